"""Code by value: functions and classes of a script or a notebook, for processes that cannot import them.

A run names each function and class by its import path, and its processes import it. `import_paths` makes such a path
for an object that a Python program gives to `flash.train`. An object of an importable module has a path already. All
others are pickled by cloudpickle, each into a module of its own, which lies beside the configuration. So the processes
import them like any other module, and nothing else in Flash knows of them. The recorder copies the modules into the run
directory (`shipped_modules`), where the recorded configuration finds them.

The name of the module contains a hash of the code. So changed code has another name, and a module that Python has
imported, or a fingerprint of an environment, never stands for other code. A run that is resumed with the same code has
the same name, although cloudpickle writes classes and sets differently in each process.
"""

from __future__ import annotations

import asyncio
import base64
import copyreg
import functools
import hashlib
import io
import json
import os
import pickle
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple, cast

import cloudpickle

from flash.errors import ConfigError

MODULE = re.compile(r"\bflash_code_[0-9a-f]{16}\b")
"""Name of a module with code by value, in the text of a configuration."""
LARGEST = 16 << 20
"""Largest size of pickled code in bytes. Every process of a run reads it, so data belongs into a file."""
DEEPEST = 20
"""Largest number of parts in one another in which the cause of a failure is looked for."""
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""Version of this Python. Another version cannot read the bytecode of pickled functions."""

MAIN = ("__main__", "__mp_main__")
"""Names of the main program as a module. The second one is its name in a process that multiprocessing has started."""
CACHED = type(functools.cache(len))
"""Type of the functions that `functools.cache` and `functools.lru_cache` make."""
NOT_PICKLED = ("_abc_impl", "__firstlineno__", "__module__")
"""Attributes of a class that Python makes again with the class, or that say only where it was written."""
KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (io.IOBase, "an open file"),
    ((type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event), "a lock"),
    (asyncio.AbstractEventLoop, "an event loop"),
    (socket.socket, "an open connection"),
    (threading.Thread, "a thread"),
    (GeneratorType, "a running generator"),
)
"""Kinds of objects that users often have in global variables and that belong to one process, with words for them."""


def import_paths(objects: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, bytes]]:
    """Return the import path `module:name` of each function or class, and a module for each of those by value.

    Args:
        objects: functions and classes, each by the key of the configuration that names it.

    Returns:
        The import paths by the same keys, and the content of each module's file by its name. The caller writes the
        files into a folder of the import path.

    Raises:
        ConfigError: an object cannot be pickled, or is too large. The message names the part that is at fault.
    """
    paths: dict[str, str] = {}
    modules: dict[str, bytes] = {}
    for key, one in objects.items():
        if (path := _import_path(one)) is not None:
            paths[key] = path
            continue
        # A lambda has no valid name, and a `functools.partial` or another callable object has none.
        name = getattr(one, "__name__", "")
        name = name if name.isidentifier() and not name.startswith("__") else "sent"
        try:
            data = _pickled({name: one})
        except Exception as error:  # objects of the user may raise anything while they are pickled
            raise _refusal(key, one, error) from error
        if len(data) > LARGEST:
            raise _too_large(key, one, len(data))
        text = base64.b85encode(data).decode("ascii")
        content = (
            '"""Function or class of a program that has called Flash, by value. Flash has written this file."""\n\n'
            "from flash.config.shipping import unpacked\n\n"
            f'globals().update(unpacked("{PYTHON}", "{text}"))\n'
        )
        # Each has a module of its own, because a bundle of a run has the module of its objective. The values that a
        # reward uses, which may be secret, do not belong there.
        module = f"flash_code_{_digest({name: one}, {})[:16]}"
        paths[key], modules[f"{module}.py"] = f"{module}:{name}", content.encode("ascii")
    return paths, modules


def unpacked(python: str, text: str) -> dict[str, Any]:
    """Return the objects of a module with code by value, by their names. The module calls this when it is imported.

    Args:
        python: version of the Python that has pickled them.
        text: the pickle, in Base85.

    Raises:
        ConfigError: this is another version of Python.
    """
    if python != PYTHON:
        raise ConfigError(
            f"this code was sent by a program in Python {python}, and only that version can read it; this is Python "
            f"{PYTHON}: use the same version, or move the code to a module of its own"
        )
    return pickle.loads(base64.b85decode(text))


def shipped_modules(text: str) -> dict[str, bytes]:
    """Return the modules with code by value that a configuration names, as the content of each file by its name.

    The recorder of a run calls this before it prepares the run directory, because a new run may move the directory that
    has these files. Modules that are not found are left out; the import of one reports that.

    Args:
        text: the configuration as TOML.
    """
    found: dict[str, bytes] = {}
    for name in set(MODULE.findall(text)):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            found[f"{name}.py"] = Path(spec.origin).read_bytes()
    return found


class _Pickler(cloudpickle.Pickler):
    """Pickler of cloudpickle that does not send what should not be in a file of the run."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is pickled, as a function and its arguments; NotImplemented to pickle it as usual. The
        pickler calls this for each object. Raises PicklingError for an object that is not sent."""
        if obj is os.environ or obj is os.environb:
            # Environment variables often have secrets. The processes of the run have the same ones.
            return getattr, (os, "environ" if obj is os.environ else "environb")
        if isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
            # cloudpickle would send the contents of the file, which may be secret.
            raise pickle.PicklingError("the contents of an open file are not sent")
        if isinstance(obj, CACHED) and _import_path(obj) is None:
            # Python would send only the name of such a function, which the processes of the run do not have.
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        known = isinstance(obj, type | FunctionType) or type(obj) in self.dispatch_table  # cloudpickle sends it whole
        if not known and getattr(obj, "__module__", None) in MAIN:
            # Python describes an object by a text if it is sent by its name. That name is in the main program here, and
            # the processes of the run have another main program.
            name = obj.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
            if isinstance(name, str):
                raise pickle.PicklingError(f"pickle sends only the name `{name}`, which the processes do not have")
        return super().reducer_override(obj)


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    """Return a function with a new cache, for one of `functools.cache` or `functools.lru_cache` that is sent by value.

    `parameters` are those of `functools.lru_cache`.
    """
    return functools.lru_cache(**parameters)(function)


def _pickled(one: Any) -> bytes:
    """Return an object as a pickle. Raises whatever the objects in it raise.

    Changes cloudpickle's settings in a process of multiprocessing: objects of the main program are sent by value.
    """
    if (main := sys.modules.get(MAIN[1])) is not None:  # cloudpickle would take it for a module that others can import
        cloudpickle.register_pickle_by_value(main)
    file = io.BytesIO()
    _Pickler(file).dump(one)
    return file.getvalue()


def _import_path(one: Any) -> str | None:
    """Return the import path of a function or class; None if another process cannot import it.

    That is so for objects of the main program, which would run again if it were imported, for lambdas, and for objects
    that a function has defined.
    """
    module, name = getattr(one, "__module__", None), getattr(one, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module in MAIN:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is one else None


def _digest(one: Any, seen: dict[int, Any]) -> str:
    """Return a text that identifies an object, and is the same in each process that has the same code.

    Plain data is its JSON, an object that others can import is its import path, and everything else is a hash. Files
    and line numbers do not count: code that has only moved is the same code.

    Args:
        one: the object.
        seen: objects so far, by their ids; this call adds to it. An object that is met again counts by its place among
            them, because functions may refer to each other in a circle.
    """
    if id(one) in seen:
        return f"again {list(seen).index(id(one))}"
    if one is None or isinstance(one, str | int | float | dict | list | tuple):
        with suppress(TypeError, ValueError):  # it holds something else, or itself
            return json.dumps(one)
    # `own` is the part of the identity that is in no other object, and `parts` are the objects that it refers to.
    own = ""
    match one:
        case FunctionType() | BuiltinFunctionType() | type() | CACHED() if (path := _import_path(one)) is not None:
            return path
        case FunctionType():
            seen[id(one)] = one
            own, parts = _code_text(one.__code__), _parts(one)
        case CACHED():
            seen[id(one)] = one
            own, parts = repr(one.cache_parameters()), _parts(one)
        case type() | dict() | list() | MethodType() | functools.partial():
            seen[id(one)] = one
            parts = _parts(one)
        case tuple() | set() | frozenset() | staticmethod() | classmethod() | property():
            parts = _parts(one)  # not in `seen`: a circle always contains an object of the cases above or of the last
        case ModuleType():
            own, parts = one.__name__, iter(())
        case _ if one is os.environ or one is os.environb:  # each process has its own
            own, parts = "environment variables", iter(())
        case bytes() | bytearray() | complex():
            own, parts = repr(one), iter(())
        case _:
            seen[id(one)] = one
            parts = (_Part("", part) for part in _reduced(one))
    digests = [f"{part.where}={_digest(part.value, seen)}" for part in parts]
    # Sets have another order in each process.
    digests = sorted(digests) if isinstance(one, set | frozenset) else digests
    text = "\0".join([str(type(one)), own, *digests])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _reduced(one: Any) -> list[Any]:
    """Return the parts from which pickle makes an object again: its class or a function, arguments, state and items.

    The only part of an object that is sent by its name is this name. An object that only cloudpickle can pickle has its
    pickle as its only part. Empty if nothing can pickle it.
    """
    try:
        reduce = copyreg.dispatch_table.get(type(one))
        # A fixed protocol, so that the parts are the same in all versions of Python.
        made = one.__reduce_ex__(4) if reduce is None else reduce(one)
        # The items of containers come as iterators, which would be different objects each time.
        return [made] if isinstance(made, str) else [[*part] if isinstance(part, Iterator) else part for part in made]
    except Exception:  # only cloudpickle can pickle it, or only together with the class that it is a part of
        with suppress(Exception):
            return [_pickled(one)]
        return []


def _code_text(code: CodeType) -> str:
    """Return everything that decides what a function's code does, as text; not its file and lines."""
    # Constants may be the code of inner functions, or sets, which have another order in each process.
    constants = (
        _code_text(one)
        if isinstance(one, CodeType)
        else repr(sorted(map(repr, one)) if isinstance(one, frozenset) else one)
        for one in code.co_consts
    )
    names = (code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return repr((names, counts, code.co_code, code.co_exceptiontable, *constants))


class _Part(NamedTuple):
    """Object that another one refers to, and that is pickled with it."""

    where: str
    """Phrase for the object, such as ``the global variable `log` ``."""
    value: Any
    """The object itself."""


def _refusal(key: str, one: Any, error: Exception) -> ConfigError:
    """Return the error for an object that cannot be pickled, which names the part at fault. `key`: the key of the
    configuration that names the object; `error`: raised while it was pickled."""
    chain = _culprit(one)
    last = chain[-1].value if chain else one
    kind = next((words for types, words in KINDS if isinstance(last, types)), f"an object of {type(last).__name__}")
    place = " of ".join(part.where for part in reversed(chain)) or "it"
    return ConfigError(
        f"`{key}`: {_described(one)} cannot be sent to the processes of the run, because {place} is {kind} "
        f"({type(error).__name__}: {error}). Make it inside of the function or class that uses it, or move the "
        "code to a module of its own, which each process imports"
    )


def _too_large(key: str, one: Any, size: int) -> ConfigError:
    """Return the error for an object whose pickle has `size` bytes, with the largest part of it. `key` names it."""
    parts = [part for part in _parts(one) if _failure(part.value) is None]
    largest = max(parts, key=lambda part: len(_pickled(part.value)), default=None)
    named = f"; the largest part is {largest.where}" if largest is not None else ""
    return ConfigError(
        f"`{key}`: the code with all that it refers to has {size >> 20} MiB, and at most {LARGEST >> 20} MiB can be "
        f"sent to the processes of the run{named}: read it from a file inside of the function or class that uses it"
    )


def _failure(one: Any) -> Exception | None:
    """Return the error with which an object cannot be pickled; None if it can."""
    try:
        _pickled(one)
    except Exception as error:  # objects of the user may raise anything while they are pickled
        return error
    return None


def _culprit(one: Any) -> list[_Part]:
    """Return the way from an object to the part of it that cannot be pickled, part by part, the innermost last.

    Empty if no part of the object is at fault, but the object itself. Stops at an object of KINDS, whose parts say
    less, and at DEEPEST parts.
    """
    chain: list[_Part] = []
    seen = {id(one)}
    while len(chain) < DEEPEST and not any(isinstance(one, types) for types, _ in KINDS):
        bad = (part for part in _parts(one) if id(part.value) not in seen and _failure(part.value) is not None)
        if (part := next(bad, None)) is None:
            break
        chain.append(part)
        one = part.value
        seen.add(id(one))
    return chain


def _parts(one: Any) -> Iterator[_Part]:
    """Yield the objects that are pickled with an object, as far as users know them. For error messages and `_digest`.

    A class that others can import, and a module, are sent by their names and have no parts.
    """
    match one:
        case FunctionType():
            for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
                try:
                    yield _Part(f"the variable `{name}` around it", cell.cell_contents)
                except ValueError:  # the variable has no value yet
                    continue
            for name in _global_names(one.__code__):
                if name in one.__globals__:
                    yield _Part(f"the global variable `{name}`", one.__globals__[name])
            for value in (*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()):
                yield _Part("a default value", value)
            yield from (_Part(f"the attribute `{name}`", value) for name, value in vars(one).items())
        case MethodType():
            yield _Part("the object", one.__self__)
            yield _Part("the function", one.__func__)
        case staticmethod() | classmethod():
            yield _Part("the function", cast("Any", one).__func__)
        case property():
            yield from (_Part("the function", function) for function in (one.fget, one.fset) if function is not None)
        case CACHED():
            yield _Part("the function", one.__wrapped__)
        case functools.partial():
            yield _Part("the function", one.func)
            yield from (_Part("an argument", value) for value in (*one.args, *one.keywords.values()))
        case type():
            if _import_path(one) is None:
                for name, value in vars(one).items():
                    if name not in NOT_PICKLED and not isinstance(value, GetSetDescriptorType | MemberDescriptorType):
                        yield _Part(f"the attribute `{name}`", value)
                yield from (_Part(f"the base {base.__name__}", base) for base in one.__bases__)
        case dict():
            values = cast("dict[Any, Any]", one)
            yield from (_Part(f"the item {str(key)[:40]!r}", value) for key, value in values.items())
        case list() | tuple() | set() | frozenset():
            yield from (_Part("an item", value) for value in cast("list[Any]", one))
        case ModuleType():
            return
        case _:
            held = getattr(one, "__dict__", {})
            yield from (_Part(f"the attribute `{name}`", value) for name, value in held.items())


def _global_names(code: CodeType) -> list[str]:
    """Return the names that a function, and the functions inside of it, may look up in the global variables, each once.

    Python does not distinguish them from names of attributes, so there may be too many.
    """
    inner = (name for one in code.co_consts if isinstance(one, CodeType) for name in _global_names(one))
    return list(dict.fromkeys((*code.co_names, *inner)))


def _described(one: Any) -> str:
    """Return the name of a function or class with the file and line of a function, for error messages."""
    name = getattr(one, "__qualname__", type(one).__name__)
    code = getattr(one, "__code__", None)
    return f"{name} ({code.co_filename}, line {code.co_firstlineno})" if isinstance(code, CodeType) else name
