"""Grades replies with tasks of lm-eval, in the worker processes of the grader `lm_eval`."""

from __future__ import annotations

import json
import logging
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from holdfast.plugins.benchmarks.names import folders, read_index

if TYPE_CHECKING:
    from holdfast.graders.worker import Answer


class _Splits(dict[str, Any]):
    """One document as every split of a dataset, because a task looks at its first document when it is built."""

    def __init__(self, doc: dict[str, Any]) -> None:
        from datasets import Dataset

        self._documents = Dataset.from_list([doc])

    def __missing__(self, key: str) -> Any:
        return self._documents


@cache
def _manager(task: str) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False, include_path=[str(path) for path in folders(task, [])])


_tasks: dict[str, Any] = {}


def load_task(name: str, doc: dict[str, Any]) -> Any:
    """Return a task without its dataset: documents come with the questions, already processed."""
    if name not in _tasks:
        manager = _manager(name)
        overrides = {
            "custom_dataset": lambda **_: _Splits(doc),
            "dataset_kwargs": None,
            "process_docs": None,
            "training_split": None,
            "fewshot_split": None,
            "fewshot_config": None,
            "num_fewshot": 0,
        }
        _tasks[name] = manager._factory.build(manager.task_index[name], overrides=overrides, registry=manager._index)
    return _tasks[name]


def grade(name: str, doc: dict[str, Any], responses: list[Any], pipeline: str) -> dict[str, Any]:
    """Return the metrics of the responses to one document, after one of the task's filters."""
    from lm_eval.api.instance import Instance

    task = load_task(name, doc)
    instances = []
    for number, response in enumerate(responses):
        instance = Instance(
            request_type=task.OUTPUT_TYPE, doc=doc, arguments=("", {}), idx=number, metadata=(name, 0, 1)
        )
        if task.OUTPUT_TYPE == "loglikelihood_rolling":
            response = response[0]  # whether it is greedy is of no meaning for a whole text
        instance.resps = [tuple(response) if isinstance(response, list) else response]
        instances.append(instance)
    chosen = next((each for each in task._filters if each.name == pipeline), None)
    if chosen is None:
        raise ValueError(f"there is no filter {pipeline!r}, but {', '.join(each.name for each in task._filters)}")
    chosen.apply(instances)
    metrics = task.process_results(doc, [instance.filtered_resps[pipeline] for instance in instances])
    return {key: _plain(value) for key, value in metrics.items()}


def _plain(value: Any) -> Any:
    """Convert a value of a metric to JSON."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def start() -> Answer:
    """Import lm-eval, so that no question's time includes it; return the function that grades replies."""
    logging.disable(logging.CRITICAL)
    import lm_eval.tasks  # noqa: F401

    read_index()
    return lambda question, _: _answer(json.dumps(question))


@lru_cache(maxsize=64)
def _answer(encoded: str) -> dict[str, Any]:
    """Answer a question; the graders of a task's metrics ask the same one, each for its own metric."""
    question = json.loads(encoded)
    try:
        return {"metrics": grade(question["task"], question["doc"], question["responses"], question["filter"])}
    except Exception as error:  # whatever a task's own code raises
        return {"error": f"{type(error).__name__}: {error}"[:400]}
