"""Functions and objects that are passed from Python: their references, and their identities.

A function or class of a file is identified by the file's code, as in an eval file, and by the values that it carries:
closed-over ones, and the state of the object whose method it is. An agent that opens a client, counts calls or fills
a cache is the same agent in the next run: changes by a run are not part of the key, changes between two runs are.

A function that was typed into a notebook or an interpreter has no file. It is identified by its own code, and by the
parts of the session that it uses: other functions and classes that were typed in, modules that are user files, and
global variables with plain values (text, numbers, lists, mappings). `Callables.uncovered` lists parts that cannot be
covered.

In a block, a function is replaced by a reference like in an eval file, and a digest of the values that the function
carries becomes the block's version.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import re
import sys
import textwrap
import weakref
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.canonical import digest, digest_bytes
from holdfast.errors import UsageError
from holdfast.functions.loading import (
    find_compiled,
    imported_files,
    is_what_the_file_says,
    methods_of,
    module_is_current,
    users_file,
)
from holdfast.spec.fingerprint import scan, token_bytes
from holdfast.spec.grader_schema import TAKEN_NAMES
from holdfast.spec.target_schema import SESSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CHANGES: Final = frozenset(
    {"append", "add", "update", "setdefault", "pop", "popitem", "extend", "insert", "clear", "remove", "discard"}
)
"""methods that change the list or mapping they belong to"""


@dataclass
class Callables:
    """Functions passed from Python, by the references that replace them in the eval."""

    functions: dict[str, Any] = field(default_factory=dict)
    uncovered: list[str] = field(default_factory=list)
    """warnings about parts of the session that functions use and that their identity does not cover"""
    _added: list[Callable[..., Any]] = field(default_factory=list, repr=False)

    def add(self, function: Callable[..., Any]) -> tuple[str, str | None]:
        """Add a function; return its reference, and a version for the values that it carries."""
        if isinstance(function, functools.partial):
            raise UsageError(
                "a functools.partial has no source code, so Holdfast cannot detect when its arguments change",
                remedy="Write a function that calls it.",
            )
        name = getattr(function, "__qualname__", type(function).__qualname__)
        file = None if any(map(_is_typed, _layers(function))) else _file(function)
        self._added.append(function)
        carried = _carried_values(function)
        if file is None:
            session = _Session()
            carried["session"] = session.of(_plain(function), *_layers(function)[:-1])
            if session.uncovered:
                self.uncovered.append(
                    f"{name} uses {', '.join(session.uncovered)}, which its key does not cover: a change there is not "
                    "noticed. Pass `fresh=True`, or change the function, to run again."
                )
        elif not is_what_the_file_says(function, file):
            raise _changed_since(file, name)
        place = SESSION if file is None else f"{file}:"
        reference = base = place + name.replace(".<locals>", "").replace("<lambda>", "lambda_")
        number = 1
        while self.functions.setdefault(reference, function) is not function:  # such as two lambdas of one file
            number += 1
            reference = f"{base}_{number}"
        return reference, digest(carried) if carried else None

    def release(self) -> None:
        """Record the state of all functions and objects at the end of a run."""
        for function in self._added:
            for owner, values in _owned(function):
                _release(owner, values)


def capture_grader(grader: Mapping[str, Any] | Callable[..., Any], captured: Callables) -> Any:
    """Return a grader's block. A bare function is a Python grader with the function's name."""
    named = {"type": "python", "name": _grader_name(grader)} if callable(grader) else {}
    return {**named, **capture_block(grader, "function", captured)}


def capture_block(value: Any, key: str, captured: Callables, *, allow_class: bool = False) -> Any:
    """Return a block with references in place of its functions, which are added to `captured`.

    A bare function stands for the block that has the function under `key`. With `allow_class`, a class may be there
    too.
    """
    if callable(value):
        value = {key: value}
    if not isinstance(value, Mapping):
        return value  # validating the eval reports the problem
    block: dict[str, Any] = {}
    versions: list[str] = []

    def capture(inner: Any, *, class_allowed: bool = False) -> Any:
        if inspect.isclass(inner) and not class_allowed:
            raise UsageError(
                f"{inner.__qualname__} is a class; only targets may be classes", remedy="Pass an object of that class."
            )
        if callable(inner):
            inner, version = captured.add(inner)
            versions.extend([] if version is None else [version])
        return inner

    for name, inner in value.items():
        if name == "tools" and isinstance(inner, list | tuple):
            block[name] = [capture_block(tool, "python", captured) for tool in inner]
        elif name == "state" and isinstance(inner, Mapping):
            block[name] = {hook: capture(function) for hook, function in inner.items()}
        else:
            block[name] = capture(inner, class_allowed=allow_class and name == key)
    if versions:
        version = block.get("version")
        block["version"] = versions[0] if len(versions) == 1 and version is None else digest([version, *versions])
    return block


def _grader_name(function: Callable[..., Any]) -> str:
    """Return a function's name, or the name of a callable object's class; reserved names get a suffix."""
    name = str(getattr(function, "__name__", type(function).__name__))
    return f"{name}_function" if name in TAKEN_NAMES else name


def _changed_since(file: str, name: str) -> UsageError:
    return UsageError(
        f"{file} has changed since {name} was imported from it",
        remedy="Import it again (importlib.reload, or restart Python), so that the file's current code runs.",
    )


def _plain(function: Callable[..., Any]) -> Any:
    """Return the holder of the code: the undecorated function, or the class of a method or a callable object."""
    plain = inspect.unwrap(function)
    if inspect.ismethod(plain):
        owner = plain.__self__
        return owner if inspect.isclass(owner) else type(owner)
    return plain if inspect.isroutine(plain) or inspect.isclass(plain) else type(plain)


def _layers(value: Any) -> list[Any]:
    """Return a function and the functions that its decorators wrap, innermost last."""
    layers = [value]
    while (inner := getattr(layers[-1], "__wrapped__", None)) is not None and inner not in layers:
        layers.append(inner)
    return layers


def _file(function: Callable[..., Any]) -> str | None:
    """Return the file that defines a function; None if the function was typed in."""
    plain = inspect.unwrap(function)
    code = getattr(plain, "__code__", None)
    holder = plain if inspect.isroutine(plain) or inspect.isclass(plain) else type(plain)
    methods = [method for _, method in methods_of(holder)] if inspect.isclass(holder) else []
    try:  # methods name their file; Python finds a class's file only by its module's name
        file = inspect.getsourcefile(methods[0] if methods else holder)
    except (TypeError, OSError):
        file = None
    if file is not None and Path(file).is_file():
        return file
    if code is None and not _typed_in(holder):
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise UsageError(
            f"{name} is not written in Python, so Holdfast cannot detect when it changes",
            remedy="Write a function that calls it.",
        )
    return None


def _typed_in(value: Any) -> bool:
    """Return True for a class or function typed into a notebook or an interpreter, or made by `exec`."""
    if isinstance(value, FunctionType):
        return not Path(value.__code__.co_filename).is_file()
    if getattr(value, "__module__", None) != "__main__":
        return False
    methods = [inner for inner in vars(value).values() if isinstance(inner, FunctionType)]
    return (
        any(map(_typed_in, methods))
        if methods
        else not Path(getattr(sys.modules["__main__"], "__file__", "")).is_file()
    )


def _carried_values(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the values that a function carries besides its source, as of its first use."""
    carried: dict[str, Any] = {}
    for owner, values in _owned(function):
        identity = _recall(owner, values)
        if not _is_json(identity):
            raise UsageError(
                f"{getattr(function, '__qualname__', function)} captures {', '.join(identity)}, whose changes "
                "Holdfast cannot detect",
                remedy="Use plain values (texts, numbers, lists), or a function that creates what it needs.",
            )
        _keep(owner, identity)
        carried |= identity
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is not None and "<" in code.co_qualname:
        carried["code"] = _code_digest(code)  # a lambda's name is not unique in its file
    return carried


def _owned(function: Callable[..., Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the carriers of values: the object of a method, and the function or class with its closures."""
    plain = inspect.unwrap(function)
    owner = plain.__self__ if inspect.ismethod(plain) else None if inspect.isroutine(plain) else plain
    if owner is not None and not inspect.ismodule(owner) and not inspect.isclass(owner):
        yield owner, _without_code({f"self.{name}": value for name, value in _attributes(owner)})
    if inspect.isclass(plain):
        yield plain, _without_code(dict(_closed_over_by_methods(plain)))
    elif inspect.isroutine(plain):
        yield getattr(plain, "__func__", plain), _without_code(dict(_closed_over(plain)))


def _without_code(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not (callable(value) or inspect.ismodule(value))}


def _closed_over(function: Any) -> Iterator[tuple[str, Any]]:
    code = getattr(function, "__code__", None)
    for name, cell in zip(getattr(code, "co_freevars", ()), getattr(function, "__closure__", None) or (), strict=True):
        with suppress(ValueError):  # not filled yet
            yield name, cell.cell_contents


def _closed_over_by_methods(kind: type) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        for name, method in methods_of(base):
            yield from ((f"{base.__qualname__}.{name}.{free}", value) for free, value in _closed_over(method))


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's attributes, including slots."""
    yield from getattr(owner, "__dict__", {}).items()
    for kind in type(owner).__mro__:
        for name, slot in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # not set
                    yield name, slot.__get__(owner)


def _is_json(value: Any) -> bool:
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _code_digest(code: CodeType) -> str:
    constants = [_code_digest(c) if isinstance(c, CodeType) else _constant(c) for c in code.co_consts]
    return digest([code.co_code.hex(), list(code.co_names), constants])


def _constant(value: Any) -> str:
    """Return a constant of compiled code as text; sets are sorted, since their order differs between processes."""
    if isinstance(value, frozenset) and not all(isinstance(inner, int) for inner in value):
        return f"frozenset({sorted(map(repr, value))})"
    return repr(value)


@dataclass
class _State:
    values: dict[str, Any]
    """the values that identify the object"""
    marks_after_run: dict[str, object] | None = None
    """marks of the values at the end of the last run; None while a run uses the object"""


_states: dict[int, tuple[Callable[[], Any], _State]] = {}
"""by the object's `id`: objects need not be hashable"""


def _recall(owner: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that identify an object: from its first use, updated by changes between runs."""
    state = _state_of(owner)
    if state is None:
        return dict(values)
    identity = dict(state.values)
    if state.marks_after_run is None:
        return identity
    marks = _marks(values)
    for name in {*state.marks_after_run, *marks}:
        if state.marks_after_run.get(name) != marks.get(name):
            identity.pop(name, None)
            if name in values:
                identity[name] = values[name]
    return identity


def _keep(owner: Any, values: Mapping[str, Any]) -> None:
    """Keep the values that identify an object while a run uses it."""
    number = id(owner)
    alive: Callable[[], Any]
    try:
        alive = weakref.ref(owner, lambda _: _states.pop(number, None))
    except TypeError:  # it has only slots: kept alive, or another object could get its id
        alive = lambda: owner  # noqa: E731
    _states[number] = alive, _State(deepcopy(dict(values)))


def _release(owner: Any, values: Mapping[str, Any]) -> None:
    """Record the values of an object at the end of a run."""
    if (state := _state_of(owner)) is not None:
        state.marks_after_run = _marks(values)


def _state_of(owner: Any) -> _State | None:
    alive, state = _states.get(id(owner), (lambda: None, None))
    return state if alive() is owner else None


def _marks(values: Mapping[str, Any]) -> dict[str, object]:
    return {name: _mark(value) for name, value in values.items()}


def _mark(value: Any) -> object:
    """Return a mark that distinguishes a value from others: its content, or its identity."""
    try:
        return msgspec.json.encode(value, order="deterministic")
    except (TypeError, ValueError, RecursionError):
        return type(value), id(value)


class _Session:
    """The parts of a session that a typed-in function depends on, directly or not."""

    def __init__(self) -> None:
        self.uncovered: list[str] = []
        self._parts: dict[str, Any] = {}
        self._seen: list[Any] = []

    def of(self, *values: Any) -> dict[str, Any]:
        """Return digests of everything that functions or classes depend on, by name."""
        for value in values:
            self._add(getattr(value, "__qualname__", type(value).__qualname__), value)
        return self._parts

    def _add(self, name: str, value: Any) -> None:
        if any(value is earlier for earlier in self._seen):
            return
        self._seen.append(value)
        if isinstance(value, ModuleType) or not _is_typed(value):
            self._add_imported(name, value)
        elif isinstance(value, type):
            self._add_class(name, value)
        else:
            self._add_function(name, value)

    def _add_function(self, name: str, function: FunctionType) -> None:
        text, tree = _source(function)
        code = function.__code__
        while name in self._parts:
            name += "'"  # another function of this name, such as a wrapper
        self._parts[name] = _code_digest(code) if text is None else digest_bytes(token_bytes(text))
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if callable(default):
                self._add(f"{name}.{getattr(default, '__qualname__', '')}", default)
        changed = set() if tree is None else set(_changed_names(tree))
        for used in dict.fromkeys(_globals_used(code)):
            if used in function.__globals__ and used not in changed:
                self._add_global(used, function.__globals__[used])
            elif used in changed:
                self.uncovered.append(used)
        for free, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # not filled yet
                if callable(cell.cell_contents):
                    self._add_global(free, cell.cell_contents)

    def _add_class(self, name: str, kind: type) -> None:
        for base in kind.__mro__[1:]:
            if _is_typed(base):
                self._add(base.__qualname__, base)
        for attribute, value in vars(kind).items():
            inner = inspect.unwrap(getattr(value, "__func__", None) or getattr(value, "fget", None) or value)
            if isinstance(inner, FunctionType):
                self._add(f"{name}.{attribute}", inner)
            elif not attribute.startswith("__") and _is_json(value):
                self._parts[f"{name}.{attribute}"] = _value_digest(value)

    def _add_global(self, name: str, value: Any) -> None:
        *wrappers, plain = _layers(value) if callable(value) else [value]
        for wrapper in wrappers:
            self._add(name, wrapper)
        if isinstance(plain, ModuleType | FunctionType | type):
            self._add(name, plain)
        elif isinstance(plain, re.Pattern):
            self._parts[name] = digest([repr(plain.pattern), plain.flags])
        elif _is_json(plain):
            self._parts[name] = _value_digest(plain)
        elif type(plain).__module__ == "typing":
            self._parts[name] = digest(repr(plain))
        elif not inspect.isroutine(plain):
            self.uncovered.append(name)

    def _add_imported(self, name: str, value: Any) -> None:
        """Add a module, or a name imported from a module, if the module is a user's file."""
        module = value if isinstance(value, ModuleType) else inspect.getmodule(value)
        if module is None or (file := users_file(module)) is None:
            return
        if not module_is_current(module, file):
            raise _changed_since(str(file), module.__name__)
        self._parts[f"{name} of {module.__name__}"] = digest(scan(file, file.parent, imported_files).digests)


def _is_typed(value: Any) -> bool:
    return isinstance(value, FunctionType | type) and _typed_in(value)


def _value_digest(value: Any) -> str:
    """Return the digest of a plain value; sets are sorted, since their order differs between processes."""
    return digest_bytes(msgspec.json.encode(value, order="deterministic"))


def _source(function: FunctionType) -> tuple[str | None, ast.AST | None]:
    """Return a function's source and syntax tree, if Python has them; not for lambdas, whose lines contain more."""
    try:
        text = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(text)
    except (OSError, TypeError, SyntaxError, ValueError):
        return None, None
    if function.__name__ == "<lambda>" or not any(find_compiled(text, function.__code__)):
        return None, None  # such as code that was typed in later under this name
    return text, tree


def _globals_used(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_used(constant)


def _changed_names(tree: ast.AST) -> Iterator[str]:
    """Yield variables that a function visibly changes: counters and caches are not part of its identity."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            yield from _root_name(node.func.value)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield from _root_name(node.value)


def _root_name(node: ast.AST) -> Iterator[str]:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id
