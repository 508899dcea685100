"""Commands of the guide to NVIDIA's `nemotron evaluate` mean here what they mean there, under our program's name."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import pytest

from tests.support.clusters import GUIDE_CONFIGURATION, GUIDE_TASKS
from tests.support.running import holdfast, write_eval

if TYPE_CHECKING:
    from pathlib import Path

PROFILE = """
[wandb]
project = "nemotron"
entity = "my-team"

[MY-CLUSTER]
executor = "slurm"
account = "my-account"
partition = "batch"

# SSH settings (enables auto-squash)
tunnel = "ssh"
host = "cluster.example.com"
user = "myuser"
remote_job_dir = "/lustre/fsw/users/myuser/.nemotron"

# Container settings - use Docker ref, auto-squashed on first run
container_image = "nvcr.io/nvidia/nemo:25.01"
"""
CUSTOM = """
defaults:
  - execution: slurm/default
  - deployment: generic
  - _self_

run:
  env:
    container: nvcr.io/nvidia/nemo:25.01  # Docker ref (auto-squashed)
    # OR: container: /path/to/container.sqsh  # Pre-squashed
  wandb:
    entity: null  # Populated from env.toml
    project: null
"""
FEWER_TASKS = re.sub(r"    - name: (adlr_arc|adlr_wino|openbook).*\n", "", GUIDE_CONFIGURATION)


@pytest.mark.parametrize(
    ("command", "tasks"),
    [
        ("evaluate -c nemotron-3-nano-nemo-ray --run MY-CLUSTER", GUIDE_TASKS),
        ("evaluate -c nemotron-3-nano-nemo-ray --dry-run", GUIDE_TASKS),
        ("evaluate -c nemotron-3-nano-nemo-ray --run MY-CLUSTER -t adlr_mmlu", ["adlr_mmlu"]),
        ("evaluate -c config --run MY-CLUSTER deployment.checkpoint_path=/path/to/your/checkpoint", GUIDE_TASKS),
        ("evaluate -c config --run MY-CLUSTER -t adlr_mmlu -t hellaswag", ["adlr_mmlu", "hellaswag"]),
        ("evaluate -c config --run MY-CLUSTER --force-squash", GUIDE_TASKS),
        ("evaluate -c my-model --run MY-CLUSTER", ["adlr_mmlu", "hellaswag"]),
        ("evaluate --config my-model --batch MY-CLUSTER --task hellaswag", ["hellaswag"]),
    ],
)
def test_a_command_of_the_guide_is_understood_word_for_word(tmp_path: Path, command: str, tasks: list[str]) -> None:
    """Previews are compared: to run it takes nodes with GPUs and the image."""
    for name in GUIDE_TASKS:
        write_eval(tmp_path, "http://127.0.0.1:1/v1", rows=1, name=name, target={"model": "any"})
    (tmp_path / "env.toml").write_text(PROFILE)
    (tmp_path / "config").mkdir()
    for name in ("nemotron-3-nano-nemo-ray", "config"):
        (tmp_path / "config" / f"{name}.yaml").write_text(GUIDE_CONFIGURATION)
    (tmp_path / "config" / "my-model.yaml").write_text(CUSTOM + FEWER_TASKS)
    (tmp_path / "ssh_config").write_text("Host *\n  ProxyCommand false\n")
    env = {"WANDB_API_KEY": "0123456789abcdef" * 3, "HOLDFAST_SSH_CONFIG": str(tmp_path / "ssh_config")}
    preview = holdfast(*shlex.split(command), "-d", cwd=tmp_path, env=env).stdout

    assert re.findall(r"# (\w+): task \d of <id>, main", preview) == list(tasks)
    scripts = preview.count("#SBATCH --gres=gpu:8")
    assert scripts == len(tasks)
    if "MY-CLUSTER" in command:
        assert preview.count("#SBATCH --account=my-account") == preview.count("#SBATCH --partition=batch") == scripts
        for key, value in (("project", "nemotron"), ("entity", "my-team"), ("image", "nvcr.io/nvidia/nemo:25.01")):
            assert re.search(rf'^ +{key}: "?{re.escape(value)}"? +# ', preview, re.MULTILINE), key
    assert ("/path/to/your/checkpoint" in preview) == ("/path/to/your/checkpoint" in command)
