"""MLflow: parameters, numbers with their intervals, tags, and the run's files with a table of its trials.

The MLflow run is found again by its tag `holdfast.run`, so a second export updates it.
"""

from __future__ import annotations

import os
import re
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Final, Self

import msgspec
from pydantic import model_validator

from holdfast import UsageError
from holdfast.http.urls import bare_url
from holdfast.plugins.exporters.tracking import TrackerExport, about, environment, flat, numbers, shown_name
from holdfast.report.exports import Exported
from holdfast.report.tables import rows
from holdfast.store.files import temporary_folder

if TYPE_CHECKING:
    from typing import BinaryIO

    from mlflow import MlflowClient

    from holdfast import RunView

_TAG: Final = "holdfast.run"
_LONGEST_PARAM: Final = 500
_LONGEST_TAG: Final = 5000
"""the limit of the oldest servers"""
_BATCH: Final = 100
_NOT_PARAMETERS: Final = ("schemaVersion", "samples", "output", "limits")
"""rows, and settings that change no result"""


_DATABASES: Final = ("sqlite:", "mysql", "postgresql", "mssql")


class MlflowExport(TrackerExport):
    """MLflow."""

    tracking_uri: str | None = None
    """Address of the server. Default: `$MLFLOW_TRACKING_URI`."""
    experiment_name: str | None = None
    """Experiment. Default: `$MLFLOW_EXPERIMENT_NAME`, else the eval's name."""
    run_name: str | None = None
    """Display name of the run. Default: the names of the eval and the target."""
    tags: dict[str, str | int | float | bool] = {}
    """Tags of the run."""

    @model_validator(mode="after")
    def _no_password(self) -> Self:
        if re.search(r"//[^/@]+@", self.tracking_uri or ""):
            raise ValueError(
                "passwords are not written into files: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return self


class Mlflow:
    """Sends runs to a tracking server."""

    schema: ClassVar[type[MlflowExport]] = MlflowExport

    @staticmethod
    def send(view: RunView, block: MlflowExport) -> Exported:
        """Send a run."""
        uri = block.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            raise UsageError(
                "no MLflow server is named", remedy="Set MLFLOW_TRACKING_URI, or give tracking_uri=http://HOST:PORT."
            )
        try:
            import mlflow
        except ImportError:
            raise UsageError("exporting to MLflow needs mlflow", remedy="pip install mlflow-skinny") from None
        if uri.startswith(_DATABASES) and find_spec("sqlalchemy") is None:
            raise UsageError(
                f"{bare_url(uri)} is a database, which the installed mlflow cannot open by itself",
                remedy="Give the address of an MLflow server, or install the whole package: pip install mlflow",
            )
        # By default the client retries an unreachable server for minutes.
        with environment(
            MLFLOW_HTTP_REQUEST_MAX_RETRIES="2",
            MLFLOW_HTTP_REQUEST_TIMEOUT="60",
            MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR="false",
            MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT="true",
            GIT_PYTHON_REFRESH="quiet",
        ):
            client = mlflow.MlflowClient(tracking_uri=uri)
            experiment = _experiment(client, block, view)
            run, notes = _run(client, experiment, block, view)
            _send(client, run, view)
        return Exported([f"{bare_url(uri).rstrip('/')}/#/experiments/{experiment}/runs/{run}"], notes)


def _experiment(client: MlflowClient, block: MlflowExport, view: RunView) -> str:
    name = block.experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or view.manifest.name
    existing = client.get_experiment_by_name(name)
    if existing is None:
        return str(client.create_experiment(name))
    if existing.lifecycle_stage != "active":
        raise UsageError(
            f"MLflow's experiment {name!r} has been deleted",
            remedy="Restore it there, or give another with experiment_name=NAME.",
        )
    return str(existing.experiment_id)


def _run(client: MlflowClient, experiment: str, block: MlflowExport, view: RunView) -> tuple[str, list[str]]:
    """Return the MLflow run of this run with its parameters and tags; create it if needed."""
    from mlflow.entities import Param, RunTag

    manifest = view.manifest
    name = block.run_name or shown_name(manifest)
    runs = client.search_runs([experiment], filter_string=f"tags.`{_TAG}` = '{manifest.id}'", max_results=1)
    run = runs[0] if runs else client.create_run(experiment, run_name=name, tags={_TAG: manifest.id})
    identifier = str(run.info.run_id)
    tags = {f"holdfast.{key}": value for key, value in flat(about(view))} | dict(flat(block.extra_metadata))
    tags |= {key: str(value) for key, value in block.tags.items()} | {"mlflow.runName": name}
    tags["mlflow.loggedArtifacts"] = '[{"path": "trials.json", "type": "table"}]'
    if block.description is not None:
        tags["mlflow.note.content"] = block.description
    eval_of = {key: value for key, value in manifest.eval.items() if key not in _NOT_PARAMETERS}
    params = {_name(key): _short(value, _LONGEST_PARAM) for key, value in flat(eval_of)}
    kept = [key for key, value in params.items() if run.data.params.get(key, value) != value]
    new = [Param(key, value) for key, value in params.items() if key not in run.data.params]
    marks = [RunTag(_name(key), _short(value, _LONGEST_TAG)) for key, value in tags.items()]
    for start in range(0, len(new), _BATCH):
        client.log_batch(identifier, params=new[start : start + _BATCH])
    for start in range(0, len(marks), _BATCH):
        client.log_batch(identifier, tags=marks[start : start + _BATCH])
    notes = [f"MLflow keeps the first value of {', '.join(kept)}; manifest.json there has today's"] if kept else []
    return identifier, notes


def _send(client: MlflowClient, run: str, view: RunView) -> None:
    from mlflow.entities import Metric

    metrics, now = view.metrics, int(time.time() * 1000)
    values: dict[str, float] = {}
    for name, value in (numbers(metrics) if metrics else {}).items():
        unique = _name(name)
        while unique in values:
            unique += "_"
        values[unique] = float(value)
    for start in range(0, len(values), _BATCH):
        some = list(values.items())[start : start + _BATCH]
        client.log_batch(run, metrics=[Metric(name, value, now, 0) for name, value in some])
    rundir = view.rundir
    for path in (rundir.manifest, rundir.results, rundir.metrics):
        if path.exists():
            client.log_artifact(run, str(path))
    # In the run directory: the next export finds and removes what a killed one has left there.
    with temporary_folder(rundir.path, "mlflow") as folder:
        table = folder / "trials.json"
        with table.open("wb") as file:
            _write_table(view, file)
        client.log_artifact(run, str(table))
    if metrics:
        client.set_terminated(run, "FINISHED")
    else:
        client.update_run(run, status="RUNNING")


def _write_table(view: RunView, file: BinaryIO) -> None:
    """Return the trials in the form of an MLflow table: columns, then rows."""
    encode = msgspec.json.Encoder().encode
    separator = b""
    for row in rows(view):
        if not separator:
            file.write(b'{"columns":' + encode(list(row)) + b',"data":[')
        file.write(separator + encode(list(row.values())))
        separator = b",\n"
    file.write(b"]}" if separator else b'{"columns":[],"data":[]}')


def _name(name: str) -> str:
    """Return a name that MLflow accepts: a path of letters, digits and a few signs."""
    plain = re.sub(r"[^\w.\- :/]", "_", name.replace("@", "_at_"))[:250]
    return "/".join(part for part in plain.split("/") if part not in ("", ".", "..")) or "_"


def _short(value: str, longest: int) -> str:
    return value if len(value) <= longest else value[: longest - 1] + "…"
