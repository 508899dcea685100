"""The only module that imports NAT itself, when a workflow or an evaluator is built."""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import os
import warnings
from contextlib import AsyncExitStack, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

import msgspec
from msgspec import UNSET

from holdfast import ConfigError, HoldfastError, Problem
from holdfast.data.dataset import Dataset
from holdfast.errors import Fault
from holdfast.functions import describe_error
from holdfast.plugins.nat.config import evaluator_part, overlay, workflow_part
from holdfast.plugins.nat.dataset import row_places

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from holdfast.spec.eval import Eval
    from holdfast.store.records import TraceStep

PACKAGES: Final = "nvidia-nat-core nvidia-nat-eval nvidia-nat-profiler"
_CHUNKS: Final = ("LLM_NEW_TOKEN", "SPAN_CHUNK")
"""steps with pieces of a result that the end of the call repeats as a whole"""


def require(where: str) -> None:
    """Raise ConfigError if NAT is not installed."""
    if not is_installed():
        raise ConfigError(
            [Problem(where, "needs NeMo Agent Toolkit")],
            remedy=f"pip install {PACKAGES}, and the NAT packages that your components need.",
        )
    os.environ.setdefault("TQDM_DISABLE", "1")  # evaluators draw a progress bar for each item
    logger = logging.getLogger("nat")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())  # errors that it logs are reported with the trial


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # there is no `nat`, or another package of that name
        return False


def load_workflow_config(path: Path, override: Mapping[str, Any], where: str) -> Any:
    """Load the part of a configuration that its workflow uses, validated by NAT."""
    require(where)
    data = _load(path, override, where)
    if not isinstance(data.get("workflow"), dict):
        raise ConfigError([Problem(where, f"{path} has no `workflow`")])
    general = copy.deepcopy(data.get("general") or {})
    if isinstance(loggers := (general.get("telemetry") or {}).get("logging"), dict):
        for name in [name for name, block in loggers.items() if (block or {}).get("_type") == "console"]:
            del loggers[name]  # the terminal shows the run
    return _validate({"general": general, **workflow_part(data)}, path, where)


def load_evaluator_config(
    path: Path | None, evaluator: str | Mapping[str, Any], override: Mapping[str, Any], where: str
) -> Any:
    """Load an evaluator and the components it names, validated by NAT, under the name `evaluator`."""
    require(where)
    if not _installed("nat.plugins.eval"):
        raise ConfigError([Problem(where, "needs NAT's evaluators")], remedy=f"pip install {PACKAGES}")
    data = {} if path is None else _load(path, override, where)
    section = data.get("eval") or {}
    block = evaluator if not isinstance(evaluator, str) else (section.get("evaluators") or {})[evaluator]
    concurrency = (section.get("general") or {}).get("max_concurrency")
    general = {} if concurrency is None else {"max_concurrency": concurrency}
    part = evaluator_part(data, block)
    return _validate({**part, "eval": {"general": general, "evaluators": {"evaluator": block}}}, path, where)


class _Component:
    """A workflow or an evaluator, built by `open` and torn down by `close`."""

    def __init__(self, config: Any, title: str) -> None:
        self._config = config
        self._title = title
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        """Build it and all components that it names; raise Fault if that fails."""
        try:
            async with AsyncExitStack() as stack:
                await self._build(stack)
                self._stack = stack.pop_all()
        except HoldfastError:
            raise
        except Exception as error:  # raised by NAT or by a component
            message = f"{self._title} cannot be built: {describe_error(error)}"
            raise Fault("rejected", message, remedy="Fix it, then run the same command again.") from error

    async def _build(self, stack: AsyncExitStack) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        """Tear down what was built."""
        await self._stack.aclose()


class Workflow(_Component):
    """A workflow."""

    def __init__(self, config: Any, name: str, json_path: str, where: str) -> None:
        """Take the JSONPath of the answer in an object; `where` names that key in messages."""
        from jsonpath_ng import parse
        from jsonpath_ng.exceptions import JSONPathError

        try:
            self._find = parse(json_path).find
        except JSONPathError as error:
            raise ConfigError([Problem(where, f"{json_path!r} is not a JSONPath: {error}")]) from error
        super().__init__(config, f"the workflow of {name}")
        self.notices: tuple[str, ...] = ()
        if config.llms and not has_profiler():
            message = "NAT reports no model calls, no tokens and no tools of frameworks without nvidia-nat-profiler"
            self.notices = (f"{message}; evaluators of trajectories see none. pip install nvidia-nat-profiler",)
        self._sessions: Any = None

    async def _build(self, stack: AsyncExitStack) -> None:
        from nat.builder.workflow_builder import WorkflowBuilder
        from nat.runtime.session import SessionManager

        builder = await stack.enter_async_context(WorkflowBuilder.from_config(config=self._config))
        self._sessions = await SessionManager.create(config=self._config, shared_builder=builder, max_concurrency=-1)
        stack.push_async_callback(self._sessions.shutdown)

    async def run(self, messages: list[dict[str, Any]]) -> NatAnswer:
        """Run the workflow as a user of its own.

        A single message is passed as text, a conversation as NAT's chat request; raises TypeError if the workflow does
        not take one.
        """
        from nat.builder.context import Context

        trace: list[TraceStep] = []

        def keep(step: Any) -> None:
            if step.payload.event_type.value not in _CHUNKS:
                trace.append(step.model_dump(mode="json", exclude_none=True, fallback=str))

        async with self._sessions.session(user_id=str(uuid4())) as session:
            request = messages[0]["content"] if len(messages) == 1 else _conversation(messages, session.workflow)
            async with session.run(request) as runner:
                Context.get().intermediate_step_manager.subscribe(on_next=keep)
                result = await runner.result()
                return self._answer(result, runner, trace)

    def _answer(self, result: Any, runner: Any, trace: list[TraceStep]) -> NatAnswer:
        """Return the answer as `nat eval` does: as text if NAT can convert it, a model as JSON, else the value."""
        from pydantic import BaseModel

        with suppress(ValueError):
            result = runner.convert(result, to_type=str)
        if isinstance(result, BaseModel):
            return NatAnswer(result.model_dump_json(indent=2), trace)
        matches = self._find(result)
        if not matches:
            raise ValueError(f"`result_json_path` finds nothing in the answer: {result!r:.200}")
        result = matches[0].value
        if isinstance(result, str):
            return NatAnswer(result, trace)
        value = _plain(result)
        return NatAnswer(msgspec.json.encode(value).decode(), trace, value)


class NatAnswer(NamedTuple):
    """What a workflow returned."""

    text: str
    trace: list[TraceStep]
    value: Any = UNSET
    """the answer itself, if it is not text"""


class Item(NamedTuple):
    """An output as an evaluator gets it."""

    id: Any
    question: Any
    expected: Any
    expected_trace: list[Any]
    row: Any
    output: Any = None
    trace: list[TraceStep] = []  # noqa: RUF012 - replaced, never changed

    def build(self) -> Any:
        """Return the item as NAT has it."""
        from nat.data_models.evaluator import EvalInputItem
        from nat.data_models.intermediate_step import IntermediateStep

        return EvalInputItem(
            id=self.id,
            input_obj=self.question,
            expected_output_obj=self.expected,
            output_obj=self.output,
            trajectory=[IntermediateStep.model_validate(step) for step in self.trace],
            expected_trajectory=self.expected_trace,
            full_dataset_entry=self.row,
        )


class Evaluation(NamedTuple):
    """An evaluator's judgement of an output."""

    score: Any
    reasoning: Any
    error: str | None
    more: dict[str, Any] = {}  # noqa: RUF012 - never changed
    """further fields of its own kind of result"""


class Evaluator(_Component):
    """An evaluator."""

    def __init__(self, config: Any, name: str, dataset: Mapping[str, Any] | None, spec: Eval) -> None:
        super().__init__(config, f"the evaluator {name}")
        self._dataset = dataset
        self._spec = spec
        self.rows: NatRows | None = None
        """the rows as NAT reads them, if the grader has a `dataset`"""
        self._info: Any = None
        self._by_row: Callable[[Any], Awaitable[Any]] | None = None
        """evaluates one item, if the evaluator works item by item by construction"""

    async def _build(self, stack: AsyncExitStack) -> None:
        from nat.plugins.eval.runtime.builder import WorkflowEvalBuilder

        builder = await stack.enter_async_context(WorkflowEvalBuilder.from_config(config=self._config))
        self._info = builder.get_evaluator("evaluator")
        self._by_row = self._find_row_method()
        if self._dataset is not None:
            self.rows = NatRows(self._dataset, self._spec)

    @property
    def looks_at_all(self) -> bool:
        """True if the verdict on one item may depend on others."""
        return self._by_row is None

    async def evaluate(self, item: Item) -> Evaluation:
        """Evaluate one item. Raises whatever the evaluator raises."""
        assert self._by_row is not None
        return _judged(await self._by_row(item.build()))

    async def evaluate_all(self, items: Sequence[Item]) -> tuple[list[Evaluation], Any, dict[str, Any]]:
        """Evaluate all items; return the evaluations, the evaluator's average, and further fields of its result."""
        from nat.data_models.evaluator import EvalInput

        eval_input = EvalInput(eval_input_items=[item.build() for item in items])
        if self._in_atif is not None:
            result = await self._in_atif(_atif_samples(eval_input))
        else:
            result = await self._info.evaluate_fn(eval_input)
        average = _plain(result.average_score)
        if isinstance(average, float) and math.isnan(average):
            average = None
        return _in_order(items, result.eval_output_items), average, _more(result, "average_score", "eval_output_items")

    @property
    def _in_atif(self) -> Any:
        """The method that takes trajectories in ATIF, if the evaluator has one: NAT prefers it."""
        method = getattr(self._info, "evaluate_atif_fn", None)
        return method if callable(method) else None

    def _find_row_method(self) -> Callable[[Any], Awaitable[Any]] | None:
        """Return the method that evaluates one item. NAT's base classes would turn an exception into 0.0."""
        from nat.data_models.evaluator import EvalInput
        from nat.plugins.eval.evaluator.atif_base_evaluator import AtifBaseEvaluator
        from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator

        if self._in_atif is not None:
            in_atif = _row_evaluator(self._in_atif, AtifBaseEvaluator, "evaluate_atif_fn", "evaluate_atif_item")

            async def evaluate_atif(item: Any) -> Any:
                (sample,) = _atif_samples(EvalInput(eval_input_items=[item]))
                return await in_atif.evaluate_atif_item(sample)

            return None if in_atif is None else evaluate_atif
        owner = _row_evaluator(self._info.evaluate_fn, BaseEvaluator, "evaluate", "evaluate_item")

        async def evaluate(item: Any) -> Any:
            async with owner.semaphore:
                return await owner.evaluate_item(item)

        return None if owner is None else evaluate


class NatRows:
    """The rows of a dataset as `nat eval` reads them: with pandas, which gives each column a type."""

    def __init__(self, block: Mapping[str, Any], spec: Eval) -> None:
        """Take NAT's dataset block, and the eval that names the file."""
        files = Dataset(spec).files
        config = _validate({"eval": {"general": {"dataset": {**block, "s3": None}}}}, None, spec.document.where(()))
        self._block, self._frame = config.eval.general.dataset, None
        self._places: dict[str, int] = {}
        parser, options = self._block.parser()
        if len(files) != 1:
            return
        with suppress(ImportError):  # pandas may lack what reads a format; the row's own values have types then
            self._frame = parser(files[0], **options)
        self._places = {place: number for number, place in enumerate(row_places(spec))}
        if self._frame is not None and len(self._frame) != len(self._places):
            raise ValueError(f"NAT reads {len(self._frame)} rows from {files[0]}, and not {len(self._places)}")

    def item(self, place: str) -> Item | None:
        """Return the row at a place of the file, as the evaluator gets it; None if the row is in no such file."""
        if self._frame is None or place not in self._places:
            return None
        position = self._places[place]
        ((_, row),) = self._frame.iloc[position : position + 1].iterrows()
        names, row_id = self._block.structure, row.get(self._block.id_key, "")
        if names.disable:
            return Item(row_id, row.to_json(), "", [], row.to_dict())
        steps = row.get(names.expected_trajectory_key)
        question, expected = row.get(names.question_key, ""), row.get(names.answer_key, "")
        return Item(row_id, question, expected, steps if isinstance(steps, list) else [], row.to_dict())


def has_profiler() -> bool:
    """Return True if NAT's profiler is installed."""
    return _installed("nat.plugins.profiler")


def profile(block: Mapping[str, Any], traces: Iterable[Sequence[TraceStep]], folder: Path) -> None:
    """Write the files of NAT's profiler, made from the steps of all trials."""
    from nat.data_models.intermediate_step import IntermediateStep
    from nat.data_models.profiler import ProfilerConfig
    from nat.plugins.profiler.profile_runner import ProfilerRunner

    steps = [[IntermediateStep.model_validate(step) for step in trace] for trace in traces]
    with warnings.catch_warnings(record=True):
        asyncio.run(ProfilerRunner(ProfilerConfig(**block), folder).run(steps))


def effective_config(path: Path, override: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as NAT uses it, with all defaults."""
    require(str(path))
    config: dict[str, Any] = _validate(_load(path, override, str(path)), path, str(path)).model_dump(mode="json")
    return config


def is_installed() -> bool:
    """Return True if NAT is installed."""
    return _installed("nat.runtime")


def _load(path: Path, override: Mapping[str, Any], where: str) -> dict[str, Any]:
    # Some dependencies warn about each other on import, and users can do nothing about that.
    with warnings.catch_warnings(record=True):
        from nat.runtime.loader import PluginTypes, discover_and_register_plugins
        from nat.utils.io.yaml_tools import yaml_load

        discover_and_register_plugins(PluginTypes.CONFIG_OBJECT)
    try:
        data: dict[str, Any] = yaml_load(path)
    except Exception as error:
        raise ConfigError([Problem(where, f"{path} cannot be read by NAT: {error}")]) from error
    overlay(data, override)
    return data


def _validate(data: dict[str, Any], path: Path | None, where: str) -> Any:
    with warnings.catch_warnings(record=True):
        from nat.data_models.config import Config
        from nat.runtime.loader import PluginTypes, discover_and_register_plugins
        from pydantic import ValidationError

        discover_and_register_plugins(PluginTypes.CONFIG_OBJECT)
    try:
        return Config(**data)
    except ValidationError as error:
        messages = [
            f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors(include_url=False)
        ]
        prefix = "" if path is None else f"{path} is refused by NAT: "
        raise ConfigError(
            [Problem(where, f"{prefix}{line[:600]}") for line in messages],
            remedy="Install the package that registers a `_type` that NAT does not find.",
        ) from error


def _conversation(messages: list[dict[str, Any]], workflow: Any) -> Any:
    from nat.data_models.api_server import ChatRequest, ChatRequestOrMessage, Message

    kind = workflow.input_type
    if not (isinstance(kind, type) and issubclass(kind, ChatRequest | ChatRequestOrMessage)):
        raise TypeError(
            f"the workflow takes {getattr(kind, '__name__', kind)}, not a conversation: "
            "`system`, `follow_ups` and `responder` need a workflow that takes NAT's ChatRequest"
        )
    visible = [
        Message(role=message["role"], content=message["content"])
        for message in messages
        if message["role"] in ("system", "user", "assistant") and message.get("content")
    ]
    return kind(messages=visible)


def _row_evaluator(method: Any, kind: type, name: str, row_method: str) -> Any:
    """Return the object that evaluates items one by one, if a method does nothing but that.

    NAT's base class does so, unless its method is overridden. In NAT's own evaluators, a function may also hand items
    to such an object, or a class may have both methods.
    """
    ours = str(getattr(method, "__module__", "")).startswith("nat.plugins.")
    cells = getattr(method, "__closure__", None) or ()
    owners = [getattr(method, "__self__", None)]
    if ours:
        with suppress(ValueError):  # a cell that is empty
            owners += [cell.cell_contents for cell in cells]
    for owner in owners:
        if isinstance(owner, kind) and getattr(type(owner), name) is getattr(kind, name):
            return owner
        if ours and owner is getattr(method, "__self__", None) and callable(getattr(owner, row_method, None)):
            return owner
    return None


def _atif_samples(items: Any) -> Any:
    from nat.plugins.eval.runtime.atif_adapter import EvalAtifAdapter

    return EvalAtifAdapter().build_samples(items)


def _judged(result: Any) -> Evaluation:
    score = result.score.item() if hasattr(result.score, "item") else result.score  # a number of NumPy's
    if not (isinstance(score, float) and math.isnan(score)):
        score = _plain(score)
    return Evaluation(score, _plain(result.reasoning), result.error, _more(result, "id", "score", "reasoning", "error"))


def _more(result: Any, *known: str) -> dict[str, Any]:
    """Return the fields of a subclass of NAT's result."""
    fields = getattr(type(result), "model_fields", ())
    return {name: _plain(getattr(result, name)) for name in fields if name not in known}


def _in_order(items: Sequence[Item], results: Sequence[Any]) -> list[Evaluation]:
    """Return each item's result: by id, or by position if ids are not unique."""
    by_id = {str(result.id): _judged(result) for result in results}
    if len({str(item.id) for item in items}) == len(items):
        missing = Evaluation(None, None, "the evaluator returned nothing for this output")
        return [by_id.get(str(item.id), missing) for item in items]
    if len(results) != len(items):
        raise ValueError(f"the evaluator returned {len(results)} results for {len(items)} outputs without ids")
    return [_judged(result) for result in results]


def _plain(value: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Any).dump_python(value, mode="json", fallback=str)
