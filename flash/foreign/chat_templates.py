"""Marked chat templates: the text that a template writes itself can be told from the text that it is given.

A chat template is a program, and its output does not show which parts the template has written itself. So each text in
the template's source is marked when the template is compiled. Marks are taken away wherever the template only inspects
a text: in comparisons, tests, keys and searches. The template therefore decides as it would without marks.

`flash.rollout.episode.controls` chooses the marks and uses the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from jinja2 import Template, nodes
from jinja2.meta import find_undeclared_variables
from jinja2.visitor import NodeTransformer

TOUCHED = ("transformers.utils.chat_template_utils:_compile_jinja_template",)
"""Attributes of transformers that this module uses, in the form of `flash.foreign.vllm.TOUCHED`."""

PLAIN, CUT = "flash_plain", "flash_cut"
"""Names of the filter that takes marks away, and of the function that calls a method which returns parts of a text."""

ASKING = frozenset({"startswith", "endswith", "find", "rfind", "index", "rindex", "count"})
"""Methods of texts that return no text. They are called with text and arguments without marks."""
CUTTING = frozenset(
    {"split", "rsplit", "partition", "rpartition", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix"}
)
"""Methods that return parts of a text. The parts are found without marks, and returned with them."""
REPLACE, GET = "replace", "get"
"""Methods that search for their first argument, and may return the second one."""
GIVING = frozenset({"join", "default", "d"})
"""Filters whose result contains their arguments, which therefore keep their marks."""
FORMATTING = frozenset({"strftime_now", "raise_exception"})
"""Functions that interpret their arguments, which therefore must not have marks."""


def compile_marked(source: str, mark: Callable[[str], str], plain: Callable[[str], str]) -> Template:
    """Return a chat template, compiled as transformers does it, that marks all text that it writes itself.

    Args:
        source: source of the template.
        mark: returns a text with marks.
        plain: returns a text without its marks.
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
    """Return the names that a chat template reads and does not define; empty if the template cannot be parsed."""
    from transformers.utils.chat_template_utils import (
        _compile_jinja_template,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
    )

    try:
        compiled: Any = _compile_jinja_template(source)
        environment = compiled.environment
        return frozenset(find_undeclared_variables(environment.parse(source)) - set(environment.globals))
    except Exception:  # a template is code of the model's author; rendering it reports the error
        return frozenset()


def _cut(plain: Callable[[str], str], text: Any, method: str, *args: Any, **more: Any) -> Any:
    """Return the parts of a marked text that a method of `CUTTING`, or `replace`, finds in the text without marks."""
    whole: Any = _without(text, plain)
    if method == REPLACE:
        old, new = args
        return str(text).replace(old, new) if whole == text or not old else new.join(_cut(plain, text, "split", old))
    found: Any = getattr(whole, method)(*args, **more)
    if whole == text:
        return found
    between, at = len(args[0]) if args and args[0] and method in ("split", "rsplit") else 0, 0
    if method in ("strip", "lstrip"):
        at = len(whole) - len(whole.lstrip(*args))
    elif method == "removeprefix":
        at = len(whole) - len(found)
    parts: list[str] = []
    for part in [found] if isinstance(found, str) else found:
        at = whole.index(part, at)
        parts.append(text[at : at + len(part)])
        at += len(part) + between
    return parts[0] if isinstance(found, str) else parts


def _without(value: Any, plain: Callable[[str], str]) -> Any:
    """Return a value without marks; in a list, each of its values."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, (list, tuple)):
        return [_without(one, plain) for one in value]  # pyright: ignore[reportUnknownVariableType]
    return value


class _Marking(NodeTransformer):
    """Marks the texts in a template's source, and takes marks away where the template inspects a text."""

    def __init__(self, mark: Callable[[str], str]) -> None:
        self._mark = mark

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        value = self._mark(node.value) if isinstance(node.value, str) else node.value
        return nodes.Const(value, lineno=node.lineno)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.TemplateData(self._mark(node.data), lineno=node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _plain(node.expr)
        for operand in node.ops:
            operand.expr = _plain(operand.expr)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        node.node = _plain(node.node)
        _plain_all(node)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            node.arg = _plain(node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _plain(node.key)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        self.generic_visit(node)
        match node.node:
            case nodes.Getattr(attr=name) as method:
                if name in ASKING:
                    method.node = _plain(method.node)
                    _plain_all(node)
                elif name in CUTTING:
                    _plain_all(node)
                    return _cutting(method.node, name, node)
                elif name == REPLACE and len(node.args) == 2:
                    return _cutting(method.node, name, node)
                elif name in (REPLACE, GET):
                    node.args[:1] = [_plain(arg) for arg in node.args[:1]]
            case nodes.Name(name=name) if name in FORMATTING:
                _plain_all(node)
            case _:
                pass
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        if node.name == REPLACE and len(node.args) == 2 and node.node is not None:
            return _cutting(node.node, REPLACE, node)
        if node.name not in GIVING:
            _plain_all(node)
        return node


def _plain(node: nodes.Expr) -> nodes.Expr:
    """Return an expression with the value of `node` without marks."""
    return nodes.Filter(node, PLAIN, [], [], None, None, lineno=node.lineno)


def _cutting(text: nodes.Expr, method: str, node: nodes.Call | nodes.Filter) -> nodes.Call:
    """Return a call of `_cut` for a method of a text, with the arguments of a node."""
    cut, name = nodes.Name(CUT, "load", lineno=node.lineno), nodes.Const(method, lineno=node.lineno)
    args = [_plain(node.args[0]), *node.args[1:]] if method == REPLACE else node.args
    return nodes.Call(cut, [text, name, *args], node.kwargs, None, None, lineno=node.lineno)


def _plain_all(node: nodes.Call | nodes.Filter | nodes.Test) -> None:
    """Take the marks away from all arguments of a node."""
    node.args = [_plain(arg) for arg in node.args]
    for keyword in node.kwargs:
        keyword.value = _plain(keyword.value)
