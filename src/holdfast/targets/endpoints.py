"""Where a model is asked: at the URLs that the eval file names, else at the environment's, else at OpenAI's."""

from __future__ import annotations

import os
from typing import Final

from holdfast.spec.redact import filled
from holdfast.spec.schema import urls_of

DEFAULT_BASE_URL: Final = "https://api.openai.com/v1"


def base_urls(given: str | list[str] | None, default: str = DEFAULT_BASE_URL) -> list[str]:
    """The URLs of a `base_url`, each once. A variable that it names may hold several, with commas between."""
    found: list[str] = []
    for url in urls_of(given) or [os.environ.get("OPENAI_BASE_URL") or default]:
        value = filled(url, "base_url")
        found += [value] if value == url else value.split(",")
    return list(dict.fromkeys(url.strip().rstrip("/") for url in found))
