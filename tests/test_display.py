"""What a person or a program sees while a run is going on."""

from __future__ import annotations

import io
import itertools
import json
import os
import pty
import re
import select
import subprocess
from collections import Counter

import pytest
from rich.console import Console

import holdfast
from holdfast.display.format import dollars, duration, inside, money, share, tokens
from holdfast.display.live import LiveDisplay, _drawing
from holdfast.display.text import Events, Plain, Quiet
from holdfast.display.types import Display
from holdfast.engine.progress import Progress
from holdfast.plan.plan import Plan
from holdfast.store.index import Spent
from holdfast.store.records import ErrorRecord, Grade, Usage
from tests.support.running import HOLDFAST, environment, server, write_eval
from tests.support.specs import output_of, write_spec


def plan(**numbers):
    return Plan(**{"samples": 100, "trials": 2, "finished": 20, "to_grade": 5, "to_run": 175, **numbers})


def progress(**state):
    return Progress(plan(), Spent(tokens=12345, requests=9, cost=0.0123), **{"outputs": 75, "graded": 70, **state})


def error(**fields):
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


GRADE = Grade("k", "g", "s1", 2, "exact", "exact", None, "failed", 0.0, 1.0, "why", None, 0.0)


class TestNumbers:
    @pytest.mark.parametrize(
        ("seconds", "said"),
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
    def test_durations(self, seconds, said):
        assert duration(seconds) == said

    @pytest.mark.parametrize(("value", "said"), [(None, "–"), (0, "0.000"), (2 / 3, "0.667"), (1.0, "1.000")])
    def test_scores(self, value, said):
        assert share(value) == said

    @pytest.mark.parametrize(
        ("cost", "said"), [(0, "$0.00"), (0.00012, "$0.0001"), (0.5, "$0.5000"), (12.346, "$12.35")]
    )
    def test_sums_of_money(self, cost, said):
        assert dollars(cost) == said

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
    def test_what_is_not_known_is_said_and_is_not_nought(self, usages, cost, count):
        spent = Spent()
        for usage in usages:
            spent.add(usage)
        assert (money(spent), tokens(spent)) == (cost, count)


class TestProgress:
    def test_the_rate_is_that_of_the_last_half_minute_and_gives_the_time_left(self, monkeypatch):
        now = [1000.0]
        monkeypatch.setattr("holdfast.engine.progress.time.monotonic", lambda: now[0])
        state = progress()
        assert (state.rate, state.eta) == (0.0, None)
        state.mark()
        for _ in range(10):
            now[0] += 1
            state.outputs += 5
            state.mark()
        assert state.rate == pytest.approx(5.0)
        assert state.eta == pytest.approx((200 - 125) / 5)

    def test_turns_and_calls_are_counted_where_there_are_any(self):
        state = progress()
        assert inside(state) == []
        for kind in ("model", "tool", "turn", "intent", "responder", "restart"):
            state.step(kind)
        assert inside(state) == ["1 turn", "2 calls"]

    def test_the_score_is_over_what_was_graded(self):
        assert progress().score is None
        assert progress(score_sum=3.0, score_count=4).score == 0.75

    def test_what_is_left_follows_from_what_is_done(self):
        left = progress(outputs=150, graded=120).left
        assert (left.finished, left.to_grade, left.to_run, left.total) == (120, 30, 50, 200)


class Seen(Display):
    """Notes how far a run was at each look before its first trial was finished."""

    def __init__(self):
        self.turns, self.calls = [], []

    def tick(self, progress):
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
def test_a_long_conversation_is_seen_to_move_before_a_trial_is_finished(tmp_path, workers):
    (tmp_path / "agent.py").write_text(AGENT)
    path = write_spec(tmp_path, target={"python": "agent.py:reply"}, follow_ups=["more"] * 19)
    seen = Seen()
    holdfast.evaluate(path, runs_dir=tmp_path / "runs", display=seen, workers=workers)
    assert len(set(seen.turns)) > 2 and max(seen.turns) <= 40
    assert len(set(seen.calls)) > 2 and max(seen.calls) <= 80


class TestPlans:
    @pytest.mark.parametrize(
        ("numbers", "said"),
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
    def test_a_plan_in_words(self, numbers, said):
        assert str(plan(**numbers)) == said


class TestPlain:
    def test_it_begins_with_what_is_to_be_done(self, capsys):
        Plain().begin("gsm8k", "gpt-4o", "runs/x", plan())
        assert capsys.readouterr().err.splitlines() == ["gsm8k · gpt-4o · runs/x", str(plan())]

    def test_it_speaks_now_and_then(self, capsys, monkeypatch):
        now = [1000.0]
        monkeypatch.setattr("holdfast.display.text.time.monotonic", lambda: now[0])
        display = Plain()
        spoken = []
        for _ in range(300):
            now[0] += 0.25
            display.tick(progress(errors=Counter(server=3)))
            if said := capsys.readouterr().err:
                spoken.append((now[0] - 1000, said))
        times = [when for when, _ in spoken]
        assert times[0] <= 10 and 6 <= len(times) <= 9
        assert all(later - earlier >= 10 for earlier, later in itertools.pairwise(times))
        line = spoken[0][1]
        for part in ("75/200", "score –", "12,345 tokens", "$0.0123", "errors server=3"):
            assert part in line

    def test_only_errors_that_are_final_are_worth_a_line(self, capsys):
        display = Plain()
        display.error(error(final=False))
        assert capsys.readouterr().err == ""
        display.error(error())
        assert capsys.readouterr().err == "s1 #2: target: server: told to fail\n"

    def test_notices_are_never_swallowed(self, capsys):
        for display in (Plain(), Quiet()):
            display.notice("look here")
            assert capsys.readouterr().err == "look here\n"

    def test_quiet_says_nothing_else(self, capsys):
        display = Quiet()
        display.begin("e", "t", "p", plan())
        display.output(output_of("x"))
        display.grade(GRADE)
        display.error(error())
        display.tick(progress())
        display.end()
        assert capsys.readouterr() == ("", "")


class TestEvents:
    def test_every_event_is_one_line_of_json(self, capsys):
        display = Events()
        display.begin("e", "t", "p", plan())
        display.output(output_of("secret transcript", sample="s1", trial=2))
        display.grade(GRADE)
        display.error(error(message="two\nlines"))
        display.notice("note")
        display.tick(progress())
        display.end()
        captured = capsys.readouterr()
        events = [json.loads(line) for line in captured.err.splitlines()]
        assert captured.out == "" and "secret transcript" not in captured.err
        assert [event["event"] for event in events] == ["begin", "output", "grade", "error", "notice"]
        begin, output, grade, failed, notice = events
        assert (begin["eval"], begin["target"], begin["run"]) == ("e", "t", "p")
        assert (begin["total"], begin["finished"], begin["to_grade"], begin["to_run"]) == (200, 20, 5, 175)
        assert (output["sample"], output["trial"], output["stop"], output["seconds"]) == ("s1", 2, "stop", 1.0)
        assert (grade["grader"], grade["status"], grade["score"]) == ("exact", "failed", 0.0)
        assert (failed["kind"], failed["message"], failed["final"]) == ("server", "two\nlines", True)
        assert notice["message"] == "note"


def drawn(state, width=100):
    console = Console(width=width, file=io.StringIO())
    console.print(_drawing(state))
    return console.file.getvalue()


class TestLive:
    def test_it_shows_progress_score_tokens_and_cost(self):
        text = drawn(progress(score_sum=3.0, score_count=4, in_flight=7, limit=64))
        for part in ("75/200", "score 0.750", "70 graded", "12,345 tokens", "$0.0123", "7 of 64 in flight", "left ?"):
            assert part in text
        assert "errors" not in text

    def test_it_shows_errors_by_class_and_who_waits(self):
        text = drawn(progress(errors=Counter(rate_limit=12, timeout=3), backing_off=4, given_up=2))
        assert "errors: rate_limit 12  timeout 3 · 4 waiting to retry · 2 given up for now" in text

    @pytest.mark.parametrize("width", [20, 40, 200])
    def test_it_fits_every_width(self, width):
        assert all(len(line) <= width for line in drawn(progress(), width).splitlines())

    def test_it_begins_ends_and_ends_again_without_a_run(self, capsys):
        display = LiveDisplay()
        display.tick(progress())
        display.begin("e", "[bold]t[/bold]", "p", plan())
        display.notice("[note]")
        display.end()
        display.end()
        said = capsys.readouterr().err
        assert "[bold]t[/bold]" in said and "[note]" in said

    def test_on_a_terminal_it_is_alive_and_leaves_the_terminal_as_it_was(self, tmp_path):
        """The real command on a real terminal."""
        with server(latency=0.02) as mock:
            path = write_eval(tmp_path, mock.base_url, rows=40, limits={"concurrency": 2})
            ours, theirs = pty.openpty()
            process = subprocess.Popen(
                [*HOLDFAST, "eval", str(path)],
                cwd=tmp_path,
                env=environment(TERM="xterm-256color", COLUMNS="100"),
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
            )
            os.close(theirs)
            said = b""
            while select.select([ours], [], [], 60)[0]:
                try:
                    chunk = os.read(ours, 65536)
                except OSError:  # the other end is closed
                    break
                if not chunk:
                    break
                said += chunk
            os.close(ours)
            assert process.wait(60) == 0
        text = said.decode()
        assert "\x1b[" in text and re.search(r"\d+/40", text) and "in flight" in text
        assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0, "the cursor is shown again"
        assert "0.500" in text and text.rstrip().split("\n")[-1].startswith("run: runs/e/")
