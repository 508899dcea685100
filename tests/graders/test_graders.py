"""Graders: what counts as right, and that what cannot be judged is an error and never a score."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.errors import AttemptError, ConfigError
from holdfast.graders.build import build_graders, threshold
from holdfast.graders.choice import Choice, ChoiceGrader
from holdfast.graders.python import as_verdict
from tests.support.running import lines, server
from tests.support.specs import grade, load

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.spec.eval import Origin


def score(folder: Path, block: Any, answer: Any, /, **row: Any) -> Any:
    """The score a grader gives; an error is no score and fails the test."""
    verdict = grade(folder, block, answer, **row)
    assert not isinstance(verdict, AttemptError), verdict
    return verdict.score


class TestExact:
    @pytest.mark.parametrize(
        ("block", "answer", "expected", "right"),
        [
            ({}, "Paris", "Paris", True),
            ({}, " Paris\n", "Paris", True),
            ({"strip": False}, " Paris", "Paris", False),
            ({}, "paris", "Paris", False),
            ({"ignore_case": True}, "STRASSE", "straße", True),
            ({}, "Paris!", "Paris", False),
            ({}, "", "", True),
            ({"expected": "{{ expected }}!"}, "Paris!", "Paris", True),
            ({"expected": 42}, "42", "ignored", True),
            ({"expected": 1.5}, "1.5", "ignored", True),
            *(({}, text, 1e16, True) for text in ("1e16", "1e+16", "10000000000000000")),
            *(({}, text, 2.5e-7, True) for text in ("2.5e-7", "2.5e-07", "0.00000025")),
            ({}, "1e17", 1e16, False),
        ],
    )
    def test_the_whole_answer_is_compared(
        self, tmp_path: Path, block: Any, answer: str, expected: str | float, right: bool
    ) -> None:
        assert score(tmp_path, {"type": "exact", **block}, answer, expected=expected) == float(right)

    def test_the_feedback_names_the_expected_text(self, tmp_path: Path) -> None:
        assert "expected 'Paris'" in grade(tmp_path, {"type": "exact"}, "Rome", expected="Paris").feedback

    def test_an_expected_text_is_data_and_not_a_template(self, tmp_path: Path) -> None:
        assert score(tmp_path, {"type": "exact"}, "{{ 1 + 1 }}", expected="{{ 1 + 1 }}") == 1


class TestText:
    @pytest.mark.parametrize(
        ("block", "answer", "expected"),
        [
            ({"contains": "egg"}, "An EGG.", 1),
            ({"contains": ["egg", "milk"]}, "egg", 0.5),
            ({"contains_cs": "egg"}, "An EGG.", 0),
            ({"contains_cs": "EGG"}, "An EGG.", 1),
            ({"contains_any": ["egg", "milk"]}, "Milk", 1),
            ({"contains_any": ["egg", "milk"]}, "bread", 0),
            ({"contains_any_cs": ["egg", "milk"]}, "Milk", 0),
            ({"not_contains": "egg"}, "EGG", 0),
            ({"not_contains": "egg"}, "milk", 1),
            ({"not_contains_cs": "egg"}, "EGG", 1),
            ({"regex_match": r"^\d+$"}, "123", 1),
            ({"regex_match": r"^\d+$"}, "n 123", 0),
            ({"regex_match": "(?i)egg"}, "EGG", 1),
            ({"regex_not_match": "egg"}, "milk", 1),
            ({"regex_not_match": ["egg", "milk"]}, "milk", 0.5),
            ({"contains": "a", "not_contains": "b", "regex_match": "c", "contains_any": ["x", "y"]}, "a b c", 0.5),
            ({"contains": "{{ word }}"}, "the word is stone", 1),
            ({"contains_any": ["{{ word }}", "tree"]}, "stone", 1),
        ],
        ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
    )
    def test_the_score_is_the_share_of_checks_that_hold(
        self, tmp_path: Path, block: Any, answer: str, expected: float | int
    ) -> None:
        assert score(tmp_path, {"type": "text", **block}, answer, word="Stone") == expected

    @pytest.mark.parametrize(
        "key", ["contains", "contains_cs", "contains_any", "contains_any_cs", "not_contains", "not_contains_cs"]
    )
    def test_a_field_that_is_empty_is_an_error_since_every_answer_contains_it(self, tmp_path: Path, key: str) -> None:
        error = grade(tmp_path, {"type": "text", key: "{{ word }}"}, "any answer", word="")
        assert isinstance(error, AttemptError) and "renders to empty text for this row" in error.message

    def test_every_failed_check_is_named(self, tmp_path: Path) -> None:
        block = {"type": "text", "contains": "a", "not_contains": "b", "regex_match": "c", "contains_any": ["x", "y"]}
        feedback = grade(tmp_path, block, "b").feedback
        for part in ("lacks 'a'", "contains 'b'", "does not match 'c'", "contains none of 'x', 'y'"):
            assert part in feedback


CHOICES = [
    *((text, "B") for text in ("B", "b", "(B)", "B.", "B)", "[B]", "**B**", "**B.**", " B \n", "B: Paris", "B. Paris")),
    *(
        (text, "C")
        for text in ("Answer: C", "answer:C", "The answer is C", "The answer is (C).", "The answer is C, not D.")
    ),
    *((text, "D") for text in ("the correct answer is: **D**", "Answer:\nD", "Final answer - D", "<answer>D</answer>")),
    *((text, "C") for text in (r"\boxed{C}", r"So $\boxed{\text{C}}$.", "C is correct.", "C is the right answer.")),
    *((text, "B") for text in ("I think it's B", "I'd say B", "The answer is b", "The answer is b.", "It must be B!")),
    *(
        (text, "D")
        for text in ("Option D", "The best choice would be option D.", "D because it fits", "D\n\nA is wrong.")
    ),
    ("A dog is an animal. The answer is D", "D"),
    ("A student should choose B.", "B"),
    ("I believe the answer is A because of B.", "A"),
    ("Answer: I think it is B.", "B"),
    ("The answer is I because the others fail", "I"),
    ("My answer: I", "I"),
    ("A is wrong. B is wrong. So the answer is B. Wait, no: the answer is C.", "C"),
    ("A) one\nB) two\nThe answer is B) two", "B"),
    ("Both A and B are wrong.\n\nC", "C"),
    ("The correct option is **C) Paris**", "C"),
    ("A", "A"),
    ("I", "I"),
    *(
        (rf"\\boxed{{{text}}}", "C")
        for text in (r"\mathrm{C}", r"\textbf{C}", r"\text{(C)}", r"\text{Option C}", "C. Oslo")
    ),
    *(
        (text, "B")
        for text in ("It's B, I'm sure.", "It’s B, I’m sure.", "__B__", "`B`", "b) Paris", "I pick B since it fits")
    ),
    *(
        (text, "B")
        for text in ("The answer is $B$.", r"The answer is \(B\).", '{"answer": "B"}', "答案是B", "I choose (B)")
    ),
    *(
        (text, "D")
        for text in ("Answer: Option D", "The answer is clearly D.", "故选D。", "So it must be D.", "Correct: D")
    ),
    ("A because B is wrong", "A"),
    # The conclusion counts, not what is denied, doubted or mentioned after it:
    ("The final answer is C. (A common mistake is to answer A)", "C"),
    ("The correct answer is C.\n\nThe answer A is tempting, but no.", "C"),
    ("The answer is D. Some would say the answer is A.", "D"),
    ("Some would say the answer is A, but the answer is D.", "D"),
    ("It is tempting to say the answer is A, but the answer is C.", "C"),
    ("I thought the answer was A, but the answer is C.", "C"),
    ("If x were 2, the answer would be A. Here x is 3, so the answer is B.", "B"),
    ("The answer is A? No, C.", "C"),
    ("A? B? Hmm. C.", "C"),
    ("The answer is B. Wait, actually it's C.", "C"),
    ("Option A is wrong. Option B is right.", "B"),
    ("Since A is wrong, the answer is C.", "C"),
    ("The answer is not A but B.", "B"),
    ("Not A, but B.", "B"),
    ("Rule out A. Answer: B", "B"),
    ("I would say the answer is B.", "B"),
    ("The answer is A.\n\nExplanation: B is too small, C is too large.", "A"),
    # Several letters, of which one is chosen:
    ("The answer is C, A is wrong.", "C"),
    ("The answer is C and A is wrong.", "C"),
    ("The answer is B, C and D are wrong.", "B"),
    ("Answer: B\n\nA, C and D are wrong.", "B"),
    ("The answer is B; not A, C or D.", "B"),
    ("The answer is B and I am sure.", "B"),
    ("A and B are wrong, so C", "C"),
    ("B and C are wrong. D", "D"),
    ("Between A and B, B is better.", "B"),
    ("The answer is A or B. I'd go with B.", "B"),
    ("B or C? I'd say C.", "C"),
    ("(D) None of A, B or C", "D"),
    ("A) Paris\nB) Rome\n\nB", "B"),
    ("<think>The answer is B</think> C", "C"),
    ("The answer is B\n</think>\nThe answer is C", "C"),
]

NO_CHOICES = [
    *("A dog is an animal", "I believe it is a cat", "a bird", "I'm not sure", "none of them", "", "Because", "Xenon"),
    *("ABCD", "A, B", "A B C D", "A or B", "A/B", "A & C", "A and B are both correct.", "A or B is correct", "A OR B"),
    *(
        "The answer is either A or B.",
        "The answer is A or B.",
        "The answer is (A) or (B).",
        "Answer: A and C",
        "A, C, D",
    ),
    *(
        "The answer could be A, B or C.",
        "Answer: A or, more likely, B",
        r"\boxed{A, B}",
        "I cannot decide between A and B.",
    ),
    *(
        "Not A",
        "The answer is not A.",
        "Neither A nor B.",
        "Option A is not correct.",
        "I eliminate A.",
        "Is the answer A?",
    ),
    *("A) Paris\nB) Rome\nC) Oslo", "Option A: Paris\nOption B: Rome", "The answer is unclear", "Answer: none of them"),
    *("<think>The answer is A</think> I do not know.", "<think>A</think>"),
]


class TestChoice:
    @pytest.mark.parametrize(("answer", "letter"), CHOICES, ids=[repr(answer)[:50] for answer, _ in CHOICES])
    def test_the_letter_is_found_in_every_usual_phrasing(self, tmp_path: Path, answer: Any, letter: Any) -> None:
        verdict = grade(tmp_path, {"type": "choice"}, answer, expected=letter)
        assert (verdict.details, verdict.score) == ({"found": letter}, 1)

    @pytest.mark.parametrize("answer", NO_CHOICES)
    def test_an_article_a_hedge_or_a_list_of_options_is_not_a_choice(self, tmp_path: Path, answer: str) -> None:
        verdict = grade(tmp_path, {"type": "choice"}, answer, expected="A")
        assert (verdict.score, verdict.details) == (0, {"found": None})

    @pytest.mark.parametrize(
        ("expected", "right"),
        [("B", True), ("b", True), ("(B)", True), ("B.", True), (1, True), ("1", True), ("C", False)],
    )
    def test_the_expected_choice_is_a_letter_or_a_position(
        self, tmp_path: Path, expected: int | str, right: bool
    ) -> None:
        assert score(tmp_path, {"type": "choice"}, "B", expected=expected) == float(right)

    @pytest.mark.parametrize("expected", ["b", 1])
    def test_lowercase_letters_can_be_choices(self, tmp_path: Path, expected: int | str) -> None:
        assert score(tmp_path, {"type": "choice", "choices": "abcd"}, "B", expected=expected) == 1

    @pytest.mark.parametrize("expected", ["Paris", "", "Z", "AB", 17, "²"])
    def test_an_invalid_expected_choice_is_an_error_and_not_a_score(self, tmp_path: Path, expected: int | str) -> None:
        error = grade(tmp_path, {"type": "choice", "choices": "ABCD"}, "A", expected=expected)
        assert isinstance(error, AttemptError) and not error.retry and "not a letter of ABCD" in error.message

    def test_only_the_letters_named_count(self, tmp_path: Path) -> None:
        assert (
            grade(tmp_path, {"type": "choice", "choices": "AB"}, "The answer is C", expected="A").details["found"]
            is None
        )

    @pytest.mark.parametrize(
        "answer",
        [
            *("answer" + 40 * ":", "answer" + 40_000 * ": ", 20_000 * "the answer is ", 40_000 * "*", 90_000 * "\n"),
            *(
                30_000 * r"\text{",
                30_000 * "A, B. ",
                30_000 * "A or B ",
                30_000 * "A is wrong. ",
                30_000 * "A) x\nB) y\n",
            ),
        ],
        ids=lambda answer: repr(answer[:9]),
    )
    def test_an_answer_of_nothing_but_marks_is_looked_through_at_once(self, tmp_path: Path, answer: str) -> None:
        """A pattern that tries every way to split the marks never comes back from the first of these."""
        assert grade(tmp_path, {"type": "choice"}, answer, expected="A").details == {"found": None}

    @given(st.text(max_size=200))
    def test_no_answer_breaks_the_choice_grader(self, answer: Any) -> None:
        letter = Choice(ChoiceGrader(type="choice"), cast("Origin", None))._reader.find(answer)
        assert letter is None or letter in "ABCDEFGHIJ"


class TestNumber:
    @pytest.mark.parametrize(
        ("answer", "expected", "right"),
        [
            ("first 1, then 42", "42", True),
            ("42 apples of 50", "42", False),
            ("$1,234.50", "1234.5", True),
            ("5.0", "5", True),
            ("12345678901234567890123456789013", "12345678901234567890123456789012", False),
            ("no number", "42", False),
            ("the result is 7 or 1e9999999", "7", False),
            ("1080", r"1{,}080", True),
            ("1 1/3", "4/3", True),
        ],
    )
    def test_the_last_number_counts(self, tmp_path: Path, answer: str, expected: str, right: bool) -> None:
        assert score(tmp_path, {"type": "number"}, answer, expected=expected) == float(right)

    @pytest.mark.parametrize(
        ("after", "answer", "right"),
        [
            ("####", "1 + 1 #### 2 and 5 more", True),
            ("####", "#### 3 no, #### 2", True),
            ("####", "2", False),
            ("####", "#### none", False),
            (r"(?i)answer:?\s*", "ANSWER: 2", True),
        ],
    )
    def test_after_takes_the_first_number_after_the_last_match(
        self, tmp_path: Path, after: str, answer: str, right: bool
    ) -> None:
        assert score(tmp_path, {"type": "number", "after": after}, answer, expected=2) == float(right)

    @pytest.mark.parametrize(
        ("block", "answer", "right"),
        [
            ({"tolerance": 0.1}, "0.3", True),
            ({"tolerance": 0.1}, "0.301", False),
            ({"tolerance": 0.1}, "0.1", True),
            ({"tolerance": 0.5, "relative": True}, "0.3", True),
            ({"tolerance": 0.5, "relative": True}, "0.31", False),
            ({"tolerance": 0.5, "relative": True, "expected": -0.2}, "-0.3", True),
        ],
    )
    def test_a_tolerance_is_absolute_or_a_share_and_has_no_rounding_error(
        self, tmp_path: Path, block: Any, answer: str, right: bool
    ) -> None:
        assert score(tmp_path, {"type": "number", **block}, answer, expected=0.2) == float(right)

    @pytest.mark.parametrize("expected", ["many", ""])
    def test_an_expected_value_that_is_not_a_number_is_an_error_and_not_a_score(
        self, tmp_path: Path, expected: str
    ) -> None:
        error = grade(tmp_path, {"type": "number"}, "5", expected=expected)
        assert isinstance(error, AttemptError) and "is not a number" in error.message

    def test_the_expected_number_may_be_cut_out_of_a_field(self, tmp_path: Path) -> None:
        block = {"type": "number", "expected": "{{ answer.split('####')[1] }}"}
        assert score(tmp_path, block, "so 18", answer="9 * 2 = 18\n#### 18") == 1
        error = grade(tmp_path, block, "so 18", answer="no mark")
        assert isinstance(error, AttemptError) and "cannot render" in error.message

    def test_no_part_of_a_number_that_can_be_read_in_two_ways_counts(self, tmp_path: Path) -> None:
        for expected in (1, 80, 1080):
            verdict = grade(tmp_path, {"type": "number"}, "It is 1 080.", expected=expected)
            assert (verdict.score, verdict.details) == (0, {"found": None})
            assert verdict.feedback == "'1 080' can be read in more than one way"

    def test_an_expected_value_that_can_be_read_in_two_ways_is_an_error(self, tmp_path: Path) -> None:
        error = grade(tmp_path, {"type": "number"}, "1.23", expected="1,23")
        assert isinstance(error, AttemptError) and "'1,23' can be read in more than one way" in error.message
        with pytest.raises(ConfigError, match="'1,23' can be read in more than one way; write it without separators"):
            load(tmp_path, graders=[{"type": "number", "expected": "1,23"}])


SCHEMA = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}


class TestJsonSchema:
    def test_an_open_fence_and_many_empty_lines_are_read_in_no_time(self, tmp_path: Path) -> None:
        block = {"type": "json_schema", "schema": SCHEMA, "extract": True}
        assert score(tmp_path, block, "```json" + "\n" * 500_000) == 0

    def test_a_number_of_thousands_of_digits_is_not_reported_as_invalid_json(self, tmp_path: Path) -> None:
        verdict = grade(tmp_path, {"type": "json_schema", "schema": {"type": "integer"}}, "1" * 100_000)
        assert verdict.score == 0 and verdict.feedback.startswith("a number is too large to be checked")
        assert score(tmp_path, {"type": "json_schema", "schema": {"type": "integer"}}, "1" * 400) == 1

    @pytest.mark.parametrize(
        ("answer", "extract", "right"),
        [
            ('{"name": "x"}', False, True),
            (' {"name": "x"}\n', False, True),
            ('{"name": 5}', False, False),
            ("{}", False, False),
            ("not JSON", False, False),
            ("", False, False),
            ('Here: {"name": "x"} ok', False, False),
            ('Here: {"name": "x"} ok', True, True),
            ('```json\n{"name": "x"}\n```', True, True),
            ('```\n{"name": "x"}\n```\nbye {', True, True),
            ("no braces", True, False),
            ('Use {braces}. {"name": "x"}', True, True),
            (r'$\frac{1}{2}$ {"name": "x"}', True, True),
            ('<think>{"name": 5}</think>{"name": "x"}', True, True),
            ('<think>{"name": "x"}</think>{"name": 5}', True, False),
            ('Draft:\n```json\n{"name": 5}\n```\nFinal:\n```json\n{"name": "x"}\n```', True, True),
            ('Draft:\n```json\n{"name": "x"}\n```\nFinal:\n```json\n{"name": 5}\n```', True, False),
            ('```json\n{"name": 5}\n```\nNo. The final answer: {"name": "x"}', True, True),
            ('```json\n{"name": "x"}\n```\nWrite {} if it is empty, see [1].', True, True),
            ('```python\nx = {"name": 5}\n```\n```json\n{"name": "x"}\n```', True, True),
            ('```json\n{"name": "x"}\n```\nRun it:\n```bash\necho {}\n```', True, True),
            ('```json\n{"name": "x"}', True, True),
            ('first {"name": 5} then {"name": "x"}', True, True),
            ('first {"name": "x"} then {"name": 5}', True, False),
            ('first {"name": "x"} then {"name": "cut o', True, False),
            ('[1] {"name": "x"} [2, 3]', True, True),
            ('{"inner": {"name": "x"}, oops}', True, False),
            ('`{"name": "x"}`', True, True),
            ("[" * 100_000, False, False),
            *((text * 100_000, True, False) for text in ("{", "[", '{"a', '{"a":', "[1] ", "```\n", "{a ")),
        ],
        ids=lambda value: repr(value)[:40],
    )
    def test_the_answer_is_json_and_fits(self, tmp_path: Path, answer: str, extract: bool, right: bool) -> None:
        assert score(tmp_path, {"type": "json_schema", "schema": SCHEMA, "extract": extract}, answer) == float(right)

    def test_the_first_misfit_is_in_the_feedback(self, tmp_path: Path) -> None:
        assert (
            '"name" is a required property' in grade(tmp_path, {"type": "json_schema", "schema": SCHEMA}, "{}").feedback
        )

    def test_a_schema_may_stand_in_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "s.json").write_text(json.dumps(SCHEMA))
        assert score(tmp_path, {"type": "json_schema", "schema_file": "s.json"}, '{"name": "x"}') == 1

    @pytest.mark.parametrize(
        ("block", "content", "words"),
        [
            ({"schema": {"type": "nonsense"}}, None, "not a JSON Schema"),
            ({"schema": {"$ref": "#/nowhere"}}, None, "not a JSON Schema"),
            ({"schema": {"$ref": "http://127.0.0.1:9/far.json"}}, None, "is not fetched"),
            ({"schema_file": "s.json"}, None, "cannot be read: No such file"),
            ({"schema_file": "s.json"}, "{", "not a JSON Schema"),
            ({"schema_file": "s.json"}, "[]", "not an object"),
            ({"schema_file": "../s.json"}, "{}", "is outside the eval file's folder"),
            ({"schema_file": "/etc/hostname"}, "{}", "is outside the eval file's folder"),
        ],
        ids=str,
    )
    def test_an_invalid_schema_is_refused(self, tmp_path: Path, block: Any, content: str | None, words: str) -> None:
        folder = tmp_path / "inner"
        folder.mkdir()
        if content is not None:
            for place in (tmp_path, folder):
                (place / "s.json").write_text(content)
        with pytest.raises(ConfigError, match=words):
            build_graders(load(folder, graders=[{"type": "json_schema", **block}]))


CHECKS = """\
import asyncio
import math
from holdfast import Verdict

def yes(output): return True
def no(output): return False
def number(output): return 0.25
def one(output): return 1
def verdict(output): return Verdict(0.5, "half", {"k": [1]})
def skip(output): return Verdict(None, "not for this one")
def mapping(output): return {"score": 0.75, "feedback": "good", "length": len(output)}
def passed(output): return {"passed": True, "reason": "since"}
async def waits(output):
    await asyncio.sleep(0)
    return output == "the answer"
def returns_coroutine(output): return waits(output)
def sees(output, sample, messages, expected):
    return output == "the answer" and sample["q"] == "Q" and messages[-1]["content"] == output and expected == "E"
def everything(**all): return set(all) >= {"output", "sample", "messages", "expected"}
def verl(solution_str, ground_truth, extra_info):
    return solution_str == "the answer" and ground_truth == "E" and extra_info["q"] == "Q"
def verl_short(solution_str, ground_truth=None, extra_info=None): return ground_truth == "E"
def optional(output, strictness=3): return strictness / 10
class Checker:
    @staticmethod
    def check(output): return True
    def __call__(self, output): return True
instance = Checker()

def raises(output): raise KeyError("lost")
def stops(output): raise StopIteration
def exits(output): raise SystemExit(3)
async def exits_later(output): raise SystemExit(4)
def cancels(output): raise asyncio.CancelledError
async def cancels_later(output): raise asyncio.CancelledError
def interrupts(output): raise KeyboardInterrupt
async def interrupts_later(output): raise KeyboardInterrupt
def none(output): return None
def nan(output): return math.nan
def infinite(output): return math.inf
def two(output): return 2
def negative(output): return -0.1
def text(output): return "0.5"
def listed(output): return [1]
def skips(output): return {"score": None, "reason": "not for this one"}
def as_bytes(output): return b"1"
def empty(output): return {}
def misspelt(output): return {"scores": 0.0, "reason": "wrong"}
def undecided(output): return {"passed": None}
def half_passed(output): return {"passed": 0.5}
def said_passed(output): return {"passed": "yes"}
def wild(output): return Verdict(5)
def unkeepable(output): return Verdict(1, "", object())
def surrogate(output): return Verdict(1, "\\ud800")
def unkeepable_dict(output): return {"score": 1, "model": object}
"""


@pytest.fixture
def checks(tmp_path: Path) -> Any:
    (tmp_path / "checks.py").write_text(CHECKS)
    return tmp_path


def by_function(folder: Path, name: Any, **more: Any) -> Any:
    return grade(folder, {"type": "python", "function": f"checks.py:{name}", **more}, "the answer", q="Q", expected="E")


class TestPython:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("yes", 1),
            ("no", 0),
            ("number", 0.25),
            ("one", 1),
            ("verdict", 0.5),
            ("mapping", 0.75),
            ("passed", 1),
            ("waits", 1),
            ("returns_coroutine", 1),
            ("sees", 1),
            ("everything", 1),
            ("verl", 1),
            ("verl_short", 1),
            ("optional", 0.3),
            ("Checker.check", 1),
            ("instance", 1),
            ("skip", None),
            ("skips", None),
        ],
    )
    def test_the_result_of_a_function_is_the_score(self, checks: Any, name: str, expected: float | int | None) -> None:
        verdict = by_function(checks, name)
        assert not isinstance(verdict, AttemptError), verdict
        assert verdict.score == expected

    def test_feedback_and_details_are_kept(self, checks: Any) -> None:
        assert by_function(checks, "verdict").feedback == "half"
        assert by_function(checks, "verdict").details == {"k": [1]}
        assert (by_function(checks, "mapping").feedback, by_function(checks, "mapping").details) == (
            "good",
            {"length": 10},
        )
        assert by_function(checks, "passed").feedback == "since"

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("raises", "KeyError: 'lost'"),
            ("stops", "StopIteration"),
            ("exits", "sys.exit(3)"),
            ("exits_later", "sys.exit(4)"),
            ("cancels", "raised CancelledError"),
            ("cancels_later", "cancelled from inside"),
            ("interrupts", "raised KeyboardInterrupt"),
            ("interrupts_later", "raised KeyboardInterrupt"),
            ("none", "returned None"),
            ("nan", "from 0 to 1"),
            ("infinite", "from 0 to 1"),
            ("two", "not 2"),
            ("negative", "not -0.1"),
            ("text", "not '0.5'"),
            ("listed", "not [1]"),
            ("wild", "not 5"),
            ("as_bytes", "not b'1'"),
            ("empty", "neither `score` nor `passed`, but no keys; to skip an output"),
            ("misspelt", "neither `score` nor `passed`, but 'scores', 'reason'; to skip"),
            ("undecided", "`passed` must be true or false, not None"),
            ("half_passed", "`passed` must be true or false, not 0.5"),
            ("said_passed", "`passed` must be true or false, not 'yes'"),
            ("unkeepable", "cannot be serialized as JSON"),
            ("unkeepable_dict", "cannot be serialized as JSON"),
            ("surrogate", "cannot be serialized as JSON"),
        ],
    )
    def test_an_invalid_verdict_is_an_error_and_not_a_score(self, checks: Any, name: str, words: str) -> None:
        error = by_function(checks, name)
        assert isinstance(error, AttemptError), error
        assert error.kind == "grader" and not error.retry and words in error.message

    def test_params_and_expected_come_from_the_file(self, checks: Any) -> None:
        assert by_function(checks, "optional", params={"strictness": 7}).score == 0.7
        assert by_function(checks, "verl_short", expected="{{ q }}").score == 0

    @pytest.mark.parametrize(
        ("row", "expected"), [({"answer": "E"}, 1), ({"answer": "x", "expected": "E"}, 1), ({"other": 1}, 0)]
    )
    def test_the_expected_value_is_the_rows_expected_or_its_answer(self, checks: Any, row: Any, expected: int) -> None:
        assert score(checks, {"type": "python", "function": "checks.py:verl_short"}, "x", **row) == expected

    @given(
        st.floats(allow_nan=True)
        | st.integers()
        | st.booleans()
        | st.none()
        | st.text(max_size=3)
        | st.lists(st.none())
    )
    def test_only_numbers_from_nought_to_one_are_scores(self, value: Any) -> None:
        try:
            verdict = as_verdict(value, 0.5)
        except AttemptError:
            assert not (isinstance(value, int | float) and 0 <= value <= 1)
        else:
            assert isinstance(value, int | float) and verdict.score == value and 0 <= verdict.score <= 1


def test_a_bug_in_a_built_in_grader_stops_neither_the_run_nor_other_graders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    async def broken_later(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("holdfast.graders.text.Exact.check", broken)
    monkeypatch.setattr("holdfast.graders.judge.Judge.judge", broken_later)
    run = holdfast.evaluate(
        name="e",
        samples=[{"id": str(number), "expected": "2"} for number in range(30)],
        prompt="{{ id }}",
        target={"command": ["echo", "2"]},
        graders=[{"type": "exact"}, {"type": "number"}, {**JUDGE, "rubric": "r", "base_url": "http://127.0.0.1:9/v1"}],
        runs_dir=tmp_path / "runs",
        accept_errors=True,
    )
    numbers = {name: (numbers.passed, numbers.errors) for name, numbers in run.metrics.graders.items()}
    assert numbers == {"exact": (0, 30), "number": (30, 0), "judge": (0, 30)}


def test_reasoning_that_graders_see_is_named_in_a_notice(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "name": "e",
        "samples": [{"id": "a", "question": "?", "expected": "C"}],
        "prompt": "{{ question }}",
        "graders": [{"type": "choice"}, {"type": "exact"}],
        "runs_dir": tmp_path / "runs",
    }
    with server(answer="<think>The answer is B</think>\nC") as mock:
        target = {"model": "m", "base_url": mock.base_url}
        run = holdfast.evaluate(target=target, **keys)
        assert {name: each.score for name, each in run.metrics.graders.items()} == {"choice": 1, "exact": 0}
        (notice,) = run.metrics.notices
        assert notice.startswith("1 of 1 replies contain </think>") and "target.strip_reasoning: true" in notice
        run = holdfast.evaluate(target={**target, "strip_reasoning": True}, **keys)
        assert run.score == 1 and run.metrics.notices == []


class TestThresholds:
    @pytest.mark.parametrize(
        ("block", "expected"),
        [
            ({"type": "exact"}, 1.0),
            ({"type": "text", "contains": "x"}, 1.0),
            ({"type": "similarity"}, 0.8),
            ({"type": "python", "function": "f.py:f"}, 0.5),
            ({"type": "prompt", "rubric": "r"}, 0.5),
            ({"type": "prompt", "rubric": "r", "threshold": 0.9}, 0.9),
            ({"type": "exact", "threshold": 0}, 0),
        ],
    )
    def test_default_thresholds_are_1_for_checks_and_less_for_estimates(
        self, tmp_path: Path, block: Any, expected: float | int
    ) -> None:
        assert threshold(load(tmp_path, graders=[block]).graders[0]) == expected


JUDGE = {
    "type": "prompt",
    "name": "judge",
    "rubric": "Is {{ output }} what {{ question }} asks for?",
    "model": "judge-model",
}


def judged(folder: Path, base_url: Any, *, judge: Any = JUDGE, **keys: Any) -> Any:
    return holdfast.evaluate(
        name="judged",
        samples=[{"id": "a", "question": "one"}, {"id": "b", "question": "two"}],
        prompt="{{ question }}",
        target={"command": ["echo", "said"]},
        graders=[{**judge, "base_url": base_url}],
        runs_dir=folder / "runs",
        **keys,
    )


class TestJudge:
    def test_a_judges_score_and_reason_are_the_grade_and_its_call_is_counted(self, tmp_path: Path) -> None:
        with server(answer="judge") as mock:
            run = judged(tmp_path, mock.base_url)
            assert run.score == 1 and mock.requests == 2
            prompts = list(mock.stats()["asked"])
            marked = r"<rubric-(\w{16})>\nIs said what .*\n</rubric-\1>\n\n<answer-\1>\nsaid\n</answer-\1>"
            assert all(re.fullmatch(marked, prompt) for prompt in prompts)
            first = lines(run.path / "grades.jsonl")[0]
            assert (first["status"], first["feedback"], first["type"]) == ("passed", "as told", "prompt")
            assert first["usage"]["requests"] == 1 and first["details"]["judge"] == "judge-model"
            assert run.metrics.judge_usage.requests == 2
            assert judged(tmp_path, mock.base_url).finished and mock.requests == 2, "a grade is kept like an output"

    def test_a_judge_that_talks_nonsense_is_shown_its_mistake_once_and_is_then_an_error(self, tmp_path: Path) -> None:
        with server(answer="I like it") as mock:
            run = judged(tmp_path, mock.base_url)
            assert not run.finished and run.exit_code == 3
            assert mock.requests == 4, "each asked once, and once more with its mistake"
            grades = lines(run.path / "grades.jsonl")
            assert [(entry["status"], entry["score"]) for entry in grades] == [("error", None)] * 2
            assert "no score from 0 to 1" in grades[0]["feedback"]
            failed = lines(run.path / "errors.jsonl")
            assert [(entry["where"], entry["final"], entry["attempt"]) for entry in failed] == [("judge", True, 1)] * 2
            assert [entry["usage"]["requests"] for entry in failed] == [2, 2], "both were paid for"
            assert len(lines(run.path / "outputs.jsonl")) == 2, "what was said is kept"
            judged(tmp_path, mock.base_url)
            assert [entry["attempt"] for entry in lines(run.path / "errors.jsonl")] == [1, 1, 2, 2]
            mock.control(answer="judge")
            again = judged(tmp_path, mock.base_url)
            assert again.finished and again.metrics.coverage == 1 and mock.requests == 10
            assert len(lines(run.path / "outputs.jsonl")) == 2, "nothing is generated again"

    def test_a_judge_with_transcript_all_sees_the_whole_conversation(self, tmp_path: Path) -> None:
        with server(answer="judge") as mock:
            judged(tmp_path, mock.base_url, judge={**JUDGE, "transcript": "all"})
            shown = r"\[user (\w{16})\]\none\n\n\[assistant \1\]\nsaid\n</answer-\1>"
            assert any(re.search(shown, prompt) for prompt in mock.stats()["asked"])
