"""Commands that read runs read those on clusters too, from copies that are always runs, and fetch nothing twice."""

from __future__ import annotations

import json
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.apps.cli import view
from holdfast.apps.cluster.remote.transport import Completed, Ssh
from holdfast.apps.cluster.watch import copies
from holdfast.apps.cluster.watch.copies import fetch_run
from holdfast.apps.cluster.watch.find import RunPlace
from holdfast.errors import ClusterError
from holdfast.store.lines import scan
from holdfast.store.metrics import GateOutcome
from holdfast.store.rundir import RunDir
from tests.support.invocations import env_of, launched, public_folder, register
from tests.support.running import PATIENCE, holdfast, start, wait_for
from tests.support.showcase import agent_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm import Cluster


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run before and after its end, with workspaces, steps and errors."""
    folder = tmp_path_factory.mktemp("runs")
    run = agent_run(folder)
    unfinished = folder / "unfinished"
    shutil.copytree(run, unfinished)
    holdfast("resume", run, "--accept-errors", cwd=folder)
    return unfinished, run


@pytest.fixture
def remote(runs: tuple[Path, Path], tmp_path: Path) -> Path:
    """A finished run in a folder of the cluster."""
    return Path(shutil.copytree(runs[1], tmp_path / "cluster" / "shop" / runs[1].name))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own directory on this machine."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


class Watched(Ssh):
    """Counts what is asked and answered, and lets something happen before a question."""

    def __init__(self, lab: Cluster, before: Callable[[int], None] = lambda _: None) -> None:
        super().__init__("cluster", config=lab.ssh_config, pauses=())
        self.calls = self.received = 0
        self._before = before

    def _try(self, *arguments: Any) -> Completed:
        self._before(self.calls)
        self.calls += 1
        done = super()._try(*arguments)
        self.received += len(done.stdout)
        return done


def fetch(transport: Ssh, run: Path) -> Path:
    return fetch_run(RunPlace(transport, str(run)), print)


def contents(run: Path) -> dict[str, bytes]:
    """The files of a run that are copied."""
    files = (path for path in run.rglob("*") if path.is_file())
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in files
        if path.name != copies.RECORD and path.relative_to(run).parts[0] not in ("claims", "export", "set-aside")
    }


def counted_ssh(folder: Path, lab: Cluster, home: Path, *, stop_at: int = 0) -> tuple[dict[str, str], Path]:
    """The environment of a user whose ssh notes each call, and does not answer from the `stop_at`th on."""
    calls = folder / "calls"
    script = folder / "bin" / "ssh"
    script.parent.mkdir(exist_ok=True)
    stop = f'test "$(wc -l <{calls})" -lt {stop_at} || exec sleep 600' if stop_at else ":"
    script.write_text(f'#!/bin/sh\necho call >>{calls}\n{stop}\nexec {shutil.which("ssh")} "$@"\n')
    script.chmod(0o755)
    return env_of(lab, home, PATH=f"{script.parent}{os.pathsep}{os.environ['PATH']}"), calls


def test_every_command_that_reads_runs_accepts_one_on_a_cluster(
    sshd: Cluster, remote: Path, tmp_path: Path, home: Path
) -> None:
    invocation = launched(sshd.here, tmp_path / "base")
    invocation.state(phase="done", done=4, total=4, run_dir=str(remote))
    register(invocation, home, host="cluster")
    env, calls = counted_ssh(tmp_path, sshd, home)
    here = {
        "show": holdfast("show", remote, "--json", cwd=tmp_path).stdout,
        "milk": holdfast("show", remote, "milk", cwd=tmp_path).stdout,
        "gate": holdfast("gate", remote, "--min", "polite=0.1", cwd=tmp_path).stdout,
        "csv": holdfast("export", remote, "--to", "csv", "-o", "here", cwd=tmp_path).stdout,
    }
    for name in (f"cluster:{remote}", invocation.id, f"{invocation.id[:6]}.0", f"cluster:{invocation.directory}"):
        calls.unlink(missing_ok=True)
        shown = json.loads(holdfast("show", name, "--json", cwd=tmp_path, env=env).stdout)
        expected = json.loads(here["show"])
        copy = Path(shown["run"].pop("path"))
        assert copy.is_relative_to(home / "fetched" / "cluster") and expected["run"].pop("path") == str(remote)
        assert (shown["counts"], shown["metrics"], shown["trials"]) == tuple(
            expected[key] for key in ("counts", "metrics", "trials")
        )
        assert len(calls.read_text().splitlines()) <= 5
        calls.unlink()
        assert holdfast("show", name, "milk", cwd=tmp_path, env=env).stdout == here["milk"]
        needed = 3 if name.endswith(invocation.id) and ":" in name else 2  # to find it, and to learn of no change
        assert len(calls.read_text().splitlines()) == needed
        assert holdfast("gate", name, "--min", "polite=0.1", cwd=tmp_path, env=env).stdout == here["gate"]
        holdfast("export", name, "--to", "csv", "-o", "there", cwd=tmp_path, env=env)
        assert contents(tmp_path / "there") == contents(tmp_path / "here")
        (pair,) = json.loads(holdfast("compare", remote, name, "--json", cwd=tmp_path, env=env).stdout)
        assert pair["first"] == str(remote) and pair["second"] == str(copy)


def test_a_run_without_its_dataset_and_code_can_still_be_read(sshd: Cluster, tmp_path: Path, home: Path) -> None:
    run = agent_run(tmp_path / "there")
    copy = fetch(Watched(sshd), run)
    shutil.rmtree(tmp_path / "there")
    shown = json.loads(holdfast("show", copy, "--json", cwd=tmp_path).stdout)
    assert {trial["sample"] for trial in shown["trials"]} == {"milk", "salt"}
    holdfast("export", copy, "--to", "csv", cwd=tmp_path)


def test_only_what_is_new_is_fetched(sshd: Cluster, remote: Path, home: Path) -> None:
    transport = Watched(sshd)
    copy = fetch(transport, remote)
    assert contents(copy) == contents(remote)
    transport.calls = transport.received = 0
    fetch(transport, remote)
    assert transport.calls == 1
    listing = transport.received
    line = (remote / "errors.jsonl").read_bytes().splitlines(keepends=True)[-1]
    with (remote / "errors.jsonl").open("ab") as file:
        file.write(line)
    transport.calls = transport.received = 0
    fetch(transport, remote)
    assert contents(copy) == contents(remote)
    assert transport.received < 3 * listing + len(line) + 1000, "the journal was not fetched from its beginning"


def test_a_run_that_is_being_written_is_fetched_in_whole_lines(
    sshd: Cluster, runs: tuple[Path, Path], remote: Path, tmp_path: Path, home: Path
) -> None:
    whole, growing = remote, tmp_path / "growing" / "run"
    shutil.copytree(runs[0], growing)
    for name in ("outputs.jsonl", "grades.jsonl"):
        (growing / name).write_bytes(b"")
    transport = Watched(sshd)
    data = (whole / "outputs.jsonl").read_bytes()
    for end in (0, 10, data.index(b"\n"), data.index(b"\n") + 1, len(data) - 1):
        (growing / "outputs.jsonl").write_bytes(data[:end])
        copy = fetch(transport, growing)
        lines = (copy / "outputs.jsonl").read_bytes()
        assert lines == data[: data[:end].rfind(b"\n") + 1]
        assert not RunDir(copy).finished
    for name in ("outputs.jsonl", "grades.jsonl", "errors.jsonl", "results.json", "metrics.json", "run.log"):
        shutil.copy(whole / name, growing / name)
    assert contents(fetch(transport, growing)) == contents(growing)


def test_the_outcome_of_a_gate_is_copied_and_forgotten_with_the_original(
    sshd: Cluster, remote: Path, home: Path
) -> None:
    transport = Watched(sshd)
    gate = GateOutcome(passed=False, baseline=None, checks=[])
    RunDir(remote).write_gate(gate)
    assert RunDir(fetch(transport, remote)).read_gate() == gate
    RunDir(remote).write_gate(None)
    copy = RunDir(fetch(transport, remote))
    assert copy.finished and copy.read_gate() is None


def _rewrite(run: Path) -> None:
    """Cut the last outputs off and write others, as a repair and a resumed run do."""
    lines = (run / "outputs.jsonl").read_bytes().splitlines(keepends=True)
    (run / "outputs.jsonl").write_bytes(lines[0] + lines[2] + lines[1] + lines[0])


def _replace(run: Path) -> None:
    """Archive the run and begin another in its place, as `--fresh` does."""
    shutil.copytree(run, run.with_name("archived"))
    (run / "manifest.json").write_bytes((run / "manifest.json").read_bytes().replace(b"shop", b"stop"))
    for name in ("steps.jsonl", "metrics.json", "results.json"):
        (run / name).unlink()
    lines = (run / "outputs.jsonl").read_bytes().splitlines(keepends=True)
    (run / "outputs.jsonl").write_bytes(b"".join(reversed(lines)) * 2)


def _reopen(run: Path) -> None:
    RunDir(run).reopen()


def _finish_again(run: Path) -> None:
    """Resume the run and write a new report of more lines."""
    for name in ("outputs.jsonl", "grades.jsonl"):
        data = (run / name).read_bytes()
        with (run / name).open("ab") as file:
            file.write(data)
    metrics = json.loads((run / "metrics.json").read_bytes())
    metrics["timing"] |= RunDir(run).journal_bytes()
    RunDir(run).reopen()
    (run / "results.json").write_bytes((run.parent / "kept.json").read_bytes())
    (run / "metrics.json").write_text(json.dumps(metrics))


@pytest.mark.parametrize(
    ("change", "known"),
    [(_rewrite, True), (_replace, False), (_replace, True), (_reopen, True), (_finish_again, False)],
)
def test_a_run_that_changes_while_it_is_fetched_is_copied_as_it_was_at_one_moment(
    sshd: Cluster,
    remote: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    known: bool,
) -> None:
    monkeypatch.setattr(copies, "_PORTION", 20_000)
    shutil.copy(remote / "results.json", remote.parent / "kept.json")
    original = remote.with_name("original")
    shutil.copytree(remote, original)
    moment = 0
    while True:
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(remote)
        shutil.copytree(original, remote)
        shutil.rmtree(remote.with_name("archived"), ignore_errors=True)
        if known:
            fetch(Watched(sshd), remote)
            with (remote / "run.log").open("a") as log:
                log.write("one more line\n" * 300)

        def alter(number: int, moment: int = moment) -> None:
            if number == moment:
                change(remote)

        transport = Watched(sshd, alter)
        check_sound(fetch(transport, remote))
        changed = transport.calls > moment
        assert contents(fetch(Watched(sshd), remote)) == contents(remote)
        if not changed:
            break
        moment += 1
    assert moment > 2


def check_sound(copy: Path, *, cut_off: bool = False) -> None:
    """A copy is a run as a reader may find it; of a fetch that was cut off, a line may have only begun."""
    rundir = RunDir(copy)
    for name in ("outputs", "grades", "steps", "errors"):
        for journal in rundir.journals(name):
            lines = [*scan(journal)]
            assert all(line.sound for line in (lines[:-1] if cut_off else lines))
    if rundir.finished:
        metrics = rundir.read_metrics()
        assert metrics is not None and not rundir.has_lost_lines(metrics)
        assert rundir.read_results()


@pytest.mark.faults
def test_a_fetch_that_is_cut_off_at_any_point_leaves_a_run_and_is_continued(
    sshd: Cluster, remote: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_PORTION", 10_000)
    complete = Watched(sshd)
    shutil.rmtree(fetch(complete, remote))

    def cut_off(number: int) -> None:
        if number == moment:
            raise KeyboardInterrupt

    for moment in range(2 * complete.calls):  # noqa: B007 - read by cut_off
        with suppress(KeyboardInterrupt):
            fetch(Watched(sshd, cut_off), remote)
            break
        check_sound(home / "fetched" / "cluster" / remote.relative_to("/"), cut_off=True)
    assert moment > 2
    copy = home / "fetched" / "cluster" / remote.relative_to("/")
    assert contents(copy) == contents(remote)
    (copy / copies.RECORD).unlink()
    rest = Watched(sshd)
    assert contents(fetch(rest, remote)) == contents(remote)
    assert rest.received < complete.received / 2, "journals that are here are not fetched again"


@pytest.mark.faults
def test_a_killed_command_is_repeated_without_harm(sshd: Cluster, remote: Path, tmp_path: Path, home: Path) -> None:
    env, calls = counted_ssh(tmp_path, sshd, home, stop_at=2)
    with start("show", f"cluster:{remote}", cwd=tmp_path, env=env) as command:
        wait_for(lambda: calls.exists() and len(calls.read_text().splitlines()) == 2, "the call that hangs")
        command.kill()
    holdfast("show", f"cluster:{remote}", cwd=tmp_path, env=env_of(sshd, home))
    assert contents(home / "fetched" / "cluster" / remote.relative_to("/")) == contents(remote)


def test_errors_name_the_host_the_path_and_what_to_do(sshd: Cluster, remote: Path, tmp_path: Path, home: Path) -> None:
    env = env_of(sshd, home)

    def refused(name: str, check: int, **more: str) -> str:
        return str(holdfast("show", name, cwd=tmp_path, env=env | more, check=check).stderr)

    missing = refused("cluster:/no/such/run", 2)
    assert "there is no cluster:/no/such/run" in missing
    assert "neither an invocation's directory nor a run's" in refused(f"cluster:{remote.parent}", 2)
    holdfast("show", f"cluster:{remote}", cwd=tmp_path, env=env)
    broken = tmp_path / "broken"
    broken.write_text("Host cluster\n  HostName 127.0.0.1\n  Port 1\n  ControlPath none\n")
    away = refused(f"cluster:{remote}", 3, HOLDFAST_SSH_CONFIG=str(broken))
    copy = home / "fetched" / "cluster" / remote.relative_to("/")
    assert "cluster" in away and "refused" in away and str(copy) in away
    holdfast("show", copy, cwd=tmp_path, env=env)

    invocation = launched(sshd.here, tmp_path / "base", tasks=("gsm8k", "mmlu"))
    register(invocation, home, host="cluster", tasks=("gsm8k", "mmlu"))
    assert f"holdfast status {invocation.id}" in refused(invocation.id, 2)
    other = remote.with_name("other-12345678")
    shutil.copytree(remote, other)
    for task, run in enumerate((remote, other)):
        invocation.state(task, phase="done", run_dir=str(run))
    several = refused(invocation.id, 2)
    assert f"{invocation.id}.0 ({remote})" in several and f"{invocation.id}.1 ({other})" in several
    shown = json.loads(holdfast("show", f"{invocation.id}.1", "--json", cwd=tmp_path, env=env).stdout)
    assert shown["run"]["path"].endswith("other-12345678")


def test_a_run_that_others_may_not_read_is_refused(sshd: Cluster, remote: Path, home: Path) -> None:
    with public_folder() as folder:
        theirs = folder / remote.name
        shutil.copytree(remote, theirs)
        (theirs / "outputs.jsonl").chmod(0o600)
        with pytest.raises(ClusterError, match="permission denied") as refused:
            fetch_run(RunPlace(sshd.ssh("colleague"), str(theirs)), print)
        assert f"chmod -R g+rX {theirs}" in str(refused.value)
        (theirs / "outputs.jsonl").chmod(0o644)
        assert contents(fetch_run(RunPlace(sshd.ssh("colleague"), str(theirs)), print)) == contents(remote)


def test_the_beginning_of_a_run_and_of_an_invocation_is_ambiguous(
    sshd: Cluster, remote: Path, tmp_path: Path, home: Path
) -> None:
    digits = remote.name.rpartition("-")[2]
    (home / "invocations").mkdir(parents=True)
    (home / "invocations" / f"{digits[:3]}{'0' * 13}.json").write_text("{}")
    env = env_of(sshd, home, HOLDFAST_RUNS_DIR=str(remote.parent.parent))
    assert "is ambiguous" in holdfast("show", digits[:3], cwd=tmp_path, env=env, check=2).stderr
    holdfast("show", digits, cwd=tmp_path, env=env)


def test_the_viewer_follows_a_run_on_a_cluster_until_it_is_finished(
    sshd: Cluster, runs: tuple[Path, Path], remote: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_SSH_CONFIG", str(sshd.ssh_config))
    growing = tmp_path / "growing" / runs[0].name
    shutil.copytree(runs[0], growing)
    name = f"cluster:{growing}"
    named = view._named_runs((name,), tmp_path)
    assert not any(run.finished for run in named.values())

    monkeypatch.setattr(view, "_FOLLOW_SECONDS", 0.0)
    follower = threading.Thread(target=view._follow_copies, args=((name,), tmp_path, named, home))
    follower.start()
    for path in ("outputs.jsonl", "grades.jsonl", "errors.jsonl", "results.json", "metrics.json"):
        shutil.copy(remote / path, growing / path)
    follower.join(PATIENCE)
    assert all(run.finished for run in named.values())
