"""Whatever a dataset, a model, a server or a run says, a terminal obeys nothing of it, whatever the command."""

from __future__ import annotations

import ast
import json
import re
from typing import TYPE_CHECKING

import pytest

from holdfast.display.terminal import echo, echo_json, printable, printable_json
from tests.hostile.inputs import ALL, TEXTS, assert_harmless, hostile_eval
from tests.support.running import ROOT, holdfast, on_a_terminal
from tests.support.serving import read_body, send, serving
from tests.support.specs import write_spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from http.server import BaseHTTPRequestHandler
    from pathlib import Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of hostile texts, one trial of which has an error, and that fails its graders."""
    folder = tmp_path_factory.mktemp("hostile")
    holdfast("eval", hostile_eval(folder), cwd=folder, check=3)
    holdfast("eval", "eval.yaml", "--accept-errors", cwd=folder, check=None)
    (folder / "second.yaml").write_text((folder / "eval.yaml").read_text().replace('"name": "e"', '"name": "f"'))
    return folder


def run_of(folder: Path) -> str:
    (path,) = (path for path in (folder / "runs" / "e").iterdir() if path.is_dir())
    return str(path)


COMMANDS: dict[str, tuple[str, ...]] = {
    "eval": ("eval", "eval.yaml", "--accept-errors"),
    "fresh plain": ("eval", "eval.yaml", "--fresh", "--display", "plain", "--runs-dir", "other"),
    "fresh rich": ("eval", "eval.yaml", "--fresh", "--display", "rich", "--runs-dir", "other"),
    "workers": ("eval", "eval.yaml", "--fresh", "--workers", "1", "--runs-dir", "other"),
    "dry run": ("eval", "eval.yaml", "--dry-run"),
    "suite": ("eval", "eval.yaml", "second.yaml", "--dry-run"),
    "ls": ("ls",),
    "show": ("show", "RUN"),
    "show failed": ("show", "RUN", "--failed"),
    "show errors": ("show", "RUN", "--errors"),
    "show a sample": ("show", "RUN", "0"),
    "compare": ("compare", "RUN", "RUN"),
    "gate": ("gate", "RUN", "--min", "score=0.5"),
    "gate on GitHub": ("gate", "RUN", "--min", "score=0.5", "--format", "github"),
    "status": ("status", "RUN"),
    "logs": ("logs", "RUN"),
    "batches": ("batches", "RUN"),
    "repair": ("repair", "RUN", "--dry-run"),
    "grade": ("grade", "RUN", "--accept-errors"),
    "export": ("export", "RUN", "--to", "csv"),
    "cache": ("cache", "ls"),
    "no such run": ("show", ALL.replace("\x00", "")),
    "no such file": ("eval", f"{ALL}.yaml".replace("\x00", "")),
    "no such verb": (ALL.replace("\x00", ""),),
}


def arguments_of(name: str, folder: Path) -> list[str]:
    return [run_of(folder) if word == "RUN" else word for word in COMMANDS[name]]


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_in_a_pipe_is_obeyed(place: Path, name: str) -> None:
    done = holdfast(*arguments_of(name, place), cwd=place, check=None)
    assert done.stdout + done.stderr and "this is a bug" not in done.stderr
    if name == "fresh rich":
        assert_harmless(done.stdout)
        assert_harmless(done.stderr, terminal=True)
    else:
        assert_harmless(done.stdout + done.stderr)


@pytest.mark.parametrize(
    "name", ["fresh rich", "fresh plain", "eval", "ls", "show", "show a sample", "compare", "cache"]
)
def test_nothing_on_a_terminal_is_obeyed(place: Path, name: str) -> None:
    codes = {"fresh rich": 3, "fresh plain": 3}
    screen = on_a_terminal(
        *arguments_of(name, place), cwd=place, columns=100, code=codes.get(name, 0), PAGER="cat", LESS=""
    )
    assert_harmless(screen.replace("\r\n", "\n"), terminal=True)
    assert "\x1b[" in screen or name.startswith("show"), "our own styles are, but not by every pager"


JSON = {
    "ls": ("ls", "--json"),
    "show": ("show", "RUN", "--json"),
    "show a sample": ("show", "RUN", "0", "--json"),
    "compare": ("compare", "RUN", "RUN", "--json"),
    "gate": ("gate", "RUN", "--min", "score=0.5", "--format", "json"),
    "dry run": ("eval", "eval.yaml", "--dry-run", "--json"),
    "suite": ("eval", "eval.yaml", "second.yaml", "--dry-run", "--json"),
    "status": ("status", "RUN", "--json"),
}


@pytest.mark.parametrize("name", JSON)
def test_json_says_the_same_in_escapes(place: Path, name: str) -> None:
    done = holdfast(*[run_of(place) if word == "RUN" else word for word in JSON[name]], cwd=place, check=None)
    assert_harmless(done.stdout)
    data = json.loads(done.stdout)
    if name in ("show", "show a sample"):
        assert json.dumps(ALL) in json.dumps(data)


def test_events_say_the_same_in_escapes(place: Path) -> None:
    done = holdfast("eval", "eval.yaml", "--fresh", "--display", "json", "--runs-dir", "events", cwd=place, check=3)
    assert_harmless(done.stderr)
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert any(TEXTS["clear"] in event.get("message", "") for event in events)


def test_the_log_of_a_run_can_be_shown(place: Path) -> None:
    logs = [path.read_text() for path in place.rglob("run.log")]
    assert logs
    for log in logs:
        assert_harmless(log)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server that refuses every request with a hostile message."""

    def refuse(handler: BaseHTTPRequestHandler) -> None:
        read_body(handler)
        send(handler, 400, {"error": {"message": ALL}})

    with serving(refuse) as address:
        yield f"{address}/v1"


@pytest.mark.parametrize("display", ["plain", "rich", "none"])
def test_the_errors_of_a_server_are_not_obeyed(tmp_path: Path, server: str, display: str) -> None:
    target = {"model": "m", "base_url": server, "api_key_env": "NO_KEY"}
    write_spec(tmp_path, target=target, limits={"retries": 0})
    screen = on_a_terminal("eval", "eval.yaml", "--display", display, cwd=tmp_path, columns=100, code=3)
    assert_harmless(screen.replace("\r\n", "\n"), terminal=True)
    assert "\\x1b]0;pwned" in re.sub(r"\x1b\[[\d;]*m|\r\n", "", screen), "the message itself is shown"


@pytest.mark.parametrize("name", TEXTS)
def test_each_text_is_spelled_out(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = TEXTS[name]
    assert printable(text).isprintable() and printable(printable(text)) == printable(text)
    assert json.loads(printable_json(json.dumps([text], ensure_ascii=False))) == [text]
    echo(text)
    echo_json(json.dumps([text], ensure_ascii=False))
    assert_harmless("".join(capsys.readouterr()))


ALLOWED = {
    "display/terminal.py": "the sink",
    "display/grid.py": "the console, what it has drawn, and rows that were spelled out",
}
"""modules that write to standard output or error themselves, and why that is safe"""


def test_nothing_else_writes_to_the_terminal() -> None:
    source = ROOT / "src" / "holdfast"
    ways = re.compile(r"click\.s?echo\b|(?<![\w.])print\(|(?<!Safe)\bConsole\(|sys\.std(out|err)\.write|print_exc\(")
    writers = set()
    for path in source.rglob("*.py"):
        name = path.relative_to(source).as_posix()
        if name.startswith(("containment/", "graders/", "targets/", "apps/view/")) or name in ALLOWED:
            continue  # these write in processes of their own, to pipes
        # Texts of programs for other machines, and docstrings, are no calls.
        code = ast.unparse(_without_texts(ast.parse(path.read_text())))
        if ways.search(code):
            writers.add(name)
    assert writers == set()


def _without_texts(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return tree
