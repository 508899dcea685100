"""Work that could take long, done where it can be stopped: asked for by an exception, answered at the next call.

Code that meets such work calls `answer_to`. Without an answer that raises `Slow`; whoever started the code has the work
done by another process, puts the answer into `ANSWERS` and starts the code again.
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
        """How long it may take."""
        ...

    @property
    def too_slow(self) -> str:
        """What to say when it takes longer."""
        ...


class Slow(Exception):
    """Something could take long."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"{type(request).__name__} has to be made elsewhere")
        self.request = request


ANSWERS: ContextVar[dict[Request, Any] | None] = ContextVar("ANSWERS", default=None)
"""what other processes have answered so far, for the code that is running"""


def answer_to(request: Request) -> Any:
    """Return the answer to a request, or raise Slow."""
    answers = ANSWERS.get()
    if answers is None or request not in answers:
        raise Slow(request)
    return answers[request]
