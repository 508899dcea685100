"""Fingerprints of code, taken by reading files and never by importing them.

A function's fingerprint covers its file and every local module that file imports, directly or not. Comments and
layout do not count: what is digested is the file's tokens, so that a new comment reruns nothing, while a changed
docstring, which a program can read, does. Local is what lies beside the file, in the eval's folder, or elsewhere on
Python's path (PYTHONPATH, editable installs); the standard library and installed packages are not followed.
"""

from __future__ import annotations

import ast
import io
import shutil
import sys
import sysconfig
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.canonical import digest_bytes
from holdfast.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}


def source_fingerprint(entry: Path, folder: Path) -> dict[str, str]:
    """Digests of `entry` and the local modules it imports, by their names relative to where they are found.

    `folder` is the eval file's: modules are looked for there and beside the entry file.
    """
    found: dict[str, str] = {}
    roots = _roots(entry, folder)
    for path, text in _sources(entry, folder):
        name = path.name if path == entry.resolve() else _relative(path, [*roots, _package_root(path)])
        while name in found:  # two files of one name, found from different places, both count
            name = f"../{name}"
        found[name] = digest_bytes(_tokens(text))
    return dict(sorted(found.items()))


def source_files(entry: Path, folder: Path) -> list[Path]:
    """`entry` and the local modules it imports."""
    return [path for path, _ in _sources(entry, folder)]


def local_module(name: str) -> Path | None:
    """The file of a module that Python would import, where it is somebody's own code and not an installed package."""
    parts = name.split(".")
    files = list(_modules(parts, _elsewhere(parts[0]) or []))
    return files[-1] if files and files[-1].stem in (parts[-1], "__init__") else None


def _roots(entry: Path, folder: Path) -> list[Path]:
    return list(dict.fromkeys([entry.parent.resolve(), _package_root(entry.resolve()), folder.resolve()]))


def _sources(entry: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    roots, waiting, seen = _roots(entry, folder), [entry.resolve()], set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        text = _read(path)
        yield path, text
        waiting.extend(_imported(ast.parse(text), path, roots))


def files_behind(folder: Path, argument: str) -> dict[str, str]:
    """The content of an argument that names a file in the eval's folder; of a Python program, also what it imports."""
    path = named_file(folder, argument)
    try:
        if path is None:
            return {}
        if path.suffix == ".py":
            return source_fingerprint(path, folder)
        return {argument: digest_bytes(path.read_bytes())}
    except OSError as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error}")]) from error


def named_file(folder: Path, argument: str) -> Path | None:
    """The file of the eval's folder that an argument names, if it does."""
    path = folder / argument
    if "{{" in argument or not is_file(path) or not path.resolve().is_relative_to(folder.resolve()):
        return None
    return path


def is_file(path: Path) -> bool:
    """Whether a path names a file; what cannot be a path does not."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def file_inside(folder: Path, name: str, where: str) -> bytes:
    """What is in a file of the eval's folder; `where` is the place in the eval file, for messages."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError([Problem(where, f"{name} leads out of the eval file's folder")])
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            [Problem(where, f"{path} cannot be read: {error.strerror or error}")],
            remedy="Paths are seen from the eval file's folder.",
        ) from error


def check_program(
    word: str, folder: Path, where: str, *, by_name: bool = True, path_variable: str | None = None
) -> None:
    """Refuse what cannot be run as a program before anything runs it.

    A word with a slash is a file as seen from the folder; one without is on the PATH (its own one, where it gets one)
    or, `by_name`, a file there too.
    """
    path = folder / word
    there = is_file(path)
    if "/" not in word and not (by_name and there):
        said = f"{word} is not on the PATH"
        remedy = f"Write it as ./{word}." if there else "Install it, or name a file of the eval's folder as ./FILE."
    else:
        said = f"{path} {'is not executable' if there else 'is no file'}"
        remedy = f"chmod +x {path}" if there else "Paths are seen from the eval file's folder."
        word = str(path)
    if shutil.which(word, path=path_variable) is None:
        raise ConfigError([Problem(where, said)], remedy=remedy)


def _read(path: Path) -> str:
    try:
        with tokenize.open(path) as file:
            text = file.read()
        ast.parse(text)
    except FileNotFoundError:
        raise ConfigError([Problem(str(path), "no such file")]) from None
    except SyntaxError as error:
        raise ConfigError([Problem(f"{path}:{error.lineno or 1}", f"not valid Python: {error.msg}")]) from error
    except (OSError, ValueError) as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error}")]) from error
    return text


def _tokens(text: str) -> bytes:
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
    """The folder from which a file's package is imported: above the topmost `__init__.py`."""
    folder = path.parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


def _relative(path: Path, roots: list[Path]) -> str:
    for root in roots:
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return path.name


def _imported(tree: ast.AST, path: Path, roots: list[Path]) -> Iterator[Path]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _absolute(alias.name.split("."), roots)
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            names = [parts, *([*parts, alias.name] for alias in node.names)]
            if node.level:
                folder = path.parent
                for _ in range(node.level - 1):
                    folder = folder.parent
                for name in names:
                    yield from _modules(name, [folder])
            else:
                for name in names:
                    yield from _absolute(name, roots)


def _absolute(parts: list[str], roots: list[Path]) -> Iterator[Path]:
    """The files of `a.b.c`: from the roots, else from where Python would take them, if that is somebody's own code."""
    files = list(_modules(parts, roots))
    yield from files or _modules(parts, _elsewhere(parts[0]))


def _elsewhere(name: str) -> list[Path]:
    """The folders on Python's path that hold a module which is neither Python's, nor installed, nor ours."""
    if name == "holdfast" or name in sys.stdlib_module_names:
        return []
    for finder in sys.meta_path:  # not `importlib.util.find_spec`, which looks at what is imported first
        try:
            spec = finder.find_spec(name, None)
        except Exception:  # noqa: S112 - a finder of somebody's; what it cannot find, importing will tell
            continue
        if spec is not None:
            places = [Path(place) for place in spec.submodule_search_locations or [spec.origin or ""]]
            return [place.parent.resolve() for place in places if place.exists() and not _is_installed(place)]
    return []


def _is_installed(path: Path) -> bool:
    known = (sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    inside = any(path.is_relative_to(place) for place in known if place)
    return inside or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _modules(parts: list[str], roots: list[Path]) -> Iterator[Path]:
    """The files that importing `a.b.c` would run, where they are local; a folder without `__init__.py` is passed."""
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
