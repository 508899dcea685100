"""Exports of a run: the registry of exporters, their schemas, and reading the exports that an eval names."""

import re
from typing import Any, Final, Literal, Self, cast

from pydantic import ConfigDict, Field, model_validator

from holdfast.errors import Problem
from holdfast.spec.document import Document, Location
from holdfast.spec.eval_schema import OutputBlock
from holdfast.spec.plugins import BUILT_IN, Registry, load_reference
from holdfast.spec.schema import Block, Strings
from holdfast.spec.validation import validate_block

EXPORTERS = Registry(
    "holdfast.exporters",
    "exporter",
    {
        "csv": "holdfast.export.tables:write_csv",
        "parquet": "holdfast.export.tables:write_parquet",
        "samples": "holdfast.export.tables:write_transcripts",
        "junit": "holdfast.export.junit:write_junit",
        "html": "holdfast.export.html:write_html",
        "wandb": "holdfast.export.wandb:export_wandb",
        "mlflow": "holdfast.export.mlflow:export_mlflow",
    },
)
"""Every exporter: a function that writes a run into a folder, or sends it to a service."""

LIVE_EXPORTERS: Final = BUILT_IN["holdfast.live_exporters"]
"""Exporters that follow a run, by key under `output`: each is a `holdfast.export.live.LiveExporter`."""


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
    """An installed package's exporter. Other options are passed to its function."""

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


def export_schema(name: str) -> type[ExportBlock]:
    """Return the schema of an exporter's options."""
    services: dict[str, type[ExportBlock]] = {"wandb": WandbExport, "mlflow": MlflowExport}
    return services.get(name) or (FileExport if name in list(EXPORTERS) else PluginExport)


def read_live_exports(output: OutputBlock, document: Document, problems: list[Problem]) -> dict[str, LiveExport]:
    """Read the blocks of live exporters, each by its schema; adds to `problems`."""
    blocks: dict[str, LiveExport] = {}
    for name, reference in LIVE_EXPORTERS.items():
        if (data := getattr(output, name)) is not None:
            schema = load_reference(reference).schema
            block = cast("LiveExport | None", validate_block(schema, data, ("output", name), document, problems))
            if block is not None:
                blocks[name] = block
    return blocks


def read_export(
    data: dict[str, Any], location: Location, document: Document, problems: list[Problem]
) -> ExportBlock | None:
    """Read the options of an export; adds to `problems`."""
    name = data.get("to")
    if isinstance(name, str) and name in EXPORTERS:
        return cast("ExportBlock | None", validate_block(export_schema(name), data, location, document, problems))
    message = EXPORTERS.unknown(str(name)) if name else f"needs `to`: {EXPORTERS.describe()}"
    problems.append(Problem(document.where(location), message))
    return None


def read_exports(output: OutputBlock, document: Document, problems: list[Problem]) -> tuple[ExportBlock, ...]:
    """Read the destinations of a finished run; adds to `problems`."""
    exports: dict[str, ExportBlock] = {}
    for number, raw in enumerate(output.export):
        location = ("output", "export", number)
        block = read_export({"to": raw} if isinstance(raw, str) else raw, location, document, problems)
        if block is not None and block.to in exports:
            problems.append(Problem(document.where(location), f"duplicate export to {block.to}"))
        elif block is not None:
            exports[block.to] = block
    return tuple(exports.values())
