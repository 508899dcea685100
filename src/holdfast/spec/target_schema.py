"""Models of the target's block: the base of all, and models, with likelihoods."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeGuard

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from holdfast.spec.schema import Api, BaseUrl, Block, Deferred, Formula, Params, ReasoningHistory, absent_block

if TYPE_CHECKING:
    from holdfast.spec.agent_schema import ToolBlock
    from holdfast.spec.http_target_schema import HttpTarget
    from holdfast.spec.model_schema import BatchBlock, ThoughtsBlock
else:
    ToolBlock = Annotated[Any, Deferred("holdfast.spec.agent_schema:ToolBlock")]
    BatchBlock = Annotated[Any, Deferred("holdfast.spec.model_schema:BatchBlock")]
    ThoughtsBlock = Annotated[Any, Deferred("holdfast.spec.model_schema:ThoughtsBlock")]


class TargetBlock(Block):
    """The base of every target's keys."""

    multi_call: ClassVar[bool] = False
    """a reply may take several model or tool calls, which are recorded one by one"""
    proxied: ClassVar[bool] = False
    """for plug-ins: the target's programs call models through a recording proxy, so that a reply has several calls"""
    works_alone: ClassVar[bool] = False
    """code that works on its own until it is done: an agent, a program, a function"""
    has_exit_code: ClassVar[bool] = False
    """a program, whose exit code tells whether it failed"""
    expressions: ClassVar[tuple[str, ...]] = ()
    """fields that hold expressions over the row"""
    sees_row: ClassVar[bool] = True
    """the target gets the whole row; False: only what templates and expressions name"""

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
    def command_line(self) -> tuple[str, ...]:
        """The program that the eval file lets the target run, with its arguments; empty where there is none."""
        return ()

    @property
    def reports_cost(self) -> bool:
        """False where neither replies nor the models' prices tell what a reply costs."""
        return True

    @property
    def counts_calls(self) -> bool:
        """True if the target's model calls are counted one by one."""
        return self.multi_call or self.proxied

    @property
    def takes_files(self) -> bool:
        """True where messages may hold images, audio and other files."""
        return False

    @property
    def label(self) -> str:
        """The target's name in tables and directory names."""
        return self.kind


def is_http(block: TargetBlock) -> "TypeGuard[HttpTarget]":
    """Tell an HTTP target from others, without its schema, which evals of models do not import."""
    return block.kind == "http"


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


def _as_block(value: Any) -> Any:
    """Return the block that `true` stands for."""
    return ({} if value else None) if isinstance(value, bool) else value


InBatches = Annotated[BatchBlock | None, BeforeValidator(_as_block)]


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


SESSION = "<session>.py:"
"""stands before the name of a function that was typed into a notebook or an interpreter, and is in no file"""
