"""Displays: the output that a person or a program sees during a run."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

import holdfast
from holdfast.display.displays import (
    Display,
    Events,
    LiveDisplay,
    Plain,
    Quiet,
    Result,
    SuiteCell,
    _render,
    inside,
    money,
    scores,
    tokens,
    trouble,
)
from holdfast.display.format import dollars, duration, latency, rate, share
from holdfast.display.grid import Column, fit_table, print_list
from holdfast.plan.plan import Plan
from holdfast.plan.progress import GraderProgress, Progress
from holdfast.store.records import ErrorRecord, Grade, Spent, Usage
from tests.support.running import holdfast as run_command
from tests.support.running import on_a_terminal, server, write_eval
from tests.support.specs import output_of, write_spec

if TYPE_CHECKING:
    from pathlib import Path


def plan(**numbers: Any) -> Any:
    return Plan(**{"samples": 100, "trials": 2, "finished": 20, "to_grade": 5, "to_run": 175, **numbers})


def progress(**state: Any) -> Any:
    return Progress(plan(), Spent(tokens=12345, requests=9, cost=0.0123), **{"outputs": 75, "graded": 70, **state})


def error(**fields: Any) -> Any:
    plain = {
        "key": "k",
        "sample": "s1",
        "trial": 2,
        "attempt": 1,
        "where": "target",
        "kind": "server",
        "message": "told to fail",
        "status": 500,
        "time": 1.0,
        "seconds": 0.1,
        "final": True,
    }
    return ErrorRecord(**{**plain, **fields})


GRADE = Grade("k", "s1", 2, "exact", "exact", "g", None, "d", "failed", 0.0, 1.0, "why", None, 0.0)


class TestNumbers:
    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (None, "?"),
            (0, "0.0s"),
            (9.94, "9.9s"),
            (12.4, "12s"),
            (59.6, "1m 00s"),
            (200, "3m 20s"),
            (3599.7, "1h 00m"),
            (3725, "1h 02m"),
            (90000, "25h 00m"),
        ],
    )
    def test_durations(self, seconds: float | int | None, text: str) -> None:
        assert duration(seconds) == text

    @pytest.mark.parametrize(
        ("per_second", "text"),
        [(0, ""), (12.34, "12.3/s"), (1, "1.0/s"), (0.5, "30.0/min"), (0.02, "1.2/min"), (0.01, "36.0/h")],
    )
    def test_rates(self, per_second: float | int, text: str) -> None:
        assert rate(per_second) == text

    @pytest.mark.parametrize(("seconds", "text"), [(0.0031, "3ms"), (0.85, "850ms"), (1, "1.0s"), (200, "3m 20s")])
    def test_latencies(self, seconds: float | int, text: str) -> None:
        assert latency(seconds) == text

    @pytest.mark.parametrize(("value", "text"), [(None, "–"), (0, "0.000"), (2 / 3, "0.667"), (1.0, "1.000")])
    def test_scores(self, value: Any, text: str) -> None:
        assert share(value) == text

    @pytest.mark.parametrize(
        ("cost", "text"),
        [(0, "$0.00"), (0.0000021, "<$0.0001"), (0.00012, "$0.0001"), (0.5, "$0.5000"), (12.346, "$12.35")],
    )
    def test_sums_of_money(self, cost: float | int, text: str) -> None:
        assert dollars(cost) == text

    @pytest.mark.parametrize(
        ("usages", "cost", "count"),
        [
            ([Usage(10, 5, 1, 0.5)], "$0.5000", "15 tokens"),
            ([Usage(1000, 500, 1, 0.5), Usage(5, 5, 1, None)], "$0.5000 + unknown", "1,510 tokens"),
            ([Usage(10, 5, 1, None)], "cost unknown", "15 tokens"),
            ([Usage(None, None, 1, None)], "cost unknown", "tokens unknown"),
            ([Usage(10, 5, 1, 0.0)], "$0.00", "15 tokens"),
            ([], "$0.00", "0 tokens"),
        ],
    )
    def test_unknown_numbers_are_shown_as_unknown_not_as_zero(self, usages: Any, cost: str, count: str) -> None:
        spent = Spent()
        for usage in usages:
            spent.add(usage)
        assert (money(spent), tokens(spent)) == (cost, count)


class TestProgress:
    def test_the_rate_is_that_of_the_last_half_minute_and_gives_the_time_left(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = [1000.0]
        monkeypatch.setattr("holdfast.plan.progress.time.monotonic", lambda: now[0])
        state = progress()
        assert (state.rate, state.eta) == (0.0, None)
        state.mark()
        for _ in range(10):
            now[0] += 1
            state.outputs += 5
            state.mark()
        assert state.rate == pytest.approx(5.0)
        assert state.eta is None, "nothing was graded yet, and nobody knows how long that takes"
        state.graded += 20
        assert state.eta == pytest.approx((200 - 90) / 2), "grading is slower, and as much a part of the run"
        state.graded += 180
        assert state.eta == pytest.approx((200 - 125) / 5)

    def test_work_of_others_and_failed_trials_are_not_in_the_time_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [1000.0]
        monkeypatch.setattr("holdfast.plan.progress.time.monotonic", lambda: now[0])
        only_outputs, only_grades = progress(grades=False), progress(generates=False, outputs=100, graded=0)
        for state in (only_outputs, only_grades):
            state.mark()
        now[0] += 10
        only_outputs.outputs += 25
        only_grades.graded += 50
        assert only_outputs.eta == pytest.approx(100 / 2.5)
        assert only_grades.eta == pytest.approx(50 / 5) and only_grades.rate == pytest.approx(5)
        only_outputs.given_up, only_grades.ungraded = 100, 50
        assert only_outputs.eta == only_grades.eta == 0

    def test_a_rate_limit_lasts_until_somebody_is_answered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [1000.0]
        monkeypatch.setattr("holdfast.plan.progress.time.monotonic", lambda: now[0])
        state = progress()
        for _ in range(3):
            state.wait("target", limited=True)
        state.wait("judge", limited=True)
        state.wait("target", limited=False)
        now[0] += 80
        assert state.backing_off == 5 and trouble(state) == [
            "waiting for a rate limit for 1m 20s (3 requests)",
            "waiting for a rate limit of judge for 1m 20s (1 request)",
        ]
        state.waited("target", limited=True)
        state.answered("target")
        now[0] += 7
        assert trouble(state)[0] == "waiting for a rate limit for 7.0s (2 requests)"
        for _ in range(2):
            state.waited("target", limited=True)
        state.answered("target")
        assert list(state.rate_limits) == ["judge"]

    def test_turns_and_calls_are_counted_where_there_are_any(self) -> None:
        state = progress()
        assert inside(state) == []
        for kind in ("model", "tool", "turn", "intent", "responder", "restart"):
            state.step(kind)
        assert inside(state) == ["1 turn", "2 calls"]

    def test_each_grader_has_a_running_score_of_its_own_with_the_number_of_its_verdicts(self) -> None:
        state = progress(graders={"correct": GraderProgress(), "judged": GraderProgress()})
        assert scores(state) == []
        for score in (1.0, 1.0, 1.0, 0.0):
            state.grade("correct", score)
        state.grade("judged", 0.5)
        state.grade("judged", None)
        assert scores(state) == ["correct 0.750 (4)", "judged 0.500 (1)"]

    def test_of_many_graders_the_furthest_behind_are_shown(self) -> None:
        state = progress()
        for number in range(10):
            for _ in range(10 - number):
                state.grade(f"g{number}", 1.0)
        assert scores(state) == [*(f"g{number} 1.000 ({10 - number})" for number in range(4, 10)), "4 more graders"]

    def test_the_remaining_work_follows_from_the_finished_work(self) -> None:
        remaining = progress(outputs=150, graded=120).remaining
        assert (remaining.finished, remaining.to_grade, remaining.to_run, remaining.total) == (120, 30, 50, 200)


class Seen(Display):
    """Notes how far a run was at each look before its first trial was finished."""

    def __init__(self) -> None:
        self.turns, self.calls = [], []

    def tick(self, progress: Any) -> None:
        if not progress.outputs:
            self.turns.append(progress.turns)
            self.calls.append(progress.calls)


AGENT = """import time
def look(n):
    return n
def reply(context):
    for n in range(2):
        context.tool(look, {"n": n})
    time.sleep(0.1)
    return "x"
"""


@pytest.mark.parametrize("workers", [None, 2])
def test_a_long_conversation_is_seen_to_move_before_a_trial_is_finished(tmp_path: Path, workers: int | None) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    path = write_spec(tmp_path, target={"python": "agent.py:reply"}, follow_ups=["more"] * 19)
    seen = Seen()
    holdfast.evaluate(path, runs_dir=tmp_path / "runs", display=seen, workers=workers)
    assert len(set(seen.turns)) > 2 and max(seen.turns) <= 40
    assert len(set(seen.calls)) > 2 and max(seen.calls) <= 80


class TestPlans:
    @pytest.mark.parametrize(
        ("numbers", "text"),
        [
            ({}, "200 trials of 100 samples: 20 finished, 5 to grade, 175 to run"),
            ({"finished": 0, "to_grade": 0, "to_run": 200}, "200 trials of 100 samples: 200 to run"),
            (
                {"samples": 1, "trials": 1, "finished": 0, "to_grade": 1, "to_run": 0, "lenders": {"e/m": 1}},
                "1 trial of 1 sample: 1 to grade; 1 output from e/m",
            ),
            (
                {"samples": 10_000, "finished": 20_000, "to_grade": 0, "to_run": 0},
                "20,000 trials of 10,000 samples: 20,000 finished",
            ),
        ],
    )
    def test_a_plan_in_words(self, numbers: Any, text: str) -> None:
        assert str(plan(**numbers)) == text


class TestPlain:
    def test_plain_begins_with_the_plan(self, capsys: pytest.CaptureFixture[str]) -> None:
        Plain().begin("gsm8k", "gpt-4o", "runs/x", plan())
        assert capsys.readouterr().err.splitlines() == ["gsm8k · gpt-4o · runs/x", str(plan())]

    def test_the_plain_display_prints_at_intervals(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = [1000.0]
        monkeypatch.setattr("holdfast.display.displays.time.monotonic", lambda: now[0])
        display = Plain()
        spoken = []
        for _ in range(300):
            now[0] += 0.25
            display.tick(progress(retried=Counter(server=3), graders={"exact": GraderProgress(4, 4, 3.0)}))
            if stderr := capsys.readouterr().err:
                spoken.append((now[0] - 1000, stderr))
        times = [when for when, _ in spoken]
        assert times[0] <= 10 and 6 <= len(times) <= 9
        assert all(later - earlier >= 10 for earlier, later in itertools.pairwise(times))
        line = spoken[0][1]
        for part in ("75/200 outputs", "70/200 graded", "exact 0.750 (4)", "12,345 tokens", "$0.0123"):
            assert part in line
        assert "retried: server 3" in line

    def test_plain_leaves_out_unknown_numbers(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = [1000.0]
        monkeypatch.setattr("holdfast.display.displays.time.monotonic", lambda: now[0])
        display = Plain()
        now[0] += 60
        display.tick(Progress(plan(), Spent(), outputs=0, graded=0, graders={"exact": GraderProgress()}))
        assert capsys.readouterr().err == "0/200 outputs  0/200 graded\n"

    def test_only_errors_that_are_final_are_worth_a_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        display = Plain()
        display.error(error(final=False))
        assert capsys.readouterr().err == ""
        display.error(error())
        assert capsys.readouterr().err == "s1 #2: target: server: told to fail\n"

    def test_a_message_of_several_lines_stays_on_one(self, capsys: pytest.CaptureFixture[str]) -> None:
        Plain().error(error(message="first\n  second\n" + "x" * 1000))
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("s1 #2: target: server: first second xxx") and len(line) < 300

    def test_failures_that_differ_in_names_and_numbers_are_of_one_kind(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        display = Plain()
        for number in range(9):
            display.error(error(sample=f"s{number}", message=f"line {number}: KeyError: 'k{number}'"))
        display.error(error(where="judge", message="line 1: KeyError: 'k1'"))
        lines = capsys.readouterr().err.splitlines()
        assert [line.split(":")[0] for line in lines] == [
            *("s0 #2", "s1 #2", "s2 #2"),
            "… and more like this, in errors.jsonl",
            "s1 #2",
        ]

    def test_notices_are_never_swallowed(self, capsys: pytest.CaptureFixture[str]) -> None:
        for display in (Plain(), Quiet()):
            display.notice("look here")
            assert capsys.readouterr().err == "note: look here\n"

    def test_quiet_shows_nothing_else(self, capsys: pytest.CaptureFixture[str]) -> None:
        display = Quiet()
        display.begin("e", "t", "p", plan())
        display.output(output_of("x"))
        display.grade(GRADE)
        display.error(error())
        display.tick(progress())
        display.end()
        assert capsys.readouterr() == ("", "")


class TestEvents:
    def test_every_event_is_one_line_of_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        display = Events()
        display.begin("e", "t", "p", plan())
        display.output(output_of("secret transcript", sample="s1", trial=2))
        display.grade(GRADE)
        display.error(error(message="two\nlines"))
        display.notice("note")
        display.tick(progress())
        display.end()
        display.result(Result(3, "budget", "too much", "runs/x", None, {"score": 0.5}, {"to_run": 1, "to_grade": 0}))
        captured = capsys.readouterr()
        events = [json.loads(line) for line in captured.err.splitlines()]
        assert captured.out == "" and "secret transcript" not in captured.err
        assert [event["event"] for event in events] == ["begin", "output", "grade", "error", "notice", "end"]
        begin, output, grade, failed, notice, end = events
        assert (end["exit_code"], end["reason"], end["message"], end["run"]) == (3, "budget", "too much", "runs/x")
        assert (end["metrics"], end["so_far"], end["left"]) == (None, {"score": 0.5}, {"to_run": 1, "to_grade": 0})
        assert (begin["eval"], begin["target"], begin["run"]) == ("e", "t", "p")
        assert (begin["total"], begin["finished"], begin["to_grade"], begin["to_run"]) == (200, 20, 5, 175)
        assert (output["sample"], output["trial"], output["stop"], output["seconds"]) == ("s1", 2, "stop", 1.0)
        assert (grade["grader"], grade["status"], grade["score"]) == ("exact", "failed", 0.0)
        assert (failed["kind"], failed["message"], failed["final"]) == ("server", "two\nlines", True)
        assert notice["message"] == "note"


def drawn(state: Any, width: int = 100, cell: SuiteCell | None = None) -> Any:
    screen = io.StringIO()
    Console(width=width, file=screen).print(_render(state, width, cell))
    return screen.getvalue()


class TestLive:
    def test_live_shows_progress_score_tokens_and_cost(self) -> None:
        text = drawn(progress(graders={"exact": GraderProgress(4, 4, 3.0)}, in_flight=7, limit=64))
        for part in ("75/200 outputs", "exact 0.750 (4)", "70/200 graded", "12,345 tokens", "$0.0123", "7 of 64 in"):
            assert part in text
        assert not any(word in text for word in ("left", "retried", "failed", "waiting"))

    def test_live_shows_retries_apart_from_failed_trials_and_grades(self) -> None:
        state = progress(retried=Counter(rate_limit=12, timeout=3), given_up=2, failed_grades=Counter(judge=5))
        for _ in range(4):
            state.wait("target", limited=False)
        text = drawn(state)
        assert "retried: rate_limit 12, timeout 3 (4 waiting)" in text
        assert "failed: 2 trials" in text and "failed grades: judge 5" in text

    def test_live_shows_the_place_in_a_suite_and_the_progress_of_the_suite(self) -> None:
        cell = SuiteCell(number=2, cells=6, eval="mmlu", target="model-a", done=1_000, trials=5_000)
        text = drawn(progress(), cell=cell)
        assert "1,070/5,000 suite · 2/6 mmlu · model-a" in text and "75/200 outputs" in text
        assert all(len(line) <= 40 for line in drawn(progress(), 40, cell).splitlines())

    def test_live_shows_the_reasons_of_failures(self, capsys: pytest.CaptureFixture[str]) -> None:
        display = LiveDisplay()
        display.begin("e", "t", "p", plan())
        for number in range(5):
            display.error(error(sample=f"s{number}"))
        display.error(error(final=False, message="repeated"))
        display.end()
        stderr = capsys.readouterr().err
        assert stderr.count("target: server: told to fail") == 3 and "and more like this" in stderr
        assert "repeated" not in stderr

    def test_a_concurrency_lowered_by_a_rate_limit_is_shown(self) -> None:
        assert "16 in flight, limit lowered to 12" in drawn(progress(in_flight=16, limit=12))

    @pytest.mark.parametrize("width", [20, 40, 200])
    def test_live_fits_every_width(self, width: int) -> None:
        assert all(len(line) <= width for line in drawn(progress(), width).splitlines())

    def test_live_begins_and_ends_twice_without_a_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        display = LiveDisplay()
        display.tick(progress())
        display.begin("e", "[bold]t[/bold]", "p", plan())
        display.notice("[note]")
        display.end()
        display.end()
        stderr = capsys.readouterr().err
        assert "[bold]t[/bold]" in stderr and "[note]" in stderr

    def test_the_live_display_updates_and_restores_the_terminal(self, tmp_path: Path) -> None:
        with server(latency=0.02) as mock:
            path = write_eval(tmp_path, mock.base_url, rows=40, limits={"concurrency": 2})
            text = on_a_terminal("eval", path, cwd=tmp_path, columns=100)
        assert "\x1b[" in text and re.search(r"\d+/40", text) and "in flight" in text
        assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0, "the cursor is shown again"
        assert "0.500" in text and text.rstrip().split("\n")[-1].startswith("run: runs/e/")


FAILING = """def reply(prompt):
    if prompt in ("q1", "q2"):
        raise KeyError("b")
    return prompt
def grade(output):
    if output == "q3":
        raise RuntimeError("cannot say")
    return 1.0
"""


@pytest.fixture
def failing(tmp_path: Path) -> Any:
    """An eval with two trials that fail in the target, and one in a grader."""
    (tmp_path / "agent.py").write_text(FAILING)
    graders = [{"type": "text", "name": "brief", "contains": "q"}]
    graders.append({"type": "python", "name": "judged-by-a-function-with-a-long-name", "function": "agent.py:grade"})
    return write_spec(
        tmp_path,
        dataset=None,
        target={"python": "agent.py:reply"},
        samples=[{"id": f"s{number}", "q": f"q{number}"} for number in range(6)],
        prompt="{{ q }}",
        graders=graders,
        limits={"retries": 0},
    )


TARGET_FAILED = "2 trials failed: 2× agent.py:3: KeyError: 'b' (s1, s2)"
GRADE_FAILED = "1 grade of judged-by-a-function-with-a-long-name failed: 1× agent.py:7: RuntimeError: cannot say (s3)"


@pytest.mark.parametrize("columns", [60, 120])
def test_a_terminal_shows_why_trials_failed_and_cuts_no_number(failing: Any, columns: int) -> None:
    screen = on_a_terminal("eval", failing, cwd=failing.parent, columns=columns, code=3, NO_COLOR="1")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen).replace("\r", "")
    flowing = " ".join(plain.split())
    assert "s1 #1: target: agent: agent.py:3: KeyError: 'b'" in flowing
    assert TARGET_FAILED in flowing and GRADE_FAILED in flowing
    table = [line for line in plain.splitlines() if line.startswith("│")]
    assert all(len(line) <= columns for line in table)
    numbers = [re.findall(r"[0-9.]+", line.split("│", 2)[2]) for line in table]
    assert [row[:5] for row in numbers if row] == [
        ["1.000", "0.510", "1.000", "4", "4"],
        ["1.000", "0.439", "1.000", "3", "3"],
        ["1.000", "0.439", "1.000", "3", "3"],
    ]


def test_workers_failures_are_shown_and_summed_up_as_those_of_one_process(failing: Any) -> None:
    done = run_command("eval", failing, "--workers", "2", cwd=failing.parent, check=3)
    assert "s1 #1: target: agent: agent.py:3: KeyError: 'b'" in done.stderr
    first_s2 = TARGET_FAILED.replace("s1, s2", "s2, s1")  # the workers fail at the same time
    assert (TARGET_FAILED in done.stdout or first_s2 in done.stdout) and GRADE_FAILED in done.stdout


def test_accepted_errors_are_reported_also_for_a_finished_run(failing: Any) -> None:
    accepted = run_command("eval", failing, "--accept-errors", cwd=failing.parent)
    again = run_command("eval", failing, "--accept-errors", cwd=failing.parent)
    for done in (accepted, again):
        assert TARGET_FAILED.replace("failed", "failed and were left out") in done.stdout
        assert GRADE_FAILED.replace("failed", "failed and was left out") in done.stdout
    assert "--retry-failed retries these trials" in again.stdout


@pytest.mark.parametrize(
    ("more", "reason", "code"),
    [((), "errors", 3), (("--accept-errors",), "finished", 0), (("--accept-errors", "gate.coverage=1"), "gate", 1)],
)
def test_json_ends_with_how_it_ended(failing: Any, more: Any, reason: str, code: int) -> None:
    done = run_command("eval", failing, "--display", "json", *more, cwd=failing.parent, check=code)
    *_, last = [json.loads(line) for line in done.stderr.splitlines()]
    assert (last["event"], last["reason"], last["exit_code"]) == ("end", reason, code)
    assert last["left"] == {"to_run": 2, "to_grade": 1, "uncertain": 0}
    (manifest,) = (failing.parent / "runs").glob("*/*/manifest.json")
    assert failing.parent / last["run"] == manifest.parent
    finished = json.loads((manifest.parent / "metrics.json").read_text()) if code != 3 else None
    assert last["metrics"] == finished
    assert (last["so_far"] is None) == (code != 3)


def test_json_ends_with_an_event_also_where_the_run_cannot_begin(failing: Any) -> None:
    (failing.parent / "agent.py").write_text("def other(): pass")
    done = run_command("eval", failing, "--display", "json", cwd=failing.parent, check=2)
    last = next(json.loads(line) for line in done.stderr.splitlines() if line.startswith("{"))
    assert (last["event"], last["reason"], last["exit_code"], last["run"]) == ("end", "failed", 2, None)
    assert "reply" in last["message"]


class TestTables:
    COLUMNS = (
        Column("grader", name=True),
        Column("score"),
        Column("95 % interval", spare=1),
        Column("graded"),
        Column("pass@1", spare=3),
        Column("pass@5", spare=2),
    )
    ROWS = (
        ("checkpoint@1/number-of-words", "0.123", "0.111 – 0.222", "1,000,000", "0.333", "0.444"),
        ("checkpoint@1/number-of-lines", "1.000", "0.999 – 1.001", "999", "0.555", "0.666"),
    )

    def cells(self, width: Any, *, plain: Any) -> Any:
        screen = io.StringIO()
        console = Console(width=width, file=screen)
        if plain:
            print_list(console, self.COLUMNS, self.ROWS, {})
        else:
            console.print(fit_table(self.COLUMNS, self.ROWS, width))
        text = screen.getvalue()
        assert "…" not in text and all(len(line) <= width for line in text.splitlines())
        return text

    @pytest.mark.parametrize("plain", [False, True])
    @pytest.mark.parametrize("width", range(44, 121, 4))
    def test_columns_are_left_out_before_a_number_is_cut(self, width: Any, plain: bool) -> None:
        text = self.cells(width, plain=plain)
        shown = [position for position in range(1, 6) if any(row[position] in text for row in self.ROWS)]
        assert all(row[position] in text for row in self.ROWS for position in shown)
        assert {1, 3} <= set(shown), "what is never left out"
        assert shown in ([1, 2, 3, 4, 5], [1, 2, 3, 5], [1, 2, 3], [1, 3]), "the least telling goes first"

    def test_a_list_of_wide_characters_and_long_names_keeps_its_columns(self) -> None:
        screen = io.StringIO()
        rows = [("日本語の名前", "finished", "1"), ("x" * 30, "running", "22"), ("a-b", "finished", "333")]
        columns = [Column("name", name=True), Column("status", word=True), Column("score")]
        console = Console(width=40, file=screen, force_terminal=True, color_system="standard", legacy_windows=False)
        print_list(console, columns, rows, {"finished": "green"})
        lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in screen.getvalue().splitlines()]
        assert lines == [
            "name                     status    score",
            "日本語の名前             finished      1",
            "xxxxxxxxxxxxxxxxxxxxxxx  running      22",
            "xxxxxxx",
            "a-b                      finished    333",
        ]
        assert screen.getvalue().count("\x1b[32mfinished\x1b[0m") == 2

    def test_names_wrap_where_one_would_break_them(self) -> None:
        text = self.cells(66, plain=False)
        names = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
        assert "".join(names) == "".join(row[0] for row in self.ROWS)
        assert all(name.endswith(("-", "/", "words", "lines")) for name in names)


def test_scores_are_coloured_unless_colour_is_disabled(failing: Any) -> None:
    coloured = on_a_terminal("eval", failing, "--accept-errors", cwd=failing.parent, columns=100)
    assert re.search(r"\x1b\[32m1\.000", coloured), "green"
    plain = on_a_terminal("eval", failing, "--accept-errors", cwd=failing.parent, columns=100, NO_COLOR="1")
    assert "1.000" in plain and "\x1b[32m" not in plain
