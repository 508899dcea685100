"""Graders of files, and programs on them: what they see, what they may do, and what is an error and no score."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from msgspec import UNSET
from msgspec.structs import replace

from holdfast import evaluate
from holdfast.engine.grading import Grading
from holdfast.errors import AttemptError, ConfigError
from holdfast.graders import programs
from holdfast.graders.build import build_graders
from holdfast.graders.programs import Isolation, isolation
from holdfast.store.index import RunIndex
from tests.support.running import ROOT, holdfast, lines, start, wait_for
from tests.support.specs import grade, identities, load, write_spec

FILES = {"src/a.py": "print('hello')\n", "README": "read me\n"}


def verdict_of(folder: Path, block: Any, answer: str = "the answer", /, **row: Any) -> Any:
    verdict = grade(folder, block, answer, files=row.pop("files", FILES), **row)
    assert not isinstance(verdict, AttemptError), verdict
    return verdict


def shell(script: Any, **more: Any) -> Any:
    return {"type": "program", "command": "bash", "args": ["-c", script], **more}


class TestFile:
    @pytest.mark.parametrize(
        ("block", "score"),
        [
            ({"must_exist": ["src/a.py", "src", "./README"]}, 1),
            ({"must_exist": ["src/a.py", "src/b.py"]}, 0.5),
            ({"must_not_exist": ["src/b.py"]}, 1),
            ({"must_not_exist": ["src"]}, 0),
            ({"content_patterns": [{"path": "src/a.py", "must_match": ["hel+o"], "must_not_match": ["rm"]}]}, 1),
            ({"content_patterns": [{"path": "src/a.py", "must_match": ["HELLO", "(?i)HELLO"]}]}, 2 / 3),
            ({"content_patterns": [{"path": "no", "must_match": ["x"], "must_not_match": ["y"]}]}, 0),
        ],
        ids=str,
    )
    def test_each_file_and_pattern_is_one_check(self, tmp_path: Path, block: Any, score: Any) -> None:
        assert verdict_of(tmp_path, {"type": "file", **block}).score == pytest.approx(score)

    def test_a_trial_whose_files_are_not_known_is_an_error(self, tmp_path: Path) -> None:
        error = grade(tmp_path, {"type": "file", "must_not_exist": ["x"]}, "x", fields={"files": UNSET}, files={})
        assert isinstance(error, AttemptError) and "no workspace" in error.message


class TestDiff:
    @pytest.mark.parametrize(
        ("expected", "score"),
        [
            ({"path": "src/a.py", "snapshot": "want.py"}, 1),
            ({"path": "README", "snapshot": "want.py"}, 0.5),
            ({"path": "src/a.py", "contains": ["+hello", "print", "-goodbye"]}, 1),
            ({"path": "src/a.py", "contains": ["-hello", "goodbye"]}, 1 / 3),
            ({"path": "gone", "snapshot": "want.py", "contains": ["-x"]}, 0),
        ],
        ids=str,
    )
    def test_each_file_snapshot_and_text_is_one_check(self, tmp_path: Path, expected: Any, score: Any) -> None:
        (tmp_path / "want.py").write_text(FILES["src/a.py"])
        assert verdict_of(tmp_path, {"type": "diff", "expected_files": [expected]}).score == pytest.approx(score)

    def test_a_changed_snapshot_is_another_grader(self, tmp_path: Path) -> None:
        (tmp_path / "want.py").write_text("one")
        spec = load(
            tmp_path, workspace={}, graders=[{"type": "diff", "expected_files": [{"path": "a", "snapshot": "want.py"}]}]
        )
        before = identities(spec)[0]
        (tmp_path / "want.py").write_text("two")
        assert identities(spec)[0] != before


def code(*assertions: Any, **keys: Any) -> Any:
    return {"type": "code", "assertions": list(assertions), **keys}


class TestProgram:
    def test_the_exit_code_is_the_score_and_standard_output_the_feedback(self, tmp_path: Path) -> None:
        verdict = verdict_of(tmp_path, shell("grep answer; cat src/a.py"))
        assert (verdict.score, verdict.feedback) == (1, "the answer\nprint('hello')")
        verdict = verdict_of(tmp_path, shell("echo no >&2; exit 3"))
        assert (verdict.score, verdict.feedback, verdict.details["exit_code"]) == (0, "no", 3)

    def test_a_program_works_in_a_temporary_copy(self, tmp_path: Path) -> None:
        script = 'test "$HOLDFAST_WORKSPACE" = "$PWD" && test "$WAZA_WORKSPACE_DIR" = "$PWD" && echo x > README && pwd'
        where = verdict_of(tmp_path, shell(script)).feedback
        assert not Path(where).exists() and not Path(where).parent.exists()
        assert verdict_of(tmp_path, shell("cat README")).feedback == "read me", "what one does no other sees"

    def test_a_program_sees_no_secret_in_its_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
        assert "sk-secret" not in verdict_of(tmp_path, shell("env")).feedback

    def test_a_file_of_the_evals_folder_is_run_and_in_the_key(self, tmp_path: Path) -> None:
        (tmp_path / "check.sh").write_text("#!/bin/sh\ntest -f src/a.py && echo $1\n")
        (tmp_path / "check.sh").chmod(0o755)
        block = {"type": "program", "command": "./check.sh", "args": ["{{ word }}"]}
        assert verdict_of(tmp_path, block, word="stone").feedback == "stone"
        named = {"type": "program", "command": "sh", "args": ["check.sh", "x"]}
        assert verdict_of(tmp_path, named).score == 1
        spec = load(tmp_path, graders=[block, {**named, "name": "other"}], samples=[{"word": "x"}], prompt="p")
        before = identities(spec)
        (tmp_path / "check.sh").write_text("#!/bin/sh\nexit 1\n")
        assert all(new != old for new, old in zip(identities(spec), before, strict=True))

    def test_a_trial_cannot_replace_the_evals_program(self, tmp_path: Path) -> None:
        (tmp_path / "check.sh").write_text("echo ours\n")
        block = {"type": "program", "command": "sh", "args": ["check.sh"]}
        assert verdict_of(tmp_path, block, files={"check.sh": "echo forged\n"}).feedback == "ours"

    def test_text_of_a_row_names_no_file_of_the_evals_folder(self, tmp_path: Path) -> None:
        (tmp_path / "check.sh").write_text("true\n")
        block = {"type": "program", "command": "echo", "args": ["{{ word }}"]}
        assert verdict_of(tmp_path, block, word="check.sh").feedback == "check.sh"

    @pytest.mark.parametrize(
        ("block", "message"),
        [
            ({"type": "program", "command": "no-shell.sh"}, "cannot be run: "),
            (shell("sleep 1000", timeout=0.3, on_timeout="error"), "timed out after 0.3 s"),
        ],
        ids=str,
    )
    def test_a_failed_start_and_a_timeout_with_on_timeout_error_are_errors(
        self, tmp_path: Path, block: Any, message: str
    ) -> None:
        (tmp_path / "no-shell.sh").write_text("#!/no/such/shell\n")
        (tmp_path / "no-shell.sh").chmod(0o755)
        error = grade(tmp_path, block, "x", files=FILES)
        assert isinstance(error, AttemptError) and message in error.message and not error.retry

    @pytest.mark.parametrize(
        ("block", "message"),
        [
            (shell("echo yes; sleep 1000", timeout=0.3), "timed out after 0.3 s"),
            (shell("kill -SEGV $$"), "killed by SIGSEGV"),
            (shell("kill -34 $$"), "killed by SIGRTMIN"),
            (shell("echo no; exit 125"), "no"),
            (shell("exit 139"), "exit code 139"),
            (code("True", "[None for _ in iter(int, 1)]", timeout=5), "timed out after 5 s"),
            (code("__import__('os').abort()"), "__import__('os').abort() (killed by SIGABRT)"),
            (code("__import__('os')._exit(0)"), "__import__('os')._exit(0) (exit code 0 without a verdict)"),
        ],
        ids=str,
    )
    def test_a_program_that_loops_or_crashes_has_failed(self, tmp_path: Path, block: Any, message: str) -> None:
        verdict = verdict_of(tmp_path, block)
        assert verdict.score == 0 and verdict.feedback.startswith(message)

    @pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "USR2"])
    def test_a_program_that_is_ended_from_outside_is_an_error(self, tmp_path: Path, name: str) -> None:
        ours = signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN)  # as under `nohup`
        try:
            error = grade(tmp_path, shell(f"kill -{name} $$"), "x", files=FILES)
        finally:
            signal.signal(signal.Signals[f"SIG{name}"], ours)
        assert isinstance(error, AttemptError) and f"was ended from outside by SIG{name}" in error.message

    def test_the_time_limit_of_turns_does_not_apply_to_programs(self, tmp_path: Path) -> None:
        def reply(prompt: Any) -> Any:
            return prompt

        run = evaluate(
            name="programs",
            samples=[{"id": "a"}],
            prompt="hi",
            target=reply,
            graders=[{"type": "program", "command": "sleep", "args": ["1000"], "timeout": 4}],
            limits={"turn_timeout": 3},
            runs_dir=tmp_path / "runs",
        )
        (record,) = lines(run.path / "grades.jsonl")
        assert (record["status"], record["score"], record["feedback"]) == ("failed", 0, "timed out after 4 s")
        assert run.finished

    def test_no_descriptor_is_closed_twice(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The second close could hit a file that another thread has opened in between."""
        doubtful = []

        class Pipe(io.FileIO):
            def close(self) -> None:
                if not self.closed:
                    try:
                        os.fstat(self.fileno())
                    except OSError as error:
                        doubtful.append(error)
                        os.dup2(0, self.fileno())
                super().close()

        monkeypatch.setattr(os, "fdopen", Pipe)

        async def run_program() -> Any:
            (tmp_path / "workspace").mkdir()
            return await programs.run_in(programs.Sandbox(tmp_path, tmp_path / "workspace"), ["true"], "", 60)

        assert uvloop.run(run_program()).code == 0 and doubtful == []

    def test_a_timeout_is_in_no_key_unless_it_is_an_error(self, tmp_path: Path) -> None:
        blocks = [
            shell("true"),
            shell("true", name="b", timeout=90, on_timeout="fail"),
            shell("true", name="c", on_timeout="error"),
        ]
        spec = load(tmp_path, graders=blocks)
        plain, same, other = identities(spec)
        assert plain == same != other and "on_timeout" not in plain

    def test_processes_that_a_program_started_end_with_it(self, tmp_path: Path) -> None:
        name = str(uuid.uuid4())
        verdict_of(tmp_path, shell(f"sleep 300 & : {name}"))
        wait_for(lambda: not _processes(name), "the end of what it started")

    @pytest.mark.parametrize(
        "able",
        [
            Isolation(),
            Isolation(writes=isolation().writes),
            Isolation(isolation().writes, processes=isolation().processes),
        ],
        ids=["nothing", "only Landlock", "processes and no mounts"],
    )
    def test_a_program_is_graded_alike_with_every_isolation(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, able: Any
    ) -> None:
        monkeypatch.setattr(programs, "isolation", lambda: able)
        verdict = verdict_of(tmp_path, shell('cat; test "$HOLDFAST_WORKSPACE" = "$PWD" && touch in; exit 3'))
        assert (verdict.feedback, verdict.details["exit_code"], verdict.details["isolation"]) == ("the answer", 3, able)
        assert verdict_of(tmp_path, shell("kill -SEGV $$")).feedback == "killed by SIGSEGV"
        name = str(uuid.uuid4())
        verdict = verdict_of(tmp_path, shell(f"sleep 300 & wait; : {name}", timeout=1))
        assert verdict.feedback == "timed out after 1 s"
        wait_for(lambda: not _processes(name), "the end of what it started")


def _processes(name: str) -> list[psutil.Process]:
    """The processes with a name in their arguments."""
    named = []
    for process in psutil.process_iter():
        try:
            if any(name in argument for argument in process.cmdline()):
                named.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue
    return named


def _outside() -> Path:
    return Path(tempfile.gettempdir()) / f"holdfast-test-outside-{os.getpid()}"


@pytest.mark.skipif(not isolation().writes, reason="this kernel has no Landlock")
class TestIsolation:
    def test_nothing_outside_the_workspace_can_be_changed(self, tmp_path: Path) -> None:
        outside, kept = _outside(), tmp_path / "kept.txt"
        kept.write_text("mine")
        tries = [f"echo b > {outside}", f"mkdir {outside}", f"echo c >> {kept}", f"rm {kept}", f"mv {kept} ."]
        verdict = verdict_of(tmp_path, shell("; ".join(["echo a > in.txt", *tries, "cat in.txt"])))
        assert verdict.feedback == "a" and not outside.exists() and kept.read_text() == "mine"
        assert verdict.details["isolation"].writes

    def test_assertions_cannot_change_files_outside_either(self, tmp_path: Path) -> None:
        outside = _outside()
        block = {
            "type": "code",
            "assertions": [f"open({str(outside)!r}, 'w').write('x')", "open('in', 'w').write('x')"],
        }
        verdict = verdict_of(tmp_path, block)
        refused = ("PermissionError", "Read-only file system")
        assert verdict.score == 0.5 and any(text in verdict.feedback for text in refused) and not outside.exists()

    def test_the_environment_of_the_run_cannot_be_read(self, tmp_path: Path) -> None:
        verdict = verdict_of(tmp_path, shell(f"cat /proc/{os.getpid()}/environ"))
        refused = ("Permission denied", "No such file")
        assert verdict.score == 0 and any(text in verdict.feedback for text in refused)

    def test_the_network_is_shut_unless_it_is_asked_for(self, tmp_path: Path) -> None:
        if isolation().network == "open":
            pytest.skip("this kernel has neither network namespaces nor Landlock for TCP")
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            script = f"exec 3<>/dev/tcp/127.0.0.1/{port}"
            assert verdict_of(tmp_path, shell(script)).score == 0
            verdict = verdict_of(tmp_path, shell(script, network=True))
            assert (verdict.score, verdict.details["isolation"].network) == (1, "open")

    def test_a_file_without_end_ends_the_program(self, tmp_path: Path) -> None:
        verdict = verdict_of(tmp_path, shell("exec cat /dev/zero > big"))
        assert (verdict.score, verdict.feedback) == (0, "killed by SIGXFSZ")


_METADATA = """
import os, sys

path = sys.argv[1]
changes = [
    lambda: os.chmod(path, 0o777),
    lambda: os.chown(path, os.getuid(), os.getgid()),
    lambda: os.utime(path, (1, 1)),
    lambda: os.setxattr(path, "user.holdfast", b"x"),
]
for change in changes:
    try:
        change()
    except OSError as error:
        print(error.strerror)
    else:
        print("changed")
"""

_DAEMON = """
import os, signal, sys

reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(writing, b"x")
        signal.pause()
    os._exit(0)
os.read(reading, 1)
"""


def daemon(name: Any, *then: Any, **more: Any) -> Any:
    """A program that starts a daemon, and then ends or does something else."""
    return {"type": "program", "command": sys.executable, "args": ["-c", "\n".join([_DAEMON, *then]), name], **more}


needs_mounts = pytest.mark.skipif(not isolation().read_only, reason="no mount namespaces here, or no mount_setattr")
needs_processes = pytest.mark.skipif(not isolation().processes, reason="no PID namespaces here")


class TestNamespaces:
    @needs_mounts
    @pytest.mark.parametrize("network", [False, True])
    def test_modes_owners_times_and_attributes_outside_cannot_be_changed(self, tmp_path: Path, network: bool) -> None:
        kept = tmp_path / "kept.txt"
        kept.write_text("mine")
        before = kept.stat()
        block = {"type": "program", "command": sys.executable, "args": ["-c", _METADATA, str(kept)], "network": network}
        verdict = verdict_of(tmp_path, block)
        assert verdict.feedback.splitlines() == ["Read-only file system"] * 4
        assert kept.stat().st_ctime_ns == before.st_ctime_ns, "every change of an inode sets it"
        inside = "chmod 700 README && touch -d 2001-01-01 . src && stat -c %a README"
        assert verdict_of(tmp_path, shell(inside)).feedback == "700"
        assert verdict.details["isolation"].read_only

    @needs_mounts
    def test_a_program_cannot_make_mounts_writable_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(programs, "isolation", lambda: Isolation(read_only=True))  # Landlock forbids mounts anyway
        kept = tmp_path / "kept.txt"
        kept.write_text("mine")
        remount = "mount -o remount,bind,rw / ; mount -o remount,bind,rw /tmp ; umount $HOLDFAST_WORKSPACE"
        script = f"chmod 700 {kept}; {remount}; chmod 700 {kept}; unshare -Urm sh -c '{remount}; chmod 700 {kept}'"
        before = kept.stat()
        verdict_of(tmp_path, shell(script))
        assert kept.stat().st_ctime_ns == before.st_ctime_ns

    @pytest.mark.parametrize("namespace", [pytest.param(True, marks=needs_processes), False], ids=["pid", "reaper"])
    @pytest.mark.parametrize(
        ("then", "message"),
        [
            ("", "exit code 0"),
            ("sys.exit(3)", "exit code 3"),
            ("os.abort()", "killed by SIGABRT"),
            ("signal.pause()", "timed out after 2 s"),
        ],
        ids=str,
    )
    def test_a_daemon_ends_with_the_grader(
        self, tmp_path: Path, then: str, message: str, namespace: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        able = replace(isolation(), processes=namespace)
        monkeypatch.setattr(programs, "isolation", lambda: able)
        name = str(uuid.uuid4())
        verdict = verdict_of(tmp_path, daemon(name, then, timeout=2 if "pause" in then else 30))
        remaining = _processes(name)
        for process in remaining:
            process.kill()
        assert verdict.feedback == message and remaining == []

    @needs_processes
    def test_the_folder_is_removed_although_daemons_write_until_the_timeout(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        write = "for i in {1..50}; do echo > $RANDOM$RANDOM; done"
        for _ in range(3):
            verdict = verdict_of(tmp_path, shell(f"while :; do (setsid bash -c '{write}' &); done", timeout=0.3))
            assert verdict.feedback == "timed out after 0.3 s"
        assert list(tmp_path.glob("holdfast-grade-*")) == []

    @needs_processes
    def test_processes_outside_cannot_be_signalled(self, tmp_path: Path) -> None:
        with subprocess.Popen(["sleep", "1000"]) as outside:
            try:
                verdict = verdict_of(tmp_path, shell(f"kill -9 {outside.pid}"))
                assert verdict.score == 0 and "No such process" in verdict.feedback
                assert outside.poll() is None
            finally:
                outside.kill()
        assert verdict.details["isolation"].processes

    @needs_processes
    @pytest.mark.parametrize(
        ("number", "message"),
        [
            (signal.SIGTERM, "ended from outside by SIGTERM"),
            (signal.SIGINT, "ended from outside by SIGINT"),
            (signal.SIGKILL, "the process that watches over .* was killed"),
        ],
    )
    def test_a_program_killed_from_outside_is_an_error_and_leaves_nothing(
        self, tmp_path: Path, number: Any, message: str
    ) -> None:
        name, workspace = str(uuid.uuid4()), tmp_path / "workspace"
        workspace.mkdir()

        async def end_from_outside() -> None:
            block = daemon(name, "open('up', 'w').close()", "signal.pause()")
            program = asyncio.create_task(
                programs.run_in(programs.Sandbox(tmp_path, workspace), [block["command"], *block["args"]], "", 300)
            )
            await asyncio.to_thread(wait_for, (workspace / "up").exists, "the daemon")
            (leader,) = (one for one in _processes(name) if os.getsid(one.pid) == one.pid)  # the daemon leads none
            (leader.parent() if number == signal.SIGKILL else leader).send_signal(number)
            await program

        with pytest.raises(AttemptError, match=message):
            asyncio.run(end_from_outside())
        wait_for(lambda: not _processes(name), "the end of the daemon")

    @needs_processes
    def test_signals_to_the_process_group_reach_only_the_program(self, tmp_path: Path) -> None:
        verdict = verdict_of(tmp_path, shell("trap 'echo here' TERM; kill -TERM 0; exit 4"))
        assert (verdict.feedback, verdict.details["exit_code"]) == ("here", 4)

    def test_another_user_keeps_the_uid_and_is_confined_too(self, tmp_path: Path) -> None:
        become = ["unshare", "-U", "--map-user=1234", "--map-group=1235"]
        _needs(*become, "unshare", "-Urnm", "--fork", "--pid", "true")
        kept = tmp_path / "kept.txt"
        kept.write_text("mine")
        script = f"id -u; id -g; touch in && chmod 700 {kept}; kill -SEGV $$"
        grading = (
            "import pathlib, sys; from tests.graders.test_files_and_programs import shell, verdict_of\n"
            "details = verdict_of(pathlib.Path(sys.argv[1]), shell(sys.argv[2])).details\n"
            "print(details['isolation'], details['killed'], details['stderr'], sep='\\n')\n"
            "print(verdict_of(pathlib.Path(sys.argv[1]), shell('id -u; id -g')).feedback)\n"
        )
        argv = [*become, sys.executable, "-c", grading, str(tmp_path), script]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
        able, killed, message, user, group = done.stdout.splitlines()
        assert "read_only=True, processes=True, network='namespace'" in able
        assert (killed, user, group) == ("killed by SIGSEGV", "1234", "1235") and "Read-only file system" in message


def _needs(*argv: str) -> None:
    if shutil.which(argv[0]) is None or subprocess.run(argv, capture_output=True).returncode != 0:
        pytest.skip(f"{' '.join(argv)} does not work here")


def test_users_are_warned_if_no_isolation_works(tmp_path: Path) -> None:
    assert isolation().caveat is None or not isolation().writes
    assert "no Landlock" in (Isolation().caveat or "")
    notices = []
    grader = type("G", (), {"caveat": Isolation().caveat, "check": None, "block": None})()
    work = type("W", (), {"slots": ()})()
    Grading([grader, grader], work, RunIndex(lambda _: ()), None, None, 1, notices.append)  # type: ignore[arg-type]
    assert notices == [Isolation().caveat]


def test_the_isolation_is_summarized_in_one_line() -> None:
    whole = Isolation(writes=True, read_only=True, processes=True, network="namespace")
    assert whole.summary == (
        "nothing outside their workspace can be changed; all their processes end with them; no network"
    )
    assert Isolation(writes=True, network="tcp").summary.split("; ") == [
        "outside their workspace, only modes, owners and times of files can be changed",
        "their processes are looked for and killed after them",
        "no TCP connections",
    ]
    assert Isolation().summary.startswith("files outside their workspace can be changed; ")


EVERY_LIST = "for each in gc.get_objects():\n    if type(each) is list: each.append([True, ''])"
CHEATING = 'import builtins, gc, json, os, signal, sys\nRESULTS = \'[[true, ""], [true, ""]]\'\n'
CHEATS = {
    "writes results to every descriptor": "for fd in range(64):\n"
    "    try: os.write(fd, RESULTS.encode())\n"
    "    except OSError: pass\n"
    "os._exit(0)",
    "writes a verdict to every descriptor": "for fd in range(64):\n"
    "    try: os.write(fd, b'1')\n"
    "    except OSError: pass\n"
    "os._exit(0)",
    "prints results": "print(RESULTS); print(RESULTS, file=sys.__stdout__); sys.stdout.flush()",
    "opens its standard output": "open('/proc/self/fd/1', 'w').write(RESULTS)",
    "appends to lists in frames": "frame = sys._getframe()\n"
    "while frame:\n"
    "    for each in list(frame.f_locals.values()):\n"
    "        if isinstance(each, list): each.append([True, ''])\n"
    "    frame = frame.f_back",
    "appends to every list": EVERY_LIST,
    "replaces built-ins": "builtins.bool = builtins.eval = builtins.type = lambda *_: True",
    "replaces what writes": "os.write = json.dumps = json.dump = os._exit = lambda *_, **__: 0",
    "ends": "os._exit(0)",
    "leaves": "sys.exit(0)",
    "interrupts": "raise KeyboardInterrupt",
    "becomes another program": "os.execv('/bin/true', ['true'])",
    "closes its descriptors": "os.closerange(0, 64)",
    "leaves at exit": "import atexit; atexit.register(os._exit, 0); sys.exit(0)",
    "raises what has no text": "class Odd(Exception):\n    def __str__(self): raise self\nraise Odd",
    "terminates itself": "os.kill(os.getpid(), signal.SIGTERM)",
    "terminates its parent": "os.kill(os.getppid(), signal.SIGTERM)",
    "terminates its group": "os.kill(0, signal.SIGTERM)",
    "has another process terminate its parent": "os.system(f'kill -HUP {os.getppid()}')",
    "kills its parent": "os.kill(os.getppid(), signal.SIGKILL)",
    "writes to its parent's memory": "open(f'/proc/{os.getppid()}/mem', 'r+b')",
    "writes to its parent's output": "open(f'/proc/{os.getppid()}/fd/1', 'a').write(RESULTS); os._exit(0)",
    "forks": "os.fork()",
}
"""what code under test may do instead of being right"""


class TestCode:
    @pytest.mark.parametrize(
        ("assertion", "holds"),
        [
            ("'answer' in output", True),
            ("any(word in output for word in ['x', 'answer'])", True),
            ("[w for w in output.split() if len(w) > len(output)] == []", True),
            ("re.search(r'an.wer', output)", True),
            ("len(tool_calls) == 0 and len(transcript) == 2", True),
            ("duration_ms == 1000 and outcome == {} and not errors", True),
            ("(workspace / 'README').read_text() == 'read me\\n'", True),
            ("sample['word'] == 'stone'", True),
            ("output == ''", False),
            ("1 / 0", False),
            ("nothing_of_that_name", False),
        ],
    )
    def test_an_assertion_is_a_python_expression(self, tmp_path: Path, assertion: str, holds: bool) -> None:
        assert verdict_of(tmp_path, {"type": "code", "assertions": [assertion]}, word="stone").score == float(holds)

    def test_only_the_assertion_that_raises_fails_with_its_message(self, tmp_path: Path) -> None:
        verdict = verdict_of(
            tmp_path, {"type": "code", "assertions": ["1 / 0", "print('x') is None", "output = ="[:6]]}
        )
        assert verdict.score == pytest.approx(2 / 3) and "ZeroDivisionError" in verdict.feedback

    def test_assertions_share_nothing(self, tmp_path: Path) -> None:
        block = {"type": "code", "assertions": ["messages.clear() is None", "len(messages) == 2"]}
        assert verdict_of(tmp_path, block).score == 1

    @pytest.mark.parametrize("cheat", CHEATS, ids=CHEATS)
    def test_code_under_test_cannot_write_its_own_verdict(self, tmp_path: Path, cheat: str) -> None:
        output = f"{CHEATING}{CHEATS[cheat]}\nadd = lambda one, other: 6"
        verdict = verdict_of(tmp_path, code("len(output) > 1", "exec(output) or add(2, 3) == 5"), output)
        assert verdict.score == (0 if cheat == "kills its parent" else 0.5), "only this assertion fails"

    @pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="there is no /proc")
    def test_code_under_test_cannot_inspect_the_process_that_writes_the_verdict(self, tmp_path: Path) -> None:
        looks = "[os.listdir(f'/proc/{os.getppid()}/fd')] if look == 'fd' else open(f'/proc/{os.getppid()}/mem', 'rb')"
        output = f"import os\ndef may(look):\n    try: return {looks}\n    except OSError: pass\n"
        assert verdict_of(
            tmp_path, code("exec(output) or not may('fd')", "exec(output) or not may('mem')"), output
        ).score
        assert verdict_of(tmp_path, code("__import__('os').listdir('/proc/self/fd')")).score == 1, "but into its own"

    def test_correct_code_passes_although_it_prints_and_starts_processes(self, tmp_path: Path) -> None:
        output = (
            "import os, subprocess\n"
            "def add(one, other):\n"
            "    print('[[false, \"\"]]')\n"
            "    subprocess.Popen(['sleep', '1000'])\n"
            "    return int(subprocess.check_output(['echo', str(one + other)]))\n"
        )
        assert verdict_of(tmp_path, code("exec(output) or add(2, 3) == 5"), output).score == 1

    @pytest.mark.skipif(shutil.which("node") is None, reason="node is not here")
    @pytest.mark.parametrize(
        "cheat",
        [
            "for (let fd = 1; fd < 64; fd++) try { fs.writeSync(fd, '[[true,\"\"]]') } catch {}; process.exit(0)",
            "JSON.stringify = () => 'true'; Boolean = () => true; process.exit = () => 0; fs.writeSync = () => 0",
            "Array.prototype.map = () => [[true, '']]; process.stdout.write('[[true, \"\"]]')",
            "process.exit(0)",
            "throw {toString: () => { throw 1 }}",
        ],
    )
    def test_javascript_under_test_cannot_write_its_own_verdict(self, tmp_path: Path, cheat: str) -> None:
        block = {**code("new Function('fs', output)(require('fs')) === 5"), "language": "javascript"}
        assert verdict_of(tmp_path, block, f"{cheat}; return 6").score == 0
        assert verdict_of(tmp_path, block, "console.log('[[false]]'); return 5").score == 1

    @pytest.mark.skipif(shutil.which("node") is None, reason="node is not here")
    def test_javascript(self, tmp_path: Path) -> None:
        block = {
            "type": "code",
            "language": "javascript",
            "assertions": ["output.includes('answer')", "tool_calls.length > 0", "nope.x", "console.log('x') || true"],
        }
        verdict = verdict_of(tmp_path, block)
        assert verdict.score == 0.5 and "ReferenceError" in verdict.feedback

    def test_javascript_without_node_is_refused_before_anything_runs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ConfigError, match="needs node"):
            build_graders(load(tmp_path, graders=[{"type": "code", "language": "javascript", "assertions": ["1"]}]))


@pytest.mark.parametrize(
    "block",
    [
        {"type": "file", "must_not_exist": ["x"]},
        {"type": "diff", "expected_files": [{"path": "x", "contains": ["-y"]}]},
    ],
    ids=str,
)
def test_an_eval_without_a_workspace_has_no_files_to_look_at(tmp_path: Path, block: Any) -> None:
    with pytest.raises(ConfigError, match=r"eval\.yaml:\d+: graders\[0\]: .* has no workspace"):
        load(tmp_path, graders=[block])


def test_the_files_an_agent_leaves_are_graded_and_graded_again_later(tmp_path: Path) -> None:
    (tmp_path / "want.txt").write_text("hello\n")
    graders = [
        {"type": "file", "must_exist": ["made.txt", "given.txt"]},
        {"type": "diff", "expected_files": [{"path": "made.txt", "snapshot": "want.txt"}]},
        {"type": "program", "command": "cat", "args": ["made.txt"]},
        {"type": "code", "assertions": ["(workspace / 'given.txt').read_text() == 'mine'"]},
    ]
    path = write_spec(
        tmp_path,
        samples=[{"id": "a", "given": {"given.txt": "mine"}}],
        prompt="hello",
        workspace={"files": "given"},
        target={"command": ["bash", "-c", "echo hello > made.txt"]},
        graders=graders[:1],
    )
    holdfast("eval", path, cwd=tmp_path)
    write_spec(tmp_path, **{**json.loads(path.read_text()), "graders": graders})
    holdfast("eval", path, cwd=tmp_path)
    records = [
        json.loads(line) for run in tmp_path.glob("runs/*/*/grades.jsonl") for line in run.read_text().splitlines()
    ]
    assert {entry["grader"]: entry["score"] for entry in records} == dict.fromkeys(
        ("file", "diff", "program", "code"), 1
    )


REFUSED = [
    ({"type": "file"}, "checks nothing"),
    ({"type": "file", "must_exist": []}, "checks nothing"),
    ({"type": "file", "must_exist": [""]}, "does not name a file inside"),
    ({"type": "file", "must_exist": ["../x"]}, "does not name a file inside"),
    ({"type": "file", "must_exist": ["a/../../x"]}, "does not name a file inside"),
    ({"type": "file", "must_not_exist": ["/etc/passwd"]}, "does not name a file inside"),
    ({"type": "file", "content_patterns": [{"path": "a"}]}, "checks nothing"),
    ({"type": "file", "content_patterns": [{"path": "a", "must_match": ["("]}]}, "not a regular expression"),
    ({"type": "diff", "expected_files": []}, "at least 1 item"),
    ({"type": "diff", "expected_files": [{"path": "a"}]}, "checks nothing"),
    ({"type": "diff", "expected_files": [{"path": "a", "contains": ["+ "]}]}, "checks nothing"),
    ({"type": "diff", "expected_files": [{"path": "a", "snapshot": "../x"}]}, "does not name a file inside"),
    ({"type": "diff", "expected_files": [{"path": "a", "snapshot": "link"}]}, "is outside"),
    ({"type": "diff", "expected_files": [{"path": "a", "snapshot": "none"}]}, "cannot be read"),
    ({"type": "program"}, "command: is missing"),
    ({"type": "program", "command": ""}, "at least 1 character"),
    ({"type": "program", "command": "x", "timeout": 0}, "greater than 0"),
    ({"type": "code"}, "assertions: is missing"),
    ({"type": "code", "assertions": []}, "at least 1 item"),
    ({"type": "code", "assertions": [""]}, "at least 1 character"),
    ({"type": "code", "assertions": ["x ="]}, "not a Python expression"),
]


@pytest.mark.parametrize(("block", "message"), REFUSED, ids=str)
def test_graders_that_check_nothing_or_leave_the_folder_are_refused(tmp_path: Path, block: Any, message: Any) -> None:
    folder = tmp_path / "eval"
    folder.mkdir()
    (tmp_path / "secret").write_text("x")
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError) as caught:
        build_graders(load(folder, graders=[block], workspace={}))
    assert message in str(caught.value) and "eval.yaml:" in str(caught.value)


def test_a_program_may_be_a_file_that_the_agent_created(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "def reply(prompt, context):\n"
        "    made = context.workspace / 'made.sh'\n"
        "    made.write_text('#!/bin/sh\\nexit ' + prompt)\n"
        "    made.chmod(0o755)\n"
        "    return prompt\n"
    )
    write_spec(
        tmp_path,
        samples=[{"id": "a", "code": 0}, {"id": "b", "code": 1}],
        prompt="{{ code }}",
        target={"python": "agent.py:reply"},
        workspace={},
        graders=[{"type": "program", "command": "./made.sh"}],
    )
    holdfast("eval", "eval.yaml", cwd=tmp_path)
    (results,) = (tmp_path / "runs").rglob("results.json")
    assert [trial["score"] for trial in json.loads(results.read_text())["trials"]] == [1.0, 0.0]


@pytest.mark.faults
def test_the_folders_of_a_killed_process_are_removed_by_the_next_one(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    write_spec(
        tmp_path,
        samples=[{"id": "a"}],
        target={"command": ["echo", "{{ id }}"], "proxy": False},
        prompt="{{ id }}",
        graders=[shell(f"until [ -e {tmp_path}/go ]; do sleep 0.05; done")],
    )
    with start("eval", "eval.yaml", cwd=tmp_path, env={"TMPDIR": str(temporary)}) as process:
        wait_for(lambda: [*temporary.glob("holdfast-grade-*/workspace")], "the grader")
        process.kill()
        process.communicate()
    assert [*temporary.glob("holdfast-grade-*")]
    (tmp_path / "go").touch()
    holdfast("eval", "eval.yaml", cwd=tmp_path, env={"TMPDIR": str(temporary)})
    assert not [*temporary.glob("holdfast-grade-*")]
