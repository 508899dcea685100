"""Docker images as `.sqsh` files below `<base>/containers/`, made by `enroot import` in a job.

    <name>-<8 hex>.sqsh     the image; the digits are those of its reference, so two never have one name
    <name>-<8 hex>.json     which file is the image now, of which digest it was made, when and by what: `Squashed`
    .jobs/<16 hex>/         the ledger and the logs of its imports, whose jobs are `hf-<16 hex>.0.squash`

An image appears under its name when it is whole, synced and checked, and is never written again: one that is made anew
(`--force-squash`, a tag that moved, a damaged file) gets `-2`, `-3`, … and the old file stays for the jobs that use it.

No lock file can be left behind, because there is none: imports of one image by one user are jobs of one name with
`--dependency=singleton`, and one that finds its work done when its turn comes does nothing.
"""

from __future__ import annotations

import re
import shlex
import time
from hashlib import sha256
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.cluster.remote.ledger import Ledger, Submitter
from holdfast.cluster.remote.slurm import JobName
from holdfast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.cluster.config.launch import Launch
    from holdfast.cluster.remote.ledger import Job
    from holdfast.cluster.remote.slurm import JobState, Slurm
    from holdfast.cluster.remote.transport import Transport

POLL_SECONDS: Final = 2.0
_SCHEME: Final = re.compile(r"^(docker|dockerd|podman|docker-archive|oci-archive)://")
_MANIFESTS: Final = (
    "application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.oci.image.index.v1+json, "
    "application/vnd.docker.distribution.manifest.v2+json, application/vnd.oci.image.manifest.v1+json"
)
_LOG_LINES: Final = 15


class Squashed(msgspec.Struct, frozen=True):
    """What is known of an image that was imported."""

    image: str
    file: str
    """beside this"""
    size: int
    digest: str | None
    """of the registry's manifest when it was imported, where the registry said"""
    imported: str
    enroot: str
    job: str = ""
    """that made it: two of one second differ in it"""


class Reference(msgspec.Struct, frozen=True):
    """A Docker reference in its parts."""

    text: str
    """as it was written"""
    registry: str | None
    name: str
    tag: str
    """or a digest, which begins with sha256:"""

    @classmethod
    def parse(cls, image: str) -> Reference:
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
        """As `enroot import` wants it."""
        if _SCHEME.match(self.text):
            return self.text
        sign = "@" if self.tag.startswith("sha256:") else ":"
        return f"docker://{self.registry + '#' if self.registry else ''}{self.name}{sign}{self.tag}"

    @property
    def id(self) -> str:
        """16 hex digits, the same for everybody."""
        return sha256(self.text.encode()).hexdigest()[:16]

    @property
    def stem(self) -> str:
        """The beginning of its files' names."""
        plain = re.sub(r"[^A-Za-z0-9]+", "_", _SCHEME.sub("", self.text)).strip("_")
        return f"{plain[:150]}-{self.id[:8]}"


def is_reference(image: str) -> bool:
    """Whether an image is one to be squashed: not a `.sqsh` file, nor any other path."""
    return not image.endswith((".sqsh", ".squashfs")) and not image.startswith(("/", "./", "../", "~"))


def ensure_image(
    transport: Transport,
    slurm: Slurm,
    image: str,
    base: str,
    *,
    account: str | None = None,
    partition: str | None = None,
    time: str | None = None,
    options: Sequence[str] = (),
    launch: Launch | None = None,
    force: bool = False,
    say: Callable[[str], None] = print,
    poll: float = POLL_SECONDS,
) -> str:
    """The path of an image's `.sqsh` file on the cluster, imported where there is none; paths are left alone.

    What is there is used while the registry's digest of the tag is the one it was made of; where the registry does not
    say, a tag that moved goes unnoticed, and `force` imports again. `options` are further ones of sbatch. What is not
    given is as `launch` has it, in the partition and the time of its profile for building. Raises `ClusterError` with
    the import's last lines and a remedy.
    """
    if not is_reference(image):
        return image
    reference = Reference.parse(image)
    shelf = _Shelf(transport, f"{base.rstrip('/')}/containers", reference)
    seen, known = shelf.read()
    digest = registry_digest(transport, reference)
    if (reason := _reason(shelf, known, digest, force=force)) is None:
        assert known is not None
        return shelf.path(known)
    say(f"{image}: {reason}")
    if launch is not None:
        where, fields = launch.execution, launch.env
        account = account or where.account
        partition = partition or fields.build_partition or where.partition
        time = time or fields.build_time or where.walltime
        if fields.build_include_gpus and (gpus := fields.build_gpus_per_node or where.gpus_per_node):
            options = [*options, f"--gpus-per-node={gpus}"]
    sbatch = [
        *(
            f"--{key}={value}"
            for key, value in (("account", account), ("partition", partition), ("time", time))
            if value
        ),
        *("--nodes=1", "--ntasks=1", "--no-requeue", "--dependency=singleton", *options),
    ]
    job = _import(transport, slurm, shelf, sbatch, digest, seen, say, poll)
    if not transport.exists(shelf.log(job[0])):  # it never began: a node that could not start it, say
        job = _import(transport, slurm, shelf, sbatch, digest, seen, say, poll)
    now, made = shelf.read()
    if made is None or now == seen or (damage := shelf.damage(made)) is not None:
        raise _failed(transport, shelf, job, damage if made is not None and now != seen else None)
    say(f"{image}: {shelf.path(made)}")
    return shelf.path(made)


def _reason(shelf: _Shelf, known: Squashed | None, digest: str | None, *, force: bool) -> str | None:
    """Why it must be imported; None where what is there will do."""
    if known is None:
        return "importing it with enroot in a job; this takes minutes, once"
    if force:
        return "importing it again, as asked"
    if (damage := shelf.damage(known)) is not None:
        return f"{shelf.path(known)} {damage}; importing it again"
    if digest is not None and known.digest is not None and digest != known.digest:
        return f"the tag has moved from {known.digest[:19]} to {digest[:19]}; importing it again"
    return None


class _Shelf:
    """Where one image's files are."""

    def __init__(self, transport: Transport, folder: str, reference: Reference) -> None:
        self.transport = transport
        self.folder = folder
        self.reference = reference
        self.note = f"{folder}/{reference.stem}.json"
        self.jobs = f"{folder}/.jobs/{reference.id}"

    def read(self) -> tuple[str, Squashed | None]:
        """The digest of the note, and what it says; one that cannot be read says nothing."""
        try:
            data = self.transport.read(self.note)
        except FileNotFoundError:
            return "none", None
        try:
            return sha256(data).hexdigest(), msgspec.json.decode(data, type=Squashed)
        except msgspec.DecodeError:
            return sha256(data).hexdigest(), None

    def path(self, known: Squashed) -> str:
        """The image."""
        return f"{self.folder}/{known.file}"

    def log(self, job: Job) -> str:
        """What an import said."""
        return f"{self.jobs}/{job.id}.log"

    def damage(self, known: Squashed) -> str | None:
        """What is wrong with the file, as far as its size and its first bytes tell."""
        script = 'test -f "$1" || exit 4; stat -c %s -- "$1"; head -c 48 -- "$1" | od -An -v -t x1'
        done = self.transport.run(["sh", "-c", script, "sh", self.path(known)])
        if done.code != 0:
            return "is gone"
        size, *rows = done.text.splitlines()
        head = bytes.fromhex("".join(rows).replace(" ", ""))
        if head[:4] != b"hsqs":
            return "is no squashfs image"
        whole = int.from_bytes(head[40:48], "little")
        if int(size) != known.size or int(size) < whole:
            return f"is damaged: it has {int(size):,} bytes of {max(known.size, whole):,}"
        return None


# Everything that can go wrong ends the job with its own words in the log. `$seen` is the note when this import was
# asked for: when another one has run in between, its work is ours.
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
    seen: str,
    say: Callable[[str], None],
    poll: float,
) -> tuple[Job, JobState | None]:
    """Submit the import and wait for its end. Our going away ends nothing: the next command finds what it made."""
    reference = shelf.reference
    values = {
        "image_json": msgspec.json.encode(reference.text).decode(),
        "digest_json": msgspec.json.encode(digest).decode(),
        "uri": reference.uri,
        "folder": shelf.folder,
        "stem": reference.stem,
        "note": shelf.note,
        "seen": seen,
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    script = "\n".join(["#!/bin/sh", *lines]) + _SCRIPT
    transport.check(["mkdir", "-p", "--", shelf.jobs])
    name = JobName(reference.id, 0, "squash")
    output = f"--output={shelf.jobs}/%j.log"
    job = Submitter(slurm, Ledger(transport, shelf.jobs)).submit(name, script.encode(), options=[*options, output])
    said = ""
    while True:
        found = [state for state in slurm.jobs(names=[str(name)]) if job.is_seen_in(state) and state.id == job.id]
        if not found or not found[0].active:
            return job, found[0] if found else None
        now = f"job {job.id} is {found[0].state}{': ' + found[0].why if found[0].why else ''}"
        if now != said:
            say(now)
            said = now
        time.sleep(poll)


_REMEDIES: Final = (
    (
        r"no enroot on|enroot: (command )?not found",
        "Auto-squash needs enroot on compute nodes: ask for it, choose another build_partition, or name a .sqsh file.",
    ),
    (
        r"\b40[13]\b|unauthori[sz]ed|denied|authentication",
        "The registry wants a login: `machine REGISTRY login USER password KEY` in ~/.config/enroot/.credentials.",
    ),
    (r"No space left|quota", "Make room in remote_job_dir, and in the nodes' $TMPDIR, where layers are unpacked."),
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


def registry_digest(transport: Transport, reference: Reference) -> str | None:
    """The digest of the manifest that a tag names now, asked from the cluster; None where nobody can say."""
    if reference.tag.startswith("sha256:"):
        return reference.tag
    scheme = _SCHEME.match(reference.text)
    if scheme and scheme[1] != "docker":
        return None
    registry = reference.registry or "docker.io"
    asked = f"docker://{registry}/{reference.name}:{reference.tag}"
    done = transport.run(["timeout", "20", "skopeo", "inspect", "--format", "{{.Digest}}", asked], once=True)
    if done.code == 0 and re.fullmatch(r"sha256:[0-9a-f]{64}", done.text.strip()):
        return done.text.strip()
    return _asked_over_http(transport, reference)


def _asked_over_http(transport: Transport, reference: Reference) -> str | None:
    """The same by HTTP, as anybody may ask a public registry."""
    registry, name = reference.registry or "registry-1.docker.io", reference.name
    if reference.registry in (None, "docker.io"):
        registry, name = "registry-1.docker.io", name if "/" in name else f"library/{name}"
    local = re.match(r"(localhost|127\.[\d.]+)(:|$)", registry)
    url = f"{'http' if local else 'https'}://{registry}/v2/{name}/manifests/{reference.tag}"
    curl = ["curl", "-sS", "--max-time", "20", "-o", "/dev/null", "-D", "-", "--head", "-H", f"Accept: {_MANIFESTS}"]
    answer = transport.run([*curl, url], once=True).text
    wanted = re.search(r'^www-authenticate:\s*bearer realm="([^"]+)"(.*)$', answer, re.IGNORECASE | re.MULTILINE)
    if wanted is not None:
        more = dict(re.findall(r'(service|scope)="([^"]*)"', wanted[2]))
        fields = [word for key, value in more.items() for word in ("--data-urlencode", f"{key}={value}")]
        got = transport.run(["curl", "-sS", "--max-time", "20", "--get", *fields, wanted[1]], once=True).stdout
        try:
            token = msgspec.json.decode(got, type=dict[str, object]).get("token")
        except msgspec.DecodeError:
            return None
        # For anybody, and good for minutes; all the same nothing that belongs into a list of processes.
        header = f"Authorization: Bearer {token}\n".encode()
        answer = transport.run([*curl, "-H", "@-", url], input=header, once=True).text
    found = re.search(r"^docker-content-digest:\s*(sha256:[0-9a-f]{64})\s*$", answer, re.IGNORECASE | re.MULTILINE)
    return found[1] if found else None
