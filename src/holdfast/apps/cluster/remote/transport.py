"""Run programs and access files on a cluster: `Here` on its login node or in one of its jobs, `Ssh` from elsewhere.

`Ssh` does everything with ordinary programs of the cluster (sh, tar, dd, tail), so nothing needs to be installed there.
`Here` accesses files itself, which also works on macOS, whose programs have other options. Arguments arrive unchanged,
whatever characters they contain. Secrets go through `input` or a file of mode 0600, never through an argument.

A connection that fails is `Unreachable`, after some tries with pauses between them: it says nothing about the program,
which may not have run, or may have run to its end. What must not happen twice is run with `once=True`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import tarfile
import tempfile
import time
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from contextlib import contextmanager, suppress
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.apps.cluster.remote import trees
from holdfast.errors import ClusterError, Unreachable, UsageError
from holdfast.store.files import replacing, sync, sync_directory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import BinaryIO

    from holdfast.apps.cluster.remote.trees import SourceFile

PAUSES: Final = (1.0, 2.0, 4.0)
"""Seconds between the tries to reach a cluster."""
TIMEOUT: Final = 60.0
_SEND_TIMEOUT: Final = 3600.0
_MISSING: Final = 44  # our scripts' exit code for a file that is not there


SSH_CONFIG: Final = "HOLDFAST_SSH_CONFIG"
"""The environment variable that names an ssh configuration to be used instead of the user's own."""


class Completed(NamedTuple):
    """A program that ran to its end."""

    argv: tuple[str, ...]
    code: int
    stdout: bytes
    stderr: str

    @property
    def text(self) -> str:
        """Its standard output."""
        return self.stdout.decode(errors="replace")


class Transport(ABC):
    """A connection to a machine. Methods raise `Unreachable` if it fails, `ClusterError` if something is refused."""

    host: str
    """the machine's name in messages"""

    def __init__(self, *, pauses: Sequence[float] = PAUSES) -> None:
        self._pauses = tuple(pauses)

    @abstractmethod
    def _try(self, argv: Sequence[str], source: BinaryIO, timeout: float) -> Completed:
        """Run a program once."""

    def run(
        self,
        argv: Sequence[str],
        *,
        input: bytes | BinaryIO = b"",  # noqa: A002 - as in subprocess.run
        timeout: float = TIMEOUT,
        once: bool = False,
    ) -> Completed:
        """Run a program to its end, whatever its exit code; 127 if there is no such program.

        `once` forbids trying again, for what must not happen twice.
        """
        source = BytesIO(input) if isinstance(input, bytes) else input
        for pause in () if once else self._pauses:
            try:
                return self._try(argv, source, timeout)
            except Unreachable as error:
                if not _may_pass(error):
                    raise
            time.sleep(pause)
            source.seek(0)
        return self._try(argv, source, timeout)

    def check(
        self,
        argv: Sequence[str],
        *,
        input: bytes | BinaryIO = b"",  # noqa: A002 - as in subprocess.run
        timeout: float = TIMEOUT,
        once: bool = False,
    ) -> Completed:
        """Run a program that must succeed."""
        done = self.run(argv, input=input, timeout=timeout, once=once)
        if done.code != 0:
            raise self._refusal(_shown(argv), done.stderr.strip() or f"exit code {done.code}")
        return done

    def _refusal(self, what: str, reason: str) -> ClusterError:
        """Return the error for what was refused. On a full disk every program complains, once for each file."""
        if full := re.search(r"No space left on device|Disk quota exceeded", reason):
            return ClusterError(f"{self.host}: {what}: {full[0]}", remedy=_MAKE_ROOM)
        return ClusterError(f"{self.host}: {what}: {reason}")

    def exists(self, path: str) -> bool:
        """Return True if there is a file or a directory of that name."""
        return self.run(["test", "-e", path]).code == 0

    def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        """Return a file's bytes from `offset` on, at most `limit`. FileNotFoundError if there is no file."""
        cut = "cat" if limit is None else f"head -c {limit:d}"
        script = f'test -e "$1" || exit {_MISSING}; exec <"$1" || exit; tail -c +{offset + 1:d} | {cut}'
        done = self.run(["sh", "-c", script, "sh", path])
        if done.code == _MISSING:
            raise FileNotFoundError(f"{self.host}: {path}")
        if done.code != 0:
            raise ClusterError(f"{self.host}: cannot read {path}: {done.stderr.strip()}")
        return done.stdout

    def read_all(self, directory: str, pattern: str) -> bytes:
        """Return the lines of all files in a directory that match a shell pattern, also after a torn last line.

        Raises an error for a file that cannot be read.
        """
        script = f'for file in "$1"/{pattern}; do test -e "$file" || exit 0; cat -- "$file" || exit; echo; done'
        return self.check(["sh", "-c", script, "sh", directory]).stdout

    def append(self, path: str, data: bytes) -> None:
        """Add lines to a file that has no other writer; returns once they are on the medium.

        A line that was torn by a crash is ended first. After a broken connection the lines may be there twice, so
        repeating them must do no harm.
        """
        if len(data) > 1 << 20:
            raise ValueError("append is for a few lines")
        self.check(["sh", "-c", _APPEND, "sh", path], input=data)

    def put(self, files: Mapping[str, SourceFile], directory: str) -> str:
        """Put files, by their relative names, into `<directory>/<digest>`, and return that path."""
        return self.put_all([files], directory)[0]

    def put_all(self, contents: Sequence[Mapping[str, SourceFile]], directory: str) -> list[str]:
        """Put several trees of files, each into `<directory>/<digest>`, and return those paths.

        The digest covers names, modes and contents, so what is there already is not sent again. A directory
        appears with everything in it, or not at all, and no file is ever readable for more users than its mode allows.
        """
        names = [trees.tree_digest(files) for files in contents]
        root = directory.rstrip("/")
        unique = dict(zip(names, contents, strict=True))
        whole = self._whole(root, {name: len(files) + 1 for name, files in unique.items()})
        missing = {name: files for name, files in unique.items() if name not in whole}
        if missing:
            with tempfile.TemporaryFile() as archive:
                trees.pack_trees(missing, archive)
                archive.seek(0)
                self._receive(archive, root, {name: len(files) + 1 for name, files in missing.items()})
        return [f"{root}/{name}" for name in names]

    def _whole(self, root: str, counts: Mapping[str, int]) -> set[str]:
        """Return the names of complete trees; `counts` has their numbers of files."""
        listing = self.check(
            ["sh", "-s", root], input=f"{trees.IS_WHOLE}\n{trees.shell_calls('list', counts)}true\n".encode()
        )
        return set(listing.text.split()) & counts.keys()

    def _receive(self, archive: BinaryIO, root: str, counts: Mapping[str, int]) -> None:
        script = f'{trees.IS_WHOLE}\n{trees.RECEIVE}\n{trees.shell_calls("place", counts)}sync -- "$1"\n'
        self.check(["sh", "-c", script, "sh", root], input=archive, timeout=_SEND_TIMEOUT)

    def replace_files(self, contents: Mapping[str, bytes]) -> None:
        """Replace small files, each in one step, and all in one round trip."""
        script = "".join(
            f"echo {b64encode(data).decode()} | base64 -d >{shlex.quote(path + '.new')}\n"
            f"sync -- {shlex.quote(path + '.new')}\n"
            f"mv -T -- {shlex.quote(path + '.new')} {shlex.quote(path)}\n"
            for path, data in contents.items()
        )
        self.check(["sh", "-s"], input=f"set -e\numask 022\n{script}".encode())

    def read_parts(self, parts: Mapping[str, tuple[int, int]]) -> dict[str, bytes]:
        """Return parts of files, given by offset and length, in one round trip. Files that are gone are empty."""
        script = "".join(
            f"tail -c +{offset + 1:d} -- {shlex.quote(path)} 2>/dev/null | head -c {length:d} | base64 -w 0; echo\n"
            for path, (offset, length) in parts.items()
        )
        lines = self.check(["sh", "-s"], input=script.encode()).stdout.split(b"\n")
        return {path: b64decode(line) for path, line in zip(parts, lines, strict=False)}

    def list_files(self, folders: Sequence[str], pattern: str) -> dict[str, list[tuple[str, int]]]:
        """List files that match a shell pattern: names and sizes by folder, the last written at the end."""
        script = (
            'pattern=$1; shift; find "$@" -maxdepth 1 -type f -name "$pattern" -printf "%T@ %s %h/%f\\n" 2>/dev/null '
            "| LC_ALL=C sort -s -n -k 1,1"
        )
        listing = self.check(["sh", "-c", script, "sh", pattern, *folders])
        files: dict[str, list[tuple[str, int]]] = {folder: [] for folder in folders}
        for _, size, path in (line.split(" ", 2) for line in listing.text.splitlines()):
            folder, _, name = path.rpartition("/")
            files[folder].append((name, int(size)))
        return files

    def read_tree(self, directory: str, patterns: Sequence[str]) -> tuple[bool, dict[str, bytes]]:
        """Return whether a directory is this user's, and the files in it and its subdirectories that match patterns.

        Files that cannot be read, or that disappear meanwhile, are left out. FileNotFoundError without a directory.
        """
        names = " -o ".join(f"-name {shlex.quote(pattern)}" for pattern in patterns)
        completed = self.run(["sh", "-c", _READ_TREE % names, "sh", directory])
        if completed.code == _MISSING:
            raise FileNotFoundError(f"{self.host}: {directory}")
        user, owner, packed = completed.stdout.split(b"\n", 2)
        files: dict[str, bytes] = {}
        with suppress(tarfile.TarError), tarfile.open(fileobj=BytesIO(packed)) as tar:
            for member in tar:
                if member.isreg() and (file := tar.extractfile(member)) is not None:
                    files[member.name.removeprefix("./")] = file.read()
        return user == owner, files


_MAKE_ROOM: Final = (
    "Make room there, or set remote_job_dir to another file system, then run the same command again. "
    "`holdfast clean PROFILE` removes what no run needs."
)

# dd: one write of everything, and the sync, by one process.
_APPEND: Final = """
set -e
umask go-w
folder=$(dirname -- "$1")
new=; test -e "$1" || { new=1; mkdir -p -- "$folder"; }
if test -s "$1" && test -n "$(tail -c 1 -- "$1")"; then echo >>"$1"; fi
dd of="$1" bs=1M iflag=fullblock oflag=append conv=notrunc,fsync status=none
test -z "$new" || sync -- "$folder"
"""

_READ_TREE: Final = r"""
cd -- "$1" 2>/dev/null || exit 44
id -u; stat -c %%u .
find . -maxdepth 2 -type f -readable \( %s \) -print0 | tar --null -T - -cf - --ignore-failed-read 2>/dev/null
true
"""


class Here(Transport):
    """This machine: the cluster's login node, a node in a job, or the machine of local jobs."""

    host = "this machine"

    def __init__(self, *, env: Mapping[str, str] | None = None, pauses: Sequence[float] = PAUSES) -> None:
        super().__init__(pauses=pauses)
        self._env = None if env is None else dict(env)

    def _try(self, argv: Sequence[str], source: BinaryIO, timeout: float) -> Completed:
        try:
            return _run(argv, argv, source, timeout, self._env)
        except FileNotFoundError:
            return Completed(tuple(argv), 127, b"", f"{argv[0]}: command not found")
        except subprocess.TimeoutExpired:
            raise Unreachable(f"{_shown(argv)}: no answer within {timeout:.0f} s") from None

    def exists(self, path: str) -> bool:
        return Path(path).exists()

    def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        with self._refusals(f"cannot read {path}"), open(path, "rb") as file:  # noqa: PTH123 - often called
            file.seek(offset)
            return file.read(-1 if limit is None else limit)

    def read_all(self, directory: str, pattern: str) -> bytes:
        return b"".join(self.read(str(path)) + b"\n" for path in sorted(Path(directory).glob(pattern)))

    def append(self, path: str, data: bytes) -> None:
        file = Path(path)
        with self._refusals(f"cannot write {path}"):
            trees.make_own_directory(file.parent)
            is_new = not file.exists()
            fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                size = os.fstat(fd).st_size
                torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
                unwritten = memoryview(b"\n" + data if torn else data)
                while unwritten:  # a disk that is nearly full takes a part, and then none
                    unwritten = unwritten[os.write(fd, unwritten) :]
                sync(fd)
            finally:
                os.close(fd)
            if is_new:
                sync_directory(file.parent)

    def replace_files(self, contents: Mapping[str, bytes]) -> None:
        for path, data in contents.items():
            with self._refusals(f"cannot write {path}"), replacing(Path(path)) as file:
                file.write(data)

    def read_parts(self, parts: Mapping[str, tuple[int, int]]) -> dict[str, bytes]:
        contents = dict.fromkeys(parts, b"")
        for path, (offset, length) in parts.items():
            with suppress(FileNotFoundError):
                contents[path] = self.read(path, offset, length)
        return contents

    def list_files(self, folders: Sequence[str], pattern: str) -> dict[str, list[tuple[str, int]]]:
        listing: dict[str, list[tuple[str, int]]] = {}
        for folder in folders:
            files = []
            for path in Path(folder).glob(pattern):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    files.append((status.st_mtime_ns, path.name, status.st_size))
            listing[folder] = [(name, size) for _, name, size in sorted(files)]
        return listing

    def read_tree(self, directory: str, patterns: Sequence[str]) -> tuple[bool, dict[str, bytes]]:
        root = Path(directory)
        try:
            is_mine = root.stat().st_uid == os.getuid()
            folders = [root, *(path for path in sorted(root.iterdir()) if path.is_dir())]
        except (FileNotFoundError, PermissionError) as error:
            raise FileNotFoundError(f"{self.host}: {directory}") from error
        files: dict[str, bytes] = {}
        for folder in folders:
            for pattern in patterns:
                for path in folder.glob(pattern):
                    with suppress(OSError):
                        files[str(path.relative_to(root))] = path.read_bytes()
        return is_mine, files

    def _whole(self, root: str, counts: Mapping[str, int]) -> set[str]:
        return {name for name, count in counts.items() if trees.is_whole(Path(root, name), count)}

    def _receive(self, archive: BinaryIO, root: str, counts: Mapping[str, int]) -> None:
        folder = Path(root)
        with self._refusals(f"cannot write {root}"):
            trees.make_own_directory(folder)
            stage = Path(tempfile.mkdtemp(prefix=".arriving-", dir=folder))
            try:
                with tarfile.open(fileobj=archive) as tar:
                    for member in tar:
                        trees.unpack_file(tar, member, stage)
                for name, count in counts.items():
                    if not trees.place_tree(stage / name, folder / name, count):
                        raise ClusterError(f"{self.host}: {folder / name}: the files did not arrive completely")
                sync_directory(folder)
            finally:
                shutil.rmtree(stage, ignore_errors=True)

    @contextmanager
    def _refusals(self, what: str) -> Iterator[None]:
        """Turn errors of the file system into ClusterError, except for missing files."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._refusal(what, str(error.strerror or error)) from error


class Ssh(Transport):
    """A login node, through the user's own OpenSSH: configuration, agent, keys and jump hosts are as in a terminal.

    One connection serves all commands of a user's processes, and stays open for a minute after the last one
    (ControlMaster). The user's configuration overrides these settings and time-outs. There is no password prompt:
    users who need one open the connection first.
    """

    def __init__(
        self,
        host: str,
        *,
        user: str | None = None,
        identity: str | Path | None = None,
        config: str | Path | None = None,
        pauses: Sequence[float] = PAUSES,
    ) -> None:
        """`config` replaces the user's and the system's configuration, as with `ssh -F`."""
        super().__init__(pauses=pauses)
        if host.startswith("-") or (user or "").startswith("-"):
            raise UsageError(  # ssh would read an option
                f"not the name of a host: {host!r}" if host.startswith("-") else f"not the name of a user: {user!r}",
                remedy="Names do not begin with a dash: correct `host` and `user` in the profile, or HOST:PATH.",
            )
        self._host = host
        self.host = host if user is None else f"{user}@{host}"
        self._config = _defaults(config)
        self._options = [
            *("-F", str(self._config), "-o", "BatchMode=yes", "-T"),
            *(() if user is None else ("-l", user)),
            *(() if identity is None else ("-i", str(Path(identity).expanduser()))),
        ]

    def _try(self, argv: Sequence[str], source: BinaryIO, timeout: float) -> Completed:
        # 255 is ssh's own failure, so a program's 255 is reported as 254.
        command = _for_any_shell(["sh", "-c", '"$@"; code=$?; exit $((code < 255 ? code : 254))', "sh", *argv])
        try:
            done = _run(argv, ["ssh", *self._options, "--", self._host, command], source, timeout)
        except FileNotFoundError:
            raise ClusterError("ssh is not installed here", remedy="Install OpenSSH's client.") from None
        except subprocess.TimeoutExpired:
            raise Unreachable(f"{self.host}: no answer within {timeout:.0f} s to {_shown(argv)}") from None
        if done.code != 255:
            return done
        lines = done.stderr.strip().splitlines() or ["the connection broke"]
        raise Unreachable(
            f"{self.host}: {lines[-1]}",
            remedy=f"`ssh {self.host} true` must work without a password prompt; jobs there are not affected by this.",
        )


def connect(
    host: str | None, user: str | None = None, identity: str | None = None, *, pauses: Sequence[float] = PAUSES
) -> Transport:
    """Return the transport to a host; without a host, to this machine."""
    if host is None:
        return Here(pauses=pauses)
    return Ssh(host, user=user, identity=identity, config=os.environ.get(SSH_CONFIG), pauses=pauses)


def _run(
    asked: Sequence[str],
    argv: Sequence[str],
    source: BinaryIO,
    timeout: float,
    env: Mapping[str, str] | None = None,
) -> Completed:
    """Run a program. Its messages go to a file: ssh's shared connection may keep a pipe open for minutes."""
    with tempfile.TemporaryFile() as buffer, tempfile.TemporaryFile() as messages:
        stdin: BinaryIO = buffer
        if isinstance(source, BytesIO):
            buffer.write(source.getvalue())
            buffer.seek(0)
        else:
            stdin = source
        done = subprocess.run(
            list(argv), stdin=stdin, stdout=subprocess.PIPE, stderr=messages, timeout=timeout, env=env, check=False
        )
        messages.seek(0)
        return Completed(tuple(asked), done.returncode, done.stdout, messages.read().decode(errors="replace"))


def _for_any_shell(argv: Sequence[str]) -> str:
    """Return a command line that every login shell reads alike, whatever its rules of quoting."""
    joined = shlex.join(argv)
    if not re.search(r"[\n!\\]", joined):
        return joined
    # csh breaks at a newline and expands ! within quotes, fish reads \ there: such a line is sent as letters and digits
    return f"""sh -c 'eval "$(echo {b64encode(joined.encode()).decode()} | base64 -d)"'"""


def _may_pass(error: Unreachable) -> bool:
    """Return True if another try may help: a refused login stays refused, and a time-out was a wait already."""
    return not re.search(r"Permission denied|Host key verification failed|authentication|within \d+ s", error.message)


def _shown(argv: Sequence[str]) -> str:
    """Return a command for messages, without the text of a script."""
    return shlex.join(["sh", "…", *argv[4:]] if argv[:2] == ["sh", "-c"] else argv)


def _defaults(config: str | Path | None) -> Path:
    """Return an ssh configuration that includes the user's first: the first value counts, so ours are defaults."""
    folder = _private_folder()
    first = ["~/.ssh/config", "/etc/ssh/ssh_config"] if config is None else [str(Path(config).absolute())]
    text = "".join(f'Include "{path}"\n' for path in first) + (
        "Host *\n"
        "  ControlMaster auto\n"
        f'  ControlPath "{folder}/%C"\n'
        "  ControlPersist 60\n"
        "  ConnectTimeout 20\n"
        "  ServerAliveInterval 15\n"
        "  ServerAliveCountMax 3\n"
    )
    path = folder / f"config-{sha256(text.encode()).hexdigest()[:12]}"
    if not path.exists():
        with replacing(path) as file:
            file.write(text.encode())
    return path


def _private_folder() -> Path:
    """Return a private folder for the sockets of shared connections, with a path short enough for a socket."""
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):  # noqa: S108 - checked below
        if base is None or len(base) > 27:
            continue
        folder = Path(base) / f"holdfast-ssh-{os.getuid()}"
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700:
                return folder
    return Path(tempfile.mkdtemp(prefix="hf-", dir="/tmp"))
