"""Token ids of texts: from the server that has the model, or from the model's `tokenizer.json` on this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast.canonical import digest_bytes
from holdfast.errors import AttemptError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from holdfast.spec.eval import Origin
    from holdfast.targets.model_server import ModelServer

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Tokenizer(Protocol):
    """Turns texts into token ids, without adding special tokens."""

    source: str
    """where the ids come from, for messages"""

    async def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ...

    async def prefix(self) -> int | None:
        """Return the token that stands before an empty context: BOS, else EOS; None where neither is known."""
        ...


class ServerTokenizer:
    """The tokenizer of the server, in the form of vLLM and SGLang or in that of llama.cpp."""

    def __init__(self, server: ModelServer, path: str, fields: Mapping[str, Any], key: str) -> None:
        self.source = f"token ids from the server's {path.lstrip('/')}"
        self._server = server
        self._path = path
        self._fields = fields
        self._key = key

    @classmethod
    async def find(cls, server: ModelServer, model: str) -> ServerTokenizer | None:
        """Return the tokenizer of a server; None for a server that has none."""
        vllm = {"model": model, "add_special_tokens": False}
        llama_cpp = {"add_special": False}
        for path in ("/tokenize", "/v1/tokenize"):
            for fields, key in ((vllm, "prompt"), (llama_cpp, "content")):
                tokenizer = cls(server, path, fields, key)
                reply = await server.find("POST", path, tokenizer.request("a"))
                if isinstance(reply, dict) and reply.get("tokens"):  # llama.cpp finds nothing in vLLM's form
                    return tokenizer
        return None

    def request(self, text: str) -> dict[str, Any]:
        """Return the body of a request."""
        return {**self._fields, self._key: text}

    async def encode(self, text: str) -> list[int]:
        """Ask the server for the ids of a text."""
        if not text:
            return []
        reply = await self._server.post(self._path, self.request(text))
        ids = reply.get("tokens") if isinstance(reply, dict) else None
        if not isinstance(ids, list) or not {int}.issuperset(map(type, ids)):
            raise AttemptError("bad_reply", f"{self._path} returned no token ids: {str(reply)[:200]}")
        return ids

    async def prefix(self) -> int | None:
        """Read the special tokens that vLLM shows under /tokenizer_info, and llama.cpp under /props."""
        for path in ("/tokenizer_info", "/props"):
            info = await self._server.find("GET", path)
            for name in ("bos_token", "eos_token"):
                token = info.get(name) if isinstance(info, dict) else None
                if isinstance(token, str) and (ids := await self.encode(token)):
                    return ids[0]
        return None


class LocalTokenizer:
    """A `tokenizer.json`, read by the package `tokenizers`."""

    def __init__(self, written: str, origin: Origin) -> None:
        self.source = f"token ids of {written}"
        try:
            import tokenizers
        except ImportError:
            raise origin.error(
                "target.tokenizer needs the package tokenizers", "Install it with: pip install tokenizers"
            ) from None
        path = tokenizer_file(written, origin)
        try:
            if path is None:
                self._tokenizer = tokenizers.Tokenizer.from_pretrained(written)
            else:
                self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare exceptions, for files and for the hub alike
            raise origin.error(f"tokenizer {written!r} cannot be loaded: {error}", _HINT) from error
        self._special = _special_tokens(path)

    async def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    async def prefix(self) -> int | None:
        """Return the id of the token that the folder's `tokenizer_config.json` calls BOS, else of EOS."""
        ids = (self._tokenizer.token_to_id(token) for token in self._special)
        return next((number for number in ids if number is not None), None)


_HINT = "It is a tokenizer.json, a folder with one, or a name on the Hugging Face hub such as owner/name."


def tokenizer_file(written: str, origin: Origin) -> Path | None:
    """Return the file that `target.tokenizer` names, relative to the eval file; None for a name on the hub."""
    path = origin.folder / Path(written).expanduser()
    if path.is_dir():
        path /= "tokenizer.json"
    if path.is_file():
        return path
    if written.endswith(".json") or not _HUB_NAME.fullmatch(written):
        raise origin.error(f"tokenizer: {path}: no such file", _HINT)
    return None


def tokenizer_identity(written: str, origin: Origin) -> str:
    """Return what identifies a tokenizer: the digest of its file, or its name on the hub."""
    path = tokenizer_file(written, origin)
    return written if path is None else digest_bytes(path.read_bytes())


def _special_tokens(path: Path | None) -> Iterable[str]:
    config = None if path is None else path.with_name("tokenizer_config.json")
    if config is None or not config.is_file():
        return []
    try:
        values = msgspec.json.decode(config.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError:
        return []
    tokens = (values.get(name) for name in ("bos_token", "eos_token"))
    return [token["content"] if isinstance(token, dict) else token for token in tokens if token]
