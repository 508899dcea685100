"""The grader of likelihoods: is the right continuation the most likely one?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import model_validator

from holdfast.conversation.turns import evaluate_continuations
from holdfast.errors import AttemptError
from holdfast.graders.expected import one_of
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.grader_schema import GraderBlock, NotEmpty
from holdfast.spec.schema import Formula
from holdfast.spec.template import RENDER_ERRORS, expression, template
from holdfast.targets.types import most_likely

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.data.checks import RowCheck
    from holdfast.data.columns import Panel
    from holdfast.data.dataset import Sample
    from holdfast.graders.types import Case
    from holdfast.spec.document import Location
    from holdfast.spec.eval import Eval, Origin


_LIST: Final = (list, tuple)


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

    expressions: ClassVar[tuple[str, ...]] = ("choices",)

    @model_validator(mode="after")
    def _greedy_is_not_normalized(self) -> Self:
        if self.greedy and self.normalize != "none":
            raise ValueError("`greedy` compares no likelihoods, so there is nothing to `normalize`")
        return self


class Likelihood(InstantGrader):
    """Scores 1 if the right continuation is the most likely one, or with `greedy` the result of greedy decoding."""

    schema = LikelihoodGrader
    block: LikelihoodGrader

    def __init__(self, block: LikelihoodGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._continuations = origin.spec.continuations

    def check(self, case: Case) -> Verdict:
        """Compare the model's likelihoods, normalized as the block says."""
        likelihoods = case.output.messages[-1].get("likelihoods")
        if self._continuations is None or not likelihoods:
            raise AttemptError("grader", "the output has no likelihoods", retry=False)
        texts = [continuation.text for continuation in evaluate_continuations(self._continuations, case.sample)]
        choices = _choices(self.block, case.sample.fields, texts)
        if not len(likelihoods) == len(texts) == len(choices):
            counts = f"{len(likelihoods)} likelihoods, {len(texts)} continuations and {len(choices)} choices"
            raise AttemptError("grader", f"this row has {counts}", retry=False)
        right = _positions(self.block.expected, case.sample.fields, choices)
        if self.block.greedy:
            passed = any(likelihoods[position]["greedy"] for position in right)
            feedback = f"greedy decoding would not produce {one_of([choices[position] for position in right])}"
            return Verdict(float(passed), "" if passed else feedback)
        chosen = most_likely([self._normalize(*pair) for pair in zip(likelihoods, choices, strict=True)])
        passed = chosen in right
        feedback = f"chose {choices[chosen][:200]!r}, expected {one_of([choices[position] for position in right])}"
        return Verdict(float(passed), "" if passed else feedback, {"chosen": chosen})

    def _normalize(self, likelihood: dict[str, Any], choice: str) -> float:
        lengths = {
            "none": 1,
            "chars": len(choice),
            "bytes": len(choice.encode("utf-8", "surrogatepass")),
            "tokens": likelihood["tokens"],
        }
        length = lengths[self.block.normalize]
        return float(likelihood["logprob"] / length) if length else float("-inf")


def row_check(spec: Eval) -> RowCheck | None:
    """Return a check of each row's continuations and expected positions; None for an eval without continuations."""
    formula = spec.continuations
    if formula is None:
        return None
    graders = [
        (number, location, block)
        for number, (location, block) in enumerate(spec.placed_graders())
        if isinstance(block, LikelihoodGrader)
    ]

    def check(sample: Sample, panel: Panel) -> Iterator[tuple[Location, str]]:
        try:
            continuations = evaluate_continuations(formula, sample)
        except AttemptError as error:
            yield ("continuations",), error.message
            return
        texts = [continuation.text for continuation in continuations]
        if "" in texts and not all(continuation.text or continuation.rolling for continuation in continuations):
            yield ("continuations",), f"{sample.where}: continuation {texts.index('')} is empty (the first is 0)"
        for number, location, block in graders:
            if number not in panel.graders or number in panel.unsure:
                continue
            key = "choices"
            try:
                choices = _choices(block, sample.fields, texts)
                key = "expected"
                _positions(block.expected, sample.fields, choices)
            except AttemptError as error:
                yield (*location, key), f"{sample.where}: {error.message}"

    return check


def expected_positions(spec: Eval, sample: Sample) -> tuple[int, ...]:
    """Return the positions that the first likelihood grader expects for a row; empty if they are unclear."""
    block = next((block for _, block in spec.placed_graders() if isinstance(block, LikelihoodGrader)), None)
    if block is None or spec.continuations is None:
        return ()
    try:
        texts = [continuation.text for continuation in evaluate_continuations(spec.continuations, sample)]
        return tuple(_positions(block.expected, sample.fields, _choices(block, sample.fields, texts)))
    except AttemptError:
        return ()


def _choices(block: LikelihoodGrader, fields: dict[str, Any], texts: list[str]) -> list[str]:
    if block.choices is None:
        return [text.lstrip() for text in texts]
    try:
        choices = expression(block.choices)(fields)
    except RENDER_ERRORS as error:
        raise AttemptError("grader", f"cannot evaluate choices: {error}", retry=False) from error
    if not isinstance(choices, _LIST) or not all(isinstance(choice, str) for choice in choices):
        raise AttemptError("grader", f"choices give {choices!r:.80}, not a list of texts", retry=False)
    return list(choices)


def _positions(expected: Any, fields: dict[str, Any], choices: list[str]) -> list[int]:
    """Return the positions of the right continuations."""
    values: list[Any] = []
    for part in expected if isinstance(expected, list) else [expected]:
        try:
            value = template(part).value(fields) if isinstance(part, str) else part
        except RENDER_ERRORS as error:
            raise AttemptError("grader", f"cannot render {part!r}: {error}", retry=False) from error
        values += value if isinstance(value, _LIST) else [value]
    if not values:
        raise AttemptError("grader", f"{expected!r} is an empty list for this row", retry=False)
    return [_position(value, choices) for value in values]


def _position(value: Any, choices: list[str]) -> int:
    """Return the position that a number, a text of digits, or the text of a choice stands for."""
    if isinstance(value, str):
        places = [place for place, choice in enumerate(choices) if choice.strip() == value.strip()]
        number = int(value) if value.strip().isdecimal() else None
        if number is not None and any(place != number for place in places):
            problem = "is a choice and a position: write a number for the position, or other `choices`"
        elif number is not None:
            return _position(number, choices)
        elif len(places) == 1:
            return places[0]
        else:
            problem = "is not among the choices" if not places else "is several of the choices: give its position"
        raise AttemptError("grader", f"the expected continuation {value[:80]!r} {problem}", retry=False)
    if type(value) is not int or not 0 <= value < len(choices):
        raise AttemptError(
            "grader",
            f"the expected continuation is {value!r:.80}; it is a text, or a position from 0 to {len(choices) - 1}",
            retry=False,
        )
    return value
