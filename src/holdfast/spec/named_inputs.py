"""`files` and `env` of an eval file: inputs of its code that a fingerprint of the code does not show.

Contents of files and digests of variables are part of the keys that depend on them: of outputs, of a grader's verdicts,
or of both. Values of variables may be secrets, so only digests are stored.
"""

from __future__ import annotations

import glob
import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.canonical import digest
from holdfast.errors import ConfigError, Problem
from holdfast.spec.fingerprint import content_digest, note_files
from holdfast.spec.validation import suggest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.spec.document import Location
    from holdfast.spec.eval import Eval

TARGET: Final = "target"
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def misnamed_parts(spec: Eval) -> Iterator[tuple[Location, str]]:
    """Yield parts under `files` and `env` that the eval does not have, and invalid names of variables."""
    parts = [TARGET, *dict.fromkeys(block.name for _, block in spec.placed_graders())]
    for key in ("files", "env"):
        named = getattr(spec, key)
        for part in named if isinstance(named, dict) else ():
            if part not in parts:
                yield (key, part), f"neither the target nor a grader has this name{suggest(part, parts)}"
    lists = [((part,), names) for part, names in spec.env.items()] if isinstance(spec.env, dict) else [((), spec.env)]
    for place, names in lists:
        for number, name in enumerate(names):
            if not _VARIABLE.fullmatch(name):
                message = f"{name!r} is not the name of an environment variable; give names without values"
                yield ("env", *place, number), message


def named_inputs(spec: Eval, part: str, *, runs_code: bool) -> dict[str, dict[str, str | None]]:
    """Return what `files` and `env` add to the identity of a part: the target or a grader."""
    files: dict[str, str | None] = {
        name: content
        for location, pattern in _names(spec, "files", part, runs_code=runs_code)
        if not pattern.startswith("!")
        for name, content in _contents(spec, location, pattern)
    }
    values: dict[str, str | None] = {
        name: digest([name, value])
        for _, name in _names(spec, "env", part, runs_code=runs_code)
        if (value := os.environ.get(name)) is not None
    }
    return {key: value for key, value in (("files", files), ("environment", values)) if value}


def with_named_inputs(identity: dict[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part's identity with its named inputs."""
    merged = {key: {**identity.get(key, {}), **value} for key, value in named.items()}
    return {**identity, **merged}


def excluded_patterns(spec: Eval) -> list[str]:
    """Return the patterns of files that code reads but that are not inputs."""
    return [pattern[1:] for pattern in _patterns(spec) if pattern.startswith("!")]


def is_named(spec: Eval, path: str) -> bool:
    """Return True if the eval file lists a file, as an input or as an exception."""
    return any(fnmatchcase(path, os.path.normpath(pattern.removeprefix("!"))) for pattern in _patterns(spec))


def _patterns(spec: Eval) -> list[str]:
    lists = spec.files.values() if isinstance(spec.files, dict) else [spec.files]
    return [pattern for patterns in lists for pattern in patterns]


def _names(spec: Eval, key: str, part: str, *, runs_code: bool) -> Iterator[tuple[Location, str]]:
    named: list[str] | Mapping[str, list[str]] = getattr(spec, key)
    if isinstance(named, dict):
        yield from (((key, part, number), name) for number, name in enumerate(named.get(part, ())))
    elif runs_code:
        yield from (((key, number), name) for number, name in enumerate(named))


def _contents(spec: Eval, location: Location, pattern: str) -> Iterator[tuple[str, str]]:
    where = spec.document.where(location)
    matches = [Path(match) for match in sorted(glob.glob(pattern, root_dir=spec.folder, recursive=True))]
    files = [match for match in matches if (spec.folder / match).is_file()]
    if not files and matches:
        remedy = f"Write {pattern.rstrip('/')}/** for all its files."
        raise ConfigError([Problem(where, f"{pattern}: is a folder, not a file")], remedy=remedy)
    if not files:
        remedy = f"Paths are relative to the eval file's folder, {spec.folder}."
        raise ConfigError([Problem(where, f"{pattern}: no such file")], remedy=remedy)
    for file in files:
        path = spec.folder / file
        content = content_digest(path)
        if content is None:
            raise ConfigError([Problem(where, f"{path}: cannot be read")])
        note_files([path])  # its content is in the key, so reading it is no further input
        yield os.path.normpath(file), content
