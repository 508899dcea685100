"""Fingerprints of Python code: every change that can matter shows, comments and layout do not."""

from __future__ import annotations

import importlib.util
import io
import sys
import tokenize
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.spec.fingerprint import scan

if TYPE_CHECKING:
    from pathlib import Path

CODE = '''\
"""A module."""
import os

LIMIT = 3


class Agent:
    """Does things."""

    names = [
        "a",
        "b",
    ]

    def reply(self, prompt: str) -> str:
        if prompt:
            return f"{prompt!r:>{LIMIT}} {os.sep}"
        else:
            return """several
            lines"""


async def later(x, *, y=1):
    async with x as z:
        return [v async for v in z if v != "#not a comment"]
'''


def fingerprint(folder: Path, text: Any, name: str = "agent.py") -> Any:
    (folder / name).write_text(text)
    return scan(folder / name, folder).digests


def with_comments(lines: Any, places: Any) -> str:
    """The lines with comments and blank lines put where Python allows any."""
    out = []
    inside = False
    for number, line in enumerate(lines):
        if number in places and not inside:
            out.extend(["", "# a comment", " " * 7 + "# deep"])
        quotes = line.count('"""')
        inside = inside != (quotes % 2 == 1)
        out.append(line + "  # after" if number in places and not inside and quotes == 0 and line else line)
    return "\n".join(out) + "\n"


@given(st.sets(st.integers(0, CODE.count("\n"))))
def test_comments_and_blank_lines_anywhere_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, places: Any
) -> None:
    folder = tmp_path_factory.getbasetemp()
    text = with_comments(CODE.splitlines(), places)
    compile(text, "agent.py", "exec")
    assert fingerprint(folder, text) == fingerprint(folder, CODE)


@pytest.mark.parametrize(
    "change",
    [
        lambda code: code.rstrip("\n"),
        lambda code: code.rstrip("\n") + "  # the end",
        lambda code: code + "\n\n\n",
        lambda code: code.replace("    ", "\t").replace("\t\t\tlines", "            lines"),
        lambda code: code.replace("names = [", "names = [  # first\n"),
        lambda code: code.replace("LIMIT = 3", "LIMIT  =  3"),
        lambda code: code.replace("\n", "\r\n"),
    ],
    ids=["no last newline", "comment at the end", "blank end", "tabs", "comment in a list", "spaces", "other newlines"],
)
def test_layout_changes_nothing(tmp_path: Path, change: Any) -> None:
    (tmp_path / "agent.py").write_bytes(change(CODE).encode())
    assert scan(tmp_path / "agent.py", tmp_path).digests == fingerprint(tmp_path, CODE)


def tokens_that_matter() -> Any:
    """Return the tokens of the code that are more than layout."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(CODE).readline)
    return [token for token in tokens if token.type not in layout and token.string.strip()]


@given(st.data())
def test_a_changed_name_number_or_text_changes_the_fingerprint(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    folder = tmp_path_factory.getbasetemp()
    chosen = [
        t for t in tokens_that_matter() if t.type in (tokenize.NAME, tokenize.NUMBER) and t.string not in ("async",)
    ]
    token = data.draw(st.sampled_from(chosen))
    lines = CODE.splitlines(keepends=True)
    row, column = token.start
    lines[row - 1] = lines[row - 1][:column] + data.draw(st.sampled_from(["x9", "y8"])) + lines[row - 1][token.end[1] :]
    changed = "".join(lines)
    try:
        compile(changed, "agent.py", "exec")
    except SyntaxError:
        return
    assert fingerprint(folder, changed) != fingerprint(folder, CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{prompt!r:>{LIMIT}}", "{prompt!s:>{LIMIT}}"),
        ("} {os", "}  {os"),
        ("#not a comment", "#not a  comment"),
        ("Does things.", "Does other things."),
        ("            lines", "             lines"),
        ("        else:\n            return", "        return"),
        ("    async with x as z:\n        return", "    async with x as z:\n        pass\n    return"),
    ],
    ids=["f-string", "space in an f-string", "hash in a text", "docstring", "space in a text", "branch", "indentation"],
)
def test_tokens_that_only_look_like_layout_count(tmp_path: Path, old: str, new: str) -> None:
    assert old in CODE
    changed = CODE.replace(old, new)
    assert fingerprint(tmp_path, changed) != fingerprint(tmp_path, CODE)


def test_every_python_takes_the_same_fingerprint(tmp_path: Path) -> None:
    """A run goes on under another version of Python, though 3.12 reads f-strings otherwise than 3.11."""
    assert fingerprint(tmp_path, CODE) == {"agent.py": "sha256:e91bac4b0aee77a9be61107740e420dd"}


class TestImports:
    @pytest.fixture
    def project(self, tmp_path: Path) -> Any:
        files = {
            "agent.py": "",
            "helper.py": "X = 1\n",
            "pkg/__init__.py": "",
            "pkg/a.py": "from . import b\nfrom .sub.c import C\n",
            "pkg/b.py": "B = 1\n",
            "pkg/sub/__init__.py": "",
            "pkg/sub/c.py": "from ..b import B\nfrom ... import nothing\nC = 1\n",
            "loose/d.py": "D = 1\n",
            "circle/__init__.py": "",
            "circle/one.py": "from circle import two\n",
            "circle/two.py": "from . import one\n",
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    @pytest.mark.parametrize(
        ("code", "files"),
        [
            ("import helper", {"helper.py"}),
            ("import helper as h, os, json", {"helper.py"}),
            ("from helper import X", {"helper.py"}),
            ("def f():\n    import helper", {"helper.py"}),
            ("try:\n    import helper\nexcept ImportError:\n    pass", {"helper.py"}),
            ("import pkg", {"pkg/__init__.py"}),
            ("import pkg.b", {"pkg/__init__.py", "pkg/b.py"}),
            ("from pkg import b", {"pkg/__init__.py", "pkg/b.py"}),
            (
                "import pkg.a",
                {"pkg/__init__.py", "pkg/a.py", "pkg/b.py", "pkg/sub/__init__.py", "pkg/sub/c.py"},
            ),
            ("from loose.d import D", {"loose/d.py"}),
            ("import loose.d", {"loose/d.py"}),
            ("import circle.one", {"circle/__init__.py", "circle/one.py", "circle/two.py"}),
            ("import numpy, not_installed_anywhere", set()),
            ("x = 'import helper'", set()),
        ],
    )
    def test_the_local_modules_that_are_imported_and_no_others(self, project: Any, code: str, files: Any) -> None:
        assert set(fingerprint(project, code + "\n")) == {"agent.py", *files}

    def test_names_are_relative_so_that_another_machine_has_the_same(
        self, project: Any, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        import shutil

        first = fingerprint(project, "import pkg.a\nimport helper\n")
        other = tmp_path_factory.mktemp("other") / "deep" / "er"
        shutil.copytree(project, other)
        assert scan(other / "agent.py", other).digests == first

    def test_a_module_inside_a_package_finds_its_siblings(self, project: Any) -> None:
        (project / "pkg" / "agent.py").write_text("from pkg import b\nfrom .sub import c\n")
        digests = scan(project / "pkg" / "agent.py", project).digests
        assert {"agent.py", "b.py", "sub/c.py"} <= set(digests)

    def test_modules_of_the_evals_folder_are_found_for_code_elsewhere(self, project: Any) -> None:
        (project / "agents").mkdir()
        (project / "agents" / "one.py").write_text("import helper\n")
        assert "helper.py" in scan(project / "agents" / "one.py", project).digests

    def test_two_modules_of_one_name_in_different_places_both_count(self, project: Any) -> None:
        (project / "agents").mkdir()
        for name, text in {"one": "import helper, d", "helper": ""}.items():
            (project / "agents" / f"{name}.py").write_text(text)
        (project / "d.py").write_text("from . import helper")
        digests = scan(project / "agents" / "one.py", project).digests
        assert set(digests) == {"one.py", "d.py", "helper.py", "../helper.py"}
        assert digests["helper.py"] != digests["../helper.py"]


class TestOnPythonsPath:
    """Code found through PYTHONPATH or an editable install is the user's own, like code next to the eval."""

    @pytest.fixture
    def elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        folder = tmp_path / "elsewhere"
        (folder / "shelf" / "deep").mkdir(parents=True)
        (folder / "shelf" / "__init__.py").write_text("")
        (folder / "shelf" / "deep" / "__init__.py").write_text("from . import book\n")
        (folder / "shelf" / "deep" / "book.py").write_text("import single_file\nPAGES = 1\n")
        (folder / "single_file.py").write_text("raise SystemExit('never imported')\n")
        monkeypatch.syspath_prepend(folder)
        return folder

    @pytest.fixture
    def project(self, tmp_path: Path) -> Any:
        (tmp_path / "project").mkdir()
        return tmp_path / "project"

    def test_modules_are_followed_and_never_imported(self, project: Any, elsewhere: Any) -> None:
        digests = fingerprint(project, "import shelf.deep\n")
        assert set(digests) == {
            "agent.py",
            "shelf/__init__.py",
            "shelf/deep/__init__.py",
            "shelf/deep/book.py",
            "single_file.py",
        }

    def test_a_changed_module_on_the_path_changes_the_fingerprint(self, project: Any, elsewhere: Any) -> None:
        before = fingerprint(project, "from shelf import deep\n")
        (elsewhere / "shelf" / "deep" / "book.py").write_text("import single_file\nPAGES = 2\n")
        after = fingerprint(project, "from shelf import deep\n")
        assert {name for name in before if before[name] != after[name]} == {"shelf/deep/book.py"}

    def test_modules_next_to_the_file_go_first(self, project: Any, elsewhere: Any) -> None:
        (project / "single_file.py").write_text("NEAR = True\n")
        before = fingerprint(project, "import single_file\n")
        (elsewhere / "single_file.py").write_text("FAR = True\n")
        assert fingerprint(project, "import single_file\n") == before

    def test_an_editable_install_that_brings_its_own_finder_is_followed(
        self, project: Any, elsewhere: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(elsewhere)])
        (elsewhere / "single_file.py").write_text("X = 1\n")

        class Finder:
            @staticmethod
            def find_spec(name: Any, _path: Any = None, _target: Any = None) -> Any:
                if name == "single_file":
                    return importlib.util.spec_from_file_location(name, elsewhere / "single_file.py")
                return None

        assert set(fingerprint(project, "import single_file\n")) == {"agent.py"}
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
        assert set(fingerprint(project, "import single_file\n")) == {"agent.py", "single_file.py"}

    def test_python_itself_installed_packages_and_holdfast_are_not_followed(self, project: Any) -> None:
        code = "import json, os.path, sys, msgspec, jinja2.sandbox, pytest, holdfast, holdfast.api, no_such_module\n"
        assert set(fingerprint(project, code)) == {"agent.py"}


class TestWhatCannotBeRead:
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"def f(:\n", r"agent\.py:1: not valid Python"),
            (b"x = 1\n\nif x:\n", r"agent\.py:3: not valid Python"),
            (b"x = '\xff'\n", r"agent\.py"),
            (b"x = 1\0\n", r"agent\.py"),
            (b"# coding: no-such-coding\n", r"agent\.py"),
        ],
        ids=["syntax", "unfinished", "not UTF-8", "NUL", "unknown coding"],
    )
    def test_a_broken_file_is_named_with_its_line(self, tmp_path: Path, content: bytes, words: str) -> None:
        (tmp_path / "agent.py").write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            scan(tmp_path / "agent.py", tmp_path)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"agent\.py: no such file"):
            scan(tmp_path / "agent.py", tmp_path)

    def test_a_folder_is_not_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "agent.py").mkdir()
        with pytest.raises(ConfigError, match="cannot be read"):
            scan(tmp_path / "agent.py", tmp_path)

    def test_a_broken_module_is_named_instead_of_the_file_that_imports_it(self, tmp_path: Path) -> None:
        (tmp_path / "helper.py").write_text("def f(:\n")
        with pytest.raises(ConfigError, match=r"helper\.py:1"):
            fingerprint(tmp_path, "import helper\n")

    def test_a_declared_coding_is_respected(self, tmp_path: Path) -> None:
        (tmp_path / "agent.py").write_bytes("# coding: latin-1\nx = 'é'\n".encode("latin-1"))
        declared = scan(tmp_path / "agent.py", tmp_path).digests
        assert declared == fingerprint(tmp_path, "x = 'é'\n")
