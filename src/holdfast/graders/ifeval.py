"""The grader `ifeval`: does the answer follow every instruction of its prompt?

The 25 kinds of instructions are written from the published definitions of "Instruction-Following Evaluation for Large
Language Models" (Zhou and others, 2023). One differs on purpose: if the `letter` is another character, such as `#`, the
published code draws a letter at random; here the character itself is counted, as the prompt asks.

IFEval splits texts with NLTK, whose English model of sentences is a download. Here NLTK's rules are applied without the
model: a list of abbreviations replaces it.
"""

from __future__ import annotations

import json
import re
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from holdfast.errors import AttemptError
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.grader_schema import TextBlock
from holdfast.spec.regex import compile_regex
from holdfast.spec.schema import Formula
from holdfast.spec.template import RENDER_ERRORS, expression

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.graders.types import Case
    from holdfast.spec.regex import Regex


class IfevalGrader(TextBlock):
    """Checks which instructions of IFEval the answer follows."""

    type: Literal["ifeval"]
    instructions: Formula = "instruction_id_list"
    """Expression over the row that returns the list of instructions, such as `punctuation:no_comma`."""
    arguments: Formula = "kwargs"
    """Expression over the row that returns a mapping of arguments for each instruction, such as `{num_words: 300}`."""
    mode: Literal["strict", "loose"] = "strict"
    """Check the answer as it is (`strict`), or accept an instruction that holds without the first line, the last line
    or asterisks (`loose`)."""

    expressions: ClassVar[tuple[str, ...]] = ("instructions", "arguments")


class InstructionFollowing(InstantGrader):
    """Scores 1 when all instructions are followed; over a run, `instruction_level` is the share of all instructions."""

    schema = IfevalGrader
    extra = "ifeval"
    block: IfevalGrader

    @classmethod
    def totals(cls, block: IfevalGrader, counts: Sequence[int]) -> dict[str, float]:
        """Return the share of instructions that were followed, over all answers."""
        return {"instruction_level": counts[0] / counts[1]}

    def check(self, case: Case) -> Verdict:
        """Check each instruction."""
        instructions = self._list(self.block.instructions, case)
        arguments = self._list(self.block.arguments, case)
        if not instructions or len(instructions) != len(arguments):
            message = f"{len(instructions)} instructions and arguments for {len(arguments)} of them"
            raise AttemptError("grader", message, retry=False)
        text = case.text(self.block)
        answers = [text] if self.block.mode == "strict" else _variants(text)
        followed = [
            any(follows(instruction, values or {}, answer) for answer in answers)
            for instruction, values in zip(instructions, arguments, strict=True)
        ]
        missed = [name for name, holds in zip(instructions, followed, strict=True) if not holds]
        feedback = f"does not follow {', '.join(missed)}" if missed else ""
        counts = (sum(followed), len(followed))
        return Verdict(float(not missed), feedback, {"followed": followed, "value": counts}, counts=counts)

    def _list(self, written: str, case: Case) -> list[Any]:
        try:
            value = expression(written)(case.sample.fields)
        except RENDER_ERRORS as error:
            raise AttemptError("grader", f"cannot evaluate {written!r}: {error}", retry=False) from error
        if not isinstance(value, list):
            raise AttemptError("grader", f"{written!r} is not a list for this row", retry=False)
        return value


def _variants(answer: str) -> list[str]:
    """Return the answer with and without its first line, its last line and its asterisks."""
    lines = answer.split("\n")
    cut = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*cut, *(text.replace("*", "") for text in cut)]


_CONSTRAINED: Final = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_POSTSCRIPTS: Final = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
_HIGHLIGHT: Final = re.compile(r"\*([^\n*]*)\*")
_BOLD: Final = re.compile(r"\*\*([^\n*]*)\*\*")
_FENCES: Final = ("```json", "```Json", "```JSON", "```")


def follows(instruction: str, arguments: Mapping[str, Any], answer: str) -> bool:
    """Return True if an answer follows an instruction; an empty answer follows none."""
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


def _in_language(answer: str, *, language: str) -> bool:
    return language_of(answer) in (language, None)


def _paragraphs(answer: str, *, num_paragraphs: int) -> bool:
    paragraphs = [paragraph.strip() for paragraph in answer.split("***")]
    return "" not in paragraphs[1:-1] and sum(map(bool, paragraphs)) == num_paragraphs


def _paragraph_begins(answer: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [paragraph.strip() for paragraph in answer.split("\n\n")]
    count = sum(map(bool, paragraphs))
    if count != num_paragraphs or nth_paragraph > count or not paragraphs[nth_paragraph - 1]:
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word, maxsplit=1)[0].lower() == first_word.lower()


def _postscript(answer: str, *, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    pattern = _POSTSCRIPTS.get(marker, rf"\s*{marker.lower()}.*$")
    return _pattern(f"(?m){pattern}").search(answer.lower())


def _bullets(answer: str, *, num_bullets: int) -> bool:
    stars, dashes = _pattern(r"(?m)^\s*\*[^\*].*$"), _pattern(r"(?m)^\s*-.*$")
    return stars.count(answer) + dashes.count(answer) == num_bullets


def _highlights(answer: str, *, num_highlights: int) -> bool:
    spans = [*_HIGHLIGHT.findall(answer), *_BOLD.findall(answer)]
    return sum(bool(span.strip()) for span in spans) >= num_highlights


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


def _english(has_case: Callable[[str], bool], answer: str) -> bool:
    return has_case(answer) and _in_language(answer, language="en")


def _quoted(answer: str) -> bool:
    text = answer.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: Final[dict[str, Callable[..., bool]]] = {
    "keywords:existence": lambda answer, *, keywords: all(
        _pattern(keyword, ignore_case=True).search(answer) for keyword in keywords
    ),
    "keywords:frequency": lambda answer, *, keyword, frequency, relation: _compare(
        _pattern(keyword.strip(), ignore_case=True).count(answer), relation, frequency
    ),
    "keywords:forbidden_words": lambda answer, *, forbidden_words: (
        not any(_pattern(rf"\b{word}\b", ignore_case=True).search(answer) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda answer, *, letter, let_frequency, let_relation: _compare(
        answer.lower().count(letter.strip().lower()), let_relation, let_frequency
    ),
    "language:response_language": _in_language,
    "length_constraints:number_sentences": lambda answer, *, num_sentences, relation: _compare(
        count_sentences(answer), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda answer, *, num_words, relation: _compare(
        len(re.findall(r"\w+", answer)), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": _paragraph_begins,
    "detectable_content:number_placeholders": lambda answer, *, num_placeholders: (
        _pattern(r"\[.*?\]").count(answer) >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda answer: any(option in answer for option in _CONSTRAINED),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": lambda answer, *, section_spliter, num_sections: (
        _pattern(rf"\s?{section_spliter.strip()}\s?\d+\s?").count(answer) >= num_sections
    ),
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda answer, *, prompt_to_repeat: (
        answer.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda answer, *, end_phrase: (
        answer.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": lambda answer, *, capital_frequency, capital_relation: _compare(
        count_capital_words(answer), capital_relation, capital_frequency
    ),
    "change_case:english_capital": partial(_english, str.isupper),
    "change_case:english_lowercase": partial(_english, str.islower),
    "punctuation:no_comma": lambda answer: "," not in answer,
}


_ABBREVIATIONS: Final = """
    mr mrs ms dr prof rev gen sen rep gov lt col sgt capt cpt maj st mt jr sr inc ltd co corp dept univ assn bros vs etc
    e.g i.e cf al approx est fig no vol pp ed jan feb mar apr jun jul aug sep sept oct nov dec mon tue wed thu fri sat
    sun u.s u.k u.n a.m p.m ph.d b.a m.a d.c ave blvd rd
"""
_OPENINGS: Final = """
    The This That These Those It He She We They You I In On At As If When While But And Or So However There Here What
    Who Why How For To Its His Her Our Their My Your After Before
"""
ABBREVIATIONS: Final = frozenset(_ABBREVIATIONS.split())
"""a full stop after these words rarely ends a sentence"""
STARTERS: Final = frozenset(_OPENINGS.split())
"""words that begin a sentence even after an abbreviation"""
_CHUNK: Final = re.compile(r"\S+")
_ENDER: Final = re.compile(r"[.?!](?=[)\";}\]*:@'({\[!?]|\Z)")


def count_sentences(text: str) -> int:
    """Return the number of sentences of an English text."""
    chunks = _CHUNK.findall(text)
    return bool(chunks) + sum(_ends_sentence(chunk, following) for chunk, following in pairwise([*chunks, ""]))


def _ends_sentence(chunk: str, following: str) -> bool:
    """Return True if a sentence ends in a chunk of text and another begins in it, or with the following chunk."""
    enders = [match.start() for match in _ENDER.finditer(chunk) if following or match.end() < len(chunk)]
    if not enders:
        return False
    if not following:
        following = chunk[enders[-1] + 1 :].strip("\"')]}")
        if not following:  # only closing quotes and brackets, which belong to the preceding sentence
            return False
    sentence, mark = chunk[: enders[-1]], chunk[enders[-1]]
    if mark != "." or "?" in sentence or "!" in sentence:
        return True
    word = re.split(r"[(\[{\"“‘'*_]", sentence)[-1]
    if word.endswith(".") or not word:  # dots of an omission
        return following[0].isupper()
    if len(word) == 1 and word.isalpha():  # an initial, as of a name
        return not following[0].isalpha()
    return word.lower() not in ABBREVIATIONS or following in STARTERS


_APART: Final = re.compile(r"[\"“”‘«»;@#$%&?!*()\[\]{}<>\u2012-\u2015]|``|''|--|\.{2,}|[:,](?!\d)")
"""separators of words, besides white space"""
_CLITIC: Final = re.compile(r"(?<=[^' ])(?:'(?:[sSmMdD]|ll|LL|re|RE|ve|VE)|n't|N'T)\Z")
_COMPOUND: Final = re.compile(r"(?i)\A(can)(not)\Z|\A(gim|lem)(me)\Z|\A(gon|wan)(na)\Z|\A(got)(ta)\Z")


def count_capital_words(text: str) -> int:
    """Return the number of words all in capitals; `DON'T` is two, `WELL-KNOWN` is one."""
    return sum(word.isupper() for chunk in _APART.sub(" ", text.replace("’", " ")).split() for word in _parts(chunk))


def _parts(word: str) -> list[str]:
    while word.endswith("'"):
        word = word[:-1]
    if clitic := _CLITIC.search(word):
        return [*_parts(word[: clitic.start()]), clitic[0]]
    if compound := _COMPOUND.match(word):
        return [part for part in compound.groups() if part]
    return [word]


def language_of(text: str) -> str | None:
    """Return the code of a text's language; None for a text without letters."""
    detect, failure = _detector()
    try:
        return detect(text)
    except failure:
        return None


@cache
def _detector() -> tuple[Callable[[str], str], Any]:
    try:
        from langdetect import DetectorFactory, LangDetectException, detect
    except ImportError:
        message = (
            "this row's language check needs the package langdetect: pip install langdetect, then repeat the command"
        )
        raise AttemptError("grader", message, retry=False) from None
    DetectorFactory.seed = 0  # its results vary otherwise, and a grade must not depend on chance
    return detect, LangDetectException
