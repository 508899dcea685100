"""The other graders: similarity, mathematics, triggers, a judge with tools; and what all of them share."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.errors import AttemptError, ConfigError
from holdfast.graders import pool
from holdfast.graders.build import build_graders, threshold
from holdfast.graders.judge import FAIL, PASS
from holdfast.graders.pool import Pool
from holdfast.graders.text_metrics import TextPair
from holdfast.graders.worker import OUTSIDE
from holdfast.spec.load_graders import GRADERS, grader_schema
from tests.support.lazy import LazyModule
from tests.support.running import ROOT, lines, server
from tests.support.specs import grade, identities, load

if TYPE_CHECKING:
    from pathlib import Path


worker = LazyModule("holdfast.graders.maths")


def score(folder: Path, block: Any, answer: Any, /, fields: Any = None, **row: Any) -> Any:
    verdict = grade(folder, block, answer, fields=fields, **row)
    assert not isinstance(verdict, AttemptError), verdict
    return verdict.score


class TestSimilarity:
    @pytest.mark.parametrize(
        ("block", "answer", "expected"),
        [
            ({}, "hello", 1),
            ({}, "hallo", 0.8),
            ({}, "HELLO", 0),
            ({"ignore_case": True}, " HELLO ", 1),
            ({"method": "partial"}, "well, hello there", 1),
            ({"method": "token_sort", "expected": "one two"}, "two one", 1),
            ({"method": "token_set", "expected": "one two"}, "two one three", 1),
            ({"method": "levenshtein"}, "hallo", 0.8),
            ({"method": "jaro_winkler"}, "hello", 1),
            ({}, "", 0),
            ({"expected": "Caf\u00e9"}, "Cafe\u0301", 1),
        ],
        ids=str,
    )
    def test_the_score_is_the_similarity(self, tmp_path: Path, block: Any, answer: str, expected: float | int) -> None:
        assert score(tmp_path, {"type": "similarity", **block}, answer, expected="hello") == pytest.approx(expected)

    def test_nothing_to_compare_with_is_an_error(self, tmp_path: Path) -> None:
        error = grade(tmp_path, {"type": "similarity"}, "any", expected=" ")
        assert isinstance(error, AttemptError) and "empty for this row" in error.message

    def test_long_texts_are_compared_elsewhere(self, tmp_path: Path) -> None:
        long = "abc " * 2000
        assert score(tmp_path, {"type": "similarity"}, long + "d", expected=long) == pytest.approx(1, abs=0.001)

    def test_texts_that_take_too_long_to_compare_are_an_error_of_that_grade(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(TextPair, "seconds", 0.3)
        words = [f"{number * number % 9973:04}" for number in range(2500)]
        block = {"type": "similarity", "method": "partial"}
        error = grade(tmp_path, block, " ".join(words), expected=" ".join(sorted(words)))
        assert isinstance(error, AttemptError) and error.kind == "timeout"
        assert "comparing 12,499 with 12,499 characters by `partial` took longer" in error.message


class TestMath:
    @pytest.mark.parametrize(
        ("expected", "answer", "equal"),
        [
            ("1/2", r"The answer is $\frac{2}{4}$.", True),
            ("1/2", "so it is 0.5", True),
            (r"\frac{1}{2}", r"\boxed{0.5}", True),
            ("(x+1)^2", "x^2 + 2x + 1", True),
            ("(x+1)^2", "$x^2 + 1$", False),
            ("12,000", "It costs 12000 dollars.", True),
            ("72", "71", False),
            ("2", "I am at 2", True),
            ("xy", "yx", True),
            (r"\sqrt{2}", r"$2^{1/2}$", True),
            ("-5", "it is \N{MINUS SIGN}5", True),
            ("-5", "$\N{MINUS SIGN}5$", True),
            ("1200", "about 1.2e3 of them", True),
            ("1200", "1.2E+3", True),
            ("0.0012", r"\boxed{1.2e-3}", True),
            ("2e3", "2000", True),
            ("1200", "1.2e4", False),
        ],
    )
    def test_equal_as_mathematics(self, expected: str, answer: str, equal: bool) -> None:
        assert worker.compare(expected, answer)["equal"] is equal

    @pytest.mark.parametrize("expected", ["Paris", "", "pairs of shoes"])
    def test_expected_words_are_not_mathematics_and_so_an_error(self, expected: str) -> None:
        assert "is not mathematics" in worker.compare(expected, "$1$")["error"]

    def test_reasoning_is_not_looked_at(self, tmp_path: Path) -> None:
        verdict = grade(tmp_path, {"type": "math"}, r"<think>\boxed{3}</think> It is 4.", expected="4")
        assert not isinstance(verdict, AttemptError) and verdict.score == 1

    def test_an_answer_without_any_is_wrong(self) -> None:
        result = worker.compare("5", "I do not know")
        assert (result["equal"], result["found"], result["reason"]) == (
            False,
            None,
            "no mathematics found in the answer",
        )

    def test_an_endless_comparison_fails_and_blocks_no_other(self, tmp_path: Path) -> None:
        run = holdfast.evaluate(
            name="maths",
            samples=[
                {"id": "endless", "say": "$10^{10^{10^{10}}}$", "expected": 5},
                {"id": "easy", "say": "$\\frac{10}{2}$"},
            ],
            prompt="{{ say }}",
            target={"command": ["echo", "{{ prompt }}"]},
            graders=[
                {"type": "math", "expected": 5, "timeout": 2},
                {"type": "math", "name": "retried", "timeout": 0.5, "on_timeout": "error", "where": "id == 'endless'"},
            ],
            runs_dir=tmp_path / "runs",
            accept_errors=True,
        )
        grades = {(one["sample"], one["grader"]): one for one in lines(run.path / "grades.jsonl")}
        late = grades["endless", "math"]
        assert (late["score"], late["status"], late["feedback"]) == (0, "failed", "timed out after 2 s")
        assert grades["endless", "retried"]["status"] == "error"
        assert grades["easy", "math"]["score"] == 1

    def test_an_answer_that_takes_for_ever_does_not_keep_the_next_one_waiting(self, tmp_path: Path) -> None:
        async def compare() -> str:
            pool = Pool("holdfast.graders.maths:start", size=2)
            endless = {"expected": "5", "answer": "$10^{10^{10^{10}}}$"}
            easy = {"expected": "5", "answer": "$5$"}
            tasks = {
                asyncio.create_task(pool.ask(one, 1000)): name for one, name in ((endless, "endless"), (easy, "easy"))
            }
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            await pool.close()
            return ", ".join(tasks[task] for task in done)

        assert asyncio.run(compare()) == "easy"

    @pytest.mark.parametrize(("cores", "processes"), [(0.5, 2), (3.9, 3), (64.0, 4)])
    def test_a_pool_has_no_more_processes_than_its_control_group_has_cores(
        self, cores: float, processes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pool, "usable_cores", lambda: cores)

        async def count_processes() -> int:
            workers = Pool()
            request = {"request": "holdfast.graders.text_metrics:TextPair", "values": {}}
            request["values"] = {"method": "ratio", "expected": "a", "answer": "a"}
            await asyncio.gather(*(workers.ask(request, 1000) for _ in range(6)))
            count = len(workers._idle)
            await workers.close()
            return count

        assert asyncio.run(count_processes()) == processes

    def test_a_signal_from_outside_does_not_end_a_comparison(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A batch system signals the whole process group; a comparison that dies of it would be scored 0."""
        ask, reached = pool._answer, []

        class SignalsAtEachStage(list[Any]):
            process: Any

            def append(self, stage: Any) -> None:
                reached.append(stage)
                self.process.send_signal(signal.SIGSTOP)  # all the signals are there before the comparison continues
                for number in (*OUTSIDE, signal.SIGCONT):
                    self.process.send_signal(number)

        async def ask_and_signal(process: Any, question: Any, stages: Any) -> Any:
            noted = SignalsAtEachStage()
            noted.process = process
            try:
                return await ask(process, question, noted)
            finally:
                stages.extend(reached)

        monkeypatch.setattr(pool, "_answer", ask_and_signal)
        block = {"type": "math", "expected": 5, "timeout": 300}
        assert score(tmp_path, block, r"$\int_0^{10} \frac{1}{10} x dx$") == 1
        assert reached == ["answer"], "whatever happens from there on is blamed on the answer"


@pytest.mark.parametrize(("kind", "package"), [("similarity", "rapidfuzz"), ("math", "math-verify")])
def test_a_missing_extra_is_reported_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, package: str
) -> None:
    monkeypatch.setattr("holdfast.graders.build.find_spec", lambda _: None)
    with pytest.raises(ConfigError) as caught:
        build_graders(load(tmp_path, graders=[{"type": kind}]))
    assert f"needs the package {package}" in str(caught.value) and "eval.yaml:" in str(caught.value)
    assert caught.value.remedy == f"pip install {package}"


SKILL = """---
name: pdf-tools
description: "Works on PDF files. USE FOR: merge PDFs, split a document. DO NOT USE FOR: spreadsheets."
---
Merge, split and rotate documents.
"""


class TestTrigger:
    @pytest.mark.parametrize(
        ("prompt", "mode", "expected"),
        [
            ("Please split a document", "positive", 1),
            ("merge documents", "positive", 1),
            ("merge spreadsheets", "positive", 0.5),
            ("What is the weather today?", "positive", 0),
            ("What is the weather today?", "negative", 1),
            ("merge spreadsheets", "negative", 0.5),
            ("", "positive", 0),
        ],
    )
    def test_the_score_is_the_overlap_with_the_skill(
        self, tmp_path: Path, prompt: str, mode: str, expected: float | int
    ) -> None:
        (tmp_path / "SKILL.md").write_text(SKILL)
        block = {"type": "trigger", "skill_path": "SKILL.md", "mode": mode}
        assert score(tmp_path, block, "any", fields={"messages": [{"role": "user", "content": prompt}]}) == expected

    @pytest.mark.parametrize(
        ("mode", "configured", "overlap", "passes"),
        [
            ("positive", None, 0.6, True),
            ("positive", None, 0.59, False),
            ("negative", None, 0.6, False),
            ("negative", None, 0.59, True),
            ("negative", 0.7, 0.4, False),
            ("negative", 0.7, 0.25, True),
        ],
    )
    def test_an_overlap_of_six_tenths_is_a_trigger_unless_a_threshold_says_otherwise(
        self, tmp_path: Path, mode: str, configured: float | None, overlap: float, passes: bool
    ) -> None:
        (tmp_path / "SKILL.md").write_text(SKILL)
        block = {"type": "trigger", "skill_path": ".//SKILL.md", "mode": mode, "threshold": configured}
        trigger_score = overlap if mode == "positive" else 1 - overlap
        assert (trigger_score >= threshold(load(tmp_path, graders=[block]).graders[0])) is passes

    def test_the_skill_is_in_the_key_by_its_content(self, tmp_path: Path) -> None:
        (tmp_path / "s").mkdir()
        (tmp_path / "s" / "SKILL.md").write_text(SKILL)
        spec = load(tmp_path, graders=[{"type": "trigger", "skill_path": "s", "mode": "positive"}])
        before = identities(spec)[0]
        (tmp_path / "s" / "SKILL.md").write_text(SKILL + "More.")
        assert identities(spec)[0] != before

    @pytest.mark.parametrize(
        ("text", "message"), [(None, "cannot be read"), ("", "no words"), ("---\na: [\n---\nwords", "not YAML")]
    )
    def test_a_skill_that_says_nothing_is_refused(self, tmp_path: Path, text: str | None, message: str) -> None:
        if text is not None:
            (tmp_path / "SKILL.md").write_text(text)
        with pytest.raises(ConfigError, match=message):
            build_graders(load(tmp_path, graders=[{"type": "trigger", "skill_path": "SKILL.md", "mode": "positive"}]))


CHECK = {"type": "prompt", "name": "judge", "prompt": "Check {{ question }}.", "model": "judge-model"}


def tool_calls(*names: Any) -> Any:
    return [
        {
            "id": str(n),
            "type": "function",
            "function": {"name": name, "arguments": '{"description": "d", "reason": "r"}'},
        }
        for n, name in enumerate(names)
    ]


def judged(folder: Path, base_url: Any, *, judge: Any = CHECK, **keys: Any) -> Any:
    return holdfast.evaluate(
        name="judged",
        samples=[{"id": "a", "question": "one"}],
        prompt="{{ question }}",
        target={"command": ["echo", "said"]},
        graders=[{**judge, "base_url": base_url}],
        runs_dir=folder / "runs",
        **keys,
    )


class TestJudgeWithTools:
    @pytest.mark.parametrize(
        ("calls", "expected", "status"),
        [((PASS, PASS), 1, "passed"), ((PASS, FAIL), 0.5, "failed"), ((FAIL,), 0, "failed")],
        ids=str,
    )
    def test_a_judges_score_is_the_share_of_passed_checks(
        self, tmp_path: Path, calls: Any, expected: float | int, status: str
    ) -> None:
        with server(answer="done", calls=tool_calls(*calls)) as mock:
            run = judged(tmp_path, mock.base_url)
            (entry,) = lines(run.path / "grades.jsonl")
            assert (entry["score"], entry["status"]) == (expected, status)
            assert entry["usage"]["requests"] == mock.requests == 2, "it is told that its calls were noted"
            assert entry["details"]["failed"] == ["d: r"] * calls.count(FAIL)
            asked = list(mock.stats()["asked"])
            assert any(re.search(r"Check one\.\n\n<answer-(\w+)>\nsaid\n</answer-\1>", prompt) for prompt in asked)

    def test_a_rubric_is_shown_to_a_judge_with_a_prompt(self, tmp_path: Path) -> None:
        (tmp_path / "rubric.md").write_text("---\nname: r\n---\nBe strict about {{ question }}.\n")
        with server(answer="done", calls=tool_calls(PASS)) as mock:
            judged(tmp_path, mock.base_url, judge={**CHECK, "rubric": "Be strict about {{ question }}."})
            assert any(re.search(r"<rubric-\w+>\nBe strict about one\.", prompt) for prompt in mock.stats()["asked"])

    def test_a_judge_that_calls_nothing_has_not_judged(self, tmp_path: Path) -> None:
        with server(answer="Looks good to me") as mock:
            run = judged(tmp_path, mock.base_url)
            (entry,) = lines(run.path / "grades.jsonl")
            assert entry["status"] == "error" and "called neither" in entry["feedback"]
            assert lines(run.path / "errors.jsonl")[0]["usage"]["requests"] == 2, "told its mistake once, both paid for"


class TestRubricFiles:
    def test_a_rubric_may_be_a_file_and_is_in_the_key_by_its_content(self, tmp_path: Path) -> None:
        (tmp_path / "good.md").write_text("---\nname: good\nversion: 1.0.0\n---\nIs it good?\n")
        block = {"type": "prompt", "rubric": "good.md", "model": "j"}
        spec = load(tmp_path, graders=[block])
        assert spec.graders[0].rubric == "Is it good?"
        same = load(tmp_path, graders=[{**block, "rubric": "Is it good?"}])
        assert identities(spec) == identities(same)

    @pytest.mark.parametrize(
        ("rubric", "message"),
        [("none.md", "cannot be read"), ("../out.md", "is outside"), ("empty.yaml", "checks nothing")],
    )
    def test_a_missing_or_empty_rubric_file_is_refused_with_its_line(
        self, tmp_path: Path, rubric: str, message: str
    ) -> None:
        folder = tmp_path / "eval"
        folder.mkdir()
        (folder / "empty.yaml").write_text("\n")
        (tmp_path / "out.md").write_text("x")
        with pytest.raises(ConfigError) as caught:
            load(folder, graders=[{"type": "prompt", "rubric": rubric}])
        assert message in str(caught.value) and re.search(r"eval\.yaml:\d+: graders\[0\]", str(caught.value))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "prompt"}, "checks nothing: give at least one of rubric, prompt"),
        ({"type": "prompt", "prompt": ""}, "at least 1 character"),
        ({"type": "prompt", "prompt": "p", "continue_session": True}, "transcript: all"),
        ({"type": "prompt", "prompt": "p", "mode": "pairwise"}, "holdfast compare"),
        ({"type": "trigger", "mode": "positive"}, "needs the skill: give `skill_path`"),
        ({"type": "trigger", "mode": "positive", "skill_path": "/etc/SKILL.md"}, "does not name a file inside"),
        ({"type": "similarity", "method": "guess"}, "'ratio'"),
        ({"type": "text", "contains": "x", "transcript": "some"}, "'last' or 'all'"),
        ({"type": "tool_call", "max_calls": 1}, "did you mean 'tool_calls'"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused_with_their_line(tmp_path: Path, block: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, graders=[block])
    assert message in str(caught.value) and "eval.yaml:" in str(caught.value)


class TestTranscripts:
    MESSAGES = (
        {"role": "user", "content": "first 7"},
        {"role": "assistant", "content": "I say one."},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": [{"type": "text", "text": "I say two."}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": "I say 3."},
    )

    @pytest.mark.parametrize(
        ("block", "last", "everything"),
        [
            ({"type": "text", "contains": ["one", "two", "3", "7"]}, 0.25, 0.75),
            ({"type": "exact", "expected": "I say one.\n\nI say two.\n\nI say 3."}, 0, 1),
            ({"type": "number", "expected": 3}, 1, 1),
            ({"type": "code", "assertions": ["'one' in output"]}, 0, 1),
            ({"type": "program", "command": "grep", "args": ["one"]}, 0, 1),
            ({"type": "similarity", "expected": "I say one.\n\nI say two.\n\nI say 3."}, 0.4, 1),
        ],
        ids=lambda value: value["type"] if isinstance(value, dict) else None,
    )
    def test_transcript_all_covers_every_reply_so_far(
        self, tmp_path: Path, block: Any, last: float | int, everything: float | int
    ) -> None:
        fields = {"messages": list(self.MESSAGES)}
        assert score(tmp_path, block, "I say 3.", fields=fields) == pytest.approx(last, abs=0.1)
        assert score(tmp_path, {**block, "transcript": "all"}, "I say 3.", fields=fields) == everything

    def test_the_default_changes_no_key_and_all_does(self, tmp_path: Path) -> None:
        blocks = [{"type": "text", "contains": "x", "name": str(n)} for n in range(3)]
        blocks[1]["transcript"], blocks[2]["transcript"] = "last", "all"
        spec = load(tmp_path, graders=blocks)
        one, two, three = identities(spec)
        assert one == two != three and "transcript" not in one


def test_a_grader_that_cannot_judge_does_not_affect_others(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def bad(output):\n    raise RuntimeError('no')\n")
    run = holdfast.evaluate(
        name="mixed",
        samples=[{"id": "a", "expected": "hi"}],
        prompt="hello {{ id }}",
        target={"command": ["echo", "hi"]},
        graders=[
            {"type": "python", "function": str(tmp_path / "bad.py:bad")},
            {"type": "program", "command": "sleep", "args": ["60"], "timeout": 0.2, "on_timeout": "error"},
            {"type": "behavior", "max_tokens": 5},
            {"type": "code", "assertions": ["output == 'hi'"]},
            {"type": "exact"},
        ],
        runs_dir=tmp_path / "runs",
    )
    statuses = {entry["grader"]: entry["status"] for entry in lines(run.path / "grades.jsonl")}
    assert statuses == {
        **dict.fromkeys(("python", "program", "behavior"), "error"),
        **dict.fromkeys(("code", "exact"), "passed"),
    }
    assert run.exit_code == 3 and len(lines(run.path / "outputs.jsonl")) == 1


def test_a_row_that_where_cannot_evaluate_is_an_error_of_that_grade_only(tmp_path: Path) -> None:
    run = holdfast.evaluate(
        name="choosy",
        samples=[{"id": "a", "level": 5}, {"id": "b", "level": "hard"}, {"id": "c", "level": 1}],
        prompt="hello {{ id }}",
        target={"command": ["echo", "hi"]},
        graders=[{"type": "text", "contains": "hi", "where": "level > 3"}, {"type": "exact", "expected": "hi"}],
        runs_dir=tmp_path / "runs",
        accept_errors=True,
    )
    results = json.loads((run.path / "results.json").read_text())["trials"]
    grades = {entry["sample"]: {name: grade["status"] for name, grade in entry["grades"].items()} for entry in results}
    assert grades == {
        "a": {"text": "passed", "exact": "passed"},
        "b": {"text": "error", "exact": "passed"},
        "c": {"exact": "passed"},
    }
    (failed,) = lines(run.path / "errors.jsonl")
    assert "`where` cannot be evaluated for this row" in failed["message"]


def test_the_documentation_has_every_kind_and_every_parameter() -> None:
    page = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("graders*.md")))
    common = {"type", "name", "weight", "threshold", "where"}
    for kind in GRADERS:
        block = grader_schema(kind)
        start = page.index(f"# `{kind}`")
        section = page[start : page.find("\n## ", start + 1)]
        for name, field in block.model_fields.items():
            if name not in common:
                assert f"`{field.alias or name}`" in section, f"{kind} does not say what {field.alias or name} is"
