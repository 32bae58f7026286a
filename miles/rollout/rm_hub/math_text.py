"""One spelling for the many ways to write an answer: LaTeX layout, Unicode, separators, units, currency."""

from __future__ import annotations

import re
from dataclasses import dataclass

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00a0\u2009\u202f\u2007\u200a\u3000", " "),
        **dict.fromkeys("\u200b\u2060\ufeff", ""),
        **dict.fromkeys("€£¥", ""),
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": r"\div ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "∪": r"\cup ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "ℝ": r"\mathbb{R}",
        "±": r"\pm ",
        "°": r"^\circ ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "²": "^2",
        "³": "^3",
    }
)
_TRIGONOMETRIC_DEGREES = (
    r"\\(sin|cos|tan|cot|sec|csc)\s*[({]?\s*(\d+(?:\.\d+)?)\s*(?:\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|"
    r"\\degree(?![a-zA-Z]))\s*[)}]?"
)
_REWRITES = [
    (re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?"), ""),
    (re.compile(r"\\(?:displaystyle|textstyle|limits|pounds|euro)(?![a-zA-Z])"), ""),
    (re.compile(r"\\\\\s*\[[^\]]*\]"), r"\\\\"),  # the height of a matrix row
    (re.compile(r"(?<!\\)\\!|\\phantom\{[^{}]*\}"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:varnothing)(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\\(?:leq|leqslant)(?![a-zA-Z])"), r"\\le"),
    (re.compile(r"\\(?:geq|geqslant)(?![a-zA-Z])"), r"\\ge"),
    (re.compile(r"\\neq(?![a-zA-Z])"), r"\\ne"),
    (re.compile(r"\\(?:R|Reals|reals)(?![a-zA-Z])|\\mathbf\{R\}"), r"\\mathbb{R}"),
    (re.compile(_TRIGONOMETRIC_DEGREES), r"\\\1(\\frac{\2\\pi}{180})"),
    (re.compile(r"(?<=[\d)}])\s*\\deg(?![a-zA-Z])"), ""),
    (re.compile(r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|\\degree(?![a-zA-Z])"), ""),
    # a thin space or a braced comma between groups of three digits separates thousands
    (re.compile(r"(?<=\d)(?:\{,\}|\\,|\\ |~|\{\\,\})(?=\d{3}(?!\d))"), ","),
    (re.compile(r"(?<!\\)\\[,;: ]|\\(?:quad|qquad|thinspace|enspace)(?![a-zA-Z])|~"), " "),
    (re.compile(r"\\\$|\$|(?<!\\)\\[()\[\]]"), ""),
    (re.compile(r"\\(?:text|mbox|textrm)\s*\{\s*(or|and)\s*\}"), r" \1 "),
    (re.compile(r"\\(?:mbox|textrm|textnormal)\s*\{"), r"\\text{"),
    (re.compile(r"\\text\{\s*\}"), ""),  # around a currency sign
    (re.compile(r"(?<![\\a-zA-Z])(sin|cos|tan|log|ln|exp|pi)(?![a-zA-Z])"), r"\\\1 "),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"_\s*(\w)"), r"_{\1}"),
]
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")
_FORMATTING = re.compile(
    r"\\(?:textbf|textit|mathbf|mathit|mathrm|mathsf|boldsymbol|bm|emph|underline|operatorname)\s*\{([^{}]*)\}"
)
_FRAC_BARE = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|(\d|[a-zA-Z]))\s*(?:\{([^{}]*)\}|(\d|[a-zA-Z]))")
_SQRT_BARE = re.compile(r"\\sqrt\s*(\d|[a-zA-Z])")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_GROUPS_OF_THREE = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:percent|\\?%)\s*\}|\bpercent)$")
_UNIT_TEXT = re.compile(r"\s*\\(?:text|mathrm)\s*\{\s*([^{}]*?)\s*\}\s*((?:\^\s*\{?\s*\d\s*\}?)?)$")
_UNIT_WORDS = re.compile(
    r"(?<=[\d)}])(?:\s+(?=[a-zA-Z]{3}|[mglhs](?![a-zA-Z])|k?m ?/ ?[hs])"
    r"|\s*(?=(?:[cmk]m|k?g|ft|hrs?|USD|usd)(?![a-zA-Z])))"
    r"((?:[a-zA-Z]+\.?)(?:[ /-][a-zA-Z]+\.?)*)\s*((?:\^\s*\{?\s*\d\s*\}?)?)$"
)
_NOT_UNITS = set(
    "or and e i d is are was not to than mod if where for else with pi sqrt sin cos tan log exp inf infinity "
    "theta alpha beta plus minus times over factorial squared cubed base negative".split()
)
_MULTIPLIERS = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_UNIT_NAMES = {
    **dict.fromkeys(("cm", "centimeter", "centimetre"), "cm"),
    **dict.fromkeys(("mm", "millimeter", "millimetre"), "mm"),
    **dict.fromkeys(("km", "kilometer", "kilometre"), "km"),
    **dict.fromkeys(("m", "meter", "metre"), "m"),
    **dict.fromkeys(("in", "inch", "inche"), "in"),
    **dict.fromkeys(("ft", "foot", "feet"), "ft"),
    **dict.fromkeys(("g", "gram"), "g"),
    **dict.fromkeys(("kg", "kilogram"), "kg"),
    **dict.fromkeys(("l", "liter", "litre"), "l"),
    **dict.fromkeys(("s", "sec", "second"), "s"),
    **dict.fromkeys(("min", "minute"), "min"),
    **dict.fromkeys(("h", "hr", "hour"), "h"),
    **dict.fromkeys(("degree", "deg"), ""),
    **dict.fromkeys(("dollar", "usd", "buck"), "dollar"),
}


@dataclass(frozen=True, slots=True)
class Quantity:
    """An answer without its unit. `unit` is empty when there is none; a percent sign is kept apart."""

    text: str
    unit: str = ""
    percent: bool = False


def normalise(text: str) -> str:
    """The text with one spelling for layout commands, fractions, signs and separators."""
    text = text.strip().strip("*`").translate(_CHARACTERS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _drop_closing_mark(text.strip())
    text = _FRAC_BARE.sub(lambda m: rf"\frac{{{m[1] or m[2] or ''}}}{{{m[3] or m[4] or ''}}}", text)
    text = _REPEATING.sub(_repeating_decimal, text)
    text = _SQRT_BARE.sub(r"\\sqrt{\1}", text)
    return re.sub(r"\s+", " ", text)


def _repeating_decimal(match: re.Match[str]) -> str:
    """0.1(6) is (16 - 1) / 90."""
    whole, fixed, repeated = match.groups()
    numerator = int(whole + fixed + repeated) - int(whole + fixed or "0")
    return rf"\frac{{{numerator}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"


def _drop_closing_mark(text: str) -> str:
    return text[:-1].rstrip() if text.endswith((".", ",", ";")) else text


def strip_formatting(text: str) -> str:
    """Without bold, italic and upright commands; their content stays. A unit in `\\mathrm` must be taken off first."""
    while (stripped := _FORMATTING.sub(r"\1", text)) != text:
        text = stripped
    return text.strip()


def merge_thousands(text: str) -> str:
    """`1,234` and `1 234` as `1234`; groups of another size stay, since they are lists."""
    if _GROUPS_OF_THREE.fullmatch(text):
        return text.replace(" ", "")
    return _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)


def split_unit(text: str) -> Quantity:
    """Take percent sign, unit and a word such as `million` off the end of an answer."""
    percent = _PERCENT.search(text)
    if percent and percent.start() > 0:
        return Quantity(text[: percent.start()].strip(), percent=True)
    unit = _UNIT_TEXT.search(text) or _UNIT_WORDS.search(text)
    if unit is None or unit.start() == 0:
        return Quantity(text)
    words = re.split(r"[ /.-]+", unit[1].lower().strip(" ."))
    if _NOT_UNITS & set(words) or not words[0] or not text[: unit.start()].strip():
        return Quantity(text)
    value = text[: unit.start()].strip()
    if words[0] in _MULTIPLIERS:
        value = rf"({value})\times {_MULTIPLIERS[words[0]]}"
        words = words[1:]
    name = "/".join(_unit_name(word) for word in words)
    power = re.sub(r"[^\d]", "", unit[2])
    return Quantity(value, unit=f"{name}^{power}" if power and name else name)


def _unit_name(word: str) -> str:
    if word in _UNIT_NAMES:
        return _UNIT_NAMES[word]
    singular = word[:-1] if word.endswith("s") and len(word) > 2 else word
    return _UNIT_NAMES.get(singular, singular)
