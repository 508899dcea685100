"""Batches of a run that are under way, in words."""

from __future__ import annotations

import time
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING

from holdfast.display.format import duration
from holdfast.store.batches import waiting_batches
from holdfast.targets.batch_files import ACCOUNT, answer_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.store.rundir import RunDir


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
