"""`.env` files: variables of a project, such as API keys, one `NAME=value` per line.

The form is that of python-dotenv: comments, `export`, single quotes for a text as it is, double quotes with `\n`, `\"`
and line breaks. Values of other variables are not inserted.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from holdfast.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pathlib import Path

NAME: Final = ".env"
_PROJECT: Final = (".git", "pyproject.toml")
"""what a folder has that is the root of a project"""
_LINE: Final = r"""[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_][\w.-]*)[ \t]*=[ \t]*
    (?:'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|(?P<bare>[^\n]*?))
    [ \t]*(?:(?:^|(?<=\s))\#[^\n]*)?(?:\r?\n|\Z)"""
_EMPTY: Final = r"[ \t]*(?:\#[^\n]*)?(?:\r?\n|\Z)"
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t"}


def find_env_file(folder: Path) -> Path | None:
    """Return the nearest `.env` in a folder or above it, up to the root of its project: a repository or a package.

    A folder that is in no project is searched alone.
    """
    folder = folder.resolve()
    above = [folder, *folder.parents]
    root = next((number for number, each in enumerate(above) if any((each / name).exists() for name in _PROJECT)), 0)
    return next((each / NAME for each in above[: root + 1] if (each / NAME).is_file()), None)


def read_env_file(path: Path) -> dict[str, str]:
    """Return the variables of a file. Raises ConfigError where the file or one of its lines cannot be read."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error}")]) from error
    # compiled here, since most projects have no such file
    empty_line, variable = re.compile(_EMPTY), re.compile(_LINE, re.VERBOSE | re.DOTALL)
    variables: dict[str, str] = {}
    position = 0
    while position < len(text):
        if empty := empty_line.match(text, position):
            position = empty.end()
            continue
        line = variable.match(text, position)
        if line is None:
            number = text.count("\n", 0, position) + 1
            problem = Problem(f"{path}:{number}", "not of the form NAME=value")  # never the line: it may be a secret
            raise ConfigError([problem], remedy="Correct the line, or use --no-env-file.")
        variables[line["name"]] = _value(line)
        position = line.end()
    return variables


def _value(line: re.Match[str]) -> str:
    if line["double"] is not None:
        return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), line["double"], flags=re.DOTALL)
    return line["bare"].strip() if line["single"] is None else line["single"]
