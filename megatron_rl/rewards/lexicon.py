"""Words and signs of answers: which say the same, which are units, which say nothing. Tables only."""

from __future__ import annotations

import re

# no alternative of this pattern can match the same text in two ways: it cannot backtrack
TOKEN = re.compile(
    r"\\(?:begin|end)\{[A-Za-z]+\*?\}|\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[A-Za-z]+|<=|>=|\s+|.",
    re.S,
)
# 1.5e-3, but not the numeral 1e3_{16}
E_NOTATION = re.compile(
    r"(?<![A-Za-z0-9.\\])([0-9]+(?:\.[0-9]+)?|\.[0-9]+)[eE]([+-]?[0-9]{1,4})(?![0-9A-Za-z._{])"
)
DOTS = re.compile(r"\.{2,}")
OPENING, CLOSING = {"(", "[", "{", "\\{"}, {")", "]", "}", "\\}"}
# TeX's signs between their two arguments, and what stands in front of them
INFIXES = {"\\choose": "\\binom", "\\over": "\\frac"}
NUM_ARGUMENTS = {
    "\\frac": 2, "\\binom": 2, "\\sqrt": 1, "^": 1, "_": 1, "\\pmod": 1, "\\mathbb": 1, "\\overline": 1, "\\vec": 1,
}  # fmt: skip
TEXT_COMMANDS = {
    "\\text", "\\textbf", "\\textnormal", "\\textrm", "\\textit", "\\textsf", "\\texttt", "\\mbox", "\\hbox",
    "\\mathrm", "\\mathbf", "\\mathit", "\\mathsf",
}  # fmt: skip
DROPPED = {
    "$", "\\$", "\\(", "\\)", "\\[", "\\]", "\\left", "\\right", "\\displaystyle", "\\limits", "\\big",
    "\\Big", "\\bigl", "\\bigr", "\\Bigl", "\\Bigr", "€", "£", "¥", "\\pounds", "\\bf", "\\rm",
    "\\it", "¢", "₹", "\\cent",
    "\\textdollar", "\\therefore", "\\checkmark", "\\underline", "\\ensuremath", "\\mathstrut", "\\strut",
}  # fmt: skip
SPACES = {"\\,", "\\!", "\\;", "\\:", "\\ ", "~", "\\quad", "\\qquad"}
SAME = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\times": "\\cdot",
    "*": "\\cdot", "\\div": "/",
    "\\le": "\\leq", "\\leqslant": "\\leq", "\\ge": "\\geq", "\\geqslant": "\\geq", "\\ne": "\\neq",
    "\\lt": "<",
    "\\gt": ">", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\langle": "(", "\\rangle": ")", "\\lvert": "|",
    "\\rvert": "|", "\\vert": "|", "\\mid": "|", "\\dots": "\\ldots", "\\cdots": "\\ldots", "\\%": "%",
    "\\varnothing": "\\emptyset", "\\degree": "°", "\\backslash": "\\setminus", "\\infin": "\\infty",
    "\\lor": "or",
    "<=": "\\leq", ">=": "\\geq", "\\lbrack": "[", "\\rbrack": "]", "\\leqq": "\\leq", "\\geqq": "\\geq",
    "\\operatorname": "\\mathrm", "\\colon": ":", "\\dbinom": "\\binom", "\\tbinom": "\\binom",
    "\\mod": "\\pmod", "\\bmod": "\\pmod", "\\Vert": "\\|", "\\lVert": "\\|", "\\rVert": "\\|",
    "\\thickapprox": "\\approx", "\\approxeq": "\\approx",
}  # fmt: skip
_UNICODE = {
    "−": "-", "–": "-", "—": "-", "×": "\\cdot ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "/", "≤": "\\leq ",  # noqa: RUF001
    "≥": "\\geq ", "≠": "\\neq ", "∞": "\\infty ", "π": "\\pi ", "√": "\\sqrt ", "∪": "\\cup ", "∩": "\\cap ",  # noqa: RUF001
    "∕": "/", "⁄": "/",  # noqa: RUF001
    "∅": "\\emptyset ", "±": "\\pm ", "、": ",", "，": ",", "。": ".", "∈": "\\in ", "ℝ": "\\mathbb{R}",  # noqa: RUF001
    "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "θ": "\\theta ", "\u3000": " ", "º": "°",
    "⅓": "\\frac{1}{3}", "⅔": "\\frac{2}{3}", "⅕": "\\frac{1}{5}", "⅖": "\\frac{2}{5}", "⅗": "\\frac{3}{5}",
    "⅘": "\\frac{4}{5}", "⅙": "\\frac{1}{6}", "⅚": "\\frac{5}{6}", "⅛": "\\frac{1}{8}", "⅜": "\\frac{3}{8}",
    "⅝": "\\frac{5}{8}", "⅞": "\\frac{7}{8}",
    "⅐": "\\frac{1}{7}", "⅑": "\\frac{1}{9}", "⅒": "\\frac{1}{10}", "≈": "\\approx ", "≡": "\\equiv ", "…": "\\ldots ",
    "‐": "-", "‑": "-", "﹣": "-", "⩾": "\\geq ", "≧": "\\geq ", "⩽": "\\leq ", "≦": "\\leq ", "∙": "\\cdot ",  # noqa: RUF001
    "∣": "|", "∠": "\\angle ", "△": "\\triangle ", "˚": "°", "⌊": "\\lfloor ", "⌋": "\\rfloor ",  # noqa: RUF001
    "⌈": "\\lceil ", "⌉": "\\rceil ", "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}",  # noqa: RUF001
    "α": "\\alpha ", "β": "\\beta ", "γ": "\\gamma ", "δ": "\\delta ", "ε": "\\varepsilon ", "λ": "\\lambda ",  # noqa: RUF001
    "μ": "\\mu ", "ρ": "\\rho ", "σ": "\\sigma ", "τ": "\\tau ", "φ": "\\varphi ", "ϕ": "\\phi ", "ω": "\\omega ",  # noqa: RUF001
    "Δ": "\\Delta ", "Γ": "\\Gamma ", "Ω": "\\Omega ", "Φ": "\\Phi ",
    "∛": "\\sqrt[3]", "∜": "\\sqrt[4]", "或": " or ", "和": " and ", "与": " and ",
    # no width, or a width that says nothing
    "\u200b": "", "\u200c": "", "\u200d": "", "\u2060": "", "\ufeff": "", "\u00a0": " ", "\u2009": " ",
    "\u202f": " ", "\u2002": " ", "\u2003": " ",
}  # fmt: skip
RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
RAISED_TABLE = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789+-n0123456789")
_FULL_WIDTH = {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
UNICODE_TABLE = str.maketrans(_FULL_WIDTH | _UNICODE)
UNITS = {
    "cm", "mm", "km", "dm", "ft", "kg", "mg", "lb", "lbs", "oz", "mph", "kph", "sec", "min", "hr", "hrs",
    "cents", "cent", "dollars", "dollar", "euros", "degrees", "degree", "inches", "inch", "feet", "foot",
    "miles", "mile", "meters", "meter", "metres", "metre", "hours", "hour", "minutes", "minute", "seconds",
    "second", "days", "day", "weeks", "week", "months", "month", "years", "year", "people", "units", "unit",
    "square", "cubic", "per", "percent", "grams", "gram", "liters", "liter", "Rs", "INR", "USD", "EUR", "GBP",
}  # fmt: skip
LITTLE_WORDS = {"of", "per", "the", "in", "a", "an"}  # between the words of a unit
# with the braces behind them; a colour or a width says nothing
DROPPED_WITH_ARGUMENT = {
    "\\color",
    "\\textcolor",
    "\\hspace",
    "\\vspace",
    "\\phantom",
    "\\hphantom",
    "\\label",
    "\\tag",
}
LETTER_COMMANDS = {"\\mathbf", "\\mathit", "\\boldsymbol", "\\bm", "\\textit"}
TRIGONOMETRIC = {"\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc"}
# in front of a sum of money
CURRENCIES = {"Rs", "Re", "INR", "USD", "US", "EUR", "GBP", "CAD", "AUD", "HK", "RMB", "CNY"}
CURRENCY = re.compile(r"(?<![A-Za-z\\])(?:" + "|".join(sorted(CURRENCIES)) + r")(?![A-Za-z])")
NUMBER_WORDS = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16,
}  # fmt: skip
# of a unit's place, but they change the value, doubt it or add a second one
NOT_UNITS = {
    "and", "or", "nor", "not", "no", "none", "to", "plus", "minus", "times", "over", "negative", "less", "fewer",
    "more", "than", "mod", "modulo", "squared", "cubed", "half", "halves", "third", "thirds", "quarter", "quarters",
    "zero", "one", "if", "maybe", "nan", "infinity", "divided", "choose", "factorial", "pi", "am", "pm",
    *NUMBER_WORDS, "seventeen", "eighteen", "nineteen", "twenty", "thirty", "forty", "fifty", "sixty", "seventy",
    "eighty", "ninety", "doubled", "tripled", "halved", "twice", "thrice", "inverse", "reciprocal", "opposite",
    "negated", "approximately", "approx", "about", "around", "almost", "nearly", "roughly", "circa", "least", "most",
    "above", "below", "under", "beyond", "between", "versus", "vs", "but", "else", "otherwise", "either", "neither",
    "instead", "perhaps", "possibly", "probably", "likely", "unless", "except", "wrong", "false", "incorrect",
    "through", "thousandth", "thousandths", "hundredth", "hundredths", "tenth", "tenths", "where", "when", "then",
    "also", "is", "double", "triple", "undefined", "unknown", "null", "xor",
    "alternatively", "guess", "exp", "log", "ln", "sin", "cos", "tan", "sqrt", "inf", "tens",
    "root", "roots", "power", "exponent", "googol", "gross", "score",
}  # fmt: skip
# letters that are no unit: unknowns, e, i, and k for a thousand
NOT_LETTER_UNITS = set("abceikjnopqrwxyz")
CHOICE_WORDS = {"Option", "option", "Choice", "choice", "Answer", "answer"}
# of a day: one of two values where both sides say it
HALF_DAYS = {"am": "am", "a.m": "am", "a.m.": "am", "pm": "pm", "p.m": "pm", "p.m.": "pm"}
# space behind the end of a row: \\[4pt]
LENGTH_UNITS = {"pt", "em", "ex", "mm", "cm"}
GREEK = {
    "\\alpha", "\\beta", "\\gamma", "\\delta", "\\epsilon", "\\varepsilon", "\\theta", "\\lambda", "\\mu", "\\rho",
    "\\sigma", "\\tau", "\\phi", "\\varphi", "\\omega", "\\Delta", "\\Gamma", "\\Omega", "\\Phi",
}  # fmt: skip
ORDINALS = {"st", "nd", "rd", "th"}
MULTIPLIERS = {"dozen": "12", "hundred": "100", "thousand": "1000", "million": "1000000", "billion": "1000000000",
    "trillion": "1000000000000", "lakh": "100000", "crore": "10000000", "万": "10000", "亿": "100000000",
}  # fmt: skip
MULTIPLIERS |= {name + "s": value for name, value in MULTIPLIERS.items() if name.isascii()}
CHINESE_UNITS = {
    "个", "只", "本", "元", "角", "分", "天", "人", "次", "种", "米", "厘米", "千米", "公里", "平方米", "平方厘米",
    "立方米", "立方厘米", "克", "千克", "小时", "分钟", "秒", "年", "月", "日", "岁", "度", "件", "条", "张", "页",
    "辆", "棵", "名", "位", "组", "双", "步", "项", "根", "升", "毫升", "吨",
}  # fmt: skip
# written without a backslash
FUNCTIONS = {
    name: "\\" + name
    for name in (
        "sqrt", "sin", "cos", "tan", "cot", "arcsin", "arccos", "arctan", "ln", "log", "pi", "infty", "theta", "alpha",
        "beta", "gamma", "lambda",
    )
} | {"infinity": "\\infty", "mod": "\\pmod"}  # fmt: skip
