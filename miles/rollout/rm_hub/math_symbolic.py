"""Grading by symbolic algebra, inside a worker process: math-verify reads the expressions, values decide.

Two expressions are equal when they agree to many digits at several points. That settles what simplification often
cannot, and it is relative, so that a tiny value is never taken for zero. Nothing here is bounded in time or memory: the
pool is (`rm_hub/pool.py`).
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Iterator
from fractions import Fraction

import sympy
from math_verify import LatexExtractionConfig, verify
from math_verify import parse as parse_math

from miles.rollout.rm_hub.math_grade import leaf_equal, leaf_equal_within, reads_exactly
from miles.rollout.rm_hub.math_structure import Equation, Items, Leaf, Structure, equal, is_relation, leaves, parse
from miles.rollout.rm_hub.math_text import Quantity

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns at each call that its alarm is off

DIGITS = 150
TOLERANCE = sympy.Float(10, DIGITS) ** -120
_EXTRACTION = [LatexExtractionConfig(boxed_match_priority=0)]
_DECIMAL = re.compile(r"(\d*)\.(\d+)")
_NO_NUMBER = re.compile(r"\d\s+\d|\.\d*\.")
_CONSTANTS = {"i": sympy.I, "e": sympy.E}
# where expressions are compared: two points with positive coordinates, and one where signs change
_POINTS = ((7, 11, 1), (3, 13, 1), (5, 17, -1))


def run(task: tuple[str, ...]) -> bool:
    """What a worker does: `("grade", label, answer)`, with a tolerance as fourth, or `("readable", label)`."""
    kind, *texts = task
    return grade(*texts) if kind == "grade" else readable(*texts)


def grade(label: str, answer: str, tolerance: str = "0") -> bool:
    """Whether the answer is right; numbers may differ by the share `tolerance` of the label."""
    expected, given = parse(label), parse(answer)
    verdict = equal(expected, given, functools.partial(_symbolic_leaf, share=Fraction(tolerance)))
    return _equal_sets(expected, given) if verdict is None else verdict


def readable(label: str) -> bool:
    """Whether every value in a label can be read."""
    return all(reads_exactly(q.text) or _expression(q.text) is not None for q in leaves(parse(label)))


def _symbolic_leaf(label: Quantity, answer: Quantity, *, share: Fraction) -> bool | None:
    verdict = (leaf_equal_within(share) if share else leaf_equal)(label, answer)
    if verdict is not None:
        return verdict
    if is_relation(Leaf(label)) or is_relation(Leaf(answer)):
        return None
    if "=" in label.text and "=" in answer.text:
        return _equal_equations(label.text, answer.text)
    if label.text != answer.text and label.text.lower() == answer.text.lower():
        return False  # math-verify reads some capital letters as small ones
    expected, given = _expression(label.text), _expression(answer.text)
    if not isinstance(expected, sympy.Expr) or not isinstance(given, sympy.Expr):
        return False
    scale = sympy.Rational(1, 100)
    expected = expected * scale if label.percent else expected
    given = given * scale if answer.percent else given
    return _equal_expressions(expected, given) or bool(share and _is_close(expected, given, share))


def _is_close(expected: sympy.Expr, given: sympy.Expr, share: Fraction) -> bool:
    """Whether two constants differ by at most a share of the first."""
    a, b = (_value(expression, {}) if not _names(expression) else None for expression in (expected, given))
    if a is None or b is None:
        return False
    return bool(abs(a - b) <= sympy.Rational(share.numerator, share.denominator) * abs(a))


@functools.lru_cache(maxsize=512)
def _expression(text: str) -> sympy.Basic | None:
    """The expression, with decimals as fractions so that nothing is compared approximately; None when unreadable."""
    if _NO_NUMBER.search(text):
        return None
    exact = _DECIMAL.sub(lambda m: rf"\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}}", text)
    parsed = parse_math(
        rf"\boxed{{{exact}}}", extraction_config=_EXTRACTION, fallback_mode="no_fallback", parsing_timeout=None
    )
    return parsed[0] if parsed and isinstance(parsed[0], sympy.Basic) else None


def _equal_expressions(first: sympy.Expr, second: sympy.Expr) -> bool:
    num_compared = 0
    for point in _points(first, second):
        a, b = _value(first, point), _value(second, point)
        if a is None or b is None or (_signs_change(point) and not (a.is_real and b.is_real)):
            continue  # outside the domain of one of them
        if abs(a - b) > TOLERANCE * max(abs(a), abs(b)):
            return False
        num_compared += 1
    return num_compared > 0


def _equal_equations(first: str, second: str) -> bool:
    """Two equations are the same when the differences of their sides are proportional."""
    differences = []
    for text in (first, second):
        left, *rest = [_expression(side) for side in text.split("=")]
        if len(rest) != 1 or not isinstance(left, sympy.Expr) or not isinstance(rest[0], sympy.Expr):
            return False
        differences.append(left - rest[0])
    if not differences[0].free_symbols or _names(differences[0]) != _names(differences[1]):
        return False
    ratios = []
    for point in _points(*differences):
        a, b = (_value(difference, point) for difference in differences)
        if a is None or b is None or b == 0:
            continue
        ratios.append(a / b)
    return len(ratios) > 1 and all(
        ratio != 0 and abs(ratio - ratios[0]) <= TOLERANCE * abs(ratios[0]) for ratio in ratios
    )


def _names(expression: sympy.Expr) -> set[str]:
    return {symbol.name for symbol in expression.free_symbols} - set(_CONSTANTS)


Point = dict[str, sympy.Expr]


def _points(*expressions: sympy.Expr) -> Iterator[Point]:
    names = sorted(set().union(*map(_names, expressions)))
    for numerator, denominator, sign in _POINTS if names else _POINTS[:1]:
        yield {
            name: sympy.Rational((numerator + 2 * position) * sign**position * sign, denominator + position)
            for position, name in enumerate(names)
        }


def _signs_change(point: Point) -> bool:
    return any(value.is_negative for value in point.values())


def _value(expression: sympy.Expr, point: Point) -> sympy.Expr | None:
    replacements = {s: {**point, **_CONSTANTS}[s.name] for s in expression.free_symbols}
    value = sympy.N(expression.doit().subs(replacements), DIGITS)
    return value if value.is_number and value.is_finite else None


def _equal_sets(label: Structure, answer: Structure) -> bool:
    """Intervals, unions and inequalities in one unknown as sets of real numbers; other inequalities by math-verify."""
    expected, given = _real_set(label), _real_set(answer)
    if expected is not None and given is not None:
        return bool(expected == given)
    if is_relation(label) and is_relation(answer):
        assert isinstance(label, Leaf) and isinstance(answer, Leaf)
        relations = _expression(label.quantity.text), _expression(answer.quantity.text)
        if all(relation is not None and relation.free_symbols for relation in relations):
            return bool(verify(*relations, timeout_seconds=None))
    return False


def _real_set(structure: Structure) -> sympy.Set | None:
    if isinstance(structure, Equation):
        return None
    if isinstance(structure, Leaf):
        relation = _expression(structure.quantity.text) if is_relation(structure) else None
        return relation.as_set() if relation is not None and len(relation.free_symbols) == 1 else None
    if structure.kind == "union" or (structure.kind == "list" and all(map(is_relation, structure.items))):
        parts = [part for item in structure.items if (part := _real_set(item)) is not None]
        if len(parts) < len(structure.items):
            return None
        # `x < -1 or x > 1`; where parts overlap, as in `x > -1 and x < 1`, both may have to hold
        overlap = structure.kind == "list" and any(
            a.intersect(b) != sympy.EmptySet for a, b in itertools.combinations(parts, 2)
        )
        return None if overlap else sympy.Union(*parts)
    return _interval_or_set(structure)


def _interval_or_set(structure: Items) -> sympy.Set | None:
    values = [_expression(item.quantity.text) if isinstance(item, Leaf) else None for item in structure.items]
    if not all(isinstance(value, sympy.Expr) and not value.free_symbols for value in values):
        return None
    if structure.kind == "set":
        return sympy.FiniteSet(*values)
    if len(values) == 2 and set(structure.kind) <= set("()[]"):
        return sympy.Interval(*values, structure.kind[0] == "(", structure.kind[1] == ")")
    return None
