"""Users' functions by `file.py:name` or `package.module:name`: found, loaded once, and fingerprinted.

A file is loaded once in a process, whatever it does to `sys.path` and however many of its functions are used, and so
are the modules that it imports: all functions share global variables. It is loaded again only when its code, or the
code of a module that it imports, has changed on disk.

Fingerprints come from reading. If reading does not show everything (`Scan.doubtful`), the file is loaded, and the files
that it actually imported are added. A plan, which runs nothing, takes them from the last run (`spec.learning`).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
from functools import cache, lru_cache
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.errors import ConfigError, HoldfastError, Problem
from holdfast.functions.calling import describe_error
from holdfast.functions.observing import observe
from holdfast.spec.fingerprint import (
    ADDED_TO_PATH,
    SESSION_FILE,
    Scan,
    installed_distribution,
    is_file,
    is_installed,
    learn,
    local_module,
    may_run,
    note_files,
    package_files,
    scan,
    source_digest,
)
from holdfast.spec.target_schema import SESSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from importlib.abc import PathEntryFinder


class Reference(NamedTuple):
    """A function that an eval names, as `file.py:name` or `package.module:name`."""

    path: Path | None
    """the local file; None if the module is installed"""
    module: str | None
    """the module's name; None if a file is named"""
    name: str
    """in the file or module"""

    def __str__(self) -> str:
        """Return the file or module, for messages."""
        return str(self.path or self.module)


def function_source(
    reference: str, folder: Path, where: str, functions: Mapping[str, Any] | None = None
) -> tuple[str, dict[str, str]]:
    """Return a function's name and what identifies its code; `where` is the place in the eval file, for messages.

    Local code is identified by digests, installed code by its distribution. `functions` were passed from Python, so
    their files are loaded already. The code of a typed-in function is in no file; `functions.callables` has put its
    digest into `version`.
    """
    if reference.startswith(SESSION):
        note_files([SESSION_FILE])
        return reference.rpartition(":")[2], {}
    path, module, name = find_function(reference, folder, where)
    if path is None:
        assert module is not None
        return reference, module_source(module, folder)
    packages = [] if module is None else package_files(path)
    read = scan(path, folder, more=packages)
    if not read.doubtful:
        return name, read.digests
    if functions and reference in functions:
        return name, scan(path, folder, imported_files).digests
    loaded = read

    def imports() -> list[str]:
        nonlocal loaded
        loaded = _load(path.resolve(), folder, module).scan
        return sorted(map(str, loaded.files))

    about = ["imports", str(path.resolve()), str(folder.resolve()), read.digests]
    unknown = (
        f"{where}: {path.name} changes sys.path, or imports modules by names that it computes. Which modules these are "
        "is unknown until it runs, so the run may have another id, and more or less to do"
    )
    try:
        files = learn(about, list[str], imports, unknown)
        if files is not None and loaded is read:  # an earlier run has learned which files it imports
            loaded = scan(path, folder, more=[*packages, *(Path(file) for file in files if is_file(Path(file)))])
    except Exception:  # in the user's file; `load_function` reports it
        return name, read.digests
    note_files(loaded.files)
    return name, loaded.digests


def module_source(module: str, folder: Path) -> dict[str, str]:
    """Return what identifies a module's code: digests of local files, or the distribution of an installed module."""
    if module.partition(".")[0] in sys.stdlib_module_names:
        return {module: f"Python {sys.version_info.major}.{sys.version_info.minor}"}
    path = local_module(module)
    if path is None:
        if not may_run() and local_module(module.partition(".")[0]) is not None:
            return {}  # searching for a module imports its package
        spec = importlib.util.find_spec(module)
        path = Path(spec.origin) if spec is not None and spec.origin else None
        if path is None:
            return {}
        if (distribution := installed_distribution(path)) is not None:
            return {module: distribution}
    packages = package_files(path)
    read = scan(path, folder, more=packages)
    return scan(path, folder, imported_files, packages).digests if read.doubtful else read.digests


def find_function(reference: str, folder: Path, where: str) -> Reference:
    """Find the file or module of a function; raise ConfigError if it does not exist."""
    place, _, name = reference.rpartition(":")
    if reference.startswith(SESSION):
        raise ConfigError(
            [Problem(where, f"{name} is defined in a notebook or interpreter, not in a file")],
            remedy="Call holdfast.evaluate there again, or move the function to a .py file.",
        )
    if not place.endswith(".py"):
        if not _has_module(place):
            raise ConfigError(
                [Problem(where, f"no module named {place}")],
                remedy=f"Install its package for {sys.executable}, or name a file, as FILE.py:{name}.",
            )
        return Reference(local_module(place), place, name)
    path = folder / Path(place).expanduser()
    if not is_file(path):
        raise ConfigError(
            [Problem(where, f"{path}: no such file")],
            remedy=f"Name the function as FILE.py:NAME, the file relative to {folder}.",
        )
    return Reference(path, None, name)


def parameters_of(reference: str, folder: Path, functions: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the names of a function's parameters without running its file; None if the file does not show them."""
    if reference in functions:
        function = functions[reference]
        called = function.__call__ if inspect.isclass(function) else function
        try:
            parameters = inspect.signature(called).parameters.values()
        except (TypeError, ValueError):
            return None
        every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        return None if every else frozenset(parameter.name for parameter in parameters) - {"self"}
    try:
        path, _, name = find_function(reference, folder, "")
        body: list[ast.stmt] = [] if path is None else ast.parse(path.read_bytes()).body
    except (HoldfastError, OSError, SyntaxError, ValueError):
        return None  # calling the function reports it
    for part in (name, "__call__"):
        node = next((each for each in body if getattr(each, "name", None) == part), None)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
            signature = node.args
            listed = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs]
            return None if signature.kwarg else frozenset(each.arg for each in listed) - {"self"}
        body = node.body if isinstance(node, ast.ClassDef) else []
    return None


def _has_module(name: str) -> bool:
    if not may_run():
        name = name.partition(".")[0]  # searching for a module imports its packages
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
    except Exception:  # raised by its package: importing the module reports it
        return True


def load_function(
    reference: str, folder: Path, where: str, functions: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Import the file or module and return the function; `where` is the place in the eval file, for messages.

    `functions` were passed from Python.
    """
    if functions is not None and reference in functions:
        observe(folder)
        return functions[reference]  # type: ignore[no-any-return]
    location = find_function(reference, folder, where)
    try:
        if location.path is None:
            assert location.module is not None
            module = importlib.import_module(location.module)
        else:
            module = _load(location.path.resolve(), folder, location.module).module
    except ConfigError:
        raise
    except Exception as error:  # any exception of the user's file
        message = f"{location} cannot be imported: {describe_error(error)}"
        missing = isinstance(error, ModuleNotFoundError)
        remedy = f"Install it for {sys.executable}, or put it in the file's folder." if missing else None
        raise ConfigError([Problem(where, message)], remedy=remedy) from error
    function: Any = module
    try:
        for part in location.name.split("."):
            function = getattr(function, part)
    except AttributeError:
        hint = _suggest(module, location.name)
        raise ConfigError([Problem(where, f"{location} has no function {location.name!r}")], remedy=hint) from None
    if not callable(function):
        hint = _suggest(module, location.name)
        raise ConfigError([Problem(where, f"{location.name!r} in {location} is not a function")], remedy=hint)
    return function  # type: ignore[no-any-return]


def _suggest(module: Any, name: str) -> str:
    """Return a hint with the functions that a module has."""
    import difflib

    functions = [
        key
        for key, value in vars(module).items()
        if callable(value) and key[0] != "_" and getattr(value, "__module__", None) == module.__name__
    ]
    close = difflib.get_close_matches(name, functions, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"It has: {', '.join(functions)}." if functions else "It has no functions at all."


class _Loaded(msgspec.Struct, frozen=True):
    """A loaded user's file, with the digests of its code at that time."""

    module: Any
    scan: Scan
    """the file, and everything that it imported"""

    @property
    def is_current(self) -> bool:
        return all(source_digest(path) == digest for path, digest in self.scan.files.items())


_modules: dict[Path, _Loaded] = {}
_digests: dict[Path, str] = {}
"""digests of users' modules at the time of their import"""


class _SourceLoader(SourceFileLoader):
    """Loads users' modules, and uses cached bytecode only if it certainly belongs to the source.

    Python accepts bytecode if the source's size and modification time, in whole seconds, match. Keys are digests of
    the source, so bytecode written in the second of the last change could belong to another key.
    """

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        try:
            written = Path(importlib.util.cache_from_source(path)).stat().st_mtime
        except (OSError, NotImplementedError):
            return super().get_code(fullname)
        if written < int(Path(path).stat().st_mtime) + 1:
            return self.source_to_code(self.get_data(path), path)
        return super().get_code(fullname)


_users_folders = FileFinder.path_hook(
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (_SourceLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)


def _find_in(entry: str) -> PathEntryFinder:
    """Find modules in a user's folder; a hook for `sys.path_hooks`."""
    if _is_installed(entry):
        raise ImportError("for Python's own finder")
    return _users_folders(entry)


def _distrust_bytecode() -> None:
    """Let imports from users' folders go through `_SourceLoader`."""
    if _find_in not in sys.path_hooks:
        sys.path_hooks.insert(0, _find_in)
        for entry in [entry for entry in sys.path_importer_cache if not _is_installed(entry)]:
            del sys.path_importer_cache[entry]


def _load(path: Path, folder: Path, module_name: str | None = None) -> _Loaded:
    """Load the current version of a file, at most once; under its module's name if the eval names a module."""
    earlier = _modules.get(path)
    if earlier is not None and earlier.is_current:
        return earlier
    observe(path.parent, folder)
    _distrust_bytecode()
    packages = [] if module_name is None else package_files(path)
    read = scan(path, folder, more=packages)
    _forget_stale(path, read, earlier)
    entries, names = set(sys.path), set(sys.modules)
    if module_name is None:
        sys.path[:] = [str(path.parent), *(entry for entry in sys.path if entry != str(path.parent))]
    try:
        module = _imported_already(path, module_name or path.stem) if earlier is None else None
        if module is None:
            module = _execute(path) if module_name is None else _import_anew(module_name)
    finally:
        ADDED_TO_PATH.update(set(sys.path) - entries)
    more = [file for name in set(sys.modules) - names if (file := users_file(sys.modules[name])) is not None]
    complete = scan(path, folder, imported_files, [*packages, *sorted(set(more) - read.files.keys())])
    _digests.update(complete.files)
    _modules[path] = _Loaded(module, complete)
    return _modules[path]


def _import_anew(name: str) -> Any:
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def _imported_already(path: Path, module_name: str) -> Any:
    """Return the module if it is the running script, or was imported by it, so that it does not run twice."""
    for name in (module_name, "__main__"):
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None or not file or Path(file).resolve() != path:
            continue
        if module_is_current(module, path):
            return module
        if name == "__main__":
            raise ImportError("it has changed since this process was started with it: start it again")
    return None


def _execute(path: Path) -> Any:
    loader = _SourceLoader(path.stem, str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
    if spec is None or path.suffix not in SOURCE_SUFFIXES:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # so that dataclasses and pickles inside it work
    try:
        loader.exec_module(module)
    except SystemExit as error:
        sys.modules.pop(path.stem, None)
        raise ImportError(f"it calls sys.exit({error.code!r}) when it is imported") from error
    except BaseException:
        sys.modules.pop(path.stem, None)  # or the next import would get half of it
        raise
    finally:
        if before is not None and users_file(before) is None:
            sys.modules[path.stem] = before
    return module


def _forget_stale(path: Path, read: Scan, earlier: _Loaded | None) -> None:
    """Forget imported modules that have changed on disk, or whose names refer to other files here.

    Two files may each import their own `util`. Current modules stay, so that files share them.
    """
    local = {file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in read.digests}
    files = {**(earlier.scan.files if earlier is not None else {}), **read.files}
    own_names = path.stem, "__main__"
    for name, module in list(sys.modules.items()):
        if name in own_names or (file := users_file(module)) is None:
            continue
        loaded_with = _digests.get(file) if file in files else None
        if (loaded_with is None and name in local) or (loaded_with and loaded_with != source_digest(file)):
            del sys.modules[name]


def is_what_the_file_says(function: Callable[..., Any], file: str) -> bool:
    """Return True if the code that would run is the code in the file, which may have changed since its import."""
    plain = inspect.unwrap(function)
    if (code := getattr(plain, "__code__", None)) is not None:
        codes = [code]
    else:
        codes = [method.__code__ for _, method in methods_of(plain if inspect.isclass(plain) else type(plain))]
    try:
        text = Path(file).read_bytes()
    except OSError:
        return False
    return all(any(match.co_qualname == code.co_qualname for match in find_compiled(text, code)) for code in codes)


def methods_of(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield a class's own functions by name, undecorated and without the ones that `dataclass` adds."""
    for name, value in vars(kind).items():
        inner = inspect.unwrap(getattr(value, "__func__", None) or getattr(value, "fget", None) or value)
        if isinstance(inner, FunctionType) and inner.__code__.co_qualname == f"{kind.__qualname__}.{inner.__name__}":
            yield name, inner


def find_compiled(text: str | bytes, code: CodeType) -> Iterator[CodeType]:
    """Yield the parts of a source that compile to this code."""
    for part in _code_parts(text, code.co_filename):
        if (part.co_name, part.co_code, part.co_names) == (code.co_name, code.co_code, code.co_names):
            constants = [[c for c in side.co_consts if not isinstance(c, CodeType)] for side in (part, code)]
            if constants[0] == constants[1]:
                yield part


@lru_cache(maxsize=4)
def _code_parts(text: str | bytes, filename: str) -> tuple[CodeType, ...]:
    """Return all code objects that a source compiles to."""
    try:
        waiting = [compile(text, filename, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return ()
    parts = []
    while waiting:
        parts.append(waiting.pop())
        waiting += [constant for constant in parts[-1].co_consts if isinstance(constant, CodeType)]
    return tuple(parts)


def module_is_current(module: ModuleType, file: Path) -> bool:
    """Return True if the functions of a loaded module are the functions in its file."""
    values = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    return all(is_what_the_file_says(value, str(file)) for value in values if isinstance(value, FunctionType))


def imported_files(parts: tuple[str, ...]) -> list[Path]:
    """Return the users' files of an imported module `a.b.c` and its packages."""
    names = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    files = (users_file(sys.modules[name]) for name in names if name in sys.modules)
    return [file for file in files if file is not None]


def users_file(module: Any) -> Path | None:
    """Return the file of a user's module; None for modules of Python, installed packages and Holdfast."""
    name, file = getattr(module, "__name__", ""), getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py") or str(name).partition(".")[0] == "holdfast":
        return None
    path = Path(os.path.realpath(file)) if not _is_installed(file) else None
    return path if path is not None and is_file(path) else None


@cache
def _is_installed(file: str) -> bool:
    """Return True for an installed file; cached, because thousands of modules are examined."""
    return is_installed(file) or is_installed(os.path.realpath(file))
