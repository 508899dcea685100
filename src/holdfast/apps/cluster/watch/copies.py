"""Copies of runs on clusters, for commands that read runs: `$HOLDFAST_HOME/fetched/HOST/PATH`.

Only what changed since the last time is fetched. A copy is always a run as a reader may find it: journals hold whole
lines (after a kill, also the beginning of one, which readers skip), and `metrics.json` is there only with the journals
and results that it describes. So a fetch may be killed at any time, and the next one continues where it stopped.

The cluster lists sizes and times of modification, `metrics.json` first: journals only grow, so they hold at least what
it counts. Every part of a file is read with a few bytes before it, which must be those that the copy has; if they are
not, the file was truncated or replaced, and is fetched again.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import tarfile
import time
from contextlib import suppress
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote

import msgspec

from holdfast.apps.cluster.remote.invocation import write
from holdfast.apps.cluster.watch.find import RunPlace, look_up
from holdfast.apps.cluster.watch.status import read_files
from holdfast.errors import ClusterError, HoldfastError, Unreachable, UsageError
from holdfast.store.files import make_directory, sync
from holdfast.store.home import home_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.apps.cluster.remote.registry import InvocationRegistry
    from holdfast.apps.cluster.remote.transport import Completed

RECORD: Final = "fetched.json"
"""the file in a copy that names the original"""
_JOURNALS: Final = ("errors.jsonl", "grades.jsonl", "outputs.jsonl", "steps.jsonl", "batches.jsonl", "run.log")
_REPORT: Final = ("gate.json", "results.json", "metrics.json")
"""in the order in which they appear; a run with `metrics.json` is finished"""
_OTHERS: Final = ("manifest.json", "exports.json")
_BLOB: Final = re.compile(r"[0-9a-f]{2}/[0-9a-f]{20,}")
_NAME: Final = re.compile(rf"(workers/[^/\s.][^/\s]*/)?({'|'.join(map(re.escape, (*_JOURNALS, *_REPORT, *_OTHERS)))})")

_PORTION: Final = 16 << 20
"""bytes that are fetched by one command"""
_PORTION_TIMEOUT: Final = 600.0
_OVERLAP: Final = 32
"""bytes before a part that are fetched again: in a journal they contain the checksum of a line"""
_TRIES: Final = 5
"""how often a fetch starts again because the run changed during it"""
_NOTABLE: Final = 4 * _PORTION
"""minimum size of a fetch that is announced"""

_GONE, _REFUSED, _CHANGED = 44, 45, 46

_LIST: Final = (
    r"""
cd -- "$1" 2>/dev/null || { test -e "$1" && exit 45; exit 44; }
test -e manifest.json || exit 44
for folder in . workers workers/*/ files; do
    test ! -d "$folder" || { test -r "$folder" && test -x "$folder"; } || exit 45
done
for name in """
    + " ".join((*reversed(_REPORT), *_JOURNALS, *_OTHERS))
    + r"""; do
    find "./$name" workers/*/"$name" -maxdepth 0 -type f -printf '%s %T@ %p\n' 2>/dev/null
done
test ! -d files || echo files
"""
)

_READ: Final = r"""
cd -- "$1" 2>/dev/null || exit 44
while read -r offset length name; do
    test -e "$name" || exit 46
    test -r "$name" || exit 45
    test "$(stat -c %s -- "$name")" -ge $((offset + length)) || exit 46
    printf '%s %s %s\n' "$offset" "$length" "$name"
    tail -c "+$((offset + 1))" -- "$name" | head -c "$length"
done
find ./metrics.json -maxdepth 0 -printf '%s %T@' 2>/dev/null
true
"""

_LIST_BLOBS: Final = r"""cd -- "$1/files" && find . -mindepth 2 -maxdepth 2 -type f -printf '%s %P\n'"""
_READ_BLOBS: Final = r"""cd -- "$1/files" && tar -cf - -T -"""


class _Stamp(msgspec.Struct, frozen=True, array_like=True):
    """The version of a file on the cluster."""

    size: int
    modified: str


class _Record(msgspec.Struct, frozen=True):
    """The content of `fetched.json`."""

    host: str
    path: str
    time: float
    files: dict[str, _Stamp]


class _Part(NamedTuple):
    """A part of a file on the cluster."""

    name: str
    offset: int
    length: int


class _Changed(Exception):
    """The run has changed while it was fetched."""


def find_places(text: str, registry: InvocationRegistry | None = None) -> dict[str, RunPlace]:
    """Return the places of the runs that a text names, each by its own name: `480d.0` for a task of `480d`.

    Raises as `find` does, and UsageError if there is no run yet.
    """
    try:
        subject, run = look_up(text, registry)
    except Unreachable as error:
        remote = re.fullmatch(r"([^:/]+):(/.*)", text)
        copy = None if remote is None else _copy_path(remote[1], remote[2])
        raise Unreachable(error.message, remedy=_copy_hint(error, copy)) from error
    if run is not None:
        return {text: run}
    assert subject is not None
    files = read_files(subject.transport, subject.directory)
    tasks = range(len(files.invocation.tasks)) if subject.task is None else [subject.task]
    places: dict[RunPlace, str] = {}
    for number in tasks:
        state = files.states.get(number)
        if state is not None and state.run_dir is not None:
            name = subject._replace(task=number).name
            places.setdefault(RunPlace(subject.transport, state.run_dir), name)
    if not places:
        raise UsageError(f"{subject.name} has no run yet", remedy=f"`holdfast status {subject.name}` says why.")
    return {name: place for place, name in places.items()}


def fetch_run(place: RunPlace, note: Callable[[str], None]) -> Path:
    """Bring the copy of a run up to date and return its path; a run on this machine is returned as it is."""
    if place.is_here:
        return Path(place.path)
    copy = _copy_path(place.transport.host, place.path)
    make_directory(copy.parent)
    with copy.with_name(f".{copy.name}.fetching").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for _ in range(_TRIES):
            with suppress(_Changed):
                return _Fetch(place, copy, note).run()
    raise ClusterError(
        f"{place.name} changed {_TRIES} times while it was fetched",
        remedy="Try again when nobody repairs it or starts it from scratch.",
    )


def _copy_path(host: str, path: str) -> Path:
    """Return the path of the copy of a run, whether it exists or not."""
    parts = PurePosixPath(path).parts[1:]
    if ".." in parts:
        raise UsageError(f"{host}:{path} contains `..`", remedy="Name the directory by its full path.")
    return home_directory().joinpath("fetched", quote(host, safe="@"), *parts)


def _read_record(copy: Path) -> _Record | None:
    try:
        return msgspec.json.decode((copy / RECORD).read_bytes(), type=_Record)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _copy_hint(error: HoldfastError, copy: Path | None) -> str | None:
    """Return the remedy of an error, with the path of the copy if there is one."""
    record = None if copy is None else _read_record(copy)
    if record is None:
        return error.remedy
    fetched = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.time))
    return f"{error.remedy or ''} The copy of {fetched} can be read by its path: {copy}".strip()


class _Fetch:
    """One pass over a run on a cluster."""

    def __init__(self, place: RunPlace, copy: Path, note: Callable[[str], None]) -> None:
        self._place = place
        self._copy = copy
        self._note = note

    def run(self) -> Path:
        """Bring the copy up to date. Raises `_Changed` if the run changes meanwhile."""
        record = _read_record(self._copy)
        stamps, has_blobs = self._list()
        known = {} if record is None else record.files
        changed = {
            name: stamp for name, stamp in stamps.items() if known.get(name) != stamp or not self._local(name).exists()
        }
        removed = [name for name in self._local_names() if name not in stamps]
        if not changed and not removed:
            return self._copy
        kept = {name: self._kept(name, stamp.size) for name, stamp in changed.items()}
        total = sum(stamp.size - kept[name] for name, stamp in changed.items())
        if total >= _NOTABLE:
            self._note(f"fetching {total / 1e6:,.0f} MB of {self._place.name}")
        if any(name in _REPORT for name in (*changed, *removed)) or "metrics.json" not in stamps:
            for name in reversed(_REPORT):
                self._local(name).unlink(missing_ok=True)
            changed |= {name: stamps[name] for name in _REPORT if name in stamps}
        for name in removed:
            self._local(name).unlink(missing_ok=True)
        self._fetch_files(changed, kept, stamps.get("metrics.json"))
        if has_blobs:
            self._fetch_blobs()
        for name in _REPORT:
            if name in changed:
                self._arriving(name).replace(self._local(name))
        fetched = _Record(self._place.transport.host, self._place.path, time.time(), stamps)
        write(self._copy / RECORD, fetched)
        return self._copy

    def _local(self, name: str) -> Path:
        return self._copy / name

    def _local_names(self) -> Iterator[str]:
        """Yield the files of the copy that the run must have too; exports may have been made only from the copy."""
        for name in (*_JOURNALS, *_REPORT, "manifest.json"):
            for path in (*self._copy.glob(name), *self._copy.glob(f"workers/*/{name}")):
                yield str(path.relative_to(self._copy))

    def _arriving(self, name: str) -> Path:
        """Return the temporary path of a file until it is complete."""
        path = self._local(name)
        return path.with_name(f".{path.name}.arriving")

    def _start_over(self) -> None:
        doomed = self._copy.with_name(f".{self._copy.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        self._copy.rename(doomed)
        shutil.rmtree(doomed)

    def _ask(self, script: str, input: bytes = b"") -> Completed:  # noqa: A002 - as in `Transport.run`
        """Run a script in the run directory."""
        place = self._place
        try:
            done = place.transport.run(["sh", "-c", script, "sh", place.path], input=input, timeout=_PORTION_TIMEOUT)
        except Unreachable as error:
            message = f"cannot fetch {place.path}: {error.message}"
            raise Unreachable(message, remedy=_copy_hint(error, self._copy)) from error
        if done.code == _CHANGED:
            raise _Changed
        if done.code == _GONE:
            raise UsageError(
                f"there is no run at {place.name}: it has no manifest.json",
                remedy="`holdfast status ID` shows where the runs of an invocation are.",
            )
        if done.code == _REFUSED:
            raise ClusterError(
                f"{place.name} cannot be read: permission denied",
                remedy=f"Its owner can let the group read it: chmod -R g+rX {place.path}",
            )
        if done.code != 0:
            raise ClusterError(
                f"{place.name} cannot be read: {done.stderr.strip() or f'exit code {done.code}'}",
                remedy=f"`ssh {place.transport.host} ls {place.path}` shows what is there.",
            )
        return done

    def _list(self) -> tuple[dict[str, _Stamp], bool]:
        """Return the files of the run, and whether it has contents of workspaces."""
        stamps: dict[str, _Stamp] = {}
        lines = self._ask(_LIST).text.splitlines()
        for line in lines:
            size, _, rest = line.partition(" ")
            modified, _, name = rest.partition(" ")
            name = name.removeprefix("./")
            if _NAME.fullmatch(name):
                stamps[name] = _Stamp(int(size), modified)
        return stamps, "files" in lines

    def _kept(self, name: str, size: int) -> int:
        """Return how many bytes of a file the copy has already; an unfinished last line is cut off."""
        path = self._local(name)
        if path.name not in _JOURNALS or not path.exists():
            return 0
        kept = _cut_to_lines(path)
        if kept > size:  # lines that the copy has were cut out there
            path.unlink()
            return 0
        return kept

    def _fetch_files(self, changed: dict[str, _Stamp], kept: dict[str, int], metrics: _Stamp | None) -> None:
        """Append to journals, and write other files; the report stays aside."""
        for name in changed:
            self._local(name).parent.mkdir(parents=True, exist_ok=True)
        for leftover in self._copy.glob(".*.arriving"):
            leftover.unlink()
        # The manifest comes first: another one means another run.
        names = sorted(changed, key=lambda name: name != "manifest.json")
        parts = [part for name in names for part in _parts(name, kept.get(name, 0), changed[name].size)]
        for portion in _portions(parts):
            listing = "".join(f"{part.offset} {part.length} {part.name}\n" for part in portion)
            data = self._ask(_READ, listing.encode()).stdout
            position = 0
            for part in portion:
                head = f"{part.offset} {part.length} {part.name}\n".encode()
                if data[position : position + len(head)] != head:
                    raise _Changed
                position += len(head) + part.length
                content = data[position - part.length : position]
                if part.name == "manifest.json" and self._is_another_run(part, content, changed[part.name].size):
                    self._start_over()
                    raise _Changed
                self._take(part, content)
            if metrics is not None and data[position:].split(b" ") != [b"%d" % metrics.size, metrics.modified.encode()]:
                raise _Changed
        for name in changed:
            path = self._local(name)
            if path.name in _JOURNALS:
                _cut_to_lines(path)
            elif path.name not in _REPORT:
                self._arriving(name).replace(path)

    def _is_another_run(self, part: _Part, content: bytes, size: int) -> bool:
        """Return True if the copy has another manifest, from a run that was archived."""
        path = self._local(part.name)
        if not path.exists():
            return False
        manifest = path.read_bytes()
        return len(manifest) != size or manifest[part.offset : part.offset + part.length] != content

    def _take(self, part: _Part, content: bytes) -> None:
        """Add a part to its file, or raise `_Changed` if it does not continue it."""
        path = self._local(part.name)
        if path.name not in _JOURNALS:
            path = self._arriving(part.name)
        with path.open("ab+") as file:
            known = file.tell() - part.offset
            file.seek(part.offset)
            if known < 0 or file.read(known) != content[:known]:
                path.unlink()
                raise _Changed
            file.write(content[known:])

    def _fetch_blobs(self) -> None:
        """Fetch contents of workspaces. They are named by their digests and never change."""
        folder = self._copy / "files"
        missing = []
        for line in self._ask(_LIST_BLOBS).text.splitlines():
            size, _, name = line.partition(" ")
            if _BLOB.fullmatch(name) and not _has_size(folder / name, int(size)):
                missing.append(_Part(name, 0, int(size)))
        for portion in _portions(missing):
            archive = self._ask(_READ_BLOBS, "".join(f"{part.name}\n" for part in portion).encode()).stdout
            with tarfile.open(fileobj=BytesIO(archive)) as tar:
                for member in tar:
                    if not member.isreg() or not _BLOB.fullmatch(member.name):
                        continue
                    content = tar.extractfile(member)
                    assert content is not None
                    path = folder / member.name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content.read())  # one that is cut off has another size


def _parts(name: str, kept: int, size: int) -> Iterator[_Part]:
    """Yield the parts of a file that are to be fetched, none larger than a portion; an empty file has one."""
    end = kept
    while end < size or end == kept:
        start = max(0, end - _OVERLAP)
        end = min(size, start + _PORTION)
        yield _Part(name, start, end - start)
        if end == size:
            return


def _portions(parts: list[_Part]) -> Iterator[list[_Part]]:
    """Yield the parts, as many at once as one command fetches."""
    portion: list[_Part] = []
    length = 0
    for part in parts:
        if portion and length + part.length > _PORTION:
            yield portion
            portion, length = [], 0
        portion.append(part)
        length += part.length
    if portion:
        yield portion


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def _cut_to_lines(path: Path) -> int:
    """Cut off an unfinished last line and return the size that is left, all of it on the medium."""
    with path.open("rb+") as file:
        end = size = file.seek(0, 2)
        while end > 0:
            start = max(0, end - (1 << 16))
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)
        sync(file.fileno())
        return end
