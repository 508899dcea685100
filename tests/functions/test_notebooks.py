"""Functions that are typed into a notebook or an interpreter work, and are identified by their code and what it uses.

Cells are run as IPython runs them: compiled under a name of their own, their text kept by `linecache`.
"""

from __future__ import annotations

import itertools
import linecache
import os
import pty
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.display.displays import Display, Plain
from holdfast.errors import UsageError
from tests.support.running import environment
from tests.support.running import holdfast as command

if TYPE_CHECKING:
    from pathlib import Path

ROWS = [{"id": "a", "text": "abc"}, {"id": "b", "text": "bcd"}]
TARGET = "def reply(prompt): return prompt\n"
_numbers = itertools.count()


class Notices(Display):
    """Keeps what a person is told."""

    def __init__(self) -> None:
        self.said = []

    def notice(self, message: Any) -> None:
        self.said.append(message)


@pytest.fixture
def session(tmp_path: Path) -> Any:
    """A session: `cell` runs one, `evaluate` evaluates what the cells have defined."""
    names = {"__name__": "__main__"}

    def cell(text: Any) -> None:
        place = f"<cell-{next(_numbers)}>"
        linecache.cache[place] = len(text), None, text.splitlines(keepends=True), place
        exec(compile(text, place, "exec"), names)

    def evaluate(**keys: Any) -> Any:
        arguments = {"name": "nb", "samples": ROWS, "prompt": "{{ text }}", "runs_dir": tmp_path / "runs", **keys}
        if not isinstance(arguments.get("target"), dict):
            arguments["target"] = names[arguments.get("target", "reply")]
        arguments["graders"] = [names[each] if isinstance(each, str) else each for each in arguments.get("graders", [])]
        return holdfast.evaluate(**arguments)

    return SimpleNamespace(cell=cell, evaluate=evaluate, names=names)


def test_functions_and_lambdas_of_cells_are_targets_and_graders(session: Any) -> None:
    session.cell("calls = 0\ndef reply(prompt):\n    global calls\n    calls += 1\n    return prompt.upper()\n")
    session.cell("def loud(output): return output.isupper()\nshort = lambda output: len(output) < 4\n")
    first = session.evaluate(graders=["loud", "short"])
    assert first.score == 1 and first.metrics.target == "reply" and first.path.name.startswith("reply-")
    assert session.evaluate(graders=["loud", "short"]) == first
    assert session.names["calls"] == 2, "the second time everything was there"


BASE = """
import re
WORDS = ["x", "y"]
LIMIT = 3
PATTERN = re.compile("a+")
UNUSED = 1
class Config:
    depth = 2
    def deep(self): return self.depth
def helper(text):
    return text + WORDS[0] + str(LIMIT)
def reply(prompt, width=2):
    def inner(text): return helper(text)
    return inner(prompt) + str(bool(PATTERN.search(prompt))) + str(Config().deep()) * width
"""


@pytest.mark.parametrize(
    "cell",
    [
        "WORDS[0] = 'z'",
        "WORDS = {'x': 1}",
        "LIMIT = 4",
        "PATTERN = re.compile('a+', re.I)",
        "Config.depth = 3",
        "def helper(text): return text",
        "class Config(Config):\n    def deep(self): return 9",
        BASE.replace("width=2", "width=3"),
        BASE.replace("inner(prompt) +", "inner(prompt.upper()) +"),
    ],
)
def test_a_change_of_what_a_function_uses_is_another_run(session: Any, cell: Any) -> None:
    session.cell(BASE)
    first = session.evaluate()
    session.cell(cell)
    assert session.evaluate().path != first.path


@pytest.mark.parametrize(
    "cell",
    [
        "UNUSED = 2",
        "WORDS = ['x', 'y']",
        "def other(text): return text",
        BASE,
        "# a comment\n" + BASE.replace("def reply", "\n\n# another\ndef reply"),
        "def helper(text):\n    # the same\n    return text + WORDS[0] + str(LIMIT)\n",
    ],
)
def test_settings_in_no_key_reuse_the_run(session: Any, cell: Any) -> None:
    session.cell(BASE)
    first = session.evaluate()
    session.cell(cell)
    assert session.evaluate().path == first.path


def test_two_lambdas_are_two_graders_and_an_edited_one_grades_again(session: Any) -> None:
    session.cell("calls = []\ndef reply(prompt):\n    calls.append(1)\n    return prompt\n")
    session.cell("one = lambda output: 'a' in output\n")
    first = session.evaluate(graders=["one"])
    session.cell("one = lambda output: 'c' in output\n")
    second = session.evaluate(graders=["one"])
    assert (first.score, second.score, len(session.names["calls"])) == (0.5, 1, 2)


def test_objects_and_methods_of_typed_in_classes_are_identified_by_class_and_state(session: Any) -> None:
    text = "class Agent:\n    def __init__(self, word): self.word = word\n    def say(self, prompt): return self.word\n"
    session.cell(text + "reply = Agent('x').say\n")
    paths = [session.evaluate().path]
    session.cell("reply = Agent('y').say\n")
    paths.append(session.evaluate().path)
    session.cell(text.replace("return self.word", "return self.word * 2") + "reply = Agent('x').say\n")
    paths.append(session.evaluate().path)
    session.cell(text + "reply = Agent('x').say\n")
    assert len(set(paths)) == 3 and session.evaluate().path == paths[0]


def test_a_typed_in_class_can_be_a_target_and_is_identified_by_its_code(session: Any) -> None:
    text = "class Agent:\n    def __call__(self, prompt):\n        calls.append(prompt)\n        return prompt\n"
    session.cell("calls = []\n" + text + "reply = Agent\n")
    first = session.evaluate()
    assert first.results()[0]["output"] == "abc" and len(session.names["calls"]) == 2
    assert session.evaluate() == first and len(session.names["calls"]) == 2
    session.cell(text.replace("return prompt\n", "return prompt * 2\n") + "reply = Agent\n")
    second = session.evaluate()
    assert second.path != first.path and second.results()[0]["output"] == "abcabc"


def test_a_typed_in_object_that_counts_its_calls_stays_the_same(session: Any) -> None:
    session.cell(
        "class Agent:\n    count = 0\n    def __call__(self, prompt):\n        self.count += 1\n        return prompt\n"
    )
    session.cell("reply = Agent()\n")
    first = session.evaluate()
    assert session.evaluate() == first and session.names["reply"].count == 2


WRAPPED = """
import functools
def twice(function):
    @functools.wraps(function)
    def wrapper(prompt): return function(prompt) * 2
    return wrapper
@twice
def reply(prompt): return prompt
"""


@pytest.mark.parametrize(
    "text", [WRAPPED, WRAPPED.replace("    @functools.wraps(function)\n", "")], ids=["with wraps", "without"]
)
def test_decorators_of_the_session_count(session: Any, text: Any) -> None:
    session.cell(text)
    first = session.evaluate()
    assert first.results()[0]["output"] == "abcabc" and session.evaluate().path == first.path
    session.cell(text.replace("* 2", "* 3"))
    assert session.evaluate().results()[0]["output"] == "abcabcabc"
    session.cell(text.replace("return prompt\n", "return prompt[0]\n"))
    assert session.evaluate().results()[0]["output"] == "aa"


def test_a_function_of_a_file_in_a_decorator_of_the_session_is_known_by_both(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "nb_plain.py").write_text("def plain(prompt): return prompt\n")
    session.cell(
        "import nb_plain\n"
        + WRAPPED.replace("@twice\ndef reply(prompt): return prompt", "reply = twice(nb_plain.plain)")
    )
    first = session.evaluate()
    session.cell(
        WRAPPED.replace("* 2", "* 3").replace(
            "@twice\ndef reply(prompt): return prompt", "reply = twice(nb_plain.plain)"
        )
    )
    assert session.evaluate().results()[0]["output"] == "abcabcabc" and session.evaluate().path != first.path


def test_code_that_no_key_covers_is_reported(session: Any) -> None:
    session.cell("client = object()\nlog = []\ndef helper(): return client\n")
    session.cell("def reply(prompt):\n    log.append(helper())\n    return prompt\n")
    notices = Notices()
    session.evaluate(display=notices)
    (notice,) = notices.said
    assert notice.startswith("reply uses log, client, which its key does not cover") and "fresh=True" in notice


def test_a_users_module_that_a_cell_uses_counts_and_must_not_be_stale(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "nb_helper.py").write_text("def word(): return 'x'\n")
    session.cell("import importlib, nb_helper\ndef reply(prompt): return nb_helper.word()\n")
    first = session.evaluate()
    (tmp_path / "nb_helper.py").write_text("def word(): return 'longer'\n")
    with pytest.raises(UsageError, match=r"nb_helper\.py has changed since nb_helper was imported"):
        session.evaluate()
    session.cell("importlib.reload(nb_helper)\n")
    second = session.evaluate()
    assert second.path != first.path and second.results()[0]["output"] == "longer"


def test_tools_simulated_users_and_checkpoints_may_be_functions(session: Any) -> None:
    session.cell(
        "STEP = 1\n"
        "def add(n: int) -> int:\n    'Add.'\n    return n + STEP\n"
        "def agent(prompt, context): return str(context.tool('add', {'n': 3}))\n"
        "def user(turn): return 'more' if turn == 1 else None\n"
        "def four(output): return output == '4'\n"
    )
    names = session.names

    def run() -> Any:
        return session.evaluate(
            target={"python": names["agent"], "tools": [names["add"]]},
            responder={"python": names["user"], "max_followups": 3},
            checkpoints=[{"after_turn": 1, "graders": [names["four"]]}],
            graders=[{"type": "python", "function": names["four"], "name": "end"}],
        )

    first = run()
    assert first.score == 1 and first.metrics.graders["checkpoint@1/four"].passed == 2
    session.cell("STEP = 2\n")
    assert run().score == 0


def test_an_agents_own_state_may_be_kept_by_functions(session: Any) -> None:
    session.cell(
        "def agent(prompt, context): return prompt\ndef save(context): return 1\ndef restore(state, context): pass\n"
    )
    names = session.names
    target = {"python": names["agent"], "state": {"save": names["save"], "restore": names["restore"]}}
    first = session.evaluate(target=target)
    session.cell("def save(context): return 2\n")
    target["state"]["save"] = names["save"]
    assert first.finished and session.evaluate(target=target).path != first.path


def test_a_function_without_source_is_identified_by_its_compiled_code(tmp_path: Path) -> None:
    """An interpreter that reads its standard input keeps no source. What it compiles is the same in every process."""
    script = (
        "import holdfast\n"
        "class Words:\n    few = 'x'\n"
        "def reply(prompt): return Words.few if prompt in {'abc', 'x', 'y', 'z'} else 'y'\n"
        "run = holdfast.evaluate(name='e', samples=[{'id': 'a'}], prompt='abc', target=reply,\n"
        "                        graders=[lambda output: output in {'x', 'z', 'w'}])\n"
        "print(run.path, run.score)\n"
    )

    def ran(text: Any, seed: Any) -> Any:
        done = subprocess.run(
            [sys.executable, "-"],
            input=text,
            cwd=tmp_path,
            env=environment(PYTHONHASHSEED=seed),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    first = ran(script, "1")
    assert first[1] == "1.0" and ran(script, "2") == first
    assert ran(script.replace("few = 'x'", "few = 'z'"), "1")[0] != first[0]
    assert ran(script.replace("{'abc', 'x', 'y', 'z'}", "{'abc', 'x', 'y'}"), "1")[0] != first[0]


def test_the_command_grades_a_notebooks_run_and_says_why_it_cannot_continue_it(session: Any, tmp_path: Path) -> None:
    session.cell(TARGET)
    run = session.evaluate(graders=[{"type": "text", "contains": "a"}])
    assert run.score == 0.5
    done = command("grade", run.path, "graders.0.contains=c", cwd=tmp_path)
    assert "1.000" in done.stdout
    session.cell("def reply(prompt): raise ValueError(prompt)\n")
    run = session.evaluate(limits={"retries": 0})
    done = command("resume", run.path, cwd=tmp_path, check=2)
    assert (
        "reply is defined in a notebook or interpreter" in done.stderr
        and "move the function to a .py file" in done.stderr
    )


class TestDisplays:
    @pytest.mark.parametrize("name", ["rich", "plain", "json", "none"])
    def test_displays_are_chosen_by_name(self, session: Any, capsys: pytest.CaptureFixture[str], name: str) -> None:
        session.cell(TARGET)
        assert session.evaluate(display=name).finished
        stderr = capsys.readouterr().err
        assert {"rich": "2 to run", "plain": "2 to run", "json": '"event":"begin"', "none": ""}[name] in stderr
        assert name != "none" or stderr == ""

    @pytest.mark.parametrize("wrong", ["loud", 3, Plain])
    def test_an_unknown_display_is_refused(self, session: Any, tmp_path: Path, wrong: Any) -> None:
        session.cell(TARGET)
        with pytest.raises(UsageError, match="rich, plain, json, none"):
            session.evaluate(display=wrong)
        assert not (tmp_path / "runs").exists()

    @pytest.mark.parametrize(("kernel", "shown"), [(True, "2 to run"), (False, "")])
    def test_a_notebook_shows_lines_by_default_and_a_script_without_terminal_nothing(
        self,
        session: Any,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        kernel: bool,
        shown: str,
    ) -> None:
        if kernel:
            monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
        session.cell(TARGET)
        session.evaluate()
        stderr = capsys.readouterr().err
        assert shown in stderr and (kernel or stderr == "")

    def test_a_terminal_shows_progress_by_default(self, tmp_path: Path) -> None:
        (tmp_path / "script.py").write_text(
            "import holdfast\ndef reply(prompt): return prompt\n"
            "holdfast.evaluate(name='e', samples=[{'id': 'a'}], prompt='x', target=reply)\n"
        )
        ours, theirs = pty.openpty()
        done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, stderr=theirs, env=environment(TERM="xterm"))
        screen = os.read(ours, 65536).decode()
        os.close(ours)
        os.close(theirs)
        assert done.returncode == 0 and "1 to run" in screen and "\x1b[" in screen


class TestRuns:
    def test_results_have_the_row_the_prompt_and_the_feedback(self, session: Any) -> None:
        session.cell(TARGET)
        session.cell("def check(output): return {'score': 'a' in output, 'reason': 'has an a'}\n")
        entry = session.evaluate(graders=["check"], prompt="Say {{ text }}").results()[0]
        assert (entry["row"], entry["prompt"]) == (ROWS[0], "Say abc")
        assert entry["grades"]["check"] == {"status": "passed", "score": 1.0, "feedback": "has an a"}

    def test_trials_without_an_output_have_their_row(self, session: Any) -> None:
        session.cell("def reply(prompt): return prompt if 'a' in prompt else 1 / 0\n")
        run = session.evaluate(accept_errors=True, limits={"retries": 0})
        assert [entry["row"] for entry in run.results()] == ROWS
        assert [entry["prompt"] for entry in run.results()] == ["abc", None]

    def test_the_repr_is_one_short_line_and_a_notebook_shows_a_table(self, session: Any) -> None:
        session.cell(TARGET)
        session.cell("def check(output): return 'a' in output\n")
        run = session.evaluate(graders=["check"], name="a<b")
        assert repr(run) == f"<Run a<b · reply, score 0.500, 1 of 2 passed, coverage 100.0%, {run.path}>"
        shown = run._repr_html_()
        assert "<td>check</td><td>0.500</td>" in shown and "a&lt;b" in shown and "a<b" not in shown

    def test_an_unfinished_one_says_why(self, session: Any) -> None:
        session.cell("def reply(prompt): raise ValueError('no <b>')\n")
        run = session.evaluate(limits={"retries": 0})
        assert repr(run).startswith(f"<Run {run.path}, not finished: 2 of 2 trials have errors")
        assert "not finished" in run._repr_html_() and "&lt;Run" in run._repr_html_()
