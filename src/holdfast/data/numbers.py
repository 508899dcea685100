"""Arrays with one number for each row, in as few bytes as the numbers need: one, as long as there are few of them."""

from __future__ import annotations

from array import array
from typing import Literal

Code = Literal["B", "I"]


def code_for(count: int) -> Code:
    """Return the type code of an array of numbers below a count."""
    return "B" if count <= 256 else "I"


def fit_code(numbers: array[int], count: int) -> array[int]:
    """Return an array of numbers below a count with the type code for them."""
    code = code_for(count)
    return numbers if numbers.typecode == code else array(code, numbers)
