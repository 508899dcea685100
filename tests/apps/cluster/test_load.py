"""The load on Slurm's controller, on ssh and on shared file systems does not grow with finished jobs, or with tasks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.apps.cli.logs import command as logs_command
from holdfast.apps.cluster.remote.chain import Chain
from holdfast.apps.cluster.remote.ledger import Ledger, Submitter
from holdfast.apps.cluster.remote.slurm import JobName, Slurm
from holdfast.apps.cluster.remote.transport import Here, Ssh
from holdfast.apps.cluster.watch import logs
from holdfast.apps.cluster.watch.find import Subject
from holdfast.apps.cluster.watch.logs import follow
from holdfast.apps.cluster.watch.status import look
from tests.support.breaking import needs_strace
from tests.support.invocations import entry_of, launched
from tests.support.launching import Site
from tests.support.running import environment, holdfast, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.slurm import Cluster


def questions(lab: Cluster) -> int:
    """How often the controller was asked for jobs."""
    counted = lab.here.check(["sdiag"]).text.partition("by message type")[2].partition("by user")[0]
    return sum(int(count) for count in re.findall(r"REQUEST_JOB_\w*INFO\w* .*?count:(\d+)", counted))


def test_the_controller_is_asked_once_per_look_whatever_is_finished(own_slurm: Cluster, tmp_path: Path) -> None:
    invocation = launched(own_slurm.here, tmp_path)
    slurm = Slurm(own_slurm.here)
    subject = Subject(own_slurm.here, str(invocation.directory))
    chain = Chain(Submitter(slurm, Ledger(own_slurm.here, subject.directory)), invocation.id, invocation.place())
    asked: list[tuple[int, int]] = []
    for number, members in enumerate((2, 20)):
        role = f"workers-{number + 1}"
        invocation.submit(role, f"--array=1-{members}", script=b"#!/bin/sh\n")
        name = str(JobName(invocation.id, 0, role))
        wait_for(lambda name=name: not any(job.active for job in slurm.jobs(names=[name])), "the end of all")
        before = questions(own_slurm)
        assert len(look(subject).tasks[0].jobs) >= members
        after = questions(own_slurm)
        chain.states()
        asked.append((after - before, questions(own_slurm) - after))
    assert asked == [(1, 1), (1, 1)]


def many_tasks(site: Site, count: int) -> None:
    """A configuration of so many tasks, whose jobs are held."""
    site.write(None, execution={"sbatch_extra_flags": {"hold": True}}, profile='tunnel = "ssh"\nhost = "cluster"')
    config: dict[str, Any] = json.loads((site.folder / "nano.yaml").read_text())
    config["evaluation"]["tasks"] = [
        {"name": "evals/e.yaml", "overrides": {"trials": number + 1}} for number in range(count)
    ]
    (site.folder / "nano.yaml").write_text(json.dumps(config))


def test_a_hundred_tasks_are_submitted_and_cancelled_in_twenty_round_trips(tmp_path: Path, sshd: Cluster) -> None:
    site = Site(tmp_path, sshd, sshd.ssh())
    many_tasks(site, 100)
    calls = tmp_path / "calls"
    env = site.env(ssh=f'echo call >>{calls}\nexec "$REAL" "$@"')
    holdfast("eval", "-c", "nano", "--batch", "lab", cwd=site.folder, env=env)
    (invocation,) = site.registry.all()
    try:
        assert len(calls.read_text().splitlines()) <= 20
        pending = [job for job in Slurm(sshd.here).jobs(invocation=invocation.id) if job.state == "pending"]
        assert len(pending) == len({job.name for job in pending}) == 100
        calls.unlink()
    finally:
        stopped = holdfast("kill", invocation.id, cwd=site.folder, env=env)
    assert "cancelled 100 jobs" in stopped.stdout
    assert len(calls.read_text().splitlines()) <= 20
    calls.unlink()
    resumed = holdfast("resume", invocation.id, cwd=site.folder, env=env).stdout
    try:
        assert resumed.count("submitted hf-") == 100
        assert len(calls.read_text().splitlines()) <= 20
    finally:
        holdfast("kill", invocation.id, cwd=site.folder, env=env)


class Counting(Ssh):
    """Counts its round trips."""

    calls = 0

    def _try(self, *arguments: Any) -> Any:
        self.calls += 1
        return super()._try(*arguments)


@pytest.mark.parametrize("how", ["attached", "logs"])
def test_following_takes_as_many_round_trips_for_thirty_tasks_as_for_one(
    how: str, tmp_path: Path, sshd: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []
    for count in (1, 30):
        names = tuple(f"t{number}" for number in range(count))
        invocation = launched(Here(pauses=()), tmp_path / str(count), tasks=names)
        for number in range(count):
            for job in range(3):
                invocation.log(f"main-{job}-0.log", f"line {job} of {number}\n", task=number)
            invocation.state(task=number, phase="done", exit_code=0)
        transport = Counting("cluster", config=sshd.ssh_config, pauses=())
        if how == "attached":
            lines: list[str] = []
            assert follow(transport, entry_of(invocation, host="cluster", tasks=names), lines.append) == 0
        else:
            subject = Subject(transport, str(invocation.directory))
            monkeypatch.setattr("holdfast.apps.cli.logs.find_subject", lambda *_, subject=subject: subject)
            assert logs_command.main(["x", "--all"], standalone_mode=False) == 0
            lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 3 * count
        calls.append(transport.calls)
    assert calls[1] == calls[0] <= 3


def test_long_logs_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sshd: Cluster) -> None:
    monkeypatch.setattr(logs, "READ_BYTES", 100)
    invocation = launched(Here(pauses=()), tmp_path)
    text = "".join(f"line {number}\n" for number in range(100))
    invocation.log("main-1-0.log", text)
    reader = logs.Logs(sshd.ssh(), [invocation.place().logs], "main-*.log")
    assert [line.text for line in reader.read()] == text.splitlines()
    invocation.log("main-1-0.log", "one more\n")
    assert [line.text for line in reader.read()] == ["one more"]


@needs_strace
@pytest.mark.faults
def test_an_idle_worker_asks_the_file_system_less_than_twice_a_second(tmp_path: Path) -> None:
    invocation = launched(Here(pauses=()), tmp_path, executor="local")
    invocation.state(phase="deploying")
    trace, folder = tmp_path / "trace", str(invocation.directory)
    process = subprocess.Popen(
        [
            *("strace", "-f", "-qq", "-ttt", "-e", "trace=%file", "-o", str(trace)),
            *(
                sys.executable,
                "-m",
                "holdfast.apps.cluster.job",
                invocation.place().path,
                "--role",
                "worker",
                "--index",
                "1",
            ),
        ],
        env=environment(),
    )

    def looks() -> list[float]:
        """The times of its calls, once it waits for work."""
        lines = [line.split(None, 2) for line in trace.read_text().splitlines()] if trace.exists() else []
        times = [float(line[1]) for line in lines if len(line) == 3 and folder in line[2]]
        first = next((float(line[1]) for line in lines if len(line) == 3 and "endpoint.json" in line[2]), None)
        return [moment for moment in times if first is not None and moment >= first]

    try:
        times = wait_for(lambda: len(looks()) >= 12 and looks(), "some looks")
    finally:
        (invocation.directory / "stop").touch()
        process.communicate()
    assert len(times) / (times[-1] - times[0]) <= 2, times
