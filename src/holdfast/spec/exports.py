"""Exports of a run: the registry of exporters, their schemas, and reading the exports that an eval names."""

from typing import Any, Final, cast

from pydantic import ConfigDict, Field

from holdfast.errors import Problem
from holdfast.spec.document import Document, Location
from holdfast.spec.eval_schema import OutputBlock
from holdfast.spec.plugins import BUILT_IN, Registry, load_reference
from holdfast.spec.schema import Block
from holdfast.spec.validation import validate_block

EXPORTERS = Registry("holdfast.exporters", "exporter", {"samples": "holdfast.report.tables:write_transcripts"})
"""Every exporter: a function that writes a run into a folder, or a `holdfast.report.exports.Service`."""

LIVE_EXPORTERS: Final = BUILT_IN["holdfast.live_exporters"]
"""Exporters that follow a run, by key under `output`: each is a `holdfast.report.live_exports.LiveExporter`."""


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


def export_schema(name: str) -> type[ExportBlock]:
    """Return the schema of an exporter's options; raise ValueError if the exporter cannot be imported."""
    schema: type[ExportBlock] | None = getattr(EXPORTERS.load(name), "schema", None)
    return schema or (FileExport if EXPORTERS.is_builtin(name) else PluginExport)


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
        try:
            schema = export_schema(name)
        except ValueError as error:  # its package is broken
            problems.append(Problem(document.where(location), str(error)))
            return None
        return cast("ExportBlock | None", validate_block(schema, data, location, document, problems))
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
