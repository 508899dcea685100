"""Workspaces: a folder for each trial, kept by content after each turn, and given back as it was."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.store.blobs import Blobs, Files, Ignored, Snapshots, follow, restore
from tests.support.breaking import assert_same_numbers, kept
from tests.support.lab import Lab
from tests.support.running import Server, lines, module_server, run_dir

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


provider = module_server(tool_calls=1)


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workspaces are in the temporary folder; when all is over nothing is left of them."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield
    assert list(folder.glob("holdfast-*/*")) == []


@pytest.fixture
def lab(tmp_path: Path, provider: Server) -> Lab:
    provider.reset()
    return Lab(
        tmp_path / "lab", provider, rows=[{"id": "a", "question": "one", "expected": "x"}], spec={"workspace": {}}
    )


def contents(run: Path, files: dict[str, str]) -> dict[str, bytes]:
    """A kept workspace, read back."""
    blobs = Blobs(run / "files")
    return {name: blobs.read(digest) for name, digest in files.items() if digest}


def use(lab: Lab, source: str, **keys: Any) -> None:
    (lab.folder / "agent.py").write_text(source)
    lab.spec["target"] = {
        "python": "agent.py:reply",
        "base_url": lab.provider.base_url,
        "params": {"model": "m"},
        **keys,
    }


DIARY = """
def reply(prompt, context):
    diary = context.workspace / "notes" / "diary.txt"
    diary.parent.mkdir(exist_ok=True)
    with diary.open("a") as file:
        file.write(prompt + "\\n")
    said = context.model(f"{prompt} in {context.workspace}: " + diary.read_text().replace("\\n", ", "))
    with diary.open("a") as file:
        file.write(said.text[:3] + "\\n")
    return diary.read_text()
"""


def test_the_workspace_is_saved_after_each_turn(lab: Lab) -> None:
    use(lab, DIARY)
    lab.spec["follow_ups"] = ["two", "six"]
    (output,) = kept(lab.eval().run)
    pages = [contents(run_dir(lab.folder), mark["files"]) for mark in output["marks"]]
    assert pages == [
        {"notes/diary.txt": b"one\none\n"},
        {"notes/diary.txt": b"one\none\ntwo\ntwo\n"},
        {"notes/diary.txt": b"one\none\ntwo\ntwo\nsix\nsix\n"},
    ]
    assert output["files"] == output["marks"][-1]["files"]


def test_two_runs_of_one_eval_have_separate_workspaces(lab: Lab, tmp_path: Path) -> None:
    use(lab, "def reply(prompt, context):\n    return str(context.workspace)\n")
    first = kept(lab.eval().run)[0]["output"]
    second = kept(lab.eval("--runs-dir", str(tmp_path / "others"), "--fresh").run)[0]["output"]
    assert first != second and str(tmp_path / "temporary") in first


TOOLS = '''
import os, signal

def write(text: str, context) -> str:
    """Write."""
    with (context.workspace / "log.txt").open("a") as file:
        file.write(text + "\\n")
    return f"{len((context.workspace / 'log.txt').read_text().splitlines())} lines"
'''


@pytest.mark.faults
def test_files_written_by_tools_are_restored_with_the_recorded_calls(lab: Lab, tmp_path: Path) -> None:
    def prepared(name: str) -> Lab:
        copy = Lab(tmp_path / name, lab.provider, rows=lab.rows, spec={"workspace": {}, "follow_ups": ["two", "six"]})
        (copy.folder / "tools.py").write_text(TOOLS)
        copy.spec["target"] = {
            "model": "m",
            "base_url": lab.provider.base_url,
            "tools": [{"python": "tools.py:write"}],
        }
        return copy

    calm = prepared("calm").eval().run
    killed = prepared("killed")
    assert killed.many_lives() == 3 * (2 + 1 + 1) - 1
    run = run_dir(killed.folder)
    assert_same_numbers(run, calm)
    (output,), (unbroken,) = kept(run), kept(calm)
    assert output["messages"] == unbroken["messages"] and output["files"] == unbroken["files"]
    assert contents(run, output["files"]) == {"log.txt": b"one 0\ntwo 0\nsix 0\n"}


def test_a_retried_turn_starts_with_the_files_of_its_first_attempt(lab: Lab) -> None:
    use(
        lab,
        "from pathlib import Path\n"
        "failed = Path(__file__).with_name('failed')\n"
        "def reply(prompt, context):\n"
        "    with (context.workspace / 'log.txt').open('a') as file:\n"
        "        file.write(prompt + '\\n')\n"
        "    if prompt == 'two' and not failed.exists():\n"
        "        failed.touch()\n"
        "        (context.workspace / 'rubbish').mkdir()\n"
        "        (context.workspace / 'rubbish' / 'x').write_text('x')\n"
        "        raise RuntimeError('stumbled')\n"
        "    return 'done'\n",
    )
    lab.spec["follow_ups"] = ["two"]
    (output,) = kept(lab.eval().run)
    assert contents(run_dir(lab.folder), output["files"]) == {"log.txt": b"one\ntwo\n"}


@pytest.mark.faults
def test_a_restarted_trial_starts_with_the_files_of_the_eval(lab: Lab) -> None:
    (lab.folder / "tools.py").write_text(
        TOOLS + "    \n\ndef pay(text: str, context) -> str:\n"
        '    """Pay."""\n'
        "    if text.startswith('two') and os.environ.get('DIE'):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return write(text, context)\n"
    )
    lab.spec |= {
        "follow_ups": ["two"],
        "target": {
            "model": "m",
            "base_url": lab.provider.base_url,
            "tools": [{"python": "tools.py:pay", "replay": "never", "on_cut_off": "restart"}],
        },
    }
    lab.eval(env={"DIE": "1"}, check=-9)
    done = lab.eval()
    assert "starts from scratch" in done.err
    assert contents(done.run, kept(done.run)[0]["files"]) == {"log.txt": b"one 0\ntwo 0\n"}


def test_a_workspace_starts_with_the_evals_folder_and_the_rows_files(lab: Lab) -> None:
    start = lab.folder / "start"
    (start / "bin").mkdir(parents=True)
    (start / "bin" / "go.sh").write_text("echo went\n")
    (start / "bin" / "go.sh").chmod(0o755)
    (start / "common.txt").write_text("common")
    lab.rows = [
        {"id": "a", "question": "q", "expected": "x", "files": {"deep/own.txt": "ünique", "common.txt": "mine"}},
        {"id": "b", "question": "q", "expected": "x", "files": {"image.bin": {"base64": "AAEC/w=="}}},
    ]
    lab.spec |= {
        "workspace": {"folder": "start", "files": "files"},
        "target": {"command": ["sh", "-c", "find . -type f | sort; cat common.txt > copy; ./bin/go.sh"]},
    }
    run = lab.eval().run
    seen = {output["sample"]: contents(run, output["files"]) for output in kept(run)}
    assert seen["a"] == {
        "bin/go.sh": b"echo went\n",
        "common.txt": b"mine",
        "copy": b"mine",
        "deep/own.txt": "ünique".encode(),
    }
    assert seen["b"]["image.bin"] == b"\x00\x01\x02\xff"
    listed = {output["sample"]: output["output"].split() for output in kept(run)}
    assert listed["b"] == ["./bin/go.sh", "./common.txt", "./image.bin", "went"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"../outside": "x"}, "is outside the workspace"),
        ({"/tmp/outside": "x"}, "is outside the workspace"),
        ({"a/../../outside": "x"}, "is outside the workspace"),
        (["a"], "not a map of paths to contents"),
        ({"a": 7}, "a file's content is a text"),
        ({"a": {"base64": "!"}}, "cannot make the workspace"),
        ({".": "x"}, "is not a file in it"),
        ({"": "x"}, "is not a file in it"),
        ({"a": "x", "a/b": "y"}, "workspace cannot be restored"),
    ],
)
def test_invalid_files_of_a_row_are_errors_of_its_trials_only(
    lab: Lab, tmp_path: Path, files: Any, message: str
) -> None:
    lab.rows = [
        {"id": "a", "question": "q", "expected": "x", "files": files},
        {"id": "b", "question": "q", "expected": "x", "files": {"fine": ""}},
    ]
    lab.spec |= {"workspace": {"files": "files"}, "target": {"command": ["ls"]}}
    done = lab.eval(check=3)
    assert [output["sample"] for output in kept(done.run)] == ["b"]
    (error,) = lines(done.run / "errors.jsonl")
    assert error["sample"] == "a" and message in error["message"] and "internal" not in done.err
    assert not list(tmp_path.rglob("outside"))


def test_a_changed_file_of_the_folder_reruns_everything_with_the_reason(lab: Lab) -> None:
    (lab.folder / "start").mkdir()
    (lab.folder / "start" / "data.txt").write_text("1")
    lab.spec |= {"workspace": {"folder": "start"}, "target": {"command": ["cat", "data.txt"]}}
    first = lab.eval()
    assert lab.plan()["to_run"] == 0
    (lab.folder / "start" / "data.txt").write_text("2")
    plan = lab.plan()
    assert plan["to_run"] == 1 and "workspace" in json.dumps(plan)
    second = lab.eval()
    assert second.run != first.run and kept(second.run)[0]["output"] == "2"


def test_workspaces_are_reused_with_their_outputs(lab: Lab) -> None:
    use(lab, DIARY)
    first = lab.eval()
    lab.spec["trials"] = 2
    lab.provider.reset()
    second = lab.eval()
    assert second.run != first.run
    outputs = {output["trial"]: output for output in kept(second.run)}
    assert "source" in outputs[1] and "source" not in outputs[2]
    for output in outputs.values():
        assert contents(second.run, output["files"])["notes/diary.txt"].startswith(b"one\n")


def test_equal_files_of_many_trials_are_stored_once(lab: Lab) -> None:
    lab.rows = [{"id": str(number), "question": f"q{number}", "expected": "x"} for number in range(10)]
    lab.spec["target"] = {"command": ["sh", "-c", "printf same > a; printf same > b"]}
    run = lab.eval().run
    assert len([path for path in (run / "files").rglob("*") if path.is_file()]) == 1
    assert all(set(output["files"]) == {"a", "b"} for output in kept(run))


LINKS = """
if [ "$HOLDFAST_TURN" = 2 ]; then
    find . -type l | sort | while read -r link; do echo "$link $(readlink "$link")"; done
    exit
fi
mkdir -p lib .bin; echo real > lib/real
printf '#!/bin/sh\necho "ran $(cat lib64/real)"\n' > lib/tool; chmod +x lib/tool
ln -s ../lib/tool .bin/tool; ln -s lib lib64; ln -s nowhere dangling; ln -s "$PWD/lib/real" own
ln -s {secret} secret; ln -s {folder} folder; mkfifo pipe
"""


def test_links_survive_turns_and_grading_and_are_never_followed_outside(lab: Lab) -> None:
    (lab.folder / "secret.txt").write_text("secret")
    script = LINKS.format(secret=lab.folder / "secret.txt", folder=lab.folder)
    there = [".bin/tool", "lib64", "dangling", "own", "secret", "folder", "lib64/real"]
    content = [{"path": path, "must_match": ["real"]} for path in ("lib64/real", "own")]
    lab.spec |= {
        "target": {"command": ["sh", "-c", script]},
        "follow_ups": ["again"],
        "graders": [
            {"type": "program", "name": "ran", "command": "sh", "args": ["-c", ".bin/tool && grep -q real own"]},
            {"type": "file", "name": "seen", "must_exist": there, "content_patterns": content},
            {"type": "file", "name": "forbidden", "must_not_exist": ["folder"]},
            {"type": "file", "name": "outside", "content_patterns": [{"path": "secret", "must_match": ["secret"]}]},
            {"type": "file", "name": "beyond", "must_exist": ["folder/secret.txt"]},
        ],
    }
    run = lab.eval().run
    (output,) = kept(run)
    assert output["files"] == {
        ".bin/tool": "link:../lib/tool",
        "dangling": "link:nowhere",
        "folder": f"link:{lab.folder}",
        "lib/real": output["files"]["lib/real"],
        "lib/tool": output["files"]["lib/tool"],
        "lib64": "link:lib",
        "own": "link:lib/real",
        "secret": f"link:{lab.folder / 'secret.txt'}",
    }
    listed = dict(line.split(" ") for line in output["output"].splitlines())
    assert listed["./lib64"] == "lib" and listed["./own"].startswith("/") and len(listed) == 6, "as the agent left them"
    scores = {grade["grader"]: grade["score"] for grade in kept(run, "grades")}
    assert scores == {"ran": 1, "seen": 1, "forbidden": 0, "outside": 0, "beyond": 0}
    assert b"secret" not in b"".join(path.read_bytes() for path in (run / "files").rglob("*") if path.is_file())


def test_links_of_the_folder_that_a_workspace_starts_with_are_there_and_in_the_key(lab: Lab) -> None:
    (lab.folder / "start").mkdir()
    (lab.folder / "start" / "tool").write_text("x")
    (lab.folder / "start" / "link").symlink_to("tool")
    lab.spec |= {"workspace": {"folder": "start"}, "target": {"command": ["readlink", "link"]}}
    assert kept(lab.eval().run)[0]["output"] == "tool"
    (lab.folder / "start" / "link").unlink()
    (lab.folder / "start" / "link").symlink_to("other")
    assert lab.plan()["to_run"] == 1


def test_a_workspace_made_a_link_by_its_agent_is_not_followed(lab: Lab) -> None:
    (lab.folder / "treasure").mkdir()
    (lab.folder / "treasure" / "gold").write_text("gold")
    use(
        lab,
        "import os, shutil\n"
        "def reply(context):\n"
        "    shutil.rmtree(context.workspace)\n"
        "    os.symlink(os.path.join(os.path.dirname(__file__), 'treasure'), context.workspace)\n"
        "    return 'done'\n",
    )
    done = lab.eval(check=3)
    (error,) = lines(done.run / "errors.jsonl")
    assert "replaced by a symbolic link" in error["message"] and error["kind"] == "agent"
    assert (lab.folder / "treasure" / "gold").read_text() == "gold"


def test_a_file_name_that_is_not_text_is_an_error_of_its_trial(lab: Lab) -> None:
    use(
        lab,
        "import os\n"
        "def reply(prompt, context):\n"
        "    name = b'\\xff' if prompt == 'one' else b'fine'\n"
        "    open(os.path.join(os.fsencode(context.workspace), name), 'w').close()\n"
        "    return 'done'\n",
    )
    lab.rows.append({"id": "b", "question": "two", "expected": "x"})
    done = lab.eval(check=3)
    assert [output["sample"] for output in kept(done.run)] == ["b"]
    (error,) = lines(done.run / "errors.jsonl")
    assert "is not UTF-8" in error["message"]


# Only the store


def snapshot(folder: Path, blobs: Blobs) -> Files:
    return Snapshots(folder, blobs, Ignored([]), 1 << 30).take()


def test_a_file_that_grows_while_it_is_stored_is_stored_as_it_was_read(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "work", Blobs(tmp_path / "files")
    folder.mkdir()
    log = folder / "server.log"
    log.write_bytes(b"started\n" * 500_000)
    sizes: list[int] = []
    with log.open("ab", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        stop = Event()

        def write() -> None:
            while not stop.wait(0.0005):
                file.write(b"served\n")

        writing = pool.submit(write)
        try:
            while len({*sizes}) < 5:
                sizes.append(len(blobs.read(snapshot(folder, blobs)["server.log"])))
        finally:
            stop.set()
        writing.result()
    assert sizes == sorted(sizes) and 4_000_000 <= sizes[0] <= sizes[-1] <= log.stat().st_size
    assert not [*(tmp_path / "files").rglob(".*")]


def test_a_folder_is_saved_and_restored_with_executables_and_empty_folders(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "work", Blobs(tmp_path / "files")
    (folder / ".git" / "refs").mkdir(parents=True)
    (folder / "run").write_text("#!/bin/sh\n")
    (folder / "run").chmod(0o755)
    (folder / "plain").write_text("text")
    files = snapshot(folder, blobs)
    assert files[".git/refs/"] == "" and files["run"].endswith("+x") and not files["plain"].endswith("+x")

    (folder / "plain").unlink()
    (folder / "plain").mkdir()
    (folder / "plain" / "inside").write_text("a folder now")
    (folder / "run").chmod(0o644)
    (folder / ".git" / "refs").rmdir()
    (folder / ".git" / "refs").write_text("a file now")
    (folder / "more").mkdir()
    restore(files, blobs, folder)
    assert snapshot(folder, blobs) == files
    assert os.access(folder / "run", os.X_OK) and (folder / ".git" / "refs").is_dir()
    assert not (folder / "more").exists()


def test_links_are_restored_as_links_and_nothing_is_written_through_them(tmp_path: Path) -> None:
    folder, blobs, outside = tmp_path / "work", Blobs(tmp_path / "files"), tmp_path / "outside"
    outside.mkdir()
    text = blobs.keep(b"text")
    restore({"a": f"link:{outside}", "b/c": "link:../d", "d": text}, blobs, folder)
    assert (folder / "a").readlink() == outside and (folder / "b" / "c").read_text() == "text"
    before = {path: path.lstat().st_ino for path in folder.rglob("*")}
    restore(snapshot(folder, blobs), blobs, folder)
    assert {path: path.lstat().st_ino for path in folder.rglob("*")} == before
    with pytest.raises(ValueError, match="is outside the workspace"):
        restore({"a": f"link:{outside}", "a/file": text}, blobs, folder)
    restore({"d": "link:b", "b": text}, blobs, folder)
    assert snapshot(folder, blobs) == {"d": "link:b", "b": text} and list(outside.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "target"),
    [("a/x", "b/x"), ("up/x", "x"), ("out", None), ("root/x", None), ("round/x", None), ("plain/./y", "plain/y")],
)
def test_links_are_followed_only_inside_a_snapshot(path: str, target: str | None) -> None:
    files = {"a": "link:b", "up": "link:b/..", "out": "link:../x", "root": "link:/etc", "round": "link:./round"}
    assert follow(files, path) == target


@pytest.mark.parametrize("kept_as", ["sha256:" + 64 * "0", "..{}", "sha256:..{}+x"])
def test_only_the_content_of_a_digest_is_read_for_it(tmp_path: Path, kept_as: str) -> None:
    (tmp_path / "secret").write_text("secret")
    forged = tmp_path / "files" / "00" / (62 * "0")
    forged.parent.mkdir(parents=True)
    forged.write_text("damaged")
    with pytest.raises(ValueError, match="does not match"):
        restore({"copy": kept_as.format(tmp_path / "secret")}, Blobs(tmp_path / "files"), tmp_path / "room")
    assert not (tmp_path / "room" / "copy").exists()


def test_a_rows_files_are_not_read_from_the_evals_folder(lab: Lab) -> None:
    lab.spec["target"] = {"command": ["echo", "{{ prompt }}", "tool.sh"]}
    (lab.folder / "tool.sh").write_text("true\n")
    lab.rows = [{"id": "a", "question": "tool.sh", "expected": "x"}]
    listed, named = kept(lab.eval().run)[0]["output"].split()
    assert listed == "tool.sh" and named == str(lab.folder / "tool.sh")


def test_unchanged_files_are_not_touched(tmp_path: Path) -> None:
    """A server may have it open, or have it as its working directory."""
    folder, blobs = tmp_path / "work", Blobs(tmp_path / "files")
    (folder / "database").mkdir(parents=True)
    (folder / "database" / "rows").write_text("1")
    files = snapshot(folder, blobs)
    before = {path: path.stat().st_ino for path in [folder, *folder.rglob("*")]}
    (folder / "other").write_text("2")
    with (folder / "database" / "rows").open("a") as open_file:
        restore(files, blobs, folder)
        open_file.write("2")
    assert {path: path.stat().st_ino for path in [folder, *folder.rglob("*")]} == before
    assert (folder / "database" / "rows").read_text() == "12"
