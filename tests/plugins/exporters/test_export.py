"""Runs for other tools: what is in the files is what is in the run, and the files read back."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.plan.identity import identify
from holdfast.plugins.nat.mirror import NatMirror
from holdfast.report.run_view import RunView
from holdfast.report.tables import rows as rows_of
from holdfast.spec.eval_schema import EXPORTERS
from holdfast.spec.load import load_eval
from holdfast.store.rundir import RunDir
from tests.support.breaking import kept
from tests.support.lab import Lab, rows
from tests.support.lazy import LazyModule
from tests.support.running import Server, holdfast, lines, metrics, module_server, server, start, wait_for

if TYPE_CHECKING:
    from pathlib import Path

ROWS, TRIALS = 5, 2
parquet = LazyModule("pyarrow.parquet")
FORMATS = ["csv", "parquet", "nat", "flexeval", "samples"]


provider = module_server()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, provider: Server) -> Lab:
    """A run with trials, two graders, and text that every format has to quote."""
    lab = Lab(tmp_path_factory.mktemp("finished"), provider, rows=rows(ROWS))
    lab.rows[2]["question"] = lab.rows[2]["expected"] = 'a "quoted", line\nbroken,\tünd 日本 🦀'
    lab.spec["trials"] = TRIALS
    lab.spec["graders"].append({"type": "text", "name": "mentions", "contains": "question", "weight": 3})
    lab.run = lab.eval("--log-samples").run
    return lab


@pytest.fixture(scope="module")
def verbose(tmp_path_factory: pytest.TempPathFactory, provider: Server) -> Lab:
    """A run whose grader gives 100 KB of feedback on each trial, 12 MB in all."""
    lab = Lab(tmp_path_factory.mktemp("verbose"), provider, rows=rows(120))
    (lab.folder / "checks.py").write_text("def check(output):\n    return {'score': 1, 'feedback': 'x' * 100_000}\n")
    lab.spec["graders"] = [{"type": "python", "name": "verbose", "function": "checks.py:check"}]
    lab.run = lab.eval().run
    return lab


@pytest.mark.parametrize("format_name", ["csv", "samples", "junit", "nat", "flexeval", "waza"])
def test_an_export_does_not_hold_the_verdicts_of_all_trials(verbose: Lab, format_name: str, tmp_path: Path) -> None:
    write = EXPORTERS.load(format_name)
    tracemalloc.start()
    try:
        assert all(path.exists() for path in write(RunView(RunDir(verbose.run)), tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 6e6
    finally:
        tracemalloc.stop()


def export(lab: Lab, format_name: str, run: Path | None = None) -> Path:
    """The folder with what was exported."""
    where = run or lab.run
    holdfast("export", where, "--to", format_name, cwd=lab.folder)
    return where / "export" / format_name


def order(lab: Lab) -> list[tuple[str, int]]:
    return [(row["id"], trial) for row in lab.rows for trial in range(1, TRIALS + 1)]


def results(run: Path) -> list[dict[str, Any]]:
    trials: list[dict[str, Any]] = json.loads((run / "results.json").read_text())["trials"]
    return trials


class TestTables:
    def test_csv_has_every_trial_as_it_was_graded(self, finished: Lab) -> None:
        with (export(finished, "csv") / "trials.csv").open(newline="", encoding="utf-8") as file:
            table = list(csv.DictReader(file))
        assert [(row["sample"], int(row["trial"])) for row in table] == order(finished)
        for row, result in zip(table, results(finished.run), strict=True):
            assert (row["output"], row["status"]) == (result["output"], result["status"])
            assert float(row["score"]) == result["score"]
            for name in ("correct", "mentions"):
                assert row[f"{name}.status"] == result["grades"][name]["status"]
                assert float(row[f"{name}.score"]) == result["grades"][name]["score"]
            assert int(row["requests"]) == 1 and float(row["seconds"]) > 0 and row["cost"] == ""

    def test_tables_have_the_row_the_prompt_and_trials_without_an_output(
        self, tmp_path: Path, provider: Server
    ) -> None:
        (tmp_path / "agent.py").write_text(
            "def reply(prompt, sample):\n    assert sample['id'] != 'bad', 'no'\n    return prompt\n"
        )
        lab = Lab(tmp_path, provider)
        lab.rows = [
            {"id": "good", "question": "What?", "expected": "What?", "tags": ["a", "b"], "level": 3},
            {"id": "bad", "question": "Why?", "expected": "Why?", "extra": None},
        ]
        lab.spec |= {"target": {"python": "agent.py:reply"}, "limits": {"retries": 0}}
        run = lab.eval("--accept-errors").run
        with (export(lab, "csv", run) / "trials.csv").open(newline="", encoding="utf-8") as file:
            good, bad = csv.DictReader(file)
        assert (good["prompt"], good["row.question"], good["row.tags"]) == ("What?", "What?", '["a","b"]')
        assert (good["row.level"], good["error"], good["correct.status"]) == ("3", "", "passed")
        assert (bad["status"], bad["row.question"], bad["output"], bad["score"]) == ("error", "Why?", "", "")
        assert "AssertionError: no" in bad["error"]
        table = parquet.read_table(export(lab, "parquet", run) / "trials.parquet").to_pylist()
        assert [list(row) for row in rows_of(RunView(RunDir(run)))] == [list(good)] * 2, "the same columns for all"
        assert [(row["sample"], row["row.question"], row["score"]) for row in table] == [
            ("good", "What?", 1.0),
            ("bad", "Why?", None),
        ]

    def test_a_grader_called_row_hides_no_field(self, tmp_path: Path, provider: Server) -> None:
        lab = Lab(tmp_path, provider)
        lab.rows = [{"id": "a", "question": "x", "expected": "x", "score": 9}]
        lab.spec["graders"] = [{"type": "exact", "name": "row"}]
        table = parquet.read_table(export(lab, "parquet", lab.eval().run) / "trials.parquet").to_pylist()
        assert (table[0]["row.score"], table[0]["row-2.score"]) == ("9", 1.0)

    def test_parquet_has_the_same_with_types(self, finished: Lab) -> None:
        table = parquet.read_table(export(finished, "parquet") / "trials.parquet")
        records = table.to_pylist()
        assert [(row["sample"], row["trial"]) for row in records] == order(finished)
        assert [row["output"] for row in records] == [result["output"] for result in results(finished.run)]
        assert [row["score"] for row in records] == [result["score"] for result in results(finished.run)]
        kinds = {name: str(table.schema.field(name).type) for name in table.schema.names}
        assert (kinds["score"], kinds["correct.score"], kinds["trial"]) == ("double", "double", "int64")
        assert {row["cost"] for row in records} == {None}, "an unknown price is not 0"


class TestSamples:
    def test_log_samples_writes_the_transcripts_into_the_run(self, finished: Lab) -> None:
        logged = lines(finished.run / "samples.jsonl")
        assert [(line["sample"], line["trial"]) for line in logged] == order(finished)
        by_key = {(output["sample"], output["trial"]): output for output in kept(finished.run)}
        for line in logged:
            assert line["messages"] == by_key[line["sample"], line["trial"]]["messages"]
            assert {grade["grader"] for grade in line["grades"]} == {"correct", "mentions"}
            assert line["fields"] == next(row for row in finished.rows if row["id"] == line["sample"])
        assert (export(finished, "samples") / "samples.jsonl").read_bytes() == (
            finished.run / "samples.jsonl"
        ).read_bytes()

    def test_output_path_names_model_dataset_time_and_id(self, tmp_path: Path, provider: Server) -> None:
        lab = Lab(tmp_path, provider)
        lab.spec["target"]["model"] = "org/model:7b"
        for _ in range(2):  # a finished run is written just the same
            run = lab.eval("--output-path", "out").run
            written = sorted(path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*.json*"))
            run_id = run.name.rpartition("-")[2]
            results_file, samples_file = written[0], written[-1]
            assert results_file.parent == samples_file.parent and results_file.parts[:2] == ("org-model-7b", "data")
            assert results_file.match(f"results_????????T??????Z_{run_id}.json")
            assert samples_file.match(f"samples_????????T??????Z_{run_id}.jsonl")
            body = json.loads((tmp_path / "out" / results_file).read_text())
            assert body["finished"] is True and body["metrics"]["score"] == 0.5
            assert body["eval"]["name"] == "e"
            assert len(lines(tmp_path / "out" / samples_file)) == len(lab.rows)
            shutil.rmtree(tmp_path / "out")

    def test_a_folder_that_cannot_be_written_is_reported(self, tmp_path: Path, provider: Server) -> None:
        lab = Lab(tmp_path, provider)
        (tmp_path / "out").write_text("a file")
        done = lab.eval("--output-path", "out", check=2)
        assert "cannot write the copies" in done.err and "Traceback" not in done.err
        assert metrics(done.run)["coverage"] == 1.0, "and the run is whole"


class TestNat:
    def test_the_files_hold_the_run(self, finished: Lab) -> None:
        folder = export(finished, "nat")
        assert sorted(path.name for path in folder.iterdir()) == [
            ".holdfast.json",
            "correct_output.json",
            "mentions_output.json",
            "workflow_output.json",
        ]
        workflow = json.loads((folder / "workflow_output.json").read_text())
        assert [row["id"] for row in workflow] == [f"{name}_rep{trial - 1}" for name, trial in order(finished)]
        fields = {row["id"]: row for row in finished.rows}
        for row, (name, _) in zip(workflow, order(finished), strict=True):
            assert row["question"] == row["generated_answer"] == fields[name]["question"]
            assert row["answer"] == row["expected"] == fields[name]["expected"], "the dataset's columns come along"
            (step,) = row["intermediate_steps"]
            assert step["payload"]["event_type"] == "LLM_END"
            assert step["payload"]["data"] == {"input": row["question"], "output": row["generated_answer"]}
        for name in ("correct", "mentions"):
            body = json.loads((folder / f"{name}_output.json").read_text())
            assert [item["id"] for item in body["eval_output_items"]] == [row["id"] for row in workflow]
            scores = [result["grades"][name]["score"] for result in results(finished.run)]
            assert [item["score"] for item in body["eval_output_items"]] == scores
            assert body["average_score"] == pytest.approx(metrics(finished.run)["metrics"][name]["score"])
            assert {item["error"] for item in body["eval_output_items"]} == {None}

    def test_nat_keeps_sample_ids_if_there_is_one_trial(self, tmp_path: Path, provider: Server) -> None:
        lab = Lab(tmp_path, provider)
        workflow = json.loads((export(lab, "nat", lab.eval().run) / "workflow_output.json").read_text())
        assert [row["id"] for row in workflow] == [row["id"] for row in lab.rows]

    def test_an_error_has_no_score(self, tmp_path: Path, provider: Server) -> None:
        (tmp_path / "g.py").write_text("def grade(output):\n    raise ValueError('no idea')\n")
        lab = Lab(tmp_path, provider, spec={"graders": [{"type": "python", "name": "n", "function": "g.py:grade"}]})
        run = lab.eval("--accept-errors").run
        body = json.loads((export(lab, "nat", run) / "n_output.json").read_text())
        assert body["average_score"] is None
        assert len(body["eval_output_items"]) == len(lab.rows)
        assert all(item["score"] is None and "no idea" in item["error"] for item in body["eval_output_items"])

    def test_a_graders_name_cannot_lead_out_of_the_folder(self, tmp_path: Path, provider: Server) -> None:
        lab = Lab(tmp_path, provider, spec={"graders": [{"type": "exact", "name": "../../up / there"}]})
        folder = export(lab, "nat", lab.eval().run)
        names = {path.name for path in folder.iterdir()}
        assert names == {".holdfast.json", "workflow_output.json", "up-there_output.json"}

    def test_no_graders_file_overwrites_another(self, tmp_path: Path, provider: Server) -> None:
        names = ["workflow", "a b", "a/b", "a-b", "A-B"]
        graders = [{"type": "exact", "name": name, "expected": name} for name in names]
        lab = Lab(tmp_path, provider, spec={"graders": graders})
        folder = export(lab, "nat", lab.eval().run)
        assert len(json.loads((folder / "workflow_output.json").read_text())) == len(lab.rows)
        files = {path.name for path in folder.glob("*_output.json")}
        assert len({name.casefold() for name in files}) == len(files) == 1 + len(names)
        assert "a-b_output.json" in files and "workflow-2_output.json" in files
        for name in files - {"workflow_output.json"}:
            assert len(json.loads((folder / name).read_text())["eval_output_items"]) == len(lab.rows)

    def test_files_of_an_earlier_export_are_removed_and_other_files_stay(
        self, tmp_path: Path, provider: Server
    ) -> None:
        lab = Lab(tmp_path, provider)
        folder = tmp_path / "out"
        for name in ("correct", "renamed"):
            lab.spec["graders"][0]["name"] = name
            holdfast("export", lab.eval().run, "--to", "nat", "-o", folder, cwd=tmp_path)
            (folder / "other_output.json").write_text("{}")
        names = {path.name for path in folder.iterdir()}
        assert names == {".holdfast.json", "workflow_output.json", "renamed_output.json", "other_output.json"}

    def test_an_unfinished_run_has_no_mean(self, finished: Lab, tmp_path: Path) -> None:
        run = tmp_path / "run"
        shutil.copytree(finished.run, run, ignore=shutil.ignore_patterns("export", "metrics.json", "results.json"))
        holdfast("export", run, "--to", "nat", cwd=tmp_path)
        body = json.loads((run / "export" / "nat" / "correct_output.json").read_text())
        assert body["average_score"] is None and body["eval_output_items"][0]["score"] is not None


class TestFlexeval:
    def test_the_files_hold_the_run(self, finished: Lab) -> None:
        folder = export(finished, "flexeval")
        outputs = lines(folder / "outputs.jsonl")
        assert [(row["extra_info"]["id"], row["extra_info"]["trial"]) for row in outputs] == order(finished)
        for row, result in zip(outputs, results(finished.run), strict=True):
            assert row["lm_output"] == result["output"] and row["finish_reason"] == "stop"
            assert row["references"] == [row["extra_info"]["expected"]]
            assert row["extra_info"]["messages"] == [{"role": "user", "content": row["extra_info"]["question"]}]
            assert (row["correct"], row["mentions"]) == tuple(grade["score"] for grade in result["grades"].values())
        flat = json.loads((folder / "metrics.json").read_text())
        scores = metrics(finished.run)["metrics"]
        assert flat["coverage"] == 1.0
        assert all(flat[name] == scores[name]["score"] for name in scores)
        assert flat["correct-pass@2"] == scores["correct"]["pass@2"]

    def test_no_grader_overwrites_a_field(self, tmp_path: Path, provider: Server) -> None:
        names = ["lm_output", "references", "finish_reason", "extra_info"]
        lab = Lab(tmp_path, provider, spec={"graders": [{"type": "exact", "name": name} for name in names]})
        folder = export(lab, "flexeval", lab.eval().run)
        row = lines(folder / "outputs.jsonl")[0]
        assert row["lm_output"] == lab.rows[0]["question"] and row["finish_reason"] == "stop"
        assert all(row[f"{name}-2"] in (0.0, 1.0) for name in names)
        assert "lm_output-2" in json.loads((folder / "metrics.json").read_text())


@pytest.mark.parametrize(
    ("format_name", "file", "prompt", "expected"),
    [
        ("nat", "workflow_output.json", "{{ question }}", "{{ answer }}"),
        ("flexeval", "outputs.jsonl", "{{ extra_info.question }}", "{{ references[0] }}"),
        ("samples", "samples.jsonl", "{{ fields.question }}", "{{ fields.expected }}"),
        ("csv", "trials.csv", "{{ output }}", "{{ output }}"),
        ("parquet", "trials.parquet", "{{ output }}", "{{ output }}"),
    ],
)
def test_an_export_can_be_the_dataset_of_a_new_eval(
    finished: Lab, tmp_path: Path, provider: Server, format_name: str, file: str, prompt: str, expected: str
) -> None:
    lab = Lab(tmp_path, provider)
    shutil.copy(export(finished, format_name) / file, tmp_path)
    lab.spec |= {"dataset": {"path": file}, "prompt": prompt}
    lab.spec["graders"] = [{"type": "exact", "expected": expected}]
    done = lab.eval()
    assert done.asked == ROWS * TRIALS
    tables = format_name in ("csv", "parquet")  # which have the answers, but not the rows' fields
    assert metrics(done.run)["score"] == (1.0 if tables else metrics(finished.run)["metrics"]["correct"]["score"])


def _answered(table: list[dict[str, Any]]) -> int:
    """Count the trials of a table that have an output."""
    assert len(table) == ROWS * TRIALS
    assert {row["status"] for row in table if not row["stop"]} <= {"error"}
    return sum(bool(row["stop"]) for row in table)


UNSURE = """
import holdfast

def grade(output, sample):
    if sample["id"] == "s1":
        raise ValueError("no idea")
    return holdfast.Verdict(None if sample["id"] == "s2" else 1.0)
"""


def test_no_export_gives_a_score_to_what_has_none(tmp_path: Path, provider: Server) -> None:
    """s0 is graded, the grader fails on s1 and skips s2, and s3 has no output."""
    (tmp_path / "g.py").write_text(UNSURE)
    target = "def reply(prompt, context):\n    if context.sample_id == 's3': raise OSError('away')\n    return prompt\n"
    (tmp_path / "agent.py").write_text(target)
    lab = Lab(tmp_path, provider, rows=rows(4))
    lab.spec |= {"target": {"python": "agent.py:reply"}, "limits": {"retries": 0}}
    lab.spec["graders"] = [{"type": "python", "name": "n", "function": "g.py:grade"}]
    run = lab.eval(check=3).run
    files = {name: export(lab, name, run) for name in (*FORMATS, "lm-eval", "junit")}
    with (files["csv"] / "trials.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["score"] for row in table] == [row["n.score"] for row in table] == ["1.0", "", "", ""]
    assert [row["status"] for row in table] == ["passed", "error", "skipped", "error"]
    typed = parquet.read_table(files["parquet"] / "trials.parquet").to_pylist()
    assert [row["n.score"] for row in typed] == [1.0, None, None, None]
    assert [line["n"] for line in lines(files["flexeval"] / "outputs.jsonl")] == [1.0, None, None]
    assert [line["score"] for line in lines(files["samples"] / "samples.jsonl")] == [1.0, None, None]
    items = json.loads((files["nat"] / "n_output.json").read_text())["eval_output_items"]
    assert [item["score"] for item in items] == [1.0, None, None]
    (samples,) = files["lm-eval"].rglob("samples_*.jsonl")
    assert [line["n"] for line in lines(samples)] == [1.0, None, None]
    assert 'tests="4" failures="0" errors="2" skipped="1"' in (files["junit"] / "junit.xml").read_text()


class TestWhatIsNotAsItShouldBe:
    @pytest.mark.parametrize("format_name", FORMATS)
    def test_an_unfinished_run_is_exported_so_far_with_a_notice(
        self, finished: Lab, tmp_path: Path, format_name: str
    ) -> None:
        run = tmp_path / "run"
        shutil.copytree(finished.run, run, ignore=shutil.ignore_patterns("export", "metrics.json", "results.json"))
        some = (run / "outputs.jsonl").read_text().splitlines(keepends=True)[:3]
        (run / "outputs.jsonl").write_text("".join(some))
        done = holdfast("export", run, "--to", format_name, cwd=tmp_path)
        assert "not finished" in done.stderr
        files = {path.name: path for path in (run / "export" / format_name).iterdir()}
        counted = {
            "csv": lambda: _answered(list(csv.DictReader(io.StringIO(files["trials.csv"].read_text())))),
            "parquet": lambda: _answered(parquet.read_table(files["trials.parquet"]).to_pylist()),
            "nat": lambda: len(json.loads(files["workflow_output.json"].read_text())),
            "flexeval": lambda: len(lines(files["outputs.jsonl"])),
            "samples": lambda: len(lines(files["samples.jsonl"])),
        }[format_name]()
        assert counted == 3
        assert "metrics.json" not in files, "which marks a finished evaluation"

    @pytest.mark.parametrize("format_name", FORMATS)
    def test_a_run_whose_dataset_is_missing_is_exported_without_its_fields(
        self, tmp_path: Path, provider: Server, format_name: str
    ) -> None:
        lab = Lab(tmp_path, provider)
        run = lab.eval().run
        (tmp_path / "data.jsonl").unlink()
        done = holdfast("export", run, "--to", format_name, cwd=tmp_path)
        assert f"{len(lab.rows)} rows are no longer in the dataset" in done.stderr
        files = (run / "export" / format_name).iterdir()
        texts = [str(parquet.read_table(file)) if format_name == "parquet" else file.read_text() for file in files]
        assert all(any(row["question"] in text for text in texts) for row in lab.rows), "every answer is there"

    @pytest.mark.parametrize("format_name", ["xlsx", ""])
    def test_an_unknown_format_is_refused(self, finished: Lab, format_name: str) -> None:
        holdfast("export", finished.run, "--to", format_name, cwd=finished.folder, check=2)


class TestNatWhileItRuns:
    def lab(self, tmp_path: Path, provider: Server, **nat: Any) -> Lab:
        return Lab(tmp_path, provider, rows=rows(30), spec={"output": {"nat": {"dir": "nat", **nat}}})

    @pytest.mark.faults
    def test_lines_are_written_as_trials_finish_and_survive_a_kill(self, tmp_path: Path) -> None:
        with server(latency=0.05) as slow:
            lab = self.lab(tmp_path, slow)
            lab.spec["limits"] = {"concurrency": 2}
            lab.write()
            path = tmp_path / "nat" / "workflow_output.jsonl"
            for count in (4, 12):
                process = start("eval", "e.yaml", cwd=tmp_path)
                wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= count, "lines")  # noqa: B023
                process.send_signal(signal.SIGKILL)
                process.communicate()
                before = path.read_bytes()
                assert not (tmp_path / "nat" / "workflow_output.json").exists(), "the whole comes at the end"
                path.write_bytes(before + b'{"id": "torn')
            slow.control(latency=0)
            lab.eval()
        rows = lines(path)
        assert [row["id"] for row in rows] == [row["id"] for row in lab.rows]
        assert rows == json.loads((tmp_path / "nat" / "workflow_output.json").read_text())
        assert (tmp_path / "nat" / "correct_output.json").exists()

    def test_reused_outputs_are_exported_too(self, tmp_path: Path, provider: Server) -> None:
        lab = self.lab(tmp_path, provider)
        lab.eval()
        for more in (0, 2):
            shutil.rmtree(tmp_path / "nat")
            lab.rows = lab.rows[::-1] + rows(more, start=90)
            assert lab.eval().asked == more
            assert [row["id"] for row in lines(tmp_path / "nat" / "workflow_output.jsonl")] == [
                row["id"] for row in lab.rows
            ]

    def test_steps_are_filtered(self, tmp_path: Path, provider: Server) -> None:
        lab = self.lab(tmp_path, provider, step_filter=["TOOL_END"])
        lab.eval()
        assert all(row["intermediate_steps"] == [] for row in lines(tmp_path / "nat" / "workflow_output.jsonl"))

    def test_a_folder_that_cannot_be_created_stops_no_eval(self, tmp_path: Path, provider: Server) -> None:
        lab = self.lab(tmp_path, provider)
        (tmp_path / "nat").write_text("a file")
        done = lab.eval()
        assert "output.nat" in done.err and "warning: output.nat: cannot write" in done.err
        assert "Traceback" not in done.err and "--to nat -o DIR" in done.err
        assert done.asked == 30 and metrics(done.run)["coverage"] == 1.0

    def test_all_steps_are_written_where_the_filter_is_empty_as_in_nat(self, tmp_path: Path, provider: Server) -> None:
        lab = self.lab(tmp_path, provider, step_filter=[])
        lab.eval()
        for row in lines(tmp_path / "nat" / "workflow_output.jsonl"):
            assert [step["payload"]["event_type"] for step in row["intermediate_steps"]] == ["LLM_START", "LLM_END"]

    def test_a_type_of_step_that_nat_does_not_know_is_refused(self, tmp_path: Path, provider: Server) -> None:
        done = self.lab(tmp_path, provider, step_filter=["BOGUS"]).eval(check=2)
        assert "step_filter" in done.err and "LLM_END" in done.err

    @pytest.mark.faults
    def test_a_folder_never_holds_two_runs(self, tmp_path: Path) -> None:
        with server() as model:
            lab = self.lab(tmp_path, model)
            lab.spec["limits"] = {"concurrency": 2}
            (tmp_path / "nat").mkdir()
            (tmp_path / "nat" / "workflow_output.json").write_text("[1]")
            lab.eval()
            first = json.loads((tmp_path / "nat" / "workflow_output.json").read_text())
            assert (tmp_path / "nat" / "workflow_output.json.bak").read_text() == "[1]", "which was not ours"
            model.control(latency=0.05)
            process = start("eval", "e.yaml", "--model", "another", cwd=tmp_path)
            path = tmp_path / "nat" / "workflow_output.jsonl"
            wait_for(lambda: path.exists() and 0 < path.read_bytes().count(b"\n") < 30, "lines of the second run")
            process.kill()
            process.communicate()
        assert first and {path.name for path in (tmp_path / "nat").iterdir() if ".tmp" not in path.name} == {
            ".holdfast.json",
            "workflow_output.json.bak",
            "workflow_output.jsonl",
        }
        assert {step["payload"]["name"] for row in lines(path) for step in row["intermediate_steps"]} == {"another"}

    def test_a_short_write_leaves_whole_lines_and_a_warning_and_is_repaired_later(
        self, tmp_path: Path, provider: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Step through the mirror without its thread, so that a write fails at a given moment."""
        lab = self.lab(tmp_path, provider)
        run = lab.eval().run
        path, notices = tmp_path / "nat" / "workflow_output.jsonl", []
        identity = identify(load_eval(lab.eval_file))
        block: Any = identity.spec.live_exports["nat"]
        mirror = NatMirror(block, identity, RunDir(run), notices.append)
        all_lines = (run / "outputs.jsonl").read_bytes()
        (run / "outputs.jsonl").write_bytes(all_lines[: all_lines.index(b"\n") + 1])
        mirror._look()
        (run / "outputs.jsonl").write_bytes(all_lines)
        with monkeypatch.context() as full:
            full.setattr("holdfast.plugins.nat.mirror.os.write", lambda fd, data, write=os.write: write(fd, data[:20]))
            mirror._look()
            mirror._look()
        assert len(lines(path)) == 1, "no half of a line"
        assert ["not up to date" in notice for notice in notices] == [True]
        mirror._look()
        assert sorted(row["id"] for row in lines(path)) == sorted(row["id"] for row in lab.rows)

    def test_workers_write_lines_too(self, tmp_path: Path) -> None:
        with server(latency=0.05) as slow:
            lab = self.lab(tmp_path, slow)
            lab.spec["limits"] = {"concurrency": 1}
            lab.spec["trials"] = 2
            lab.write()
            path = tmp_path / "nat" / "workflow_output.jsonl"
            process = start("eval", "e.yaml", "--workers", "2", cwd=tmp_path)
            wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= 2, "lines")
            seen = [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
            assert not (tmp_path / "nat" / "workflow_output.json").exists()
            slow.control(latency=0)
            process.communicate()
        whole = {row["id"]: row for row in json.loads((tmp_path / "nat" / "workflow_output.json").read_text())}
        assert len(whole) == 60 and all(whole[row["id"]] == row for row in seen)
