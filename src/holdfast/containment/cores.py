"""Counts the cores that this process may use, by its affinity and the quota of its control group."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> float:
    """Return the number of cores this process may use, at least 0.01: a control group may allow only a fraction."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0.01, min([affinity, *_quotas(root)]))


def _quotas(root: Path) -> list[float]:
    """Return the quotas, in cores, of this process's control group and its parents, from both versions of cgroups."""
    quotas: list[float] = []
    mount = root / "sys/fs/cgroup"
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                quotas += [_v2(group) for group in _upwards(mount, path)]
            elif "cpu" in controllers.split(","):
                places = (mount / controllers, mount / "cpu")
                quotas += [_v1(group) for place in places for group in _upwards(place, path)]
    return [quota for quota in quotas if quota > 0]


def _upwards(mount: Path, path: str) -> list[Path]:
    """Return a group and its parents. Inside a container only the mount itself may exist."""
    group = mount / path.strip("/")
    return [place for place in (group, *group.parents) if place == mount or mount in place.parents]


def _v2(group: Path) -> float:
    """Read the quota of a group from `cpu.max`, such as `150000 100000` or `max 100000`; 0 without a quota."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    return 0.0


def _v1(group: Path) -> float:
    """Read the quota of a group from `cpu.cfs_quota_us`, which is -1 without a quota."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = ((group / f"cpu.cfs_{what}_us").read_text() for what in ("quota", "period"))
        return int(quota) / int(period)
    return 0.0
