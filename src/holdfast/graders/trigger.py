"""Compares a prompt with the words of a SKILL.md, to decide if the skill applies. Asks no model."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

from pydantic import model_validator

from holdfast.canonical import digest_bytes
from holdfast.errors import AttemptError
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.document import read_value
from holdfast.spec.grader_schema import GraderBlock
from holdfast.spec.schema import EvalPath

if TYPE_CHECKING:
    from holdfast.graders.types import Case
    from holdfast.spec.eval import Origin

_WORD: Final = re.compile(r"[^\W_]{3,}")
_COMMON: Final = frozenset(
    re.findall(
        r"\w+",
        "the and for with this that from into your you are was were what where how why not can should using about have "
        "has had but all any too out get let",
    )
)
_HEADING: Final = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
_NOT_FOR: Final = re.compile(r"do not use for:", re.IGNORECASE)
_TRIGGERS: Final = 0.6
_FOR: Final = re.compile(r"(?<!not )use for:", re.IGNORECASE)


class TriggerGrader(GraderBlock):
    """Scores whether the prompt should trigger a skill, by the words of its SKILL.md."""

    type: Literal["trigger"]
    skill_path: EvalPath | None = None
    """The skill's `SKILL.md`, or its folder, in the eval file's folder."""
    skill: str | None = None
    """Text of the skill's `SKILL.md`, instead of a file."""
    mode: Literal["positive", "negative"]
    """`positive` if the prompt should trigger the skill, `negative` if it should not."""

    templates: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="after")
    def _names_one_skill(self) -> Self:
        if self.skill_path is None and self.skill is None:
            raise ValueError("needs the skill: give `skill_path`, or its text as `skill`")
        return self


class Trigger(InstantGrader):
    """Scores the overlap of the first prompt with the skill's words; with `mode: negative`, 1 minus the overlap."""

    schema = TriggerGrader
    block: TriggerGrader

    def __init__(self, block: TriggerGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        try:
            self._keywords, self._phrases = skill_words(_read_skill(block, origin))
        except ValueError as error:
            raise origin.error(f"{block.skill_path or 'skill'}: {error}") from error

    @classmethod
    def identity(cls, block: TriggerGrader, origin: Origin) -> dict[str, Any]:
        """Return the skill's text, from the block or its file."""
        return {**block.identity(), "skill_path": None, "skill": digest_bytes(_read_skill(block, origin).encode())}

    @classmethod
    def threshold(cls, block: TriggerGrader) -> float:
        """Return the overlap that counts as a trigger; with `negative`, the smallest score of a lower overlap."""
        return _TRIGGERS if block.mode == "positive" else math.nextafter(1 - _TRIGGERS, 1)

    def check(self, case: Case) -> Verdict:
        """Compare words and phrases."""
        prompt = case.output.prompt
        if not isinstance(prompt, str):
            raise AttemptError("grader", "the conversation has no user message that is a text", retry=False)
        share = overlap(prompt, self._keywords, self._phrases)
        score = share if self.block.mode == "positive" else 1 - share
        matched = sorted(set(_words(prompt)) & self._keywords)
        return Verdict(score, f"overlap {share:.2f}", {"overlap": share, "matched": matched})


def _read_skill(block: TriggerGrader, origin: Origin) -> str:
    if block.skill is not None:
        return block.skill
    name = str(block.skill_path)
    if (origin.folder / name).is_dir():
        name = f"{name}/SKILL.md"
    return origin.read(name).decode("utf-8", "replace")


def skill_words(text: str) -> tuple[frozenset[str], list[str]]:
    """Return the words of a SKILL.md, and the phrases after `USE FOR:` in its description; raises ValueError."""
    heading, body = {}, text
    if match := _HEADING.match(text):
        body = text[match.end() :]
        try:
            heading = read_value(match[1])
        except Exception as error:  # the YAML parser raises many kinds
            raise ValueError(f"its heading is not YAML: {' '.join(str(error).split())}") from error
        if not isinstance(heading, dict):
            heading = {}
    description = str(heading.get("description") or "")
    purpose = _NOT_FOR.split(description)[0]
    keywords = frozenset(_words(f"{heading.get('name') or ''} {purpose} {body}"))
    if not keywords:
        raise ValueError("it has no words to compare a prompt with")
    listed = _FOR.split(purpose)[1:]
    phrases = [phrase.strip(" \t\"'.") for part in listed for phrase in re.split(r"[,;\n]", part)]
    return keywords, [phrase.casefold() for phrase in phrases if phrase]


def overlap(prompt: str, keywords: frozenset[str], phrases: list[str]) -> float:
    """Return the share of the prompt's words that are in the skill, or of a phrase's words that are in the prompt."""
    words = set(_words(prompt))
    if not words:
        return 0.0
    best = len(words & keywords) / len(words)
    for phrase in phrases:
        if phrase in prompt.casefold():
            return 1.0
        parts = _words(phrase)
        if parts:
            best = max(best, sum(part in words for part in parts) / len(parts))
    return best


def _words(text: str) -> list[str]:
    return [word for word in _WORD.findall(text.casefold()) if word not in _COMMON]
