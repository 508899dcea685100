"""Results by fields of the rows: in the report, the table, exports, comparisons and Python."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ElementTree
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.plugins.exporters.tracking import numbers
from holdfast.store.metrics import Metrics
from tests.support.lab import Lab, rows
from tests.support.patterns import POINTS, finished_run
from tests.support.running import Server, lines, metrics, module_server
from tests.support.running import holdfast as run_command
from tests.support.specs import command, who, write_rows

if TYPE_CHECKING:
    from pathlib import Path

provider = module_server()

SUBJECTS = {
    "s0": {"subject": "algebra"},
    "s1": {"subject": "botany"},
    "s2": {"subject": "algebra"},
    "s3": {"subject": None},
    "s4": {},
}
ANSWERS = {"s0": "yes", "s1": "no", "s2": "no", "s3": "yes", "s4": "yes"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("by") / "run", ANSWERS, rows=SUBJECTS, by="subject")


def by_subject(lab: Lab, count: int = 6) -> Lab:
    """An eval whose rows have one of three subjects, in turn."""
    lab.rows = [{**row, "subject": "abc"[number % 3]} for number, row in enumerate(rows(count))]
    lab.spec["by"] = ["subject"]
    return lab


class TestReport:
    def test_each_value_has_the_statistics_of_its_rows_in_the_datasets_order(self, run: Path) -> None:
        subjects = metrics(run)["by"]["subject"]
        assert list(subjects) == ["algebra", "botany", "(none)"], "null and a missing field have no value"
        assert {
            value: (block["samples"], block["metrics"]["correct"]["score"]) for value, block in subjects.items()
        } == {
            "algebra": (2, 0.5),
            "botany": (1, 0.0),
            "(none)": (2, 1.0),
        }
        assert subjects["algebra"]["overall"]["passed"] == 1
        assert "threshold" not in subjects["algebra"]["metrics"]["correct"], "the whole run's thresholds hold"

    def test_a_value_has_the_same_numbers_as_a_run_of_its_rows_alone(self, tmp_path: Path) -> None:
        scores = {f"s{number}": [str(number % 5 / 4), str(number % 3 / 2)] for number in range(12)}
        more = {sample: {"kind": "odd" if number % 2 else "even"} for number, sample in enumerate(scores)}
        keys: dict[str, Any] = {"graders": POINTS, "trials": 2}
        whole = finished_run(tmp_path / "whole", scores, rows=more, by=["kind"], **keys)
        odd = {sample: score for sample, score in scores.items() if more[sample]["kind"] == "odd"}
        alone = metrics(finished_run(tmp_path / "alone", odd, **keys))
        block = metrics(whole)["by"]["kind"]["odd"]
        plain = {
            name: value for name, value in alone["metrics"]["points"].items() if name not in ("threshold", "weight")
        }
        assert block["metrics"]["points"] == plain
        assert block["overall"] == alone["overall"]

    def test_numbers_and_flags_are_values_too(self, tmp_path: Path) -> None:
        more: dict[str, Any] = {"a": {"level": 1}, "b": {"level": True}, "c": {"level": 2.5}, "d": {"level": ""}}
        finished = finished_run(tmp_path / "run", dict.fromkeys(more, "yes"), rows=more, by="level")
        assert list(metrics(finished)["by"]["level"]) == ["1", "true", "2.5", ""]

    def test_a_grader_is_listed_where_it_applies(self, tmp_path: Path) -> None:
        graders = [{"type": "exact", "name": "all"}, {"type": "exact", "name": "some", "where": "kind == 'x'"}]
        more = {"a": {"kind": "x"}, "b": {"kind": "y"}}
        finished = finished_run(tmp_path / "run", dict.fromkeys(more, "yes"), rows=more, by="kind", graders=graders)
        kinds = metrics(finished)["by"]["kind"]
        assert (list(kinds["x"]["metrics"]), list(kinds["y"]["metrics"])) == (["all", "some"], ["all"])

    def test_run_wide_metrics_of_a_grader_are_those_of_the_value(self, tmp_path: Path) -> None:
        more = {"a": {"kind": "x"}, "b": {"kind": "y"}}
        graders = [{"type": "wer", "name": "wer"}]
        finished = finished_run(tmp_path / "run", {"a": "yes", "b": "no"}, rows=more, by="kind", graders=graders)
        kinds = metrics(finished)["by"]["kind"]
        assert [kinds[kind]["metrics"]["wer"]["error_rate"] for kind in "xy"] == [0.0, 1.0]

    def test_without_by_the_files_have_no_such_field(self, tmp_path: Path) -> None:
        finished = finished_run(tmp_path / "run", ANSWERS, rows=SUBJECTS)
        assert metrics(finished).keys().isdisjoint({"by", "benchmark"})
        assert all("by" not in trial for trial in json.loads((finished / "results.json").read_text())["trials"])

    def test_python_has_them_as_metrics(self, run: Path) -> None:
        numbers_by = holdfast.load_run(run).metrics.by["subject"]
        assert numbers_by["algebra"].graders["correct"].score == 0.5
        data = json.loads((run / "metrics.json").read_text())
        assert Metrics.from_dict(data).to_dict() == data


class TestKeys:
    def test_by_is_in_no_key_and_a_finished_run_only_gets_a_new_report(self, tmp_path: Path, provider: Server) -> None:
        lab = by_subject(Lab(tmp_path, provider))
        first = lab.eval()
        assert first.asked == 6
        before = (first.run / "outputs.jsonl").read_bytes(), (first.run / "grades.jsonl").read_bytes()
        lab.spec["by"] = ["expected", "subject"]
        second = lab.eval()
        assert (second.run, second.work) == (first.run, (0, {}))
        assert list(metrics(first.run)["by"]) == ["expected", "subject"]
        third = lab.eval("by=[]")
        assert (third.run, third.work) == (first.run, (0, {})) and "by" not in metrics(first.run)
        assert before == ((first.run / "outputs.jsonl").read_bytes(), (first.run / "grades.jsonl").read_bytes())

    def test_a_finished_report_is_left_alone(self, tmp_path: Path, provider: Server) -> None:
        lab = by_subject(Lab(tmp_path, provider))
        lab.spec["by"] = ["subject", "subject"]
        written = (lab.eval().run / "metrics.json").stat().st_mtime_ns
        assert (lab.eval().run / "metrics.json").stat().st_mtime_ns == written

    def test_resumed_equals_uninterrupted_and_workers_equal_one_process(self, tmp_path: Path, provider: Server) -> None:
        labs = [
            by_subject(Lab(tmp_path / name, provider), 12) for name in ("whole", "resumed", "workers", "one by one")
        ]
        whole = labs[0].eval().run
        labs[1].eval("limits.concurrency=1", "--token-budget", "10", check=3)
        resumed = labs[1].eval().run
        workers = labs[2].eval("--workers", "3").run
        alone = labs[3].eval("limits.concurrency=1").run
        plain = json.dumps(metrics(whole))
        assert all(json.dumps(metrics(each)) == plain for each in (resumed, workers, alone))
        assert len({(each / "results.json").read_bytes() for each in (whole, resumed, workers, alone)}) == 1


class TestProblems:
    def problem(self, tmp_path: Path, **keys: Any) -> str:
        with pytest.raises(holdfast.errors.ConfigError) as raised:
            who(tmp_path, **keys)
        return str(raised.value)

    def test_a_field_that_no_row_has_is_named_with_the_closest_one(self, tmp_path: Path) -> None:
        message = self.problem(tmp_path, by=["id", "qestion"])
        assert "by[1]: no sample has a field 'qestion' (did you mean 'question'?)" in message
        assert "they have: expected, id, question" in self.problem(tmp_path, by="zzz")

    @pytest.mark.parametrize(("value", "kind"), [(["a"], "a list"), ({"a": 1}, "a mapping")])
    def test_a_list_or_mapping_is_rejected_with_its_row(self, tmp_path: Path, value: Any, kind: str) -> None:
        samples = [{"id": "a", "question": "x", "expected": "x", "tags": value}]
        assert f"samples[0]: 'tags' is {kind}" in self.problem(tmp_path, by="tags", samples=samples)

    def test_a_field_with_a_value_for_every_row_is_rejected_for_large_datasets(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "d.jsonl", [{"question": f"q{number}", "expected": "x"} for number in range(10_001)])
        message = self.problem(tmp_path, by="question", samples=None, dataset={"path": "d.jsonl"})
        assert "'question' has more than 10,000 different values" in message


class TestTable:
    def test_the_final_table_has_one_for_each_field(self, tmp_path: Path, provider: Server) -> None:
        lab = by_subject(Lab(tmp_path, provider))
        shown = lab.eval().out
        table = shown[shown.index("by subject") :].splitlines()
        assert [cell.strip() for cell in table[2].strip("┃").split("┃")] == [
            "subject",
            "samples",
            "score",
            "95 % interval",
        ]
        assert [line.split("│")[1:4] for line in table[4:7]] == [
            [" a       ", "       2 ", " 0.500 "],
            [" b       ", "       2 ", " 0.500 "],
            [" c       ", "       2 ", " 0.500 "],
        ]

    @pytest.mark.parametrize("width", [60, 80])
    def test_breakdown_tables_fit_narrow_terminals(self, width: int) -> None:
        from rich.console import Console

        from holdfast.report.table import breakdown_tables

        console = Console(width=width, record=True, file=io.StringIO())
        for table, hidden in breakdown_tables(many_values(40, 5), width):
            console.print(table)
            assert hidden == 0
        text = console.export_text()
        assert max(map(len, text.splitlines())) <= width
        assert "0.000 – 0.793" in text, "numbers are whole"

    def test_of_very_many_values_the_rest_is_counted(self) -> None:
        from holdfast.report.table import breakdown_tables

        ((table, hidden),) = breakdown_tables(many_values(100, 1), 80)
        assert (table.row_count, hidden) == (64, 36)


def many_values(count: int, graders: int) -> Metrics:
    """Numbers of a run with so many values of a field, whose names are long."""
    from holdfast.report.tally import Tally
    from holdfast.report.trials import UsageTally
    from holdfast.store.metrics import Answers, RunTiming, ValueMetrics

    tally = Tally(1)
    tally.add([("failed", 0.0)])
    one = tally.summary()
    names = [f"grader number {number}" for number in range(graders)]
    value = ValueMetrics(samples=1, graders=dict.fromkeys(names, one), overall=one)
    usage = UsageTally().summary()
    return Metrics(
        run="0",
        eval="e",
        target="t",
        samples=count,
        trials=1,
        total=count,
        outputs=count,
        answers=Answers(whole=count),
        graded=count,
        coverage=1.0,
        score=0.0,
        passed=0.0,
        graders=dict.fromkeys(names, one),
        overall=one,
        by={"subject": {f"high_school_european_history_and_more_{number}": value for number in range(count)}},
        usage=usage,
        judge_usage=usage,
        timing=RunTiming(finished="", seconds=0.0, trial_seconds_p50=None, trial_seconds_p95=None),
    )


class TestExports:
    def test_trackers_get_a_number_for_each_value_and_grader(self, run: Path) -> None:
        loaded = holdfast.load_run(run).metrics
        assert loaded is not None
        flat = {name: value for name, value in numbers(loaded).items() if name.startswith("by/")}
        assert flat == {
            "by/subject/algebra/correct": 0.5,
            "by/subject/botany/correct": 0.0,
            "by/subject/(none)/correct": 1.0,
        }

    def test_junit_and_html_have_them(self, run: Path, tmp_path: Path) -> None:
        run_command("export", run, "--to", "junit", "-o", tmp_path, cwd=tmp_path)
        run_command("export", run, "--to", "html", "-o", tmp_path, cwd=tmp_path)
        suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
        properties = {each.get("name"): each.get("value") for each in suite.iter("property")}
        assert properties["by.subject.algebra.correct.score"] == "0.5"
        page = (tmp_path / "report.html").read_text()
        assert page.startswith("<!doctype html>")
        assert "<h2>By subject</h2>" in page and '<td class="name">botany</td>' in page

    def test_csv_has_the_field_as_a_column(self, run: Path, tmp_path: Path) -> None:
        run_command("export", run, "--to", "csv", "-o", tmp_path, cwd=tmp_path)
        assert "row.subject" in (tmp_path / "trials.csv").read_text().splitlines()[0]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    answers = {"s0": "no", "s1": "no", "s2": "no", "s3": "yes", "s9": "yes"}
    more = {**SUBJECTS, "s9": {"subject": "zoology"}}
    return finished_run(tmp_path_factory.mktemp("by") / "other", answers, rows=more, by="subject")


class TestCompare:
    def test_differences_are_paired_within_each_value(self, run: Path, other: Path) -> None:
        (breakdown,) = holdfast.compare(run, other).by
        assert breakdown.field == "subject"
        differences = {value: (row.samples, row.difference) for value, (row,) in breakdown.values.items()}
        assert differences == {"algebra": (2, 0.5), "botany": (1, 0.0), "(none)": (1, 0.0)}
        assert (breakdown.only_first, breakdown.only_second) == ((), ("zoology",))

    def test_a_run_that_was_not_broken_down_takes_the_values_of_the_other(self, run: Path, tmp_path: Path) -> None:
        plain = finished_run(tmp_path / "plain", {**ANSWERS, "s0": "no"}, rows=SUBJECTS)
        for pair in ((run, plain), (plain, run)):
            (breakdown,) = holdfast.compare(*pair).by
            (row,) = breakdown.values["algebra"]
            assert abs(row.difference) == 0.5 and not breakdown.only_first and not breakdown.only_second

    def test_the_command_shows_them(
        self, run: Path, other: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
    ) -> None:
        shown = command(monkeypatch, capsys, tmp_path, "compare", run, other)
        assert shown.code == 0 and "by subject" in shown.out
        assert "subject: only in the second run: zoology" in shown.out
        data = json.loads(command(monkeypatch, capsys, tmp_path, "compare", run, other, "--json").out)[0]
        assert data["by"]["subject"]["values"]["algebra"][0]["difference"] == 0.5
        assert data["by"]["subject"]["only_second"] == ["zoology"]

    def test_a_report_without_by_does_not_mention_it(self, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
        runs = [finished_run(tmp_path / name, answers) for name, answers in (("a", ANSWERS), ("b", ANSWERS))]
        (data,) = json.loads(command(monkeypatch, capsys, tmp_path, "compare", *runs, "--json").out)
        assert "by" not in data


def test_values_of_a_run_stay_known_when_its_dataset_is_gone(tmp_path: Path, provider: Server) -> None:
    labs = [by_subject(Lab(tmp_path / name, provider)) for name in ("one", "two")]
    labs[1].rows[0]["expected"] = "nothing"
    runs = [lab.eval().run for lab in labs]
    for lab in labs:
        (lab.folder / "data.jsonl").unlink()
    (breakdown,) = holdfast.compare(*runs).by
    assert list(breakdown.values) == ["a", "b", "c"]
    assert len(lines(runs[0] / "outputs.jsonl")) == 6
