"""Arguments of vLLM's engines and their types, read from the source of the installed version without importing it.

The import of vLLM would take seconds. `flash.config.machine` checks the table `[engine.vllm]` of a configuration
against the arguments before any engine starts.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin

MODULE, CLASSES = "vllm.engine.arg_utils", ("EngineArgs", "AsyncEngineArgs")
"""vLLM's module and classes whose fields are the arguments."""
PLAIN_TYPES = {"str": str, "int": int, "float": float, "bool": bool, "dict": dict, "list": list}
"""Types of Python by the names that annotations have for them."""


def argument_names() -> list[str]:
    """Return the names of all arguments; empty if vLLM is not installed. The check of `[engine.vllm]` refuses others.

    Raises:
        LookupError: the installed vLLM declares its arguments in another place.
    """
    if not _declared() and find_spec("vllm") is not None:
        raise LookupError("the installed vLLM declares its arguments elsewhere: adapt flash/foreign/vllm_arguments.py")
    return sorted(_declared())


def type_of(name: str) -> Any:
    """Return the type that msgspec must find for the argument `name` of `argument_names` in a configuration file.

    The result is `Any` if `_type` does not know this kind of annotation; the value is then not checked.
    """
    return _type(_declared()[name], MODULE)


@cache
def _module(name: str) -> ast.Module:
    """Return the parsed source of a module of vLLM, by its dotted name; an empty module if there is none."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        return ast.Module([], [])
    path = Path(found.origin).parent.joinpath(*name.split(".")[1:])
    files = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return ast.parse(next((file.read_text(encoding="utf-8") for file in files if file.is_file()), ""))


@cache
def _declared() -> dict[str, ast.expr]:
    """Return the annotation of each argument, by the argument's name. Private fields are left out."""
    classes = [node for node in _module(MODULE).body if isinstance(node, ast.ClassDef) and node.name in CLASSES]
    return {
        node.target.id: node.annotation
        for each in classes
        for node in each.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_"
    }


def _type(node: ast.expr, module: str) -> Any:
    """Return the type for msgspec that an annotation in vLLM's module `module` stands for.

    Annotations of kinds that are not listed here become Any.
    """
    match node:
        case ast.Constant(value=str(text)):
            return _type(ast.parse(text, mode="eval").body, module)
        case ast.Constant(value=None):
            return None
        case ast.Name(id=name):
            return PLAIN_TYPES[name] if name in PLAIN_TYPES else _named(name, module)
        case ast.BinOp(left=left, right=right):
            return _either(_type(left, module), _type(right, module))
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            # A Literal may contain the name of another Literal.
            values = [
                value
                for each in (inner.elts if isinstance(inner, ast.Tuple) else [inner])
                for value in ([each.value] if isinstance(each, ast.Constant) else get_args(_type(each, module)))
            ]
            return cast("Any", Literal)[tuple(values)]
        case ast.Subscript(value=ast.Name(id="list" | "set"), slice=inner):
            return list[_type(inner, module)]
        case ast.Subscript(value=ast.Name(id="dict")):
            return dict[str, Any]
        case _:
            return Any


def _either(left: Any, right: Any) -> Any:
    """Return a union of two types that msgspec supports.

    msgspec refuses a union of `str` and a Literal of texts, so `str` alone stands for both.
    """
    if Any in (left, right):
        return Any
    # Each side may be a union itself.
    members = [part for side in (left, right) for part in (get_args(side) if get_origin(side) is Union else (side,))]
    if str in members:
        members = [member for member in members if get_origin(member) is not Literal]
    return cast("Any", Union)[tuple(members)]


def _named(name: str, module: str) -> Any:
    """Return the type for msgspec that a name in vLLM's module `module` stands for.

    Follows imports from vLLM's other modules, and aliases such as `Name = Literal["a", "b"]`. A decorated class is a
    class of options, for which a configuration file has a table. The result is `Any` for everything else.
    """
    for node in ast.walk(_module(module)):
        match node:
            case ast.ImportFrom(module=str(other), names=imported) if name in [one.name for one in imported]:
                return _named(name, other) if other.startswith("vllm.") else Any
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return _type(value, module)
            case ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as value) if found == name:
                return _type(value, module)
            case ast.ClassDef(name=found, decorator_list=[_, *_]) if found == name:
                return dict[str, Any]
            case _:
                pass
    return Any
