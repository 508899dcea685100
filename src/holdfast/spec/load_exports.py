"""Reads the exports of an eval, each by the schema of its exporter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from holdfast.errors import Problem
from holdfast.spec.plugins import BUILT_IN, Registry, load_reference
from holdfast.spec.validation import validate_block

if TYPE_CHECKING:
    from holdfast.spec.document import Document, Location
    from holdfast.spec.export_schema import ExportBlock, LiveExport
    from holdfast.spec.schema import OutputBlock

EXPORTERS = Registry(
    "holdfast.exporters",
    "exporter",
    {
        "csv": "holdfast.export.tables:write_csv",
        "parquet": "holdfast.export.tables:write_parquet",
        "samples": "holdfast.export.samples:write_transcripts",
        "junit": "holdfast.export.junit:write_junit",
        "html": "holdfast.export.html:write_html",
        "wandb": "holdfast.export.wandb:export_wandb",
        "mlflow": "holdfast.export.mlflow:export_mlflow",
    },
)
"""Every exporter: a function that writes a run into a folder, or sends it to a service."""

LIVE_EXPORTERS: Final = BUILT_IN["holdfast.live_exporters"]
"""Exporters that follow a run, by their keys under `output`: each a `holdfast.export.live.LiveExporter`."""


def export_schema(name: str) -> type[ExportBlock]:
    """Return the schema of an exporter's options."""
    # most evals name no destination, and start without the models of destinations
    from holdfast.spec.export_schema import FileExport, MlflowExport, PluginExport, WandbExport

    services: dict[str, type[ExportBlock]] = {"wandb": WandbExport, "mlflow": MlflowExport}
    return services.get(name) or (FileExport if name in list(EXPORTERS) else PluginExport)


def read_live_exports(output: OutputBlock, document: Document, problems: list[Problem]) -> dict[str, LiveExport]:
    """Read the blocks of live exporters, each by its schema; adds to `problems` what is wrong with them."""
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
    """Read the options of an export; adds to `problems` what is wrong with them."""
    name = data.get("to")
    if isinstance(name, str) and name in EXPORTERS:
        return cast("ExportBlock | None", validate_block(export_schema(name), data, location, document, problems))
    message = EXPORTERS.unknown(str(name)) if name else f"needs `to`: {EXPORTERS.describe()}"
    problems.append(Problem(document.where(location), message))
    return None
