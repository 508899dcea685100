"""`holdfast gate`: what passes, what does not, and what is no question at all."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.patterns import CORRECT, answered, finished_run, module_run
from tests.support.specs import command

if TYPE_CHECKING:
    from pathlib import Path


base = module_run("base", answered(8, 2))
"""10 samples, 8 right"""
worse = module_run("worse", answered(2, 8))
"""a run over the samples of `base` with 2 right answers: 75 % lower, which is more than chance"""
lower = module_run("lower", answered(6, 4))
"""a run over the samples of `base` with 6 right answers, which 10 samples do not show to be worse"""
other_samples = module_run("other", {f"s{n}": "yes" for n in range(2, 10)} | {"n0": "yes", "n1": "no"})
"""s2 to s9 of the others, all right, and two new ones, of which n1 is wrong"""


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: Any, capsys: Any) -> Any:
    return lambda *arguments: command(monkeypatch, capsys, tmp_path, "gate", *arguments)


def checks(gate: Any, *arguments: Any) -> dict[str, tuple[bool, str]]:
    """Return the gate's checks in order, and check that exit code and JSON agree."""
    ended = gate(*arguments, "--format", "json")
    report = json.loads(ended.out)
    assert report["passed"] == all(check["passed"] for check in report["checks"])
    assert ended.code == (0 if report["passed"] else 1)
    return {check["what"]: (check["passed"], check["message"]) for check in report["checks"]}


# Against a baseline


def test_a_run_that_is_no_worse_passes(gate: Any, base: Path, worse: Path) -> None:
    for arguments in ((base, "--baseline", base), (base, "--baseline", worse)):
        ended = gate(*arguments)
        assert ended.code == 0 and ended.out.endswith("gate passed\n") and "FAIL" not in ended.out


def test_a_run_that_is_worse_is_a_regression(gate: Any, base: Path, worse: Path) -> None:
    ended = gate(worse, "--baseline", base)
    assert ended.code == 1
    assert ended.out.splitlines() == [
        "FAIL  correct  worse: 0.800 → 0.200, −60.0 points (−85.7 – −14.3), p 0.0156",
        "gate failed",
    ]


def test_too_few_samples_cannot_tell_and_the_gate_says_how_many_would_do(gate: Any, base: Path, lower: Path) -> None:
    ended = gate(lower, "--baseline", base)
    assert ended.code == 0
    assert ended.out.splitlines() == [
        "warn  correct  cannot tell: 0.800 → 0.600, −20.0 points (−47.2 – +13.9)",
        "               10 samples show a loss of 41.4 points at best; 2 points need 4,294",
        "gate passed",
    ]
    assert gate(lower, "--baseline", base, "--inconclusive", "fail").code == 1
    assert gate(lower, "--baseline", base, "--max-drop", "50").code == 0
    assert gate(lower, "--baseline", base, "--max-drop", "50", "--inconclusive", "fail").code == 0
    # With less confidence, the same difference is a loss.
    assert gate(lower, "--baseline", base, "--confidence", "0.7").code == 1


def test_the_same_outputs_are_not_worse_however_few_they_are(gate: Any, base: Path) -> None:
    ended = gate(base, "--baseline", base, "--inconclusive", "fail")
    assert ended.out.splitlines() == [
        "ok    correct  not worse: 0.800 → 0.800, the same outputs of 10 samples",
        "gate passed",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-drop", "0.5"], "0.5 is ambiguous: write 0.5pt or 50pt"),
        (["--max-drop", "-1"], "'-1' is not a difference: write 2pt for 2 points, or 0.02"),
        (["--max-drop", "2%"], "'2%' is not a difference"),
        (["--max-drop", "2", "--max-regression-pct", "2"], "exclude each other"),
        (["--confidence", "95"], "confidence 95 is not between 0.5 and 1"),
        (["--inconclusive", "maybe"], "--inconclusive"),
        (["--max-regression-pct", "-1"], "--max-regression-pct"),
    ],
)
def test_wrong_settings_are_usage_errors(gate: Any, base: Path, options: list[str], message: str) -> None:
    ended = gate(base, "--baseline", base, *options)
    assert ended.code == 2 and message in ended.err and ended.out == ""


def test_settings_of_a_baseline_need_one(gate: Any, base: Path) -> None:
    for option in ("--max-drop", "--max-regression-pct"):
        ended = gate(base, "--min", "correct=0.5", option, "2")
        assert ended.code == 2 and "need --baseline" in ended.err


def test_a_percentage_says_that_it_tests_nothing(gate: Any, base: Path, lower: Path) -> None:
    ended = gate(lower, "--baseline", base, "--max-regression-pct", "0")
    assert ended.code == 1
    assert "FAIL  correct 0.8 → 0.6, 25.0 % lower (allowed: 0 %)" in ended.out.splitlines()
    assert "tests nothing: the same system measured twice would fail in about 36 % of cases" in " ".join(
        ended.err.split()
    )


@pytest.mark.parametrize(("allowed", "code"), [("74.99", 1), ("75", 0), ("75.01", 0), ("0", 1), ("100", 0)])
def test_a_metric_may_fall_by_as_much_as_is_allowed_and_no_more(
    gate: Any, base: Path, worse: Path, allowed: str, code: int
) -> None:
    assert gate(worse, "--baseline", base, "--max-regression-pct", allowed).code == code


def test_a_baseline_of_zero_cannot_be_fallen_below(gate: Any, base: Path, tmp_path: Path) -> None:
    nothing = finished_run(tmp_path / "nothing", answered(0, 10))
    assert gate(base, "--baseline", nothing).code == 0
    assert gate(nothing, "--baseline", nothing).code == 0
    assert gate(nothing, "--baseline", base).code == 1


def test_every_metric_is_checked_and_so_is_passing_all_of_them(gate: Any, tmp_path: Path) -> None:
    graders = [*CORRECT, {"type": "text", "name": "short", "regex_match": ["^.{0,3}$"]}]
    names = [f"s{number}" for number in range(12)]
    first = finished_run(tmp_path / "first", dict.fromkeys(names, "yes"), graders=graders)
    second = finished_run(tmp_path / "second", dict.fromkeys(names, "yes indeed") | {"s0": "yes"}, graders=graders)
    results = checks(gate, second, "--baseline", first)
    assert {name: passed for name, (passed, _) in results.items()} == {
        "correct": False,
        "short": False,
        "passed": False,
    }
    assert "passed worse: 1.000 → 0.083" in results["passed"][1] and "(Holm)" in results["passed"][1]


def test_checkpoints_are_metrics_like_any_other(gate: Any, tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "follow_ups": ["again"],
        "checkpoints": [{"after_turn": 1, "graders": [{"type": "text", "name": "kind", "contains": ["e"]}]}],
        "graders": [{"type": "text", "name": "end", "contains": [" "], "threshold": 0}],
    }
    first = finished_run(tmp_path / "first", {"a": "yes", "b": "yes"}, **keys)
    second = finished_run(tmp_path / "second", {"a": "yes", "b": "no"}, **keys)
    results = checks(gate, second, "--baseline", first, "--max-regression-pct", "0")
    assert results["checkpoint@1/kind"][0] is False and results["end"][0] is True
    assert "checkpoint@1/kind 1 → 0.5" in results["checkpoint@1/kind"][1]
    for minimum, code in (("0.5", 0), ("0.51", 1)):
        assert gate(second, "--min", f"checkpoint@1/kind={minimum}").code == code
    assert gate(second, "--min", "checkpoint@1/kind/pass@1=0.5").code == 0


def test_a_metric_of_the_baseline_that_is_gone_fails(gate: Any, base: Path, tmp_path: Path) -> None:
    renamed = finished_run(tmp_path / "renamed", answered(10, 0), graders=[{"type": "exact", "name": "right"}])
    results = checks(gate, renamed, "--baseline", base)
    assert results["correct"] == (False, "correct is in the baseline and not in this run")


def test_runs_without_a_common_metric_fail_instead_of_passing_for_lack_of_one(
    gate: Any, base: Path, tmp_path: Path
) -> None:
    ungraded = finished_run(tmp_path / "ungraded", answered(3, 0), graders=[])
    results = checks(gate, base, "--baseline", ungraded, "--removed", "ignore")
    assert results["metrics"][0] is False and "no metric in common" in results["metrics"][1]
    assert gate(ungraded, "--baseline", base).code == 1


def test_passing_all_graders_is_not_compared_where_the_graders_are_not_the_same(gate: Any, tmp_path: Path) -> None:
    short = {"type": "text", "name": "short", "regex_match": ["^.{0,3}$"]}
    strict = {"type": "text", "name": "strict", "contains": ["never"]}
    before = finished_run(tmp_path / "before", {"a": "yes"}, graders=[*CORRECT, short])
    after = finished_run(tmp_path / "after", {"a": "yes"}, graders=[*CORRECT, short, strict])
    assert list(checks(gate, after, "--baseline", before)) == ["correct", "short"]  # a new grader is no regression
    lost = checks(gate, before, "--baseline", after)
    assert {name: passed for name, (passed, _) in lost.items()} == {"correct": True, "short": True, "strict": False}


def test_accepted_errors_do_not_hide_what_has_become_worse(gate: Any, base: Path, tmp_path: Path) -> None:
    """The samples that were wrong no longer have an answer, and the rest looks better than before."""
    answers: dict[str, Any] = answered(8, 0) | {"s8": None, "s9": None}
    run = finished_run(tmp_path / "errors", answers, flags=("--accept-errors",), limits={"retries": 0})
    results = checks(gate, run, "--baseline", base)
    assert results["correct"][0] is True
    assert results["coverage"] == (False, "coverage 1 → 0.8, 20 points lower (allowed: 2 points)")
    assert gate(run, "--baseline", base, "--max-regression-pct", "20").code == 0
    allowed = gate(run, "--baseline", base, "--max-drop", "20")
    assert allowed.code == 0 and "warn  coverage 1 → 0.8, 20 points lower (allowed: 20 points)" in allowed.out
    assert "coverage" not in checks(gate, base, "--baseline", run)


# Minima


@pytest.mark.parametrize(
    ("minimum", "code"),
    [
        ("correct=0.8", 0),
        ("correct=0.81", 1),
        ("score=0.8", 0),
        ("score=0.9", 1),
        ("passed=0.8", 0),
        ("passed=1", 1),
        ("coverage=1", 0),
        ("correct/pass@1=0.8", 0),
        ("correct/pass@1=0.9", 1),
    ],
)
def test_a_metric_must_reach_its_minimum(gate: Any, base: Path, minimum: str, code: int) -> None:
    ended = gate(base, "--min", minimum)
    assert ended.code == code
    assert ("FAIL" in ended.out) == bool(code)


def test_all_minima_must_be_reached(gate: Any, base: Path) -> None:
    results = checks(gate, base, "--min", "correct=0.5", "--min", "passed=0.9")
    assert results == {
        "min correct": (True, "correct is 0.8 (minimum 0.5)"),
        "min passed": (False, "passed is 0.8 (minimum 0.9)"),
    }


@pytest.mark.parametrize(
    "minimum",
    [
        *(
            "corect=0.5",
            "correct/pass@9=0.5",
            "correct/interval=0.5",
            "correct",
            "correct=",
            "=0.5",
            "correct=much",
            "",
        ),
        *("correct=20", "correct=-1", "correct=nan"),
    ],
)
def test_an_invalid_minimum_is_a_usage_error(gate: Any, base: Path, minimum: str) -> None:
    ended = gate(base, "--min", minimum)
    assert ended.code == 2 and re.match("error: (--min|minimum of|there is no metric) ?", ended.err)
    assert ended.out == ""


def test_an_unknown_metric_is_answered_with_the_known_ones(gate: Any, base: Path) -> None:
    assert "This run has: correct, score, passed, coverage, whole, graded." in gate(base, "--min", "corect=0.5").err


# Golden samples


def test_golden_samples_must_pass(gate: Any, base: Path) -> None:
    assert gate(base, "--golden", "s0", "--golden", "s7").code == 0
    ended = gate(base, "--golden", "s0", "--golden", "s9")
    assert ended.code == 1
    assert ended.out.splitlines() == [
        "ok    golden sample s0 passes",
        "FAIL  golden sample s9 fails 1 of 1 trials",
        "gate failed",
    ]


def test_a_golden_failure_is_named_before_all_other_failures(gate: Any, base: Path, worse: Path) -> None:
    ended = gate(worse, "--baseline", base, "--min", "correct=0.9", "--golden", "s9")
    failures = [line for line in ended.out.splitlines() if line.startswith("FAIL")]
    assert len(failures) == 3 and failures[0] == "FAIL  golden sample s9 fails 1 of 1 trials"


def test_a_golden_sample_passes_only_when_every_trial_does(gate: Any, tmp_path: Path) -> None:
    run = finished_run(tmp_path / "trials", {"a": ["yes", "yes", "no"], "b": "yes"}, trials=3)
    assert gate(run, "--golden", "b").code == 0
    ended = gate(run, "--golden", "a")
    assert ended.code == 1 and "golden sample a fails 1 of 3 trials" in ended.out


def test_golden_rows_must_pass_without_being_named(gate: Any, tmp_path: Path) -> None:
    rows = {"s0": {"golden": True}, "s2": {"golden": True}, "s3": {"golden": False}}
    run = finished_run(tmp_path / "rows", answered(2, 2), rows=rows)
    results = checks(gate, run, "--min", "correct=0.5")
    assert {name: passed for name, (passed, _) in results.items()} == {
        "golden s0": True,
        "golden s2": False,
        "min correct": True,
    }
    assert gate(run).code == 1  # golden rows are something to check


def test_a_golden_sample_that_is_gone_or_lost_its_flag_fails_the_gate(gate: Any, tmp_path: Path) -> None:
    golden = {"s0": {"golden": True}, "s1": {"golden": True}}
    base = finished_run(tmp_path / "base", {"s0": "yes", "s1": "yes", "s2": "no"}, rows=golden)
    current = finished_run(tmp_path / "current", {"s1": "no", "s2": "yes"})
    results = checks(gate, current, "--baseline", base, "--max-regression-pct", "100")
    assert results["golden s0"] == (False, "golden sample s0 is not in this run")
    assert results["golden s1"] == (False, "golden sample s1 fails 1 of 1 trials")
    allowed = checks(gate, current, "--baseline", base, "--max-regression-pct", "100", "--ignore-golden-rows")
    assert not any(name.startswith("golden") for name in allowed)


def test_a_changed_grader_fails_instead_of_being_measured_with_another_ruler(
    gate: Any, base: Path, tmp_path: Path
) -> None:
    lenient = finished_run(tmp_path / "lenient", answered(10, 0), graders=[{**CORRECT[0], "ignore_case": True}])
    results = checks(gate, lenient, "--baseline", base)
    assert results["correct"] == (
        False,
        "correct is not the same grader as in the baseline (ignore_case (default) → True): it cannot be compared",
    )


def test_golden_rows_that_can_no_longer_be_read_are_reported(gate: Any, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"id": "a", "expected": "yes", "golden": true}\n{"id": "b", "expected": "yes"}\n')
    keys: dict[str, Any] = {"samples": None, "dataset": {"path": str(data)}}
    run = finished_run(tmp_path / "gone", {"a": "no", "b": "yes"}, **keys)
    ended = gate(run, "--min", "correct=0.5")
    assert ended.code == 1 and "which rows say" not in ended.err
    data.unlink()
    assert "which rows say `golden: true` is not known" in gate(run, "--min", "correct=0.5").err


# New and removed samples


def test_new_samples_are_ignored_unless_they_must_pass(gate: Any, base: Path, other_samples: Path) -> None:
    assert "new samples" not in checks(gate, other_samples, "--baseline", base)
    results = checks(gate, other_samples, "--baseline", base, "--new", "must-pass")
    assert results["new samples"] == (False, "1 of 2 new samples do not pass: n1")
    passing = checks(gate, base, "--baseline", base, "--new", "must-pass")
    assert "new samples" not in passing


@pytest.mark.parametrize(("policy", "code", "reported"), [("ignore", 0, False), ("warn", 0, True), ("fail", 1, True)])
def test_removed_samples_are_ignored_or_a_warning_or_a_failure(
    gate: Any, base: Path, other_samples: Path, policy: str, code: int, reported: bool
) -> None:
    ended = gate(other_samples, "--baseline", base, "--removed", policy)
    assert ended.code == code
    word = {"warn": "warn", "fail": "FAIL"}.get(policy, "")
    assert (f"{word}  2 baseline samples are missing from this run: s0, s1" in ended.out) == reported


def test_removed_samples_are_a_warning_by_default(gate: Any, base: Path, other_samples: Path) -> None:
    assert (
        gate(other_samples, "--baseline", base).out == gate(other_samples, "--baseline", base, "--removed", "warn").out
    )


# Formats


def test_markdown_is_a_table(gate: Any, base: Path, worse: Path) -> None:
    ended = gate(worse, "--baseline", base, "--golden", "s0", "--format", "markdown")
    assert ended.code == 1
    assert ended.out.splitlines() == [
        "<!-- holdfast:e -->",
        f"### ❌ e: gate failed (baseline `agent.py:reply {base.name.rpartition('-')[2]}`)",
        "",
        "| | metric | baseline | this run | difference | verdict |",
        "|---|---|---|---|---|---|",
        "| ❌ | correct | 80.0 % | 20.0 % | −60.0 (−85.7 – −14.3) | **worse** |",
        "",
        "| | check | |",
        "|---|---|---|",
        "| ✅ | golden s0 | golden sample s0 passes |",
        "",
        "`correct`: 6 samples fell, 0 rose.",
        "",
        "A system that did not change is red in at most 5 % of gates.",
    ]


def test_github_gets_an_annotation_for_each_failure(gate: Any, base: Path, worse: Path) -> None:
    ended = gate(worse, "--baseline", base, "--golden", "s0", "--format", "github")
    assert ended.code == 1
    failure, summary = ended.out.splitlines()
    assert failure.startswith("::error title=holdfast gate::correct worse: 0.800 → 0.200, −60.0 points")
    assert summary == "::notice title=holdfast gate::gate failed, 2 checks"
    passed = gate(base, "--baseline", base, "--format", "github")
    assert passed.code == 0 and passed.out == "::notice title=holdfast gate::gate passed, 1 check\n"


def test_github_gets_a_step_summary(gate: Any, base: Path, worse: Path, tmp_path: Path, monkeypatch: Any) -> None:
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    gate(worse, "--baseline", base, "--format", "github")
    assert summary.read_text() == gate(worse, "--baseline", base, "--format", "markdown").out


def test_a_step_summary_that_cannot_be_written_is_only_a_warning(gate: Any, base: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "/nonexistent/summary")
    ended = gate(base, "--min", "correct=0.5", "--format", "github")
    assert ended.code == 0 and "::warning title=holdfast gate::cannot write the step summary" in ended.out


def test_names_with_special_characters_break_no_format(gate: Any, tmp_path: Path) -> None:
    name = "a|b\n::c%"
    run = finished_run(tmp_path / "odd", {name: "no"})
    markdown = gate(run, "--golden", name, "--format", "markdown").out.splitlines()
    assert len(markdown) == 6 and markdown[-1].replace("\\|", "").count("|") == 4
    github = gate(run, "--golden", name, "--format", "github").out.splitlines()
    assert len(github) == 2 and "a|b%0A::c%25" in github[0]


# What is no question at all


def test_a_run_that_is_not_finished_is_an_error_and_never_a_pass(gate: Any, base: Path, tmp_path: Path) -> None:
    run = finished_run(tmp_path / "ungraded", answered(10, 0), flags=("--skip-graders",))
    for arguments in ((run, "--baseline", base), (base, "--baseline", run), (run, "--golden", "s0")):
        for shape in ("human", "json", "markdown", "github"):
            ended = gate(*arguments, "--format", shape)
            assert ended.code == 2 and "is not finished" in ended.err
            assert ended.out == ""


def test_a_finished_run_that_lost_its_numbers_is_an_error(gate: Any, base: Path, tmp_path: Path) -> None:
    run = shutil.copytree(base, tmp_path / base.name)
    (run / "metrics.json").unlink()
    assert gate(run, "--golden", "s0").code == 2
    (run / "metrics.json").write_text('{"schemaVersion": "1.0"}')
    ended = gate(run, "--golden", "s0")
    assert ended.code == 2 and "cannot be read" in ended.err


def test_a_gate_with_nothing_to_check_is_wrong_usage(gate: Any, base: Path) -> None:
    for arguments in ((base,), (base, "--new", "must-pass"), (base, "--removed", "fail")):
        ended = gate(*arguments)
        assert ended.code == 2 and "the gate has nothing to check" in ended.err


def test_a_run_that_is_not_there_is_wrong_usage(gate: Any, base: Path) -> None:
    assert gate("ffffff", "--golden", "s0").code == 2
    ended = gate(base, "--baseline", "ffffff")
    assert ended.code == 2 and "no run 'ffffff'" in ended.err
    assert gate().code == 2
