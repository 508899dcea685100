"""The base of all schemas, the types of their values, and the validation of blocks. Unknown keys are errors.

All problems and notices are reported at once, each with its place, rather than only the first mistake.
"""

import os
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from holdfast.errors import ConfigError, Problem, suggest
from holdfast.spec.document import Location, parse_duration, parse_size
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


class Placed(Protocol):
    """A document, or another object that knows the places of its keys."""

    def where(self, location: Location) -> str:
        """Return `file:line: key`."""


_PLAIN: Final = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}
"""expected values by pydantic's error types, in the words of YAML's users"""
_KEYS: Final = {"target": ("model", "python", "command", "http"), "graders": ("type", "name", "threshold")}
"""keys of mappings that have several schemas"""


_PARAMETERS: Final = frozenset(
    {"temperature", "max_tokens", "max_completion_tokens", "top_p", "top_k", "min_p", "seed", "stop", "n", "logprobs"}
    | {"presence_penalty", "frequency_penalty", "reasoning_effort", "response_format", "logit_bias"}
)
"""parameters of a request that are often misplaced next to `model`"""
_ALIASES: Final = {
    "url": ("base_url", "http"),
    "endpoint": ("base_url", "http"),
    "api_base": ("base_url",),
    "file": ("path",),
    "regex": ("regex_match",),
}
"""other tools' names for keys"""


def compile_json_schema(schema: dict[str, Any]) -> Any:
    """Compile a JSON Schema; raise ValueError if it is invalid, or refers to a document elsewhere."""
    import jsonschema_rs

    try:
        return jsonschema_rs.validator_for(schema, retriever=_refuse_retrieval)
    except ValueError as error:
        raise ValueError(f"not a JSON Schema: {str(error).partition(chr(10))[0]}") from error


def _refuse_retrieval(uri: str) -> dict[str, Any] | bool:
    raise ValueError(f"{uri} is not fetched; put its content under $defs")


def validate_block(
    model: type[Block], data: Any, location: Location, document: Placed, problems: list[Problem]
) -> Block | None:
    """Return the block, or None after adding its problems to `problems`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        explanations: dict[Location, list[str]] = {}
        values: dict[Location, Any] = {}
        for item in error.errors(include_url=False):
            place = _written(data, item["loc"], item["type"])
            explanations.setdefault(place, []).append(_explain(item["type"], item["msg"], place, model))
            values[place] = item["input"]
        for place, listed in explanations.items():
            if all(each.startswith("should ") for each in listed) and _holds_another(place, explanations):
                continue  # the value has the shape of one member of a union, and the problem is inside it
            first, *others = dict.fromkeys(listed)  # several for a union of types
            message = " or ".join([first, *(other.removeprefix("should be ") for other in others)])
            if first.startswith("should "):
                message += f", not {_describe(values[place])}"
            problems.append(Problem(document.where((*location, *place)), message))
        return None


def _holds_another(place: Location, places: Iterable[Location]) -> bool:
    return any(len(other) > len(place) and other[: len(place)] == place for other in places)


def _written(data: Any, location: Location, kind: str) -> Location:
    """Return the part of a location that is in the file: pydantic adds the names of a union's members."""
    place: list[str | int] = []
    for part in location:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            continue
        place.append(part)
    return (*place, location[-1]) if kind == "missing" else tuple(place)


def _model_at(model: type[Block], location: Sequence[Any]) -> type[Block] | None:
    """Return the schema of the block that holds a key, to suggest its keys."""
    current: type[Block] | None = model
    for part in location:
        if isinstance(part, int):
            continue  # an item of a list has the list's schema
        field = current.model_fields.get(part) if current is not None else None
        current = next(_blocks(field.annotation), None) if field else None
    return current


def _blocks(annotation: Any) -> Iterator[type[Block]]:
    """Yield the blocks that an annotation names, also inside unions and lists."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _blocks(part)


def _explain(kind: str, message: str, place: Location, model: type[Block]) -> str:
    if kind == "extra_forbidden":
        key, owner = str(place[-1]), _model_at(model, place[:-1])
        names = list(_written_names(owner)) if owner else []
        if key in ("api_key", "key", "token") and "tokens" not in names:
            return "keys are not written into files: name the environment variable with api_key_env"
        if key == "max_tokens" and "token_budget" in names:
            return "the length of a reply is target.params.max_tokens, a budget for the whole run limits.token_budget"
        if key in _PARAMETERS and "params" in names:
            return f"unknown key; parameters of a request go under `params`: params: {{{key}: …}}"
        alias = next((name for name in _ALIASES.get(key, ()) if name in names), None)
        hint = f" (did you mean {alias!r}?)" if alias else suggest(key, names)
        return f"unknown key{hint}" + (f"; known here: {', '.join(names)}" if names and not hint else "")
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    if kind == "too_short":
        return "needs at least 1 item"  # pydantic would mention tuples
    expected = _PLAIN.get(kind)
    if expected == "a mapping":
        block = _model_at(model, place)
        keys = list(_written_names(block))[:6] if block else _KEYS.get(next((p for p in place if p in _KEYS), ""), ())
        expected += f" with keys such as {', '.join(keys)}" if keys else ""
    return message.removeprefix("Input ") if expected is None else f"should be {expected}"


def _describe(value: Any) -> str:
    return "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)


def _written_names(model: type[Block]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield field.alias or name


class Findings:
    """Problems, which are errors, and notices, which are not."""

    def __init__(self, notices: Iterable[str] = ()) -> None:
        """Begin with notices that are complete sentences."""
        self.problems: list[Problem] = []
        self._complete = list(notices)
        self._noticed: dict[tuple[str, str], list[str]] = {}
        """places by key and message"""

    def wrong(self, document: Placed, location: Location, message: str) -> None:
        """Add a problem at a place."""
        self.problems.append(Problem(document.where(location), message))

    def notice(self, document: Placed, location: Location, message: str) -> None:
        """Add a notice at a place."""
        name = str(location[-1]) if location else ""
        places = self._noticed.setdefault((name, message), [])
        if (place := document.where(location)) not in places:
            places.append(place)

    def add_notices(self, notices: Iterable[str]) -> None:
        """Add notices that are complete sentences."""
        self._complete.extend(notices)

    @property
    def notices(self) -> tuple[str, ...]:
        """Return all notices, equal ones only once."""
        lines = list(self._complete)
        for (_, message), places in self._noticed.items():
            more = f" (and in {len(places) - 1} more places)" if len(places) > 1 else ""
            lines.append(f"{places[0]}: {message}{more}")
        return tuple(dict.fromkeys(lines))

    def raise_problems(self) -> None:
        """Raise ConfigError if there are problems."""
        if self.problems:
            raise ConfigError(list(dict.fromkeys(self.problems)))
