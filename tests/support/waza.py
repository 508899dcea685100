"""waza's evals in files, and what they become."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.errors import ConfigError
from holdfast.spec.document import read_document
from holdfast.spec.formats import load_any
from holdfast.spec.load import parse_override

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.spec.eval import Eval

EVAL = """\
name: small
skill: s
config: {trials_per_task: 1, timeout_seconds: 30, executor: mock}
graders: [{type: text, name: any, config: {contains: [mock]}}]
tasks: ["tasks/*.yaml"]
"""
TASK = "id: one\nname: One\ninputs: {prompt: Hello.}\n"


def tree(folder: Path, **files: str) -> Path:
    """Write an eval and its files, `eval_yaml`, `tasks_a_yaml` … named by their keys; returns the eval's path."""
    contents = {"eval.yaml": EVAL, "tasks/a.yaml": TASK}
    contents |= {_path(key): text for key, text in files.items()}
    for name, text in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "eval.yaml"


def _path(key: str) -> str:
    return re.sub(r"_(yaml|csv|md|txt)$", r".\1", key).replace("tasks_", "tasks/")


def load(path: Path, *overrides: str) -> Eval:
    """Return the eval that a file becomes."""
    return load_any(read_document(path), [parse_override(text) for text in overrides])


def refused(path: Path, *overrides: str) -> str:
    """Return why an eval is not read."""
    with pytest.raises(ConfigError) as caught:
        load(path, *overrides)
    return str(caught.value)


def rows(spec: Eval) -> dict[str, dict[str, Any]]:
    """Return the rows by their ids."""
    assert spec.samples is not None
    return {row["id"]: row for row in spec.samples}


def notices(spec: Eval) -> str:
    """Return what is said of the eval, in one text."""
    return "\n".join(spec.document.notices)
