"""Regular expressions: Python's verdicts, RE2's speed, and no pattern that can freeze a run."""

from __future__ import annotations

import json
import re
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.graders.types import Verdict
from holdfast.spec.regex import Slow, compile_regex
from tests.support.running import lines
from tests.support.specs import grade

if TYPE_CHECKING:
    from pathlib import Path

CATASTROPHE = "a" * 60 + "!"
"""on which `(a+)+$` takes Python's `re` longer than the sun will last"""

ATOMS = [
    *("a", "b", "i", "K", "ß", "é", "ſ", "İ", "µ", "-", r"\.", r"\n", "."),
    *(r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"\b", "^", "$", r"\A", r"\Z"),
    *("[ab]", "[^a]", r"[^\w]", "[a-k]", "[^i]", r"[\s\d]", "[À-ɏ]", r"[\D]", r"[^\W\d]"),
]
REPEATS = ["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{0,2}?", "{,2}", "{2,}"]


def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Patterns made of patterns."""
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        inner.map(lambda one: f"(?:|{one})"),
        st.tuples(st.sampled_from(["", "?i:", "?s:", "?m:", "?-i:"]), inner).map(lambda two: f"({two[0]}{two[1]})"),
        st.tuples(inner, st.sampled_from(REPEATS)).map(lambda two: f"(?:{two[0]}){two[1]}"),
    )


PATTERNS = st.tuples(
    st.sampled_from(["", "", "(?i)", "(?m)", "(?s)", "(?a)"]),
    st.recursive(st.sampled_from(ATOMS), grown, max_leaves=6),
).map("".join)
TEXTS = st.text(alphabet="aabbiIkKſßéÉ\u212a09 \n\n.-xX_İıµμ٣漢”\x1c\x0b\u00a0\u0301", max_size=8)


def groups_of_last_match(pattern: re.Pattern[str], text: str) -> tuple[str, ...] | None:
    """The last element of `findall`, as a tuple."""
    matches = pattern.findall(text)
    last = matches[-1] if matches else None
    return (last,) if isinstance(last, str) else last


@settings(max_examples=200, deadline=None)
@given(PATTERNS, TEXTS, st.booleans())
def test_re2_says_what_python_says(pattern: str, text: str, ignore_case: bool) -> None:
    regex = compile_regex(pattern, ignore_case=ignore_case)
    python = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    checked = False
    for question, answer in (
        (regex.search, python.search(text) is not None),
        (regex.last_end, max((match.end() for match in python.finditer(text)), default=None)),
        (regex.count, len(python.findall(text))),
        (lambda text: regex.find(text, -1), groups_of_last_match(python, text)),
        (regex.remove, python.sub("", text)),
    ):
        try:
            assert question(text) == answer
            checked = True
        except Slow:  # left to Python's own `re`
            continue
    assume(checked)


@given(st.text(alphabet="ab(|)[]?i:\\^pz{}2,", max_size=12), st.sampled_from(["python", "re2"]))
def test_every_pattern_is_compiled_or_rejected_by_name(pattern: str, dialect: Any) -> None:
    try:
        compile_regex(pattern, dialect=dialect)
    except ValueError as error:
        assert repr(pattern) in str(error)


@pytest.mark.parametrize(
    "pattern", ["(", "a(?i", r"(?=a)\z", "[[:nonsense:]]", r"\p{Nonsense}", r"(((a{99}){99}){99})\z"]
)
def test_patterns_that_neither_python_nor_re2_can_read_are_rejected_with_both_reasons(pattern: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(pattern))) as caught:
        compile_regex(pattern)
    assert "RE2: " in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "fits", "misses"),
    [
        ("a(?i)b", "aB", "AB"),
        ("x(a(?i)b)c", "xaBc", "xaBC"),
        ("a(?i)b|c", "C", "A"),
        ("a(?s).b", "a\nb", "ab"),
        (r"\((?i)b", "(B", "B"),
        ("a(?i)b(?-i)c", "aBc", "aBC"),
        ("x[[:space:]]y", "x y", "xy"),
        ("^[[:^alpha:]]$", "1", "a"),
        (r"^\pL+$", "Straße", "a1"),
        (r"a\z", "a", "a\n"),
        (r"\Qa.b\E", "a.b", "acb"),
        ("(?U)^a+$", "aa", "b"),
    ],
)
def test_patterns_that_only_re2_can_read_have_the_meaning_of_re2(pattern: str, fits: str, misses: str) -> None:
    regex = compile_regex(pattern)
    assert regex.search(fits) and not regex.search(misses)


@pytest.mark.parametrize(
    ("pattern", "text", "python", "go"),
    [
        (r"^\w+$", "é", True, False),
        (r"^\d$", "٣", True, False),
        (r"a\sb", "a\u00a0b", True, False),
        (r"a\sb", "a\x0bb", True, False),
        ("a$", "a\n", True, False),
        ("^x{,2}$", "xx", True, False),
        ("^caf.$", "café", True, True),
    ],
)
def test_the_dialect_decides_what_both_can_read(pattern: str, text: str, python: bool, go: bool) -> None:
    assert compile_regex(pattern).search(text) is python
    assert compile_regex(pattern, dialect="re2").search(text) is go


CALLED = {
    "messages": [
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "shell", "arguments": json.dumps({"command": "rm -rf é"})}}],
        }
    ]
}


@pytest.mark.parametrize(
    ("block", "right", "wrong"),
    [
        ({"type": "text", "regex_match": "(?<!not )allowed"}, "is allowed", "is not allowed"),
        ({"type": "text", "regex_match": r"^(\w)\w*\1$"}, "otto", "otta"),
        ({"type": "text", "regex_match": r"\bcafé\b"}, "un café noir", "caféteria"),
        ({"type": "text", "regex_match": "x{1500}"}, "x" * 1500, "x" * 1499),
        ({"type": "text", "regex_match": "^[^a]$"}, "\ud800", "a\ud800"),
        ({"type": "number", "expected": 2, "after": r"(?<!not )sum\b"}, "not sum 1 sum 2 not sum 3", "sum 3"),
        ({"type": "number", "expected": 2, "after": "sum"}, "sum 1 ü sum 2", "sum 2 sum 1"),
        ({"type": "file", "content_patterns": [{"path": "f", "must_match": ["(?<!not )odd"]}]}, "odd", "not odd"),
    ],
    ids=str,
)  # fmt: skip
def test_patterns_that_re2_cannot_match_are_matched_by_a_worker(
    tmp_path: Path, block: dict[str, Any], right: str, wrong: str
) -> None:
    for answer, score in ((right, 1), (wrong, 0)):
        files = {"f": answer} if block["type"] == "file" else None
        verdict = grade(tmp_path, block, answer, files=files)
        assert isinstance(verdict, Verdict), verdict
        assert verdict.score == (score or (0.5 if files else 0))


@pytest.mark.parametrize(("pattern", "score"), [(r"(?<=-)rf\s\w", 1), (r"(?<=-)fr", 0)])
def test_patterns_of_arguments_are_matched_by_a_worker(tmp_path: Path, pattern: str, score: int) -> None:
    block = {
        "type": "tool_calls",
        "expect": [{"tool": {"pattern": "(?=s)shell"}, "args": {"command": {"regex": pattern}}}],
    }
    verdict = grade(tmp_path, block, "done", fields=CALLED)
    assert isinstance(verdict, Verdict) and verdict.score == score


def test_a_pattern_that_backtracks_for_ever_in_python_is_answered(tmp_path: Path) -> None:
    verdict = grade(tmp_path, {"type": "text", "regex_match": ["^(a+)+$", "^(a|a)*$"]}, CATASTROPHE)
    assert isinstance(verdict, Verdict) and verdict.score == 0


def test_a_pattern_that_takes_too_long_is_an_error_only_of_that_grade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.spec.regex.MATCH_SECONDS", 0.5)
    run = holdfast.evaluate(
        name="patterns",
        samples=[{"id": "bad", "say": CATASTROPHE}, {"id": "good", "say": "aaa"}],
        prompt="{{ say }}",
        target={"command": ["echo", "-n", "{{ prompt }}"]},
        graders=[
            {"type": "text", "name": "boom", "regex_match": "^(?=a)(a+)+$"},
            {"type": "text", "name": "calm", "regex_match": "^(a+)+$"},
        ],
        limits={"turn_timeout": 60},
        runs_dir=tmp_path / "runs",
        accept_errors=True,
    )
    grades = {(one["sample"], one["grader"]): one for one in lines(run.path / "grades.jsonl")}
    assert {at: one["status"] for at, one in grades.items()} == {
        ("bad", "boom"): "error",
        ("bad", "calm"): "failed",
        ("good", "boom"): "passed",
        ("good", "calm"): "passed",
    }
    (failed,) = lines(run.path / "errors.jsonl")
    assert (failed["where"], failed["kind"]) == ("boom", "timeout")
    assert failed["message"].startswith("the pattern took longer than 0.5 s")


def test_a_checkpoint_with_a_slow_pattern_stops_the_conversation(tmp_path: Path) -> None:
    run = holdfast.evaluate(
        name="patterns",
        samples=[{"id": "a", "say": "no"}],
        prompt="{{ say }}",
        follow_ups=["more"],
        target={"command": ["echo", "-n", "{{ prompt }}"]},
        checkpoints=[
            {"after_turn": 1, "on_failure": "stop", "graders": [{"type": "text", "regex_match": "(?<!n)o"}]}
        ],
        runs_dir=tmp_path / "runs",
    )  # fmt: skip
    assert [one["turns"] for one in lines(run.path / "outputs.jsonl")] == [1]


def test_a_long_text_and_a_large_pattern_are_matched_elsewhere() -> None:
    regex = compile_regex("[ab]*a[ab]{500}c")
    assert not regex.search("ab" * 100)
    with pytest.raises(Slow):
        regex.search("ab" * 100_000)


def test_patterns_cause_no_warnings() -> None:
    with warnings.catch_warnings(action="error"):
        assert compile_regex("[[a]").search("[")
