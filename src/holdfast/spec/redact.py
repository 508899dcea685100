"""Removes secrets before an eval is shown or stored: passwords, header values, and values in URLs."""

from __future__ import annotations

import os
import re
from typing import Any

from holdfast.canonical import digest_bytes
from holdfast.errors import UsageError

_HIDDEN = "(hidden)"
_URLS = ("base_url", "http", "url", "tracking_uri")

_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
_SHORTEST_SECRET = 8
"""shorter values, as in `KEY=none`, are found in texts by chance"""

_SECRET_VARIABLE = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD)$", re.IGNORECASE)

VARIABLE = re.compile(r"\$\{(\w+)\}")
"""an environment variable in a file"""


def looks_secret(name: str) -> bool:
    """Tell by its name whether an environment variable holds a secret."""
    return _SECRET_VARIABLE.search(name) is not None


def fill_variables(text: str, where: str) -> str:
    """Return a text with the values of the environment variables that it names."""
    for name in VARIABLE.findall(text):
        if name not in os.environ:
            raise UsageError(f"{where} names ${{{name}}}, which is not set in the environment")
    return VARIABLE.sub(lambda match: os.environ[match[1]], text)


def bare_url(url: str) -> str:
    """Return a URL for names and messages: without `user:password@`, query and fragment."""
    return _without_password(re.split(r"[?#]", url, maxsplit=1)[0])


def shown_url(url: str) -> str:
    """Return a URL for manifests and keys: values in its query are replaced by digits of their digests.

    So another value is noticed and the value itself stays unknown. What is hidden already stays as it is, since an
    eval may be read back from a manifest; a value that names an environment variable hides nothing.
    """
    start, mark, query = url.partition("?")
    shown = "&".join(_hidden_pair(pair) for pair in query.split("&"))
    return _without_password(start) + mark + (shown if query else "")


def redact(text: str) -> str:
    """Remove passwords in URLs, and values of environment variables that hold secrets, from a text."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and _SECRET_NAME.search(name):
            text = text.replace(value, _HIDDEN)
    return re.sub(r"//[^/@\s]+@", "//", text)


def without_secrets(data: dict[str, Any]) -> dict[str, Any]:
    """Return the resolved eval without secrets. API keys are only named by their environment variables.

    Rows stay as they are: a changed one would be another row when the run is taken up from its manifest.
    """
    return {key: _redact_key(key, value) for key, value in data.items()}


def _redact_key(key: str, value: Any) -> Any:
    if key == "samples":
        return value
    return _target(value) if key in ("target", "baseline") and isinstance(value, dict) else _tree(value)


def _target(block: dict[str, Any]) -> dict[str, Any]:
    redacted: dict[str, Any] = _tree(block)
    if isinstance(block.get("headers"), dict):
        redacted["headers"] = {
            name: value if "${" in str(value) else _HIDDEN for name, value in block["headers"].items()
        }
    for tool, redacted_tool in zip(block.get("tools") or [], redacted.get("tools") or [], strict=True):
        if isinstance(tool, dict) and isinstance(tool.get("mcp"), dict):
            redacted_tool["mcp"] = _target(tool["mcp"])
    return redacted


def _tree(value: Any) -> Any:
    if isinstance(value, list):
        return [_tree(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {key: _redact_urls(inner) if key in _URLS else _tree(inner) for key, inner in value.items()}


def _redact_urls(value: Any) -> Any:
    if isinstance(value, list):
        return [_redact_urls(inner) for inner in value]
    return shown_url(value) if isinstance(value, str) else _tree(value)


def _hidden_pair(pair: str) -> str:
    name, mark, value = pair.partition("=")
    if "${" in pair or re.fullmatch(r"\(hidden:[0-9a-f]{8}\)", value if mark else name):
        return pair
    hidden = f"(hidden:{digest_bytes((value if mark else name).encode())[7:15]})"
    return f"{name}={hidden}" if mark else hidden


def _without_password(url: str) -> str:
    return re.sub(r"//[^/@]+@", "//", url)
