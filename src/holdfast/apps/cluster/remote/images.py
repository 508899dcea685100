"""Import Docker images to `.sqsh` files below `<base>/containers/`, with `enroot import` in a job.

    <name>-<8 hex>.sqsh     the image; the digits are from the digest of its reference, so two never share a name
    <name>-<8 hex>.json     the current file of the image, its digest, and when it was imported: `Squashed`
    .jobs/<16 hex>/         the ledger and the logs of its imports, whose jobs are `hf-<16 hex>.0.squash`

An image appears under its name when it is complete, synced and checked, and is never written again: another import
(`--force-squash`, a tag that moved, a damaged file) gets `-2`, `-3`, … and the old file stays for the jobs that use it.

There is no lock file that a killed process could leave: imports of one image by one user are jobs of one name with
`--dependency=singleton`, and a job that finds its work done when its turn comes does nothing.
"""

from __future__ import annotations

import re
import shlex
import time
from hashlib import sha256
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.apps.cluster.remote.ledger import JobScript, Ledger, Submitter
from holdfast.apps.cluster.remote.slurm import JobName
from holdfast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.apps.cluster.config.launch import Launch
    from holdfast.apps.cluster.remote.ledger import Job
    from holdfast.apps.cluster.remote.slurm import JobState, Slurm
    from holdfast.apps.cluster.remote.transport import Transport

POLL_SECONDS: Final = 2.0
_SCHEME: Final = re.compile(r"^(docker|dockerd|podman|docker-archive|oci-archive)://")
_MANIFESTS: Final = (
    "application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.oci.image.index.v1+json, "
    "application/vnd.docker.distribution.manifest.v2+json, application/vnd.oci.image.manifest.v1+json"
)
_LOG_LINES: Final = 15


class Squashed(msgspec.Struct, frozen=True):
    """An image that was imported."""

    image: str
    file: str
    """its name, in the same folder"""
    size: int
    digest: str | None
    """of the registry's manifest at the time of the import, if known"""
    imported: str
    enroot: str
    job: str = ""
    """the job that imported it, which distinguishes imports of the same second"""


class ImageReference(msgspec.Struct, frozen=True):
    """A Docker reference in its parts."""

    text: str
    """as it was written"""
    registry: str | None
    name: str
    tag: str
    """or a digest, which begins with sha256:"""

    @classmethod
    def parse(cls, image: str) -> ImageReference:
        """`nvcr.io/nvidia/nemo:25.01`, `ubuntu`, `docker://host:5000#team/image:tag`."""
        rest = re.sub(r"^docker://", "", image)
        first, sign, name = rest.partition("#") if "#" in rest else rest.partition("/")
        registry = first if sign and ("#" in rest or re.search(r"[.:]|^localhost$", first)) else None
        name = name if registry is not None else rest
        if "@" in name:
            name, _, tag = name.partition("@")
            name = re.sub(r":[\w.-]+$", "", name)
        else:
            name, _, tag = name.partition(":")
        return cls(image, registry, name, tag or "latest")

    @property
    def uri(self) -> str:
        """The URI for `enroot import`."""
        if _SCHEME.match(self.text):
            return self.text
        sign = "@" if self.tag.startswith("sha256:") else ":"
        return f"docker://{self.registry + '#' if self.registry else ''}{self.name}{sign}{self.tag}"

    @property
    def id(self) -> str:
        """16 hex digits, the same for all users."""
        return sha256(self.text.encode()).hexdigest()[:16]

    @property
    def stem(self) -> str:
        """The beginning of its files' names."""
        plain = re.sub(r"[^A-Za-z0-9]+", "_", _SCHEME.sub("", self.text)).strip("_")
        return f"{plain[:150]}-{self.id[:8]}"


def is_reference(image: str) -> bool:
    """Return True if an image is a Docker reference: not a `.sqsh` file, nor any other path."""
    return not image.endswith((".sqsh", ".squashfs")) and not image.startswith(("/", "./", "../", "~"))


def ensure_image(
    transport: Transport,
    slurm: Slurm,
    image: str,
    base: str,
    *,
    options: Sequence[str] = (),
    force: bool = False,
    say: Callable[[str], None] = print,
    poll: float = POLL_SECONDS,
) -> str:
    """Return the path of an image's `.sqsh` file on the cluster, imported if it is missing; paths stay as they are.

    A file is used while the registry's digest of the tag is still the imported one. If the registry does not answer, a
    tag that moved goes unnoticed, and `force` imports again. `options` are for sbatch. Raises ClusterError with the
    last lines of the import and a remedy.
    """
    if not is_reference(image):
        return image
    reference = ImageReference.parse(image)
    shelf = _Shelf(transport, f"{base.rstrip('/')}/containers", reference)
    version, squashed = shelf.read()
    digest = registry_digest(transport, reference)
    if (reason := _import_reason(shelf, squashed, digest, force=force)) is None:
        assert squashed is not None
        transport.run(["touch", "-c", "--", shelf.path(squashed)])  # it is in use, as `holdfast clean` sees
        return shelf.path(squashed)
    say(f"{image}: {reason}")
    sbatch = ["--nodes=1", "--ntasks=1", "--no-requeue", "--dependency=singleton", *options]
    job = _import(transport, slurm, shelf, sbatch, digest, version, say, poll)
    if not transport.exists(shelf.log(job[0])):  # it never began, for example on a node that could not start it
        job = _import(transport, slurm, shelf, sbatch, digest, version, say, poll)
    new_version, squashed = shelf.read()
    if squashed is None or new_version == version or (damage := shelf.damage(squashed)) is not None:
        raise _failed(transport, shelf, job, damage if squashed is not None and new_version != version else None)
    say(f"{image}: {shelf.path(squashed)}")
    return shelf.path(squashed)


def import_options(launch: Launch) -> list[str]:
    """Return the options of sbatch for imports: the profile's partition and time for building, or else for jobs."""
    execution, env = launch.execution, launch.env
    values = {
        "account": execution.account,
        "partition": env.build_partition or execution.partition,
        "time": env.build_time or execution.walltime,
        "gpus-per-node": (env.build_gpus_per_node or execution.gpus_per_node) if env.build_include_gpus else None,
    }
    return [f"--{name}={value}" for name, value in values.items() if value]


def _import_reason(shelf: _Shelf, squashed: Squashed | None, digest: str | None, *, force: bool) -> str | None:
    """Return why the image must be imported, or None."""
    if squashed is None:
        return "importing it with enroot in a job; this takes minutes, once"
    if force:
        return "importing it again, as asked"
    if (damage := shelf.damage(squashed)) is not None:
        return f"{shelf.path(squashed)} {damage}; importing it again"
    if digest is not None and squashed.digest is not None and digest != squashed.digest:
        return f"the tag has moved from {squashed.digest[:19]} to {digest[:19]}; importing it again"
    return None


class _Shelf:
    """The files of one image."""

    def __init__(self, transport: Transport, folder: str, reference: ImageReference) -> None:
        self.transport = transport
        self.folder = folder
        self.reference = reference
        self.note = f"{folder}/{reference.stem}.json"
        self.jobs = f"{folder}/.jobs/{reference.id}"

    def read(self) -> tuple[str, Squashed | None]:
        """Return the digest of the note, and its content, if it can be read."""
        try:
            data = self.transport.read(self.note)
        except FileNotFoundError:
            return "none", None
        try:
            return sha256(data).hexdigest(), msgspec.json.decode(data, type=Squashed)
        except msgspec.DecodeError:
            return sha256(data).hexdigest(), None

    def path(self, squashed: Squashed) -> str:
        """Return the path of the image."""
        return f"{self.folder}/{squashed.file}"

    def log(self, job: Job) -> str:
        """Return the path of an import's log."""
        return f"{self.jobs}/{job.id}.log"

    def damage(self, squashed: Squashed) -> str | None:
        """Return what is wrong with the size or the first bytes of the file, or None."""
        script = 'test -f "$1" || exit 4; stat -c %s -- "$1"; head -c 48 -- "$1" | od -An -v -t x1'
        answer = self.transport.run(["sh", "-c", script, "sh", self.path(squashed)])
        if answer.code != 0:
            return "is gone"
        size, *rows = answer.text.splitlines()
        head = bytes.fromhex("".join(rows).replace(" ", ""))
        if head[:4] != b"hsqs":
            return "is not a squashfs image"
        whole = int.from_bytes(head[40:48], "little")
        if int(size) != squashed.size or int(size) < whole:
            return f"is damaged: it has {int(size):,} bytes of {max(squashed.size, whole):,}"
        return None


# Every failure ends the job with a message in the log. `$seen` is the digest of the note at submission: if another
# import has run since, there is nothing left to do.
_SCRIPT: Final = r"""
set -eu
now=none; test ! -e "$note" || now=$(sha256sum <"$note" | cut -d' ' -f1)
if test "$now" != "$seen"; then echo "another import has done it"; exit 0; fi
command -v enroot >/dev/null || { echo "there is no enroot on $(hostname)" >&2; exit 127; }
umask 022
new=$folder/.importing-$stem-$SLURM_JOB_ID
find "$folder" -maxdepth 1 -name ".importing-$stem-*" -mmin +2880 -exec rm -f {} + || true
rm -f "$new"
trap 'rm -f "$new" "$new.json"' EXIT
trap 'exit 143' TERM INT
export ENROOT_RUNTIME_PATH="${ENROOT_RUNTIME_PATH:-${TMPDIR:-/tmp}/enroot-runtime-$(id -u)}"
enroot import --output "$new" "$uri" &
wait $! || { code=$?; echo "enroot ended with exit code $code" >&2; exit "$code"; }
size=$(stat -c %s -- "$new")
test "$(head -c 4 -- "$new")" = hsqs || { echo "what enroot made is no squashfs image" >&2; exit 65; }
whole=$(od -An -t u8 -j 40 -N 8 -- "$new" | tr -d ' ')
test "$size" -ge "$whole" || { echo "what enroot made is cut off: $size bytes of $whole" >&2; exit 65; }
if command -v unsquashfs >/dev/null; then unsquashfs -s "$new" >/dev/null; fi
sync -- "$new"
final=$stem.sqsh; number=1
while ! { test ! -e "$folder/$final" && mv -nT -- "$new" "$folder/$final" && test ! -e "$new"; }; do
    number=$((number + 1)); final=$stem-$number.sqsh
done
when=$(date -u +%Y-%m-%dT%H:%M:%SZ)
printf '{"image":%s,"file":"%s","size":%s,"digest":%s,"imported":"%s","enroot":"%s","job":"%s"}\n' \
    "$image_json" "$final" "$size" "$digest_json" "$when" "$(enroot version | head -n 1)" "$SLURM_JOB_ID" >"$new.json"
sync -- "$new.json"
mv -T -- "$new.json" "$note"
sync -- "$folder"
"""


def _import(
    transport: Transport,
    slurm: Slurm,
    shelf: _Shelf,
    options: Sequence[str],
    digest: str | None,
    version: str,
    say: Callable[[str], None],
    poll: float,
) -> tuple[Job, JobState | None]:
    """Submit the import and wait for its end. It continues if this process ends: the next command finds its result."""
    reference = shelf.reference
    values = {
        "image_json": msgspec.json.encode(reference.text).decode(),
        "digest_json": msgspec.json.encode(digest).decode(),
        "uri": reference.uri,
        "folder": shelf.folder,
        "stem": reference.stem,
        "note": shelf.note,
        "seen": version,
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    script = "\n".join(["#!/bin/sh", *lines]) + _SCRIPT
    transport.check(["mkdir", "-p", "--", shelf.jobs])
    name = JobName(reference.id, 0, "squash")
    output = f"--output={shelf.jobs}/%j.log"
    submitted = JobScript(name, script.encode(), options=[*options, output])
    job = Submitter(slurm, Ledger(transport, shelf.jobs)).submit(submitted)
    last = ""
    while True:
        states = [state for state in slurm.jobs(names=[str(name)]) if job.matches(state) and state.id == job.id]
        if not states or not states[0].active:
            return job, states[0] if states else None
        message = f"job {job.id} is {states[0].state}{': ' + states[0].why if states[0].why else ''}"
        if message != last:
            say(message)
            last = message
        time.sleep(poll)


_REMEDIES: Final = (
    (
        r"no enroot on|enroot: (command )?not found",
        "Auto-squash needs enroot on compute nodes: ask for it, choose another build_partition, or name a .sqsh file.",
    ),
    (
        r"\b40[13]\b|unauthori[sz]ed|denied|authentication",
        "The registry requires a login: `machine REGISTRY login USER password KEY` in ~/.config/enroot/.credentials.",
    ),
    (r"No space left|quota", "Make room in remote_job_dir, and in the nodes' $TMPDIR, in which layers are unpacked."),
    (r"\b404\b|manifest unknown|not found|No such image", "There is no such image, or no such tag: correct its name."),
    (
        r"resolve host|timed out|Connection refused|Network is unreachable",
        "The compute nodes do not reach the registry: choose a build_partition that does, or name a .sqsh file.",
    ),
)


def _failed(
    transport: Transport, shelf: _Shelf, ended: tuple[Job, JobState | None], damage: str | None
) -> ClusterError:
    job, state = ended
    log = shelf.log(job)
    try:
        text = transport.read(log).decode(errors="replace")
    except FileNotFoundError:
        text = ""
    tail = "".join(f"\n    {line}" for line in text.splitlines()[-_LOG_LINES:])
    remedy = next((words for pattern, words in _REMEDIES if re.search(pattern, text, re.IGNORECASE)), None)
    if state is not None and state.state == "timeout":
        remedy = "Its time was too short: write a longer build_time into the profile."
    how = "has vanished" if state is None else damage or f"ended: {state.state}"
    return ClusterError(
        f"{shelf.reference.text}: the import, job {job.id}, {how}; its log is {log}{tail}",
        remedy=remedy or "Correct what it says and run the same command again; incomplete files are never used.",
    )


def registry_digest(transport: Transport, reference: ImageReference) -> str | None:
    """Return the digest of the manifest that a tag names now, as seen from the cluster; None if unknown."""
    if reference.tag.startswith("sha256:"):
        return reference.tag
    scheme = _SCHEME.match(reference.text)
    if scheme and scheme[1] != "docker":
        return None
    registry = reference.registry or "docker.io"
    url = f"docker://{registry}/{reference.name}:{reference.tag}"
    answer = transport.run(["timeout", "20", "skopeo", "inspect", "--format", "{{.Digest}}", url], once=True)
    if answer.code == 0 and re.fullmatch(r"sha256:[0-9a-f]{64}", answer.text.strip()):
        return answer.text.strip()
    return _digest_over_http(transport, reference)


def _digest_over_http(transport: Transport, reference: ImageReference) -> str | None:
    """Ask a public registry over HTTP."""
    registry, name = reference.registry or "registry-1.docker.io", reference.name
    if reference.registry in (None, "docker.io"):
        registry, name = "registry-1.docker.io", name if "/" in name else f"library/{name}"
    local = re.match(r"(localhost|127\.[\d.]+)(:|$)", registry)
    url = f"{'http' if local else 'https'}://{registry}/v2/{name}/manifests/{reference.tag}"
    curl = ["curl", "-sS", "--max-time", "20", "-o", "/dev/null", "-D", "-", "--head", "-H", f"Accept: {_MANIFESTS}"]
    answer = transport.run([*curl, url], once=True).text
    challenge = re.search(r'^www-authenticate:\s*bearer realm="([^"]+)"(.*)$', answer, re.IGNORECASE | re.MULTILINE)
    if challenge is not None:
        more = dict(re.findall(r'(service|scope)="([^"]*)"', challenge[2]))
        fields = [word for key, value in more.items() for word in ("--data-urlencode", f"{key}={value}")]
        grant = transport.run(["curl", "-sS", "--max-time", "20", "--get", *fields, challenge[1]], once=True).stdout
        try:
            token = msgspec.json.decode(grant, type=dict[str, object]).get("token")
        except msgspec.DecodeError:
            return None
        # The token is public and short-lived, but still does not belong into the process list.
        header = f"Authorization: Bearer {token}\n".encode()
        answer = transport.run([*curl, "-H", "@-", url], input=header, once=True).text
    digest = re.search(r"^docker-content-digest:\s*(sha256:[0-9a-f]{64})\s*$", answer, re.IGNORECASE | re.MULTILINE)
    return digest[1] if digest else None
