"""The base of all schemas, and the types of their values. Unknown keys are errors."""

import os
import posixpath
import re
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from holdfast.spec.regex import compile_regex
from holdfast.spec.template import is_template, pattern_example

SCHEMA_VERSION = "1.0"
"""Version of the eval file format, MAJOR.MINOR. Part of no key."""

_ANSWERS = ("n", "best_of", "candidateCount", "candidate_count")
"""parameters for the number of answers, in several APIs"""
_DURATION = r"(?:(\d+(?:\.\d+)?)h)?\s*(?:(\d+(?:\.\d+)?)m(?:in)?)?\s*(?:(\d+(?:\.\d+)?)s)?"


def parse_duration(value: Any) -> Any:
    """Seconds from `90`, `90s`, `5m`, `2h` or `1h30m`."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    match = re.fullmatch(_DURATION, text)
    if not text or match is None:
        raise ValueError("a duration such as 90, 90s, 5m or 1h30m")
    hours, minutes, seconds = (float(group or 0) for group in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def parse_size(value: Any) -> Any:
    """Bytes from `65536`, `64MB`, `1.5 GB` or `512 KiB`."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", value.strip().lower())
    if match is None:
        raise ValueError("a size such as 65536, 64MB or 1.5GB")
    number, unit, binary = match.groups()
    return round(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit or " "))


def parse_points(value: Any) -> Any:
    """A difference of scores, which are from 0 to 1: from `2pt` or `2`, which are points of 0.01, or from `0.02`."""
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
    """A path in its plainest form, or a ValueError where it would lead out of its folder."""
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
    """The URLs of a `base_url`: of one, of a list of them, or of none."""
    return [base_url] if isinstance(base_url, str) else list(dict.fromkeys(base_url or []))


def one_or_all(urls: Sequence[str]) -> str | list[str] | None:
    """URLs as a `base_url` has them: one alone as a text."""
    return list(urls) if len(urls) > 1 else next(iter(urls), None)


def refuse_secret_paths(override: dict[str, Any]) -> None:
    """Raise ValueError where a value laid over another tool's configuration is a secret."""
    for path in override:
        if re.search(r"(^|_)(api_?key|access_key|secret|secret_key|password|token)$", path.rpartition(".")[2].lower()):
            raise ValueError(f"keys are not written into files: let {path} name an environment variable in the file")


def inside_workspace(path: str) -> str:
    """A path in a trial's workspace in its plainest form, or a ValueError where it would lead out; templates stay."""
    return path if is_template(path) else _inside(path)


def check_pattern(pattern: str) -> str:
    """Return a pattern, or raise ValueError where it cannot be compiled, whatever a row puts into its templates."""
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
    """Return the parameter by which a request asks for several answers, of which only one would count; None: none."""
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
"""where a model is served: one URL, or several, of which each request goes to the least busy one"""

Api = Literal["chat", "responses", "messages", "gemini", "completions"]
"""an API of models"""

ReasoningHistory = Literal["auto", "all", "last", "none"]
"""which of its earlier reasoning a model gets back"""
Formula = Annotated[str, AfterValidator(_bare)]
"""an expression over the row, also where it is written in braces like a template"""
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
    """A block of the eval file: fixed keys, values that do not change after reading."""

    # So that starting is fast, a model is built only when it is used, and the modules that every eval needs do not
    # postpone annotations: reading them back out of strings takes pydantic a third of its time.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), defer_build=True)

    templates: ClassVar[tuple[str, ...]] = ()
    """fields that hold templates over the row"""
    regexes: ClassVar[tuple[str, ...]] = ()
    """those among them that hold patterns"""
    expressions: ClassVar[tuple[str, ...]] = ()
    """fields that hold expressions over the row"""
    as_written: ClassVar[tuple[str, ...]] = ()
    """fields whose texts are another program's, with braces of its own"""
    instead: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """what to write instead of a template, by field, where none is read"""

    @classmethod
    def model_rebuild(cls, *, _parent_namespace_depth: int = 2, **options: Any) -> bool | None:
        """Build the model, without pydantic's plug-ins: to find them it reads the metadata of all installed packages.

        Models of the user's own code, in this process too, still have them.
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
    """Declare a block that is read as an empty one where the file lacks it, without building its model beforehand."""
    return Field(default={}, validate_default=True)


def is_embedded(model: str) -> bool:
    """Return True for the name of a model that runs on this machine, inside Holdfast."""
    return model.startswith("local/")
