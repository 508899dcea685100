"""The grader `ifeval`: all 25 kinds of instructions, strict and loose, by prompt and by instruction."""

from __future__ import annotations

import sys
import types
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.graders import ifeval
from holdfast.graders.ifeval import ABBREVIATIONS, CHECKS, STARTERS, count_capital_words, count_sentences, follows
from holdfast.spec.regex import Slow
from tests.support.lazy import LazyModule
from tests.support.specs import grade

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

nltk = LazyModule("nltk")
destructive = LazyModule("nltk.tokenize.destructive")
punkt = LazyModule("nltk.tokenize.punkt")

FOLLOWED: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["mom", "mother"]}, "My Mother, my mom", "My mother"),
    ("keywords:frequency", {"keyword": "war", "frequency": 2, "relation": "at least"}, "war, Warm", "war"),
    ("keywords:frequency", {"keyword": "war", "frequency": 2, "relation": "less than"}, "war", "war war"),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, "rocket", "We ROCK!"),
    ("keywords:letter_frequency", {"letter": "T", "let_frequency": 2, "let_relation": "less than"}, "to", "Tot"),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "at least"}, "# #", "t t"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "So. It is.", "So it is."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n***\nb\n***\nc"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***a***b***", "a ****** b"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "one two", "one, two-three"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Weekend"},
        'One.\n\n"Weekend!" it is.',
        "Weekend.\n\nTwo.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name\n] at [place]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Yes.\np. s. and", "PS and"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P.P.S: and", "P.S. and"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n - b", "* a\n** b"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "My answer is perhaps."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and ** **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2",
        "Section 1",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<Joy>>\nA poem.", "<< >>\n<a>"),
    ("combination:two_responses", {}, "yes\n******\nno", "yes\n******\nyes"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hello."}, "say hello. Hello!", "Hello! Say hello."),
    ("startend:end_checker", {"end_phrase": "Any other questions?"}, 'So. "Any other questions?"', "Any other?"),
    ("startend:quotation", {}, ' "quoted" ', '"'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "DON'T",
        "WELL-KNOWN",
    ),
    ("punctuation:no_comma", {}, "no", "yes, no"),
]
"""an instruction, its arguments, an answer that follows it, and one that does not"""
LANGUAGES: list[tuple[str, dict[str, Any], str, str]] = [
    ("language:response_language", {"language": "de"}, "Das ist ein ganz kurzer Satz.", "This is a short sentence."),
    ("change_case:english_capital", {}, "THIS IS A SHORT SENTENCE.", "THIS is a short sentence."),
    ("change_case:english_lowercase", {}, "this is a short sentence.", "das ist ein ganz kurzer satz."),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), FOLLOWED)
def test_an_instruction_is_followed_or_not(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    unset = {"num_words": None, "keywords": None}  # as the dataset on the hub has them
    assert follows(name, {**unset, **arguments}, good) is True
    assert follows(name, arguments, bad) is False
    assert follows(name, arguments, " \n") is False, "an empty answer follows nothing"


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), LANGUAGES)
def test_a_language_is_recognized(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    pytest.importorskip("langdetect")
    assert follows(name, arguments, good) is True
    assert follows(name, arguments, bad) is False
    assert follows(name, arguments, "123") is (name == "language:response_language"), "a text without letters"


def test_every_instruction_has_an_example() -> None:
    assert {name for name, *_ in (*FOLLOWED, *LANGUAGES)} == {*CHECKS}
    assert len(CHECKS) == 25


def test_without_langdetect_the_grade_is_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)
    ifeval._detector.cache_clear()
    row: dict[str, Any] = {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "kn"}]}
    failure = grade(tmp_path, {"type": "ifeval"}, "no", **row)
    assert "pip install langdetect" in str(failure)
    ifeval._detector.cache_clear()


def test_loose_ignores_the_first_line_the_last_line_and_asterisks(tmp_path: Path) -> None:
    row: dict[str, Any] = {"instruction_id_list": ["startend:quotation", "punctuation:no_comma"], "kwargs": [{}, {}]}
    answer = 'Sure:\n*"quoted"*'
    strict, loose = (grade(tmp_path, {"type": "ifeval", "mode": mode}, answer, **row) for mode in ("strict", "loose"))
    assert (strict.score, strict.counts, strict.feedback) == (0, (1, 2), "does not follow startend:quotation")
    assert (loose.score, loose.counts) == (1, (2, 2))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction_id_list": ["a:b"], "kwargs": [{}]}, "unknown instruction 'a:b'"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "1 instructions and arguments for 0"),
        ({"instruction_id_list": ["startend:end_checker"], "kwargs": [{}]}, "startend:end_checker: wrong arguments"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["c++("]}]}, "not a regular"),
        ({"instruction_id_list": "punctuation:no_comma", "kwargs": [{}]}, "is not a list"),
    ],
)
def test_a_row_that_cannot_be_checked_is_an_error(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    assert message in str(grade(tmp_path, {"type": "ifeval"}, "text", **row))


PIECES = [
    "*",
    "**",
    "***",
    "******",
    "-",
    "\n",
    "\n\n",
    " ",
    "a",
    "war",
    "Mom",
    "[x]",
    "[",
    "]",
    "<<",
    ">>",
    "P.S.",
    "p. p. s",
]
PIECES += ["Section 1", "SECTION", "2", ".", "!", ",", '"', "'", "{", "}", "My answer is yes.", "```json", "é", "_"]
ANSWERS = st.lists(st.sampled_from(PIECES), max_size=10).map("".join)
WORDS = ["I", "DON'T", "THEY'LL", "GONNA", "CANNOT", "A,B", "3,5", "U.S.", "'", '"', "X--Y", "...", "(B)", "C#", "E-F"]
WORDS += ["it's", "It’s", "WHO'S", ":", "Q:A", "*BOLD*", "…", "—Z", "G/H", "J_K", "\n"]
ENDS = ["word.", "It", "is", 'said."', "one?", "two!", "3.5", "end.)", "(so.", "x", "**bold.**", "a.com", "\n"]
ENDS += ["Dr. Smith", "mr. x", "etc. It", "etc. and", "e.g. this", "the U.S. is", "J. Smith", "J. 3.5", "a.m. We"]
OUR_OWN = {"length_constraints:number_sentences", "change_case:capital_word_frequency", "keywords:letter_frequency"}


@pytest.fixture(scope="module")
def light_nltk() -> None:
    """NLTK, imported without what it can do without, which would take seconds."""
    with pytest.MonkeyPatch.context() as patched:
        for name in {"scipy", "sklearn"} - sys.modules.keys():
            patched.setitem(sys.modules, name, None)
        assert nltk.data and destructive.NLTKWordTokenizer and punkt.PunktParameters


@pytest.fixture(scope="module")
def lm_eval_checks(light_nltk: None) -> Iterator[Any]:
    """lm-eval's own checks, without its download of NLTK's data, and without what they do not need."""
    imported = set(sys.modules)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nltk.data, "find", lambda *_: None)
        (folder,) = getattr(find_spec("lm_eval"), "submodule_search_locations", None) or ()
        for name, content in (
            ("immutabledict", {"immutabledict": dict}),
            ("langdetect", {}),
            ("lm_eval", {"__path__": [folder]}),
            ("lm_eval.tasks", {"__path__": [f"{folder}/tasks"]}),
        ):
            module = types.ModuleType(name)
            vars(module).update(content)
            patched.setitem(sys.modules, name, module)
        from lm_eval.tasks.ifeval import utils

        yield utils
    for name in set(sys.modules) - imported:
        if name.startswith("lm_eval."):
            del sys.modules[name]


@settings(max_examples=150, deadline=None)
@given(answer=ANSWERS, which=st.sampled_from([case for case in FOLLOWED if case[0] not in OUR_OWN]))
def test_checks_agree_with_lm_eval(
    lm_eval_checks: Any, answer: str, which: tuple[str, dict[str, Any], str, str]
) -> None:
    name, arguments, *_ = which
    row = {"key": 1, "instruction_id_list": [name], "prompt": "", "kwargs": [arguments]}
    theirs = lm_eval_checks.process_results(row, [answer])
    from holdfast.graders.ifeval import _variants

    try:
        assert follows(name, arguments, answer) == theirs["prompt_level_strict_acc"]
        loose = any(follows(name, arguments, variant) for variant in _variants(answer))
        assert loose == theirs["prompt_level_loose_acc"]
    except Slow:
        return


@settings(deadline=None)
@given(words=st.lists(st.sampled_from(WORDS)))
def test_words_in_capitals_are_counted_as_by_nltk(light_nltk: None, words: list[str]) -> None:
    text = " ".join(words)
    assert count_capital_words(text) == sum(word.isupper() for word in destructive.NLTKWordTokenizer().tokenize(text))


@settings(deadline=None)
@given(words=st.lists(st.sampled_from(ENDS)))
def test_sentences_are_counted_as_by_nltk_with_the_same_abbreviations(light_nltk: None, words: list[str]) -> None:
    parameters = punkt.PunktParameters()
    parameters.abbrev_types, parameters.sent_starters = set(ABBREVIATIONS), {word.lower() for word in STARTERS}
    text = " ".join(words)
    assert count_sentences(text) == len(punkt.PunktSentenceTokenizer(parameters).tokenize(text))


def test_hostile_answers_take_no_time(tmp_path: Path) -> None:
    names = [case for case in FOLLOWED if case[0] != "keywords:forbidden_words"]
    row: dict[str, Any] = {"instruction_id_list": [case[0] for case in names], "kwargs": [case[1] for case in names]}
    for hostile in ("[" * 60_000, "\n" * 60_000 + "x", "*" * 60_000, "a" * 60_000 + "!" * 60_000, "<<" * 60_000):
        assert grade(tmp_path, {"type": "ifeval"}, hostile, **row).score == 0
