"""Exact values of arithmetic in LaTeX or plain notation: a small recursive-descent parser over rational numbers."""

from __future__ import annotations

import math
import re
from fractions import Fraction

MAX_BITS = 32_768  # of a numerator or denominator: one operation takes about a millisecond at most
MAX_FACTORIAL = 3000
MAX_DEPTH = 40
MAX_ROOT = 16
MAX_DIGITS = 4000  # of one numeral; Python refuses more than 4300

_TOKEN = re.compile(
    r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<command>\\[a-zA-Z]+)|(?P<symbol>[-+*/^!(){}])|(?P<space>\s+)"
)
_TIMES = ("*", r"\cdot", r"\times")
_OVER = ("/", r"\div")


class NotRationalError(Exception):
    """The text is not arithmetic over rational numbers (it may still be a valid expression)."""


class TooLargeError(Exception):
    """The value, or a step on the way to it, is beyond the limits above."""


def evaluate(text: str) -> Fraction | None:
    """The exact value, or None when the text is something else. Raises `TooLargeError`.

    Knows + - * / ^ !, brackets, fractions, roots that are rational, mixed numbers (`3\\frac{1}{2}`, `3 1/2`) and
    scientific notation. Two numbers side by side are not a product.
    """
    try:
        parser = _Parser(_tokens(text))
        value = parser.sum_(0)
        parser.expect_end()
    except (NotRationalError, ZeroDivisionError):
        return None
    return value


def _tokens(text: str) -> list[str]:
    tokens = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotRationalError
        if match.lastgroup != "space":
            tokens.append(match.group())
        position = match.end()
    return tokens


def _is_number(token: str | None) -> bool:
    return token is not None and (token[0].isdigit() or token[0] == ".")


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0

    def expect_end(self) -> None:
        if self._position != len(self._tokens):
            raise NotRationalError

    def sum_(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise NotRationalError
        value = self._product(depth)
        while self._peek() in ("+", "-"):
            operator = self._take()
            term = self._product(depth)
            value = _bounded(value + term if operator == "+" else value - term)
        return value

    def _product(self, depth: int) -> Fraction:
        sign = 1
        while self._peek() in ("+", "-"):
            sign = -sign if self._take() == "-" else sign
        value = sign * self._power(depth)
        while (token := self._peek()) is not None:
            if token in _TIMES:
                self._take()
                value = _bounded(value * self._signed_power(depth))
            elif token in _OVER:
                self._take()
                value = _bounded(value / self._signed_power(depth))
            elif token in ("(", r"\frac", r"\sqrt"):
                value = _bounded(value * self._power(depth))
            else:
                break
        return value

    def _signed_power(self, depth: int) -> Fraction:
        sign = 1
        while self._peek() == "-":
            self._take()
            sign = -sign
        return sign * self._power(depth)

    def _power(self, depth: int) -> Fraction:
        value = self._base(depth)
        while self._peek() == "!":
            self._take()
            value = _factorial(value)
        if self._peek() == "^":
            self._take()
            value = _power(value, self._exponent(depth))
        while self._peek() == "!":
            self._take()
            value = _factorial(value)
        return value

    def _exponent(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise NotRationalError
        sign = 1
        if self._peek() == "-":
            self._take()
            sign = -1
        value = self._base(depth)
        if self._peek() == "^":
            self._take()
            value = _power(value, self._exponent(depth + 1))
        return sign * value

    def _base(self, depth: int) -> Fraction:
        token = self._take()
        if _is_number(token):
            return self._mixed(token, depth)
        if token == "(":
            return self._closed(")", depth)
        if token == "{":
            return self._closed("}", depth)
        if token == r"\frac":
            return _bounded(self._group(depth) / self._group(depth))
        if token == r"\sqrt":
            return _root(self._group(depth))
        raise NotRationalError

    def _mixed(self, token: str, depth: int) -> Fraction:
        """A number; with a proper fraction right after it, a mixed number."""
        value = _number(token)
        start = self._position
        if token.isdigit() and self._peek() == r"\frac":
            self._take()
            numerator, denominator = self._group(depth), self._group(depth)
            if 0 < numerator < denominator:
                return value + numerator / denominator
        elif token.isdigit() and _is_number(self._peek()):
            numerator_token, slash, denominator_token = self._take(), self._take(), self._take()
            if not (numerator_token.isdigit() and slash == "/" and denominator_token.isdigit()):
                raise NotRationalError
            numerator, denominator = _number(numerator_token), _number(denominator_token)
            if not 0 < numerator < denominator:
                raise NotRationalError
            return value + numerator / denominator
        self._position = start
        return value

    def _group(self, depth: int) -> Fraction:
        if self._peek() != "{":
            raise NotRationalError
        self._take()
        return self._closed("}", depth)

    def _closed(self, end: str, depth: int) -> Fraction:
        value = self.sum_(depth + 1)
        if self._take() != end:
            raise NotRationalError
        return value

    def _peek(self) -> str | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def _take(self) -> str:
        token = self._peek()
        if token is None:
            raise NotRationalError
        self._position += 1
        return token


def _number(token: str) -> Fraction:
    mantissa, _, exponent = token.lower().partition("e")
    if len(mantissa) > MAX_DIGITS or len(exponent) > 6:
        raise TooLargeError
    whole, _, decimals = mantissa.partition(".")
    value = Fraction(int((whole + decimals) or "0"), 10 ** len(decimals))
    return _bounded(value * _power(Fraction(10), Fraction(int(exponent)))) if exponent else value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        base, exponent = _root(base, exponent.denominator), Fraction(exponent.numerator)
    if base == 0 and exponent < 0:
        raise ZeroDivisionError
    if base in (0, 1) or exponent == 0:
        return base if exponent else Fraction(1)
    if base == -1:
        return Fraction(-1 if exponent.numerator % 2 else 1)
    if abs(exponent) * _bits(base) > MAX_BITS:
        raise TooLargeError
    return base**exponent.numerator


def _factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or value < 0:
        raise NotRationalError
    if value > MAX_FACTORIAL:
        raise TooLargeError
    return Fraction(math.factorial(value.numerator))


def _root(value: Fraction, degree: int = 2) -> Fraction:
    """The root when it is rational."""
    if value < 0 or degree > MAX_ROOT:
        raise NotRationalError
    root = Fraction(_integer_root(value.numerator, degree), _integer_root(value.denominator, degree))
    if root**degree != value:
        raise NotRationalError
    return root


def _integer_root(value: int, degree: int) -> int:
    """The largest integer whose power is at most `value`, by bisection."""
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**degree <= value else (low, middle)
    return low


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise TooLargeError
    return value
