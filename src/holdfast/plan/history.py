"""A look around before a run: what other runs can lend it, what changed since the nearest one, and why.

Only manifests are read of runs that cannot help. Nothing here writes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.canonical import digest
from holdfast.errors import UsageError
from holdfast.plan.changes import RowChanges, identity_changes
from holdfast.plan.keys import run_id
from holdfast.plan.plan import Work, make_plan
from holdfast.plan.reuse import Borrowed, borrow
from holdfast.store.catalog import sound_runs
from holdfast.store.lines import scan
from holdfast.store.manifest import Drift

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from holdfast.plan.identity import RunIdentity
    from holdfast.plan.plan import Plan
    from holdfast.store.index import Index
    from holdfast.store.manifest import Manifest
    from holdfast.store.rundir import RunDir

Neighbour = tuple["RunDir", "Manifest"]


class _First(msgspec.Struct):
    key: str
    sample: str
    trial: int


_first = msgspec.json.Decoder(_First)


def neighbours(found: RunIdentity, rundir: RunDir, runs_dir: Path) -> list[Neighbour]:
    """The other runs, nearest first."""
    others = [(other, manifest) for other, manifest in sound_runs(runs_dir) if other.path != rundir.path]
    return sorted(others, key=lambda neighbour: _nearness(found, neighbour[1]), reverse=True)


def _nearness(found: RunIdentity, manifest: Manifest) -> tuple[bool, int, int, str]:
    """Of the same eval, alike in most parts, with most rows, and the newest."""
    recorded = msgspec.to_builtins(manifest.fingerprints)
    same = sum(found.fingerprints.get(part) == value for part, value in recorded.items())
    return manifest.name == found.spec.name, same, manifest.dataset.count, manifest.created


def look_around(
    found: RunIdentity, index: Index, runs_dir: Path, others: Iterable[Neighbour], *, grades: bool = True
) -> tuple[Borrowed, Plan]:
    """What can be borrowed, without the verdicts if they are not wanted, and the plan with its reasons.

    A run that kept outputs in spite of drift answers new rows with other code under the same keys, so it lends only to
    its like.
    """
    neighbourhood = list(others)
    borrowed = borrow(
        found.survey,
        found.work,
        index,
        [
            (label(other, runs_dir), other)
            for other, manifest in neighbourhood
            if manifest.fingerprints.work in found.work.digests and (found.drift or not manifest.drift)
        ],
        grades=grades,
    )
    plan = make_plan(found.survey, found.work, index, borrowed)
    if index.outputs or plan.complete:
        return borrowed, plan
    nearest = next((pair for pair in neighbourhood if pair[1].name == found.spec.name), None)
    reasons = () if nearest is None else tuple(_reasons(found, *nearest))
    return borrowed, replace(plan, reasons=reasons)


def label(rundir: RunDir, runs_dir: Path) -> str:
    """A run as people name it: eval and directory."""
    path = rundir.path
    return path.relative_to(runs_dir).as_posix() if path.is_relative_to(runs_dir) else str(path)


def _reasons(found: RunIdentity, rundir: RunDir, manifest: Manifest) -> list[str]:
    same_rows = manifest.fingerprints.dataset == found.survey.digest
    said = identity_changes(manifest.identity, found.contents, same_rows=same_rows)
    if not same_rows:
        said.append(_row_changes(found, rundir, manifest))
    return said


def _row_changes(found: RunIdentity, rundir: RunDir, manifest: Manifest) -> str:
    """What became of the nearest run's rows. Their keys are made with its work, so a new prompt does not hide them."""
    earlier: dict[str, str] = {}
    with suppress(OSError, msgspec.DecodeError):  # what cannot be read is found to be missing below
        for path in rundir.journals("outputs"):
            for line in scan(path):
                if line.sound:
                    first = _first.decode(line.data)
                    if first.trial == 1:
                        earlier[first.sample] = first.key
    unfinished = len(earlier) < manifest.dataset.count
    work = Work.of_run(manifest)
    new = changed = 0
    for sample in found.dataset:
        key = earlier.pop(sample.id, None)
        if key is None:
            new += 1
        elif key not in work.keys_of(sample.digest, 1, typed=sample.typed):
            changed += 1
    if unfinished:  # what it lacks says nothing about the rows
        return str(RowChanges(0, changed, 0)) or "other rows chosen, or not all were run"
    return str(RowChanges(new, changed, len(earlier))) or "rows in another order"


def accept_drift(found: RunIdentity, rundir: RunDir, runs_dir: Path) -> RunIdentity:
    """Keep the keys of the nearest run whose target differs in its code alone. The new run says so for ever.

    Where this code has itself finished a run there is nothing to accept; one that it only began does not count, or an
    eval that was started without --accept-drift by mistake could not be started with it.
    """
    if rundir.finished:
        return found
    begun = rundir.manifest.exists()
    for other, manifest in neighbours(found, rundir, runs_dir):
        old, new = manifest.identity.target, found.contents.target
        same_target = _without_code(old) == _without_code(new)
        same_talk = manifest.fingerprints.conversation == found.fingerprints["conversation"]
        if manifest.name != found.spec.name or not same_target or not same_talk:
            continue
        if manifest.fingerprints.work in found.work.digests and not manifest.drift:
            if other.finished:
                return found
            begun = True
            continue
        drift = Drift(lender=label(other, runs_dir), old=_code(old), new=_code(new))
        parts = {**found.fingerprints, "target": manifest.fingerprints.target, "drift": digest(drift.new)}
        work = Work(manifest.fingerprints.work, found.work.trials, found.work.slots)
        return replace(found, work=work, fingerprints=parts, drift=drift, id=run_id(found.spec.name, parts))
    if begun:
        return found
    raise UsageError(
        "--accept-drift: there is no earlier run of this eval that differs only in the target's code",
        remedy="Run it without --accept-drift.",
    )


def _without_code(target: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in target.items() if key not in ("source", "files")}


def _code(target: dict[str, Any]) -> dict[str, Any]:
    return {**target.get("source", {}), **target.get("files", {})}


def _with_texts_alone(found: RunIdentity) -> RunIdentity:
    """The eval as it was identified when HTTP requests could only hold texts."""
    target = {key: value for key, value in found.contents.target.items() if key != "request_values"}
    parts = {**found.fingerprints, "target": digest(target)}
    return replace(
        found,
        work=replace(found.work, typed_digest=None),
        fingerprints=parts,
        contents=msgspec.structs.replace(found.contents, target=target),
        id=run_id(found.spec.name, parts),
    )


def with_outputs_of(lender: Neighbour, found: RunIdentity, *, grading: bool = False) -> RunIdentity:
    """Make sure that a run's outputs are what an eval would grade; where they are not, say what changed.

    Where the eval is the run's own, its verdicts go where the run is, wherever that may be. With `grading`, nothing is
    asked of the target, so a run whose requests held texts alone is graded as it is.
    """
    rundir, manifest = lender
    if grading and "request_values" in found.contents.target.keys() - manifest.identity.target.keys():
        found = _with_texts_alone(found)
    same_target = _without_code(manifest.identity.target) == _without_code(found.contents.target)
    if manifest.drift is not None and same_target:
        work = Work(manifest.fingerprints.work, found.work.trials, found.work.slots)
        parts = {**found.fingerprints, "target": manifest.fingerprints.target, "drift": manifest.fingerprints.drift}
        found = replace(found, work=work, fingerprints=parts, drift=manifest.drift, id=run_id(found.spec.name, parts))
    if manifest.fingerprints.work in found.work.digests:
        return replace(found, place=rundir.path) if found.id == manifest.id else found
    changes = "; ".join(identity_changes(manifest.identity, found.contents)) or "it is another eval"
    raise UsageError(
        f"the outputs of run {manifest.id} do not fit this eval: {changes}",
        remedy="Grading never calls the target; `holdfast eval` runs what depends on the change.",
    )
