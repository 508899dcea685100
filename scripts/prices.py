"""Print the prices of genai-prices as the table that Holdfast ships: one line per model, in the package's order.

The date of the table is the newest one that the data mentions, up to today. Prices are those of that date; where they
depend on the time of day, those without a discount.
"""

import datetime
import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import genai_prices.data
from genai_prices.types import StartDateConstraint, TieredPrices

PREFIXES = {
    "openai": "openai",
    "anthropic": "anthropic",
    "google": "google",
    "openrouter": "openrouter",
    "mistral": "mistral",
    "groq": "groq",
    "together": "together",
    "deepseek": "deepseek",
    "x-ai": "xai",
    "azure": "azure",
    "aws": "bedrock",
}
"""providers of the package, and their prefixes in Holdfast"""
OWN = ("openai", "anthropic", "google", "x-ai")
"""providers whose models are known by their names alone; those of others may be served by anybody"""
RATES = {
    "input_mtok": "input",
    "output_mtok": "output",
    "cache_read_mtok": "cache_read",
    "cache_write_mtok": "cache_write",
    "cache_write_1h_mtok": "cache_write_1h",
    "input_audio_mtok": "input_audio",
    "output_audio_mtok": "output_audio",
    "web_searches_kcount": "web_search",
}
TIERS = ("flex", "priority", "fast")
SAME_FOR_AUDIO = ("google",)
"""providers whose price lists have one price for texts and sounds, unless they name another"""
ALSO_NAMED = {"openai": ["|", ["^", "ft:gpt-"], ["^", "chatgpt-"]]}
"""names that belong to a provider, beside those that the package knows"""
CLAUSES = {"equals": "=", "starts_with": "^", "ends_with": "$", "contains": "~", "regex": "/", "or_": "|", "and_": "&"}


def table_date() -> datetime.date:
    text = Path(genai_prices.data.__file__).read_text()
    dates = {datetime.date(*map(int, match)) for match in re.findall(r"(20\d\d)-([01]\d)-([0-3]\d)", text)}
    return max(date for date in dates if date <= datetime.datetime.now(datetime.UTC).date())


def clause(match: Any) -> list[Any]:
    ((name, value),) = vars(match).items()
    return [CLAUSES[name], *map(clause, value)] if isinstance(value, list) else [CLAUSES[name], value]


def number(value: Any) -> Any:
    if isinstance(value, TieredPrices):
        return [[0, number(value.base)], *([tier.start, number(tier.price)] for tier in value.tiers)]
    return int(value) if value == int(value) else float(value)


def rates(prices: Any) -> dict[str, Any]:
    values = vars(prices)
    return {ours: number(values[theirs]) for theirs, ours in RATES.items() if values.get(theirs) is not None}


def is_current(constraint: Any, date: datetime.date) -> bool:
    return constraint is None or (isinstance(constraint, StartDateConstraint) and constraint.start_date <= date)


def lines(provider: Any, date: datetime.date) -> list[str]:
    rows = []
    for model in provider.models:
        prices = model.prices
        if isinstance(prices, list):
            current = [each.prices for each in prices if is_current(each.constraint, date)]
            prices = current[-1] if current else prices[0].prices
        row: dict[str, Any] = {"match": clause(model.match), "rates": rates(prices)}
        if not {"input", "output"} <= row["rates"].keys():
            continue  # embeddings, speech and images
        if provider.id == "openai" and "gpt-oss" in model.id:
            continue  # open weights, which OpenAI itself does not serve
        if provider.id in SAME_FOR_AUDIO:
            row["rates"] = {"input_audio": row["rates"]["input"], "output_audio": row["rates"]["output"]} | row["rates"]
        current = [variant for variant in model.price_variants or () if is_current(variant.constraint, date)]
        for variant in reversed(current):  # the first of those that apply counts
            if variant.when == {"processing": "batch"}:
                row["batch"] = rates(variant.prices)
            elif (tier := variant.when.get("service_tier")) in TIERS:
                row.setdefault("tiers", {})[tier] = rates(variant.prices)
        rows.append(json.dumps(row, ensure_ascii=False))
    return rows


def main() -> None:
    date = table_date()
    by_id = {provider.id: provider for provider in genai_prices.data.providers}
    blocks = []
    for theirs, ours in PREFIXES.items():
        others = [PREFIXES[each] for each in by_id[theirs].fallback_model_providers or () if each in PREFIXES]
        rows = ",\n".join(lines(by_id[theirs], date))
        blocks.append(f'"{ours}": {{"fallback": {json.dumps(others)}, "models": [\n{rows}\n]}}')
    source = (
        f"genai-prices {version('genai-prices')} by Pydantic, MIT licence, https://github.com/pydantic/genai-prices"
    )
    names = {PREFIXES[each]: clause(by_id[each].model_match) for each in OWN}
    names |= {PREFIXES[each]: ["|", names[PREFIXES[each]], more] for each, more in ALSO_NAMED.items()}
    facts = {"date": str(date), "source": source, "names": names}
    head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in facts.items()) + '"providers": {\n'
    sys.stdout.write("{\n" + head + ",\n".join(blocks) + "\n}}\n")


main()
