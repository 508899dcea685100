"""The grader `extract`: the filters and the exact match of lm-evaluation-harness, to the letter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.dataset import Sample
from holdfast.graders.text import Extract, ExtractGrader
from holdfast.graders.types import Case
from holdfast.spec.regex import ANSWERS, Slow
from tests.support.lazy import LazyModule
from tests.support.specs import grade, output_of

if TYPE_CHECKING:
    from pathlib import Path

instances = LazyModule("lm_eval.api.instance")
metrics = LazyModule("lm_eval.api.metrics")
lm_eval_filters = LazyModule("lm_eval.filters")

PATTERNS = [
    r"#### (\-?[0-9\.\,]+)",
    r"(-?[$0-9.,]{2,})|(-?[0-9]+)",
    r"(?i)answer is (\w+)",
    r"(.).*",
    r"(a|b)?(c*)",
    r"\d+",
    "(?<=a)b",
    "é+",
]
TEXTS = st.one_of(
    st.text(alphabet="aAbBcCé#$.,-!0123 \n", max_size=12),
    st.lists(st.sampled_from(["#### ", "12", "-3,4", "answer is ", "Answer is", "ab", " ", "\n", "."])).map("".join),
    # numpy, with which lm-eval compares, drops NUL at the end and cuts İ where it becomes longer in lower case
    st.text(st.characters(exclude_characters="\0\u0130", exclude_categories=["Cs"]), max_size=8),
)
FILTERS = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"regex": st.sampled_from(PATTERNS), "group": st.sampled_from([0, 0, -1])},
            optional={"fallback": st.sampled_from(["", " none "])},
        ),
        st.sampled_from(["remove_whitespace", "lowercase", "uppercase"]),
    ),
    max_size=3,
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "ignore_case": st.booleans(),
        "ignore_punctuation": st.booleans(),
        "ignore_numbers": st.booleans(),
        "ignore": st.lists(st.sampled_from([",", r"\$", r"(?s).*#### ", r"\.$", "a*"]), min_size=1, max_size=2),
    },
)


def lm_eval_score(text: str, filters: list[Any], gold: str, options: dict[str, Any]) -> float:
    """The score that lm-eval gives, as its `process_results` calls filters and metric."""
    components = [
        ("regex", {"regex_pattern": step["regex"], "group_select": step["group"], **_fallback(step)})
        if isinstance(step, dict)
        else (step, None)
        for step in filters
    ]
    instance = instances.Instance("generate_until", doc={}, arguments=(), idx=0, resps=[text])
    lm_eval_filters.build_filter_ensemble("f", components).apply([instance])
    keywords = {"regexes_to_ignore" if name == "ignore" else name: value for name, value in options.items()}
    prediction = instance.filtered_resps["f"]
    return float(metrics.exact_match_hf_evaluate([prediction], [gold], **keywords)["exact_match"])


def _fallback(step: dict[str, Any]) -> dict[str, str]:
    return {"fallback": step["fallback"]} if "fallback" in step else {}


def our_score(text: str, filters: list[Any], gold: str | list[str], options: dict[str, Any]) -> float | None:
    """The score of our grader; what could take forever is done in this process."""
    block = ExtractGrader.model_validate({"type": "extract", "filters": filters, "expected": "{{ gold }}", **options})
    case = Case(Sample("s", {"gold": gold}, "sha256:0", "here"), output_of(text))
    answers: dict[Any, Any] = {}
    before = ANSWERS.set(answers)
    try:
        while True:
            try:
                return Extract(block, None).check(case).score  # type: ignore[arg-type]
            except Slow as slow:
                answers[slow.request] = slow.request.work()
    finally:
        ANSWERS.reset(before)


@settings(max_examples=300, deadline=None)
@given(TEXTS, FILTERS, OPTIONS, st.data())
def test_the_score_is_lm_evals(text: str, filters: list[Any], options: dict[str, Any], data: st.DataObject) -> None:
    gold = data.draw(st.one_of(TEXTS, st.sampled_from([text, text.strip(), text.lower(), "12", "[invalid]"])))
    steps = [*filters, "take_first"]
    assert our_score(text, steps, gold, options) == lm_eval_score(text, steps, gold, options)


@settings(deadline=None)
@given(TEXTS.filter(str.strip), FILTERS.filter(bool), st.sampled_from(["A", "12", "a"]))
def test_filters_after_take_first_see_characters_as_in_lm_eval(text: str, filters: list[Any], gold: str) -> None:
    steps = ["remove_whitespace", "take_first", *filters]
    assert our_score(text, steps, gold, {}) == lm_eval_score(text, steps, gold, {})


@pytest.mark.parametrize("text", ["so 7", "#### 12", "#### 13"])
def test_any_of_several_accepted_answers_will_do(text: str) -> None:
    filters = [{"regex": r"(\d+)", "group": -1}]
    assert our_score(text, filters, ["7", "12"], {}) == float(text != "#### 13")


def test_the_feedback_names_what_was_extracted(tmp_path: Path) -> None:
    block = {"type": "extract", "filters": [{"regex": r"#### (\d+)"}], "expected": "{{ answer }}"}
    verdict = grade(tmp_path, block, "6 * 7 is\n#### 42", answer="41")
    assert verdict.score == 0
    assert verdict.feedback == "extracted '42', expected '41'"
    assert grade(tmp_path, block, "no number", answer="41").feedback == "extracted '[invalid]', expected '41'"


@pytest.mark.parametrize(
    "keys",
    [
        {"filters": [{"regex": "(a+)+(?=b)"}]},
        {"ignore": ["(?=(a+)+b)a"]},
        {"filters": ["strip", {"regex": r"(\w+\s?)*(?=!)", "group": -1}]},
    ],
)
def test_no_pattern_can_freeze_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]) -> None:
    monkeypatch.setattr("holdfast.spec.regex.MATCH_SECONDS", 0.3)
    failure = grade(tmp_path, {"type": "extract", **keys}, "a" * 60, expected="x")
    assert failure.kind == "timeout"
    assert "the pattern took longer than 0.3 s" in str(failure)


def test_expected_values_are_compared_as_written(tmp_path: Path) -> None:
    assert grade(tmp_path, {"type": "extract"}, "e\u0301", expected="\u00e9").score == 0
    assert grade(tmp_path, {"type": "extract"}, "e\u0301", expected="e\u0301").score == 1
