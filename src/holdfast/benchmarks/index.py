"""Names of lm-eval's tasks, and the file that defines each of them.

lm-eval's own index parses 14,000 YAML files at every start. This one reads only the names out of them, once for each
version of lm-eval, and needs no import of it.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.benchmarks.cache import cache_folder, write_atomically
from holdfast.benchmarks.progress import note

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

OVERLAY: Final = Path(__file__).with_name("overlay")
"""definitions of NVIDIA's tasks for lm-eval, where Jinja is enough"""

_KEY: Final = re.compile(
    r"""^["']?(task|group|tag|class|include)["']?[ \t]*:[ \t]*(.*?)[ \t]*(?:#.*)?$""", re.MULTILINE
)
_FOLLOWING_ITEM: Final = re.compile(r"""\n[ \t]*-[ \t]*["']?([^"'\n#:]+?)["']?[ \t]*(?:#.*)?(?=\n|\Z)""")


class TaskIndex(msgspec.Struct, frozen=True):
    """Tasks and groups by name, with the paths of their files relative to lm-eval's folder of tasks."""

    version: str
    tasks: dict[str, str]
    groups: dict[str, str]
    tags: dict[str, list[str]]
    """the tasks of each tag"""

    def __contains__(self, name: str) -> bool:
        return name in self.tasks or name in self.groups or name in self.tags

    def names(self) -> list[str]:
        """List all names in their order."""
        return sorted({*self.tasks, *self.groups, *self.tags})

    def files(self, name: str) -> list[str]:
        """Return the files that define a name: those of all its tasks for a tag."""
        if name in self.groups:
            return [self.groups[name]]
        if name in self.tasks:
            return [self.tasks[name]]
        return [self.tasks[task] for task in self.tags.get(name, ())]


def installed_version() -> str | None:
    """Return the version of lm-eval, or None where it is not installed."""
    try:
        return version("lm-eval")
    except PackageNotFoundError:
        return None


def tasks_folder() -> Path:
    """Return the folder of lm-eval's tasks, without importing lm-eval."""
    spec = find_spec("lm_eval")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "tasks"


@cache
def read_index() -> TaskIndex | None:
    """Return the index of the installed lm-eval, or None where there is none."""
    current = installed_version()
    if current is None:
        return None
    file = cache_folder() / f"lm-eval-{current}.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=TaskIndex)
    except (OSError, msgspec.DecodeError):
        note(f"reading the names of lm-eval {current}'s tasks, once …")
        index = scan(tasks_folder(), current)
        write_atomically(file, msgspec.json.encode(index))
        return index


@cache
def overlay_index() -> TaskIndex:
    """Return the index of the overlay."""
    return scan(OVERLAY, "overlay")


def scan(folder: Path, version: str) -> TaskIndex:
    """Read the names out of all YAML files of a folder, the first file of a name in the order of lm-eval."""
    tasks: dict[str, str] = {}
    groups: dict[str, str] = {}
    tags: dict[str, list[str]] = {}
    included: dict[Path, dict[str, list[str]]] = {}
    for path in sorted(folder.rglob("*.yaml"), key=Path.as_posix):
        keys = _keys(path, included)
        name = path.as_posix().removeprefix(f"{folder.as_posix()}/")
        group, task = keys.get("group"), keys.get("task")
        if group and "class" not in keys:
            groups.setdefault(group[0], name)
        elif task and task[0] not in tasks:
            tasks[task[0]] = name
            for tag in keys.get("tag", ()):
                tags.setdefault(tag, []).append(task[0])
    return TaskIndex(version, tasks, groups, {tag: sorted(names) for tag, names in tags.items()})


def _keys(path: Path, included: dict[Path, dict[str, list[str]]], depth: int = 0) -> dict[str, list[str]]:
    """Return the values of the keys that name a task, those of included files first.

    `included` holds the keys of files that were included before: a few are, by thousands of others.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # an include of a file that is not there: lm-eval leaves such a task out, too
        return {}
    own = {match[1]: list(_values(match, text)) for match in _KEY.finditer(text)}
    inherited: dict[str, list[str]] = {}
    for include in own.pop("include", []) if depth < 5 else []:
        file = path.parent / include
        if file not in included:
            included[file] = _keys(file, included, depth + 1)
        inherited |= included[file]
    return {**inherited, **own}


def _values(match: re.Match[str], text: str) -> Iterator[str]:
    """Yield the value of a key: a text, a list in brackets, or the list on the lines after it."""
    value = match[2]
    if value.startswith("["):
        yield from (part.strip(" \"'") for part in value.strip("[]").split(",") if part.strip())
    elif value:
        yield value.strip("\"'")
    else:
        position = match.end()
        while (item := _FOLLOWING_ITEM.match(text, position)) is not None:
            yield item[1].strip()
            position = item.end()


def folders(name: str, children: Iterable[str]) -> list[Path]:
    """Return the folders that lm-eval has to read for a name and the names of a group's children."""
    places: dict[Path, None] = {}
    for root, index in ((tasks_folder(), read_index()), (OVERLAY, overlay_index())):
        if index is None:
            continue
        for each in (name, *children):
            places |= dict.fromkeys((root / file).parent for file in index.files(each))
    return list(places)
