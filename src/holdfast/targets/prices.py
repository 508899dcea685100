"""Prices of tokens, in US dollars per million: a dated table, and `prices:` of the eval file, which goes first.

The table is `prices.json` beside this module, or the file that $HOLDFAST_PRICES names. A model that is not listed has
an unknown price, which is shown as unknown and never as zero.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import UNSET

from holdfast.errors import UsageError
from holdfast.store.records import Usage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.dialects.types import TokenCounts
    from holdfast.spec.schema import Price

_BUILT_IN: Final = Path(__file__).with_name("prices.json")


class _Table(msgspec.Struct, frozen=True):
    date: str
    models: dict[str, tuple[float, float]]
    """dollars per million tokens that are sent, and that are received"""


@lru_cache(maxsize=4)
def _read_table(path: Path) -> _Table:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Table)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"the prices in {path} cannot be read: {error}",
            remedy=f"Write them as {_BUILT_IN} does, or unset HOLDFAST_PRICES.",
        ) from error


class Prices:
    """The prices of one model, which may be unknown."""

    def __init__(self, model: str, prices: Mapping[str, Price]) -> None:
        self._rates: tuple[float, float] | None = None
        self.date: str | None = None
        """of the table; None where the prices come from the eval file, or are unknown"""
        if model in prices:
            self._rates = prices[model].input, prices[model].output
        elif model.startswith("local/"):
            self._rates = 0.0, 0.0
        else:
            table = _read_table(Path(os.environ.get("HOLDFAST_PRICES") or _BUILT_IN))
            self._rates = table.models.get(model.rpartition("/")[2])
            self.date = None if self._rates is None else table.date

    @property
    def known(self) -> bool:
        """True where a budget in dollars can be enforced."""
        return self._rates is not None

    def usage(self, tokens: TokenCounts, requests: int = 1) -> Usage:
        """Return tokens with their cost, which is unknown where the price or the tokens are."""
        cost = None
        if self._rates == (0.0, 0.0):
            cost = 0.0
        elif self._rates is not None and tokens.input is not None and tokens.output is not None:
            cost = (tokens.input * self._rates[0] + tokens.output * self._rates[1]) / 1e6
        return Usage(
            tokens.input,
            tokens.output,
            requests,
            cost,
            cache_read_tokens=tokens.cache_read or UNSET,
            cache_write_tokens=tokens.cache_write or UNSET,
            reasoning_tokens=UNSET if tokens.reasoning is None else tokens.reasoning,
        )
