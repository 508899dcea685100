"""The packages: imports point one way, as docs/architecture.md has it, and each says which modules it is made of."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from tests.support.running import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOURCE = ROOT / "src" / "holdfast"
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text()
ORDER = re.findall(r"`(\w+)`", DOCUMENT[DOCUMENT.index("`cli` →") :].split(".\n", 1)[0])
PARTS = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")} - {
    "__init__",
    "__main__",
}
PACKAGES = sorted(path.parent for path in SOURCE.glob("*/**/__init__.py"))
ROOMS = {"watch": {"remote", "config"}, "job": {"remote", "config"}, "remote": {"config"}, "config": set()}
"""the packages of `cluster`, and which of the others each may import"""


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """The parts of ours that a file imports, also for the type checker alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "holdfast":
            inside = node.module.split(".")[1:2] or [alias.name for alias in node.names]
            yield from ((name, node.lineno) for name in inside if name in PARTS)


def test_the_document_names_every_part() -> None:
    assert sorted(ORDER) == sorted(PARTS)
    assert {name for name in PARTS if f"| `{name}` |" not in DOCUMENT} == set()


@pytest.mark.parametrize("part", ORDER)
def test_imports_never_point_back(part: str) -> None:
    files = [SOURCE / f"{part}.py"] if (SOURCE / f"{part}.py").exists() else sorted((SOURCE / part).rglob("*.py"))
    above = ORDER[: ORDER.index(part)]
    back = [
        f"{file.relative_to(SOURCE)}:{line}: {name}" for file in files for name, line in imports(file) if name in above
    ]
    assert back == []


def test_public_class_names_are_unique() -> None:
    homes: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert {name: lines for name, lines in homes.items() if len(lines) > 1} == {}


def test_names_say_what_they_hold() -> None:
    """Variables, parameters and fields are not named for how their values came about."""
    banned = {"found", "said", "given", "made", "told", "wanted"}
    bound = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                    if name.lstrip("_") in banned:
                        bound.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {name}")
    assert bound == []


@pytest.mark.parametrize("room", ROOMS)
def test_the_packages_of_cluster_import_one_way(room: str) -> None:
    """Names for the type checker count, too."""
    allowed = {*ROOMS[room], room}
    back = [
        f"{file.relative_to(SOURCE)}: {name}"
        for file in (SOURCE / "cluster" / room).glob("*.py")
        for name in re.findall(r"^\s*from holdfast\.cluster\.(\w+)", file.read_text(), re.MULTILINE)
        if name not in allowed
    ]
    assert back == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_package_that_lists_its_modules_lists_them_all(package: Path) -> None:
    said = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    listed = set(re.findall(r"^`(\w+)`", said, re.MULTILINE)) | set(re.findall(r"and `(\w+)`", said))
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    modules |= {path.parent.name for path in package.glob("*/__init__.py")}
    assert not listed or listed == modules
