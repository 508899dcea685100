"""Calls users' functions, without trusting them, with the values that their parameters name.

A synchronous function runs in a daemon thread: if it never returns, it can be abandoned, and the process can exit.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import AttemptError, ConfigError, Fault, Problem
from holdfast.functions.observing import running
from holdfast.spec.redact import redact

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from holdfast.errors import AttemptKind, HoldfastError

_OURS: Final = Path(__file__).parents[1]
_LONGEST_TRACE: Final = 8000


class Function:
    """A user's function and its parameters."""

    def __init__(
        self, function: Callable[..., Any], offered: tuple[str, ...], where: str, *, takes_fields: bool = False
    ) -> None:
        """Refuse a function that cannot be called with the offered values.

        With `takes_fields`, further parameters without a default are fields of the row: they are listed in `fields`.
        """
        self._function = function
        self.offered = offered
        parameters = inspect.signature(function).parameters.values()
        self.takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self.names = [
            parameter.name
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        self.required = [
            parameter.name
            for parameter in parameters
            if parameter.name in self.names and parameter.default is parameter.empty
        ]
        self.fields = [name for name in self.required if name not in offered]
        if self.fields and not takes_fields:
            parameter = "parameter" if len(self.fields) == 1 else "parameters"
            message = f"unknown {parameter} {', '.join(self.fields)}; available: {', '.join(offered)}"
            raise ConfigError([Problem(where, message)])
        call = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)

    def __str__(self) -> str:
        """Return `reply (agent.py:12)`, for messages."""
        plain = inspect.unwrap(self._function)
        code = getattr(plain, "__code__", None) or getattr(getattr(plain, "__call__", None), "__code__", None)  # noqa: B004
        name = getattr(plain, "__name__", type(plain).__name__)
        return name if code is None else f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"

    def takes(self, name: str) -> bool:
        """Return True for the name of a parameter."""
        return self.takes_all or name in self.names

    def lacking(self, fields: Collection[str]) -> list[str]:
        """Return the parameters for which a row with these fields has no value."""
        return [name for name in self.fields if name not in fields]

    def of_row(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of parameters that are fields of the row; raise AttemptError if a field is missing."""
        if lacking := self.lacking(fields):
            raise AttemptError(
                "agent", f"{self} asks for {', '.join(lacking)}, which this row does not have", retry=False
            )
        return {name: fields[name] for name in self.fields}

    async def __call__(self, offered: Mapping[str, Any]) -> Any:
        """Call the function with the offered values that its parameters name."""
        arguments = dict(offered) if self.takes_all else {name: offered[name] for name in self.names if name in offered}
        try:
            with running:
                if self._is_async:
                    return await self._function(**arguments)
                result = await _in_thread(functools.partial(self._function, **arguments))
                return await result if inspect.isawaitable(result) else result
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # This task was not cancelled: the error leaked out of the function, and would end the worker silently.
            raise RuntimeError("the function was cancelled from inside") from error
        except (SystemExit, KeyboardInterrupt) as error:  # not from Ctrl-C, for which the run has its own handler
            raise _contained(error) from error


def describe_error(error: BaseException) -> str:
    """Describe an exception in a user's code with the line that raised it: `agent.py:12: ValueError: odd`."""
    frames = traceback.extract_tb(error.__traceback__)
    place = next((frame for frame in reversed(frames) if not _is_ours(frame)), None)
    where = f"{Path(place.filename).name}:{place.lineno}: " if place is not None else ""
    return f"{where}{type(error).__name__}: {error}"


def user_error(
    kind: AttemptKind, error: BaseException, message: str | None = None, *, retry: bool = True
) -> AttemptError:
    """Return a failed attempt for an exception in a user's code, with its traceback."""
    failed = AttemptError(kind, redact(message or describe_error(error)), retry=retry)
    failed.traceback = user_traceback(error)
    return failed


@contextmanager
def user_errors(
    kind: AttemptKind, *, retry: bool = True, passed: tuple[type[HoldfastError], ...] = (AttemptError, Fault)
) -> Iterator[None]:
    """Make failed attempts of exceptions in a user's code, which must not end the run; `passed` ones stay."""
    try:
        yield
    except passed:
        raise
    except Exception as error:
        raise user_error(kind, error, retry=retry) from error


def user_traceback(error: BaseException) -> str:
    """Format a traceback without Holdfast's frames and secrets; a long traceback is cut in the middle."""
    whole = part = traceback.TracebackException.from_exception(error)
    visited: list[traceback.TracebackException] = []
    while part is not None and part not in visited:
        visited.append(part)
        part.stack = traceback.StackSummary.from_list([frame for frame in part.stack if not _is_ours(frame)])
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)  # type: ignore[assignment]
    text = "".join(whole.format()).strip()
    if len(text) > _LONGEST_TRACE:
        text = f"{text[: _LONGEST_TRACE // 4]}\n…\n{text[-_LONGEST_TRACE * 3 // 4 :]}"
    return redact(text)


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return Path(frame.filename).is_relative_to(_OURS)


async def _in_thread(call: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():
            return  # abandoned
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:
            error = _contained(raised)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    context = contextvars.copy_context()  # identifies the surrounding call
    threading.Thread(target=context.run, args=[run], name="holdfast-function", daemon=True).start()
    return await future


def _contained(error: BaseException) -> Exception:
    """Return an exception that a future can hold, and that ends the function and not the run."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    happened = f"raised {type(error).__name__}: {error}".removesuffix(": ")
    if isinstance(error, SystemExit):
        happened = f"called sys.exit({error.code!r})"
    contained = RuntimeError(f"the function {happened}")
    contained.__cause__ = error
    return contained
