"""Install this version of Holdfast on the cluster, from a wheel, once per version."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import re
import threading
import time
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import holdfast
from holdfast.apps.cluster.remote.bundle import dataset_paths
from holdfast.apps.cluster.remote.trees import SourceFile
from holdfast.canonical import digest
from holdfast.display.format import duration
from holdfast.errors import ClusterError
from holdfast.graders.build import grader_class
from holdfast.spec.schema import is_embedded
from holdfast.spec.target_schema import ModelTarget
from holdfast.targets.build import target_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from holdfast.apps.cluster.remote.transport import Transport
    from holdfast.spec.eval import Eval

_INSTALL_SECONDS: Final = 1800.0
_REPORT_SECONDS: Final = 15.0
_EPOCH: Final = (2020, 1, 1, 0, 0, 0)


def build_wheel() -> tuple[str, bytes]:
    """Build a wheel of this version, and return its name and its bytes, which depend only on the code."""
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
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return f"holdfast_evals-{version}-py3-none-any.whl", buffer.getvalue()


def _record(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def ensure_python(
    transport: Transport, base: str, extras: Sequence[str] = (), say: Callable[[str], None] = lambda _: None
) -> str:
    """Return an interpreter on the cluster that has this version of Holdfast, installed there once per version."""
    name, wheel = build_wheel()
    code = transport.put({name: SourceFile(wheel)}, f"{base}/holdfast/code")
    key = digest([code.rpartition("/")[2], sorted(extras)]).removeprefix("sha256:")
    place = f"{base}/holdfast/env/{key[:32]}"
    requirement = f"{code}/{name}" + (f"[{','.join(sorted(extras))}]" if extras else "")
    if transport.run(["test", "-e", f"{place}/.ready"]).code != 0:
        say(f"note: installing Holdfast {holdfast.__version__} on {transport.host} (once per version)")
    with _reporting(say):
        completed = transport.run(["sh", "-c", _MAKE_ENV, "sh", place, requirement], timeout=_INSTALL_SECONDS)
    if completed.code != 0:
        output = "\n".join((completed.stderr.strip() or completed.text.strip()).splitlines()[-8:])
        raise ClusterError(
            f"{transport.host}: Holdfast could not be installed in {place}:\n{output}",
            remedy='Install it there yourself, and name the interpreter in the profile: python = "/path/to/bin/python"',
        )
    return f"{place}/bin/python"


@contextmanager
def _reporting(say: Callable[[str], None]) -> Iterator[None]:
    """Say from time to time that the installation is under way: on a busy login node it takes minutes."""
    over, began = threading.Event(), time.monotonic()

    def report() -> None:
        while not over.wait(_REPORT_SECONDS):
            say(f"note: still installing, for {duration(time.monotonic() - began)}")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# A virtual environment cannot be moved, so one process creates it in its place; `.ready` marks it complete.
_MAKE_ENV: Final = """
umask go-w
env="$1" wheel="$2"
test -e "$env/.ready" && { touch -c -- "$env"; exit 0; }
mkdir -p -- "$(dirname -- "$env")"
waited=0
until mkdir -- "$env.lock" 2>/dev/null; do
    test -e "$env/.ready" && exit 0
    waited=$((waited + 1))
    if test $waited -gt 900; then echo "another process is installing; if not, remove $env.lock" >&2; exit 1; fi
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
    uv venv -q --python '>=3.11' -- "$env" &&
        uv pip install -q --compile-bytecode --python "$env/bin/python" -- "$wheel" || exit 1
else
    echo "neither Python 3.11 or newer with venv nor uv is on the PATH of a non-login shell" >&2
    exit 1
fi
"$env/bin/python" -m holdfast --version || exit 1
touch -- "$env/.ready"
"""


def needed_extras(specs: Sequence[Eval], destinations: Iterable[str]) -> list[str]:
    """Return the extras of Holdfast that these evals and exports need."""
    exports = set(destinations)
    for spec in specs:
        exports |= {block.to for block in spec.exports}
    extras = exports & {"wandb", "mlflow", "parquet"}
    for spec in specs:
        paths = dataset_paths(spec)
        extras |= {"hf" for path in paths if path.startswith("hf://")}
        extras |= {"parquet" for path in paths if path.endswith(".parquet")}
        if isinstance(spec.target, ModelTarget) and is_embedded(spec.target.model):
            extras.add("local")
        if getattr(spec.target, "mcp", None) or "mcp" in str(getattr(spec.target, "tools", "")):
            extras.add("mcp")
        graders = [grader_class(block) for _, block in spec.placed_graders()]
        named = [target_class(spec).extra, *(kind.extra for kind in graders)]
        extras |= {extra for extra in named if extra is not None}
        for kind in graders:
            if kind.requires is not None:
                extras |= _extras_with(kind.requires[1])
    return sorted(extras)


def _extras_with(package: str) -> set[str]:
    """Return the first of Holdfast's extras that installs a package; none for packages that plug-ins need."""
    for requirement in importlib.metadata.requires("holdfast-evals") or []:
        if match := re.match(rf"{re.escape(package)}\b.*extra == [\"']([\w-]+)[\"']", requirement):
            return {match[1]}
    return set()
