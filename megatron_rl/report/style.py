"""Colours of the charts: safe for the colour-blind (Okabe and Ito), each with its twin for a dark page."""

from __future__ import annotations

# light page, dark page
_PAIRS = (
    ("#0072b2", "#56b4e9"),  # blue
    ("#d55e00", "#ff8c42"),  # vermilion
    ("#008f6b", "#2fc79a"),  # green
    ("#b8578f", "#e7a3c8"),  # purple
    ("#a67c00", "#f0c040"),  # amber
    ("#5a5f66", "#b4bac2"),  # grey
    ("#3b4cc0", "#9aa8ff"),  # indigo
    ("#7a3e00", "#d9a273"),  # brown
)
NUM_COLOURS = len(_PAIRS)
_BAND_OPACITY = 0.16
_FILL_OPACITY = 0.75
DASHES = ("solid", "dot", "dash", "dashdot", "longdash")
MARK_COLOUR, MARK_DARK = "#6e7781", "#8b949e"


def colour(index: int) -> str:
    return _PAIRS[index % len(_PAIRS)][0]


def band_colour(index: int) -> str:
    return _transparent(_PAIRS[index % len(_PAIRS)][0], _BAND_OPACITY)


def fill_colour(index: int) -> str:
    return _transparent(_PAIRS[index % len(_PAIRS)][0], _FILL_OPACITY)


def dark_colours() -> dict[str, str]:
    """What the page puts in place of each colour of a figure when it is dark."""
    found = {MARK_COLOUR: MARK_DARK}
    for light, dark in _PAIRS:
        found[light] = dark
        for opacity in (_BAND_OPACITY, _FILL_OPACITY):
            found[_transparent(light, opacity)] = _transparent(dark, opacity)
    return found


def colour_classes() -> str:
    """CSS: a class of each colour, c0 and on, whose background it is."""
    light = "".join(f".c{number}{{background:{pair[0]}}}" for number, pair in enumerate(_PAIRS))
    dark = "".join(f".c{number}{{background:{pair[1]}}}" for number, pair in enumerate(_PAIRS))
    return f"{light}@media (prefers-color-scheme:dark){{{dark}}}"


def _transparent(code: str, opacity: float) -> str:
    red, green, blue = (int(code[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
