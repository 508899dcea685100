"""Options that several commands share: their types and completion, the runs directory, and `.env` files.

`eval "$(_HOLDFAST_COMPLETE=bash_source holdfast)"` switches completion on.

A `.env` file holds variables of a project, such as API keys, one `NAME=value` per line. The syntax is python-dotenv's:
comments, `export`, single quotes for a literal text, double quotes with `\n`, `\"` and line breaks. Other variables are
not expanded. The file may come from a stranger, like the eval next to it, and is read even by commands that run nothing
from the eval. So it cannot decide which programs and libraries are loaded, which proxy requests use, or which server
receives a key that is not in the file itself.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from holdfast.apps.cli.errors import show_note, show_warning
from holdfast.errors import ConfigError, Problem, UsageError
from holdfast.spec.document import parse_duration
from holdfast.spec.plugins import load_reference
from holdfast.spec.redact import looks_secret
from holdfast.store import catalog
from holdfast.store.files import slug
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from click.shell_completion import CompletionItem

    from holdfast.store.rundir import Manifest

_EXPORTERS: Final = "holdfast.spec.eval_schema:EXPORTERS"
"""the registry of exporters, whose schemas are imported only if an exporter is named"""


class Positive(click.ParamType[int]):
    """A whole number from 1. Unlike `click.IntRange`, adds nothing to the help text, which has the default."""

    name = "positive"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a number and check that it is at least 1."""
        return click.IntRange(1).convert(value, param, ctx)


class Duration(click.ParamType[float]):
    """A number of seconds, such as `90s`, `5m` or `2h`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse a duration."""
        try:
            return float(parse_duration(value))
        except ValueError:
            return self.fail(f"{value!r} is not a duration such as 90s, 5m or 2h", param, ctx)


class ExporterName(click.ParamType[str]):
    """The name of an exporter, built in or of an installed package."""

    name = "exporter"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the name."""
        exporters = load_reference(_EXPORTERS)
        if value not in exporters:
            self.fail(exporters.unknown(str(value)), param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Offer all exporters."""
        from click.shell_completion import CompletionItem

        exporters = load_reference(_EXPORTERS)
        names = (*exporters, *exporters.plugins)
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


class Concurrency(click.ParamType["int | str"]):
    """A number of requests in flight, or `auto`."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Parse a positive number or `auto`."""
        if value == "auto":
            return "auto"
        if str(value).isdigit() and int(value) > 0:
            return int(value)
        return self.fail(f"{value!r} is neither a number above 0 nor auto", param, ctx)


accept_errors_option = click.option("--accept-errors", is_flag=True, help="Finish even if some trials have errors.")
retry_failed_option = click.option(
    "--retry-failed", is_flag=True, help="Retry the errors of a run that was finished with --accept-errors."
)
wait_option = click.option(
    "--wait", is_flag=True, help="Wait if another process holds the run, instead of exiting with code 4."
)
no_wait_option = click.option(
    "--no-wait",
    is_flag=True,
    help="Submit and collect batches, and exit with code 5 while they are under way, instead of waiting.",
)
display_option = click.option(
    "--display",
    type=click.Choice(["rich", "plain", "json", "none"]),
    help="How to show progress [default: rich on a terminal, else plain].",
)
runs_dir_option = click.option(
    "--runs-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder that holds the runs [default: $HOLDFAST_RUNS_DIR or ./runs].",
)


def lock_timeout(*, wait: bool) -> float:
    """Return the seconds to wait for a run that another process holds; -1 for as long as it takes."""
    text = os.environ.get("HOLDFAST_LOCK_TIMEOUT")
    if not text:
        return -1 if wait else 0
    try:
        return max(0.0, float(parse_duration(text)))
    except ValueError:
        raise UsageError(f"invalid HOLDFAST_LOCK_TIMEOUT {text!r}: expected seconds") from None


def runs_directory(option: Path | None) -> Path:
    """Return the runs directory: the option's, else the environment's, else ./runs."""
    chosen = option or Path(os.environ.get("HOLDFAST_RUNS_DIR") or "runs")
    if chosen.exists() and not chosen.is_dir():
        raise UsageError(f"{chosen} is a file, not a directory for runs", remedy="Give another one with --runs-dir.")
    return chosen


def find_run(name: str, runs_dir: Path) -> Path:
    """Find a run by its path, its id, or the beginning of its id. Shows a note if a newer Holdfast wrote it."""
    return announce_version(catalog.find_run(name, runs_dir))


def announce_version(path: Path) -> Path:
    """Show a note if a newer Holdfast wrote a run, and return its path."""
    rundir = RunDir(path)
    with suppress(UsageError):  # reported when the run is read
        manifest = rundir.read_manifest()
        if manifest is not None and (newer := rundir.newer(manifest)) is not None:
            show_note(newer)
    return rundir.path


def find_runs_dir(rundir: RunDir, manifest: Manifest, root: Path) -> Path:
    """Return the runs directory that a run is in; `root` for a run that was copied elsewhere, or archived."""
    place = rundir.path if len(rundir.path.parts) > 2 else rundir.path.resolve()
    return place.parent.parent if place.parent.name == slug(manifest.name) else root


def run_name(rundir: RunDir) -> str:
    """Return the shortest argument that names a run: its id, or its path if it is not in the runs directory."""
    manifest = rundir.read_manifest()
    if manifest is not None and rundir.path == runs_directory(None) / slug(manifest.name) / rundir.path.name:
        return manifest.id
    return shlex.quote(str(rundir.path))


def complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Leave the completion of paths to the shell."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the ids of runs, with eval and target as help; paths if no id matches."""
    from click.shell_completion import CompletionItem

    items = []
    for run in catalog.find_runs(runs_directory(ctx.params.get("runs_dir"))):
        target, _, number = run.path.name.rpartition("-")
        if number.startswith(incomplete):
            items.append(CompletionItem(number, help=f"{run.path.parent.name} · {target}"))
    return items or complete_files(ctx, param, incomplete)


def complete_profiles(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Offer the profiles of the nearest env.toml."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        try:
            tables = tomllib.loads((folder / "env.toml").read_text())
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return []
        names = [name for name, table in tables.items() if isinstance(table, dict) and name != "wandb"]
        return [name for name in names if name.startswith(incomplete)]
    return []


_CHOICE: Final = "holdfast.env_file"
"""the key of the context under which the options for `.env` files are kept"""
_ENV_FILE: Final = ".env"
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


def env_file_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for `.env` files to a command."""
    named = click.option(
        "--env-file",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="FILE",
        expose_value=False,
        callback=_keep,
        help="Take variables that are not set from this file [default: the project's .env].",
    )
    none = click.option("--no-env-file", is_flag=True, expose_value=False, callback=_keep, help="Read no .env file.")
    return named(none(command))


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value:
        ctx.meta[_CHOICE] = value


def load_env_file(*folders: Path) -> None:
    """Set the unset variables of a `.env` file: the file that an option names, or the nearest one to `folders`.

    A note names the variables, without their values.
    """
    context = click.get_current_context(silent=True)
    choice = None if context is None else context.meta.get(_CHOICE)
    if choice is True:
        return
    path = choice or next((path for folder in folders if (path := find_env_file(folder)) is not None), None)
    if path is None:
        return
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    variables, refusals = take_env_file(shown, os.environ)
    os.environ.update(variables)
    for refusal in refusals:
        show_warning(refusal)
    if variables:
        show_note(f"{', '.join(sorted(variables))} from {shown}")


def find_env_file(folder: Path) -> Path | None:
    """Return the nearest `.env` in a folder or above it, up to the root of its project: a repository or a package.

    Outside a project, only the folder itself is searched.
    """
    folder = folder.resolve()
    above = [folder, *folder.parents]
    root = next((number for number, each in enumerate(above) if any((each / name).exists() for name in _PROJECT)), 0)
    return next((each / _ENV_FILE for each in above[: root + 1] if (each / _ENV_FILE).is_file()), None)


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
