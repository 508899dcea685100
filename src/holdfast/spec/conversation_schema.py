"""Models of what is said beside a prompt: messages with files, the simulated user, and checks between turns."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from holdfast.spec.schema import FILE_KINDS, Api, BaseUrl, Block, FunctionName, Params


class PartBlock(Block):
    """A part of a message: a text or a file. Paths are relative to the eval file's folder, or to the dataset's."""

    text: str | None = None
    """Template of a text."""
    image: str | None = None
    """Template of the path of an image, or of a `data:` URL."""
    audio: str | None = None
    """Template of the path of a recording, or of a `data:` URL."""
    file: str | None = None
    """Template of the path of another file, such as a PDF, or of a `data:` URL."""

    @property
    def named(self) -> tuple[str, str]:
        """The kind of the part, and its template."""
        return next((kind, value) for kind in ("text", *FILE_KINDS) if (value := getattr(self, kind)) is not None)

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if [self.text, self.image, self.audio, self.file].count(None) != 3:
            raise ValueError("must be one of `text`, `image`, `audio` and `file`")
        return self


class MessageBlock(Block):
    """A message of the conversation up to the target's first reply."""

    role: Literal["system", "user", "assistant"]
    """Who says it. The last message is the user's."""
    content: str | list[str | PartBlock]
    """Template of the text, or a list of texts and files: see [messages](conversations.md#messages-and-files)."""

    def templated(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield the templates of the message with their locations in it."""
        if isinstance(self.content, str):
            yield ("content",), self.content
            return
        for number, part in enumerate(self.content):
            if isinstance(part, str):
                yield ("content", number), part
            else:
                kind, source = part.named
                yield ("content", number, kind), source


class ResponderBlock(Block):
    """A simulated user: it replies to the target, stops, or abstains. A model with instructions, or a function."""

    model: str | None = None
    """Model that plays the user. Default: the target's model and endpoint."""
    python: FunctionName | None = None
    """Function that plays the user instead of a model, as `file.py:function` or `package.module:function`. It may
    take `messages`, `sample` and `turn`, and returns the next message, or None to stop."""
    instructions: str | None = None
    """Who the user is and what they want. A template over the row."""
    max_followups: Annotated[int, Field(ge=1)] | str
    """Maximum number of messages after the prompt, or an expression over the row, with 0 for rows without a
    simulated user."""
    stop_when: str | None = None
    """Expression over `output`, `turn` and the row's fields. The conversation ends as soon as it is true."""
    base_url: BaseUrl | None = None
    """URL of the model that plays the user, or a list of URLs. Default: the target's."""
    api_key_env: str | None = None
    """Environment variable that holds the API key. Default: the target's."""
    api: Api | None = None
    """API of that model, as for the target. Default: the target's, or that of the model's provider."""
    params: Params = {}
    """Parameters sent with each request."""
    version: str | None = None
    """Change this when the simulated user behaves differently from now on."""

    templates: ClassVar[tuple[str, ...]] = ("instructions",)

    @model_validator(mode="after")
    def _somebody(self) -> Self:
        if self.python is not None and (self.model is not None or self.instructions is not None):
            raise ValueError("must be either a function (python) or a model with instructions, not both")
        if self.python is None and not self.instructions:
            raise ValueError("needs instructions for the model that plays the user, or a python function")
        return self


class CheckpointBlock(Block):
    """Graders that run after a turn and may end the conversation."""

    after_turn: int = Field(ge=1)
    """Number of the turn to check, counted from 1."""
    on_failure: Literal["continue", "stop"] = "continue"
    """Effect of a failed checkpoint: `continue` the conversation, or `stop` it with score 0. The trial fails in
    either case."""
    where: str | None = None
    """Expression over the row's fields. Where it is false, the checkpoint does not apply."""
    graders: list[dict[str, Any]] = Field(min_length=1)
    """Graders that check the conversation up to this turn."""
