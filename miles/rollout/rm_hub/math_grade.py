"""Whether an answer is right, as far as exact arithmetic and plain comparison can tell."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

from miles.rollout.rm_hub.math_answer import extract_label
from miles.rollout.rm_hub.math_number import TooLargeError, evaluate
from miles.rollout.rm_hub.math_structure import LeafEqual, equal, leaves, parse
from miles.rollout.rm_hub.math_text import Quantity

_CHOICE = re.compile(r"\(?([A-Z])[).:]?|\(([a-z])\)")
_CHOICE_WITH_TEXT = re.compile(r"\(?([A-Z])[).:]\s*(.+)")
_IN_BASE = re.compile(r"(\w+)_\{?(\d+)\}?")
_LETTERS = re.compile(r"[a-zA-Z]")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_TEXT_COMMAND = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{4,}")
_ONE_WORD = re.compile(r"[a-zA-Z]{3,}|[Nn]o|NO")
_FUNCTION_NAMES = {"sqrt", "frac", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log10", "infty", "cdot"}
_OPAQUE = re.compile(
    r"\\(?:overline|overrightarrow|vec|angle|triangle|equiv|pmod|bmod|cong|sim|parallel|perp|mid)(?![a-zA-Z])|\\\{"
)
_NO_ANSWER = {"nan", "null", "n/a", "?"}


def grade_exactly(label: str, answer: str, *, tolerance: Fraction | None = None) -> bool | None:
    """True, False, or None when it takes symbolic algebra to tell. Numbers must be equal, or within the `tolerance`."""
    return equal(parse(label), parse(answer), leaf_equal if tolerance is None else leaf_equal_within(tolerance))


def leaf_equal_within(tolerance: Fraction) -> LeafEqual:
    """`leaf_equal`, where numbers may also differ by this share of the label (by this much where the label is 0)."""

    def compare(label: Quantity, answer: Quantity) -> bool | None:
        verdict = leaf_equal(label, answer)
        other_unit = label.percent != answer.percent or (label.unit and answer.unit and label.unit != answer.unit)
        expected, value = _value(label.text), _value(answer.text)
        if verdict is not False or other_unit or expected is None or value is None:
            return verdict
        return abs(value - expected) <= tolerance * (abs(expected) or 1)

    return compare


def label_problem(label: Any) -> str | None:
    """Why no answer could ever be compared with this label; None when one can. Labels that only symbolic algebra can
    read are let through: `needs_symbolic` says which."""
    if isinstance(label, float) and not math.isfinite(label):
        return "it is not a finite number"
    if not isinstance(label, (str, int, float)):
        return f"it is a {type(label).__name__}; expected a text or a number"
    text = extract_label(str(label))
    if text is None:
        return "its box or its line after #### is empty or never closed"
    if not text or text.lower() in _NO_ANSWER:
        return "it is empty"
    if text.count("{") != text.count("}"):
        return "its braces do not match"
    if not re.search(r"[^\W_]|\\[a-zA-Z]|\\\{\s*\\\}", text):
        return "it has neither a number nor a letter"
    for quantity in leaves(parse(text)):
        try:
            evaluate(quantity.text)
        except TooLargeError:
            return f"its number {quantity.text:.40} is too large"
    return None


def needs_symbolic(label: str) -> bool:
    """Whether a part of the label is an expression that neither exact arithmetic nor plain text covers."""
    return not all(reads_exactly(quantity.text) for quantity in leaves(parse(extract_label(label) or "")))


def reads_exactly(text: str) -> bool:
    """Whether a single value is a number, a choice or plain language."""
    return (
        is_words(text)
        or _in_other_base(text)
        or _CHOICE.fullmatch(text) is not None
        or text.lstrip("+-") == r"\infty"
        or _value(text) is not None
    )


def leaf_equal(label: Quantity, answer: Quantity) -> bool | None:
    """Compare single values. Numbers must be exactly equal; a unit may be left out but not be another one."""
    if label.unit and answer.unit and label.unit != answer.unit:
        return False
    if (label.unit and answer.percent) or (answer.unit and label.percent):
        return False
    if _joined(label) == _joined(answer) and label.unit != answer.unit:
        return True  # `5m` and `5 m`, where m may be a name or a metre
    if _plain(label.text) == _plain(answer.text) and label.percent == answer.percent:
        return bool(label.text)
    choice = _CHOICE.fullmatch(_without_text(label.text))
    if choice:
        return _is_choice(answer.text, (choice[1] or choice[2]).upper())
    if is_words(label.text) or is_words(answer.text):
        return _plain(label.text) == _plain(answer.text)
    if _in_other_base(label.text) or _in_other_base(answer.text):
        return False
    return _equal_values(label, answer)


def is_words(text: str) -> bool:
    """Plain language, which is compared as text and never as algebra, where `act` equals `cat`."""
    if _OPAQUE.search(text) or _TEXT_COMMAND.search(text) or _ONE_WORD.fullmatch(text):
        return text not in _FUNCTION_NAMES
    return any(word not in _FUNCTION_NAMES for word in _WORD.findall(_COMMAND.sub(" ", text)))


def _joined(quantity: Quantity) -> str:
    return (quantity.text + quantity.unit).replace(" ", "")


def _equal_values(label: Quantity, answer: Quantity) -> bool | None:
    try:
        expected = _number(label.text)
    except TooLargeError:
        return None
    try:
        value = _number(answer.text)
    except TooLargeError:
        return False if expected is not None else None
    if expected is not None and value is not None:
        if label.percent == answer.percent:
            return expected == value
        # "25%" may be written as 25 or as 0.25
        with_sign, without = (expected, value) if label.percent else (value, expected)
        return without in (with_sign, with_sign / 100)
    for known, other in ((expected, answer.text), (value, label.text)):
        if known is not None and not _LETTERS.search(other) and "|" not in other:
            return False  # digits and signs that make no number
    return None


def _number(text: str) -> Fraction | None:
    in_base_ten = _IN_BASE.fullmatch(text)
    return evaluate(in_base_ten[1] if in_base_ten and in_base_ten[2] == "10" else text)


def _value(text: str) -> Fraction | None:
    try:
        return _number(text)
    except TooLargeError:
        return None


def _in_other_base(text: str) -> bool:
    match = _IN_BASE.fullmatch(text)
    return match is not None and match[1].isdigit() and match[2] != "10"


def _is_choice(answer: str, letter: str) -> bool:
    text = _without_text(answer)
    bare = _CHOICE.fullmatch(text)
    if bare:
        return (bare[1] or bare[2]).upper() == letter
    with_text = _CHOICE_WITH_TEXT.fullmatch(text)
    return with_text is not None and with_text[1] == letter and not re.search(r"\([A-Z]\)", with_text[2])


def _plain(text: str) -> str:
    """For comparison as text: words in lower case; symbols without spaces, except between digits."""
    if is_words(text):
        return re.sub(r"\s+", " ", _without_text(text)).strip(" .,!").lower()
    text = re.sub(r"(?<=\d)\s+(?=\d)", "\0", text).replace(" ", "").removeprefix("+")
    return re.sub(r"\{(\w)\}", r"\1", text)


def _without_text(text: str) -> str:
    return _TEXT_COMMAND.sub(r"\1", text).strip()
