"""A run directory: its files, its manifest, and its archive."""

from __future__ import annotations

import shlex
import shutil
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from holdfast.errors import ManifestError, ResultsError, VersionError
from holdfast.store.files import (
    LARGEST,
    LONGEST_LINE,
    UNREADABLE,
    make_directory,
    open_binary,
    read_file,
    read_lines,
    remove_leftovers,
    replacing,
    sync_directory,
)
from holdfast.store.index import RunIndex, Seen, StaleIndexError
from holdfast.store.index_files import INDEX, open_index, private_folder, refresh_index
from holdfast.store.lines import cut_damage
from holdfast.store.records import SCHEMA_VERSION
from holdfast.store.shared import FOLDER, journal_size
from holdfast.versions import check_version, parse_version

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.store.metrics import GateOutcome, Metrics, TrialResult

T = TypeVar("T")

LEDGER: Final = "batches"
"""The journal of batches: see `holdfast.plugins.batches.ledger`."""
ARCHIVE: Final = "archived"
"""Folder, next to an eval's runs, to which `--fresh` moves the old runs."""


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


class RunPolicy(Struct, frozen=True, kw_only=True):
    """The policy of a run. Each field is named like its option of `holdfast eval`."""

    fresh: bool = False
    """archive the earlier run and start from scratch"""
    retry_failed: bool = False
    """retry the errors of a run that was finished with them"""
    accept_errors: bool = False
    """finish even if some trials have errors, which lower the coverage and not the scores"""
    accept_drift: bool = False
    """keep outputs even if the target's code has changed"""
    skip_graders: bool = False
    log_samples: bool = False
    """write the transcripts to samples.jsonl when the run is over"""
    output_path: str | None = None
    """a folder for the results and transcripts when the run is over"""

    @property
    def policy(self) -> dict[str, Any]:
        """The fields of the policy by name, to make another struct with the same policy."""
        return {name: getattr(self, name) for name in RunPolicy.__struct_fields__}


class _Version(Struct):
    schema_version: Any = field(name="schemaVersion", default=None)


class RunDir:
    """A run on disk. Writing needs the run's lease; reading does not."""

    def __init__(self, path: Path) -> None:
        if path.name in ("", ".."):
            path = path.resolve()  # `.` has no name, from which the lease's name is made
        self.path = path
        self.manifest = path / "manifest.json"
        self.results = path / "results.json"
        self.metrics = path / "metrics.json"
        self.gate = path / "gate.json"
        self.log = path / "run.log"
        self.aside = path / "set-aside"
        self.files = path / "files"
        self.workers = path / "workers"
        self.claims = path / "claims"
        self.batches = path / "batches"

    @property
    def lease(self) -> Path:
        """The lease, next to the directory, so that it stays when the directory is archived."""
        return self.path.with_name(f"{self.path.name}.lock")

    @property
    def finished(self) -> bool:
        """True if the run has its metrics."""
        return self.metrics.exists()

    def journals(self, name: str) -> Iterator[Path]:
        """Yield the files of one kind of journal, of all writers."""
        yield self.path / f"{name}.jsonl"
        for folder, pattern in ((self.path / FOLDER, f"*/{name}.*.jsonl"), (self.workers, f"*/{name}.jsonl")):
            if folder.is_dir():  # as in few runs: looking takes less time than preparing a pattern
                yield from sorted(folder.glob(pattern))

    @property
    def has_batches(self) -> bool:
        """True if requests of the run were made in batches."""
        return any(path.exists() for path in self.journals(LEDGER))

    def journal_bytes(self) -> dict[str, int]:
        """Sizes of the journals that a report is made of, summed over all writers, as recorded in `metrics.json`."""
        return {f"{name}_bytes": self._size(name) for name in ("outputs", "grades")}

    def _size(self, name: str) -> int:
        return sum(map(journal_size, self.journals(name)))

    def has_lost_lines(self, metrics: Metrics) -> bool:
        """True if a journal is shorter than it was for the report. Journals only grow, so lines are missing."""
        sizes = self.journal_bytes()
        pairs = [(getattr(metrics.timing, name), size) for name, size in sizes.items()]
        return any(before is not None and now < before for before, now in pairs)  # None in numbers so far

    def load(self, *, repair: bool, verify: bool = False) -> RunIndex:
        """Return the index of the run; `repair` only while holding the lease. `verify`: read every line anew.

        Damaged bytes are noted in the index; with `repair` they are moved out of the journals.
        """
        if repair:
            self._remove_leftovers()
        index = self._read_all(repair=repair) if verify else self._open_index(repair=repair)
        if not repair or not index.damage:
            return index
        own = [spot for spot in index.damage if spot.lender is None]
        if any(not spot.torn for spot in index.damage):
            # Before lines move. It may also have places of lines that are damaged now, in a lender's journals, too.
            shutil.rmtree(self.path / INDEX, ignore_errors=True)
        cut_damage(own, self.aside)
        if any(not spot.torn for spot in own):
            index = self._read_all(repair=True)
            index.damage = [*own, *index.damage]  # damage in a shared journal is noticed again
        return index

    def refresh(self, index: RunIndex) -> RunIndex:
        """Return an index of the journals as they are now, for the process that holds the lease and has written them.

        It is published if much was written.
        """
        try:
            refreshed = refresh_index(index, self, self.path / INDEX, durable=False)
        except StaleIndexError:
            refreshed = self._open_index(repair=True)
            refreshed.keep_rules_of(index)
        refreshed.damage.clear()  # of the last line, which another process may be writing
        return refreshed

    def follow(self, index: RunIndex, seen: Seen | None = None) -> RunIndex:
        """Return an index with what other processes have appended since; `seen` is as for `RunIndex.read`.

        It is a new one if a journal has become shorter: its writer cuts off what it could not sync.
        """
        try:
            index.read(seen=seen)
        except StaleIndexError:
            fresh = self._open_index(repair=False)
            fresh.keep_rules_of(index)
            return fresh
        return index

    def _open_index(self, *, repair: bool) -> RunIndex:
        own = self.path / INDEX
        if repair:
            return open_index(self, [own], own, durable=True)
        private = self.private_index
        return open_index(self, [own, private], private, durable=False)

    @property
    def private_index(self) -> Path:
        """The folder in `$HOLDFAST_HOME` for indexes of this run that readers make."""
        return private_folder(self.path)

    def _read_all(self, *, repair: bool) -> RunIndex:
        index = RunIndex(self.journals)
        index.read(durable=repair, verify=True)
        return index

    def _remove_leftovers(self) -> None:
        """Remove temporary files that killed processes have left."""
        for place in ("", "batches/", f"{FOLDER}/*/"):
            for leftover in self.path.glob(f"{place}.*.tmp"):
                with suppress(OSError):
                    leftover.unlink()
        for folder in (self.files, *self.path.glob("export/*/")):  # others may write there without the lease
            remove_leftovers(folder)

    def write_manifest(self, manifest: Manifest) -> None:
        """Create the directory and write its manifest."""
        make_directory(self.path)
        with replacing(self.manifest) as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2))

    def read_manifest(self) -> Manifest | None:
        """Read the manifest; None if it is not written yet."""
        try:
            data = read_file(self.manifest)
        except FileNotFoundError:
            return None
        try:
            version = msgspec.json.decode(data).get("schemaVersion")
            if version is not None:
                parse_version(version)
                self._check(self.manifest, version)
            manifest = msgspec.json.decode(data, type=Manifest)
        except (*UNREADABLE, ValueError, AttributeError) as error:
            raise ManifestError(
                f"{self.manifest}: not a manifest ({error})",
                remedy=f"Set it aside with: holdfast repair {self.path}",
            ) from error
        self._check(self.manifest, version)
        return manifest

    def read_metrics(self) -> Metrics | None:
        """Read the metrics; None if they are not written yet. Raises ResultsError if they are damaged."""
        data = self._read(self.metrics, dict[str, Any])
        if data is None:
            return None
        from holdfast.store.metrics import Metrics  # which a run that begins does not have

        try:
            return Metrics.from_dict(data)
        except UNREADABLE as error:
            raise self._damaged(self.metrics, error) from error

    def read_gate(self) -> GateOutcome | None:
        """Read the result of the run's gate; None without a gate. Raises ResultsError if it is damaged."""
        if not self.gate.exists() or not self.finished:
            return None
        from holdfast.store.metrics import GateOutcome

        return self._read(self.gate, GateOutcome)

    def write_gate(self, gate: GateOutcome | None) -> None:
        """Store the result of the run's gate, if it has changed; None: the run has no gate."""
        with suppress(ResultsError, VersionError):  # an unreadable file is written again
            if self.read_gate() == gate:
                return
        if gate is None:
            self.gate.unlink(missing_ok=True)
            return
        with replacing(self.gate) as file:
            file.write(msgspec.json.format(msgspec.json.encode(gate), indent=2) + b"\n")

    def read_results(self) -> list[TrialResult]:
        """Read every trial with its verdicts. Raises ResultsError if they are missing or damaged."""
        return list(self.iterate_results())

    def iterate_results(self) -> Iterator[TrialResult]:
        """Yield every trial with its verdicts, without holding all of them."""
        if not self.results.exists():
            raise self._damaged(self.results, "there is no such file")
        from holdfast.store.metrics import TrialResult

        decoder = msgspec.json.Decoder(TrialResult)
        file = open_binary(self.results)
        try:
            lines = read_lines(file, self.results)
            head = next(lines, b"")
            if not head.endswith(b'"trials":[\n'):  # not written by us, with a trial per line
                from holdfast.store.metrics import Results

                results = self._read(self.results, Results)
                yield from () if results is None else results.trials
                return
            self._check(self.results, msgspec.json.decode(head[:-1] + b"]}", type=_Version).schema_version)
            line = b""
            for line in lines:
                if not line.startswith(b"]"):
                    yield decoder.decode(line.rstrip(b",\n"))
            if not line.startswith(b"]"):
                raise self._damaged(self.results, "its end is missing")
        except UNREADABLE as error:
            raise self._damaged(self.results, error) from error
        finally:
            with suppress(OSError):  # the reader may have stopped long ago and does not care
                file.close()

    def newer(self, manifest: Manifest) -> str | None:
        """Return a notice if a newer Holdfast began the run."""
        return self._check(self.manifest, manifest.schema_version)

    def _read(self, path: Path, kind: type[T]) -> T | None:
        try:
            data = read_file(path, LONGEST_LINE if path == self.results else LARGEST)
        except FileNotFoundError:
            return None
        try:
            version = msgspec.json.decode(data, type=_Version).schema_version
            self._check(path, version)
            return msgspec.json.decode(data, type=kind)
        except UNREADABLE as error:
            raise self._damaged(path, error) from error

    def _damaged(self, path: Path, reason: object) -> ResultsError:
        return ResultsError(
            f"{path}: cannot be read ({reason})",
            remedy=f"Remove it with `holdfast repair {shlex.quote(str(self.path))}`, then run the `holdfast eval` "
            "command of this run, which writes it again.",
        )

    def _check(self, path: Path, version: object) -> str | None:
        return check_version(path, version, SCHEMA_VERSION)

    def set_manifest_aside(self) -> None:
        """Move a damaged manifest out of the way; the eval that made the run can write it again."""
        make_directory(self.aside)
        self.manifest.replace(self.aside / self.manifest.name)
        sync_directory(self.aside)
        sync_directory(self.path)

    def reopen(self) -> None:
        """Delete the report of a finished run, so that the run can continue."""
        for path in (self.metrics, self.gate, self.results):
            with suppress(FileNotFoundError):
                path.unlink()
        sync_directory(self.path)

    def end_rounds(self) -> None:
        """Delete how workers divided the trials of a run that is finished. Needs the run's lease."""
        shutil.rmtree(self.claims, ignore_errors=True)

    def forget_if_never_begun(self) -> bool:
        """Remove a run that holds nothing but its manifest and its log. Needs the run's lease."""
        with suppress(OSError):
            if {path.name for path in self.path.iterdir()} <= {self.manifest.name, self.log.name}:
                self.log.unlink(missing_ok=True)
                self.manifest.unlink()
                self.path.rmdir()
                return True
        return False

    def set_aside(self) -> Path | None:
        """Move the whole run to the archive and return its new path."""
        if not self.path.exists():
            return None
        archive = self.path.parent / ARCHIVE
        make_directory(archive)
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        destination = archive / f"{self.path.name}.{stamp}"
        number = 1
        while destination.exists():
            number += 1
            destination = archive / f"{self.path.name}.{stamp}-{number}"
        self.path.rename(destination)
        sync_directory(archive)
        sync_directory(self.path.parent)
        return destination
