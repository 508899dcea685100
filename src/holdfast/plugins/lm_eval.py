"""Write lm-eval's files (lm-evaluation-harness 0.4.13): `results_TIME.json`, and `samples_TASK_TIME.jsonl` per task.

A benchmark has the tasks, groups and numbers that it has in lm-eval. Any other eval is one task, whose metrics are its
graders. Trials of a sample are repeats of one document.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from hashlib import sha256
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast import GradedTrial
from holdfast.report.benchmark import benchmark_metrics, mean, uses_values
from holdfast.report.tables import unique_names
from holdfast.spec.eval import TASK_FIELD, BenchmarkTask, BenchmarkTasks, TaskMetric, benchmark_tasks
from holdfast.spec.target_schema import ModelTarget
from holdfast.store.files import Spool, make_directory, replacing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from holdfast import Metrics, RunView
    from holdfast.store.metrics import BenchmarkMetrics
    from holdfast.store.records import Output

_PARAMETERS: Final = {"stop": "until", "max_tokens": "max_gen_toks"}
"""names of request parameters, and lm-eval's"""
_HASHES: Final = ("doc_hash", "prompt_hash", "target_hash")
_FIELDS: Final = ("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", *_HASHES)
"""fields of a sample, which no metric can be called"""
_EXPECTED: Final = ("expected", "answer", "target")
"""fields of a row that may hold the expected answer"""


def write_lm_eval(view: RunView, folder: Path) -> list[Path]:
    """Write results and samples below a folder of the model's name, as `lm_eval --output_path` does."""
    model = view.manifest.target
    place = folder / _file_name(model)
    make_directory(place)
    # The run's time, so that a second export replaces the first. The run's id serves as the fraction of the
    # second, which keeps runs that began together apart.
    stamp = f"{view.manifest.created.rstrip('Z').replace(':', '-')}.{int(view.manifest.id, 16) % 1_000_000:06d}"
    tasks = benchmark_tasks(view.manifest.eval) or _as_task(view)
    with Spool() as spool:
        samples = _Samples(tasks, spool)
        samples.take(view)
        written = [place / f"samples_{_file_name(name)}_{stamp}.jsonl" for name in samples.names]
        hashes = {}
        for name, path in zip(samples.names, written, strict=True):
            with replacing(path) as file:
                hashes[name] = samples.copy(name, file)
    results = place / f"results_{stamp}.json"
    metrics = view.metrics
    if metrics is None:
        results.unlink(missing_ok=True)  # of an earlier export, whose numbers no longer hold
        return written
    numbers = metrics.benchmark or benchmark_metrics(tasks, samples.values)
    with replacing(results) as file:
        data = _results(view, metrics, tasks, numbers, hashes)
        file.write(json.dumps(data, indent=2, ensure_ascii=False).encode("utf-8", "backslashreplace"))
    return [results, *written]


def _as_task(view: RunView) -> BenchmarkTasks:
    """Describe an eval that is not a benchmark as one task with its graders as metrics."""
    names = unique_names(view.graders, taken=_FIELDS)
    metrics = [TaskMetric(metric=names[name], grader=name) for name in view.graders]
    version = (view.manifest.eval.get("metadata") or {}).get("version")
    return BenchmarkTasks(tasks={view.manifest.name: BenchmarkTask(metrics=metrics, version=version)})


class _Samples:
    """Lines of the samples' files.

    They wait in a temporary file, since a task's file has all documents with one filter, then all with the next.
    """

    def __init__(self, tasks: BenchmarkTasks, spool: Spool) -> None:
        self._tasks = tasks
        self._spool = spool
        self._lines: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
        """offset, length and hash of each line, by task and filter"""
        self.values: dict[tuple[str, str], list[Any]] = {}
        """values of each document, by task and the metric's key"""

    @property
    def names(self) -> list[str]:
        """The tasks that have documents."""
        return list(dict.fromkeys(task for task, _ in self._lines))

    def take(self, view: RunView) -> None:
        """Read all trials of a run."""
        several, only = len(self._tasks.tasks) > 1, next(iter(self._tasks.tasks))
        gen_kwargs = _gen_kwargs(getattr(view.spec.target, "params", {}))
        for number, (_, group) in enumerate(groupby(view.everything(), key=_sample_id)):
            trials = [trial for trial in group if isinstance(trial, GradedTrial)]
            if not trials:
                continue
            name = str(trials[0].fields.get(TASK_FIELD)) if several else only
            task = self._tasks.tasks.get(name)
            if task is not None:
                self._add(name, task, trials, _document_number(name, trials[0], number), gen_kwargs)

    def _add(
        self, name: str, task: BenchmarkTask, trials: Sequence[GradedTrial], number: int, gen_kwargs: dict[str, Any]
    ) -> None:
        document = _document(trials, number, gen_kwargs)
        hashes = _hashes(document)
        for filter_name in dict.fromkeys(metric.filter for metric in task.metrics):
            metrics = [metric for metric in task.metrics if metric.filter == filter_name and metric.grader is not None]
            values = {metric.metric: _value(metric, trials) for metric in metrics}
            for metric in metrics:
                if (value := values[metric.metric]) is not None:
                    self.values.setdefault((name, metric.key), []).append(value)
            line = {
                **document,
                "filtered_resps": _filtered(document["resps"], metrics, trials),
                "filter": filter_name,
                "metrics": list(values),
                **hashes,
                **values,
            }
            text = json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
            place = self._spool.tell(), len(text), "".join(hashes.values())
            self._lines.setdefault((name, filter_name), []).append(place)
            self._spool.write(text)

    def copy(self, name: str, file: BinaryIO) -> str:
        """Write the file of a task, and return the hash of its documents, prompts and targets."""
        whole = sha256()
        for (task, _), lines in self._lines.items():
            for offset, length, mark in lines if task == name else ():
                self._spool.seek(offset)
                file.write(self._spool.read(length))
                whole.update(mark.encode())
        return whole.hexdigest()


def _sample_id(trial: Any) -> str:
    return str(trial.output.sample if isinstance(trial, GradedTrial) else trial.sample)


def _document_number(task: str, trial: GradedTrial, number: int) -> int:
    """Return the number that a benchmark's id ends in, as in `hellaswag/17`, else the sample's place in the dataset."""
    tail = trial.output.sample.removeprefix(f"{task}/")
    return int(tail) if tail.isdecimal() and tail != trial.output.sample else number


def _document(trials: Sequence[GradedTrial], number: int, gen_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that do not depend on the filter: document, target, requests and replies."""
    fields, output = trials[0].fields, trials[0].output
    prompt = _prompt(output)
    likelihoods = [list(_likelihoods(trial.output)) for trial in trials]
    if likelihoods[0]:
        arguments: list[list[Any]] = [
            list(pair) for pair in _continuations(fields.get("continuations"), prompt, len(likelihoods[0]))
        ]
        replies: list[Any] = [list(repeats) for repeats in zip(*likelihoods, strict=True)]
        target = fields.get("gold")
    else:
        generation = fields.get("generation")
        arguments = [[prompt, _gen_kwargs(generation) if isinstance(generation, dict) else gen_kwargs]]
        replies = [[trial.output.output for trial in trials]]
        target = next((fields[name] for name in _EXPECTED if name in fields), "")
    document = fields.get("doc")
    return {
        "doc_id": number,
        "doc": document if isinstance(document, dict) else fields,
        "target": str(target),
        "arguments": {
            f"gen_args_{place}": {f"arg_{position}": value for position, value in enumerate(request)}
            for place, request in enumerate(arguments)
        },
        "resps": replies,
    }


def _prompt(output: Output) -> str:
    """Return what the model was asked: one text, or several messages as JSON."""
    asked = output.messages[:-1]
    if len(asked) == 1 and isinstance(asked[0].get("content"), str):
        return str(asked[0]["content"])
    return json.dumps(asked, ensure_ascii=False)


def _likelihoods(output: Output) -> Iterator[list[str]]:
    """Yield each log-likelihood, and whether it is greedy, as text, which is how lm-eval writes them."""
    for each in output.messages[-1].get("likelihoods") or ():
        yield [str(each["logprob"]), str(each["greedy"])]


def _continuations(continuations: Any, prompt: str, count: int) -> Iterator[tuple[str, str]]:
    """Yield context and text of each continuation that the row has."""
    listed = continuations if isinstance(continuations, list) and len(continuations) == count else [""] * count
    for each in listed:
        if isinstance(each, dict):
            yield str(each.get("context", prompt)), str(each.get("text", ""))
        else:
            yield prompt, str(each)


def _gen_kwargs(params: dict[str, Any]) -> dict[str, Any]:
    return {_PARAMETERS.get(name, name): value for name, value in params.items()}


def _value(metric: TaskMetric, trials: Sequence[GradedTrial]) -> Any:
    """Return what a document's trials contribute to a metric; None if no trial has a verdict."""
    grades = [grade for trial in trials for grade in trial.grades if grade.grader == metric.grader]
    if uses_values(metric):
        values = [grade.details.get("value") for grade in grades if isinstance(grade.details, dict)]
        return next((value for value in values if value is not None), None)
    scores = [grade.score for grade in grades if grade.score is not None]
    return mean(scores) if scores else None


def _filtered(replies: list[Any], metrics: Sequence[TaskMetric], trials: Sequence[GradedTrial]) -> list[Any]:
    """Return the first reply to each request, as filtered if a grader recorded that."""
    names = {metric.grader for metric in metrics}
    for grade in trials[0].grades:
        if grade.grader in names and isinstance(grade.details, dict) and "extracted" in grade.details:
            return [grade.details["extracted"]]
    return [repeats[0] for repeats in replies]


def _hashes(document: dict[str, Any]) -> dict[str, str]:
    doc = json.dumps(document["doc"], indent=2, ensure_ascii=False)
    prompt = document["arguments"]["gen_args_0"]["arg_0"]
    return {name: _hash(text) for name, text in zip(_HASHES, (doc, prompt, document["target"]), strict=True)}


def _hash(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _file_name(name: str) -> str:
    """Return a name as lm-eval writes it into paths."""
    return re.sub(r"[\"<>:/|\\?*\[\]\0]+", "__", name)


def _results(
    view: RunView, metrics: Metrics, tasks: BenchmarkTasks, numbers: BenchmarkMetrics, hashes: dict[str, str]
) -> dict[str, Any]:
    spec, manifest = view.spec, view.manifest
    data: dict[str, Any] = msgspec.to_builtins(numbers)
    data |= {"group_subtasks": numbers.group_subtasks, "configs": _configs(view, tasks)}
    order = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")
    source, arguments = _model(view)
    return {
        **{name: data[name] for name in order if name in data},
        "config": {
            "model": source,
            "model_args": arguments,
            "limit": None if spec.dataset is None else spec.dataset.limit,
            "bootstrap_iters": 0,
            "gen_kwargs": _gen_kwargs(getattr(spec.target, "params", {})) or None,
            "fewshot_seed": tasks.seed,
        },
        "date": datetime.fromisoformat(manifest.created).timestamp(),
        **({"lm_eval_version": tasks.provider_version} if tasks.provider == "lm-eval" else {}),
        "holdfast_version": manifest.holdfast,
        "task_hashes": hashes,
        "model_source": source,
        "model_name": manifest.target,
        "model_name_sanitized": _file_name(manifest.target),
        "system_instruction": spec.system,
        "system_instruction_sha": None if spec.system is None else _hash(spec.system),
        "fewshot_as_multiturn": spec.history is not None,
        "chat_template": None,
        "chat_template_sha": None,
        "total_evaluation_time_seconds": str(metrics.timing.seconds),
    }


def _model(view: RunView) -> tuple[str, dict[str, Any]]:
    """Return the target as lm-eval's model and its arguments."""
    target = view.spec.target
    if not isinstance(target, ModelTarget):
        return target.kind, {"model": view.manifest.target}
    arguments: dict[str, Any] = {"model": target.model}
    if target.base_url is not None:
        arguments["base_url"] = target.base_url
    return "local-completions" if target.api == "completions" else "local-chat-completions", arguments


def _configs(view: RunView, tasks: BenchmarkTasks) -> dict[str, Any]:
    """Return what is known of each task's configuration."""
    sources = view.manifest.dataset.source
    output_type = "generate_until" if view.spec.continuations is None else "multiple_choice"
    return {
        name: {
            "task": name,
            "dataset_path": sources[0] if sources else None,
            "doc_to_text": view.spec.prompt or "",
            "num_fewshot": task.n_shot,
            "metric_list": [
                {
                    "metric": metric.metric,
                    "aggregation": metric.aggregation,
                    "higher_is_better": metric.higher_is_better,
                }
                for metric in {metric.metric: metric for metric in task.metrics}.values()
            ],
            "output_type": output_type,
            "repeats": view.manifest.trials,
            "metadata": {"version": task.version},
        }
        for name, task in sorted(tasks.tasks.items())
    }
