"""Numbers in texts: each is read whole, as it is meant, or has no value; never a part of it."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.graders.number import first_number, last_number, numbers_in

READ = {
    "42": ("42", "It is 42.", "1, then 42", "٤٢", "#42", "40-42", "(40)-42", "40 - 42", "__42__"),
    "4": ("(3, 4)",),
    "7": ("007", "x^2 + 7"),
    "5": ("５", "+5", "3–5", "- 5", "-->5", "...5", "5.", "5 million", "- $5", "5 €", "x_1 = 5, so x_{2}"),
    "500": ("Rs500",),
    "-5": (
        "-5",
        "\u22125",
        "–5",
        "－5",
        "**-5**",
        "=-5",
        "x = - 5",
        "(-5)",
        "negative 5",
        "-$5",
        "-€5",
        "$-5",
        "$-5$",
        r"-\$5",
        "-US$5",
        "\u22125°C",
    ),
    "19": ("COVID-19",),
    "3.14": ("3.14",),
    "0.5": (".5",),
    "-0.5": ("-.5",),
    "3.14159": ("3.14159...",),
    "1.234": ("1.234",),
    "50": ("50%",),
    "25": ("25 °C", "25 cm^2", "25 cm²", "(5^2)"),
    "60": ("60 km/h",),
    "9.8": ("9.8 m/s^2",),
    "1234567": ("1,234,567",),
    "1234.5": ("$1,234.50", "1\u202f234,5"),
    "12345": ("12,345.",),
    "100000": ("1,00,000",),
    "1234567.5": ("12,34,567.5",),
    "1080": (
        r"\boxed{1{,}080}",
        "$1{,}080$",
        r"1\,080",
        r"1\ 080",
        r"1\!080",
        r"1,\!080",
        r"1\text{,}080",
        "1\u202f080",
        "1\u00a0080",
    ),
    "1080000": (r"1\;080\;000",),
    "1080.5": ("1\u2009080.5",),
    "1000": ("1'000", "1_000", "1e3", "10^3"),
    "1000000": ("1’000’000", "1.000.000", "1\u00a0000\u00a0000"),
    "1234567.89": ("1.234.567,89",),
    "1234.56": ("1.234,56",),
    "4000": ("3,000-4,000",),
    "-5.5": ("\u2212$5.50",),
    "10": ("$5-$10", "$5$-$10$"),
    "0.25": ("2.5E-1",),
    "1500": ("1.5e+3",),
    "2500000": (r"2.5\times10^{6}", r"$2.5 \times 10^6$", "2.5 × 10⁶", "2.5x10^6", "2.5*10**6"),
    "-2500": (r"-2.5\cdot 10^{3}",),
    "0.001": ("10⁻³", "10^{-3}"),
    "1024": ("2^{10}",),
    "3/4": ("3/4", "3 / 4", r"\frac{3}{4}", r"\frac34"),
    "-3/4": ("\u22123/4", r"-\dfrac{3}{4}"),
    "9": ("18/2", "18/2 = 9"),
    "250": ("1,000/4",),
    "1/2": ("1⁄2", "½"),
    "1000/3": (r"\tfrac{1,000}{3}",),
    "-1/2": ("-½",),
    "3/2": ("1 1/2", r"1\frac{1}{2}", "1½"),
    "7/3": (r"2 \frac{1}{3}",),
    "-3/2": ("-1 1/2",),
}
"""values, and how they are written"""

UNCLEAR = [
    *("1,23", "0,5", "0,123", "1234,567", "1,2,3", "1,080,5", "1.234,567", "6,02 × 10^{23}", r"3\,14"),
    *("1 080", "1 000 000", "12 345.5", "5'10\"", "1.2.3", "192.168.0.1", "15.01.2024", "v1.2.3.4"),
    *("12:30", "1:1,000", "3/4/2024", "2024-01-15", "555-123-4567", "0x1F", "No.5", "1e9999999", "1" * 10_001),
    *("1-1/2", "5 7/3", "1/0", r"\frac{1}{0}", "1/2/3", r"0.\overline{3}", "0.(3)", "2^n", "2^{0.5}", "9^99999999"),
    *(r"\sqrt{2}", r"3\sqrt{2}", r"\sqrt[3]{7}", "√2", r"2\pi", "3π", "x/4", r"\frac{\pi}{4}", r"\frac{3\pi}{4}"),
    *("±5", r"\pm 5", "+/-5", "7 minus 5", "3 × 2^4", "5^2 × 10^3"),
]
NONE = ["", "no number", "x^2", "x_1", "²", "½x"[1:], "e^-"]


@pytest.mark.parametrize(
    ("text", "value"), [(text, value) for value, texts in READ.items() for text in texts], ids=lambda text: repr(text)
)
def test_a_number_is_read_as_it_is_meant(text: str, value: str) -> None:
    for around in ("{}", "so it is {}", "{} is it", "1 + 1\n{}\n"):
        number = last_number(around.replace("{}", text))
        assert number is not None and number.value == Fraction(value), (around, number)


@pytest.mark.parametrize("text", UNCLEAR, ids=lambda text: repr(text)[:30])
def test_no_part_of_an_ambiguous_number_counts(text: str) -> None:
    number = last_number(f"7 and {text}")
    assert number is not None and number.value is None, number


@pytest.mark.parametrize("text", NONE)
def test_some_digits_are_not_numbers(text: str) -> None:
    assert last_number(text) is first_number(text) is None and numbers_in(text) == []


def test_the_number_that_counts_is_found_in_long_lines() -> None:
    words, digits = "word " * 5_000, "1 2,3 x_4 " * 2_000
    for text, value in ((f"-7 {words}", -7), (f"{words}1{{,}}080", 1080), (f"{digits}{words}-7 {words}", -7)):
        number = last_number(text)
        assert number is not None and number.value == value
    for text, value in ((f"{words}-7 {digits}", -7), (f"{words}{'x_1 ' * 2_000}-7", -7), (f"-7 {words}", -7)):
        number = first_number(text)
        assert number is not None and number.value == value


@pytest.mark.parametrize(
    "text",
    [
        *("1" * 500_000, "1," * 300_000, "1 " * 300_000, " 123" * 200_000, r"\," * 300_000 + "1", "½" * 100_000),
        *(r"\frac{1}" * 100_000, "{1}" * 200_000, "-" * 500_000 + "5", "1\u00a0" * 300_000, "(\\, " * 100_000 + "1"),
    ],
    ids=lambda text: text[:10],
)
def test_no_text_takes_long(text: str) -> None:
    """A pattern that tries every way to split these never comes back."""
    assert last_number(text) is not None and first_number(text) is not None


@example("00")
@given(st.text("0123456789eE+-.,%'_ x^{}()/\\frac×$:\u00a0½²", max_size=60) | st.text(max_size=60))
def test_no_text_breaks_reading_numbers(text: str) -> None:
    numbers = numbers_in(text)
    assert [last_number(text), first_number(text)] == ([numbers[-1], numbers[0]] if numbers else [None, None])
    for number in numbers:
        assert number.value is None or abs(Fraction(number.value) - 1) <= abs(Fraction(number.value)) + 1


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
def test_a_number_is_found_in_every_usual_spelling(number: Any) -> None:
    latex = f"{number:,}".replace(",", "{,}")
    thin = f"{number:,}".replace(",", "\u202f")
    for text in (f"{number}", f"{number:,}", f"is {number}.", f"({number})", f"{number:e}", f"${latex}$", thin):
        (found,) = numbers_in(text)
        assert found.value == number


@pytest.mark.parametrize("digits", ["42", "007", "\u0664\u0662", "\u00b2", "9" * 9_999, "9" * 10_001])
def test_a_text_of_digits_is_read_like_digits_among_words(digits: str) -> None:
    """A text that is nothing but a number takes a shorter way."""
    assert [number.value for number in numbers_in(digits)] == [number.value for number in numbers_in(f"({digits})")]
