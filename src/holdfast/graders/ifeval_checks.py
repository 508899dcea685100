"""The 25 kinds of instructions of IFEval: for each, a function that tells whether an answer follows it.

They are written from the published definitions of "Instruction-Following Evaluation for Large Language Models" (Zhou
and others, 2023). One differs on purpose: for a `letter` that is not a letter, such as `#`, the published code draws a
letter at random; here the character itself is counted, as the prompt asks.
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import AttemptError
from holdfast.graders.ifeval_text import count_capital_words, count_sentences, language_of
from holdfast.spec.regex import compile_regex

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from holdfast.spec.regex import Regex

_CONSTRAINED: Final = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_POSTSCRIPTS: Final = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
_HIGHLIGHT: Final = re.compile(r"\*([^\n*]*)\*")
_BOLD: Final = re.compile(r"\*\*([^\n*]*)\*\*")
_FENCES: Final = ("```json", "```Json", "```JSON", "```")


def follows(instruction: str, arguments: Mapping[str, Any], answer: str) -> bool:
    """Tell whether an answer follows an instruction; an empty answer follows none."""
    try:
        check = CHECKS[instruction]
    except KeyError:
        raise AttemptError("grader", f"unknown instruction {instruction!r}", retry=False) from None
    if not answer.strip():
        return False
    try:
        return check(answer, **{name: value for name, value in arguments.items() if value is not None})
    except TypeError as error:
        raise AttemptError(
            "grader", f"{instruction}: wrong arguments {dict(arguments)}: {error}", retry=False
        ) from error


def _pattern(source: str, *, ignore_case: bool = False) -> Regex:
    try:
        return compile_regex(source, ignore_case=ignore_case)
    except ValueError as error:
        raise AttemptError("grader", f"a keyword of this row is {error}", retry=False) from error


def _compare(count: int, relation: str, limit: int) -> bool:
    if relation not in ("less than", "at least"):
        raise AttemptError("grader", f"unknown relation {relation!r}: neither `less than` nor `at least`", retry=False)
    return count < limit if relation == "less than" else count >= limit


def _keywords_exist(answer: str, *, keywords: list[str]) -> bool:
    return all(_pattern(keyword, ignore_case=True).search(answer) for keyword in keywords)


def _keyword_frequency(answer: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(_pattern(keyword.strip(), ignore_case=True).count(answer), relation, frequency)


def _no_forbidden_words(answer: str, *, forbidden_words: list[str]) -> bool:
    return not any(_pattern(rf"\b{word}\b", ignore_case=True).search(answer) for word in forbidden_words)


def _letter_frequency(answer: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(answer.lower().count(letter.strip().lower()), let_relation, let_frequency)


def _in_language(answer: str, *, language: str) -> bool:
    return language_of(answer) in (language, None)


def _sentences(answer: str, *, num_sentences: int, relation: str) -> bool:
    return _compare(count_sentences(answer), relation, num_sentences)


def _paragraphs(answer: str, *, num_paragraphs: int) -> bool:
    paragraphs = [paragraph.strip() for paragraph in answer.split("***")]
    return "" not in paragraphs[1:-1] and sum(map(bool, paragraphs)) == num_paragraphs


def _words(answer: str, *, num_words: int, relation: str) -> bool:
    return _compare(len(re.findall(r"\w+", answer)), relation, num_words)


def _paragraph_begins(answer: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [paragraph.strip() for paragraph in answer.split("\n\n")]
    count = sum(map(bool, paragraphs))
    if count != num_paragraphs or nth_paragraph > count or not paragraphs[nth_paragraph - 1]:
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word, maxsplit=1)[0].lower() == first_word.lower()


def _placeholders(answer: str, *, num_placeholders: int) -> bool:
    return _pattern(r"\[.*?\]").count(answer) >= num_placeholders


def _postscript(answer: str, *, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    pattern = _POSTSCRIPTS.get(marker, rf"\s*{marker.lower()}.*$")
    return _pattern(f"(?m){pattern}").search(answer.lower())


def _bullets(answer: str, *, num_bullets: int) -> bool:
    stars, dashes = _pattern(r"(?m)^\s*\*[^\*].*$"), _pattern(r"(?m)^\s*-.*$")
    return stars.count(answer) + dashes.count(answer) == num_bullets


def _constrained(answer: str) -> bool:
    return any(option in answer for option in _CONSTRAINED)


def _highlights(answer: str, *, num_highlights: int) -> bool:
    spans = [*_HIGHLIGHT.findall(answer), *_BOLD.findall(answer)]
    return sum(bool(span.strip()) for span in spans) >= num_highlights


def _sections(answer: str, *, section_spliter: str, num_sections: int) -> bool:
    return _pattern(rf"\s?{section_spliter.strip()}\s?\d+\s?").count(answer) >= num_sections


def _is_json(answer: str) -> bool:
    text = answer.strip()
    for fence in _FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(answer: str) -> bool:
    for line in answer.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start <= end - 3 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def _two_responses(answer: str) -> bool:
    responses = [response.strip() for response in answer.split("******")]
    nonempty = list(filter(None, responses))
    return "" not in responses[1:-1] and len(nonempty) == 2 and nonempty[0] != nonempty[1]


def _repeats_prompt(answer: str, *, prompt_to_repeat: str) -> bool:
    return answer.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends_with(answer: str, *, end_phrase: str) -> bool:
    return answer.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _capital_words(answer: str, *, capital_frequency: int, capital_relation: str) -> bool:
    return _compare(count_capital_words(answer), capital_relation, capital_frequency)


def _english(has_case: Callable[[str], bool], answer: str) -> bool:
    return has_case(answer) and _in_language(answer, language="en")


def _no_comma(answer: str) -> bool:
    return "," not in answer


def _quoted(answer: str) -> bool:
    text = answer.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: Final[dict[str, Callable[..., bool]]] = {
    "keywords:existence": _keywords_exist,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _no_forbidden_words,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _in_language,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": _words,
    "length_constraints:nth_paragraph_first_word": _paragraph_begins,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeats_prompt,
    "startend:end_checker": _ends_with,
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": partial(_english, str.isupper),
    "change_case:english_lowercase": partial(_english, str.islower),
    "punctuation:no_comma": _no_comma,
}
