"""Examples of the NeMo Evaluator launcher compile to the same resources and commands, or the difference is named."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.support.clusters import launched, lay_out, write

FILE = Path(__file__).with_name("launcher_examples.yaml")
NAMES = re.findall(r"^(\w.*):$", FILE.read_text(), re.MULTILINE)
"""read without parsing the examples, which every test process would do to collect its tests"""
PROFILE = """\
[cluster]
executor = "slurm"
host = "login.example.com"
account = "acct"
partition = "batch"
remote_job_dir = "/lustre/me"
"""
ONLY_OURS = Counter(("--host", "0.0.0.0"))
"""what vLLM does without it, too: workers on other nodes have to reach the server"""


@cache
def examples() -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe").load(FILE)
    assert list(loaded) == NAMES
    return loaded


def words(command: str) -> Counter[str]:
    """The words of a command in any order, options apart from their values."""
    return Counter(command.replace("=", " ").split())


def as_options(resources: dict[str, Any]) -> set[str]:
    return {f"--{name}" if value is True else f"--{name}={value}" for name, value in resources.items()}


@pytest.mark.parametrize("name", NAMES)
def test_an_example_of_the_launcher_means_the_same(name: str, tmp_path: Path) -> None:
    example, folder = examples()[name], lay_out(tmp_path)
    write(folder / "env.toml", PROFILE)
    config = {**example["config"], "evaluation": {"tasks": ["mmlu"]}}
    write(folder / "config" / "example.yaml", json.dumps(config))  # which is YAML, too
    is_local = name.startswith("local")
    launch = launched(folder, "example", None if is_local else "cluster")

    differs = set(example.get("differs", ()))
    expected = {key: value for key, value in example.get("resources", {}).items() if key not in differs}
    options = set(launch.shared.main_options)
    assert as_options(expected) <= options
    asked = {
        option for option in options if option.startswith(("--gres", "--gpus", "--exclusive", "--nodes", "--time"))
    }
    assert asked <= as_options(expected)

    assert ("command" in example) == (launch.shared.deployment is not None)
    if launch.shared.deployment is not None:
        ours, theirs = words(launch.shared.deployment.command.splitlines()[-1]), words(example["command"])
        assert not theirs - ours
        assert ours - theirs in (Counter(), ONLY_OURS)

    notice = example.get("notice")
    assert notice is None or any(notice in line for line in launch.notices), launch.notices
