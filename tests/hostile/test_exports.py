"""What an export writes is data to the program that opens it: no formula in a spreadsheet, no markup in a page."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from holdfast.report.tables import write_rows
from tests.hostile.inputs import ALL, FORMULAS, HTML, hostile_eval
from tests.support.running import holdfast, run_dir
from tests.support.viewing import viewer

if TYPE_CHECKING:
    from pathlib import Path

BEGINNINGS = tuple("=+-@\t\r\n")


def cells(text: str) -> list[str]:
    return [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]


@pytest.mark.parametrize("formula", FORMULAS)
def test_no_cell_of_a_table_is_a_formula(tmp_path: Path, formula: str) -> None:
    hostile_eval(tmp_path, formula, samples=[{"id": formula, "question": formula, "kind": formula, formula: formula}])
    holdfast("eval", "eval.yaml", "--export", "csv", cwd=tmp_path)
    (path,) = run_dir(tmp_path).glob("export/csv/trials.csv")
    table = cells(path.read_bytes().decode())
    assert [cell for cell in table if cell.startswith(BEGINNINGS)] == []
    assert f"'{formula}" in table and f"row.{formula}" in table
    run = run_dir(tmp_path).name.rpartition("-")[2]
    with viewer(tmp_path) as pages:
        shown = cells(pages.get(f"/run/{run}/trials.csv").text)
    assert f"'{formula}" in shown
    assert [cell for cell in shown if cell.startswith(BEGINNINGS)] == []


@pytest.mark.parametrize(
    "value", [-1, -1.5, 1e-9, "-1", "+2", "-1.5e-3", "-.5", "text", "", None, "a=b", "2 - 1", "'quoted"]
)
def test_numbers_and_other_texts_stay_unchanged(value: Any) -> None:
    text = io.StringIO(newline="")
    write_rows(text, [["x", value]])
    assert cells(text.getvalue()) == ["x", "" if value is None else str(value)]


@pytest.mark.parametrize("form", ["html", "junit", "samples", "csv"])
def test_texts_for_terminals_and_browsers_are_not_markup(tmp_path: Path, form: str) -> None:
    hostile_eval(tmp_path, f"{HTML} {ALL}")
    holdfast("eval", "eval.yaml", "--accept-errors", "--export", form, cwd=tmp_path)
    files = [path for path in run_dir(tmp_path).glob(f"export/{form}/**/*") if path.is_file()]
    assert files
    for path in files:
        data = path.read_text()
        if form == "html":
            assert "<script>alert" not in data and "<img src=x" not in data and "\x1b" not in data
        elif form == "junit":
            assert ElementTree.fromstring(data).tag
