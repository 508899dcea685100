"""Docker images become .sqsh files once, whole or not at all, on a real Slurm.

enroot is in no package here, so a stand-in of that name takes its place: a script that makes a real squashfs image with
mksquashfs, slowly or badly where a test wants that. What is said of enroot itself is not tested.
"""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from holdfast.apps.cluster.remote.images import ImageReference, ensure_image, is_reference, registry_digest
from holdfast.apps.cluster.remote.slurm import JobName, Slurm
from holdfast.apps.cluster.remote.transport import Here
from holdfast.errors import ClusterError
from tests.support.running import wait_for
from tests.support.slurm import Cluster, wait_for_job

if TYPE_CHECKING:
    from collections.abc import Iterator

ENROOT = """#!/bin/sh
if test "$1" = version; then echo 3.5.0; exit; fi
test "$1 $2" = "import --output" || exit 2
echo "$4" >>"{folder}/imports"
echo "[INFO] Fetching image"
. "{folder}/how"
root="{folder}/root-$$"
mkdir -p "$root" && echo "$4" >"$root/image" && head -c 20000 /dev/urandom >"$root/layer"
exec mksquashfs "$root" "$3" -quiet -no-progress >/dev/null
"""


class Place:
    """A directory on the cluster, and an enroot on its nodes that does what `how` says first."""

    def __init__(self, lab: Cluster, folder: Path) -> None:
        self.folder = folder
        self.base = folder / "base dir"
        self.bin = folder / "bin"
        self.bin.mkdir()
        (self.bin / "enroot").write_text(ENROOT.format(folder=folder))
        (self.bin / "enroot").chmod(0o755)
        self.how("")
        self.transport = Here(env={**lab.env, "PATH": f"{self.bin}:{lab.env['PATH']}"}, pauses=())
        self.slurm = Slurm(self.transport)
        self.said: list[str] = []

    def how(self, shell: str) -> None:
        (self.folder / "how").write_text(shell)

    def ensure(self, image: str, **options: Any) -> str:
        return ensure_image(
            self.transport, self.slurm, image, str(self.base), say=self.said.append, poll=0.05, **options
        )

    @property
    def imports(self) -> list[str]:
        log = self.folder / "imports"
        return log.read_text().splitlines() if log.exists() else []

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.base / "containers").iterdir() if path.name != ".jobs")


@pytest.fixture
def place(slurm: Cluster, tmp_path: Path) -> Place:
    if shutil.which("mksquashfs") is None:
        pytest.skip("mksquashfs is missing; on Debian and Ubuntu scripts/lab/install installs it, as root")
    return Place(slurm, tmp_path)


@pytest.fixture
def registry() -> Iterator[Any]:
    """A registry that answers only for the digests of tags; `tags` is what it knows."""

    class Registry(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            digest = server.tags.get(self.path)
            token = self.headers.get("Authorization")
            if server.realm and token != "Bearer t0ken":
                self.send_response(401)
                self.send_header("WWW-Authenticate", f'Bearer realm="{server.realm}",service="r",scope="s"')
            elif digest is None or "manifest.list" not in (self.headers.get("Accept") or ""):
                self.send_response(404)
            else:
                self.send_response(200)
                self.send_header("Docker-Content-Digest", digest)
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"token": "t0ken" if "service=r&scope=s" in self.path else ""}).encode())

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        tags: ClassVar[dict[str, str]] = {}
        realm = ""

    with Server(("127.0.0.1", 0), Registry) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_image_is_imported_once_and_then_reused(place: Place) -> None:
    image = f"127.0.0.1:1/team/{place.folder.name}:1.0"
    path = place.ensure(image, options=["--time=5", "--partition=main"])
    assert Path(path).parent == place.base / "containers"
    assert Path(path).read_bytes()[:4] == b"hsqs"
    assert place.imports == [f"docker://127.0.0.1:1#team/{place.folder.name}:1.0"]
    note = json.loads(Path(path).with_suffix(".json").read_text())
    assert note["image"] == image and note["file"] == Path(path).name and note["enroot"] == "3.5.0"
    assert note["size"] == Path(path).stat().st_size and note["digest"] is None
    (job,) = place.slurm.jobs(names=[str(JobName(ImageReference.parse(image).id, 0, "squash"))])
    assert job.state == "completed" and str(job.id) == note["job"] and job.nodes.startswith("node")
    assert place.ensure(image) == path
    assert len(place.imports) == 1
    assert place.files() == [Path(path).with_suffix(".json").name, Path(path).name]


def test_two_simultaneous_jobs_import_an_image_once(place: Place) -> None:
    image = f"127.0.0.1:1/{place.folder.name}:two"
    place.how(f'until test -e "{place.folder}/go"; do sleep 0.05; done')
    name = str(JobName(ImageReference.parse(image).id, 0, "squash"))
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(place.ensure, image) for _ in range(2)]
        wait_for(lambda: len(place.slurm.jobs(names=[name])) == 2, "both jobs")
        (place.folder / "go").touch()
        first, second = (future.result(timeout=300) for future in both)
    assert first == second
    assert len(place.imports) == 1


def test_a_killed_import_leaves_nothing_that_is_ever_used(place: Place) -> None:
    image = f"127.0.0.1:1/{place.folder.name}:killed"
    place.how('head -c 5000 /dev/zero >"$3"; sleep 600')
    name = str(JobName(ImageReference.parse(image).id, 0, "squash"))
    with ThreadPoolExecutor(1) as pool:
        importing = pool.submit(place.ensure, image)
        wait_for(lambda: place.imports, "the import")
        job = wait_for_job(place.slurm, name, lambda job: job.state == "running")
        place.transport.check(["scancel", "--signal=KILL", "--full", job.id])
        with pytest.raises(ClusterError, match=f"job {job.id}, ended: (failed|cancelled)"):
            importing.result(timeout=300)
    assert not [file for file in place.files() if not file.startswith(".importing-")]
    place.how("")
    path = place.ensure(image)
    assert Path(path).read_bytes()[:4] == b"hsqs" and len(place.imports) == 2


@pytest.mark.parametrize(
    ("how", "message", "remedy"),
    [
        ('echo "[ERROR] URL returned error code: 401 Unauthorized" >&2; exit 1', "401", "enroot/.credentials"),
        ('echo "mksquashfs: No space left on device" >&2; exit 1', "No space left", "Make room"),
        ('echo "curl: (6) Could not resolve host: nvcr.io" >&2; exit 1', "Could not resolve", "build_partition"),
        ('echo hello >"$3"; exit 0', "no squashfs image", "incomplete files are never used"),
        ("exit 0", "cannot stat", "incomplete files are never used"),
    ],
)
def test_a_failed_import_is_reported_with_a_remedy(place: Place, how: str, message: str, remedy: str) -> None:
    place.how(how)
    with pytest.raises(ClusterError) as raised:
        place.ensure(f"127.0.0.1:1/{place.folder.name}:fails")
    assert message in raised.value.message and ".log" in raised.value.message
    assert remedy in str(raised.value)
    assert place.files() == []


def test_a_node_without_enroot_is_named_with_the_ways_out(place: Place) -> None:
    (place.bin / "enroot").unlink()
    with pytest.raises(ClusterError, match=r"(?s)there is no enroot on .*build_partition.*\.sqsh file"):
        place.ensure(f"127.0.0.1:1/{place.folder.name}:none")


def test_a_damaged_image_is_noticed_and_replaced_by_another_file(place: Place) -> None:
    image = f"127.0.0.1:1/{place.folder.name}:damaged"
    path = Path(place.ensure(image))
    whole = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(whole // 2)
    again = Path(place.ensure(image))
    assert any(f"is damaged: it has {whole // 2:,} bytes of {whole:,}" in line for line in place.said)
    assert again != path and again.name == f"{path.stem}-2.sqsh" and again.read_bytes()[:4] == b"hsqs"
    again.unlink()
    third = place.ensure(image)
    assert any("is gone" in line for line in place.said)
    assert Path(third).exists() and len(place.imports) == 3


def test_force_imports_again_and_leaves_the_file_that_jobs_may_use(place: Place) -> None:
    image = f"127.0.0.1:1/{place.folder.name}:force"
    path = place.ensure(image)
    content = Path(path).read_bytes()
    again = place.ensure(image, force=True)
    assert again != path and Path(path).read_bytes() == content
    assert place.ensure(image) == again and len(place.imports) == 2


@pytest.mark.parametrize("with_login", [False, True])
def test_a_moved_tag_is_noticed(place: Place, registry: Any, with_login: bool) -> None:
    host = f"127.0.0.1:{registry.server_port}"
    image, tag = f"{host}/{place.folder.name}:stable", f"/v2/{place.folder.name}/manifests/stable"
    registry.realm = f"http://{host}/token" if with_login else ""
    registry.tags = {tag: "sha256:" + 64 * "a"}
    path = place.ensure(image)
    assert json.loads(Path(path).with_suffix(".json").read_text())["digest"] == "sha256:" + 64 * "a"
    assert place.ensure(image) == path
    registry.tags = {tag: "sha256:" + 64 * "b"}
    moved = place.ensure(image)
    assert moved != path and any("the tag has moved from sha256:aaaa" in line for line in place.said)
    registry.tags = {}  # a registry that is down moves nothing
    assert place.ensure(image) == moved and len(place.imports) == 2


@pytest.mark.parametrize("image", ["/images/a.sqsh", "a.sqsh", "/images/plain", "./b"])
def test_images_that_are_files_are_not_imported(image: str) -> None:
    assert not is_reference(image)
    assert ensure_image(None, None, image, "/base") == image  # type: ignore[arg-type]  # nobody is asked


@pytest.mark.parametrize(
    ("image", "registry", "name", "tag", "uri"),
    [
        ("ubuntu", None, "ubuntu", "latest", "docker://ubuntu:latest"),
        ("vllm/vllm-openai:v0.9", None, "vllm/vllm-openai", "v0.9", "docker://vllm/vllm-openai:v0.9"),
        ("nvcr.io/nvidia/nemo:25.01", "nvcr.io", "nvidia/nemo", "25.01", "docker://nvcr.io#nvidia/nemo:25.01"),
        ("localhost:5000/a:b", "localhost:5000", "a", "b", "docker://localhost:5000#a:b"),
        ("docker://nvcr.io#nvidia/nemo:1", "nvcr.io", "nvidia/nemo", "1", "docker://nvcr.io#nvidia/nemo:1"),
        ("r.io/a:t@sha256:00", "r.io", "a", "sha256:00", "docker://r.io#a@sha256:00"),
    ],
)
def test_references_are_read_as_docker_reads_them(
    image: str, registry: str | None, name: str, tag: str, uri: str
) -> None:
    reference = ImageReference.parse(image)
    assert (reference.registry, reference.name, reference.tag, reference.uri) == (registry, name, tag, uri)


def test_names_of_images_never_collide() -> None:
    images = ["a.io/b/c:1", "a.io/b_c:1", "a.io/b/c_1", "a_io/b/c:1"]
    assert len({ImageReference.parse(image).stem for image in images}) == len(images)
    assert ImageReference.parse("nvcr.io/nvidia/nemo:25.01").stem.startswith("nvcr_io_nvidia_nemo_25_01-")


def test_a_reference_by_digest_is_its_own_digest(slurm: Cluster) -> None:
    assert registry_digest(slurm.here, ImageReference.parse("a.io/b@sha256:0123")) == "sha256:0123"
