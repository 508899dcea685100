"""Check an eval against the rows of its dataset, before anybody pays for a request.

`TemplateChecks` looks for variables that rows lack, and for lists that would be sent as texts. `Questions` refuses an
eval that asks the target the same for every row: in most of them, a field is spelled as another tool spells it, such as
`{question}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.data.columns import Panel
from holdfast.errors import ConfigError, Problem
from holdfast.spec.template import RENDER_ERRORS, NotText, Template, TemplateError, expression

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from holdfast.data.dataset import Sample
    from holdfast.data.readers import Row
    from holdfast.spec.document import Location
    from holdfast.spec.eval import Eval

Shape = tuple[tuple[str, ...], Panel]
"""the names of a row's fields, and the graders that apply to it"""
RowCheck = Callable[["Sample", Panel], Iterable[tuple["Location", str]]]
"""yields what is wrong with a row, and which key of the eval file says so"""

_SENT: Final = ("system", "prompt", "messages", "follow_ups")
"""templates whose text is sent to the target as it comes out"""
_NESTED: Final = (list, tuple, dict)
_BRACED: Final = re.compile(r"\$\{\s*(\w+)\s*\}|(?<![\w\\{}])\{\s*(\w+)\s*\}(?!\})|%\((\w+)\)s")
"""fields as other tools spell them: `${x}`, `{x}`, `%(x)s`; but not `\\boxed{x}`"""
_LIKE_FIELDS: Final = re.compile(rf"{_BRACED.pattern}|\$(\w+)|<(\w+)>|\[\[?\s*(\w+)\s*\]\]?")
"""the same, and spellings that are often something else: `$x`, `<x>`, `[x]`"""
_PLACEHOLDERS: Final[Row] = {"prompt": "", "messages": [], "trial": 1}
"""variables of a target's templates, in addition to the row's fields"""


def _render(compiled: Template, placeholders: Row, fields: Row) -> str:
    return compiled.render({**fields, **placeholders} if placeholders else fields)


class _RowTemplate(msgspec.Struct, frozen=True):
    """A template or expression over the row."""

    location: Location
    """in the eval file"""
    fill_in: Callable[[Row], Any]
    needed: frozenset[str]
    """fields that it names"""
    grader: int | None
    """the number of the grader that it belongs to, if any"""


class TemplateChecks:
    """Checks templates, expressions and graders' `where` against rows.

    Variables that some rows lack are reported before the run.
    """

    def __init__(self, spec: Eval, check: RowCheck | None) -> None:
        self._document = spec.document
        self._check = check
        self.fields: set[str] = set()
        """fields that some row has"""
        self._missing: dict[Location, tuple[str, str, frozenset[str]]] = {}
        self._templates: list[_RowTemplate] = []
        self._not_texts: dict[Location, str] = {}
        self._unfit: dict[Location, str] = {}
        self._graders = list(spec.placed_graders())
        numbers = {location: number for number, (location, _) in enumerate(self._graders)}
        for each in spec.templates():
            compiled = each.compile(texts_only=each.location[0] in _SENT)
            if needed := compiled.names - each.variables:
                placeholders = dict.fromkeys(compiled.names - needed, "")
                grader = None if each.grader is None else numbers[each.grader]
                fill_in = partial(_render, compiled, placeholders)
                self._templates.append(_RowTemplate(each.location, fill_in, needed, grader))
        for location, formula in spec.row_expressions():
            evaluate = expression(formula)
            if evaluate.names:
                grader = numbers.get(location[:-1])
                self._templates.append(_RowTemplate(location, evaluate.required, evaluate.names, grader))
        self._doubtful = lru_cache(self._find_doubtful)

    def look(self, sample: Sample, shape: Shape) -> None:
        incomplete, sent = self._doubtful(shape)
        for template in incomplete:
            self._try(sample, template)
        for template in sent:
            if _any_nested(sample.fields, template.needed):
                self._try(sample, template)
        if self._check is not None:
            for location, message in self._check(sample, shape[1]):
                self._unfit.setdefault(location, message)

    def is_doubtful(self, shape: Shape) -> bool:
        """Return True if a template or the `where` of a grader names a field that rows of this shape lack."""
        return any(template.grader is not None for template in self._find_doubtful(shape)[0])

    def _find_doubtful(self, shape: Shape) -> tuple[list[_RowTemplate], list[_RowTemplate]]:
        """Return the templates that lack a field in rows of this shape, and others that are sent.

        Most datasets have many rows of few shapes, so this is asked once for each.
        """
        fields, panel = shape
        self.fields.update(fields)
        templates = [each for each in self._templates if each.grader is None or each.grader in panel.graders]
        for number in panel.unsure:
            location, block = self._graders[number]
            condition = expression(block.where or "")
            templates.append(_RowTemplate((*location, "where"), condition, condition.names, number))
        incomplete = [each for each in templates if not each.needed.issubset(fields)]
        return incomplete, [each for each in templates if each.location[0] in _SENT and each not in incomplete]

    def _try(self, sample: Sample, template: _RowTemplate) -> None:
        location, missing = template.location, template.needed - sample.fields.keys()
        try:
            template.fill_in(sample.fields)
        except NotText as error:
            self._not_texts.setdefault(location, f"{sample.where}: {error}")
        except TemplateError as error:
            if missing:
                self._missing.setdefault(location, (sample.where, str(error), missing))
        except RENDER_ERRORS:
            return  # not due to a missing field: an error of that trial, when it runs

    def conclude(self) -> None:
        problems = []
        for location, (where, message, names) in self._missing.items():
            unknown = sorted(names - self.fields)
            if unknown:
                fields = ", ".join(sorted(self.fields))
                text = f"no sample has a field {', '.join(map(repr, unknown))}; they have: {fields}"
            else:
                text = f"{where}: {message}"
            problems.append(Problem(self._document.where(location), text))
        if problems:
            raise ConfigError(problems)

    def unsendable(self) -> ConfigError | None:
        """Return an error for templates that would send a list or an object as a text, and for rows that do not fit."""
        messages = {**self._unfit, **self._not_texts}
        problems = [Problem(self._document.where(location), message) for location, message in messages.items()]
        hint = NotText.hint if self._not_texts else "Fix these rows, or leave them out with dataset.where."
        return ConfigError(problems, remedy=hint) if problems else None


def _any_nested(fields: Row, names: Iterable[str]) -> bool:
    for name in names:  # noqa: SIM110 - asked of each row, for which a generator takes three times as long
        if isinstance(fields[name], _NESTED):
            return True
    return False


class Questions:
    """Compares what rows ask the target, up to the first row that asks something else."""

    def __init__(self, spec: Eval) -> None:
        self._document = spec.document
        self._key = "messages" if spec.prompt is None else "prompt"
        self._asked: list[Callable[[Row], Any]] = []
        self._sources: list[str] = []
        self.names: set[str] = set()
        """fields that the conversation or the target uses"""
        for each in spec.templates():
            if each.grader is None:
                compiled = Template(each.source)
                self._sources.append(each.source)
                self.names |= (compiled.names | ({"row"} if compiled.takes_row else set())) - each.variables
                placeholders = {name: _PLACEHOLDERS[name] for name in each.variables}
                self._asked.append(partial(_render, compiled, placeholders))
        for location, formula in spec.expressions():
            # `stop_when` ends a conversation; it asks nothing.
            if location[0] not in ("graders", "checkpoints") and location != ("responder", "stop_when"):
                evaluate = expression(formula)
                self.names |= evaluate.names
                self._asked.append(evaluate)
        self.differ = False
        """two rows ask something else"""
        self._first: list[Any] | None = None

    def look(self, fields: Row) -> None:
        """Compare the next row."""
        if not self.names or self.differ:
            return
        try:
            asked = [ask(fields) for ask in self._asked]
        except RENDER_ERRORS:
            self.differ = True  # what is wrong with the row is said elsewhere
            return
        if self._first is None:
            self._first = asked
        self.differ = asked != self._first

    def problem(self, count: int, fields: Collection[str]) -> ConfigError | None:
        """Return the error of a dataset whose rows all ask the same; None if they differ, or there is one only."""
        if self.differ or count < 2:
            return None
        spellings = (_find(_LIKE_FIELDS, source, set(fields) - self.names) for source in self._sources)
        likely = next(filter(None, spellings), None)
        if self.names:
            message = f"is the same for all {count:,} rows, although it uses {', '.join(sorted(self.names))}"
        else:
            message = f"uses no field of the rows, so it is the same for all {count:,} of them"
        if likely is not None:
            spelled, name = likely
            message += f"; {spelled!r} looks like a field"
            remedy = f"Write {{{{ {name} }}}} for the field."
        else:
            named = ", ".join(sorted(fields))
            remedy = f"Write fields as {{{{ NAME }}}}; the rows have: {named}."
        remedy += f" For many answers to one prompt: one row and `trials: {count}`, or `same_prompt: true`."
        return ConfigError([Problem(self._document.where((self._key,)), message)], remedy=remedy)


def misspelled_fields(spec: Eval, fields: Collection[str]) -> Iterator[str]:
    """Yield a notice for each text that has a field of the rows as other tools spell it, and so as it is written."""
    for each in spec.templates():
        if not _BRACED.search(each.source):
            continue
        if (spelled := _find(_BRACED, each.source, set(fields) - each.compile().names)) is not None:
            text, name = spelled
            where = spec.document.where(each.location)
            yield f"{where}: {text!r} stands there as it is written; the row's field is written {{{{ {name} }}}}"


def _find(spellings: re.Pattern[str], source: str, fields: Collection[str]) -> tuple[str, str] | None:
    """Return the first part of a text that looks like a field of the rows, and the field's name."""
    for match in spellings.finditer(source):
        name = match[match.lastindex or 0]
        if name in fields:
            return match[0], name
    return None
