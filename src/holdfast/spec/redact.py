"""Removes secrets before anything is shown or stored.

In evals: passwords, header values, and values in URLs. In the output of models, programs and servers: the values of
environment variables that hold secrets (`Secrets`).
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote

import msgspec

from holdfast.canonical import digest_bytes
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

T = TypeVar("T")

_HIDDEN = "(hidden)"
_URLS = ("base_url", "http", "url", "tracking_uri")

_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
_SHORTEST_SECRET = 8
"""shorter values, as in `KEY=none`, occur in texts by chance"""
_WORD_OR_NUMBER = re.compile(r"[A-Za-z]{1,19}|\d+")
"""values that occur in texts by chance"""
MARK: Final = b"(hidden: $"
"""how the replacement of a secret begins"""

_SECRET_VARIABLE = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD)$", re.IGNORECASE)

VARIABLE = re.compile(r"\$\{(\w+)\}")
"""an environment variable in a file"""


def looks_secret(name: str) -> bool:
    """Return True if the name of an environment variable suggests a secret."""
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

    So a changed value is noticed, and the value itself stays unknown. A hidden value stays as it is, because an eval
    may be read back from a manifest. The name of an environment variable is not secret.
    """
    start, mark, query = url.partition("?")
    shown = "&".join(_hidden_pair(pair) for pair in query.split("&"))
    return _without_password(start) + mark + (shown if query else "")


def _is_harmless(value: str) -> bool:
    """Return True for a word, a number or the path of a file; a secret may begin with `/` or `~`, too."""
    if _WORD_OR_NUMBER.fullmatch(value):
        return True
    return value[0] in "/~" and os.path.exists(os.path.expanduser(value))  # noqa: PTH110, PTH111 - never raises


class Secrets:
    """The values of environment variables that hold secrets, and their replacement by `(hidden: $NAME)`.

    A value is found as it is, in JSON inside a text, and in a URL. Other encodings, such as base64, and names of files
    are not searched.
    """

    def __init__(
        self,
        names: Iterable[str] = (),
        notice: Callable[[str], object] = lambda _: None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """`names` are the eval's variables that hold secrets, whatever they are called.

        `notice` is called once for each variable whose value is found.
        """
        named = {*names}
        self._notice = notice
        self._reported: set[str] = set()
        spellings: dict[str, str] = {}
        for name, value in environ.items():
            if len(value) >= _SHORTEST_SECRET and (
                name in named or (_SECRET_NAME.search(name) and not _is_harmless(value))
            ):
                for spelling in _spellings(value):
                    spellings.setdefault(spelling, name)
        self._spellings = sorted(spellings.items(), key=lambda pair: -len(pair[0]))
        """the longest first, since it may contain another one"""
        self._needles = [*dict.fromkeys(_json(spelling) for spelling, _ in self._spellings)]

    def found_in(self, data: bytes) -> bool:
        """Return True if a line of JSON has a secret in it."""
        for needle in self._needles:  # noqa: SIM110 - a generator takes twice as long
            if needle in data:
                return True
        return False

    def hide(self, text: str) -> str:
        """Return a text without secrets."""
        for spelling, name in self._spellings:
            if spelling in text:
                text = text.replace(spelling, f"(hidden: ${name})")
                if name not in self._reported:
                    self._reported.add(name)
                    self._notice(
                        f"the value of ${name} appeared in what the target, a tool or a grader returned. It was "
                        f"replaced by (hidden: ${name}) before it was written or sent on; the output counts it as "
                        "`redacted`"
                    )
        return text

    def clean(self, value: T) -> T:
        """Return JSON without secrets; the value itself if it contains no secret."""
        if not self._needles:
            return value
        try:
            if not self.found_in(_encoder.encode(value)):
                return value
        except (TypeError, ValueError, msgspec.MsgspecError):  # not JSON; the writer reports it
            return value
        cleaned: T = self._cleaned(value)
        return cleaned

    def _cleaned(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, dict):
            return {self._cleaned(key): self._cleaned(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._cleaned(each) for each in value]
        if isinstance(value, msgspec.Struct):
            return msgspec.convert(self._cleaned(msgspec.to_builtins(value)), type(value))
        return value

    def clean_stream(self, events: list[Any]) -> list[Any]:
        """Return the events of a stream without secrets, even if a secret is split among events.

        Texts at the same place of each event belong together. A secret is replaced in the event that it begins in.
        """
        events = self.clean(events)
        if not self._needles:
            return events
        places: dict[Place, list[tuple[int, str]]] = {}
        for number, event in enumerate(events):
            for place, text in _texts(event):
                places.setdefault(place, []).append((number, text))
        changes: list[dict[Place, str]] = [{} for _ in events]
        for place, pieces in places.items():
            joined = "".join(text for _, text in pieces)
            if len(pieces) > 1 and self.hide(joined) != joined:
                for (number, _), text in zip(pieces, self._divided([text for _, text in pieces]), strict=True):
                    changes[number][place] = text
        return [_with_texts(event, new) if new else event for event, new in zip(events, changes, strict=True)]

    def _divided(self, pieces: list[str]) -> list[str]:
        """Return the pieces of a text, with each secret replaced in the piece that it begins in."""
        joined, new = "".join(pieces), [""] * len(pieces)
        owners = [number for number, piece in enumerate(pieces) for _ in piece]
        at = 0
        while at < len(joined):
            match = next(((text, name) for text, name in self._spellings if joined.startswith(text, at)), None)
            text, shown = (joined[at], joined[at]) if match is None else (match[0], f"(hidden: ${match[1]})")
            new[owners[at]] += shown
            at += len(text)
        return new


Place = tuple[str | int, ...]
"""the place of a text in an event: keys of mappings and positions in lists"""


def _texts(value: Any, place: Place = ()) -> Iterable[tuple[Place, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _texts(each, (*place, key))
    elif isinstance(value, list):
        for position, each in enumerate(value):
            yield from _texts(each, (*place, position))


def _with_texts(value: Any, texts: Mapping[Place, str], place: Place = ()) -> Any:
    if isinstance(value, str):
        return texts.get(place, value)
    if isinstance(value, dict):
        return {key: _with_texts(each, texts, (*place, key)) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_texts(each, texts, (*place, position)) for position, each in enumerate(value)]
    return value


_encoder: Final = msgspec.json.Encoder()


def _json(text: str) -> bytes:
    """Return a text as JSON, without the quotes."""
    return _encoder.encode(text.encode("utf-8", "replace").decode())[1:-1]


def _spellings(value: str) -> Iterable[str]:
    """Yield the forms of a value in texts: as it is, in JSON up to two levels deep, and in a URL."""
    once = _json(value).decode()
    yield from dict.fromkeys(
        (value, once, _json(once).decode(), value.replace("/", "\\/"), quote(value, safe=""), quote(value))
    )


def secret_variables(data: Any) -> set[str]:
    """Return the environment variables that an eval uses as secrets: keys, headers, and values in the query of URLs."""
    if isinstance(data, list):
        return {name for each in data for name in secret_variables(each)}
    names: set[str] = set()
    for key, value in data.items() if isinstance(data, dict) else ():
        if key == "api_key_env" and isinstance(value, str):
            names.add(value)
        elif key == "headers" and isinstance(value, dict):
            names.update(name for header in value.values() for name in VARIABLE.findall(str(header)))
        elif key in _URLS and isinstance(value, str):
            names.update(VARIABLE.findall(value.partition("?")[2]))
        elif key != "samples":
            names |= secret_variables(value)
    return names


def redact(text: str) -> str:
    """Remove passwords in URLs, and values of environment variables that hold secrets, from a text."""
    return re.sub(r"//[^/@\s]+@", "//", Secrets().hide(text))


def without_secrets(data: dict[str, Any]) -> dict[str, Any]:
    """Return the resolved eval without secrets. API keys are only named by their environment variables.

    Rows stay as they are: a changed row would be another one when the run is resumed from its manifest.
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
