"""`.env` files: variables of a project, such as API keys, one `NAME=value` per line.

The syntax is python-dotenv's: comments, `export`, single quotes for a literal text, double quotes with `\n`, `\"` and
line breaks. Other variables are not expanded.

The file may come from a stranger, like the eval next to it, and is read even by commands that run nothing from the
eval. So it cannot decide which programs and libraries are loaded, which proxy requests use, or which server receives a
key that is not in the file itself.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.errors import ConfigError, Problem
from holdfast.spec.redact import looks_secret

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NAME: Final = ".env"
_PROJECT: Final = (".git", "pyproject.toml")
"""files and folders that mark the root of a project"""
_LINE: Final = r"""[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_][\w.-]*)[ \t]*=[ \t]*
    (?:'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|(?P<bare>[^\n]*?))
    [ \t]*(?:(?:^|(?<=\s))\#[^\n]*)?(?:\r?\n|\Z)"""
_EMPTY: Final = r"[ \t]*(?:\#[^\n]*)?(?:\r?\n|\Z)"
_REFUSED: Final = (
    r"(LD|DYLD|GIT|BASH|SSH|XDG|SSL_CERT|OPENSSL|NPM_CONFIG|DOCKER|HOLDFAST)_.*|PYTHON.*|PERL5.*|.*_PROXY"
    r"|PATH|ENV|IFS|SHELL|HOME|TMPDIR|EDITOR|VISUAL|PAGER|LESSOPEN|LESSCLOSE|BROWSER|NODE_(OPTIONS|PATH|EXTRA_CA_CERTS|TLS_.*)"
    r"|GCONV_PATH|RUSTC_WRAPPER|GOFLAGS|CLASSPATH|LUA_.*|(PIP|UV)_.*|KUBECONFIG"
    r"|RUBY(OPT|LIB)|_?JAVA(_TOOL)?_OPTIONS|SSLKEYLOGFILE|(REQUESTS|CURL)_CA_BUNDLE"
    r"|AWS_(CONFIG|SHARED_CREDENTIALS)_FILE|GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES|NETRC"
    r"|HF_(HOME|TOKEN_PATH|STORED_TOKENS_PATH|(\w+_)?(ENDPOINT|CACHE|TRUST_REMOTE_CODE))|HUGGINGFACE_(HUB_CACHE|CO_\w+)"
    r"|MLFLOW_((TRACKING|REGISTRY)_URI|TRACKING_(AUTH|INSECURE_TLS|SERVER_CERT_PATH))"
)
"""variables that decide what is run or loaded, the places of files, whom connections trust, or who gets a login"""
_ADDRESS: Final = r"(\w+?)_(API_)?(BASE|BASE_URL|ENDPOINT|ENDPOINT_URL\w*|URL|URI|HOST)"
"""a variable with the address of a service"""
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t"}


def find_env_file(folder: Path) -> Path | None:
    """Return the nearest `.env` in a folder or above it, up to the root of its project: a repository or a package.

    Outside a project, only the folder itself is searched.
    """
    folder = folder.resolve()
    above = [folder, *folder.parents]
    root = next((number for number, each in enumerate(above) if any((each / name).exists() for name in _PROJECT)), 0)
    return next((each / NAME for each in above[: root + 1] if (each / NAME).is_file()), None)


class Variable(NamedTuple):
    """A variable in a file."""

    value: str
    line: int


def take_env_file(path: Path, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the unset variables that a file may set, and why it may not set others. Raises as `read_env_file`."""
    taken, refusals = {}, []
    for name, variable in read_env_file(path).items():
        if name in environ:
            continue
        reason = _reason_against(name, environ)
        if reason is None:
            taken[name] = variable.value
        else:
            refusals.append(
                f"{path}:{variable.line}: {name} is not taken from this file: {reason}. "
                f"If you want that, set it yourself: export {name}=…"
            )
    return taken, refusals


def _reason_against(name: str, environ: Mapping[str, str]) -> str | None:
    """Return why a file may not set a variable; None if it may."""
    if re.fullmatch(_REFUSED, name, re.IGNORECASE):
        return "it decides what is run or loaded, the places of files, whom connections trust, or who gets a login"
    if (address := re.fullmatch(_ADDRESS, name, re.IGNORECASE)) is not None:
        service = address[1].upper()
        own = next((each for each in environ if each.upper().startswith(f"{service}_") and looks_secret(each)), None)
        if own is not None:
            return f"{own} of your environment would be sent to the address"
    return None


def read_env_file(path: Path) -> dict[str, Variable]:
    """Return the variables of a file. Raises ConfigError if the file or one of its lines is invalid."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error}")]) from error
    # compiled here, since most projects have no such file
    empty_line, variable = re.compile(_EMPTY), re.compile(_LINE, re.VERBOSE | re.DOTALL)
    variables: dict[str, Variable] = {}
    position = 0
    while position < len(text):
        if empty := empty_line.match(text, position):
            position = empty.end()
            continue
        line, number = variable.match(text, position), text.count("\n", 0, position) + 1
        if line is None:
            problem = Problem(f"{path}:{number}", "not of the form NAME=value")  # never the line: it may be a secret
            raise ConfigError([problem], remedy="Correct the line, or use --no-env-file.")
        variables[line["name"]] = Variable(_value(line), number)
        position = line.end()
    return variables


def _value(line: re.Match[str]) -> str:
    if line["double"] is not None:
        return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), line["double"], flags=re.DOTALL)
    return line["bare"].strip() if line["single"] is None else line["single"]
