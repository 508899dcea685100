"""Check the templates and expressions of an eval against the rows of its dataset."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.errors import ConfigError, Problem
from holdfast.spec.template import RENDER_ERRORS, NotText, TemplateError, expression

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.data.dataset import RowCheck, Sample, Shape
    from holdfast.data.readers import Row
    from holdfast.spec.document import Location
    from holdfast.spec.eval import Eval
    from holdfast.spec.template import Template

_SENT: Final = ("system", "prompt", "messages", "follow_ups")
"""templates whose text is sent to the target as it comes out"""
_NESTED: Final = (list, tuple, dict)


def _render(compiled: Template, values: Row, fields: Row) -> str:
    return compiled.render({**fields, **values})


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

    def __init__(self, spec: Eval, check: RowCheck | None, fields: Iterable[str] = ()) -> None:
        """`fields` are those of other rows of the dataset."""
        self._document = spec.document
        self._check = check
        self.fields = set(fields)
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
