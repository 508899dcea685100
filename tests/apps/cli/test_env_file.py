"""`.env` files: found in the project, read as python-dotenv reads them, never above the environment, and mentioned."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.apps.cli.flags import find_env_file, read_env_file, take_env_file
from holdfast.errors import ConfigError
from tests.support.providers import Say, provider
from tests.support.specs import command, write_spec

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "sk-very-secret-1234567"


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ("A=1\nB = two \n", {"A": "1", "B": "two"}),
        ("export A=1\n\n# comment\n  B=2", {"A": "1", "B": "2"}),
        (
            "A='x # y'\nB=\"x # y\"\nC=x # y\nD=x#y\nE=#z\n",
            {"A": "x # y", "B": "x # y", "C": "x", "D": "x#y", "E": "#z"},
        ),
        ('A="one\\ntwo\\"three"\nB=\'one\\ntwo\'\n', {"A": 'one\ntwo"three', "B": "one\\ntwo"}),
        ('A="-----BEGIN\nline\n-----END"\nB=1\n', {"A": "-----BEGIN\nline\n-----END", "B": "1"}),
        ("A=\nB=''\r\nC=1\r\n", {"A": "", "B": "", "C": "1"}),
        ("\ufeffA=${B}\nA=2\n", {"A": "2"}),
        ("A=it's\nB=a=b\n", {"A": "it's", "B": "a=b"}),
        ("A='x' # comment\nB=\"y\"#z\n", {"A": "x", "B": '"y"#z'}),
        ("", {}),
    ],
)
def test_a_file_is_read_as_it_is_meant(tmp_path: Path, text: str, variables: dict[str, str]) -> None:
    (tmp_path / ".env").write_bytes(text.encode())
    read = read_env_file(tmp_path / ".env")
    assert {name: variable.value for name, variable in read.items()} == variables


@pytest.mark.parametrize("line", [SECRET, f"1A={SECRET}", f"export {SECRET}"])
def test_a_line_that_is_none_is_named_by_its_place_and_never_shown(tmp_path: Path, line: str) -> None:
    (tmp_path / ".env").write_text(f"A='one\ntwo'\n{line}\nB=2\n")
    with pytest.raises(ConfigError, match=r"\.env:3: not of the form NAME=value") as raised:
        read_env_file(tmp_path / ".env")
    assert SECRET not in str(raised.value)


def test_the_nearest_file_of_the_project_counts(tmp_path: Path) -> None:
    folder = tmp_path / "project" / "evals" / "maths"
    folder.mkdir(parents=True)
    (tmp_path / ".env").write_text("A=1")
    assert find_env_file(folder) is None  # in no project
    (tmp_path / "project" / "pyproject.toml").touch()
    assert find_env_file(folder) is None  # never from above the project
    (tmp_path / "project" / ".env").write_text("A=2")
    assert find_env_file(folder) == (tmp_path / "project" / ".env").resolve()
    (folder / ".env").write_text("A=3")
    assert find_env_file(folder) == (folder / ".env").resolve()
    (folder / ".env").unlink()
    (tmp_path / "project" / "evals" / ".git").mkdir()
    assert find_env_file(folder) is None  # a repository of its own


REFUSED = [
    *(
        "PATH",
        "LD_PRELOAD",
        "DYLD_INSERT_LIBRARIES",
        "PYTHONPATH",
        "PYTHONSTARTUP",
        "GIT_SSH_COMMAND",
        "BASH_ENV",
        "ENV",
    ),
    *("HTTPS_PROXY", "https_proxy", "All_Proxy", "NO_PROXY", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("HF_ENDPOINT", "HF_INFERENCE_ENDPOINT", "HF_HOME", "HF_TOKEN_PATH", "HF_HUB_CACHE", "MLFLOW_TRACKING_URI"),
    *("MLFLOW_TRACKING_INSECURE_TLS", "NODE_TLS_REJECT_UNAUTHORIZED", "DOCKER_HOST", "NETRC"),
    *("NODE_OPTIONS", "IFS", "HOLDFAST_HOME", "HOLDFAST_RUNS_DIR", "AWS_CONFIG_FILE", "PERL5OPT", "JAVA_TOOL_OPTIONS"),
]


@pytest.mark.parametrize("name", REFUSED)
def test_variables_that_decide_on_programs_and_connections_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / ".env").write_text(f"A=1\n{name}=./evil\n")
    taken, refusals = take_env_file(tmp_path / ".env", {})
    assert taken == {"A": "1"}
    assert len(refusals) == 1 and refusals[0].startswith(f"{tmp_path / '.env'}:2: {name} is not taken")
    assert f"export {name}=" in refusals[0] and "./evil" not in refusals[0]


@pytest.mark.parametrize(
    "name", ["OPENAI_API_KEY", "GITHUB_TOKEN", "AWS_REGION", "NODE_ENV", "MY_PATH", "WANDB_PROJECT", "HF_TOKEN"]
)
def test_other_variables_are_taken(tmp_path: Path, name: str) -> None:
    (tmp_path / ".env").write_text(f"{name}=x\n")
    assert take_env_file(tmp_path / ".env", {"OTHER_TOKEN": "x"}) == ({name: "x"}, [])


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("OPENAI_BASE_URL", "OPENAI_API_KEY"),
        ("AZURE_OPENAI_ENDPOINT", "AZURE_OPENAI_API_KEY"),
        ("WANDB_BASE_URL", "WANDB_API_KEY"),
    ],
)
def test_an_address_never_gets_a_key_from_elsewhere(tmp_path: Path, address: str, key: str) -> None:
    (tmp_path / ".env").write_text(f"{address}=https://evil.example\n{key}=of-the-file\n")
    assert take_env_file(tmp_path / ".env", {})[0] == {address: "https://evil.example", key: "of-the-file"}
    taken, refusals = take_env_file(tmp_path / ".env", {key: "mine"})
    assert taken == {} and f"{key} of your environment" in refusals[0]


class TestCommands:
    @pytest.fixture
    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
        for name in ("MY_KEY", "OTHER"):
            monkeypatch.setenv(name, "x")  # so that it is restored after the test
            monkeypatch.delenv(name)

        def start(*arguments: Any, code: int = 0) -> tuple[Any, Any]:
            with provider("chat", [Say("2")]) as server:
                target = {"model": "m", "base_url": server.url, "api_key_env": "MY_KEY"}
                path = write_spec(tmp_path / "evals", target=target)
                done = command(monkeypatch, capsys, tmp_path, "eval", path, *arguments)
            assert done.code == code, done.err
            return done, server

        (tmp_path / "pyproject.toml").touch()
        (tmp_path / ".env").write_text(f"MY_KEY={SECRET}\nOTHER=1\n")
        return start

    def test_variables_are_taken_and_named_without_their_values(self, run: Any, tmp_path: Path) -> None:
        done, server = run("--display", "plain")
        assert {asked.headers["authorization"] for asked in server.asked} == {f"Bearer {SECRET}"}
        assert done.err.count("note: MY_KEY, OTHER from .env\n") == 1
        kept = b"".join(path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file())
        assert SECRET.encode() not in kept and SECRET not in done.err + done.out

    def test_the_environment_goes_first(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MY_KEY", "from the environment")
        done, server = run()
        assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer from the environment"}
        assert "note: OTHER from .env\n" in done.err

    def test_an_option_names_another_file_or_none(self, run: Any, tmp_path: Path) -> None:
        done, server = run("--no-env-file")
        assert "authorization" not in server.asked[0].headers and ".env" not in done.err
        (tmp_path / "team.env").write_text("MY_KEY=of-the-team\n")
        done, server = run("--env-file", "team.env", "--fresh")
        assert server.asked[0].headers["authorization"] == "Bearer of-the-team"
        assert "note: MY_KEY from team.env\n" in done.err
        assert "OTHER" not in os.environ

    def test_a_broken_file_ends_the_command(self, run: Any, tmp_path: Path) -> None:
        (tmp_path / ".env").write_text(f"{SECRET}\n")
        done, server = run(code=2)
        assert ".env:1: not of the form NAME=value" in done.err and SECRET not in done.err
        assert not server.asked

    def test_a_refused_variable_is_named_and_not_set(self, run: Any, tmp_path: Path) -> None:
        (tmp_path / ".env").write_text(f"MY_KEY={SECRET}\nLD_PRELOAD=./evil.so\n")
        done, _ = run()
        assert "warning: .env:2: LD_PRELOAD is not taken from this file" in done.err
        assert "note: MY_KEY from .env\n" in done.err and "LD_PRELOAD" not in os.environ
