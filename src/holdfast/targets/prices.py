"""Prices of tokens, in US dollars per million: a dated table, and `prices:` of the eval file, which goes first.

The table is `prices.json` beside this module, with the figures of the package genai-prices, or the file that
$HOLDFAST_PRICES names. A model that is not listed has an unknown price, which is shown as unknown and never as zero.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET, Struct

from holdfast.errors import UsageError
from holdfast.spec.providers import has_provider
from holdfast.spec.schema import is_embedded
from holdfast.store.records import Usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from holdfast.dialects.types import TokenCounts
    from holdfast.spec.model_schema import Price

_BUILT_IN: Final = Path(__file__).with_name("prices.json")
_TABLES: Final = {"vertex": "google"}
"""prefixes whose prices are those of another"""

Rate = float | tuple[tuple[int, float], ...]
"""dollars per million tokens; or several, each for requests with more input tokens than its first number"""


class Rates(Struct, frozen=True):
    """The prices of a model, in dollars per million tokens."""

    input: Rate
    output: Rate
    cache_read: Rate | None = None
    """None: as input"""
    cache_write: Rate | None = None


class _Listed(Struct, frozen=True):
    """A model of the table, and the names that it has."""

    match: list[Any]
    rates: Rates
    batch: dict[str, Rate] = {}
    """of batches, as far as they differ"""


class _Provider(Struct, frozen=True):
    models: list[_Listed]
    fallback: list[str] = []
    """providers whose models it has, too"""


class _Table(Struct, frozen=True):
    date: str
    models: dict[str, tuple[float, float] | Rates] = {}
    """rates by the exact name, or those of input and output alone"""
    names: dict[str, list[Any]] = {}
    """rules for names without a prefix, by the prefix of the provider that they belong to"""
    providers: dict[str, msgspec.Raw] = {}
    """decoded where a price is needed: most runs need one provider"""


@lru_cache(maxsize=4)
def _read_table(path: Path) -> _Table:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Table)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"the prices in {path} cannot be read: {error}",
            remedy='Write {"date": "2026-11", "models": {"NAME": [INPUT, OUTPUT]}}, or unset HOLDFAST_PRICES.',
        ) from error


class Prices:
    """The prices of one model, which may be unknown."""

    def __init__(self, model: str, prices: Mapping[str, Price]) -> None:
        self._rates: Rates | None = None
        self._batch: Rates | None = None
        self.date: str | None = None
        """of the table; None where the prices come from the eval file, or are unknown"""
        prefix, name = _split(model)
        written = prices.get(model) or prices.get(name)
        if written is not None:
            self._rates = Rates(**written.model_dump())
        elif is_embedded(model):
            self._rates = Rates(0.0, 0.0)
        else:
            table = _read_table(Path(os.environ.get("HOLDFAST_PRICES") or _BUILT_IN))
            self._rates, batch = _find(table, prefix, name)
            self._batch = self._rates and msgspec.structs.replace(self._rates, **batch)
            self.date = None if self._rates is None else table.date

    @property
    def known(self) -> bool:
        """True where a budget in dollars can be enforced."""
        return self._rates is not None

    def usage(self, tokens: TokenCounts, requests: int = 1, *, batch: bool = False) -> Usage:
        """Return tokens with their cost, which is unknown where the price or the tokens are.

        Where the rates of a batch are not known, it costs as much as other requests, which is at least what it costs.
        """
        rates = (self._batch or self._rates) if batch else self._rates
        cost = None
        if rates is not None and (rates.input, rates.output) == (0.0, 0.0):
            cost = 0.0
        elif rates is not None and tokens.input is not None and tokens.output is not None:
            cost = _cost(rates, tokens.input, tokens.output, tokens.cache_read, tokens.cache_write)
        return Usage(
            tokens.input,
            tokens.output,
            requests,
            cost,
            cache_read_tokens=tokens.cache_read or UNSET,
            cache_write_tokens=tokens.cache_write or UNSET,
            reasoning_tokens=UNSET if tokens.reasoning is None else tokens.reasoning,
        )

    def estimate(self, sent: int, received: int, requests: int, *, batch: bool = False) -> float | None:
        """Return about what requests cost that have so many tokens together; None where the price is unknown."""
        rates = (self._batch or self._rates) if batch else self._rates
        if rates is None or not requests:
            return None if rates is None else 0.0
        return _cost(rates, sent / requests, received / requests, 0, 0) * requests


def _split(model: str) -> tuple[str, str]:
    """Return the prefix of a model's provider, empty where it has none, and its name there."""
    if has_provider(model):
        prefix, _, name = model.partition("/")
        return prefix, name
    return "", model.rpartition("/")[2]


def _find(table: _Table, prefix: str, name: str) -> tuple[Rates | None, dict[str, Rate]]:
    """Return the rates of a model, and what is different in batches."""
    exact = table.models.get(name) or table.models.get(name.rpartition("/")[2])
    if exact is not None:
        return exact if isinstance(exact, Rates) else Rates(*exact), {}
    name = name.lower()
    listed = next((each for each in _candidates(table, prefix, name) if _matches(each.match, name)), None)
    return (None, {}) if listed is None else (listed.rates, listed.batch)


def _candidates(table: _Table, prefix: str, name: str) -> Iterable[_Listed]:
    """Yield the models of the provider that a prefix or a name belongs to, then those that it offers of others."""
    if not prefix:
        prefix = next((each for each, names in table.names.items() if _matches(names, name)), "")
    block = table.providers.get(_TABLES.get(prefix, prefix))
    if block is None:
        return
    provider = _decode(bytes(block))
    yield from provider.models
    for other in provider.fallback:  # at its rates, except for batches, which each provider has its own way with
        for listed in _decode(bytes(table.providers[other])).models:
            yield msgspec.structs.replace(listed, batch={})


@lru_cache(maxsize=16)
def _decode(block: bytes) -> _Provider:
    return msgspec.json.decode(block, type=_Provider)


def _matches(clause: list[Any], name: str) -> bool:
    """Return True if a name in lower case fits a rule of the table."""
    kind, *values = clause
    match kind:
        case "|":
            return any(_matches(each, name) for each in values)
        case "&":
            return all(_matches(each, name) for each in values)
        case "/":
            return re.search(values[0], name) is not None
    text = values[0].lower()
    tests: dict[str, bool] = {
        "=": name == text,
        "^": name.startswith(text),
        "$": name.endswith(text),
        "~": text in name,
    }
    return tests[kind]


def _cost(rates: Rates, sent: float, received: float, read: int, written: int) -> float:
    """Return the dollars of a request. The length of its input decides about all rates."""
    amounts = (
        (rates.input, sent - read - written),
        (rates.output, received),
        (rates.input if rates.cache_read is None else rates.cache_read, read),
        (rates.input if rates.cache_write is None else rates.cache_write, written),
    )
    return sum(_at(rate, sent) * count for rate, count in amounts) / 1e6


def _at(rate: Rate, sent: float) -> float:
    if isinstance(rate, tuple):
        return next((price for start, price in reversed(rate) if sent > start), rate[0][1])
    return rate
