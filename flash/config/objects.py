"""Objects named in the configuration by import path, such as environments, objectives, verifiers, tools and sinks.

`module:attribute` names anything that Python can import, including modules in the config's folder and in the working
directory. So adding an object needs no change inside Flash. Options are checked against the signature before anything
starts: each keyword argument is an option. If the only argument is `options` and is annotated with a struct, each field
of that struct is an option.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import msgspec

from algorithms import OBJECTIVES
from algorithms.base import Objective
from flash.config.decode import ConfigProblem, Place, examine_table, refuse, suggest
from flash.errors import ConfigError

ENVIRONMENT_METHODS = ("reset", "step", "close")
"""Methods that a class must have to be an environment; see `flash.environment`."""

CLASS_METHODS = ("check", "prepare", "kind_of", "held_out_problems", "solution_of", "wrapped", "domains")
"""Optional methods of an environment that Flash calls on the class, without an episode; see `flash.environment`."""

PREPARE = "prepare"
"""Name of the only one of `CLASS_METHODS` that is an `async def`."""

WRAPPED = "wrapped"
"""Name of the method by which a class around another environment names that environment."""

OPTIONS = "options"
"""Name of the parameter that stands for the whole table of options, if it is the only one and is annotated with a
struct."""

IMPORT_PATH = "FLASH_IMPORT_PATH"
"""Environment variable through which the processes of a run get the import path of the process that started the run. It
holds a JSON list, because names of folders may contain colons."""


CALL_FOLDER = ".call-"
"""Beginning of the name of a folder below `run.output_dir`. It holds the configuration and the code by value of a call
from Python until the end of its run, whose directory then has both."""


def import_from(folders: Iterable[str]) -> None:
    """Add folders to the end of Python's import path. Installed modules take precedence over modules in them.

    Called when a configuration is read, and in each process of a run before that.
    """
    sys.path += [folder for folder in dict.fromkeys(folders) if folder not in sys.path]


def share_import_path() -> None:
    """Store the import path of this process in the environment variable that `IMPORT_PATH` names, for processes that
    are started from here.

    A launcher calls this. The processes read it with `take_import_path`. PYTHONPATH is not used, because it would put a
    user's folder before the standard library, also in programs that run under another Python.
    """
    os.environ[IMPORT_PATH] = json.dumps([os.path.abspath(folder) for folder in sys.path])


def take_import_path() -> None:
    """Add the import path of the process that started this one, which `share_import_path` has stored; do nothing if
    none is stored. Each process that a launcher starts calls this first."""
    import_from(json.loads(os.environ.get(IMPORT_PATH, "[]")))


def load_object(path: str) -> Any:
    """Return the object at `module:attribute`, and import the module. Dots in the attribute reach into classes.

    The working directory is added to the import path.

    Raises:
        ConfigError: the path has another form, the module is missing or fails to import, or it has no such attribute.
    """
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")]):
        raise ConfigError(f"expected `module:attribute`, got `{path}`")
    found: Any = _load_module(module_name)
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            public = [other for other in dir(found) if not other.startswith("_")]
            raise ConfigError(f"`{module_name}` has no `{attribute}`{suggest(name, public)}") from error
        except (ConfigError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a module may import the attribute only now, in its `__getattr__`
            raise _import_failure(module_name, error) from error
    return found


def _load_module(name: str) -> Any:
    """Import a module. Raises ConfigError if the module is missing or fails to import."""
    import_from([os.getcwd()])
    importlib.invalidate_caches()  # the file may be newer than Python's list of the files of its folder
    missing = _first_missing(name)
    if missing is not None:
        looked = "" if "." in missing else f" (looked in what is installed, and in {', '.join(own_folders())})"
        raise ConfigError(
            f"there is no module `{missing}`{_hidden_folder(missing) or _nearest_module(missing)}{looked}"
        )
    try:
        return importlib.import_module(name)
    # A ConfigError has a message of its own, for example about a missing package. A KeyboardInterrupt is the user's
    # Ctrl-C during a long import.
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the module is the user's: any exception, even SystemExit, is a fault of the input
        raise _import_failure(name, error) from error


def _import_failure(name: str, error: BaseException) -> ConfigError:
    """Return the error to raise after an exception in the code of the module `name`, with its message and line."""
    if isinstance(error, SyntaxError):
        message, place = error.msg, f"{error.filename}, line {error.lineno}"
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message, place = str(error), f"{frame.filename}, line {frame.lineno}"
    return ConfigError(f"importing `{name}` failed: {type(error).__name__}: {message} ({place})")


def _first_missing(name: str) -> str | None:
    """Return the shortest prefix of a module's name that cannot be found; None if all can be found. Imports the
    packages around the module; None also if one of them raises an error."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        prefix = ".".join(parts[:count])
        if prefix in sys.modules:
            continue
        try:
            if find_spec(prefix) is None:
                return prefix
        except ModuleNotFoundError:  # the parent is a module, not a package
            return prefix
        except Exception:  # the parent package fails to import: importing the whole name reports that
            return None
    return None


def _nearest_module(name: str) -> str:
    """Return `; did you mean X?` for the module that has the most similar name to the missing module `name` and lies in
    the same package; empty if there is none."""
    parent, _, _ = name.rpartition(".")
    # `_first_missing` has imported the parent. It has no `__path__` if it is a module, and no package.
    paths = getattr(sys.modules[parent], "__path__", []) if parent else own_folders()
    prefix = f"{parent}." if parent else ""
    shipped = [] if parent else ["envs", "algorithms"]  # Flash's packages of environments and objectives
    return suggest(name, [*shipped, *(prefix + module.name for module in pkgutil.iter_modules(paths))])


def _hidden_folder(name: str) -> str:
    """Return a phrase about a folder that would have the missing module `name`, but that another package hides; empty
    if there is none.

    Python imports a package from one folder only. Flash's own packages `envs` and `algorithms` have names that a
    user's folder may have, too.
    """
    top, *rest = name.split(".")
    used = [Path(path).resolve() for path in getattr(sys.modules.get(top), "__path__", [])]
    for folder in (*own_folders(), Path(__file__).parents[2]):
        other = (Path(folder) / top).resolve()
        module = other.joinpath(*rest)
        if used and other not in used and (module.is_dir() or module.with_suffix(".py").is_file()):
            return f": `{top}` is the package in {used[0]}, which hides {other}; give your own package another name"
    return ""


def own_folders() -> list[str]:
    """Return the folders of the import path that hold the user's own modules, in order: all but the folders of Python
    and of installed packages.

    A run records the folders, a bundle copies modules from them, and error messages suggest names in them.
    """
    # The other paths of `sysconfig` are no folders of modules. One of them is the whole virtual environment, which may
    # be the folder of the user's project.
    paths = sysconfig.get_paths()
    installed = {Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    own: list[str] = []
    for entry in filter(os.path.isdir, sys.path):
        folder = Path(entry).resolve()
        # `sysconfig` does not know the packages of a user, of the system and of other environments.
        packages = "site-packages" in folder.parts or "dist-packages" in folder.parts
        if not packages and installed.isdisjoint((folder, *folder.parents)):
            own.append(os.path.abspath(entry))
    return list(dict.fromkeys(own))


def load_environment(path: str) -> type[object]:
    """Return the environment class at `module:Class`. The check of `env.path` calls this, and each process that uses
    the environment.

    Raises:
        ConfigError: there is no such object; it is not an environment; one of CLASS_METHODS is no classmethod, or is an
            `async def` although Flash does not await it; or the class has `inform` and a blocking method.
    """
    found = load_object(path)
    if not isinstance(found, type) or not all(callable(getattr(found, name, None)) for name in ENVIRONMENT_METHODS):
        raise ConfigError(f"`{path}` is not an environment: expected a class with reset, step and close")
    for name in CLASS_METHODS:  # the class may have a method of its own that has one of these names by chance
        if inspect.isfunction(inspect.getattr_static(found, name, None)):
            raise ConfigError(
                f"`{path}`: Flash calls the method {name} on the class, without an episode: put @classmethod above it, "
                "or rename it if it has another purpose"
            )
        # Nobody would await the coroutine of a `check`, so that every option would pass it.
        if name != PREPARE and inspect.iscoroutinefunction(getattr(found, name, None)):
            raise ConfigError(f"`{path}`: Flash does not await the method {name}: make it a plain `def`")
    if hasattr(found, "inform"):  # blocking methods run in threads, where the view that `inform` gets must not be used
        for name in ENVIRONMENT_METHODS:
            if not inspect.iscoroutinefunction(getattr(found, name)):
                raise ConfigError(f"`{path}` has `inform`, so its {name} must be an `async def`")
    return cast("type[object]", found)


def class_with(method: str, cls: type[Any], kwargs: dict[str, Any]) -> tuple[type[Any], dict[str, Any]] | None:
    """Return the environment class that has a classmethod about its problems, and the keyword arguments for it; None if
    no class has the method.

    Such methods, for example `domains` and `held_out_problems`, are called on the class, without an instance. If `cls`
    itself has no such method but wraps another environment, its method `wrapped` (`flash.environment.Wrapping`) names
    that one, and the search continues there. `wrapped` is a user's and may raise anything; the callers handle that.

    Args:
        method: name of the classmethod.
        cls: the environment class to begin with.
        kwargs: keyword arguments of `cls`.
    """
    while not callable(getattr(cls, method, None)):
        if not callable(getattr(cls, WRAPPED, None)):
            return None
        cls, kwargs = cls.wrapped(**kwargs)
    return cls, kwargs


def load_objective(name: str) -> type[Objective]:
    """Return the objective class with this name (see `algorithms.OBJECTIVES`) or import path. The checks of
    `[algorithm]` and each trainer rank call this.

    Raises:
        ConfigError: there is no such object, it is not an objective, or it has no formula.
    """
    if ":" not in name and name not in OBJECTIVES:
        known = ", ".join(f"`{one}`" for one in OBJECTIVES)
        raise ConfigError(f"expected {known} or `module:Class`, got `{name}`{suggest(name, OBJECTIVES)}")
    found = load_object(OBJECTIVES.get(name, name))
    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise ConfigError(f"`{name}` is not a subclass of `algorithms.base:Objective`")
    if found.__call__ is Objective.__call__:
        raise ConfigError(f"`{name}` does not define `__call__(self, tokens)`, the formula of its loss")
    return found


def load_sink(path: str) -> Callable[[dict[str, Any], int | None], Any]:
    """Return the function that `track.to` names, which makes a sink; see `flash.observe.trackers.receivers`. The check
    of `track.to` and the first node of a run call this.

    Raises:
        ConfigError: there is no such function, or it takes other arguments.
    """
    found = load_object(path)
    if not callable(found) or not _takes(found, "config", "resumed_at"):
        raise ConfigError(
            f"`{path}` makes no sink: expected a function that is called as `function(config, resumed_at)`"
        )
    return found


def is_sink(made: object) -> bool:
    """Return True if an object can be called as `sink(kind, row)`. Checked when a function of `track.to` has made a
    sink, at the start of a run."""
    return callable(made) and _takes(made, "kind", "row")


def _takes(function: Callable[..., object], *positional: str) -> bool:
    """Return True if a function can be called with these positional arguments, or if that cannot be found out."""
    try:
        inspect.signature(function).bind(*positional)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature: its parameters cannot be checked
        pass
    return True


def check_options(cls: Callable[..., object], options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the keyword arguments for `cls`, each converted to its annotated type.

    Args:
        cls: the class or function that takes the options.
        options: the table of options.
        where: the path of the table, for error messages.

    Raises:
        ConfigError: names every option that is unknown, missing or of a wrong type, or says why a struct refuses them.
    """
    kwargs, problems = examine_options(cls, options, where)
    if problems:
        raise refuse(problems)
    return kwargs


def examine_options(
    cls: Callable[..., object], options: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """Do the work of `check_options`, but return the problems instead of raising them.

    Returns the keyword arguments for `cls`, and the problems. With problems the arguments are incomplete.
    """
    parameters = dict(_parameters(cls))
    struct = _struct_of_options(parameters)
    if struct is None:
        return _examine(cls, parameters, options, where)
    values, problems = _examine(cls, dict(_parameters(struct)), options, where)
    if problems:
        return {}, problems
    try:
        return {OPTIONS: struct(**values)}, []
    # The struct is the user's, so it may raise any exception to refuse its options, or even try to end the process.
    except (Exception, SystemExit) as error:
        return {}, [ConfigProblem(where, refusal(cls, error))]


def refusal(cls: Callable[..., object], error: BaseException) -> str:
    """Return the error message for options that have the right types but that the class `cls`, which is a user's, or
    its options struct refuses. `error` is the exception that it has raised."""
    verdict = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    return f"{cls.__name__} refuses them: {verdict}"


def _struct_of_options(parameters: Mapping[str, inspect.Parameter]) -> type[msgspec.Struct] | None:
    """Return the annotation of `options` if that is the only parameter and its annotation is a struct; else None."""
    annotation = parameters[OPTIONS].annotation if list(parameters) == [OPTIONS] else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) else None


def _examine(
    cls: Callable[..., object], parameters: Mapping[str, inspect.Parameter], options: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """Return the options by name, converted to the types of these parameters of `cls`, and the problems.

    With problems the options are incomplete. `where`: path of the table, for error messages.
    """
    known = {name: one for name, one in parameters.items() if one.kind is not one.VAR_KEYWORD}
    places = {name: Place(one.annotation, one.default is one.empty) for name, one in known.items()}
    if len(known) < len(parameters):  # the class takes any keyword argument
        places |= {name: Place(Any, False) for name in options if name not in known}
    choices = ", ".join(f"`{one}`" for one in known) or "none"

    def unknown(name: str) -> str:
        """Return the error message for an option that `cls` does not have."""
        return f"{cls.__name__} has no such option{suggest(name, known)} (its options: {choices})"

    return examine_table(options, places, where, unknown)


def _parameters(cls: Callable[..., object]) -> Iterator[tuple[str, inspect.Parameter]]:
    """Yield each parameter that can be given by keyword, with its annotation evaluated.

    The annotation is Any if there is none or if it cannot be evaluated.
    """
    if isinstance(cls, type) and issubclass(cls, msgspec.Struct):
        for field in msgspec.structs.fields(cls):
            default = inspect.Parameter.empty if field.required else field.default
            yield (
                field.name,
                inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=field.type),
            )
        return
    function = cls.__init__ if isinstance(cls, type) else cls
    namespace: dict[str, Any] = getattr(inspect.unwrap(function), "__globals__", {})
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            continue
        yield name, parameter.replace(annotation=_evaluate(parameter.annotation, namespace))


def _evaluate(annotation: Any, namespace: dict[str, Any]) -> Any:
    """Return the type that an annotation names. An annotation that is written as text is evaluated with the names of
    `namespace`, and again if the result is a text. Returns Any if that fails."""
    if annotation is inspect.Parameter.empty:
        return Any
    # With `from __future__ import annotations`, an annotation in quotes is a text in a text.
    for _ in range(2):
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, namespace)
            # A NameError if the name is imported for type checkers only; a user's annotation may also be wrong.
            except Exception:
                return Any
    return Any if isinstance(annotation, str) else annotation
