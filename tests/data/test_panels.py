"""Graders that look at some rows only: what they cost elsewhere, and what is said of one that looks at none."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.data.columns import Conditions, Panel
from holdfast.errors import ConfigError
from holdfast.plan.identity import identify
from holdfast.report.run_view import RunView
from holdfast.spec.load import eval_of_run
from holdfast.spec.template import RENDER_ERRORS, Expression, expression
from holdfast.store.rundir import RunDir
from tests.support.running import holdfast as run_command
from tests.support.running import lines, run_dir, write_eval
from tests.support.specs import load

if TYPE_CHECKING:
    from pathlib import Path

AGENT = """\
def reply(prompt):
    return prompt

def shy(output):
    return {"score": None}
"""
ROWS = [
    {"id": "a", "level": "easy", "steps": 1},
    {"id": "b", "level": "hard", "steps": 4},
    {"id": "c", "level": "hard", "steps": 9},
    {"id": "d", "level": "none"},
]
HARD = {"type": "text", "name": "hard", "contains": "b", "where": 'level == "hard"'}
LONG = {"type": "text", "name": "long", "contains": "c", "where": "steps is defined and steps > 4"}
NOT_D = {"type": "exact", "name": "any", "expected": "{{ id }}", "where": "id != 'd'"}
SEEN = {"hard": {"b", "c"}, "long": {"c"}, "any": {"a", "b", "c"}}


@pytest.fixture
def evaluate(tmp_path: Path) -> Any:
    (tmp_path / "agent.py").write_text(AGENT)

    def run(*graders: Any, rows: Any = ROWS, **keys: Any) -> Any:
        return holdfast.evaluate(
            name="e",
            samples=rows,
            prompt="{{ id }}",
            target={"python": f"{tmp_path}/agent.py:reply"},
            graders=list(graders),
            runs_dir=tmp_path / "runs",
            **keys,
        )

    return run


def asked(run: Any) -> Any:
    """Return the samples that each grader has a line for."""
    samples = {}
    for grade in lines(run.path / "grades.jsonl"):
        samples.setdefault(grade["grader"], set()).add(grade["sample"])
    return samples


def statuses_of(run: Any) -> Any:
    return {entry["sample"]: {name: v["status"] for name, v in entry["grades"].items()} for entry in run.results()}


def make_report_again(run: Any) -> None:
    (run.path / "metrics.json").unlink()
    (run.path / "results.json").unlink()


def without_time(metrics: Any) -> Any:
    return {key: value for key, value in metrics.to_dict().items() if key != "timing"}


class TestWhatDoesNotApply:
    def test_a_grader_that_does_not_apply_has_no_line_and_no_metric(self, evaluate: Any) -> None:
        run = evaluate(HARD, LONG, NOT_D)
        assert run.exit_code == 0 and asked(run) == SEEN
        assert len(lines(run.path / "grades.jsonl")) == 6
        assert statuses_of(run) == {
            "a": {"any": "passed"},
            "b": {"hard": "passed", "any": "passed"},
            "c": {"hard": "failed", "long": "passed", "any": "passed"},
            "d": {},
        }
        counts = {name: (v.n, v.passed, v.skipped, v.rows) for name, v in run.metrics.graders.items()}
        assert counts == {"hard": (2, 1, 2, 2), "long": (1, 1, 3, 1), "any": (3, 3, 1, 3)}
        assert run.metrics.coverage == 1 and run.metrics.graded == 3

    def test_a_row_without_graders_is_skipped_and_finished(self, evaluate: Any) -> None:
        run = evaluate(HARD, rows=[ROWS[0]])
        assert run.exit_code == 0 and not (run.path / "grades.jsonl").exists()
        assert [(entry["status"], entry["score"]) for entry in run.results()] == [("skipped", None)]
        make_report_again(run)
        assert evaluate(HARD, rows=[ROWS[0]]).metrics.coverage == 1

    def test_a_rebuilt_report_is_the_same_without_requests(self, evaluate: Any) -> None:
        first = evaluate(HARD, LONG, NOT_D)
        before = first.path.joinpath("grades.jsonl").read_bytes()
        make_report_again(first)
        again = evaluate(HARD, LONG, NOT_D)
        assert first.path.joinpath("grades.jsonl").read_bytes() == before
        assert without_time(again.metrics) == without_time(first.metrics)

    def test_outputs_graded_later_are_graded_by_the_graders_that_apply(self, evaluate: Any) -> None:
        evaluate(HARD, LONG, NOT_D, skip_graders=True)
        run = evaluate(HARD, LONG, NOT_D)
        assert run.exit_code == 0 and asked(run) == SEEN

    def test_a_checkpoint_of_some_rows_stops_and_grades_these_alone(self, evaluate: Any) -> None:
        checkpoint = {
            "after_turn": 1,
            "on_failure": "stop",
            "where": 'level == "hard"',
            "graders": [{"type": "text", "name": "stay", "contains": "c"}],
        }
        run = evaluate(NOT_D, checkpoints=[checkpoint], follow_ups=["{{ id }}"])
        assert asked(run) == {"stay": {"b", "c"}, "any": {"a", "c"}}
        assert {entry["sample"]: entry["status"] for entry in run.results()} == {
            "a": "passed",
            "b": "failed",
            "c": "passed",
            "d": "skipped",
        }
        make_report_again(run)
        before = len(lines(run.path / "grades.jsonl"))
        assert without_time(evaluate(NOT_D, checkpoints=[checkpoint], follow_ups=["{{ id }}"]).metrics) == without_time(
            run.metrics
        )
        assert len(lines(run.path / "grades.jsonl")) == before

    def test_each_condition_is_evaluated_once_for_a_row(self, evaluate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        looked = Counter()
        call = Expression.__call__

        def counting(self: Any, fields: Any) -> Any:
            looked[self, fields["id"]] += 1
            return call(self, fields)

        monkeypatch.setattr(Expression, "__call__", counting)
        run = evaluate(LONG, NOT_D, {**LONG, "name": "too"}, {"type": "exact", "expected": "{{ id }}"}, trials=3)
        assert run.exit_code == 0
        assert set(looked.values()) == {1} and len(looked) == 2 * len(ROWS)

    def test_what_only_its_rows_have_may_stand_in_its_templates(self, evaluate: Any) -> None:
        steps = {"type": "exact", "name": "steps", "expected": "{{ 'abc'[steps // 4] }}", "where": "steps is defined"}
        assert statuses_of(evaluate(steps)) == {**{name: {"steps": "passed"} for name in "abc"}, "d": {}}
        with pytest.raises(ConfigError, match="'steps' is undefined"):
            evaluate({**steps, "where": "true"})

    def test_workers_apply_the_same_conditions(self, tmp_path: Path, evaluate: Any) -> None:
        keys: dict[str, Any] = {"samples": ROWS, "prompt": "{{ id }}", "graders": [HARD, LONG, NOT_D]}
        (tmp_path / "e.yaml").write_text(
            json.dumps({"schemaVersion": "1.0", "name": "w", "target": {"python": "agent.py:reply"}, **keys})
        )
        run_command("eval", "e.yaml", "--workers", "2", "--display", "none", cwd=tmp_path)
        shared = run_dir(tmp_path, "w")
        grades = [grade for path in shared.glob("workers/*/grades.jsonl") for grade in lines(path)]
        assert Counter(grade["grader"] for grade in grades) == {name: len(rows) for name, rows in SEEN.items()}
        alone = evaluate(HARD, LONG, NOT_D)
        together = RunDir(shared).read_metrics()
        assert together.graders == alone.metrics.graders and together.overall == alone.metrics.overall


def test_a_new_grader_of_some_rows_leaves_the_others_finished(tmp_path: Path) -> None:
    lab = {"samples": ROWS, "prompt": "{{ id }}", "target": {"python": "agent.py:reply"}}
    (tmp_path / "agent.py").write_text(AGENT)

    def plan(*graders: Any, do: bool = False) -> Any:
        spec = {"schemaVersion": "1.0", "name": "e", **lab, "graders": list(graders)}
        (tmp_path / "e.yaml").write_text(json.dumps(spec))
        planned = json.loads(run_command("eval", "e.yaml", "--dry-run", "--json", cwd=tmp_path).stdout)
        if do:
            run_command("eval", "e.yaml", "--display", "none", cwd=tmp_path)
        return planned["reused"], planned["to_grade"], planned["to_run"]

    assert plan(NOT_D, do=True) == (0, 0, 4)
    assert plan(NOT_D, LONG) == (3, 1, 0)
    assert plan(NOT_D, HARD, do=True) == (2, 2, 0)
    assert plan(HARD) == (4, 0, 0)


def test_a_run_is_exported_alike_when_its_rows_are_gone(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    spec = {"schemaVersion": "1.0", "name": "e", "dataset": {"path": "rows.jsonl"}, "prompt": "{{ id }}"}
    spec |= {"target": {"python": "agent.py:reply"}, "graders": [HARD, LONG, NOT_D]}
    (tmp_path / "e.yaml").write_text(json.dumps(spec))
    run_command("eval", "e.yaml", "--display", "none", cwd=tmp_path)

    def read() -> Any:
        trials = RunView(RunDir(run_dir(tmp_path))).trials()
        return sorted((t.output.sample, t.status, t.score, [g.grader for g in t.grades]) for t in trials)

    before = read()
    assert [status for _, status, _, _ in before] == ["passed", "passed", "failed", "skipped"]
    (tmp_path / "rows.jsonl").unlink()
    assert read() == before


class TestNothingChecked:
    def test_a_condition_that_is_true_for_no_row_is_a_notice_and_fails_nothing(
        self, tmp_path: Path, evaluate: Any
    ) -> None:
        typo = {**HARD, "name": "typo", "where": 'level == "hrad"'}
        run = evaluate(NOT_D, typo)
        assert run.exit_code == 0
        assert run.metrics.notices == ["grader `typo` applies to no row: check its `where`"]
        assert run.metrics.graders["typo"].rows == run.metrics.graders["typo"].n == 0
        assert "typo" in (run.path / "run.log").read_text()

    def test_the_notice_is_shown_before_the_run_and_below_its_table(self, tmp_path: Path) -> None:
        (tmp_path / "agent.py").write_text(AGENT)
        several = [{**HARD, "name": f"typo{number}", "where": "steps is defined and steps > 10"} for number in range(7)]
        keys: dict[str, Any] = {
            "rows": 3,
            "target": {"python": "agent.py:reply"},
            "graders": [{"type": "exact"}, *several],
        }
        eval_file = write_eval(tmp_path, "", **keys)
        notice = "graders `typo0`, `typo1`, `typo2`, `typo3`, `typo4` and 2 more apply to no row: check their `where`"
        planned = run_command("eval", eval_file, "--dry-run", cwd=tmp_path)
        assert f"note: {notice}" in planned.stdout
        done = run_command("eval", eval_file, cwd=tmp_path)
        assert notice in done.stderr and f"note: {notice}" in done.stdout
        assert "│ exact" in done.stdout and "│ typo" not in done.stdout
        some = run_command("eval", eval_file, "--limit", "2", "--dry-run", cwd=tmp_path)
        assert "apply to none of the selected rows" in some.stdout

    def test_a_grader_that_skips_every_output_or_is_never_reached_is_a_notice(
        self, evaluate: Any, tmp_path: Path
    ) -> None:
        shy = {"type": "python", "name": "shy", "function": f"{tmp_path}/agent.py:shy"}
        checkpoint = {"after_turn": 3, "graders": [{"type": "text", "name": "late", "contains": "x"}]}
        responder = {"python": f"{tmp_path}/agent.py:nothing", "max_followups": 3}
        (tmp_path / "agent.py").write_text(AGENT + "\ndef nothing(messages):\n    return None\n")
        run = evaluate(shy, NOT_D, checkpoints=[checkpoint], responder=responder)
        assert run.exit_code == 0
        assert run.metrics.notices == [
            "grader `shy` skipped every output: it has checked nothing",
            "grader `checkpoint@3/late` checked nothing: no conversation reached that turn",
        ]

    def test_there_is_no_notice_where_all_graders_checked_something(self, evaluate: Any) -> None:
        assert evaluate(HARD, LONG, NOT_D).metrics.notices == []


texts = st.sampled_from(["x", "y", "it's"])
values = st.one_of(texts, st.integers(0, 3), st.none(), st.lists(st.integers(), max_size=1))
conditions = st.one_of(
    st.builds(lambda field, text: f"{field} == {json.dumps(text)}", st.sampled_from(["id", "level"]), texts),
    st.builds(lambda text: f"level  ==  ({json.dumps(text)})", texts),
    st.sampled_from(["level", "level > 1", "level is defined and level in 'xy'", "level == id", "not level", "true"]),
    st.none(),
)


class TestConditions:
    @given(
        wheres=st.lists(conditions, max_size=8),
        row=st.fixed_dictionaries({}, optional={"id": values, "level": values}),
    )
    def test_conditions_together_decide_as_each_alone(
        self, tmp_path_factory: pytest.TempPathFactory, wheres: Any, row: Any
    ) -> None:
        graders = [
            {"type": "exact", "name": f"g{number}", "expected": "x", **({} if where is None else {"where": where})}
            for number, where in enumerate(wheres)
        ]
        spec = load(tmp_path_factory.getbasetemp(), graders=graders)
        looking, unsure = [], set()
        for number, where in enumerate(wheres):
            try:
                applies = where is None or expression(where)(row)
            except RENDER_ERRORS:
                applies = True
                unsure.add(number)
            if applies:
                looking.append(number)
        assert Conditions(spec).panel_for(row) == Panel(tuple(looking), frozenset(unsure))

    @pytest.mark.parametrize("value", [5, None, ["x"], {"x": 1}, True])
    def test_a_text_equals_no_other_kind_of_value(self, value: Any) -> None:
        assert expression('level == "5"')({"level": value}) is False


def test_the_survey_counts_the_rows_of_each_grader(evaluate: Any) -> None:
    run = evaluate(HARD, LONG, NOT_D)
    manifest = RunDir(run.path).read_manifest()
    panels = identify(eval_of_run(manifest.eval, manifest.folder, manifest.eval_file)).survey.panels
    assert panels.rows() == [2, 1, 3] and panels.mean == 6 / 4
    assert [panels.panel_at(position).graders for position in range(4)] == [(2,), (0, 2), (0, 1, 2), ()]
