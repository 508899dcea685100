"""The cores that this process may use, by its affinity and the quota of its control group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.targets.build import usable_cores

if TYPE_CHECKING:
    from pathlib import Path


def machine(folder: Path, groups: str, **files: str) -> Path:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(groups)
    for path, text in files.items():
        place = folder / "sys/fs/cgroup" / path.replace("__", "/").replace("_max", ".max")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return folder


@pytest.fixture(autouse=True)
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 64)


def test_without_a_quota_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 16
    assert usable_cores(machine(tmp_path, "0::/a\n", a__cpu_max="max 100000")) == 16


def test_the_smallest_quota_of_a_group_and_its_parents_counts(tmp_path: Path) -> None:
    files = {"a__b__cpu_max": "max 100000", "a__cpu_max": "150000 100000", "cpu_max": "400000 100000"}
    assert usable_cores(machine(tmp_path, "0::/a/b\n", **files)) == 1.5


def test_inside_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    assert usable_cores(machine(tmp_path, "0::/not/there\n", cpu_max="50000 100000")) == 0.5


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
@pytest.mark.parametrize(("quota", "cores"), [("250000", 2.5), ("-1", 16)])
def test_quotas_of_control_groups_version_1(mount: str, quota: str, cores: float, tmp_path: Path) -> None:
    root = machine(tmp_path, "4:memory:/x\n3:cpu,cpuacct:/job\n")
    group = root / "sys/fs/cgroup" / mount / "job"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text(quota + "\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(root) == cores
