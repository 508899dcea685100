"""The meaning of failures: an `AttemptError` concerns one request and may be retried, a `Fault` concerns all requests.

The status of a response decides, and the code and the message in its body. Servers say in headers or in the body when
to ask again.
"""

from __future__ import annotations

import re
import socket
import ssl
import time
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from holdfast.errors import AttemptError, Fault
from holdfast.http.response import NOT_JSON, TooLong, decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_LONGEST: Final = 600.0
_LIMITS: Final = (
    *((f"x-ratelimit-remaining-{unit}", f"x-ratelimit-reset-{unit}") for unit in ("requests", "tokens")),
    *(
        (f"anthropic-ratelimit-{unit}-remaining", f"anthropic-ratelimit-{unit}-reset")
        for unit in ("requests", "tokens", "input-tokens", "output-tokens")
    ),
)
"""pairs of headers: the remaining quota, and when it resets"""
_DURATION: Final = r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?"
_SECONDS: Final = (3600.0, 60.0, 1.0, 0.001)
_OTHER_PATH: Final = "Check the URL (an OpenAI-compatible base_url usually ends in /v1) and the model's name."


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """What users can do about failures, in the words of whoever makes the requests."""

    key: str = "Check the credentials, then run it again."
    """after 401 and 403"""
    path: str = ""
    """after 404; empty: a hint for OpenAI-compatible servers, or `model`"""
    model: str = "Check the model's name: the server does not know it."
    """after 404 about a model"""
    redirect: str = "If you trust that server with the credentials and the content, send requests there."
    size: str = ""
    """after a reply that is too large"""
    size_setting: str = ""
    """the name of the setting that limits the size"""
    end: str = "Serve it over HTTP/1.1 with chunks, or end it with `data: [DONE]`."
    """after a stream that may have been cut off"""
    end_setting: str = ""
    """the name of the setting that names the last event of a stream"""


NO_HINTS: Final = Hints()


class Refusals:
    """Makes the errors for one URL. No message repeats a secret: some servers repeat the key that they refuse."""

    def __init__(self, url: str, hints: Hints, secrets: Callable[[], Iterable[str]]) -> None:
        """`url` is for messages, without credentials and query."""
        self._url = url
        self._hints = hints
        self._secrets = secrets

    def of_response(self, status: int, headers: Mapping[str, str], data: bytes, url: str = "") -> AttemptError | Fault:
        """Return the error for a response that refuses a request."""
        code, message = _reason(data)
        text = self.clean(f"{url or self._url} answered {status}: {message}")
        refusal = self._of_status(status, code, message, text, headers)
        self._keep_body(refusal, data)
        if isinstance(refusal, AttemptError) and refusal.kind == "rate_limit" and refusal.retry_after is None:
            refusal.retry_after = limit_reset(headers, refusal.body)
        return refusal

    def reported(self, data: bytes, where: str) -> AttemptError | Fault:
        """Return the error that a server reports after it has answered 200."""
        code, message = _reason(data)
        text = self.clean(f"{self._url} reported an error {where}: {message}")
        failure = self._of_status(_status_of(code), code, message, text, {})
        self._keep_body(failure, data)
        return failure

    def of_exception(self, error: OSError) -> AttemptError | Fault:
        """Return the error for a connection that failed, or a reply that cannot be read."""
        failure = self._of_exception(error)
        failure.message = self.clean(failure.message)
        failure.remedy = failure.remedy and self.clean(failure.remedy)
        return failure

    def check_end(self, headers: Mapping[str, str], end: str | None) -> None:
        """Raise AttemptError unless a stream that ended without an end marker is known to be whole.

        `end` is the marker that was expected; None: any marker, `close`: no marker.
        """
        if end not in (None, "close"):
            setting = self._hints.end_setting and f" ({self._hints.end_setting})"
            raise AttemptError("bad_reply", f"the stream ended without {end!r}{setting}")
        chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        if end is None and not chunked and "content-length" not in headers:
            message = "the stream ended with its connection; the response may be truncated"
            raise AttemptError("bad_reply", message, remedy=self._hints.end, retry=False)

    def other_server(self, url: str, new: str) -> Fault:
        """Return the error for a redirect to another server, which gets neither the key nor the content."""
        message = f"{url} redirects to another server: {self.clean(new)[:300]}. Nothing was sent there."
        return Fault("rejected", message, remedy=self._hints.redirect)

    def too_many_redirects(self, most: int) -> AttemptError:
        """Return the error for a request that was redirected again and again."""
        return AttemptError("bad_reply", f"{self._url} redirects more than {most} times", retry=False)

    def clean(self, text: str) -> str:
        """Remove secrets from a message."""
        for secret in self._secrets():
            text = text.replace(secret, "(hidden)")
        return text

    def _keep_body(self, failure: AttemptError | Fault, data: bytes) -> None:
        with suppress(*NOT_JSON):
            failure.body = decode(self.clean(data.decode()))

    def _of_status(
        self, status: int, code: str, message: str, text: str, headers: Mapping[str, str]
    ) -> AttemptError | Fault:
        if status in (401, 403):
            return Fault("auth", text, status=status, remedy=self._hints.key)
        if status == 402 or code in ("insufficient_quota", "billing_hard_limit_reached", "quota_exceeded"):
            remedy = "Top up the account or wait for its quota, then run it again."
            return Fault("quota", text, status=status, remedy=remedy)
        if status == 404:
            about_model = "model" in message.lower() or "model" in code
            remedy = self._hints.path or (self._hints.model if about_model else _OTHER_PATH)
            return Fault("no_model", text, status=status, remedy=remedy)
        if status == 429 or _is_overload(status, headers, f"{code} {message}"):
            return AttemptError("rate_limit", text, status=status, retry_after=retry_after(headers))
        if status < 400 or status in (408, 409, 425) or status >= 500 or code == "workflow_error":
            # A 422 with this code is anything that happens inside a workflow, a passing failure of its model included.
            return AttemptError("server", text, status=status, retry_after=retry_after(headers))
        return AttemptError("bad_request", text, status=status, retry=False)

    def _of_exception(self, error: OSError) -> AttemptError | Fault:
        if isinstance(error, TooLong):
            setting = self._hints.size_setting and f" ({self._hints.size_setting})"
            remedy = self._hints.size or None
            return AttemptError("bad_reply", f"{self._url}: {error}{setting}", remedy=remedy, retry=False)
        place = f"{urlsplit(self._url).hostname}:{urlsplit(self._url).port or 'default port'}"
        if isinstance(error, ssl.SSLCertVerificationError):
            return Fault("refused", f"{place}: the certificate is not trusted ({error})")
        if isinstance(error, socket.gaierror):
            return Fault("refused", f"{place}: no such host", remedy="Check the URL and the network.", away=True)
        if isinstance(error, ConnectionRefusedError):
            remedy = f"Is the server running at {self._url}? Start it, then run the same command again."
            return Fault("refused", f"{place} refuses connections", remedy=remedy, away=True)
        return AttemptError("connection", f"{place}: {type(error).__name__}: {error}".rstrip(": "))


def is_error(value: Any) -> bool:
    """Return True for an event or a reply that reports an error, in one of the shapes that servers use."""
    if not isinstance(value, dict):
        return False
    failed = bool(value.get("error")) or "error" in (value.get("type"), value.get("object"))
    return failed or value.get("code") == "workflow_error"


def _status_of(code: str) -> int:
    """Return the HTTP status that an error inside a stream would have had, by its code.

    Statuses that would stop a whole run are left out: a workflow may report a failure of something that it called.
    """
    if "rate_limit" in code.lower():
        return 429
    if code in ("400", "413", "422", "429", "invalid_request_error", "context_length_exceeded"):
        return int(code) if code.isdigit() else 400
    return 500


def _reason(data: bytes) -> tuple[str, str]:
    """Return an error's code and message, from the shapes that servers use."""
    try:
        body = decode(data)
    except NOT_JSON:
        return "", data[:300].decode("utf-8", "replace").strip() or "no reason given"
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail") or error
        return str(error.get("code") or error.get("type") or ""), str(message)[:300]
    return "", str(error)[:300]


def _is_overload(status: int, headers: Mapping[str, str], reason: str) -> bool:
    """Return True for a server that reports an overload, and is not broken."""
    if status == 503:
        return "overload" in reason.lower() or retry_after(headers) is not None
    return status == 529


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait, from `retry-after-ms` or `Retry-After` in either of its forms.

    The names of the headers are in lower case.
    """
    if re.fullmatch(r"\d+(\.\d+)?", headers.get("retry-after-ms", "")):
        return min(float(headers["retry-after-ms"]) / 1000, _LONGEST)
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return min(float(value), _LONGEST)
    if value:
        import email.utils  # takes long to import

        try:
            moment = email.utils.parsedate_to_datetime(value)
        except ValueError:
            return None
        return min(max(0.0, moment.timestamp() - time.time()), _LONGEST)
    return None


def limit_reset(headers: Mapping[str, str], body: Any) -> float | None:
    """Return the seconds until exhausted limits reset, for a 429 without `Retry-After`."""
    resets = [_seconds(headers.get(reset, "")) for left, reset in _LIMITS if headers.get(left, "").strip() == "0"]
    waits = [wait for wait in (*resets, _delay_in(body)) if wait is not None]
    return min(max(waits), _LONGEST) if waits else None


def _seconds(value: str) -> float | None:
    """Read a duration such as `1s`, `6m0s` or `120ms`, seconds, or a time of RFC 3339."""
    value = value.strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    if value and (match := re.fullmatch(_DURATION, value)):
        return sum(float(part) * unit for part, unit in zip(match.groups(), _SECONDS, strict=True) if part)
    try:
        return max(0.0, datetime.fromisoformat(value).timestamp() - time.time())
    except ValueError:
        return None


def _delay_in(body: Any) -> float | None:
    """Read Google's `RetryInfo`, which is among the details of an error."""
    error = body.get("error") if isinstance(body, dict) else None
    details = error.get("details") if isinstance(error, dict) else None
    for detail in details if isinstance(details, list) else ():
        if isinstance(detail, dict) and isinstance(delay := detail.get("retryDelay"), str):
            return _seconds(delay)
    return None
