"""Models by the prefixes of their providers: their addresses, their API keys, and what identifies them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.errors import ConfigError
from holdfast.plugins.benchmarks.format import wants_chat
from holdfast.plugins.benchmarks.names import find_listed
from holdfast.spec.eval_schema import BenchmarkBlock
from holdfast.spec.providers import PROVIDERS, endpoint_of, suggest_prefix
from holdfast.targets.build import build_target
from tests.support.providers import Refuse, Say, provider
from tests.support.specs import command, load, who, write_spec

if TYPE_CHECKING:
    from pathlib import Path

AZURE = {"AZURE_OPENAI_ENDPOINT": "https://us.openai.azure.com"}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of any provider is set."""
    for name in list(os.environ):
        if name.endswith(("_API_KEY", "_BASE_URL")) or name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("model", "name", "api", "url", "key"),
    [
        ("openai/gpt-5", "gpt-5", "responses", "https://api.openai.com/v1", "OPENAI_API_KEY"),
        ("anthropic/claude-x", "claude-x", "messages", "https://api.anthropic.com/v1", "ANTHROPIC_API_KEY"),
        ("google/gemini-x", "gemini-x", "gemini", "https://generativelanguage.googleapis.com/v1beta", "GEMINI_API_KEY"),
        ("openrouter/a/b", "a/b", "chat", "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
        ("mistral/m", "m", "chat", "https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
        ("groq/openai/gpt-oss", "openai/gpt-oss", "chat", "https://api.groq.com/openai/v1", "GROQ_API_KEY"),
        ("together/m/n", "m/n", "chat", "https://api.together.xyz/v1", "TOGETHER_API_KEY"),
        ("deepseek/m", "m", "chat", "https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
        ("xai/grok", "grok", "chat", "https://api.x.ai/v1", "XAI_API_KEY"),
        ("ollama/qwen", "qwen", "chat", "http://127.0.0.1:11434/v1", "OLLAMA_API_KEY"),
        ("vllm/Qwen/Q", "Qwen/Q", "chat", "http://127.0.0.1:8000/v1", "VLLM_API_KEY"),
        ("gpt-5", "gpt-5", "chat", "https://api.openai.com/v1", "OPENAI_API_KEY"),
        ("Qwen/Qwen3", "Qwen/Qwen3", "chat", "https://api.openai.com/v1", "OPENAI_API_KEY"),
    ],
)
def test_a_prefix_chooses_the_api_the_address_and_the_key(model: str, name: str, api: str, url: str, key: str) -> None:
    endpoint = endpoint_of(model)
    assert (endpoint.model, endpoint.api, endpoint.urls, endpoint.key_env) == (name, api, [url], key)
    assert endpoint.needs == ((key,) if url.startswith("https://") else ())


def test_a_base_url_and_settings_of_the_file_count_instead_of_a_prefix() -> None:
    endpoint = endpoint_of("anthropic/claude-x", None, "http://127.0.0.1:1/v1")
    assert (endpoint.model, endpoint.api, endpoint.needs) == ("anthropic/claude-x", "chat", ())
    endpoint = endpoint_of("anthropic/claude-x", "chat", None, "OTHER_KEY")
    assert (endpoint.model, endpoint.api, endpoint.needs) == ("claude-x", "chat", ("OTHER_KEY",))


def test_organisations_on_the_hub_are_left_to_the_server_of_the_environment() -> None:
    there = {"OPENAI_BASE_URL": "http://node1:8000/v1"}
    for model in ("openai/gpt-oss-20b", "google/gemma-3"):
        endpoint = endpoint_of(model, environ=there)
        assert (endpoint.model, endpoint.urls, endpoint.needs) == (model, ["http://node1:8000/v1"], ())
    assert endpoint_of("anthropic/claude-x", environ=there).urls == ["https://api.anthropic.com/v1"]


def test_the_first_key_that_is_set_counts() -> None:
    assert endpoint_of("google/g", environ={"GOOGLE_API_KEY": "b"}).key_env == "GOOGLE_API_KEY"
    assert endpoint_of("google/g", environ={"GOOGLE_API_KEY": "b", "GEMINI_API_KEY": "a"}).key_env == "GEMINI_API_KEY"


@pytest.mark.parametrize("url", ["https://gate.example", "https://gate.example/", "https://gate.example/v1"])
def test_a_providers_own_variable_for_its_address_is_heeded_in_its_own_form(url: str) -> None:
    endpoint = endpoint_of("anthropic/claude-x", environ={"ANTHROPIC_BASE_URL": url})
    assert (endpoint.urls, endpoint.needs) == (["https://gate.example/v1"], ())


@pytest.mark.parametrize("suffix", ["", "/", "/openai/v1", "/openai/v1/"])
def test_azure_is_asked_at_the_address_of_the_account(suffix: str) -> None:
    endpoint = endpoint_of("azure/my-gpt", environ={"AZURE_OPENAI_ENDPOINT": f"https://us.openai.azure.com{suffix}"})
    assert (endpoint.model, endpoint.api) == ("my-gpt", "chat")
    assert endpoint.urls == ["https://us.openai.azure.com/openai/v1"]
    assert endpoint.needs == ("AZURE_OPENAI_ENDPOINT", "AZURE_OPENAI_API_KEY")


@pytest.mark.parametrize(
    ("model", "api", "url"),
    [
        ("anthropic.claude-x-v1:0", "messages", "https://bedrock-runtime.eu-west-1.amazonaws.com"),
        ("us.anthropic.claude-x-v1:0", "messages", "https://bedrock-runtime.eu-west-1.amazonaws.com"),
        ("openai.gpt-oss-20b-1:0", "chat", "https://bedrock-runtime.eu-west-1.amazonaws.com/openai/v1"),
    ],
)
def test_bedrock_is_asked_in_the_region_of_the_environment(model: str, api: str, url: str) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        endpoint = endpoint_of(f"bedrock/{model}", environ={name: "eu-west-1"})
        assert (endpoint.model, endpoint.api, endpoint.urls, endpoint.needs) == (model, api, [url], (name,))


@pytest.mark.parametrize(
    ("model", "api", "place"),
    [
        ("gemini-x", "gemini", "publishers/google"),
        ("claude-x@20260101", "messages", "publishers/anthropic"),
        ("meta/llama-x", "chat", "endpoints/openapi"),
    ],
)
def test_vertex_is_asked_in_the_project_and_location_of_the_environment(model: str, api: str, place: str) -> None:
    project = {"GOOGLE_CLOUD_PROJECT": "p-1"}
    endpoint = endpoint_of(f"vertex/{model}", environ=project)
    assert (endpoint.model, endpoint.api, endpoint.needs) == (model, api, ("GOOGLE_CLOUD_PROJECT",))
    assert endpoint.urls == [f"https://aiplatform.googleapis.com/v1/projects/p-1/locations/global/{place}"]
    near = endpoint_of(f"vertex/{model}", environ={**project, "GOOGLE_CLOUD_LOCATION": "europe-west4"})
    assert near.urls == [
        f"https://europe-west4-aiplatform.googleapis.com/v1/projects/p-1/locations/europe-west4/{place}"
    ]


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "AZURE_OPENAI_ENDPOINT and AZURE_OPENAI_API_KEY are not set"),
        (AZURE, "no API key: AZURE_OPENAI_API_KEY is not set"),
        ({**AZURE, "AZURE_OPENAI_API_KEY": "k"}, None),
    ],
)
def test_a_missing_variable_is_named_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], message: str | None
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    spec = load(tmp_path, target={"model": "azure/my-gpt"})
    if message is None:
        build_target(spec)
    else:
        with pytest.raises(ConfigError, match=message):
            build_target(spec)


@pytest.mark.parametrize("prefix", sorted(set(PROVIDERS) - {"ollama", "vllm", "azure", "bedrock", "vertex"}))
def test_a_run_without_the_providers_key_ends_with_2_and_names_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, prefix: str
) -> None:
    path = write_spec(tmp_path, target={"model": f"{prefix}/m"})
    done = command(monkeypatch, capsys, tmp_path, "eval", path)
    assert done.code == 2
    assert f"{PROVIDERS[prefix].key_env[0]} is not set" in done.err
    assert not (tmp_path / "runs").exists()


def test_a_judge_with_a_prefix_is_asked_at_its_provider_whatever_the_target_is(tmp_path: Path) -> None:
    judge = {"type": "prompt", "name": "j", "model": "anthropic/claude-x", "prompt": "good?"}
    spec = load(tmp_path, target={"model": "m", "base_url": "http://127.0.0.1:1/v1"}, graders=[judge])
    assert (spec.graders[0].base_url, spec.graders[0].api) == (None, None)


def test_a_mistyped_prefix_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert suggest_prefix("antropic/claude-x", None) == (
        "antropic/ is not the prefix of a provider: did you mean anthropic/?"
    )
    for model in ("anthropic/claude-x", "gpt-5", "Qwen/Qwen3", "meta-llama/Llama"):
        assert suggest_prefix(model, None) is None
    assert suggest_prefix("antropic/claude-x", "http://127.0.0.1:1/v1") is None
    path = write_spec(tmp_path, target={"model": "antropic/claude-x"})
    done = command(monkeypatch, capsys, tmp_path, "eval", path)
    assert done.code == 2
    assert "did you mean anthropic/?" in done.err


def test_a_mistyped_prefix_is_named_when_the_server_does_not_know_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    missing = "The model `antropic/claude-x` does not exist or you do not have access to it."
    with provider("chat", [Refuse(404, missing)]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        path = write_spec(tmp_path, target={"model": "antropic/claude-x"})
        done = command(monkeypatch, capsys, tmp_path, "eval", path)
        plain = command(monkeypatch, capsys, tmp_path, "eval", path, "-m", "claude-x")
    assert done.code == plain.code == 3
    assert "antropic/ is not the prefix of a provider: did you mean anthropic/?" in done.out
    assert "Check target.model: the server does not know it." in plain.out


def test_with_a_server_in_the_environment_other_prefixes_go_to_their_providers() -> None:
    there = {"OPENAI_BASE_URL": "http://node1:8000/v1"}
    stays = {
        prefix
        for prefix in PROVIDERS
        if endpoint_of(f"{prefix}/anthropic.m", environ=there).urls == [there["OPENAI_BASE_URL"]]
    }
    assert stays == {"openai", "google"}
    for model in ("gpt-5", "Qwen/Qwen3", "mistralai/Mistral-7B"):
        assert endpoint_of(model, environ=there).urls == [there["OPENAI_BASE_URL"]]


class TestBenchmarks:
    """Benchmarks leave the API to the provider, unless they need plain completions."""

    @pytest.mark.parametrize(
        ("target", "chat"),
        [
            ({"model": "anthropic/claude-x"}, True),
            ({"model": "openai/gpt-5"}, True),
            ({"model": "vllm/Qwen/Qwen3"}, False),
            ({"model": "m", "base_url": "http://127.0.0.1:1/v1"}, False),
            ({"model": "anthropic/claude-x", "base_url": "http://127.0.0.1:1/v1"}, False),
            ({"model": "m", "api": "messages"}, True),
            ({"model": "anthropic/claude-x", "api": "completions"}, False),
            ({}, False),
        ],
    )
    def test_a_provider_without_completions_is_asked_as_in_a_conversation(
        self, target: dict[str, Any], chat: bool
    ) -> None:
        benchmark = find_listed("gsm8k")
        assert benchmark is not None
        assert wants_chat(benchmark, BenchmarkBlock(name="gsm8k"), target) is chat

    def test_the_api_is_the_providers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        model = ("-m", "anthropic/claude-x", "--dry-run")
        done = command(monkeypatch, capsys, tmp_path, "eval", "humaneval-sample", *model)
        assert done.code == 0 and "claude-x is asked at https://api.anthropic.com/v1 by the messages API" in done.out

    @pytest.mark.parametrize("name", ["mmlu-sample", "winogrande-sample"])
    def test_a_benchmark_that_needs_completions_is_refused_by_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str
    ) -> None:
        done = command(monkeypatch, capsys, tmp_path, "eval", name, "-m", "anthropic/claude-x", "--dry-run")
        assert done.code == 2
        assert f"{name} needs plain completions, which anthropic/claude-x does not have" in done.err

    def test_likelihoods_are_refused_by_name(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"groq/m cannot be asked for likelihoods"):
            load(tmp_path, target={"model": "groq/m", "api": "completions"}, continuations="ends", graders=[])


def test_a_function_asks_a_model_at_its_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    body = "def reply(prompt, context):\n    return context.model(prompt, model='anthropic/claude-x').text\n"
    (tmp_path / "agent.py").write_text(body)
    path = write_spec(tmp_path, target={"python": "agent.py:reply"}, limits={"concurrency": 1})
    refused = command(monkeypatch, capsys, tmp_path, "eval", path, "--display", "none")
    assert refused.code == 3 and "ANTHROPIC_API_KEY is not set" in refused.out + refused.err
    with provider("messages", [Say("2")]) as server:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", server.url)
        monkeypatch.setenv("ANTHROPIC_API_KEY", "key-of-anthropic")
        done = command(monkeypatch, capsys, tmp_path, "eval", path, "--display", "none")
    assert done.code == 0, done.out + done.err
    assert {asked.headers["x-api-key"] for asked in server.asked} == {"key-of-anthropic"}


class TestKeys:
    """What identifies a model: its name and its API, not where it is asked."""

    def keys(self, folder: Path, **target: Any) -> list[str]:
        identity = who(folder, target=target)
        return [identity.work.key(sample.asked, 1) for sample in identity.dataset]

    def test_a_prefix_and_the_api_have_the_same_key(self, tmp_path: Path) -> None:
        prefixed = self.keys(tmp_path, model="anthropic/claude-x")
        assert prefixed == self.keys(tmp_path, model="claude-x", api="messages")
        assert prefixed == self.keys(tmp_path, model="claude-x", api="messages", base_url="http://127.0.0.1:1/v1")
        assert prefixed == self.keys(tmp_path, model="vertex/claude-x")
        assert prefixed != self.keys(tmp_path, model="claude-x")
        assert self.keys(tmp_path, model="groq/m") == self.keys(tmp_path, model="m")

    def test_the_address_of_a_model_is_in_no_key(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = self.keys(tmp_path, model="anthropic/claude-x")
        monkeypatch.setenv("ANTHROPIC_BASE_URL", "https://gate.example")
        assert self.keys(tmp_path, model="anthropic/claude-x") == before
        monkeypatch.setenv("AWS_REGION", "eu-west-1")
        near = self.keys(tmp_path, model="bedrock/anthropic.claude-x")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        assert self.keys(tmp_path, model="bedrock/anthropic.claude-x") == near
