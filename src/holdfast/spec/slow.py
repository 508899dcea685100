"""Work that could take forever, delegated to another process by an exception.

Code that meets such work calls `answer_to`, which raises `Slow` if there is no answer yet. The caller then lets another
process do the work, puts the answer into `ANSWERS`, and calls the code again.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol


class Request(Protocol):
    """A piece of work: a NamedTuple of JSON values."""

    def _asdict(self) -> dict[str, Any]: ...

    def __hash__(self) -> int: ...

    @property
    def seconds(self) -> float:
        """Time limit."""
        ...

    @property
    def too_slow(self) -> str:
        """Error message for work that takes longer."""
        ...

    def work(self) -> Any:
        """Return the answer, however long it takes: for a process that may be killed."""
        ...


class Slow(Exception):
    """Raised by code that needs an answer from another process."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"{type(request).__name__} needs another process")
        self.request = request


ANSWERS: ContextVar[dict[Request, Any] | None] = ContextVar("ANSWERS", default=None)
"""the answers of other processes so far, for the running code"""


def answer_to(request: Request) -> Any:
    """Return the answer to a request, or raise Slow."""
    answers = ANSWERS.get()
    if answers is None or request not in answers:
        raise Slow(request)
    return answers[request]
