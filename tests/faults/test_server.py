"""An outage is not a wrong answer: failures of a server are recorded, retried or reported, and never scored."""

from __future__ import annotations

import re
import socket
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import evaluate
from holdfast.display.displays import Display
from holdfast.engine.admission import Window
from holdfast.engine.retry import delay_before
from holdfast.errors import AttemptError
from tests.support.breaking import (
    assert_each_once,
    assert_same_numbers,
    kept,
    nothing_left,  # noqa: F401 - a fixture
)
from tests.support.running import Server, holdfast, metrics, run_dir, server, write_eval

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 40
CONCURRENCY = 8
KEYS: dict[str, Any] = {"rows": ROWS, "limits": {"concurrency": CONCURRENCY}}


@pytest.fixture
def nobody() -> str:
    """The base URL of a port at which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    return f"http://127.0.0.1:{port}/v1"


def test_a_server_that_fails_in_every_way_is_asked_until_it_answers(
    tmp_path: Path, provider: Server, calm: Path
) -> None:
    fail = {"429": 0.15, "500": 0.15, "503": 0.1, "hang": 0.1, "cut": 0.15, "garbage": 0.15}
    provider.control(fail=fail, fail_first=2)
    eval_file = write_eval(tmp_path, provider.base_url, **KEYS)
    holdfast("eval", eval_file, "limits.turn_timeout=1.5", cwd=tmp_path)
    run = run_dir(tmp_path)
    outcomes = provider.stats()["outcomes"]
    assert all(outcomes.get(how, 0) > 0 for how in fail), outcomes
    assert provider.stats()["answered"] == {f"question {number}": 1 for number in range(ROWS)}

    errors = kept(run, "errors")
    assert Counter(error["kind"] for error in errors) == {
        "rate_limit": outcomes["429"],
        "server": outcomes["500"] + outcomes["503"],
        "timeout": outcomes["hang"],
        "connection": outcomes["cut"],
        "bad_reply": outcomes["garbage"],
    }
    assert Counter(error["status"] for error in errors if error["status"]) == {
        429: outcomes["429"],
        500: outcomes["500"],
        503: outcomes["503"],
    }
    assert not any(error["final"] for error in errors)
    failed = Counter(error["sample"] for error in errors)
    assert all(output["attempt"] == 1 + failed[output["sample"]] for output in kept(run))
    assert_each_once(run, ROWS)
    assert_same_numbers(run, calm)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back-off as long in steps as ever, and a thousand times as short."""
    from holdfast.engine import retry as attempts

    monkeypatch.setattr(attempts, "_FIRST_DELAY", {"rate_limit": 0.001})
    monkeypatch.setattr(attempts, "_LONGEST_DELAY", 0.03)
    monkeypatch.setattr(attempts, "_SHORTEST_PAUSE", 0.0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", ["429", "529", "overloaded", "later"])
def test_a_rate_limit_is_waited_out_however_often_it_is_met(how: str, tmp_path: Path, provider: Server) -> None:
    provider.control(fail={how: 1.0}, fail_first=12, retry_after=0 if how == "later" else -1)
    eval_file = write_eval(tmp_path, provider.base_url, rows=3, limits={"retries": 1, "trial_timeout": 60})
    run = evaluate(eval_file, runs_dir=tmp_path / "runs")
    assert provider.stats()["outcomes"] == {how: 36, "ok": 3}
    assert run.finished and run.metrics is not None and run.metrics.coverage == 1
    errors = kept(run.path, "errors")
    assert Counter((error["kind"], error["final"]) for error in errors) == {("rate_limit", False): 36}
    assert {output["attempt"] for output in kept(run.path)} == {13}


@pytest.mark.usefixtures("impatient")
def test_a_judge_that_limits_its_rate_is_waited_for_too(tmp_path: Path, provider: Server) -> None:
    with server(answer="judge", fail={"429": 1.0}, fail_first=12, retry_after=-1) as judge:
        judged = {"type": "prompt", "rubric": "Good?\n{{ id }}", "model": "judge", "base_url": judge.base_url}
        eval_file = write_eval(tmp_path, provider.base_url, rows=3, graders=[judged], limits={"retries": 0})
        run = evaluate(eval_file, runs_dir=tmp_path / "runs")
        assert judge.stats()["outcomes"] == {"429": 36, "ok": 3}
    assert run.finished and run.score == 1


@pytest.mark.usefixtures("impatient")
def test_waiting_for_a_rate_limit_does_not_use_a_trials_time(
    tmp_path: Path, provider: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.engine.retry import Deadline

    postponed: list[float] = []
    monkeypatch.setattr(Deadline, "postpone", lambda _, seconds: postponed.append(seconds))
    provider.control(fail={"429": 1.0}, fail_first=3, retry_after=-1)
    run = evaluate(write_eval(tmp_path, provider.base_url, rows=1), runs_dir=tmp_path / "runs")
    errors = kept(run.path, "errors")
    assert len(postponed) == len(errors) == 3
    assert all(seconds >= error["seconds"] for seconds, error in zip(postponed, errors, strict=True))


@pytest.mark.usefixtures("impatient")
def test_a_limit_of_time_ends_waiting_for_a_rate_limit(tmp_path: Path, provider: Server) -> None:
    provider.control(status=429)
    eval_file = write_eval(tmp_path, provider.base_url, rows=3, limits={"max_time": 0.5})
    run = evaluate(eval_file, runs_dir=tmp_path / "runs")
    assert run.exit_code == 3 and run.reason is not None and "--max-time" in run.reason
    assert provider.requests > 3 * 6, "more often than the retries of one trial"


@pytest.mark.usefixtures("impatient")
def test_a_limit_of_time_ends_waiting_for_a_judge_too(tmp_path: Path, provider: Server) -> None:
    with server(status=429) as judge:
        judged = {"type": "prompt", "rubric": "Good?\n{{ id }}", "model": "judge", "base_url": judge.base_url}
        keys: dict[str, Any] = {"graders": [judged], "limits": {"max_time": 0.5}}
        run = evaluate(write_eval(tmp_path, provider.base_url, rows=3, **keys), runs_dir=tmp_path / "runs")
    assert run.exit_code == 3 and run.reason is not None and "--max-time" in run.reason
    assert len(kept(run.path)) == 3


def test_a_rate_limit_that_lasts_is_reported_with_its_duration(
    tmp_path: Path, provider: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engine.loop._PATIENCE_SECONDS", 0.0)
    provider.control(fail={"429": 1.0}, fail_first=1, retry_after=0.5)
    display = Notices()
    run = evaluate(write_eval(tmp_path, provider.base_url, rows=3), runs_dir=tmp_path / "runs", display=display)
    assert run.finished
    waits = [notice for notice in display.notices if "rate limit" in notice]
    assert len(waits) == 1 and re.match(r"waiting for a rate limit for \d\.\ds \([1-3] requests?\)\. The run", waits[0])
    assert "waiting for a rate limit" in (run.path / "run.log").read_text()


class Notices(Display):
    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, message: str) -> None:
        self.notices.append(message)


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [(None, (0.5, 1), (15, 30)), (0, (0.05, 0.0625), (30, 37.5)), (90, (90, 112.5), (90, 112.5))],
)
def test_a_server_that_keeps_refusing_is_asked_less_and_less_often(
    asked: float | None, first: tuple[float, float], last: tuple[float, float]
) -> None:
    error = AttemptError("rate_limit", "slow down", retry_after=asked)
    assert first[0] <= delay_before(1, error) <= first[1]
    for retry in (20, 1000, 100_000):
        assert last[0] <= delay_before(retry, error) <= last[1], "bounded, and never for nothing"


def test_a_fixed_window_shrinks_at_a_rate_limit_and_grows_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("holdfast.engine.admission.time.monotonic", lambda: now[0])
    window = Window(64)
    for _ in range(5):
        window.overloaded()
    assert window.limit == 51, "the requests already under way belong to the same overload"
    for _ in range(30):
        now[0] += 2
        window.overloaded()
    assert window.limit == 1
    for _ in range(1000):
        window.succeeded()
    assert window.limit == 64


@pytest.mark.parametrize("concurrency", [4, 200])
def test_stray_refusals_leave_a_fixed_window_as_it_is(concurrency: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("holdfast.engine.admission.time.monotonic", lambda: now[0])
    window = Window(concurrency)
    for reply in range(20_000):
        now[0] += 0.1
        if reply % 50 == 0:
            window.overloaded()
        else:
            window.succeeded()
        assert window.limit == concurrency
    for _ in range(concurrency):  # now the server means it
        now[0] += 0.1
        window.overloaded()
        window.succeeded()
    for _ in range(20):
        now[0] += 0.1
        window.overloaded()
    assert window.limit < concurrency


def test_errors_are_pending_never_scored_and_only_they_are_asked_again(
    tmp_path: Path, provider: Server, calm: Path
) -> None:
    provider.control(fail={"500": 0.3})
    eval_file = write_eval(tmp_path, provider.base_url, **KEYS)
    first = holdfast("eval", eval_file, "limits.retries=0", cwd=tmp_path, check=3)
    run = run_dir(tmp_path)
    failed = {error["sample"] for error in kept(run, "errors")}
    answered = {output["sample"] for output in kept(run)}
    assert 3 <= len(failed) <= ROWS - 3
    assert answered == {f"s{number}" for number in range(ROWS)} - failed
    assert {grade["sample"] for grade in kept(run, "grades")} == answered
    assert f"{len(answered)} of {ROWS} trials have an output" in first.stdout
    assert f"{len(failed)} trials have errors and stay pending" in first.stdout
    assert f"holdfast eval {eval_file} limits.retries=0" in first.stdout
    assert not (run / "metrics.json").exists()

    provider.control(status=500)
    provider.reset()
    accepted = holdfast("eval", eval_file, "--accept-errors", "limits.retries=0", cwd=tmp_path)
    assert set(provider.stats()["asked"]) == {f"question {name[1:]}" for name in failed}
    report = metrics(run)
    right = sum(int(name[1:]) % 2 == 0 for name in answered)
    assert report["coverage"] == len(answered) / ROWS
    assert report["graded"] == report["outputs"] == report["metrics"]["exact"]["n"] == len(answered)
    assert report["score"] == pytest.approx(right / len(answered))
    assert f"coverage {len(answered) / ROWS:.1%} of {ROWS} trials" in accepted.stdout

    provider.control(status=200, fail={})
    provider.reset()
    holdfast("eval", eval_file, cwd=tmp_path)
    assert provider.requests == 0, "errors were accepted, so the run is finished"
    holdfast("eval", eval_file, "--retry-failed", cwd=tmp_path)
    assert provider.stats()["asked"] == {f"question {name[1:]}": 1 for name in failed}
    assert_each_once(run, ROWS)
    assert_same_numbers(run, calm)


REFUSALS: dict[str, Any] = {
    "401": ({"status": 401}, "answered 401", "OPENAI_API_KEY"),
    "403": ({"status": 403}, "answered 403", "OPENAI_API_KEY"),
    "402": ({"status": 402}, "answered 402", "Top up the account"),
    "429 without quota": ({"status": 429, "code": "insufficient_quota"}, "answered 429", "Top up the account"),
    "404": ({"status": 404, "code": "model_not_found"}, "answered 404", "Check target.model"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refusal_that_will_hit_every_request_stops_the_run_at_once(
    refusal: str, tmp_path: Path, provider: Server, calm: Path
) -> None:
    settings, message, remedy = REFUSALS[refusal]
    provider.control(**settings)
    eval_file = write_eval(tmp_path, provider.base_url, **KEYS)
    stopped = holdfast("eval", eval_file, cwd=tmp_path, check=3)
    assert "stopped:" in stopped.stdout and message in stopped.stdout and remedy in stopped.stdout
    assert f"0 of {ROWS} trials have an output" in stopped.stdout
    assert 1 <= provider.requests <= CONCURRENCY
    assert kept(run_dir(tmp_path)) == kept(run_dir(tmp_path), "grades") == []

    provider.control(status=200)
    provider.reset()
    holdfast("eval", eval_file, cwd=tmp_path)
    assert provider.requests == ROWS
    assert_same_numbers(run_dir(tmp_path), calm)


def test_a_refusal_in_the_middle_keeps_what_was_answered(tmp_path: Path, provider: Server, calm: Path) -> None:
    eval_file = write_eval(tmp_path, provider.base_url, **KEYS)
    holdfast("eval", eval_file, "--token-budget", "30", cwd=tmp_path, check=3)
    run = run_dir(tmp_path)
    there = len(kept(run))
    assert 0 < there < ROWS
    provider.control(status=401)
    holdfast("eval", eval_file, cwd=tmp_path, check=3)
    provider.control(status=200)
    provider.reset()
    holdfast("eval", eval_file, cwd=tmp_path)
    assert provider.requests == ROWS - there
    assert_each_once(run, ROWS)
    assert_same_numbers(run, calm)


def test_a_refused_connection_stops_the_run_at_once(tmp_path: Path, nobody: str, provider: Server, calm: Path) -> None:
    eval_file = write_eval(tmp_path, nobody, **KEYS)
    stopped = holdfast("eval", eval_file, cwd=tmp_path, check=3)
    assert "refuses connections" in stopped.stdout
    assert f"Is the server running at {nobody}/chat/completions? Start it" in stopped.stdout
    assert 1 <= len(kept(run_dir(tmp_path), "errors")) <= CONCURRENCY

    holdfast("eval", eval_file, f"target.base_url={provider.base_url}", cwd=tmp_path)
    assert provider.requests == ROWS
    assert_same_numbers(run_dir(tmp_path), calm)


def test_a_host_that_does_not_exist_stops_the_run_at_once(tmp_path: Path, provider: Server, calm: Path) -> None:
    eval_file = write_eval(tmp_path, "http://no-such-host.invalid/v1", **KEYS)
    stopped = holdfast("eval", eval_file, cwd=tmp_path, check=3)
    assert "no-such-host.invalid" in stopped.stdout and "no such host" in stopped.stdout
    assert "Check the URL and the network" in stopped.stdout
    assert 1 <= len(kept(run_dir(tmp_path), "errors")) <= CONCURRENCY

    holdfast("eval", eval_file, f"target.base_url={provider.base_url}", cwd=tmp_path)
    assert provider.requests == ROWS
    assert_same_numbers(run_dir(tmp_path), calm)


def test_a_server_that_rejects_everything_is_not_asked_for_all_of_it(tmp_path: Path, provider: Server) -> None:
    provider.control(status=400)
    eval_file = write_eval(tmp_path, provider.base_url, rows=300, limits={"concurrency": CONCURRENCY})
    stopped = holdfast("eval", eval_file, cwd=tmp_path, check=3)
    assert "all of the first 20 attempts failed" in stopped.stdout
    assert "Fix the target or its parameters" in stopped.stdout
    assert 20 <= provider.requests <= 20 + CONCURRENCY
    assert {(error["kind"], error["status"]) for error in kept(run_dir(tmp_path), "errors")} == {("bad_request", 400)}


def test_a_judge_that_is_down_costs_no_outputs_and_grades_later(tmp_path: Path, provider: Server, nobody: str) -> None:
    judged = {"type": "prompt", "name": "judged", "rubric": "Is it good?", "model": "judge", "base_url": nobody}
    eval_file = write_eval(tmp_path, provider.base_url, **KEYS, graders=[{"type": "exact"}, judged])
    stopped = holdfast("eval", eval_file, cwd=tmp_path, check=3)
    run = run_dir(tmp_path)
    assert "grader 'judged' is disabled; outputs are still recorded" in stopped.stderr
    assert "refuses connections" in stopped.stdout and "Start it" in stopped.stdout
    assert f"{ROWS} of {ROWS} trials have an output, {ROWS} of them without all their grades" in stopped.stdout
    assert len(kept(run)) == ROWS
    assert Counter(grade["grader"] for grade in kept(run, "grades")) == {"exact": ROWS}
    provider.reset()

    with server(answer="judge") as judge:
        holdfast("eval", eval_file, f"graders.1.base_url={judge.base_url}", cwd=tmp_path)
        assert judge.requests == ROWS
    assert provider.requests == 0
    report = metrics(run)
    assert report["coverage"] == 1
    assert report["metrics"]["judged"]["score"] == 1 and report["metrics"]["exact"]["score"] == 0.5
    assert Counter(grade["grader"] for grade in kept(run, "grades")) == {"exact": ROWS, "judged": ROWS}


def test_a_judge_that_fails_now_and_then_is_asked_again_and_never_scores_zero(tmp_path: Path, provider: Server) -> None:
    with server(answer="judge", fail={"500": 0.3, "garbage": 0.2}, fail_first=2) as judge:
        judged = {"type": "prompt", "rubric": "Good?\n{{ id }}", "model": "judge", "base_url": judge.base_url}
        holdfast("eval", write_eval(tmp_path, provider.base_url, **KEYS, graders=[judged]), cwd=tmp_path)
        failures = judge.stats()["outcomes"]
    report = metrics(run_dir(tmp_path))
    assert failures["500"] + failures["garbage"] > 0
    assert report["score"] == 1 and report["coverage"] == 1
    assert {error["where"] for error in kept(run_dir(tmp_path), "errors")} == {"prompt"}


# Budgets.

PRICES = {"test-model": {"input": 1_000_000, "output": 2_000_000}}
"""two words in and one token out, so that each trial costs four dollars and three tokens"""


@pytest.mark.parametrize(
    ("option", "first", "second", "message"),
    [("--token-budget", "30", "60", "(30 tokens used)"), ("--max-cost", "40", "80", "($40.00 used)")],
)
def test_a_budget_stops_admission_counts_earlier_spending_and_can_be_raised(
    option: str, first: str, second: str, message: str, tmp_path: Path, provider: Server
) -> None:
    eval_file = write_eval(tmp_path, provider.base_url, **{**KEYS, "limits": {"concurrency": 1}}, prices=PRICES)
    stopped = holdfast("eval", eval_file, option, first, cwd=tmp_path, check=3)
    assert f"budget reached: {option} {first} {message}\nhint: Resume with a higher limit" in stopped.stdout
    assert provider.requests == 10
    resume = stopped.stdout.split("Resume with:\n  ")[1].splitlines()[0]
    raised = re.fullmatch(rf"holdfast eval {re.escape(str(eval_file))} {option} (\d+)", resume)
    assert raised and int(raised[1]) >= ROWS * int(first) / 10, "enough for the rest at the present rate"

    holdfast("eval", eval_file, option, first, cwd=tmp_path, check=3)
    assert provider.requests == 10, "what earlier attempts spent counts"
    holdfast("eval", eval_file, option, second, cwd=tmp_path, check=3)
    assert provider.requests == 20
    holdfast("eval", eval_file, option, "1000000", cwd=tmp_path)
    assert provider.requests == ROWS
    assert metrics(run_dir(tmp_path))["usage"] == {
        "input_tokens": 2 * ROWS,
        "output_tokens": ROWS,
        "requests": ROWS,
        "cost": pytest.approx(4 * ROWS),
    }


def test_a_budget_of_time_stops_admission_counts_earlier_time_and_can_be_raised(
    tmp_path: Path, provider: Server
) -> None:
    provider.control(latency=0.15)
    eval_file = write_eval(tmp_path, provider.base_url, **{**KEYS, "limits": {"concurrency": 4}})
    stopped = holdfast("eval", eval_file, "--max-time", "0.5s", cwd=tmp_path, check=3)
    assert re.search(r"budget reached: --max-time 0\.5s \(\d[\d.]*s used\)", stopped.stdout)
    assert re.search(r"Resume with:\n  holdfast eval .* --max-time [1-9][\d.]*[smh]\n", stopped.stdout)
    asked = provider.requests
    assert 4 <= asked < ROWS
    assert len(kept(run_dir(tmp_path))) == asked, "what is in flight may end"

    holdfast("eval", eval_file, "--max-time", "0.1s", cwd=tmp_path, check=3)
    assert provider.requests == asked, "the time of earlier attempts counts, which was 0.15 s at least"
    provider.control(latency=0)
    holdfast("eval", eval_file, "--max-time", "1h", cwd=tmp_path)
    assert provider.requests == ROWS


def test_the_time_of_graders_counts_in_the_next_process_too(tmp_path: Path, provider: Server) -> None:
    (tmp_path / "slow.py").write_text("import time\n\ndef grade(output):\n    time.sleep(0.2)\n    return 1.0\n")
    graders = [{"type": "python", "function": "slow.py:grade"}]
    eval_file = write_eval(tmp_path, provider.base_url, graders=graders, limits={"concurrency": 1})
    holdfast("eval", eval_file, "--max-time", "0.5s", cwd=tmp_path, check=3)
    asked = provider.requests
    assert asked < ROWS
    holdfast("eval", eval_file, "--max-time", "0.1s", cwd=tmp_path, check=3)
    assert provider.requests == asked


def test_a_budget_in_dollars_needs_a_known_price(tmp_path: Path, provider: Server) -> None:
    refused = holdfast("eval", write_eval(tmp_path, provider.base_url), "--max-cost", "1", cwd=tmp_path, check=2)
    assert "the price of test-model is unknown" in refused.stderr
    assert "prices:" in refused.stderr
    assert provider.requests == 0


@pytest.mark.parametrize(
    "target", [{"http": "http://127.0.0.1:1/x", "request": {}}, {"command": ["true"], "proxy": False}]
)
def test_a_budget_in_dollars_is_rejected_for_targets_without_costs(target: dict[str, Any], tmp_path: Path) -> None:
    eval_file = write_eval(tmp_path, "", target=target)
    refused = holdfast("eval", eval_file, "--max-cost", "1", cwd=tmp_path, check=2)
    assert "does not report its cost" in refused.stderr and not (tmp_path / "runs").exists()


def test_a_budget_that_cannot_be_enforced_is_reported_once(tmp_path: Path, provider: Server) -> None:
    (tmp_path / "agent.py").write_text("def reply(prompt): return prompt\n")
    silent = write_eval(tmp_path, "", target={"python": "agent.py:reply"})
    stderr = holdfast("eval", silent, "--max-cost", "1", "--token-budget", "1000", cwd=tmp_path).stderr
    assert stderr.count("max_cost cannot be enforced") == stderr.count("token_budget cannot be enforced") == 1
    provider.control(usage=False)
    prices = {"test-model": {"input": 1, "output": 1}}
    model = write_eval(tmp_path / "model", provider.base_url, prices=prices)
    stderr = holdfast("eval", model, "--max-cost", "1", cwd=tmp_path / "model").stderr
    assert stderr.count("max_cost cannot be enforced") == 1
    provider.control(usage=True)
    stderr = holdfast("eval", model, "--max-cost", "1", "--fresh", cwd=tmp_path / "model").stderr
    assert "cannot be enforced" not in stderr


# As many at once as the server keeps up with.


def test_auto_concurrency_grows_while_the_server_keeps_up(tmp_path: Path, provider: Server) -> None:
    provider.control(latency=0.05)
    eval_file = write_eval(tmp_path, provider.base_url, rows=400)
    holdfast("eval", eval_file, "--concurrency", "auto", cwd=tmp_path)
    stats = provider.stats()
    assert stats["requests"] == 400
    assert stats["most_active"] > 8


def test_auto_concurrency_backs_off_when_the_server_falls_behind(tmp_path: Path, provider: Server) -> None:
    provider.control(latency=0.02, max_concurrent=4)
    refused = {}
    for concurrency in ("auto", "64"):
        provider.reset()
        folder = tmp_path / concurrency
        eval_file = write_eval(folder, provider.base_url, rows=200, limits={"retries": 200})
        holdfast("eval", eval_file, "--concurrency", concurrency, cwd=folder)
        stats = provider.stats()
        assert stats["answered"] == {f"question {number}": 1 for number in range(200)}
        assert stats["most_active"] == 4
        refused[concurrency] = stats["outcomes"]["429"]
    assert 0 < refused["auto"] < refused["64"] / 2


@pytest.mark.parametrize("latency", [0, 0.02, 0.05])
def test_auto_concurrency_starts_every_trial_after_simultaneous_rate_limits(
    latency: float, tmp_path: Path, provider: Server
) -> None:
    """The window closes, then all its workers finish in one moment: not all of them may leave."""
    provider.control(latency=latency, fail={"429": 1.0}, fail_first=1, retry_after=0)
    eval_file = write_eval(tmp_path, provider.base_url, rows=100, limits={"retries": 200})
    holdfast("eval", eval_file, "--concurrency", "auto", cwd=tmp_path)
    assert provider.stats()["outcomes"]["429"] == 100
    assert_each_once(run_dir(tmp_path), 100)
