"""Batches of a run, in words: those that it would take, and those that are under way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from holdfast.display.format import duration
from holdfast.plan.changes import format_count
from holdfast.spec.providers import endpoint_of
from holdfast.spec.schema import ModelTarget
from holdfast.store.batches import waiting_batches
from holdfast.targets.batch_apis import batch_api_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.plan.plan import Plan
    from holdfast.spec.load import Eval
    from holdfast.store.rundir import RunDir


def planned_batches(spec: Eval, plan: Plan) -> Iterator[str]:
    """Describe the batches that a run would take."""
    target = spec.target
    if not isinstance(target, ModelTarget) or target.batch is None or not plan.to_run:
        return
    api = batch_api_of(endpoint_of(target.model, target.api, target.base_url, target.api_key_env))
    largest = min(api.most_requests if api else plan.to_run, target.batch.size or plan.to_run)
    count = -(-plan.to_run // largest)
    line = f"{format_count(plan.to_run, 'request')} in {'1 batch' if count == 1 else f'{count:,} batches'}"
    if spec.multi_turn or target.tools:
        line += ", and as many for each further turn or step, one after the other"
    yield line


def batch_lines(rundir: RunDir) -> Iterator[str]:
    """Describe the batches of a run whose results are still to come."""
    for batch in waiting_batches(rundir):
        count = len(batch.intent.requests)
        requests = "1 request" if count == 1 else f"{count:,} requests"
        age = duration(max(0.0, time.time() - (batch.sent or batch.intent.time)))
        yield f"batch {batch.name}: {requests} of {batch.intent.where}, submitted {age} ago, not collected yet"
