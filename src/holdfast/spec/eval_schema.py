"""Schemas of the eval file, and the registry of exporters. Targets and graders have modules of their own."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Final, Literal, Self, cast

import msgspec
from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from holdfast.errors import Problem
from holdfast.spec.document import Document, Location
from holdfast.spec.plugins import BUILT_IN, Registry, load_reference
from holdfast.spec.schema import (
    FILE_KINDS,
    SCHEMA_VERSION,
    Api,
    BaseUrl,
    Block,
    Formula,
    FunctionName,
    NamedInputs,
    Params,
    Points,
    Seconds,
    Size,
    Strings,
    absent_block,
    as_dataset,
    validate_block,
)

AGENT_TURN: Final = 3600.0
AGENT_TRIAL: Final = 6 * 3600.0
"""default time limits of agents and of the embedded model, in seconds"""

RUN_METRICS: Final = ("score", "passed", "coverage", "whole", "graded")
"""metrics of a whole run, in addition to its graders': `Metrics.shares` has the same names"""
MAX_DROP: Final = 0.02
"""how far a metric may fall by default"""

Inconclusive = Literal["pass", "fail"]
"""the verdict of a gate if there are too few samples to show or exclude a difference"""
OnLimit = Literal["score", "error"]


class DatasetBlock(Block):
    """The source of the samples."""

    path: Annotated[Strings, Field(min_length=1)]
    """File, glob or list of them, relative to the eval file, or `hf://owner/name`. Reads `.jsonl`, `.json`, `.csv`,
    `.tsv` and `.parquet`, also compressed as `.gz`, `.zst`, `.bz2` or `.xz`."""
    format: Literal["jsonl", "json", "csv", "parquet"] | None = None
    """Format of the files. Default: inferred from the file name."""
    id: str | None = None
    """Field that names a sample. Default: `id`, or a digest of the row if there is no such field."""
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


class Selection(msgspec.Struct, frozen=True):
    """Globs for ids and for tags. If both are set, a row has to match both."""

    ids: Sequence[str] = ()
    """one has to match the row's id or `name`"""
    tags: Sequence[str] = ()
    """one has to match one of the row's `tags`"""

    @classmethod
    def of(cls, **globs: Any) -> Self:
        """Make a selection from single values or lists."""
        return cls(
            **{
                key: [str(one) for one in (value if isinstance(value, list) else [value])]
                for key, value in globs.items()
            }
        )

    def takes(self, row: Mapping[str, Any], sample_id: object) -> bool:
        """Return True for a row that is selected."""
        names = [str(name) for name in (sample_id, row.get("name")) if name is not None]
        tags = row.get("tags")
        tagged = [tags] if isinstance(tags, str) else [str(tag) for tag in tags] if isinstance(tags, list) else []
        return _any(self.ids, names) and _any(self.tags, tagged)


def _any(globs: Sequence[str], words: list[str]) -> bool:
    return not globs or any(fnmatchcase(word, glob) for glob in globs for word in words)


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
    """API of that model, as for the target. Default: the target's, or the provider's."""
    params: Params = {}
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
    """Effect of a failed checkpoint: `continue` the conversation, or `stop` it with score 0. The trial fails in
    either case."""
    where: str | None = None
    """Expression over the row's fields. The checkpoint applies to rows for which it is true."""
    graders: list[dict[str, Any]] = Field(min_length=1)
    """Graders that check the conversation up to this turn."""


class WorkspaceBlock(Block):
    """A folder for each trial. Agents and tools work in it, graders look at it, and it is kept after each turn."""

    folder: str | None = None
    """Folder to copy into each trial's workspace, relative to the eval file."""
    files: str | None = None
    """Expression over the row that returns further files, as a mapping of paths to contents: a text, `{base64: …}`,
    or `{text: …, executable: true}`."""
    ignore: Strings = []
    """Files and folders that are not kept, as globs: a name such as `node_modules` or `*.log` at any depth, or a path
    from the top of the workspace such as `build/cache`. Graders do not see them."""
    max_size: Size = 5_000_000_000
    """Maximum size of the files that are kept, such as `500MB`. Of a larger workspace the largest files are left out,
    and the output names them. Default: `5GB`."""


class TrialLimitsBlock(Block):
    """What one trial may use. A trial that reaches a limit ends there, and counts as `on_limit` says."""

    time: Seconds | None = None
    """Time of the target in all turns. Default: `trial_timeout`."""
    tokens: int | None = Field(default=None, gt=0)
    """Input and output tokens of the target's model calls."""
    cost: float | None = Field(default=None, gt=0)
    """US dollars of the target's model calls."""
    calls: int | None = Field(default=None, gt=0)
    """Number of the target's model calls, as `usage.requests` counts them."""


class Limits(Block):
    """Concurrency, timeouts, retries and budgets. Part of a key only if reaching them scores."""

    concurrency: int | Literal["auto"] | None = None
    """Maximum number of requests in flight, or `auto` to raise it while the server keeps up. A rate limit lowers it
    for a while, stray refusals do not. Default: `auto` for a model on the internet, 64 for one in your own network, for
    several servers and for other targets, 4 for the embedded model; for likelihoods 16, or 1 for the embedded model;
    for [agents](agents.md#limits) as many as the machine has cores, at most 8."""
    turn_timeout: Seconds = 120
    """Time limit for one reply of the target. Default for the embedded model and for [agents](agents.md#limits): 1
    hour."""
    trial_timeout: Seconds = 600
    """Time limit for a whole trial with its retries. Waiting for a rate limit does not count. Default for the
    embedded model and for [agents](agents.md#limits): 6 hours."""
    trial: TrialLimitsBlock | None = None
    """What one trial may use, for targets that make several calls: see [limits of a trial](agents.md#limits)."""
    on_limit: OnLimit | None = None
    """What happens to a trial that reaches a limit: `score` grades what is there, `error` leaves the trial pending.
    Default: `score` for [agents](agents.md#limits) and with `trial`, else `error`."""
    on_exit: OnLimit | None = None
    """What happens to a trial whose program ends with an exit code other than 0: `score` or `error`. Default: `score`
    for [agents](agents.md#limits), else `error`."""
    retries: int = Field(default=5, ge=0)
    """How many retries each turn has, per process. Waiting for a rate limit uses none; an attempt that got further than
    the last starts the count again."""
    max_cost: float | None = Field(default=None, gt=0)
    """Budget of the whole run in US dollars. Once it is spent, no trial starts, and no call of a trial with several."""
    token_budget: int | None = Field(default=None, gt=0)
    """Budget of the whole run in tokens. The length of a single reply is `target.params.max_tokens`."""
    max_time: Seconds | None = None
    """Time budget of the whole run. Once it is used up, no trial starts, and no call of a trial with several."""
    reply_bytes: Size = 64_000_000
    """Maximum size of one reply of a server, such as `64MB`, after decompression and with all events of a stream. A
    longer one is an error of that attempt, which is not retried."""

    @model_validator(mode="after")
    def _positive(self) -> Self:
        if isinstance(self.concurrency, int) and self.concurrency < 1:
            raise ValueError("concurrency must be at least 1, or auto")
        return self

    def with_time(self, *, patient: bool) -> Self:
        """Return limits with enough time if the file sets none.

        `patient` is for agents and for models that run on this machine. Such a model's requests share the cores, so a
        time-out that is too short throws all of them away at once, and they begin again. A default never cuts short a
        limit of the trial's time that the file sets.
        """
        trial = (self.trial and self.trial.time) or 0.0
        usual = {
            "turn_timeout": max(trial, AGENT_TURN if patient else self.turn_timeout),
            "trial_timeout": max(2 * trial, AGENT_TRIAL if patient else self.trial_timeout),  # with its retries
        }
        written = self.model_fields_set
        values = {name: value if name in written else usual.get(name, value) for name, value in self}
        return self.model_construct(written, **values)  # unlike a copy, which would count the defaults as written


def _quoted(name: Any) -> Any:
    if isinstance(name, int | float):
        raise ValueError("YAML reads the id of this run as a number: put it in quotes")  # noqa: TRY004 - pydantic reports it
    return name


class GateSettings(Block):
    """The keys of a gate that are not metrics."""

    baseline: Annotated[str | None, BeforeValidator(_quoted)] = Field(default=None, min_length=1)
    """Finished run that this one must not be worse than: its id, the beginning of its id, or its path."""
    max_drop: Points | None = None
    """How far a metric may fall below the baseline: `2pt` or `2` for 2 points, `0.02` for the same as a share of 1.
    Default: 2 points."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence of each verdict against the baseline."""
    inconclusive: Inconclusive = "pass"
    """Verdict of the gate if there are too few samples to tell: `pass`, with a warning, or `fail`."""


SETTINGS: Final = tuple(GateSettings.__annotations__)


class GateBlock(GateSettings):
    """Conditions that a finished run must meet."""

    minima: dict[str, Annotated[float, Field(ge=0, le=1)]] = {}
    """every other key: the minimum of the metric of this name"""

    @model_validator(mode="before")
    @classmethod
    def _gather_minima(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        settings = {key: data[key] for key in SETTINGS if key in data}
        return {**settings, "minima": {key: value for key, value in data.items() if key not in SETTINGS}}

    @property
    def present(self) -> bool:
        """True if there is something to check."""
        return bool(self.minima) or self.baseline is not None

    def idle_settings(self) -> list[str]:
        """Describe settings that have no effect."""
        idle = [f"gate.{name}" for name in SETTINGS[1:] if name in self.model_fields_set and self.baseline is None]
        return [f"{' and '.join(idle)}: without gate.baseline there is nothing to compare with"] if idle else []


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

    @property
    def present(self) -> bool:
        """True if there is a program to run."""
        return bool(self.before_run or self.after_run or self.before_task or self.after_task)


class Price(Block):
    """US dollars per million tokens."""

    input: float = Field(ge=0)
    """US dollars per million input tokens."""
    output: float = Field(ge=0)
    """US dollars per million output tokens."""
    cache_read: float | None = Field(default=None, ge=0)
    """US dollars per million input tokens that are read from the provider's cache. Default: the same as `input`."""
    cache_write: float | None = Field(default=None, ge=0)
    """US dollars per million input tokens that are written to it. Default: the same as `input`."""
    web_search: float | None = Field(default=None, ge=0)
    """US dollars per thousand web searches that the provider makes. Default: unknown."""


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


class OutputBlock(Block):
    """Copies of the results for other tools. Never part of a key."""

    nat: dict[str, Any] | None = None
    """Write NeMo Agent Toolkit's `workflow_output.jsonl` and related files: see
    [exports](exports.md#nemo-agent-toolkit)."""
    export: list[str | dict[str, Any]] = []
    """Destinations of a finished run, each a name such as `junit` or a mapping such as `{to: wandb, project: x}`:
    see [exports](exports.md)."""


class EvalFields(Block):
    """The top of an eval file. Target and graders are read by their own schemas."""

    schemaVersion: str = SCHEMA_VERSION  # noqa: N815 - as in all our files
    """Version of the file format, MAJOR.MINOR in quotes: see [versions](versions.md)."""
    name: str = Field(min_length=1, max_length=120)
    """Name of the eval, and of the folder of its runs."""
    metadata: dict[str, Any] = {}
    """Any mapping to record with the run."""
    dataset: Annotated[DatasetBlock | None, BeforeValidator(as_dataset)] = None
    """Where the samples come from: a path, a list of paths, or a mapping: see [`dataset`](#dataset)."""
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
    follow_ups: list[str] | Formula = []
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
    same_prompt: bool = False
    """Allow a prompt that is the same for all rows, which is refused otherwise: see [prompts](#prompts). Part of no
    key."""
    graders: list[dict[str, Any]] = []
    """Checks of the outputs: see [graders](graders.md)."""
    by: Strings = []
    """Fields of the row by which the results are broken down, such as `subject`."""
    cluster: str | None = None
    """Field of the row whose values group samples that belong together, such as questions about one text: see
    [`cluster`](#cluster). Part of no key."""
    limits: Limits = absent_block()
    """Concurrency, timeouts, retries and budgets: see [`limits`](#limits)."""
    gate: GateBlock | None = None
    """Minimum values by metric, and a baseline that the run must not be worse than: see [`gate`](#gate). If a
    condition is not met, the exit code is 1."""
    hooks: HooksBlock | None = None
    """Programs to run before and after the run and its trials: see [`hooks`](#hooks)."""
    files: NamedInputs = []
    """Files that code reads or scripts include, as paths and globs relative to the eval file; or a mapping of `target`
    and names of graders to such lists. Their contents are part of the key. `!GLOB` names files that are not inputs: see
    [`files` and `env`](#files-and-env)."""
    env: NamedInputs = []
    """Names of environment variables that code reads; or a mapping of `target` and names of graders to such lists.
    Digests of their values are part of the key."""
    output: OutputBlock = absent_block()
    """Exports of the finished run: see [`output`](#output)."""
    baseline: dict[str, Any] | None = None
    """Second target to evaluate in a run of its own. Keys that it lacks are taken from `target` if both are of the
    same kind."""
    prices: dict[str, Price] = {}
    """Prices of models that the built-in table lacks, by model: see [`prices`](#prices)."""


EXPORTERS = Registry("holdfast.exporters", "exporter", {"samples": "holdfast.report.tables:write_transcripts"})
"""Every exporter: a function that writes a run into a folder, or a `holdfast.report.exports.Service`."""

LIVE_EXPORTERS: Final = BUILT_IN["holdfast.live_exporters"]
"""Exporters that follow a run, by key under `output`: each is a `holdfast.report.exports.LiveExporter`."""


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
    """An installed package's exporter. Other options are passed to its function."""

    model_config = ConfigDict(extra="allow")


def export_schema(name: str) -> type[ExportBlock]:
    """Return the schema of an exporter's options; raise ValueError if the exporter cannot be imported."""
    schema: type[ExportBlock] | None = getattr(EXPORTERS.load(name), "schema", None)
    return schema or (FileExport if EXPORTERS.is_builtin(name) else PluginExport)


def read_live_exports(output: OutputBlock, document: Document, problems: list[Problem]) -> dict[str, LiveExport]:
    """Read the blocks of live exporters, each by its schema; adds to `problems`."""
    blocks: dict[str, LiveExport] = {}
    for name, reference in LIVE_EXPORTERS.items():
        if (data := getattr(output, name)) is not None:
            schema = load_reference(reference).schema
            block = cast("LiveExport | None", validate_block(schema, data, ("output", name), document, problems))
            if block is not None:
                blocks[name] = block
    return blocks


def read_export(
    data: dict[str, Any], location: Location, document: Document, problems: list[Problem]
) -> ExportBlock | None:
    """Read the options of an export; adds to `problems`."""
    name = data.get("to")
    if isinstance(name, str) and name in EXPORTERS:
        try:
            schema = export_schema(name)
        except ValueError as error:  # its package is broken
            problems.append(Problem(document.where(location), str(error)))
            return None
        return cast("ExportBlock | None", validate_block(schema, data, location, document, problems))
    message = EXPORTERS.unknown(str(name)) if name else f"needs `to`: {EXPORTERS.describe()}"
    problems.append(Problem(document.where(location), message))
    return None


def read_exports(output: OutputBlock, document: Document, problems: list[Problem]) -> tuple[ExportBlock, ...]:
    """Read the destinations of a finished run; adds to `problems`."""
    exports: dict[str, ExportBlock] = {}
    for number, raw in enumerate(output.export):
        location = ("output", "export", number)
        block = read_export({"to": raw} if isinstance(raw, str) else raw, location, document, problems)
        if block is not None and block.to in exports:
            problems.append(Problem(document.where(location), f"duplicate export to {block.to}"))
        elif block is not None:
            exports[block.to] = block
    return tuple(exports.values())
