"""Models of where a run is exported to, imported only where an eval or a command names a destination."""

import re
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from holdfast.spec.schema import Block, Strings


class LiveExport(Block):
    """A copy of the results that is written while the run is in progress."""

    dir: str
    """Folder for the files, relative to the eval file."""


class ExportBlock(Block):
    """A destination of a finished run."""

    to: str
    """Format or service."""


class FileExport(ExportBlock):
    """A destination that is a folder of files."""

    dir: str | None = Field(default=None, min_length=1)
    """Folder for the files, relative to the eval file. Default: `export/FORMAT` in the run directory."""


class PluginExport(FileExport):
    """An exporter of an installed package, whose other options are passed to its function."""

    model_config = ConfigDict(extra="allow")


class TrackerExport(ExportBlock):
    """A destination that is a service."""

    description: str | None = None
    """Description of the run."""
    extra_metadata: dict[str, Any] = {}
    """Further values to record with the configuration."""


class WandbExport(TrackerExport):
    """Weights & Biases."""

    project: str | None = None
    """Project. Default: `$WANDB_PROJECT`, else what `wandb init` set, else `holdfast`."""
    entity: str | None = None
    """User or team. Default: `$WANDB_ENTITY`, else that of the login."""
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
