"""Files that are read along with an eval: fixtures, skills, instructions. Their contents go into the rows."""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any, Final

from holdfast.waza.findings import at

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.spec.document import Document, Location
    from holdfast.waza.findings import Findings

Content = str | dict[str, str]
"""a text, or {"base64": …}"""

_MOST_BYTES: Final = 16 << 20
"""of one task; contents stand in the run's manifest"""

_FRONT_MATTER: Final = re.compile(r"\A---\s*\n.*?\n---\s*\n", re.DOTALL)


def task_files(findings: Findings, task: Document, fixtures: Path) -> dict[str, Content]:
    """What a task finds in its workspace: path to content."""
    found: dict[str, bytes] = {}
    fixture = findings.block(task, ("inputs",), "context").get("fixture")
    if isinstance(fixture, str):
        place: Location = ("inputs", "context", "fixture")
        path = findings.inside(task, place, fixtures, fixture)
        if path is not None:
            found |= _tree(findings, task, place, path)
    listed = at(task, ("inputs",)).get("files") or []
    for number in range(len(listed) if isinstance(listed, list) else 0):
        found |= _listed(findings, task, ("inputs", "files", number), fixtures)
    if not isinstance(listed, list):
        findings.wrong(task, ("inputs", "files"), "is a list of {path: …} or {path: …, content: …}")
    if sum(map(len, found.values())) > _MOST_BYTES:
        findings.wrong(task, ("inputs",), f"its files are larger than {_MOST_BYTES >> 20} MB together")
        return {}
    return {name: _content(data) for name, data in found.items()}


def _listed(findings: Findings, task: Document, place: Location, fixtures: Path) -> dict[str, bytes]:
    entry = at(task, place)
    name, content = entry.get("path"), entry.get("content")
    findings.keys(task, place, ("path", "content"))
    if not isinstance(name, str) or not name:
        findings.wrong(task, place, "needs a path")
        return {}
    path = findings.inside(task, (*place, "path"), fixtures, name)
    if path is None or not path.resolve().is_relative_to(fixtures.resolve()):
        if path is not None:
            findings.wrong(task, (*place, "path"), f"{name!r} leads out of the workspace")
        return {}
    if content is not None:
        return {name: str(content).encode()}
    if not path.is_file():
        findings.notice(
            task, (*place, "path"), f"there is no {name} in {fixtures}; the task runs without it, as in waza"
        )
        return {}
    return {name: path.read_bytes()}


def _tree(findings: Findings, task: Document, place: Location, path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {path.name: path.read_bytes()}
    if not path.is_dir():
        findings.notice(task, place, f"there is no {path}; the task runs without it, as in waza")
        return {}
    files = (file for file in sorted(path.rglob("*")) if file.is_file() and not file.is_symlink())
    own = path.resolve()  # a folder in it may be a link, too
    return {
        file.relative_to(path).as_posix(): file.read_bytes() for file in files if file.resolve().is_relative_to(own)
    }


def _content(data: bytes) -> Content:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def skill_text(folders: list[Path], skill: str) -> tuple[Path, str] | None:
    """The body of a skill's SKILL.md, in one of the folders or in one of their folders of its name."""
    for folder in folders:
        for path in (folder / skill / "SKILL.md", folder / "SKILL.md"):
            if path.is_file() and (path.parent.name == skill or _named(path) == skill):
                return path, _FRONT_MATTER.sub("", path.read_text(encoding="utf-8")).strip()
    return None


def _named(path: Path) -> Any:
    match = re.search(r"^name:\s*[\"']?([^\"'\n]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1].strip() if match else None


def instructions(findings: Findings, document: Document, location: Location, folder: Path) -> list[str]:
    """The texts of `instruction_files`."""
    found = []
    for name in findings.texts(document, location):
        path = findings.inside(document, location, folder, name)
        if path is None:
            continue
        try:
            found.append(path.read_text(encoding="utf-8").strip())
        except (OSError, UnicodeDecodeError) as error:
            findings.wrong(document, location, f"{name} cannot be read: {error}")
    return found
