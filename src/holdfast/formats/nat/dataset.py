"""Translate the dataset of a NAT configuration into a `dataset` block."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.errors import Problem

if TYPE_CHECKING:
    from holdfast.spec.document import Location

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
_FIXED: Final = {
    "generated_answer_key": "generated_answer",
    "trajectory_key": "intermediate_steps",
    "expected_trajectory_key": "expected_intermediate_steps",
}
"""columns that have one name"""
_NAME: Final = re.compile(r"[A-Za-z_]\w*")

_DATASET: Final = ("eval", "general", "dataset")


class Rows(NamedTuple):
    """The place of the rows, and their fields for question and answer."""

    block: dict[str, Any]
    """the `dataset` block"""
    question: str
    """the field with the question"""
    answer: str | None
    """the field with the expected answer, where the configuration names one"""


class Reader:
    """Translates a dataset and collects its problems."""

    def __init__(self, block: dict[str, Any], folder: Path, where: Any) -> None:
        self._block = block
        self._folder = folder
        self._where = where
        self.problems: list[Problem] = []

    def read(self) -> Rows:
        """Return the rows; their problems are added to `problems`."""
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
        for key, name in structure.items():
            if key not in _STRUCTURE:
                self._wrong(("structure", key), "unknown key")
            elif name != _FIXED.get(key, name):
                self._wrong(("structure", key), f"not supported: the column is called {_FIXED[key]}; rename it")
        if structure.get("disable"):
            reason = "rows without a structure have no question; write an eval with a `prompt` and `target: {nat: …}`"
            self._wrong(("structure", "disable"), f"not supported: {reason}")
        dataset: dict[str, Any] = {"path": self._path(), "format": kind}
        if (name := block.get("id_key")) is not None:
            dataset["id"] = str(name)
        if condition := self._filter():
            dataset["where"] = condition
        question = self._field(("structure", "question_key"), structure.get("question_key", "question"))
        answer = structure.get("answer_key")
        return Rows(dataset, question, None if answer is None else self._field(("structure", "answer_key"), answer))

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

    def _filter(self) -> str | None:
        """Translate allowlist and denylist into one expression. A column that a row does not have filters nothing."""
        parts: list[str] = []
        for key in ("allowlist", "denylist"):
            filters = self._mapping(("filter",), self._block.get("filter"))
            named = self._mapping(("filter", key), filters.get(key))
            columns = self._mapping(("filter", key, "field"), named.get("field"))
            for column, values in columns.items():
                name = self._field(("filter", key, "field", column), column)
                globs = values if isinstance(values, list) else [values]
                tests = (
                    " or ".join(f"{name} is glob({json.dumps(str(glob), ensure_ascii=False)})" for glob in globs)
                    or "false"
                )
                matches = f"({name} is not defined or {tests})"
                parts.append(matches if key == "allowlist" else f"({name} is not defined or not ({tests}))")
        return " and ".join(parts) or None

    def _mapping(self, location: Location, value: Any) -> dict[str, Any]:
        if value is None or isinstance(value, dict):
            return value or {}
        if not any(problem.where == self._where((*_DATASET, *location)) for problem in self.problems):
            self._wrong(location, "must be a mapping of keys to values")
        return {}

    def _field(self, location: Location, name: Any) -> str:
        if _NAME.fullmatch(str(name)) is None:
            message = (
                f"not supported: {name!r} is not a valid name in a template; rename the column to letters, digits and _"
            )
            self._wrong(location, message)
        return str(name)

    def _wrong(self, location: Location, message: str) -> None:
        self.problems.append(Problem(self._where((*_DATASET, *location)), message))
