"""Write the tables of keys, fields and options in the Markdown files, from docstrings of fields and help of commands.

A table stands between `<!-- keys: NAME -->`, `<!-- fields: NAME -->`, `<!-- options: COMMAND -->` or
`<!-- imports: MODULE MODULE … -->` and `<!-- end -->`. An `imports` table has the names that built-in plug-ins import.
NAME is `module.Class` below the package `holdfast`, which for fields is a msgspec struct; for keys it may also be
`grader TYPE` or `target KIND`, and `module.Class own` leaves out inherited keys.

Run it after a change to either: python docs/tables.py
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import click
import msgspec
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from holdfast.spec.load_graders import GRADERS
from holdfast.spec.target_schema import TARGETS

FOLDER = Path(__file__).parent
MARKED = re.compile(r"(<!-- (keys|fields|options|imports): (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
PLAIN = {str: "text", int: "integer", float: "number", bool: "boolean", dict: "mapping", Any: "any value"}
VALIDATORS = {
    "parse_duration": "duration",
    "parse_size": "size",
    "parse_points": "points",
    "_urls": "URL or list of URLs",
    "_as_list": "text or list of texts",
    "_bare": "expression",
}
HEADS = {"keys": "key | value", "fields": "field", "options": "option", "imports": "module | names"}
FLATTENED = {
    "pass_at": "`pass@1`, `pass@2` …",
    "pass_all": "`pass^2`, `pass^3` …",
    "totals": "`corpus`, `error_rate`, `instruction_level`, `measured`",
}
"""fields of `GraderMetrics` that are stored as several numbers, by the names in the file"""
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def update(text: str) -> str:
    """Return a page with its tables regenerated."""
    return MARKED.sub(lambda match: f"{match[1]}{table(match[2], match[3])}{match[4]}", text)


def table(kind: str, name: str) -> str:
    """Return the table of a block's keys, a struct's fields, a command's options, or of modules for plug-ins."""
    head = HEADS[kind]
    match kind:
        case "keys":
            rows = block_rows(find_block(name), own_only=name.endswith(" own"))
        case "fields":
            rows = field_rows(find_class(name))
        case "options":
            rows = option_rows(name)
        case _:
            rows = import_rows(name.split())
    lines = [" | ".join(row) for row in rows]
    rule = "|---" * (head.count("|") + 2) + "|"
    return "".join(f"{line}\n" for line in (f"| {head} | meaning |", rule, *(f"| {line} |" for line in lines)))


def find_block(name: str) -> type[BaseModel]:
    """Return the model of a block by its kind or by the path of its class."""
    kind, _, which = name.partition(" ")
    if kind in ("grader", "target"):
        return (GRADERS if kind == "grader" else TARGETS).load(which).schema
    return find_class(kind)


def find_class(path: str) -> Any:
    """Return a class by its path below the package."""
    module, _, class_name = path.rpartition(".")
    return getattr(import_module(f"holdfast.{module}"), class_name)


def block_rows(block: type[BaseModel], *, own_only: bool = False) -> Iterator[tuple[str, ...]]:
    """Yield key, value and meaning; keys of one meaning share a row; keys without effect have no row."""
    block.model_rebuild()
    common = () if "type" not in block.model_fields or block.__name__ == "GraderBlock" else _grader_fields(block)
    rows: dict[tuple[str, str], list[str]] = {}
    own = inspect.get_annotations(block)
    for name, field in sorted(block.model_fields.items(), key=lambda item: item[0] not in own):
        if name in common or (own_only and name not in own):
            continue
        meaning = docstring(block, name)
        if meaning.startswith(("No effect", "Older")):  # a notice says so when they are used
            continue
        rows.setdefault((describe(field, meaning), meaning), []).append(f"`{field.alias or name}`")
    for (value, meaning), names in rows.items():
        yield ", ".join(names), _cell(value), _cell(meaning)


def _grader_fields(block: type[BaseModel]) -> tuple[str, ...]:
    base = next((base for base in block.__mro__ if base.__name__ == "GraderBlock"), None)
    return () if base is None else tuple(base.model_fields)


def field_rows(struct: type[msgspec.Struct]) -> Iterator[tuple[str, ...]]:
    """Yield the name of each field of a struct in its file, and its meaning."""
    for field in msgspec.structs.fields(struct):
        yield FLATTENED.get(field.name, f"`{field.encode_name}`"), _cell(docstring(struct, field.name))


def docstring(block: type, name: str) -> str:
    """Return the string below a field, in the class that defines it."""
    for owner in block.__mro__:
        if name in inspect.get_annotations(owner):
            if name in _docstrings(owner):
                return _docstrings(owner)[name]
            raise LookupError(f"{owner.__name__}.{name} has no docstring")
    raise LookupError(f"{block.__name__} has no field {name}")


@cache
def _docstrings(owner: type) -> dict[str, str]:
    """Return the strings below the fields of a class. To find its source, the whole module is parsed."""
    texts = {}
    for statement, below in pairwise(ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[field] = " ".join(text.split())
    return texts


def describe(field: FieldInfo, meaning: str) -> str:
    """Return the type of a field, and whether it is required or has a default."""
    value = words(field.annotation, field.metadata)
    if field.is_required():
        return f"{value}, required"
    default = field.get_default(call_default_factory=True)
    empty = default is None or isinstance(default, BaseModel) or (not default and not isinstance(default, bool | int))
    if empty or "Default:" in meaning:
        return value
    return f"{value}, default `{yaml(default)}`{' s' if value == 'duration' else ''}"


def words(annotation: Any, metadata: list[Any]) -> str:
    """Return a type in plain words."""
    for item in metadata:
        function = getattr(getattr(item, "func", None), "__name__", "")
        if function in VALIDATORS:
            return VALIDATORS[function]
    limits = {name: limit for item in metadata for name in BOUNDS if (limit := getattr(item, name, None)) is not None}
    bounds = "".join(f" {BOUNDS[name]} {limit:g}" for name, limit in limits.items())
    if limits.keys() == {"ge", "le"}:
        bounds = f" from {limits['ge']:g} to {limits['le']:g}"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return words(arguments[0], list(arguments[1:]))
    if origin is Literal:
        return _either([f"`{value}`" for value in arguments])
    if origin in (list, tuple):
        inner = words(arguments[0], [])
        return "two numbers" if arguments == (float, float) else f"list of {_plural(inner)}"
    if origin is not None and origin is not dict:
        lists = [part for part in arguments if get_origin(part) is list]
        single = _either([words(part, []) for part in arguments if part is not type(None) and part not in lists])
        if single == "expression" and lists:  # which returns such a list, and is not an item of one
            return f"{words(lists[0], [])} or {single}"
        either = f"{single}, or a list of them" if single and lists else single or words(lists[0], [])
        return either + bounds
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return PLAIN[origin or annotation] + bounds


def _plural(nouns: str) -> str:
    parts = nouns.split(" or ")
    return " or ".join(noun if " " in noun or noun.startswith("`") else f"{noun}s" for noun in parts)


def _either(parts: list[str]) -> str:
    parts = list(dict.fromkeys("number" if part == "integer" and "number" in parts else part for part in parts))
    return " or ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def yaml(value: Any) -> str:
    """Return a default as it would be written in a file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(yaml, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def option_rows(command_name: str) -> Iterator[tuple[str, ...]]:
    """Yield the spellings of each option of a command, and its help."""
    command: click.Command = import_module(f"holdfast.apps.cli.{command_name.split()[0]}").command
    context = click.Context(command)
    for name in command_name.split()[1:]:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    for parameter in command.params:
        if isinstance(parameter, click.Option) and (record := parameter.get_help_record(context)) is not None:
            spellings = record[0].replace(" / ", ", ").split(", ")
            yield ", ".join(f"`{_cell(spelling.strip())}`" for spelling in spellings), _cell(parameter.help or "")


def import_rows(modules: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield each module, the names that built-in plug-ins import from it, and the first sentence of its docstring."""
    for module in modules:
        names = sorted(sorted(plugin_imports().get(f"holdfast.{module}", ())), key=str.lower)
        docstring = inspect.getdoc(import_module(f"holdfast.{module}")) or ""
        first = " ".join(docstring.partition("\n\n")[0].split())
        yield f"`{module}`", ", ".join(f"`{name}`" for name in names), _cell(re.split(r"(?<=\.) ", first)[0])


@cache
def plugin_imports() -> dict[str, set[str]]:
    """Return the names that built-in plug-ins import from each module that is not their own."""
    imports: dict[str, set[str]] = {}
    for path in (FOLDER.parent / "src" / "holdfast" / "plugins").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                imports.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
    return imports


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for page in sorted(FOLDER.glob("*.md")):
        before = page.read_text()
        if (after := update(before)) != before:
            page.write_text(after)
            print(f"updated {page.name}")  # noqa: T201
