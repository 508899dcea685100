"""Starts modules by forking a process that has already imported what they need.

Starting Python and importing Holdfast is most of the time a short command takes, and tests start thousands of them.
`Forked` is a `subprocess.Popen` whose process is forked from a warm one: its standard files, working directory,
environment, arguments and `sys.path` are as for a new `python -m MODULE`, and it ends as one, but for the clearing of
its memory. The processes of Holdfast that it starts in turn, such as workers, are forked as well.

The report of a failed test lists the processes that it started, and whether each was forked from a warm one or started
cold. `COLD=1 scripts/test …` starts all of them cold, as is always done on systems other than Linux.

All processes of a test run share the warm process and three that are forked from it, which import lm-eval, MLflow or
W&B. For each connection to its socket such a process forks one that in turn forks for each request, until the
connection is closed.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import pkgutil
import runpy
import select
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import redirect_stdout, suppress
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Never

if TYPE_CHECKING:
    from collections.abc import Iterable

STARTED: Final[list[str]] = []
"""the processes that the current test has started, for the report of its failure"""
_COLD: Final = bool(os.environ.get("COLD")) or sys.platform != "linux"
ROOT: Final = Path(__file__).resolve().parents[2]
_LARGEST: Final = 1 << 20
_ENVIRONMENT: Final = dict(os.environ)
"""what the warm process starts with"""
_READ_AT_START: Final = ("PYTHON", "LD_", "LC_", "LANG", "HOLDFAST_LEASE_SECONDS", "MALLOC_")
"""variables that Python or Holdfast reads as it starts: a process forked later would not notice them"""
_ALSO_NEEDED: Final = (
    "aiohttp",
    "jinja2",
    "mcp.server.mcpserver",
    "rich.live",
    "rich.progress",
    "rich.table",
    "ruamel.yaml",
    "uvloop",
)
"""what commands, and servers of tests, import as they run"""
_MORE: Final = {
    "holdfast": (),
    "lm-eval": ("lm_eval.evaluator", "lm_eval.models.openai_completions", "sacrebleu", "scipy.io"),
    "mlflow": ("mlflow.entities",),
    "wandb": ("wandb.sdk.launch", "pandas"),
}
"""the warm processes, and what each imports once it is needed"""
_READ_BY_LM_EVAL: Final = ("HF_", "TQDM_")
"""variables that packages of lm-eval read as they are imported"""
OFFLINE: Final = {
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
}
"""with what lm-eval is imported: as for data of a folder"""
_VARIABLES: Final = {"lm-eval": OFFLINE, "mlflow": {"DO_NOT_TRACK": "1"}, "wandb": {"WANDB_ERROR_REPORTING": "false"}}
"""under which a warm process imports more"""
_WITH_LM_EVAL: Final = ("holdfast.plugins.benchmarks.compiler", "tests.support.lm_eval_oracle")
_OF_THE_VIEWER: Final = tuple(f"holdfast.apps.view.{name}" for name in ("columns", "counting", "search"))
_FORKABLE: Final = ("holdfast", *_OF_THE_VIEWER, *_WITH_LM_EVAL)
"""modules that are forked even if code under test starts them"""
_FOLDER: Final = "FOLDER_OF_WARM_PROCESS"
"""the variable by which the processes of a test run know where the sockets are"""
_FEW: Final = 4
"""forks, as many as most commands need of their own"""
_HUGE: Final = 2 << 20
_MADV_COLLAPSE: Final = 25
_EVAL: Final = "{schemaVersion: '1.0', name: e, samples: [{q: 1}], prompt: '{{ q }}', target: {model: m}}"


def can_fork(env: dict[str, str], module: str = "holdfast") -> bool:
    """Return True if a process of a module with this environment may be forked from the warm one."""
    if _COLD:
        return False
    has_lm_eval = module in _WITH_LM_EVAL
    warm = _ENVIRONMENT | (OFFLINE if has_lm_eval else {})
    differing = (key for key in env.keys() | warm.keys() if env.get(key) != warm.get(key))
    read = (*_READ_AT_START, *(_READ_BY_LM_EVAL if has_lm_eval else ()))
    return not any(key.startswith(read) for key in differing)


class Forked(subprocess.Popen[Any]):
    """`Forked(["python", "-m", MODULE, *arguments], cwd=…, env=…, …)`."""

    _ended: int

    def __new__(cls, args: Any, *rest: Any, **options: Any) -> Any:
        """Start the process cold if that is what the user asked for."""
        return start_cold(args, *rest, **options) if _COLD else super().__new__(cls)

    def _execute_child(
        self, args: Any, executable: Any, preexec: Any, close: Any, fds: Any, cwd: Any, env: Any, *rest: Any
    ) -> None:
        stdin, _, _, stdout, _, stderr = pipes = rest[3:9]
        request = {
            "module": args[2],
            "arguments": [os.fspath(argument) for argument in args[3:]],
            "cwd": os.fspath(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "new_session": rest[-2],
        }
        STARTED.append(f"warm: {shlex.join(map(str, args[2:]))[:200]}")
        files = [own if given == -1 else given for own, given in enumerate((stdin, stdout, stderr))]
        self._forker = _forker(_choose_warm(request["module"], request["arguments"]))
        self.pid = self._forker.ask({"fork": request}, files)
        self._ended = os.pidfd_open(self.pid)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        ended, _, _ = select.select([self._ended], [], [], 0 if flags & os.WNOHANG else None)
        if not ended:
            return 0, 0
        os.close(self._ended)
        return self.pid, self._forker.ask({"wait": self.pid})

    def _internal_poll(self, _deadstate: Any = None, **_: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                pid, status = (0, 0) if self.returncode is not None else self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def _choose_warm(module: str, arguments: list[str]) -> str:
    """Return the name of the warm process that has imported most of what a module will need."""
    if module in _WITH_LM_EVAL:
        return "lm-eval"
    words = (module, *arguments)
    return next((name for name in ("mlflow", "wandb") if any(name in word for word in words)), "holdfast")


class ForkedIfPossible:
    """Stands in for `subprocess.Popen` where code under test starts processes of Holdfast."""

    def __new__(cls, args: Any, *rest: Any, **options: Any) -> Any:
        """Fork a process that may be forked, and start any other one."""
        env = options.get("env")
        is_ours = args[:2] == [sys.executable, "-m"] and args[2] in _FORKABLE
        can = is_ours and can_fork(dict(os.environ if env is None else env), args[2])
        return (Forked if can else start_cold)(args, *rest, **options)

    def __class_getitem__(cls, _: Any) -> type[ForkedIfPossible]:
        return cls


_Popen: Final = subprocess.Popen


def start_cold(args: Any, *rest: Any, **options: Any) -> subprocess.Popen[Any]:
    """Start a process as usual, and note it."""
    STARTED.append(f"cold: {shlex.join(map(str, args))[:200]}" if isinstance(args, list) else f"cold: {args}")
    return _Popen(args, *rest, **options)


class _Forker:
    """A connection to the warm process."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)
        self._socket.connect(f"{start_warm_process()}/{name}")

    def ask(self, request: dict[str, Any], files: list[int] | None = None) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files or [])
            return int(self._socket.recv(64))


_forkers: dict[tuple[int, str], _Forker] = {}


def _forker(name: str) -> _Forker:
    """The connection of this process: one that was forked from it has its own."""
    key = os.getpid(), name
    return _forkers.get(key) or _forkers.setdefault(key, _Forker(name))


def start_warm_process() -> str:
    """Start the warm process of this test run unless it runs or is not wanted, and return the folder of its sockets."""
    if _COLD:
        return ""
    if _FOLDER not in _ENVIRONMENT:
        folder = tempfile.mkdtemp(prefix="holdfast-warm-")
        for variables in (_ENVIRONMENT, os.environ):
            variables.update({_FOLDER: folder, "HF_DATASETS_CACHE": f"{folder}/datasets"})
        listeners = [_listen(f"{folder}/{name}") for name in _MORE]
        numbers = [listener.fileno() for listener in listeners]
        process = _Popen(
            [sys.executable, "-c", f"from tests.support.forking import serve; serve(*{numbers})"],
            pass_fds=numbers,
            cwd=ROOT,
            env=_ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for listener in listeners:
            listener.close()
        atexit.register(_stop, os.getpid(), process)
    return _ENVIRONMENT[_FOLDER]


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    return listener


def _stop(starter: int, process: subprocess.Popen[bytes]) -> None:
    if os.getpid() == starter:  # and not a process that was forked from it
        process.communicate(b".")  # as the end of the file would, which others may hold open


def serve(*listeners: int) -> None:
    """Be the warm processes until standard input is closed. Takes the sockets at which they listen."""
    import_all()
    _build_blocks()
    _run_a_command()
    for module in list(sys.modules.values()):
        import_module("holdfast.functions.loading").users_file(module)
    _freeze()
    (_, own), *others = zip(_MORE, listeners, strict=True)
    forked = [_fork_warm(name, listener) for name, listener in others]
    _accept(socket.socket(fileno=own), ())
    for process in forked:
        with suppress(ChildProcessError):  # it has ended, and was waited for with what was forked here
            os.waitpid(process, 0)
    shutil.rmtree(_ENVIRONMENT[_FOLDER])


def _fork_warm(name: str, listener: int) -> int:
    """Fork a warm process that imports more, and return its id."""
    if process := os.fork():
        return process
    os.environ.update(_VARIABLES[name])
    _accept(socket.socket(fileno=listener), _MORE[name])
    os._exit(0)


def import_all() -> None:
    """Import what commands could need, ahead of forks."""
    modules = pkgutil.walk_packages(import_module("holdfast").__path__, "holdfast.", onerror=lambda _: None)
    _import(module.name for module in modules if not module.name.endswith("__main__"))
    _import((*_ALSO_NEEDED, "tests.support.server"))


def _import(names: Iterable[str]) -> None:
    for name in names:
        with suppress(ImportError):
            import_module(name)


def _build_blocks() -> None:
    """Make the validators of all blocks of eval files."""
    waiting = [import_module("holdfast.spec.schema").Block]
    while waiting:
        block = waiting.pop()
        block.model_rebuild()
        waiting += block.__subclasses__()


def _run_a_command() -> None:
    """Look at an eval, so that whatever is made once per process is made."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()), suppress(SystemExit):
        file = Path(folder) / "e.yaml"
        file.write_text(_EVAL)
        os.environ["HOLDFAST_HOME"] = folder
        sys.argv = ["-m", "eval", str(file), "--dry-run", "--runs-dir", folder]
        import_module("holdfast.apps.cli.main").main()


def _accept(listener: socket.socket, needed: Iterable[str]) -> None:
    """Fork for each connection, after the first has shown that what is needed is to be imported."""
    while True:
        ready, _, _ = select.select([0, listener.fileno()], [], [])
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if 0 in ready:  # standard input was closed
            return
        connection, _ = listener.accept()
        if needed:
            _import(needed)
            _freeze()
            needed = ()
        with connection:
            if os.fork() == 0:
                listener.close()
                _obey(connection)


def _obey(connection: socket.socket) -> Never:
    """Fork for each request that comes over a connection, until this is closed."""
    forks = 0
    while True:
        message, files, _, _ = socket.recv_fds(connection, _LARGEST, 3)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if "wait" in request:
            answer = os.waitpid(request["wait"], 0)[1]
        else:
            forks += 1
            if forks == _FEW:
                _use_huge_pages()
            answer = os.fork()
            for number, file in enumerate(files):
                if answer == 0:
                    os.dup2(file, number)
                os.close(file)
            if answer == 0:
                connection.close()
                _become(**request["fork"])
        connection.send(b"%d" % answer)


def _freeze() -> None:
    """Exempt all objects from garbage collection: a fork that looked through them would copy them."""
    gc.collect()
    gc.freeze()
    _use_huge_pages()


def _use_huge_pages() -> None:
    """Let the kernel put this process's memory into huge pages if it can, which halves the time of a fork.

    What is shared with other processes is copied: that is worth it only in a process that forks often.
    """
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *name = line.split()
        if access == "rw-p" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            start, end = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if start < end:
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)


def _become(module: str, arguments: list[str], cwd: str, env: dict[str, str], new_session: bool) -> Never:
    """Be a new process that runs a module."""
    if new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[0] = cwd
    tempfile.tempdir = None  # read again from the variables
    _make_media_folder()
    sys.argv = ["-m", *arguments]
    subprocess.Popen = ForkedIfPossible
    if module != "holdfast":
        sys.modules.pop(module, None)  # it is __main__
    os._exit(_run(module))


def _make_media_folder() -> None:
    """Make this process's own copy of the temporary folder that W&B makes as it is imported."""
    if module := sys.modules.get("wandb.sdk.data_types._private"):
        module.MEDIA_TMP.cleanup()
        module.MEDIA_TMP.__init__("wandb-media")


def _run(module: str) -> int:
    """Run a module as `python -m` does, to the end of its threads and exit handlers, and return its exit code.

    What Python would do next, clearing one module after the other, takes longer than most commands.
    """
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code: Any = 0
    except SystemExit as ending:
        code = ending.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        code = 120  # as Python does
    return int(code or 0)
