"""Access to servers: a header for all requests or a signature for each, and what users can do about refusals."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import AttemptError, Fault, UsageError
from holdfast.http.client import Signer
from holdfast.http.failures import Hints

if TYPE_CHECKING:
    from holdfast.dialects.types import Dialect
    from holdfast.spec.providers import ModelEndpoint

_SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
_LOG_IN: Final = "Log in again, then rerun the same command to resume from here."


def eval_hints(key: str, path: str = "") -> Hints:
    """Return hints about failed requests in the words of the eval file; `key` and `path` as in `Hints`."""
    return Hints(
        key=key,
        path=path,
        model="Check target.model: the server does not know it.",
        redirect="If you trust that server with the key and the prompts, set base_url (of an HTTP target: http) so "
        "that requests go there.",
        size="If such replies are wanted, raise limits.reply_bytes.",
        size_setting="limits.reply_bytes",
        end="Serve it over HTTP/1.1 with chunks, end it with `data: [DONE]`, or name its last event as "
        "target.stream_end. `stream_end: close` accepts such a stream.",
        end_setting="target.stream_end",
    )


def headers_of(endpoint: ModelEndpoint, dialect: Dialect) -> dict[str, str]:
    """Return the headers of all requests to a model."""
    key = os.environ.get(endpoint.key_env) if endpoint.key_env else None
    return {"api-key": key} if endpoint.access == "azure" and key else dialect.headers(key)


def signer_of(endpoint: ModelEndpoint) -> Signer | None:
    """Return the signer of requests to a model; None if a key is enough."""
    if endpoint.access == "aws" and not os.environ.get(endpoint.key_env):
        return _AwsSigner(endpoint)
    return _GoogleSigner() if endpoint.access == "gcp" else None


class _AwsSigner(Signer):
    """Signs requests with the credentials that AWS's own programs use, by Signature Version 4."""

    secrets = ()

    def __init__(self, endpoint: ModelEndpoint) -> None:
        try:
            from botocore.session import Session
        except ImportError as error:
            raise UsageError(
                f"bedrock/{endpoint.model} needs the package botocore to sign requests",
                remedy=f'pip install "holdfast-evals[aws]", or set {endpoint.key_env} to an API key of Bedrock.',
            ) from error
        self._region = endpoint.region
        self._credentials: Any = Session().get_credentials()
        if self._credentials is None:
            raise UsageError(
                f"bedrock/{endpoint.model}: there are no AWS credentials",
                remedy="Run `aws configure` or set AWS_PROFILE or AWS_ACCESS_KEY_ID, or set "
                f"{endpoint.key_env} to an API key of Bedrock.",
            )

    async def headers(self, url: str, body: bytes) -> dict[str, str]:
        return await asyncio.to_thread(self._sign, url, body)  # credentials that expire are renewed over the network

    def _sign(self, url: str, body: bytes) -> dict[str, str]:
        from botocore.auth import SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.exceptions import BotoCoreError

        try:
            credentials = self._credentials.get_frozen_credentials()
        except BotoCoreError as error:  # an expired login, which no retry renews
            raise Fault("auth", f"the AWS credentials cannot be renewed: {error}", remedy=_LOG_IN) from error
        request = AWSRequest("POST", url, data=body)
        SigV4Auth(credentials, "bedrock", self._region).add_auth(request)
        return dict(request.headers.items())


class _GoogleSigner(Signer):
    """Sends the tokens of Google's application default credentials."""

    def __init__(self) -> None:
        try:
            import google.auth
            import google.auth.exceptions
            import google.auth.transport.requests
        except ImportError as error:
            raise UsageError(
                "models of Vertex AI need the packages google-auth and requests",
                remedy='pip install "holdfast-evals[gcp]"',
            ) from error
        try:
            self._credentials: Any = google.auth.default(scopes=[_SCOPE])[0]
        except google.auth.exceptions.DefaultCredentialsError as error:
            raise UsageError(
                f"there are no credentials for Vertex AI: {error}",
                remedy="Run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS.",
            ) from error
        self._transport = google.auth.transport.requests.Request()
        self._renewing = asyncio.Lock()

    async def headers(self, url: str, body: bytes) -> dict[str, str]:
        async with self._renewing:
            if not self._credentials.valid:
                await asyncio.to_thread(self._renew)
        headers: dict[str, str] = {}
        self._credentials.apply(headers)
        return headers

    def _renew(self) -> None:
        from google.auth.exceptions import GoogleAuthError, TransportError

        try:
            self._credentials.refresh(self._transport)
        except TransportError as error:
            raise AttemptError("connection", f"the server of Google's tokens does not answer: {error}") from error
        except GoogleAuthError as error:
            raise Fault("auth", f"Google's credentials cannot be renewed: {error}", remedy=_LOG_IN) from error

    @property
    def secrets(self) -> tuple[str, ...]:
        return (self._credentials.token,) if self._credentials.token else ()
