"""The only module that imports NAT itself, when a workflow or an evaluator is built."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from contextlib import AsyncExitStack, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from holdfast.errors import ConfigError, Problem
from holdfast.formats.nat.config import evaluator_part, overlay, workflow_part

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from holdfast.store.records import TraceStep

PACKAGES: Final = "nvidia-nat-core nvidia-nat-eval nvidia-nat-profiler"
_CHUNKS: Final = ("LLM_NEW_TOKEN", "SPAN_CHUNK")
"""steps with pieces of a result that the end of the call repeats as a whole"""


def require(where: str) -> None:
    """Raise ConfigError if NAT is not installed."""
    if not _installed("nat.runtime"):
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


class Workflow:
    """A workflow, built by `open` and torn down by `close`."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.notices: tuple[str, ...] = ()
        if config.llms and not _installed("nat.plugins.profiler"):
            message = "NAT reports no model calls, no tokens and no tools of frameworks without nvidia-nat-profiler"
            self.notices = (f"{message}; evaluators of trajectories see none. pip install nvidia-nat-profiler",)
        self._stack = AsyncExitStack()
        self._sessions: Any = None

    async def open(self) -> None:
        """Build all components; raises whatever they raise."""
        from nat.builder.workflow_builder import WorkflowBuilder
        from nat.runtime.session import SessionManager

        async with AsyncExitStack() as stack:
            builder = await stack.enter_async_context(WorkflowBuilder.from_config(config=self._config))
            self._sessions = await SessionManager.create(
                config=self._config, shared_builder=builder, max_concurrency=-1
            )
            stack.push_async_callback(self._sessions.shutdown)
            self._stack = stack.pop_all()

    async def close(self) -> None:
        """Tear down what was built."""
        await self._stack.aclose()

    async def run(self, messages: list[dict[str, Any]]) -> tuple[str, list[TraceStep]]:
        """Run the workflow as a user of its own, and return its answer and its steps.

        A single message is given as a text. A conversation is given as NAT's chat request; raises TypeError where the
        workflow does not take one.
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
                return _text(result, runner), trace


class Evaluator:
    """An evaluator, built by `open` and torn down by `close`."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self._info: Any = None

    async def open(self) -> None:
        """Build it and the components it names; raises whatever they raise."""
        from nat.plugins.eval.runtime.builder import WorkflowEvalBuilder

        async with AsyncExitStack() as stack:
            builder = await stack.enter_async_context(WorkflowEvalBuilder.from_config(config=self._config))
            self._info = builder.get_evaluator("evaluator")
            self._stack = stack.pop_all()

    async def close(self) -> None:
        """Tear down what was built."""
        await self._stack.aclose()

    async def evaluate(
        self,
        sample: str,
        question: Any,
        expected: Any,
        output: str,
        trace: list[TraceStep],
        expected_trace: list[TraceStep],
        row: dict[str, Any],
    ) -> tuple[Any, Any, str | None]:
        """Return the score, the reasoning, and the error where there was one. Raises whatever the evaluator raises."""
        from nat.data_models.evaluator import EvalInput, EvalInputItem
        from nat.data_models.intermediate_step import IntermediateStep
        from nat.plugins.eval.evaluator.atif_base_evaluator import AtifBaseEvaluator
        from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator
        from nat.plugins.eval.runtime.atif_adapter import EvalAtifAdapter

        item = EvalInputItem(
            id=sample,
            input_obj=question,
            expected_output_obj="" if expected is None else expected,
            output_obj=output,
            trajectory=[IntermediateStep.model_validate(step) for step in trace],
            expected_trajectory=[IntermediateStep.model_validate(step) for step in expected_trace],
            full_dataset_entry=row,
        )
        items = EvalInput(eval_input_items=[item])
        # NAT's base classes turn an exception into a score of 0.0, so the method below them is called if possible.
        if callable(in_atif := getattr(self._info, "evaluate_atif_fn", None)):
            samples = EvalAtifAdapter().build_samples(items)
            if (owner := _owner(in_atif, AtifBaseEvaluator, "evaluate_atif_fn")) is not None:
                result = await owner.evaluate_atif_item(samples[0])
            else:
                result = (await in_atif(samples)).eval_output_items[0]
        elif (owner := _owner(self._info.evaluate_fn, BaseEvaluator, "evaluate")) is not None:
            async with owner.semaphore:
                result = await owner.evaluate_item(item)
        else:
            result = (await self._info.evaluate_fn(items)).eval_output_items[0]
        return result.score, _plain(result.reasoning), result.error


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


def _text(result: Any, runner: Any) -> str:
    """Return the answer as `nat eval` does: converted by NAT if possible, an object as JSON."""
    from pydantic import BaseModel, TypeAdapter

    with suppress(ValueError):
        result = runner.convert(result, to_type=str)
    if isinstance(result, str):
        return result
    if isinstance(result, BaseModel):
        return result.model_dump_json()
    return TypeAdapter(Any).dump_json(result, fallback=str).decode()


def _owner(method: Any, kind: type, name: str) -> Any:
    """Return the evaluator of a bound method, if the method is NAT's own."""
    owner = getattr(method, "__self__", None)
    return owner if isinstance(owner, kind) and getattr(method, "__func__", None) is getattr(kind, name) else None


def _plain(value: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Any).dump_python(value, mode="json", fallback=str)
