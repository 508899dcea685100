"""The `open` and `close` methods that a Python target may have, called once per process around the run."""

from __future__ import annotations

import inspect
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from holdfast.errors import AttemptError, ConfigError, Fault, HoldfastError, Problem
from holdfast.functions import Function, describe_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


def instance_of(target: Callable[..., Any], where: str) -> Callable[..., Any]:
    """Return the object that answers: a class is constructed once, without arguments."""
    if not inspect.isclass(target):
        return target
    if "__call__" not in dir(target):
        message = f"{target.__name__} has no method __call__, which answers a prompt"
        raise ConfigError([Problem(where, message)], remedy="Write it as  def __call__(self, prompt): …")
    try:
        instance: Any = target()
    except Exception as error:  # raised by the user's class
        raise ConfigError([Problem(where, f"{target.__name__}() failed: {describe_error(error)}")]) from error
    return instance  # type: ignore[no-any-return]


@asynccontextmanager
async def lifetime(target: Callable[..., Any], params: dict[str, Any], where: str) -> AsyncIterator[None]:
    """Open the target on the way in and close it on the way out, where it has methods for that."""
    opening, closing = _method(target, "open", ("params",), where), _method(target, "close", (), where)
    if opening is not None:
        try:
            await opening({"params": params})
        except HoldfastError:
            raise
        except Exception as error:
            message = f"the target's open() failed: {describe_error(error)}"
            raise Fault("rejected", message, remedy="Fix it, then run the same command again.") from error
    try:
        yield
    finally:
        if closing is not None:
            try:
                await closing({})
            except Exception as error:
                raise AttemptError("agent", f"the target's close() failed: {describe_error(error)}") from error


def _method(target: Callable[..., Any], name: str, offered: tuple[str, ...], where: str) -> Function | None:
    if inspect.isroutine(target):
        return None
    method = getattr(target, name, None)
    return Function(method, offered, f"{where}: {name}") if callable(method) else None
