"""The real `nat eval` and `holdfast eval` on the same configurations: every file that they write is compared.

Both run in one process each for all configurations, since NAT takes seconds to start.
"""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from holdfast.report.run_view import GradedTrial, RunView
from holdfast.store.rundir import RunDir
from tests.support.nat import install_components
from tests.support.running import metrics, run_dir

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.nat import Nat

NAT_EVAL = """
import asyncio, sys
from pathlib import Path
from nat.data_models.evaluate_runtime import EvaluationRunConfig
from nat.plugins.eval.cli.evaluate import run_and_evaluate
for path in sys.argv[1:]:
    asyncio.run(run_and_evaluate(EvaluationRunConfig(config_file=Path(path))))
"""
"""what the command does with its arguments"""
QUESTIONS = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff"]
TYPED = [5, 2.5, ["a", "b"], {"k": 1}, True, "text"]


def rows(**columns: list[Any]) -> list[dict[str, Any]]:
    """Rows with ids and questions, and further columns; a column of a row that is `...` is absent."""
    return [
        {"id": number + 1, "question": QUESTIONS[number]}
        | {name: values[number] for name, values in columns.items() if values[number] is not ...}
        for number in range(len(next(iter(columns.values()))))
    ]


class Example(NamedTuple):
    """A configuration, its rows, and how Holdfast's table of scores has to look."""

    rows: list[dict[str, Any]]
    evaluators: dict[str, Any]
    scores: dict[str, float | None]
    kind: str = "text"
    """what the workflow returns"""
    dataset: dict[str, Any] = {}  # noqa: RUF012 - never changed
    general: dict[str, Any] = {}  # noqa: RUF012
    columns_of_pandas: bool = False
    """NAT's rows have the types that pandas gives to whole columns; in Holdfast's file they are as in the dataset"""


SEES, RANK = {"_type": "sees"}, {"_type": "rank"}
EXAMPLES = {
    "typed": Example(
        rows(answer=TYPED), {"sees": SEES, "rank": RANK}, {"sees": 1.0, "rank": 3.5 / 6}, "object",
        dataset={"structure": {"answer_key": "answer"}},
    ),
    "lists": Example(rows(answer=[["a"], ["b", 1], []]), {"sees": SEES}, {"sees": 1.0}, "list"),
    "numbers": Example(
        rows(answer=["49", "7"]), {"sees": SEES, "rank": RANK}, {"sees": 1.0, "rank": 0.75}, "number",
        columns_of_pandas=True,
    ),
    "models": Example(rows(answer=["a", "b"]), {"sees": SEES}, {"sees": 1.0}, "model"),
    "nothing": Example(rows(answer=["a", "b"]), {"sees": SEES}, {"sees": 1.0}, "nothing"),
    "both": Example(rows(answer=["a0", "a1"], expected=["e0", "e1"]), {"sees": SEES}, {"sees": 1.0}),
    "missing": Example(
        rows(answer=["a", ..., None, 5], extra=[1, 2, ..., 4]), {"sees": SEES, "rank": RANK},
        {"sees": 0.75, "rank": 2.5 / 4}, columns_of_pandas=True, general={"verbose": True},
    ),
    "spreadsheet": Example(
        rows(answer=[5, 7], price=[1.5, ...]), {"sees": SEES}, {"sees": 1.0},
        dataset={"_type": "csv"}, columns_of_pandas=True,
    ),
    "unstructured": Example(
        [{"id": 1, "city": "Oslo", "rain/day": 2}, {"id": 2, "city": "Århus", "rain/day": 3}],
        {"sees": SEES}, {"sees": 0.0}, dataset={"structure": {"disable": True}},
    ),
    "scales": Example(
        rows(score=[0.0, 0.5, 1.0], wide=[0, 1.5, 2], label=["good", "bad", "good"]),
        {
            "plain": {"_type": "scores"},
            "wide": {"_type": "scores", "column": "wide"},
            "label": {"_type": "scores", "column": "label"},
        },
        {"plain": 0.5, "wide": None, "label": None},
    ),
    "names": Example(
        [{"key": "x", "the question": "why", "truth": [1]}, {"key": "y", "the question": "how", "truth": [2]}],
        {"sees": SEES, "atif": {"_type": "in_atif"}, "together": {"_type": "in_atif", "together": True}},
        {"sees": 0.0, "atif": 1.0, "together": 0.25},
        dataset={
            "id_key": "key",
            "structure": {
                "question_key": "the question", "answer_key": "truth", "generated_answer_key": "ours",
                "trajectory_key": "steps", "expected_trajectory_key": "wanted",
            },
        },
    ),
    "measured": Example(
        rows(answer=["a", "b"]),
        {"calls": {"_type": "avg_num_llm_calls"}, "runtime": {"_type": "avg_workflow_runtime"}},
        {"calls": None, "runtime": None}, general={"profiler": {"base_metrics": True}},
    ),
}  # fmt: skip
ERRORS = Example(
    rows(answer=["a", "b", "c"], score=[1.0, "raise", "hide"]),
    {"judge": {"_type": "scores"}, "broken": {"_type": "rank", "raises": True}, "rank": RANK},
    {"judge": 1.0, "broken": None, "rank": 2 / 3},
)
CLOCK = ("timestamp", "event_timestamp", "span_event_timestamp", "UUID", "function_id", "parent_id")
CHANCE = ("workflow_run_id", "workflow_trace_id")


def write_example(folder: Path, name: str, example: Example) -> Path:
    kind = example.dataset.get("_type", "json")
    if kind == "csv":
        text = io.StringIO()
        table = csv.DictWriter(text, list(example.rows[0]))
        table.writeheader()
        table.writerows(example.rows)
        (folder / f"{name}.data").write_text(text.getvalue())
    else:
        (folder / f"{name}.data").write_text(json.dumps(example.rows))
    general = {
        "output": {"dir": f"out/{name}"},
        "dataset": {"_type": kind, "file_path": f"{name}.data", **example.dataset},
        **example.general,
    }
    config = {
        "workflow": {"_type": "gives", "kind": example.kind},
        "eval": {"general": {"workflow_alias": name, **general}, "evaluators": example.evaluators},
    }
    (folder / f"{name}.yml").write_text(json.dumps(config))
    return folder / f"{name}.yml"


@pytest.fixture(scope="module")
def both(nat: Nat, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what NAT wrote below `theirs`, and what Holdfast wrote below `out`."""
    folder = tmp_path_factory.mktemp("both")
    install_components(folder, "kinds")
    examples = {**EXAMPLES, "errors": ERRORS}
    configs = [str(write_example(folder, name, example)) for name, example in examples.items()]
    done = nat.python("-c", NAT_EVAL, *configs, cwd=folder)
    assert done.returncode == 0, done.stderr
    shutil.move(folder / "out", folder / "theirs")
    nat("eval", *configs, "--accept-errors", cwd=folder)
    return folder


def timeless(value: Any) -> Any:
    """Return a value without what depends on the clock or on chance, and without keys that are null."""
    if isinstance(value, list):
        return [timeless(each) for each in value]
    if isinstance(value, dict):
        return {key: timeless(each) for key, each in value.items() if key not in (*CLOCK, *CHANCE) and each is not None}
    return value


def shape(value: Any) -> Any:
    """Return a value with nothing for its numbers."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    return [*map(shape, value)] if isinstance(value, list) else None if isinstance(value, int | float) else value


def as_text(value: Any) -> Any:
    """Return a value of a row as the text that CSV would have; nothing for an empty cell."""
    empty = value in (None, "") or (isinstance(value, float) and math.isnan(value))
    return "" if empty else str(float(value)) if isinstance(value, int | float) or value.isdigit() else str(value)


@pytest.mark.parametrize("name", EXAMPLES)
def test_holdfast_and_nat_write_the_same_files(name: str, both: Path) -> None:
    theirs, ours = both / "theirs" / name, both / "out" / name
    extra = {".holdfast.json", "workflow_output.jsonl"}
    assert {path.name for path in ours.iterdir()} - extra == {path.name for path in theirs.iterdir()}
    for path in theirs.glob("*.json"):
        wanted, found = (json.loads((folder / path.name).read_text()) for folder in (theirs, ours))
        if path.name == "config_metadata.json" or name == "measured":
            wanted, found = timeless(wanted), timeless(found)
        if path.name == "workflow_output.json":
            wanted, found = timeless(wanted), timeless(found)
        if EXAMPLES[name].columns_of_pandas and path.name.endswith("_output.json"):
            for body in (wanted, found):
                for row in body if isinstance(body, list) else body["eval_output_items"]:
                    row |= {key: as_text(row.get(key)) for key in ("answer", "extra", "price", "id")}
        if path.name.endswith("runtime_output.json"):
            assert abs(wanted.pop("average_score") - found.pop("average_score")) < 5
            for item in (*wanted["eval_output_items"], *found["eval_output_items"]):
                assert 0 <= item.pop("score") < 5
        if path.name == "inference_optimization.json":
            wanted, found = shape(wanted), shape(found)
        assert found == wanted, path.name
    assert (ours / "config_original.yml").read_text() == (theirs / "config_original.yml").read_text()
    assert (ours / "config_effective.yml").read_text() == (theirs / "config_effective.yml").read_text()


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_scores_are_those_of_the_evaluators_as_far_as_they_are_scores(name: str, both: Path) -> None:
    numbers = metrics(run_dir(both, name))
    assert numbers["coverage"] == 1
    block = numbers["metrics"]
    assert {grader: values["score"] for grader, values in block.items()} == pytest.approx(EXAMPLES[name].scores)


def test_an_error_is_a_score_of_zero_for_nat_and_none_here(both: Path) -> None:
    theirs, ours = (
        {path.name: json.loads(path.read_text()) for path in (both / side / "errors").glob("*_output.json")}
        for side in ("theirs", "out")
    )
    scores = [[item["score"] for item in side["judge_output.json"]["eval_output_items"]] for side in (theirs, ours)]
    assert scores == [[1.0, 0.0, 0.0], [1.0, None, None]]
    assert (theirs["judge_output.json"]["average_score"], ours["judge_output.json"]["average_score"]) == (0.33, 1.0)
    errors = [item["error"] for item in ours["judge_output.json"]["eval_output_items"]]
    assert errors[0] is None and errors[1].endswith("the judge is down") and errors[2].endswith("no answer")
    assert "broken_output.json" not in theirs, "NAT writes nothing of an evaluator that raised"
    assert {item["error"].rpartition(": ")[2] for item in ours["broken_output.json"]["eval_output_items"]} == {
        "no order"
    }
    assert ours["rank_output.json"] == theirs["rank_output.json"]


def test_a_trial_has_no_score_where_its_grader_measures(both: Path) -> None:
    view = RunView(RunDir(run_dir(both, "scales")))
    grades = [{grade.grader: grade for grade in trial.grades} for trial in view.trials()]
    alone = [view.trial(str(number), 1) for number in (1, 2, 3)]
    for number, each in enumerate(grades):
        trial = alone[number]
        assert isinstance(trial, GradedTrial)
        assert {name: grade.score for name, grade in each.items()} == {"plain": number / 2, "wide": None, "label": None}
        assert {grade.grader: grade.score for grade in trial.grades} == {n: g.score for n, g in each.items()}
    assert [each["wide"].details["value"] for each in grades] == [0.0, 1.5, 2.0]
