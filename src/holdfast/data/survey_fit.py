"""Fit a survey to other graders. Rows, ids and digests stay; which graders apply to which row is decided again.

Most rows need no look for this. A grader without `where` applies to all rows, and one with the `where` of an earlier
grader to the rows of that one. For any other `where`, the rows are decoded once, without digesting or checking them.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from msgspec.structs import replace

from holdfast.data.dataset import MOST_SHAPES, Survey
from holdfast.data.numbers import code_for, fit_code
from holdfast.data.panels import Conditions, Panels
from holdfast.data.row_checks import TemplateChecks
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.data.dataset import Shape
    from holdfast.data.panels import Panel
    from holdfast.data.readers import Row
    from holdfast.spec.eval import Eval


def fit_survey(
    survey: Survey, wheres: Sequence[str | None], spec: Eval, rows: Iterable[tuple[str, Row]] | None
) -> Survey | None:
    """Return the survey of the same rows for the graders of an eval; None if it has to be made from the beginning.

    `wheres` are those of the graders for which the survey was made. `rows` are read if need be; None: they are others.
    """
    conditions = Conditions(spec)
    fitted = _fit(survey, wheres, conditions, rows)
    if fitted is None:
        return None
    checks = TemplateChecks(spec, None)
    return None if any(map(checks.is_doubtful, fitted.shapes)) else fitted


def _fit(
    survey: Survey, wheres: Sequence[str | None], conditions: Conditions, rows: Iterable[tuple[str, Row]] | None
) -> Survey | None:
    if len(survey.shapes) >= MOST_SHAPES:
        return None
    panels = [conditions.panel_like(panel, wheres) for _, panel in survey.shapes]
    derived = [panel for panel in panels if panel is not None]
    if len(derived) == len(panels):
        shapes, shape_rows = _derive(survey, derived)
    elif rows is None:
        return None
    else:
        try:
            shapes, shape_rows = _look(survey, panels, conditions, rows)
        except HoldfastError:
            return None  # the files have just been changed
        if len(shape_rows) != survey.count or len(shapes) >= MOST_SHAPES:
            return None
    kinds = list(dict.fromkeys([conditions.everyone, *[panel for _, panel in shapes]]))
    places = {panel: place for place, panel in enumerate(kinds)}
    numbers, code = [places[panel] for _, panel in shapes], code_for(len(kinds))
    panel_rows = array(code, map(numbers.__getitem__, shape_rows)) if any(numbers) else array(code, [0]) * survey.count
    return replace(survey, panels=Panels.unpacked(kinds, panel_rows), shapes=shapes, shape_rows=shape_rows)


def _derive(survey: Survey, panels: Sequence[Panel]) -> tuple[dict[Shape, str], array[int]]:
    """Return shapes and the number of each row's shape, where rows of one shape have one panel."""
    shapes: dict[Shape, str] = {}
    numbers: dict[Shape, int] = {}
    for ((names, _), where), panel in zip(survey.shapes.items(), panels, strict=True):
        numbers.setdefault((names, panel), len(numbers))
        shapes.setdefault((names, panel), where)
    if len(shapes) == len(survey.shapes):
        return shapes, survey.shape_rows
    order = [numbers[names, panel] for (names, _), panel in zip(survey.shapes, panels, strict=True)]
    return shapes, array(code_for(len(shapes)), map(order.__getitem__, survey.shape_rows))


def _look(
    survey: Survey, panels: Sequence[Panel | None], conditions: Conditions, rows: Iterable[tuple[str, Row]]
) -> tuple[dict[Shape, str], array[int]]:
    """Return shapes and the number of each row's shape, where the panels of some rows depend on their values."""
    shapes: dict[Shape, str] = {}
    numbers: dict[Shape, int] = {}
    shape_rows = array("I")
    all_names = [names for names, _ in survey.shapes]
    known: list[dict[Panel, int]] = [{} for _ in all_names]
    for earlier, (where, row) in zip(survey.shape_rows, rows, strict=False):
        panel = panels[earlier] or conditions.panel_for(row)
        number = known[earlier].get(panel)
        if number is None:
            shape = all_names[earlier], panel
            shapes.setdefault(shape, where)
            number = known[earlier][panel] = numbers.setdefault(shape, len(numbers))
        shape_rows.append(number)
    return shapes, fit_code(shape_rows, len(shapes))
