"""Graders: the base classes, the cases they judge, and their verdicts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import msgspec

from holdfast.dialects.reading import after_thoughts, reasoning_text, visible
from holdfast.errors import AttemptError
from holdfast.spec.template import fill_in
from holdfast.store.records import content_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from holdfast.data.dataset import Sample
    from holdfast.errors import Problem
    from holdfast.spec.document import Document, Location
    from holdfast.spec.eval import Origin
    from holdfast.spec.grader_schema import GraderBlock
    from holdfast.store.blobs import Blobs
    from holdfast.store.records import Output, Usage
    from holdfast.targets.types import BatchHub


class Verdict(msgspec.Struct, frozen=True):
    """A grader's judgment of an output.

    `score` is between 0 and 1 (a bool counts as 0 or 1), or None to skip this output. The grader's `threshold` decides
    if the output passes.
    """

    score: float | None
    feedback: str = ""
    """the reason, for people"""
    details: Any = None
    """further data for the record; JSON"""
    usage: Usage | None = None
    """tokens and cost of a judge"""
    passed: bool | None = None
    """set by kinds that do not pass by their score but, for example, by the order of calls; else None"""
    counts: tuple[int, ...] | None = None
    """numbers that are summed over a run, for metrics that are not a mean over outputs"""


def check_score(value: Any) -> float | None:
    """Return a score as a number; raise AttemptError if it is not from 0 to 1."""
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes | bytearray | memoryview) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= 1:
        message = f"a score must be a bool or a number from 0 to 1, not {value!r}"
        raise AttemptError("grader", message, retry=False)
    return number


class SetVerdict(msgspec.Struct, frozen=True):
    """A grader's judgment of all outputs of a run together."""

    verdicts: list[Verdict | AttemptError]
    """one per output, in the order of the cases; AttemptError: this output could not be judged"""
    score: Any = None
    """the grader's own number for all outputs, if it is not the mean of the scores; JSON"""
    details: Any = None
    """further data about all outputs, for the record; JSON"""


class _WithTranscript(Protocol):
    """A block that names the replies to look at."""

    @property
    def transcript(self) -> str: ...


class Case(msgspec.Struct, frozen=True):
    """An output to be graded, with the sample it answers."""

    sample: Sample
    output: Output
    blobs: Blobs | None = None
    """the contents of `output.files`"""

    def text(self, block: _WithTranscript) -> str:
        """Return the text to grade: the last reply, or with `transcript: all` all replies so far."""
        return "\n\n".join(filter(None, self._replies(block)))

    def answer(self, block: _WithTranscript) -> str:
        """Return the text to search for an answer: without reasoning that servers leave in replies."""
        return "\n\n".join(filter(None, map(after_thoughts, self._replies(block))))

    def _replies(self, block: _WithTranscript) -> list[str]:
        if block.transcript != "all":
            return [self.output.output]
        texts = [message_text(message) for message in self.output.conversation if message.get("role") == "assistant"]
        if not texts or texts[-1] != self.output.output:
            texts.append(self.output.output)  # the answer of an HTTP workflow may be in no message
        return texts

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as graders see it: without reasoning and data that only the model's server can read."""
        return visible(self.output.messages)

    @property
    def reasoning(self) -> str:
        """The model's reasoning in the last turn; empty if its server reports no reasoning."""
        messages = self.output.messages
        start = max((at for at, message in enumerate(messages) if message.get("role") == "user"), default=-1)
        return "\n\n".join(filter(None, map(reasoning_text, messages[start + 1 :])))

    @property
    def messages_with_reasoning(self) -> list[dict[str, Any]]:
        """The conversation as graders see it, with the model's reasoning as text."""
        return [
            {**shown, "reasoning": text} if (text := reasoning_text(message)) else shown
            for shown, message in zip(self.messages, self.output.messages, strict=True)
        ]

    def fill_in(self, value: Any) -> Any:
        """Return a text, or a list or mapping of texts, with its templates rendered with the row."""
        return fill_in(value, self.sample.fields)

    def fields(self) -> dict[str, Any]:
        """Return the variables of a grader's templates: the row's fields, `output` and `messages`."""
        return {**self.sample.fields, "output": self.output.output, "messages": self.messages}


def message_text(message: dict[str, Any]) -> str:
    """Return the text of a message, whose content may be a list of parts."""
    return content_text(message.get("content"))


class Grader:
    """Base class of all graders. One class contains everything about a kind of grader.

    Subclass `InstantGrader` or `WaitingGrader`. Graders raise AttemptError if they cannot judge: the result is an
    error grade, never a score.
    """

    schema: ClassVar[type[GraderBlock]]
    """the keys of the grader's block in the eval file"""
    revision: ClassVar[int] = 0
    """increased when outputs are judged differently, so that earlier verdicts are not reused"""
    default_threshold: ClassVar[float | None] = 1.0
    """the minimum score to pass; None: verdicts set `passed` themselves"""
    requires: ClassVar[tuple[str, str] | None] = None
    """an optional module that the grader imports, and the package that provides the module"""
    extra: ClassVar[str | None] = None
    """the extra of Holdfast that installs the grader's packages, if there are several"""
    one_scale: ClassVar[bool] = False
    """if a verdict with `counts` is a measurement without a score, all of the run's verdicts are"""

    block: GraderBlock
    """the grader's block in the eval file"""
    looks_at_all = False
    """True: asked about all outputs of the run at once, by `WaitingGrader.judge_all`; set when the grader is opened"""

    def __init__(self, block: GraderBlock, origin: Origin) -> None:
        self.block = block

    @classmethod
    def resolve(
        cls, block: Any, document: Document, location: Location, folder: Path, problems: list[Problem]
    ) -> GraderBlock:
        """Return a block with its defaults from the rest of the eval; add to `problems`."""
        resolved: GraderBlock = block
        return resolved

    @classmethod
    def identity(cls, block: Any, origin: Origin) -> dict[str, Any]:
        """Return everything that can change a verdict: part of the keys of grades."""
        identity: dict[str, Any] = block.identity()
        return identity

    @classmethod
    def threshold(cls, block: Any) -> float | None:
        """Return the default threshold of a block."""
        return cls.default_threshold

    @classmethod
    def totals(cls, block: Any, counts: Sequence[int]) -> dict[str, float]:
        """Return numbers about the whole run from the sums of its verdicts' `counts`."""
        return {}

    def use_batches(self, batches: BatchHub) -> None:
        """Use the run's batches for requests. Called before the grader is opened."""

    async def __aenter__(self) -> Self:
        """Open connections and start processes, once per run."""
        return self

    async def __aexit__(self, *details: object) -> None:
        """Release all resources."""


class InstantGrader(Grader):
    """A grader that answers without waiting for anything."""

    def check(self, case: Case) -> Verdict:
        """Return the verdict on one output."""
        raise NotImplementedError


class WaitingGrader(Grader):
    """A grader that waits for a model, a program, a file or a user's code."""

    async def judge(self, case: Case) -> Verdict:
        """Return the verdict on one output."""
        raise NotImplementedError

    async def judge_all(self, cases: Sequence[Case]) -> SetVerdict:
        """Return the verdicts on all outputs of the run, if the grader `looks_at_all`."""
        raise NotImplementedError
