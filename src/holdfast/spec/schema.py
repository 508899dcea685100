"""What users may write in an eval file, one model per block. Unknown keys are errors."""

import posixpath
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from holdfast.spec.redact import bare_url
from holdfast.spec.regex import compile_regex

SCHEMA_VERSION = "1.2"
"""Version of the eval file, MAJOR.MINOR. Part of no key. docs/versions.md has what changed in which."""

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


def _urls(given: str | list[str]) -> str | list[str]:
    for url in urls_of(given):
        if not re.match(r"https?://[^/\s]+|\$\{\w+\}", url):
            raise ValueError(f"{url!r} is no URL: it begins with http:// or https://, or with a variable as ${{NAME}}")
    if not given:
        raise ValueError("is a URL, or a list of at least one")
    return given


def urls_of(given: str | list[str] | None) -> list[str]:
    """The URLs of a `base_url`: of one, of a list of them, or of none."""
    return [given] if isinstance(given, str) else list(dict.fromkeys(given or []))


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


def _names_function(reference: str) -> str:
    if not re.fullmatch(r"([^:]+\.py|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):[A-Za-z_][\w.]*", reference):
        raise ValueError(f"{reference!r} does not name a function: write FILE.py:NAME or PACKAGE.MODULE:NAME")
    return reference


Seconds = Annotated[float, BeforeValidator(parse_duration), Field(gt=0)]
Strings = Annotated[list[str], BeforeValidator(_as_list)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_list)]
"""texts of which none is empty; one may stand alone"""
BaseUrl = Annotated[str | list[str], AfterValidator(_urls)]
"""where a model is asked: one URL, or several, of which each request goes to the least busy one"""
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


class Block(BaseModel):
    """A block of the eval file: fixed keys, values that do not change after reading."""

    # So that starting is fast, a model is built only when it is used, and the modules that every eval needs do not
    # postpone annotations: reading them back out of strings takes pydantic a third of its time.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), defer_build=True)

    templates: ClassVar[tuple[str, ...]] = ()
    """fields that hold templates over the row"""


class DatasetBlock(Block):
    """Where the samples come from."""

    path: Annotated[Strings, Field(min_length=1)]
    """file, glob or `hf://owner/name`; relative to the eval file"""
    format: Literal["jsonl", "json", "csv", "parquet"] | None = None
    """when the name does not tell"""
    id: str | None = None
    """the field that names a sample; default `id`, else a digest of the row"""
    limit: int | None = Field(default=None, ge=1)
    offset: int = Field(default=0, ge=0)
    shuffle: int | None = None
    """a seed; the order then depends on it and on the rows alone"""
    where: str | None = None
    """an expression over the row's fields: rows for which it is false are left out"""
    ids: Strings = []
    """globs: only rows whose id, or `name`, matches one"""
    tags: Strings = []
    """globs: only rows of whose field `tags` one matches one"""
    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    """CSV only: what separates values; default: a comma, or a tab for `.tsv`"""
    encoding: str = "utf-8"
    """of text files, for example `latin-1` or `cp1252`"""
    field: str | None = None
    """JSON only: the key under which a file has its list of rows"""
    split: str = "test"
    """Hugging Face only"""
    subset: str | None = None
    """Hugging Face only: the configuration's name"""
    revision: str | None = None
    """Hugging Face only; the commit it stands for is kept in the manifest"""


class McpBlock(Block):
    """A server of tools: a program that is started, or a URL."""

    command: list[str] = []
    """started in the trial's workspace, else in the eval file's folder"""
    url: str | None = Field(default=None, pattern=r"^(https?://|\$\{\w+\})")
    """may name environment variables as ${NAME}"""
    env: dict[str, str] = {}
    """for the program; values may name environment variables as ${NAME}"""
    headers: dict[str, str] = {}
    """for the URL; values may name environment variables as ${NAME}"""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if bool(self.command) == (self.url is not None):
            raise ValueError("is either a `command` or a `url`")
        for name, value in self.env.items():
            if re.search(r"KEY|TOKEN|SECRET|PASSWORD", name.upper()) and "${" not in value:
                raise ValueError(f"keys are not written into files: {name}: ${{{name}}} takes it from the environment")
        return self


class ScriptedResponse(Block):
    """What a scripted tool answers to the calls that fit. Without any `match` it fits every call."""

    match: dict[str, Any] = {}
    """the call's arguments, all of them"""
    match_regex: dict[str, str] = {}
    """patterns (RE2) by argument; a value that is no text is taken as JSON"""
    match_schema: dict[str, Any] = {}
    """a JSON Schema for the arguments"""
    result: Any = None
    """the answer; what is no text is given as JSON"""
    error: str | None = None
    """the answer is this error instead"""


class ScriptedTool(Block):
    """A tool that answers by a script: the first response that fits a call."""

    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    """a JSON Schema, for the model to see"""
    responses: list[ScriptedResponse] = Field(min_length=1)


class ToolBlock(Block):
    """Something a model may call: a Python function, a scripted tool, or the tools of an MCP server."""

    python: FunctionName | None = None
    """`file.py:function`; its signature and docstring say what it takes"""
    mcp: McpBlock | None = None
    scripted: ScriptedTool | None = None
    only: list[str] = []
    """of a server's tools these"""
    per: Literal["trial", "run"] = "trial"
    """how long a server lives: one for each trial, or one that all share"""
    replay: Literal["record", "never", "again"] = "record"
    """after a crash: a finished call is answered from the record; `never`: it has side effects, and a trial that was
    cut off in it starts from scratch; `again`: it is run again, to bring a server's own state back"""
    version: str | None = None
    """change it when the same tool answers differently from now on"""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if [self.python, self.mcp, self.scripted].count(None) != 2:
            raise ValueError("is either a `python` function, an `mcp` server or a `scripted` tool")
        if self.only and self.mcp is None:
            raise ValueError("`only` picks among the tools of an mcp server")
        return self


class StateBlock(Block):
    """How an agent's own state is kept after each turn, and given back after a crash."""

    save: FunctionName
    """a function given `context`, returns JSON"""
    restore: FunctionName
    """a function given `state` and `context`"""


class TargetBlock(Block):
    """What every target has."""

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
    def label(self) -> str:
        """The target's name in tables and directory names."""
        return self.kind


class ModelTarget(TargetBlock):
    """A model behind an OpenAI-compatible API, or the embedded one."""

    model: str = Field(min_length=1)
    base_url: BaseUrl | None = None
    """one URL or several, ${NAME} for the environment's; default: $OPENAI_BASE_URL"""
    api_key_env: str = "OPENAI_API_KEY"
    """the environment variable that holds the key"""
    api: Literal["chat", "completions"] = "chat"
    params: dict[str, Any] = {}
    """sent with each request: temperature, max_tokens, stop, seed …"""
    stream: bool = False
    """read the reply as it comes, and note when its first token came"""
    identity: Literal["name", "url"] = "name"
    """`url`: the same model name behind another base_url is another model"""
    version: str | None = None
    """change it when the same name answers differently from now on"""
    tools: list[ToolBlock] = []
    """what the model may call: Python functions and MCP servers"""
    max_steps: int = Field(default=20, ge=1)
    """model calls in one turn, where there are tools"""

    @model_validator(mode="after")
    def _tools_need_chat(self) -> Self:
        if self.tools and self.api != "chat":
            raise ValueError("tools need `api: chat`")
        return self

    @property
    def label(self) -> str:
        """The model's name."""
        return self.model


def is_embedded(model: str) -> bool:
    """Whether a model's name means one that runs on this machine, inside Holdfast."""
    return model.startswith("local/")


SESSION = "<session>.py:"
"""stands before the name of a function that was typed into a notebook or an interpreter, and is in no file"""


class PythonTarget(TargetBlock):
    """A Python function, `file.py:function`, relative to the eval file."""

    python: FunctionName
    params: dict[str, Any] = {}
    """handed to the function as `context.params`"""
    version: str | None = None
    base_url: BaseUrl | None = None
    """where `context.model` and `context.base_url` ask; default: $OPENAI_BASE_URL"""
    api_key_env: str = "OPENAI_API_KEY"
    tools: list[ToolBlock] = []
    """what `context.tool` can call by name"""
    state: StateBlock | None = None
    """for an agent that keeps its own"""

    multi_call: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """The file's name and the function, however the path is spelled."""
        return Path(self.python).name.removeprefix(SESSION)


class HttpTarget(TargetBlock):
    """A workflow behind HTTP: JSON is posted, the answer picked from what comes back."""

    http: str = Field(pattern=r"^(https?://|\$\{\w+\})")
    """may name environment variables as ${NAME}"""
    request: dict[str, Any]
    """the body; texts in it are templates with `prompt`, `messages`, `trial` and the row's fields. A text that is one
    `{{ expression }}` and nothing else becomes the expression's value: a list, a number, an object"""
    response: str = "@"
    """a JMESPath to the answer in the reply, or in each event of a stream"""
    stream_end: str | None = Field(default=None, min_length=1)
    """the data or the name of the event that ends a stream: without it, a stream was cut off. `close`: the end of the
    connection is enough. Default: `[DONE]`, or the end of the transport's last chunk"""
    headers: dict[str, str] = {}
    """values may name environment variables as ${NAME}"""
    version: str | None = None

    templates: ClassVar[tuple[str, ...]] = ("request",)

    @property
    def label(self) -> str:
        """The URL without credentials and query."""
        return bare_url(self.http)


class CommandTarget(TargetBlock):
    """A program; its standard output is the answer."""

    command: list[str] = Field(min_length=1)
    """the arguments; each is a template with `prompt` and the row's fields"""
    stdin: str | None = None
    """a template for what the program reads"""
    env: str | None = None
    """an expression over the row that gives more of the program's environment: a map of names to texts"""
    working_directory: str | None = None
    """a template for the folder of the workspace that it starts in; default: the workspace itself"""
    path: list[str] = []
    """folders of the workspace in which programs are looked for first"""
    version: str | None = None
    proxy: bool = True
    """give the program an OPENAI_BASE_URL of ours, so that its model calls are recorded, counted and replayed"""
    base_url: BaseUrl | None = None
    """where those calls go; default: $OPENAI_BASE_URL"""
    api_key_env: str = "OPENAI_API_KEY"

    templates: ClassVar[tuple[str, ...]] = ("command", "stdin", "working_directory")
    multi_call: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """The program's name."""
        return Path(self.command[0]).name


class NatTarget(TargetBlock):
    """A workflow of NeMo Agent Toolkit, run in this process."""

    nat: str = Field(pattern=r"\.(ya?ml|json)$")
    """its configuration, relative to the eval file"""
    override: dict[str, Any] = {}
    """values laid over the configuration, by dotted path: `llms.main.temperature`"""
    version: str | None = None
    """change it when an installed component answers differently from now on"""

    @model_validator(mode="after")
    def _no_secrets(self) -> Self:
        refuse_secret_paths(self.override)
        return self

    @property
    def label(self) -> str:
        """The configuration file's name."""
        return Path(self.nat).name


class Limits(Block):
    """How fast, how long, how much. Never part of a key."""

    concurrency: int | Literal["auto"] | None = None
    """requests in flight; default 64 (4 for the embedded model)"""
    turn_timeout: Seconds = 120
    """for one reply of the target; default an hour where a model runs on this machine"""
    trial_timeout: Seconds = 600
    """for a whole trial, its retries included but not its waits for a rate limit; default 6 hours for such a model"""
    retries: int = Field(default=5, ge=0)
    """how often a failed attempt is repeated in one process; a rate limit is no failure and is waited out"""
    max_cost: float | None = Field(default=None, gt=0)
    """dollars, for the whole run"""
    token_budget: int | None = Field(default=None, gt=0)
    """tokens, for the whole run; the length of a reply is `target.params.max_tokens`"""
    max_time: Seconds | None = None
    """for the whole run"""

    @model_validator(mode="after")
    def _positive(self) -> Self:
        if isinstance(self.concurrency, int) and self.concurrency < 1:
            raise ValueError("concurrency is at least 1, or auto")
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
    output: float = Field(ge=0)


class ResponderBlock(Block):
    """A simulated user: it replies to the target, stops, or abstains. A model with instructions, or a function."""

    model: str | None = None
    """who plays the user; default: the target's own model and endpoint"""
    python: FunctionName | None = None
    """a function given what its parameters name: messages, sample, turn; returns a text, or None to stop"""
    instructions: str | None = None
    """who the user is and what it wants; a template over the row"""
    max_followups: Annotated[int, Field(ge=1)] | str
    """how many replies it may give; or an expression over the row that says so, 0 where a row has no such user"""
    stop_when: str | None = None
    """an expression over `output`, `turn` and the row's fields: once true the conversation is over"""
    base_url: BaseUrl | None = None
    api_key_env: str | None = None
    params: dict[str, Any] = {"temperature": 0}
    version: str | None = None

    templates: ClassVar[tuple[str, ...]] = ("instructions",)

    @model_validator(mode="after")
    def _somebody(self) -> Self:
        if self.python is not None and (self.model is not None or self.instructions is not None):
            raise ValueError("is either a function (python) or a model with instructions, not both")
        if self.python is None and not self.instructions:
            raise ValueError("needs instructions for the model that plays the user, or a python function")
        return self


class CheckpointBlock(Block):
    """Graders that run after a turn and may end the conversation."""

    after_turn: int = Field(ge=1)
    on_failure: Literal["continue", "stop"] = "continue"
    where: str | None = None
    """an expression over the row's fields: where it is false, the checkpoint does not apply"""
    graders: list[dict[str, Any]] = Field(min_length=1)


class WorkspaceBlock(Block):
    """A folder for each trial. Agents and tools work in it, graders look at it, and it is kept after each turn."""

    folder: str | None = None
    """what it starts with: a folder, relative to the eval file"""
    files: str | None = None
    """an expression over the row that gives more of its files: a map of paths to contents"""


class HookBlock(Block):
    """A program that runs before or after."""

    command: str | Annotated[list[str], Field(min_length=1)]
    """a text is split at blanks; there is no shell"""
    working_directory: str = "."
    """relative to the eval file"""
    exit_codes: list[int] = [0]
    """which of them mean success"""
    error_on_fail: bool = False
    """a failure stops the run, or is an error of the trial; otherwise it is said and passed over"""

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
    """when a process begins to work"""
    after_run: list[HookBlock] = []
    """when it has no more to do"""
    before_task: list[HookBlock] = []
    """before each trial that is run"""
    after_task: list[HookBlock] = []
    """after it, also when it failed"""


NatStep = Literal[
    "LLM_START",
    "LLM_NEW_TOKEN",
    "LLM_END",
    "TOOL_START",
    "TOOL_END",
    "FUNCTION_START",
    "FUNCTION_END",
    "WORKFLOW_START",
    "WORKFLOW_END",
    "TASK_START",
    "TASK_END",
    "TTC_START",
    "TTC_END",
    "CUSTOM_START",
    "CUSTOM_END",
    "SPAN_START",
    "SPAN_CHUNK",
    "SPAN_END",
]
"""the types of steps that NeMo Agent Toolkit knows"""


class NatOutput(Block):
    """Also write what finishes as NeMo Agent Toolkit's `workflow_output.jsonl`."""

    dir: str
    """the folder, relative to the eval file"""
    step_filter: list[NatStep] = ["LLM_END", "TOOL_END"]
    """which types of steps to write; an empty list stands for all, as in NAT"""


class OutputBlock(Block):
    """Copies of the results for other tools. Never part of a key."""

    nat: NatOutput | None = None
    export: list[str | dict[str, Any]] = []
    """where a finished run goes: `junit`, or `{to: wandb, project: x}`; each is read by the model of its kind"""


class ExportBlock(Block):
    """Where a finished run goes."""

    to: str


class FileExport(ExportBlock):
    """Files on this machine."""

    dir: str | None = Field(default=None, min_length=1)
    """the folder, relative to the eval file; default: `export/<format>` in the run directory"""


class TrackerExport(ExportBlock):
    """A service that keeps runs."""

    description: str | None = None
    extra_metadata: dict[str, Any] = {}
    """kept beside the configuration"""


class WandbExport(TrackerExport):
    """Weights & Biases."""

    project: str | None = None
    """default: $WANDB_PROJECT, else `holdfast`"""
    entity: str | None = None
    """default: $WANDB_ENTITY, else the login's own"""
    name: str | None = None
    """how the run is shown; default: the eval's name and the target's"""
    group: str | None = None
    job_type: str = "evaluation"
    tags: Strings = []
    mode: Literal["online", "offline"] | None = None
    """default: $WANDB_MODE, else online where there is a login and a network"""


class MlflowExport(TrackerExport):
    """MLflow."""

    tracking_uri: str | None = None
    """default: $MLFLOW_TRACKING_URI"""
    experiment_name: str | None = None
    """default: $MLFLOW_EXPERIMENT_NAME, else the eval's name"""
    run_name: str | None = None
    """default: the eval's name and the target's"""
    tags: dict[str, str | int | float | bool] = {}

    @model_validator(mode="after")
    def _no_password(self) -> Self:
        if re.search(r"//[^/@]+@", self.tracking_uri or ""):
            raise ValueError(
                "passwords are not written into files: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return self


EXPORTS: dict[str, type[ExportBlock]] = {
    **dict.fromkeys(("csv", "parquet", "samples", "junit", "html", "nat", "flexeval", "waza"), FileExport),
    "wandb": WandbExport,
    "mlflow": MlflowExport,
}


class EvalFields(Block):
    """The top of an eval file; target and graders are read by their own models."""

    schemaVersion: str = SCHEMA_VERSION  # noqa: N815 - the key as users write it
    name: str = Field(min_length=1, max_length=120)
    metadata: dict[str, Any] = {}
    """whatever should be kept with the run; in no key"""
    dataset: DatasetBlock | None = None
    samples: list[dict[str, Any]] | None = None
    target: dict[str, Any]
    system: str | None = None
    prompt: str = Field(min_length=1)
    follow_ups: list[str] | str = []
    """the user's further messages, each a template; or an expression over the row that gives their list"""
    responder: ResponderBlock | None = None
    workspace: WorkspaceBlock | None = None
    """a folder for each trial"""
    checkpoints: list[CheckpointBlock] = []
    trials: int = Field(default=1, ge=1)
    graders: list[dict[str, Any]] = []
    limits: Limits = Limits()
    gate: dict[str, float] = {}
    hooks: HooksBlock = HooksBlock()
    output: OutputBlock = OutputBlock()
    baseline: dict[str, Any] | None = None
    """a second target, evaluated beside the first"""
    prices: dict[str, Price] = {}
    """dollars per million tokens, for models the built-in table lacks"""
