"""Marked chat templates: their output shows which parts the template itself has written.

A chat template is a Jinja program that turns messages into a prompt. Tokens such as the end of a turn must come from
the template only; the same letters inside a message must stay text. But the output does not show which parts the
template has written. So each text in the template's source is *marked* when the template is compiled: each character
that such tokens contain is replaced by a *mark*, a different character that stands for it.
`flash.rollout.episode.controls` chooses the marks, compiles templates with `compile_marked` when a tokenizer is first
used, and reads the marks in the output.

A template also inspects texts. In comparisons, tests, keys and searches, marks are taken away first, so the template
decides as it would without marks. `_Marking` changes the program's syntax tree for this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from jinja2 import Template, nodes
from jinja2.meta import find_undeclared_variables
from jinja2.visitor import NodeTransformer

TOUCHED = ("transformers.utils.chat_template_utils:_compile_jinja_template",)
"""Attributes of transformers that this module uses, as `module:Class.attribute`. A test looks for each of them."""

PLAIN, CUT = "flash_plain", "flash_cut"
"""Names, inside a marked template, of the filter that takes marks away, and of the function `_cut`."""

QUERY_METHODS = frozenset({"startswith", "endswith", "find", "rfind", "index", "rindex", "count"})
"""Methods of texts that return no text. They are called on a text without marks, with arguments without marks."""
CUT_METHODS = frozenset(
    {"split", "rsplit", "partition", "rpartition", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix"}
)
"""Methods of texts that return parts of a text. The parts are found without marks, and returned with marks (`_cut`)."""
REPLACE, GET = "replace", "get"
"""Methods that search for their first argument, whose marks are taken away. They may return the second argument, which
keeps its marks."""
PASSING_FILTERS = frozenset({"join", "default", "d"})
"""Filters whose result contains their arguments, so these keep their marks."""
INTERPRETING_FUNCTIONS = frozenset({"strftime_now", "raise_exception"})
"""Functions that interpret the text of their arguments, so these lose their marks."""


def compile_marked(source: str, mark: Callable[[str], str], plain: Callable[[str], str]) -> Template:
    """Compile a chat template as transformers does, so that it marks all text that it writes itself.

    `flash.rollout.episode.controls` calls this once for each template, and then renders messages with the result.

    Args:
        source: source of the template.
        mark: returns a marked copy of a text.
        plain: returns a text without its marks. A text without marks is returned unchanged.
    """
    from transformers.utils.chat_template_utils import (
        _compile_jinja_template,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
    )

    compiled: Any = _compile_jinja_template(source)
    environment = compiled.environment.overlay()
    environment.filters = {**environment.filters, PLAIN: lambda value: _without(value, plain)}
    environment.globals = {**environment.globals, CUT: partial(_cut, plain)}
    tree = _Marking(mark).visit(environment.parse(source))
    return Template.from_code(environment, environment.compile(tree), environment.make_globals(None))


def arguments_of(source: str) -> frozenset[str]:
    """Return the names of a chat template's arguments: names that the template reads but does not define.

    Arguments that a user gives are compared with them. `source`: source of the template. Empty if the template cannot
    be parsed; rendering it will report the error.
    """
    from transformers.utils.chat_template_utils import (
        _compile_jinja_template,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
    )

    try:
        compiled: Any = _compile_jinja_template(source)
        environment = compiled.environment
        return frozenset(find_undeclared_variables(environment.parse(source)) - set(environment.globals))
    except Exception:  # a template is code of the model's author, and may raise any error
        return frozenset()


def _cut(plain: Callable[[str], str], text: Any, method: str, *args: Any, **more: Any) -> Any:
    """Return the result of a method of CUT_METHODS, or of `replace`, on a marked text, with its marks.

    Marked templates call this function (`CUT`). The method runs on the text without marks. The marked text has the same
    length, so each part that the method returns is taken from the same position of the marked text.

    Args:
        plain: returns a text without its marks.
        text: the marked text.
        method: name of the method.
        args: arguments of the method, without marks, except for the new text of `replace`.
        more: keyword arguments of the method.
    """
    unmarked: Any = _without(text, plain)
    if method == REPLACE:
        old, new = args
        if unmarked == text or not old:  # an empty text occurs between all characters, and `split` refuses it
            return str(text).replace(old, new)
        # A marked text is divided at `old`, which is found without marks, and joined with `new`.
        return new.join(_cut(plain, text, "split", old))
    found: Any = getattr(unmarked, method)(*args, **more)
    # A text without marks needs no further steps.
    if unmarked == text:
        return found
    # `at`: position at which the next part is searched. `between`: length of the separator after each part.
    separator = args[0] if args else more.get("sep")
    between, at = len(separator) if separator and method in ("split", "rsplit") else 0, 0
    if method in ("strip", "lstrip"):
        at = len(unmarked) - len(unmarked.lstrip(*args))
    elif method == "removeprefix":
        at = len(unmarked) - len(found)
    parts: list[str] = []
    for part in [found] if isinstance(found, str) else found:
        at = unmarked.index(part, at)
        parts.append(text[at : at + len(part)])
        at += len(part) + between
    return parts[0] if isinstance(found, str) else parts


def _without(value: Any, plain: Callable[[str], str]) -> Any:
    """Return a value without marks. In a list or tuple, which becomes a list, marks are taken away from each value;
    values of other types are returned unchanged."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, (list, tuple)):
        return [_without(one, plain) for one in value]  # pyright: ignore[reportUnknownVariableType]
    return value


class _Marking(NodeTransformer):
    """Changes the syntax tree of a template: marks its texts, and takes marks away where the template inspects a text.

    Jinja calls `visit_NAME` for each node of type NAME.
    """

    def __init__(self, mark: Callable[[str], str]) -> None:
        self._mark = mark

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        """Mark a text inside an expression."""
        value = self._mark(node.value) if isinstance(node.value, str) else node.value
        return nodes.Const(value, lineno=node.lineno)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        """Mark a text outside of expressions, which the template writes as it is."""
        return nodes.TemplateData(self._mark(node.data), lineno=node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Compare values without marks."""
        self.generic_visit(node)
        node.expr = _plain(node.expr)
        for operand in node.ops:
            operand.expr = _plain(operand.expr)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        """Test a value without marks, such as in `x is equalto("y")`."""
        self.generic_visit(node)
        node.node = _plain(node.node)
        _plain_all(node)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Look a value up by a key without marks."""
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            node.arg = _plain(node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        """Give a dictionary of the template a key without marks."""
        self.generic_visit(node)
        node.key = _plain(node.key)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        """Take marks away from the text and the arguments of a call.

        The constants at the top of this file say which methods and functions need that.
        """
        self.generic_visit(node)
        match node.node:
            case nodes.Getattr(attr=name) as method:
                if name in QUERY_METHODS:
                    method.node = _plain(method.node)
                    _plain_all(node)
                elif name in CUT_METHODS:
                    _plain_all(node)
                    return _cutting(method.node, name, node)
                elif name == REPLACE and len(node.args) == 2:
                    return _cutting(method.node, name, node)
                elif name in (REPLACE, GET):  # `replace` with a number of replacements, which templates hardly use
                    node.args[:1] = [_plain(arg) for arg in node.args[:1]]
            case nodes.Name(name=name) if name in INTERPRETING_FUNCTIONS:
                _plain_all(node)
            case _:
                pass
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        """Call a filter with arguments without marks, unless its result contains them."""
        self.generic_visit(node)
        if node.name == REPLACE and len(node.args) == 2 and node.node is not None:
            return _cutting(node.node, REPLACE, node)
        if node.name not in PASSING_FILTERS:
            _plain_all(node)
        return node


def _plain(node: nodes.Expr) -> nodes.Expr:
    """Return an expression whose value is the value of `node` without marks."""
    return nodes.Filter(node, PLAIN, [], [], None, None, lineno=node.lineno)


def _cutting(text: nodes.Expr, method: str, node: nodes.Call | nodes.Filter) -> nodes.Call:
    """Return an expression that calls `_cut` for a method of `text`, with the arguments of `node`.

    The first argument of `replace` loses its marks, because it is searched.
    """
    cut, name = nodes.Name(CUT, "load", lineno=node.lineno), nodes.Const(method, lineno=node.lineno)
    args = [_plain(node.args[0]), *node.args[1:]] if method == REPLACE else node.args
    return nodes.Call(cut, [text, name, *args], node.kwargs, None, None, lineno=node.lineno)


def _plain_all(node: nodes.Call | nodes.Filter | nodes.Test) -> None:
    """Change a call, filter or test so that none of its arguments has marks."""
    node.args = [_plain(arg) for arg in node.args]
    for keyword in node.kwargs:
        keyword.value = _plain(keyword.value)
