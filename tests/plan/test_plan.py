"""A plan one can read: what would be done, and why, before anything is; and runs directories full of rubbish."""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.lab import Lab, rows, tree
from tests.support.running import Server, holdfast, metrics, module_server

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 6


provider = module_server()


@pytest.fixture
def lab(tmp_path: Path, provider: Server) -> Lab:
    return Lab(tmp_path, provider, rows=rows(ROWS), spec={"target": target(provider)})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, provider: Server) -> Path:
    """The folder of a lab whose eval has run once."""
    lab = Lab(tmp_path_factory.mktemp("finished"), provider, rows=rows(ROWS), spec={"target": target(provider)})
    assert lab.eval().asked == ROWS
    return lab.folder


@pytest.fixture
def ran(lab: Lab, finished: Path) -> Lab:
    """A lab of one's own whose eval has run once."""
    shutil.copytree(finished, lab.folder, dirs_exist_ok=True)
    return lab


def target(provider: Server, **params: Any) -> dict[str, Any]:
    return {"model": "test-model", "base_url": provider.base_url, "params": {"temperature": 0, **params}}


def edit_agent(lab: Lab, *files: str) -> None:
    for name in files:
        lab.edit(name, "return answer(prompt)" if name == "agent.py" else "return prompt", "return 'x'")


class TestDryRun:
    def test_a_dry_run_writes_nothing_and_makes_no_request(self, lab: Lab) -> None:
        lab.write()
        before = tree(lab.folder)
        done = lab.do("eval", "e.yaml", "--dry-run")
        assert (done.asked, tree(lab.folder)) == (0, before), "not even the runs directory is made"
        lab.eval()
        lab.rows += rows(2, start=50)
        lab.spec["graders"].append({"type": "text", "contains": "q"})
        lab.write()
        (lab.runs / "e" / "other-00000000").mkdir()
        with (next(lab.runs.glob("e/test*/")) / "outputs.jsonl").open("a") as file:
            file.write('{"torn":')
        before = tree(lab.folder)
        for options in ([], ["--json"], ["--fresh"], ["--trials", 3]):
            done = lab.do("eval", "e.yaml", "--dry-run", *options)
            assert done.asked == 0
            assert tree(lab.folder) == before

    def test_a_dry_run_never_runs_the_users_code(self, lab: Lab) -> None:
        lab.use_agent()
        lab.spec["graders"] = [{"type": "python", "name": "g", "function": "grade.py:grade"}]
        body = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"
        for name in ("agent.py", "tools/answers.py"):
            path = lab.folder / name
            path.write_text(body + path.read_text())
        (lab.folder / "grade.py").write_text(body + "def grade(output): return 1\n")
        lab.plan()
        assert list(lab.folder.rglob("*.ran")) == []
        lab.eval()
        assert len(list(lab.folder.rglob("*.ran"))) == 3, "as running does"

    def test_a_dry_run_shows_the_compiled_eval(self, lab: Lab) -> None:
        lab.write()
        shown = lab.do("eval", "e.yaml", "--dry-run", "target.params.temperature=0.7", "--limit", 3).out
        assert re.search(r"temperature: 0.7", shown) and re.search(r"limit: 3", shown)
        assert "3 trials of 3 samples: 3 to run" in shown

    def test_a_dry_run_reports_that_everything_is_finished(self, ran: Lab) -> None:
        lab, (run,) = ran, ran.runs.glob("e/*/")
        shown = lab.do("eval", "e.yaml", "--dry-run").out
        assert f"run: {run.relative_to(lab.folder)} (finished)" in shown
        assert f"{ROWS} trials of {ROWS} samples: {ROWS} finished\n" in shown
        plan = lab.plan()
        assert plan["already_finished"] is True and plan["finished"] == plan["total"] == ROWS

    def test_text_json_and_the_real_run_agree(self, ran: Lab) -> None:
        lab, (first,) = ran, ran.runs.glob("e/*/")
        lab.rows += rows(2, start=50)
        lab.spec["graders"].append({"type": "text", "name": "more", "contains": "q"})
        plan = lab.plan()
        label = f"e/{first.name}"
        assert {key: plan[key] for key in ("total", "finished", "reused", "to_grade", "to_run")} == {
            "total": ROWS + 2,
            "finished": 0,
            "reused": 0,
            "to_grade": ROWS,
            "to_run": 2,
        }
        assert plan["lenders"] == {label: ROWS}
        assert plan["reasons"] == ["grader `more` added", "2 rows new"]
        assert plan["eval"]["name"] == "e"
        line = (
            f"{ROWS + 2} trials of {ROWS + 2} samples: {ROWS} to grade, 2 to run "
            f"(grader `more` added; 2 rows new); {ROWS} outputs from {label}"
        )
        assert line in lab.do("eval", "e.yaml", "--dry-run").out.splitlines()
        real = lab.eval()
        name, summary = real.err.splitlines()[:2]
        assert summary == line and name == f"e · test-model · {plan['run']}"
        assert real.work == (2, {"correct": 2, "more": ROWS + 2})

    def test_an_unfinished_run_counts_what_it_has(self, lab: Lab) -> None:
        lab.eval("--token-budget", 1, "--concurrency", 1, check=3)
        plan = lab.plan()
        assert (plan["finished"], plan["to_run"], plan["lenders"], plan["reasons"]) == (1, ROWS - 1, {}, [])

    def test_outputs_without_grades_are_to_be_graded(self, lab: Lab) -> None:
        lab.eval("--skip-graders")
        plan = lab.plan()
        assert (plan["finished"], plan["to_grade"], plan["to_run"]) == (0, ROWS, 0)

    def test_an_eval_with_a_baseline_has_a_plan_for_both(self, ran: Lab) -> None:
        lab = ran
        lab.spec["baseline"] = {"model": "other-model"}
        plan = lab.plan()
        assert plan["finished"] == ROWS and plan["baseline"]["to_run"] == ROWS
        lab.write()
        shown = lab.do("eval", "e.yaml", "--dry-run").out
        assert f"{ROWS} finished" in shown and f"{ROWS} to run" in shown and "other-model" in shown


class TestReasons:
    @pytest.mark.parametrize(
        ("change", "reasons", "asked"),
        [
            (lambda lab: lab.spec.update(prompt="Say: {{ question }}"), ["prompt changed"], ROWS),
            (lambda lab: lab.spec.update(system="Be brief."), ["system added"], ROWS),
            (
                lambda lab: lab.spec.update(target=target(lab.provider, temperature=0.7)),
                ["target.params.temperature 0 → 0.7"],
                ROWS,
            ),
            (
                lambda lab: lab.spec["target"]["params"].update(stop=["x"]),
                ["target.params.stop changed"],
                ROWS,
            ),
            (
                lambda lab: lab.spec["target"].update(model="other"),
                ["target.model test-model → other"],
                ROWS,
            ),
            (lambda lab: lab.spec["target"].update(version="2"), ["target.version (none) → 2"], ROWS),
            (lambda lab: lab.spec["graders"][0].update(ignore_case=True), ["grader `correct` changed"], 0),
            (
                lambda lab: lab.spec.update(graders=[{"type": "text", "contains": "x"}]),
                ["grader `correct` removed", "grader `text` added"],
                0,
            ),
            (lambda lab: lab.spec.update(trials=2), ["trials 1 → 2"], ROWS),
            (lambda lab: setattr(lab, "rows", lab.rows + rows(1, start=50)), ["1 row new"], 1),
        ],
        ids=lambda value: "; ".join(value) if isinstance(value, list) else "",
    )
    def test_reasons_name_what_changed(self, ran: Lab, change: Any, reasons: list[str], asked: int) -> None:
        change(ran)
        assert ran.plan()["reasons"] == reasons
        done = ran.eval()
        assert f"({'; '.join(reasons)})" in done.err and done.asked == asked

    def test_a_grader_with_empty_lists_in_it_has_not_changed(self, lab: Lab) -> None:
        lab.spec["graders"].append({"type": "tool_calls", "min_calls": 1})
        lab.eval()
        lab.spec["prompt"] = "Say: {{ question }}"
        assert lab.plan()["reasons"] == ["prompt changed"]

    def test_new_changed_and_removed_rows_are_counted(self, lab: Lab) -> None:
        lab.rows = rows(20)
        lab.eval()
        edited = [{**row, "question": "edited"} for row in lab.rows[:3]]
        lab.rows = edited + lab.rows[3:-1] + rows(12, start=50)
        assert lab.plan()["reasons"] == ["12 rows new, 3 changed, 1 gone"]
        lab.spec["prompt"] = "Say: {{ question }}"
        assert lab.plan()["reasons"] == ["prompt changed", "12 rows new, 3 changed, 1 gone"], "a new prompt hides none"

    @pytest.mark.parametrize(
        ("files", "reason"),
        [
            (["agent.py"], "agent.py changed"),
            (["agent.py", "tools/answers.py"], "agent.py and tools/answers.py changed"),
        ],
    )
    def test_reasons_name_the_files_of_code_that_changed(self, lab: Lab, files: list[str], reason: str) -> None:
        lab.use_agent()
        lab.eval()
        edit_agent(lab, *files)
        assert lab.plan()["reasons"] == [reason]

    def test_the_nearest_run_is_the_one_compared_with(self, ran: Lab) -> None:
        lab = ran
        lab.spec["prompt"] = "Say: {{ question }}"
        lab.eval()
        lab.spec["trials"] = 2
        assert lab.plan()["reasons"] == ["trials 1 → 2"]

    def test_a_run_that_lends_is_compared_with_rather_than_one_with_more_equal_parts(self, lab: Lab) -> None:
        final = {key: lab.spec.get(key) for key in ("prompt", "graders")}
        lab.spec |= {"trials": 2, "graders": [{"type": "exact", "name": "other"}]}
        lab.eval("--limit", "2")
        lab.spec |= {"trials": 1, **final, "prompt": "Say: {{ question }}"}
        lab.eval()
        lab.spec |= final
        plan = lab.plan()
        assert sum(plan["lenders"].values()) == 2
        assert "trials 2 → 1" in plan["reasons"] and "prompt changed" not in plan["reasons"]

    def test_a_first_run_has_no_reasons(self, lab: Lab) -> None:
        assert lab.plan()["reasons"] == []


class TestRubbishInTheRunsDirectory:
    def litter(self, lab: Lab) -> int:
        """Write files that belong to no run, and return how many look like runs."""
        folder = lab.runs / "e"
        good = next(folder.glob("test-model-*/"))
        manifest = json.loads((good / "manifest.json").read_text())

        def run(name: str, content: Any, outputs: bytes = b"") -> None:
            (folder / name).mkdir()
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            (folder / name / "manifest.json").write_bytes(data)
            (folder / name / "outputs.jsonl").write_bytes(outputs)

        whole = (good / "outputs.jsonl").read_bytes()
        strange = [
            {**manifest, "dataset": {"count": "many", "source": 3}},
            {**manifest, "dataset": []},
            {**manifest, "identity": {"target": [], "graders": 7}},
            {**manifest, "identity": {**manifest["identity"], "target": {"kind": "model", "source": [1]}}},
            {**manifest, "fingerprints": {"work": 5}},
            {**manifest, "trials": "all"},
            {**manifest, "schemaVersion": "9.0"},
            {"name": "e"},
            [1, 2],
            b"",
            b"{",
            b"\xff\xfe\x00",
            (good / "manifest.json").read_bytes()[:200],
        ]
        for number, content in enumerate(strange):
            run(f"strange-{number:08x}", content, whole)
        run("torn-0000000a", manifest, whole[:-30])
        run("rotten-0000000b", manifest, whole.replace(b"question", b"QUESTION") + b"\x00\xff\n\n{}\nnull\n")
        (folder / "folders-0000000c" / "manifest.json").mkdir(parents=True)
        (folder / "folders-0000000d" / "outputs.jsonl").mkdir(parents=True)
        (folder / "folders-0000000d" / "grades.jsonl").mkdir()
        (folder / "folders-0000000d" / "manifest.json").write_text(json.dumps(manifest))
        (folder / "folders-0000000e").mkdir()
        (folder / "folders-0000000e" / "metrics.json").write_text('{"score": "high"}')
        (folder / "loop-0000000f").symlink_to("loop-0000000f")
        (folder / "hole-00000010").symlink_to("nowhere")
        (folder / "a file").write_text("not a run")
        (lab.runs / "a file").write_text("not a folder")
        (lab.runs / "notes" / "deep" / "deeper").mkdir(parents=True)
        (lab.runs / "notes" / "deep" / "readme.txt").write_text("mine")
        (lab.runs / "archived").mkdir()
        foreign = os.fsencode(folder) + b"/\xff-00000011"
        os.mkdir(foreign)  # noqa: PTH102 - the name is no text
        with open(foreign + b"/manifest.json", "wb") as file:  # noqa: PTH123
            file.write(b"{}")
        return len(strange) + 2 + 2

    @pytest.fixture
    def littered(self, lab: Lab) -> Lab:
        lab.eval()
        self.looks_like_runs = self.litter(lab)
        lab.rows += rows(1, start=50)
        lab.write()
        return lab

    def test_none_of_it_stops_an_eval_or_its_plan(self, littered: Lab) -> None:
        plan = littered.plan()
        assert (plan["reused"], plan["to_run"]) == (ROWS, 1)
        done = littered.eval()
        assert done.work == (1, {"correct": 1})
        assert metrics(done.run)["coverage"] == 1.0

    def test_none_of_it_stops_a_listing(self, littered: Lab) -> None:
        listed = json.loads(holdfast("cache", "ls", "--json", cwd=littered.folder).stdout)
        by_path = {run["path"].rpartition("/")[2]: run["status"] for run in listed}
        assert len(listed) == self.looks_like_runs + 1
        assert by_path["strange-0000000a"] == by_path["strange-00000000"] == "damaged"
        assert [status for name, status in by_path.items() if name.startswith("test-model-")] == ["finished"]
        text = holdfast("cache", "ls", cwd=littered.folder).stdout
        assert len(text.splitlines()) == len(listed) + 1

    def test_a_run_that_is_not_this_evals_is_named_by_its_path(self, littered: Lab) -> None:
        refused = holdfast("export", "strange-", "--to", "csv", cwd=littered.folder, check=2).stderr
        assert "no run 'strange-'" in refused
        refused = holdfast("export", "runs/e/strange-0000000a", "--to", "csv", cwd=littered.folder, check=2).stderr
        assert "manifest" in refused and "Traceback" not in refused


class TestFingerprintsOfCode:
    """The plan only reads these files and never imports them."""

    FILES = {  # noqa: RUF012 - read only
        "agent.py": "from pkg import inner\nimport space.deep.leaf\ndef reply(): ...\n",
        "pkg/__init__.py": "",
        "pkg/inner.py": "from .sub.far import thing\n",
        "pkg/sub/__init__.py": "",
        "pkg/sub/far.py": "thing = 1\n",
        "space/deep/leaf.py": "",
    }

    @pytest.fixture
    def project(self, lab: Lab) -> Lab:
        for name, text in self.FILES.items():
            path = lab.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("raise SystemExit('imported')\n" + text)
        lab.spec["target"] = {"python": "agent.py:reply"}
        return lab

    def test_planning_reads_them_and_never_imports(self, project: Lab) -> None:
        assert project.plan()["to_run"] == ROWS

    @pytest.mark.parametrize("name", ["agent.py", "pkg/sub/far.py"])
    def test_a_syntax_error_is_named_by_file_and_line(self, project: Lab, name: str) -> None:
        path = project.folder / name
        path.write_text(path.read_text() + "def broken(:\n")
        line = len(path.read_text().splitlines())
        for option in (["--dry-run"], []):
            stderr = project.eval(*option, check=2).err
            assert f"{path}:{line}: not valid Python" in stderr
            assert "Traceback" not in stderr
        assert not project.runs.exists()
