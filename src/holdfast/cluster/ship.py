"""What must be on the cluster before a job begins: this version of Holdfast, and the user's files.

Both are named by their content, so they travel once. A running job never sees what is changed here meanwhile.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import os
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

import holdfast
from holdfast.canonical import digest
from holdfast.cluster.transport import File
from holdfast.errors import ClusterError, UsageError
from holdfast.formats import load_any
from holdfast.spec.document import read_document
from holdfast.spec.fields import ModelTarget, is_embedded
from holdfast.spec.load import eval_of_run
from holdfast.spec.source import source_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from holdfast.cluster.transport import Transport
    from holdfast.spec.load import Eval
    from holdfast.spec.overrides import Override

MOST_BYTES: Final = 512 << 20
"""of the files that travel with an eval"""
LEFT_OUT: Final = frozenset(
    {".git", ".hg", ".svn", ".venv", "venv", "node_modules", "runs", ".holdfast", "__pycache__", ".tox", ".nox"}
    | {".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints", ".DS_Store", "secrets.env", ".env"}
)
"""folders and files that are never sent"""
TRANSLATED: Final = ".holdfast.json"
"""how the name of an eval ends that another tool's file was turned into"""
_INSTALL_SECONDS: Final = 1800.0
_EPOCH: Final = (2020, 1, 1, 0, 0, 0)


def build_wheel() -> tuple[str, bytes]:
    """This very version as a wheel: its name and its bytes, which are the same for the same code."""
    package = Path(holdfast.__file__).parent
    about = importlib.metadata.distribution("holdfast-evals")
    version = about.version
    info = f"holdfast_evals-{version}.dist-info"
    files: dict[str, bytes] = {}
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
            files[f"holdfast/{path.relative_to(package)}"] = path.read_bytes()
    files[f"{info}/METADATA"] = (about.read_text("METADATA") or "").encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: holdfast\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = (about.read_text("entry_points.txt") or "").encode()
    record = "".join(f"{name},sha256={_record(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return f"holdfast_evals-{version}-py3-none-any.whl", made.getvalue()


def _record(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def ensure_python(
    transport: Transport, base: str, extras: Sequence[str] = (), say: Callable[[str], None] = lambda _: None
) -> str:
    """An interpreter on the cluster that has this version of Holdfast, made there once per version."""
    name, wheel = build_wheel()
    code = transport.put({name: File(wheel)}, f"{base}/holdfast/code")
    key = digest([code.rpartition("/")[2], sorted(extras)]).removeprefix("sha256:")
    place = f"{base}/holdfast/env/{key[:32]}"
    wanted = f"{code}/{name}" + (f"[{','.join(sorted(extras))}]" if extras else "")
    if transport.run(["test", "-e", f"{place}/.ready"]).code != 0:
        say(f"[info] Holdfast {holdfast.__version__} is installed on {transport.place}, once for this version")
    done = transport.run(["sh", "-c", _MAKE_ENV, "sh", place, wanted], timeout=_INSTALL_SECONDS)
    if done.code != 0:
        said = "\n".join((done.stderr.strip() or done.text.strip()).splitlines()[-8:])
        raise ClusterError(
            f"{transport.place}: Holdfast could not be installed in {place}:\n{said}",
            remedy='Install it there yourself, and name the interpreter in the profile: python = "/path/to/bin/python"',
        )
    return f"{place}/bin/python"


# A virtual environment cannot be moved, so it is made in its place, by one at a time; `.ready` says that it is whole.
_MAKE_ENV: Final = """
env="$1" wheel="$2"
test -e "$env/.ready" && exit 0
mkdir -p -- "$(dirname -- "$env")"
waited=0
until mkdir -- "$env.lock" 2>/dev/null; do
    test -e "$env/.ready" && exit 0
    waited=$((waited + 1))
    if test $waited -gt 900; then echo "somebody else is at it: $env.lock; remove it if nobody is" >&2; exit 1; fi
    sleep 1
done
trap 'rmdir -- "$env.lock"' EXIT
test -e "$env/.ready" && exit 0
rm -rf -- "$env"
python=
for name in python3.13 python3.12 python3.11 python3 python3.14; do
    if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$name; break
    fi
done
if test -n "$python"; then
    "$python" -m venv -- "$env" && "$env/bin/python" -m pip install -q --no-input -- "$wheel" || exit 1
elif command -v uv >/dev/null; then
    uv venv -q --python '>=3.11' -- "$env" && uv pip install -q --python "$env/bin/python" -- "$wheel" || exit 1
else
    echo "there is neither a Python from 3.11 with venv nor uv on the PATH of a shell that is not a login shell" >&2
    exit 1
fi
"$env/bin/python" -m holdfast --version || exit 1
touch -- "$env/.ready"
"""


def needed_extras(specs: Sequence[Eval], destinations: Iterable[str]) -> list[str]:
    """What must be installed beside Holdfast itself for these evals and exports."""
    going = set(destinations)
    for spec in specs:
        going |= {block.to for block in spec.exports}
    found = going & {"wandb", "mlflow", "parquet"}
    for spec in specs:
        paths = _strings(spec.dataset.path) if spec.dataset else []
        found |= {"hf" for path in paths if path.startswith("hf://")}
        found |= {"parquet" for path in paths if path.endswith(".parquet")}
        if isinstance(spec.target, ModelTarget) and is_embedded(spec.target.model):
            found.add("local")
        if getattr(spec.target, "mcp", None) or "mcp" in str(getattr(spec.target, "tools", "")):
            found.add("mcp")
        kinds = {grader.type for _, grader in spec.placed_graders()}
        found |= {
            extra for extra, words in (("math", "math"), ("similarity", "similar")) if any(words in k for k in kinds)
        }
    return sorted(found)


@dataclass(frozen=True)
class Bundle:
    """The files of an eval, by their names in the bundle."""

    files: dict[str, File]
    eval_file: str
    moved: dict[str, str]
    """absolute paths of data, and their names in the bundle"""
    translated: bool = False
    """the eval file was another tool's, and stands here as what was made of it, overrides and all"""

    def send(self, transport: Transport, base: str) -> str:
        """Put it on the cluster, unless it is there."""
        return transport.put(self.files, f"{base}/holdfast/bundles")

    def overrides(self, spec: Eval, place: str) -> list[tuple[tuple[str, ...], Any]]:
        """What must be laid over the eval file so that it finds its data there."""
        if not self.moved or spec.dataset is None:
            return []
        paths = [f"{place}/{self.moved[path]}" if path in self.moved else path for path in _strings(spec.dataset.path)]
        return [(("dataset", "path"), paths if isinstance(spec.dataset.path, list) else paths[0])]


def collect(spec: Eval, eval_file: Path, *, translated: bool = False) -> Bundle:
    """The folder of an eval file, and data that lies elsewhere; refused where that is too much."""
    folder = eval_file.resolve().parent
    outside, moved = _outside(spec, folder)
    root = Path(os.path.commonpath([folder, *outside])) if outside else folder
    files: dict[str, File] = {}
    sizes: dict[str, int] = {}
    for path in [*_walk(folder), *outside]:
        name = str(path.relative_to(root))
        # Modes beyond "may be executed" are this machine's matter, and would make another bundle of the same content.
        files[name] = File(path, 0o755 if os.access(path, os.X_OK) else 0o644)
        sizes[name] = path.stat().st_size
    if (size := sum(sizes.values())) > MOST_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        shown = ", ".join(f"{root / name} ({sizes[name] >> 20} MB)" for name in largest)
        raise UsageError(
            f"{eval_file}: {size >> 20} MB lie beside it, more than the {MOST_BYTES >> 20} MB that are sent",
            remedy=f"The largest: {shown}. Put the eval file in a folder of its own, and large data on the cluster "
            "beforehand: a path that does not exist here is taken as one of the cluster's.",
        )
    absolute = {str(path): str(path.relative_to(root)) for path in moved}
    name = str((folder / eval_file.name).relative_to(root))
    if translated:  # whose task files, fixtures and skills may lie anywhere in a project; what they say is in the rows
        name += TRANSLATED
        files[name] = File(msgspec.json.encode(spec.document.data), 0o644)
    return Bundle(files, name, absolute, translated)


def load_sent(file: Path, overrides: Sequence[Override]) -> Eval:
    """The eval of a bundle; what there is to note of it was said of the user's own file, when it was submitted."""
    if not file.name.endswith(TRANSLATED):
        return replace(load_any(read_document(file), overrides), notices=())
    return eval_of_run(msgspec.json.decode(file.read_bytes()), str(file.parent), str(file), overrides)


def copies_in(spec: Eval, folder: Path) -> list[Override]:
    """What must be laid over an eval so that folders for copies, relative to its file, are below another folder.

    By their names alone: the folder may be a cluster's, and links of this machine lead elsewhere.
    """
    found: list[Override] = []
    if spec.output.nat is not None:
        found.append((("output", "nat", "dir"), os.path.normpath(folder / spec.output.nat.dir)))
    blocks = [block.model_dump(exclude_unset=True) for block in spec.exports]
    named = [block for block in blocks if block.get("dir")]
    for block in named:
        block["dir"] = os.path.normpath(folder / block["dir"])
    if named:
        found.append((("output", "export"), blocks))
    return found


def _outside(spec: Eval, folder: Path) -> tuple[list[Path], list[Path]]:
    """Files outside the folder that the eval names, and those of them that it names by absolute path."""
    found: dict[Path, None] = {}
    moved: list[Path] = []
    for text in _strings(spec.dataset.path) if spec.dataset else []:
        if "://" in text:
            continue
        path = Path(text).expanduser()
        matches = sorted(path.parent.glob(path.name)) if path.is_absolute() else sorted(folder.glob(text))
        far = [match for match in matches if not match.resolve().is_relative_to(folder)]
        found |= dict.fromkeys(Path(os.path.normpath(match)) for match in far if match.is_file())
        if path.is_absolute() and far:
            moved.append(path)
    for text in _leaves(spec.document.data):
        reference = text.partition(":")[0]
        if "\n" in text or not reference.startswith("..") or len(reference) > 1000:
            continue
        path = Path(os.path.normpath(folder / reference))
        if path.is_file():
            found[path] = None
        if path.suffix == ".py" and path.is_file():
            found |= dict.fromkeys(file for file in source_files(path, folder) if _beside(file, path))
    if spec.workspace is not None and spec.workspace.folder is not None:
        found |= dict.fromkeys(_walk(Path(os.path.normpath(folder / spec.workspace.folder))))
    return [path for path in found if not path.is_relative_to(folder)], moved


def _beside(file: Path, entry: Path) -> bool:
    """Whether a module is found from where its importer lies, and not by Python's path, which is another there."""
    return file.is_relative_to(entry.resolve().parent)


def _leaves(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict | list):
        for value in node.values() if isinstance(node, dict) else node:
            yield from _leaves(value)


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT and not name.endswith(".egg-info"))
        for name in sorted(names):
            path = Path(place) / name
            if name not in LEFT_OUT and not name.endswith((".pyc", ".tmp")) and path.is_file():
                yield path


def _strings(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
