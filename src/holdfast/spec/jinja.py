"""Templates and expressions that take Jinja2, in its sandbox. `template.py` imports this for them alone."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import jinja2
from jinja2 import StrictUndefined, Undefined, meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from holdfast.spec.template import NotText, TemplateError, TemplateSyntaxError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Tuples: a union would be built again for each row.
_NESTED: Final = (list, tuple, dict)
_TYPED: Final = (bool, int, float, *_NESTED)

_environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
_environment.tests["glob"] = lambda value, pattern: fnmatchcase(str(value), pattern)


class _Translated:
    """Raises the errors of Jinja2 as those of `template.py`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, jinja2.TemplateSyntaxError):
            raise TemplateSyntaxError(error.message or "", str(error)) from error
        if isinstance(error, jinja2.TemplateError):
            raise TemplateError(str(error)) from error


_translated: Final = _Translated()


def _text(value: Any) -> Any:
    if isinstance(value, _NESTED):
        raise NotText(f"cannot insert {'an object' if isinstance(value, dict) else 'a list'} into text: {value!r:.80}")
    return value


_texts_alone = _environment.overlay(finalize=_text)
_globals = dict(_environment.globals)


def _scalar(value: Any) -> Any:
    """Return a value that has one obvious form as text; raise TypeError for others."""
    if value is None or isinstance(value, _NESTED) or hasattr(value, "__next__"):
        kind = "null" if value is None else "an object" if isinstance(value, dict) else "a list"
        raise TypeError(f"cannot insert {kind} into text")
    return value


_strict_environment = _environment.overlay(finalize=_scalar)


class FullTemplate:
    """A compiled template and the variables it names."""

    def __init__(self, source: str, *, texts_only: bool) -> None:
        self._source = source
        with _translated:
            parsed = _environment.parse(source)
            self._body = parsed.body
            self.names = frozenset(meta.find_undeclared_variables(parsed))
            self._compiled = (_texts_alone if texts_only else _environment).from_string(source)

    def render(self, fields: Mapping[str, Any]) -> str:
        """Return the text for one row."""
        return _render(self._compiled, fields)

    def value(self, fields: Mapping[str, Any], *, strict: bool) -> Any:
        """Return the text for one row, or the value of a lone expression."""
        if (lone := self._lone) is not None:
            value = lone.value(fields)
            if value is None or isinstance(value, _TYPED):
                return value
            if strict and hasattr(value, "__next__"):
                return value  # of a filter such as `map`: a list in the making
        return _render(self._strict if strict else self._compiled, fields)

    @cached_property
    def _strict(self) -> jinja2.Template:
        return _strict_environment.from_string(self._source)

    @cached_property
    def _lone(self) -> FullExpression | None:
        """The expression, where there is nothing else in the template."""
        match self._body:
            case [nodes.Output(nodes=[inner])] if not isinstance(inner, nodes.TemplateData):
                pass
            case _:
                return None
        source = self._source.removesuffix("\n")  # which YAML's `|` leaves, and a value has none of
        inside = source[2:-2].removeprefix("-").removesuffix("-").removeprefix("+")
        try:
            return FullExpression(inside.strip())
        except TemplateSyntaxError:
            return None  # `{{ a, b }}`


def _render(compiled: jinja2.Template, fields: Mapping[str, Any]) -> str:
    # What Template.render does, less its chained lookup of globals, which takes longer than all the rest.
    with _translated:
        context = compiled.new_context({**_globals, **fields}, shared=True)
        return "".join(compiled.root_render_func(context))


class FullExpression:
    """A compiled expression and the variables it names."""

    def __init__(self, source: str) -> None:
        with _translated:
            parser = Parser(_environment, source, state="variable")
            parsed = parser.parse_expression()
            if not parser.stream.eos:
                raise jinja2.TemplateSyntaxError("more than one expression", parser.stream.current.lineno)
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
                with _translated:
                    self._compiled = _environment.from_string(self._body)

    def value(self, fields: Mapping[str, Any]) -> Any:
        """Return the value for one row; an undefined one is jinja2's Undefined."""
        if self.equality is not None and type(text := fields.get(self.equality[0])) is str:
            return text == self.equality[1]
        if self._field is not None and self._field in fields:
            return fields[self._field]  # without Jinja, which takes a hundred times as long
        if self._compiled is None:
            self._compiled = _environment.from_string(self._body)
        # As in Template.render; and in one mapping, not as keywords: a field may be called `self`.
        with _translated:
            context = self._compiled.new_context({**_globals, **fields}, shared=True)
            for _ in self._compiled.root_render_func(context):
                pass
        return context.vars["result"]

    def value_or_none(self, fields: Mapping[str, Any]) -> Any:
        """Return the value for one row; an undefined one is None."""
        value = self.value(fields)
        return None if isinstance(value, Undefined) else value

    def required(self, fields: Mapping[str, Any]) -> Any:
        """Return the value for one row; raise TemplateError where it is undefined."""
        value = self.value(fields)
        if isinstance(value, Undefined):
            with _translated:
                str(value)  # raises, and names what is missing
        return value


def _equality(parsed: nodes.Expr) -> tuple[str, str] | None:
    match parsed:
        case nodes.Compare(
            expr=nodes.Name(name=str(name)), ops=[nodes.Operand(op="eq", expr=nodes.Const(value=str(text)))]
        ):
            return name, text
    return None
