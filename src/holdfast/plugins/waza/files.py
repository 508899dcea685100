"""Read the files of an eval into its rows: fixtures, skills, instructions, and commits of git repositories.

waza checks out a worktree. Here a commit's files become part of the row, so that the key depends on their contents and
a run that has begun no longer needs the repository. The workspace has no `.git`.
"""

from __future__ import annotations

import base64
import os
import posixpath
import re
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast import ConfigError, Problem
from holdfast.spec.document import read_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from holdfast import Document
    from holdfast.plugins.waza.findings import WazaFindings
    from holdfast.spec.document import Location

Content = str | dict[str, str]
"""a text, or {"base64": …}"""

LARGEST: Final = 16 << 20
"""maximum size of a task's files; contents are stored in the run's manifest"""

_FRONT_MATTER: Final = re.compile(r"\A---\s*\n.*?\n---\s*\n", re.DOTALL)
_PLAIN: Final = ("100644", "100664")
_EXECUTABLE: Final = "100755"
_SECONDS: Final = 120.0
"""after which git is stopped: an object may be a file that never ends"""


def task_files(
    findings: WazaFindings, task: Document, folder: Path, fixtures: Path, instructions: dict[str, bytes]
) -> dict[str, Content]:
    """Return the contents of a task's workspace by path. `folder` is the eval's; later files replace earlier ones."""
    contents = _fixture(findings, task, folder, fixtures)
    for place, entry in findings.blocks(task, ("inputs", "files"), "{path: …} or {path: …, content: …}"):
        contents |= _listed(findings, task, place, entry, fixtures)
    contents |= instructions
    if sum(map(len, contents.values())) > LARGEST:
        findings.wrong(task, ("inputs",), f"its files are larger than {LARGEST >> 20} MB together")
        return {}
    return {name: content(data) for name, data in contents.items()}


def _fixture(findings: WazaFindings, task: Document, folder: Path, fixtures: Path) -> dict[str, bytes]:
    """Read `inputs.context.fixture`, a file or folder that waza looks up in the eval's folder."""
    context = findings.block(task, ("inputs",), "context")
    if "fixture" not in context:
        return {}
    name, place = context["fixture"], ("inputs", "context", "fixture")
    if not isinstance(name, str) or not is_below(name):
        findings.wrong(task, place, f"must be the path of a file or folder below the eval's folder, not {name!r}")
        return {}
    for start in (folder, fixtures):
        path = findings.inside(task, place, start, name)
        if path is None:
            return {}
        if path.exists():
            if start != folder:
                findings.notice(task, place, f"found in {fixtures}; waza looks in the eval's folder, {folder}, only")
            return _tree(path)
    findings.wrong(task, place, f"no such file or folder: {name!r}; looked in {folder} (the eval's folder), {fixtures}")
    return {}


def _listed(
    findings: WazaFindings, task: Document, place: Location, entry: Mapping[str, Any], fixtures: Path
) -> dict[str, bytes]:
    name, content = entry.get("path"), entry.get("content")
    findings.keys(task, place, ("path", "content"))
    if not isinstance(name, str) or not name:
        findings.wrong(task, place, "needs a path")
        return {}
    path = findings.inside(task, (*place, "path"), fixtures, name)
    if path is None or not path.resolve().is_relative_to(fixtures.resolve()):
        if path is not None:
            findings.wrong(task, (*place, "path"), f"{name!r} is outside the workspace")
        return {}
    if content is not None:
        return {name: str(content).encode()}
    if not path.is_file():
        findings.notice(
            task, (*place, "path"), f"there is no {name} in {fixtures}; the task runs without it, as in waza"
        )
        return {}
    return {name: path.read_bytes()}


def _tree(path: Path) -> dict[str, bytes]:
    if not path.is_dir():
        return {path.name: path.read_bytes()}
    files = (file for file in sorted(path.rglob("*")) if file.is_file() and not file.is_symlink())
    root = path.resolve()  # a folder below it may be a link
    return {
        file.relative_to(path).as_posix(): file.read_bytes() for file in files if file.resolve().is_relative_to(root)
    }


def content(data: bytes) -> Content:
    """Return bytes in a form that JSON can hold."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def skill_text(folders: list[Path], skill: str) -> tuple[Path, str] | None:
    """Read the body of a skill's SKILL.md, in one of the folders or in a subfolder of the skill's name."""
    for folder in folders:
        for path in (folder / skill / "SKILL.md", folder / "SKILL.md"):
            if path.is_file() and (path.parent.name == skill or _named(path) == skill):
                return path, _FRONT_MATTER.sub("", path.read_text(encoding="utf-8")).strip()
    return None


class Agent(NamedTuple):
    """The content of an `.agent.md`."""

    path: Path
    tools: list[str] | None
    """the only tools that it may call; None if it does not list any"""
    body: str


def agent_file(folders: Sequence[Path]) -> Agent | None:
    """Return the first `.agent.md` in the folders."""
    path = next((path for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.agent.md"))), None)
    if path is None:
        return None
    text = path.read_text(encoding="utf-8")
    heading = _FRONT_MATTER.match(text)
    try:
        heading_values = read_value(heading[0].strip().strip("-")) if heading else {}
    except Exception as error:  # YAML's errors have several classes
        raise ConfigError([Problem(str(path), f"its heading is not YAML: {' '.join(str(error).split())}")]) from error
    tools = heading_values.get("tools") if isinstance(heading_values, dict) else None
    tools = [tools] if isinstance(tools, str) else tools
    listed = [str(name) for name in tools] if isinstance(tools, list) else None
    return Agent(path, listed, _FRONT_MATTER.sub("", text).strip())


def _named(path: Path) -> Any:
    match = re.search(r"^name:\s*[\"']?([^\"'\n]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1].strip() if match else None


def instruction_files(
    findings: WazaFindings, document: Document, location: Location, fixtures: Path
) -> dict[str, bytes]:
    """Read `instruction_files`, which waza looks up in the folder of the task's fixtures only."""
    contents: dict[str, bytes] = {}
    for name in findings.texts(document, location):
        if not is_below(name):
            findings.wrong(document, location, f"{name!r} must be a path below the fixtures, {fixtures}")
        elif (path := findings.inside(document, location, fixtures, name)) is not None:
            try:
                data = path.read_bytes()
                data.decode()
                contents[posixpath.normpath(name)] = data
            except FileNotFoundError:
                message = f"no such file: {name!r}; looked in {fixtures}, the folder of fixtures"
                findings.wrong(document, location, message)
            except UnicodeDecodeError as error:
                findings.wrong(document, location, f"{name} is not a text: {error}")
            except OSError as error:
                findings.wrong(document, location, f"{path} cannot be read: {error.strerror or error}")
    return contents


def read_repos(findings: WazaFindings, task: Document) -> dict[str, Any]:
    """Return the files of all repositories of a task by their paths in the workspace."""
    files: dict[str, Any] = {}
    form = "{type: worktree, source: …, commit: …, dest: …}"
    for place, block in findings.blocks(task, ("inputs", "repos"), form):
        files |= _repository_files(findings, task, place, block)
    return files


def _repository_files(
    findings: WazaFindings, task: Document, place: Location, block: Mapping[str, Any]
) -> dict[str, Any]:
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
        with _git_folder(repository) as git_folder:
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
    """Return True for a relative name inside its folder, which is not the folder itself."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and not name.startswith(("\\", "~"))


@contextmanager
def _git_folder(repository: Path) -> Iterator[Path]:
    """Make a git folder with a repository's refs and objects, but without its configuration.

    The repository may be a stranger's, and its configuration can name programs that git runs: to fetch missing objects,
    as a hook, or to watch files.
    """
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
    """Run git in a folder that `_git_folder` made."""
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
