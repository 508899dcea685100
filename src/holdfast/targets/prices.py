"""Prices of tokens, in US dollars per million. `prices:` in the eval file adds to the table.

A model that is not listed has an unknown price, which is shown as unknown and never as zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from holdfast.store.records import Usage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.spec.schema import Price

_TABLE: Final[dict[str, tuple[float, float]]] = {
    "claude-haiku-4-5": (1.00, 5.00),
    "claude-opus-4-1": (15.00, 75.00),
    "claude-sonnet-4-5": (3.00, 15.00),
    "gemini-2.5-flash": (0.30, 2.50),
    "gemini-2.5-pro": (1.25, 10.00),
    "gpt-4.1": (2.00, 8.00),
    "gpt-4.1-mini": (0.40, 1.60),
    "gpt-4.1-nano": (0.10, 0.40),
    "gpt-4o": (2.50, 10.00),
    "gpt-4o-mini": (0.15, 0.60),
    "gpt-5": (1.25, 10.00),
    "gpt-5-mini": (0.25, 2.00),
    "gpt-5-nano": (0.05, 0.40),
    "o3": (2.00, 8.00),
    "o4-mini": (1.10, 4.40),
}


class Prices:
    """The prices of one model, which may be unknown."""

    def __init__(self, model: str, prices: Mapping[str, Price]) -> None:
        self._rates: tuple[float, float] | None = None
        if model in prices:
            self._rates = prices[model].input, prices[model].output
        elif model.startswith("local/"):
            self._rates = 0.0, 0.0
        else:
            self._rates = _TABLE.get(model.rpartition("/")[2])

    @property
    def known(self) -> bool:
        """True where a budget in dollars can be enforced."""
        return self._rates is not None

    def usage(self, input_tokens: int | None, output_tokens: int | None, requests: int = 1) -> Usage:
        """Return tokens with their cost, which is unknown where the price or the tokens are."""
        cost = None
        if self._rates == (0.0, 0.0):
            cost = 0.0
        elif self._rates is not None and input_tokens is not None and output_tokens is not None:
            cost = (input_tokens * self._rates[0] + output_tokens * self._rates[1]) / 1e6
        return Usage(input_tokens, output_tokens, requests, cost)
