"""Models of judges: graders that ask a model."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from holdfast.spec.grader_schema import Combine, GraderBlock
from holdfast.spec.schema import Api, BaseUrl, Block, Params
from holdfast.spec.target_schema import InBatches

if TYPE_CHECKING:
    from collections.abc import Iterable


class JudgeBlock(Block):
    """One of several judges, with settings of its own. What is not set here is taken from the grader."""

    model: str = Field(min_length=1)
    """Name of the model."""
    name: str | None = Field(default=None, min_length=1)
    """Name of the judge in results, for a model that judges twice with different settings. Default: `model`. Not part
    of the key."""
    base_url: BaseUrl | None = None
    """URL of this judge, or a list of URLs. Not part of the key."""
    api_key_env: str | None = None
    """Environment variable that holds this judge's API key. Not part of the key."""
    api: Api | None = None
    """API of this judge."""
    params: Params = {}
    """Parameters of this judge, which take precedence over those of the grader."""

    @property
    def label(self) -> str:
        """Name of the judge in results."""
        return self.name or self.model


class PromptGrader(GraderBlock):
    """Asks a judge model, with a rubric, or with a prompt of the user's and two tools that report pass and fail."""

    type: Literal["prompt"]
    rubric: str | None = Field(default=None, min_length=1)
    """Criteria for the judge: a template with `output`, `messages` and the row's fields, or a `.md`, `.yaml`, `.yml`
    or `.txt` file in the eval file's folder. A heading between `---` lines is left out."""
    prompt: str | None = Field(default=None, min_length=1)
    """Instructions for the judge in your own words, as a template. The judge answers by calling
    `set_waza_grade_pass` and `set_waza_grade_fail`."""
    model: str | Annotated[list[str | JudgeBlock], Field(min_length=1)] | None = None
    """The judge, or a list of judges, each of which votes: a name, or a mapping with a `model` and settings of its own.
    Default: the target's model and endpoint."""
    votes: int = Field(default=1, ge=1)
    """How often each judge is asked about an output."""
    combine: Combine = "mean"
    """How several votes become one verdict: the `mean`, the `median` or the `min` of their scores, or `majority`: 1 if
    more than half of them pass, else 0. Not part of the key."""
    base_url: BaseUrl | None = None
    """URL of the judge, or a list of URLs. `${NAME}` takes it from the environment. Not part of the key."""
    api_key_env: str | None = None
    """Environment variable that holds the judge's API key. Not part of the key."""
    api: Api | None = None
    """API of the judge, as for the target. Default: that of the judge's provider, or the target's."""
    batch: InBatches = None
    """Ask the judge in [batches](batches.md): `true`, or a mapping. Not part of the key."""
    params: Params = {}
    """Parameters sent with each request. A reply has at most 4,096 tokens unless a limit is set here."""
    range: tuple[float, float] | None = None
    """Lowest and highest score that the judge may give by the `rubric`, such as `[1, 10]`, mapped to 0 and 1. Default:
    0 to 1."""
    transcript: Literal["last", "all", "reasoning"] = "last"
    """Part of the conversation that the judge sees: the `last` reply, `all` of it with its roles, or the last reply
    with the `reasoning` of the model before it."""
    continue_session: bool = False
    """Not supported: a judge never continues the target's session. Use `transcript: all`."""
    mode: Literal["independent", "pairwise"] = "independent"
    """Only `independent` is supported. Use `holdfast compare --judge` to compare the answers of two runs."""

    checks: ClassVar[tuple[str, ...]] = ("rubric", "prompt")
    templates: ClassVar[tuple[str, ...]] = ("rubric", "prompt")
    sees_row: ClassVar[bool] = False
    later: ClassVar[tuple[str, ...]] = ("where", "prompt", "range", "continue_session", "mode", "api")
    _seats: "tuple[PromptGrader, ...]" = PrivateAttr(default=())
    _vote: int = PrivateAttr(default=1)
    _label: str | None = PrivateAttr(default=None)
    inherited: ClassVar[tuple[str, ...]] = ("model", "base_url", "api_key_env", "api")

    @property
    def vote(self) -> int:
        """Number of this vote among those of the same judge, from 1."""
        return self._vote

    def judges(self) -> "list[PromptGrader]":
        """Return a grader for each judge, with one model."""
        if not isinstance(self.model, list):
            return [self]
        judges = []
        for each in self.model:
            entry = JudgeBlock(model=each) if isinstance(each, str) else each
            own = {key: getattr(entry, key) for key in entry.model_fields_set - {"name", "params"}}
            judge = self.model_copy(update={**own, "params": {**self.params, **entry.params}})
            judge._label = entry.label
            judges.append(judge)
        return judges

    def with_seats(self, judges: "Iterable[PromptGrader]") -> Self:
        """Return the grader with its judges, each of which has one model."""
        seats = []
        for judge in judges:
            for number in range(1, self.votes + 1):
                seat = judge.model_copy(update={"votes": 1})
                seat._vote = number
                seats.append(seat)
        panel = self.model_copy()
        panel._seats = tuple(seats)
        return panel

    @property
    def seats(self) -> "tuple[PromptGrader, ...]":
        """The votes that this grader combines; none if it has one judge, who votes once."""
        return self._seats

    def expanded(self) -> "tuple[GraderBlock, ...]":
        """Return the votes, as graders of weight 0, then the grader itself."""
        shared = {"weight": 0.0, "threshold": self.threshold, "where": self.where}
        votes = (
            seat.model_copy(
                update={
                    **shared,
                    "name": f"{self.name}/{seat._label or seat.model}" + (f"#{seat.vote}" if seat.vote > 1 else ""),
                }
            )
            for seat in self._seats
        )
        return (*votes, self)

    def identity(self) -> dict[str, Any]:
        """Return the keys that are in a vote's key: how votes are combined is in none."""
        identity = {key: value for key, value in super().identity().items() if key not in ("votes", "combine")}
        return identity if self._vote == 1 else {**identity, "vote": self._vote}

    @model_validator(mode="after")
    def _has_votes_to_combine(self) -> Self:
        entries = self.model if isinstance(self.model, list) else []
        labels = [each if isinstance(each, str) else each.label for each in entries]
        if len(set(labels)) < len(labels):
            raise ValueError(
                "`model` names a judge twice: `votes: 2` asks each judge twice, and a `name` tells apart judges that "
                "have one model"
            )
        if "combine" in self.model_fields_set and self.votes == 1 and not isinstance(self.model, list):
            raise ValueError("`combine` is for several judges (`model: [a, b]`) or several `votes`")
        return self

    @model_validator(mode="after")
    def _range_is_ordered(self) -> Self:
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError("`range` is the lowest and the highest score, as in [1, 10]")
        if self.range is not None and self.prompt is not None:
            raise ValueError("`range` is for a score by a `rubric`; with a `prompt` the judge gives no score")
        return self

    @model_validator(mode="after")
    def _judges_alone(self) -> Self:
        if self.continue_session:
            raise ValueError(
                "continue_session: a judge never continues the target's own session; `transcript: all` shows it "
                "the whole conversation"
            )
        if self.mode == "pairwise":
            raise ValueError(
                "mode: pairwise compares the answers of two runs, which a grader cannot; use `holdfast compare --judge`"
            )
        return self
