"""Runs in Python: loaded from a path, compared, gated, shown in notebooks and turned into data frames."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

ROWS = [{"id": f"s{number}", "q": f"q{number}", "level": number, "tags": ["a"]} for number in range(6)]
MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture
def evaluate(tmp_path: Path) -> Any:
    def run(name: str, suffix: str = "", **keys: Any) -> holdfast.Run:
        return holdfast.evaluate(
            **{
                "name": name,
                "samples": ROWS,
                "prompt": "{{ q }}",
                "target": {"command": ["sh", "-c", f"cat; printf '{suffix}'"]},
                "graders": [{"type": "text", "name": "loud", "contains": "!"}],
                "runs_dir": tmp_path / "runs",
                "limits": {"retries": 0},
                **keys,
            }
        )

    return run


def table_of(shown: Any) -> str:
    return str(shown._repr_html_())


class TestLoading:
    def test_a_finished_run_is_what_evaluate_returned(self, evaluate: Any) -> None:
        run = evaluate("loud", "!", gate={"loud": 0.9})
        assert holdfast.load_run(run.path) == run and holdfast.load_run(str(run.path)) == run
        assert isinstance(run.metrics, holdfast.Metrics) and run.metrics.graders["loud"].passed == 6

    def test_a_gate_that_is_not_met_is_exit_code_one(self, evaluate: Any) -> None:
        run = evaluate("quiet", gate={"loud": 0.9})
        assert (run.exit_code, holdfast.load_run(run.path).exit_code) == (1, 1)

    def test_an_unfinished_run_names_the_command_that_resumes_it(self, evaluate: Any) -> None:
        run = evaluate("broken", target={"command": ["false"]})
        loaded = holdfast.load_run(run.path)
        assert (loaded.finished, loaded.metrics, loaded.exit_code) == (False, None, 3)
        assert f"holdfast resume {run.path}" in repr(loaded) and "not finished" in table_of(loaded)

    def test_another_directory_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="is not a run directory"):
            holdfast.load_run(tmp_path)


class TestComparing:
    def test_runs_and_paths_are_compared_metric_by_metric(self, evaluate: Any) -> None:
        loud, quiet = evaluate("loud", "!"), evaluate("quiet")
        comparison = holdfast.compare(loud, quiet.path)
        row = comparison["loud"]
        assert (row.first, row.second, row.difference, row.verdict) == (1.0, 0.0, 1.0, "higher")
        assert len(comparison.flips) == 6
        assert repr(comparison).startswith("<Comparison of ") and repr(comparison).endswith(": loud +1.000>")
        assert "loud: 1.000 and 0.000, difference +1.000 (+0.090 – +1.000), p = 0.0312: higher" in str(comparison)
        assert "<td>loud</td><td>1.000</td><td>0.000</td><td>+1.000</td>" in table_of(comparison)
        with pytest.raises(KeyError):
            comparison["other"]

    def test_an_unfinished_run_is_refused(self, evaluate: Any) -> None:
        broken = evaluate("broken", target={"command": ["false"]})
        for arguments in ((broken, evaluate("loud", "!")), (evaluate("loud", "!"), broken)):
            with pytest.raises(UsageError, match="is not finished"):
                holdfast.compare(*arguments)


class TestGating:
    def test_minima_baselines_and_golden_samples_are_checked(self, evaluate: Any) -> None:
        loud, quiet = evaluate("loud", "!"), evaluate("quiet")
        passed = holdfast.gate(loud, quiet, minima={"loud": 0.9, "loud/pass@1": 1}, golden=["s1"])
        assert passed and passed.passed and repr(passed) == "<gate passed>"
        assert str(passed).splitlines()[:2] == ["ok    golden sample s1 passes", "ok    loud is 1 (minimum 0.9)"]
        failed = holdfast.gate(quiet.path, loud.path, minima={"score": 0.5})
        assert not failed and [check.what for check in failed.checks if not check.passed] == ["min score", "loud"]
        assert repr(failed).startswith(
            "<gate failed: score is 0 (minimum 0.5); loud worse: 1.000 → 0.000, −100.0 points"
        )
        assert "<td>FAIL</td><td>min score</td><td>score is 0 (minimum 0.5)</td>" in table_of(failed)

    def test_golden_rows_must_pass_by_default(self, evaluate: Any) -> None:
        run = evaluate("quiet", samples=[{**ROWS[0], "golden": True}, *ROWS[1:]])
        assert not holdfast.gate(run)
        with pytest.raises(UsageError, match="nothing to check"):
            holdfast.gate(run, golden_rows=False)

    @pytest.mark.parametrize(
        ("minima", "message"), [({"laud": 0.5}, "no metric 'laud'"), ({"loud": 80}, "80 is not between 0 and 1")]
    )
    def test_an_impossible_minimum_is_refused(self, evaluate: Any, minima: Any, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            holdfast.gate(evaluate("loud", "!"), minima=minima)


class TestDisplaying:
    def test_names_are_escaped_in_tables(self, evaluate: Any) -> None:
        run = evaluate(MARKUP, graders=[{"type": "text", "name": MARKUP, "contains": "q"}])
        failed = holdfast.gate(run, golden=[MARKUP])
        for shown in (run, holdfast.compare(run, run), failed):
            assert "<img" not in table_of(shown) and "&lt;img" in table_of(shown)


class TestFrames:
    def test_pandas(self, evaluate: Any) -> None:
        pandas = pytest.importorskip("pandas")
        frame = evaluate("loud", "!", trials=2).to_pandas()
        assert isinstance(frame, pandas.DataFrame) and len(frame) == 12
        assert list(frame.columns[:4]) == ["sample", "trial", "status", "score"]
        assert frame["loud.score"].mean() == 1 and frame["row.level"].sum() == 30
        assert frame["row.tags"][0] == '["a"]' and frame["output"][0].endswith("!")

    @pytest.mark.skipif(importlib.util.find_spec("polars") is None, reason="polars is not installed here")
    def test_polars(self, evaluate: Any) -> None:
        frame = evaluate("loud", "!").to_polars()
        assert frame.shape[0] == 6 and frame["row.level"].sum() == 15 and frame["loud.score"].mean() == 1

    @pytest.mark.parametrize("package", ["pandas", "polars"])
    def test_a_package_that_is_missing_is_named(
        self, evaluate: Any, monkeypatch: pytest.MonkeyPatch, package: str
    ) -> None:
        run = evaluate("loud", "!")
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UsageError, match=f"{package} is not installed\nhint: pip install {package}"):
            getattr(run, f"to_{package}")()
