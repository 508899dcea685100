"""The `messages` of a row, and the files in them: images, audio and documents, identified by their content.

A part of a message names a file by its path, or holds it as a `data:` URL. A file that a row names has to be inside the
folder of the eval file or of the dataset, or inside a folder that the eval file spells out: a dataset from elsewhere
must not be able to send any file of this machine to a model.
"""

from __future__ import annotations

import os
import re
from base64 import b64decode, b64encode
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.canonical import digest_bytes
from holdfast.errors import DataError
from holdfast.spec.schema import FILE_KINDS
from holdfast.spec.template import RENDER_ERRORS, Template, expression

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.spec.eval import Eval
    from holdfast.spec.eval_schema import PartBlock

    Message = dict[str, Any]

_TYPES: Final = {
    **dict.fromkeys(("png", "gif", "webp", "bmp", "tiff", "heic"), "image/{}"),
    **dict.fromkeys(("wav", "mp3", "flac", "ogg", "aac", "m4a", "opus", "aiff"), "audio/{}"),
    **dict.fromkeys(("html", "css", "csv", "xml", "rtf"), "text/{}"),
    **dict.fromkeys(("pdf", "json", "zip"), "application/{}"),
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "tif": "image/tiff",
    "svg": "image/svg+xml",
    "txt": "text/plain",
    "md": "text/markdown",
    "docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    "xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
    "pptx": "application/vnd.openxmlformats-officedocument.presentationml.presentation",
}
"""media types by suffix, the same on every machine, as providers name them"""
_MARKS: Final = (
    (b"\x89PNG\r\n\x1a\n", 0, "image/png"),
    (b"\xff\xd8\xff", 0, "image/jpeg"),
    (b"GIF8", 0, "image/gif"),
    (b"WEBP", 8, "image/webp"),
    (b"WAVE", 8, "audio/wav"),
    (b"fLaC", 0, "audio/flac"),
    (b"OggS", 0, "audio/ogg"),
    (b"ID3", 0, "audio/mp3"),
    (b"\xff\xfb", 0, "audio/mp3"),
    (b"%PDF-", 0, "application/pdf"),
)
"""bytes, their offset, and the type of files that have them"""
PICTURES: Final = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
"""images that every browser shows, and that can do nothing else"""
_DATA_URL: Final = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w=.+-]+)*;base64,")
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_KEYS: Final = frozenset(("role", "content", "name", "tool_calls", "tool_call_id"))
_FORM: Final = "A message has a `role` and a `content`: a text, or a list of texts and mappings such as {image: PATH}."


class Attachment(msgspec.Struct, frozen=True):
    """A file of a message."""

    digest: str
    media_type: str
    name: str
    path: Path | None
    """None: the row holds the content"""
    data: bytes = b""

    def read(self) -> bytes:
        """Return the content as it is now."""
        return self.data if self.path is None else self.path.read_bytes()


class RowMessages:
    """The key `messages` of an eval."""

    def __init__(self, spec: Eval) -> None:
        self._formula = None if spec.messages_from is None else expression(spec.messages_from)
        self._messages = [(block.role, _compile(block.content)) for block in spec.messages]
        self._folder = spec.folder
        self._target = spec.target
        self._named = [
            spec.folder / os.path.dirname(part.source.partition("{{")[0])  # noqa: PTH120 - a text with a template in it
            for _, content in self._messages
            for kind, part in (content if isinstance(content, list) else ())
            if kind != "text"
        ]
        """folders that the eval file spells out"""

    @property
    def may_have_files(self) -> bool:
        """False if no row can name a file."""
        return self._formula is not None or bool(self._named)

    def render(self, fields: Mapping[str, Any], where: str) -> list[Message]:
        """Return the messages of a row. The part of a file has a `source`: its path or `data:` URL.

        Raises RENDER_ERRORS if an expression or a template does not fit the row, and DataError for what is no
        message.
        """
        if self._formula is None:
            return [{"role": role, "content": _fill_in(content, fields)} for role, content in self._messages]
        values = self._formula.required(fields)
        if not isinstance(values, list | tuple) or not values:
            raise DataError(where, f"messages give {values!r:.80}, not a list of messages", remedy=_FORM)
        messages = [_message(value, where) for value in values]
        if messages[-1]["role"] != "user":
            raise DataError(
                where,
                f"the last of its messages is of the role {messages[-1]['role']!r}, and has to be the user's",
                remedy="The target answers the last message: leave out its answer, for example with messages[:-1].",
            )
        return messages

    def files(self, fields: Mapping[str, Any], where: str) -> dict[str, Attachment]:
        """Return the files that the messages of a row name, by their source."""
        try:
            messages = self.render(fields, where)
        except RENDER_ERRORS:
            return {}  # reported with the templates, or an error of the trial when it runs
        files: dict[str, Attachment] = {}
        for part in parts_with_source(messages):
            files[part["source"]] = self._attachment(part["type"], part["source"], where)
        if files and not self._target.takes_files:
            raise DataError(
                where,
                f"its messages hold a file, and a target of the kind {self._target.kind!r} takes only texts",
                remedy="Files go to a `model` with a chat API, and to a `python` target.",
            )
        return files

    def contents(self, fields: Mapping[str, Any], where: str, files: Mapping[str, Attachment]) -> list[Message]:
        """Return the messages of a row as the target gets them, with the contents of files instead of their names.

        Only of a file that is no image and no recording does a model learn the name.
        """
        messages = self.render(fields, where)
        for part in parts_with_source(messages):
            file = files[part.pop("source")]
            part |= {"digest": file.digest, "media_type": file.media_type}
            if part["type"] == "file":
                part["name"] = file.name
        return messages

    def _attachment(self, kind: str, source: str, where: str) -> Attachment:
        if source.startswith("data:"):
            return _inline(kind, source, where)
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", source):
            raise DataError(
                where,
                f"{kind} {source!r:.200} is on another machine and can change at any time",
                remedy="Download the file, and name it by its path.",
            )
        path = self._find(kind, source, where)
        try:
            stat = path.stat()
            digest = _digest_file(path, (stat.st_size, stat.st_mtime_ns))
        except (OSError, ValueError) as error:
            reason = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
            remedy = f"Paths are relative to the eval file's folder, {self._folder}, or to the dataset's folder."
            raise DataError(where, f"{kind} {source!r:.200}: {reason}", remedy=remedy) from error
        return Attachment(digest, _media_type(kind, path.name, where), path.name, path)

    def _find(self, kind: str, source: str, where: str) -> Path:
        dataset = (self._folder / re.sub(r"(:\d+|\[\d+\])$", "", where)).parent
        bases = [self._folder, dataset]
        places = [Path(os.path.normpath(base / source)) for base in bases]
        allowed = [Path(os.path.normpath(folder)) for folder in (*bases, *self._named)]
        inside = [place for place in places if any(place.is_relative_to(folder) for folder in allowed)]
        if not inside:
            raise DataError(
                where,
                f"{kind} {source!r:.200} is outside the folders of the eval file and the dataset",
                remedy="Spell the folder out in the eval file, as in {image: /data/images/{{ name }}}.",
            )
        return next((place for place in inside if place.exists()), inside[0])


def parts_with_source(messages: list[Message]) -> Iterator[dict[str, Any]]:
    """Yield the parts of messages that name a file."""
    for message in messages:
        if isinstance(message["content"], list):
            yield from (part for part in message["content"] if "source" in part)


_Compiled = Template | list[tuple[str, Template]]


def _compile(content: str | list[str | PartBlock]) -> _Compiled:
    if isinstance(content, str):
        return Template(content, texts_only=True)
    parts = (("text", part) if isinstance(part, str) else part.named for part in content)
    return [(kind, Template(source, texts_only=True)) for kind, source in parts]


def _fill_in(content: _Compiled, fields: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    if isinstance(content, Template):
        return content.render(fields)
    return [_named_part(kind, template.render(fields)) for kind, template in content]


def _named_part(kind: str, value: str) -> dict[str, Any]:
    return {"type": kind, "text" if kind == "text" else "source": value}


def _message(value: Any, where: str) -> Message:
    """Return a message of a row in the form of conversations."""
    if not isinstance(value, dict) or not value.keys() <= _KEYS or value.get("role") not in _ROLES:
        raise DataError(where, f"one of its messages is {value!r:.120}", remedy=_FORM)
    content, calls = value.get("content"), value.get("tool_calls")
    if not isinstance(content, str | list) and not (calls and content is None):
        raise DataError(where, f"one of its messages is {value!r:.120}", remedy=_FORM)
    message = {key: value[key] for key in value if value[key] is not None or key == "content"}
    role = "system" if value["role"] == "developer" else value["role"]
    if isinstance(content, list):
        content = [_part(part, where) for part in content]
        if all(part["type"] == "text" for part in content):
            content = "".join(part["text"] for part in content)
    return {**message, "role": role, "content": content}


def _part(part: Any, where: str) -> dict[str, Any]:
    """Return a part of a row's message, in our form or in the form of chat completions."""
    match part:
        case str():
            return _named_part("text", part)
        case {"text": str(text)}:
            return _named_part("text", text)
        case {"image_url": {"url": str(source)}} | {"image_url": str(source)}:
            return _named_part("image", source)
        case {"input_audio": {"data": str(data), "format": str(suffix)}}:
            return _named_part("audio", f"data:audio/{suffix};base64,{data}")
        case {"file": {"file_data": str(source)}}:
            return _named_part("file", source)
        case dict():
            for kind in FILE_KINDS:
                if isinstance(part.get(kind), str) and part.keys() <= {"type", kind}:
                    return _named_part(kind, part[kind])
    raise DataError(where, f"a part of its messages is {part!r:.120}", remedy=_FORM)


def _inline(kind: str, source: str, where: str) -> Attachment:
    match = _DATA_URL.match(source)
    try:
        data = None if match is None else b64decode(source[match.end() :], validate=True)
    except ValueError:
        data = None
    if match is None or data is None:
        raise DataError(where, f"{kind} {source[:60]!r}… is not of the form data:TYPE;base64,…")
    suffix = match[1].rpartition("/")[2]
    name = f"{kind}.{'jpg' if suffix == 'jpeg' else suffix}"
    _check_kind(kind, match[1], name, where)
    return Attachment(digest_bytes(data), match[1], name, None, data)


def _media_type(kind: str, name: str, where: str) -> str:
    suffix = name.rpartition(".")[2].lower()
    media_type = _TYPES.get(suffix, "application/octet-stream").format(suffix)
    _check_kind(kind, media_type, name, where)
    return media_type


def _check_kind(kind: str, media_type: str, name: str, where: str) -> None:
    if kind == "file" or media_type.startswith(f"{kind}/"):
        return
    known = media_type != "application/octet-stream"
    problem = f"is {media_type}" if known else "has no suffix by which its type is known"
    raise DataError(
        where,
        f"{kind} {name!r:.200} {problem}",
        remedy=f"Write {{file: …}} for files that are no {kind}." if known else "Rename the file, as in picture.png.",
    )


@lru_cache(maxsize=100_000)
def _digest_file(path: Path, _stamp: tuple[int, int]) -> str:
    """Return the digest of a file, which is read once while its size and time stay equal."""
    return digest_bytes(path.read_bytes())


def media_type_of(data: bytes) -> str:
    """Return the media type of a file by its content, whatever it is called."""
    return next(
        (kind for mark, start, kind in _MARKS if data[start : start + len(mark)] == mark), "application/octet-stream"
    )


def data_url(data: bytes) -> str:
    """Return a file as a `data:` URL."""
    return f"data:{media_type_of(data)};base64,{b64encode(data).decode()}"
