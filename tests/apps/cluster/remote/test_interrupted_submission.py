"""A submission that ends halfway: what is queued, or may be, is kept and named with what to type."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.launching import Site, deployment
from tests.support.running import holdfast

if TYPE_CHECKING:
    from tests.support.slurm import Cluster

HELD = {"hold": True}
"""so that no job begins"""
TAKES_ONE = """\
if test -e "$0.used"; then echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; fi
touch "$0.used"
exec "$REAL" "$@"
"""


@pytest.fixture
def site(tmp_path: Path, slurm: Cluster) -> Site:
    return Site(tmp_path, slurm, slurm.here)


def two_tasks(site: Site) -> None:
    config: dict[str, Any] = json.loads((site.folder / "nano.yaml").read_text())
    config["evaluation"]["tasks"].append({"name": "evals/e.yaml", "overrides": {"trials": 2}})
    (site.folder / "nano.yaml").write_text(json.dumps(config))


def left_by(site: Site, stderr: str) -> str:
    """The invocation that an error names, which can be looked after."""
    named = re.search(r"`holdfast status ([0-9a-f]{16})` shows it", stderr)
    assert named is not None, stderr
    for verb in ("resume", "kill"):
        assert f"`holdfast {verb} {named[1]}`" in stderr
    (invocation,) = site.registry.all()
    assert invocation.id == named[1] and Path(invocation.directory, "invocation.json").exists()
    return named[1]


def test_a_partial_submission_is_reported_with_the_submitted_jobs(site: Site) -> None:
    site.write(None, execution={"sbatch_extra_flags": HELD})
    two_tasks(site)
    env = site.env(sbatch=TAKES_ONE)
    stderr = holdfast("eval", "-c", "nano", "--batch", "lab", cwd=site.folder, env=env, check=3).stderr
    assert "QOSMaxSubmitJobPerUserLimit" in stderr and "Slurm was asked for" in stderr
    invocation = left_by(site, stderr)
    assert f"hf-{invocation}.0.main is job " in stderr

    env = site.env(sbatch='exec "$REAL" "$@"')
    try:
        rest = holdfast("resume", invocation, cwd=site.folder, env=env).stdout
        assert re.findall(r"submitted hf-\w+\.(\S+)", rest) == ["1.main-2"]
    finally:
        holdfast("kill", invocation, cwd=site.folder, env=env)


def test_a_job_that_could_not_be_recorded_is_remembered(site: Site) -> None:
    site.write(None, execution={"sbatch_extra_flags": HELD})
    ledgers = f"{site.base}/holdfast/*/jobs-*.jsonl"  # once sbatch has accepted the job, nothing can be written to them
    fill = f'for file in {ledgers}; do mv "$file" "$file.kept" && ln -s /dev/full "$file"; done'
    env = site.env(sbatch=f'"$REAL" "$@" && {{ {fill}; }}')
    stderr = holdfast("eval", "-c", "nano", "--batch", "lab", cwd=site.folder, env=env, check=3).stderr
    assert "No space left" in stderr and "may be submitted" in stderr and "Slurm was asked" not in stderr
    identifier = left_by(site, stderr)

    for kept in site.base.glob("holdfast/*/jobs-*.jsonl.kept"):
        kept.replace(kept.with_suffix(""))
    env = site.env(sbatch='exec "$REAL" "$@"')
    (invocation,) = site.registry.all()
    assert len(site.live(invocation, "main")) == 1
    holdfast("kill", identifier, cwd=site.folder, env=env)
    assert site.live(invocation, "main") == []


def test_a_refused_submission_leaves_nothing(site: Site) -> None:
    # Its workers would be accepted, but only a main job queues them.
    execution = {"partition": "nowhere", "cpu_partition": "main", "workers": 3}
    site.write(None, deployment=deployment(site.folder), execution=execution)
    stderr = holdfast("eval", "-c", "nano", "--batch", "lab", cwd=site.folder, env=site.env(), check=3).stderr
    assert "Slurm was asked for partition nowhere (nano.yaml:1)" in stderr
    assert "`holdfast doctor lab`" in stderr and "holdfast status" not in stderr
    assert site.registry.all() == []
    assert str(site.base) not in site.slurm("squeue", "--noheader", "--states=all", "--format=%Z %o"), (
        "no worker either"
    )
    assert not list((site.base / "holdfast").glob("*/invocation.json"))
