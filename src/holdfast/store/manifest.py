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
    reread: list[str] | UnsetType = UNSET
    """graders that read some rows differently than earlier versions did"""
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
    """The values behind the fingerprints, from which a plan explains what changed."""

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
    id: str
    name: str
    target: str
    created: str
    holdfast: str
    """version of Holdfast"""
    python: str
    platform: str
    fingerprints: Fingerprints
    identity: Identity
    fresh: bool = False
    """begun with --fresh: the run takes nothing from other runs"""
    drift: Drift | None = None
    """set when outputs were kept although the target's code had changed"""
    dataset: DatasetInfo
    trials: int
    eval_file: str | None
    folder: str
    """folder of the eval file, which its paths are relative to"""
    eval: dict[str, Any]
    """the eval file as it was read, without secrets"""


decode_manifest = msgspec.json.Decoder(Manifest).decode
