"""Only what a change touches runs: counted at the server, and in the grades, on the real command."""

from __future__ import annotations

import json
import shutil
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.breaking import assert_same_numbers, kept, metrics_bytes
from tests.support.lab import Lab, remove, rows
from tests.support.running import Server, holdfast, lines, metrics, module_server, server, start, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ROWS = 6
ALL = {"correct": ROWS, "length": ROWS, "judge": ROWS}
CHECK = """from rules import LIMIT


def length(output):
    return len(output) <= LIMIT
"""


provider = module_server()
judge = module_server(answer="judge")


@pytest.fixture
def lab(tmp_path: Path, provider: Server, judge: Server) -> Lab:
    return new_lab(tmp_path, provider, judge)


@pytest.fixture(scope="module")
def make_lab(tmp_path_factory: pytest.TempPathFactory, provider: Server, judge: Server) -> Callable[[], Lab]:
    """Make labs for tests to share."""
    return lambda: new_lab(tmp_path_factory.mktemp("shared"), provider, judge)


@pytest.fixture(scope="module")
def finished(make_lab: Callable[[], Lab]) -> Path:
    """The folder of a lab whose eval has run once."""
    return run_once(make_lab())


@pytest.fixture(scope="module")
def finished_by_digest(make_lab: Callable[[], Lab]) -> Path:
    """The folder of a lab whose eval has run once, with rows that have no ids."""
    lab = make_lab()
    lab.rows = rows(ROWS, ids=False)
    return run_once(lab)


@pytest.fixture(scope="module")
def finished_agent(make_lab: Callable[[], Lab]) -> Path:
    """The folder of a lab whose eval has run once, with an agent."""
    lab = make_lab()
    lab.use_agent()
    return run_once(lab)


def run_once(lab: Lab) -> Path:
    done = lab.eval()
    assert done.work == (ROWS, ALL) and done.judged == ROWS
    return lab.folder


def copied(lab: Lab, finished: Path) -> Lab:
    shutil.copytree(finished, lab.folder, dirs_exist_ok=True)
    return lab


@pytest.fixture
def ran(lab: Lab, finished: Path) -> Lab:
    """A lab of one's own whose eval has run once."""
    return copied(lab, finished)


@pytest.fixture
def ran_agent(lab: Lab, finished_agent: Path) -> Lab:
    """A lab of one's own whose eval has run once, with an agent."""
    lab.use_agent()
    return copied(lab, finished_agent)


@pytest.fixture(scope="module")
def finished_chain(make_lab: Callable[[], Lab]) -> list[Path]:
    """Three runs, each with a row more."""
    lab, runs = make_lab(), []
    for number in range(3):
        runs.append(lab.eval().run)
        lab.rows += rows(1, start=71 + number)
    return runs


@pytest.fixture
def chain(lab: Lab, finished_chain: list[Path]) -> list[Path]:
    """Three runs of one's own, each with a row more, and the lab with one more than the third."""
    copied(lab, finished_chain[0].parents[2])
    lab.rows += rows(3, start=71)
    return [lab.runs / "e" / run.name for run in finished_chain]


def new_lab(folder: Path, provider: Server, judge: Server) -> Lab:
    """An eval with one grader of each kind: at once, a Python function with a module of its own, a judge."""
    (folder / "check.py").write_text(CHECK)
    (folder / "rules.py").write_text("LIMIT = 100\n")
    graders = [
        {"type": "exact", "name": "correct"},
        {"type": "python", "name": "length", "function": "check.py:length"},
        {"type": "prompt", "name": "judge", "rubric": "polite", "model": "j", "base_url": judge.base_url},
    ]
    return Lab(folder, provider, judge, rows(ROWS), {"graders": graders})


def only_run(lab: Lab) -> Path:
    (run,) = lab.runs.glob("e/*/")
    return run


def changed(path: str, value: Any) -> Callable[[Lab], None]:
    """Set one key of the eval."""

    def change(lab: Lab) -> None:
        *way, last = path.split(".")
        node: Any = lab.spec
        for part in way:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        node[last] = value

    return change


class TestRows:
    @pytest.mark.parametrize("ids", [True, False], ids=["with ids", "by digest"])
    @pytest.mark.parametrize(
        ("change", "touched"),
        [
            (lambda old: old + rows(2, ids="id" in old[0], start=90), 2),
            (lambda old: rows(1, ids="id" in old[0], start=91) + old, 1),
            (lambda old: [{**old[0], "question": "edited"}, old[1], {**old[2], "question": "too"}, *old[3:]], 2),
            (lambda old: old[::-1], 0),
            (lambda old: old[1:], 0),
            (lambda old: old, 0),
        ],
        ids=["2 appended", "1 put first", "2 edited", "reordered", "1 removed", "none"],
    )
    def test_only_new_and_edited_rows_run(
        self, lab: Lab, finished: Path, finished_by_digest: Path, change: Any, touched: int, ids: bool
    ) -> None:
        copied(lab, finished if ids else finished_by_digest)
        lab.rows = change(rows(ROWS, ids=ids))
        again = lab.eval()
        assert again.work == (touched, dict.fromkeys(ALL, touched) if touched else {})
        assert again.judged == touched
        assert metrics(again.run)["outputs"] == len(lab.rows), "and the report is over all of them"
        order = [entry["output"] for entry in json.loads((again.run / "results.json").read_text())["trials"]]
        assert order == [row["question"] for row in lab.rows], "in the dataset's order"

    @pytest.mark.parametrize(
        ("change", "graded"),
        [
            (lambda row: {**row, "expected": "corrected"}, {"correct": 1, "length": 1}),
            (lambda row: {**row, "note": "seen"}, {"correct": 1, "length": 1}),
            (lambda row: {"expected": row["expected"], "question": row["question"], "id": row["id"]}, {}),
        ],
        ids=["expected", "a field that nobody names", "order of fields"],
    )
    def test_fields_that_only_graders_read_are_graded_again_and_call_nobody(
        self, ran: Lab, change: Any, graded: dict[str, int]
    ) -> None:
        before, ran.rows[2] = only_run(ran), change(ran.rows[2])
        plan = ran.eval("--dry-run").out
        assert ("1 row changed in fields that only graders read" in plan) == bool(graded)
        again = ran.eval()
        assert (again.work, again.judged) == ((0, graded), 0), "the judge sees neither field"
        assert ran.eval().work == (0, {}), "and once is enough"
        if graded:
            remove(before)
        assert ran.eval().work == (0, {}), "the run has all that it needs"

    def test_a_corrected_label_counts_in_the_numbers_and_the_earlier_run_keeps_its_own(self, ran: Lab) -> None:
        first = only_run(ran)
        before = metrics(first)["metrics"]["correct"]["score"]
        wrong = next(row for row in ran.rows if row["expected"] != row["question"])
        wrong["expected"] = wrong["question"]
        again = ran.eval()
        assert metrics(again.run)["metrics"]["correct"]["score"] == pytest.approx(before + 1 / ROWS)
        assert metrics(first)["metrics"]["correct"]["score"] == before
        shown = holdfast("show", first, wrong["id"], "--json", cwd=ran.folder).stdout
        assert wrong["question"] in shown and '"failed"' in shown

    def test_a_field_that_the_judge_reads_asks_the_judge_again(self, lab: Lab) -> None:
        lab.spec["graders"][2]["rubric"] = "as right as {{ expected }}"
        lab.eval()
        lab.rows[0]["expected"] = "corrected"
        again = lab.eval()
        assert (again.asked, again.judged) == (0, 1)

    def test_a_row_whose_id_changes_is_another_row(self, ran: Lab) -> None:
        ran.rows[0]["id"] = "renamed"
        assert ran.eval().asked == 1

    def test_limit_100_to_150_asks_for_50(self, lab: Lab) -> None:
        lab.rows, lab.spec["graders"] = rows(200), lab.spec["graders"][:1]
        assert lab.eval("--limit", 100).work == (100, {"correct": 100})
        assert lab.eval("--limit", 150).work == (50, {"correct": 50})
        assert lab.eval("--limit", 120).work == (0, {}), "fewer are all there"

    def test_trials_3_to_5_asks_for_the_two_missing_ones(self, lab: Lab) -> None:
        assert lab.eval("--trials", 3).work == (3 * ROWS, dict.fromkeys(ALL, 3 * ROWS))
        more = lab.eval("--trials", 5)
        assert more.work == (2 * ROWS, dict.fromkeys(ALL, 2 * ROWS))
        trials = sorted((output["sample"], output["trial"]) for output in kept(more.run))
        assert trials == [(f"s{number}", trial) for number in range(ROWS) for trial in range(1, 6)]


class TestWhatTheChangeTouches:
    @pytest.mark.parametrize(
        ("change", "grader"),
        [
            (changed("graders.0.ignore_case", True), "correct"),
            (changed("graders.1.params", {}), None),
            (changed("graders.2.rubric", "rude"), "judge"),
            (changed("graders.2.model", "better-judge"), "judge"),
            (changed("graders.2.params", {"temperature": 1}), "judge"),
            (lambda lab: lab.spec["graders"].append({"type": "text", "name": "new", "contains": "q"}), "new"),
            (lambda lab: lab.spec["graders"].pop(0), None),
            (lambda lab: lab.edit("check.py", "<=", "<"), "length"),
            (lambda lab: lab.edit("rules.py", "100", "5"), "length"),
            (lambda lab: lab.edit("rules.py", "100", "100  # plenty"), None),
        ],
        ids=[
            "edited",
            "said as it was by default",
            "rubric",
            "judge's model",
            "judge's parameter",
            "added",
            "removed",
            "its source",
            "a module it imports",
            "a comment in that",
        ],
    )
    def test_a_changed_grader_grades_existing_outputs(self, ran: Lab, change: Any, grader: str | None) -> None:
        before = only_run(ran)
        change(ran)
        done = ran.eval()
        assert done.work == (0, {grader: ROWS} if grader else {})
        assert done.judged == (ROWS if grader == "judge" else 0)
        assert metrics(done.run)["coverage"] == 1.0
        if grader == "length" and "5" in (ran.folder / "rules.py").read_text():
            assert metrics(before)["metrics"]["length"]["score"] == 1.0, "the earlier run keeps its verdicts"
            assert metrics(done.run)["metrics"]["length"]["score"] == 0.0

    def test_a_grader_with_a_new_name_keeps_its_verdicts(self, ran: Lab) -> None:
        ran.spec["graders"][0]["name"] = "right"
        done = ran.eval()
        assert done.work == (0, {})
        assert metrics(done.run)["metrics"]["right"]["n"] == ROWS

    @pytest.mark.parametrize(
        "change",
        [
            changed("graders.1.threshold", 0.25),
            changed("limits", {"concurrency": 2, "turn_timeout": 7, "trial_timeout": 70, "retries": 1}),
            changed("target.base_url", "http://127.0.0.1:1/v1"),
            changed("graders.2.base_url", "http://127.0.0.1:1/v1"),
            changed("dataset.path", "./data.jsonl"),
            changed("dataset.path", "../{folder}/data.jsonl"),
            changed("dataset.path", "{absolute}/data.jsonl"),
            changed("dataset.path", ["dat*.jsonl"]),
            changed("dataset", {"path": "data.jsonl", "format": "jsonl", "id": "id"}),
            changed("graders.1.function", "./check.py:length"),
        ],
    )
    def test_limits_prices_paths_spelling_and_thresholds_rerun_nothing(self, ran: Lab, change: Any) -> None:
        first = only_run(ran)
        change(ran)
        path = ran.spec["dataset"]["path"]
        if isinstance(path, str):
            ran.spec["dataset"]["path"] = path.format(folder=ran.folder.name, absolute=ran.folder)
        again = ran.eval()
        assert again.work == (0, {}) and again.judged == 0
        assert again.run == first, "it is the same run"

    def test_options_environment_and_folder_rerun_nothing(self, ran: Lab, tmp_path: Path) -> None:
        lab, first = ran, only_run(ran)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        for arguments, env in [
            (["--concurrency", "3"], {}),
            (["--output-path", "out"], {}),
            (["--log-samples"], {}),
            (["--display", "none"], {"OPENAI_API_KEY": "sk-another"}),
        ]:
            assert lab.eval(*arguments, env=env).work == (0, {})
        away = lab.do("eval", "../e.yaml", "--runs-dir", lab.runs, cwd=elsewhere)
        assert away.work == (0, {}) and away.run.resolve() == first.resolve()
        away = lab.do("eval", lab.eval_file, cwd=elsewhere, env={"HOLDFAST_RUNS_DIR": "../runs"})
        assert away.work == (0, {}) and away.run.resolve() == first.resolve()

    def test_a_new_threshold_and_weight_change_the_numbers_without_grading(self, lab: Lab) -> None:
        lab.edit("check.py", "len(output) <= LIMIT", "0.4")
        run = lab.eval().run
        assert metrics(run)["metrics"]["length"]["passed"] == 0
        lab.spec["graders"][1]["threshold"] = 0.3
        lab.spec["graders"][0]["weight"] = 0
        assert lab.eval().work == (0, {})
        now = metrics(run)
        assert now["metrics"]["length"]["passed"] == ROWS
        assert now["score"] == pytest.approx((0.4 + 1.0) / 2), "correct weighs nothing now"

    def test_a_changed_gate_is_checked_without_any_work(self, ran: Lab) -> None:
        ran.spec["gate"] = {"correct": 0.9}
        missed = ran.eval(check=1)
        assert missed.work == (0, {}) and "gate not met: correct is 0.5" in missed.out


class TestPythonTargets:
    @pytest.mark.parametrize(
        ("file", "old", "new", "asked"),
        [
            ("agent.py", "return answer(prompt)", "return answer(prompt + '!')", ROWS),
            ("tools/answers.py", "return prompt", "return prompt.upper()", ROWS),
            ("agent.py", "return answer(prompt)", "return  answer(  prompt )  # as it was", 0),
            ("tools/answers.py", "def answer", "# what it says\n\n\ndef answer", 0),
        ],
        ids=["its source", "a module it imports", "layout and a comment", "a comment in the module"],
    )
    def test_code_counts_and_comments_do_not(self, ran_agent: Lab, file: str, old: str, new: str, asked: int) -> None:
        ran_agent.edit(file, old, new)
        assert ran_agent.eval().work == (asked, ALL if asked else {})

    def test_going_back_to_earlier_code_finds_its_outputs(self, ran_agent: Lab) -> None:
        lab, first = ran_agent, only_run(ran_agent)
        lab.edit("tools/answers.py", "return prompt", "return prompt + '?'")
        assert lab.eval().asked == ROWS
        lab.edit("tools/answers.py", "return prompt + '?'", "return prompt")
        back = lab.eval()
        assert back.work == (0, {}) and back.run == first


class TestAcceptingDrift:
    @pytest.fixture
    def drifted(self, ran_agent: Lab) -> Lab:
        """A run, then a change of the agent's code."""
        ran_agent.edit("tools/answers.py", "return prompt", "return prompt + ''")
        return ran_agent

    def test_outputs_are_kept_and_the_manifest_records_it(self, drifted: Lab) -> None:
        lab, old = drifted, only_run(drifted)
        kept_run = lab.eval("--accept-drift")
        assert kept_run.work == (0, {}) and kept_run.run != old
        drift = json.loads((kept_run.run / "manifest.json").read_text())["drift"]
        assert drift["from"] == f"e/{old.name}"
        assert set(drift["was"]) == set(drift["is"]) == {"agent.py", "tools/answers.py"}
        assert drift["was"]["agent.py"] == drift["is"]["agent.py"]
        assert drift["was"]["tools/answers.py"] != drift["is"]["tools/answers.py"]
        assert json.loads((old / "manifest.json").read_text())["drift"] is None

    def test_a_second_time_it_finds_its_own_run(self, drifted: Lab) -> None:
        first = drifted.eval("--accept-drift")
        manifest = (first.run / "manifest.json").read_bytes()
        again = drifted.eval("--accept-drift")
        assert again.work == (0, {}) and again.run == first.run
        assert (first.run / "manifest.json").read_bytes() == manifest

    def test_new_rows_run_with_the_new_code_and_are_not_taken_for_the_old(self, drifted: Lab) -> None:
        lab = drifted
        lab.rows += rows(1, start=50)
        assert lab.eval("--accept-drift").asked == 1
        lab.edit("tools/answers.py", "return prompt + ''", "return prompt")
        assert lab.eval().asked == 1, "the old code never answered that row"

    def test_accept_drift_changes_nothing_without_drift(self, ran_agent: Lab) -> None:
        run = only_run(ran_agent)
        again = ran_agent.eval("--accept-drift")
        assert again.run == run and again.work == (0, {})

    def test_a_run_begun_without_it_by_mistake_does_not_prevent_it(self, drifted: Lab) -> None:
        lab = drifted
        (lab.folder / "calls.txt").rename(lab.folder / "counted.txt")
        lab.eval("--concurrency", "1", "--max-time", "0.000001s", check=3)
        assert lab.eval("--accept-drift").asked == 0

    def test_accept_drift_is_rejected_if_no_run_matches(self, lab: Lab) -> None:
        lab.use_agent()
        refused = lab.eval("--accept-drift", check=2)
        assert "--accept-drift" in refused.err and "no earlier run" in refused.err
        lab.eval()
        lab.spec["prompt"] = "Other: {{ question }}"
        lab.edit("tools/answers.py", "return prompt", "return prompt + ''")
        refused = lab.eval("--accept-drift", check=2)
        assert "differs only in the target's code" in refused.err and refused.asked == 0
        assert len(list(lab.runs.glob("e/*/manifest.json"))) == 1, "a refusal leaves no run behind"

    def test_grading_a_drifted_run_stays_drifted(self, drifted: Lab) -> None:
        lab = drifted
        run = lab.eval("--accept-drift").run
        lab.spec["graders"].append({"type": "text", "name": "new", "contains": "q"})
        lab.write()
        graded = lab.do("grade", run, "e.yaml")
        assert graded.work == (0, {"new": ROWS})
        assert json.loads((graded.run / "manifest.json").read_text())["drift"]["is"]


class TestWhereItCameFrom:
    def test_each_line_names_the_run_where_the_work_was_done(self, chain: list[Path]) -> None:
        first, second, third = chain
        for name, each in (("outputs", 1), ("grades", 3)):
            assert all("source" not in record for record in kept(first, name))
            sources = [record.get("source") for record in kept(third, name)]
            assert sources.count(f"e/{first.name}") == ROWS * each, "a copy of a copy keeps the first source"
            assert sources.count(f"e/{second.name}") == each
            assert sources.count(None) == each

    def test_the_lender_may_be_deleted(self, lab: Lab, chain: list[Path]) -> None:
        first, second, third = chain
        for run in (first, second):
            remove(run)
        lab.rows.pop()  # as they were for the third
        numbers = metrics_bytes(third)
        assert lab.eval().work == (0, {})
        (third / "metrics.json").unlink()
        assert lab.eval().work == (0, {}), "the report is made from its own files"
        assert metrics_bytes(third) == numbers
        holdfast("export", third, "--to", "samples", cwd=lab.folder)
        exported = lines(third / "export" / "samples" / "samples.jsonl")
        assert [line["sample"] for line in exported] == [row["id"] for row in lab.rows]
        assert lab.do("grade", third, "--again").work == (0, dict.fromkeys(ALL, ROWS + 2))

    def test_reused_equals_run(self, lab: Lab, chain: list[Path]) -> None:
        *_, third = chain
        lab.rows.pop()
        lab.write()
        holdfast("eval", "e.yaml", "--runs-dir", "others", cwd=lab.folder)
        (alone,) = (lab.folder / "others" / "e").glob("*/")
        assert_same_numbers(third, alone)

    def test_budgets_do_not_count_reused_outputs(self, lab: Lab) -> None:
        lab.spec["graders"] = lab.spec["graders"][:1]
        spent = sum(metrics(lab.eval().run)["usage"][kind] for kind in ("input_tokens", "output_tokens"))
        lab.rows += rows(2, start=50)
        done = lab.eval("--token-budget", spent)
        assert done.asked == 2 and metrics(done.run)["coverage"] == 1.0
        lab.rows += rows(2, start=60)
        held = lab.eval("--token-budget", 1, "--concurrency", 1, check=3)
        assert held.asked == 1, "what this run pays itself does count"
        assert "budget reached" in held.out
        went_on = lab.eval("--token-budget", spent)
        assert went_on.asked == 1, "nor are they counted when the run is opened again"

    def test_fresh_reuses_nothing(self, ran: Lab) -> None:
        ran.rows += rows(1, start=50)
        assert ran.eval("--fresh").asked == ROWS + 1

    def test_a_run_begun_with_fresh_borrows_nothing_when_it_resumes(self, ran: Lab) -> None:
        ran.rows += rows(1, start=50)
        begun = ran.eval("--fresh", "--token-budget", 1, "--concurrency", 1, check=3)
        assert begun.asked == 1
        went_on = ran.eval()
        assert went_on.run == begun.run and went_on.asked == ROWS

    def test_an_unfinished_run_lends_what_it_has(self, lab: Lab) -> None:
        lab.eval("--token-budget", 1, "--concurrency", 1, check=3)
        lab.rows += rows(1, start=50)
        assert lab.eval().asked == ROWS

    def test_damaged_lines_are_not_lent(self, ran: Lab) -> None:
        lab, first = ran, only_run(ran)
        text = (first / "outputs.jsonl").read_text().splitlines(keepends=True)
        text[0] = text[0].replace("question", "Question")
        text[1] = text[1].replace('"attempt":1', '"attempt":2')
        (first / "outputs.jsonl").write_text("".join(text) + '{"key":"sha256:')
        lab.rows += rows(1, start=50)
        assert lab.eval().work == (3, dict.fromkeys(ALL, 3))


class TestADatasetThatChangesUnderTheEval:
    @pytest.fixture
    def slow(self) -> Iterator[Server]:
        with server() as running:
            yield running

    def begin(self, lab: Lab, slow: Server) -> Any:
        """An eval in which four answers have come, and four more will not come for a while."""
        lab.rows, lab.spec["graders"] = rows(40), lab.spec["graders"][:1]
        lab.spec["target"]["base_url"] = slow.base_url
        lab.spec["limits"] = {"concurrency": 4}
        lab.write()
        slow.control(latency=0.3)
        process = start("eval", "e.yaml", cwd=lab.folder)
        wait_for(lambda: sum(slow.stats()["answered"].values()) >= 4, "the first answers")
        return process

    @pytest.mark.parametrize(
        "change",
        [
            lambda old: old + rows(1, start=90),
            lambda old: [*old[:-1], {**old[-1], "question": "edited"}],
            lambda old: [{**old[0], "question": "edited"}, *old[1:]],
            lambda old: old[:20],
        ],
        ids=["appended", "a row to come edited", "a row that is done edited", "cut"],
    )
    def test_the_run_stops_with_a_message_and_the_next_command_reuses_the_outputs(
        self, lab: Lab, slow: Server, change: Any
    ) -> None:
        process = self.begin(lab, slow)
        lab.rows = change(lab.rows)
        lab.write()
        out, err = process.communicate(timeout=300)
        assert process.returncode == 3, out + err
        assert "the dataset changed while the eval was running" in out
        done = {record["messages"][-1]["content"] for path in lab.runs.glob("e/*") for record in kept(path)}
        assert 4 <= len(done) < 40 and len(done) == slow.requests, "admission stopped, and what was asked was kept"
        slow.control(latency=0)
        lab.provider = slow
        again = lab.eval()
        assert again.asked == sum(row["question"] not in done for row in lab.rows)

    def test_a_changed_modification_time_does_not_stop_it(self, lab: Lab, slow: Server) -> None:
        process = self.begin(lab, slow)
        (lab.folder / "data.jsonl").touch()
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, out + err
        assert slow.requests == 40

    def test_equal_rows_written_again_do_not_stop_it(self, lab: Lab, slow: Server) -> None:
        process = self.begin(lab, slow)
        text = "".join(json.dumps(dict(reversed(row.items()))) + "\n\n" for row in lab.rows)
        (lab.folder / "new").write_text(text)
        (lab.folder / "new").replace(lab.folder / "data.jsonl")
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, out + err

    @pytest.mark.faults
    def test_a_killed_run_lends_its_outputs_to_the_changed_eval(self, lab: Lab, slow: Server) -> None:
        process = self.begin(lab, slow)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        (run,) = lab.runs.glob("e/*/")
        had = len(kept(run))
        lab.rows += rows(1, start=90)
        slow.control(latency=0)
        lab.provider = slow
        assert lab.eval().asked == 41 - had
