"""W&B: offline by reading back what was written, online by what the client sends to a stand-in for the server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.plugins.exporters.wandb import detect
from tests.support.lab import Lab, rows
from tests.support.running import ROOT, Server, environment, holdfast, metrics, module_server
from tests.support.wandb_double import OfflineRun, wandb_double

KEY = "5ecre7" + "0123456789abcdef" * 2 + "01"
NOBODY = "http://127.0.0.1:1"


provider = module_server()


def finished(folder: Path, provider: Server) -> Lab:
    """Return a finished run of two graders, on a machine that knows nothing of W&B."""
    (folder / "home").mkdir()
    lab = Lab(folder / "lab", provider, rows=rows(4), spec={"trials": 2})
    lab.spec["graders"].append({"type": "text", "name": "mentions", "contains": "question"})
    lab.run = lab.eval().run
    return lab


@pytest.fixture
def lab(tmp_path: Path, provider: Server) -> Lab:
    return finished(tmp_path, provider)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, provider: Server) -> tuple[Lab, str]:
    """A finished run that was exported, which tests only read, and what the command printed."""
    lab = finished(tmp_path_factory.mktemp("exported"), provider)
    options = ("project=p", "entity=somebody", "tags=[a, b]", "description=why", "extra_metadata={k: 1}")
    return lab, export(lab, *options).stdout


def export(lab: Lab, *options: str, check: int = 0, **env: Any) -> Any:
    home = {"HOME": str(lab.folder.parent / "home")}
    return holdfast("export", lab.run, "--to", "wandb", *options, cwd=lab.folder, env={**home, **env}, check=check)


def written(lab: Lab) -> Path:
    """The one folder that `wandb sync` takes."""
    (folder,) = (lab.run / "export" / "wandb" / "wandb").glob("offline-run-*")
    return folder


def offline(lab: Lab) -> OfflineRun:
    (file,) = written(lab).glob("*.wandb")
    return OfflineRun(file)


def run_id(lab: Lab) -> str:
    return f"e-{lab.run.name.rpartition('-')[2]}"


class TestOffline:
    def test_numbers_configuration_table_and_files_are_in_what_was_written(self, exported: tuple[Lab, str]) -> None:
        lab, stdout = exported
        assert f"wandb sync {written(lab).resolve()}" in stdout
        offline_run, report = offline(lab), metrics(lab.run)
        assert (offline_run.run.run_id, offline_run.run.project, offline_run.run.entity) == (
            run_id(lab),
            "p",
            "somebody",
        )
        assert (list(offline_run.run.tags), offline_run.run.notes, offline_run.run.job_type) == (
            ["a", "b"],
            "why",
            "evaluation",
        )
        assert offline_run.config["graders"] == lab.spec["graders"] and offline_run.config["metadata"] == {"k": 1}
        assert offline_run.config["holdfast"]["run"] == lab.run.name.rpartition("-")[2]
        for name in ("correct", "mentions"):
            for value in ("score", "low", "high", "n"):
                assert offline_run.summary[f"{name}/{value}"] == report["metrics"][name][value]
        assert (offline_run.summary["score"], offline_run.summary["coverage"]) == (report["score"], 1.0)
        files = offline_run.artifacts[f"holdfast-{run_id(lab)}"]
        assert sorted(files) == ["manifest.json", "metrics.json", "results.json"]
        (logged,) = [step for step in offline_run.history if "trials._type" in step]
        table = json.loads((written(lab) / "files" / logged["trials.path"]).read_text())
        results = json.loads((lab.run / "results.json").read_text())["trials"]
        read = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        assert [(row["sample"], row["trial"], row["status"], row["score"], row["output"]) for row in read] == [
            (entry["sample"], entry["trial"], entry["status"], entry["score"], entry["output"]) for entry in results
        ]
        assert [row["correct.status"] for row in read] == [entry["grades"]["correct"]["status"] for entry in results]

    def test_a_second_export_is_the_same_run_and_nothing_lies_outside_the_run_directory(
        self, exported: tuple[Lab, str], tmp_path: Path
    ) -> None:
        shutil.copytree(exported[0].folder.parent, tmp_path, dirs_exist_ok=True)
        lab = replace(exported[0], folder=tmp_path / "lab")
        lab.run = lab.folder / exported[0].run.relative_to(exported[0].folder)
        first = offline(lab)
        export(lab)
        second = offline(lab)
        assert first.run.run_id == second.run.run_id == run_id(lab)
        assert second.run.project == "p", "what is not given is as it was"
        assert {path.name for path in lab.folder.iterdir()} == {"data.jsonl", "e.yaml", "runs"}
        assert not (lab.folder.parent / "home" / ".cache").exists()

    def test_an_unfinished_run_has_its_trials_but_no_numbers(self, lab: Lab) -> None:
        (lab.run / "metrics.json").unlink()
        assert "not finished" in export(lab).stderr
        offline_run = offline(lab)
        assert offline_run.summary["finished"] is False and "score" not in offline_run.summary
        assert [step["trials.nrows"] for step in offline_run.history if "trials.nrows" in step] == [8]

    def test_no_secret_is_in_anything_that_was_written(self, tmp_path: Path, provider: Server) -> None:
        secrets = {"WANDB_API_KEY": KEY, "OPENAI_API_KEY": "sk-topsecret-1", "OTHER_SECRET": "topsecret-2"}
        lab = Lab(tmp_path / "lab", provider)
        (tmp_path / "home").mkdir()
        lab.spec["target"] = {
            "http": f"{provider.base_url}/chat/completions",
            "request": {"model": "m", "messages": [{"role": "user", "content": "{{ prompt }}"}]},
            "response": "choices[0].message.content",
            "headers": {"X-Key": "topsecret-3", "X-Other": "${OTHER_SECRET}"},
        }
        lab.run = lab.eval(env=secrets).run
        done = export(lab, "mode=offline", **secrets)  # type: ignore[arg-type]
        assert "Detected W&B login (WANDB_API_KEY)" in done.stdout
        texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "e.yaml"]
        assert len(texts) > 10
        for secret in (KEY, "topsecret"):
            assert not any(secret.encode() in text for text in texts)
            assert secret not in done.stdout + done.stderr


class TestLogin:
    @pytest.fixture(autouse=True)
    def nobody(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("API_KEY", "PROJECT", "ENTITY", "BASE_URL", "CONFIG_DIR"):
            monkeypatch.delenv(f"WANDB_{name}", raising=False)
        monkeypatch.delenv("NETRC", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)

    def test_without_a_login_nothing_is_detected(self) -> None:
        login = detect()
        assert (login.api_key, login.source, login.project, login.entity) == (None, None, None, None)

    def test_settings_of_wandb_login_and_wandb_init_are_found(self, tmp_path: Path) -> None:
        wrote = (
            "from wandb.sdk.lib.wbauth import write_netrc_auth\n"
            f"write_netrc_auth(host='https://api.wandb.ai', api_key={KEY!r})\n"
        )
        subprocess.run([sys.executable, "-c", wrote], env=environment(HOME=str(tmp_path)), check=True, cwd=tmp_path)
        (tmp_path / "wandb").mkdir()
        (tmp_path / "wandb" / "settings").write_text("[default]\nentity = team\nproject = evals\n")
        login = detect()
        assert (login.api_key, login.source) == (KEY, str(tmp_path / ".netrc"))
        assert (login.project, login.entity) == ("evals", "team")
        assert KEY not in repr(login)

    def test_the_environment_has_the_last_word(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "wandb").mkdir()
        (tmp_path / "wandb" / "settings").write_text("[default]\nentity = team\n")
        for name, value in (("API_KEY", "k"), ("PROJECT", "p"), ("ENTITY", "e"), ("BASE_URL", "http://w:1/")):
            monkeypatch.setenv(f"WANDB_{name}", value)
        login = detect()
        assert (login.api_key, login.source, login.base_url) == ("k", "WANDB_API_KEY", "http://w:1")
        assert (login.project, login.entity) == ("p", "e")

    def test_another_servers_login_is_not_this_ones(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        netrc = tmp_path / ".netrc"
        netrc.write_text(f"machine wandb.example\n  login user\n  password {KEY}\n")
        netrc.chmod(0o600)
        assert detect().api_key is None
        monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
        assert detect().api_key == KEY and detect().check().base_url == "https://wandb.example"
        monkeypatch.setenv("WANDB_BASE_URL", "https://other.example")
        netrc.write_text(f"default\n  login user\n  password {KEY}\n")
        assert detect().api_key is None, "a password for all hosts is not meant for this one"


class TestOnline:
    def test_both_exports_go_to_one_run(self, lab: Lab) -> None:
        with wandb_double() as double:
            for _ in range(2):
                done = export(lab, "project=p", WANDB_BASE_URL=double.url, WANDB_API_KEY=KEY, WANDB_ENTITY="team")
                assert "Detected W&B login" in done.stdout and f"/p/runs/{run_id(lab)}" in done.stdout
        resumed = double.asked("RunResumeStatus")
        assert [(asked["name"], asked["project"], asked["entity"]) for asked in resumed] == [
            (run_id(lab), "p", "team")
        ] * 2
        assert {asked["name"] for asked in double.asked("UpsertBucket")} == {run_id(lab)}
        assert double.summary()["correct/low"] == metrics(lab.run)["metrics"]["correct"]["low"]
        assert any(name.startswith("media/table/trials") for name in double.files)

    def test_the_sync_command_sends_what_was_written_offline(self, exported: tuple[Lab, str]) -> None:
        lab, stdout = exported
        server, *command = stdout.partition("To send it: ")[2].split()
        assert (server, *command[:2]) == ("WANDB_BASE_URL=https://api.wandb.ai", "wandb", "sync")
        with wandb_double() as double:
            sent = subprocess.run(
                [str(Path(sys.executable).with_name("wandb")), *command[1:]],
                env=environment(WANDB_BASE_URL=double.url, WANDB_API_KEY=KEY, HOME=str(lab.folder.parent / "home")),
                cwd=lab.folder,
                capture_output=True,
                text=True,
                timeout=900,
            )
        assert sent.returncode == 0, sent.stdout + sent.stderr
        assert {asked["name"] for asked in double.asked("UpsertBucket")} == {run_id(lab)}
        assert double.summary()["score"] == metrics(lab.run)["score"]

    def test_an_offline_export_is_never_up_to_date_and_sent_by_the_same_command(self, lab: Lab) -> None:
        def status() -> str:
            return str(holdfast("status", lab.run, cwd=lab.folder).stdout)

        done = export(lab, "--if-changed", WANDB_BASE_URL=NOBODY, WANDB_API_KEY=KEY)
        send = f"WANDB_BASE_URL={NOBODY} wandb sync {written(lab).resolve()}"
        assert "is offline, nothing was sent" in done.stdout and "cannot be reached" in done.stdout
        assert send in done.stdout and send in status()
        assert offline(lab).run.run_id == run_id(lab)
        with wandb_double() as double:

            def again() -> str:
                return str(export(lab, "--if-changed", WANDB_BASE_URL=double.url, WANDB_API_KEY=KEY).stdout)

            assert "up to date" not in again()
            assert {asked["name"] for asked in double.asked("UpsertBucket")} == {run_id(lab)}
            assert "wandb sync" not in status()
            assert "wandb: already up to date" in again()

    def test_the_key_of_another_server_is_not_sent(self, lab: Lab) -> None:
        netrc = lab.folder.parent / "home" / ".netrc"
        netrc.write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
        netrc.chmod(0o600)
        (lab.folder / "wandb").mkdir()
        with wandb_double() as double:
            assert (
                "is the login for api.wandb.ai"
                in export(lab, WANDB_BASE_URL=double.url, WANDB_API_KEY=KEY, check=2).stderr
            )
            # A folder that somebody else wrote names a server.
            (lab.folder / "wandb" / "settings").write_text(f"[default]\nbase_url = {double.url}\n")
            refused = export(lab, WANDB_API_KEY="k" * 40, check=2).stderr
            assert f"set WANDB_BASE_URL={double.url}" in refused
            assert double.queries == []

    def test_online_mode_without_a_network_fails(self, lab: Lab) -> None:
        done = export(lab, "mode=online", WANDB_BASE_URL=NOBODY, WANDB_API_KEY=KEY, check=3)
        assert "cannot export to wandb" in done.stderr and "Traceback" not in done.stderr


def test_a_missing_package_is_reported_with_the_command_to_install_it(lab: Lab) -> None:
    missing = lab.folder.parent / "missing"
    missing.mkdir()
    for name, package in (("wandb", "wandb"), ("mlflow", "mlflow-skinny")):
        (missing / f"{name}.py").write_text("raise ImportError\n")
        done = holdfast(
            "export",
            lab.run,
            "--to",
            name,
            cwd=lab.folder,
            env={"PYTHONPATH": f"{missing}:{ROOT}", "MLFLOW_TRACKING_URI": NOBODY},
            check=2,
        )
        assert f"pip install {package}" in done.stderr


def test_disabled_mode_is_reported(lab: Lab) -> None:
    assert "WANDB_MODE is disabled" in export(lab, WANDB_MODE="disabled", check=2).stderr
