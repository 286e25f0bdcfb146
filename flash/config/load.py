"""Reads TOML files and dotted overrides into a checked `Config`, and writes it back.

Files merge left to right, key by key in nested tables. Overrides are applied last; an empty table as an override clears
a table. All faults of the input are found before anything starts. One `ConfigError` names all unknown keys and wrong
types, each with its path, its file and the expected type. If there are none, another `ConfigError` names all other
problems. Needs no torch or vllm.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, TypeVar, cast, get_args

import msgspec
import tomli_w

from flash.config.check import check, check_training
from flash.config.check_learning import check_sft, supervised
from flash.config.decode import (
    NO_KEY,
    NONE,
    OVERRIDE,
    RECORDED,
    ConfigProblem,
    examine,
    nearest,
    refuse,
    section_in,
    show,
    suggest,
    table_of,
    tables_in,
    tag_field,
    take_out,
)
from flash.config.machine import computes_bfloat16, count_gpus
from flash.config.models import hub_models, with_folder
from flash.config.objects import CALL_FOLDER, import_from, own_folders
from flash.config.removed import REMOVED, ignore_removed, removed_keys
from flash.config.section import ABSENT, Section
from flash.config.simulate import FORMER_DISTRIBUTION, Distribution
from flash.config.tree import Config
from flash.errors import ConfigError

DEEPEST = 64
"""Largest depth of nested tables and lists in a source. Only the options of environments may be nested freely."""


def load(
    paths: str | Path | Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    simulated: bool = False,
    also: Callable[[Config], Iterable[ConfigProblem]] = lambda config: (),
) -> Config:
    """Read, merge, decode, resolve and check a configuration. Commands and users' programs call this first of all.

    The configuration may name modules, such as an environment, in the folders of its files and in `env.folders`: these
    folders are added to Python's import path.

    Args:
        paths: a TOML file, or several of them; later files take precedence.
        overrides: `dotted.key=value`; the value is parsed as TOML, or taken as text if it is not TOML. They take
            precedence over the files.
        simulated: check only what a simulation needs, and not the model, environment or devices.
        also: function that returns further problems of the decoded configuration, such as models that are missing. It
            is called last, also if problems were found; its problems of keys that already have one are left out.

    Raises:
        ConfigError: a file or an override cannot be read, or the GPUs cannot be counted. Otherwise it names every
            unknown key and wrong type; if there are none, every other problem.
    """
    files = _files(paths)
    decoded, origins = _decoded(files, overrides)
    config = _resolve(decoded)
    import_from([*(str(file.resolve().parent) for file in files), *map(os.path.abspath, config.env.folders)])
    # `check_sft` looks for tables that [sft] makes useless. `_resolve` has already replaced them in `config`.
    problems = [*check_sft(decoded), *check(config, simulated=simulated)]
    # `with_folder` moves a GGUF file from model.path to model.fetch: name the key that the user has set.
    if config.model.fetch != decoded.model.fetch:
        problems = [one._replace(key="model.path") if one.key == "model.fetch" else one for one in problems]
    if not simulated:
        problems += _missing_folders(config, origins)
    named = {problem.key for problem in problems}
    problems += [problem for problem in also(config) if problem.key not in named]
    if problems:
        raise refuse(problems, origins)
    return config


def merge_tables(
    files: Sequence[Path],
    overrides: Sequence[str],
    sources: Iterable[tuple[str, Mapping[str, Any]]],
    defaults: Mapping[str, Any],
) -> tuple[dict[str, Any], Config]:
    """Merge files and overrides with the tables of a Python program. Returns the result, as tables and decoded.

    `flash.train` and `flash check-env` call this. Only unknown keys and wrong types are found here; `load` makes all
    other checks when a command reads the tables. The decoded configuration is not resolved: "auto" stays.

    Args:
        files: configuration files; later ones take precedence.
        overrides: as for `load`.
        sources: nested tables, each with a phrase for its source in error messages. They take precedence over files and
            overrides, and later ones over earlier ones. None unsets a key. With the source OVERRIDE an empty table
            clears a table.
        defaults: nested tables over which everything else takes precedence.

    Raises:
        ConfigError: a source cannot be read or is nested too deeply; or there are unknown keys or wrong types, and the
            message names all of these.
    """
    merged, origins = _merged(files, overrides, defaults)
    for source, table in sources:
        _check_depth(dict(table), source)
        _merge(merged, _written(table), source, origins)
        for key in [key for key, value in flat(table) if value is None]:
            _forget(merged, key)
    return merged, _decode(merged, origins)


def _written(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested tables in which the text NONE stands for None, as in a file."""
    inner = ((key, _written(value) if isinstance(value, dict) else value) for key, value in table.items())
    return {key: NONE if value is None else value for key, value in inner}


def _forget(merged: dict[str, Any], key: str) -> None:
    """Unset a dotted key that a program has set to None. `merged` holds the text NONE as the key's value so far.

    The text stays for a key that may be None and may not be text, because `examine` makes it None. It also stays for an
    unknown key, which is refused later. Any other key is taken out of `merged`, so that it has its default: a key that
    may not be None, an option of an environment, and a whole table. A text key that may be None has None as its
    default.
    """
    kinds = get_args(dict(keys()).get(key))
    # The key itself, an entry of a key that holds a table, such as `env.options`, or a table that holds keys.
    known = any(path == key or key.startswith(f"{path}.") or path.startswith(f"{key}.") for path in key_paths())
    if known and (NoneType not in kinds or str in kinds):
        take_out(merged, key)


def load_recorded(files: Sequence[Path], overrides: Sequence[str] = (), *, checked: bool = True) -> Config:
    """Read the configuration of an earlier run in order to train its batches again, without the run's surroundings.

    Only the tables that train are checked. Nothing is imported from the environment or from a folder that the file
    names, because the file may come from somebody else.

    Args:
        files: configuration that `dump` has written; later files take precedence.
        overrides: as for `load`.
        checked: False reads without any check beyond types. The checks import the objective's module.

    Raises:
        ConfigError: as `load`, except that only problems of the tables that train are found, and none if `checked` is
            False.
    """
    decoded, origins = _decoded(files, overrides)
    config = _resolve(decoded)
    if checked and (problems := check_training(config)):
        raise refuse(problems, origins)
    return config


def _decoded(files: Sequence[Path], overrides: Sequence[str]) -> tuple[Config, dict[str, str]]:
    """Read, merge and decode all sources. Return the configuration, and the source that set each dotted key.

    Raises:
        ConfigError: a source cannot be read, or has unknown keys or wrong types; the message names all of these.
    """
    merged, origins = _merged(files, overrides)
    return _decode(merged, origins), origins


def _decode(merged: dict[str, Any], origins: Mapping[str, str]) -> Config:
    """Return merged tables as a configuration. Raises ConfigError for unknown keys and wrong types.

    Changes `merged`: removed keys that are ignored are taken out, and a table `[env]` is added beside `[sft]`.
    `origins`: the source of each key.
    """
    ignore_removed(merged, origins)
    if isinstance(merged.get("sft"), dict):
        merged.setdefault("env", {"path": ""})  # supervised fine-tuning runs no environment
    decoded, problems = examine(merged, Config, "")
    if problems:
        raise refuse([_with_hint(problem, merged) for problem in problems], origins)
    return decoded


def _missing_folders(config: Config, origins: Mapping[str, str]) -> Iterator[ConfigProblem]:
    """Yield a problem for each folder of `env.folders` that does not exist.

    `origins`: the source of each key.
    """
    # A run records all folders of the import path in its config.toml. Some of them may be gone when that file is read
    # again, or on another machine, and are needed only if they hold a module of the run.
    if Path(origins.get("env.folders", OVERRIDE)).name == RECORDED:
        return
    for place, folder in enumerate(config.env.folders):
        if not os.path.exists(folder):
            message = f"expected a folder to import modules from, and {show(os.path.abspath(folder))} does not exist"
            yield ConfigProblem(f"env.folders[{place}]", message)


def load_checked(file: Path) -> Config:
    """Read the file that a launcher wrote with `dump`. Each process that the launcher starts calls this first.

    Adds `env.folders` to Python's import path. The launcher has checked the configuration, so it is not checked again.
    If a disk or a model has changed since then, the error appears where the run uses it. A check here would report it
    as a mistake in a file that no user has written.

    Raises:
        ConfigError: the file cannot be read, or has an unknown key or a wrong type.
    """
    decoded, problems = examine(read_toml(file), Config, "")
    if problems:
        raise refuse(problems)
    import_from(map(os.path.abspath, decoded.env.folders))
    return decoded


def _files(paths: object) -> list[Path]:
    """Return the argument `paths` of `load` as a list. Raises ConfigError if it is something else, such as a table that
    a user's program passes."""
    several = cast("Sequence[object]", paths) if isinstance(paths, list | tuple) else [paths]
    for one in several:
        if not isinstance(one, str | os.PathLike):
            raise ConfigError(
                "flash.load: expected the path of a TOML file, or a list of paths, and settings as `key=value` texts "
                f"in its second argument, got a value of type {type(one).__name__}; write a table to a file first"
            )
    return [Path(cast("str", one)) for one in several]


def given(paths: Sequence[Path], overrides: Sequence[str]) -> set[str]:
    """Return the dotted keys that these sources set, and those of the tables around them. `flash replay` checks that
    the given keys have an effect.

    Raises:
        ConfigError: a source cannot be read.
    """
    return set(_merged(paths, overrides)[1])


def _merged(
    files: Sequence[Path], overrides: Sequence[str], defaults: Mapping[str, Any] = MappingProxyType({})
) -> tuple[dict[str, Any], dict[str, str]]:
    """Read and merge all sources. Return the tables, and the source that set each dotted key last.

    Tables have dotted keys, too. A source is the path of a file, OVERRIDE, or `default`. An override with the bare word
    `none` unsets its key. All sources take precedence over the nested tables `defaults`. Raises ConfigError if a file
    cannot be read, an override is not `key=value`, or a source is nested too deeply.
    """
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    _merge(merged, defaults, "default", origins)
    for file in files:
        read = read_toml(file)
        _merge(merged, read, str(file), origins)
    for override in overrides:
        parsed = _parse_override(override)
        _check_depth(parsed, f"setting {show(override)}")
        _merge(merged, parsed, OVERRIDE, origins)
        key, _, value = (part.strip() for part in override.partition("="))
        if value == NONE:
            _unset(merged, key)
    return merged, origins


def _unset(merged: dict[str, Any], key: str) -> None:
    """Unset a dotted key whose override is the bare word `none`. `merged` holds that word as the key's value so far.

    A key that may not be None is taken out of `merged`, so it has its default, or is refused as missing if it is
    required. A text key that may be None gets None. All other keys keep the word, for `examine`.
    """
    annotation = dict(keys()).get(key)
    # Whole tables, unknown keys and options of an environment have no annotation here. `examine` converts or refuses
    # the word there. It is a value of some keys, such as checkpoint.batches.
    if annotation is None or NONE in get_args(annotation):
        return
    table, name = table_of(merged, key)
    if NoneType not in get_args(annotation):
        del table[name]
    elif str in get_args(annotation):
        table[name] = None


def _check_depth(table: dict[str, Any], source: str) -> None:
    """Raise ConfigError if tables or lists are nested deeper than `DEEPEST`. Later functions walk them recursively, and
    would exceed Python's recursion limit. `source` names the source in the message."""
    level: list[Any] = [table]  # the tables and lists at one depth; first the whole source, which is not counted
    for _ in range(DEEPEST + 1):
        inner = (value for one in level for value in (one.values() if isinstance(one, dict) else one))
        level = [value for value in inner if isinstance(value, (dict, list))]
    if level:
        raise ConfigError(f"{source}: expected tables and lists at most {DEEPEST} deep in one another")


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each entry of nested tables; each key begins with `prefix`. Lists are
    values as a whole; an empty table yields nothing. Callers compare two configurations, or give one to a tracker."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flat(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            yield prefix + name, value


_fields = cache(msgspec.structs.fields)
"""Fields of a struct. They are kept, because `msgspec` reads the annotations of the class each time."""


def dump(config: Config) -> str:
    """Return the configuration as TOML, which `load` reads back to an equal configuration.

    The run directory's config.toml, and the file that a launcher gives to its processes, are written with it. None is
    left out if it is the default, and written as the text `none` otherwise.
    """
    return tomli_w.dumps(_plain(config))


def _plain(value: Any) -> Any:
    """Return a value of the configuration in types that TOML has: structs become tables, tuples become lists.

    A field that is None is left out of its table if None is its default, and becomes the text NONE otherwise.
    """
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("Sequence[Any]", value)]
    if not isinstance(value, msgspec.Struct):
        return value
    # The tag of a struct, such as `kind = "normal"`, distinguishes it from structs of other kinds.
    described = value.__struct_config__
    table: dict[str, Any] = {described.tag_field: described.tag} if described.tag_field is not None else {}
    for field in _fields(type(value)):
        inner = getattr(value, field.name)
        if inner is not None:
            table[field.name] = _plain(inner)
        elif field.default is not None:  # without the key, the field would get its default when it is read
            table[field.name] = NONE
    return table


def read_toml(path: Path) -> dict[str, Any]:
    """Read a configuration file, of a user or of a run, without checking its keys.

    Raises:
        ConfigError: the file is missing, cannot be read, is not TOML, or is nested too deeply.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors of Windows write a byte-order mark
    except FileNotFoundError:
        beside = [str(other) for other in path.parent.glob("*.toml")]
        near = f"; did you mean `{path}.toml`?" if f"{path}.toml" in beside else suggest(str(path), beside)
        raise ConfigError(f"there is no configuration file {path}{near}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; expected a TOML file{_files_in(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text, which a configuration must be: {error.reason} at byte {error.start}. If it is "
            "TOML, save it as UTF-8"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: the path is invalid
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        read = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: not TOML, or a number of too many digits
        what = "is not valid TOML" if path.suffix == ".toml" else "is not a TOML file, which a configuration must be"
        raise ConfigError(f"{path} {what}: {error}") from error
    _check_depth(read, str(path))
    return read


def _files_in(folder: Path) -> str:
    """Return the end of the error message for a folder that was given as a configuration file. It names TOML files in
    the folder, and is empty if there are none."""
    if (folder / "config.toml").is_file():
        return f". It looks like the folder of a run, whose configuration is {folder / 'config.toml'}"
    found = sorted(str(file) for file in folder.glob("*.toml"))
    return f", such as {' or '.join(found[:3])}" if found else ""


def _parse_override(text: str) -> dict[str, Any]:
    """Return the nested tables that an override such as `train.async_ratio=2` stands for. Raises ConfigError if it has
    another form."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"setting `{text}`: expected `section.key=value`")
    table: dict[str, Any] = {parts[-1]: parse_value(value.strip())}
    for part in reversed(parts[:-1]):
        table = {part: table}
    return table


def parse_value(text: str) -> Any:
    """Return the value on the right side of an override: the value of a TOML text, or the text itself if it is not TOML
    or is a date or a time."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    # No key takes a date, but a run may be named after one. A text with line breaks, such as `1\nrun.name = "x"`, would
    # set further keys.
    return text if len(parsed) > 1 or isinstance(parsed["value"], date | time) else parsed["value"]


def _merge(
    into: dict[str, Any], table: Mapping[str, Any], source: str, origins: dict[str, str], prefix: str = ""
) -> None:
    """Merge a table of one source into `into`, and note in `origins` which source set each key last.

    `prefix`: dotted path of the table with a dot behind; empty for the tables of a whole source. Nested tables are
    merged key by key, with two exceptions. A table of another kind replaces the earlier one as a whole, whose options
    would not fit. The table `{}` in an override clears the earlier one.
    """
    for key, value in table.items():
        path = prefix + key
        existing = into.get(key)
        if isinstance(value, dict):
            cleared = source == OVERRIDE and not value
            if not isinstance(existing, dict) or _other_kind(path, existing, value) or cleared:
                into[key] = {}
            _merge(into[key], cast("dict[str, Any]", value), source, origins, path + ".")
        else:
            into[key] = value
        origins[path] = source


def _other_kind(path: str, existing: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Return True if the table `value` names another kind than the earlier table `existing` at the same dotted path,
    and so has other options. False if `value` names no kind, or if all tables at this path are of one kind."""
    tag = _tagged_tables().get(path)
    return tag is not None and tag in value and value[tag] != existing.get(tag)


@cache
def _tagged_tables() -> dict[str, str]:
    """Return the tag field of every key that holds a table of one of several kinds, by the dotted path of the key. The
    tag field is the option that names the kind."""
    found = ((path, tag_field(kinds)) for path, annotation in keys() if (kinds := tables_in(annotation)))
    return {path: tag for path, tag in found if tag is not None}


def _with_hint(problem: ConfigProblem, merged: Mapping[str, Any]) -> ConfigProblem:
    """Return the problem with a hint, if it is about an unknown key or a distribution of `[simulate]` in text form.

    The hint for an unknown key is the reason why the key does not exist. Without a known reason it is a key of the same
    name in another table, or the nearest name, first in the same table. Other problems are returned unchanged.
    `_decode` calls this for each problem that `examine` has found. `merged`: the tables of all sources.
    """
    section, _, name = problem.key.partition(".")
    # Earlier versions of Flash read a distribution from a text.
    if dict(keys()).get(problem.key) == Distribution and isinstance(merged[section][name], str):
        return ConfigProblem(problem.key, f"{problem.message}; {FORMER_DISTRIBUTION}")
    if (removed := REMOVED.get(problem.key)) is not None:
        return ConfigProblem(problem.key, f"this key was removed. {removed.why}. Delete it there")
    if problem.message != NO_KEY:
        return problem
    if (why := ABSENT.get(problem.key)) is not None:
        return ConfigProblem(problem.key, f"{NO_KEY}: {why}")
    return ConfigProblem(problem.key, NO_KEY + _suggest_key(*problem.key.rpartition(".")))


def _suggest_key(table: str, dot: str, key: str) -> str:
    """Return `; did you mean X?` for an unknown key; empty if no key is similar.

    The arguments are the three parts of the key's dotted path: table, last dot, and name. `table` and `dot` are empty
    for a key outside all tables.
    """
    same = [f"`{path}`" for path in _keys_named(key)]
    if same:
        return f"; did you mean {' or '.join(same)}?"
    prefix = table + dot
    siblings = (path.removeprefix(prefix).partition(".")[0] for path in key_paths() if path.startswith(prefix))
    if here := suggest(key, dict.fromkeys(siblings), prefix):
        return here
    elsewhere = {path.rpartition(".")[2]: path for path in key_paths()}
    near = nearest(key, elsewhere)
    return f"; did you mean `{elsewhere[near]}`?" if near else ""


def _keys_named(name: str) -> list[str]:
    """Return the dotted paths of the keys whose path, or whose last part of the path, is exactly `name`."""
    return [path for path in key_paths() if name in (path, path.rpartition(".")[2])]


def as_setting(word: str, after: Sequence[str]) -> str:
    """Return the right form of a setting that a user wrote as `--train.async-ratio 2` or `train.async_ratio 2`.

    Error messages about a missing file and an unknown option suggest it: several forms, joined by `or`, if several keys
    have this name. Empty if no key has it.

    Args:
        word: the word of the command line, without leading dashes.
        after: the words of the command line that follow.
    """
    name, equals, value = word.partition("=")
    if not equals:
        # The next word may be the value, unless it is a setting or an option itself.
        value = after[0] if after and not is_setting(after[0]) and not after[0].startswith("-") else "VALUE"
    return " or ".join(f"`{path}={value}`" for path in _keys_named(name.replace("-", "_")))


def key_paths() -> Iterator[str]:
    """Yield the dotted path of every key."""
    return (path for path, _ in keys())


@cache
def keys(section: type[Section] = Config, prefix: str = "") -> tuple[tuple[str, Any], ...]:
    """Return the dotted path and the annotated type of every key in `section` and the sections inside it.

    `prefix` stands before each path. Sections themselves are not keys. A table of one of several kinds, such as
    `algorithm.kl`, is one key.
    """
    found: list[tuple[str, Any]] = []
    for field in msgspec.structs.fields(section):
        inner = section_in(field.type)
        found += [(prefix + field.name, field.type)] if inner is None else keys(inner, f"{prefix}{field.name}.")
    return tuple(found)


def _resolve(config: Config) -> Config:
    """Return the decoded configuration with the values that depend on other keys or on this machine.

    `load` and `load_recorded` call this.

    A GGUF file becomes the folder that it is converted to, and an `[sft]` table sets what it needs. "auto" becomes the
    number of GPUs and the precision for them, or for this CPU. Checks and the rest of Flash see only the result.

    Raises:
        ConfigError: the GPUs cannot be counted.
    """
    config = supervised(with_folder(config))
    if config.cluster.gpus_per_node == "auto":
        cluster = msgspec.structs.replace(config.cluster, gpus_per_node=count_gpus())
        config = msgspec.structs.replace(config, cluster=cluster)
    if config.model.dtype == "auto":
        is_fast = config.gpus_per_node > 0 or computes_bfloat16()
        model = msgspec.structs.replace(config.model, dtype="bfloat16" if is_fast else "float32")
        config = msgspec.structs.replace(config, model=model)
    return config


def is_setting(argument: str) -> bool:
    """Return True if an argument of a command is a setting `key.path=value`, and not a path."""
    key, equals, _ = argument.partition("=")
    # Names of folders may contain an equals sign, as in `sweep/lr=0.1/run.toml`.
    return bool(equals) and "/" not in key and not os.path.exists(argument)


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Divide the arguments of a command into paths of config files and settings, which override the files. The files
    need not exist.

    Raises:
        ConfigError: no file was given, or an argument names no file but a key, so it is probably meant as a setting.
    """
    overrides = [argument for argument in arguments if is_setting(argument)]
    paths = [Path(argument) for argument in arguments if not is_setting(argument)]
    # A setting without an equals sign, such as `train.async_ratio 2`, would be taken for a file that is missing.
    for place, word in enumerate(arguments):
        if "=" not in word and not os.path.exists(word) and (setting := as_setting(word, arguments[place + 1 :])):
            raise ConfigError(f"there is no configuration file {word}; a setting is given as {setting}")
    if not paths:
        raise ConfigError("no config file was given; `flash init FOLDER` writes a small project that has one")
    return paths, overrides


# -- the recorded configuration: read from any folder -------------------------------------------------------------

FLASH_HOME = Path(__file__).parents[2]
"""Folder from which Flash itself is imported. It need not be recorded, since it is always there."""

AnySection = TypeVar("AnySection", bound=msgspec.Struct)


def recorded(config: Config) -> Config:
    """Return the configuration as a run records it: with absolute paths of its models, its rows, its run and its
    modules, so that it can be read from any folder.

    Options of an environment are not changed, because only the environment knows which of them are paths.
    """
    algorithm, kl, teacher = config.algorithm, config.algorithm.kl, config.algorithm.teacher
    hub_ids = hub_models(config).values()

    def placed(section: AnySection, key: str = "path") -> AnySection:
        """Return the section with the path in `key` made absolute. None and hub ids stay unchanged."""
        path: str | None = getattr(section, key)
        if path is None or path in hub_ids:
            return section
        return msgspec.structs.replace(section, **{key: str(Path(path).absolute())})

    run_dir = str(config.run_dir.absolute())
    # A call from Python has its code in a folder of its own, which ends with the run. The run directory has a copy.
    folders = [
        run_dir if Path(folder).name.startswith(CALL_FOLDER) else folder
        for folder in own_folders()
        if Path(folder).resolve() != FLASH_HOME
    ]
    return msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, output_dir=str(Path(config.run.output_dir).absolute())),
        model=placed(config.model),
        env=msgspec.structs.replace(config.env, folders=folders),
        critic=config.critic and placed(config.critic),
        sft=config.sft and placed(placed(config.sft, "data"), "held_out"),
        algorithm=msgspec.structs.replace(
            algorithm, kl=kl and placed(kl, "reference"), teacher=teacher and placed(teacher)
        ),
    )


def read_recorded(file: Path) -> dict[str, Any]:
    """Return the settings in the config.toml of an earlier run as this version of Flash would record them.

    `--resume` compares them with the present settings. The comparison must show only changes that the user has made:
    keys that were added since have their defaults, and removed keys with their former default are left out. Removed
    keys with another value stay. If the settings have another fault, such as a key that this version does not know, no
    defaults are filled in: the settings are returned as they are, without removed keys that have their former default.

    Raises:
        ConfigError: the file cannot be read (`read_toml`).
    """
    settings = read_toml(file)
    removed = removed_keys(settings)
    for one in removed:
        take_out(settings, one.key)
    decoded, problems = examine(settings, Config, "")
    if not problems:
        settings = tomllib.loads(dump(decoded))  # with the defaults of keys that the run did not know
    for one in removed:
        if not one.at_default:
            table, name = table_of(settings, one.key)
            table[name] = one.value
    return settings
