"""Several servers in one job, on a real Slurm: instances of the model that share the questions, and a judge."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.apps.cluster.config.launch import Server
from holdfast.apps.cluster.job import successor
from holdfast.apps.cluster.job.servers import Node, ServerProcess, _listens, spots
from holdfast.apps.cluster.remote.invocation import End
from holdfast.apps.cluster.watch.find import Subject
from holdfast.apps.cluster.watch.status import look
from holdfast.errors import HoldfastError
from tests.support.launching import Site, calmly, deployment, free_port, node_of, pid_of
from tests.support.running import server, wait_for
from tests.support.slurm import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROWS = 200
IN_FLIGHT = 4
JUDGE = {
    "type": "prompt",
    "name": "judge",
    "rubric": "Is it polite?",
    "model": "test-model",
    "base_url": "${JUDGE_URL}",
}
VERDICT = '{"reason": "as told", "score": 1}'


@pytest.fixture
def site(tmp_path: Path, slurm: Cluster) -> Site:
    return Site(tmp_path, slurm, slurm.here)


def asked(site: Site, name: str = "asked") -> Counter[str]:
    path = site.folder / f"{name}.txt"
    return Counter(path.read_text().splitlines() if path.exists() else [])


def two_instances(site: Site, **execution: Any) -> None:
    site.write(
        None,
        rows=ROWS,
        limits={"concurrency": IN_FLIGHT},
        deployment=deployment(site.folder, port=free_port(2)),
        execution={"num_instances": 2, **execution},
    )


@pytest.mark.faults
def test_a_killed_instance_loses_only_requests_in_flight(site: Site) -> None:
    two_instances(site)
    invocation = site.submit()
    site.await_done(invocation, 20)
    os.kill(pid_of(site.folder / "asked-1.txt"), signal.SIGKILL)
    state = site.await_over(invocation)
    assert (state.phase, state.done, state.attempt) == ("done", ROWS, 2), site.logs(invocation)
    counts = asked(site) + asked(site, "asked-1")
    assert len(counts) == ROWS
    # What was in flight to the one that died is asked of the other; then what is in flight as the attempt ends is left.
    assert counts.total() - ROWS <= 2 * IN_FLIGHT
    assert max(counts.values()) <= 3
    first_end = next(record for record in site.attempts(invocation) if isinstance(record, End))
    assert first_end.goes_on
    assert "(instance 1, node" in first_end.why


def test_instances_span_nodes_of_which_the_first_answers(site: Site) -> None:
    code = """
if os.environ["INSTANCE_RANK"] != "0":
    pathlib.Path(path + ".rank").write_text(os.environ["SLURMD_NODENAME"])
    time.sleep(600)
"""
    served = deployment(site.folder, code=code, port=free_port(2))
    site.write(None, rows=40, deployment=served, execution={"num_nodes": 4, "num_instances": 2})
    invocation = site.submit()
    state = site.await_over(invocation)
    assert (state.phase, state.done) == ("done", 40), site.logs(invocation)
    assert asked(site) + asked(site, "asked-1") == {f"question {number}": 1 for number in range(40)}
    assert asked(site) and asked(site, "asked-1")
    seconds = [(site.folder / f"{name}.txt.rank").read_text() for name in ("asked", "asked-1")]
    assert seconds[0] != seconds[1], "each on a node of its own"


def test_an_instance_that_cannot_start_stops_the_chain_and_is_named(site: Site) -> None:
    served = deployment(site.folder, code="if instance == '1': sys.exit('no GPU here')", port=free_port(2))
    site.write(None, deployment=served, execution={"num_instances": 2})
    invocation = site.submit()
    state = site.await_over(invocation)
    assert (state.phase, state.exit_code, state.attempt) == ("stopped", 3, 1)
    assert "(instance 1, node" in state.reason and "no GPU here" in state.reason
    assert asked(site) == {}
    log = "".join(path.read_text() for path in Path(site.place(invocation).logs).glob("main-*.log"))
    assert log.count("no GPU here") == 1, log
    calmly(lambda: not site.live(invocation, "main"), "the successor's end")


def judged(site: Site, rows: int, judge: dict[str, Any] | None = None, **more: Any) -> None:
    judge = judge or {}
    site.write(
        None,
        rows=rows,
        limits={"concurrency": IN_FLIGHT},
        deployment=deployment(site.folder, port=free_port(2)),
        auxiliary={"judge": {**deployment(site.folder, name="judge", says=VERDICT, port=free_port(2)), **judge}},
        **{"graders": [{"type": "exact"}, JUDGE], **more},
    )


def test_instances_of_a_model_and_of_its_judge_share_the_questions(site: Site) -> None:
    judged(site, ROWS, {"num_instances": 2}, execution={"num_instances": 2, "workers": 2})
    invocation = site.submit()
    state = site.await_over(invocation)
    assert (state.phase, state.done, state.attempt) == ("done", ROWS, 1), site.logs(invocation)
    scores = {name: grader["score"] for name, grader in site.metrics(state)["metrics"].items()}
    assert scores == {"exact": 0.5, "judge": 1.0}
    questions, verdicts = (asked(site, name) + asked(site, f"{name}-1") for name in ("asked", "judge"))
    assert questions == {f"question {number}": 1 for number in range(ROWS)}
    assert (len(verdicts), verdicts.total()) == (ROWS, ROWS)
    names = ("asked", "asked-1", "judge", "judge-1")
    assert min(asked(site, name).total() for name in names) > ROWS / 3, [asked(site, name).total() for name in names]
    assert len({node_of(site.folder / f"{name}.txt") for name in names}) == 4
    logs = Path(site.place(invocation).logs)
    for name in ("deployment", "judge"):
        for instance in ("", "-1"):
            assert "serving\n" in (logs / f"{name}-{state.job}-0{instance}.log").read_text()


def test_a_judge_for_a_model_that_is_elsewhere(site: Site) -> None:
    judge = deployment(site.folder, name="judge", says=VERDICT)
    with server() as model:
        site.write(model.base_url, graders=[JUDGE], auxiliary={"judge": judge}, execution={"workers": 2})
        invocation = site.submit()
        state = site.await_over(invocation)
        assert (state.phase, state.done) == ("done", 20), site.logs(invocation)
        assert (model.requests, asked(site, "judge").total()) == (20, 20)


def test_overrides_name_the_judge_as_other_launchers_do(tmp_path: Path) -> None:
    site = Site(tmp_path, Cluster(tmp_path / "none"), Cluster(tmp_path / "none").here)
    grader = {**JUDGE, "model": "another", "base_url": "http://127.0.0.1:9/v1"}
    named = {
        "graders.judge.base_url": "auxiliary_deployments.judge.chat_url",
        "graders.judge.model": "auxiliary_deployments.judge.model_id",
    }
    judged(site, 4, graders=[grader], task={"overrides": named})
    invocation = site.submit(profile="here")
    wait_for(lambda: site.state(invocation).phase in ("done", "stopped"), "the end")
    assert site.state(invocation).phase == "done", site.logs(invocation)
    assert asked(site, "judge").total() == 4


def test_instances_on_this_machine_have_ports_one_after_the_other(tmp_path: Path) -> None:
    site = Site(tmp_path, Cluster(tmp_path / "none"), Cluster(tmp_path / "none").here)
    two_instances(site)
    invocation = site.submit("execution.workers=2", profile="here")
    calmly(lambda: site.state(invocation).phase in ("done", "stopped"), "the end")
    assert site.state(invocation).phase == "done", site.logs(invocation)
    assert asked(site) + asked(site, "asked-1") == {f"question {number}": 1 for number in range(ROWS)}
    assert min(asked(site).total(), asked(site, "asked-1").total()) > ROWS / 3


class TestSpots:
    NODES = tuple(Node(f"n{number}", f"10.0.0.{number}") for number in range(1, 6))

    def test_each_server_has_its_own_nodes(self) -> None:
        model = Server(command="x", instances=2, nodes=4)
        judge = Server(command="y", name="judge", prefix="JUDGE", nodes=1)
        assigned = spots([model, judge], self.NODES, "n1")
        assert [[node.name for node in spot.nodes] for spot in assigned] == [["n1", "n2"], ["n3", "n4"], ["n5"]]
        assert [spot.url("/v1") for spot in assigned] == [
            "http://127.0.0.1:8000/v1",
            "http://10.0.0.3:8000/v1",
            "http://10.0.0.5:8000/v1",
        ]
        assert assigned[0].url("/v1", "host1") == "http://host1:8000/v1"
        assert [str(spot) for spot in assigned] == [
            "the server (instance 0, n1)",
            "the server (instance 1, n3)",
            "the server judge",
        ]
        assert assigned[1].env == {
            "HOLDFAST_PORT": "8000",
            "INSTANCE_ID": "1",
            "INSTANCE_RANK": "0",
            "PROC_ID": "0",
            "NUM_INSTANCES": "2",
            "NODES_PER_INSTANCE": "2",
            "MASTER_IP": "10.0.0.3",
            "INSTANCE_MASTER_IP": "10.0.0.3",
            "ALL_NODE_IPS": "10.0.0.3,10.0.0.4",
        }

    def test_instances_at_one_address_have_ports_of_their_own(self) -> None:
        same = [Node(f"n{number}", "127.0.0.1") for number in range(3)]
        assigned = spots([Server(command="x", instances=3, nodes=3, port=7000)], same, "n0")
        assert [spot.port for spot in assigned] == [7000, 7001, 7002]

    def test_a_server_on_one_machine_is_near(self) -> None:
        (alone,) = spots([Server(command="x")], [], "n1")
        assert (alone.nodes, alone.near, alone.url("")) == ((), True, "http://127.0.0.1:8000")
        assert alone.env["MASTER_IP"] == alone.env["ALL_NODE_IPS"] != ""

    def test_too_few_nodes_are_reported(self) -> None:
        with pytest.raises(HoldfastError, match="the job has 5 nodes"):
            spots([Server(command="x", nodes=6)], self.NODES, "n1")


def here(_: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of a server on this machine."""
    return os.environ


SRUN = """\
#!/bin/bash
if [ "$1" = --help ]; then echo "  --container-image=…"; exit; fi
for word; do
    case $word in --container-env=*) kept=",${word#*=},";; --mpi=*) export MPI=${word#*=};; esac
done
if [ "${@: -1}" = true ]; then [ $MPI = $LOADABLE ]; exit; fi
[[ $kept = *,HF_HOME,* ]] || export HF_HOME=/image/hf
SLURM_PROCID=1 exec "${@: -3}"
"""
"""stands for srun with pyxis: a variable of the image wins, unless --container-env names it"""


@pytest.mark.parametrize(("loadable", "mpi"), [("pmix", "pmix"), ("none", "default")])
def test_a_server_in_an_image_keeps_its_variables_and_uses_pmix_if_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loadable: str, mpi: str
) -> None:
    monkeypatch.setenv("LOADABLE", loadable)
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}:{os.environ['PATH']}")
    written = tmp_path / "env.txt"
    shown = "$HF_HOME $PROC_ID $INSTANCE_RANK $NODES_PER_INSTANCE ${MASTER_IP:+known} ${MPI:-default}"
    command = f'echo "{shown}" > {written}'
    env = {"HF_HOME": "lit:/user/hf", "UNKNOWN": "runtime:NOT_SET"}
    (spot,) = spots([Server(command=command, image="i", port=free_port(), env=env)], [], "n1")
    process = ServerProcess(spot, tmp_path / "log", lambda _: {**os.environ, "HF_HOME": "/user/hf"})
    assert process.start(lambda _: None, lambda: False)
    wait_for(lambda: written.exists() and written.read_text(), "the server")
    process.stop()
    assert written.read_text() == f"/user/hf 1 1 1 known {mpi}\n"


def test_a_port_is_one_jobs_at_a_time_and_the_next_waits_for_it(tmp_path: Path) -> None:
    port, going = free_port(), threading.Event()
    (spot,) = spots([Server(command="sleep 600", port=port)], [], "n1")
    first, second = (ServerProcess(spot, tmp_path / f"{name}.log", here) for name in "ab")
    messages: list[str] = []
    assert first.start(messages.append, going.is_set)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(second.start, messages.append, going.is_set)
        wait_for(lambda: messages, "it to say that it waits")
        assert f"port {port} of " in messages[0] and not waiting.done()
        first.stop()
        assert waiting.result(timeout=300)
        third = pool.submit(ServerProcess(spot, tmp_path / "c.log", here).start, messages.append, going.is_set)
        going.set()
        assert not third.result(timeout=300), "told to stop before it could begin"
    second.stop()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        assert not second.start(messages.append, going.is_set), "nor next to somebody else's server"
    second.stop()


@contextmanager
def used_by_another_job(port: int) -> Iterator[None]:
    """A port whose server is one of Holdfast, in another job on the same node."""
    (spot,) = spots([Server(command=f"exec {sys.executable} -m http.server {port}", port=port)], [], "n1")
    with tempfile.NamedTemporaryFile() as log:
        process = ServerProcess(spot, Path(log.name), here)
        assert process.start(lambda _: None, lambda: False)
        try:
            wait_for(lambda: _listens("127.0.0.1", port), "the other server")
            yield
        finally:
            process.stop()


def test_a_command_with_the_variable_of_the_port_gets_the_next_free_one(site: Site) -> None:
    port = free_port(2)
    read_port = "os.environ['HOLDFAST_PORT'] = sys.argv[sys.argv.index('--port') + 1]"
    served = deployment(site.folder, code=read_port, port=port)
    served["command"] += " --port $HOLDFAST_PORT"
    site.write(None, deployment=served, execution={"workers": 2})
    with used_by_another_job(port):
        invocation = site.submit()
        state = site.await_over(invocation)
        assert (state.phase, state.done, state.attempt) == ("done", 20, 1), site.logs(invocation)
    assert f"the server answers at http://127.0.0.1:{port + 1}/v1" in site.logs(invocation)
    assert asked(site).total() == 20


def test_every_kind_of_server_is_told_its_port() -> None:
    nim = Server(command="start", port=8000, any_port=True, env={"NIM_SERVER_PORT": "lit:8000", "A": "lit:8000"})
    assert nim.on_port(8003).env == {"NIM_SERVER_PORT": "lit:8003", "A": "lit:8000"}
    vllm = Server(command="vllm serve m --port 8000 --max-model-len 8000", port=8000, any_port=True)
    moved = vllm.on_port(8003)
    assert (moved.command, moved.port) == ("vllm serve m --port 8003 --max-model-len 8000", 8003)
    own = Server(command="serve --port 8000", port=8000)
    assert own.on_port(8003) == own


def test_waiting_for_a_port_is_shown_and_is_not_an_attempt_without_progress(site: Site) -> None:
    port = free_port()
    site.write(None, deployment=deployment(site.folder, port=port))
    with used_by_another_job(port):
        invocation = site.submit()
        calmly(lambda: f"port {port}" in site.state(invocation).reason, "it to wait for the port")
        subject = Subject(site.lab.here, invocation.directory)
        shown = look(subject, site.registry).tasks[0]
        assert shown.status == "deploying" and "is used by the server of another job" in shown.reason
        assert "see /" not in shown.reason, "the server has no log yet"
        site.slurm("scancel", "--batch", "--signal=USR2", str(site.state(invocation).job))  # as near the time limit
        calmly(lambda: site.state(invocation).attempt == 2, "the next job")
    state = site.await_over(invocation)
    assert (state.phase, state.done, state.attempt) == ("done", 20, 2), site.logs(invocation)
    first_end = next(record for record in site.attempts(invocation) if isinstance(record, End))
    assert first_end.goes_on and f"port {port}" in first_end.why


def test_a_server_that_did_not_answer_in_all_the_time_of_its_job_is_the_reason(site: Site) -> None:
    site.write(None, deployment=deployment(site.folder, code="time.sleep(600)"))
    invocation = site.submit()
    calmly(lambda: "see /" in site.state(invocation).reason, "the server to start")
    site.slurm("scancel", "--batch", "--signal=USR2", str(site.state(invocation).job))
    state = site.await_over(invocation)
    assert (state.phase, state.attempt) == ("stopped", 1)
    assert "its time was up before the server answered" in state.reason


def test_the_server_stays_until_workers_have_their_answers_at_a_time_limit(site: Site) -> None:
    served = deployment(site.folder)
    site.write(None, rows=ROWS, limits={"concurrency": IN_FLIGHT}, deployment=served, execution={"workers": 2})
    invocation = site.submit()
    calmly(lambda: site.running(invocation, "workers"), "the worker")
    site.await_done(invocation, 20)
    site.slurm("scancel", "--batch", "--signal=USR2", str(site.state(invocation).job))
    state = site.await_over(invocation)
    assert (state.phase, state.done) == ("done", ROWS), site.logs(invocation)
    assert asked(site) == {f"question {number}": 1 for number in range(ROWS)}


def test_requests_that_are_cut_off_with_the_server_are_no_errors_of_the_run(site: Site) -> None:
    served = deployment(site.folder)
    site.write(None, rows=ROWS, limits={"concurrency": IN_FLIGHT}, deployment=served, execution={"workers": 2})
    invocation = site.submit()
    calmly(lambda: site.running(invocation, "workers"), "the worker")
    site.await_done(invocation, 20)
    run = Path(str(site.state(invocation).run_dir))
    calmly(lambda: (run / "workers" / "w1" / "outputs.jsonl").exists(), "its work")
    site.slurm("scancel", str(site.state(invocation).job))
    state = site.await_over(invocation)
    assert (state.phase, state.errors) == ("stopped", 0), site.logs(invocation)
    calmly(lambda: not site.live(invocation, "workers"), "the worker to leave")


class TestPauses:
    """A target that refuses connections for a while."""

    @staticmethod
    def written(site: Site, **keys: Any) -> None:
        site.write(None, rows=ROWS, limits={"concurrency": IN_FLIGHT}, **keys)

    def test_a_server_that_its_supervisor_restarts(self, site: Site) -> None:
        served = deployment(site.folder)
        served["command"] = f"while :; do {served['command']}; sleep 3; done"
        self.written(site, deployment=served, execution={"workers": 2})
        invocation = site.submit()
        site.await_done(invocation, 20)
        os.kill(pid_of(site.folder / "asked.txt"), signal.SIGKILL)
        calmly(lambda: site.state(invocation).reason.startswith("paused: "), "the pause")
        state = site.await_over(invocation)
        assert (state.phase, state.done, state.attempt) == ("done", ROWS, 1), site.logs(invocation)
        assert asked(site).total() - ROWS <= 2 * IN_FLIGHT

    def test_a_server_that_does_not_come_back_is_started_again_by_the_next_job(self, site: Site) -> None:
        served = deployment(site.folder)
        served["command"] = f"{served['command']}; exec sleep 600"
        self.written(site, deployment=served, execution={"endpoint_readiness_timeout": 3})
        invocation = site.submit()
        site.await_done(invocation, 20)
        os.kill(pid_of(site.folder / "asked.txt"), signal.SIGKILL)
        state = site.await_over(invocation)
        assert (state.phase, state.done, state.attempt) == ("done", ROWS, 2), site.logs(invocation)

    def test_an_endpoint_elsewhere_that_is_away(self, site: Site) -> None:
        elsewhere = deployment(site.folder)
        port = elsewhere["port"]
        command = ["bash", "-c", f"exec {elsewhere['command']}"]
        env = {**os.environ, "INSTANCE_ID": "0", "HOLDFAST_PORT": str(port)}
        site.write(f"http://127.0.0.1:{port}/v1", rows=ROWS, limits={"concurrency": IN_FLIGHT})
        first = subprocess.Popen(command, env=env)
        try:
            invocation = site.submit()
            site.await_done(invocation, 20)
        finally:
            first.kill()
            first.wait()
        calmly(lambda: site.state(invocation).reason.startswith("paused: "), "the pause")
        second = subprocess.Popen(command, env=env)
        try:
            state = site.await_over(invocation)
        finally:
            second.kill()
            second.wait()
        assert (state.phase, state.done, state.attempt) == ("done", ROWS, 1), site.logs(invocation)
        assert asked(site).total() - ROWS <= IN_FLIGHT

    def test_an_endpoint_that_never_answered_is_reported_at_once(self, site: Site) -> None:
        site.write(f"http://127.0.0.1:{free_port()}/v1")
        invocation = site.submit()
        state = site.await_over(invocation)
        assert state.phase == "stopped" and "refuses connections" in state.reason
        assert "paused" not in site.logs(invocation)


def test_workers_that_cannot_start_are_not_queued_forever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Simulate Slurm for the jobs around a main job."""
    queued: list[str] = []

    class Gone:
        def __init__(self, *_: object) -> None:
            pass

        def live(self, role: str) -> list[Any]:
            return []

        known = live

        def states(self) -> list[Any]:
            return []

        def submit_main(self, after: str) -> str:
            return after

        def submit_workers(self) -> None:
            queued.append("workers")

    monkeypatch.setattr(successor, "Chain", Gone)
    monkeypatch.setattr(successor.Submitter, "reconcile", lambda _: None)  # type: ignore[attr-defined]
    place = SimpleNamespace(invocation="/nowhere", number=0)
    task = SimpleNamespace(invocation="0" * 16, workers=3)
    job = SimpleNamespace(place=place, task=task, id="7", kill_requested=False)
    queued_jobs = successor.QueuedJobs(job)  # type: ignore[arg-type]
    assert queued_jobs.ensure() and not queued
    assert all(queued_jobs.ensure(workers=True) for _ in range(9))
    assert len(queued) == 5
    assert capsys.readouterr().err.count("workers have ended 5 times") == 1
