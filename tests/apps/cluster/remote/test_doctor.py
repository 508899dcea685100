"""`holdfast doctor` finds what is wrong with a profile, says what to do, and leaves nothing on the cluster."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.apps.cluster.remote.slurm import Slurm
from holdfast.graders.programs import isolation
from tests.support.invocations import env_of
from tests.support.running import holdfast

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.slurm import Cluster

SSH = 'tunnel = "ssh"\nhost = "cluster"\n'


def doctor(
    lab: Cluster, folder: Path, profile: str, *options: str, check: int = 0, **env: str
) -> tuple[dict[str, dict[str, Any]], str]:
    """The checks by name, and what people see."""
    (folder / "env.toml").write_text(f"[lab]\n{profile}")
    environ = env_of(lab, folder / "home", HOME=str(folder), **env)
    stdout = holdfast("doctor", "lab", "--json", *options, cwd=folder, env=environ, check=check).stdout
    checks = {one["name"]: one for one in json.loads(stdout)}
    return checks, stdout


@pytest.mark.parametrize("way", ["", SSH])
def test_a_profile_that_works_has_no_complaint(slurm: Cluster, tmp_path: Path, way: str) -> None:
    base = tmp_path / "base dir"
    profile = f'executor = "slurm"\npartition = "main"\ntime = "00:05:00"\nremote_job_dir = "{base}"\n{way}'
    checks, _ = doctor(slurm, tmp_path, profile)
    assert {name: one["state"] for name, one in checks.items()} == {
        "env.toml": "ok",
        "ssh": "ok" if way else "skipped",
        "sbatch": "ok",
        "partition": "ok",
        "account, partition and time": "ok",
        "remote_job_dir": "ok",
        "write speed": "ok",
        "files": "ok",
        "compute node": "ok",
        "programs of graders": "ok",
        "containers": "skipped",
        "W&B": "skipped",
    }
    nodes = re.findall(r"(\d+) \w+", checks["partition"]["said"].partition("node")[0])
    assert "slurm" in checks["sbatch"]["said"] and sum(map(int, nodes)) == 4, checks["partition"]["said"]
    assert "sees the directory" in checks["compute node"]["said"] and "Python 3." in checks["compute node"]["said"]
    assert checks["programs of graders"]["said"] == isolation().summary, "the nodes are all this machine"
    assert "MB/s" in checks["write speed"]["said"] and "wandb login" in checks["W&B"]["remedy"]
    assert not base.exists(), "nothing is left there"
    assert not [job for job in Slurm(slurm.here).jobs() if job.name.endswith(".doctor") and job.active]


def test_people_get_one_line_each_with_a_sign_and_the_remedy_below(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "env.toml").write_text(
        f'[lab]\nexecutor = "slurm"\npartition = "mian"\nremote_job_dir = "{tmp_path}/base"\n'
    )
    env = env_of(slurm, tmp_path / "home", HOME=str(tmp_path))
    stdout = holdfast("doctor", "lab", cwd=tmp_path, env=env, check=1).stdout
    assert "✓ env.toml: env.toml, [lab] in line 1" in stdout
    assert "✗ partition: there is no mian\n    hint: env.toml:3: there are low, lowgrace, main." in stdout
    assert "✗ account, partition and time: " in stdout and "nvalid partition" in stdout
    assert "– compute node: no job was run: Slurm would not accept it" in stdout


def test_a_directory_that_cannot_be_written_is_named_with_its_line(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    profile = f'executor = "slurm"\nremote_job_dir = "{tmp_path}/file/below"\n'
    checks, _ = doctor(slurm, tmp_path, profile, check=1)
    assert checks["remote_job_dir"]["state"] == "failed" and "Not a directory" in checks["remote_job_dir"]["said"]
    assert checks["remote_job_dir"]["remedy"].startswith("env.toml:3: ")
    assert "compute node" not in checks


@pytest.mark.parametrize("folder", ["~bob/jobs", "jobs"])
def test_a_directory_without_a_whole_path_is_refused_as_a_launch_does(
    slurm: Cluster, tmp_path: Path, folder: str
) -> None:
    checks, _ = doctor(slurm, tmp_path, f'executor = "slurm"\nremote_job_dir = "{folder}"\n', "--no-job", check=1)
    assert checks["remote_job_dir"]["state"] == "failed"
    assert f"'{folder}' is a folder of the cluster: give an absolute path" in checks["remote_job_dir"]["said"]
    assert not list(tmp_path.rglob("jobs"))


def test_existing_files_stay(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    doctor(slurm, tmp_path, f'executor = "slurm"\nremote_job_dir = "{tmp_path}/base/jobs"\n', "--no-job")
    assert [path.name for path in tmp_path.rglob("base*")] == ["base"] and not list((tmp_path / "base").iterdir())


def test_a_directory_that_nodes_do_not_share_is_noticed(slurm: Cluster, tmp_path: Path) -> None:
    # The nodes are all this machine, so a setup line makes the job look elsewhere.
    lines = 'setup_lines = ["cat() { echo other; }"]\n'
    checks, _ = doctor(slurm, tmp_path, f'executor = "slurm"\nremote_job_dir = "{tmp_path}/b"\n{lines}', check=1)
    assert checks["compute node"]["state"] == "failed" and "other files" in checks["compute node"]["said"]


def test_an_old_or_missing_python_on_nodes_is_noticed(slurm: Cluster, tmp_path: Path) -> None:
    profile = f'executor = "slurm"\nremote_job_dir = "{tmp_path}/b"\npython = "/nowhere/python"\n'
    checks, _ = doctor(slurm, tmp_path, profile, check=1)
    assert "no /nowhere/python" in checks["compute node"]["said"] and "3.11" in checks["compute node"]["remedy"]


def test_no_job_is_run_with_no_job(slurm: Cluster, tmp_path: Path) -> None:
    checks, _ = doctor(slurm, tmp_path, f'executor = "slurm"\nremote_job_dir = "{tmp_path}/b"\n', "--no-job")
    assert checks["compute node"]["said"] == "no job was run, as asked"


def test_images_need_pyxis_and_squashing_needs_ssh(slurm: Cluster, tmp_path: Path) -> None:
    image = 'container_image = "nvcr.io/nvidia/nemo:25.01"\n'
    base = f'executor = "slurm"\nremote_job_dir = "{tmp_path}/b"\n'
    checks, _ = doctor(slurm, tmp_path, base + image, "--no-job", check=1)
    assert checks["containers"]["state"] == "failed" and "pyxis" in checks["containers"]["remedy"]
    assert 'lacks tunnel = "ssh", host = "…"' in checks["auto-squash"]["said"]
    checks, _ = doctor(slurm, tmp_path, base + image + SSH, "--no-job", check=1)
    assert checks["auto-squash"]["state"] == "ok"


def test_an_unreachable_host_is_reported_and_other_checks_are_skipped(slurm: Cluster, tmp_path: Path) -> None:
    config = tmp_path / "ssh"
    config.write_text("Host cluster\n  HostName 127.0.0.1\n  Port 1\n")
    profile = f'executor = "slurm"\nremote_job_dir = "{tmp_path}/b"\n{SSH}'
    checks, _ = doctor(slurm, tmp_path, profile, check=1, HOLDFAST_SSH_CONFIG=str(config))
    assert [name for name, one in checks.items() if one["state"] == "failed"] == ["connection"]
    assert "refused" in checks["connection"]["said"] and "ssh cluster true" in checks["connection"]["remedy"]
    assert "sbatch" not in checks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[other]\nexecutor = 'slurm'\n", "no profile 'lab'"),
        ("[lab]\nexecutor = 'slurm'\nacount = 'x'\n", "env.toml:3"),
    ],
)
def test_a_wrong_env_toml_is_reported_first(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "env.toml").write_text(text)
    assert message in holdfast("doctor", "lab", cwd=tmp_path, check=1).stdout


def test_a_local_profile_needs_few_checks_and_a_login_is_found(slurm: Cluster, tmp_path: Path) -> None:
    checks, stdout = doctor(slurm, tmp_path, 'executor = "local"\n[wandb]\nproject = "p"\n', WANDB_API_KEY="s3cret")
    assert "sbatch" not in checks and checks["files"]["state"] == "ok"
    assert checks["programs of graders"]["said"] == isolation().summary
    assert checks["W&B"]["said"] == "login for https://api.wandb.ai found; project p" and "s3cret" not in stdout
