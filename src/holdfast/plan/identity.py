"""Which run this is: everything that its keys are made of, from the eval file and one pass over the dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.canonical import digest, digest_bytes
from holdfast.conversation.script import Script
from holdfast.conversation.simulated_user import responder_identity
from holdfast.data.dataset import Dataset, Survey
from holdfast.errors import ConfigError, Problem
from holdfast.graders.build import grader_identity, grader_places, revised, stale_rows, threshold
from holdfast.plan.keys import run_id, work_digests
from holdfast.plan.plan import Slot, Work
from holdfast.spec.load import target_name
from holdfast.store.blobs import link_of, mode_of
from holdfast.store.durable import slug
from holdfast.store.manifest import Identity
from holdfast.store.rundir import RunDir
from holdfast.targets.build import target_identity

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.graders.build import GraderPlace
    from holdfast.spec.load import Eval
    from holdfast.store.manifest import Drift


@dataclass(frozen=True)
class Identified:
    """An eval with its data read once: everything that its keys are made of."""

    spec: Eval
    dataset: Dataset
    survey: Survey
    work: Work
    parts: dict[str, Any]
    """digests of all that defines the run"""
    identity: Identity
    """the values behind the digests, to explain what changed"""
    id: str
    stamp: tuple[tuple[int, int], ...]
    """of the dataset's files when they were read"""
    drift: Drift | None = None
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


def identify(spec: Eval) -> Identified:
    """Read the dataset once and derive who this run is."""
    dataset = Dataset(spec)
    conversation, target = Script.identity(spec), target_identity(spec)
    if (player := responder_identity(spec)) is not None:
        conversation["responder"] = player
    if (files := workspace_identity(spec)) is not None:
        conversation["workspace"] = files
    places = [(place, grader_identity(place, spec)) for place in grader_places(spec)]
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
    identity = Identity(conversation=conversation, target=target, graders=identities, trials=spec.trials)
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


def common_files(spec: Eval) -> dict[str, Path | str]:
    """What every workspace of an eval starts with: path in the workspace to file, or to what stands for a link."""
    block = spec.workspace
    if block is None or block.folder is None:
        return {}
    folder = (spec.folder / block.folder).resolve()
    if not folder.is_dir():
        where = spec.document.where(("workspace", "folder"))
        said = "not a folder" if folder.exists() else "no such folder"
        raise ConfigError([Problem(where, f"{folder}: {said}")], remedy="Paths are relative to the eval file's folder.")
    return {
        path.relative_to(folder).as_posix(): link_of(path, folder) if path.is_symlink() else path
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def workspace_identity(spec: Eval) -> dict[str, Any] | None:
    """What of the workspace can change an answer."""
    if spec.workspace is None:
        return None
    contents = {
        name: path if isinstance(path, str) else digest_bytes(path.read_bytes()) + mode_of(path)
        for name, path in common_files(spec).items()
    }
    return {"folder": contents, "files": spec.workspace.files}
