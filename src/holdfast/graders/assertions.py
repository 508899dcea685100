"""Run as a script in the sandbox: read assertions as JSON, and write their results as JSON.

    python -I -S assertions.py [javascript]

Assertions may run the answer's code, which may try to fake a pass. So this process, which writes the results, runs none
of that code. Each Python assertion is evaluated in its own child, JavaScript assertions in one process of node. A child
has two pipes. After evaluating the assertion, it reads a secret code from one pipe, and writes the code and its verdict
to the other. Until then, only the parent's memory holds the code, and the child may not read that memory. A child that
ends early, writes anything else or signals its parent has failed.

This stops answers that write to every descriptor, end their process, replace built-in functions, or change objects in
frames. It cannot stop an answer that knows this file, because it runs in the process that reads the secret code.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

TYPE_CHECKING = False  # `typing` takes long to import
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Result = tuple[bool, str]

_DUMPABLE = 4
"""option of prctl: the user's other processes may read a process's memory"""
_WATCHED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD}
"""signals that end a process from outside (`worker.OUTSIDE`), and the signal for a child's end"""
_MOST_BYTES = 40_000
"""limit of all reasons together: a pipe holds 65,536 bytes"""
_JAVASCRIPT = """
const {readFileSync, readSync, writeSync} = require('fs');
const {parse, stringify} = JSON;
const [reading, writing] = process.argv.slice(1).map(Number);
const asked = parse(readFileSync(0, 'utf8'));
const length = Math.floor(40000 / asked.assertions.length / 3);
const {exit} = process, keys = Object.keys, values = Object.values, Buffer_ = Buffer, String_ = String;
const slice = Function.prototype.call.bind(String.prototype.slice);
process.stdout.write = process.stderr.write.bind(process.stderr);
writeSync(writing, 'r');
let results = '';
for (let number = 0; number < asked.assertions.length; number++) {
  const names = parse(stringify(asked.names));
  names.workspace = process.cwd();
  let holds = false, reason = '';
  try {
    holds = new Function(...keys(names), `return (${asked.assertions[number]}\\n);`)(...values(names)) ? true : false;
  } catch (error) {
    try { reason = slice(String_(error), 0, length); } catch { reason = 'an error without a text'; }
  }
  results += (number ? ',' : '') + `[${holds},${stringify(reason)}]`;
}
const code = Buffer_.alloc(16);
readSync(reading, code);
writeSync(writing, code);
writeSync(writing, '[' + results + ']');
exit(0);
"""


def main() -> None:
    """Write `ready`, then the results: after `ready`, every failure is caused by the assertions."""
    question = json.load(sys.stdin)
    assertions = question["assertions"]
    _set_dumpable(False)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    if sys.argv[1:] == ["javascript"]:
        os.lseek(0, 0, os.SEEK_SET)
        results = _run_node(len(assertions))
    else:
        _announce()
        most = _MOST_BYTES // len(assertions)
        results = [_check(assertion.strip(), question["names"], most) for assertion in assertions]
    sys.stdout.write(json.dumps(results))


def _announce() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def _check(assertion: str, names: dict[str, Any], most: int) -> Result:
    """Evaluate a Python assertion; an exception is a failure, with the error as its reason."""

    def evaluate(reading: int, writing: int) -> None:
        known = {**json.loads(json.dumps(names)), "re": re, "json": json, "math": math, "workspace": Path.cwd()}
        _evaluate(assertion, known, reading, writing, most)

    child = _Child(evaluate)
    answer, ended = child.end()
    if answer[:1] == b"1" and not answer[1:]:
        return True, ""
    return False, answer[1:].decode(errors="replace") if answer[:1] == b"0" else ended


def _evaluate(
    assertion: str,
    names: dict[str, Any],
    reading: int,
    writing: int,
    most: int,
    run: Any = eval,
    read: Any = os.read,
    write: Any = os.write,
    leave: Any = os._exit,
    kind: Any = type,
    all_errors: Any = BaseException,
) -> None:
    """Evaluate an assertion and write the verdict, with functions that the assertion cannot replace."""
    verdict = b"0"
    try:
        # As globals: generator expressions and lambdas do not see locals.
        if run(assertion, names):
            verdict = b"1"
    except all_errors as error:
        try:
            verdict = f"0{kind(error).__name__}: {error}".encode(errors="replace")[:most]
        except all_errors:
            verdict = b"0an error without a text"
    write(writing, read(reading, 16) + verdict)
    leave(0)


def _run_node(count: int) -> list[Result]:
    def become_node(reading: int, writing: int) -> None:
        for descriptor in (reading, writing):
            os.set_inheritable(descriptor, True)
        os.execvp("node", ["node", "-e", _JAVASCRIPT, str(reading), str(writing)])  # noqa: S606, S607

    child = _Child(become_node, keeps_stdin=True)
    if os.read(child.verdict, 1) != b"r":
        sys.exit("node could not be started")
    _announce()
    answer, ended = child.end()
    try:
        results: list[Result] = json.loads(answer)
    except ValueError:
        return [(False, ended)] * count
    return results


class _Child:
    """A process that evaluates assertions, and its two pipes."""

    def __init__(self, work: Any, *, keeps_stdin: bool = False) -> None:
        reading, giving = os.pipe()
        self.verdict, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _become_child(lambda: work(reading, writing), (giving, self.verdict), keeps_stdin=keeps_stdin)
        os.close(reading)
        os.close(writing)
        self._code = os.urandom(16)  # created after the fork, so that the child has no copy
        with suppress(BrokenPipeError):
            os.write(giving, self._code)
        os.close(giving)

    def end(self) -> tuple[bytes, str]:
        """Wait for the child; return its answer after the code, and a description of its end."""
        code = os.waitstatus_to_exitcode(_wait_for(self.pid))
        os.set_blocking(self.verdict, False)  # a process started by the child may still hold the pipe
        answer = b""
        with suppress(BlockingIOError):
            answer = os.read(self.verdict, 1 << 16)
        os.close(self.verdict)
        if code == 0 and answer.startswith(self._code):
            return answer[len(self._code) :], "no verdict that can be read"
        return b"", f"exit code {code} without a verdict" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _become_child(work: Any, parents: tuple[int, ...], *, keeps_stdin: bool) -> NoReturn:
    """Close the parent's descriptors, do the work, and exit."""
    try:
        for descriptor in parents:
            os.close(descriptor)
        if not keeps_stdin:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # assertions may print
        _set_dumpable(True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        work()
    finally:
        os._exit(1)


def _wait_for(child: int) -> int:
    """Return a child's exit status. Signals from the child are ignored; a signal from outside ends this process."""
    if not hasattr(signal, "sigwaitinfo"):
        return os.waitpid(child, 0)[1]
    while True:
        info = signal.sigwaitinfo(_WATCHED)
        if info.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return status
        elif not _is_inside(info.si_pid, child):
            signal.signal(info.si_signo, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
            os.kill(os.getpid(), info.si_signo)


def _is_inside(sender: int, child: int) -> bool:
    """Return True for the child or a process that it started. In a PID namespace, outside senders have the id 0."""
    if sender in (0, child) or os.getpid() == 2:  # the second process of a namespace
        return sender != 0
    with suppress(OSError):
        return os.getpgid(sender) == os.getpgid(0)
    return False


def _set_dumpable(value: bool) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_DUMPABLE, int(value), 0, 0, 0)


if __name__ == "__main__":
    main()
