"""From an eval to an open run directory: who it is, what is there already, what is left to do."""

from __future__ import annotations

import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast import __version__
from holdfast.conversation.simulated_user import build_player
from holdfast.engine.parameters import check_parameters
from holdfast.errors import Fault, ResultsError, VersionError
from holdfast.graders.build import build_graders
from holdfast.plan.history import accept_drift, look_around, neighbours, with_outputs_of
from holdfast.plan.identity import Identified, identify
from holdfast.plan.plan import Plan
from holdfast.plan.reuse import adopt
from holdfast.spec.load import target_name
from holdfast.spec.redact import without_secrets
from holdfast.store.durable import advice_for, make_directory
from holdfast.store.index import Index
from holdfast.store.manifest import DatasetInfo, Fingerprints, Manifest
from holdfast.store.run_lock import hold
from holdfast.targets.build import build_target

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from holdfast.conversation.simulated_user import Player
    from holdfast.engine.options import Options
    from holdfast.graders.types import InstantGrader, WaitingGrader
    from holdfast.spec.load import Eval
    from holdfast.store.lease import RunLease
    from holdfast.store.rundir import RunDir
    from holdfast.targets.types import Target


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
        notice(f"the earlier run was archived to {place}")
    manifest = rundir.read_manifest()
    if manifest is None:
        manifest = manifest_of(found, fresh=options.fresh)
        opened.new = not rundir.path.exists()
        rundir.write_manifest(manifest)
    if (newer := rundir.newer(manifest)) is not None:
        notice(newer)
    with suppress(OSError, ResultsError, VersionError):
        if (metrics := rundir.read_metrics()) is not None and rundir.has_lost_lines(metrics):
            notice("lines are missing from this finished run's journals; doing that work again")
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
        fingerprints=Fingerprints(**found.parts, work=found.work_digest),
        identity=found.identity,
        fresh=fresh,
        drift=found.drift,
        dataset=DatasetInfo(
            source=found.dataset.source,
            digest=found.survey.digest,
            count=found.survey.count,
            revision=found.dataset.revision,
        ),
        trials=spec.trials,
        eval_file=str(spec.document.path.resolve()) if spec.document.path else None,
        folder=str(spec.folder),
        eval=without_secrets(spec.document.data),
    )
