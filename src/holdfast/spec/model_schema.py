"""Models of settings that few models need: prices, batches, and reasoning in the text of replies."""

from typing import Literal, Self

from pydantic import Field, model_validator

from holdfast.spec.schema import Block, Seconds


class Price(Block):
    """US dollars per million tokens."""

    input: float = Field(ge=0)
    """US dollars per million input tokens."""
    output: float = Field(ge=0)
    """US dollars per million output tokens."""
    cache_read: float | None = Field(default=None, ge=0)
    """US dollars per million input tokens that are read from the provider's cache. Default: those of `input`."""
    cache_write: float | None = Field(default=None, ge=0)
    """US dollars per million input tokens that are written to it. Default: those of `input`."""
    web_search: float | None = Field(default=None, ge=0)
    """US dollars per thousand web searches that the provider makes. Default: unknown."""


class BatchBlock(Block):
    """How requests are made in batches, which providers answer within a day at a lower price."""

    max_wait: Seconds | None = None
    """Longest time to wait for a batch, such as `6h`. It is then cancelled, and keeps what it has answered. Default: as
    long as the provider takes, which is at most a day."""
    then: Literal["batch", "live"] = "batch"
    """How to ask again for what a batch has not answered in time: in the next `batch`, or `live`, at the normal
    price."""
    size: int | None = Field(default=None, ge=1)
    """Maximum number of requests in a batch. Default: that of the provider, 50,000 or 100,000."""
    via: Literal["api", "files"] = "api"
    """How batches are handed over: to the provider by its `api`, or as `files` that you have answered with
    `vllm run-batch`."""

    @model_validator(mode="after")
    def _files_have_no_server(self) -> Self:
        if self.via == "files" and self.then == "live":
            raise ValueError("`then: live` needs a server: remove it, or `via: files`")
        return self


class ThoughtsBlock(Block):
    """`target.strip_reasoning`: how reasoning is marked in the text of replies."""

    start: str = "<think>"
    """Text with which reasoning begins. It may be missing, as where the prompt ends with it."""
    end: str = Field(default="</think>", min_length=1)
    """Text with which reasoning ends; the answer is what follows the last of them."""
    unfinished: Literal["keep", "drop"] = "keep"
    """Handling of a reply without the end: it is kept as it is, or all of it counts as reasoning (`drop`)."""
