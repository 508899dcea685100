"""Every trial is accounted for: answers and verdicts add up to the number of trials, wherever they are counted."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import holdfast
from holdfast.plugins.exporters.junit import write_junit
from holdfast.plugins.exporters.tables import write_csv
from holdfast.report.table import draw_metrics
from holdfast.report.tables import write_transcripts
from tests.support.running import holdfast as run_command
from tests.support.running import run_dir, server, wait_for, write_eval
from tests.support.viewing import viewer

if TYPE_CHECKING:
    from pathlib import Path

CLASSES = ("whole", "cut", "filtered", "refused", "empty", "paused", "limited", "exited", "errors")
STOPS = {
    "whole": "stop",
    "empty": "stop",
    "cut": "length",
    "filtered": "content_filter",
    "refused": "refusal",
    "paused": "pause",
    "limited": "token_limit",
    "exited": "exit:3",
}
AGENT = """\
failed = set()

def reply(prompt, sample, context):
    kind = sample["answers"][context.trial - 1]
    place = sample["run"], sample["id"], context.trial
    if kind == "errors" or (kind == "late" and place not in failed):
        failed.add(place)
        raise RuntimeError("down")
    kind = "whole" if kind == "late" else kind
    return {"output": "" if kind == "empty" else f"said {context.trial}", "stop": STOPS[kind]}

def first(output, sample, context=None):
    return judge(sample["first"])

def second(output, sample):
    return judge(sample["second"])

def judge(verdict):
    if verdict == "errors":
        raise ValueError("cannot say")
    return {"score": {"passed": 1.0, "failed": 0.0, "half": 0.5, "skipped": None}[verdict]}
"""

verdicts = st.sampled_from(["passed", "failed", "half", "skipped", "errors"])


@st.composite
def mixtures(draw: Any) -> Mixture:
    trials = draw(st.integers(1, 3))
    answers = st.lists(st.sampled_from([*CLASSES, "late"]), min_size=trials, max_size=trials)
    row = st.fixed_dictionaries({"answers": answers, "first": verdicts, "second": verdicts, "asked": st.booleans()})
    return Mixture(trials, draw(st.lists(row, min_size=1, max_size=6)))


class Mixture(NamedTuple):
    """What the target replies and the graders decide, row by row."""

    trials: int
    rows: list[dict[str, Any]]

    def answers(self) -> dict[str, int]:
        counts = Counter(kind if kind != "late" else "whole" for row in self.rows for kind in row["answers"])
        return {name: counts[name] for name in CLASSES}

    def statuses(self, row: dict[str, Any], grader: str) -> list[str]:
        """The status that a grader gives to each trial of a row."""
        if grader == "second" and not row["asked"]:
            return ["skipped"] * self.trials
        verdict = {"half": "passed"}.get(row[grader], row[grader])
        return ["errors" if kind == "errors" else verdict for kind in row["answers"]]

    def score(self, grader: str) -> float | None:
        """The mean over the samples of the mean over their trials."""
        values = {"passed": 1.0, "failed": 0.0, "half": 0.5}
        means = [
            fmean([values[row[grader]]] * count)
            for row in self.rows
            if (count := sum(status in ("passed", "failed") for status in self.statuses(row, grader)))
        ]
        return fmean(means) if means else None


def evaluate(folder: Path, mixture: Mixture, name: str) -> holdfast.Run:
    """Run a mixture: errors are left pending by a first command, and accepted by a second that retries them."""
    agent = folder / "agent.py"
    agent.write_text(f"STOPS = {STOPS!r}\n{AGENT}")
    grader = {"type": "python", "threshold": 0.5}
    keys: dict[str, Any] = {
        "name": name,
        "samples": [{"id": f"s{number}", "run": name, **row} for number, row in enumerate(mixture.rows)],
        "prompt": "{{ id }}",
        "trials": mixture.trials,
        "target": {"python": f"{agent}:reply"},
        "graders": [
            {**grader, "name": "first", "function": f"{agent}:first"},
            {**grader, "name": "second", "function": f"{agent}:second", "where": "asked"},
        ],
        "limits": {"retries": 0},
        "runs_dir": folder / "runs",
    }
    holdfast.evaluate(**keys)
    return holdfast.evaluate(**keys, retry_failed=True, accept_errors=True)


def printed(metrics: Any) -> tuple[dict[str, dict[str, str]], str]:
    """The table by grader and column, and all that is printed."""
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    for piece in draw_metrics(metrics, 200):
        console.print(piece)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    head = next(line for line in text.splitlines() if "grader" in line)
    columns = [cell.strip() for cell in head.strip("┃ ").split("┃")]
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in text.splitlines() if line[:1] == "│"]
    return {row[0]: dict(zip(columns, row, strict=True)) for row in rows}, text


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mixture=mixtures())
def test_sums_agree_in_all_reports(tmp_path_factory: pytest.TempPathFactory, mixture: Mixture) -> None:
    folder = tmp_path_factory.mktemp("account")
    run = evaluate(folder, mixture, "e")
    total = len(mixture.rows) * mixture.trials
    assert run.finished and run.metrics is not None
    numbers = json.loads((run.path / "metrics.json").read_text())
    assert numbers["total"] == total
    assert numbers["answers"] == mixture.answers()

    for name in ("first", "second"):
        counts = Counter(status for row in mixture.rows for status in mixture.statuses(row, name))
        block = numbers["metrics"][name]
        assert {status: block[status] for status in ("passed", "failed", "skipped", "errors")} == {
            status: counts[status] for status in ("passed", "failed", "skipped", "errors")
        }
        assert block["score"] == pytest.approx(mixture.score(name))
    overall = numbers["overall"]
    assert overall["passed"] + overall["failed"] + overall["skipped"] + overall["errors"] == total
    assert numbers["graded"] == overall["passed"] + overall["failed"]
    assert numbers["passed"] == overall.get("pass@1")

    results = json.loads((run.path / "results.json").read_text())["trials"]
    assert Counter(trial["answer"] or "errors" for trial in results) == +Counter(mixture.answers())
    covered = [
        row["first"] not in ("skipped", "errors")
        and (not row["asked"] or row["second"] not in ("skipped", "errors"))
        and kind != "errors"
        for row in mixture.rows
        for kind in row["answers"]
    ]
    assert numbers["coverage"] == pytest.approx(sum(covered) / total)

    check_table(run, mixture)
    check_exports(run, mixture, results)
    check_gate(run, numbers)
    check_comparison(run, numbers)


def check_table(run: holdfast.Run, mixture: Mixture) -> None:
    table, text = printed(run.metrics)
    for name in ("first", "second"):
        counts = Counter(status for row in mixture.rows for status in mixture.statuses(row, name))
        cells = table.get(name)
        if cells is None:  # a grader that looks at no row is named below the table
            assert not any(row["asked"] for row in mixture.rows)
            continue
        assert (cells["passed"], cells["graded"]) == (str(counts["passed"]), str(counts["passed"] + counts["failed"]))
        for status in ("skipped", "errors"):
            assert cells.get(status, "0") == str(counts[status])
        for k in range(1, mixture.trials + 1):
            if f"pass@{k}" in cells and (shown := cells[f"pass@{k}"]) != "–":
                enough = [row for row in mixture.rows if _decided(mixture, row, name) >= k]
                assert shown.endswith(f"({len(enough)})")
    answers = mixture.answers()
    partial = sum(answers.values()) - answers["whole"] - answers["errors"]
    assert (f"{partial} of {sum(answers.values()) - answers['errors']} answers" in text) == (partial > 0)


def _decided(mixture: Mixture, row: dict[str, Any], grader: str) -> int:
    return sum(status in ("passed", "failed") for status in mixture.statuses(row, grader))


def check_exports(run: holdfast.Run, mixture: Mixture, results: list[dict[str, Any]]) -> None:
    folder = run.path / "out"
    folder.mkdir()
    for write in (write_csv, write_junit, write_transcripts):
        write(run.view(), folder)
    table = list(csv.DictReader((folder / "trials.csv").read_text().splitlines()))
    assert Counter(row["answer"] or "errors" for row in table) == +Counter(mixture.answers())
    assert [row["score"] for row in table] == ["" if t["score"] is None else repr(t["score"]) for t in results]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert Counter(line["answer"] for line in samples) == +Counter({**mixture.answers(), "errors": 0})
    suite = ElementTree.parse(folder / "junit.xml").getroot()
    statuses = Counter(trial["status"] for trial in results)
    assert int(suite.get("tests", "")) == len(results)
    assert (int(suite.get("failures", "")), int(suite.get("errors", "")), int(suite.get("skipped", ""))) == (
        statuses["failed"],
        statuses["error"],
        statuses["skipped"],
    )
    properties = {each.get("name"): each.get("value") for each in suite.iter("property")}
    assert {name: int(properties[f"answers.{name}"] or "") for name in CLASSES} == mixture.answers()


def check_gate(run: holdfast.Run, numbers: dict[str, Any]) -> None:
    total = numbers["total"]
    for name, value in (("whole", numbers["answers"]["whole"] / total), ("graded", numbers["graded"] / total)):
        assert holdfast.gate(run, minima={name: value}).passed
        if value < 1:
            assert not holdfast.gate(run, minima={name: math.nextafter(value, 2)}).passed


def check_comparison(run: holdfast.Run, numbers: dict[str, Any]) -> None:
    scored = {name: block["score"] for name, block in numbers["metrics"].items() if block["n"]}
    if scored:
        compared = {each.metric: each.first for each in holdfast.compare(run, run).metrics}
        assert {name: compared[name] for name in scored} == pytest.approx(scored)


def test_a_comparison_says_how_many_answers_are_whole(tmp_path: Path) -> None:
    row = {"first": "passed", "second": "passed", "asked": True}
    whole, partial = (
        evaluate(tmp_path, Mixture(2, [{**row, "answers": answers}] * 2), name)
        for name, answers in (("a", ["whole", "whole"]), ("b", ["whole", "cut"]))
    )
    assert "whole answers (4 of 4 → 2 of 4)" in holdfast.compare(whole, partial).differences


def test_a_comparison_says_how_many_samples_it_rests_on(tmp_path: Path) -> None:
    row = {"answers": ["whole"], "second": "passed", "asked": True}
    rows = [{**row, "first": verdict} for verdict in ("passed", "skipped", "failed")]
    run = evaluate(tmp_path, Mixture(1, rows), "e")
    printed = run_command("compare", run.path, run.path, cwd=tmp_path).stdout
    assert "first: only 2 of 3 samples have a verdict in both runs" in printed
    assert "second: only" not in printed


def test_the_viewer_counts_what_the_report_counts(tmp_path: Path) -> None:
    rows = [
        {"answers": ["whole", "cut"], "first": "passed", "second": "skipped", "asked": True},
        {"answers": ["empty", "errors"], "first": "failed", "second": "passed", "asked": False},
        {"answers": ["filtered", "paused"], "first": "skipped", "second": "failed", "asked": True},
        {"answers": ["limited", "exited"], "first": "passed", "second": "failed", "asked": True},
    ]
    mixture = Mixture(2, rows)
    run = evaluate(tmp_path, mixture, "viewed")
    address = f"/run/{run.path.name.rpartition('-')[2]}"
    with viewer(tmp_path) as shown:
        wait_for(lambda: shown.json(f"{address}/trials.json")["building"] is None, "the columns")
        for name, count in mixture.answers().items():
            if name != "errors":
                assert shown.json(f"{address}/trials.json?q=answer={name}")["selected"] == count, name
        page = shown.get(address).text
    assert "12.5%</b> of answers whole" in page and "answer%3Dcut" in page


def test_answers_that_are_not_whole_are_reported_and_can_be_gated(tmp_path: Path) -> None:
    with server(stop="length") as mock:
        safe = {"type": "text", "name": "safe", "not_contains": "bomb"}
        write_eval(tmp_path, mock.base_url, graders=[safe], gate={"whole": 1})
        ended = run_command("eval", "e.yaml", cwd=tmp_path, check=1)
    assert "answers are not whole" in ended.stdout and "cut at the token limit" in ended.stdout
    assert "gate not met: whole is 0 (minimum 1)" in ended.stdout
    run = run_dir(tmp_path)
    answers = json.loads((run / "metrics.json").read_text())["answers"]
    assert answers["cut"] == sum(answers.values())
    listed = run_command("show", run, "--answer", "cut", cwd=tmp_path)
    assert listed.stdout.count("answer cut") == 20
    assert "0 of" in run_command("show", run, "--answer", "whole", cwd=tmp_path).stdout


def test_the_first_answer_that_is_not_whole_is_said_while_the_run_goes_on(tmp_path: Path) -> None:
    with server(stop="length", latency=0.5) as mock:
        write_eval(tmp_path, mock.base_url, rows=4)
        ended = run_command("eval", "e.yaml", "--display", "plain", "--concurrency", "1", cwd=tmp_path)
    said = [line for line in ended.stderr.splitlines() if "not whole" in line]
    assert said[0] == "note: so far 1 of 1 answers is not whole: 1 cut at the token limit"
