"""Send the files of an eval to the cluster: its folder, and files outside of it that it names.

Files keep their modes and are stored by their content, so they are sent once, and a running job never sees later
changes. Files that the eval does not name are left out if they could be secrets or are not part of the project:
credential files, files that git ignores, and links that leave the folder. `Bundle.left_out` lists them with the reason.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast.apps.cluster.remote.trees import SourceFile
from holdfast.display.format import byte_count
from holdfast.errors import UsageError
from holdfast.spec.document import read_document
from holdfast.spec.fingerprint import scan
from holdfast.spec.formats import load_any
from holdfast.spec.load import eval_of_run
from holdfast.spec.template import texts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from holdfast.apps.cluster.remote.transport import Transport
    from holdfast.spec.eval import Eval
    from holdfast.spec.load import Override

MAX_BYTES: Final = 512 << 20
"""of the files of one eval"""
TRANSLATED: Final = ".holdfast.json"
"""suffix of an eval that another tool's file was translated to"""
_CACHES: Final = frozenset(
    {".git", ".hg", ".svn", ".venv", "venv", "node_modules", "runs", ".holdfast", "__pycache__", ".tox", ".nox"}
    | {".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints", ".DS_Store"}
)
"""folders and files that are never part of an eval, and are not listed"""
_CREDENTIAL_FOLDERS: Final = frozenset(
    {".ssh", ".gnupg", ".aws", ".azure", ".config", ".kube", ".docker", ".password-store", ".huggingface"}
)
_CREDENTIAL_FILES: Final = (
    *(".env", ".env.*", "*.env", "env.toml", ".netrc", "_netrc", ".pgpass", ".my.cnf", ".pypirc", ".npmrc", ".yarnrc*"),
    *(".git-credentials", ".htpasswd", "credentials", "credentials.*", "*credentials.json", "secret.*", "secrets.*"),
    *("service-account*.json", "service_account*.json", "client_secret*.json", "*.pem", "*.key", "*.p12", "*.pfx"),
    *("*.jks", "*.keystore", "*.kdbx", "*.ppk", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.ovpn"),
    *("*kubeconfig*", "token", "token.*", "*_token", "*_token.txt", "*.token", "*.tfvars", "*.tfvars.json"),
    *("*.tfstate*", ".dockercfg", ".docker*config.json", "*.secret", "password.txt", "passwords.txt"),
)
_HARMLESS: Final = ("*.example", "*.sample", "*.template", "*.pub", "*.py")


_SHOWN: Final = 40
"""lines of a dry run about one eval's files"""


class LeftOut(NamedTuple):
    """A file or folder that is not sent."""

    name: str
    """relative to the eval's folder"""
    why: str


@dataclass(frozen=True)
class Bundle:
    """The files of an eval, by their names in the bundle."""

    files: dict[str, SourceFile]
    eval_file: str
    moved: dict[str, str]
    """absolute paths of data, and their names in the bundle"""
    translated: bool = False
    """the eval was translated from another tool's file, with the overrides applied"""
    sizes: dict[str, int] = field(default_factory=dict)
    """bytes by name"""
    left_out: tuple[LeftOut, ...] = ()

    def lines(self) -> Iterator[str]:
        """Describe what is sent and what is not, for people."""
        count = "1 file" if len(self.sizes) == 1 else f"{len(self.sizes):,} files"
        yield f"sends {count}, {byte_count(sum(self.sizes.values()))}:"
        yield from _first(f"  {name}  {byte_count(size)}" for name, size in sorted(self.sizes.items()))
        if self.left_out:
            yield "does not send:"
            yield from _first(f"  {name}  ({why})" for name, why in self.left_out)

    def as_dict(self) -> dict[str, Any]:
        """Describe what is sent and what is not, for scripts."""
        return {"sent": self.sizes, "left_out": dict(self.left_out)}

    def overrides(self, spec: Eval, place: str) -> list[tuple[tuple[str, ...], Any]]:
        """Return overrides with which the eval finds its data on the cluster."""
        if not self.moved or spec.dataset is None:
            return []
        paths = [f"{place}/{self.moved[path]}" if path in self.moved else path for path in _strings(spec.dataset.path)]
        return [(("dataset", "path"), paths if isinstance(spec.dataset.path, list) else paths[0])]


def collect(spec: Eval, eval_file: Path, *, translated: bool = False) -> Bundle:
    """Collect the folder of an eval file, and files it names elsewhere. UsageError if they are too large."""
    folder = eval_file.resolve().parent
    if folder == Path.home().resolve():
        raise UsageError(
            f"{eval_file} is in your home directory, all of which would be sent",
            remedy="Move the eval file and its data to a folder of their own.",
        )
    outside, moved = _outside(spec, folder)
    sent, left_out = _inside(folder, _named(spec, eval_file, folder))
    root = Path(os.path.commonpath([folder, *outside])) if outside else folder
    paths = {str(path.relative_to(root)): path for path in [*sent, *outside]}
    files = {name: SourceFile(path) for name, path in paths.items()}
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    if (size := sum(sizes.values())) > MAX_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        shown = ", ".join(f"{root / name} ({sizes[name] >> 20} MB)" for name in largest)
        raise UsageError(
            f"{eval_file}: {size >> 20} MB are in its folder, more than the {MAX_BYTES >> 20} MB that are sent",
            remedy=f"The largest: {shown}. Put the eval file in a folder of its own, and large data on the cluster "
            "beforehand: a path that does not exist here is taken as one of the cluster's.",
        )
    absolute = {str(path): str(path.relative_to(root)) for path in moved}
    name = str((folder / eval_file.name).relative_to(root))
    if translated:  # whose task files, fixtures and skills may lie anywhere in a project; their content is in the rows
        name += TRANSLATED
        content = msgspec.json.encode(spec.document.data)
        files[name], sizes[name] = SourceFile(content, 0o644), len(content)
    return Bundle(files, name, absolute, translated, sizes, tuple(left_out))


def send_bundles(bundles: Sequence[Bundle], transport: Transport, base: str) -> list[str]:
    """Put the files of bundles on the cluster, unless they are there, and return their folders."""
    return transport.put_all([bundle.files for bundle in bundles], f"{base}/holdfast/bundles")


def _named(spec: Eval, eval_file: Path, folder: Path) -> set[Path]:
    """Return the files of the folder that the eval names, with the modules they import: they are always sent."""
    named = {folder / eval_file.name, *(path for text in dataset_paths(spec) for path in _matches(text, folder))}
    # Rows contain anything, and a grader may name `.env` to forbid it: neither makes a secret be sent.
    for text in texts({key: value for key, value in spec.document.data.items() if key != "samples"}):
        reference = text.partition(":")[0] if ".py:" in text else text
        path = Path(os.path.normpath(folder / reference))
        is_short = 0 < len(reference) < 1000 and "\n" not in reference
        if is_short and path.is_relative_to(folder) and path.is_file() and not _is_credential(path.relative_to(folder)):
            named.add(path)
    for path in [path for path in named if path.suffix == ".py" and path.is_file()]:
        named.update(scan(path, folder).files)
    if spec.workspace is not None and spec.workspace.folder is not None:
        named.update(_walk(Path(os.path.normpath(folder / spec.workspace.folder))))
    return named


def _inside(folder: Path, named: set[Path]) -> tuple[list[Path], list[LeftOut]]:
    """Split the files of a folder into those that are sent and those that are not."""
    paths = list(_walk(folder))
    ignored = _ignored_by_git(folder, [path for path in paths if path not in named])
    sent, left_out = [], []
    for path in paths:
        name = path.relative_to(folder)
        if path in named:
            sent.append(path)
        elif path.is_symlink() and not path.resolve().is_relative_to(folder):
            left_out.append(LeftOut(str(name), "a link that leaves the folder"))
        elif _is_credential(name):
            left_out.append(LeftOut(str(name), "looks like credentials"))
        elif path in ignored:
            left_out.append(LeftOut(str(name), "ignored by git"))
        else:
            sent.append(path)
    return sent, left_out


def _is_credential(name: Path) -> bool:
    if not _CREDENTIAL_FOLDERS.isdisjoint(name.parts[:-1]):
        return True
    base = name.name.lower()
    if any(fnmatch.fnmatch(base, pattern) for pattern in _HARMLESS):
        return False
    return any(fnmatch.fnmatch(base, pattern) for pattern in _CREDENTIAL_FILES)


def _ignored_by_git(folder: Path, paths: Sequence[Path]) -> set[Path]:
    """Return the files that git ignores; none without git, or outside of a repository."""
    names = b"\0".join(os.fsencode(path.relative_to(folder)) for path in paths)
    try:
        completed = subprocess.run(
            ["git", "-C", str(folder), "-c", "core.fsmonitor=false", "check-ignore", "-z", "--stdin"],  # noqa: S607 - the user's own git
            input=names,
            capture_output=True,
            check=False,
        )
    except OSError:
        return set()
    return {folder / os.fsdecode(name) for name in completed.stdout.split(b"\0") if name}


def load_sent(file: Path, overrides: Sequence[Override]) -> Eval:
    """Load the eval of a bundle, without its notices, which were shown at submission."""
    if not file.name.endswith(TRANSLATED):
        return msgspec.structs.replace(load_any(read_document(file), overrides), notices=())
    return eval_of_run(msgspec.json.decode(file.read_bytes()), str(file.parent), str(file), overrides)


def copies_in(spec: Eval, folder: Path) -> list[Override]:
    """Return overrides that put folders for copies, which are relative to the eval file, below another folder.

    Only their names are used: the folder may be on a cluster, which does not have this machine's links.
    """
    overrides: list[Override] = []
    for name, live in spec.live_exports.items():
        overrides.append((("output", name, "dir"), os.path.normpath(folder / live.dir)))
    blocks = [block.model_dump(exclude_unset=True) for block in spec.exports]
    named = [block for block in blocks if block.get("dir")]
    for block in named:
        block["dir"] = os.path.normpath(folder / block["dir"])
    if named:
        overrides.append((("output", "export"), blocks))
    return overrides


def _outside(spec: Eval, folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files outside of the folder that the eval names, and those that it names by absolute path."""
    files: dict[Path, None] = {}
    moved: list[Path] = []
    for text in dataset_paths(spec):
        far = [match for match in _matches(text, folder) if not match.resolve().is_relative_to(folder)]
        files |= dict.fromkeys(far)
        if Path(text).expanduser().is_absolute() and far:
            moved.append(Path(text).expanduser())
    for text in texts(spec.document.data):
        reference = text.partition(":")[0]
        if "\n" in text or not reference.startswith("..") or len(reference) > 1000:
            continue
        path = Path(os.path.normpath(folder / reference))
        if path.is_file() and not _is_credential(Path(reference)):
            files[path] = None
        if path.suffix == ".py" and path.is_file():
            files |= dict.fromkeys(file for file in scan(path, folder).files if _beside(file, path))
    if spec.workspace is not None and spec.workspace.folder is not None:
        files |= dict.fromkeys(_walk(Path(os.path.normpath(folder / spec.workspace.folder))))
    return [path for path in files if not path.is_relative_to(folder)], moved


def _matches(text: str, folder: Path) -> list[Path]:
    """Return the files that a dataset's path matches, which may be a glob."""
    if "://" in text:
        return []
    path = Path(text).expanduser()
    matches = path.parent.glob(path.name) if path.is_absolute() else folder.glob(text)
    return sorted(Path(os.path.normpath(match)) for match in matches if match.is_file())


def _beside(file: Path, entry: Path) -> bool:
    """Return True if a module is found next to its importer, and not through Python's path, which differs there."""
    return file.is_relative_to(entry.resolve().parent)


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _CACHES and not name.endswith(".egg-info"))
        for name in sorted(names):
            path = Path(place) / name
            if name not in _CACHES and not name.endswith((".pyc", ".tmp")) and path.is_file():
                yield path


def dataset_paths(spec: Eval) -> list[str]:
    """Return the paths of the eval's dataset as they are written."""
    return [] if spec.dataset is None else _strings(spec.dataset.path)


def _first(lines: Iterable[str]) -> Iterator[str]:
    remaining = iter(lines)
    yield from itertools.islice(remaining, _SHOWN)
    if count := sum(1 for _ in remaining):
        yield f"  … and {count:,} more; --json lists all"


def _strings(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
