"""Weights & Biases: configuration, numbers with their intervals, a table of the trials, and the run's files.

The W&B run's id is made from ours, so a second export updates it. Without a login or a network everything is written
into the run directory, with the command that sends it later. Neither the login nor facts about the machine are written
there.
"""

from __future__ import annotations

import configparser
import netrc
import os
import shlex
import shutil
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Literal
from urllib.parse import urlsplit

from holdfast import UsageError
from holdfast.plugins.exporters.tracking import TrackerExport, about, environment, numbers, shown_name, stable_id
from holdfast.report.exports import Exported
from holdfast.report.tables import rows
from holdfast.spec.schema import Strings
from holdfast.store.files import make_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import wandb

    from holdfast import RunView

_HOME: Final = "https://api.wandb.ai"
_FOLDER_SETTINGS: Final = Path("wandb") / "settings"
"""what `wandb init` writes into the working directory"""
_TABLE: Final = 10_000
"""rows of a table that W&B shows"""
_PATIENCE: Final = 10.0
"""seconds for the server to answer at all"""


@dataclass(frozen=True)
class Login:
    """The W&B settings of this machine, read without a request and without the wandb package."""

    api_key: str | None = field(repr=False)
    source: str | None
    """where the key comes from: an environment variable's name, or a file"""
    base_url: str
    url_source: str
    """where the address comes from, likewise; empty for the public service"""
    key_host: str | None
    """the host of the key, if the key is in ~/.netrc"""
    project: str | None
    entity: str | None

    def check(self) -> Login:
        """Return the login. Raises UsageError if its key may be meant for another server."""
        if self.api_key is None:
            return self
        if self.key_host is not None and self.key_host != urlsplit(self.base_url).netloc:
            raise UsageError(
                f"the W&B API key ({self.source}) is the login for {self.key_host}, and the server is {self.base_url} "
                f"({self.url_source or 'the default'})",
                remedy=f"Run `{login_command(self.base_url)}`, or set WANDB_BASE_URL to the server of the key.",
            )
        # Whoever wrote the folder would otherwise decide where the key of the environment goes.
        if self.source == "WANDB_API_KEY" and self.url_source == str(_FOLDER_SETTINGS):
            raise UsageError(
                f"{_FOLDER_SETTINGS} in this folder names the W&B server {self.base_url}, and WANDB_API_KEY may be for "
                "another",
                remedy=f"If it is for this one, set WANDB_BASE_URL={self.base_url}.",
            )
        return self


def same_server(first: str, second: str) -> bool:
    """Return True if two addresses name the same server."""
    return first.rstrip("/") == second.rstrip("/")


def login_command(base_url: str) -> str:
    """Return the command that logs in to a server."""
    return "wandb login" if same_server(base_url, _HOME) else shlex.join(["wandb", "login", "--host", base_url])


def detect(environ: Mapping[str, str] = os.environ) -> Login:
    """Find login, project and entity: in the environment, else where `wandb login` and `wandb init` store them."""
    home = Path(environ.get("HOME") or Path.home())
    settings: dict[str, tuple[str, str]] = {}
    for file in (Path(environ.get("WANDB_CONFIG_DIR") or home / ".config" / "wandb") / "settings", _FOLDER_SETTINGS):
        settings |= {name: (value, str(file)) for name, value in _settings(file)}
    named = settings.get("base_url", (_HOME, ""))
    base_url, url_source = (environ["WANDB_BASE_URL"], "WANDB_BASE_URL") if environ.get("WANDB_BASE_URL") else named
    netrc_file = environ.get("NETRC")
    files = [Path(netrc_file).expanduser()] if netrc_file else [home / ".netrc", home / "_netrc"]
    logins = [(host, key, str(file)) for file in files for host, key in _netrc_logins(file)]
    host = urlsplit(base_url).netloc
    api_key, source = environ.get("WANDB_API_KEY"), "WANDB_API_KEY"
    if not api_key:
        api_key, source = next(((key, file) for each, key, file in logins if each == host), (None, ""))
    hosts = [each for each, key, _ in logins if key == api_key]
    return Login(
        api_key=api_key or None,
        source=source if api_key else None,
        base_url=base_url.rstrip("/"),
        url_source=url_source,
        key_host=host if host in hosts else next(iter(hosts), None),
        project=environ.get("WANDB_PROJECT") or settings.get("project", (None,))[0],
        entity=environ.get("WANDB_ENTITY") or settings.get("entity", (None,))[0],
    )


def _settings(file: Path) -> Iterable[tuple[str, str]]:
    parser = configparser.ConfigParser(interpolation=None)
    with suppress(configparser.Error, OSError, UnicodeDecodeError):
        parser.read(file)
    return parser.items("default") if parser.has_section("default") else ()


def _netrc_logins(file: Path) -> list[tuple[str, str]]:
    """Return the hosts and passwords of a file. The entry for all other hosts is not meant for W&B."""
    with suppress(OSError, netrc.NetrcParseError):
        logins = netrc.netrc(file).hosts
        return [(host, login[2]) for host, login in logins.items() if login[2] and host != "default"]
    return []


class WandbExport(TrackerExport):
    """Weights & Biases."""

    project: str | None = None
    """Project. Default: `$WANDB_PROJECT`, else what `wandb init` set, else `holdfast`."""
    entity: str | None = None
    """User or team. Default: `$WANDB_ENTITY`, else the login's."""
    name: str | None = None
    """Display name of the run. Default: the names of the eval and the target."""
    group: str | None = None
    """Group of the run."""
    job_type: str = "evaluation"
    """Job type of the run."""
    tags: Strings = []
    """Tags of the run."""
    mode: Literal["online", "offline"] | None = None
    """Send the run (`online`) or write it to disk (`offline`). Default: `$WANDB_MODE`, else online if there is a
    login and the server answers."""


class Wandb:
    """Sends runs, or writes them to disk for `wandb sync`."""

    schema: ClassVar[type[WandbExport]] = WandbExport

    @staticmethod
    def send(view: RunView, block: WandbExport) -> Exported:
        """Send a run, or write it to disk."""
        settings = detect().check()
        try:
            import wandb
        except ImportError:
            raise UsageError("exporting to W&B needs wandb", remedy="pip install wandb") from None
        why_offline, notes = _why_offline(block, settings)
        folder = view.rundir.path.resolve() / "export" / "wandb"
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier export, which this one replaces
        make_directory(folder)
        manifest = view.manifest
        data, cache = str(folder / "data"), str(folder / "cache")
        with environment(WANDB_DATA_DIR=data, WANDB_CACHE_DIR=cache, WANDB_SILENT="true"):
            run = wandb.init(
                id=stable_id(manifest),
                resume="allow",
                reinit="create_new",  # a Python program may have a W&B run of its own open
                mode="offline" if why_offline else "online",
                dir=folder,
                project=block.project or settings.project or "holdfast",
                entity=block.entity or settings.entity,
                name=block.name or shown_name(manifest),
                group=block.group,
                job_type=block.job_type,
                tags=block.tags or None,
                notes=block.description,
                config={**manifest.eval, "holdfast": about(view), "metadata": block.extra_metadata},
                allow_val_change=True,
                settings=_quiet(settings.base_url),
            )
            try:
                notes += _send(view, run)
            except BaseException:
                run.finish(exit_code=1)
                raise
            run.finish()
        if not why_offline:
            return Exported([str(run.url)], notes)
        place = str(run.settings.sync_dir)
        send = f"WANDB_BASE_URL={shlex.quote(settings.base_url)} {shlex.join(['wandb', 'sync', place])}"
        return Exported([place], notes, why_offline, send)


def _quiet(base_url: str) -> wandb.Settings:
    """Return settings by which W&B prints nothing, and records nothing about this machine."""
    import wandb

    return wandb.Settings(
        base_url=base_url,
        console="off",
        disable_code=True,
        disable_git=True,
        quiet=True,
        save_code=False,
        silent=True,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )


def _why_offline(block: WandbExport, settings: Login) -> tuple[str | None, list[str]]:
    """Return why nothing can be sent, or None, and notes about the login."""
    mode = block.mode or os.environ.get("WANDB_MODE") or "online"
    if mode == "disabled":
        raise UsageError("W&B is switched off here: WANDB_MODE is disabled", remedy="Unset it, or set it to offline.")
    notes = [f"Detected W&B login ({settings.source}) for {settings.base_url}"] if settings.source else []
    if mode in ("offline", "dryrun"):
        return "W&B is set to offline", notes
    if not settings.source:
        return f"no W&B login (WANDB_API_KEY, or `{login_command(settings.base_url)}`)", notes
    try:
        urllib.request.urlopen(settings.base_url, timeout=_PATIENCE).close()  # noqa: S310 - the user's own server
    except urllib.error.HTTPError as answer:
        answer.close()  # any answer means that the server is there
    except (OSError, ValueError) as error:
        if block.mode == "online":
            raise
        return f"{settings.base_url} cannot be reached ({getattr(error, 'reason', error)})", notes
    return None, notes


def _send(view: RunView, run: wandb.Run) -> list[str]:
    import wandb

    notes = []
    metrics = view.metrics
    run.summary.update({"finished": metrics is not None, **(numbers(metrics) if metrics else {})})
    table = None
    waiting = rows(view)
    for row in islice(waiting, _TABLE):
        table = table or wandb.Table(columns=list(row), allow_mixed_types=True)
        table.add_data(*row.values())
    if table is not None:
        run.log({"trials": table})
    if more := sum(1 for _ in waiting):
        notes.append(f"W&B's table has the first {_TABLE:,} trials; the other {more:,} are in its results.json")
    artifact = wandb.Artifact(f"holdfast-{stable_id(view.manifest)}", type="evaluation")
    rundir = view.rundir
    for path in (rundir.manifest, rundir.results, rundir.metrics):
        if path.exists():
            artifact.add_file(str(path))
    run.log_artifact(artifact)
    return notes
