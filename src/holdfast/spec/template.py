"""Templates: Jinja2 in its sandbox, where a missing field is an error and not an empty text."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, Undefined, meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import jinja2

__all__ = [
    "RENDER_ERRORS",
    "NotText",
    "Template",
    "TemplateError",
    "TemplateSyntaxError",
    "Undefined",
    "expression",
    "fill_in",
    "texts",
]

RENDER_ERRORS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
"""errors of rendering over a user's row"""

# Tuples: a union would be built again for each row.
_NESTED: Final = (list, tuple, dict)
_TYPED: Final = (bool, int, float, *_NESTED)

_environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
_environment.tests["glob"] = lambda value, pattern: fnmatchcase(str(value), pattern)


class NotText(TemplateError):
    """A list or an object where a text is needed: its Python repr is not a useful prompt."""

    hint = (
        "Write {{ x | tojson }} to send it as JSON, {{ x | join(', ') }} for its parts, or `messages: x` instead of "
        "`prompt` for a conversation."
    )


def _text(value: Any) -> Any:
    if isinstance(value, _NESTED):
        raise NotText(f"cannot insert {'an object' if isinstance(value, dict) else 'a list'} into text: {value!r:.80}")
    return value


_texts_alone = _environment.overlay(finalize=_text)
_globals = dict(_environment.globals)
_ONE_FIELD = re.compile(r"\{\{\s*([A-Za-z_]\w*)\s*\}\}")


def _scalar(value: Any) -> Any:
    """Return a value that has one obvious form as text; raise TypeError for others."""
    if value is None or isinstance(value, _NESTED) or hasattr(value, "__next__"):
        kind = "null" if value is None else "an object" if isinstance(value, dict) else "a list"
        raise TypeError(f"cannot insert {kind} into text")
    return value


_strict_environment = _environment.overlay(finalize=_scalar)


class Template:
    """A compiled template and the variables it names. With `texts_only`, lists and objects are not written into it."""

    def __init__(self, source: str, *, texts_only: bool = False) -> None:
        self.source = source
        self.names: frozenset[str] = frozenset()
        self._compiled: jinja2.Template | None = None
        self._field: str | None = None
        if "{{" in source or "{%" in source or "{#" in source:
            self.names = frozenset(meta.find_undeclared_variables(_environment.parse(source)))
            self._compiled = (_texts_alone if texts_only else _environment).from_string(source)
        if (match := _ONE_FIELD.fullmatch(source)) and match[1] in self.names:  # `{{ none }}` names nothing
            self._field = match[1]

    def render(self, fields: Mapping[str, Any]) -> str:
        """The text for one row; raises jinja2's TemplateError where a field is missing."""
        if self._compiled is None:
            return self.source
        if self._field is not None and type(text := fields.get(self._field)) is str:
            return text  # `{{ question }}`, as most templates are, at a tenth of what Jinja takes
        # What Template.render does, less its chained lookup of globals, which takes longer than all the rest.
        context = self._compiled.new_context({**_globals, **fields}, shared=True)
        return "".join(self._compiled.root_render_func(context))

    def lone_field(self, fields: Mapping[str, Any]) -> Any:
        """Return the field's value where the template is `{{ field }}` and no more; else None."""
        return None if self._field is None else fields.get(self._field)

    def value(self, fields: Mapping[str, Any], *, strict: bool = False) -> Any:
        """Return the text for one row, or the value of a template that is one `{{ expression }}` and nothing else.

        Only JSON keeps its type. Anything else, such as a date, becomes text. With `strict`, a list, an object or null
        inside a longer text raises TypeError: its Python repr is never what was meant.
        """
        if self._field is not None and type(text := fields.get(self._field)) is str:
            return text
        if (lone := self._lone) is not None:
            value = lone.value(fields)
            if value is None or isinstance(value, _TYPED):
                return value
            if strict and hasattr(value, "__next__"):
                return value  # of a filter such as `map`: a list in the making
        if not strict or self._compiled is None:
            return self.render(fields)
        context = self._strict.new_context({**_globals, **fields}, shared=True)
        return "".join(self._strict.root_render_func(context))

    @cached_property
    def _strict(self) -> jinja2.Template:
        return _strict_environment.from_string(self.source)

    @cached_property
    def _lone(self) -> Expression | None:
        """The expression, where there is nothing else in the template."""
        if self._compiled is None:
            return None
        match _environment.parse(self.source).body:
            case [nodes.Output(nodes=[inner])] if not isinstance(inner, nodes.TemplateData):
                pass
            case _:
                return None
        source = self.source.removesuffix("\n")  # which YAML's `|` leaves, and a value has none of
        inside = source[2:-2].removeprefix("-").removesuffix("-").removeprefix("+")
        try:
            return Expression(inside.strip())
        except TemplateSyntaxError:
            return None  # `{{ a, b }}`


@lru_cache(maxsize=1024)
def template(source: str) -> Template:
    """A template, compiled once."""
    return Template(source)


def fill_in(value: Any, fields: Mapping[str, Any]) -> Any:
    """Fill in every template inside a JSON-like value; see `Template.value`."""
    if isinstance(value, str):
        return template(value).value(fields)
    if isinstance(value, dict):
        return {key: fill_in(inner, fields) for key, inner in value.items()}
    if isinstance(value, list):
        return [fill_in(inner, fields) for inner in value]
    return value


def texts(value: Any) -> Iterator[str]:
    """Every text inside a JSON-like value, as `fill_in` finds them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from texts(inner)


class Expression:
    """A compiled expression and the variables it names; called with a row's fields, it is its value."""

    def __init__(self, source: str) -> None:
        parser = Parser(_environment, source, state="variable")
        parsed = parser.parse_expression()
        if not parser.stream.eos:
            raise TemplateSyntaxError("more than one expression", parser.stream.current.lineno)
        self.equality = _equality(parsed)
        """field and text, where it says no more than `field == "text"`"""
        self._field = parsed.name if isinstance(parsed, nodes.Name) else None
        """the field, where it is no more than the name of one"""
        self._body = nodes.Template([nodes.Assign(nodes.Name("result", "store"), parsed, lineno=1)], lineno=1)
        self._body.set_environment(_environment)
        self._compiled: jinja2.Template | None = None
        if self.equality is not None:
            self.names = frozenset({self.equality[0]})
        else:
            self.names = frozenset(meta.find_undeclared_variables(self._body))
            if self._field is None:
                self._compiled = _environment.from_string(self._body)

    def __call__(self, fields: Mapping[str, Any]) -> Any:
        """The value for one row; an undefined one is None."""
        value = self.value(fields)
        return None if isinstance(value, Undefined) else value

    def required(self, fields: Mapping[str, Any]) -> Any:
        """The value for one row; raises jinja2's TemplateError where it is undefined."""
        value = self.value(fields)
        return str(value) if isinstance(value, Undefined) else value  # which raises, and names what is missing

    def value(self, fields: Mapping[str, Any]) -> Any:
        """The value for one row, which may be jinja2's Undefined."""
        if self.equality is not None and type(text := fields.get(self.equality[0])) is str:
            return text == self.equality[1]
        if self._field is not None and self._field in fields:
            return fields[self._field]  # without Jinja, which takes a hundred times as long
        if self._compiled is None:
            self._compiled = _environment.from_string(self._body)
        # As in Template.render; and in one mapping, not as keywords: a field may be called `self`.
        context = self._compiled.new_context({**_globals, **fields}, shared=True)
        for _ in self._compiled.root_render_func(context):
            pass
        return context.vars["result"]


def _equality(parsed: nodes.Expr) -> tuple[str, str] | None:
    match parsed:
        case nodes.Compare(
            expr=nodes.Name(name=str(name)), ops=[nodes.Operand(op="eq", expr=nodes.Const(value=str(text)))]
        ):
            return name, text
    return None


@cache
def expression(source: str) -> Expression:
    """A sandboxed expression over a row's fields, as in `where: level == "hard"`, compiled once."""
    return Expression(source)
