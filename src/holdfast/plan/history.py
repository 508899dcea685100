"""Earlier runs: which of their outputs and grades a run can reuse, and what has changed since the nearest one.

Of runs that cannot lend anything, only the manifests are read. Nothing here writes.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from holdfast.canonical import digest
from holdfast.errors import Fault, UsageError
from holdfast.graders.build import grader_places
from holdfast.plan.changes import RowChanges, identity_changes
from holdfast.plan.inputs import stale_parts, with_state
from holdfast.plan.keys import run_id
from holdfast.plan.plan import Work, make_plan
from holdfast.plan.reuse import Borrowed, Lender, Offer, borrow, choose_set
from holdfast.spec.eval import TARGET
from holdfast.store.catalog import brief_runs
from holdfast.store.files import UNREADABLE, advice_for, if_present
from holdfast.store.lines import scan
from holdfast.store.rundir import Drift, RunDir

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from holdfast.plan.identity import RunIdentity
    from holdfast.plan.plan import Plan
    from holdfast.store.catalog import Brief
    from holdfast.store.index import RunIndex
    from holdfast.store.rundir import Manifest

OtherRun = tuple["RunDir", "Manifest"]

_MOST_COMPARED: Final = 50
"""runs of the same eval that are compared with a new one, to explain what has changed"""


class _First(msgspec.Struct):
    key: str
    sample: str
    trial: int
    row: str | None = None


def other_runs(
    identity: RunIdentity, rundir: RunDir, runs_dir: Path, *, alike: int | None = _MOST_COMPARED
) -> list[OtherRun]:
    """Return the other runs that can lend, and up to `alike` others of the same eval, nearest first.

    Of the rest, not even the manifests are read again.
    """
    try:
        return list(_other_runs(identity, rundir, runs_dir, alike))
    except OSError as error:
        raise Fault(
            "disk",
            f"cannot read other runs, whose outputs might be reused: {error}",
            remedy=f"{advice_for(error)} Then run the same command again. Or do all work here, with --fresh.",
        ) from error


def _other_runs(identity: RunIdentity, rundir: RunDir, runs_dir: Path, alike: int | None) -> Iterator[OtherRun]:
    briefs = brief_runs(runs_dir, besides=rundir.path)
    others = sorted(briefs, key=lambda run: _nearness(identity, run[1]), reverse=True)
    compared = set([path for path, brief in others if brief.name == identity.spec.name][:alike])
    for path, brief in others:
        if path in compared or brief.fingerprints["work"] == identity.work.digest:
            other = RunDir(path)
            with suppress(UsageError), if_present():  # the run may be gone by now
                if (manifest := other.read_manifest()) is not None:
                    yield other, manifest


def _nearness(identity: RunIdentity, brief: Brief) -> tuple[bool, int, int, str]:
    """Return a sort key: same eval, most equal parts, most rows, newest."""
    same = sum(identity.fingerprints.get(part) == value for part, value in brief.fingerprints.items())
    return brief.name == identity.spec.name, same, brief.count, brief.created


def plan_with_reuse(
    identity: RunIdentity,
    index: RunIndex,
    runs_dir: Path,
    others: Iterable[OtherRun],
    *,
    grades: bool = True,
    known_done: bytes = b"",
) -> tuple[Borrowed, Plan]:
    """Return the records to borrow, without verdicts unless `grades`, and the plan with its reasons.

    A run that kept outputs in spite of drift answers new rows with other code under the same keys, so it lends only to
    runs that did the same.
    """
    candidates = list(others)
    lenders = [
        (run_label(other, runs_dir), other)
        for other, manifest in candidates
        if manifest.fingerprints.work == identity.work.digest and (identity.drift or not manifest.drift)
    ]
    stale = {name: stale_parts(other, identity) for name, other in lenders}
    places = [place.name for place in grader_places(identity.spec)]
    borrowed = borrow(
        identity.survey,
        identity.work,
        index,
        [
            Offer(name, other, frozenset(number for number, grader in enumerate(places) if grader in stale[name].parts))
            for name, other in lenders
            if TARGET not in stale[name].parts
        ],
        grades=grades,
        known_done=known_done,
    )
    choose_set(index, borrowed)
    for name in borrowed.names:
        borrowed.inputs += stale[name].current
    if borrowed.shared is not None:
        known_done = borrowed.shared.known_done
    plan = make_plan(identity.survey, identity.work, index, borrowed, known_done)
    if index.rows["outputs"] or plan.complete:
        return borrowed, plan
    named_alike = [run for run in candidates if run[1].name == identity.spec.name]
    if not named_alike:
        return borrowed, plan
    # If several share equally much, the first is the nearest.
    nearest = max(
        named_alike, key=lambda run: (plan.lenders.get(run_label(run[0], runs_dir), 0), _likeness(identity, run))
    )
    shared = borrowed.shared
    if shared is not None and shared.name != run_label(nearest[0], runs_dir):
        shared = None
    reasons = [*_reasons(identity, *nearest, shared), *stale_parts(nearest[0], identity).parts.values()]
    return borrowed, replace(plan, reasons=tuple(dict.fromkeys(reasons)))


def _likeness(identity: RunIdentity, run: OtherRun) -> int:
    """Return a number that is higher the less has changed since a run."""
    manifest = run[1]
    same_rows = manifest.fingerprints.dataset == identity.survey.digest
    changes = len(identity_changes(manifest.identity, identity.contents))
    return same_rows - changes - len(stale_parts(run[0], identity).parts)


def run_label(rundir: RunDir, runs_dir: Path) -> str:
    """Return a run's name for people: eval and directory."""
    path = rundir.path
    return path.relative_to(runs_dir).as_posix() if path.is_relative_to(runs_dir) else str(path)


def _reasons(identity: RunIdentity, rundir: RunDir, manifest: Manifest, shared: Lender | None) -> list[str]:
    same_rows = manifest.fingerprints.dataset == identity.survey.digest
    reasons = identity_changes(manifest.identity, identity.contents)
    if not same_rows:
        reasons.append(
            _row_changes(identity, rundir, manifest) if shared is None else _changes_since(shared, identity, manifest)
        )
    return reasons


def _changes_since(shared: Lender, identity: RunIdentity, manifest: Manifest) -> str:
    """Describe how the rows changed since a run whose journals are shared: only rows that differ are looked at."""
    decoder = msgspec.json.Decoder(_First)
    first = (decoder.decode(line.read()) for line in shared.unwanted.values())
    relabelled = 0
    gone = set()
    for each in first:
        if each.trial == 1 and each.key in shared.relabelled:
            relabelled += 1
        elif each.trial == 1:
            gone.add(each.sample)
    missing = set(shared.missing) if gone else set()
    rows = enumerate(identity.dataset.rows()) if gone else ()
    changed = sum(identity.dataset.sample(row).id in gone for position, row in rows if position in missing)
    changes = RowChanges(len(shared.missing) - changed, changed, len(gone) - changed, relabelled)
    return _describe(changes, unfinished=shared.recorded < manifest.dataset.count * manifest.trials)


def _describe(changes: RowChanges, *, unfinished: bool) -> str:
    """Describe how the rows changed since a run. Outputs that an unfinished run lacks say nothing about its rows."""
    if unfinished:
        known = RowChanges(0, changes.changed, 0, changes.relabelled)
        return str(known) or "other rows chosen, or not all were run"
    return str(changes) or "rows in another order"


def _row_changes(identity: RunIdentity, rundir: RunDir, manifest: Manifest) -> str:
    """Describe how the rows changed since the nearest run, by that run's keys, so that a new prompt does not matter."""
    decoder, earlier = msgspec.json.Decoder(_First), dict[str, _First]()
    with suppress(OSError, *UNREADABLE):  # an unreadable row counts as missing below
        for path in rundir.journals("outputs"):
            for line in scan(path):
                if line.sound:
                    first = decoder.decode(line.data)
                    if first.trial == 1:
                        earlier[first.sample] = first
    unfinished = len(earlier) < manifest.dataset.count
    work = Work.of_run(manifest)
    new = changed = relabelled = 0
    for sample in identity.dataset:
        if sample.id not in earlier:
            new += 1
            continue
        first = earlier.pop(sample.id)
        same = first.key == work.key(sample.digest, 1) if first.row is None else first.row == sample.row
        if not same and first.key == work.key(sample.asked, 1):
            relabelled += 1
        elif not same:
            changed += 1
    return _describe(RowChanges(new, changed, len(earlier), relabelled), unfinished=unfinished)


def accept_drift(identity: RunIdentity, rundir: RunDir, runs_dir: Path) -> RunIdentity:
    """Keep the keys of the nearest run whose target differs only in its code, which the manifest records.

    If this code has finished a run, there is nothing to accept. An unfinished run does not count: if --accept-drift
    was forgotten, the eval can be started again with it.
    """
    if rundir.finished:
        return identity
    begun = rundir.manifest.exists()
    for other, manifest in other_runs(identity, rundir, runs_dir, alike=None):
        old, new = manifest.identity.target, identity.contents.target
        same_target = _without_code(old) == _without_code(new)
        same_talk = manifest.fingerprints.conversation == identity.fingerprints["conversation"]
        if manifest.name != identity.spec.name or not same_target or not same_talk:
            continue
        if manifest.fingerprints.work == identity.work.digest and not manifest.drift:
            if other.finished:
                return identity
            begun = True
            continue
        drift = Drift(lender=run_label(other, runs_dir), old=_code(old), new=_code(new))
        parts = {**identity.fingerprints, "target": manifest.fingerprints.target, "drift": digest(drift.new)}
        work = Work(manifest.fingerprints.work, identity.work.trials, identity.work.slots)
        return replace(identity, work=work, fingerprints=parts, drift=drift, id=run_id(identity.spec.name, parts))
    if begun:
        return identity
    raise UsageError(
        "--accept-drift: there is no earlier run of this eval that differs only in the target's code",
        remedy="Run it without --accept-drift.",
    )


def _without_code(target: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in target.items() if key not in ("source", "files")}


def _code(target: dict[str, Any]) -> dict[str, Any]:
    return {**target.get("source", {}), **target.get("files", {})}


def match_outputs(lender: OtherRun, identity: RunIdentity) -> RunIdentity:
    """Return the identity with which a run's outputs are valid; raise UsageError with the changes if they are not.

    If the run belongs to this eval, the identity names the run's directory, wherever that is.
    """
    rundir, manifest = lender
    same_target = _without_code(manifest.identity.target) == _without_code(identity.contents.target)
    if manifest.drift is not None and same_target:
        work = Work(manifest.fingerprints.work, identity.work.trials, identity.work.slots)
        parts = {**identity.fingerprints, "target": manifest.fingerprints.target, "drift": manifest.fingerprints.drift}
        identity = replace(
            identity, work=work, fingerprints=parts, drift=manifest.drift, id=run_id(identity.spec.name, parts)
        )
    if manifest.fingerprints.work == identity.work.digest:
        if isinstance(state := manifest.fingerprints.inputs, str):
            identity = with_state(identity, state)
        changes = stale_parts(rundir, identity).parts.get(TARGET, "")
        if not changes:
            return replace(identity, run_path=rundir.path) if identity.id == manifest.id else identity
    else:
        changes = "; ".join(identity_changes(manifest.identity, identity.contents)) or "it is another eval"
    raise UsageError(
        f"the outputs of run {manifest.id} do not fit this eval: {changes}",
        remedy="Grading never calls the target; `holdfast eval` runs what depends on the change.",
    )
