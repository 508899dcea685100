"""Launches on a real Slurm, from a configuration to metrics.json, with every way of being interrupted between."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.cluster.launch import follow
from tests.support.launching import Site
from tests.support.running import server

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.slurm import Lab



@pytest.fixture
def site(tmp_path: Path, slurm: Lab) -> Site:
    return Site(tmp_path, slurm, slurm.here)


def test_a_launch_over_ssh_is_followed_to_its_numbers(tmp_path: Path, sshd: Lab) -> None:
    site = Site(tmp_path, sshd, sshd.ssh())
    with server() as model:
        site.write(model.base_url)
        invocation = site.submit()
        lines: list[str] = []
        code = follow(site.transport, invocation, lines.append)
        state = site.state(invocation)
        assert (code, state.phase) == (0, "done"), site.logs(invocation)
        assert site.metrics(state)["score"] == 0.5
        assert model.requests == 20
        assert any("score 0.5" in line for line in lines), lines
