"""Reports to read: JUnit for CI, a page for people. Whatever models say, they stay well-formed and count rightly."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.columns import Panel
from holdfast.plugins.exporters import html
from holdfast.plugins.exporters.html import write_html
from holdfast.plugins.exporters.junit import write_junit
from holdfast.report.run_view import GradedTrial, Pending, RunView
from holdfast.report.timeline import trial_timeline
from holdfast.store.records import Grade, Output, Timing, Usage
from holdfast.store.rundir import RunDir
from tests.support.lab import Lab, rows
from tests.support.running import Server, holdfast, metrics, module_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOSTILE = "<script>alert(1)</script> ]]> &amp; \x00\x1b[31m \ud7ff\ufffe \r\n <!-- \"' {{ 7 * 7 }}"
VOID = {"meta", "input", "line", "circle", "link", "br"}


provider = module_server()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, provider: Server) -> Path:
    """Two turns with a checkpoint that stops, a grader that looks at some rows only, and a hostile answer."""
    folder = tmp_path_factory.mktemp("reports")
    lab = Lab(folder, provider, rows=rows(6))
    lab.rows[2]["question"] = HOSTILE
    lab.rows[3]["question"] = "question 3 stop"
    lab.spec |= {"follow_ups": ["{{ question }} again"], "trials": 2}
    lab.spec["checkpoints"] = [
        {"after_turn": 1, "on_failure": "stop", "graders": [{"type": "text", "name": "go", "not_contains": ["stop"]}]}
    ]
    some = {"type": "text", "name": "some", "contains": "again", "where": "id in ('s0', 's4')"}
    lab.spec["graders"] = [{"type": "text", "name": "even", "contains_any": ["0 again", "4 again"]}, some]
    return lab.eval().run


def results(run: Path) -> list[dict[str, Any]]:
    trials: list[dict[str, Any]] = json.loads((run / "results.json").read_text())["trials"]
    return trials


class Page(HTMLParser):
    """A page taken apart: fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.statuses: list[str] = []
        self.addresses: list[str] = []
        self.scripts = 0
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        assert not any(name.startswith("on") for name in attributes)
        self.addresses += [str(attributes[name]) for name in ("href", "src", "action") if name in attributes]
        self.scripts += tag == "script"
        if tag == "li" and attributes.get("class") == "trial":
            self.statuses.append(str(attributes["data-status"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def summaries(text: str) -> list[str]:
    """The list of trials, as it is read."""
    matches = re.findall(r"<summary>(.*?)</summary>", text.partition('<ol class="trials">')[2], re.DOTALL)
    return [Page(one).text for one in matches if 'class="badge' in one]


def test_trials_are_judged_as_in_the_results(run: Path) -> None:
    """Checkpoints, and graders that look at some rows only, as well."""
    read = [
        (trial.output.sample, trial.output.trial, trial.status, trial.score, {g.grader: g.status for g in trial.grades})
        for trial in RunView(RunDir(run)).trials()
    ]
    expected = [
        (
            entry["sample"],
            entry["trial"],
            entry["status"],
            entry["score"],
            {name: grade["status"] for name, grade in entry["grades"].items() if grade["status"] != "not_reached"},
        )
        for entry in results(run)
    ]
    assert read == expected
    assert {entry["status"] for entry in results(run)} == {"passed", "failed"}
    assert "some" not in results(run)[2]["grades"]


class TestJunit:
    def test_every_trial_is_a_case_with_its_verdict(self, run: Path) -> None:
        holdfast("export", run, "--to", "junit", cwd=run)
        suite = ElementTree.parse(run / "export" / "junit" / "junit.xml").getroot().find("testsuite")
        assert suite is not None
        cases = suite.findall("testcase")
        entries = results(run)
        assert [case.get("name") for case in cases] == [f"{e['sample']} [trial {e['trial']}]" for e in entries]
        for case, entry in zip(cases, entries, strict=True):
            failure = case.find("failure")
            assert (failure is not None) == (entry["status"] == "failed")
            if failure is not None:
                blamed = {line.partition(": ")[0] for line in str(failure.text).splitlines()}
                wrong = {name for name, grade in entry["grades"].items() if grade["status"] == "failed"}
                assert wrong <= blamed
        counts = Counter(entry["status"] for entry in entries)
        assert (suite.get("tests"), suite.get("failures")) == (str(len(entries)), str(counts["failed"]))
        assert (suite.get("errors"), suite.get("skipped")) == ("0", "0")
        values = {item.get("name"): item.get("value") for item in suite.iter("property")}
        assert float(str(values["even.low"])) == metrics(run)["metrics"]["even"]["low"]

    def test_a_pending_trial_is_an_error_with_its_cause(self, tmp_path: Path, provider: Server) -> None:
        lab = Lab(tmp_path, provider, spec={"target": {"python": "agent.py:reply"}, "limits": {"retries": 0}})
        (tmp_path / "agent.py").write_text(
            "def reply(prompt):\n    if '3' in prompt: raise ValueError('no idea')\n    return prompt\n"
        )
        lab.write()
        holdfast("eval", "e.yaml", cwd=tmp_path, check=3)
        (run,) = (path.parent for path in (tmp_path / "runs").rglob("manifest.json"))
        holdfast("export", run, "--to", "junit", cwd=tmp_path)
        suite = ElementTree.parse(run / "export" / "junit" / "junit.xml").getroot()[0]
        assert (suite.get("tests"), suite.get("errors")) == ("6", "1")
        (case,) = [case for case in suite.findall("testcase") if case.find("error") is not None]
        error = case.find("error")
        assert case.get("name") == "s3" and error is not None and "no idea" in str(error.get("message"))


class TestPage:
    def test_numbers_trials_and_checkpoints_are_on_it(self, run: Path) -> None:
        holdfast("export", run, "--to", "html", cwd=run)
        text = (run / "export" / "html" / "report.html").read_text()
        page = Page(text)
        assert Counter(page.statuses) == Counter(entry["status"] for entry in results(run))
        for name, values in metrics(run)["metrics"].items():
            assert name in page.text and f"{values['low']:.3f} – {values['high']:.3f}" in page.text
        for expected in ("Turn 1", "Turn 2", "checkpoint@1/go", "question 0 again"):
            assert expected in page.text
        assert page.addresses == [], "whoever gets the page by mail has no other file"
        assert f"outputs.jsonl of the run directory {run.parent.name}/{run.name} ." in page.text

    def test_the_list_shows_question_answer_and_feedback(self, run: Path, tmp_path: Path) -> None:
        write_html(RunView(RunDir(run)), tmp_path)
        lines = summaries((tmp_path / "report.html").read_text())
        assert lines[0] == "passed s0 trial 1 1.000 question 0 question 0 again"
        assert (
            lines[2]
            == "failed s1 trial 1 0.000 question 1 question 1 again even : contains none of '0 again', '4 again'"
        )
        assert lines[6].startswith("failed s3 trial 1 0.000 question 3 stop question 3 stop checkpoint@1/go : contains")

    def test_the_list_shows_the_question_of_trials_that_failed_and_what_passing_graders_say(
        self, run: Path, tmp_path: Path
    ) -> None:
        trials = RunView(RunDir(run)).everything()
        whole = next(trial for trial in trials if isinstance(trial, GradedTrial))
        grades = [msgspec.structs.replace(grade, feedback=f"line 1\nof {grade.grader}") for grade in whole.grades]
        many = [msgspec.structs.replace(grades[0], grader=f"g{number}", status="failed") for number in range(5)]
        asked = [{"role": "user", "content": [{"type": "text", "text": "\n\n First?\nSecond"}]}]
        listed: list[GradedTrial | Pending] = [
            Pending("p", 1, "agent: ValueError: odd", {"question": "Why?\nExplain."}),
            Pending("q", 1, "", {}),
            whole._replace(grades=grades),
            whole._replace(grades=many, output=msgspec.structs.replace(whole.output, messages=asked)),
        ]
        write_html(Told(run, listed), tmp_path)
        pending, bare, passed, failed = summaries((tmp_path / "report.html").read_text())
        assert pending == "error p trial 1 – Why? agent: ValueError: odd"
        assert bare == "error q trial 1 – not run yet"
        assert "checkpoint@1/go: line 1 of checkpoint@1/go · even: line 1 of even" in passed
        assert "First? question 0 again g0 : line 1 of" in failed
        assert "g2 :" in failed and "g3" not in failed and failed.endswith("and 2 more")

    @pytest.mark.parametrize(("cost", "shown"), [(None, ""), (0.0, ""), (0.0000021, "<$0.0001"), (0.5, "$0.5000")])
    def test_a_zero_or_unknown_cost_is_not_shown_with_a_trial(
        self, run: Path, tmp_path: Path, cost: float | None, shown: str
    ) -> None:
        whole = next(trial for trial in RunView(RunDir(run)).everything() if isinstance(trial, GradedTrial))
        output = msgspec.structs.replace(whole.output, usage=Usage(10, 5, 1, cost))
        write_html(Told(run, [whole._replace(output=output)]), tmp_path)
        text = Page((tmp_path / "report.html").read_text()).text
        assert text.partition("10 + 5 tokens")[2].partition("form.filter")[0].count("$") == bool(shown)
        assert shown in text

    def test_every_number_of_a_grader_has_its_label_where_the_header_is_not_shown(
        self, run: Path, tmp_path: Path
    ) -> None:
        write_html(RunView(RunDir(run)), tmp_path)
        table = (tmp_path / "report.html").read_text().partition('<table class="graders">')[2].partition("</table>")[0]
        header = re.findall(r'<th class="n">([^<]*)</th>', table)
        assert "not reached" in header and "pass@2" in header
        rows = table.partition("<tbody>")[2].split("</tr>")[:-1]
        assert len(rows) == len(metrics(run)["metrics"]) + 1
        assert all(re.findall(r'<td class="n" data-label="([^"]*)">', row) == header for row in rows)

    def test_graders_that_checked_nothing_or_have_no_threshold_are_on_it(
        self, tmp_path: Path, provider: Server
    ) -> None:
        idle = {"type": "exact", "name": "idle", "where": "id == 'nobody'"}
        calls = {"type": "action_sequence", "expected_actions": ["look"], "matching_mode": "any_order_match"}
        run = Lab(tmp_path, provider, rows=rows(2), spec={"graders": [idle, calls, {"type": "exact"}]}).eval().run
        for kind in ("html", "junit", "waza", "csv"):
            holdfast("export", run, "--to", kind, cwd=tmp_path)
        page = Page((run / "export" / "html" / "report.html").read_text())
        assert "grader `idle` applies to no row: check its `where`" in page.text and "action_sequence" in page.text

    def test_the_page_is_one_file_without_external_resources(self, run: Path) -> None:
        holdfast("export", run, "--to", "html", "-o", "page", cwd=run)
        text = (run / "page" / "report.html").read_text()
        assert [path.name for path in (run / "page").iterdir()] == ["report.html"]
        assert "default-src 'none'" in text and "@import" not in text and "url(" not in text
        assert re.findall(r"https?://(?!127\.0\.0\.1)", text) == [], "but for the model's own address"
        assert Page(text).scripts == 1

    def test_a_large_run_is_cut_with_what_failed_first(
        self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(html, "_PAGE", 6_000)
        write_html(RunView(RunDir(run)), tmp_path)
        page = Page((tmp_path / "report.html").read_text())
        assert 0 < len(page.statuses) < len(results(run)) and set(page.statuses) == {"failed"}
        assert f"{len(page.statuses)} of {len(results(run))} trials are shown" in page.text

    def test_trials_that_passed_are_not_rendered_once_the_page_is_full(
        self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        passed = [trial for trial in RunView(RunDir(run)).trials() if trial.status == "passed"]
        monkeypatch.setattr(html, "_PAGE", 10_000)
        rendered: list[GradedTrial] = []

        def render(view: RunView, trial: GradedTrial, *, contents: bool) -> Any:
            rendered.append(trial)
            return trial_timeline(view, trial, contents=contents)

        monkeypatch.setattr(html, "trial_timeline", render)
        write_html(Told(run, [*passed * 20]), tmp_path)
        shown = len(Page((tmp_path / "report.html").read_text()).statuses)
        assert 0 < shown < len(passed) * 20 and len(rendered) == shown + 1

    def test_an_unfinished_run_is_marked(self, run: Path, tmp_path: Path) -> None:
        copy = tmp_path / "run"
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("metrics.json", "results.json", "export"))
        holdfast("export", copy, "--to", "html", cwd=tmp_path)
        page = Page((copy / "export" / "html" / "report.html").read_text())
        assert "This run is not finished" in page.text and len(page.statuses) == len(results(run))


class Told(RunView):
    """A run with other trials than its own."""

    def __init__(self, run: Path, trials: list[GradedTrial | Pending]) -> None:
        super().__init__(RunDir(run))
        self._told = trials

    def everything(self) -> Iterator[GradedTrial | Pending]:
        yield from self._told


anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from([HOSTILE, "</pre></li>"])


@st.composite
def trial(draw: Any) -> GradedTrial | Pending:
    name, text, feedback = draw(anything), draw(anything), draw(anything)
    if draw(st.booleans()):
        return Pending(name, 1, feedback, {})
    messages = [{"role": draw(anything), "content": text, "tool_calls": [{"function": {"name": text}}, text]}]
    output = Output("k", name, 1, 1, messages, text, 1, text, "whole", Usage(), Timing(0, 1), "d")
    status = draw(st.sampled_from(["passed", "failed", "error", "skipped"]))
    grade = Grade("k", name, 1, draw(anything), "text", "g", None, "d", status, None, 1, feedback, None, 0)
    return GradedTrial({text: {"deep": feedback}}, output, [grade], status, None, Panel((0,)))


@settings(max_examples=60)
@given(trials=st.lists(trial(), max_size=5))
def test_any_text_gives_well_formed_reports_that_count_every_trial(
    run: Path, tmp_path_factory: pytest.TempPathFactory, trials: list[GradedTrial | Pending]
) -> None:
    folder = tmp_path_factory.mktemp("said")
    reader = Told(run, trials)
    (xml,), (page,) = write_junit(reader, folder), write_html(reader, folder)
    suite = ElementTree.parse(xml).getroot()[0]
    statuses: list[str] = [each.status if isinstance(each, GradedTrial) else "error" for each in trials]
    assert len(suite.findall("testcase")) == len(trials)
    for status, name in (("failed", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert suite.get(name) == str(statuses.count(status))
    read = Page(page.read_text())
    assert read.statuses == statuses and read.scripts == 1 and read.addresses == []
    shutil.rmtree(folder)
