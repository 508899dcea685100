"""Sentences, words in capitals and languages, as IFEval counts them. Nothing is downloaded.

IFEval splits texts with NLTK, whose English model of sentences is a download. The rules here are those of NLTK without
the model: a list of abbreviations stands in for it.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import AttemptError

if TYPE_CHECKING:
    from collections.abc import Callable

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
"""words after which a full stop rarely ends a sentence"""
STARTERS: Final = frozenset(_OPENINGS.split())
"""words that begin a sentence even after an abbreviation"""
_CHUNK: Final = re.compile(r"\S+")
_ENDER: Final = re.compile(r"[.?!](?=[)\";}\]*:@'({\[!?]|\Z)")


def count_sentences(text: str) -> int:
    """Return the number of sentences of an English text."""
    chunks = _CHUNK.findall(text)
    return bool(chunks) + sum(_ends_sentence(chunk, following) for chunk, following in pairwise([*chunks, ""]))


def _ends_sentence(chunk: str, following: str) -> bool:
    """Tell whether a sentence ends in a chunk of text, and another one begins in it or with the following chunk."""
    enders = [match.start() for match in _ENDER.finditer(chunk) if following or match.end() < len(chunk)]
    if not enders:
        return False
    if not following:
        following = chunk[enders[-1] + 1 :].strip("\"')]}")
        if not following:  # only closing quotes and brackets, which belong to the sentence before them
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
"""what separates words beside white space"""
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
    """Return the code of the language of a text; None for a text without letters to tell from."""
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
    DetectorFactory.seed = 0  # it draws at random, and a grade must not depend on chance
    return detect, LangDetectException
