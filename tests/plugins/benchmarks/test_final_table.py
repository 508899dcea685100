"""The tables at the end of a benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.running import holdfast, module_server

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.running import Server

provider = module_server()


@pytest.mark.parametrize(("name", "tables"), [("winogrande-sample", 0), ("mmlu-sample", 1)])
def test_numbers_of_a_single_task_are_shown_once(name: str, tables: int, tmp_path: Path, provider: Server) -> None:
    target = f"target.base_url={provider.base_url}"
    shown = holdfast("eval", name, "-m", "m", target, "--limit", "1", cwd=tmp_path).stdout
    assert " acc " in shown and shown.count("as lm-eval reports it") == tables
