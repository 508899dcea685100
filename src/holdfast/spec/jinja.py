"""Templates and expressions that take Jinja2, in its sandbox. `template.py` imports this for them alone."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

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
_environment.globals["row"] = {}  # stands for all fields of the row, unless one of them has this name


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


class _Regex(str):
    """A text that is a part of a pattern as it is."""

    __slots__ = ()


def _regex(value: Any) -> _Regex:
    if not isinstance(value, str):
        raise TypeError(f"a pattern is a text, not {value!r:.80}")
    return _Regex(value)


def escape_value(value: Any) -> str:
    """Return the pattern that finds a value; raise TypeError for an empty text, a list, an object and null."""
    if isinstance(value, str) and not value:
        raise TypeError("an empty text is found everywhere, or nowhere")
    if isinstance(value, _Regex):
        return str(value)
    if isinstance(value, bool):
        return "(?:true|True)" if value else "(?:false|False)"
    return re.escape(str(_scalar(value)))


_pattern_environment = _environment.overlay(finalize=escape_value)
_pattern_environment.filters = {**_environment.filters, "regex": _regex}

Use = Literal["values", "texts", "pattern"]
"""what becomes of values in a longer text: any is inserted; texts and numbers only; as patterns that find them"""
_ENVIRONMENTS: Final = {"values": _environment, "texts": _texts_alone, "pattern": _pattern_environment}


class FullTemplate:
    """A compiled template and the variables it names."""

    def __init__(self, source: str, use: Use) -> None:
        self._source = source
        self._is_pattern = use == "pattern"
        with _translated:
            parsed = _ENVIRONMENTS[use].parse(source)
            self._body = parsed.body
            self.takes_row = _takes_row(parsed)
            self.names = frozenset(meta.find_undeclared_variables(parsed))
            self._compiled = _ENVIRONMENTS[use].from_string(source)

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
        return _render(self._strict if strict and not self._is_pattern else self._compiled, fields)

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


def normal_template(source: str) -> str:
    """Return a template with one space between the words inside of braces, and without the words of comments."""
    parts: list[str] = []
    words: list[str] = []
    try:
        for _, kind, text in _environment.lex(source):
            if kind in ("variable_begin", "block_begin"):
                words = [text]
            elif kind in ("variable_end", "block_end"):
                parts.append(" ".join([*words, text.strip()]))
                words = []
            elif words:
                words += [] if kind == "whitespace" else [text]
            elif kind in ("raw_begin", "raw_end"):
                parts.append("{% raw %}" if kind == "raw_begin" else "{% endraw %}")
            elif kind.startswith("comment"):
                parts += [text + "#}"] if kind == "comment_begin" else []
            else:
                parts.append(text)
    except jinja2.TemplateSyntaxError:
        return source  # which the eval's other checks report
    return "".join(parts)


def _render(compiled: jinja2.Template, fields: Mapping[str, Any]) -> str:
    # What Template.render does, less its chained lookup of globals, which takes longer than all the rest.
    with _translated:
        context = compiled.new_context({**_globals, "row": fields, **fields}, shared=True)
        return "".join(compiled.root_render_func(context))


def _takes_row(parsed: nodes.Template) -> bool:
    """Return True if a template uses `row`, which stands for all fields and is no name of one."""
    return any(node.name == "row" for node in parsed.find_all(nodes.Name))


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
        self.takes_row = _takes_row(self._body)
        self._compiled: jinja2.Template | None = None
        if self.equality is not None:
            self.names = frozenset({self.equality[0]})
        else:
            with _translated:
                self.names = frozenset(meta.find_undeclared_variables(self._body))
                if self._field is None:
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
            context = self._compiled.new_context({**_globals, "row": fields, **fields}, shared=True)
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
