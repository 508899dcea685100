"""Batches of a run that are under way, in words."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from holdfast.display.format import duration
from holdfast.store.batches import waiting_batches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.store.rundir import RunDir


def batch_lines(rundir: RunDir) -> Iterator[str]:
    """Describe the batches of a run whose results are still to come."""
    for batch in waiting_batches(rundir):
        count = len(batch.intent.requests)
        requests = "1 request" if count == 1 else f"{count:,} requests"
        age = duration(max(0.0, time.time() - (batch.sent or batch.intent.time)))
        yield f"batch {batch.name}: {requests} of {batch.intent.where}, submitted {age} ago, not collected yet"
