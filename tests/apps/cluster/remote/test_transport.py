"""Programs and files on a cluster, directly and over a real ssh server: what arrives is what was sent, or nothing."""

from __future__ import annotations

import io
import os
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.apps.cluster.remote import install, trees
from holdfast.apps.cluster.remote import transport as module
from holdfast.apps.cluster.remote.transport import Completed, Here, Ssh, Transport
from holdfast.apps.cluster.remote.trees import SourceFile
from holdfast.errors import ClusterError, Unreachable, UsageError
from tests.support.breaking import needs_root, small_disk

if TYPE_CHECKING:
    from tests.support.slurm import Cluster

HOSTILE = [
    "two words",
    "",
    "'single' \"double\"",
    "$HOME `id` $(id) ${x}",
    "a\nb\n",
    "back\\slash \\n \\",
    "!history !!",
    "*?[a]{b,c}~",
    "; rm -rf / & | > < #",
    "--help",
    "ünïcödé 漢字",
    "\ttab",
]


@needs_root
def test_a_full_disk_is_one_line_with_a_remedy(transport: Transport, tmp_path: Path) -> None:
    files = {f"f{number}": SourceFile(b"x" * 30_000) for number in range(19)}
    with small_disk(tmp_path / "small", "256k"):
        with pytest.raises(ClusterError, match="No space left on device") as caught:
            transport.put(files, str(tmp_path / "small" / "there"))
        assert not list((tmp_path / "small").rglob("f*")), "nothing half is left"
    assert "\n" not in caught.value.message and "`holdfast clean PROFILE`" in str(caught.value.remedy)


@pytest.mark.parametrize("names", [("-oProxyCommand=touch owned", None), ("host", "-l")])
def test_an_option_of_ssh_is_neither_a_host_nor_a_user(names: tuple[str, str | None]) -> None:
    with pytest.raises(UsageError, match="not the name of a"):
        Ssh(names[0], user=names[1])


def test_a_long_installation_reports_that_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of these names stand for Pythons of which the first takes long and none is suitable."""
    programs, go = tmp_path / "bin", tmp_path / "go"
    programs.mkdir()
    for name in ("python3", *(f"python3.{minor}" for minor in (11, 12, 13, 14)), "uv"):
        wait = f"until test -e {go}; do sleep 0.05; done\n" if name == "python3.13" else ""
        (programs / name).write_text(f"#!/bin/sh\n{wait}exit 1\n")
        (programs / name).chmod(0o755)
    monkeypatch.setattr(install, "_REPORT_SECONDS", 0.05)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if "still installing" in line:
            go.touch()

    here = Here(env={"PATH": f"{programs}:{os.environ['PATH']}"}, pauses=())
    with pytest.raises(ClusterError, match="could not be installed"):
        install.ensure_python(here, str(tmp_path), say=say)
    assert lines[0].startswith("note: installing Holdfast") and "still installing" in lines[1]


@pytest.fixture
def seen(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int]]:
    """Record what was sent over the transport: arguments, and the number of bytes of the input."""
    calls: list[tuple[list[str], int]] = []
    real = transport._try

    def counting(argv: Any, source: Any, timeout: float) -> Completed:
        size = source.seek(0, io.SEEK_END)
        source.seek(0)
        calls.append((list(argv), size))
        return real(argv, source, timeout)

    monkeypatch.setattr(transport, "_try", counting)
    return calls


def test_only_the_owner_can_change_what_arrives(transport: Transport, tmp_path: Path) -> None:
    shared = tmp_path / "script.sh"
    shared.write_text("exit\n")
    shared.chmod(0o775)
    previous = os.umask(0o002)
    try:
        arrived = Path(transport.put({"a/script.sh": SourceFile(shared)}, str(tmp_path / "new" / "bundles")))
        transport.append(str(arrived.parent / "jobs" / "log"), b"a line\n")
    finally:
        os.umask(previous)
    places = [arrived, arrived / "a", arrived / "a" / "script.sh", arrived.parent, arrived.parent / "jobs"]
    assert [oct(place.stat().st_mode & 0o022) for place in places] == ["0o0"] * 5
    assert (arrived / "a" / "script.sh").stat().st_mode & 0o755 == 0o755


def test_arguments_and_input_arrive_unchanged(transport: Transport) -> None:
    show = 'import sys; sys.stdout.buffer.write(repr((sys.argv[1:], sys.stdin.read())).encode("utf-8"))'
    for arguments in (HOSTILE, [""], ["plain"], []):
        done = transport.run(["python3", "-c", show, *arguments], input=b"the input\n")
        assert (done.code, done.text) == (0, repr((arguments, "the input\n"))), done.stderr


def test_bytes_are_returned_unchanged(transport: Transport) -> None:
    data = bytes(range(256)) * 4096
    assert transport.run(["cat"], input=data).stdout == data


@pytest.mark.parametrize(("code", "expected"), [(0, {0}), (3, {3}), (127, {127}), (255, {254, 255})])
def test_a_programs_exit_code_is_not_taken_for_the_connections(
    transport: Transport, code: int, expected: set[int]
) -> None:
    done = transport.run(["sh", "-c", f"echo out; echo err >&2; exit {code}"])
    assert done.code in expected
    assert (done.text, done.stderr) == ("out\n", "err\n")


def test_a_missing_program_has_its_own_exit_code(transport: Transport) -> None:
    assert transport.run(["no-such-program"]).code == 127
    with pytest.raises(ClusterError, match="no-such-program"):
        transport.check(["no-such-program"])


def test_a_program_that_does_not_end_is_unknown(transport: Transport) -> None:
    with pytest.raises(Unreachable, match="no answer within"):
        transport.run(["sleep", "60"], timeout=1)


def test_files_arrive_with_names_contents_and_modes(transport: Transport, tmp_path: Path) -> None:
    (tmp_path / "run me").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "run me").chmod(0o755)
    files = {
        "bin/run it": SourceFile(tmp_path / "run me"),
        "secret": SourceFile(b"token", 0o600),
        "deep/er/data.bin": SourceFile(bytes(range(256))),
        "x" * 200: SourceFile(b"a long name"),
    }
    place = transport.put(files, str(tmp_path / "on the cluster" / "code"))
    assert transport.run([f"{place}/bin/run it"]).text == "ran\n"
    modes = transport.run(["stat", "-c", "%a", f"{place}/secret", f"{place}/bin/run it"]).text.split()
    assert modes == ["600", "755"]
    assert transport.read(f"{place}/deep/er/data.bin") == bytes(range(256))
    assert transport.read(f"{place}/{'x' * 200}") == b"a long name"


def test_files_that_are_there_are_not_sent_again(
    transport: Transport, tmp_path: Path, seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[int] = []
    pack = trees.pack_trees
    monkeypatch.setattr(
        trees, "pack_trees", lambda sent, archive: packed.extend(map(len, sent.values())) or pack(sent, archive)
    )
    files = {"wheel": SourceFile(b"w" * 300_000), "secret": SourceFile(b"geheim", 0o600)}
    first = transport.put(files, str(tmp_path))
    assert packed == [2]
    assert transport.put(dict(reversed(files.items())), str(tmp_path)) == first
    assert packed == [2]
    assert transport.put({**files, "secret": SourceFile(b"geheim", 0o640)}, str(tmp_path)) != first
    assert "geheim" not in str([argv for argv, _ in seen])


def test_a_bundle_that_lost_a_file_is_sent_again(transport: Transport, tmp_path: Path) -> None:
    files = {"a": SourceFile(b"a"), "b": SourceFile(b"b")}
    place = transport.put(files, str(tmp_path / "code"))
    transport.check(["rm", f"{place}/a"])
    assert transport.put(files, str(tmp_path / "code")) == place
    assert transport.read(f"{place}/a") == b"a"
    assert [path.name for path in (tmp_path / "code").iterdir()] == [place.rsplit("/", 1)[1]]


def test_a_transfer_that_breaks_off_between_two_files_leaves_nothing(
    transport: Transport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trees.pack_trees

    def broken(files: Any, archive: Any) -> None:
        packed = io.BytesIO()
        whole(files, packed)
        archive.write(packed.getvalue()[:1024])  # header and content of the first file

    monkeypatch.setattr(trees, "pack_trees", broken)
    with pytest.raises(ClusterError):
        transport.put({"a": SourceFile(b"a"), "b": SourceFile(b"b")}, str(tmp_path / "code"))
    assert list((tmp_path / "code").iterdir()) == []


def test_two_who_send_the_same_at_once_both_get_it(slurm: Cluster, tmp_path: Path) -> None:
    files = {f"file {number}": SourceFile(b"x" * 10_000) for number in range(50)}
    places: list[str] = []
    threads = [
        threading.Thread(target=lambda: places.append(slurm.here.put(files, str(tmp_path / "code")))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(places) == 4
    assert [str(path) for path in (tmp_path / "code").iterdir()] == list(set(places))


@pytest.mark.parametrize("name", ["/etc/passwd", "../out", "a/../../out", ""])
def test_no_file_is_put_outside_its_directory(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the name"):
        Here().put({name: SourceFile(b"")}, str(tmp_path))


def test_a_file_is_read_from_an_offset(transport: Transport, tmp_path: Path) -> None:
    path = tmp_path / "a log"
    path.write_bytes(b"first\nsecond\n")
    assert transport.read(str(path)) == b"first\nsecond\n"
    assert transport.read(str(path), 6) == b"second\n"
    assert transport.read(str(path), 6, 3) == b"sec"
    assert transport.read(str(path), 13) == b""
    assert transport.read(str(path), 99) == b""
    assert transport.exists(str(path))
    assert not transport.exists(str(tmp_path / "no log"))
    with pytest.raises(FileNotFoundError):
        transport.read(str(tmp_path / "no log"))


def test_appended_lines_stay_lines_after_a_torn_one(transport: Transport, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "journal.jsonl"
    transport.append(str(path), b"one\n")
    transport.append(str(path), b"two\nthree\n")
    assert path.read_bytes() == b"one\ntwo\nthree\n"
    path.write_bytes(b"one\ntw")
    transport.append(str(path), b"four\n")
    assert path.read_bytes() == b"one\ntw\nfour\n"


def test_an_ssh_server_that_is_down_is_unreachable_until_it_is_back(own_sshd: Cluster) -> None:
    ssh = own_sshd.ssh()
    assert ssh.run(["echo", "here"]).text == "here\n"
    own_sshd.script("sshd-down")
    with pytest.raises(Unreachable, match=r"(?i)refused|closed|reset") as caught:
        ssh.run(["echo", "gone"])
    assert "ssh cluster true" in str(caught.value)
    own_sshd.script("sshd-up")
    assert ssh.run(["echo", "back"]).text == "back\n"


def test_a_short_outage_is_waited_for_except_for_commands_that_run_once(own_sshd: Cluster, tmp_path: Path) -> None:
    own_sshd.script("sshd-down")
    patient = Ssh("cluster", config=own_sshd.ssh_config, pauses=(0.2,) * 100)
    with pytest.raises(Unreachable):
        patient.run(["touch", str(tmp_path / "once")], once=True)
    later = threading.Timer(1, own_sshd.script, ["sshd-up"])
    later.start()
    assert patient.run(["cat"], input=b"still whole").stdout == b"still whole"
    later.join()
    assert not (tmp_path / "once").exists()


def test_a_refused_login_is_reported_at_once(sshd: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(module.time, "sleep", pauses.append)  # type: ignore[attr-defined]
    with pytest.raises(Unreachable, match="Permission denied") as caught:
        Ssh("cluster", user="nobody", config=sshd.ssh_config, pauses=(60,)).run(["true"])
    assert "without a password prompt" in str(caught.value) and 60 not in pauses


def test_the_users_ssh_configuration_wins_over_our_defaults(sshd: Cluster, tmp_path: Path) -> None:
    def effective(ssh: Ssh) -> dict[str, str]:
        shown = subprocess.run(["ssh", *ssh._options, "-G", ssh._host], capture_output=True, text=True, check=True)
        return dict(line.split(" ", 1) for line in shown.stdout.splitlines() if " " in line)

    ours = effective(sshd.ssh())
    assert (ours["controlmaster"], ours["controlpersist"], ours["batchmode"]) == ("auto", "60", "yes")
    folder = sshd.ssh()._config.parent
    assert ours["controlpath"].startswith(f"{folder}/")
    assert folder.stat().st_mode & 0o777 == 0o700

    config = tmp_path / "config"
    config.write_text(f"Host cluster\n  ControlPath {tmp_path}/%n\n  ControlPersist 5\n  ConnectTimeout 7\n")
    config.write_text(config.read_text() + sshd.ssh_config.read_text())
    ssh = Ssh("cluster", config=config)
    theirs = effective(ssh)
    assert theirs["controlpath"].startswith(str(tmp_path))
    assert (theirs["controlpersist"], theirs["connecttimeout"]) == ("5", "7")
    assert ssh.run(["echo", "works"]).text == "works\n"
    subprocess.run(["ssh", *ssh._options, "-O", "exit", "cluster"], capture_output=True, check=True)  # ours to end here


@pytest.mark.parametrize("shell", ["sh", "bash", "tcsh", "zsh", "fish"])
def test_the_command_line_means_the_same_to_every_login_shell(shell: str) -> None:
    line = module._for_any_shell(["printf", "%s|", *HOSTILE])
    try:
        done = subprocess.run([shell, "-c", line], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"no {shell} here")
    assert done.stdout == "".join(f"{argument}|" for argument in HOSTILE)
