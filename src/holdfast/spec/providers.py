"""Finds a model's provider by the prefix of its name: `anthropic/claude-opus-5` is asked through Anthropic's API.

A prefix counts only without a `base_url`. `openai/` and `google/` are also organisations on the hub, and many servers
serve their models under these full names: for the two prefixes, $OPENAI_BASE_URL counts as a `base_url`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from holdfast.spec.redact import fill_variables
from holdfast.spec.schema import urls_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.spec.eval_schema import ResponderBlock
    from holdfast.spec.grader_schema import PromptGrader
    from holdfast.spec.schema import Api

Access = Literal["key", "azure", "aws", "gcp"]
"""how requests are authenticated: a key in the API's own header, or in Azure's; AWS's signatures; Google's tokens"""


class Provider(msgspec.Struct, frozen=True):
    """A service, or a kind of server."""

    api: Api
    base_url: str
    """default; $`url_env` takes precedence. Empty if it depends on the account"""
    key_env: tuple[str, ...]
    """environment variables for the API key: the first that is set counts"""
    url_env: str = ""
    url_path: str = ""
    """appended to the value of `url_env` if it is missing, as the provider's own clients do"""
    access: Access = "key"
    completions: bool = False
    """its models also complete plain texts"""


OPENAI: Final = Provider("chat", "https://api.openai.com/v1", ("OPENAI_API_KEY",), "OPENAI_BASE_URL", completions=True)
"""for names without a known prefix"""

PROVIDERS: Final = {
    "openai": msgspec.structs.replace(OPENAI, api="responses", completions=False),
    "anthropic": Provider(
        "messages", "https://api.anthropic.com/v1", ("ANTHROPIC_API_KEY",), "ANTHROPIC_BASE_URL", "/v1"
    ),
    "google": Provider(
        "gemini",
        "https://generativelanguage.googleapis.com/v1beta",
        ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
        "GOOGLE_GEMINI_BASE_URL",
        "/v1beta",
    ),
    "openrouter": Provider("chat", "https://openrouter.ai/api/v1", ("OPENROUTER_API_KEY",), completions=True),
    "mistral": Provider("chat", "https://api.mistral.ai/v1", ("MISTRAL_API_KEY",)),
    "groq": Provider("chat", "https://api.groq.com/openai/v1", ("GROQ_API_KEY",), "GROQ_BASE_URL", "/openai/v1"),
    "together": Provider(
        "chat", "https://api.together.xyz/v1", ("TOGETHER_API_KEY",), "TOGETHER_BASE_URL", completions=True
    ),
    "deepseek": Provider("chat", "https://api.deepseek.com/v1", ("DEEPSEEK_API_KEY",)),
    "xai": Provider("chat", "https://api.x.ai/v1", ("XAI_API_KEY",)),
    "azure": Provider("chat", "", ("AZURE_OPENAI_API_KEY",), "AZURE_OPENAI_ENDPOINT", "/openai/v1", "azure"),
    "bedrock": Provider("chat", "", ("AWS_BEARER_TOKEN_BEDROCK",), "AWS_ENDPOINT_URL_BEDROCK_RUNTIME", access="aws"),
    "vertex": Provider("gemini", "", (), "GOOGLE_VERTEX_BASE_URL", access="gcp"),
    "ollama": Provider("chat", "http://127.0.0.1:11434/v1", ("OLLAMA_API_KEY",), "OLLAMA_BASE_URL", completions=True),
    "vllm": Provider("chat", "http://127.0.0.1:8000/v1", ("VLLM_API_KEY",), "VLLM_BASE_URL", completions=True),
}
_ALSO_ON_THE_HUB: Final = ("openai", "google")


class ModelEndpoint(msgspec.Struct, frozen=True):
    """The address of a model, and how to ask it."""

    model: str
    """its name at the provider"""
    api: Api
    urls: list[str]
    """base URLs"""
    key_env: str
    """the environment variable with the API key; empty without a key"""
    needs: tuple[str, ...]
    """environment variables without which the model cannot be asked"""
    hosted: bool
    """the model is asked at the provider's own address"""
    access: Access = "key"
    region: str = ""
    """of AWS"""
    provider: str = ""
    """the prefix of the model's name"""


def has_provider(model: str, served_at: Any = None, environ: Mapping[str, str] = os.environ) -> bool:
    """Return True for a name with a provider's prefix; `served_at` is the URL of a server that may have the model."""
    prefix, _, name = model.partition("/")
    on_server = prefix in _ALSO_ON_THE_HUB and (served_at or environ.get(OPENAI.url_env))
    return bool(name) and prefix in PROVIDERS and not on_server


def provider_of(
    model: str, base_url: str | list[str] | None, environ: Mapping[str, str] = os.environ
) -> tuple[Provider, str]:
    """Return a model's provider, with the API for this model, and the model's name at the provider."""
    if base_url is not None or not has_provider(model, environ=environ):
        return OPENAI, model
    prefix, _, name = model.partition("/")
    provider = PROVIDERS[prefix]
    if (provider.access == "aws" and "anthropic." in name) or (provider.access == "gcp" and name.startswith("claude")):
        provider = msgspec.structs.replace(provider, api="messages")
    elif provider.access == "gcp" and "/" in name:  # a publisher before the name: not one of Google's models
        provider = msgspec.structs.replace(provider, api="chat")
    return provider, name


def endpoint_of(
    model: str,
    api: Api | None = None,
    base_url: str | list[str] | None = None,
    key_env: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ModelEndpoint:
    """Return a model's endpoint. A variable in a `base_url` may hold several URLs, separated by commas."""
    provider, name = provider_of(model, base_url, environ)
    api = api or provider.api
    key_env = key_env or next((each for each in provider.key_env if environ.get(each)), (*provider.key_env, "")[0])
    address = environ.get(provider.url_env, "").rstrip("/")
    if address and not address.endswith(provider.url_path):
        address += provider.url_path
    if provider.access == "aws":
        return _on_bedrock(name, api, address, key_env, environ)
    if provider.access == "gcp":
        return _on_vertex(name, api, address, environ)
    urls: list[str] = []
    for url in urls_of(base_url) or [address or provider.base_url]:
        value = fill_variables(url, "base_url")
        urls += [value] if value == url else value.split(",")
    urls = list(dict.fromkeys(url.strip().rstrip("/") for url in urls))
    if provider.access == "azure":
        return ModelEndpoint(name, api, urls, key_env, (provider.url_env, key_env), hosted=True, access="azure")
    hosted = any(url == provider.base_url and url.startswith("https://") for url in urls)
    prefix = model.removesuffix(name).rstrip("/")
    return ModelEndpoint(name, api, urls, key_env, (key_env,) if hosted else (), hosted, provider=prefix)


def _on_bedrock(name: str, api: Api, address: str, key_env: str, environ: Mapping[str, str]) -> ModelEndpoint:
    region_env = next((each for each in ("AWS_REGION", "AWS_DEFAULT_REGION") if environ.get(each)), "AWS_REGION")
    region = environ.get(region_env, "")
    root = address or f"https://bedrock-runtime.{region}.amazonaws.com"
    url = root if api == "messages" else f"{root}/openai/v1"
    return ModelEndpoint(name, api, [url], key_env, (region_env,), hosted=True, access="aws", region=region)


def _on_vertex(name: str, api: Api, address: str, environ: Mapping[str, str]) -> ModelEndpoint:
    project_env = "GOOGLE_CLOUD_PROJECT"
    location = environ.get("GOOGLE_CLOUD_LOCATION") or "global"
    host = "aiplatform.googleapis.com" if location == "global" else f"{location}-aiplatform.googleapis.com"
    place = f"{address or f'https://{host}'}/v1/projects/{environ.get(project_env, '')}/locations/{location}"
    publishers = {"messages": "/publishers/anthropic", "gemini": "/publishers/google"}
    url = place + publishers.get(api, "/endpoints/openapi")
    return ModelEndpoint(name, api, [url], "", (project_env,), hosted=True, access="gcp")


def suggest_prefix(model: str, base_url: str | list[str] | None) -> str | None:
    """Return a question about an unknown prefix if a provider has a similar one."""
    prefix, slash, _ = model.partition("/")
    if base_url is not None or not slash or prefix in PROVIDERS:
        return None
    import difflib  # only for wrong names

    similar = difflib.get_close_matches(prefix.lower(), PROVIDERS, n=1, cutoff=0.7)
    return f"{prefix}/ is not the prefix of a provider: did you mean {similar[0]}/?" if similar else None


def identity_of_model(identity: dict[str, Any], block: PromptGrader | ResponderBlock) -> dict[str, Any]:
    """Return the identity of a block that asks a model, without the model's address.

    `chat`, the usual API, is left out.
    """
    assert isinstance(block.model, str)
    provider, name = provider_of(block.model, block.base_url)
    api = block.api or provider.api
    kept = {key: value for key, value in identity.items() if key not in ("base_url", "api_key_env", "api", "batch")}
    return {**kept, "model": name, **({} if api == "chat" else {"api": api})}
