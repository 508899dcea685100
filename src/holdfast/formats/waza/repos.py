"""`inputs.repos`: the files of commits of local git repositories, read into a task's workspace.

waza checks out a worktree. Here the commit's files become part of the row, so that the key depends on their contents
and a run that has begun no longer needs the repository. There is no `.git` in the workspace.

The repository may be a stranger's, and the configuration of a repository can name programs that git runs: to fetch
missing objects, as a hook, as a monitor of files. So git reads the objects and refs of the repository through a folder
with a configuration of ours, in which there is none of that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.formats.waza.files import LARGEST, content
from holdfast.formats.waza.findings import at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.formats.waza.findings import WazaFindings
    from holdfast.spec.document import Document, Location

_PLAIN: Final = ("100644", "100664")
_EXECUTABLE: Final = "100755"
_SECONDS: Final = 120.0
"""after which git is stopped: an object may be a file that never ends"""


def read_repos(findings: WazaFindings, task: Document) -> dict[str, Any]:
    """Return the files of all repositories of a task by their paths in the workspace."""
    place: Location = ("inputs", "repos")
    listed = at(task, ("inputs",)).get("repos") or []
    if not isinstance(listed, list):
        findings.wrong(task, place, "must be a list of {type: worktree, source: …, commit: …, dest: …}")
        return {}
    files: dict[str, Any] = {}
    for number in range(len(listed)):
        files |= _files(findings, task, (*place, number))
    return files


def _files(findings: WazaFindings, task: Document, place: Location) -> dict[str, Any]:
    block = at(task, place)
    findings.keys(task, place, ("type", "source", "commit", "dest"))
    if block.get("type") != "worktree":
        findings.wrong(task, (*place, "type"), f"not supported: {block.get('type')!r}; a repository is a `worktree`")
        return {}
    folder, source, commit = str(block.get("dest") or ""), str(block.get("source") or ""), block.get("commit") or "HEAD"
    if not is_below(folder):
        findings.wrong(task, (*place, "dest"), "names a folder of the workspace, without `..`")
        return {}
    repository = (
        next((path for place in findings.places if (path := place / source).is_dir()), None) if source else None
    )
    if repository is None:
        findings.wrong(task, (*place, "source"), findings.nowhere(source))
        return {}
    try:
        with _opened(repository) as git_folder:
            resolve = ("rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}")
            head = _git(git_folder, *resolve).decode().strip()
            lines = _git(git_folder, "ls-tree", "-rlz", "--full-tree", head).split(b"\0")
            entries = [_entry(line) for line in lines if line]
            files = [entry for entry in entries if entry.mode in (*_PLAIN, _EXECUTABLE)]
            if sum(file.size for file in files) > LARGEST:
                most = f"{LARGEST >> 20} MB, which is the most that is kept"
                findings.wrong(task, place, f"{source} is larger than {most}; let a hook check it out")
                return {}
            contents = _contents(git_folder, files)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        message = (getattr(error, "stderr", b"") or str(error).encode()).decode("utf-8", "replace").strip()
        findings.wrong(task, place, f"{source} at {commit} cannot be read: {message}")
        return {}
    left_out = len(entries) - len(files)
    findings.notice(
        task,
        place,
        f"the {len(files)} files of {repository.resolve()} at {head[:12]} are put into {folder}, without .git"
        + (f"; {left_out} links and submodules are left out" if left_out else ""),
    )
    return {f"{folder}/{path}": value for path, value in contents.items()}


def is_below(name: str) -> bool:
    """True if a relative name is inside its folder, and not the folder itself."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and not name.startswith(("\\", "~"))


@contextmanager
def _opened(repository: Path) -> Iterator[Path]:
    """Make a git folder with the refs and objects of a repository, and with nothing of its configuration."""
    # This looks at no object and runs no program of the repository. It refuses repositories of other users.
    where = ("rev-parse", "--path-format=absolute", "--git-dir", "--git-common-dir", "--show-object-format")
    quiet = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
    answer = os.fsdecode(_run("git", "-C", str(repository), *quiet, *where))
    own, common, form = answer.rstrip("\n").split("\n")
    with TemporaryDirectory(prefix="holdfast-git-") as name:
        folder = Path(name)
        shutil.copyfile(Path(own) / "HEAD", folder / "HEAD")
        for part in ("refs", "packed-refs", "objects", "reftable"):
            if (Path(common) / part).exists():
                (folder / part).symlink_to(Path(common) / part)
        refs = "\trefStorage = reftable\n" if (folder / "reftable").exists() else ""
        settings = "[core]\n\trepositoryFormatVersion = 1\n\tbare = true\n[extensions]\n"
        (folder / "config").write_text(f"{settings}\tobjectFormat = {form}\n{refs}")
        yield folder


def _git(folder: Path, *arguments: str, stdin: bytes = b"") -> bytes:
    """Run git in a folder that `_opened` made."""
    return _run(
        "git", f"--git-dir={folder}", *arguments, stdin=stdin, GIT_CONFIG_NOSYSTEM="1", GIT_CONFIG_GLOBAL=os.devnull
    )


def _run(*command: str, stdin: bytes = b"", **variables: str) -> bytes:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none", "GIT_TERMINAL_PROMPT": "0", **variables}
    return subprocess.run(
        command, check=True, capture_output=True, input=stdin, env=environment, timeout=_SECONDS
    ).stdout


class _Entry(NamedTuple):
    """A line of `git ls-tree -l`."""

    mode: str
    size: int
    object: str
    path: str


def _entry(line: bytes) -> _Entry:
    about, _, path = line.partition(b"\t")
    mode, _, name, size = about.decode().split()
    return _Entry(mode, int(size) if size.isdigit() else 0, name, path.decode("utf-8", "replace"))


def _contents(repository: Path, files: Sequence[_Entry]) -> dict[str, Any]:
    """Read the contents of files; git prints each after a header line, and before a newline."""
    names = "".join(f"{file.object}\n" for file in files).encode()
    answer, position = _git(repository, "cat-file", "--batch", stdin=names), 0
    contents: dict[str, Any] = {}
    for file in files:
        start = answer.index(b"\n", position) + 1
        if answer[position : start - 1].split()[1:] != [b"blob", b"%d" % file.size]:
            raise ValueError(f"{file.path} is not in the repository, which may be a partial clone; fetch it first")
        position = start + file.size + 1
        value: Any = content(answer[start : start + file.size])
        if file.mode == _EXECUTABLE:
            value = {**(value if isinstance(value, dict) else {"text": value}), "executable": True}
        contents[file.path] = value
    return contents
