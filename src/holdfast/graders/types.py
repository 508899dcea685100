"""What a grader is given, and what it gives back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from types import TracebackType

    from holdfast.data.dataset import Sample
    from holdfast.spec.grader_schema import GraderBlock, TextBlock
    from holdfast.store.blobs import Blobs
    from holdfast.store.records import Output, Usage


class Verdict(msgspec.Struct, frozen=True):
    """What a grader says of an output.

    `score` is between 0 and 1 (a bool counts as 0 or 1), or None to skip this output. Whether it passes is decided
    by the grader's `threshold`.
    """

    score: float | None
    feedback: str = ""
    """why, in words"""
    details: Any = None
    """anything else worth keeping; JSON"""
    usage: Usage | None = None
    """what a judge used"""
    passed: bool | None = None
    """for kinds that pass by something else than their score, such as an order of calls; None for all others"""
    counts: tuple[int, ...] | None = None
    """what is summed over a run where a metric of the whole is not the mean of its parts"""


class Case(msgspec.Struct, frozen=True):
    """An output to be graded, with the sample it answers."""

    sample: Sample
    output: Output
    blobs: Blobs | None = None
    """where the contents of `output.files` are"""

    def said(self, block: TextBlock) -> str:
        """The text a grader looks at: the last reply, or by `transcript: all` everything said so far."""
        if block.transcript == "last":
            return self.output.output
        texts = [message_text(message) for message in self.output.messages if message.get("role") == "assistant"]
        if not texts or texts[-1] != self.output.output:
            texts.append(self.output.output)  # an answer that is in no message, as HTTP workflows may give it
        return "\n\n".join(filter(None, texts))

    def fields(self) -> dict[str, Any]:
        """The variables of a grader's templates: the row's fields, `output` and `messages`."""
        return {**self.sample.fields, "output": self.output.output, "messages": self.output.messages}


def message_text(message: dict[str, Any]) -> str:
    """Return what a message says, in one text or in parts of which some are texts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


class Grader(Protocol):
    """A check. Raises AttemptError where it cannot judge: that is an error grade, never a score."""

    fingerprint: str
    """of all that can change its verdict"""

    @property
    def block(self) -> GraderBlock:
        """What the eval file says."""
        ...

    async def __aenter__(self) -> Grader:
        """Get ready."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let everything go."""
        ...


class InstantGrader(Grader, Protocol):
    """Answers without waiting for anything."""

    def check(self, case: Case) -> Verdict:
        """The verdict on one output."""
        ...


class WaitingGrader(Grader, Protocol):
    """Waits for a model or for a user's code."""

    async def judge(self, case: Case) -> Verdict:
        """The verdict on one output."""
        ...
