"""Write a run as NeMo Agent Toolkit's files: `workflow_output.json` and one `<evaluator>_output.json` per grader.

`mirror` writes `workflow_output.jsonl` during a run. The run of a NAT configuration also gets the configuration and the
profiler's files.

Rows keep their ids and values; with several trials an id becomes `<id>_rep<k>`, k from 0.
Files of evaluators have what the evaluator returned, and its own average.
"""

from __future__ import annotations

import json
import shutil
import time
from array import array
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from holdfast import HoldfastError
from holdfast.errors import ExportFailed
from holdfast.functions import describe_error
from holdfast.plugins.nat.config import without_secrets
from holdfast.plugins.nat.dataset import NatColumns
from holdfast.plugins.nat.library import effective_config, has_profiler, is_installed, profile
from holdfast.plugins.nat.schema import NatOutput
from holdfast.plugins.nat.steps import nat_steps
from holdfast.report.tables import unique_names
from holdfast.spec.target_schema import ModelTarget
from holdfast.store.files import Spool, keep_backup, make_directory, replacing, slug, temporary_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from holdfast import RunView
    from holdfast.spec.eval import Eval
    from holdfast.store.records import Grade, Output, Step, Together, TraceStep

_WORKFLOW: Final = "workflow_output.json"
_LINES: Final = "workflow_output.jsonl"
_ORIGINAL, _EFFECTIVE, _METADATA = _CONFIGS = ("config_original.yml", "config_effective.yml", "config_metadata.json")

_encode = msgspec.json.Encoder().encode


class RowForm:
    """The form of rows in NAT's files."""

    def __init__(self, spec: Eval, block: NatOutput | None = None) -> None:
        own = spec.live_exports.get("nat")
        self.block = block or (own if isinstance(own, NatOutput) else NatOutput(dir="."))
        self._columns = NatColumns.of(self.block.dataset)
        self.structured = not (self.block.dataset.get("structure") or {}).get("disable")
        self._types = frozenset(self.block.step_filter)
        self._model = spec.target.model if isinstance(spec.target, ModelTarget) else None
        self._trials = spec.trials

    def row_id(self, fields: Mapping[str, Any], output: Output) -> Any:
        """Return the id of a trial."""
        row_id = fields.get(self._columns.id, output.sample)
        return f"{row_id}_rep{output.trial - 1}" if self._trials > 1 else row_id

    def row(self, fields: dict[str, Any], output: Output, recorded: Sequence[Step]) -> dict[str, Any]:
        """Return a trial as `workflow_output.json` has it: the dataset's columns, then NAT's own."""
        names = self._columns
        answer = fields.get(names.answer, fields.get("expected", "") if not self.block.dataset else "")
        return {
            **fields,
            names.id: self.row_id(fields, output),
            names.question: fields.get(names.question, output.prompt or ""),
            names.answer: answer,
            names.generated_answer: answer_of(output),
            names.trajectory: self.steps(output, recorded),
            names.expected_trajectory: fields.get(names.expected_trajectory, []),
        }

    def line(self, fields: dict[str, Any], output: Output, recorded: Sequence[Step]) -> bytes:
        """Return a trial as a line of `workflow_output.jsonl`."""
        return _encode(self.row(fields, output, recorded)) + b"\n"

    def steps(self, output: Output, recorded: Sequence[Step], *, all_types: bool = False) -> list[TraceStep]:
        """Return the steps of a trial."""
        return nat_steps(output, recorded, self._model, frozenset() if all_types else self._types)


def answer_of(output: Output) -> Any:
    """Return what the target returned."""
    return output.output if output.value is UNSET else output.value


def _parsed(answer: Any) -> Any:
    """Return an answer as NAT writes it for rows without structure: JSON text as its value."""
    if isinstance(answer, str):
        with suppress(ValueError, RecursionError):
            return json.loads(answer)
    return answer


def grader_files(graders: Iterable[str]) -> dict[str, str]:
    """Return a file name for each grader, different from the workflow output's and from each other."""
    parts = unique_names(graders, slug, taken=("workflow",))
    return {name: f"{part}_output.json" for name, part in parts.items()}


class _Claim(msgspec.Struct):
    run: str
    files: list[str]


class NatFolder:
    """A folder of NAT's files for one run. `.holdfast.json` is our claim: it names the run and the files we wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = path / _LINES
        self._claim = path / ".holdfast.json"

    def take_over(self, run: str, graders: Iterable[str]) -> None:
        """Take the folder over for a run in progress: remove other runs' files.

        A file that the claim does not list may be NAT's own, so a copy is kept.
        """
        make_directory(self.path)
        claimed, names = self._files(), {_WORKFLOW, _LINES, *_CONFIGS, *grader_files(graders).values()}
        self.set_aside(names)
        self._note(run, [_LINES])
        for name in names | claimed:
            (self.path / name).unlink(missing_ok=True)

    def set_aside(self, names: Iterable[str] = ()) -> None:
        """Keep copies of NAT's files, and of the named ones, that the claim does not list.

        NAT's files are then removed, since `nat eval` empties the folder.
        """
        others = {path.name for path in self.path.glob("*_output.json")} - self._files()
        for name in others | (set(names) - self._files()):
            if (self.path / name).is_file():
                keep_backup(self.path / name)
        for name in others:
            (self.path / name).unlink(missing_ok=True)

    def settle(self, run: str, written: Iterable[Path]) -> None:
        """Record what was written, and remove what only an earlier export wrote."""
        names = [path.name for path in written]
        stale = self._files() - set(names)
        self._note(run, names)
        for name in stale:
            (self.path / name).unlink(missing_ok=True)

    def _files(self) -> set[str]:
        with suppress(OSError, msgspec.DecodeError):
            names = msgspec.json.decode(self._claim.read_bytes(), type=_Claim).files
            return {name for name in names if "/" not in name and name not in ("", ".", "..")}
        return set()

    def _note(self, run: str, names: list[str]) -> None:
        with replacing(self._claim) as file:
            file.write(_encode(_Claim(run, names)) + b"\n")


def write_nat(view: RunView, folder: Path, *, lines: bool = False, block: NatOutput | None = None) -> list[Path]:
    """Write all of NAT's files for a run; with `lines` also `workflow_output.jsonl`, in the dataset's order.

    Only finished runs have means.
    """
    make_directory(folder)
    form = RowForm(view.spec, block)
    files = grader_files(view.graders)
    written = [folder / _WORKFLOW, *[folder / name for name in files.values()]]
    with ExitStack() as stack:
        verdicts = {name: stack.enter_context(_Verdicts()) for name in files}
        with replacing(written[0]) as file:
            separator = b"[\n"
            for trial in view.trials():
                recorded = view.steps(trial.output.key)
                if form.structured:
                    row: Any = form.row(trial.fields, trial.output, recorded)
                else:
                    row = _parsed(answer_of(trial.output))
                file.write(separator + _encode(row))
                separator = b",\n"
                for grade in trial.grades:
                    verdicts[grade.grader].add(form.row_id(trial.fields, trial.output), grade)
            file.write(b"\n]\n" if separator != b"[\n" else b"[]\n")
        for name, file_name in files.items():
            verdicts[name].write(folder / file_name, finished=view.metrics is not None)
    if lines:
        written.append(folder / _LINES)
        with replacing(written[-1]) as file:
            for trial in view.trials():
                file.write(form.line(trial.fields, trial.output, view.steps(trial.output.key)))
    written += _write_config(view, form.block, folder)
    if form.block.profiler and view.metrics is not None and has_profiler():
        written += _write_profile(view, form, folder)
    NatFolder(folder).settle(view.manifest.id, written)
    return written


def _write_config(view: RunView, block: NatOutput, folder: Path) -> list[Path]:
    """Write the configuration, as written and as NAT uses it, without secrets, and the settings of the run."""
    source = None if block.config_file is None else view.spec.folder / block.config_file
    if source is None or not source.is_file():
        return []
    written = [folder / _ORIGINAL, folder / _METADATA]
    with replacing(written[0]) as file:
        file.write(source.read_bytes())
    overrides = [
        {"path": path, "value": value if isinstance(value, str) else json.dumps(value)}
        for path, value in block.override.items()
    ]
    metadata = {
        "config_file": str(source),
        "config_file_type": "Path",
        "overrides": overrides,
        "dataset": None,
        "result_json_path": getattr(view.spec.target, "result_json_path", "$"),
        "skip_workflow": False,
        "skip_completed_entries": False,
        "reps": view.manifest.trials,
        "endpoint": None,
        "endpoint_timeout": 300,
        "adjust_dataset_size": False,
        "num_passes": 0,
        "export_timeout": 60.0,
        "user_id": "nat_eval_user_id",
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
    }
    with replacing(written[1]) as file:
        file.write(msgspec.json.format(_encode(metadata), indent=2))
    with suppress(HoldfastError):  # the configuration has changed since, or a package of its components is not here
        if is_installed():
            config = without_secrets(effective_config(source, block.override))
            with replacing(folder / _EFFECTIVE) as file:
                file.write(msgspec.yaml.encode(config, order=None))
            written.append(folder / _EFFECTIVE)
    return written


def _write_profile(view: RunView, form: RowForm, folder: Path) -> list[Path]:
    """Write the profiler's files, made from the recorded steps of all trials."""
    traces = [form.steps(trial.output, view.steps(trial.output.key), all_types=True) for trial in view.trials()]
    with temporary_folder(folder, "profiler") as profiled:
        try:
            profile(form.block.profiler or {}, traces, profiled)
        except Exception as error:  # raised by the profiler
            raise ExportFailed(f"NAT's profiler failed: {describe_error(error)}") from error
        names = sorted(path.name for path in profiled.iterdir())
        for name in names:
            target = folder / name
            if target.is_dir():
                shutil.rmtree(target)
            (profiled / name).replace(target)
    return [folder / name for name in names]


class _Verdicts:
    """The verdicts of a grader, in a temporary file until their mean is known, because NAT's file begins with it."""

    def __init__(self) -> None:
        self._items = Spool()
        self._scores = array("d")
        self._digits: int | None = None
        """to which NAT rounds the mean"""
        self._together: Together | None = None

    def __enter__(self) -> _Verdicts:
        return self

    def __exit__(self, *_: object) -> None:
        self._items.close()

    def add(self, row_id: Any, grade: Grade) -> None:
        """Add a verdict; for NAT's evaluators, what they returned."""
        details = grade.details
        item = {
            "id": row_id,
            "score": grade.score,
            "reasoning": {"feedback": grade.feedback, "details": details},
            "error": None,
        }
        if grade.status == "error":
            item |= {"score": None, "reasoning": {"error": grade.feedback}, "error": grade.feedback}
        elif grade.type == "nat" and isinstance(details, dict):
            item |= {"score": details["value"], "reasoning": details["reasoning"], **details.get("more", {})}
            self._digits = 2
        if not isinstance(grade.together, UnsetType):
            self._together = grade.together
        separator = b",\n    " if self._items.tell() else b"\n    "
        self._items.write(separator + msgspec.json.format(_encode(item), indent=2).replace(b"\n", b"\n    "))
        if isinstance(item["score"], int | float):
            self._scores.append(item["score"])

    def write(self, path: Path, *, finished: bool) -> None:
        """Write the mean and the items. An evaluator that looks at all outputs together has its own mean."""
        mean: Any = sum(self._scores) / len(self._scores) if self._scores else None
        if mean is not None and self._digits is not None:
            mean = round(mean, self._digits)
        more: dict[str, Any] = {}
        if self._together is not None:
            mean, more = self._together.score, self._together.details or {}
        end = b"\n  ]" if self._items.tell() else b"]"
        self._items.seek(0)
        with replacing(path) as file:
            file.write(b'{\n  "average_score": %b,\n  "eval_output_items": [' % _encode(mean if finished else None))
            shutil.copyfileobj(self._items, file)
            file.write(end)
            for name, value in more.items():
                file.write(b",\n  %b: %b" % (_encode(name), _encode(value)))
            file.write(b"\n}")
