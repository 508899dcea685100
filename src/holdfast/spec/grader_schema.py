"""Models of the keys that all graders share, and of graders that check what was said. Unknown keys are errors."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from holdfast.spec.expected import alternatives, reads_as_before
from holdfast.spec.numbers import numbers_in
from holdfast.spec.regex import Dialect, compile_regex
from holdfast.spec.schema import Api, BaseUrl, Block, Formula, Strings
from holdfast.spec.target_schema import InBatches
from holdfast.spec.template import RENDER_ERRORS, template

Measure = Literal["tokens", "seconds"]
Combine = Literal["majority", "mean", "median", "min"]
"""how the votes of several judges become one verdict"""
OnTimeout = Literal["fail", "error"]
"""what a check is that takes too long because of the answer: failed, with the score 0, or an error and tried again"""


def _not_empty(value: Any) -> Any:
    if value is None:
        raise ValueError("must not be null; omit it to use the row's `expected`")
    if value == []:
        raise ValueError("is an empty list: no answer could be right")
    return value


NotEmpty = BeforeValidator(_not_empty)
Expected = Annotated[str | int | float | bool | list[str | int | float | bool], NotEmpty]
"""a text, a number, a template over the row, or a list of them: any one of the list will do"""


class GraderBlock(Block):
    """Keys that every grader has."""

    type: str
    """Type of the grader."""
    name: str = ""
    """Name in reports. Default: the type. `overall`, `score`, `passed`, `coverage` and `target` are reserved."""
    weight: float = Field(default=1.0, ge=0)
    """Weight in the trial's overall score. A grader of weight 0 is reported, and changes neither the score of a trial
    nor whether it passes."""
    threshold: float | None = Field(default=None, ge=0, le=1)
    """Minimum score to pass. The default depends on the type."""
    where: str | None = None
    """Expression over the row's fields. Where it is false, the grader does not apply to the row and counts in no
    number."""

    checks: ClassVar[tuple[str, ...]] = ()
    """of these fields at least one must be set, or the grader would check nothing"""
    templates: ClassVar[tuple[str, ...]] = ("expected",)
    alternatives: ClassVar[tuple[str, ...]] = ()
    """fields whose templates may stand for a list of strings"""
    later: ClassVar[tuple[str, ...]] = ("where", "transcript")
    """fields that are in the key only where they are set, so that grades from before they came stay good"""
    inherited: ClassVar[tuple[str, ...]] = ()
    """fields whose defaults come from the target; a `baseline` is graded with those of the first target"""
    needs_workspace: ClassVar[bool] = False

    @property
    def measures(self) -> tuple[Measure, ...]:
        """Measures of the output that the verdict depends on, beside its text: a part of its grades' keys."""
        return ()

    def expanded(self) -> "tuple[GraderBlock, ...]":
        """Return the graders that the block stands for: itself, after the votes that it combines."""
        return (self,)

    @property
    def program(self) -> tuple[str, ...]:
        """The program that the grader runs, with its arguments; empty where there is none."""
        return ()

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        if self.checks and not any(self._is_set(field) for field in self.checks):
            written = (type(self).model_fields[field].alias or field for field in self.checks)
            raise ValueError(f"checks nothing: give at least one of {', '.join(written)}")
        return self

    def _is_set(self, field: str) -> bool:
        value = getattr(self, field)
        return value not in (None, "", [], (), {}) and value != type(self).model_fields[field].default

    def reads_as_before(self, fields: Mapping[str, Any]) -> bool:
        """Return True for a row that is read as before lists were supported, so that earlier verdicts hold."""
        for name in self.alternatives:
            value = getattr(self, name)
            if name == "expected":
                if not reads_as_before(value, fields):
                    return False
            elif not all(reads_as_before(part, fields) for part in value):
                return False
        return True

    def identity(self) -> dict[str, Any]:
        """Return the keys of the block that are in a grade's key: all but name, weight, threshold and timeout."""
        identity = self.model_dump(exclude={"name", "weight", "threshold", "timeout"})
        for field in self.later:
            if field in identity and not self._is_set(field):
                del identity[field]
        return identity


class TextBlock(GraderBlock):
    """A grader that looks at text."""

    transcript: Literal["last", "all"] = "last"
    """What to look at: the `last` reply, or `all` replies so far, joined by blank lines."""


class PatternBlock(GraderBlock):
    """A grader with regular expressions."""

    dialect: Dialect = "python"
    """Meaning of [patterns](graders.md#patterns) that both Python's `re` and RE2 can read: `python`, or `re2` as in
    Go."""

    def patterns(self) -> Iterable[tuple[str, bool]]:
        """Return all regular expressions, each with whether it ignores case."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """Add the engine where its verdict could differ from that of Python's `re`, which made all earlier grades."""
        identity = super().identity()
        del identity["dialect"]
        regexes = (compile_regex(p, ignore_case=loose, dialect=self.dialect) for p, loose in self.patterns())
        return {**identity, "engine": "re2"} if any(regex.key for regex in regexes) else identity


class ExactGrader(TextBlock):
    """Checks that the whole answer equals the expected one."""

    type: Literal["exact"]
    expected: Expected = "{{ expected }}"
    """Expected answer, or a list of accepted answers. Templates over the row."""
    ignore_case: bool = False
    """Ignore upper and lower case."""
    strip: bool = True
    """Ignore white space around the answer and the expected value."""

    alternatives: ClassVar[tuple[str, ...]] = ("expected",)


class TextGrader(PatternBlock, TextBlock):
    """Checks which texts and patterns the answer contains. Keys that end in `_cs` match case."""

    type: Literal["text"]
    contains: Strings = []
    """Texts that must all occur, ignoring case. Templates over the row."""
    contains_cs: Strings = []
    """Texts that must all occur, matching case. Templates over the row."""
    contains_any: Strings = []
    """Texts of which at least one must occur, ignoring case. Templates over the row."""
    contains_any_cs: Strings = []
    """Texts of which at least one must occur, matching case. Templates over the row."""
    not_contains: Strings = []
    """Texts that must not occur, ignoring case. Templates over the row."""
    not_contains_cs: Strings = []
    """Texts that must not occur, matching case. Templates over the row."""
    regex_match: Strings = []
    """Patterns that must be found."""
    regex_not_match: Strings = []
    """Patterns that must not be found."""

    checks: ClassVar[tuple[str, ...]] = (
        "contains",
        "contains_cs",
        "contains_any",
        "contains_any_cs",
        "not_contains",
        "not_contains_cs",
        "regex_match",
        "regex_not_match",
    )
    templates: ClassVar[tuple[str, ...]] = checks[:6]
    alternatives: ClassVar[tuple[str, ...]] = templates

    @model_validator(mode="after")
    def _regexes_compile(self) -> Self:
        for pattern, _ in self.patterns():
            compile_regex(pattern)
        if any("" in getattr(self, field) for field in self.checks):
            raise ValueError("checks nothing: an empty text is in every answer")
        return self

    def patterns(self) -> Iterable[tuple[str, bool]]:
        """Return those of `regex_match` and `regex_not_match`."""
        return ((pattern, False) for pattern in (*self.regex_match, *self.regex_not_match))


class ChoiceGrader(TextBlock):
    """Checks the letter of a multiple-choice answer."""

    type: Literal["choice"]
    expected: Annotated[str | int | list[str | int], NotEmpty] = "{{ expected }}"
    """Letter of the right choice, its position counted from 0, or a list of accepted ones."""
    choices: str = Field(default="ABCDEFGHIJ", min_length=1)
    """Letters that count as choices."""

    alternatives: ClassVar[tuple[str, ...]] = ("expected",)


class NumberGrader(PatternBlock, TextBlock):
    """Checks a number in the answer: the last one, or the one after a pattern."""

    type: Literal["number"]
    expected: Annotated[str | int | float | list[str | int | float], NotEmpty] = "{{ expected }}"
    """Expected number, or a list of accepted numbers. Templates over the row."""
    after: str | None = None
    """Pattern. The first number after its last match is compared. Default: the last number of the answer."""
    tolerance: float = Field(default=0.0, ge=0)
    """Largest accepted difference."""
    relative: bool = False
    """Take `tolerance` as a share of the expected number."""

    alternatives: ClassVar[tuple[str, ...]] = ("expected",)

    @model_validator(mode="after")
    def _regex_compiles(self) -> Self:
        if self.after is not None:
            compile_regex(self.after)
        return self

    @model_validator(mode="after")
    def _expects_numbers(self) -> Self:
        for part in self.expected if isinstance(self.expected, list) else [self.expected]:
            if not (isinstance(part, str) and "{" in part) and len(numbers_in(str(part))) != 1:
                raise ValueError(f"expected: {part!r} is not one number; write several as a list")
        return self

    def reads_as_before(self, fields: Mapping[str, Any]) -> bool:
        """Return True for a row that is read as before: of a text with several numbers, the first once counted."""
        if not super().reads_as_before(fields):
            return False
        if not isinstance(self.expected, str):
            return True
        value = template(self.expected).lone_field(fields)
        if isinstance(value, int | float) or (isinstance(value, str) and value.isdecimal()):
            return True  # as most rows are
        try:
            return all(len(numbers_in(text)) < 2 for text in alternatives(self.expected, fields))
        except RENDER_ERRORS:
            return False

    def patterns(self) -> Iterable[tuple[str, bool]]:
        """Return that of `after`."""
        return () if self.after is None else ((self.after, False),)


class LikelihoodGrader(GraderBlock):
    """Checks that the right continuation is the most likely one. Needs `continuations`."""

    type: Literal["likelihood"]
    expected: Annotated[str | int | list[str | int], NotEmpty] = "{{ expected }}"
    """Right continuation: its position counted from 0, its text among `choices`, or a list of accepted ones."""
    normalize: Literal["none", "chars", "bytes", "tokens"] = "none"
    """Divide each log-likelihood by the length of its text, in characters, bytes of UTF-8 or tokens."""
    choices: Formula | None = None
    """Expression over the row that returns the texts whose lengths normalize, and among which `expected` is looked
    up. Default: the continuations without white space at their beginning."""
    greedy: bool = False
    """Check instead that greedy decoding would produce the right continuation."""

    @model_validator(mode="after")
    def _greedy_is_not_normalized(self) -> Self:
        if self.greedy and self.normalize != "none":
            raise ValueError("`greedy` compares no likelihoods, so there is nothing to `normalize`")
        return self


RUBRIC_FILES = (".md", ".yaml", ".yml", ".txt")


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
    params: dict[str, Any] = {}
    """Parameters of this judge, which take precedence over those of the grader."""

    @property
    def label(self) -> str:
        """What the judge is called in results."""
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
    params: dict[str, Any] = {}
    """Parameters sent with each request. A reply has at most 4,096 tokens unless a limit is set here."""
    range: tuple[float, float] | None = None
    """Lowest and highest score that the judge may give by the `rubric`, such as `[1, 10]`, mapped to 0 and 1. Default:
    0 to 1."""
    transcript: Literal["last", "all", "reasoning"] = "last"
    """What the judge sees: the `last` reply, `all` of the conversation with its roles, or the last reply with the
    `reasoning` of the model before it."""
    continue_session: bool = False
    """Not supported: a judge never continues the target's session. Use `transcript: all`."""
    mode: Literal["independent", "pairwise"] = "independent"
    """Only `independent` is supported. Use `holdfast compare --judge` to compare the answers of two runs."""

    checks: ClassVar[tuple[str, ...]] = ("rubric", "prompt")
    templates: ClassVar[tuple[str, ...]] = ("rubric", "prompt")
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


TAKEN_NAMES = frozenset({"overall", "score", "passed", "coverage", "target"})
"""words of reports, gates and errors, which a grader of that name could not be told from"""
