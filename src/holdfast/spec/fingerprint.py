"""Fingerprints of code, taken by reading files and never by importing them.

A function's fingerprint covers its file and every local module that the file imports, directly or indirectly. It
digests tokens rather than text: a new comment or another layout reruns nothing, but a changed docstring, which code can
read, does. Local modules are next to the file, in the eval's folder, or elsewhere on Python's path (PYTHONPATH,
editable installs); imports of the standard library and of installed packages are not followed.

Reading has limits: code that changes `sys.path`, or imports by a computed name, may import files that reading misses. A
`Scan` records such code, so that callers can look at the modules that were really imported, or warn.

Some facts need a process (`learn`): the version of a program, computed imports. A run asks, and keeps the answer in
`$HOLDFAST_HOME/learned`. A plan starts nothing from the eval: it uses the answer for exactly this program or file, or
notes that the fact is unknown.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import sys
import sysconfig
import tokenize
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec

from holdfast.canonical import digest, digest_bytes
from holdfast.errors import ConfigError, Problem
from holdfast.store.files import make_directory, replacing
from holdfast.store.home import home_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
_COMPUTED: Final = frozenset(
    {"import_module", "__import__", "spec_from_file_location", "SourceFileLoader", "exec_module", "load_module"}
    | {"run_path", "run_module", "addsitedir", "iter_modules", "walk_packages", "exec"}
)
"""functions that import or run something that only the running program knows"""
_INTERPRETER: Final = re.compile(r"(python|pypy)[\d.]*(\.exe)?")

ADDED_TO_PATH: Final[set[str]] = set()
"""entries of `sys.path` that loading users' files added. They are ignored, or a fingerprint would depend on what this
process loaded before"""
SESSION_FILE: Final = Path("<session>")
"""stands for the code of functions that were typed into a notebook or an interpreter"""
_noted: Final[ContextVar[set[Path] | None]] = ContextVar("_noted", default=None)
_unknown: Final[ContextVar[list[str] | None]] = ContextVar("_unknown", default=None)
"""unknown facts, while nothing may run; None: everything may run"""

T = TypeVar("T")


class _Import(NamedTuple):
    level: int
    """the number of dots of a relative import; else 0"""
    parts: tuple[str, ...]
    is_module: bool
    """False: the last part may be a name inside the module"""


class _Parsed(NamedTuple):
    digest: str
    imports: tuple[_Import, ...]
    computed: int | None
    """the first line with an import that reading does not show"""


class Scan(msgspec.Struct):
    """A Python file and the local modules that reading shows it to import."""

    files: dict[Path, str] = {}
    """digests in the order of discovery"""
    digests: dict[str, str] = {}
    """digests by names relative to the folders of the files, sorted"""
    computed: str | None = None
    """`file.py:3`, the place of code that may import more than reading shows"""
    unresolved: bool = False
    """an imported module was not found"""

    @property
    def doubtful(self) -> bool:
        """True if importing the file may bring in more than reading shows."""
        return self.unresolved or self.computed is not None


def scan(
    entry: Path,
    folder: Path,
    lookup: Callable[[tuple[str, ...]], list[Path]] = lambda _: [],
    more: Iterable[Path] = (),
    text: str | None = None,
) -> Scan:
    """Read `entry` and every local module that it imports, directly or indirectly.

    Modules are searched for in `folder`, the eval file's, next to the entry file, and on Python's path; `lookup` is
    asked for the others. `more` are further files that are known to belong to the entry. `text` is the source if
    `entry` is not a file.
    """
    result = Scan()
    entry = entry.resolve()
    roots = list(dict.fromkeys([entry.parent, _package_root(entry), folder.resolve()]))
    waiting = [*more, entry]
    while waiting:
        path = waiting.pop()
        if path in result.files:
            continue
        parsed = _parsed_file(path, text if path == entry else None)
        result.files[path] = parsed.digest
        if parsed.computed is not None and result.computed is None:
            result.computed = f"{path.name}:{parsed.computed}"
        for imported in parsed.imports:
            files = _files_of(imported, path, roots)
            if files is None:
                files = lookup(imported.parts)
                result.unresolved |= imported.is_module and not files
            waiting.extend(files)
    for path, content in result.files.items():
        name = path.name if path == entry else _relative(path, [*roots, _package_root(path)])
        while name in result.digests:  # two files of the same name, found from different places, both count
            name = f"../{name}"
        result.digests[name] = content
    result.digests = dict(sorted(result.digests.items()))
    note_files(result.files)
    return result


def local_module(name: str) -> Path | None:
    """Return the file of a module that Python would import; None for installed packages."""
    parts = name.split(".")
    files = list(_modules(parts, _elsewhere(parts[0]) or []))
    return files[-1] if files and files[-1].stem in (parts[-1], "__init__") else None


def package_files(module: Path) -> list[Path]:
    """List the `__init__.py` files that Python runs before it imports a module of a package."""
    files = []
    folder = module.parent.parent if module.name == "__init__.py" else module.parent
    while (folder / "__init__.py").exists():
        files.append(folder / "__init__.py")
        folder = folder.parent
    return files


def installed_distribution(path: Path) -> str | None:
    """Return `name version` of the installed distribution that a file belongs to; None for all other files."""
    if not is_installed(path):
        return None
    from importlib.metadata import distributions

    for distribution in distributions():
        root = Path(str(distribution.locate_file("")))
        if path.is_relative_to(root):
            line = f"{path.relative_to(root).as_posix()},"
            if any(entry.startswith(line) for entry in (distribution.read_text("RECORD") or "").splitlines()):
                return f"{distribution.name} {distribution.version}"
    return None


def source_digest(path: Path) -> str | None:
    """Return the digest of a file's code; None if the file cannot be read."""
    try:
        return _parsed_file(path, None).digest
    except ConfigError:
        return None


def content_digest(path: Path) -> str | None:
    """Return the digest of a file's content, or of its code for Python; None if the file cannot be read."""
    if path.suffix == ".py" and (code := source_digest(path)) is not None:
        return code
    try:
        with path.open("rb") as file:
            return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()[:32]
    except OSError:
        return None


def command_files(folder: Path, command: Sequence[str]) -> dict[str, str]:
    """Return digests of the files that a command names in the eval's folder, and of its Python programs' imports.

    `python -m package` names files, too.
    """
    digests: dict[str, str] = {}
    for argument in command:
        path = named_file(folder, argument)
        if path is not None and path.suffix != ".py":
            try:
                digests[argument] = digest_bytes(path.read_bytes())
            except OSError as error:
                raise ConfigError([Problem(str(path), f"cannot be read: {error}")]) from error
    for program in _programs(folder, command):
        digests |= program.digests
    return digests


def computed_imports(folder: Path, command: Sequence[str]) -> list[str]:
    """Return places such as `file.py:3` at which a command's Python programs may import more than reading shows."""
    return [program.computed for program in _programs(folder, command) if program.computed is not None]


def _programs(folder: Path, command: Sequence[str]) -> Iterator[Scan]:
    for argument in command:
        path = named_file(folder, argument)
        if path is not None and path.suffix == ".py":
            yield scan(path, folder)
    text = _interpreted(command)
    if text is not None and _is_python(text):
        # The text is an argument, and so in the key already; its imports are not.
        program = scan(folder / "<string>", folder, text=text)
        del program.digests["<string>"]
        yield program


def _interpreted(command: Sequence[str]) -> str | None:
    """Return the code that a command runs by `python -c`, or an import for `python -m`; None for other commands."""
    words = iter(command)
    if not any(_INTERPRETER.fullmatch(Path(word).name) for word in words):
        return None
    for word in words:
        if word in ("-X", "-W"):
            next(words, None)
        elif match := re.fullmatch(r"-[A-Za-z]*?([mc])(.*)", word, re.DOTALL):
            value = match[2] or next(words, "")
            if "{{" in value or (match[1] == "m" and not all(map(str.isidentifier, value.split(".")))):
                return None
            return value if match[1] == "c" else f"import {value}.__main__"
        elif not word.startswith("-"):
            return None
    return None


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False  # Python reports it at run time
    return True


def named_file(folder: Path, argument: str) -> Path | None:
    """Return the file that an argument names: one in the eval's folder, or one named from there with `../`."""
    path = folder / argument
    if "{{" in argument or not is_file(path):
        return None
    return path if argument.startswith("../") or path.resolve().is_relative_to(folder.resolve()) else None


def is_file(path: Path) -> bool:
    """Like `Path.is_file`, but False for strings that are not valid paths."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def check_program(
    word: str, folder: Path, where: str, *, by_name: bool = True, path_variable: str | None = None
) -> None:
    """Raise ConfigError for a program that cannot be run.

    A word with a slash is a file relative to the folder. Other words are searched on the PATH (or on `path_variable`)
    and, with `by_name`, in the folder.
    """
    from shutil import which  # which imports every kind of compression, and few evals have programs

    path = folder / word
    there = is_file(path)
    if "/" not in word and not (by_name and there):
        message = f"{word} is not on the PATH"
        remedy = f"Write it as ./{word}." if there else "Install it, or name a file of the eval's folder as ./FILE."
    else:
        message = f"{path} {'is not executable' if there else 'is not a file'}"
        remedy = f"chmod +x {path}" if there else "Paths are relative to the eval file's folder."
        word = str(path)
    if which(word, path=path_variable) is None:
        raise ConfigError([Problem(where, message)], remedy=remedy)


def _parsed_file(path: Path, text: str | None) -> _Parsed:
    try:
        if text is None:
            with tokenize.open(path) as file:
                text = file.read()
        return _parsed(text)
    except FileNotFoundError:
        raise ConfigError([Problem(str(path), "no such file")]) from None
    except SyntaxError as error:
        raise ConfigError([Problem(f"{path}:{error.lineno or 1}", f"not valid Python: {error.msg}")]) from error
    except (OSError, ValueError) as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error}")]) from error


@lru_cache(maxsize=4096)
def _parsed(text: str) -> _Parsed:
    """Parse a source. Cached, because an eval with many tools reads the same modules for each tool."""
    imports: list[_Import] = []
    computed: list[int] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imports += [_Import(0, tuple(alias.name.split(".")), True) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = tuple(node.module.split(".")) if node.module else ()
            imports.append(_Import(node.level, parts, True))
            imports += [_Import(node.level, (*parts, alias.name), False) for alias in node.names]
            if node.module == "sys" and any(alias.name == "path" for alias in node.names):
                computed.append(node.lineno)
        elif isinstance(node, ast.Attribute) and node.attr == "path":
            if isinstance(node.value, ast.Name) and node.value.id == "sys":
                computed.append(node.lineno)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _COMPUTED and (name != "exec" or isinstance(node.func, ast.Name)):
                computed.append(node.lineno)
    return _Parsed(digest_bytes(token_bytes(text)), tuple(imports), min(computed, default=None))


def token_bytes(text: str) -> bytes:
    """Return the tokens of a source text, without comments and layout."""
    lines = text.splitlines(keepends=True)
    parts: list[str] = []
    opened: tuple[int, int] | None = None
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        # Python 3.12 splits f-strings into several tokens, 3.11 does not: take them whole, so both agree.
        if kind.endswith("STRING_START"):
            opened = opened if depth else token.start
            depth += 1
        elif kind.endswith("STRING_END"):
            depth -= 1
            if depth == 0 and opened is not None:
                parts.append("STRING " + _between(lines, opened, token.end))
        elif depth == 0 and token.type not in _LAYOUT:
            text_of = "" if kind in ("INDENT", "DEDENT", "NEWLINE") else token.string
            parts.append(f"{kind} {text_of}")
    return "\n".join(parts).encode("utf-8", "surrogatepass")


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    first, last = lines[start[0] - 1][start[1] :], lines[end[0] - 1][: end[1]]
    return first + "".join(lines[start[0] : end[0] - 1]) + last


def _package_root(path: Path) -> Path:
    """Return the folder from which a file's package is imported: above the topmost `__init__.py`."""
    folder = path.parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


def _relative(path: Path, roots: list[Path]) -> str:
    for root in roots:
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return path.name


def _files_of(imported: _Import, path: Path, roots: list[Path]) -> list[Path] | None:
    """Return the local files that an import runs; None if the module is not found."""
    if imported.level:
        folder = path.parent
        for _ in range(imported.level - 1):
            folder = folder.parent
        return list(_modules(imported.parts, [folder]))
    files = list(_modules(imported.parts, roots))
    if files:
        return files
    elsewhere = _elsewhere(imported.parts[0])
    return None if elsewhere is None else list(_modules(imported.parts, elsewhere))


def _elsewhere(name: str) -> list[Path] | None:
    """Return the folders on Python's path that hold a local module; None if there is no module of that name.

    The list is empty for Python's own modules, installed packages and Holdfast.
    """
    if name == "holdfast" or name in sys.stdlib_module_names:
        return []
    path = tuple(entry for entry in sys.path if entry not in ADDED_TO_PATH)
    finders = tuple(sys.meta_path)
    if (name, path, finders) not in _found_elsewhere:
        for finder in finders:  # not `importlib.util.find_spec`, which looks at imported modules first
            try:
                spec = finder.find_spec(name, list(path) if finder is PathFinder else None)
            except Exception:  # noqa: S112 - a finder of somebody's; what it cannot find, importing will tell
                continue
            if spec is not None:
                places = [Path(place) for place in spec.submodule_search_locations or [spec.origin or ""]]
                local = [place.parent.resolve() for place in places if place.exists() and not is_installed(place)]
                _found_elsewhere[name, path, finders] = local
                break
        else:
            return None  # not remembered: the file may be written later
    return _found_elsewhere[name, path, finders]


_found_elsewhere: dict[tuple[str, tuple[str, ...], tuple[object, ...]], list[Path]] = {}


@cache
def _installed_places() -> tuple[str, ...]:
    places = (sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    return tuple(f"{place}/" for place in places if place)


def is_installed(path: Path | str) -> bool:
    """Return True for files and folders of Python and of installed packages. Called for thousands of paths."""
    name = f"{path}/"
    return name.startswith(_installed_places()) or "/site-packages/" in name or "/dist-packages/" in name


def _modules(parts: Sequence[str], roots: Sequence[Path]) -> Iterator[Path]:
    """Yield the local files that importing `a.b.c` would run."""
    for root in roots:
        folder, files = root, []
        if not parts and (root / "__init__.py").is_file():
            files.append(root / "__init__.py")
        for part in parts:
            if (folder / part / "__init__.py").is_file():
                files.append(folder / part / "__init__.py")
            elif (folder / f"{part}.py").is_file():
                files.append(folder / f"{part}.py")
                break
            elif not (folder / part).is_dir():
                break
            folder = folder / part
        if files:
            yield from (file.resolve() for file in files)
            return


@contextmanager
def noting_files() -> Iterator[set[Path]]:
    """Collect the code files that are read for fingerprints inside the block."""
    files: set[Path] = set()
    token = _noted.set(files)
    try:
        yield files
    finally:
        _noted.reset(token)


def note_files(files: Iterable[Path]) -> None:
    """Add code files to the collection of `noting_files`."""
    noted = _noted.get()
    if noted is not None:
        noted.update(files)


@contextmanager
def running_nothing() -> Iterator[None]:
    """Keep `learn` from running anything inside the block."""
    token = _unknown.set([])
    try:
        yield
    finally:
        _unknown.reset(token)


def may_run() -> bool:
    """Return False while nothing of the eval may be started or imported."""
    return _unknown.get() is None


def take_unknown() -> tuple[str, ...]:
    """Return notes of the facts that `learn` could not find out since the last call."""
    notes = _unknown.get() or []
    taken = tuple(dict.fromkeys(notes))
    notes.clear()
    return taken


def learn(about: Any, kind: type[T], ask: Callable[[], T], unknown: str) -> T | None:
    """Return the answer of `ask`, which runs something; None if nothing may run and no earlier run has asked.

    `about` identifies what is run, by its content or by the size and time of its file. `unknown` is a plan's note.
    """
    path = home_directory() / "learned" / f"{digest(about)[7:39]}.json"
    notes = _unknown.get()
    if notes is None:
        answer = ask()
        data = msgspec.json.encode(answer)
        with suppress(OSError):  # without it, a plan knows less
            if not (path.exists() and path.read_bytes() == data):
                make_directory(path.parent)
                with replacing(path) as file:
                    file.write(data)
        return answer
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        notes.append(unknown)
        return None
