"""Models of the eval file, one per block. Unknown keys are errors."""

import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from holdfast.spec.redact import bare_url
from holdfast.spec.regex import compile_regex

SCHEMA_VERSION = "1.4"
"""Version of the eval file format, MAJOR.MINOR. Part of no key. docs/versions.md lists the changes."""

_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?\s*(?:(\d+(?:\.\d+)?)m(?:in)?)?\s*(?:(\d+(?:\.\d+)?)s)?")


def parse_duration(value: Any) -> Any:
    """Seconds from `90`, `90s`, `5m`, `2h` or `1h30m`."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    match = _DURATION.fullmatch(text)
    if not text or match is None:
        raise ValueError("a duration such as 90, 90s, 5m or 1h30m")
    hours, minutes, seconds = (float(group or 0) for group in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _inside(path: str) -> str:
    """A path in its plainest form, or a ValueError where it would lead out of its folder."""
    plain = posixpath.normpath(path)
    if not path.strip() or plain.startswith(("/", "~")) or plain.split("/")[0] in ("..", "."):
        raise ValueError(f"{path!r} does not name a file inside the folder it is relative to")
    return plain


def _urls(base_url: str | list[str]) -> str | list[str]:
    for url in urls_of(base_url):
        if not re.match(r"https?://[^/\s]+|\$\{\w+\}", url):
            raise ValueError(f"{url!r} is not a URL: it must start with http:// or https:// (or ${{NAME}})")
    if not base_url:
        raise ValueError("needs at least one URL")
    return base_url


def urls_of(base_url: str | list[str] | None) -> list[str]:
    """The URLs of a `base_url`: of one, of a list of them, or of none."""
    return [base_url] if isinstance(base_url, str) else list(dict.fromkeys(base_url or []))


def one_or_all(urls: Sequence[str]) -> str | list[str] | None:
    """URLs as a `base_url` has them: one alone as a text."""
    return list(urls) if len(urls) > 1 else next(iter(urls), None)


def refuse_secret_paths(override: dict[str, Any]) -> None:
    """Raise ValueError where a value laid over another tool's configuration is a secret."""
    for path in override:
        if re.search(r"(^|_)(api_?key|access_key|secret|secret_key|password|token)$", path.rpartition(".")[2].lower()):
            raise ValueError(f"keys are not written into files: let {path} name an environment variable in the file")


def _compiles(pattern: str) -> str:
    compile_regex(pattern)
    return pattern


def _compiles_loosely(pattern: str) -> str:
    compile_regex(pattern, ignore_case=True)
    return pattern


def _bare(formula: str) -> str:
    bare = formula.strip().removeprefix("{{").removesuffix("}}").strip()
    if not bare:
        raise ValueError("is an empty expression")
    return bare


def _names_function(reference: str) -> str:
    if not re.fullmatch(r"([^:]+\.py|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):[A-Za-z_][\w.]*", reference):
        raise ValueError(f"{reference!r} does not name a function: write FILE.py:NAME or PACKAGE.MODULE:NAME")
    return reference


Seconds = Annotated[float, BeforeValidator(parse_duration), Field(gt=0)]
Strings = Annotated[list[str], BeforeValidator(_as_list)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_list)]
"""texts, none of them empty; a single text stands for a list of one"""
BaseUrl = Annotated[str | list[str], AfterValidator(_urls)]
"""where a model is served: one URL, or several, of which each request goes to the least busy one"""

Api = Literal["chat", "responses", "messages", "gemini", "completions"]
"""an API of models"""

ReasoningHistory = Literal["auto", "all", "last", "none"]
"""which of its earlier reasoning a model gets back"""
Formula = Annotated[str, AfterValidator(_bare)]
"""an expression over the row, also where it is written in braces like a template"""
FunctionName = Annotated[str, AfterValidator(_names_function)]
"""a Python function: `file.py:name`, relative to the eval file, or `package.module:name`"""
EvalPath = Annotated[str, AfterValidator(_inside)]
"""a file in the eval's folder"""
WorkspacePath = EvalPath
"""a file in a trial's workspace"""
Pattern = Annotated[str, Field(min_length=1), AfterValidator(_compiles)]
"""a regular expression"""
LoosePattern = Annotated[str, Field(min_length=1), AfterValidator(_compiles_loosely)]
"""a regular expression that ignores case"""

_DISABLE_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


class Block(BaseModel):
    """A block of the eval file: fixed keys, values that do not change after reading."""

    # So that starting is fast, a model is built only when it is used, and the modules that every eval needs do not
    # postpone annotations: reading them back out of strings takes pydantic a third of its time.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), defer_build=True)

    templates: ClassVar[tuple[str, ...]] = ()
    """fields that hold templates over the row"""

    @classmethod
    def model_rebuild(cls, *, _parent_namespace_depth: int = 2, **options: Any) -> bool | None:
        """Build the model, without pydantic's plug-ins: to find them it reads the metadata of all installed packages.

        Models of the user's own code, in this process too, still have them.
        """
        disabled = os.environ.get(_DISABLE_PLUGINS)
        os.environ[_DISABLE_PLUGINS] = "1"
        try:
            return super().model_rebuild(_parent_namespace_depth=_parent_namespace_depth + 1, **options)
        finally:
            if disabled is None:
                del os.environ[_DISABLE_PLUGINS]
            else:
                os.environ[_DISABLE_PLUGINS] = disabled


class DatasetBlock(Block):
    """The dataset: where the samples come from."""

    path: Annotated[Strings, Field(min_length=1)]
    """File, glob or list of them, relative to the eval file, or `hf://owner/name`. Reads `.jsonl`, `.json`, `.csv`,
    `.tsv` and `.parquet`, also compressed as `.gz`, `.zst`, `.bz2` or `.xz`."""
    format: Literal["jsonl", "json", "csv", "parquet"] | None = None
    """Format of the files. Default: inferred from the file name."""
    id: str | None = None
    """Field that names a sample. Default: `id`, or a digest of the row where there is no such field."""
    limit: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep only the first N rows, after `where`, `ids`, `tags`, `shuffle` and `offset`. A number below 1 is a share of
    the rows, rounded up."""
    limit_by: str | None = None
    """Field whose values are limited separately: with `limit: 5` and `limit_by: subject`, the first five rows of each
    subject are kept. `offset` skips rows of each value, too."""
    offset: int = Field(default=0, ge=0)
    """Skip the first N rows, after `where`, `ids`, `tags` and `shuffle`."""
    shuffle: int | None = None
    """Seed of a random order. The order depends only on the seed and the rows, so a new row never reorders the
    others. Shuffled rows are held in memory."""
    where: str | None = None
    """Expression over the row's fields, such as `level == "hard" and steps > 3`. Rows for which it is false are left
    out."""
    ids: Strings = []
    """Globs. Keep only rows whose id or `name` matches one of them."""
    tags: Strings = []
    """Globs. Keep only rows with at least one matching entry in their field `tags`."""
    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    """CSV only: the character between values, such as `";"`. Default: a comma, or a tab for `.tsv`."""
    encoding: str = "utf-8"
    """Encoding of text files, such as `latin-1` or `cp1252`."""
    field: str | None = None
    """JSON only: the key that holds the list of rows, with dots for nested keys, as in `data.rows`."""
    split: str = "test"
    """Hugging Face only: the split to read."""
    subset: str | None = None
    """Hugging Face only: the name of the configuration."""
    revision: str | None = None
    """Hugging Face only: branch, tag or commit. The commit is recorded in the manifest."""


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
    """How a recorded call is handled after a crash: answered from the record (`record`), the same but never repeated
    if it was cut off (`never`, for side effects), or run again to restore the tool's state (`again`)."""
    version: str | None = None
    """Change this when the tool answers differently from now on."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if [self.python, self.mcp, self.scripted].count(None) != 2:
            raise ValueError("must be either a `python` function, an `mcp` server or a `scripted` tool")
        if self.only and self.mcp is None:
            raise ValueError("`only` picks among the tools of an mcp server")
        return self


class StateBlock(Block):
    """Functions that save an agent's own state after each turn, and restore it after a crash."""

    save: FunctionName
    """Function called after each turn with `context`. It returns the state as JSON."""
    restore: FunctionName
    """Function called with `state` and `context` before a turn, when the previous turn failed or ran in another
    process."""


class TargetBlock(Block):
    """The base of every target's keys."""

    multi_call: ClassVar[bool] = False
    """a reply may take several model or tool calls, which are recorded one by one"""

    _kind: str = PrivateAttr(default="")

    @property
    def kind(self) -> str:
        """The kind of target: the key that built-in kinds are written with, or a plug-in's name."""
        return self._kind

    def with_kind(self, kind: str) -> Self:
        """Set the kind, once the block is read."""
        self._kind = kind
        return self

    @property
    def reports_cost(self) -> bool:
        """False where neither replies nor the models' prices tell what a reply costs."""
        return True

    @property
    def takes_files(self) -> bool:
        """True where messages may hold images, audio and other files."""
        return False

    @property
    def label(self) -> str:
        """The target's name in tables and directory names."""
        return self.kind


class LikelihoodBlock(Block):
    """How a model is asked for likelihoods, in evals with `continuations`."""

    form: Literal["auto", "echo", "sglang", "llama.cpp"] = "auto"
    """Request to send: `echo` is that of vLLM, NIM and other servers whose completions return the log-probabilities
    of the prompt, `sglang` and `llama.cpp` are those servers' own. `auto` finds out which one the server answers."""
    truncate: Literal["never", "left"] = "never"
    """Treatment of a row that is longer than the model's context: `never` cut it, so that its trial is an error,
    or cut it on the `left`, as lm-eval does."""
    max_length: int | None = Field(default=None, ge=2)
    """Maximum number of tokens of context and continuation together. Default: what the server says."""
    prefix: int | str | None = None
    """Token before a continuation whose context is empty, by its id or its text. Default: the tokenizer's BOS, else
    its EOS."""


class BatchBlock(Block):
    """How requests are made in batches, which providers answer within a day at a lower price."""

    max_wait: Seconds | None = None
    """Longest time to wait for a batch, such as `6h`. It is then cancelled, and keeps what it has answered. Default: as
    long as the provider takes, which is at most a day."""
    then: Literal["batch", "live"] = "batch"
    """How to ask again for what a batch has not answered in time: in the next `batch`, or `live`, at the normal
    price."""
    size: int | None = Field(default=None, ge=1)
    """Maximum number of requests in a batch. Default: that of the provider, 50,000 or 100,000."""


def _as_block(value: Any) -> Any:
    """Return the block that `true` stands for."""
    return ({} if value else None) if isinstance(value, bool) else value


InBatches = Annotated[BatchBlock | None, BeforeValidator(_as_block)]


class ThoughtsBlock(Block):
    """`target.strip_reasoning`: how reasoning is marked in the text of replies."""

    start: str = "<think>"
    """Text with which reasoning begins. It may be missing, as where the prompt ends with it."""
    end: str = Field(default="</think>", min_length=1)
    """Text with which reasoning ends; the answer is what follows the last of them."""
    unfinished: Literal["keep", "drop"] = "keep"
    """What becomes of a reply without the end: it is kept as it is, or all of it counts as reasoning (`drop`)."""


StripReasoning = Annotated[ThoughtsBlock | None, BeforeValidator(_as_block)]
"""`true`, `false` or the settings of batches"""


class ModelTarget(TargetBlock):
    """A model behind an API, or the embedded one."""

    model: str = Field(min_length=1)
    """Name of the model, with its provider's prefix where no `base_url` is given: see [models](models.md).
    `local/smollm2-135m` is the embedded model, which Holdfast starts on this machine and stops with the run."""
    base_url: BaseUrl | None = None
    """URL of the API, or a list of URLs that serve the same model. `${NAME}` takes one URL, or several separated by
    commas, from the environment. Default: that of the model's provider; for names without a provider
    `$OPENAI_BASE_URL`, else OpenAI's API."""
    api_key_env: str | None = None
    """Environment variable that holds the API key. Keys are never written into files. Default: the provider's usual
    one; `OPENAI_API_KEY` for names without a provider."""
    api: Api | None = None
    """Which API to call: `chat`, `responses`, `messages`, `gemini` or `completions`. Default: the provider's; `chat`
    for names without a provider."""
    params: dict[str, Any] = {}
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
    """Which of its earlier reasoning the model gets back: what its API asks for (`auto`), `all`, that of the current
    turn (`last`), or `none`. Part of the key."""
    strip_reasoning: StripReasoning = None
    """Take [reasoning in the text](models.md#reasoning) of replies, such as `<think>…</think>`, out of it: `true`, or a
    mapping. Part of the key."""
    json_schema: dict[str, Any] | str | None = Field(default=None, alias="schema")
    """JSON Schema of the replies, which the model is asked to follow: a mapping, or a `.json` file in the eval file's
    folder. Part of the key. The grader [`json_schema`](graders-text.md#json_schema) checks what came of it."""
    identity: Literal["name", "url"] = "name"
    """What identifies the model: its `name` alone, or its name together with the `url`, so that another `base_url`
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
    likelihood: LikelihoodBlock = LikelihoodBlock()
    """How to ask for [likelihoods](likelihood.md), in evals with `continuations`."""

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
    def takes_files(self) -> bool:
        """True unless the model completes plain text."""
        return self.api != "completions"

    @property
    def label(self) -> str:
        """The model's name."""
        return self.model


def is_embedded(model: str) -> bool:
    """Return True for the name of a model that runs on this machine, inside Holdfast."""
    return model.startswith("local/")


SESSION = "<session>.py:"
"""stands before the name of a function that was typed into a notebook or an interpreter, and is in no file"""


class PythonTarget(TargetBlock):
    """A Python function, `file.py:function`, relative to the eval file."""

    python: FunctionName
    """Function, class or object to call, as `file.py:name` relative to the eval file, or as `package.module:name`."""
    params: dict[str, Any] = {}
    """Values passed to the function as `context.params`."""
    version: str | None = None
    """Change this when the function answers differently for a reason its source does not show."""
    base_url: BaseUrl | None = None
    """Where `context.model` and `context.base_url` send requests: a URL or a list of URLs. Default: that of the model's
    provider; for requests to `context.base_url`, the provider whose API they use."""
    api_key_env: str | None = None
    """Environment variable that holds the API key. Default: that of the provider, such as `OPENAI_API_KEY`."""
    ignore: list[str] = []
    """Fields of requests to `context.base_url` that differ on every start, such as `metadata` or `input[].id`. A
    recorded call is found without them."""
    tools: list[ToolBlock] = []
    """Tools that `context.tool` can call by name."""
    state: StateBlock | None = None
    """Functions that save and restore the agent's own memory between turns."""

    multi_call: ClassVar[bool] = True

    @property
    def takes_files(self) -> bool:
        """True: `context.read` returns their content."""
        return True

    @property
    def label(self) -> str:
        """The file's name and the function, however the path is spelled."""
        return Path(self.python).name.removeprefix(SESSION)


class HttpTarget(TargetBlock):
    """A workflow behind HTTP: JSON is posted, the answer picked from what comes back."""

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

    @property
    def reports_cost(self) -> bool:
        """False: nothing is known of the models behind the URL."""
        return False

    @property
    def label(self) -> str:
        """The URL without credentials and query."""
        return bare_url(self.http)


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
    program uses, at `$OPENAI_BASE_URL`, `$ANTHROPIC_BASE_URL` or `$GOOGLE_GEMINI_BASE_URL` where they are set."""
    api_key_env: str | None = None
    """Environment variable that holds the API key. The proxy sends it; the program needs none. Default:
    `OPENAI_API_KEY`, `ANTHROPIC_API_KEY` or `GEMINI_API_KEY`, by the API."""
    ignore: list[str] = []
    """Fields of the program's requests that differ on every start, such as `metadata` or `input[].id`. A recorded call
    is found without them."""

    templates: ClassVar[tuple[str, ...]] = ("command", "stdin", "working_directory")
    multi_call: ClassVar[bool] = True

    @property
    def reports_cost(self) -> bool:
        """True if the program's model calls go through the proxy."""
        return self.proxy

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
    """Fields of the agent's requests that differ on every start, beside those that are known to."""

    templates: ClassVar[tuple[str, ...]] = ("args",)
    multi_call: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """The agent and its model."""
        return f"{self.agent}-{self.model}"


class Limits(Block):
    """Concurrency, timeouts, retries and budgets. Never part of a key."""

    concurrency: int | Literal["auto"] | None = None
    """Maximum number of requests in flight, or `auto` to raise it while the server keeps up. A rate limit lowers it
    for a while. Default: `auto` for a model on the internet, 64 for one in your own network, for several servers and
    for other targets, 4 for the embedded model; for likelihoods 16, or 1 for the embedded model."""
    turn_timeout: Seconds = 120
    """Time limit for one reply of the target. Default for the embedded model: 1 hour."""
    trial_timeout: Seconds = 600
    """Time limit for a whole trial with its retries. Waiting for a rate limit does not count. Default for the
    embedded model: 6 hours."""
    retries: int = Field(default=5, ge=0)
    """How many retries each turn has, per process. Waiting for a rate limit uses none; an attempt that got further than
    the last starts the count again."""
    max_cost: float | None = Field(default=None, gt=0)
    """Budget of the whole run in US dollars. Once it is spent, no more trials start."""
    token_budget: int | None = Field(default=None, gt=0)
    """Budget of the whole run in tokens. The length of a single reply is `target.params.max_tokens`."""
    max_time: Seconds | None = None
    """Time budget of the whole run. Once it is used up, no more trials start."""

    @model_validator(mode="after")
    def _positive(self) -> Self:
        if isinstance(self.concurrency, int) and self.concurrency < 1:
            raise ValueError("concurrency must be at least 1, or auto")
        return self

    def for_models(self, models: Iterable[str]) -> Self:
        """Return limits with time for a model that runs on this machine, where the file names none.

        Such a model is as fast as the machine is idle. Its requests share the cores, so a time-out that is too short
        throws away all of them at once, and they begin again.
        """
        if not any(map(is_embedded, models)):
            return self
        longer = {"turn_timeout": 3600, "trial_timeout": 6 * 3600}
        return self.model_copy(update={key: value for key, value in longer.items() if key not in self.model_fields_set})


class Price(Block):
    """US dollars per million tokens."""

    input: float = Field(ge=0)
    """US dollars per million input tokens."""
    output: float = Field(ge=0)
    """US dollars per million output tokens."""
    cache_read: float | None = Field(default=None, ge=0)
    """US dollars per million input tokens that are read from the provider's cache. Default: those of `input`."""
    cache_write: float | None = Field(default=None, ge=0)
    """US dollars per million input tokens that are written to it. Default: those of `input`."""


FILE_KINDS = ("image", "audio", "file")
"""kinds of files in a message"""


class PartBlock(Block):
    """A part of a message: a text or a file. Paths are relative to the eval file's folder, or to the dataset's."""

    text: str | None = None
    """Template of a text."""
    image: str | None = None
    """Template of the path of an image, or of a `data:` URL."""
    audio: str | None = None
    """Template of the path of a recording, or of a `data:` URL."""
    file: str | None = None
    """Template of the path of another file, such as a PDF, or of a `data:` URL."""

    @property
    def named(self) -> tuple[str, str]:
        """The kind of the part, and its template."""
        return next((kind, value) for kind in ("text", *FILE_KINDS) if (value := getattr(self, kind)) is not None)

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if [self.text, self.image, self.audio, self.file].count(None) != 3:
            raise ValueError("must be one of `text`, `image`, `audio` and `file`")
        return self


class MessageBlock(Block):
    """A message of the conversation up to the target's first reply."""

    role: Literal["system", "user", "assistant"]
    """Who says it. The last message is the user's."""
    content: str | list[str | PartBlock]
    """Template of the text, or a list of texts and files: see [messages](conversations.md#messages-and-files)."""

    def templated(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield the templates of the message with their locations in it."""
        if isinstance(self.content, str):
            yield ("content",), self.content
            return
        for number, part in enumerate(self.content):
            if isinstance(part, str):
                yield ("content", number), part
            else:
                kind, source = part.named
                yield ("content", number, kind), source


class ResponderBlock(Block):
    """A simulated user: it replies to the target, stops, or abstains. A model with instructions, or a function."""

    model: str | None = None
    """Model that plays the user. Default: the target's model and endpoint."""
    python: FunctionName | None = None
    """Function that plays the user instead of a model, as `file.py:function` or `package.module:function`. It may
    take `messages`, `sample` and `turn`, and returns the next message, or None to stop."""
    instructions: str | None = None
    """Who the user is and what they want. A template over the row."""
    max_followups: Annotated[int, Field(ge=1)] | str
    """Maximum number of messages after the prompt, or an expression over the row, with 0 for rows without a
    simulated user."""
    stop_when: str | None = None
    """Expression over `output`, `turn` and the row's fields. The conversation ends as soon as it is true."""
    base_url: BaseUrl | None = None
    """URL of the model that plays the user, or a list of URLs. Default: the target's."""
    api_key_env: str | None = None
    """Environment variable that holds the API key. Default: the target's."""
    api: Api | None = None
    """API of that model, as for the target. Default: the target's, or that of the model's provider."""
    params: dict[str, Any] = {}
    """Parameters sent with each request."""
    version: str | None = None
    """Change this when the simulated user behaves differently from now on."""

    templates: ClassVar[tuple[str, ...]] = ("instructions",)

    @model_validator(mode="after")
    def _somebody(self) -> Self:
        if self.python is not None and (self.model is not None or self.instructions is not None):
            raise ValueError("must be either a function (python) or a model with instructions, not both")
        if self.python is None and not self.instructions:
            raise ValueError("needs instructions for the model that plays the user, or a python function")
        return self


class CheckpointBlock(Block):
    """Graders that run after a turn and may end the conversation."""

    after_turn: int = Field(ge=1)
    """Number of the turn to check, counted from 1."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What a failed checkpoint does: `continue` the conversation, or `stop` it with score 0. The trial fails in
    either case."""
    where: str | None = None
    """Expression over the row's fields. Where it is false, the checkpoint does not apply."""
    graders: list[dict[str, Any]] = Field(min_length=1)
    """Graders that check the conversation up to this turn."""


class WorkspaceBlock(Block):
    """A folder for each trial. Agents and tools work in it, graders look at it, and it is kept after each turn."""

    folder: str | None = None
    """Folder to copy into each trial's workspace, relative to the eval file."""
    files: str | None = None
    """Expression over the row that returns further files, as a mapping of paths to contents: a text, `{base64: …}`,
    or `{text: …, executable: true}`."""


class HookBlock(Block):
    """A program to run before or after a run or a trial."""

    command: str | Annotated[list[str], Field(min_length=1)]
    """Program and arguments, as a list or as a text that is split at blanks. No shell is involved."""
    working_directory: str = "."
    """Folder to start in, relative to the eval file."""
    exit_codes: list[int] = [0]
    """Exit codes that count as success."""
    error_on_fail: bool = False
    """Let a failing `before_run` stop the run, and a failing `before_task` fail the trial. Otherwise failures are
    only reported."""

    @property
    def arguments(self) -> list[str]:
        """The program and its arguments."""
        return self.command.split() if isinstance(self.command, str) else list(self.command)

    @model_validator(mode="after")
    def _some_program(self) -> Self:
        if not self.arguments:
            raise ValueError("a hook's command is empty")
        return self


class HooksBlock(Block):
    """Programs around a run and around its trials. Never part of a key."""

    before_run: list[HookBlock] = []
    """Programs to run when a process starts generating."""
    after_run: list[HookBlock] = []
    """Programs to run when that process has finished generating."""
    before_task: list[HookBlock] = []
    """Programs to run before each trial."""
    after_task: list[HookBlock] = []
    """Programs to run after each trial, also after a failed one."""


class OutputBlock(Block):
    """Copies of the results for other tools. Never part of a key."""

    nat: dict[str, Any] | None = None
    """Write NeMo Agent Toolkit's `workflow_output.jsonl` and related files: see
    [exports](exports.md#nemo-agent-toolkit)."""
    export: list[str | dict[str, Any]] = []
    """Destinations of a finished run, each a name such as `junit` or a mapping such as `{to: wandb, project: x}`:
    see [exports](exports.md)."""


class BenchmarkBlock(Block):
    """A benchmark by name, instead of a dataset, a prompt and graders."""

    name: str = Field(min_length=1)
    """Name of the benchmark, as `holdfast tasks ls` lists it; `lm-eval/NAME` for lm-eval's own settings."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Number of examples before each question. Default: the benchmark's."""
    seed: int = 1234
    """Seed of the choice of examples."""
    chat: bool | None = None
    """Ask through a chat API, with the examples as turns of a conversation. Default: as the benchmark is defined, or
    as `target.api` says."""
    data: str | None = None
    """Folder with the datasets in the layout of the Hugging Face hub, or with the one dataset, relative to the eval
    file. Default: `$HOLDFAST_DATA`, else the hub."""
    revision: str | None = None
    """Commit, tag or branch of the dataset on the hub. Default: the commit that Holdfast pins, else the newest."""
    task: str | None = None
    """Task of lm-eval to ask instead of the name's, with the name's settings."""


class LiveExport(Block):
    """A copy of the results that is written while the run is in progress."""

    dir: str
    """Folder for the files, relative to the eval file."""


class ExportBlock(Block):
    """A destination of a finished run."""

    to: str
    """Format or service."""


class FileExport(ExportBlock):
    """A destination that is a folder of files."""

    dir: str | None = Field(default=None, min_length=1)
    """Folder for the files, relative to the eval file. Default: `export/FORMAT` in the run directory."""


class PluginExport(FileExport):
    """An exporter of an installed package, whose other options are passed to its function."""

    model_config = ConfigDict(extra="allow")


class TrackerExport(ExportBlock):
    """A destination that is a service."""

    description: str | None = None
    """Description of the run."""
    extra_metadata: dict[str, Any] = {}
    """Further values to record with the configuration."""


class WandbExport(TrackerExport):
    """Weights & Biases."""

    project: str | None = None
    """Project. Default: `$WANDB_PROJECT`, else what `wandb init` set, else `holdfast`."""
    entity: str | None = None
    """User or team. Default: `$WANDB_ENTITY`, else that of the login."""
    name: str | None = None
    """Display name of the run. Default: the names of the eval and the target."""
    group: str | None = None
    """Group of the run."""
    job_type: str = "evaluation"
    """Job type of the run."""
    tags: Strings = []
    """Tags of the run."""
    mode: Literal["online", "offline"] | None = None
    """Send the run (`online`) or write it to disk (`offline`). Default: `$WANDB_MODE`, else online if there is a
    login and the server answers."""


class MlflowExport(TrackerExport):
    """MLflow."""

    tracking_uri: str | None = None
    """Address of the server. Default: `$MLFLOW_TRACKING_URI`."""
    experiment_name: str | None = None
    """Experiment. Default: `$MLFLOW_EXPERIMENT_NAME`, else the eval's name."""
    run_name: str | None = None
    """Display name of the run. Default: the names of the eval and the target."""
    tags: dict[str, str | int | float | bool] = {}
    """Tags of the run."""

    @model_validator(mode="after")
    def _no_password(self) -> Self:
        if re.search(r"//[^/@]+@", self.tracking_uri or ""):
            raise ValueError(
                "passwords are not written into files: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return self


class EvalFields(Block):
    """The top of an eval file; target and graders are read by their own models."""

    schemaVersion: str = SCHEMA_VERSION  # noqa: N815 - the key as users write it
    """Version of the file format, MAJOR.MINOR in quotes: see [versions](versions.md)."""
    name: str = Field(min_length=1, max_length=120)
    """Name of the eval, and of the folder of its runs."""
    metadata: dict[str, Any] = {}
    """Any mapping to record with the run."""
    dataset: DatasetBlock | None = None
    """Where the samples come from: see [`dataset`](#dataset)."""
    samples: list[dict[str, Any]] | None = None
    """The samples themselves, as a list of mappings, instead of `dataset`."""
    target: dict[str, Any]
    """What to evaluate: see [targets](targets.md)."""
    system: str | None = None
    """Template of the system message."""
    history: Formula | None = None
    """Expression over the row that returns messages, each with a `role` and a `content`, to place between the system
    message and the prompt, such as worked examples."""
    prompt: str | None = Field(default=None, min_length=1)
    """Template of the first user message."""
    messages: Annotated[list[MessageBlock], Field(min_length=1)] | Formula | None = None
    """Messages up to the target's first reply, instead of `prompt`: a list of mappings with `role` and `content`, or an
    expression over the row that returns such a list: see [messages and files](conversations.md#messages-and-files)."""
    continuations: Formula | None = None
    """Expression over the row that returns texts, or mappings with a `text` and a `context` of its own, or with a
    `text` and `rolling: true`. Instead of replying, the model says how likely each text is after the prompt: see
    [likelihoods](likelihood.md)."""
    follow_ups: list[str] | str = []
    """Templates of further user messages, or an expression over the row that returns a list of them: see
    [conversations](conversations.md)."""
    responder: ResponderBlock | None = None
    """Simulated user that continues the conversation: see [conversations](conversations.md#a-simulated-user)."""
    workspace: WorkspaceBlock | None = None
    """Folder for each trial: see [workspaces](agents.md#workspaces)."""
    checkpoints: list[CheckpointBlock] = []
    """Graders that run after a given turn: see [conversations](conversations.md#checkpoints)."""
    trials: int = Field(default=1, ge=1)
    """Number of trials per sample."""
    graders: list[dict[str, Any]] = []
    """Checks of the outputs: see [graders](graders.md)."""
    by: Strings = []
    """Fields of the row by which the results are broken down, such as `subject`."""
    cluster: str | None = None
    """Field of the row whose values group samples that belong together, such as questions about one text: see
    [`cluster`](#cluster). Part of no key."""
    limits: Limits = Limits()
    """Concurrency, timeouts, retries and budgets: see [`limits`](#limits)."""
    gate: dict[str, float] = {}
    """Minimum values by metric, from 0 to 1: a grader's name, `score`, `passed`, `NAME/pass@K` or
    `NAME/pass^K`. Below a minimum
    the exit code is 1."""
    hooks: HooksBlock = HooksBlock()
    """Programs to run before and after the run and its trials: see [`hooks`](#hooks)."""
    output: OutputBlock = OutputBlock()
    """Exports of the finished run: see [`output`](#output)."""
    baseline: dict[str, Any] | None = None
    """Second target to evaluate in a run of its own. Keys that it lacks are taken from `target` if both are of the
    same kind."""
    prices: dict[str, Price] = {}
    """Prices of models that the built-in table lacks, by model: see [`prices`](#prices)."""
