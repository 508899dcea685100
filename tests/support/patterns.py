"""Finished runs with the verdicts one wants, for commands that read runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.spec.schema import SCHEMA_VERSION
from tests.support.running import holdfast, run_dir

if TYPE_CHECKING:
    from pathlib import Path

AGENT = """def reply(sample, context):
    answer = context.params["answers"][sample["id"]]
    return answer[context.trial - 1] if isinstance(answer, list) else answer
def points(output):
    return float(output)
"""
CORRECT = [{"type": "exact", "name": "correct"}]
POINTS = [{"type": "python", "name": "points", "function": "agent.py:points"}]


def finished_run(folder: Path, answers: dict[str, Any], *, flags: tuple[str, ...] = (), **keys: Any) -> Path:
    """The run of an agent that gives these answers, by sample; `yes` is right. Rows have what `rows` says of them."""
    folder.mkdir(parents=True)
    more: dict[str, Any] = keys.pop("rows", {})
    spec: dict[str, Any] = {
        "schemaVersion": SCHEMA_VERSION,
        "name": "e",
        "samples": [{"id": sample, "expected": "yes", **more.get(sample, {})} for sample in answers],
        "target": {"python": "agent.py:reply", "params": {"answers": answers}},
        "prompt": "{{ id }}",
        "graders": CORRECT,
        **keys,
    }
    (folder / "agent.py").write_text(AGENT)
    (folder / "e.yaml").write_text(json.dumps({key: value for key, value in spec.items() if value is not None}))
    holdfast("eval", "e.yaml", *flags, cwd=folder)
    return run_dir(folder)


def module_run(name: str, answers: dict[str, Any]) -> Any:
    """Return a fixture: a finished run for all tests of a module."""

    @pytest.fixture(scope="module")
    def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return finished_run(tmp_path_factory.mktemp("module") / name, answers)

    return run


def answered(right: int, wrong: int) -> dict[str, str]:
    """Return right answers followed by wrong ones."""
    return {f"s{number}": "yes" if number < right else "no" for number in range(right + wrong)}
