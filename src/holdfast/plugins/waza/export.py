"""Write any run as waza's `results.json`, schema 1.5.

A trial that a checkpoint stopped has the status `error`, as in waza, and counts as failed. A trial without an output,
or whose graders could not judge, also has the status `error`, but no verdict: only counts of errors include it. A task
is an `error` if some verdicts are missing and all others are good. Unknown numbers are null, which waza reads as 0. A
trial without graders is `skipped`, and so is a checkpoint that was never reached, which waza does not list.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UnsetType

from holdfast import GradedTrial
from holdfast.graders.build import grader_places
from holdfast.plugins.waza.statistics import SuiteNumbers, deviation, mean, task_stats
from holdfast.plugins.waza.tasks import SHOULD
from holdfast.spec.template import RENDER_ERRORS, expression
from holdfast.store.files import replacing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from holdfast import Pending, RunView, Usage
    from holdfast.graders.build import GraderPlace
    from holdfast.store.records import Grade, Output

SCHEMA_VERSION: Final = "1.5"

_CONFIDENCE: Final = {"medium": 0.5}
"""what a trigger prompt counts; default: 1"""

_encode = msgspec.json.Encoder().encode


def write_waza(view: RunView, folder: Path) -> list[Path]:
    """Write `results.json` task by task, so that a large run need not fit into memory."""
    path = folder / "results.json"
    whole = _Whole(view)
    with replacing(path) as file:
        file.write(_encode(whole.head())[:-1] + b',"tasks":[')
        separator = b"\n"
        for task in whole.tasks():
            file.write(separator + _encode(task))
            separator = b",\n"
        file.write(b"\n]," + _encode(whole.tail())[1:] + b"\n")
    return [path]


class _Whole:
    """One pass over a run, counting on the way."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        self._spec = view.spec
        self._places = grader_places(self._spec)
        self._about = _block(_block(view.manifest.eval, "metadata"), "waza")
        self._kind = self._spec.target.kind
        target = view.manifest.target
        self._model = str(self._about.get("model") or target) if self._kind == "mock" else target
        self._tasks = SuiteNumbers()
        self._milliseconds = 0
        """of all trials that have an output"""
        self._trials = self._verdicts = 0
        """of all tasks, trigger prompts included"""
        self._statuses: Counter[str] = Counter()
        self._groups: dict[str, list[tuple[str, float | None]]] = defaultdict(list)
        self._usage: Counter[str] = Counter()
        self._unmetered = 0
        """runs that do not report their tokens"""
        self._triggers: list[tuple[float, bool]] = []

    def head(self) -> dict[str, Any]:
        """Return the fields that need no trial."""
        manifest, spec = self._view.manifest, self._spec
        judge = self._about.get("judge_model")
        return {
            "schemaVersion": SCHEMA_VERSION,
            "eval_id": f"run-{manifest.id}",
            "skill": self._about.get("skill", ""),
            "eval_name": manifest.name,
            "timestamp": manifest.created,
            "config": {
                "runs_per_test": manifest.trials,
                "model_id": self._model,
                "engine_type": self._kind,
                "timeout_sec": int(spec.limits.turn_timeout),
                **({"judge_model": judge} if judge else {}),
            },
        }

    def tasks(self) -> Iterator[dict[str, Any]]:
        """Yield every sample, in the dataset's order."""
        for sample, trials in groupby(self._view.everything(), key=_sample):
            sample_trials = list(trials)
            self._trials += len(sample_trials)
            self._verdicts += sum(isinstance(trial, GradedTrial) and trial.score is not None for trial in sample_trials)
            if any(isinstance(trial, GradedTrial) and "should_trigger" in trial.fields for trial in sample_trials):
                self._note_triggers(sample_trials)
            else:
                yield self._task(sample, sample_trials)

    def tail(self) -> dict[str, Any]:
        """Return the fields that need all trials."""
        metrics = self._view.metrics
        so_far = self._verdicts / self._trials if self._trials else None
        return {
            "summary": self._summary(),
            "metrics": self._measures(),
            "metadata": {
                "holdfast": {
                    "run": self._view.manifest.id,
                    "finished": metrics is not None,
                    "coverage": so_far if metrics is None else metrics.coverage,
                }
            },
        }

    def _task(self, sample: str, trials: list[GradedTrial | Pending]) -> dict[str, Any]:
        runs = [self._run(trial) if isinstance(trial, GradedTrial) else _pending(trial) for trial in trials]
        row = next((trial.fields for trial in trials if isinstance(trial, GradedTrial)), {})
        stats, status = task_stats(runs), _overall(runs)
        self._tasks.add(runs, stats)
        self._statuses[status] += 1
        self._milliseconds += sum(run["duration_ms"] or 0 for run in runs)
        for run in runs:
            self._usage.update(run.get("usage", {}))
            self._unmetered += "usage" not in run and bool(run["final_output"])
        group = self._model if self._about.get("group_by") == "model" else row.get("group")
        if group is not None:
            self._groups[str(group)].append((status, stats["avg_score"]))
        return {
            "test_id": sample,
            "display_name": str(row.get("name") or sample),
            **({"group": str(group)} if group is not None else {}),
            **({"golden": True} if row.get("golden") is True else {}),
            "status": status,
            "stats": stats,
            "runs": [{key: value for key, value in run.items() if not key.startswith("_")} for run in runs],
        }

    def _run(self, trial: GradedTrial) -> dict[str, Any]:
        output = trial.output
        stopped = not isinstance(output.stopped_by, UnsetType)
        skipped = bool(trial.panel.graders) and not trial.grades
        checkpoints = [] if skipped else list(self._checkpoints(trial))
        final = [grade for grade in trial.grades if grade.turn is None]
        unjudged = [grade.grader for grade in trial.grades if grade.status == "error"]
        error = ""
        if stopped:
            failed = [name for point in checkpoints if "stopped" in point for name in _failed(point["validations"])]
            error = f"checkpoint after_turn={output.turns} failed (on_failure: stop): {', '.join(sorted(failed))}"
        elif trial.status == "error" and not skipped:
            error = f"not judged by {', '.join(unjudged)}" if unjudged else "not judged by all its graders yet"
        calls, usage = list(_calls(output)), _usage(output.usage, output.turns)
        return {
            "run_number": output.trial,
            "attempts": output.attempt,
            "status": "error" if error else "skipped" if skipped else trial.status,
            "duration_ms": _milliseconds(output.timing.seconds),
            "validations": _validations(final, output.sample),
            "session_digest": {
                "tool_call_count": len(calls),
                "tools_used": sorted({call["tool_name"] for call in calls}),
                "tool_calls": [{"name": call["tool_name"], "arguments": call["args"]} for call in calls],
                "errors": [],
                **({"usage": usage} if usage else {}),
                "session_id": output.key,
            },
            "transcript": list(_transcript(output)),
            "final_output": output.output,
            **({"error_msg": error} if error else {}),
            **({"usage": usage} if usage else {}),
            **self._responder(trial),
            **({"checkpoints": checkpoints} if checkpoints else {}),
            **({"tool_events": calls} if calls else {}),
            "_score": trial.score,
            "_plain": mean([grade.score for grade in final if grade.score is not None]),
        }

    def _responder(self, trial: GradedTrial) -> dict[str, Any]:
        """Return how the simulated user ended the conversation, if the trial has one."""
        block, output = self._spec.responder, trial.output
        if block is None:
            return {}
        most: Any = block.max_followups
        if isinstance(most, str):
            try:
                most = expression(most)(trial.fields)
            except RENDER_ERRORS:  # the row is gone
                most = None
        if not isinstance(most, int) or most < 1:
            return {}
        stopped = output.stop.startswith("checkpoint@")
        outcome = "stopped" if stopped or output.turns - 1 < most else "cap_exhausted"
        reason = {"reason": f"checkpoint after_turn={output.turns}"} if stopped else {}
        return {"responder": {"followups_sent": output.turns - 1, "outcome": outcome, **reason}}

    def _checkpoints(self, trial: GradedTrial) -> Iterator[dict[str, Any]]:
        """Return a trial's checkpoints, including the ones that it never reached."""
        by_turn: dict[int, list[GraderPlace]] = defaultdict(list)
        for number in trial.panel.graders:
            place = self._places[number]
            if place.turn is not None:
                by_turn[place.turn].append(place)
        for turn, places in sorted(by_turn.items()):
            grades = [grade for grade in trial.grades if grade.turn == turn]
            validations = _validations(grades, trial.output.sample)
            if trial.output.turns < turn:
                status = "skipped"
            elif len(grades) < len(places) or any(grade.status == "error" for grade in grades):
                status = "error"
                feedback = "; ".join(f"{grade.grader}: {grade.feedback}" for grade in grades if grade.status == "error")
                validations["_checkpoint_error"] = _checkpoint_error(feedback or "not judged yet")
            else:
                status = "failed" if any(grade.status == "failed" for grade in grades) else "passed"
            stopped = trial.output.stop == f"checkpoint@{turn}"
            yield {
                "after_turn": turn,
                "status": status,
                "validations": validations,
                **({"stopped": True} if stopped else {}),
            }

    def _note_triggers(self, trials: list[GradedTrial | Pending]) -> None:
        for trial in trials:
            if isinstance(trial, GradedTrial) and trial.status in ("passed", "failed"):
                weight = _CONFIDENCE.get(str(trial.fields.get("confidence")), 1.0)
                self._triggers.append((weight, trial.status == "passed"))

    def _measures(self) -> dict[str, Any]:
        total = sum(weight for weight, _ in self._triggers)
        if not total:
            return {}
        value = sum(weight for weight, right in self._triggers if right) / total
        least = 0.0 if self._spec.gate is None else self._spec.gate.minima.get(SHOULD, 0.0)
        measure = {"identifier": "trigger_accuracy", "value": value, "threshold": least, "passed": value >= least}
        return {"trigger_accuracy": {**measure, "weight": 1.0}}

    def _summary(self) -> dict[str, Any]:
        count, tasks = self._statuses, self._tasks
        scores, judged = tasks.scores, count["passed"] + count["failed"]
        groups = [
            {
                "name": name,
                "passed": sum(status == "passed" for status, _ in verdicts),
                "total": len(verdicts),
                "avg_score": mean([score for _, score in verdicts if score is not None]),
            }
            for name, verdicts in sorted(self._groups.items())
        ]
        usage = dict(self._usage) if not self._unmetered else {}
        statistics = tasks.statistics(count["passed"], judged)
        return {
            "total_tests": count.total(),
            "succeeded": count["passed"],
            "failed": count["failed"],
            "errors": count["error"],
            "skipped": count["skipped"],
            "success_rate": count["passed"] / judged if judged else None,
            "aggregate_score": mean(scores),
            "weighted_score": mean(tasks.weighted_scores),
            "min_score": min(scores, default=None),
            "max_score": max(scores, default=None),
            "std_dev": deviation(scores),
            "duration_ms": self._milliseconds,
            **({"groups": groups} if groups else {}),
            **({"usage": usage} if usage else {}),
            **({"statistics": statistics} if statistics else {}),
        }


def _sample(trial: GradedTrial | Pending) -> str:
    return trial.output.sample if isinstance(trial, GradedTrial) else trial.sample


def _pending(trial: Pending) -> dict[str, Any]:
    """Return a trial that has no output: an error, and never a score."""
    _, abstained, reason = trial.error.partition("the simulated user abstained: ")
    return {
        "run_number": trial.trial,
        "attempts": 1 if trial.error else 0,
        "status": "error",
        "duration_ms": None,
        "validations": {},
        "session_digest": {"tool_call_count": 0, "tools_used": [], "errors": [trial.error] if trial.error else []},
        "transcript": [],
        "final_output": "",
        "error_msg": trial.error or "not run yet",
        **({"responder": {"outcome": "abstained", "reason": reason}} if abstained else {}),
        "_score": None,
        "_plain": None,
    }


def _overall(runs: Sequence[dict[str, Any]]) -> str:
    """Return a task's status as in waza, except that a run without a verdict is not a failure."""
    statuses = {"failed" if run["status"] == "error" and run["_score"] is not None else run["status"] for run in runs}
    for status in ("failed", "error", "passed"):
        if status in statuses:
            return status
    return "skipped"


def _validations(grades: Sequence[Grade], sample: str) -> dict[str, Any]:
    """Return verdicts by waza's own names, unless two would collide; errors are not verdicts."""
    validations: dict[str, Any] = {}
    for grade in grades:
        if grade.score is None or grade.status not in ("passed", "failed"):
            continue
        full = grade.grader.partition("/")[2] if grade.turn is not None else grade.grader
        name = full.removeprefix(f"{sample}/").removeprefix("eval/")
        name = full if name in validations else name
        validations[name] = {
            "identifier": name,
            "type": grade.type,
            "score": grade.score,
            "weight": grade.weight,
            "passed": grade.status == "passed",
            "feedback": grade.feedback,
            "details": _details(grade),
            "duration_ms": _milliseconds(grade.seconds),
        }
    return validations


def _checkpoint_error(reason: str) -> dict[str, Any]:
    about = {"identifier": "_checkpoint_error", "type": "checkpoint_error", "score": None, "weight": 1.0}
    return {**about, "passed": False, "feedback": reason}


def _failed(validations: dict[str, Any]) -> list[str]:
    return [name for name, verdict in validations.items() if not verdict["passed"]]


def _calls(output: Output) -> Iterator[dict[str, Any]]:
    """Yield the tool calls of a conversation, with their turns and results."""
    if not isinstance(output.calls, UnsetType):
        for number, call in enumerate((call for call in output.calls if call.name), 1):
            yield {
                "turn": call.turn,
                "sequence": number,
                "tool_call_id": "",
                "tool_name": call.name,
                "args": call.arguments,
                "result": call.result,
                "success": call.result is not None,
            }
        return
    results = {message.get("tool_call_id"): message.get("content") for message in output.messages if _is_tool(message)}
    turn = sequence = 0
    for message in output.conversation:
        turn += message.get("role") == "user"
        for call in message.get("tool_calls") or ():
            body = call.get("function") or call
            sequence += 1
            done = call.get("id") in results
            yield {
                "turn": turn,
                "sequence": sequence,
                "tool_call_id": str(call.get("id") or ""),
                "tool_name": str(body.get("name") or ""),
                "args": _arguments(body.get("arguments")),
                "result": results.get(call.get("id")),
                "success": done,
            }


def _transcript(output: Output) -> Iterator[dict[str, Any]]:
    for message in output.messages:
        if _is_tool(message):
            yield {
                "type": "tool.execution_complete",
                "tool_call_id": message.get("tool_call_id"),
                "tool_result": message.get("content"),
                "success": True,
            }
            continue
        yield {"type": f"{message.get('role')}.message", "content": message.get("content") or ""}
        for call in message.get("tool_calls") or ():
            body = call.get("function") or call
            yield {
                "type": "tool.execution_start",
                "tool_call_id": call.get("id"),
                "tool_name": body.get("name"),
                "arguments": _arguments(body.get("arguments")),
            }


def _is_tool(message: dict[str, Any]) -> bool:
    return message.get("role") == "tool"


def _arguments(written: Any) -> Any:
    if not isinstance(written, str):
        return written
    try:
        return msgspec.json.decode(written or "{}")
    except msgspec.DecodeError:
        return written


def _usage(usage: Usage, turns: int) -> dict[str, Any] | None:
    """Return the usage; None if it is unknown, which is not zero."""
    if usage.input_tokens is None or usage.output_tokens is None:
        return None
    return {
        "turns": turns,
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cache_read_tokens": 0,
        "cache_write_tokens": 0,
        "premium_requests": 0,
    }


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)


def _details(grade: Grade) -> dict[str, Any]:
    """Return a grader's feedback, or else what failed."""
    if grade.details is None:
        return {"failures": [grade.feedback] if grade.status == "failed" and grade.feedback else []}
    return grade.details if isinstance(grade.details, dict) else {"value": grade.details}


def _block(data: dict[str, Any], key: str) -> dict[str, Any]:
    block = data.get(key)
    return block if isinstance(block, dict) else {}
