"""Clouds: requests are signed as the real services verify them, and a missing package is named."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import pytest

from tests.support.breaking import kept
from tests.support.providers import Asked, Say
from tests.support.providers.chat import WIRE as CHAT
from tests.support.providers.messages import WIRE as MESSAGES
from tests.support.running import run_dir
from tests.support.serving import read_body, send, serving
from tests.support.specs import command, load, write_spec

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from http.server import BaseHTTPRequestHandler
    from pathlib import Path

    from tests.support.providers import Wire

BEDROCK = {"AWS_REGION": "eu-west-1", "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret-of-aws"}
CLAUDE = "us.anthropic.claude-x-v1:0"


class Request:
    """A request as it came over the wire."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self.path = handler.path
        self.headers = {name.lower(): value for name, value in handler.headers.items()}
        self.data = read_body(handler)

    @property
    def body(self) -> Any:
        return json.loads(self.data)


def asking(answer: Callable[[Request], tuple[int, Any]]) -> AbstractContextManager[str]:
    """Serve what a function returns for each request: a status and a body."""
    return serving(lambda handler: send(handler, *answer(Request(handler))))


def reply(wire: Wire, request: Request) -> Any:
    """An answer in the form of an API."""
    return wire.whole(Say("2"), Asked(request.path, request.headers, {"model": "m", **request.body}))


def sigv4(request: Request, host: str) -> str:
    """The Authorization header of a request, computed again from what came over the wire."""
    from botocore.auth import SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    again = AWSRequest("POST", host + request.path, data=request.data, headers={"Host": request.headers["host"]})
    again.headers["X-Amz-Date"] = again.context["timestamp"] = request.headers["x-amz-date"]
    token = request.headers.get("x-amz-security-token")
    if token:
        again.headers["X-Amz-Security-Token"] = token
    signer = SigV4Auth(
        Credentials(BEDROCK["AWS_ACCESS_KEY_ID"], BEDROCK["AWS_SECRET_ACCESS_KEY"], token), "bedrock", "eu-west-1"
    )
    signature = signer.signature(signer.string_to_sign(again, signer.canonical_request(again)), again)
    names = signer.signed_headers(signer.headers_to_sign(again))
    return f"AWS4-HMAC-SHA256 Credential={signer.scope(again)}, SignedHeaders={names}, Signature={signature}"


@pytest.fixture
def evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_BEARER_TOKEN_BEDROCK", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)

    def run(model: str, environ: dict[str, str], code: int = 0, **target: Any) -> Any:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        path = write_spec(tmp_path, target={"model": model, **target}, limits={"concurrency": 2, "retries": 0})
        done = command(monkeypatch, capsys, tmp_path, "eval", path, "--display", "none")
        assert done.code == code, done.out + done.err
        return done

    return run


@pytest.mark.parametrize("token", [None, "session-token-of-aws"])
@pytest.mark.parametrize("model", [CLAUDE, "arn:aws:bedrock:eu-west-1:1:inference-profile/eu.anthropic.claude-x"])
def test_bedrock_verifies_the_signature_of_claudes_requests(
    evaluate: Any, tmp_path: Path, model: str, token: str | None
) -> None:
    pytest.importorskip("botocore")
    asked: list[Request] = []

    def answer(request: Request) -> tuple[int, Any]:
        if request.headers["authorization"] != sigv4(request, url):
            return 403, {"message": "The request signature we calculated does not match the signature you provided."}
        asked.append(request)
        return 200, reply(MESSAGES, request)

    with asking(answer) as url:
        session = {"AWS_SESSION_TOKEN": token} if token else {}
        evaluate(f"bedrock/{model}", {**BEDROCK, **session, "AWS_ENDPOINT_URL_BEDROCK_RUNTIME": url})
    assert len(asked) == len(kept(run_dir(tmp_path))) == 2
    for request in asked:
        assert request.path.endswith("/invoke") and request.path.count("/") == 3, "a name's slashes are its own"
        assert request.body["anthropic_version"] == "bedrock-2023-05-31"
        assert not request.body.keys() & {"model", "stream"}
        assert request.headers.get("x-amz-security-token") == token


@pytest.mark.parametrize("key", [None, "bedrock-api-key-1"])
def test_other_models_of_bedrock_are_asked_by_chat(evaluate: Any, key: str | None) -> None:
    pytest.importorskip("botocore")

    def answer(request: Request) -> tuple[int, Any]:
        expected = f"Bearer {key}" if key else sigv4(request, url)
        if request.headers["authorization"] != expected or request.path != "/openai/v1/chat/completions":
            return 403, {"message": "refused"}
        return 200, reply(CHAT, request)

    with asking(answer) as url:
        bearer = {"AWS_BEARER_TOKEN_BEDROCK": key} if key else {}
        evaluate("bedrock/openai.gpt-oss-20b-1:0", {**BEDROCK, **bearer, "AWS_ENDPOINT_URL_BEDROCK_RUNTIME": url})


def test_streams_of_bedrock_are_refused_by_name(evaluate: Any) -> None:
    done = evaluate(f"bedrock/{CLAUDE}", BEDROCK, code=2, stream=True)
    assert f"bedrock/{CLAUDE} cannot be streamed" in done.err and "Remove `stream: true`" in done.err


def test_a_missing_package_of_aws_is_named_and_a_key_needs_none(evaluate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    done = evaluate(f"bedrock/{CLAUDE}", BEDROCK, code=2)
    assert "botocore" in done.err and 'pip install "holdfast-evals[aws]"' in done.err
    with asking(lambda request: (200, reply(MESSAGES, request))) as url:
        evaluate(
            f"bedrock/{CLAUDE}",
            {**BEDROCK, "AWS_BEARER_TOKEN_BEDROCK": "key-1234567", "AWS_ENDPOINT_URL_BEDROCK_RUNTIME": url},
        )


def test_missing_credentials_and_regions_are_named(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("botocore")
    monkeypatch.delenv("AWS_REGION", raising=False)
    assert "AWS_REGION is not set" in evaluate(f"bedrock/{CLAUDE}", {}, code=2).err
    nowhere = {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REGION": "eu-west-1",
    }
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert "there are no AWS credentials" in evaluate(f"bedrock/{CLAUDE}", nowhere, code=2).err


class TestVertex:
    """Google's tokens: asked for with a signed assertion, renewed when they expire, and never shown."""

    @pytest.fixture
    def account(self, tmp_path: Path) -> Any:
        """The file of a service account, and its public key."""
        pytest.importorskip("google.auth")
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import rsa

        key = rsa.generate_private_key(65537, 2048)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

        def write(token_uri: str) -> str:
            fields = {"type": "service_account", "client_email": "a@b", "private_key": private.decode()}
            path = tmp_path / "account.json"
            path.write_text(json.dumps({**fields, "token_uri": token_uri, "private_key_id": "1", "project_id": "p"}))
            return str(path)

        return write, public

    def test_claude_is_asked_by_raw_predict_with_the_token_of_the_account(
        self, evaluate: Any, account: Any, tmp_path: Path
    ) -> None:
        from google.auth import jwt

        decode: Any = jwt.decode

        write, public = account
        tokens: list[str] = []
        asked: list[Request] = []

        def answer(request: Request) -> tuple[int, Any]:
            if request.path == "/token":
                assertion = parse_qs(request.data.decode())["assertion"][0]
                claims = decode(assertion, certs=public.decode())
                assert claims["iss"] == "a@b"
                tokens.append(f"token-number-{len(tokens)}")
                # Shorter than google-auth's safety margin, so that the next request needs another one.
                return 200, {"access_token": tokens[-1], "expires_in": 1, "token_type": "Bearer"}
            if request.headers.get("authorization") not in {f"Bearer {token}" for token in tokens}:
                return 401, {"error": {"message": f"no: {request.headers.get('authorization')}"}}
            asked.append(request)
            return 200, reply(MESSAGES, request)

        with asking(answer) as url:
            environ = {
                "GOOGLE_APPLICATION_CREDENTIALS": write(f"{url}/token"),
                "GOOGLE_CLOUD_PROJECT": "p-1",
                "GOOGLE_CLOUD_LOCATION": "europe-west1",
                "GOOGLE_VERTEX_BASE_URL": url,
            }
            evaluate("vertex/claude-x@20260101", environ)
        place = "/v1/projects/p-1/locations/europe-west1/publishers/anthropic/models"
        assert {request.path.replace("%40", "@") for request in asked} == {f"{place}/claude-x@20260101:rawPredict"}
        assert all(request.body["anthropic_version"] == "vertex-2023-10-16" for request in asked)
        assert not any("model" in request.body for request in asked)
        assert len(tokens) >= 2, "renewed"
        stored = b"".join(path.read_bytes() for path in run_dir(tmp_path).rglob("*") if path.is_file())
        assert b"token-number" not in stored

    def test_a_missing_package_or_project_is_named(self, evaluate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
        assert "GOOGLE_CLOUD_PROJECT is not set" in evaluate("vertex/claude-x", {}, code=2).err
        monkeypatch.setitem(sys.modules, "google.auth", None)
        done = evaluate("vertex/claude-x", {"GOOGLE_CLOUD_PROJECT": "p"}, code=2)
        assert "google-auth" in done.err and 'pip install "holdfast-evals[gcp]"' in done.err


def test_azure_is_sent_the_key_in_its_own_header(evaluate: Any) -> None:
    def answer(request: Request) -> tuple[int, Any]:
        if request.headers.get("api-key") != "key-of-azure" or "authorization" in request.headers:
            return 401, {"error": {"message": "Access denied"}}
        assert (request.path, request.body["model"]) == ("/openai/v1/chat/completions", "my-gpt")
        return 200, reply(CHAT, request)

    with asking(answer) as url:
        evaluate("azure/my-gpt", {"AZURE_OPENAI_ENDPOINT": url, "AZURE_OPENAI_API_KEY": "key-of-azure"})


def test_the_target_of_a_bedrock_model_can_be_loaded_without_credentials(tmp_path: Path) -> None:
    assert load(tmp_path, target={"model": f"bedrock/{CLAUDE}"}).target.model == f"bedrock/{CLAUDE}"
