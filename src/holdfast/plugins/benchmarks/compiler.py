"""Run as a program: compile a task of lm-eval into a rows file, and its metrics into graders.

The request is one JSON object on standard input. Each line of output is an object with `progress`, `result` or `error`.
A process of its own keeps lm-eval's imports, its printing and the code of its tasks out of the process that runs evals.

Holdfast itself grades accuracies over likelihoods, and exact matches after filters of texts. Everything else is graded
by the task's own code, with the grader `lm_eval`.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
from collections import Counter
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast.data.readers import hub_commit
from holdfast.errors import DataError
from holdfast.plugins.benchmarks.cache import Source, local_dataset
from holdfast.plugins.benchmarks.names import OVERLAY, folders, overlay_index, read_index, tasks_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_LIKELIHOODS: Final = ("multiple_choice", "loglikelihood", "loglikelihood_rolling")
_OFFLINE: Final = "Without a hub, name a mirror in its layout: benchmark.data=FOLDER, or HOLDFAST_DATA=FOLDER."
_MAX_TOKENS: Final = 256
"""default length of replies, as in lm-eval's clients"""
_REQUEST_SEED: Final = 1234
"""that lm-eval's clients send with each request"""
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


class Refused(Exception):
    """A task that cannot be compiled, for a reason that its user can act on."""

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(message)
        self.remedy = remedy


class CompileRequest(msgspec.Struct, frozen=True):
    """A task to compile, with its settings."""

    task: str
    shots: int | None
    seed: int
    chat: bool
    params: dict[str, Any]
    """of requests; they override the task's"""
    mirror: str | None
    revision: str | None
    """of all datasets, instead of `revisions`"""
    revisions: dict[str, str]
    """commits by dataset"""


def compile_task(request: CompileRequest, out: Path, report: Callable[[str], None]) -> dict[str, Any]:
    """Write the rows of a task, and return what the eval document says of them."""
    import datasets
    import numpy as np
    from lm_eval import utils
    from lm_eval.api.group import Group
    from lm_eval.tasks import TaskManager

    children = closure(request.task)
    sources = _pin_datasets(datasets, request, out.with_name("datasets"))
    # lm-eval compiles a template again for each field of each example of each document: nearly all of its time.
    utils.env.from_string = cache(utils.env.from_string)
    random.seed(0)
    np.random.seed(_REQUEST_SEED)
    manager = TaskManager(include_defaults=False, include_path=[str(path) for path in folders(request.task, children)])
    report("loading the data")
    try:
        loaded = manager.load([request.task])
    except Refused:
        raise
    except Exception as error:  # whatever a task's own code raises
        raise explain("load", request.task, error, request, sources.values()) from error
    tasks, groups = loaded["tasks"], loaded.get("groups") or {}
    kinds = {_kind(name, task, request) for name, task in tasks.items()}
    if len(kinds) > 1:
        raise Refused(
            f"{request.task} mixes likelihoods and generated replies, which are evals of their own",
            "Name its tasks one by one: " + ", ".join(list(tasks)[:8]) + (" …" if len(tasks) > 8 else "."),
        )
    notices = _settle(tasks, request)
    params = {
        name: request_params(task.config.generation_kwargs or {}, chat=request.chat) for name, task in tasks.items()
    }
    common = _common(list(params.values())) if kinds == {"generation"} else {}
    metrics = {name: metrics_of(task) for name, task in tasks.items()}
    rows = _write_rows(tasks, params, common, request, out, report, sources.values())
    return {
        "rows": rows.digest,
        "count": rows.sizes.total(),
        "kind": next(iter(kinds)),
        "params": common,
        "params_vary": any(own.keys() - common.keys() for own in params.values()) and kinds == {"generation"},
        "graders": graders_of(metrics),
        "tasks": {
            name: {
                "version": task.VERSION,
                "n_shot": task.config.num_fewshot,
                "n_original": rows.sizes[name],
                "metrics": [metric.as_dict() for metric in metrics[name]],
                **({"alias": task.config.task_alias} if task.config.task_alias else {}),
            }
            for name, task in tasks.items()
        },
        "groups": {name: _describe_group(group, metrics) for name, group in groups.items() if isinstance(group, Group)},
        "sources": [msgspec.to_builtins(source) for source in sources.values()],
        "notices": notices,
    }


class _Rows(NamedTuple):
    digest: str
    sizes: Counter[str]
    """rows by task"""


def _write_rows(
    tasks: dict[str, Any],
    params: dict[str, dict[str, Any]],
    common: dict[str, Any],
    request: CompileRequest,
    out: Path,
    report: Callable[[str], None],
    sources: Iterable[Source],
) -> _Rows:
    """Write the rows of all tasks; each row has the parameters that not all tasks have in common."""
    import zstandard

    whole, sizes = sha256(), Counter[str]()
    with out.open("wb") as file, zstandard.ZstdCompressor(level=10).stream_writer(file) as writer:
        for number, (name, task) in enumerate(tasks.items(), 1):
            report(f"{name} ({number} of {len(tasks)})")
            own = {key: value for key, value in params[name].items() if key not in common} if common else {}
            try:
                rows = list(task_rows(name, task, request, own))
            except Refused:
                raise
            except Exception as error:  # whatever a task's own code raises
                _check_examples(name, task)
                raise explain("ask", name, error, request, sources) from error
            for row in rows:
                line = msgspec.json.encode(row, enc_hook=_plain) + b"\n"
                whole.update(line)
                writer.write(line)
            sizes[name] += len(rows)
            task._instances = None
    return _Rows(whole.hexdigest()[:16], sizes)


def explain(what: str, task: str, error: Exception, request: CompileRequest, sources: Iterable[Source]) -> Refused:
    """Return the refusal for an error of a task's own code, such as a missing package or missing data."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ModuleNotFoundError) and cause.name is not None:
            package = cause.name.partition(".")[0]
            return Refused(f"{task} needs the package {package}, which is not installed", f"pip install {package}")
        cause = cause.__cause__ or cause.__context__
    message = f"lm-eval cannot {what} {task}: {type(error).__name__}: {error}"[:500]
    whole = next((source.path for source in sources if source.folder and source.folder == request.mirror), None)
    if whole is not None:  # a folder that is taken as the dataset itself may be any dataset
        return Refused(
            f"{request.mirror} is not the dataset {whole}: {message}",
            f"Name the folder of {whole}, or a mirror in the hub's layout, with FOLDER/{whole}.",
        )
    return Refused(message, _OFFLINE if request.mirror is None else None)


def _check_examples(name: str, task: Any) -> None:
    """Refuse more examples than there are, which lm-eval reports as a sample that is too large."""
    shots, available = task.config.num_fewshot or 0, len(list(task.fewshot_docs() or ()))
    if shots and shots >= available:  # one of them may be the question itself
        raise Refused(
            f"{name} is asked with {shots:,} examples, and the split has only {available:,} examples",
            "Set benchmark.num_fewshot to a lower number.",
        )


def closure(task: str) -> list[str]:
    """Return the names that a group refers to, at any depth. Refuses tasks that run a model's code unprotected."""
    from lm_eval.tasks._yaml_loader import load_yaml

    names: dict[str, None] = {}
    waiting = [task]
    while waiting:
        name = waiting.pop()
        names[name] = None
        for root, index in ((tasks_folder(), read_index()), (OVERLAY, overlay_index())):
            for file in index.files(name) if index is not None else ():
                config = load_yaml(root / file, resolve_func=False)
                if config.get("unsafe_code"):
                    raise Refused(
                        f"{name} runs code that the model wrote, which lm-eval does without a sandbox",
                        "Use Holdfast's own benchmarks for code: `holdfast tasks ls` lists them.",
                    )
                if "class" in config:
                    raise Refused(f"{name} is written in Python for lm-eval, and cannot be compiled")
                if index is not None and name in index.groups:
                    waiting += [child for child in _children(config.get("task")) if child not in names]
    return list(names)[1:]


def _children(listed: Any) -> Iterator[str]:
    for item in listed if isinstance(listed, list) else [listed]:
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            if isinstance(item.get("group"), str):
                yield item["group"]
            yield from _children(item.get("task"))


def _pin_datasets(datasets: Any, request: CompileRequest, place: Path) -> dict[tuple[str, str | None], Source]:
    """Let lm-eval load datasets from the mirror, or from the hub at a fixed commit, and record which ones it loads.

    The library's own cache does not notice all changes of local files, so what it makes of them goes into `place`.
    """
    original = datasets.load_dataset
    datasets.load.dataset_module_factory = _once_each(datasets.load.dataset_module_factory)
    sources: dict[tuple[str, str | None], Source] = {}
    mirror = Path(request.mirror) if request.mirror is not None else None

    def load_dataset(path: str, name: str | None = None, **options: Any) -> Any:
        folder = local_dataset(mirror, path) if mirror is not None else None
        if mirror is not None and folder is None and not Path(path).exists():
            raise Refused(
                f"{mirror} has no dataset {path}",
                f"Copy it to {mirror / path}, as on the hub: its README.md names the files of each configuration.",
            )
        if folder is not None:
            options.pop("revision", None)
            sources[path, name] = Source(path, name, None, str(folder))
            return original(str(folder), name, **{**options, "cache_dir": str(place)})
        if Path(path).exists() or "data_files" in options:  # files that the task brings or names itself
            sources[path, name] = Source(path, name, None)
            return original(path, name, **options)
        revision = options.pop("revision", None) or request.revision or request.revisions.get(path) or _commit(path)
        sources[path, name] = Source(path, name, revision)
        return original(path, name, revision=revision, **options)

    datasets.load_dataset = load_dataset
    return sources


def _once_each(describe: Callable[..., Any]) -> Callable[..., Any]:
    """Describe a dataset only once: the library would do so for each configuration, and MMLU has 57."""
    described: dict[str, Any] = {}

    def describe_once(*place: Any, **options: Any) -> Any:
        key = repr((place, options))
        if key not in described:
            described[key] = describe(*place, **options)
        return deepcopy(described[key])  # the library changes what it gets

    return describe_once


def _commit(path: str) -> str:
    try:
        return hub_commit(path, None)
    except DataError as error:
        raise Refused(
            f"the dataset {path} cannot be found: {error.message}"[:400],
            _OFFLINE,
        ) from error


def _kind(name: str, task: Any, request: CompileRequest) -> str:
    """Return `likelihood` or `generation`; refuse a task that has neither as rows."""
    if getattr(task, "MULTIMODAL", False):
        raise Refused(f"{name} has images or sound, which Holdfast does not send")
    if task.config.repeats > 1:
        raise Refused(
            f"{name} asks {task.config.repeats} times and combines the replies, which is not supported",
            "Use a variant without repeats, and `--trials` for several replies.",
        )
    if task.OUTPUT_TYPE not in _LIKELIHOODS:
        return "generation"
    if request.chat:
        raise Refused(
            f"{name} asks for likelihoods, which chat APIs do not return",
            "Leave out benchmark.chat, and use a server with completions: target.api=completions.",
        )
    return "likelihood"


def _settle(tasks: dict[str, Any], request: CompileRequest) -> list[str]:
    """Set examples, seed and parameters of the tasks as lm-eval's own command does."""
    fixed = []
    changes = {("max_gen_toks" if key == "max_tokens" else key): value for key, value in request.params.items()}
    for name, task in tasks.items():
        own = task.config.num_fewshot
        if request.shots is not None and own == 0 and request.shots != 0:
            fixed.append(name)
        elif request.shots is not None or own is None:
            task.set_config(key="num_fewshot", value=request.shots or 0)
        task.set_fewshot_seed(seed=request.seed)
        if task.OUTPUT_TYPE == "generate_until" and changes:
            task.set_config(key="generation_kwargs", value=changes, update=True)
    if not fixed:
        return []
    which = f"{fixed[0]} is" if len(fixed) == 1 else f"{len(fixed)} of its tasks are"
    return [f"{which} defined without examples, so num_fewshot has no effect"]


def request_params(options: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    """Return the parameters of requests for lm-eval's `generation_kwargs`, as its API clients send them."""
    left = {key: value for key, value in options.items() if key != "do_sample"}
    longest = left.pop("max_gen_toks", _MAX_TOKENS)
    until = left.pop("until", None) or []
    stop = [until] if isinstance(until, str) else list(until)
    return {
        "max_tokens": left.pop("max_tokens", longest),
        "temperature": left.pop("temperature", 0),
        "stop": stop[:4] if chat else stop,
        "seed": _REQUEST_SEED,
        **left,
    }


def _common(params: list[dict[str, Any]]) -> dict[str, Any]:
    first = params[0]
    return {key: value for key, value in first.items() if all(key in each and each[key] == value for each in params)}


def task_rows(name: str, task: Any, request: CompileRequest, params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a task: one for each document, in the order of the data."""
    task.build_all_requests(
        rank=0,
        world_size=1,
        apply_chat_template=request.chat,
        fewshot_as_multiturn=request.chat,
        chat_template=_as_json if request.chat else None,
    )
    documents: dict[int, list[Any]] = {}
    for instance in task.instances:
        documents.setdefault(instance.doc_id, []).append(instance)
    for number, instances in documents.items():
        doc = instances[0].doc
        row: dict[str, Any] = {"id": f"{name}/{number}", "task": name, "doc": doc}
        if task.OUTPUT_TYPE == "generate_until":
            row |= _prompt(name, instances[0].args[0], chat=request.chat)
            row["expected"] = _expected(task, doc)
            if params:
                row["generation"] = params
        elif task.OUTPUT_TYPE == "loglikelihood_rolling":
            (text,) = instances[0].args
            row |= {"context": "", "continuations": [{"text": text, "rolling": True}]}
        else:
            row |= _choices(task, doc, [instance.args for instance in instances])
        yield row


def _as_json(messages: list[dict[str, str]], **_: Any) -> str:
    return json.dumps(messages)


def _prompt(name: str, context: str, *, chat: bool) -> dict[str, Any]:
    if not chat:
        return {"context": context}
    messages = json.loads(context)
    if messages[-1]["role"] != "user":
        raise Refused(
            f"{name} begins the reply itself, which chat APIs do not continue",
            "Use it with completions: benchmark.chat=false.",
        )
    return {"history": messages[:-1], "context": messages[-1]["content"]}


def _expected(task: Any, doc: Any) -> str | list[str]:
    """Return the right answer as lm-eval's metrics get it."""
    gold = task.doc_to_target(doc)
    if task.config.doc_to_choice is not None:
        return str(task.doc_to_choice(doc)[gold])
    return [str(one) for one in gold] if task.multiple_target and isinstance(gold, list) else str(gold)


def _choices(task: Any, doc: Any, arguments: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the continuations of a document, each with its context if the contexts differ."""
    contexts = list(dict.fromkeys(context for context, _ in arguments))
    if len(contexts) == 1:
        row: dict[str, Any] = {"context": contexts[0], "continuations": [text for _, text in arguments]}
    else:
        shared = os.path.commonprefix(contexts)  # noqa: RUF071 - of texts, letter by letter
        pairs = [{"context": context, "text": text} for context, text in arguments]
        row = {"context": shared, "continuations": pairs}
    if task.OUTPUT_TYPE == "loglikelihood":
        return {**row, "gold": 0}
    choices = list(task.doc_to_choice(doc))
    gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    return {**row, "choices": choices, "gold": _positions(gold, choices)}


def _positions(gold: Any, choices: list[str]) -> int | list[int]:
    """Return the positions of the right choices; an empty list if the data names a choice that does not exist."""
    if isinstance(gold, list):
        return [place for place in gold if place < len(choices)]
    if isinstance(gold, str):
        return choices.index(gold) if gold in choices else []
    return gold if gold < len(choices) else []


def _describe_group(group: Any, metrics: dict[str, list[Metric]]) -> dict[str, Any]:
    leaves = [task.task_name for task in group.get_all_tasks()]
    described = []
    for item in group.aggregate_metric_list or []:
        filters = item.filter_list or sorted(
            {metric.filter for leaf in leaves for metric in metrics[leaf] if metric.metric == item.metric}
        )
        if callable(item.aggregation):
            continue
        described += [{"metric": item.metric, "filter": one, "weight_by_size": item.weight_by_size} for one in filters]
    alias = {"alias": group.alias} if group.alias and group.alias != group.name else {}
    return {"tasks": list(group.child_names), "metrics": described, "version": group.version, **alias}


def _plain(value: Any) -> Any:
    """Convert values of documents that JSON lacks."""
    return value.item() if hasattr(value, "item") else str(value)


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
    """Return the graders of all tasks. A grader that not all tasks share names its tasks with `where`."""
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
    """Return filters of the grader `extract`, or None if the pipeline has others.

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


def main() -> None:
    """Answer the request on standard input."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the code of a task prints is not an answer
    logging.disable(logging.CRITICAL)

    def write(**line: Any) -> None:
        answers.write(json.dumps(line) + "\n")

    data = json.loads(sys.stdin.readline())
    try:
        request = msgspec.convert(data["request"], CompileRequest)
        write(result=compile_task(request, Path(data["out"]), lambda text: write(progress=text)))
    except Refused as error:
        write(error=str(error), remedy=error.remedy)


if __name__ == "__main__":
    main()
