"""Batches of a run, in words: those that it would take, and those that are under way."""

from __future__ import annotations

import time
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING

from holdfast.display.format import dollars, duration
from holdfast.plan.changes import format_count
from holdfast.spec.providers import endpoint_of
from holdfast.spec.schema import ModelTarget
from holdfast.store.batches import waiting_batches
from holdfast.targets.batch_apis import batch_api_of
from holdfast.targets.batch_files import ACCOUNT, answer_command
from holdfast.targets.prices import Prices

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.report.preview import Preview
    from holdfast.spec.load import Eval
    from holdfast.store.rundir import RunDir


def planned_batches(spec: Eval, plan: Preview) -> Iterator[str]:
    """Describe the batches that a run would take, and what they would cost."""
    target, requests = spec.target, plan.trials
    if not isinstance(target, ModelTarget) or target.batch is None or not requests:
        return
    api = batch_api_of(endpoint_of(target.model, target.api, target.base_url, target.api_key_env))
    count = -(-requests // min(api.most_requests if api else requests, target.batch.size or requests))
    line = f"{format_count(requests, 'request')} in {'1 batch' if count == 1 else f'{count:,} batches'}"
    if spec.multi_turn or target.tools:
        line += ", and as many for each further turn or step, one after the other"
    prices = Prices(target.model, spec.prices)
    cost = prices.estimate(plan.tokens, plan.replies or 0, requests, batch=True)
    if cost is not None and plan.cost is not None and cost < plan.cost:
        line += f", about {dollars(cost)} instead of {dollars(plan.cost)}"
    yield line


def batch_lines(rundir: RunDir, states: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """Describe the batches of a run whose results are still to come; `states` says how far they are, by intent."""
    for batch in waiting_batches(rundir):
        count = len(batch.intent.requests)
        requests = "1 request" if count == 1 else f"{count:,} requests"
        age = duration(max(0.0, time.time() - (batch.sent or batch.intent.time)))
        state = states.get(batch.intent.intent, "not collected yet")
        verb = "submitted"
        if batch.intent.account == ACCOUNT:
            verb = "written"
            with suppress(FileNotFoundError):  # it was removed, which cancels it
                state += f"; answer it with: {answer_command(rundir.batches, batch.intent.intent)}"
        yield f"batch {batch.name}: {requests} of {batch.intent.where}, {verb} {age} ago, {state}"
