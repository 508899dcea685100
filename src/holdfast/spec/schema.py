"""The base of all schemas, and the types of their values. Unknown keys are errors."""

import os
import posixpath
import re
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from holdfast.spec.quantities import parse_duration, parse_size
from holdfast.spec.regex import compile_regex
from holdfast.spec.template import is_template, pattern_example

SCHEMA_VERSION = "1.0"
"""Version of the eval file format, MAJOR.MINOR. Part of no key."""

_ANSWERS = ("n", "best_of", "candidateCount", "candidate_count")
"""parameters for the number of answers, in several APIs"""


def parse_points(value: Any) -> Any:
    """Parse a difference of scores: `2pt` and `2` are 2 points of 0.01 each, `0.02` is the same as a share of 1."""
    text = value.strip() if isinstance(value, str) else value
    in_points = isinstance(text, str) and text.endswith("pt")
    try:
        number = float(text.removesuffix("pt") if isinstance(text, str) else text) if not isinstance(text, bool) else -1
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number <= 100:  # also refuses NaN
        raise ValueError(f"{value!r} is not a difference: write 2pt for 2 points, or 0.02")
    if not in_points and 0.2 < number < 1:
        raise ValueError(f"{number:g} is ambiguous: write {number:g}pt or {number * 100:g}pt")
    return number / 100 if in_points or number >= 1 else number


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def as_dataset(value: Any) -> Any:
    """Return the block that a path, or a list of paths, stands for."""
    return {"path": value} if isinstance(value, str | list) else value


def _inside(path: str) -> str:
    """Normalize a path; raise ValueError if it leads out of its folder."""
    plain = posixpath.normpath(path)
    if not path.strip() or plain.startswith(("/", "~")) or plain.split("/")[0] in ("..", "."):
        raise ValueError(f"{path!r} does not name a file inside the folder it is relative to")
    return plain


def _urls(base_url: str | list[str]) -> str | list[str]:
    for url in urls_of(base_url):
        if not re.match(r"https?://[^/\s]+|\$\{\w+\}", url):
            raise ValueError(f"{url!r} is not a URL: it must start with http:// or https:// (or ${{NAME}})")
    if not base_url:
        raise ValueError("needs at least one URL")
    return base_url


def urls_of(base_url: str | list[str] | None) -> list[str]:
    """Return the URLs of a `base_url`, which is one URL, a list of URLs, or None."""
    return [base_url] if isinstance(base_url, str) else list(dict.fromkeys(base_url or []))


def one_or_all(urls: Sequence[str]) -> str | list[str] | None:
    """Return URLs in the form of a `base_url`: a single URL is a text."""
    return list(urls) if len(urls) > 1 else next(iter(urls), None)


def refuse_secret_paths(override: dict[str, Any]) -> None:
    """Raise ValueError if an override of another tool's configuration is a secret."""
    for path in override:
        if re.search(r"(^|_)(api_?key|access_key|secret|secret_key|password|token)$", path.rpartition(".")[2].lower()):
            raise ValueError(f"keys are not written into files: let {path} name an environment variable in the file")


def inside_workspace(path: str) -> str:
    """Normalize a path in a trial's workspace; raise ValueError if it leads out. Templates stay as they are."""
    return path if is_template(path) else _inside(path)


def check_pattern(pattern: str) -> str:
    """Return a pattern; raise ValueError if it cannot be compiled, whatever a row puts into its templates."""
    if (example := pattern_example(pattern)) is not None:
        compile_regex(example)
    return pattern


def _bare(formula: str) -> str:
    bare = formula.strip().removeprefix("{{").removesuffix("}}").strip()
    if not bare:
        raise ValueError("is an empty expression")
    return bare


def _names_function(reference: str) -> str:
    if not re.fullmatch(r"([^:]+\.py|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):[A-Za-z_][\w.]*", reference):
        raise ValueError(f"{reference!r} does not name a function: write FILE.py:NAME or PACKAGE.MODULE:NAME")
    return reference


def several_answers(params: Mapping[str, Any]) -> str | None:
    """Return the parameter that asks for several answers, if there is one. Only one of the answers would count."""
    nested = params.get("generationConfig")
    values = {**params, **(nested if isinstance(nested, dict) else {})}
    asked = (name for name in _ANSWERS if isinstance(values.get(name), int | float) and values[name] > 1)
    return next(asked, None)


def _one_answer(params: dict[str, Any]) -> dict[str, Any]:
    if (name := several_answers(params)) is not None:
        raise ValueError(f"`{name}` asks for several answers, of which one would count: write `trials:` instead")
    return params


Seconds = Annotated[float, BeforeValidator(parse_duration), Field(gt=0)]
Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
"""a number of bytes"""
Points = Annotated[float, BeforeValidator(parse_points)]
"""a difference of scores, as a share of 1"""
Strings = Annotated[list[str], BeforeValidator(_as_list)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_list)]
"""texts, none of them empty; a single text stands for a list of one"""
Params = Annotated[dict[str, Any], AfterValidator(_one_answer)]
"""parameters of requests to a model"""
BaseUrl = Annotated[str | list[str], AfterValidator(_urls)]
"""one URL of a model, or several; each request goes to the least busy one"""

Api = Literal["chat", "responses", "messages", "gemini", "completions"]
"""an API of models"""

ReasoningHistory = Literal["auto", "all", "last", "none"]
"""how much of its earlier reasoning a model gets back"""
Formula = Annotated[str, AfterValidator(_bare)]
"""an expression over the row, with or without the braces of a template"""
FunctionName = Annotated[str, AfterValidator(_names_function)]
"""a Python function: `file.py:name`, relative to the eval file, or `package.module:name`"""
EvalPath = Annotated[str, AfterValidator(_inside)]
"""a file in the eval's folder"""
WorkspacePath = Annotated[str, AfterValidator(inside_workspace)]
"""a file in a trial's workspace"""
Pattern = Annotated[str, Field(min_length=1), AfterValidator(check_pattern)]
"""a regular expression"""

NamedInputs = Strings | dict[str, Strings]
"""names for all code of the eval, or by `target` and names of graders"""

FILE_KINDS = ("image", "audio", "file")
"""kinds of files in a message"""

_DISABLE_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
_PLUGIN_LOADER = "pydantic.plugin._loader"
_NO_PLUGINS = ModuleType(_PLUGIN_LOADER)
_NO_PLUGINS.get_plugins = tuple  # type: ignore[attr-defined]


class Block(BaseModel):
    """A block of the eval file, with fixed keys and immutable values."""

    # For a fast start, a model is built only when it is used, and modules with models do not postpone annotations:
    # evaluating them from strings takes pydantic a third of its time.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), defer_build=True)

    templates: ClassVar[tuple[str, ...]] = ()
    """fields that hold templates over the row"""
    regexes: ClassVar[tuple[str, ...]] = ()
    """the templates among them that are patterns"""
    expressions: ClassVar[tuple[str, ...]] = ()
    """fields that hold expressions over the row"""
    as_written: ClassVar[tuple[str, ...]] = ()
    """fields with texts for another program, which has braces of its own"""
    instead: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """what to write instead of a template, by field that has no templates"""

    @classmethod
    def model_rebuild(cls, *, _parent_namespace_depth: int = 2, **options: Any) -> bool | None:
        """Build the model without pydantic's plug-ins: finding them reads the metadata of all installed packages.

        Models in users' code, even in this process, still have their plug-ins.
        """
        disabled = os.environ.get(_DISABLE_PLUGINS)
        os.environ[_DISABLE_PLUGINS] = "1"
        # The module that looks for them imports importlib.metadata and, through it, the package for mail.
        sys.modules.setdefault(_PLUGIN_LOADER, _NO_PLUGINS)
        try:
            return super().model_rebuild(_parent_namespace_depth=_parent_namespace_depth + 1, **options)
        finally:
            if sys.modules.get(_PLUGIN_LOADER) is _NO_PLUGINS:
                del sys.modules[_PLUGIN_LOADER]
            if disabled is None:
                del os.environ[_DISABLE_PLUGINS]
            else:
                os.environ[_DISABLE_PLUGINS] = disabled


def absent_block() -> Any:
    """Declare a block that is empty if the file lacks it. Its model is built only when a file is read."""
    return Field(default={}, validate_default=True)


def is_embedded(model: str) -> bool:
    """Return True for the name of a model that runs on this machine, inside Holdfast."""
    return model.startswith("local/")
