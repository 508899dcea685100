"""The grader of likelihoods: which continuation is the most likely one, by lm-eval's rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast.errors import AttemptError
from holdfast.graders.types import Verdict
from tests.support.specs import grade

if TYPE_CHECKING:
    from pathlib import Path

ENDINGS = [" a", " long ending", " größer"]


def judge(
    folder: Path, logprobs: list[float], greedy: tuple[int, ...] = (), tokens: int = 2, /, row: Any = None, **keys: Any
) -> Verdict | AttemptError:
    """The verdict on likelihoods of three endings."""
    entries = [
        {"logprob": value, "greedy": place in greedy, "tokens": tokens + place} for place, value in enumerate(logprobs)
    ]
    output_fields = {"messages": [{"role": "assistant", "content": "x", "likelihoods": entries}]}
    fields = {"endings": ENDINGS, "expected": 1, **(row or {})}
    return grade(folder, {"type": "likelihood", **keys}, "x", output_fields, **fields)


@pytest.mark.parametrize(
    ("logprobs", "normalize", "chosen"),
    [
        ([-1.0, -2.0, -3.0], "none", 0),
        ([-2.0, -1.0, -1.0], "none", 1),  # the first of equals
        ([-1.0, -10.0, -7.0], "chars", 1),  # 1/1, 10/11, 7/6
        ([-1.0, -12.0, -7.6], "bytes", 2),  # 1/1, 12/11, 7.6/8
        ([-3.0, -4.0, -4.0], "tokens", 2),  # 3/2, 4/3, 4/4
    ],
)
def test_the_largest_likelihood_counts_by_the_length_of_its_text(
    tmp_path: Path, logprobs: list[float], normalize: str, chosen: int
) -> None:
    for expected in range(3):
        verdict = judge(tmp_path, logprobs, normalize=normalize, expected=expected)
        assert isinstance(verdict, Verdict)
        assert (verdict.score, verdict.details) == (float(expected == chosen), {"chosen": chosen})
        if expected != chosen:
            bare = [ending.strip() for ending in ENDINGS]
            assert verdict.feedback == f"chose {bare[chosen]!r}, expected {bare[expected]!r}"


@pytest.mark.parametrize("expected", [1, "1", "long ending", [0, "long ending"], "{{ expected }}", "{{ [expected] }}"])
def test_the_right_one_is_a_position_a_text_or_several(tmp_path: Path, expected: Any) -> None:
    verdict = judge(tmp_path, [-2.0, -1.0, -3.0], expected=expected)
    assert isinstance(verdict, Verdict) and verdict.score == 1


def test_greedy_looks_only_at_the_right_continuation(tmp_path: Path) -> None:
    right = judge(tmp_path, [-1.0, -9.0, -9.0], (1,), greedy=True)
    wrong = judge(tmp_path, [-9.0, -1.0, -9.0], (0, 2), greedy=True)
    several = judge(tmp_path, [-9.0, -1.0, -9.0], (2,), greedy=True, expected=[0, 2])
    assert isinstance(right, Verdict) and isinstance(wrong, Verdict) and isinstance(several, Verdict)
    assert (right.score, wrong.score, several.score) == (1, 0, 1)
    assert wrong.feedback == "greedy decoding would not produce 'long ending'"


def test_choices_give_the_lengths_and_the_names(tmp_path: Path) -> None:
    row = {"letters": ["A", "B", "Consonant"]}
    verdict = judge(tmp_path, [-1.0, -1.5, -2.0], choices="letters", normalize="chars", expected="Consonant", row=row)
    assert isinstance(verdict, Verdict) and verdict.score == 1


@pytest.mark.parametrize(
    ("keys", "row", "words"),
    [
        ({"expected": 3}, {}, "is 3; it is a text, or a position from 0 to 2"),
        ({"expected": "four"}, {}, "'four' is not among the choices"),
        ({"expected": "{{ missing }}"}, {"missing": None}, "is None; it is a text"),
        ({"expected": "{{ several }}"}, {"several": []}, "is an empty list for this row"),
        ({}, {"endings": [" 2", " 1", " 3"], "expected": "2"}, "is a choice and a position"),
        ({}, {"endings": [" x", " x", " y"], "expected": "x"}, "is several of the choices: give its position"),
        ({}, {"endings": [" x", " y"]}, "3 likelihoods, 2 continuations and 2 choices"),
        ({"choices": "endings[0]"}, {}, "not a list of texts"),
    ],
)
def test_an_ambiguous_row_is_an_error_and_not_a_score(
    tmp_path: Path, keys: dict[str, Any], row: dict[str, Any], words: str
) -> None:
    error = judge(tmp_path, [-1.0, -2.0, -3.0], row=row, **keys)
    assert isinstance(error, AttemptError) and words in error.message and not error.retry


def test_an_output_without_likelihoods_is_an_error(tmp_path: Path) -> None:
    error = grade(tmp_path, {"type": "likelihood"}, "x", endings=ENDINGS, expected=1)
    assert isinstance(error, AttemptError) and error.message == "the output has no likelihoods"
