"""The identity of a run: everything that its keys are made of, from the eval file and one pass over the dataset."""

from __future__ import annotations

import platform
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast import __version__
from holdfast.canonical import digest, digest_bytes
from holdfast.conversation.script import Script
from holdfast.data.dataset import Dataset, Survey
from holdfast.data.panels import name_graders
from holdfast.errors import ConfigError, Problem
from holdfast.graders.build import grader_identity, grader_places, revise, stale_rows, threshold
from holdfast.plan.keys import run_id, work_digests
from holdfast.plan.plan import Slot, Work
from holdfast.spec.load import target_name
from holdfast.spec.redact import without_secrets
from holdfast.store.blobs import link_of, mode_of
from holdfast.store.durable import slug
from holdfast.store.manifest import DatasetInfo, Fingerprints, Identity, Manifest
from holdfast.store.rundir import RunDir
from holdfast.targets.build import target_identity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.graders.build import GraderPlace
    from holdfast.spec.load import Eval
    from holdfast.store.manifest import Drift


_LARGE: Final = 2 << 20
"""bytes of a dataset's files from which on its survey is stored"""


class RunIdentity(msgspec.Struct, frozen=True, dict=True):
    """An eval whose dataset was read once, with everything that its keys are made of."""

    spec: Eval
    dataset: Dataset
    survey: Survey
    work: Work
    fingerprints: dict[str, Any]
    """digests of all that defines the run"""
    contents: Identity
    """the values behind the fingerprints, to explain what changed"""
    id: str
    stamp: tuple[tuple[int, int], ...]
    """of the dataset's files when they were read"""
    drift: Drift | None = None
    run_path: Path | None = None
    """the run directory, if it is known: a run may have been moved"""

    @property
    def work_digest(self) -> str:
        """The work digest of the manifest: that of rows with values that are not texts, if there are any."""
        return (self.work.typed_digest if self.survey.typed else None) or self.work.digest

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

    def directory(self, runs_dir: Path) -> RunDir:
        """Return the directory of this run."""
        if self.run_path is not None:
            return RunDir(self.run_path)
        return RunDir(runs_dir / slug(self.spec.name) / f"{slug(target_name(self.spec.target))}-{self.id}")


def identify(spec: Eval) -> RunIdentity:
    """Read the dataset once and derive the run's identity."""
    dataset = Dataset(spec)
    conversation, target = Script.identity(spec), target_identity(spec)
    if spec.responder is not None:
        from holdfast.conversation.simulated_user import responder_identity  # which few evals need

        conversation["responder"] = responder_identity(spec)
    if (files := workspace_identity(spec)) is not None:
        conversation["workspace"] = files
    places = [(place, grader_identity(place, spec)) for place in grader_places(spec)]
    stamp, survey = dataset.stamp(), _survey(spec, dataset)
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
    identity = Identity(conversation=conversation, target=target, graders=identities, trials=spec.trials)
    return RunIdentity(spec, dataset, survey, work, parts, identity, run_id(spec.name, parts), stamp)


def _survey(spec: Eval, dataset: Dataset) -> Survey:
    stale, check = stale_rows(spec), None
    if spec.continuations is not None:
        from holdfast.graders.likelihood import row_check  # which few evals need

        check = row_check(spec)
    if sum(size for size, _ in dataset.stamp()) < _LARGE:
        return dataset.survey(stale, check)
    from holdfast.data.survey_cache import survey_dataset

    return survey_dataset(spec, dataset, stale, check)


def new_manifest(identity: RunIdentity, *, fresh: bool = False) -> Manifest:
    """Return the manifest of a run that begins now."""
    spec = identity.spec
    host = platform.uname()  # not `platform.platform()`, which starts a process to learn the processor's name
    return Manifest(
        id=identity.id,
        name=spec.name,
        target=target_name(spec.target),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        holdfast=__version__,
        python=platform.python_version(),
        platform=f"{host.system} {host.release} {host.machine}",
        fingerprints=Fingerprints(**identity.fingerprints, work=identity.work_digest),
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


def _slots(places: list[tuple[GraderPlace, dict[str, Any]]], survey: Survey) -> tuple[tuple[Slot, ...], dict[str, Any]]:
    """Return the graders' slots, and their identities by name."""
    slots, identities = [], {}
    reread = survey.panels.reread()
    for number, (place, identity) in enumerate(places):
        other = revise(identity)
        identities[place.name] = identity if other is None or number not in reread else other
        slots.append(
            Slot(
                digest(identity),
                place.turn,
                place.stops,
                threshold(place.block),
                place.block.measures,
                None if other is None else digest(other),
                place.votes,
                place.combine,
            )
        )
    return tuple(slots), identities


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
    """Return the part of every generation key that describes the workspace; None if there is none."""
    if spec.workspace is None:
        return None
    contents = {
        name: path if isinstance(path, str) else digest_bytes(path.read_bytes()) + mode_of(path)
        for name, path in common_files(spec).items()
    }
    return {"folder": contents, "files": spec.workspace.files}
