"""results.json and metrics.json: what was graded is scored, what was not is said, and both follow from the journals."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.errors import ConfigError
from tests.support.running import holdfast as run_command
from tests.support.running import lines, metrics, run_dir, server, write_eval

if TYPE_CHECKING:
    from pathlib import Path

AGENT = """\
def reply(prompt, context):
    if prompt.startswith("fail"):
        raise RuntimeError("down")
    return f"{prompt} {context.trial}"


def half(output):
    return 0.5


def picky(output):
    if "b" in output:
        raise ValueError("cannot say")
    return 1.0


def undecided(output):
    return {"score": None} if "b" in output else True
"""


@pytest.fixture
def evaluate(tmp_path: Path) -> Any:
    (tmp_path / "agent.py").write_text(AGENT)

    def run(*prompts: Any, graders: Any = (), **keys: Any) -> Any:
        return holdfast.evaluate(
            name=keys.pop("name", "e"),
            samples=[{"id": f"s{number}", "q": prompt} for number, prompt in enumerate(prompts)],
            prompt="{{ q }}",
            target={"python": f"{tmp_path}/agent.py:reply"},
            graders=[
                {"type": "python", "name": g, "function": f"{tmp_path}/agent.py:{g}"} if isinstance(g, str) else g
                for g in graders
            ],
            runs_dir=tmp_path / "runs",
            **{"limits": {"retries": 0}, **keys},
        )

    return run


def text(name: Any, contains: Any, **more: Any) -> Any:
    return {"type": "text", "name": name, "contains": contains, **more}


class TestCoverage:
    def test_an_error_of_a_grader_takes_its_trial_out_of_the_overall_score_alone(self, evaluate: Any) -> None:
        run = evaluate("a", "b", graders=["picky", text("t", "a")], accept_errors=True)
        numbers = run.metrics
        assert (numbers.coverage, numbers.graded, numbers.outputs) == (0.5, 1, 2)
        assert (
            numbers.graders["picky"].score,
            numbers.graders["picky"].errors,
            numbers.graders["picky"].n,
        ) == (1, 1, 1)
        assert (numbers.graders["t"].score, numbers.graders["t"].n) == (0.5, 2)
        assert (numbers.score, numbers.overall.n) == (1.0, 1)

    def test_a_skipped_output_is_neither_covered_nor_scored(self, evaluate: Any) -> None:
        run = evaluate("a", "b", graders=["undecided"])
        numbers = run.metrics
        assert run.finished and (numbers.coverage, numbers.graded) == (0.5, 1)
        assert numbers.notices == ["undecided skipped 1 of 2 trials: they have no verdict and no score"]
        assert (numbers.graders["undecided"].skipped, numbers.graders["undecided"].n, numbers.score) == (
            1,
            1,
            1.0,
        )
        assert [entry["status"] for entry in run.results()] == ["passed", "skipped"]

    def test_without_graders_outputs_are_what_is_covered_and_there_is_no_score(self, evaluate: Any) -> None:
        run = evaluate("a", "b")
        assert run.finished and run.score is None
        assert (run.metrics.coverage, run.metrics.graders, run.metrics.overall) == (1, {}, None)


class TestScores:
    @pytest.mark.parametrize(
        ("weights", "expected"),
        [((1, 1), 0.75), ((3, 1), 0.875), ((1, 3), 0.625), ((1, 0), 1.0), ((0, 1), 0.5), ((0, 0), None)],
    )
    def test_the_overall_score_is_the_weighted_mean(self, evaluate: Any, weights: Any, expected: float | None) -> None:
        run = evaluate(
            "a", graders=[text("t", "a", weight=weights[0]), {**text("u", ["a", "z"]), "weight": weights[1]}]
        )
        assert run.score == expected
        assert run.metrics.graders["t"].weight == weights[0]

    def test_a_trial_passes_when_every_grader_passes(self, evaluate: Any) -> None:
        run = evaluate("a", "b", "ab", graders=[text("has a", "a"), text("has b", "b")])
        assert [entry["status"] for entry in run.results()] == ["failed", "failed", "passed"]
        assert run.metrics.passed == pytest.approx(1 / 3)
        assert run.score == pytest.approx(2 / 3)

    def test_a_grader_of_weight_0_is_reported_and_decides_nothing(self, evaluate: Any) -> None:
        run = evaluate("a", "b", "ab", graders=[text("has a", "a"), {**text("has b", "b"), "weight": 0}])
        assert [(entry["status"], entry["score"]) for entry in run.results()] == [
            ("passed", 1.0),
            ("failed", 0.0),
            ("passed", 1.0),
        ]
        assert run.metrics.graders["has b"].score == run.metrics.passed == run.metrics.score == pytest.approx(2 / 3)
        assert run.metrics.overall.passed == 2

    def test_a_trial_that_only_graders_of_weight_0_check_is_skipped(self, evaluate: Any) -> None:
        run = evaluate("a", "b", graders=[{**text("has a", "a"), "weight": 0}])
        assert [(entry["status"], entry["score"]) for entry in run.results()] == [("skipped", None)] * 2
        assert (run.metrics.coverage, run.metrics.passed, run.metrics.graders["has a"].passed) == (1, None, 1)

    def test_an_error_of_a_grader_of_weight_0_leaves_the_trial_pending(self, evaluate: Any, tmp_path: Path) -> None:
        picky = {"type": "python", "name": "picky", "function": f"{tmp_path}/agent.py:picky", "weight": 0}
        assert not evaluate("a", "b", graders=[text("t", "a"), picky]).finished

    def test_trials_are_counted_apart_and_together(self, evaluate: Any) -> None:
        run = evaluate("a", "b", trials=3, graders=[text("last", "3")])
        last = run.metrics.graders["last"]
        assert (run.metrics.total, last.n, last.score) == (6, 6, pytest.approx(1 / 3))
        assert last.pass_at == pytest.approx({1: 1 / 3, 2: 2 / 3, 3: 1})
        assert last.interval == "wilson-clustered"


class TestTheFiles:
    @pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"metrics": 5}'])
    def test_damaged_metrics_are_rebuilt(self, evaluate: Any, content: str) -> None:
        run = evaluate("a", graders=["half"])
        before = metrics(run.path)
        (run.path / "metrics.json").write_text(content)
        assert metrics(evaluate("a", graders=["half"]).path) == before

    def test_results_and_metrics_are_standard_json(self, evaluate: Any) -> None:
        run = evaluate("a", graders=["half"])
        results = json.loads((run.path / "results.json").read_text())
        assert results["schemaVersion"] == "1.0" and results["eval"] == "e" and len(results["trials"]) == 1
        manifest = json.loads((run.path / "manifest.json").read_text())
        assert manifest["schemaVersion"] == "1.0" and run.path.name.endswith(manifest["id"])
        assert manifest["dataset"]["count"] == 1
        for name in ("outputs.jsonl", "grades.jsonl"):
            assert all(list(entry)[-1] == "sum" for entry in lines(run.path / name))

    def test_every_output_and_grade_has_the_documented_fields(self, evaluate: Any) -> None:
        run = evaluate("a", graders=["half"])
        (output,), (grade,) = lines(run.path / "outputs.jsonl"), lines(run.path / "grades.jsonl")
        assert {"key", "sample", "trial", "attempt", "messages", "output", "turns", "stop", "usage", "timing"} <= set(
            output
        )
        assert set(output["usage"]) == {"input_tokens", "output_tokens", "requests", "cost"}
        assert set(output["timing"]) == {"started", "seconds", "first_token"}
        documented = "key sample trial grader type by turn judged status score weight feedback details seconds"
        assert set(documented.split()) <= set(grade)
        assert (grade["key"], grade["turn"], grade["status"], grade["score"]) == (output["key"], None, "passed", 0.5)

    def test_the_times_are_those_of_the_trials(self, evaluate: Any) -> None:
        run = evaluate("a", "b", "c", graders=["half"])
        seconds = sorted(entry["timing"]["seconds"] for entry in lines(run.path / "outputs.jsonl"))
        assert run.metrics.timing.trial_seconds_p50 == pytest.approx(seconds[1])
        assert seconds[1] <= run.metrics.timing.trial_seconds_p95 <= seconds[2]


class TestUnfinished:
    def test_an_unfinished_run_shows_what_it_has_and_what_is_missing_and_is_not_finished_by_it(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "agent.py").write_text(AGENT)
        picky = {"type": "python", "name": "picky", "function": "agent.py:picky"}
        some = text("some", "a", where="q != 'ab'")
        samples = [{"id": f"s{number}", "q": q} for number, q in enumerate(["a", "b", "ab", "fail"])]
        spec = {"schemaVersion": "1.0", "name": "e", "samples": samples, "prompt": "{{ q }}"}
        spec |= {"target": {"python": "agent.py:reply"}, "limits": {"retries": 0}}
        spec["graders"] = [text("any", ["a"]), some, picky]
        (tmp_path / "e.yaml").write_text(json.dumps(spec))
        done = run_command("eval", "e.yaml", cwd=tmp_path, check=3)
        assert "e · agent.py:reply · incomplete" in done.stdout
        cells = [[cell.strip() for cell in line.strip("│┃").split(line[0])] for line in table(done.stdout)]
        head, *rows = cells
        by_name = {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}
        assert {name: (row["graded"], row["ungraded"]) for name, row in by_name.items()} == {
            "any": ("3", "0"),
            "some": ("2", "0"),
            "picky": ("1", "2"),
            "overall": ("1", "2"),
        }
        assert [by_name[name]["score"] for name in by_name] == ["0.667", "0.500", "1.000", "1.000"]
        assert (
            "incomplete: 1 of 4 trials has no output; 1 grader has no verdict on some outputs (picky 2)." in done.stdout
        )
        assert "1 trial failed: 1× agent.py:" in done.stdout and "2 grades of picky failed: " in done.stdout
        assert "3 of 4 trials have an output, 2 of them without all their grades" in done.stdout
        run = run_dir(tmp_path)
        assert not (run / "metrics.json").exists() and not (run / "results.json").exists()

        accepted = run_command("eval", "e.yaml", "--accept-errors", cwd=tmp_path)
        assert "incomplete" not in accepted.stdout and (run / "metrics.json").exists()

    def test_where_nothing_was_graded_there_is_no_table(self, tmp_path: Path, evaluate: Any) -> None:
        spec = {"schemaVersion": "1.0", "name": "e", "samples": [{"q": "fail"}], "prompt": "{{ q }}"}
        spec |= {"target": {"python": "agent.py:reply"}, "limits": {"retries": 0}, "graders": [text("t", "a")]}
        (tmp_path / "e.yaml").write_text(json.dumps(spec))
        done = run_command("eval", "e.yaml", cwd=tmp_path, check=3)
        assert "│" not in done.stdout and "0 of 1 trials have an output" in done.stdout


def table(printed: Any) -> Any:
    return [line for line in printed.splitlines() if line.startswith(("│", "┃"))]


class TestAfterTheFact:
    def test_other_thresholds_and_weights_change_the_report_without_a_request(self, tmp_path: Path) -> None:
        with server() as mock:
            grader = {"type": "text", "contains": ["question", "nothing"]}
            path = write_eval(tmp_path, mock.base_url, rows=4, graders=[grader, {"type": "exact"}])
            run_command("eval", path, cwd=tmp_path)
            run = run_dir(tmp_path)
            before = metrics(run)
            assert (before["metrics"]["text"]["passed"], before["score"], mock.requests) == (0, 0.5, 4)
            grades = (run / "grades.jsonl").read_bytes()
            grader |= {"threshold": 0.5, "weight": 3}
            write_eval(tmp_path, mock.base_url, rows=4, graders=[grader, {"type": "exact"}])
            done = run_command("eval", path, cwd=tmp_path)
            after = metrics(run)
            assert (after["metrics"]["text"]["passed"], after["metrics"]["text"]["threshold"]) == (4, 0.5)
            assert (after["passed"], before["passed"]) == (0.5, 0.0)
            assert after["score"] == pytest.approx((3 * 0.5 + 0.5) / 4)
            assert mock.requests == 4 and (run / "grades.jsonl").read_bytes() == grades
            assert "already finished" not in done.stdout
            assert "already finished" in run_command("eval", path, cwd=tmp_path).stdout

    def test_a_gate_in_the_eval_file_takes_the_names_that_the_gate_command_takes(self, evaluate: Any) -> None:
        keys: dict[str, Any] = {"trials": 3, "graders": [text("last", "3")]}
        assert evaluate("a", "b", gate={"last/pass@3": 1.0, "last/pass@1": 0.3, "coverage": 1}, **keys).exit_code == 0
        missed = evaluate("a", "b", gate={"last/pass@2": 0.7, "last/low": 0.9}, **keys)
        assert missed.exit_code == 1
        for name, problem in (
            ("last/pass@4", "it has .* pass@1 to pass@3"),
            ("least/pass@1", "no grader of this name"),
        ):
            with pytest.raises(ConfigError, match=problem):
                evaluate("a", gate={name: 0.5}, **keys)
