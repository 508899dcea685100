"""The summary at the end of a command: time, cost, retries, and how to resume."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.engine.admission import Budget
from holdfast.errors import BudgetReached
from holdfast.plan.plan import Plan
from holdfast.plan.progress import Progress
from holdfast.report.outcome import Alike
from holdfast.report.table import facts, with_raised_limit
from holdfast.spec.eval_schema import Limits
from holdfast.store.metrics import Answers, Metrics, RunTiming
from holdfast.store.records import NO_USAGE, Spent, Usage
from tests.support.running import holdfast, run_dir, server, start, wait_for, write_eval

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.running import Server

PRICES = {"test-model": {"input": 100, "output": 200}, "judge": {"input": 1000, "output": 1000}}

PAID_MORE = (
    "this run paid $0.0071, more than the $0.0066 of its outputs and grades: calls that failed, were repeated or "
    "belong to unfinished trials count, too"
)


def numbers(
    judge_usage: Usage = NO_USAGE, seconds: float = 12.0, p50: float | None = 0.85, p95: float | None = 3.2
) -> Metrics:
    """Return the metrics of a run of ten trials, without graders."""
    return Metrics(
        run="0",
        eval="e",
        target="t",
        samples=10,
        trials=1,
        total=10,
        outputs=10,
        answers=Answers(whole=10),
        graded=0,
        coverage=1.0,
        score=None,
        passed=None,
        graders={},
        overall=None,
        usage=Usage(800, 200, 10, 0.0066),
        judge_usage=judge_usage,
        timing=RunTiming(
            finished="2026-01-01T00:00:00Z", seconds=seconds, trial_seconds_p50=p50, trial_seconds_p95=p95
        ),
    )


class TestFacts:
    def test_tokens_cost_time_and_latency(self) -> None:
        assert list(facts(numbers(), Spent(tokens=1000, cost=0.0066), 12.5)) == [
            "coverage 100.0% of 10 trials · 1,000 tokens · $0.0066 · 12s",
            "latency per trial: p50 850ms, p95 3.2s",
        ]

    def test_judges_are_shown_separately(self) -> None:
        assert list(facts(numbers(judge_usage=Usage(50, 7, 3)), None, None))[:2] == [
            "coverage 100.0% of 10 trials · 12s",
            "target: 1,000 tokens · $0.0066 · judges: 57 tokens · cost unknown",
        ]

    @pytest.mark.parametrize(
        ("seconds", "wall", "shown"),
        [(0.0, 14.0, "14s"), (12.0, 12.4, "12s"), (75.0, 14.0, "14s (the whole run: 1m 15s)"), (75.0, None, "1m 15s")],
    )
    def test_the_time_counts_only_this_process(self, seconds: float, wall: float | None, shown: str) -> None:
        assert next(iter(facts(numbers(seconds=seconds, p50=None, p95=None), None, wall))).endswith(f" · {shown}")

    @pytest.mark.parametrize(
        ("spent", "shown"),
        [
            (Spent(tokens=800, cost=0.0053), "total $0.0066, of which this run paid $0.0053; the rest was reused"),
            (Spent(), "total $0.0066, of which this run paid $0.00; the rest was reused"),
            (Spent(cost=0.0071), PAID_MORE),
            (Spent(cost=0.0053, unpriced=3), "this run paid at least $0.0053: what 3 of its requests cost is unknown"),
        ],
    )
    def test_reused_costs_are_marked(self, spent: Spent, shown: str) -> None:
        assert shown in list(facts(numbers(), spent, 1.0))


def test_equal_failures_are_grouped_with_a_few_samples() -> None:
    alike = Alike("KeyError: 'b'")
    for sample in "aabcde":
        alike.add("KeyError: 'b'", sample)
    assert str(alike) == "6× KeyError: 'b' (a, b, c, …)"
    alike.add("KeyError: 'c'", "f")
    assert str(alike) == "7× KeyError: 'b' and similar (a, b, c, …)"


class TestBudgets:
    def reached(self, spent: Spent, **limits: Any) -> BudgetReached:
        progress = Progress(Plan(100, 1, 10, 0, 90), spent, outputs=10, graded=10)
        reached = Budget(Limits(**limits), progress, lambda _: None).reached()
        assert reached is not None
        return reached

    def test_budgets_are_formatted_for_typing_and_for_reading(self) -> None:
        cost = self.reached(Spent(cost=0.0012), max_cost=0.001)
        assert (cost.message, cost.raised) == ("budget reached: --max-cost 0.001 ($0.00120 used)", "0.015")
        tokens = self.reached(Spent(tokens=1234), token_budget=1000)
        assert (tokens.message, tokens.raised) == ("budget reached: --token-budget 1000 (1,234 tokens used)", "15000")
        spent = Spent()
        spent.add_time(0.0, 0.6)
        time = self.reached(spent, max_time=0.5)
        assert (time.message, time.raised) == ("budget reached: --max-time 0.5s (0.6s used)", "7.2s")
        assert time.remedy == "Resume with a higher limit, e.g. --max-time 7.2s."

    @pytest.mark.parametrize(
        ("command", "raised"),
        [
            ("holdfast eval e.yaml --max-time 0.5s --trials 2", "holdfast eval e.yaml --max-time 9s --trials 2"),
            ("holdfast eval e.yaml --max-time=0.5s", "holdfast eval e.yaml --max-time=9s"),
            ("holdfast eval e.yaml limits.max_time=0.5", "holdfast eval e.yaml limits.max_time=9s"),
            ("holdfast eval 'my eval.yaml'", "holdfast eval 'my eval.yaml' --max-time 9s"),
            ("holdfast resume 1234", "holdfast resume 1234 limits.max_time=9s"),
            ("", ""),
        ],
    )
    def test_the_command_to_resume_has_a_higher_limit(self, command: str, raised: str) -> None:
        assert with_raised_limit(command, BudgetReached("", "", "--max-time", "9s")) == raised


def test_judges_retries_and_what_was_reused_are_in_the_summary(tmp_path: Path, provider: Server) -> None:
    provider.control(fail={"429": 1.0}, fail_first=1, retry_after=0)
    with server(answer="judge", fail={"500": 1.0}, fail_first=1) as judge:
        judged = {"type": "prompt", "rubric": "Good?\n{{ id }}", "model": "judge", "base_url": judge.base_url}
        keys: dict[str, Any] = {"graders": [judged], "prices": PRICES}
        first = holdfast("eval", write_eval(tmp_path, provider.base_url, rows=5, **keys), cwd=tmp_path)
        assert "10 attempts were retried: 5 rate_limit, 5 server" in first.stdout
        assert re.search(r"target: 15 tokens · \$0\.0020 · judges: [1-9]\d* tokens · \$0\.\d+", first.stdout)
        assert "latency per trial: p50 " in first.stdout and "itself" not in first.stdout
        more = holdfast("eval", write_eval(tmp_path, provider.base_url, rows=6, **keys), cwd=tmp_path)
    assert re.search(r"total \$0\.0\d+, of which this run paid \$0\.00\d+; the rest was reused", more.stdout)


def test_a_run_without_graders_reports_that_nothing_was_graded(tmp_path: Path, provider: Server) -> None:
    done = holdfast("eval", write_eval(tmp_path, provider.base_url, rows=2, graders=[]), cwd=tmp_path)
    assert "Nothing was graded: the eval has no graders." in done.stdout


def test_the_time_of_a_failed_run_is_not_zero(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "import time\ndef reply(prompt):\n    time.sleep(0.3)\n    raise OSError('no')\n"
    )
    keys: dict[str, Any] = {"target": {"python": "agent.py:reply"}, "limits": {"retries": 0}}
    eval_file = write_eval(tmp_path, "", rows=2, **keys)
    done = holdfast("eval", eval_file, "--accept-errors", cwd=tmp_path)
    took = re.search(r"coverage 0\.0% of 2 trials · .* · ([\d.]+)s\n", done.stdout)
    assert took and float(took[1]) >= 0.3


def test_ctrl_c_shows_the_numbers_so_far(tmp_path: Path, provider: Server) -> None:
    provider.control(latency=0.02)
    process = start("eval", write_eval(tmp_path, provider.base_url, rows=400, limits={"concurrency": 4}), cwd=tmp_path)
    try:
        wait_for(lambda: len(provider.stats()["answered"]) >= 20, "some answers")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130
    assert "e · test-model · incomplete" in out and re.search(r"│ exact +│ 0\.\d{3} │", out)
    assert "Resume with:\n  holdfast eval" in out
    assert not (run_dir(tmp_path) / "metrics.json").exists()


def test_every_problem_of_a_file_is_labelled_as_an_error(tmp_path: Path) -> None:
    eval_file = write_eval(tmp_path, "http://127.0.0.1:1/v1", nothing=1, trials=0)
    refused = holdfast("eval", eval_file, cwd=tmp_path, check=2)
    assert len(refused.stderr.splitlines()) >= 2
    assert all(line.startswith(("error: ", "hint: ")) for line in refused.stderr.splitlines())
    assert refused.stderr.count("error: ") == 2
