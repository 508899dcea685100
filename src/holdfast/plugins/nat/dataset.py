"""The dataset of a NAT configuration: its translation into a `dataset` block, and the names of its columns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.data.dataset import Dataset
from holdfast.data.readers import Layout, read_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast import Document
    from holdfast.spec.document import Location
    from holdfast.spec.eval import Eval
    from holdfast.spec.schema import Findings

FORMATS: Final = ("json", "jsonl", "csv", "parquet")
_REFUSED: Final = {
    "xls": "Excel files are not read; save the sheet as CSV and write `_type: csv`",
    "custom": "a custom loader is NAT's own code; write its rows to a JSON lines file and name that",
}
_KNOWN: Final = frozenset({"_type", "id_key", "structure", "filter", "file_path"})
_STRUCTURE: Final = frozenset(
    {
        *("disable", "question_key", "answer_key", "generated_answer_key"),
        *("trajectory_key", "expected_trajectory_key"),
    }
)
KEYED: Final = ("_type", "id_key", "structure")
"""keys of a dataset block that decide what evaluators get of a row"""
_NAME: Final = re.compile(r"[A-Za-z_]\w*")

_DATASET: Final = ("eval", "general", "dataset")


class Rows(NamedTuple):
    """The place of the rows, and their fields for question and answer."""

    block: dict[str, Any]
    """the `dataset` block"""
    prompt: str
    """the template of the message to the workflow"""


class NatColumns(NamedTuple):
    """The names of columns in NAT's files."""

    id: str = "id"
    question: str = "question"
    answer: str = "answer"
    generated_answer: str = "generated_answer"
    trajectory: str = "intermediate_steps"
    expected_trajectory: str = "expected_intermediate_steps"

    @classmethod
    def of(cls, block: Mapping[str, Any]) -> NatColumns:
        """Return the names that a dataset block gives the columns, and NAT's default for the others."""
        structure = block.get("structure") or {}
        named = {"id_key": block.get("id_key"), **structure}
        values = {name: named.get(f"{name}_key") for name in cls._fields}
        return cls(**{name: str(value) for name, value in values.items() if value is not None})


def row_places(spec: Eval) -> Iterator[str]:
    """Yield the places of all rows of an eval's files, as samples have them, including rows that are not selected."""
    block, dataset = spec.dataset, Dataset(spec)
    assert block is not None
    layout = Layout(block.format, block.delimiter, block.encoding, block.field)
    for path in dataset.files:
        for place, _ in read_rows(path, layout):
            yield place


class Reader:
    """Translates the dataset of a configuration."""

    def __init__(self, block: dict[str, Any], document: Document, findings: Findings) -> None:
        assert document.path is not None
        self._block = block
        self._document = document
        self._folder = document.path.resolve().parent
        self._findings = findings

    def read(self) -> Rows:
        """Return the rows; problems are added to the findings."""
        block = self._block
        kind = str(block.get("_type", "json"))
        if kind not in FORMATS:
            reason = _REFUSED.get(kind, "a loader of a NAT plug-in; write its rows to a JSON lines file and name that")
            self._wrong(("_type",), f"not supported: {kind}: {reason}")
        for key in block:
            if key in ("s3", "remote_file_path") and block[key] is not None:
                self._wrong((key,), "not supported: nothing is downloaded; fetch the file and name it as file_path")
            elif key not in _KNOWN and key not in ("s3", "remote_file_path", "function", "kwargs"):
                self._wrong((key,), "unknown key")
        structure = self._mapping(("structure",), block.get("structure"))
        for key in structure:
            if key not in _STRUCTURE:
                self._wrong(("structure", key), "unknown key")
        dataset: dict[str, Any] = {"path": self._path(), "format": kind}
        if (name := block.get("id_key")) is not None:
            dataset["id"] = str(name)
        conditions, prompt = self._filters(), "{{ row | tojson }}"
        if not structure.get("disable"):
            question = _variable(structure.get("question_key", "question"))
            prompt = f"{{{{ {question} }}}}"
            # As in NAT, rows without a question are left out.
            conditions.append(f"{question} is defined and {question} is not none and ({question} | string | trim)")
        if conditions:
            dataset["where"] = " and ".join(conditions)
        return Rows(dataset, prompt)

    def _path(self) -> str:
        """Return the path relative to the working directory, as in NAT, or else relative to the configuration."""
        path = self._block.get("file_path")
        if not isinstance(path, str) or not path:
            self._wrong(("file_path",), "is missing")
            return ""
        if "://" in path:
            self._wrong(("file_path",), "not supported: nothing is downloaded; fetch the file and name it here")
        here = Path.cwd() / path
        return str(here) if here.is_file() and here.resolve() != (self._folder / path).resolve() else path

    def _filters(self) -> list[str]:
        """Translate allowlist and denylist into expressions. A column that a row does not have filters nothing."""
        parts: list[str] = []
        for key in ("allowlist", "denylist"):
            filters = self._mapping(("filter",), self._block.get("filter"))
            named = self._mapping(("filter", key), filters.get(key))
            columns = self._mapping(("filter", key, "field"), named.get("field"))
            for column, values in columns.items():
                name = _variable(column)
                globs = values if isinstance(values, list) else [values]
                tests = (
                    " or ".join(f"{name} is glob({json.dumps(str(glob), ensure_ascii=False)})" for glob in globs)
                    or "false"
                )
                matches = f"({name} is not defined or {tests})"
                parts.append(matches if key == "allowlist" else f"({name} is not defined or not ({tests}))")
        return parts

    def _mapping(self, location: Location, value: Any) -> dict[str, Any]:
        if value is None or isinstance(value, dict):
            return value or {}
        self._wrong(location, "must be a mapping of keys to values")
        return {}

    def _wrong(self, location: Location, message: str) -> None:
        self._findings.wrong(self._document, (*_DATASET, *location), message)


def _variable(column: Any) -> str:
    """Return a column as templates and expressions name it."""
    name = str(column)
    return name if _NAME.fullmatch(name) else f"row[{json.dumps(name)}]"
