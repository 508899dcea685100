"""Collects the batches of a run that waits for them, without working on the run, and lists them.

Results of batches that have ended are stored. The next process that works on the run finds them there, and makes
outputs and grades of them. Nothing is submitted, and nothing is paid for.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from holdfast.display.format import duration
from holdfast.graders.build import grader_places
from holdfast.plugins.batches.hub import Batches
from holdfast.plugins.batches.ledger import BatchStore, waiting_batches
from holdfast.plugins.batches.providers import FILES, answer_command
from holdfast.spec.grader_schema import is_judge
from holdfast.spec.load import eval_of_run
from holdfast.spec.target_schema import ModelTarget
from holdfast.store.run_lock import hold
from holdfast.targets.model import Model
from holdfast.targets.prices import Prices

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from holdfast.spec.eval import Eval
    from holdfast.store.rundir import Manifest, RunDir


class Collected(NamedTuple):
    """The state of a run's batches after their providers were asked."""

    states: dict[str, str]
    """by intent: how far each batch is that was under way"""
    news: list[str]
    """batches that were collected or found, in words"""


def collect_batches(rundir: RunDir, manifest: Manifest, notice: Callable[[str], None]) -> Collected:
    """Ask the providers about a run's batches, and store the results of those that have ended.

    `notice` receives the reason if this has to wait for the lease of a process that died.

    Raises RunHeld if another process works on the run, which collects them itself, and ConfigError if a model cannot be
    asked.
    """
    places = {batch.intent.where for batch in waiting_batches(rundir)}
    spec = eval_of_run(manifest.eval, manifest.folder, manifest.eval_file)
    models = dict(_models(spec, places))
    lease = hold(rundir, notice=notice)
    try:
        news: list[str] = []
        hub = Batches(
            BatchStore(rundir, rundir.path),
            notice=news.append,
            held=lease.still_held,
            idle=lambda: False,
            stopping=lambda: True,
            stop=lambda _: None,
            wait=False,
            live_limit=1,
        )
        return Collected(asyncio.run(_look(hub, models)), news)
    finally:
        lease.release()


def _models(spec: Eval, places: Collection[str]) -> Iterator[tuple[str, Model]]:
    """Yield the models that have submitted batches, by their place in the eval."""
    if "target" in places and isinstance(spec.target, ModelTarget):
        yield "target", Model(spec.target, Prices(spec.target.model, spec.prices), where="target")
    for place in grader_places(spec):
        block = place.block
        if block.name in places and is_judge(block) and isinstance(block.model, str):
            yield block.name, Model.of(block, Prices(block.model, spec.prices), f"graders.{block.name}")


async def _look(hub: Batches, models: dict[str, Model]) -> dict[str, str]:
    async with AsyncExitStack() as stack:
        for where, model in models.items():
            model.use_batches(hub, where)
            await stack.enter_async_context(model)
        hub.open()
        return await hub.look()


def batch_lines(rundir: RunDir, states: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """Describe the batches of a run that have no results yet; `states` has their progress, by intent."""
    for batch in waiting_batches(rundir):
        count = len(batch.intent.requests)
        requests = "1 request" if count == 1 else f"{count:,} requests"
        age = duration(max(0.0, time.time() - (batch.sent or batch.intent.time)))
        state = states.get(batch.intent.intent, "not collected yet")
        verb = "submitted"
        if batch.intent.account == FILES:
            verb = "written"
            with suppress(FileNotFoundError):  # removing the file cancels the batch
                state += f"; answer it with: {answer_command(rundir.batches, batch.intent.intent)}"
        yield f"batch {batch.name}: {requests} of {batch.intent.where}, {verb} {age} ago, {state}"
