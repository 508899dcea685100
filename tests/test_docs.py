"""The documentation: its files are written and its commands run, its tables are current, its snippets are valid."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from glob import glob
from pathlib import Path
from types import ModuleType

import pytest
from ruamel.yaml import YAML

from holdfast.spec.load import load_eval
from holdfast.spec.load_graders import GRADERS
from holdfast.spec.providers import PROVIDERS
from tests.support.running import ROOT, environment, holdfast

DOCS = ROOT / "docs"
FORMATS = DOCS / "file-formats.md"
MARKED = re.compile(
    r"(?:<!-- run(?:: exit (?P<exit>\d+))? -->\n|^\*\*`(?P<file>[^`]+)`\*\*\n\n)```\w*\n(?P<body>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
"""a block of code: commands to run, or a file below its name"""
PLAIN = re.compile(r"holdfast (?:[^|&;<>()$`*?\[\]#~\\{}!\n]*|[^|&;<>()$`'\"#~\\{}!\n]*)")
"""a command that a shell only splits into words, which are patterns of files where nothing is quoted"""
INSTALLED = 3
"""commands of the tutorial that run as it says, by the installed script: the plan, an eval and its failures"""
SECTION = re.compile(r"^###? `(\w+)`\n\n```yaml\n(- type: .*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = sorted(path for path in [ROOT / "README.md", *DOCS.glob("*.md")] if MARKED.search(path.read_text()))
SNIPPETS = [
    pytest.param(page, kind, snippet, id=kind)
    for page in sorted(DOCS.glob("graders-*.md"))
    for kind, snippet in SECTION.findall(page.read_text())
]


def run_line(line: str, cwd: Path, env: dict[str, str], code: int, *, installed: bool) -> None:
    """Run a line of the documentation: in a shell, if that has anything to do, or if the installed script is meant."""
    if PLAIN.fullmatch(line) and not installed:
        words = shlex.split(line)[1:]
        holdfast(
            *(path for word in words for path in sorted(glob(word, root_dir=cwd)) or [word]),
            cwd=cwd,
            env=env,
            check=code,
        )
        return
    done = subprocess.run(
        ["bash", "-c", line], cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == code, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_and_commands_of_a_page_work(page: Path, tmp_path: Path) -> None:
    programs = Path(sys.executable).parent
    env = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "HOLDFAST_HOME": str(tmp_path / "home")}
    commands = 0
    for block in MARKED.finditer(page.read_text()):
        if block["file"]:
            (tmp_path / block["file"]).write_text(block["body"])
            continue
        for line in block["body"].splitlines():
            if line.startswith("$ "):
                installed = page.name == "tutorial.md" and commands < INSTALLED
                run_line(line[2:], tmp_path, env, int(block["exit"] or 0), installed=installed)
                commands += 1
    if page.name == "tutorial.md":
        assert commands >= 8


def test_linked_pages_and_files_exist() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = re.findall(r"^- \[[^\]]+\]\(([\w-]+\.md)\)", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted({path.name for path in DOCS.glob("*.md")} - {"index.md"})


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", DOCS / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_tables_are_current(tables: ModuleType) -> None:
    for page in DOCS.glob("*.md"):
        text = page.read_text()
        assert tables.update(text) == text, f"{page.name} is out of date: run python docs/tables.py"


def test_examples_of_files_have_the_fields_of_their_tables() -> None:
    examples = re.findall(
        r"```json\n([^`]*)```\n\n<!-- fields: .+? -->\n(.*?)<!-- end -->", FORMATS.read_text(), re.DOTALL
    )
    assert len(examples) == 8
    for example, table in examples:
        fields = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) | {"sum"}
        assert json.loads(example).keys() <= fields


def test_every_grader_has_a_snippet_and_a_table() -> None:
    text = "".join(page.read_text() for page in DOCS.glob("graders-*.md"))
    assert {kind for kind, _ in SECTION.findall(text)} == set(GRADERS)
    assert set(re.findall(r"<!-- keys: grader (\w+) -->", text)) == set(GRADERS)


@pytest.mark.parametrize(("page", "kind", "snippet"), SNIPPETS)
def test_snippet_of_a_grader_is_valid(page: Path, kind: str, snippet: str, tmp_path: Path) -> None:
    for block in MARKED.finditer(page.read_text()):
        if block["file"]:
            (tmp_path / block["file"]).write_text(block["body"])
    row = {"expected": "4", "question": "2 + 2?", "answer": "#### 4", "references": ["4", "four"]}
    row |= dict.fromkeys(("city", "country", "reference", "solution"), "4")
    graders = YAML(typ="safe").load(snippet)
    assert [grader["type"] for grader in graders] == [kind]
    data = {
        "name": "snippet",
        "samples": [row],
        "target": {"command": ["echo", "4"]},
        "prompt": "{{ question }}",
        "workspace": {},
        "graders": graders,
    }
    if kind == "likelihood":
        data |= {"continuations": "references", "target": {"model": "m", "api": "completions"}}
    with (tmp_path / "eval.yaml").open("w") as file:
        YAML().dump(data, file)
    load_eval(tmp_path / "eval.yaml")


def test_the_table_of_providers_has_their_apis_keys_and_addresses() -> None:
    rows = re.findall(r"^\| `(\w+)/` \| (.*) \| (.*) \| (.*) \|$", (ROOT / "docs/models.md").read_text(), re.MULTILINE)
    assert [prefix for prefix, *_ in rows] == list(PROVIDERS)
    for prefix, api, keys, address in rows:
        provider = PROVIDERS[prefix]
        names = [name for name in (provider.base_url, provider.url_env) if name]
        assert api.startswith(f"`{provider.api}`"), prefix
        assert tuple(re.findall(r"`(\w+)`", keys)) == provider.key_env, prefix
        assert all(f"`{name}`" in address for name in names), prefix
