"""`inputs.jsonl`: the files that users' code read in a run, as they were then.

Keys are made before code runs, so they do not contain what it reads. Instead a run's records count only while these
files are as they were; else the records that depend on them are stale. A line is on disk before the first record that
may depend on it.

A stale run keeps its directory and its numbers. The same command then works in another directory, which takes from the
stale run what does not depend on the file: everything for a file that only one grader reads, but its verdicts.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from holdfast.canonical import digest
from holdfast.plan.keys import run_id
from holdfast.spec.eval import TARGET, excluded_patterns
from holdfast.spec.fingerprint import SESSION_FILE
from holdfast.store.catalog import brief_runs
from holdfast.store.files import UNREADABLE, make_directory, replacing
from holdfast.store.journal import append_lines
from holdfast.store.lines import scan, seal
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from holdfast.plan.identity import RunIdentity
    from holdfast.spec.eval import Eval

_NAME: Final = "inputs"
_LARGE: Final = 16 << 20
"""minimum size in bytes of a file that is not read again while its size and time stay the same"""


class Input(Struct, frozen=True):
    """A file that code read: a line of `inputs.jsonl`."""

    source: str
    """the user's file that read it, relative to the eval's folder"""
    path: str
    """the file, relative to the eval's folder"""
    digest: str | None
    """of its content, or of its code for Python; null if there was no such file; empty if it has changed since"""
    size: int = 0
    """bytes"""
    mtime: int = 0
    """time of its last change, in nanoseconds since the epoch"""
    product: bool | UnsetType = UNSET
    """true if the file is not an input, since the code itself, or a program it starts, writes it"""


_decoder: Final = msgspec.json.Decoder(Input)


def read_inputs(rundir: RunDir) -> list[Input]:
    """Read the inputs of a run, of all its writers."""
    inputs = []
    for line in chain.from_iterable(map(scan, rundir.journals(_NAME))):
        if line.sound:
            with suppress(*UNREADABLE):
                inputs.append(_decoder.decode(line.data))
    return inputs


def append_inputs(folder: Path, inputs: Iterable[Input]) -> None:
    """Append to the inputs in a folder of journals; return when they are on disk."""
    lines = b"".join(seal(msgspec.json.encode(each)) for each in inputs)
    if lines:
        make_directory(folder)
        append_lines(folder / f"{_NAME}.jsonl", lines)


def mend_inputs(folder: Path) -> None:
    """Remove a torn line, which the next one would be appended to. The caller is the only writer."""
    path = folder / f"{_NAME}.jsonl"
    lines = list(scan(path))
    if not all(line.sound for line in lines):
        with replacing(path) as file:
            file.write(b"".join(line.data + b"\n" for line in lines if line.sound))


class InputState(NamedTuple):
    """Changes since a run in the files that its code read."""

    parts: Mapping[str, str]
    """by part, `target` or a grader: the reason, in words"""
    contents: Mapping[str, str | None]
    """digests of all files that were read, as they are now"""
    current: list[Input]
    """records of files that are as they were"""


_FRESH: Final = InputState({}, {}, [])


def stale_parts(rundir: RunDir, identity: RunIdentity) -> InputState:
    """Return the stale parts of a run."""
    if not identity.code:
        return _FRESH
    inputs = read_inputs(rundir)
    products = {each.path for each in inputs if each.product is True}
    inputs = [each for each in inputs if each.path not in products and not is_excluded(each.path, identity.spec)]
    contents: dict[str, str | None] = {}
    changed: list[Input] = []
    for each in inputs:
        if each.path not in contents:
            contents[each.path] = digest_now(identity.spec.folder / each.path, each)
        if each.digest != contents[each.path]:
            changed.append(each)
    parts: dict[str, str] = {}
    for part, files in identity.code.items() if changed else ():
        sources = set(files)
        for each in inputs:
            extend_sources(sources, each)
        reasons = [
            f"{each.path} changed, which {Path(each.source).name} read" for each in changed if each.source in sources
        ]
        if reasons:
            parts[part] = "; ".join(dict.fromkeys(reasons))
    if identity.accepts_drift:
        parts.pop(TARGET, None)
    current = inputs if identity.accepts_drift else [each for each in inputs if each not in changed]
    return InputState(parts, contents, current)


def extend_sources(sources: set[str], read: Input) -> None:
    """Add a module that code of these files imported in a way that reading does not show.

    Inputs come in the order of reading: a module is opened before its code opens anything.
    """
    if read.source in sources and read.path.endswith(".py"):
        sources.add(read.path)


def choose_run(identity: RunIdentity, runs_dir: Path) -> RunIdentity:
    """Return the identity with the directory whose records count: a different directory if the usual one is stale."""
    own = identity.directory(runs_dir)
    stale = stale_parts(own, identity)
    if not stale.parts:
        return identity
    contents, base = dict(stale.contents), _without_state(identity.fingerprints)
    for path, brief in brief_runs(runs_dir, besides=own.path):
        parts: dict[str, Any] = dict(brief.fingerprints)
        state = parts.get("inputs")
        if state is None or brief.name != identity.spec.name or _without_state(parts) != base:
            continue
        other = stale_parts(RunDir(path), identity)
        if not other.parts:
            return with_state(identity, state)
        contents |= other.contents
    return with_state(identity, digest(contents))


def with_state(identity: RunIdentity, state: str) -> RunIdentity:
    """Return the identity of a run that began after files which code reads had changed."""
    parts = {**identity.fingerprints, "inputs": state}
    return replace(identity, fingerprints=parts, id=run_id(identity.spec.name, parts), run_path=None)


def _without_state(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in parts.items() if key not in ("inputs", "work")}


def relative(path: str, folder: Path) -> str:
    """Return a file as records name it: from the eval's folder, so that a project may be moved."""
    return path if path == str(SESSION_FILE) else os.path.relpath(os.path.realpath(path), os.path.realpath(folder))


def is_excluded(path: str, spec: Eval) -> bool:
    """Return True if the eval file says that a file is no input: `files: ["!cache/*"]`."""
    return any(fnmatchcase(path, pattern) for pattern in excluded_patterns(spec))


def digest_now(path: Path, recorded: Input | None = None) -> str | None:
    """Return the current digest of a file; None if the file does not exist.

    A large file is not read again if its size and time have not changed.
    """
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    same = recorded is not None and (status.st_size, status.st_mtime_ns) == (recorded.size, recorded.mtime)
    if recorded is not None and recorded.digest and same and status.st_size >= _LARGE:
        return recorded.digest
    return _digest(path, (status.st_size, status.st_mtime_ns, status.st_ino))


@lru_cache(maxsize=20_000)
def _digest(path: Path, _stamp: tuple[int, int, int]) -> str | None:
    from holdfast.spec.fingerprint import content_digest  # which evals without code need not import

    return content_digest(path)
