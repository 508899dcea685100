"""Users' files: loaded once whatever they do to Python's path, and fingerprinted with all that they really import."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.errors import ConfigError
from holdfast.functions import function_source, load_function
from holdfast.plan.identity import identify
from holdfast.spec import fingerprint as source
from holdfast.spec.fingerprint import command_files
from tests.support.running import holdfast as command
from tests.support.running import lines, run_dir
from tests.support.specs import load, write_spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXTENDS = "import os, sys\nsys.path.insert(0, os.path.join(os.path.dirname(__file__), 'lib'))\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A folder of users' files; what they do to this process is undone."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = dict(sys.modules)
    (tmp_path / "lib").mkdir()
    yield tmp_path
    for name in set(sys.modules) - set(before):
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def loaded(folder: Path, *references: Any) -> Any:
    return [load_function(reference, folder, "here") for reference in references]


class TestLoadedOnce:
    def test_functions_of_a_file_that_extends_the_path_share_its_variables(self, folder: Path) -> None:
        (folder / "lib" / "kit.py").write_text("EMPTY = -1\n")
        (folder / "tools.py").write_text(
            EXTENDS + "from kit import EMPTY\nkept = {}\n"
            "def put(n): kept['n'] = n\ndef get(): return kept.get('n', EMPTY)\n"
        )
        function_source("tools.py:put", folder, "here")
        put, get = loaded(folder, "tools.py:put", "tools.py:get")
        put(5)
        assert get() == 5

    def test_two_files_share_the_modules_that_both_import(self, folder: Path) -> None:
        (folder / "base.py").write_text("kept = {}\n")
        (folder / "one.py").write_text("import base\ndef put(n): base.kept['n'] = n\n")
        (folder / "two.py").write_text("from base import kept\ndef get(): return kept.get('n', -1)\n")
        put, get = loaded(folder, "one.py:put", "two.py:get")
        put(7)
        assert get() == 7

    @pytest.mark.parametrize("name", ["tools.py", "lib/kit.py"])
    def test_a_function_is_reloaded_when_its_code_or_a_helper_changed(self, folder: Path, name: str) -> None:
        (folder / "lib" / "kit.py").write_text("WORD = 'old'\n")
        (folder / "tools.py").write_text(EXTENDS + "from kit import WORD\ndef get(): return WORD + ' old'\n")
        assert loaded(folder, "tools.py:get")[0]() == "old old"
        text = (folder / name).read_text()
        (folder / name).write_text("# a comment\n" + text)
        assert loaded(folder, "tools.py:get") == loaded(folder, "tools.py:get"), "a comment is no change"
        (folder / name).write_text(text.replace("old", "new"))
        assert loaded(folder, "tools.py:get")[0]() == ("new old" if name == "lib/kit.py" else "old new")

    def test_a_module_that_the_program_has_imported_is_not_loaded_again(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(folder)
        (folder / "known_tools.py").write_text("def get(): return 'old'\n")
        module = importlib.import_module("known_tools")
        assert load_function("known_tools.py:get", folder, "here") is module.get

    def test_an_edited_function_runs_with_its_new_code(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(folder)
        (folder / "edited_tools.py").write_text("def get(): return 'old'\n")
        importlib.import_module("edited_tools")
        (folder / "edited_tools.py").write_text("def get(): return 'newer'\n")
        assert load_function("edited_tools.py:get", folder, "here")() == "newer"

    def test_a_file_that_exits_when_it_is_imported_is_reported(self, folder: Path) -> None:
        (folder / "tools.py").write_text("import sys\nsys.exit(3)\ndef get(): ...\n")
        with pytest.raises(ConfigError, match=r"cannot be imported: .*calls sys\.exit\(3\)"):
            load_function("tools.py:get", folder, "here")


class TestFingerprints:
    @pytest.mark.parametrize(
        "code",
        [
            EXTENDS + "import kit\n",
            EXTENDS + "from kit import WORD\n",
            EXTENDS + "import kit\nsys.path.pop(0)\n",
            EXTENDS + "import importlib\nkit = importlib.import_module('ki' + 't')\n",
            EXTENDS + "def late():\n    import kit\nlate()\n",
            "from sys import path\npath.append(__file__.rpartition('/')[0] + '/lib')\nimport kit\n",
        ],
        ids=["import", "from", "taken back", "computed", "in a function", "another name"],
    )
    def test_helpers_found_through_a_changed_path_are_part_of_the_fingerprint(self, folder: Path, code: str) -> None:
        (folder / "lib" / "kit.py").write_text("import kit_more\nWORD = 1\n")
        (folder / "lib" / "kit_more.py").write_text("")
        (folder / "agent.py").write_text(code + "def reply(prompt): return 'x'\n")
        assert set(function_source("agent.py:reply", folder, "here")[1]) == {
            "agent.py",
            "lib/kit.py",
            "lib/kit_more.py",
        }

    def test_a_helper_that_a_grader_finds_by_the_targets_doing_is_part_of_the_graders(self, folder: Path) -> None:
        (folder / "lib" / "kit.py").write_text("WORD = 1\n")
        (folder / "agent.py").write_text(EXTENDS + "def reply(prompt): return 'x'\n")
        (folder / "checks.py").write_text("import kit\ndef check(output): return True\n")
        spec = load(
            folder, target={"python": "agent.py:reply"}, graders=[{"type": "python", "function": "checks.py:check"}]
        )
        assert set(identify(spec).contents.graders["python"]["source"]) == {"checks.py", "lib/kit.py"}

    def test_a_fingerprint_does_not_depend_on_loaded_modules(self, folder: Path) -> None:
        (folder / "lib" / "extra.py").write_text("")
        (folder / "plain.py").write_text(
            "try:\n    import extra\nexcept ImportError:\n    extra = None\ndef f(): ...\n"
        )
        (folder / "agent.py").write_text(EXTENDS + "def reply(prompt): return 'x'\n")
        before = source.scan(folder / "plain.py", folder).digests
        load_function("agent.py:reply", folder, "here")
        assert source.scan(folder / "plain.py", folder).digests == before == {"plain.py": before["plain.py"]}

    def test_code_that_cannot_be_imported_here_is_fingerprinted_by_reading(self, folder: Path) -> None:
        (folder / "agent.py").write_text(EXTENDS + "import no_such_package\ndef reply(prompt): return 'x'\n")
        assert set(function_source("agent.py:reply", folder, "here")[1]) == {"agent.py"}

    def test_plain_code_is_not_imported(self, folder: Path) -> None:
        (folder / "agent.py").write_text("import json, msgspec, helper\ndef reply(prompt): return 'x'\n")
        (folder / "helper.py").write_text("raise OSError('imported')\n")
        assert set(function_source("agent.py:reply", folder, "here")[1]) == {"agent.py", "helper.py"}
        assert "helper" not in sys.modules

    def test_many_functions_of_the_same_files_are_parsed_once(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = [f"part{number}" for number in range(6)]
        for name in names:
            (folder / f"{name}.py").write_text(f"NAME = {name!r}\n")
        text = "".join(f"import {name}\n" for name in names) + "def a(): ...\ndef b(): ...\ndef c(): ...\n"
        (folder / "tools.py").write_text(text)
        parsed = []
        parse = ast.parse

        def count(*arguments: Any, **options: Any) -> ast.AST:
            parsed.append(arguments)
            return parse(*arguments, **options)

        monkeypatch.setattr(source.ast, "parse", count)  # type: ignore[attr-defined]
        assert len({str(function_source(f"tools.py:{name}", folder, "here")[1]) for name in "abc"}) == 1
        assert len(parsed) == 7


class TestThroughTheCommand:
    def test_a_changed_helper_runs_and_grades_again(self, tmp_path: Path) -> None:
        (tmp_path / "lib").mkdir()
        (tmp_path / "agent.py").write_text(EXTENDS + "import kit\ndef reply(prompt): return kit.WORD\n")
        (tmp_path / "checks.py").write_text(EXTENDS + "import mark\ndef check(output): return mark.SCORE\n")
        grader = {"type": "python", "function": "checks.py:check"}
        write_spec(tmp_path, samples=[{"id": "a"}], prompt="x", target={"python": "agent.py:reply"}, graders=[grader])

        def outcome(word: Any, score: Any) -> Any:
            (tmp_path / "lib" / "kit.py").write_text(f"WORD = {word!r}\n")
            (tmp_path / "lib" / "mark.py").write_text(f"SCORE = {score}\n")
            done = command("eval", "eval.yaml", cwd=tmp_path)
            newest = max((tmp_path / "runs").glob("*/*/metrics.json"), key=os.path.getmtime).parent
            return (
                done.stderr,
                lines(newest / "outputs.jsonl")[0]["output"],
                lines(newest / "grades.jsonl")[-1]["score"],
            )

        assert outcome("one", 1)[1:] == ("one", 1)
        stderr, output, score = outcome("two", 1)
        assert (output, score) == ("two", 1) and "1 to run (lib/kit.py changed)" in stderr
        stderr, output, score = outcome("two", 0)
        assert (output, score) == ("two", 0) and "1 to grade (grader `python` changed)" in stderr

    def test_a_change_within_the_second_in_which_bytecode_was_written_is_run(self, tmp_path: Path) -> None:
        """Python itself would take the bytecode: the source has the same size and was changed in the same second."""
        write_spec(tmp_path, samples=[{"id": "a"}], prompt="x", target={"python": "agent.py:reply"}, graders=None)
        second = int(time.time()) + 3600

        def output(own: Any, word: Any) -> Any:
            (tmp_path / "agent.py").write_text(f"import kit\ndef reply(prompt): return '{own}' + kit.WORD\n")
            (tmp_path / "kit.py").write_text(f"WORD = '{word}'\n")
            for name in ("agent.py", "kit.py"):
                os.utime(tmp_path / name, (second, second))
            command("eval", "eval.yaml", cwd=tmp_path, env={"PYTHONDONTWRITEBYTECODE": ""})
            newest = max((tmp_path / "runs").glob("*/*/metrics.json"), key=os.path.getmtime).parent
            return lines(newest / "outputs.jsonl")[0]["output"]

        assert [output("a", "one"), output("a", "two"), output("b", "two")] == ["aone", "atwo", "btwo"]

    def test_an_import_that_reading_does_not_show_is_noticed_at_run_time(self, tmp_path: Path) -> None:
        """An installed package may import a user's module by an entry point."""
        (tmp_path / "hidden.py").write_text("WORD = 'x'\n")
        (tmp_path / "agent.py").write_text("__builtins__['__import__']('hidden')\ndef reply(prompt): return 'x'\n")
        write_spec(tmp_path, samples=[{"id": "a"}], prompt="x", target={"python": "agent.py:reply"}, graders=None)
        command("eval", "eval.yaml", cwd=tmp_path)
        (tmp_path / "hidden.py").write_text("WORD = 'x'  # as before\n")
        assert "1 finished" in command("eval", "eval.yaml", "--dry-run", cwd=tmp_path).stdout
        (tmp_path / "hidden.py").write_text("WORD = 'y'\n")
        planned = command("eval", "eval.yaml", "--dry-run", cwd=tmp_path).stdout
        assert "1 to run (hidden.py changed, which agent.py read)" in planned


PACKAGE = {"pkg/__init__.py", "pkg/__main__.py", "pkg/inner.py", "nearby.py"}


class TestCommands:
    @pytest.fixture
    def project(self, tmp_path: Path) -> Any:
        for name, text in {
            "pkg/__init__.py": "",
            "pkg/__main__.py": "from .inner import run\nimport nearby\nrun()\n",
            "pkg/inner.py": "def run(): print('x')\n",
            "nearby.py": "",
            "single.py": "import nearby\n",
            "unused.py": "",
        }.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    @pytest.mark.parametrize(
        ("words", "files"),
        [
            (["python", "-m", "pkg"], PACKAGE),
            (["/usr/bin/python3.11", "-u", "-X", "dev", "-m", "pkg", "--loud"], PACKAGE),
            (["env", "A=1", "python3", "-m", "pkg"], PACKAGE),
            (["uv", "run", "python", "-mpkg"], PACKAGE),
            (["python", "-Im", "pkg.inner"], {"pkg/__init__.py", "pkg/inner.py"}),
            (["python", "-m", "single"], {"single.py", "nearby.py"}),
            (["python", "-c", "import single; single.main()"], {"single.py", "nearby.py"}),
            (["python", "single.py", "-m", "pkg"], {"single.py", "nearby.py"}),
            (["python", "-m", "json.tool"], set()),
            (["python", "-m", "nowhere"], set()),
            (["python", "-m", "{{ module }}"], set()),
            (["python", "-c", "this is not Python"], set()),
            (["bash", "-c", "import single"], set()),
            (["python"], set()),
            (["python", "-m"], set()),
        ],
    )
    def test_modules_run_with_python_m_are_files_of_the_command(self, project: Any, words: Any, files: Any) -> None:
        assert set(command_files(project, words)) == files

    def test_an_edited_package_runs_again(self, project: Any) -> None:
        write_spec(
            project, samples=[{"id": "a"}], prompt="x", target={"command": [sys.executable, "-m", "pkg"]}, graders=None
        )
        command("eval", "eval.yaml", cwd=project)
        assert lines(run_dir(project) / "outputs.jsonl")[0]["output"] == "x"
        (project / "pkg" / "inner.py").write_text("def run(): print('y')\n")
        assert "1 to run (pkg/inner.py changed)" in command("eval", "eval.yaml", "--dry-run", cwd=project).stdout

    def test_the_modules_of_an_mcp_server_and_of_a_program_grader_count(self, project: Any) -> None:
        def identities() -> Any:
            server = {"mcp": {"command": ["python", "-m", "pkg"]}}
            grader = {"type": "program", "command": "python3", "args": ["-m", "pkg"]}
            spec = load(
                project, target={"model": "m", "base_url": "http://127.0.0.1:1", "tools": [server]}, graders=[grader]
            )
            identity = identify(spec).contents
            return identity.target["tools"][0], identity.graders["program"]

        before = identities()
        (project / "pkg" / "inner.py").write_text("def run(): print('y')\n")
        assert all(new != old for new, old in zip(identities(), before, strict=True))

    def test_a_program_that_changes_pythons_path_is_named_in_the_plan(self, project: Any) -> None:
        (project / "agent.py").write_text("import nearby\n" + EXTENDS + "print('x')\n")
        write_spec(
            project, samples=[{"id": "a"}], prompt="x", target={"command": [sys.executable, "agent.py"]}, graders=None
        )
        for arguments in (["--dry-run"], []):
            stderr = command("eval", "eval.yaml", *arguments, cwd=project).stderr
            assert "target.command: agent.py:3 changes sys.path" in stderr and "use --fresh" in stderr


def test_a_script_that_passes_functions_is_fingerprinted_with_its_imports(folder: Path) -> None:
    """Functions handed over from Python are of modules that are loaded already, and are not loaded again."""
    (folder / "lib" / "kit.py").write_text("WORD = 1\n")
    (folder / "script.py").write_text(
        "import holdfast\n" + EXTENDS + "import kit\n"
        "print('loaded')\n"
        "def reply(prompt): return str(kit.WORD)\n"
        "run = holdfast.evaluate(name='e', samples=[{'id': 'a'}], prompt='x', target=reply)\n"
        "print(run.path, run.results()[0]['output'])\n"
    )

    def ran() -> Any:
        done = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    first = ran()
    assert first[0] == "loaded" and first[1].endswith(" 1") and len(first) == 2
    (folder / "lib" / "kit.py").write_text(
        "WORD = 1 + 1\n"
    )  # Python tells versions of one second apart by their length
    second = ran()
    assert second[1].endswith(" 2") and second[1].split()[0] != first[1].split()[0]
