"""Explain why something has to be done: what differs from the nearest earlier run, in the words of the eval file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.canonical import canonical

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.store.rundir import Identity

_SHOWN = 40
"""maximum length of a value that is shown; longer values are only said to have changed"""


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun: `1 trial`, `2,000 trials`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class RowChanges(msgspec.Struct, frozen=True):
    """Changes of the rows since an earlier run, by their ids."""

    new: int = 0
    changed: int = 0
    gone: int = 0
    relabelled: int = 0
    """changed only in fields that the target does not see"""

    def __str__(self) -> str:
        counts = [
            (self.new, "new"),
            (self.changed, "changed"),
            (self.gone, "gone"),
            (self.relabelled, "changed in fields that only graders read"),
        ]
        parts = [f"{count:,} {what}" for count, what in counts if count]
        if not parts:
            return ""
        count, _, what = parts[0].partition(" ")
        return ", ".join([f"{count} {'row' if count == '1' else 'rows'} {what}", *parts[1:]])


def identity_changes(old: Identity, new: Identity) -> list[str]:
    """List what changed between two runs' identities: conversation, target, graders, trials."""
    changes = list(_conversation(old.conversation, new.conversation))
    changes += _target(old.target, new.target)
    changes += _graders(old.graders, new.graders)
    if old.trials != new.trials:
        changes.append(f"trials {old.trials} → {new.trials}")
    return changes


def grader_changes(old: Any, new: Any) -> list[str]:
    """List the differences between two graders' identities; nothing if they are the same grader."""
    if canonical(old) == canonical(new):  # JSON has no tuples: an identity read from a file has lists
        return []
    (old_code, old_rest), (new_code, new_rest) = _split(old), _split(new)
    files = _files(old_code, new_code)
    changes = [f"{files} changed"] if files else []
    for key in sorted({*old_rest, *new_rest}):
        changes += _differences(key, old_rest.get(key), new_rest.get(key), absent="(default)")  # which keys leave out
    return changes or ["changed"]


def _conversation(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted({*old, *new}):
        if old.get(key) != new.get(key):
            if key == "limits":
                yield f"limits changed: {', '.join(_differences('limits', old.get(key) or {}, new.get(key) or {}))}"
            elif old.get(key) is None:
                yield f"{key} added"
            else:
                yield f"{key} changed" if new.get(key) is not None else f"{key} removed"


def _target(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    if old.get("kind") != new.get("kind"):
        return [f"target {old.get('kind')} → {new.get('kind')}"]
    (old_code, old_rest), (new_code, new_rest) = _split(old), _split(new)
    files = _files(old_code, new_code)
    return [*([f"{files} changed"] if files else []), *_differences("target", old_rest, new_rest)]


def _split(part: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Split an identity into the code of a part and its tools, and everything else."""
    code: dict[str, str] = {**part.get("source", {}), **part.get("files", {})}
    rest = {key: value for key, value in part.items() if key not in ("source", "files")}
    for key in ("tools", "mcp"):
        inside = part.get(key, [])
        split = [_split(one) for one in (inside if isinstance(inside, list) else [inside])]
        if split:
            rest[key] = [other for _, other in split]
        for more, _ in split:
            code |= more
    return code, rest


def _files(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _graders(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*old, *new}):
        if name not in old:
            yield f"grader `{name}` added"
        elif name not in new:
            yield f"grader `{name}` removed"
        elif grader_changes(old[name], new[name]):
            yield f"grader `{name}` changed"


def _differences(path: str, old: Any, new: Any, absent: str = "(none)") -> Iterator[str]:
    if old is None and _is_flat(new):
        old = {}
    elif new is None and _is_flat(old):
        new = {}
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from _differences(f"{path}.{key}", old.get(key), new.get(key))
    elif canonical(old) != canonical(new):
        if path == "target.version" and all(str(value).startswith("sha256:") for value in (old, new)):
            yield "the function, or what it uses, changed"
            return
        digests = any(str(value).startswith("sha256:") for value in (old, new))
        short = all(len(str(value)) <= _SHOWN and not isinstance(value, dict | list) for value in (old, new))
        yield f"{path} {_shown(old, absent)} → {_shown(new, absent)}" if short and not digests else f"{path} changed"


def _is_flat(block: Any) -> bool:
    """Return True for a block whose keys can be named one by one even if the other eval lacks the block."""
    return isinstance(block, dict) and not any(isinstance(value, dict | list) for value in block.values())


def _shown(value: Any, absent: str) -> str:
    return absent if value is None else str(value)
