from __future__ import annotations

import contextlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.rollout.rm_hub.math_grade import grade_exactly
from miles.rollout.rm_hub.math_number import TooLargeError, evaluate

numbers = st.integers(-99999, 99999)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("-7", -7),
        ("- 7", -7),
        (".75", Fraction(3, 4)),
        ("5.", 5),
        ("007", 7),
        ("1.5e3", 1500),
        (r"1.5\times10^{3}", 1500),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"-\frac{-1}{2}", Fraction(1, 2)),
        (r"3\frac{1}{2}", Fraction(7, 2)),
        (r"-3\frac{1}{2}", Fraction(-7, 2)),
        ("3 1/2", Fraction(7, 2)),
        (r"3\frac{5}{2}", Fraction(15, 2)),
        ("2^10", 1024),
        ("2^{-3}", Fraction(1, 8)),
        ("-2^2", -4),
        ("2^3^2", 512),
        ("(1+2)(3)", 9),
        ("6!", 720),
        ("2^3!", 40320),
        (r"\sqrt{16}", 4),
        (r"\sqrt{\frac{1}{4}}", Fraction(1, 2)),
        ("8^{1/3}", 2),
        ("1/2/2", Fraction(1, 4)),
        ("2-3-4", -5),
        (r"\frac{2^{2005}+1}{3*2^{2006}}", Fraction(2**2005 + 1, 3 * 2**2006)),
    ],
)
def test_arithmetic_is_exact(text: str, value: Fraction) -> None:
    assert evaluate(text) == value


@pytest.mark.parametrize(
    "text", ["", "x", "1 0", "5 +", "(5", "5)", r"\sqrt{2}", r"\frac{1}{0}", "0^{-1}", "1.2.3", "2^", "3 5/2", "*5"]
)
def test_what_is_no_rational_number_has_no_value(text: str) -> None:
    assert evaluate(text) is None


@pytest.mark.parametrize("text", ["9^{9^{9}}", "2^{2^{2^{2^{2^{2}}}}}", "99999!", "10^{99999}", "1e99999", "9" * 5000])
def test_values_beyond_the_limits_are_refused_at_once(text: str) -> None:
    with pytest.raises(TooLargeError):
        evaluate(text)


def notations(n: int) -> list[str]:
    """An integer in ten notations."""
    sign = "-" if n < 0 else ""
    grouped = f"{n:,}"
    return [
        str(n),
        f"{n}.00",
        f"{sign}0{abs(n)}",
        grouped,
        grouped.replace(",", "{,}"),
        rf"\frac{{{2 * n}}}{{2}}",
        f"{n}/1",
        rf"{n}\times10^{{0}}",
        rf"{n}\text{{ units}}",
        f"x={n}",
    ]


@given(n=numbers)
def test_a_number_equals_itself_in_ten_notations_and_differs_from_its_neighbours(n: int) -> None:
    for label in notations(n):
        for answer in notations(n):
            assert grade_exactly(label, answer) is True, (label, answer)
        for other in (n - 1, n + 1):
            for answer in notations(other):
                assert grade_exactly(label, answer) is False, (label, answer)


def decimal_notations(hundredths: int) -> list[str]:
    """A positive number with two decimals in ten notations."""
    whole, rest = divmod(hundredths, 100)
    plain = f"{whole}.{rest:02}"
    return [
        plain,
        f"{plain}00",
        f"{whole:,}.{rest:02}",
        rf"\${plain}",
        rf"\frac{{{hundredths}}}{{100}}",
        rf"\dfrac{{{3 * hundredths}}}{{300}}",
        rf"{hundredths}\times10^{{-2}}",
        f"{hundredths}e-2",
        rf"{whole}\frac{{{rest}}}{{100}}" if rest else f"{whole}",
        rf"{plain}\text{{ litres}}",
    ]


@given(hundredths=st.integers(1, 10**7))
def test_a_decimal_equals_itself_in_ten_notations_and_differs_from_its_neighbours(hundredths: int) -> None:
    for label in decimal_notations(hundredths):
        for answer in decimal_notations(hundredths):
            assert grade_exactly(label, answer) is True, (label, answer)
        for other in (hundredths - 1, hundredths + 1):
            for answer in decimal_notations(other) if other else ["0"]:
                assert grade_exactly(label, answer) is False, (label, answer)


@given(value=st.fractions(min_value=-50, max_value=50, max_denominator=30))
def test_python_and_latex_agree_on_fractions(value: Fraction) -> None:
    assert evaluate(rf"\frac{{{value.numerator}}}{{{value.denominator}}}") == value
    assert evaluate(str(value)) == value
    assert evaluate(f"({value})*2-1") == value * 2 - 1


@given(text=st.text(r"0123456789+-*/^!(){}\fracsqt .", max_size=40))
def test_no_text_breaks_the_parser(text: str) -> None:
    with contextlib.suppress(TooLargeError):
        assert evaluate(text) is None or isinstance(evaluate(text), Fraction)


@given(text=st.text("0123456789+-=,;:.()[]{}\\ fracsqtxorandpm^_%$<>&", max_size=60))
def test_no_answer_breaks_the_comparison(text: str) -> None:
    assert grade_exactly("5", text) in (True, False, None)
    assert grade_exactly(text, "x=1 or 2") in (True, False, None)
