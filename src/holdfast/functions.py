"""Users' Python functions, for targets and graders: found, called with what their parameters name, never trusted.

A synchronous function runs in a daemon thread, so that a function that never returns can be given up on and
does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError, Problem
from holdfast.spec.source import is_file, source_fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def split_reference(reference: str, folder: Path) -> tuple[Path, str]:
    """`agent.py:reply` as a file and a name in it."""
    file, _, name = reference.rpartition(":")
    return folder / Path(file).expanduser(), name


def function_source(reference: str, folder: Path, where: str) -> tuple[str, dict[str, str]]:
    """A function's name and what its code is, read and not imported; `where` is the place in the eval file."""
    path, name = _found(reference, folder, where)
    return name, source_fingerprint(path, folder)


def _found(reference: str, folder: Path, where: str) -> tuple[Path, str]:
    path, name = split_reference(reference, folder)
    if not is_file(path):
        raise ConfigError(
            [Problem(where, f"{path}: no such file")],
            remedy=f"Name the function as FILE.py:NAME, the file as seen from {folder}.",
        )
    return path, name


def load_function(reference: str, folder: Path, where: str) -> Callable[..., Any]:
    """Import the file and take the function; `where` is the place in the eval file, for messages."""
    path, name = _found(reference, folder, where)
    try:
        module = found = _module(path.resolve(), folder)
    except ConfigError:
        raise
    except Exception as error:  # the file is the user's: whatever it raises is theirs to see
        said = f"{path} cannot be imported: {said_with_place(error)}"
        missing = isinstance(error, ModuleNotFoundError)
        remedy = f"Install it for {sys.executable}, or put it beside the file." if missing else None
        raise ConfigError([Problem(where, said)], remedy=remedy) from error
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise ConfigError([Problem(where, f"{path} has no function {name!r}")], remedy=_instead(module, name)) from None
    if not callable(found):
        raise ConfigError([Problem(where, f"{name!r} in {path} is not a function")], remedy=_instead(module, name))
    return found  # type: ignore[no-any-return]


def _instead(module: Any, name: str) -> str:
    """What a file has instead of the function that was named."""
    import difflib

    own = [
        known
        for known, value in vars(module).items()
        if callable(value) and known[0] != "_" and getattr(value, "__module__", None) == module.__name__
    ]
    close = difflib.get_close_matches(name, own, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"It has: {', '.join(own)}." if own else "It has no functions at all."


_modules: dict[Path, tuple[dict[str, str], Any]] = {}
"""users' files that are loaded, with the digests of the code they were loaded with"""


def _module(path: Path, folder: Path) -> Any:
    """The file as it is now. What was loaded before from other code, or for another file, is loaded anew."""
    digests = source_fingerprint(path, folder)
    if path in _modules and _modules[path][0] == digests:
        return _modules[path][1]
    _forget_others(path, digests)
    sys.path[:] = [str(path.parent), *(entry for entry in sys.path if entry != str(path.parent))]
    # The script that runs us, or something it has imported, is there already, and must not run a second time.
    known = [] if path in _modules else [sys.modules.get(name) for name in (path.stem, "__main__")]
    files = ((module, getattr(module, "__file__", None)) for module in known)
    module = next((module for module, file in files if file and Path(file).resolve() == path), None)
    if module is None:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ImportError("not a Python file")
        module = importlib.util.module_from_spec(spec)
        before = sys.modules.get(path.stem)
        sys.modules[path.stem] = module  # so that dataclasses and pickles inside it work
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(path.stem, None)  # not half of it, the next time
            raise
        finally:
            if before is not None and not _is_users(before):
                sys.modules[path.stem] = before
    _modules[path] = digests, module
    return module


def _forget_others(path: Path, digests: dict[str, str]) -> None:
    """Two files may each import a `util` of their own, and a helper may have changed since it was imported."""
    local = {file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in digests}
    for name in [name for name in sys.modules if name in local and name != path.stem]:
        if _is_users(sys.modules[name]):
            del sys.modules[name]


def _is_users(module: Any) -> bool:
    """Whether a module is a user's file, and not Python's or an installed package's."""
    file = getattr(module, "__file__", None)
    if file is None:
        return False
    places = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return not any(Path(file).is_relative_to(place) for place in places if place)


class Function:
    """A user's function and the parameters it asks for."""

    def __init__(self, function: Callable[..., Any], offered: tuple[str, ...], where: str) -> None:
        self._function = function
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self.names = [
            parameter.name
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        required = [
            parameter.name
            for parameter in parameters
            if parameter.name in self.names and parameter.default is parameter.empty
        ]
        strange = [name for name in required if name not in offered]
        if strange:
            said = f"the function asks for {', '.join(strange)}; it can have {', '.join(offered)}"
            raise ConfigError([Problem(where, said)])
        call = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)

    def takes(self, name: str) -> bool:
        """Whether it asks for a value."""
        return self._takes_all or name in self.names

    async def __call__(self, offered: Mapping[str, Any]) -> Any:
        """Call it with those of the offered values it names."""
        arguments = (
            dict(offered) if self._takes_all else {name: offered[name] for name in self.names if name in offered}
        )
        try:
            if self._is_async:
                return await self._function(**arguments)
            result = await _in_thread(functools.partial(self._function, **arguments))
            return await result if inspect.isawaitable(result) else result
        except SystemExit as error:  # it may leave its own work, but not take the run with it
            raise RuntimeError(f"the function called sys.exit({error.code!r})") from error
        except KeyboardInterrupt as error:  # a real one never comes out of a function: the run has its own handler
            raise RuntimeError(f"the function raised KeyboardInterrupt: {error}") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Nobody cancelled us: it leaked out of the function, and would end the worker without a word.
            raise RuntimeError("the function was cancelled from inside") from error


def said_with_place(error: BaseException) -> str:
    """An exception of a user's code with the line of theirs that raised it: `agent.py:12: ValueError: odd`."""
    ours = Path(__file__).parent
    frames = traceback.extract_tb(error.__traceback__)
    place = next((frame for frame in reversed(frames) if not Path(frame.filename).is_relative_to(ours)), None)
    where = f"{Path(place.filename).name}:{place.lineno}: " if place is not None else ""
    return f"{where}{type(error).__name__}: {error}"


async def _in_thread(call: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return  # given up on
        if error is None:
            future.set_result(result)
        elif isinstance(error, StopIteration):
            future.set_exception(RuntimeError("the function raised StopIteration"))
        elif isinstance(error, SystemExit):
            future.set_exception(RuntimeError(f"the function called sys.exit({error.code!r})"))
        elif not isinstance(error, Exception):
            future.set_exception(RuntimeError(f"the function raised {type(error).__name__}: {error}"))
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="holdfast-function", daemon=True).start()
    return await future
