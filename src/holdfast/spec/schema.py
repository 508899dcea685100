"""Models of the eval file, one per block. Unknown keys are errors."""

import os
import posixpath
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core.core_schema import no_info_plain_validator_function

from holdfast.spec.plugins import load_reference
from holdfast.spec.quantities import parse_duration, parse_size
from holdfast.spec.regex import compile_regex
from holdfast.spec.template import is_template, pattern_example

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

SCHEMA_VERSION = "1.4"
"""Version of the eval file format, MAJOR.MINOR. Part of no key. docs/versions.md lists the changes."""

_ANSWERS = ("n", "best_of", "candidateCount", "candidate_count")
"""parameters for the number of answers, in several APIs"""


def parse_points(value: Any) -> Any:
    """A difference of scores, which are from 0 to 1: from `2pt` or `2`, which are points of 0.01, or from `0.02`."""
    text = value.strip() if isinstance(value, str) else value
    in_points = isinstance(text, str) and text.endswith("pt")
    try:
        number = float(text.removesuffix("pt") if isinstance(text, str) else text) if not isinstance(text, bool) else -1
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number <= 100:  # also refuses NaN
        raise ValueError(f"{value!r} is not a difference: write 2pt for 2 points, or 0.02")
    if not in_points and 0.2 < number < 1:
        raise ValueError(f"{number:g} is ambiguous: write {number:g}pt or {number * 100:g}pt")
    return number / 100 if in_points or number >= 1 else number


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


def inside_workspace(path: str) -> str:
    """A path in a trial's workspace in its plainest form, or a ValueError where it would lead out; templates stay."""
    return path if is_template(path) else _inside(path)


def check_pattern(pattern: str) -> str:
    """Return a pattern, or raise ValueError where it cannot be compiled, whatever a row puts into its templates."""
    if (example := pattern_example(pattern)) is not None:
        compile_regex(example)
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


def several_answers(params: Mapping[str, Any]) -> str | None:
    """Return the parameter by which a request asks for several answers, of which only one would count; None: none."""
    nested = params.get("generationConfig")
    values = {**params, **(nested if isinstance(nested, dict) else {})}
    asked = (name for name in _ANSWERS if isinstance(values.get(name), int | float) and values[name] > 1)
    return next(asked, None)


def _one_answer(params: dict[str, Any]) -> dict[str, Any]:
    if (name := several_answers(params)) is not None:
        raise ValueError(f"`{name}` asks for several answers, of which one would count: write `trials:` instead")
    return params


Seconds = Annotated[float, BeforeValidator(parse_duration), Field(gt=0)]
Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
"""a number of bytes"""
Points = Annotated[float, BeforeValidator(parse_points)]
"""a difference of scores, as a share of 1"""
Strings = Annotated[list[str], BeforeValidator(_as_list)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_list)]
"""texts, none of them empty; a single text stands for a list of one"""
Params = Annotated[dict[str, Any], AfterValidator(_one_answer)]
"""parameters of requests to a model"""
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
WorkspacePath = Annotated[str, AfterValidator(inside_workspace)]
"""a file in a trial's workspace"""
Pattern = Annotated[str, Field(min_length=1), AfterValidator(check_pattern)]
"""a regular expression"""

NamedInputs = Strings | dict[str, Strings]
"""names for all code of the eval, or by `target` and names of graders"""

FILE_KINDS = ("image", "audio", "file")
"""kinds of files in a message"""

_DISABLE_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
_PLUGIN_LOADER = "pydantic.plugin._loader"
_NO_PLUGINS = ModuleType(_PLUGIN_LOADER)
_NO_PLUGINS.get_plugins = tuple  # type: ignore[attr-defined]


class Block(BaseModel):
    """A block of the eval file: fixed keys, values that do not change after reading."""

    # So that starting is fast, a model is built only when it is used, and the modules that every eval needs do not
    # postpone annotations: reading them back out of strings takes pydantic a third of its time.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), defer_build=True)

    templates: ClassVar[tuple[str, ...]] = ()
    """fields that hold templates over the row"""
    regexes: ClassVar[tuple[str, ...]] = ()
    """those among them that hold patterns"""
    expressions: ClassVar[tuple[str, ...]] = ()
    """fields that hold expressions over the row"""
    as_written: ClassVar[tuple[str, ...]] = ()
    """fields whose texts are another program's, with braces of its own"""
    instead: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """what to write instead of a template, by field, where none is read"""

    @classmethod
    def model_rebuild(cls, *, _parent_namespace_depth: int = 2, **options: Any) -> bool | None:
        """Build the model, without pydantic's plug-ins: to find them it reads the metadata of all installed packages.

        Models of the user's own code, in this process too, still have them.
        """
        disabled = os.environ.get(_DISABLE_PLUGINS)
        os.environ[_DISABLE_PLUGINS] = "1"
        # The module that looks for them imports importlib.metadata and, through it, the package for mail.
        sys.modules.setdefault(_PLUGIN_LOADER, _NO_PLUGINS)
        try:
            return super().model_rebuild(_parent_namespace_depth=_parent_namespace_depth + 1, **options)
        finally:
            if sys.modules.get(_PLUGIN_LOADER) is _NO_PLUGINS:
                del sys.modules[_PLUGIN_LOADER]
            if disabled is None:
                del os.environ[_DISABLE_PLUGINS]
            else:
                os.environ[_DISABLE_PLUGINS] = disabled


def absent_block() -> Any:
    """Declare a block that is read as an empty one where the file lacks it, without building its model beforehand."""
    return Field(default={}, validate_default=True)


class Deferred:
    """A block whose module is imported, and whose model is built, only for a file that has the block."""

    def __init__(self, reference: str) -> None:
        """Take the `module:attribute` of the block."""
        self._reference = reference

    @cached_property
    def block(self) -> type[Block]:
        """The model itself."""
        block: type[Block] = load_reference(self._reference)
        return block

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> "CoreSchema":
        """Validate by the model, whose errors keep their places below this one."""
        return no_info_plain_validator_function(lambda value: self.block.model_validate(value))


if TYPE_CHECKING:
    from holdfast.spec.agent_schema import WorkspaceBlock
    from holdfast.spec.conversation_schema import CheckpointBlock, MessageBlock, ResponderBlock
    from holdfast.spec.gate_schema import GateBlock
    from holdfast.spec.hook_schema import HooksBlock
    from holdfast.spec.model_schema import Price
else:
    WorkspaceBlock = Annotated[Any, Deferred("holdfast.spec.agent_schema:WorkspaceBlock")]
    CheckpointBlock = Annotated[Any, Deferred("holdfast.spec.conversation_schema:CheckpointBlock")]
    MessageBlock = Annotated[Any, Deferred("holdfast.spec.conversation_schema:MessageBlock")]
    ResponderBlock = Annotated[Any, Deferred("holdfast.spec.conversation_schema:ResponderBlock")]
    GateBlock = Annotated[Any, Deferred("holdfast.spec.gate_schema:GateBlock")]
    HooksBlock = Annotated[Any, Deferred("holdfast.spec.hook_schema:HooksBlock")]
    Price = Annotated[Any, Deferred("holdfast.spec.model_schema:Price")]


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


def as_dataset(value: Any) -> Any:
    """Return the block that a path, or a list of paths, stands for."""
    return {"path": value} if isinstance(value, str | list) else value


AGENT_TURN: Final = 3600.0
AGENT_TRIAL: Final = 6 * 3600.0
"""default time limits of agents and of the embedded model, in seconds"""


def is_embedded(model: str) -> bool:
    """Return True for the name of a model that runs on this machine, inside Holdfast."""
    return model.startswith("local/")


class TrialLimitsBlock(Block):
    """What one trial may use. A trial that reaches a limit ends there; `on_limit` says how it counts."""

    time: Seconds | None = None
    """Time of the target in all turns. Default: `trial_timeout`."""
    tokens: int | None = Field(default=None, gt=0)
    """Input and output tokens of the target's model calls."""
    cost: float | None = Field(default=None, gt=0)
    """US dollars of the target's model calls."""
    calls: int | None = Field(default=None, gt=0)
    """Number of the target's model calls, as `usage.requests` counts them."""


OnLimit = Literal["score", "error"]


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
    """What becomes of a trial that reaches a limit: `score` grades what is there, `error` leaves the trial pending.
    Default: `score` for [agents](agents.md#limits) and with `trial`, else `error`."""
    on_exit: OnLimit | None = None
    """What becomes of a trial whose program ends with an exit code other than 0: `score` or `error`. Default: `score`
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
        """Return limits with enough time where the file names none.

        `patient`: for an agent, or a model that runs on this machine. Such a model is as fast as the machine is idle.
        Its requests share the cores, so a time-out that is too short throws away all of them at once, and they begin
        again. A limit of the trial's time is not cut short by the default of another one.
        """
        trial = (self.trial and self.trial.time) or 0.0
        usual = {
            "turn_timeout": max(trial, AGENT_TURN if patient else self.turn_timeout),
            "trial_timeout": max(2 * trial, AGENT_TRIAL if patient else self.trial_timeout),  # with its retries
        }
        written = self.model_fields_set
        values = {name: value if name in written else usual.get(name, value) for name, value in self}
        return self.model_construct(written, **values)  # unlike a copy, which would count the defaults as written


class OutputBlock(Block):
    """Copies of the results for other tools. Never part of a key."""

    nat: dict[str, Any] | None = None
    """Write NeMo Agent Toolkit's `workflow_output.jsonl` and related files: see
    [exports](exports.md#nemo-agent-toolkit)."""
    export: list[str | dict[str, Any]] = []
    """Destinations of a finished run, each a name such as `junit` or a mapping such as `{to: wandb, project: x}`:
    see [exports](exports.md)."""


class EvalFields(Block):
    """The top of an eval file; target and graders are read by their own models."""

    schemaVersion: str = SCHEMA_VERSION  # noqa: N815 - the key as users write it
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
    and names of graders to such lists. Their contents are part of the key. `!GLOB` names files that are no inputs: see
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
