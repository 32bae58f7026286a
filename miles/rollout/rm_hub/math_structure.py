"""What kind of thing an answer is (number, list, interval, set, matrix, equation, ...) and when two of them are equal.

Every comparison has three outcomes: True, False, and None when only symbolic algebra can tell. What counts as equal at
a leaf is a parameter, so that the exact path and the symbolic one share everything above the leaves.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from miles.rollout.rm_hub.math_text import Quantity, merge_thousands, normalise, split_unit, strip_formatting

MAX_ITEMS = 64
MAX_NESTING = 20

LeafEqual = Callable[[Quantity, Quantity], bool | None]


@dataclass(frozen=True, slots=True)
class Leaf:
    quantity: Quantity


@dataclass(frozen=True, slots=True)
class Items:
    """Several values. `kind`: `list` or `union` (any order), `set` (any order, no repeats), `ratio` or `matrix_<n>`
    with n columns (in order), or the two brackets of a tuple or interval."""

    kind: str
    items: tuple[Structure, ...]


@dataclass(frozen=True, slots=True)
class Equation:
    """Sides of `a = b = c`. `text` is the whole of it."""

    sides: tuple[Structure, ...]
    text: str


Structure = Leaf | Items | Equation

_REALS = Items("()", (Leaf(Quantity(r"-\infty")), Leaf(Quantity(r"\infty"))))
_MATRIX = re.compile(r"\\begin\{([pbB]|small)?(?:matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{[a-zA-Z]+\}", re.DOTALL)
_MEMBERSHIP = re.compile(r"[a-zA-Z]\s*\\in(?![a-zA-Z])\s*(.+)", re.DOTALL)
_SYMBOL = re.compile(
    r"[a-zA-Z](?:_\{?\w+\}?|')?|\\(?!pi\b)[a-zA-Z]+|[a-zA-Z](?:\^\{-1\})?\(\s*[a-zA-Z]\s*\)"
    r"|\\text\{[a-zA-Z ]+\}|[a-zA-Z]{2,}"
)
_RELATION = re.compile(r"<|>|\\(?:le|ge|ne|lt|gt)(?![a-zA-Z])|!=")
_OR_AND = re.compile(r"(?<![a-zA-Z\\])(?:or|and)(?![a-zA-Z])")
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_WHOLE_TEXT = re.compile(r"^\\text\s*\{((?:[^{}a-zA-Z]|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z]))*)\}$")  # without a word in it
_SET = re.compile(r"\\\{(.*)\\\}", re.DOTALL)


@functools.lru_cache(maxsize=4096)  # a label is compared with every answer of its prompt
def parse(text: str) -> Structure:
    """The structure of an answer as it was written. Nesting beyond any real answer is not looked into."""
    text = normalise(text)
    return _parse(text) if _nesting(text) <= MAX_NESTING else Leaf(Quantity(text))


def is_relation(structure: Structure) -> bool:
    return isinstance(structure, Leaf) and _RELATION.search(structure.quantity.text) is not None


def leaves(structure: Structure) -> Iterable[Quantity]:
    if isinstance(structure, Leaf):
        yield structure.quantity
    else:
        for part in structure.items if isinstance(structure, Items) else structure.sides:
            yield from leaves(part)


def _parse(text: str, *, inside: bool = False) -> Structure:
    """`inside` brackets a comma between digits separates items, never thousands."""
    text = _unwrap(_WHOLE_TEXT.sub(r"\1", strip_formatting(text) if _is_plain_wrapper(text) else text))
    if not inside and not text.startswith(("(", "[", "\\{")):
        text = merge_thousands(text)
    for parse_kind in (_parse_list, _parse_plus_minus, _parse_equation, _parse_membership, _parse_brackets):
        structure = parse_kind(text)
        if structure is not None:
            return structure
    quantity = split_unit(text)
    return Leaf(Quantity(strip_formatting(merge_thousands(quantity.text)), quantity.unit, quantity.percent))


def _nesting(text: str) -> int:
    depths = itertools.accumulate((c in _PAIRS) - (c in _PAIRS.values()) for c in text)
    return max(depths, default=0)


def _is_plain_wrapper(text: str) -> bool:
    """A formatting command around the whole text, as in `\\textbf{(B)}`."""
    return re.fullmatch(r"\\[a-zA-Z]+\s*\{[^{}]*\}", text) is not None and not text.startswith(r"\mathbb")


def _unwrap(text: str) -> str:
    """Without braces or round brackets around the whole of one value."""
    text = text.strip()
    while len(text) > 1 and text[0] in "({" and _closing(text, 0) == len(text) - 1 and not _is_choice(text):
        inner = text[1:-1].strip()
        if not inner or len(_split(inner, ",")) > 1:
            break
        text = inner
    return text


def _is_choice(text: str) -> bool:
    return re.fullmatch(r"\([A-Za-z]\)", text) is not None


def _parse_list(text: str) -> Structure | None:
    parts = [part for piece in _split(text, ",;") for part in _split_words(piece)]
    parts = [part.strip() for part in parts]
    if len(parts) < 2 or len(parts) > MAX_ITEMS or len([part for part in parts if part]) < 2:
        return None
    return Items("list", tuple(_parse(part) for part in parts if part))


def _parse_plus_minus(text: str) -> Structure | None:
    before, sign, after = text.partition(r"\pm")
    if not sign or r"\pm" in after or r"\mp" in after or "=" in before:
        return None
    if not before.strip():
        return Items("list", (_parse(after), _parse(f"-({after})")))
    return Items("list", tuple(Leaf(Quantity(f"{before}{operator}({after})")) for operator in "+-"))


def _parse_equation(text: str) -> Structure | None:
    if _RELATION.search(text):
        return None
    sides = [side.strip() for side in _split(text, "=")]
    if len(sides) < 2 or not all(sides):
        return None
    parsed = [_parse(side) for side in sides]
    if len(parsed) == 2 and _is_symbol(parsed[1]) and not _is_symbol(parsed[0]):
        parsed.reverse()
    return Equation(tuple(parsed), text)


def _parse_membership(text: str) -> Structure | None:
    member = _MEMBERSHIP.fullmatch(text)
    return _parse(member[1]) if member else None


def _parse_brackets(text: str) -> Structure | None:
    if text == r"\emptyset":
        return Items("set", ())
    if text == r"\mathbb{R}" or re.sub(r"\\text\{(.*)\}", r"\1", text).lower() == "all real numbers":
        return _REALS
    parts = _split_command(text, r"\cup")
    if len(parts) > 1:
        return Items("union", tuple(_parse(part) for part in parts))
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        rows = [row.split("&") for row in re.split(r"\\\\", matrix[2]) if row.strip()]
        cells = tuple(_parse(cell.strip(), inside=True) for row in rows for cell in row)
        return Items(f"matrix_{len(rows[0])}", cells) if rows and len(cells) <= MAX_ITEMS else None
    braces = _SET.fullmatch(text)
    if braces and not re.search(r"\\mid|\||:", braces[1]) and "\\{" not in braces[1]:
        items = [item for item in _split(braces[1], ",;") if item.strip()]
        return Items("set", tuple(_parse(item, inside=True) for item in items[:MAX_ITEMS]))
    if re.fullmatch(r"\\langle.*\\rangle", text, re.DOTALL):
        return _bracketed("<>", text[len(r"\langle") : -len(r"\rangle")])
    if len(text) > 1 and text[0] in "([" and text[-1] in ")]" and _closing(text, 0) == len(text) - 1:
        return _bracketed(text[0] + text[-1], text[1:-1])
    ratio = text.split(":")
    if len(ratio) > 1 and all(re.fullmatch(r"\s*[\w.]+\s*", part) for part in ratio):
        return Items("ratio", tuple(_parse(part.strip()) for part in ratio))
    return None


def _bracketed(kind: str, inner: str) -> Structure | None:
    items = _split(inner, ",;")
    if len(items) < 2 or len(items) > MAX_ITEMS:
        return None
    return Items(kind, tuple(_parse(item, inside=True) for item in items))


def _closing(text: str, start: int) -> int:
    """Position of the bracket that closes the one at `start`, maybe of another kind; -1 when none does."""
    depth = 0
    for position in range(start, len(text)):
        character = text[position]
        if position and text[position - 1] == "\\":
            continue
        if character in _PAIRS:
            depth += 1
        elif character in _PAIRS.values():
            depth -= 1
            if depth == 0:
                return position
    return -1


def _split(text: str, separators: str) -> list[str]:
    """Split at separators that are outside all brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in _PAIRS:
            depth += 1
        elif character in _PAIRS.values():
            depth -= 1
        elif character in separators and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]


def _split_words(text: str) -> list[str]:
    """Split at `or` and `and` outside brackets."""
    parts, start = [], 0
    for match in _OR_AND.finditer(text):
        if text[: match.start()].count("{") == text[: match.start()].count("}"):
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]


def _split_command(text: str, command: str) -> list[str]:
    return [part.strip() for part in re.split(re.escape(command) + r"(?![a-zA-Z])", text)]


def _is_symbol(structure: Structure) -> bool:
    if isinstance(structure, Items):
        return structure.kind == "()" and all(_is_symbol(item) for item in structure.items)
    return isinstance(structure, Leaf) and _SYMBOL.fullmatch(structure.quantity.text) is not None


def equal(label: Structure, answer: Structure, leaf_equal: LeafEqual) -> bool | None:
    """Whether two answers are the same; None when `leaf_equal` could not tell and it matters."""
    if isinstance(label, Equation) or isinstance(answer, Equation):
        return _equal_equation(label, answer, leaf_equal)
    if isinstance(label, Leaf) and isinstance(answer, Leaf):
        return leaf_equal(label.quantity, answer.quantity)
    if isinstance(label, Items) and isinstance(answer, Items):
        return _equal_items(label, answer, leaf_equal)
    # an inequality can say the same as an interval; nothing else of one part equals something of several
    return None if is_relation(label) or is_relation(answer) else False


def _equal_items(label: Items, answer: Items, leaf_equal: LeafEqual) -> bool | None:
    kinds = {label.kind, answer.kind}
    if kinds <= {"list", "set"}:
        return _equal_unordered(label.items, answer.items, leaf_equal, distinct="set" in kinds)
    if label.kind != answer.kind:
        return None if "union" in kinds else False
    if label.kind == "union":
        return _equal_unordered(label.items, answer.items, leaf_equal, distinct=True) or None
    if len(label.items) != len(answer.items):
        return False
    return _all(equal(a, b, leaf_equal) for a, b in zip(label.items, answer.items, strict=True))


def _equal_unordered(
    label: Sequence[Structure], answer: Sequence[Structure], leaf_equal: LeafEqual, *, distinct: bool
) -> bool | None:
    if distinct:
        label, answer = _without_repeats(label, leaf_equal), _without_repeats(answer, leaf_equal)
    if len(label) != len(answer):
        return False
    left = list(answer)
    unsure = False
    for item in label:
        verdicts = [equal(item, other, leaf_equal) for other in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            unsure = True
        else:
            return False
    return None if unsure else True


def _without_repeats(items: Sequence[Structure], leaf_equal: LeafEqual) -> list[Structure]:
    kept: list[Structure] = []
    for item in items:
        if not any(equal(item, other, leaf_equal) for other in kept):
            kept.append(item)
    return kept


def _equal_equation(label: Structure, answer: Structure, leaf_equal: LeafEqual) -> bool | None:
    """An equation `x = 5` says the same as 5 where only one of the two names the unknown."""
    if isinstance(label, Equation) and isinstance(answer, Equation):
        if _is_symbol(label.sides[0]) and _is_symbol(answer.sides[0]):
            return _all(
                equal(a, b, leaf_equal)
                for a, b in ((label.sides[0], answer.sides[0]), (label.sides[-1], answer.sides[-1]))
            )
        return leaf_equal(Quantity(label.text), Quantity(answer.text))
    if isinstance(label, Equation):
        return equal(label.sides[-1], answer, leaf_equal) if _is_symbol(label.sides[0]) else False
    assert isinstance(answer, Equation)
    return _all(
        equal(label, side, leaf_equal)
        for position, side in enumerate(answer.sides)
        if position == len(answer.sides) - 1 or not _is_symbol(side)
    )


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    unsure = False
    for verdict in verdicts:
        if verdict is False:
            return False
        unsure = unsure or verdict is None
    return None if unsure else True
