"""Metrics of lm-eval's tasks, and the graders that compute them.

Accuracies over likelihoods, and exact matches after filters of texts, are graded by Holdfast itself. Everything else is
graded by the task's own code, with the grader `lm_eval`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

_LIKELIHOOD: Final[dict[str, dict[str, Any]]] = {
    "acc": {},
    "acc_norm": {"normalize": "chars"},
    "acc_bytes": {"normalize": "bytes"},
    "exact_match": {"greedy": True},
}
"""metrics of multiple choice, and the keys of the grader `likelihood` for each"""
_FILTERS: Final = ("remove_whitespace", "lowercase", "uppercase")
"""filters without options that the grader `extract` has, too"""
_IGNORED: Final = {
    "ignore_case": "ignore_case",
    "ignore_punctuation": "ignore_punctuation",
    "ignore_numbers": "ignore_numbers",
    "regexes_to_ignore": "ignore",
}
"""options of exact_match, and the keys of the grader `extract` for each"""


@dataclass(frozen=True)
class Metric:
    """A number of a task: of one metric, after one filter."""

    metric: str
    filter: str
    aggregation: str
    higher_is_better: bool
    definition: dict[str, Any] | None = field(compare=False)
    """the grader without its name; None for numbers that are no mean of scores"""
    grader: str | None = None
    """name of the grader"""

    def as_dict(self) -> dict[str, Any]:
        """Describe the metric for reports."""
        return {key: value for key, value in asdict(self).items() if key != "definition"}


def metrics_of(task: Any) -> list[Metric]:
    """List the metrics of a task of lm-eval in its order: by filter, then by metric."""
    from lm_eval.api.registry import AGGREGATION_REGISTRY

    names = {function: name for name, function in AGGREGATION_REGISTRY.items()}
    pipelines = task.config.filter_list or [{"name": "none", "filter": [{"function": "take_first"}]}]
    metrics = []
    for pipeline in pipelines:
        for metric in task._metric_fn_list:
            aggregation = task.aggregation()[metric]
            definition = _definition(task, metric, pipeline)
            label = f"{metric},{pipeline['name']}" if len(pipelines) > 1 else metric
            metrics.append(
                Metric(
                    metric,
                    pipeline["name"],
                    names.get(aggregation, getattr(aggregation, "__name__", "custom")),
                    bool(task.higher_is_better()[metric]),
                    definition,
                    label if definition is not None else None,
                )
            )
    return metrics


def graders_of(metrics: dict[str, list[Metric]]) -> list[dict[str, Any]]:
    """Return the graders of all tasks. One that not all tasks have, or have alike, names its tasks with `where`."""
    uses: dict[str, list[tuple[dict[str, Any], list[str]]]] = {}
    for task, listed in metrics.items():
        for metric in listed:
            if metric.grader is None or metric.definition is None:
                continue
            variants = uses.setdefault(metric.grader, [])
            same = next((tasks for definition, tasks in variants if definition == metric.definition), None)
            if same is None:
                variants.append((metric.definition, [task]))
            else:
                same.append(task)
    graders = []
    for label, variants in uses.items():
        for number, (definition, tasks) in enumerate(variants):
            name = label if number == 0 else f"{label}@{tasks[0]}"
            _rename(metrics, tasks, label, name)
            where = {} if len(tasks) == len(metrics) else {"where": f"task in {tasks!r}"}
            graders.append({"name": name, **definition, **where})
    return graders


def _rename(metrics: dict[str, list[Metric]], tasks: list[str], label: str, name: str) -> None:
    if label == name:
        return
    for task in tasks:
        metrics[task] = [replace(metric, grader=name) if metric.grader == label else metric for metric in metrics[task]]


def _definition(task: Any, metric: str, pipeline: dict[str, Any]) -> dict[str, Any] | None:
    own = callable(task.config.process_results)
    kind = task.OUTPUT_TYPE
    if not own and kind == "loglikelihood":
        return {"type": "likelihood", "greedy": True, "expected": 0} if metric == "acc" else None
    if not own and kind == "multiple_choice" and metric in _LIKELIHOOD:
        return {"type": "likelihood", "expected": "{{ gold }}", "choices": "choices", **_LIKELIHOOD[metric]}
    if not own and kind == "generate_until" and metric == "exact_match":
        filters = _native_filters(pipeline["filter"])
        options = task._metric_fn_kwargs[metric]
        if filters is not None and options.keys() <= _IGNORED.keys():
            ignored = {_IGNORED[key]: value for key, value in options.items() if value}
            return {"type": "extract", "filters": filters, "expected": "{{ expected }}", **ignored}
    return {"type": "lm_eval", "task": task.task_name, "filter": pipeline["name"], "metric": metric}


def _native_filters(functions: list[dict[str, Any]]) -> list[Any] | None:
    """Return filters of the grader `extract`, or None where a pipeline has others.

    `take_first` comes last: before other filters, those would see the letters of a reply one by one.
    """
    if not functions or functions[-1] != {"function": "take_first"}:
        return None
    filters: list[Any] = []
    for options in functions[:-1]:
        name = options["function"]
        if name == "regex" and options.keys() <= {"function", "regex_pattern", "group_select", "fallback"}:
            keys = {"regex_pattern": "regex", "group_select": "group", "fallback": "fallback"}
            pattern = {"regex_pattern": r"#### (\-?[0-9\.\,]+)", **options}
            filters.append({keys[key]: value for key, value in pattern.items() if key != "function"})
        elif name in _FILTERS and len(options) == 1:
            filters.append(name)
        else:
            return None
    return [*filters, "take_first"]
