"""NeMo Agent Toolkit's files: `workflow_output.json`, one `<evaluator>_output.json` per grader, and, while a run is
going on, `workflow_output.jsonl` with a line per finished trial (see `mirror`).

Row `id`s are the samples'; with several trials `<id>_rep<k>`, k from 0. `calls` has the steps.
"""

from __future__ import annotations

import shutil
from array import array
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.export.names import unique_names
from holdfast.formats.nat.steps import nat_steps
from holdfast.spec.target_schema import ModelTarget
from holdfast.store.durable import keep_backup, make_directory, replacing, slug
from holdfast.store.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from holdfast.report.run_view import RunView
    from holdfast.store.records import Grade, Output, Step

DEFAULT_STEPS: Final = ("LLM_END", "TOOL_END")
_WORKFLOW: Final = "workflow_output.json"
_LINES: Final = "workflow_output.jsonl"

_encode = msgspec.json.Encoder().encode


def workflow_row(
    fields: dict[str, Any],
    output: Output,
    recorded: Sequence[Step],
    model: str | None,
    trials: int,
    step_types: frozenset[str],
) -> dict[str, Any]:
    """Return a trial as `workflow_output.json` has it: the dataset's columns, then NAT's own."""
    return {
        **fields,
        "id": f"{output.sample}_rep{output.trial - 1}" if trials > 1 else output.sample,
        "question": fields.get("question", output.prompt or ""),
        "answer": fields.get("answer", fields.get("expected", "")),
        "generated_answer": output.output,
        "intermediate_steps": nat_steps(output, recorded, model, step_types),
        "expected_intermediate_steps": fields.get("expected_intermediate_steps", []),
    }


def workflow_line(
    fields: dict[str, Any],
    output: Output,
    recorded: Sequence[Step],
    model: str | None,
    trials: int,
    step_types: frozenset[str],
) -> bytes:
    """Return the same as a line of `workflow_output.jsonl`."""
    return _encode(workflow_row(fields, output, recorded, model, trials, step_types)) + b"\n"


def grader_files(graders: Iterable[str]) -> dict[str, str]:
    """Return the names of the graders' files; none is that of the workflow's output or of another grader."""
    parts = unique_names(graders, slug, taken=("workflow",))
    return {name: f"{part}_output.json" for name, part in parts.items()}


class _Claim(msgspec.Struct):
    run: str
    files: list[str]


class NatFolder:
    """A folder of NAT's files, all of one run: `.holdfast.json` says of which, and which of them are ours."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = path / _LINES
        self._claim = path / ".holdfast.json"

    def take_over(self, run: str, graders: Iterable[str]) -> None:
        """Make the folder a run's, which is going on and has no whole files yet: those of other runs are removed.

        A file that this folder's claim does not list may be NAT's, or of an earlier version: a copy of it is kept.
        """
        make_directory(self.path)
        claimed, names = self._files(), {_WORKFLOW, _LINES, *grader_files(graders).values()}
        for name in names - claimed:
            if (self.path / name).is_file():
                keep_backup(self.path / name)
        self._note(run, [_LINES])
        for name in names | claimed:
            (self.path / name).unlink(missing_ok=True)

    def settle(self, run: str, written: Iterable[Path]) -> None:
        """Say what was written; what an earlier export wrote and this one did not goes."""
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


def write_nat(view: RunView, folder: Path, steps: Iterable[str] = DEFAULT_STEPS, *, lines: bool = False) -> list[Path]:
    """Write all of NAT's files for a run; with `lines` also `workflow_output.jsonl`, in the dataset's order.

    Means are those of finished runs only.
    """
    make_directory(folder)
    target, trials, step_types = view.spec.target, view.manifest.trials, frozenset(steps)
    model = target.model if isinstance(target, ModelTarget) else None
    files = grader_files(view.graders)
    written = [folder / _WORKFLOW, *[folder / name for name in files.values()]]
    with ExitStack() as stack:
        verdicts = {name: stack.enter_context(_Verdicts()) for name in files}
        with replacing(written[0]) as file:
            separator = b"[\n"
            for trial in view.trials():
                recorded = view.steps(trial.output.key)
                row = workflow_row(trial.fields, trial.output, recorded, model, trials, step_types)
                file.write(separator + _encode(row))
                separator = b",\n"
                for grade in trial.grades:
                    verdicts[grade.grader].add(row["id"], grade)
            file.write(b"\n]\n" if separator != b"[\n" else b"[]\n")
        for name, file_name in files.items():
            verdicts[name].write(folder / file_name, finished=view.metrics is not None)
    if lines:
        written.append(folder / _LINES)
        with replacing(written[-1]) as file:
            for trial in view.trials():
                recorded = view.steps(trial.output.key)
                file.write(workflow_line(trial.fields, trial.output, recorded, model, trials, step_types))
    NatFolder(folder).settle(view.manifest.id, written)
    return written


class _Verdicts:
    """The verdicts of a grader: in a temporary file until their mean is known, with which NAT's file begins."""

    def __init__(self) -> None:
        self._items = Spool()
        self._scores = array("d")

    def __enter__(self) -> _Verdicts:
        return self

    def __exit__(self, *_: object) -> None:
        self._items.close()

    def add(self, row_id: str, grade: Grade) -> None:
        item = {
            "id": row_id,
            "score": grade.score,
            "reasoning": {"feedback": grade.feedback, "details": grade.details},
            "error": grade.feedback if grade.status == "error" else None,
        }
        separator = b",\n    " if self._items.tell() else b"\n    "
        self._items.write(separator + msgspec.json.format(_encode(item), indent=2).replace(b"\n", b"\n    "))
        if grade.score is not None:
            self._scores.append(grade.score)

    def write(self, path: Path, *, finished: bool) -> None:
        mean = sum(self._scores) / len(self._scores) if self._scores and finished else None
        end = b"\n  ]\n}" if self._items.tell() else b"]\n}"
        self._items.seek(0)
        with replacing(path) as file:
            file.write(b'{\n  "average_score": %b,\n  "eval_output_items": [' % _encode(mean))
            shutil.copyfileobj(self._items, file)
            file.write(end)
