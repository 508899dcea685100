"""Weights & Biases: configuration, numbers with their intervals, a table of the trials, and the run's files.

The W&B run's id is made from ours, so a second export updates it. Without a login or a network everything is written
into the run directory, with the command that sends it later. Neither a login nor anything of the machine is written
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
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from holdfast.errors import UsageError
from holdfast.export.registry import Exported
from holdfast.export.tables import rows
from holdfast.export.tracking import about, environment, numbers, shown_name, stable_id
from holdfast.store.durable import make_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import wandb

    from holdfast.report.run_view import RunView
    from holdfast.spec.export_schema import WandbExport

_HOME: Final = "https://api.wandb.ai"
_TABLE: Final = 10_000
"""rows of a table that W&B shows"""
_PATIENCE: Final = 10.0
"""seconds for the server to answer at all"""


@dataclass(frozen=True)
class Detected:
    """The W&B settings of this machine, read without a request and without the wandb package."""

    api_key: str | None = field(repr=False)
    source: str | None
    """where the login comes from: an environment variable's name, or a file"""
    base_url: str
    project: str | None
    entity: str | None


def detect(environ: Mapping[str, str] = os.environ) -> Detected:
    """Find login, project and entity: in the environment, else where `wandb login` and `wandb init` store them."""
    home = Path(environ.get("HOME") or Path.home())
    settings = dict(_settings(Path(environ.get("WANDB_CONFIG_DIR") or home / ".config" / "wandb")))
    base_url = environ.get("WANDB_BASE_URL") or settings.get("base_url") or _HOME
    api_key, source = environ.get("WANDB_API_KEY"), "WANDB_API_KEY"
    if not api_key:
        netrc_file = environ.get("NETRC")
        files = [Path(netrc_file).expanduser()] if netrc_file else [home / ".netrc", home / "_netrc"]
        api_key, source = _from_netrc(urlsplit(base_url).netloc, files)
    return Detected(
        api_key=api_key or None,
        source=source if api_key else None,
        base_url=base_url.rstrip("/"),
        project=environ.get("WANDB_PROJECT") or settings.get("project"),
        entity=environ.get("WANDB_ENTITY") or settings.get("entity"),
    )


def _settings(folder: Path) -> Iterator[tuple[str, str]]:
    for path in (folder / "settings", Path("wandb") / "settings"):
        parser = configparser.ConfigParser(interpolation=None)
        with suppress(configparser.Error, OSError, UnicodeDecodeError):
            parser.read(path)
            if parser.has_section("default"):
                yield from parser.items("default")


def _from_netrc(host: str, files: Iterable[Path]) -> tuple[str | None, str]:
    for path in files:
        with suppress(OSError, netrc.NetrcParseError):
            login = netrc.netrc(path).authenticators(host)
            if login and login[2]:
                return login[2], str(path)
    return None, ""


def export_wandb(view: RunView, block: WandbExport) -> Exported:
    """Send a run, or write it where it can be sent from."""
    try:
        import wandb
    except ImportError:
        raise UsageError("exporting to W&B needs wandb", remedy="pip install wandb") from None
    settings = detect()
    why_offline, notes = _why_offline(block, settings)
    folder = view.rundir.path.resolve() / "export" / "wandb"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier export, which this one replaces
    make_directory(folder)
    manifest = view.manifest
    quiet = wandb.Settings(
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
    ours = {"WANDB_DATA_DIR": str(folder / "data"), "WANDB_CACHE_DIR": str(folder / "cache"), "WANDB_SILENT": "true"}
    with environment(**ours):
        run = wandb.init(
            id=stable_id(manifest),
            resume="allow",
            reinit="create_new",  # whoever evaluates from Python may have a run of their own open
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
            settings=quiet,
        )
        try:
            notes += _send(view, run)
        except BaseException:
            run.finish(exit_code=1)
            raise
        run.finish()
    if not why_offline:
        return Exported([str(run.url)], notes)
    place = run.settings.sync_dir
    notes.append(f"{why_offline}: written offline. To send it: {shlex.join(['wandb', 'sync', str(place)])}")
    return Exported([str(place)], notes)


def _why_offline(block: WandbExport, settings: Detected) -> tuple[str | None, list[str]]:
    """Why nothing can be sent, in words; None where it can. And what to tell of the login."""
    mode = block.mode or os.environ.get("WANDB_MODE") or "online"
    if mode == "disabled":
        raise UsageError("W&B is switched off here: WANDB_MODE is disabled", remedy="Unset it, or set it to offline.")
    notes = [f"Detected W&B login ({settings.source})"] if settings.source else []
    if mode in ("offline", "dryrun"):
        return "W&B is set to offline", notes
    if not settings.source:
        return "no W&B login (WANDB_API_KEY, or `wandb login`)", notes
    try:
        urllib.request.urlopen(settings.base_url, timeout=_PATIENCE).close()  # noqa: S310 - the user's own server
    except urllib.error.HTTPError as answer:
        answer.close()  # whatever it says, it is there
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
