"""A Python function as the target."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, get_args

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from holdfast.errors import AttemptError, ConfigError, Fault, HoldfastError, Problem, UsageError
from holdfast.functions import (
    Function,
    describe_error,
    function_source,
    load_function,
    parameters_of,
    user_errors,
)
from holdfast.spec.plugins import load_reference
from holdfast.spec.providers import has_provider
from holdfast.spec.schema import several_answers
from holdfast.spec.target_schema import TARGETS, ModelTarget, PythonTarget
from holdfast.store.records import OnCutOff, Usage
from holdfast.targets.prices import Prices
from holdfast.targets.tools import Toolbox, ToolContext, as_text, find_home, tools_identity, use
from holdfast.targets.types import PROCESS, PROXY, Home, ReplayPolicy, Reply, Target

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from pathlib import Path

    from holdfast.spec.eval import Origin
    from holdfast.targets.model import Model
    from holdfast.targets.proxy import Proxy
    from holdfast.targets.tools import Tool
    from holdfast.targets.types import Message, PastCall, Turn

OFFERED = ("prompt", "messages", "sample", "context")


@dataclass
class Context:
    """The trial that a Python target answers for: its settings, and recorded calls of models and tools.

    Calls made with `model` and `tool` are on disk before their results are used. After a crash the function runs again
    from the start of its turn, and calls that are on record are answered from there.
    """

    trial: int
    turn: int
    seed: int
    """the same for the same sample and trial; seed your randomness with it"""
    sample_id: str
    params: dict[str, Any] = field(default_factory=dict)
    """`target.params` of the eval file"""
    state: Any = None
    """the `state` of the previous reply"""
    workspace: Path | None = None
    """the trial's folder, if the eval has a `workspace`"""
    base_url: str = ""
    """an OpenAI-compatible URL of this trial, for frameworks with a client of their own: calls through it are recorded,
    counted and replayed like calls of `model`"""
    deadline: float | None = None
    """when the time for this reply is up, in seconds since the epoch"""
    _owner: tuple[PythonFunction, Turn, asyncio.AbstractEventLoop] | None = field(default=None, repr=False)

    def model(self, messages: list[Message] | str, *, model: str | None = None, **params: Any) -> Any:
        """Ask a model; returns a `holdfast.Reply` with `text`, `messages` (with the tool calls) and `usage`.

        Async functions `await` the result; in plain functions the call blocks. `model` defaults to `params: {model: …}`
        of the target; everything else goes into the request: temperature, tools, max_tokens …
        """
        name = model or self.params.get("model")
        if not isinstance(name, str):
            raise UsageError("context.model needs a model: name it, or give target.params.model")
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        function, turn, loop = self._trial()
        return _result(function.ask(turn, name, conversation, params), loop)

    def tool(
        self,
        tool: Callable[..., Any] | str,
        arguments: dict[str, Any] | None = None,
        *,
        replay: ReplayPolicy = "record",
        on_cut_off: OnCutOff = "stop",
    ) -> Any:
        """Call a function, or one of `target.tools` by name; returns its result as JSON.

        Async functions `await` the result; in plain functions the call blocks. `replay="never"` is for functions with
        side effects: a call that was cut off is not made again, and `on_cut_off` says what happens instead. A function
        with a parameter `context` gets the call's `call_id` with it.
        """
        function, turn, loop = self._trial()
        return _result(function.use(turn, tool, arguments or {}, replay, on_cut_off), loop)

    def read(self, part: dict[str, Any]) -> bytes:
        """Return the content of an image, a recording or another file: a part of a message that has a `digest`."""
        _, turn, _ = self._trial()
        assert turn.load is not None
        return turn.load(part["digest"])

    def _trial(self) -> tuple[PythonFunction, Turn, asyncio.AbstractEventLoop]:
        if self._owner is None:
            raise UsageError("this context belongs to no trial")
        return self._owner


def _result(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Any:
    """Return an awaitable to code in the event loop, and the result itself to any other thread."""
    try:
        if asyncio.get_running_loop() is loop:
            return work
    except RuntimeError:
        pass
    return asyncio.run_coroutine_threadsafe(work, loop).result()


class PythonFunction(Target):
    """Calls the user's function once per turn."""

    schema = PythonTarget
    block: PythonTarget

    def __init__(self, block: PythonTarget, origin: Origin) -> None:
        super().__init__(block, origin)
        spec = origin.spec

        def load(reference: str, offered: tuple[str, ...], *key: str) -> Function:
            where = spec.document.where(("target", *key))
            function = load_function(reference, spec.folder, where, spec.functions)
            return Function(function, offered, where, takes_fields=offered is OFFERED)

        self._prices = spec.prices
        where = spec.document.where(("target", "python"))
        target = load_function(block.python, spec.folder, where, spec.functions)
        self._object, self._where = _instance_of(target, where), where
        self._function = Function(self._object, OFFERED, where, takes_fields=True)
        self._save = None if block.state is None else load(block.state.save, ("context",), "state", "save")
        restored = ("state", "context")
        self._restore = None if block.state is None else load(block.state.restore, restored, "state", "restore")
        self._tools = Toolbox(block.tools, spec) if block.tools else None
        self._models: dict[str, Model] = {}
        self._opening = asyncio.Lock()
        self._proxy: Proxy | None = None
        self._opened = AsyncExitStack()

    @classmethod
    def sees_row(cls, block: PythonTarget, origin: Origin) -> bool:
        """Return False for a function that takes nothing but the prompt and the messages."""
        names = parameters_of(block.python, origin.folder, origin.spec.functions)
        return names is None or not names <= {"prompt", "messages"}

    @classmethod
    def identity(cls, block: PythonTarget, origin: Origin) -> dict[str, Any]:
        """Return the code of all functions, and the values that they get."""
        spec = origin.spec
        name, source = function_source(block.python, spec.folder, origin.where("python"), spec.functions)
        files = {**source}  # a copy: callers share the scan of a file
        identity: dict[str, Any] = {"function": name, "source": files, "params": block.params, "version": block.version}
        if block.tools:
            identity["tools"] = tools_identity(block.tools, spec)
        if block.state is not None:
            for key, hook in (("save", block.state.save), ("restore", block.state.restore)):
                files |= function_source(hook, spec.folder, origin.where("state", key), spec.functions)[1]
        return identity

    @property
    def function(self) -> Function:
        """The user's function."""
        return self._function

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:
            if self._function.takes("context"):
                proxy = load_reference(PROXY)(self.block, self._prices)
                self._proxy = await opening.enter_async_context(proxy)
            if self._tools is not None:
                await opening.enter_async_context(self._tools)
            await opening.enter_async_context(_lifetime(self._object, self.block.params, self._where))
            self._opened = opening.pop_all()
        return self

    async def __aexit__(self, *details: Any) -> None:
        for model in self._models.values():
            self._opened.push_async_exit(model)
        await self._opened.__aexit__(*details)

    @property
    def final_notices(self) -> list[str]:
        """What the servers of the function's models did that cannot be accounted for."""
        proxied = [] if self._proxy is None else self._proxy.final_notices
        return [*(notice for model in self._models.values() for notice in model.final_notices), *proxied]

    async def reply(self, turn: Turn) -> Reply:
        """Call the function and return its result as a reply."""
        calls, proxy = turn.calls, self._proxy
        context = Context(turn.trial, turn.number, turn.seed, turn.sample.id, self.block.params, turn.state)
        context.deadline = turn.deadline
        if calls is not None:
            context.workspace = calls.workspace
            context._owner = self, turn, asyncio.get_running_loop()
            calls.observed = self._function.takes("context")
        with user_errors("agent"):
            if proxy is None or calls is None:
                return await self._call(turn, context)
            with proxy.serving(calls) as context.base_url:
                return await self._call(turn, context)

    async def _call(self, turn: Turn, context: Context) -> Reply:
        if turn.calls is not None:
            await self._restore_calls(turn)
        resumed = turn.calls is not None and not turn.calls.first
        if self._restore is not None and turn.state is not None and resumed:
            await self._restore({"state": turn.state, "context": context})
        offered = {
            "prompt": turn.prompt,
            "messages": [dict(message) for message in turn.messages],
            "sample": dict(turn.sample.fields),
            "context": context,
            **self._function.of_row(turn.sample.fields),
        }
        reply = _as_reply(await self._function(offered))
        return _settle(reply if self._save is None else replace(reply, state=await self._save({"context": context})))

    async def ask(self, turn: Turn, name: str, messages: list[Message], params: dict[str, Any]) -> Reply:
        """Return a model's answer, for `context.model`."""
        assert turn.calls is not None
        if (several := several_answers(params)) is not None:
            raise UsageError(f"context.model: `{several}` asks for several answers, of which one would count")
        async with self._opening:  # calls may be concurrent, and the embedded model starts slowly
            if name not in self._models:
                self._models[name] = await self._model(name).__aenter__()
        return await self._models[name].answer(messages, turn.calls, params, turn.load)

    def _model(self, name: str) -> Model:
        """Return a model that the function names; its provider's prefix counts if the target has no `base_url`."""
        by_prefix = self.block.base_url is None and has_provider(name)
        key_env = None if by_prefix else self.block.api_key_env
        try:
            block = ModelTarget(model=name, base_url=self.block.base_url, api_key_env=key_env)
            model: Model = TARGETS.load("model")(block, Prices(name, self._prices), where=f"context.model({name!r})")
        except UsageError as error:  # the function names the model only now
            raise Fault("auth", error.message, remedy=error.remedy) from error
        return model

    async def use(
        self,
        turn: Turn,
        tool: Callable[..., Any] | str,
        arguments: dict[str, Any],
        replay: ReplayPolicy,
        on_cut_off: OnCutOff,
    ) -> Any:
        """Return a tool's result, for `context.tool`."""
        assert turn.calls is not None
        if isinstance(tool, str):
            tools = await self._tools_of(turn)
            if tool not in tools:
                raise UsageError(f"there is no tool called {tool!r} in target.tools")
            await self._restore_calls(turn)  # its server may have crashed since the turn began
            return await use(tools, tool, arguments, turn)
        name = getattr(tool, "__name__", type(tool).__name__)
        if replay not in get_args(ReplayPolicy) or on_cut_off not in get_args(OnCutOff):
            raise UsageError(f"context.tool({name}): there is no replay={replay!r} with on_cut_off={on_cut_off!r}")
        if on_cut_off != "stop" and replay != "never":
            raise UsageError(f"context.tool({name}): `on_cut_off` is for functions with replay='never'")
        reference = _reference(tool)
        home = PROCESS if reference is not None else getattr(tool, "__self__", tool)
        call = functools.partial(_call_tool, tool, arguments, turn, turn.number)
        return await turn.calls.tool(name, arguments, call, replay, home, reference, on_cut_off)

    async def _tools_of(self, turn: Turn) -> dict[str, Tool]:
        assert turn.calls is not None
        return {} if self._tools is None else await self._tools.of(turn.calls)

    async def _restore_calls(self, turn: Turn) -> None:
        """Rebuild lost state by repeating earlier calls of `context.tool`."""
        assert turn.calls is not None

        async def find(past: PastCall) -> Home | None:
            if isinstance(past.function, UnsetType):
                return find_home(await self._tools_of(turn), past, turn)
            function = None if past.function is None else _look_up(past.function)
            if function is None:
                return Home(PROCESS, None)
            return Home(PROCESS, functools.partial(_repeat, function, past.arguments, turn, past.turn, past.call_id))

        await turn.calls.restore(find)


def _reference(function: Callable[..., Any]) -> str | None:
    """Return a function as `module:name`; None for closures, methods and others without such a name."""
    reference = f"{getattr(function, '__module__', None)}:{getattr(function, '__qualname__', None)}"
    return reference if _look_up(reference) is function else None


def _look_up(reference: str) -> Any:
    module, _, name = reference.partition(":")
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


async def _call_tool(
    function: Callable[..., Any], arguments: dict[str, Any], turn: Turn, number: int, call_id: str
) -> Any:
    assert turn.calls is not None
    name = getattr(function, "__name__", type(function).__name__)
    call = Function(functools.partial(function, **arguments), ("context",), f"context.tool({name})")
    context = ToolContext(dict(turn.sample.fields), turn.trial, number, turn.calls.workspace, call_id)
    offered = {"context": context} if "context" in call.required else {}
    return _as_json(await call(offered))


async def _repeat(
    function: Callable[..., Any], arguments: dict[str, Any], turn: Turn, number: int, call_id: str
) -> None:
    """Call a function for the state that it builds; the agent has dealt with its result already."""
    with suppress(Exception):
        await _call_tool(function, arguments, turn, number, call_id)


def _as_json(value: Any) -> Any:
    """Return a result as the record will give it back."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value))
    except (TypeError, ValueError):
        return as_text(value)


def settle_reply(returned: Any) -> Reply:
    """Return a user's return value as the reply that the journal will give back."""
    return _settle(_as_reply(returned))


def _settle(reply: Reply) -> Reply:
    try:
        settled = msgspec.json.decode(msgspec.json.encode(reply), type=Reply)
        return replace(settled, usage=settled.usage.checked())
    except (TypeError, ValueError, RecursionError) as error:
        raise AttemptError("agent", f"the reply cannot be serialized as JSON: {error}", retry=False) from error


def _as_reply(returned: Any) -> Reply:
    if isinstance(returned, Reply):
        return returned
    if isinstance(returned, str):
        return Reply(text=returned)
    if isinstance(returned, dict):
        return _from_dict(returned)
    raise AttemptError(
        "agent",
        f"the target returned {type(returned).__name__}, not a text, a dict with `output`, or a holdfast.Reply",
        retry=False,
    )


def _from_dict(returned: dict[str, Any]) -> Reply:
    """Read a dict. An empty `tool_calls` or `messages` means that no tool was called; None means unknown."""
    text = next((returned[key] for key in ("output", "text", "content") if key in returned), None)
    messages: list[Message] | None = _listed(returned, "messages")
    value = UNSET
    if text is None and messages:
        text = messages[-1].get("content")
    elif text is not None and not isinstance(text, str):
        value, text = text, as_text(text)
    if not isinstance(text, str):
        raise AttemptError("agent", f"the reply has no text: {str(returned)[:200]}", retry=False)
    if (calls := _listed(returned, "tool_calls")) is not None:
        if messages is None:
            messages = [{"role": "assistant", "content": text, "tool_calls": calls}]
        elif calls and not any(message.get("tool_calls") for message in messages):
            messages = [{"role": "assistant", "content": "", "tool_calls": calls}, *messages]
    counts = returned.get("usage") or {}
    usage = Usage(
        counts.get("input_tokens", counts.get("prompt_tokens")),
        counts.get("output_tokens", counts.get("completion_tokens")),
        counts.get("requests", 0),
        counts.get("cost"),
    )
    return Reply(
        text=text,
        messages=messages,
        usage=usage,
        stop=str(returned.get("stop") or "stop"),
        state=returned.get("state"),
        value=value,
    )


def _listed(returned: dict[str, Any], key: str) -> list[dict[str, Any]] | None:
    """Return a list of objects in a reply; None if the reply does not have it."""
    value = returned.get(key)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(each, dict) for each in value):
        raise AttemptError("agent", f"`{key}` of the reply is not a list of objects: {str(value)[:200]}", retry=False)
    return list(value)


def _instance_of(target: Callable[..., Any], where: str) -> Callable[..., Any]:
    """Return the object that answers: a class is constructed once, without arguments."""
    if not inspect.isclass(target):
        return target
    if "__call__" not in dir(target):
        message = f"{target.__name__} has no method __call__, which answers a prompt"
        raise ConfigError([Problem(where, message)], remedy="Write it as  def __call__(self, prompt): …")
    try:
        instance: Any = target()
    except Exception as error:  # raised by the user's class
        raise ConfigError([Problem(where, f"{target.__name__}() failed: {describe_error(error)}")]) from error
    return instance  # type: ignore[no-any-return]


@asynccontextmanager
async def _lifetime(target: Callable[..., Any], params: dict[str, Any], where: str) -> AsyncIterator[None]:
    """Open the target on the way in and close it on the way out, if it has methods for that."""
    opening, closing = _method(target, "open", ("params",), where), _method(target, "close", (), where)
    if opening is not None:
        try:
            await opening({"params": params})
        except HoldfastError:
            raise
        except Exception as error:
            message = f"the target's open() failed: {describe_error(error)}"
            raise Fault("rejected", message, remedy="Fix it, then run the same command again.") from error
    try:
        yield
    finally:
        if closing is not None:
            try:
                await closing({})
            except Exception as error:
                raise AttemptError("agent", f"the target's close() failed: {describe_error(error)}") from error


def _method(target: Callable[..., Any], name: str, offered: tuple[str, ...], where: str) -> Function | None:
    if inspect.isroutine(target):
        return None
    method = getattr(target, name, None)
    return Function(method, offered, f"{where}: {name}") if callable(method) else None
