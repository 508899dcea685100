"""The model of a benchmark by name."""

from pydantic import Field

from holdfast.spec.schema import Block


class BenchmarkBlock(Block):
    """A benchmark by name, instead of a dataset, a prompt and graders."""

    name: str = Field(min_length=1)
    """Name of the benchmark, as `holdfast tasks ls` lists it; `lm-eval/NAME` for lm-eval's own settings."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Number of examples before each question. Default: the benchmark's."""
    seed: int = 1234
    """Seed of the choice of examples."""
    chat: bool | None = None
    """Ask through a chat API, with the examples as turns of a conversation. Default: as the benchmark is defined, or
    as `target.api` says."""
    data: str | None = None
    """Folder with the datasets in the layout of the Hugging Face hub, or with the one dataset, relative to the eval
    file. Default: `$HOLDFAST_DATA`, else the hub."""
    revision: str | None = None
    """Commit, tag or branch of the dataset on the hub. Default: the commit that Holdfast pins, else the newest."""
    task: str | None = None
    """Task of lm-eval to ask instead of the name's, with the name's settings."""
