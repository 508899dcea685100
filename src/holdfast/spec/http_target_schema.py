"""The model of the target that is a workflow behind HTTP."""

from typing import Any, ClassVar

from pydantic import Field

from holdfast.http.urls import bare_url
from holdfast.spec.target_schema import TargetBlock


class HttpTarget(TargetBlock):
    """A workflow behind HTTP: JSON is posted, the answer picked from what comes back."""

    http: str = Field(pattern=r"^(https?://|\$\{\w+\})")
    """URL to post to. May name environment variables as `${NAME}`."""
    request: dict[str, Any]
    """Body of the request. Strings in it are templates with `prompt`, `messages`, `trial` and the row's fields. A text
    that is a single `{{ expression }}` keeps the type of its value."""
    response: str = "@"
    """[JMESPath](https://jmespath.org) of the answer in the reply, or in each event of a stream. Default: the whole
    reply."""
    stream_end: str | None = Field(default=None, min_length=1)
    """Data or name of the event that ends a stream. `close` accepts the end of the connection. Default: `[DONE]`, or
    the last chunk of the transfer."""
    headers: dict[str, str] = {}
    """HTTP headers. Values may name environment variables, as in `"Bearer ${TOKEN}"`."""
    version: str | None = None
    """Change this when the workflow answers differently from now on."""

    templates: ClassVar[tuple[str, ...]] = ("request",)
    sees_row: ClassVar[bool] = False

    @property
    def reports_cost(self) -> bool:
        """False: nothing is known of the models behind the URL."""
        return False

    @property
    def label(self) -> str:
        """The URL without credentials and query."""
        return bare_url(self.http)
