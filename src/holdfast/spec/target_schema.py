"""Schemas of targets and their tools, and the registry of targets.

A target is a model, an HTTP workflow, a function, a program or an installed agent.
"""

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, cast

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from holdfast.errors import Problem, suggest
from holdfast.http.urls import bare_url
from holdfast.spec.document import Document
from holdfast.spec.plugins import Registry
from holdfast.spec.schema import (
    Api,
    BaseUrl,
    Block,
    Formula,
    FunctionName,
    Params,
    ReasoningHistory,
    Seconds,
    absent_block,
    validate_block,
)

MAX_RESULT: Final = 65_536
"""bytes of a tool's result by default"""
SESSION: Final = "<session>.py:"
"""stands before the name of a function that was typed into a notebook or an interpreter"""


class TargetBlock(Block):
    """The base of every target's keys."""

    multi_call: ClassVar[bool] = False
    """a reply may take several model or tool calls, which are recorded one by one"""
    proxied: ClassVar[bool] = False
    """for plug-ins: the target's programs call models through a recording proxy, so that a reply has several calls"""
    works_alone: ClassVar[bool] = False
    """code that works on its own until it is done: an agent, a program, a function"""
    has_exit_code: ClassVar[bool] = False
    """a program, which reports failure by its exit code"""
    expressions: ClassVar[tuple[str, ...]] = ()
    """fields that hold expressions over the row"""
    sees_row: ClassVar[bool] = True
    """the target gets the whole row; False: only what templates and expressions name"""

    _kind: str = PrivateAttr(default="")

    @property
    def kind(self) -> str:
        """The kind of target: the key of a built-in kind, or a plug-in's name."""
        return self._kind

    def with_kind(self, kind: str) -> Self:
        """Set the kind of a block that was just read."""
        self._kind = kind
        return self

    @property
    def command_line(self) -> tuple[str, ...]:
        """The program that the target runs, with its arguments; empty for other targets."""
        return ()

    @property
    def reports_cost(self) -> bool:
        """False if the cost of a reply is unknown, from the reply and from the models' prices."""
        return True

    @property
    def counts_calls(self) -> bool:
        """True if the target's model calls are counted one by one."""
        return self.multi_call or self.proxied

    @property
    def takes_files(self) -> bool:
        """True if messages may hold images, audio and other files."""
        return False

    @property
    def label(self) -> str:
        """The target's name in tables and directory names."""
        return self.kind


class McpBlock(Block):
    """A server of tools: a program that is started, or a URL."""

    command: list[str] = []
    """Program and arguments of a server on standard input and output. It is started in the trial's workspace, else
    in the eval file's folder."""
    url: str | None = Field(default=None, pattern=r"^(https?://|\$\{\w+\})")
    """Address of a server over HTTP. May name environment variables as `${NAME}`."""
    env: dict[str, str] = {}
    """Environment variables for the program. Values may name environment variables as `${NAME}`."""
    headers: dict[str, str] = {}
    """HTTP headers for the URL. Values may name environment variables as `${NAME}`."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if bool(self.command) == (self.url is not None):
            raise ValueError("must be either a `command` or a `url`")
        for name, value in self.env.items():
            if re.search(r"KEY|TOKEN|SECRET|PASSWORD", name.upper()) and "${" not in value:
                raise ValueError(f"keys are not written into files: {name}: ${{{name}}} takes it from the environment")
        return self


class ScriptedResponse(Block):
    """A response of a scripted tool to the calls that match. Without any `match` key it matches every call."""

    match: dict[str, Any] = {}
    """Match calls with exactly these arguments."""
    match_regex: dict[str, str] = {}
    """Match calls by a pattern (RE2) for each named argument. A value that is not text is matched as JSON."""
    match_schema: dict[str, Any] = {}
    """Match calls whose arguments fit this JSON Schema."""
    result: Any = None
    """Result to return. A value that is not text is returned as JSON."""
    error: str | None = None
    """Error to return instead of a result."""


class ScriptedTool(Block):
    """A tool that answers from a script: the first response that matches a call."""

    name: str = Field(min_length=1)
    """Name of the tool, as the model sees it."""
    description: str = ""
    """Description of the tool, as the model sees it."""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    """JSON Schema of the arguments, as the model sees it. Default: no arguments."""
    responses: list[ScriptedResponse] = Field(min_length=1)
    """Responses to choose from. The first one that matches a call is used; a call that matches none gets an error."""


class ToolBlock(Block):
    """Something a model may call: a Python function, a scripted tool, or the tools of an MCP server."""

    python: FunctionName | None = None
    """Function to call, as `file.py:function` or `package.module:function`. Its signature and docstring describe it
    to the model."""
    mcp: McpBlock | None = None
    """MCP server whose tools the model may call. Needs `pip install mcp`."""
    scripted: ScriptedTool | None = None
    """Tool that answers from a script instead of running code."""
    only: list[str] = []
    """Names of the MCP server's tools to offer. Default: all."""
    per: Literal["trial", "run"] = "trial"
    """Lifetime of an MCP server: one for each `trial`, or one that the whole `run` shares."""
    replay: Literal["record", "never", "again"] = "record"
    """How a call is handled after a crash. `record`: a finished call is answered from the record, and one that was cut
    off is made again. `never`, for side effects: the same, but a call that was cut off is not made again. `again`:
    calls run again to restore the tool's state."""
    on_cut_off: Literal["stop", "error_result", "restart"] | None = None
    """With `replay: never`, what happens if a call was cut off: the trial is uncertain and waits for
    `holdfast resume --settle` (`stop`, the default), the model gets an error as the result (`error_result`), or the
    trial begins again (`restart`)."""
    max_result: int = Field(default=MAX_RESULT, ge=256)
    """Maximum size of a result in bytes. Of a longer result the model gets the beginning and the end, with a mark that
    says how much is left out; no more is stored."""
    version: str | None = None
    """Change this when the tool answers differently from now on."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if [self.python, self.mcp, self.scripted].count(None) != 2:
            raise ValueError("must be either a `python` function, an `mcp` server or a `scripted` tool")
        if self.only and self.mcp is None:
            raise ValueError("`only` picks among the tools of an mcp server")
        if self.on_cut_off is not None and self.replay != "never":
            raise ValueError("`on_cut_off` is for tools with `replay: never`")
        return self


class BatchBlock(Block):
    """How requests are made in batches, which providers answer within a day at a lower price."""

    max_wait: Seconds | None = None
    """Longest time to wait for a batch, such as `6h`. It is then cancelled, and keeps what it has answered. Default: as
    long as the provider takes, which is at most a day."""
    then: Literal["batch", "live"] = "batch"
    """What to do with requests that a batch did not answer in time: ask in the next `batch`, or `live`, at the normal
    price."""
    size: int | None = Field(default=None, ge=1)
    """Maximum number of requests in a batch. Default: the provider's, 50,000 or 100,000."""
    via: Literal["api", "files"] = "api"
    """How batches are handed over: to the provider by its `api`, or as `files` that you have answered with
    `vllm run-batch`."""

    @model_validator(mode="after")
    def _files_have_no_server(self) -> Self:
        if self.via == "files" and self.then == "live":
            raise ValueError("`then: live` needs a server: remove it, or `via: files`")
        return self


class ThoughtsBlock(Block):
    """`target.strip_reasoning`: how reasoning is marked in the text of replies."""

    start: str = "<think>"
    """Text with which reasoning begins. It may be missing, for example if the prompt ends with it."""
    end: str = Field(default="</think>", min_length=1)
    """Text with which reasoning ends; the answer is what follows the last of them."""
    unfinished: Literal["keep", "drop"] = "keep"
    """Handling of a reply without the end: it is kept as it is, or all of it counts as reasoning (`drop`)."""


class LikelihoodBlock(Block):
    """How a model is asked for likelihoods, in evals with `continuations`."""

    form: Literal["auto", "echo", "sglang", "llama.cpp"] = "auto"
    """Request to send: `echo` for vLLM, NIM and other servers whose completions return the log-probabilities of the
    prompt, `sglang` and `llama.cpp` for these servers. `auto` finds out which one the server answers."""
    truncate: Literal["never", "left"] = "never"
    """Treatment of a row that is longer than the model's context: `never` cut it, so that its trial is an error,
    or cut it on the `left`, as lm-eval does."""
    max_length: int | None = Field(default=None, ge=2)
    """Maximum number of tokens of context and continuation together. Default: what the server says."""
    prefix: int | str | None = None
    """Token before a continuation whose context is empty, by its id or its text. Default: the tokenizer's BOS, else
    its EOS."""


def _as_block(value: Any) -> Any:
    """Return the block that `true` stands for."""
    return ({} if value else None) if isinstance(value, bool) else value


InBatches = Annotated[BatchBlock | None, BeforeValidator(_as_block)]


StripReasoning = Annotated[ThoughtsBlock | None, BeforeValidator(_as_block)]
"""`true`, `false` or the settings of batches"""


class ModelTarget(TargetBlock):
    """A model with an API, or the embedded model."""

    model: str = Field(min_length=1)
    """Name of the model, with its provider's prefix if there is no `base_url`: see [models](models.md).
    `local/smollm2-135m` is the embedded model, which Holdfast starts on this machine and stops with the run."""
    base_url: BaseUrl | None = None
    """URL of the API, or a list of URLs that serve the same model. `${NAME}` takes one URL, or several separated by
    commas, from the environment. Default: the address of the model's provider; for names without a provider
    `$OPENAI_BASE_URL`, else OpenAI's API."""
    api_key_env: str | None = None
    """Environment variable that holds the API key. Keys are never written into files. Default: the provider's usual
    one; `OPENAI_API_KEY` for names without a provider."""
    api: Api | None = None
    """Which API to call: `chat`, `responses`, `messages`, `gemini` or `completions`. Default: the provider's; `chat`
    for names without a provider."""
    params: Params = {}
    """Parameters sent with each request, such as `temperature`, `max_tokens`, `stop` or `seed`."""
    params_from: Formula | None = None
    """Expression over the row that returns further parameters for the requests of that row, as a mapping. They take
    precedence over `params`."""
    stream: bool = False
    """Stream the reply and record the time to its first token."""
    batch: InBatches = None
    """Make requests in [batches](batches.md), at a lower price and within a day: `true`, or a mapping. Not part of the
    key."""
    reasoning_history: ReasoningHistory = "auto"
    """How much of its earlier reasoning the model gets back: what its API asks for (`auto`), `all`, the current turn's
    (`last`), or `none`. Part of the key."""
    strip_reasoning: StripReasoning = None
    """Take [reasoning in the text](models.md#reasoning) of replies, such as `<think>…</think>`, out of it: `true`, or a
    mapping. Part of the key."""
    json_schema: dict[str, Any] | str | None = Field(default=None, alias="schema")
    """JSON Schema of the replies, which the model is asked to follow: a mapping, or a `.json` file in the eval file's
    folder. Part of the key. The grader [`json_schema`](graders-text.md#json_schema) checks the replies."""
    identity: Literal["name", "url"] = "name"
    """What identifies the model: only its `name`, or its name together with the `url`, so that another `base_url`
    counts as another model."""
    version: str | None = None
    """Change this when the same name answers differently from now on."""
    tools: list[ToolBlock] = []
    """Tools the model may call: see [agents and tools](agents.md)."""
    max_steps: int = Field(default=20, ge=1)
    """Maximum number of model calls in one turn, for models with tools."""
    tokenizer: str | None = Field(default=None, min_length=1)
    """Tokenizer of the model, for [likelihoods](likelihood.md) from servers that do not tokenize: a `tokenizer.json`
    or its folder, relative to the eval file, or a name on the Hugging Face hub. Needs `pip install tokenizers`."""
    likelihood: LikelihoodBlock = absent_block()
    """How to ask for [likelihoods](likelihood.md), in evals with `continuations`."""

    sees_row: ClassVar[bool] = False

    @model_validator(mode="after")
    def _tools_need_chat(self) -> Self:
        if self.tools and self.api == "completions":
            raise ValueError("a model cannot call tools with `api: completions`")
        if self.batch is not None and self.stream:
            raise ValueError("replies of a batch cannot be streamed: remove `stream` or `batch`")
        if self.json_schema is not None and self.api == "completions":
            raise ValueError("a model cannot be asked for JSON by a `schema` with `api: completions`")
        return self

    @property
    def counts_calls(self) -> bool:
        """True if a reply may take several calls."""
        return bool(self.tools)

    @property
    def may_pause(self) -> bool:
        """True if the provider runs tools of its own, between which a model may pause."""
        return not self.params.keys().isdisjoint(("tools", "mcp_servers"))

    @property
    def takes_files(self) -> bool:
        """True unless the model completes plain text."""
        return self.api != "completions"

    @property
    def label(self) -> str:
        """The model's name."""
        return self.model


class HttpTarget(TargetBlock):
    """A workflow with an HTTP API: JSON is posted, and the answer is picked from the reply."""

    http: str = Field(pattern=r"^(https?://|\$\{\w+\})")
    """URL to post to. May name environment variables as `${NAME}`."""
    request: dict[str, Any]
    """Body of the request. Strings in it are templates with `prompt`, `messages`, `trial` and the row's fields. A text
    that is a single `{{ expression }}` keeps the type of its value."""
    response: str = "@"
    """[JMESPath](https://jmespath.org) of the answer in the reply, or in each event of a stream. Default: the whole
    reply."""
    stream_end: str | None = Field(default=None, min_length=1)
    """Data or name of the event that ends a stream. `close` accepts the end of the connection. Default: `[DONE]`, or
    the last chunk of the transfer."""
    headers: dict[str, str] = {}
    """HTTP headers. Values may name environment variables, as in `"Bearer ${TOKEN}"`."""
    version: str | None = None
    """Change this when the workflow answers differently from now on."""

    templates: ClassVar[tuple[str, ...]] = ("request",)
    sees_row: ClassVar[bool] = False

    @property
    def reports_cost(self) -> bool:
        """False: the models that the workflow uses are unknown."""
        return False

    @property
    def label(self) -> str:
        """The URL without credentials and query."""
        return bare_url(self.http)


class StateBlock(Block):
    """Functions that save an agent's own state after each turn, and restore it after a crash."""

    save: FunctionName
    """Function called after each turn with `context`. It returns the state as JSON."""
    restore: FunctionName
    """Function called with `state` and `context` before a turn, when the previous turn failed or ran in another
    process."""


class PythonTarget(TargetBlock):
    """A Python function, `file.py:function`, relative to the eval file."""

    python: FunctionName
    """Function, class or object to call, as `file.py:name` relative to the eval file, or as `package.module:name`."""
    params: dict[str, Any] = {}
    """Values passed to the function as `context.params`."""
    version: str | None = None
    """Change this when the function answers differently for a reason its source does not show."""
    base_url: BaseUrl | None = None
    """Where `context.model` and `context.base_url` send requests: a URL or a list of URLs. Default: the model's
    provider; for requests to `context.base_url`, the provider whose API they use."""
    api_key_env: str | None = None
    """Environment variable that holds the API key. Default: the provider's, such as `OPENAI_API_KEY`."""
    ignore: list[str] = []
    """Fields of requests to `context.base_url` that differ on every start, such as `metadata` or `input[].id`. A
    recorded call is found without them."""
    tools: list[ToolBlock] = []
    """Tools that `context.tool` can call by name."""
    state: StateBlock | None = None
    """Functions that save and restore the agent's own memory between turns."""

    multi_call: ClassVar[bool] = True
    works_alone: ClassVar[bool] = True

    @property
    def takes_files(self) -> bool:
        """True: `context.read` returns their content."""
        return True

    @property
    def label(self) -> str:
        """The file's name and the function, however the path is spelled."""
        return Path(self.python).name.removeprefix(SESSION)


class CommandTarget(TargetBlock):
    """A program; its standard output is the answer."""

    command: list[str] = Field(min_length=1)
    """Program and arguments. Each is a template with `prompt` and the row's fields."""
    stdin: str | None = None
    """Template of the text the program reads from standard input. Default: nothing."""
    env: str | None = None
    """Expression over the row that returns further environment variables, as a mapping of names to texts."""
    working_directory: str | None = None
    """Template of the folder in the workspace to start in. Default: the workspace itself."""
    path: list[str] = []
    """Folders of the workspace to search for programs first."""
    version: str | None = None
    """Change this when the program answers differently for a reason its files do not show."""
    proxy: bool = True
    """Set `OPENAI_BASE_URL`, `ANTHROPIC_BASE_URL` and `GOOGLE_GEMINI_BASE_URL` for the program, so that its model calls
    are recorded, counted and replayed."""
    base_url: BaseUrl | None = None
    """Where the proxy sends the program's model calls: a URL or a list of URLs. Default: the provider whose API the
    program uses, at `$OPENAI_BASE_URL`, `$ANTHROPIC_BASE_URL` or `$GOOGLE_GEMINI_BASE_URL` if they are set."""
    api_key_env: str | None = None
    """Environment variable that holds the API key. The proxy sends it; the program needs none. Default:
    `OPENAI_API_KEY`, `ANTHROPIC_API_KEY` or `GEMINI_API_KEY`, by the API."""
    ignore: list[str] = []
    """Fields of the program's requests that differ on every start, such as `metadata` or `input[].id`. A recorded call
    is found without them."""

    templates: ClassVar[tuple[str, ...]] = ("command", "stdin", "working_directory")
    expressions: ClassVar[tuple[str, ...]] = ("env",)
    sees_row: ClassVar[bool] = False
    multi_call: ClassVar[bool] = True
    works_alone: ClassVar[bool] = True
    has_exit_code: ClassVar[bool] = True

    @property
    def reports_cost(self) -> bool:
        """True if the program's model calls go through the proxy."""
        return self.proxy

    @property
    def counts_calls(self) -> bool:
        """True if the program's model calls go through the proxy."""
        return self.proxy

    @property
    def command_line(self) -> tuple[str, ...]:
        """The program and its arguments."""
        return tuple(self.command)

    @property
    def label(self) -> str:
        """The program's name."""
        return Path(self.command[0]).name


class AgentTarget(TargetBlock):
    """An agent that is installed as a program: Claude Code, or Codex."""

    agent: Literal["claude-code", "codex"]
    """The agent: `claude-code` or `codex`. It runs in the trial's workspace, without asking for permissions."""
    model: str = Field(min_length=1)
    """Name of the model, as the agent knows it."""
    args: list[str] = []
    """Further arguments of the program. Each is a template with `prompt` and the row's fields."""
    program: str | None = None
    """The program, as a path relative to the eval file, or as a name on the PATH. Default: `claude` or `codex`."""
    version: str | None = None
    """The version of the agent, which is part of the key. Another one that is installed is refused. Default: the one
    that is installed."""
    base_url: BaseUrl | None = None
    """Where the agent's model calls are sent: a URL or a list of URLs. Default: `$ANTHROPIC_BASE_URL` or
    `$OPENAI_BASE_URL`, else the provider."""
    api_key_env: str | None = None
    """Environment variable that holds the API key. Default: `ANTHROPIC_API_KEY` or `OPENAI_API_KEY`."""
    ignore: list[str] = []
    """Fields of the agent's requests that differ on every start, in addition to the known ones."""

    templates: ClassVar[tuple[str, ...]] = ("args",)
    sees_row: ClassVar[bool] = False
    multi_call: ClassVar[bool] = True
    works_alone: ClassVar[bool] = True
    has_exit_code: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """The agent and its model."""
        return f"{self.agent}-{self.model}"


TARGETS = Registry(
    "holdfast.targets",
    "target type",
    {
        "model": "holdfast.targets.model:Model",
        "python": "holdfast.targets.python:PythonFunction",
        "http": "holdfast.targets.http:HttpWorkflow",
        "command": "holdfast.targets.command:Command",
        "agent": "holdfast.targets.agents:AgentProgram",
    },
)
"""Every kind of target: a class that owns its schema. Built-in kinds are named by a key, plug-ins by `type`."""


def read_target(data: Any, document: Document, problems: list[Problem], key: str = "target") -> TargetBlock | None:
    """Read a target's block; adds to `problems`."""
    if not isinstance(data, dict):
        return None  # the schema of the whole file reports it
    kind = target_kind(data)
    if kind is None:
        named = [name for name in (*TARGETS, "type") if name in data]
        suggestions = filter(None, (suggest(str(name), TARGETS) for name in data))
        end = f", not {' and '.join(named)}" if named else next(suggestions, "")
        message = f"needs exactly one of {', '.join(TARGETS)}, or `type: NAME` of a plug-in{end}"
        problems.append(Problem(document.where((key,)), message))
        return None
    try:
        schema = schema_of(kind)
    except ValueError as error:
        problems.append(Problem(document.where((key, "type")), str(error)))
        return None
    fields = {name: value for name, value in data.items() if name != "type"}
    block = cast("TargetBlock | None", validate_block(schema, fields, (key,), document, problems))
    return None if block is None else block.with_kind(kind)


def target_kind(data: dict[str, Any]) -> str | None:
    """Return the kind that a target's block names; None unless it names exactly one.

    With `type`, all other keys belong to the plug-in, whatever their names.
    """
    if "type" in data and data["type"] not in set(TARGETS):
        return str(data["type"])
    kinds = [kind for kind in TARGETS if kind in data]
    if "agent" in kinds:
        kinds = [kind for kind in kinds if kind != "model"]  # agents have a key of this name, too
    return kinds[0] if len(kinds) == 1 and "type" not in data else None


def schema_of(kind: str) -> type[TargetBlock]:
    """Return the schema of a kind of target; raise ValueError, worded for users, if there is none."""
    schema = getattr(TARGETS.load(kind), "schema", None)
    if not (isinstance(schema, type) and issubclass(schema, TargetBlock)):
        message = f"the class of the target type {kind!r} has no `schema` that is a holdfast.TargetBlock"
        raise ValueError(message)  # noqa: TRY004 - users see it as a wrong value in their file
    return schema
