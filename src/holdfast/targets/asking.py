"""What a request has to know of the run: who makes it, for requests in batches, which are named by the trial and may
take a day; and how long its reply may be.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Asker(Protocol):
    """The attempt at a trial or a grade that makes a request."""

    key: str
    """of the trial"""
    where: str
    """`target`, or the grader's name"""

    def waiting(self) -> AbstractContextManager[None]:
        """Suspend time limits while the request waits for its batch."""
        ...


ASKER: Final[ContextVar[Asker]] = ContextVar("asker")
"""set by the engine for each attempt"""
