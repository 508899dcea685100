"""The batch scripts as text, and what travels to the cluster before they run."""

from __future__ import annotations

import json
import shlex
import stat
import subprocess
import sys
import sysconfig
import zipfile
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.apps.cluster.config.launch import Server, TaskFile
from holdfast.apps.cluster.job.servers import server_line
from holdfast.apps.cluster.remote.bundle import collect, load_sent, send_bundles
from holdfast.apps.cluster.remote.chain import directive, main_script, worker_script
from holdfast.apps.cluster.remote.install import build_wheel, ensure_python, needed_extras
from holdfast.apps.cluster.remote.invocation import TaskFolder, read_secrets, write_secrets
from holdfast.apps.cluster.remote.submit import preview
from holdfast.apps.cluster.remote.transport import Here
from holdfast.errors import ClusterError, UsageError
from holdfast.spec.load import load_eval
from tests.support.clusters import launched, lay_out
from tests.support.running import holdfast, write_eval
from tests.support.specs import load

if TYPE_CHECKING:
    from collections.abc import Iterator

NEW = {"HF_TOKEN": "x", "OTHER_TOKEN": "y", "WANDB_API_KEY": "z"}


def task(**changes: object) -> TaskFile:
    values: dict[str, object] = {
        "invocation": "0123456789abcdef",
        "number": 0,
        "name": "gsm8k",
        "python": "/env/bin/python",
        "eval_file": "/bundle/gsm8k.yaml",
        "runs_dir": "/runs",
        **changes,
    }
    return TaskFile(**values)  # type: ignore[arg-type]


def test_the_main_script_is_this_text() -> None:
    settings = task(main_options=("--account=a", "--time=04:00:00", "--exclusive"), setup_lines=("module load cuda",))
    assert main_script(settings, TaskFolder("/base/holdfast/0123456789abcdef", 0)) == (
        "#!/bin/bash\n"
        "#SBATCH --output=/base/holdfast/0123456789abcdef/0/logs/slurm-%j.log\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --account=a\n"
        "#SBATCH --time=04:00:00\n"
        "#SBATCH --exclusive\n"
        "# gsm8k: task 0 of 0123456789abcdef, main\n"
        "trap '' USR2\n"
        "module load cuda\n"
        "exec /env/bin/python -m holdfast.apps.cluster.job /base/holdfast/0123456789abcdef/0 --role main\n"
    )


def test_the_workers_script_is_this_text() -> None:
    assert worker_script(task(workers=4, worker_options=("--time=1",)), TaskFolder("/b/holdfast/0", 0)) == (
        "#!/bin/bash\n"
        "#SBATCH --output=/b/holdfast/0/0/logs/slurm-%A_%a.log\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --array=1-3\n"
        "#SBATCH --requeue\n"
        "#SBATCH --time=1\n"
        "# gsm8k: task 0 of 0123456789abcdef, worker\n"
        "trap '' USR2\n"
        "exec /env/bin/python -m holdfast.apps.cluster.job /b/holdfast/0/0 --role worker\n"
    )


def test_a_job_starts_its_supervisor_without_the_modules_that_read_configurations() -> None:
    code = "import sys, holdfast.apps.cluster.job.main; print(*sys.modules)"
    modules = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert "holdfast.apps.cluster.job.main" in modules
    read = {"pydantic", "jinja2", "ruamel", "aiohttp", "omegaconf", "asyncio", "filelock", "ssl", "http"}
    assert modules & read == set()


def test_names_that_a_shell_would_read_are_quoted() -> None:
    text = main_script(task(python="/my env/$(reboot)/python", name="a\nreboot"), TaskFolder("/a b/100%/x", 0))
    *_, comment, _, last = text.splitlines()
    assert comment == "# a reboot: task 0 of 0123456789abcdef, main"
    assert shlex.split(last) == [
        *("exec", "/my env/$(reboot)/python", "-m", "holdfast.apps.cluster.job", "/a b/100%/x/0", "--role", "main")
    ]
    assert "#SBATCH --output='/a b/100%%/x/0/logs/slurm-%j.log'" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    with pytest.raises(UsageError, match="line break"):
        directive("--comment=a\n#SBATCH --uid=0")


def options(text: str) -> Iterator[str]:
    return (line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH "))


def test_the_options_are_the_configurations(tmp_path: Path) -> None:
    folder = lay_out(tmp_path)
    extra = ("execution.workers=3", "execution.cpu_partition=cpu", "+execution.sbatch_extra_flags.qos=high")
    first = preview(launched(folder, "newer", "BIG", *extra, environ={**NEW, "PWD": str(folder)}))[0]
    main = list(options(first.main))
    assert {"--account=acct", "--partition=batch", "--time=04:00:00", "--nodes=2", "--qos=high"} <= set(main)
    assert "--gpus-per-node=8" in main or "--gres=gpu:8" in main
    assert "--signal=B:USR2@120" in main
    assert first.worker is not None
    beside = list(options(first.worker))
    assert {"--array=1-2", "--requeue", "--partition=cpu", "--nodes=1", "--ntasks=1", "--qos=high"} <= set(beside)
    assert not any("gpu" in option for option in beside), "the server has them"


def test_a_short_time_limit_has_a_short_margin(tmp_path: Path) -> None:
    folder = lay_out(tmp_path)
    scripts = preview(launched(folder, "newer", "BIG", "execution.walltime=2m", environ={**NEW, "PWD": str(folder)}))
    assert "--signal=B:USR2@30" in options(scripts[0].main)


def test_a_server_in_a_container_is_started_by_srun() -> None:
    served = Server(command="vllm serve '/a b'", image="/i.sqsh", mounts=("/m:/checkpoint:ro",), pre_cmd="ulimit -n 9")
    words = shlex.split(server_line(served, 2, pyxis=True))
    assert words[:5] == ["srun", "--overlap", "--nodes=2", "--ntasks=2", "--kill-on-bad-exit=1"]
    assert words[5:8] == [
        *("--container-image=/i.sqsh", "--container-mounts=/m:/checkpoint:ro", "--no-container-mount-home")
    ]
    ranks = "export INSTANCE_RANK=$SLURM_PROCID PROC_ID=$SLURM_PROCID"
    assert words[8:] == ["bash", "-c", f"{ranks}\nulimit -n 9\nvllm serve '/a b'"]
    assert "--container-env=A,B" in shlex.split(server_line(served, 1, pyxis=True, variables=["B", "A"]))
    assert "--nodelist=n1,n2" in shlex.split(server_line(served, 2, pyxis=False, names=["n1", "n2"]))
    assert server_line(served, 1, pyxis=False) == "ulimit -n 9\nvllm serve '/a b'"


def test_any_secret_survives_its_file() -> None:
    values = {"A": "plain", "B": "with = and \" and ' and\nnew lines $HOME `reboot` ü"}
    assert read_secrets(write_secrets(values)) == values


def test_a_dry_run_shows_everything_and_does_nothing(tmp_path: Path) -> None:
    folder = lay_out(tmp_path)
    before = sorted(folder.rglob("*"))
    stdout = holdfast("eval", "-c", "newer", "--run", "BIG", "-d", "-t", "hellaswag", cwd=folder, env=NEW).stdout
    assert "Compiled Configuration" in stdout and "env.toml" in stdout
    assert "#SBATCH --account=acct" in stdout and "--role main" in stdout
    assert "1 sample × 1 trial" in stdout
    assert "hellaswag" in stdout and "Task 1" not in stdout
    assert sorted(folder.rglob("*")) == before


def test_a_configuration_is_known_by_its_keys(tmp_path: Path) -> None:
    folder = lay_out(tmp_path)
    stdout = holdfast("eval", "config/hosted.yaml", "-d", cwd=folder, env={"API_KEY": "k"}).stdout
    assert "Compiled Configuration" in stdout
    wrong = holdfast("eval", "evals/mmlu.yaml", "--force-squash", "-d", cwd=folder, check=2).stderr
    assert "--run or --batch" in wrong


def test_the_wheel_of_a_version_is_reproducible() -> None:
    name, data = build_wheel()
    assert build_wheel() == (name, data)
    with zipfile.ZipFile(BytesIO(data)) as wheel:
        names = wheel.namelist()
        assert wheel.testzip() is None
        assert b"Requires-Dist: msgspec" in wheel.read(next(name for name in names if name.endswith("METADATA")))
    assert "holdfast/apps/cluster/job/__main__.py" in names
    assert "holdfast/apps/cluster/config/groups/deployment/vllm.yaml" in names
    assert not any("__pycache__" in name for name in names)


def put_interpreter(folder: Path, script: str) -> str:
    """Put a program where the installer looks for Python first, and return the path to search."""
    path = folder / "bin/python3.13"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return f"{path.parent}:/usr/bin:/bin"


@pytest.fixture
def dependencies(tmp_path: Path) -> Path:
    """Return a folder with what is installed here but Holdfast, which need not be fetched again."""
    folder = tmp_path / "dependencies"
    folder.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "holdfast" not in path.name:
            (folder / path.name).symlink_to(path)
    return folder


def test_holdfast_is_installed_on_the_cluster_once(tmp_path: Path, dependencies: Path) -> None:
    # What is installed here has pip already, which takes longer to install than Holdfast.
    without_pip = 'test "$1 $2" = "-m venv" && shift 2 && set -- -m venv --without-pip "$@"' if find_spec("pip") else ""
    path = put_interpreter(tmp_path, f'{without_pip}\nexec {sys._base_executable} "$@"')  # type: ignore[attr-defined]
    options = {"PIP_NO_COMPILE": "1", "PIP_NO_INDEX": "1", "PYTHONPATH": str(dependencies)}
    transport = Here(pauses=(), env={"PATH": path, **options})
    notes: list[str] = []
    python = ensure_python(transport, str(tmp_path), say=notes.append)
    assert "installing Holdfast" in notes[0] and all("still installing" in note for note in notes[1:])
    notes.clear()
    ready = Path(python).parent.parent / ".ready"
    modified = ready.stat().st_mtime_ns
    stdout = subprocess.run(
        [python, "-c", "import holdfast; print(holdfast.__file__)"], capture_output=True, text=True, cwd="/", check=True
    ).stdout
    assert stdout.startswith(str(ready.parent)), stdout
    assert ensure_python(transport, str(tmp_path), say=notes.append) == python
    assert notes == []  # only if there is something to remove
    assert ready.stat().st_mtime_ns == modified


@pytest.mark.parametrize(
    ("kind", "extras"),
    [("exact", []), ("similarity", ["similarity"]), ("bleu", ["text-metrics"]), ("rouge", ["text-metrics"])],
)
def test_extras_that_graders_need_are_installed_on_the_cluster(tmp_path: Path, kind: str, extras: list[str]) -> None:
    assert needed_extras([load(tmp_path, graders=[{"type": kind}])], []) == extras


def test_a_failed_installation_is_reported_with_a_remedy(tmp_path: Path) -> None:
    path = put_interpreter(tmp_path, 'test "$1" = -c && exit; echo "disk quota exceeded" >&2; exit 1')
    transport = Here(pauses=(), env={"PATH": path})
    with pytest.raises(ClusterError, match=r"could not be installed.*\n.*disk quota exceeded") as refused:
        ensure_python(transport, str(tmp_path))
    assert 'python = "' in str(refused.value)
    assert not list(tmp_path.rglob(".ready"))


def test_the_copy_of_an_eval_file_repeats_no_notices(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text('schemaVersion: "1.7"\nname: e\nsamples: [{id: a}]\ntarget: {model: m}\nprompt: p\ngraders: []\n')
    assert "1.7 is newer" in "".join(load_eval(path).notices)
    assert load_sent(path, ()).notices == ()


def test_the_files_of_an_eval_are_sent_and_no_others(tmp_path: Path) -> None:
    folder = tmp_path / "project" / "evals"
    path = write_eval(folder, "http://127.0.0.1:9/v1", dataset={"path": str(tmp_path / "elsewhere" / "far.jsonl")})
    (folder / "runs" / "old").mkdir(parents=True)
    for name in ("runs/old/outputs.jsonl", ".env", "grader.py"):
        (folder / name).write_text("x")
    (tmp_path / "elsewhere").mkdir()
    (folder / "data.jsonl").rename(tmp_path / "elsewhere" / "far.jsonl")
    spec = load_eval(path)
    bundle = collect(spec, path)
    assert set(bundle.files) == {"elsewhere/far.jsonl", "project/evals/e.yaml", "project/evals/grader.py"}
    sent = send_bundles([bundle], Here(pauses=()), str(tmp_path / "cluster"))[0]
    there = load_eval(Path(sent) / bundle.eval_file, bundle.overrides(spec, sent))
    assert there.dataset is not None
    (far,) = there.dataset.path if isinstance(there.dataset.path, list) else [there.dataset.path]
    assert Path(far).read_bytes() == (tmp_path / "elsewhere" / "far.jsonl").read_bytes()
    assert Path(far).is_relative_to(sent)


def sent_names(path: Path) -> tuple[set[str], dict[str, str]]:
    bundle = collect(load_eval(path), path)
    return set(bundle.files), dict(bundle.left_out)


def test_files_that_look_like_credentials_are_not_sent(tmp_path: Path) -> None:
    path = write_eval(tmp_path, "http://127.0.0.1:9/v1")
    secrets = {".env.local", ".netrc", ".ssh/id_rsa", ".aws/credentials", ".config/gh/hosts.yml", "key.pem", "env.toml"}
    secrets |= {"kubeconfig", "kubeconfig.yaml", "token.txt", "hf_token", "terraform.tfvars", ".docker_config.json"}
    for name in {*secrets, "secrets.json", ".env.example", "prompts/key.txt", "tokens.jsonl"}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    names, left_out = sent_names(path)
    assert names == {"e.yaml", "data.jsonl", ".env.example", "prompts/key.txt", "tokens.jsonl"}
    assert set(left_out) == {*secrets, "secrets.json"}


def test_a_text_of_an_eval_that_is_the_name_of_a_secret_does_not_send_it(tmp_path: Path) -> None:
    checks = [{"type": "file", "must_not_exist": [".env"]}]
    rows = [{"id": "a", "question": "env.toml"}]
    path = write_eval(tmp_path, "http://127.0.0.1:9/v1", dataset=None, samples=rows, workspace={}, graders=checks)
    for name in (".env", "env.toml"):
        (tmp_path / name).write_text("SECRET=1\n")
    names, left_out = sent_names(path)
    assert set(left_out) == {".env", "env.toml"} and not names & {".env", "env.toml"}


def test_links_that_leave_the_folder_are_not_sent_unless_the_eval_names_them(tmp_path: Path) -> None:
    folder = tmp_path / "evals"
    path = write_eval(folder, "http://127.0.0.1:9/v1")
    (tmp_path / "private.txt").write_text("x")
    (tmp_path / "large.jsonl").write_bytes((folder / "data.jsonl").read_bytes())
    (folder / "data.jsonl").unlink()
    (folder / "data.jsonl").symlink_to(tmp_path / "large.jsonl")
    (folder / "stray.txt").symlink_to(tmp_path / "private.txt")
    (folder / "alias.yaml").symlink_to("e.yaml")
    assert sent_names(path) == (
        {"e.yaml", "data.jsonl", "alias.yaml"},
        {"stray.txt": "a link that leaves the folder"},
    )


def test_files_that_git_ignores_are_not_sent_unless_the_eval_names_them(tmp_path: Path) -> None:
    path = write_eval(tmp_path, "", target={"python": "agent.py:reply"})
    (tmp_path / ".gitignore").write_text("*.jsonl\nscratch/\ngenerated.py\n")
    (tmp_path / "agent.py").write_text("import generated\n\n\ndef reply(prompt):\n    return generated.WORD\n")
    (tmp_path / "generated.py").write_text("WORD = 'x'\n")
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "dump.bin").write_bytes(b"x")
    assert "scratch/dump.bin" in sent_names(path)[0], "outside a repository nothing is ignored"
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    names, left_out = sent_names(path)
    assert names == {"e.yaml", "data.jsonl", "agent.py", "generated.py", ".gitignore"}
    assert left_out == {"scratch/dump.bin": "ignored by git"}


def test_files_keep_their_modes_on_the_cluster(tmp_path: Path) -> None:
    path = write_eval(tmp_path / "evals", "http://127.0.0.1:9/v1")
    modes = {"e.yaml": 0o640, "data.jsonl": 0o600, "tool.sh": 0o700}
    (path.parent / "tool.sh").write_text("true\n")
    for name, mode in modes.items():
        (path.parent / name).chmod(mode)
    sent = send_bundles([collect(load_eval(path), path)], Here(pauses=()), str(tmp_path / "cluster"))[0]
    assert {name: stat.S_IMODE((Path(sent) / name).stat().st_mode) for name in modes} == modes


def test_an_eval_in_the_home_directory_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_eval(tmp_path, "http://127.0.0.1:9/v1")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match="is in your home directory"):
        collect(load_eval(path), path)


def test_a_dry_run_lists_files_that_would_be_sent_and_left_out(tmp_path: Path) -> None:
    write_eval(tmp_path, "http://127.0.0.1:9/v1", rows=2)
    (tmp_path / "env.toml").write_text('[here]\nexecutor = "local"\n')
    for number in range(60):
        (tmp_path / f"extra{number:02}.txt").write_text("x" * 1500)
    stdout = holdfast("eval", "e.yaml", "--run", "here", "--dry-run", cwd=tmp_path).stdout
    assert "sends 62 files, 90 kB:" in stdout
    assert "extra07.txt  1.5 kB" in stdout and "extra59.txt" not in stdout
    assert "… and 22 more; --json lists all" in stdout
    assert "env.toml  (looks like credentials)" in stdout
    planned = json.loads(holdfast("eval", "e.yaml", "--run", "here", "-d", "--json", cwd=tmp_path).stdout)
    files = planned["tasks"][0]["files"]
    assert len(files["sent"]) == 62 and files["sent"]["extra59.txt"] == 1500
    assert files["left_out"] == {"env.toml": "looks like credentials"}


def test_too_much_in_the_folder_of_an_eval_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_eval(tmp_path, "http://127.0.0.1:9/v1")
    monkeypatch.setattr("holdfast.apps.cluster.remote.bundle.MAX_BYTES", 100)
    with pytest.raises(UsageError, match=r"e\.yaml: 0 MB are in its folder") as refused:
        collect(load_eval(path), path)
    assert "data.jsonl" in str(refused.value)


def test_the_interpreter_of_a_profile_must_have_holdfast(tmp_path: Path) -> None:
    folder = lay_out(tmp_path)
    (folder / "env.toml").write_text('[here]\nexecutor = "local"\npython = "/usr/bin/env"\n')
    done = holdfast("eval", "-c", "hosted", "--batch", "here", cwd=folder, env={"API_KEY": "k"}, check=3)
    assert "Holdfast is not installed in /usr/bin/env" in done.stderr
    assert sys.executable not in done.stderr
