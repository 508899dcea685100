"""A failed start names the problem, its place in the eval file and the remedy, and leaves nothing in the way."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from holdfast.display.displays import Quiet
from holdfast.engine.run import run_eval
from holdfast.engine.session import Options
from holdfast.errors import UsageError
from holdfast.spec.document import read_document
from holdfast.spec.formats import load_any
from tests.support.running import holdfast, run_dir

if TYPE_CHECKING:
    from pathlib import Path

AGENT = "NUMBER = 3\ndef reply(prompt):\n    return prompt\ndef several(*words):\n    return words\n"
HEAD = 'schemaVersion: "1.0"\nname: e\nprompt: "{{ question }}"\n'
SAMPLES = "samples: [{id: a, question: one, expected: one}]\n"
TARGET = "target: {python: agent.py:reply}\n"
GRADERS = "graders: [{type: exact}]\n"
MODEL = "target:\n  model: m\n  base_url: http://127.0.0.1:9/v1\n"


def write(folder: Path, text: str) -> Path:
    (folder / "agent.py").write_text(AGENT)
    (folder / "breaks.py").write_text("x = 1\nraise AttributeError('odd')\n")
    (folder / "wants.py").write_text("import no_such_module\ndef reply(prompt):\n    return prompt\n")
    (folder / "broken.json").write_text("{")
    (folder / "e.yaml").write_text(HEAD + text)
    return folder / "e.yaml"


def graded(block: str) -> str:
    return SAMPLES + TARGET + "graders:\n  - type: exact\n" + block


FUNCTIONS = {
    "target": (SAMPLES + GRADERS + "target:\n  python: {}\n", "target.python", 7),
    "tool": (SAMPLES + GRADERS + MODEL + "  tools:\n    - python: {}\n", r"target.tools\[0\](.python)?", 10),
    "saving": (
        SAMPLES + GRADERS + "target:\n  python: agent.py:reply\n  state:\n    save: {}\n    restore: agent.py:reply\n",
        "target.state.save",
        9,
    ),
    "restoring": (
        SAMPLES + GRADERS + "target:\n  python: wants.py:reply\n  state:\n    save: wants.py:reply\n    restore: {}\n",
        "target.state.restore",
        10,
    ),
    "responder": (SAMPLES + TARGET + GRADERS + "responder:\n  python: {}\n  max_followups: 1\n", "responder.python", 8),
    "grader": (graded("  - type: python\n    function: {}\n"), r"graders\[1\]", 8),
    "checkpoint": (
        SAMPLES + TARGET + GRADERS + "checkpoints:\n  - after_turn: 1\n    graders:\n"
        "      - type: python\n        function: {}\n",
        r"checkpoints\[0\].graders\[0\]",
        10,
    ),
}


def refused(folder: Path, text: str) -> str:
    """Return the message about an eval that cannot start, and check that no file is left."""
    path = write(folder, text)
    with pytest.raises(UsageError) as caught:
        run_eval(load_any(read_document(path)), Options(folder / "runs"), Quiet())
    assert not (folder / "runs").exists()
    return str(caught.value)


@pytest.mark.parametrize("place", FUNCTIONS)
def test_a_missing_file_of_a_function_is_reported_with_its_line(tmp_path: Path, place: str) -> None:
    text, key, line = FUNCTIONS[place]
    message = refused(tmp_path, text.replace("{}", "missing.py:go"))
    assert re.search(rf"e\.yaml:{line}: {key}: {tmp_path}/missing\.py: no such file\n", message), message
    assert "Name the function as FILE.py:NAME" in message


@pytest.mark.parametrize("place", [place for place in FUNCTIONS if place != "restoring"])
@pytest.mark.parametrize(
    ("reference", "wrong"),
    [
        ("agent.py:repyl", r"agent\.py has no function 'repyl'\nhint: Did you mean 'reply'\?"),
        ("agent.py:NUMBER", r"'NUMBER' in .*agent\.py is not a function\nhint: It has: reply, several\."),
        ("breaks.py:go", r"breaks\.py cannot be imported: breaks\.py:2: AttributeError: odd"),
        (
            "wants.py:reply",
            r"wants\.py:1: ModuleNotFoundError: No module named 'no_such_module'\nhint: Install it for ",
        ),
    ],
    ids=["no function", "no function of it", "raises", "not installed"],
)
def test_a_function_that_cannot_be_loaded_is_reported_with_its_line(
    tmp_path: Path, place: str, reference: str, wrong: str
) -> None:
    text, key, line = FUNCTIONS[place]
    message = refused(tmp_path, text.replace("{}", reference))
    assert re.search(rf"e\.yaml:{line}: {key}: .*{wrong}", message), message


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (
            graded("  - {type: json_schema, schema_file: gone.json}\n"),
            r"8: graders\[1\]: .*gone.json cannot be read: No",
        ),
        (graded("  - {type: json_schema, schema_file: broken.json}\n"), r"8: graders\[1\]: broken.json is not a JSON"),
        (
            graded("  - {type: diff, expected_files: [{path: a, snapshot: gone.txt}]}\n") + "workspace: {}\n",
            r"8: graders\[1\]: .*gone.txt cannot be read: No such file or directory\nhint: Paths are relative to",
        ),
        (
            graded("  - {type: trigger, skill_path: gone, mode: positive}\n"),
            r"8: graders\[1\]: .*gone cannot be read",
        ),
        (
            graded("  - {type: program, command: ./gone}\n"),
            r"8: graders\[1\]: .*/gone is not a file\nhint: Paths are relative",
        ),
        (graded("  - {type: program, command: gone-away}\n"), r"8: graders\[1\]: gone-away is not on the PATH\n"),
        (
            graded("  - {type: program, command: agent.py}\n"),
            r"8: graders\[1\]: .*agent.py is not executable\nhint: chmod",
        ),
        (graded("  - {type: prompt, rubric: good, model: m}\n"), r"8: graders\[1\]: no API key: OPENAI_API_KEY is not"),
        (SAMPLES + GRADERS + "target:\n  model: m\n", r"7: target.model: no API key: .*\nhint: export OPENAI_API_KEY"),
        (
            SAMPLES + GRADERS + "target:\n  model: local/gone\n",
            r"7: target.model: no embedded model 'local/gone'\nhint: Th",
        ),
        (SAMPLES + GRADERS + "target:\n  command: [./gone]\n", r"7: target.command: .*/gone is not a file\n"),
        (
            SAMPLES + GRADERS + "target:\n  command: [agent.py]\n",
            r"agent.py is not on the PATH\nhint: Write it as ./agent",
        ),
        (SAMPLES + GRADERS + MODEL + "  tools: [{mcp: {command: [./gone]}}]\n", r"9: target.tools\[0\]: .*/gone is no"),
        (SAMPLES + GRADERS + MODEL + "  tools: ['agent.py:reply']\n", r"9: target.tools\[0\]: .*keys such as python, "),
        (SAMPLES + TARGET + GRADERS + "workspace: {folder: gone}\n", r"7: workspace.folder: .*gone: no such folder\n"),
        (SAMPLES + TARGET + GRADERS + "workspace: {folder: agent.py}\n", r"7: workspace.folder: .*: not a folder\n"),
        (
            TARGET + GRADERS + "dataset:\n  path: gone.jsonl\n",
            r"7: dataset.path: .*gone.jsonl: no such file\nhint: Paths a",
        ),
        (TARGET + GRADERS + "dataset:\n  path: [gone-*.csv]\n", r"7: dataset.path.*gone-\*.csv: matches no file\n"),
        (SAMPLES + TARGET + GRADERS + "promt: x\n", r"7: promt: unknown key \(did you mean 'prompt'\?\)"),
    ],
)
def test_missing_files_of_an_eval_are_reported_with_their_line(
    tmp_path: Path, text: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    message = refused(tmp_path, text)
    assert re.search(rf"e\.yaml:{wrong}" if wrong[0].isdigit() else wrong, message), message


def test_the_command_exits_with_2_and_works_once_the_file_is_fixed(tmp_path: Path) -> None:
    path = write(tmp_path, SAMPLES + GRADERS + "target:\n  python: mine.py:reply\n")
    failed = holdfast("eval", path.name, cwd=tmp_path, check=2)
    assert "e.yaml:7: target.python: " in failed.stderr and "Traceback" not in failed.stderr
    assert not (tmp_path / "runs").exists()
    (tmp_path / "mine.py").write_text(AGENT)
    holdfast("eval", path.name, cwd=tmp_path)
    assert (run_dir(tmp_path) / "metrics.json").exists()


HOOK = "hooks: {before_run: [{command: sh hook.sh, error_on_fail: true}]}\n"


def test_a_run_that_never_began_leaves_no_files(tmp_path: Path) -> None:
    path = write(tmp_path, SAMPLES + TARGET + GRADERS + HOOK)
    (tmp_path / "hook.sh").write_text("exit 7\n")
    failed = holdfast("eval", path.name, cwd=tmp_path, check=3)
    assert "hooks.before_run: sh ended with 7" in failed.stderr
    assert list((tmp_path / "runs").rglob("*")) == []
    (tmp_path / "hook.sh").write_text("exit 0\n")
    holdfast("eval", path.name, cwd=tmp_path)
    assert (run_dir(tmp_path) / "metrics.json").exists()


def test_a_run_that_has_begun_is_kept_when_it_cannot_continue(tmp_path: Path) -> None:
    path = write(tmp_path, SAMPLES + TARGET + GRADERS + HOOK)
    (tmp_path / "hook.sh").write_text("exit 0\n")
    holdfast("eval", path.name, "--skip-graders", cwd=tmp_path)
    run = run_dir(tmp_path)
    before = (run / "outputs.jsonl").read_bytes()
    (tmp_path / "hook.sh").write_text("exit 7\n")
    path.write_text(path.read_text() + "trials: 2\n")  # another run, which takes over what is there
    holdfast("eval", path.name, cwd=tmp_path, check=3)
    assert (run / "outputs.jsonl").read_bytes() == before
    others = [place for place in run.parent.iterdir() if place != run]
    assert [len((place / "outputs.jsonl").read_text().splitlines()) for place in others] == [1]


def test_workers_that_cannot_start_report_why_once(tmp_path: Path) -> None:
    path = write(tmp_path, SAMPLES + TARGET + GRADERS + HOOK)
    (tmp_path / "hook.sh").write_text("exit 7\n")
    failed = holdfast("eval", path.name, "--workers", "2", cwd=tmp_path, check=3)
    output: str = failed.stdout + failed.stderr
    assert output.count("hooks.before_run: sh ended with 7") == 1
    logs = list(run_dir(tmp_path).glob("workers/*/run.log"))
    assert logs and all("end hooks.before_run: sh ended with 7" in log.read_text() for log in logs)
    (tmp_path / "hook.sh").write_text("exit 0\n")
    holdfast("eval", path.name, "--workers", "2", cwd=tmp_path)
    assert (run_dir(tmp_path) / "metrics.json").exists()
