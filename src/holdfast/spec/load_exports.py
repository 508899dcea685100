"""Reads the exports of an eval, each by the schema of its exporter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from holdfast.errors import Problem
from holdfast.spec.plugins import Registry
from holdfast.spec.schema import ExportBlock, FileExport, MlflowExport, PluginExport, WandbExport
from holdfast.spec.validation import validate_block

if TYPE_CHECKING:
    from holdfast.spec.document import Document, Location

EXPORTERS = Registry(
    "holdfast.exporters",
    "exporter",
    {
        "csv": "holdfast.export.tables:write_csv",
        "parquet": "holdfast.export.tables:write_parquet",
        "samples": "holdfast.export.samples:write_transcripts",
        "junit": "holdfast.export.junit:write_junit",
        "html": "holdfast.export.html:write_html",
        "nat": "holdfast.formats.nat.export:write_nat",
        "flexeval": "holdfast.formats.flexeval:write_flexeval",
        "waza": "holdfast.formats.waza.export:write_waza",
        "lm-eval": "holdfast.formats.lm_eval:write_lm_eval",
        "wandb": "holdfast.export.wandb:export_wandb",
        "mlflow": "holdfast.export.mlflow:export_mlflow",
    },
)
"""Every exporter: a function that writes a run into a folder, or sends it to a service."""

_SERVICES: Final[dict[str, type[ExportBlock]]] = {"wandb": WandbExport, "mlflow": MlflowExport}


def export_schema(name: str) -> type[ExportBlock]:
    """Return the schema of an exporter's options."""
    return _SERVICES.get(name) or (FileExport if name in list(EXPORTERS) else PluginExport)


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
