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
    "\\operatorname": "\\mathrm", "\\colon": ":",
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
    "square", "cubic", "per", "percent", "grams", "gram", "liters", "liter",
}  # fmt: skip
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
# of a unit's place, but they change the value or add a second one
NOT_UNITS = {
    "and", "or", "not", "no", "none", "to", "plus", "minus", "times", "over", "negative", "less", "more", "than",
    "mod", "modulo", "squared", "cubed", "half", "halves", "third", "thirds", "quarter", "quarters", "zero", "one",
    "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "if", "maybe",
    "nan", "infinity", "divided", "choose", "factorial", "pi", "am", "pm",
}  # fmt: skip
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
    "trillion": "1000000000000", "万": "10000", "亿": "100000000",
}  # fmt: skip
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
} | {"infinity": "\\infty"}  # fmt: skip
