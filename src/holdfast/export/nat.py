"""NeMo Agent Toolkit's files: `workflow_output.json`, one `<evaluator>_output.json` per grader, and, while a run is
going on, `workflow_output.jsonl` with a line per finished trial.

Row `id`s are the samples'; with several trials `<id>_rep<k>`, k from 0. Steps are made from the conversation:
each assistant message is an LLM_END, each tool's result a TOOL_END.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.store.files import make_directory, replacing, slug

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from holdfast.export.reading import RunReader, Trial
    from holdfast.store.records import Output

DEFAULT_STEPS = ("LLM_END", "TOOL_END")

_encode = msgspec.json.Encoder().encode


def workflow_row(
    fields: dict[str, Any], output: Output, trials: int, steps: Iterable[str] = DEFAULT_STEPS
) -> dict[str, Any]:
    """A trial as `workflow_output.json` has it: the dataset's columns, then NAT's own."""
    asked = next((m["content"] for m in output.messages if m.get("role") == "user"), "")
    return {
        **fields,
        "id": f"{output.sample}_rep{output.trial - 1}" if trials > 1 else output.sample,
        "question": fields.get("question", asked),
        "answer": fields.get("answer", fields.get("expected", "")),
        "generated_answer": output.output,
        "intermediate_steps": list(_steps(output, frozenset(steps))),
        "expected_intermediate_steps": fields.get("expected_intermediate_steps", []),
    }


def _steps(output: Output, wanted: frozenset[str]) -> Iterator[dict[str, Any]]:
    ended = output.timing.started + output.timing.seconds
    before: Any = ""
    for number, message in enumerate(output.messages):
        kind = {"assistant": "LLM_END", "tool": "TOOL_END"}.get(str(message.get("role")))
        if kind in wanted:
            yield {
                "parent_id": "root",
                "function_ancestry": {
                    "function_id": "root",
                    "function_name": "root",
                    "parent_id": None,
                    "parent_name": None,
                },
                "payload": {
                    "event_type": kind,
                    "event_timestamp": ended,
                    "span_event_timestamp": output.timing.started,
                    "framework": None,
                    "name": message.get("name") or message.get("tool_call_id"),
                    "data": {"input": before, "output": message.get("content")},
                    "UUID": f"{output.key}-{number}",
                },
            }
        before = message.get("content")


def write_nat(
    reader: RunReader, folder: Path, steps: Iterable[str] = DEFAULT_STEPS, *, lines: bool = False
) -> list[Path]:
    """All of NAT's files for a run; with `lines` also `workflow_output.jsonl`, in the dataset's order."""
    make_directory(folder)
    trials = reader.manifest.trials
    verdicts: dict[str, list[dict[str, Any]]] = {name: [] for name in reader.manifest.identity.get("graders", {})}
    written = [folder / "workflow_output.json"]
    with replacing(written[0]) as file:
        separator = b"[\n"
        for trial in reader.trials():
            row = workflow_row(trial.fields, trial.output, trials, steps)
            file.write(separator + _encode(row))
            separator = b",\n"
            _note(trial, row["id"], verdicts)
        file.write(b"\n]\n" if separator != b"[\n" else b"[]\n")
    for name, items in verdicts.items():
        scores = [item["score"] for item in items if item["score"] is not None]
        mean = sum(scores) / len(scores) if scores else None
        path = folder / f"{slug(name)}_output.json"
        with replacing(path) as file:
            file.write(msgspec.json.format(_encode({"average_score": mean, "eval_output_items": items}), indent=2))
        written.append(path)
    if lines:
        mirror = NatMirror(folder, steps, trials)
        mirror.begin((trial.fields, trial.output) for trial in reader.trials())
        mirror.close()
        written.append(mirror.path)
    return written


def _note(trial: Trial, row_id: str, verdicts: dict[str, list[dict[str, Any]]]) -> None:
    for grade in trial.grades:
        failed = grade.status == "error"
        item = {
            "id": row_id,
            "score": grade.score,
            "reasoning": {"feedback": grade.feedback, "details": grade.details},
            "error": grade.feedback if failed else None,
        }
        verdicts.setdefault(grade.grader, []).append(item)


class NatMirror:
    """`workflow_output.jsonl`, kept up while a run is going on. The journals are the truth; this is a copy."""

    def __init__(self, folder: Path, steps: Iterable[str], trials: int) -> None:
        self.path = folder / "workflow_output.jsonl"
        self._steps = tuple(steps)
        self._trials = trials
        self._fd: int | None = None

    def begin(self, earlier: Iterable[tuple[dict[str, Any], Output]]) -> None:
        """Write what is there already, so that a resumed run neither lacks nor repeats a line."""
        make_directory(self.path.parent)
        with replacing(self.path) as file:
            for fields, output in earlier:
                file.write(self._line(fields, output))
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def add(self, fields: dict[str, Any], output: Output) -> None:
        """A trial has finished. Failing to copy it fails nothing: it is written anew by the next process."""
        if self._fd is not None:
            with suppress(OSError):
                os.write(self._fd, self._line(fields, output))

    def close(self) -> None:
        """No more will come."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _line(self, fields: dict[str, Any], output: Output) -> bytes:
        return _encode(workflow_row(fields, output, self._trials, self._steps)) + b"\n"
