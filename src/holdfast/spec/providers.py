"""Where models are found by the prefix of their name: `anthropic/claude-opus-5` is asked at Anthropic's, by its API.

A prefix counts where no `base_url` is given. `openai/` and `google/` are also organisations on the hub, whose models
many servers serve under their full names: for these two, $OPENAI_BASE_URL counts as a `base_url`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.spec.redact import fill_variables
from holdfast.spec.schema import urls_of

if TYPE_CHECKING:
    from holdfast.spec.grader_schema import PromptGrader
    from holdfast.spec.schema import Api, ResponderBlock


class Provider(NamedTuple):
    """A service, or a kind of server."""

    api: Api
    base_url: str
    """default; $`url_env` takes precedence"""
    key_env: str
    url_env: str = ""


OPENAI: Final = Provider("chat", "https://api.openai.com/v1", "OPENAI_API_KEY", "OPENAI_BASE_URL")
"""of names without a known prefix"""

PROVIDERS: Final = {
    "openai": OPENAI._replace(api="responses"),
    "anthropic": Provider("messages", "https://api.anthropic.com/v1", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"),
    "google": Provider(
        "gemini", "https://generativelanguage.googleapis.com/v1beta", "GEMINI_API_KEY", "GOOGLE_GEMINI_BASE_URL"
    ),
    "openrouter": Provider("chat", "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "mistral": Provider("chat", "https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
    "groq": Provider("chat", "https://api.groq.com/openai/v1", "GROQ_API_KEY"),
    "together": Provider("chat", "https://api.together.xyz/v1", "TOGETHER_API_KEY"),
    "deepseek": Provider("chat", "https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
    "xai": Provider("chat", "https://api.x.ai/v1", "XAI_API_KEY"),
    "ollama": Provider("chat", "http://127.0.0.1:11434/v1", "OLLAMA_API_KEY", "OLLAMA_BASE_URL"),
    "vllm": Provider("chat", "http://127.0.0.1:8000/v1", "VLLM_API_KEY", "VLLM_BASE_URL"),
}
_ALSO_ON_THE_HUB: Final = ("openai", "google")


class ModelEndpoint(NamedTuple):
    """Where and how a model is asked."""

    model: str
    """its name there"""
    api: Api
    urls: list[str]
    """base URLs"""
    key_env: str
    """the environment variable with the API key"""
    needs_key: bool
    """the service refuses requests without one"""


def has_provider(model: str, served_at: Any = None) -> bool:
    """Return True for a name with a provider's prefix; `served_at` is the URL of a server that may know the name."""
    prefix, _, name = model.partition("/")
    on_server = prefix in _ALSO_ON_THE_HUB and (served_at or os.environ.get(OPENAI.url_env))
    return bool(name) and prefix in PROVIDERS and not on_server


def provider_of(model: str, base_url: str | list[str] | None) -> tuple[Provider, str]:
    """Return the provider of a model, and the model's name there."""
    if base_url is not None or not has_provider(model):
        return OPENAI, model
    prefix, _, name = model.partition("/")
    return PROVIDERS[prefix], name


def endpoint_of(
    model: str, api: Api | None = None, base_url: str | list[str] | None = None, key_env: str | None = None
) -> ModelEndpoint:
    """Return where a model is asked. A variable in a `base_url` may hold several URLs, separated by commas."""
    provider, name = provider_of(model, base_url)
    default = (provider.url_env and os.environ.get(provider.url_env)) or provider.base_url
    urls: list[str] = []
    for url in urls_of(base_url) or [default]:
        value = fill_variables(url, "base_url")
        urls += [value] if value == url else value.split(",")
    urls = list(dict.fromkeys(url.strip().rstrip("/") for url in urls))
    hosted = any(url == provider.base_url and url.startswith("https://") for url in urls)
    return ModelEndpoint(name, api or provider.api, urls, key_env or provider.key_env, hosted)


def identity_of_model(identity: dict[str, Any], block: PromptGrader | ResponderBlock) -> dict[str, Any]:
    """Return the identity of a block that asks a model, without where the model is asked.

    The API is left out where it is `chat`, which once was the only one.
    """
    assert block.model is not None
    provider, name = provider_of(block.model, block.base_url)
    api = block.api or provider.api
    kept = {key: value for key, value in identity.items() if key not in ("base_url", "api_key_env", "api", "batch")}
    return {**kept, "model": name, **({} if api == "chat" else {"api": api})}
