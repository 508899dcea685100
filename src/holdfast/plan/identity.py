"""The identity of a run: everything that its keys are made of, from the eval file and one pass over the dataset."""

from __future__ import annotations

import os
import platform
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.canonical import digest, digest_bytes
from holdfast.conversation.turns import Script
from holdfast.data.checks import misspelled_fields
from holdfast.data.columns import name_graders
from holdfast.data.dataset import Dataset
from holdfast.data.survey import Survey, survey_dataset
from holdfast.errors import ConfigError, Problem
from holdfast.graders.build import grader_identity, grader_places, threshold
from holdfast.plan.keys import run_id, work_digest
from holdfast.plan.plan import Slot, Work
from holdfast.spec.eval import TARGET, fields_of_grader, fields_of_target
from holdfast.spec.fingerprint import SESSION_FILE, noting_files, take_unknown
from holdfast.spec.plugins import load_reference
from holdfast.spec.redact import without_secrets
from holdfast.spec.template import normal_expression
from holdfast.spec.trial_limits import limits_identity
from holdfast.store.blobs import link_of, mode_of
from holdfast.store.files import slug
from holdfast.store.rundir import DatasetInfo, Fingerprints, Identity, Manifest, RunDir
from holdfast.targets.build import target_identity, target_sees_row
from holdfast.versions import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from holdfast.data.checks import RowCheck
    from holdfast.graders.build import GraderPlace
    from holdfast.spec.eval import Eval
    from holdfast.store.rundir import Drift


class RunIdentity(msgspec.Struct, frozen=True, dict=True):
    """An eval with everything that its keys are made of, after one pass over its dataset."""

    spec: Eval
    dataset: Dataset
    survey: Survey
    work: Work
    fingerprints: dict[str, Any]
    """digests of all that defines the run"""
    contents: Identity
    """the fingerprinted values, to explain what changed"""
    id: str
    stamp: tuple[tuple[int, int], ...]
    """of the dataset's files when they were read"""
    code: Mapping[str, frozenset[str]] = {}
    """files that identify the code which runs in this process, by part: `target`, or a grader; relative to the eval"""
    accepts_drift: bool = False
    """outputs are kept although files that code reads have changed"""
    drift: Drift | None = None
    unknown: tuple[str, ...] = ()
    """notes for a plan about what only a run can find out"""
    run_path: Path | None = None
    """the run directory, if it is known: a run may have been moved"""

    @cached_property
    def spelling_notices(self) -> list[str]:
        """Notices about fields of the rows that are spelled as other tools spell them."""
        fields = {name for names, _ in self.survey.shapes for name in names}
        return list(misspelled_fields(self.spec, fields))

    @cached_property
    def idle_notices(self) -> list[str]:
        """Notices about graders whose `where` is true for no row."""
        places = grader_places(self.spec)
        names = [places[number].name for number, rows in enumerate(self.survey.panels.rows()) if not rows]
        if not names:
            return []
        block = self.spec.dataset
        selected = block is not None and any((block.limit, block.offset, block.where, block.ids, block.tags))
        rows = "none of the selected rows" if selected else "no row"
        verb, whose = ("applies", "its") if len(names) == 1 else ("apply", "their")
        return [f"{name_graders(names)} {verb} to {rows}: check {whose} `where`"]

    @property
    def plan_notices(self) -> list[str]:
        """Everything that a plan has to say of the eval."""
        return [*self.idle_notices, *self.spelling_notices, *self.unknown]

    def directory(self, runs_dir: Path) -> RunDir:
        """Return the directory of this run."""
        if self.run_path is not None:
            return RunDir(self.run_path)
        return RunDir(runs_dir / slug(self.spec.name) / f"{slug(self.spec.target.label)}-{self.id}")


def identify(spec: Eval) -> RunIdentity:
    """Read the dataset once and derive the run's identity."""
    dataset = Dataset(spec, must_differ=not spec.same_prompt and not target_sees_row(spec))
    code: dict[str, set[Path]] = {}
    with noting_files() as code[TARGET]:
        conversation, target = Script.identity(spec), target_identity(spec)
        if spec.responder is not None:
            from holdfast.conversation.simulated_user import responder_identity  # which few evals need

            conversation["responder"] = responder_identity(spec)
    if (files := workspace_identity(spec)) is not None:
        conversation["workspace"] = files
    if limits := limits_identity(spec):
        conversation["limits"] = limits
    places = []
    for place in grader_places(spec):
        with noting_files() as code[place.name]:
            places.append((place, grader_identity(place, spec)))
    stamp, survey = dataset.stamp(), survey_dataset(dataset, _row_check(spec))
    identities = {place.name: identity for place, identity in places}
    work = Work(work_digest(conversation, target), spec.trials, _slots(spec, places))
    parts = {
        "dataset": survey.digest,
        "conversation": digest(conversation),
        "target": digest(target),
        "graders": {name: digest(value) for name, value in identities.items()},
        "trials": spec.trials,
    }
    if spec.checkpoints:
        parts["checkpoints"] = [[checkpoint.after_turn, checkpoint.stops] for checkpoint in spec.checkpoints]
    identity = Identity(conversation=conversation, target=target, graders=identities, trials=spec.trials)
    return RunIdentity(
        spec,
        dataset,
        survey,
        work,
        parts,
        identity,
        run_id(spec.name, parts),
        stamp,
        _relative_files(code, spec),
        unknown=take_unknown(),
    )


def _relative_files(code: Mapping[str, set[Path]], spec: Eval) -> dict[str, frozenset[str]]:
    """Return the files of code by their names from the eval's folder."""
    folder = os.path.realpath(spec.folder)
    return {
        part: frozenset(
            str(file) if file == SESSION_FILE else os.path.relpath(os.path.realpath(file), folder) for file in files
        )
        for part, files in code.items()
        if files
    }


def _row_check(spec: Eval) -> RowCheck | None:
    if spec.continuations is None:
        return None
    check: RowCheck | None = load_reference("holdfast.graders.likelihood:row_check")(spec)
    return check


def new_manifest(identity: RunIdentity, *, fresh: bool = False) -> Manifest:
    """Return the manifest of a run that begins now."""
    spec = identity.spec
    host = platform.uname()  # not `platform.platform()`, which starts a process to learn the processor's name
    return Manifest(
        id=identity.id,
        name=spec.name,
        target=spec.target.label,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        holdfast=__version__,
        python=platform.python_version(),
        platform=f"{host.system} {host.release} {host.machine}",
        fingerprints=Fingerprints(**identity.fingerprints, work=identity.work.digest),
        identity=identity.contents,
        fresh=fresh,
        drift=identity.drift,
        dataset=DatasetInfo(
            source=identity.dataset.source,
            digest=identity.survey.digest,
            count=identity.survey.count,
            revision=identity.dataset.revision,
        ),
        trials=spec.trials,
        eval_file=str(spec.document.path.resolve()) if spec.document.path else None,
        folder=str(spec.folder),
        eval=without_secrets(spec.document.data),
    )


def _slots(spec: Eval, places: list[tuple[GraderPlace, dict[str, Any]]]) -> tuple[Slot, ...]:
    visible = fields_of_target(spec)
    return tuple(slot_of(place, digest(identity), visible) for place, identity in places)


def slot_of(place: GraderPlace, fingerprint: str, visible: frozenset[str] | None) -> Slot:
    """Return a grader's slot; `visible` are the fields of a row that the target sees, None for all of them."""
    fields = fields_of_grader(place.block)
    return Slot(
        fingerprint,
        place.turn,
        place.stops,
        threshold(place.block),
        place.block.measures,
        visible is not None and (fields is None or not fields <= visible),
        place.votes,
        place.combine,
    )


def installed_code(identity: RunIdentity) -> list[str]:
    """Describe the installed code of an eval, which is identified by the version of its distribution."""
    contents = msgspec.to_builtins(identity.contents)
    return sorted({f"{module} ({distribution})" for module, distribution in _installed(contents)})


def _installed(node: Any) -> Iterator[tuple[str, str]]:
    if isinstance(node, list):
        for value in node:
            yield from _installed(value)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key == "source" and isinstance(value, dict):
                yield from ((name, version) for name, version in value.items() if not name.endswith(".py"))
            else:
                yield from _installed(value)


def common_files(spec: Eval) -> dict[str, Path | str]:
    """Return the initial files of every workspace: path in the workspace to file, or to the text of a link."""
    block = spec.workspace
    if block is None or block.folder is None:
        return {}
    folder = (spec.folder / block.folder).resolve()
    if not folder.is_dir():
        where = spec.document.where(("workspace", "folder"))
        problem = "not a folder" if folder.exists() else "no such folder"
        remedy = "Paths are relative to the eval file's folder."
        raise ConfigError([Problem(where, f"{folder}: {problem}")], remedy=remedy)
    return {
        path.relative_to(folder).as_posix(): link_of(path, folder) if path.is_symlink() else path
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def workspace_identity(spec: Eval) -> dict[str, Any] | None:
    """Return the part of every generation key that describes the workspace; None without a workspace."""
    if spec.workspace is None:
        return None
    contents = {
        name: path if isinstance(path, str) else digest_bytes(path.read_bytes()) + mode_of(path)
        for name, path in common_files(spec).items()
    }
    block = spec.workspace
    # Settings change which files graders see. Defaults are left out.
    settings = block.model_dump(include={"ignore", "max_size"}, exclude_defaults=True)
    if "ignore" in settings:
        settings["ignore"] = sorted(set(block.ignore))
    return {"folder": contents, "files": normal_expression(block.files), **settings}
