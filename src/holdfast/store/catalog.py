"""Find and summarize the runs below a runs directory. Other files and folders there are skipped.

Summaries of many runs are cached (`store.home`). They are valid while the run's files look unchanged: inodes, sizes
and times. A file that was just written may change again without looking different, so its run is not cached.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar

import msgspec
from xxhash import xxh3_128_hexdigest

from holdfast.errors import Fault, NoSuchRun, ResultsError, UsageError, VersionError
from holdfast.store.files import if_present, open_binary
from holdfast.store.home import HomeDb
from holdfast.store.lease import is_held
from holdfast.store.lines import scan, scan_raw, search
from holdfast.store.records import SCHEMA_VERSION
from holdfast.store.rundir import ARCHIVE, RunDir
from holdfast.store.shared import unwanted_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from holdfast.store.metrics import Metrics
    from holdfast.store.rundir import Manifest

T = TypeVar("T")

_LISTED: Final = 10
"""runs that an error lists"""
_FORM: Final = 1
"""to be changed when runs are read differently, which invalidates the cache"""
_MANY: Final = 200
"""runs that have to be read again before caching is worth a write"""
_MOST_CACHED: Final = 64
"""runs directories and purposes for which runs are cached"""
_SETTLED_SECONDS: Final = 2.0
"""minimum age of a file, in seconds, at which another write is sure to change its time"""


class Stamp(NamedTuple):
    """How some files look."""

    looks: str
    settled: bool
    """another write would make them look different; False if there are no files"""


def _stamp_of(stats: Iterable[os.stat_result]) -> Stamp:
    """Return how files look, in the order in which they are given."""
    newest, looks = 0.0, []
    for stat in stats:
        looks.append(f"{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}")
        if stat.st_mtime > newest:
            newest = stat.st_mtime
    settled = bool(looks) and time.time() - newest > _SETTLED_SECONDS
    return Stamp(xxh3_128_hexdigest("\n".join(looks).encode()), settled)


class _Cache(Generic[T]):
    """Cached facts about the runs below a directory, for one purpose."""

    def __init__(self, root: Path, purpose: str, kind: type[T]) -> None:
        name = os.fsencode(f"{_FORM}\n{SCHEMA_VERSION}\n{root.absolute()}")
        self._shelf = f"runs {purpose} {xxh3_128_hexdigest(name)}"
        self._decode = msgspec.msgpack.Decoder(tuple[str, kind]).decode  # type: ignore[valid-type]
        with HomeDb() as home:
            self._cached = home.get_all(self._shelf)
        self._kept: set[bytes] = set()
        self._new: dict[bytes, bytes] = {}

    def get(self, path: str, look: Callable[[T], Stamp | None], read: Callable[[], tuple[Stamp, T]]) -> T:
        """Return the cached facts about a run, or else the result of `read`.

        `look` returns the current stamp of the files that the cached facts depend on, or None if a file is gone; `read`
        returns the facts with the stamp from before reading.
        """
        name = os.fsencode(path)
        with suppress(KeyError, msgspec.DecodeError):
            looks, value = self._decode(self._cached[name])
            stamp = look(value)
            if stamp is not None and stamp.looks == looks:
                if stamp.settled:
                    self._kept.add(name)
                return value
        stamp, value = read()
        if stamp.settled:
            self._new[name] = msgspec.msgpack.encode((stamp.looks, value))
        return value

    def save(self) -> None:
        """Store the facts that were read, if there are enough to be worth a write."""
        if len(self._new) >= _MANY:
            with HomeDb() as home:
                home.put(self._shelf, self._new, keep=self._kept, most=_MOST_CACHED)


def find_runs(root: Path, *, archived: bool = False) -> Iterator[RunDir]:
    """Find every directory that has, or should have, a manifest: `<eval>/<run>`, or `<eval>/archived/<run>`."""
    return (RunDir(Path(path)) for path, _ in _run_folders(root, archived=archived))


def _run_folders(root: Path, *, archived: bool = False, all_or_raise: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield each directory, and True if it has a lease. Paths are strings, since there are thousands."""
    for name in _listing(str(root), all_or_raise)[0]:
        folder = f"{root}/{name}/{ARCHIVE}" if archived else f"{root}/{name}"
        names, files = _listing(folder, all_or_raise)
        for run in names:
            if archived or run != ARCHIVE:
                yield f"{folder}/{run}", f"{run}.lock" in files


def find_run(name: str, root: Path) -> Path:
    """Return a run by its path, its id, or the beginning of its id below a runs directory."""
    path = Path(name)
    if name and (path / "manifest.json").exists():
        return path
    ids = {run.path: run.path.name.rpartition("-")[2] for run in find_runs(root)}
    matches = [path for path, run_id in ids.items() if name and run_id.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        more = ", …" if len(matches) > _LISTED else ""
        raise UsageError(
            f"{name!r} is ambiguous, it matches {len(matches)} runs: {', '.join(map(str, matches[:_LISTED]))}{more}",
            remedy="Give more digits.",
        )
    if name and any((path / file).exists() for file in ("outputs.jsonl", "metrics.json")):
        raise UsageError(
            f"{name} has no manifest.json, which says what the run is",
            remedy="Run the `holdfast eval` command of this run again: it writes the manifest.",
        )
    from difflib import get_close_matches  # which only a wrong name needs

    close = get_close_matches(name, ids.values(), n=3)
    near = ", ".join(str(path) for path, run_id in ids.items() if run_id in close)
    hint = f"Runs are looked for in {root}; `holdfast ls` lists them."
    raise NoSuchRun(f"no run {name!r}", remedy=f"Did you mean {near}? {hint}" if near else hint)


class Brief(msgspec.Struct, frozen=True):
    """The part of a manifest that shows if another run can use this one."""

    name: str
    created: str
    count: int
    """rows of the dataset"""
    fingerprints: dict[str, Any]


def brief_runs(root: Path, *, besides: Path) -> Iterator[tuple[Path, Brief]]:
    """Yield the directories of other runs whose manifest can be read. Manifests of many runs are read once.

    Raises OSError if the disk fails: what cannot be read might be reused, and would be paid for again.
    """
    cache = _Cache(root, "briefs", Brief)
    for path, _ in _run_folders(root, all_or_raise=True):
        if Path(path) == besides:
            continue
        with suppress(UsageError), if_present():
            yield Path(path), cache.get(path, partial(_look_at_manifest, path), partial(_read_brief, path))
    cache.save()


def _look_at_manifest(path: str, _: Brief | None = None) -> Stamp:
    return _stamp_of([os.stat(f"{path}/manifest.json")])  # noqa: PTH116 - pathlib is slow for thousands of runs


def _read_brief(path: str) -> tuple[Stamp, Brief]:
    stamp, manifest = _look_at_manifest(path), RunDir(Path(path)).read_manifest()
    if manifest is None:
        raise FileNotFoundError(path)  # the run was removed meanwhile
    parts = msgspec.to_builtins(manifest.fingerprints)
    return stamp, Brief(manifest.name, manifest.created, manifest.dataset.count, parts)


def _listing(path: str, all_or_raise: bool) -> tuple[list[str], set[str]]:
    """Return the names of a folder's folders, sorted, and the names of its files."""
    folders, files = [], set()
    with if_present() if all_or_raise else suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            if _is_folder(entry):
                folders.append(entry.name)
            else:
                files.add(entry.name)
    return sorted(folders), files


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """True for a folder that is not hidden and whose name can be printed."""
    try:
        entry.name.encode()
        return not entry.name.startswith(".") and entry.is_dir()
    except (OSError, UnicodeEncodeError):
        return False  # such as a symbolic link to itself; the other entries are still listed


Status = Literal["running", "unfinished", "finished", "gate failed", "foreign", "damaged"]
"""`gate failed`: finished, and below its gate; `foreign`: written by a version that this Holdfast cannot read"""


class RunSummary(msgspec.Struct, frozen=True):
    """Summary of a run, for lists."""

    id: str
    name: str
    target: str
    dataset: str
    status: Status
    done: int
    """trials that have an output"""
    total: int
    score: float | None
    coverage: float | None
    size: int
    """bytes on disk"""
    written: float
    """time of the last write, seconds since the epoch"""
    created: str
    path: str
    low: float | None = None
    """lower end of the score's 95 % interval"""
    high: float | None = None
    cost: float | None = None
    """dollars of the outputs and judges; None if it is not known, or the run is not finished"""
    uncertain: int = 0
    """trials that wait for `holdfast resume --settle`"""

    @property
    def finished(self) -> bool:
        """True if the run is finished, whether or not it met its gate."""
        return self.status in ("finished", "gate failed")

    @property
    def progress(self) -> str:
        """Number of outputs and of trials, and of trials that a person has to settle."""
        uncertain = f" ({self.uncertain:,} uncertain)" if self.uncertain else ""
        return f"{self.done:,}/{self.total:,}{uncertain}" if self.total else "?"

    @property
    def score_text(self) -> str:
        """The overall score, or `-` if it is not known yet."""
        return "-" if self.score is None else f"{self.score:.3f}"

    @property
    def size_text(self) -> str:
        """The size on disk, with a suitable unit."""
        size = float(self.size)
        for unit in ("B", "kB", "MB"):
            if size < 1000:
                return f"{size:.0f} {unit}"
            size /= 1000
        return f"{size:.1f} GB"

    @property
    def age_seconds(self) -> float:
        """Seconds since the last write."""
        return max(0.0, time.time() - self.written)

    @property
    def age(self) -> str:
        """Time since the last write, with a suitable unit."""
        seconds = self.age_seconds
        for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
            if seconds >= size:
                return f"{seconds / size:.0f}{unit}"
        return f"{seconds:.0f}s"


_KEY_END = len('{"key":"sha256:') + 32
_OURS = ("manifest.json", "outputs.jsonl", "metrics.json")


class _Listed(msgspec.Struct, frozen=True, array_like=True):
    """A run in the catalog."""

    summary: RunSummary | None
    """None: it is not a run of Holdfast"""
    watched: list[str]
    """its folders, journals and logs, by the ends of their paths: while these look unchanged, so is the run

    All other files are replaced as a whole, which changes the time of their folder.
    """
    leased: bool
    """workers hold the run, or held it"""


def list_runs(root: Path, *, archived: bool = False) -> list[RunSummary]:
    """List the runs below a runs directory, the most recently written first. If there are many, they are cached."""
    cache = _Cache(root, "archived" if archived else "summaries", _Listed)
    runs = []
    for path, locked in _run_folders(root, archived=archived):
        listed = cache.get(path, partial(_look, path), partial(_list, path))
        summary = listed.summary
        if summary is not None:
            runs.append(_with_status(RunDir(Path(path)), summary) if locked or listed.leased else summary)
    cache.save()
    return sorted(runs, key=lambda run: (-run.written, run.name, run.id))


def _look(path: str, listed: _Listed) -> Stamp | None:
    try:
        return _stamp_of([os.lstat(path + end) for end in listed.watched])
    except OSError:
        return None


def _list(path: str) -> tuple[Stamp, _Listed]:
    files, folders = _files(path)
    watched = folders | {file: stat for file, stat in files.items() if file.endswith((".jsonl", ".log"))}
    summary = _summarize(Path(path), files) if _is_run(path, files) else None
    leased = any(file.endswith("/lease") for file in files)
    return _stamp_of(watched.values()), _Listed(summary, [name[len(path) :] for name in watched], leased)


def summarize_run(rundir: RunDir) -> RunSummary | None:
    """Summarize a run; None for a folder that is not a run of Holdfast."""
    files, _ = _files(str(rundir.path))
    return _with_status(rundir, _summarize(rundir.path, files)) if _is_run(str(rundir.path), files) else None


def _is_run(path: str, files: dict[str, os.stat_result]) -> bool:
    """True for a run of Holdfast. Other folders are not runs, whatever their subfolders hold."""
    return any(f"{path}/{name}" in files for name in _OURS)


def _with_status(rundir: RunDir, summary: RunSummary) -> RunSummary:
    """Return the summary of a run, which another process may be writing."""
    if not summary.total or not is_running(rundir):
        return summary
    uncertain = len(find_uncertain(rundir, running=True)) if summary.uncertain else 0
    return msgspec.structs.replace(summary, status="running", uncertain=uncertain)


def _summarize(path: Path, files: dict[str, os.stat_result]) -> RunSummary:
    """Summarize a run only from its files."""
    rundir = RunDir(path)
    manifest: Manifest | None = None
    metrics: Metrics | None = None
    ended: Status = "finished"
    unread: Status = "damaged"
    try:
        with suppress(ResultsError):  # `holdfast eval` writes damaged numbers again, so the run counts as unfinished
            metrics = rundir.read_metrics()
        if metrics is not None and str(rundir.gate) in files:
            ended = finished_status(rundir)
        manifest = rundir.read_manifest()
    except VersionError:
        unread = "foreign"
    except (UsageError, OSError):
        pass  # listed as damaged
    common: dict[str, Any] = {
        "size": sum(stat.st_size for stat in files.values()),
        "written": max(stat.st_mtime for stat in files.values()),
        "path": str(rundir.path),
        "score": metrics.score if metrics else None,
        "coverage": metrics.coverage if metrics else None,
        "low": metrics.overall.low if metrics and metrics.overall else None,
        "high": metrics.overall.high if metrics and metrics.overall else None,
        "cost": (metrics.usage + metrics.judge_usage).cost if metrics else None,
        "done": metrics.outputs if metrics else _count_outputs(rundir),
    }
    if manifest is None:
        name = rundir.path.name
        return RunSummary(
            id=name.rpartition("-")[2],
            name=rundir.path.parent.name,
            target=name.rpartition("-")[0],
            dataset="?",
            status=unread,
            total=0,
            created="",
            **common,
        )
    status: Status = ended if metrics else "unfinished"
    if metrics and _lacks_lines(rundir, metrics):
        status, common["done"] = "damaged", _count_outputs(rundir)
    return RunSummary(
        id=manifest.id,
        name=manifest.name,
        target=manifest.target,
        dataset=", ".join(manifest.dataset.source),
        status=status,
        total=manifest.dataset.count * manifest.trials,
        created=manifest.created,
        uncertain=0 if metrics else len(find_uncertain(rundir)),
        **common,
    )


def find_uncertain(rundir: RunDir, *, running: bool = False) -> set[str]:
    """Return the keys of trials that wait for a person; if the run is `running`, without calls that may be in flight.

    Journals are only searched, not read, if no call in them must not happen twice.
    """
    marks = {"errors": b'"kind":"uncertain"', "steps": b'"kind":"intent"'}
    if all(next(search(path, words), None) is None for name, words in marks.items() for path in rundir.journals(name)):
        return set()
    try:
        return set(rundir.load(repair=False).uncertain_trials(running=running))
    except Fault:
        return set()  # a journal was replaced meanwhile


def _lacks_lines(rundir: RunDir, metrics: Metrics) -> bool:
    """True if journals are shorter than the report says, or cannot be looked at."""
    try:
        return rundir.has_lost_lines(metrics)
    except OSError:
        return True


def finished_status(rundir: RunDir) -> Status:
    """Return the status of a finished run, by the result of its gate."""
    try:
        gate = rundir.read_gate()
    except ResultsError:
        return "damaged"
    return "finished" if gate is None or gate.passed else "gate failed"


def is_running(rundir: RunDir) -> bool:
    """True if a process seems to write a run."""
    return is_held(rundir.lease) or any(map(is_held, rundir.workers.glob("*/lease")))


def _files(path: str) -> tuple[dict[str, os.stat_result], dict[str, os.stat_result]]:
    """Return the files and folders below a folder, including itself, with their looks before they are listed."""
    files: dict[str, os.stat_result] = {}
    folders: dict[str, os.stat_result] = {}
    remaining = [path]
    while remaining:
        folder = remaining.pop()
        with suppress(OSError):
            look = os.lstat(folder)
            with os.scandir(folder) as entries:
                folders[folder] = look
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        remaining.append(entry.path)
                        continue
                    with suppress(OSError):  # a live run's temporary file may be gone by now
                        files[entry.path] = entry.stat(follow_symlinks=False)
    return files, folders


def is_surely_ours(run: RunSummary) -> bool:
    """True if a run may be deleted without being named: its manifest is sound, or it holds an output that we sealed."""
    if run.status not in ("damaged", "foreign"):
        return True
    with suppress(OSError):
        return any(line.sound for path in RunDir(Path(run.path)).journals("outputs") for line in scan(path))
    return False


def _count_outputs(rundir: RunDir) -> int:
    first, *others = rundir.journals("outputs")
    if not others:
        return _count_lines(first)
    keys: set[bytes] = set()  # two workers may have written an output for the same trial
    with suppress(OSError):
        for path in (first, *others):
            unwanted = {b'{"key":"%b' % key.encode() for key in unwanted_keys(path)}
            keys.update(start for _, line in scan_raw(path) if (start := line[:_KEY_END]) not in unwanted)
    return len(keys)


def _count_lines(path: Path) -> int:
    count = 0
    with suppress(OSError), open_binary(path, buffering=0) as file:
        while chunk := file.read(1 << 20):
            count += chunk.count(b"\n")
    return count
