"""`manifest.json`: the definition of a run."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from holdfast.store.records import SCHEMA_VERSION


class Fingerprints(Struct, frozen=True, kw_only=True):
    """Digests of everything that defines a run."""

    dataset: str
    conversation: str
    target: str
    graders: dict[str, str] = {}
    trials: int = 1
    checkpoints: list[list[int | bool]] | UnsetType = UNSET
    """turn of each checkpoint, and whether its failure ends the conversation"""
    inputs: str | UnsetType = UNSET
    """digest of files that code reads, if an earlier run of the same eval read other contents"""
    drift: str | UnsetType = UNSET
    """digest of the target's code, if outputs were kept although it had changed"""
    work: str
    """digest of conversation and target: the part of a generation key that all samples share"""


class _Target(Struct):
    """The fields of a target's identity that are read by name."""

    kind: str
    source: dict[str, str] = {}
    files: dict[str, str] = {}


class Identity(Struct, frozen=True, kw_only=True):
    """The fingerprinted values, from which a plan explains what changed."""

    conversation: dict[str, Any]
    target: dict[str, Any]
    """`kind`, and the other values that define a target of that kind"""
    graders: dict[str, dict[str, Any]]
    trials: int = 1

    def __post_init__(self) -> None:
        msgspec.convert(self.target, _Target)


class DatasetInfo(Struct, frozen=True, kw_only=True):
    """The dataset as it was read when the run began."""

    source: list[str] = []
    digest: str = ""
    count: int
    """samples"""
    revision: str | None = None
    """commit of a Hugging Face dataset"""


class Drift(Struct, frozen=True, kw_only=True):
    """A change of the target's code despite which outputs were kept."""

    lender: str = field(name="from")
    """the run whose outputs were kept"""
    old: dict[str, str] = field(name="was")
    """files and their digests"""
    new: dict[str, str] = field(name="is")


class Manifest(Struct, frozen=True, kw_only=True):
    """The definition of a run. Written first, once, and never changed."""

    schema_version: str = field(name="schemaVersion", default=SCHEMA_VERSION)
    """version of the file, MAJOR.MINOR"""
    id: str
    """id of the run: the eight digits of its directory"""
    name: str
    """name of the eval"""
    target: str
    """name of the target"""
    created: str
    """when the run began, in UTC"""
    holdfast: str
    """version of Holdfast"""
    python: str
    """version of Python"""
    platform: str
    """operating system and machine"""
    fingerprints: Fingerprints
    """digests of everything that defines the run: `dataset`, `conversation`, `target`, each of `graders`, `trials`"""
    identity: Identity
    """the fingerprinted values, from which a plan explains what changed"""
    fresh: bool = False
    """true if the run was begun with `--fresh` and takes nothing from other runs"""
    drift: Drift | None = None
    """only if outputs were kept although the target's code had changed: the run that they are `from`, and the digests
    of the files as it `was` and `is`; else null"""
    dataset: DatasetInfo
    """`source`, `digest` and `count` of the dataset, and `revision`, the commit of a Hugging Face dataset"""
    trials: int
    """number of trials per sample"""
    eval_file: str | None
    """path of the eval file; null for an eval from Python"""
    folder: str
    """folder of the eval file, which its paths are relative to"""
    eval: dict[str, Any]
    """the eval as it was read, without secrets"""


def decode_manifest(data: bytes) -> Manifest:
    """Read a manifest."""
    return msgspec.json.decode(data, type=Manifest)
