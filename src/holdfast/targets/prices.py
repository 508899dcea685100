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

from holdfast.dialects.types import TokenCounts
from holdfast.errors import UsageError
from holdfast.spec.providers import PROVIDERS, has_provider
from holdfast.spec.schema import is_embedded
from holdfast.store.records import Usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from holdfast.spec.eval_schema import Price

_BUILT_IN: Final = Path(__file__).with_name("prices.json")
_TABLES: Final = {"vertex": "google"}
"""prefixes whose prices are those of another"""
_OTHER_PREFIXES: Final = ("x-ai", "models")
"""what stands before the names of xAI's models at routers, and of Google's in its own lists"""
_STANDARD: Final = (None, "", "auto", "default", "standard", "standard_only", "on_demand")
"""service tiers that cost what the table says"""

Rate = float | tuple[tuple[int, float], ...]
"""dollars per million tokens; or several, each for requests with more input tokens than its first number"""


class Rates(Struct, frozen=True):
    """The prices of a model, in dollars per million tokens."""

    input: Rate
    output: Rate
    cache_read: Rate | None = None
    """None: as input"""
    cache_write: Rate | None = None
    """None: as input"""
    cache_write_1h: Rate | None = None
    """of what is written to be kept for an hour; None: unknown"""
    input_audio: Rate | None = None
    """None: unknown"""
    output_audio: Rate | None = None
    """None: unknown"""
    web_search: Rate | None = None
    """per thousand web searches; None: unknown"""


class _Listed(Struct, frozen=True):
    """A model of the table, and the names that it has."""

    match: list[Any]
    rates: Rates
    batch: dict[str, Rate] = {}
    """of batches, as far as they differ"""
    tiers: dict[str, dict[str, Rate]] = {}
    """likewise of service tiers"""


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
        self._model = model
        self._rates: Rates | None = None
        self._batch: Rates | None = None
        self._tiers: dict[str, Rates] = {}
        self._written = False
        """the rates come from the eval file, where one rate is for all tokens"""
        self._gaps: set[str] = set()
        """what requests were charged for and the table has no price of, so that their cost is unknown"""
        self._absurd = False
        """the server has reported token counts that cannot be true"""
        self.date: str | None = None
        """of the table; None where the prices come from the eval file, or are unknown"""
        prefix, name, own = _split(model)
        written = prices.get(model) or prices.get(name)
        if written is not None:
            self._rates, self._written = Rates(**written.model_dump()), True
        elif is_embedded(model):
            self._rates = Rates(0.0, 0.0)
        else:
            table = _read_table(Path(os.environ.get("HOLDFAST_PRICES") or _BUILT_IN))
            listed = _find(table, prefix, name, own=own)
            if listed is not None:
                self._rates, self.date = listed.rates, table.date
                self._batch = msgspec.structs.replace(listed.rates, **listed.batch)
                for tier, rates in listed.tiers.items():
                    # What the tier does not name may have another price there than elsewhere.
                    others = dict.fromkeys(("cache_write_1h", "input_audio", "output_audio"))
                    self._tiers[tier] = msgspec.structs.replace(listed.rates, **{**others, **rates})

    @property
    def known(self) -> bool:
        """True where a budget in dollars can be enforced."""
        return self._rates is not None

    @property
    def notices(self) -> list[str]:
        """Why costs or tokens are unknown although the model has a price and reports them."""
        absurd = (
            f"{self._model} reported token counts that cannot be true, such as negative ones: they are unknown, and so "
            "is their cost. Budgets do not see these requests."
        )
        return [absurd] * self._absurd + [
            f"the cost of {self._model} is unknown: no price is known for {gap}; write `prices` in the eval file"
            for gap in sorted(self._gaps)
        ]

    def usage(self, tokens: TokenCounts, requests: int = 1, *, batch: bool = False) -> Usage:
        """Return tokens with their cost, which is unknown where the price or the tokens are.

        Where the rates of a batch are not known, it costs as much as other requests, which is at least what it costs.
        """
        self._absurd |= tokens.absurd
        tier = None if batch or self._written or tokens.tier in _STANDARD else tokens.tier
        rates = (self._batch or self._rates) if batch else self._rates
        if tier is not None and rates is not None:
            rates = self._tiers.get(tier)
        cost = None
        if self._rates is not None and (self._rates.input, self._rates.output) == (0.0, 0.0):
            cost = 0.0
        elif self._rates is not None and (gap := self._gap(rates, tokens, tier)) is not None:
            self._gaps.add(gap)
        elif rates is not None and tokens.input is not None and tokens.output is not None:
            cost = _cost(rates, tokens.input, tokens.output, tokens)
        return Usage(
            tokens.input,
            tokens.output,
            requests,
            cost,
            cache_read_tokens=tokens.cache_read or UNSET,
            cache_write_tokens=tokens.cache_write or UNSET,
            reasoning_tokens=UNSET if tokens.reasoning is None else tokens.reasoning,
        )

    def _gap(self, rates: Rates | None, tokens: TokenCounts, tier: str | None) -> str | None:
        """Return what a request was charged for and has no price; None if there is nothing."""
        if tokens.unpriced is not None:
            return tokens.unpriced
        if rates is None:
            return f"the service tier {tier!r}"
        if tokens.searches and rates.web_search is None:
            return "web searches"
        if self._written:
            return None
        if tokens.cache_write_long and rates.cache_write_1h is None:
            return "cache that is kept for an hour"
        if (tokens.input_audio and rates.input_audio is None) or (tokens.output_audio and rates.output_audio is None):
            return "audio"
        return None

    def estimate(self, sent: int, received: int, requests: int, *, batch: bool = False) -> float | None:
        """Return about what requests cost that have so many tokens together; None where the price is unknown."""
        rates = (self._batch or self._rates) if batch else self._rates
        if rates is None or not requests:
            return None if rates is None else 0.0
        return _cost(rates, sent / requests, received / requests, TokenCounts()) * requests


def _split(model: str) -> tuple[str, str, bool]:
    """Return the prefix of a model's provider, empty where it has none, its name there, and whether it is known by it.

    A name such as `team/gpt-4o` is one that somebody gave to a model of their own.
    """
    prefix, slash, name = model.partition("/")
    if has_provider(model):
        return prefix, name, True
    return "", model.rpartition("/")[2], not slash or prefix in PROVIDERS or prefix in _OTHER_PREFIXES


def _find(table: _Table, prefix: str, name: str, *, own: bool) -> _Listed | None:
    """Return the entry of a model; `own`: that its provider gave it this name."""
    exact = table.models.get(name) or table.models.get(name.rpartition("/")[2])
    if exact is not None:
        return _Listed([], exact if isinstance(exact, Rates) else Rates(*exact))
    name = name.lower()
    candidates = _candidates(table, prefix, name) if own else ()
    return next((each for each in candidates if _matches(each.match, name)), None)


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
            yield msgspec.structs.replace(listed, batch={}, tiers={})


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


def _cost(rates: Rates, sent: float, received: float, tokens: TokenCounts) -> float:
    """Return the dollars of a request, of whose tokens some have rates of their own. Its length decides about all."""
    read, written, long = tokens.cache_read, tokens.cache_write - tokens.cache_write_long, tokens.cache_write_long
    heard, spoken = tokens.input_audio, tokens.output_audio
    writing = _first(rates.cache_write, rates.input)
    amounts = (
        (rates.input, max(0, sent - read - written - long - heard)),  # sounds may be in the cache, too
        (rates.output, received - spoken),
        (_first(rates.cache_read, rates.input), read),
        (writing, written),
        (_first(rates.cache_write_1h, writing), long),
        (_first(rates.input_audio, rates.input), heard),
        (_first(rates.output_audio, rates.output), spoken),
        (_first(rates.web_search, 0.0), tokens.searches * 1000),
    )
    return sum(_at(rate, sent) * count for rate, count in amounts) / 1e6


def _first(rate: Rate | None, other: Rate) -> Rate:
    return other if rate is None else rate


def _at(rate: Rate, sent: float) -> float:
    if isinstance(rate, tuple):
        return next((price for start, price in reversed(rate) if sent > start), rate[0][1])
    return rate
