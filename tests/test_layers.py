"""The packages: imports point one way, as docs/architecture.md has it, and each says which modules it is made of."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from tests.support.running import ROOT, Server, environment
from tests.support.specs import write_spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOURCE = ROOT / "src" / "holdfast"
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text()


def ring(name: str) -> list[str]:
    """Return the packages that the document lists for a ring, those first that import the others."""
    line = re.search(rf"^\| \*\*{name}\*\*.*$", DOCUMENT, re.MULTILINE)
    assert line is not None, name
    return re.findall(r"`(\w+)`", line.group().rsplit("|", 2)[1])


CORE, PLUGINS, APPS = ring("core"), ring("plug-ins"), ring("apps")
APPS_TO_PLUGINS = {"cli": {"batches", "benchmarks", "exporters"}, "cluster": {"exporters"}}
"""the built-in plug-ins that have commands of their own, and the login of W&B, which jobs need"""
PACKAGES = sorted(path.parent for path in SOURCE.glob("*/**/__init__.py"))
ROOMS = {"watch": {"remote", "config"}, "job": {"remote", "config"}, "remote": {"config"}, "config": set()}
"""the packages of `cluster`, and which of the others each may import"""
REGISTRIES = {
    "apps/cluster/config/executor.py",
    "spec/eval_schema.py",
    "spec/load_graders.py",
    "spec/target_schema.py",
    "spec/plugins.py",
    "targets/types.py",
}
"""the modules that name later ones as `module:attribute`, which are imported when an eval or a profile uses them"""
_GRADE_TOOLS = {"set_waza_grade_pass", "set_waza_grade_fail"}
FOREIGN = {
    "spec/eval_schema.py": {"nat"},
    "spec/grader_schema.py": _GRADE_TOOLS,
    "graders/judge.py": _GRADE_TOOLS,
    "graders/programs.py": {"WAZA_WORKSPACE_DIR"},
}
"""names that eval files, prompts and programs of users rely on, whatever the format of the eval"""


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The syntax of a file."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[tuple[str, ...]]:
    """Yield the modules of ours that a file imports, for the type checker too, each as its parts and a line."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, *inside = name.split(".")
            if package == "holdfast":
                yield (*inside, str(node.lineno))


def dependencies(path: Path) -> set[str]:
    """Return the modules that a file imports, without names, for the type checker too."""
    targets = set()
    for *parts, _ in imports(path):
        name = ".".join(parts)
        targets.add(name if name in modules() else name.rpartition(".")[0])
    return targets


@cache
def modules() -> dict[str, Path]:
    """The files of all modules and packages by name below `holdfast`, which is itself named by an empty text."""
    files = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def references(path: Path) -> Iterator[tuple[str, ...]]:
    """Yield the modules of ours that a file names as `module:attribute`, each as its parts."""
    for node in nodes(path):
        if isinstance(node, ast.Constant) and re.fullmatch(r"holdfast(\.\w+)+:\w+", str(node.value)):
            yield tuple(str(node.value).partition(":")[0].split(".")[1:])


def modules_of(folder: Path) -> set[str]:
    """Return the names of the packages and modules of a folder."""
    return {path.name.removesuffix(".py") for path in folder.glob("[!_]*") if path.suffix in ("", ".py")}


def files_of(ring: str, part: str) -> list[Path]:
    """Return the source files of a package or module."""
    folder = SOURCE / ring
    return [folder / f"{part}.py"] if (folder / f"{part}.py").exists() else sorted((folder / part).rglob("*.py"))


def test_the_document_names_every_package() -> None:
    assert sorted([*CORE, "plugins", "apps"]) == sorted(modules_of(SOURCE))
    assert sorted(PLUGINS) == sorted(modules_of(SOURCE / "plugins"))
    assert sorted(APPS) == sorted(modules_of(SOURCE / "apps"))
    assert {name for name in (*CORE, *PLUGINS, *APPS) if f"| `{name}` |" not in DOCUMENT} == set()


def test_the_document_names_modules_that_exist() -> None:
    paths = set(re.findall(r"`([\w/]+\.py)`", DOCUMENT))
    assert {path for path in paths if not (SOURCE / path).exists() and not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("part", CORE)
def test_the_core_imports_one_way_and_neither_plugins_nor_apps(part: str) -> None:
    above = {*CORE[: CORE.index(part)], "plugins", "apps"}
    back = [
        f"{file.relative_to(SOURCE)}:{module[-1]}: {module[0]}"
        for file in files_of("", part)
        for module in imports(file)
        if module[0] in above
    ]
    assert back == []


@pytest.mark.parametrize("part", PLUGINS)
def test_a_plugin_imports_no_other_plugin_and_no_app(part: str) -> None:
    back = [
        f"{file.relative_to(SOURCE)}:{module[-1]}: {'.'.join(module[:2])}"
        for file in files_of("plugins", part)
        for module in imports(file)
        if module[0] == "apps" or (module[0] == "plugins" and module[1] != part)
    ]
    assert back == []


@pytest.mark.parametrize("part", APPS)
def test_apps_import_one_way(part: str) -> None:
    above = APPS[: APPS.index(part)]
    back = [
        f"{file.relative_to(SOURCE)}:{module[-1]}: {'.'.join(module[:2])}"
        for file in files_of("apps", part)
        for module in imports(file)
        if (module[0] == "apps" and module[1] in above)
        or (module[0] == "plugins" and module[1] not in APPS_TO_PLUGINS.get(part, ()))
    ]
    assert back == []


def test_built_in_plugins_import_public_names_and_the_modules_of_the_documentation() -> None:
    """A name that `holdfast` has is imported from there, as everybody's plug-in does."""
    page = (ROOT / "docs" / "extending.md").read_text()
    listed = [module for line in re.findall(r"<!-- imports: (.*) -->", page) for module in line.split()]
    used: set[str] = set()
    not_public = []
    for file in [file for part in PLUGINS for file in files_of("plugins", part)]:
        used |= {module for module in dependencies(file) if module and not module.startswith("plugins.")}
        for *parts, line in imports(file):
            home, name = ".".join(["holdfast", *parts[:-1]]), parts[-1]
            if holdfast._HOMES.get(name) == home or (len(parts) == 1 and name not in holdfast.__all__):
                not_public.append(f"{file.relative_to(SOURCE)}:{line}: {home}.{name}")
    assert not_public == []
    assert sorted(listed) == sorted(used)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or not."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reached = {name: reach(name) for name in graph}
    groups = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in graph}
    return [list(group) for group in sorted(groups) if group]


def test_no_module_imports_itself_on_any_way() -> None:
    """Imports for the type checker count, too."""
    assert cycles({name: dependencies(path) & modules().keys() for name, path in modules().items()}) == []


def test_public_class_names_are_unique() -> None:
    homes: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert {name: lines for name, lines in homes.items() if len(lines) > 1} == {}


def test_names_say_what_they_hold() -> None:
    """Variables, parameters and fields are not named for how their values came about."""
    banned = {"found", "said", "given", "made", "told", "wanted"}
    bound = []
    for path in SOURCE.rglob("*.py"):
        for node in nodes(path):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                    if name.lstrip("_") in banned:
                        bound.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {name}")
    assert bound == []


def test_names_of_tests_have_a_subject() -> None:
    """A name that begins with a pronoun says nothing in a list of failures."""
    pronouns = re.compile(r"def (test_(?:it|so|they|those|these|this|that|one|and|then)_\w+)")
    vague = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name in pronouns.findall(path.read_text())
    ]
    assert vague == []


@pytest.mark.parametrize("room", ROOMS)
def test_the_packages_of_cluster_import_one_way(room: str) -> None:
    """Names for the type checker count, too."""
    allowed = {*ROOMS[room], room}
    back = [
        f"{file.relative_to(SOURCE)}:{module[-1]}: {module[2]}"
        for file in (SOURCE / "apps" / "cluster" / room).glob("*.py")
        for module in imports(file)
        if module[:2] == ("apps", "cluster") and module[2] in ROOMS and module[2] not in allowed
    ]
    assert back == []


def test_only_registries_name_modules_of_later_packages() -> None:
    naming = set()
    for file in SOURCE.rglob("*.py"):
        own = file.relative_to(SOURCE)
        part = own.parts[0].removesuffix(".py")
        above = {*CORE[: CORE.index(part)], "plugins", "apps"} if part in CORE else set()
        in_cluster = own.parts[:2] == ("apps", "cluster")
        rooms = {own.parts[2], *ROOMS.get(own.parts[2], ())} if in_cluster else set()
        for reference in references(file):
            if reference[0] in above or (in_cluster and reference[:2] == own.parts[:2] and reference[2] not in rooms):
                naming.add(str(own))
    assert naming == REGISTRIES


def test_the_core_names_foreign_formats_only_in_the_table_of_plugins() -> None:
    mentions: dict[str, set[str]] = {}
    for file in SOURCE.rglob("*.py"):
        own = file.relative_to(SOURCE)
        names = re.findall(r"\w*waza\w*|\bnat\b|\w*flexeval\w*", file.read_text(), re.IGNORECASE)
        if names and own.parts[0] != "plugins" and str(own) != "spec/plugins.py":
            mentions[str(own)] = set(names)
    assert mentions == FOREIGN


def run_without(packages: str, script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a process that cannot import these packages."""
    block = f"import sys\nsys.modules.update(dict.fromkeys({packages.split()!r}))\n"
    return subprocess.run(
        [sys.executable, "-c", block + script],
        cwd=folder,
        env=environment(OPENAI_API_KEY="k"),
        capture_output=True,
        text=True,
        check=False,
    )


QUESTION = {"question": "1 + 1", "expected": 2}
COMMAND = "from holdfast.apps.cli.main import main\nsys.argv = ['holdfast', 'eval', *{}, '--display', 'json']\nmain()\n"


def test_the_core_can_be_imported_and_runs_an_eval_without_plugins_and_apps(tmp_path: Path) -> None:
    core = [".".join(["holdfast", name]) for name in modules() if name and name.split(".")[0] in CORE]
    write_spec(tmp_path, target={"command": ["echo", "2"]}, samples=[QUESTION])
    script = (
        "import holdfast, importlib\n"
        "assert holdfast.evaluate('eval.yaml').score == 1\n"
        f"for name in {core!r}: importlib.import_module(name)\n"
    )
    ended = run_without("holdfast.plugins holdfast.apps", script, tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_the_command_runs_an_eval_without_plugins(tmp_path: Path) -> None:
    write_spec(tmp_path, target={"command": ["echo", "2"]}, samples=[QUESTION])
    ended = run_without("holdfast.plugins", COMMAND.format(["eval.yaml"]), tmp_path)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("keys", "missing"),
    [
        ({"target": {"mock": {}}}, "waza.mock"),
        ({"target": {"model": "openai/m", "batch": True}}, "batches.providers"),
        ({"graders": [{"type": "nat"}]}, "nat.components"),
        ({"output": {"export": ["junit"]}}, "exporters.junit"),
        ({"output": {"nat": {"dir": "x"}}}, "nat.mirror"),
    ],
)
def test_a_kind_of_a_missing_plugin_is_an_error(tmp_path: Path, keys: dict[str, Any], missing: str) -> None:
    write_spec(tmp_path, **{"target": {"command": ["cat"]}, "samples": [{"question": "?", "expected": 2}], **keys})
    ended = run_without("holdfast.plugins", COMMAND.format(["eval.yaml"]), tmp_path)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    assert f"holdfast.plugins.{missing} is missing: this Holdfast was installed without it" in ended.stderr


def test_a_file_of_a_missing_format_and_a_missing_benchmark_are_errors(tmp_path: Path) -> None:
    (tmp_path / "waza.yaml").write_text("name: e\nskill: s\ntasks: [t.yaml]\n")
    for name in ("waza.yaml", "gsm8k"):
        ended = run_without("holdfast.plugins", COMMAND.format([name]), tmp_path)
        assert ended.returncode == 2 and "holdfast.plugins.benchmarks.format is missing" in ended.stderr, ended.stderr
        assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("kind", ["function", "model"])
def test_an_eval_of_one_prompt_loads_at_most_120_modules(kind: str, provider: Server, tmp_path: Path) -> None:
    (tmp_path / "answer.py").write_text("def answer(prompt):\n    return '2'\n")
    model = {"model": "m", "base_url": provider.base_url}
    write_spec(tmp_path, target=model if kind == "model" else {"python": "answer.py:answer"}, samples=[QUESTION])
    script = (
        "import atexit\n"
        "ours = lambda: [name for name in sys.modules if name.split('.')[0] == 'holdfast']\n"
        "atexit.register(lambda: print('loaded:', len(ours()), file=sys.stderr))\n"
        "from holdfast.apps.cli.main import main\n"
        "sys.argv = ['holdfast', 'eval', 'eval.yaml']\n"
        "main()\n"
    )
    ended = run_without("", script, tmp_path)
    assert ended.returncode == 0, ended.stderr
    loaded = re.search(r"^loaded: (\d+)$", ended.stderr, re.MULTILINE)
    assert loaded is not None and int(loaded[1]) <= 120, ended.stderr


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_package_that_lists_its_modules_lists_them_all(package: Path) -> None:
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    listed = set(re.findall(r"^`(\w+)`", docstring, re.MULTILINE)) | set(re.findall(r"and `(\w+)`", docstring))
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    modules |= {path.parent.name for path in package.glob("*/__init__.py")}
    assert not listed or listed == modules
