"""Versions of the eval file, and the spellings of files from before there were versions.

A file without a version is read if it has today's spellings. Otherwise it is refused, with each place and the
`holdfast migrate` command that rewrites it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import ConfigError, Problem, VersionError
from holdfast.spec.rewrite import Add, Assign, Change, Rename, Wrap
from holdfast.spec.schema import SCHEMA_VERSION
from holdfast.versions import check_version, migrate_command, migrate_remedy, parse_version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.spec.document import Document, Location

KEYS: Final = {"follow_up_prompts": "follow_ups", "trials_per_sample": "trials"}
"""keys at the top, and their names today"""
WRAPPED: Final = {"model": ("target", "model")}
"""keys at the top whose value was a bare text, and the block and the key in it where it stands today"""
GRADERS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "regex": ("text", {"must_match": "regex_match", "must_not_match": "regex_not_match"}),
    "keyword": (
        "text",
        {"must_contain": "contains", "must_contain_any": "contains_any", "must_not_contain": "not_contains"},
    ),
    "llm": ("prompt", {"prompt": "rubric"}),
    "llm_judge": ("prompt", {"prompt": "rubric"}),
}
"""kinds of graders: their names today, and those of their parameters"""


def eval_version(document: Document) -> str | None:
    """Return a notice for a version newer than this one; raise ConfigError where it cannot be read."""
    written = document.data.get("schemaVersion", SCHEMA_VERSION)
    try:
        newer = check_version(document.where(("schemaVersion",)), written, SCHEMA_VERSION, document.path)
    except VersionError as error:
        raise ConfigError([Problem("", error.message)], remedy=error.remedy) from error
    document.data["schemaVersion"] = str(written)
    return newer


def check_spellings(document: Document) -> tuple[str, ...]:
    """Raise ConfigError for a file without a version that has removed spellings; else return notices."""
    if "schemaVersion" in document.data:
        return ()
    if changes := list(earlier_spellings(document.data)):
        problems = [Problem(document.where(change.location), change.message) for change in changes if change.message]
        raise ConfigError(problems, remedy=migrate_remedy(document.path))
    return (f"{document.path} has no schemaVersion; to add it: {migrate_command(document.path)}",)


def is_before_versions(written: object) -> bool:
    """Return True for the version of a file that may have earlier spellings."""
    return written is None or parse_version(written).major == 0


def earlier_spellings(data: dict[str, Any]) -> Iterator[Change]:
    """Yield the changes that bring a file without a version up to date."""
    for old, new in KEYS.items():
        if old in data:
            yield Rename((old,), f"is now {new}", new)
    for old, (block, key) in WRAPPED.items():
        if isinstance(data.get(old), str):
            yield Wrap((old,), f"is now {block}: {{{key}: …}}", key)
            if block != old:
                yield Rename((old,), "", block)
    yield from _graders(data.get("graders"), ("graders",))
    checkpoints = data.get("checkpoints")
    for number, checkpoint in enumerate(checkpoints if isinstance(checkpoints, list) else []):
        if isinstance(checkpoint, dict):
            yield from _graders(checkpoint.get("graders"), ("checkpoints", number, "graders"))


def _graders(graders: Any, base: Location) -> Iterator[Change]:
    for number, grader in enumerate(graders if isinstance(graders, list) else []):
        kind = grader.get("type") if isinstance(grader, dict) else None
        if not isinstance(kind, str) or kind not in GRADERS:
            continue
        location: Location = (*base, number)
        new, parameters = GRADERS[kind]
        if grader.get("name"):
            yield Assign((*location, "type"), f"{kind} is now {new}", new)
        else:  # its name is its kind: keep it for reports and gates
            yield Assign((*location, "type"), f"{kind} is now {new}, with the name {kind}", new)
            yield Add((*location, "type"), "", "name", kind)
        for place in (location, (*location, "config")):
            block = grader if place == location else grader.get("config")
            for old in parameters if isinstance(block, dict) else ():
                if old in block:
                    yield Rename((*place, old), f"is now {parameters[old]}", parameters[old])
