"""`inputs.repos`: the files of commits of local git repositories, read into a task's workspace.

waza checks out a worktree. Here the commit's files become part of the row, so that the key depends on what they say
and a run that has begun no longer needs the repository. There is no `.git` in the workspace.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from holdfast.waza.files import LARGEST, Content, content
from holdfast.waza.findings import at

if TYPE_CHECKING:
    from holdfast.spec.document import Document, Location
    from holdfast.waza.findings import Findings

_FILES: Final = ("100644", "100755", "100664")


def checked_out(findings: Findings, task: Document) -> dict[str, Content]:
    """Return the files of all repositories of a task by their paths in the workspace."""
    place: Location = ("inputs", "repos")
    listed = at(task, ("inputs",)).get("repos") or []
    if not isinstance(listed, list):
        findings.wrong(task, place, "is a list of {type: worktree, source: …, commit: …, dest: …}")
        return {}
    files: dict[str, Content] = {}
    for number in range(len(listed)):
        files |= _files(findings, task, (*place, number))
    return files


def _files(findings: Findings, task: Document, place: Location) -> dict[str, Content]:
    block = at(task, place)
    findings.keys(task, place, ("type", "source", "commit", "dest"))
    if block.get("type") != "worktree":
        findings.wrong(task, (*place, "type"), f"not supported: {block.get('type')!r}; a repository is a `worktree`")
        return {}
    folder, source, commit = str(block.get("dest") or ""), str(block.get("source") or ""), block.get("commit") or "HEAD"
    if not below(folder):
        findings.wrong(task, (*place, "dest"), "names a folder of the workspace, without `..`")
        return {}
    repository = (
        next((path for place in findings.places if (path := place / source).is_dir()), None) if source else None
    )
    if repository is None:
        findings.wrong(task, (*place, "source"), findings.nowhere(source))
        return {}
    try:
        head = _git(repository, "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}").decode().strip()
        entries = [
            _entry(line) for line in _git(repository, "ls-tree", "-rlz", "--full-tree", head).split(b"\0") if line
        ]
        plain = [(size, name, path) for mode, size, name, path in entries if mode in _FILES]
        if sum(size for size, _, _ in plain) > LARGEST:
            said = (
                f"{source} is larger than {LARGEST >> 20} MB, which is the most that is kept; let a hook check it out"
            )
            findings.wrong(task, place, said)
            return {}
        asked = "".join(f"{name}\n" for _, name, _ in plain).encode()
        contents = _batch(_git(repository, "cat-file", "--batch", stdin=asked), [size for size, _, _ in plain])
    except (subprocess.CalledProcessError, OSError) as error:
        said = (getattr(error, "stderr", b"") or str(error).encode()).decode("utf-8", "replace").strip()
        findings.wrong(task, place, f"{source} at {commit} cannot be read: {said}")
        return {}
    left_out = len(entries) - len(plain)
    findings.notice(
        task,
        place,
        f"the {len(plain)} files of {repository.resolve()} at {head[:12]} are put into {folder}, without .git"
        + (f"; {left_out} links and submodules are left out" if left_out else ""),
    )
    return {f"{folder}/{path}": content(data) for (_, _, path), data in zip(plain, contents, strict=True)}


def below(name: str) -> bool:
    """Whether a name is that of something in a folder, and not of the folder itself or of what is outside."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and not name.startswith(("\\", "~"))


def _git(folder: Path, *arguments: str, stdin: bytes = b"") -> bytes:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, input=stdin, env=environment).stdout


def _entry(line: bytes) -> tuple[str, int, str, str]:
    """Return mode, size, object and path of a line of `git ls-tree -l`."""
    about, _, path = line.partition(b"\t")
    mode, _, name, size = about.decode().split()
    return mode, int(size) if size.isdigit() else 0, name, path.decode("utf-8", "replace")


def _batch(answer: bytes, sizes: list[int]) -> list[bytes]:
    """Return the contents in what `git cat-file --batch` printed, each after a line about it and before a newline."""
    contents, place = [], 0
    for size in sizes:
        start = answer.index(b"\n", place) + 1
        contents.append(answer[start : start + size])
        place = start + size + 1
    return contents
