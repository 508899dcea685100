"""From an eval to an open run directory: who it is, what is there already, what is left to do."""

from __future__ import annotations

import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast import __version__
from holdfast.canonical import digest
from holdfast.conversation.simulated_user import build_player, responder_identity
from holdfast.conversation.turns import Script
from holdfast.data.dataset import Dataset, Survey
from holdfast.engine.parameters import check_parameters
from holdfast.engine.workspace import workspace_identity
from holdfast.errors import Fault, VersionError
from holdfast.graders.build import build_graders, grader_identity, grader_places, revised, stale_rows, threshold
from holdfast.plan.history import accept_drift, look_around, neighbours, with_outputs_of
from holdfast.plan.keys import run_id, work_digests
from holdfast.plan.plan import Plan, Slot, Work
from holdfast.plan.reuse import adopt
from holdfast.spec.load import target_name
from holdfast.spec.redact import without_secrets
from holdfast.store.durable import advice_for, make_directory, slug
from holdfast.store.index import Index
from holdfast.store.run_lock import hold
from holdfast.store.rundir import Manifest, RunDir
from holdfast.targets.build import build_target, target_identity

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from holdfast.conversation.simulated_user import Player
    from holdfast.engine.options import Options
    from holdfast.graders.build import GraderPlace
    from holdfast.graders.types import InstantGrader, WaitingGrader
    from holdfast.spec.load import Eval
    from holdfast.store.lease import RunLease
    from holdfast.targets.types import Target


@dataclass(frozen=True)
class Identified:
    """An eval with its data read once: everything that its keys are made of."""

    spec: Eval
    dataset: Dataset
    survey: Survey
    work: Work
    parts: dict[str, Any]
    """digests of all that defines the run"""
    identity: dict[str, Any]
    """what the digests are made of, to say what changed"""
    id: str
    stamp: tuple[tuple[int, int], ...]
    """of the dataset's files when they were read"""
    drift: dict[str, Any] | None = None
    place: Path | None = None
    """where it is, when that is already known: a run may have been moved"""

    @property
    def work_digest(self) -> str:
        """The work digest that stands in the manifest: that of the rows with other values, if there are any."""
        return (self.work.typed_digest if self.survey.typed else None) or self.work.digest

    def directory(self, runs_dir: Path) -> RunDir:
        """Where this run lives."""
        if self.place is not None:
            return RunDir(self.place)
        return RunDir(runs_dir / slug(self.spec.name) / f"{slug(target_name(self.spec.target))}-{self.id}")


@dataclass(frozen=True)
class Parts:
    """What does the work, built but not opened."""

    target: Target | None
    """None: nothing is generated"""
    player: Player | None
    """who plays the user, if anybody does"""
    graders: list[InstantGrader | WaitingGrader]
    """in the order of the plan's slots"""

    @classmethod
    def build(cls, found: Identified, options: Options) -> Parts:
        """Whatever is wrong with target or graders is said here, before anything is written."""
        spec = found.spec
        if options.grade_only:
            parts = cls(None, None, build_graders(spec))
        else:
            parts = cls(build_target(spec), build_player(spec), build_graders(spec))
        check_parameters(found, parts.target, parts.player, parts.graders)
        return parts


@dataclass
class Opened:
    """A run directory that this process may write."""

    identified: Identified
    rundir: RunDir
    lease: RunLease
    index: Index
    plan: Plan
    lost: bool = False
    worker: str | None = None
    """which of the run's workers this process is; None: it has the run for itself"""
    new: bool = False
    """this process has made the directory"""

    @property
    def writes(self) -> Path:
        """Where this process keeps its journals."""
        return self.rundir.path if self.worker is None else self.rundir.workers / self.worker


def identify(spec: Eval) -> Identified:
    """Read the dataset once and derive who this run is."""
    dataset = Dataset(spec)
    conversation, target = Script.identity(spec), target_identity(spec)
    if (player := responder_identity(spec)) is not None:
        conversation["responder"] = player
    if (files := workspace_identity(spec)) is not None:
        conversation["workspace"] = files
    places = [
        (place, grader_identity(place.block, spec, spec.document.where(place.where))) for place in grader_places(spec)
    ]
    stamp, survey = dataset.stamp(), dataset.survey(stale_rows(spec))
    slots, identities = _slots(places, survey)
    texts, values = work_digests(conversation, target)
    if survey.typed:  # a run of its own: an earlier one is finished with answers to requests that held texts
        target["request_values"] = "JSON"
    work = Work(texts, spec.trials, slots, values)
    parts = {
        "dataset": survey.digest,
        "conversation": digest(conversation),
        "target": digest(target),
        "graders": {name: digest(value) for name, value in identities.items()},
        "trials": spec.trials,
    }
    if spec.checkpoints:
        parts["checkpoints"] = [[checkpoint.after_turn, checkpoint.stops] for checkpoint in spec.checkpoints]
    if reread := [
        name
        for number, (name, slot) in enumerate(zip(identities, slots, strict=True))
        if number in survey.panels.reread() and slot.revised is None  # else its identity says so already
    ]:
        parts["reread"] = reread  # a run of its own: an earlier one is finished with verdicts that do not hold
        identities |= {name: {**identities[name], "reread": True} for name in reread}
    identity = {"conversation": conversation, "target": target, "graders": identities, "trials": spec.trials}
    return Identified(spec, dataset, survey, work, parts, identity, run_id(spec.name, parts), stamp)


def _slots(places: list[tuple[GraderPlace, dict[str, Any]]], survey: Survey) -> tuple[tuple[Slot, ...], dict[str, Any]]:
    """The graders in their places, and what each of them is made of, by name."""
    slots, identities = [], {}
    reread = survey.panels.reread()
    for number, (place, identity) in enumerate(places):
        other = revised(identity)
        identities[place.name] = identity if other is None or number not in reread else other
        slots.append(
            Slot(
                digest(identity),
                place.turn,
                place.stops,
                threshold(place.block),
                place.block.measures,
                None if other is None else digest(other),
            )
        )
    return tuple(slots), identities


def open_run(
    found: Identified,
    options: Options,
    notice: Callable[[str], None],
    lease: RunLease | None = None,
) -> Opened:
    """Take the lease unless it is given, read what is there, say what is left. The caller releases the lease."""
    rundir = found.directory(options.runs_dir)
    opened = Opened(found, rundir, None, Index(), Plan(0, 0, 0, 0, 0))  # type: ignore[arg-type]  # filled below

    def lost() -> None:
        opened.lost = True

    try:
        make_directory(rundir.path.parent)
        opened.lease = lease or hold(rundir, options.wait, notice, lost)
        try:
            _fill(opened, options, notice)
        except BaseException:
            opened.lease.release()
            raise
    except OSError as error:
        raise Fault(
            "disk",
            f"cannot use {rundir.path}: {error.strerror or error}",
            remedy=f"{advice_for(error)} Or choose another place with --runs-dir.",
        ) from error
    return opened


def located(spec: Eval, options: Options) -> tuple[Identified, RunDir]:
    """Who the run of an eval is, and where, by what the command says of it."""
    found = identify(spec)
    if options.outputs_of is not None:
        found = with_outputs_of(options.outputs_of, found, grading=True)
    if options.accept_drift:
        found = accept_drift(found, found.directory(options.runs_dir), options.runs_dir)
    rundir = found.directory(options.runs_dir)
    wrong = found.survey.unsendable
    if wrong is not None and not options.grade_only and (options.fresh or rundir.read_manifest() is None):
        raise wrong  # a run that an earlier version has begun can still be shown, graded and exported
    return found, rundir


def planned(spec: Eval, options: Options) -> tuple[Identified, RunDir, Plan]:
    """What a run would do, and where, with nothing written."""
    found, rundir = located(spec, options)
    rundir.read_manifest()
    others = [] if options.fresh else neighbours(found, rundir, options.runs_dir)
    index = Index() if options.fresh else rundir.load(mend=False)
    _, plan = look_around(found, index, options.runs_dir, others)
    return found, rundir, plan


def _fill(opened: Opened, options: Options, notice: Callable[[str], None]) -> None:
    found, rundir = opened.identified, opened.rundir
    if options.fresh and (place := rundir.set_aside()):
        notice(f"the earlier run is kept in {place}")
    manifest = rundir.read_manifest()
    if manifest is None:
        manifest = manifest_of(found, fresh=options.fresh)
        opened.new = not rundir.path.exists()
        rundir.write_manifest(manifest)
    if (newer := rundir.newer(manifest)) is not None:
        notice(newer)
    with suppress(OSError, msgspec.DecodeError, VersionError):
        if rundir.has_lost_lines(rundir.read_metrics()):
            notice("lines are missing from this finished run's journals; doing what they held again")
    opened.index = rundir.load(mend=True)
    opened.index.outputs = {key: ref for key, ref in opened.index.outputs.items() if found.work.fits(ref)}
    for damage in opened.index.damage:
        notice(str(damage))
    if options.again:
        opened.index.verdicts.clear()
    others = [] if manifest.fresh else neighbours(found, rundir, options.runs_dir)
    if options.outputs_of is not None:
        others.insert(0, options.outputs_of)
    borrowed, opened.plan = look_around(found, opened.index, options.runs_dir, others, grades=not options.again)
    if borrowed:
        adopt(borrowed, rundir, opened.index)


def manifest_of(found: Identified, *, fresh: bool = False) -> Manifest:
    """What a new run says of itself."""
    spec = found.spec
    host = platform.uname()  # not `platform.platform()`, which starts a process to learn the processor's name
    return Manifest(
        id=found.id,
        name=spec.name,
        target=target_name(spec.target),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        holdfast=__version__,
        python=platform.python_version(),
        platform=f"{host.system} {host.release} {host.machine}",
        fingerprints={**found.parts, "work": found.work_digest},
        identity=found.identity,
        fresh=fresh,
        drift=found.drift,
        dataset={
            "source": found.dataset.source,
            "digest": found.survey.digest,
            "count": found.survey.count,
            "revision": found.dataset.revision,
        },
        trials=spec.trials,
        eval_file=str(spec.document.path.resolve()) if spec.document.path else None,
        folder=str(spec.folder),
        eval=without_secrets(spec.document.data),
    )
