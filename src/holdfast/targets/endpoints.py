"""Base URLs of models: those of the eval file, else that of the environment, else OpenAI's."""

from __future__ import annotations

import os
from typing import Final

from holdfast.spec.redact import fill_variables
from holdfast.spec.schema import urls_of

DEFAULT_BASE_URL: Final = "https://api.openai.com/v1"


def base_urls(base_url: str | list[str] | None, default: str = DEFAULT_BASE_URL) -> list[str]:
    """Return the URLs of a `base_url` without duplicates. A variable in it may hold several, separated by commas."""
    urls: list[str] = []
    for url in urls_of(base_url) or [os.environ.get("OPENAI_BASE_URL") or default]:
        value = fill_variables(url, "base_url")
        urls += [value] if value == url else value.split(",")
    return list(dict.fromkeys(url.strip().rstrip("/") for url in urls))
