"""Models of the keys that graders share, and of judges. Unknown keys are errors.

Each other model is next to its grader, in `holdfast.graders`.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeGuard

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from holdfast.spec.regex import Dialect, Slow, compile_regex
from holdfast.spec.schema import Api, BaseUrl, Block, Params
from holdfast.spec.target_schema import InBatches
from holdfast.spec.template import pattern_example

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Measure = Literal["tokens", "seconds"]
Combine = Literal["majority", "mean", "median", "min"]
"""how the votes of several judges become one verdict"""
OnTimeout = Literal["fail", "error"]
"""the result of a check that takes too long because of the answer: failed with score 0, or an error and retried"""
TAKEN_NAMES = frozenset({"overall", "score", "passed", "coverage", "whole", "graded", "target"})
"""words of reports, gates and errors, which would be ambiguous as names of graders"""


def _not_empty(value: Any) -> Any:
    if value is None:
        raise ValueError("must not be null; omit it to use the row's `expected`")
    if value == []:
        raise ValueError("is an empty list: no answer could be right")
    return value


NotEmpty = BeforeValidator(_not_empty)
Expected = Annotated[str | int | float | bool | list[str | int | float | bool], NotEmpty]
"""a text, a number or a template over the row, or a list of accepted ones"""


class GraderBlock(Block):
    """Keys that every grader has."""

    type: str
    """Type of the grader."""
    name: str = ""
    """Name in reports. Default: the type. `overall`, `score`, `passed`, `coverage`, `whole`, `graded` and `target` are
    reserved."""
    weight: float = Field(default=1.0, ge=0)
    """Weight in the trial's overall score. A grader of weight 0 is reported, but affects neither the trial's score nor
    whether it passes."""
    threshold: float | None = Field(default=None, ge=0, le=1)
    """Minimum score to pass. The default depends on the type."""
    where: str | None = None
    """Expression over the row's fields. If it is false, the grader does not apply to the row, and counts nowhere."""

    checks: ClassVar[tuple[str, ...]] = ()
    """at least one of these fields must be set, or the grader would check nothing"""
    templates: ClassVar[tuple[str, ...]] = ("expected",)
    alternatives: ClassVar[tuple[str, ...]] = ()
    """fields whose templates may stand for a list of strings"""
    sees_row: ClassVar[bool] = True
    """the grader may read any field of the row; False: only fields that its templates name"""
    expressions: ClassVar[tuple[str, ...]] = ()
    """fields that hold expressions over the row, which must have a value for every row"""
    runs_code: ClassVar[bool] = False
    """the grader runs the user's code"""
    inherited: ClassVar[tuple[str, ...]] = ()
    """fields whose defaults come from the target; a `baseline` is graded with the first target's defaults"""
    needs_workspace: ClassVar[bool] = False

    @property
    def measures(self) -> tuple[Measure, ...]:
        """Measures of the output that the verdict depends on besides its text: part of its grades' keys."""
        return ()

    def expanded(self) -> "tuple[GraderBlock, ...]":
        """Return the graders that the block stands for: the votes that it combines, then itself."""
        return (self,)

    @property
    def program(self) -> tuple[str, ...]:
        """The program that the grader runs, with its arguments; empty if it runs no program."""
        return ()

    def idle_checks(self) -> "Iterator[str]":
        """Yield a warning for each check that passes or fails whatever the answer is. It may be intended."""
        if self.threshold == 0:
            yield f"threshold: 0 is met by every score, so {self.name!r} passes every output"

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        if self.checks and not any(self._is_set(field) for field in self.checks):
            written = (type(self).model_fields[field].alias or field for field in self.checks)
            raise ValueError(f"checks nothing: give at least one of {', '.join(written)}")
        return self

    def _is_set(self, field: str) -> bool:
        value = getattr(self, field)
        return value not in (None, "", [], (), {}) and value != type(self).model_fields[field].default

    def identity(self) -> dict[str, Any]:
        """Return the block's part of a grade's key: all fields but name, weight, threshold and timeout.

        Defaults are left out, so that a new field of a block changes no key.
        """
        return self.model_dump(exclude={"name", "weight", "threshold", "timeout"}, exclude_defaults=True)


def is_everywhere(pattern: str, texts: "Sequence[str]") -> bool:
    """Return True for a pattern that is found in all texts, whatever a row puts into its templates."""
    example = pattern_example(pattern)
    if example is None:
        return False
    try:
        return all(compile_regex(example).search(text) for text in texts)
    except (ValueError, Slow):  # a pattern of another dialect, or one that could take long
        return False


class TextBlock(GraderBlock):
    """A grader that looks at text."""

    transcript: Literal["last", "all"] = "last"
    """What to look at: the `last` reply, or `all` replies so far, joined by blank lines."""


class PatternBlock(GraderBlock):
    """A grader with regular expressions."""

    dialect: Dialect = "python"
    """Meaning of [patterns](graders.md#patterns) that both Python's `re` and RE2 can read: `python`, or `re2` as in
    Go."""


class JudgeBlock(Block):
    """One of several judges, with its own settings. Settings that it lacks are the grader's."""

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
    """Parameters of this judge, which override the grader's."""

    @property
    def label(self) -> str:
        """Name of the judge in results."""
        return self.name or self.model


class PromptGrader(GraderBlock):
    """Asks a judge model, with a rubric, or with the user's prompt and two tools that report pass and fail."""

    type: Literal["prompt"]
    rubric: str | None = Field(default=None, min_length=1)
    """Criteria for the judge: a template with `output`, `messages` and the row's fields, or a `.md`, `.yaml`, `.yml`
    or `.txt` file in the eval file's folder. A heading between `---` lines is left out."""
    prompt: str | None = Field(default=None, min_length=1)
    """Instructions for the judge in your own words, as a template. The judge answers by calling
    `set_waza_grade_pass` and `set_waza_grade_fail`."""
    model: str | Annotated[list[str | JudgeBlock], Field(min_length=1)] | None = None
    """The judge, or a list of judges who each vote: names, or mappings with a `model` and its settings. Default: the
    target's model and endpoint."""
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
    """API of the judge, as for the target. Default: the API of the judge's provider, or the target's."""
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
    _seats: "tuple[PromptGrader, ...]" = PrivateAttr(default=())
    _vote: int = PrivateAttr(default=1)
    _label: str | None = PrivateAttr(default=None)
    inherited: ClassVar[tuple[str, ...]] = ("model", "base_url", "api_key_env", "api")

    @property
    def vote(self) -> int:
        """Number of this vote among its judge's votes, from 1."""
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
        """The votes that this grader combines; empty for one judge who votes once."""
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
        """Return the keys that are part of a vote's key. How votes are combined is in no key."""
        identity = {key: value for key, value in super().identity().items() if key not in ("votes", "combine")}
        return identity if self._vote == 1 else {**identity, "vote": self._vote}

    @model_validator(mode="after")
    def _has_votes_to_combine(self) -> Self:
        entries = self.model if isinstance(self.model, list) else []
        labels = [each if isinstance(each, str) else each.label for each in entries]
        if len(set(labels)) < len(labels):
            raise ValueError(
                "`model` names a judge twice: `votes: 2` asks each judge twice, and a `name` distinguishes judges with "
                "the same model"
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


def is_judge(block: object) -> TypeGuard[PromptGrader]:
    """Return True for a block of a judge."""
    return isinstance(block, PromptGrader)
