"""Reads TOML files and dotted overrides into a checked `Config`, and writes it back.

Files merge left to right, key by key in nested tables. Overrides are applied last; an empty table as an override clears
a table. All faults of the input are found before anything starts. One `ConfigError` names all unknown keys and wrong
types, each with its path, its file and the expected type. If there are none, another `ConfigError` names all other
problems. Needs no torch or vllm.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast, get_args

import msgspec
import tomli_w

from flash.config.check import check
from flash.config.check_learning import check_sft, supervised
from flash.config.decode import (
    NO_KEY,
    NONE,
    ConfigProblem,
    examine,
    nearest,
    refuse,
    section_in,
    show,
    suggest,
    tables_in,
    tag_field,
)
from flash.config.machine import computes_bfloat16, count_gpus
from flash.config.models import is_hub_id, with_folder
from flash.config.objects import import_from, own_folders
from flash.config.section import ABSENT, REMOVED, Section
from flash.config.simulate import FORMER_DISTRIBUTION, Distribution
from flash.config.tree import Config
from flash.errors import ConfigError
from flash.text import harmless

DEEPEST = 64
"""Largest depth of nested tables and lists in a source. Only the options of environments may be nested freely."""
OVERRIDE = "setting"
"""Source of keys that an override has set, as error messages show it."""
RECORDED = "config.toml"
"""Name of the file in which a run records its configuration."""
MOST_LISTED = 5
"""Largest number of items in a message about ignored keys. The recorded configuration of an old run may have dozens."""


def load(
    paths: str | Path | Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    simulated: bool = False,
    also: Callable[[Config], Iterable[ConfigProblem]] = lambda config: (),
) -> Config:
    """Read, merge, decode, resolve and check a configuration.

    Its import paths may name modules in the folders of the files: those folders are added to Python's import path.

    Args:
        paths: a TOML file, or several of them; later files take precedence.
        overrides: `dotted.key=value`; the value is parsed as TOML, or taken as text if it is not TOML.
        simulated: check only what a simulation needs, and not the model, environment or devices.
        also: function that returns further problems of the checked configuration. Problems of keys that already have
            one are left out.

    Raises:
        ConfigError: names every unknown key and wrong type; if there are none, every other problem.
    """
    files = _files(paths)
    merged, origins = _merged(files, overrides)
    _ignore_removed(merged, origins)
    if isinstance(merged.get("sft"), dict):
        merged.setdefault("env", {"path": ""})  # supervised fine-tuning runs no environment
    decoded, problems = examine(merged, Config, "")
    if problems:
        raise refuse([_with_hint(problem, merged) for problem in problems], origins)
    config = _resolve(decoded)
    import_from([*(str(file.resolve().parent) for file in files), *map(os.path.abspath, config.env.folders)])
    problems = [*check_sft(decoded), *check(config, simulated=simulated)]
    if not simulated:
        problems += _missing_folders(config, origins)
    named = {problem.key for problem in problems}
    problems += [problem for problem in also(config) if problem.key not in named]
    if problems:
        raise refuse(problems, origins)
    return config


def _missing_folders(config: Config, origins: Mapping[str, str]) -> Iterator[ConfigProblem]:
    """Yield a problem for each folder of `env.folders` that does not exist.

    A run records all folders of the import path in its config.toml. Some of them may be gone when the run is resumed,
    or on another node, and are needed only if they hold a module of the run. So those are not checked.
    """
    if Path(origins.get("env.folders", OVERRIDE)).name == RECORDED:
        return
    for place, folder in enumerate(config.env.folders):
        if not os.path.exists(folder):
            message = f"expected a folder to import modules from, and {show(os.path.abspath(folder))} does not exist"
            yield ConfigProblem(f"env.folders[{place}]", message)


def load_checked(file: Path) -> Config:
    """Read the file that `dump` wrote of a checked configuration, in a process of its run.

    The configuration is not checked again. If a disk or a model has changed since the run began, the error appears
    where the run uses it. A check here would report it as a mistake in a file that no user has written.

    Raises:
        ConfigError: the file cannot be read.
    """
    decoded, problems = examine(_read(file), Config, "")
    if problems:
        raise refuse(problems)
    import_from(map(os.path.abspath, decoded.env.folders))
    return decoded


def _files(paths: object) -> list[Path]:
    """Return the paths that `load` was given as a list. Raises ConfigError if they are something else, such as a
    table."""
    several = cast("Sequence[object]", paths) if isinstance(paths, list | tuple) else [paths]
    for one in several:
        if not isinstance(one, str | os.PathLike):
            raise ConfigError(
                "flash.load: expected the path of a TOML file, or a list of paths, and settings as `key=value` texts "
                f"in its second argument, got a value of type {type(one).__name__}; write a table to a file first"
            )
    return [Path(cast("str", one)) for one in several]


def given(paths: Sequence[Path], overrides: Sequence[str]) -> set[str]:
    """Return the dotted keys that these sources set, and those of the tables around them.

    Raises:
        ConfigError: a source cannot be read.
    """
    return set(_merged(paths, overrides)[1])


def _merged(files: Sequence[Path], overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Read and merge all sources. Return the tables, and the source that set each dotted key last.

    Tables have dotted keys, too. A source is the path of a file, or OVERRIDE. An override with the bare word `none`
    unsets its key. Raises ConfigError if a source cannot be read or is nested too deeply.
    """
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for file in files:
        read = _read(file)
        _check_depth(read, str(file))
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
    """Unset a key whose override is the bare word `none`.

    A text key gets None if it may be None. A key that may not be None is taken out of `merged`, so it has its default,
    or is refused as missing if it is required. All else is left to `examine`: other keys that may be None, whole
    tables, unknown keys, and keys of which `none` is a value.
    """
    annotation = dict(keys()).get(key)
    if annotation is None or NONE in get_args(annotation):
        return
    *tables, name = key.split(".")
    table = merged
    for outer in tables:
        table = cast("dict[str, Any]", table[outer])
    if NoneType not in get_args(annotation):
        del table[name]
    elif str in get_args(annotation):
        table[name] = None


def _ignore_removed(merged: dict[str, Any], origins: Mapping[str, str]) -> None:
    """Take removed keys out of `merged` if a file sets them to the default that they had.

    A run records all defaults, so the config.toml of a run of an older version holds such keys, although its user never
    set them. In such a file another value is ignored, too, with a warning: the run must stay readable. Other values in
    a file that a user has written are left, and so are overrides. They are refused as unknown keys.
    """
    ignored: dict[str, list[str]] = {}
    for key, value, at_default in removed_keys(merged):
        file = origins.get(key, OVERRIDE)
        if file == OVERRIDE or not (at_default or Path(file).name == RECORDED):
            continue
        _take_out(merged, key)
        if at_default:
            ignored.setdefault(file, []).append(key)
        else:
            _report_without_effect(file, key, show(value))
    for file, keys in ignored.items():
        _report_ignored(file, tuple(keys))


def _take_out(settings: Mapping[str, Any], key: str) -> None:
    """Delete a dotted key, which is there, from nested tables."""
    *tables, name = key.split(".")
    table: Any = settings
    for outer in tables:
        table = table[outer]
    del table[name]


@cache
def _report_ignored(file: str, keys: tuple[str, ...]) -> None:
    """Print one line about ignored keys. Cached: a command that reads a file several times prints the line once."""
    listed = [f"`{key}`" for key in keys]
    if len(listed) > MOST_LISTED:
        listed[MOST_LISTED - 1 :] = [f"and {len(listed) - MOST_LISTED + 1} more keys"]
    were = "was removed, and it is" if len(keys) == 1 else "were removed, and they are"
    has = "it has its" if len(keys) == 1 else "they have their"
    sys.stderr.write(f"flash: {', '.join(listed)} in {harmless(file)} {were} ignored, because {has} former default\n")


@cache
def _report_without_effect(file: str, key: str, value: str) -> None:
    """Print the warning about a removed key to which a recorded configuration gives another value than its default."""
    message = f"was removed, so {harmless(value)} in {harmless(file)} has no effect. {REMOVED[key].why}"
    sys.stderr.write(f"flash: warning: `{key}` {message}\n")


def removed_keys(settings: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Return each removed key that nested tables still hold: its path, its value, and True if that is its old
    default."""
    found: list[tuple[str, Any, bool]] = []
    for key, removed in REMOVED.items():
        *tables, name = key.split(".")
        table: Any = settings
        for outer in tables:
            table = cast("dict[str, Any]", table).get(outer) if isinstance(table, dict) else None
        if isinstance(table, dict) and name in table:
            value = cast("dict[str, Any]", table)[name]
            default = NONE if removed.default is None else removed.default
            # False == 0 in Python, but not in TOML.
            found.append((key, value, value == default and isinstance(value, bool) == isinstance(default, bool)))
    return found


def _check_depth(table: dict[str, Any], source: str) -> None:
    """Raise ConfigError if tables or lists are nested too deeply to be walked recursively."""
    level: list[Any] = [table]
    for _ in range(DEEPEST):
        inner = (value for one in level for value in (one.values() if isinstance(one, dict) else one))
        level = [value for value in inner if isinstance(value, (dict, list))]
    if level:
        raise ConfigError(f"{source}: expected tables and lists at most {DEEPEST} deep in one another")


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables with their dotted keys."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flat(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            yield prefix + name, value


def dump(config: Config) -> str:
    """Return the configuration as TOML, which `load` reads back to an equal configuration.

    None is left out if it is the default, and written as the text `none` otherwise.
    """
    return tomli_w.dumps(_plain(config))


def _plain(value: Any) -> Any:
    """Convert structs to tables of plain values, recursively."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("Sequence[Any]", value)]
    if not isinstance(value, msgspec.Struct):
        return value
    described = value.__struct_config__
    table: dict[str, Any] = {described.tag_field: described.tag} if described.tag_field is not None else {}
    for field in msgspec.structs.fields(type(value)):
        inner = getattr(value, field.name)
        if inner is not None:
            table[field.name] = _plain(inner)
        elif field.default is not None:
            table[field.name] = NONE
    return table


def _read(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError if the file is missing, cannot be read, or is not TOML."""
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
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: not TOML, or a number of too many digits
        what = "is not valid TOML" if path.suffix == ".toml" else "is not a TOML file, which a configuration must be"
        raise ConfigError(f"{path} {what}: {error}") from error


def _files_in(folder: Path) -> str:
    """Return the part of an error message that names TOML files in a folder; empty if there are none."""
    if (folder / "config.toml").is_file():
        return f". It looks like the folder of a run, whose configuration is {folder / 'config.toml'}"
    found = sorted(str(file) for file in folder.glob("*.toml"))
    return f", such as {' or '.join(found[:3])}" if found else ""


def _parse_override(text: str) -> dict[str, Any]:
    """Return the nested tables that an override such as `train.async_ratio=2` stands for. Raises ConfigError."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"setting `{text}`: expected `section.key=value`")
    table: dict[str, Any] = {parts[-1]: parse_value(value.strip())}
    for part in reversed(parts[:-1]):
        table = {part: table}
    return table


def parse_value(text: str) -> Any:
    """Return the value of a TOML text, or the text itself if it is not TOML.

    A text with line breaks could hold further keys; it is then taken as text, too.
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _merge(
    into: dict[str, Any], table: Mapping[str, Any], source: str, origins: dict[str, str], prefix: str = ""
) -> None:
    """Merge the table of one source into `into`, and note in `origins` which source set each key last.

    Nested tables are merged key by key. A table replaces the earlier one as a whole if it has another kind, whose
    options would not fit, or if it is `{}` in an override, with which a user clears a table.
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
    """Return True if a table replaces an earlier one because it has another kind, and so other options."""
    tag = _tagged_tables().get(path)
    return tag is not None and tag in value and value[tag] != existing.get(tag)


@cache
def _tagged_tables() -> dict[str, str]:
    """Return the path and tag field of every key that holds a table of one of several kinds."""
    found = ((path, tag_field(kinds)) for path, annotation in keys() if (kinds := tables_in(annotation)))
    return {path: tag for path, tag in found if tag is not None}


def _with_hint(problem: ConfigProblem, merged: Mapping[str, Any]) -> ConfigProblem:
    """Add a hint to the problem of an unknown key, and to that of a distribution in its former form.

    The hint for an unknown key is the reason why the key does not exist, a key of the same name in another table, or
    the nearest name, first in the same table. `merged`: the tables of all sources.
    """
    section, _, name = problem.key.partition(".")
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
    """Return `; did you mean X?` for an unknown key; empty if no key is similar. `table` and `dot` stand before it."""
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
    """Return the keys with exactly this name in any table, or with exactly this path."""
    return [path for path in key_paths() if name in (path, path.rpartition(".")[2])]


def as_setting(word: str, after: Sequence[str]) -> str:
    """Return the right form of a setting that was written as `--train.async-ratio 2` or `train.async_ratio 2`.

    Error messages about a missing file and an unknown option suggest it. The result is empty if there is no such
    setting.

    Args:
        word: the written word, without leading dashes.
        after: the words that follow.
    """
    name, equals, value = word.partition("=")
    if not equals:
        value = after[0] if after and "=" not in after[0] and not after[0].startswith("-") else "VALUE"
    return " or ".join(f"`{path}={value}`" for path in _keys_named(name.replace("-", "_")))


def key_paths() -> Iterator[str]:
    """Yield the dotted path of every key."""
    return (path for path, _ in keys())


@cache
def keys(section: type[Section] = Config, prefix: str = "") -> tuple[tuple[str, Any], ...]:
    """Return the dotted path and type of every key."""
    found: list[tuple[str, Any]] = []
    for field in msgspec.structs.fields(section):
        inner = section_in(field.type)
        found += [(prefix + field.name, field.type)] if inner is None else keys(inner, f"{prefix}{field.name}.")
    return tuple(found)


def _resolve(config: Config) -> Config:
    """Return the configuration with values that depend on other keys or on this machine.

    A GGUF file becomes the folder that it is converted to, and an `[sft]` table sets what it needs. "auto" becomes the
    number of GPUs and the precision for them, or for this CPU. Checks and the rest of Flash see only the result.
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


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Divide arguments into config files and `key.path=value` overrides, by the equals sign.

    Raises:
        ConfigError: no file was given, or a missing file is probably meant as a setting.
    """
    overrides = [argument for argument in arguments if "=" in argument]
    paths = [Path(argument) for argument in arguments if "=" not in argument]
    for place, word in enumerate(arguments):
        if "=" not in word and not os.path.exists(word) and (setting := as_setting(word, arguments[place + 1 :])):
            raise ConfigError(f"there is no configuration file {word}; a setting is given as {setting}")
    if not paths:
        raise ConfigError("no config file was given; the smallest one is examples/tiny.toml")
    return paths, overrides


# -- the recorded configuration: read from any folder -------------------------------------------------------------

FLASH_HOME = Path(__file__).parents[2]
"""Folder from which Flash itself is imported. It need not be recorded, since it is always there."""

AnySection = TypeVar("AnySection", bound=msgspec.Struct)


def recorded(config: Config) -> Config:
    """Return the configuration with absolute paths of its models, its run and its modules.

    Options of an environment are not changed, because only the environment knows which of them are paths.
    """
    algorithm, kl, teacher = config.algorithm, config.algorithm.kl, config.algorithm.teacher
    folders = [folder for folder in own_folders() if Path(folder).resolve() != FLASH_HOME]
    return msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, output_dir=str(Path(config.run.output_dir).absolute())),
        model=_placed(config.model),
        env=msgspec.structs.replace(config.env, folders=folders),
        critic=config.critic and _placed(config.critic),
        sft=config.sft and _placed(_placed(config.sft, "data"), "held_out"),
        algorithm=msgspec.structs.replace(
            algorithm, kl=kl and _placed(kl, "reference"), teacher=teacher and _placed(teacher)
        ),
    )


def read_recorded(file: Path) -> dict[str, Any]:
    """Return the settings in the config.toml of an earlier run as this version of Flash would record them.

    So comparing them with the present settings shows only changes that the user has made: keys that were added since
    have their defaults, and removed keys with their former default are left out. Removed keys with another value stay.
    Settings that this version cannot read for another reason are returned as they are.

    Raises:
        OSError, ValueError: the file cannot be read, or it is not TOML.
    """
    settings = tomllib.loads(file.read_text(encoding="utf-8"))
    removed = removed_keys(settings)
    for key, *_ in removed:
        _take_out(settings, key)
    decoded, problems = examine(settings, Config, "")
    if not problems:
        settings = tomllib.loads(dump(decoded))
    for key, value, at_default in removed:
        if not at_default:
            *tables, name = key.split(".")
            table = settings
            for outer in tables:
                table = table[outer]
            table[name] = value
    return settings


def _placed(section: AnySection, key: str = "path") -> AnySection:
    """Return the section with the path in `key` made absolute. Hub ids and None stay unchanged."""
    path: str | None = getattr(section, key)
    if path is None or is_hub_id(path):
        return section
    return msgspec.structs.replace(section, **{key: str(Path(path).absolute())})
