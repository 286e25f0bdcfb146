"""Checks of this machine and of the resumed run, which `flash train` and `flash sft` make before any work.

`flash.config` checks the configuration itself, in every process of a job. The checks here run once, in the command,
because they write files, resolve host names, or read files that a run has left. The commands call `start_problems` and
`sft_problems`, also with `--dry-run`, and print the problems. Each check is a generator of problems, so that the user
sees all of them at once. A check reports nothing about a path that cannot be reached (`unreachable`), because the
configuration's own checks report it.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from flash.config.decode import ConfigProblem, show
from flash.config.load import dump, read_recorded, recorded
from flash.config.models import is_hub_id, other_models, unreachable
from flash.config.resuming import partial_effects, refused
from flash.config.tree import Config
from flash.data.tables import column_names
from flash.environment.fingerprint import texts_in
from flash.errors import ConfigError, FlashError, RunDirectoryError
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.trackers.trackers import not_installed
from flash.run.fetch import check_source, refuse_unrecorded, source_of, why_not_there
from flash.run.journal import journal_folder
from flash.run.models import hugging_face_fault, tiny_models
from flash.run.processes.locks import in_use
from flash.run.processes.rendezvous import advertised_host
from flash.run.restart import version_with_metrics
from flash.trainer.checkpoint_files import (
    alpha_mismatch,
    complete_checkpoints,
    damaged_checkpoints,
    extras_mismatch,
    newest_complete,
    read_manifest,
)
from flash.trainer.model.tiny_model import changed_parts, refuse_foreign
from flash.transport.server import try_listening
from flash.waiting import run_apart

WEIGHTS = ("*.safetensors", "*.bin")
"""Files of a model folder that hold its weights."""
TOKENIZERS = ("tokenizer.*", "vocab.*", "*.tiktoken", "*.model", "tokenization_*.py")
"""Files of a model folder that hold its tokenizer. The settings in tokenizer_config.json are none without them."""


def start_problems(config: Config) -> list[ConfigProblem]:
    """Return the problems that would stop the run of `flash train`, in addition to those of the configuration.

    `flash.config.load.load` calls this last, for `flash train`, `flash doctor` and `flash.train`.
    """
    if config.sft is not None:
        message = "is only for `flash sft`: leave it out (`sft=none`), and set model.path to the model that it has made"
        return [ConfigProblem("sft", message)]
    return [*_common_problems(config), *too_many_steps(config)]


def sft_problems(config: Config) -> list[ConfigProblem]:
    """Return the problems that would stop the run that `flash sft` is about to start, except faults of single rows.

    `flash.config.load.load` calls this last, for `flash sft` and `flash doctor`. The rows are tokenized, and so
    checked, after that.
    """
    if config.sft is None:
        return [ConfigProblem("sft", "is missing: an [sft] table names the rows, as `sft.data=rows.jsonl`")]
    problems: list[ConfigProblem] = []
    for key, path in (("sft.data", config.sft.data), ("sft.held_out", config.sft.held_out)):
        try:
            _ = path and column_names(path)  # raises an error if the file is missing or cannot be read
        except ConfigError as error:
            problems.append(ConfigProblem(key, str(error)))
    # The number of steps follows from the rows, which are not read yet. So `flash sft` calls `too_many_steps` later.
    return [*problems, *_common_problems(config)]


def _common_problems(config: Config) -> list[ConfigProblem]:
    """Return the problems that would stop a run of `flash train` or of `flash sft`."""
    problems = [*_temporary_folder(), *_unimportable(config), *_trackers(config), *_models(config), *_fetched(config)]
    if unreachable(str(config.run_dir.absolute())) is None:
        problems += [*_output_folders(config), *_hub(config), *_resumed_run(config)]
    return problems


def _temporary_folder() -> Iterator[ConfigProblem]:
    """Yield a problem if temporary files can be written in none of the usual folders."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        message = f"no folder for temporary files can be written: {error.strerror}; set it to one that can"
        yield ConfigProblem("TMPDIR", message)


def _unimportable(config: Config) -> Iterator[ConfigProblem]:
    """Yield problems of classes that the other processes of the run cannot import, because they are in `__main__`."""
    values = {
        "env.path": config.env.path,
        "env.options": config.env.options,
        "track.to": config.track.to,
        "algorithm.objective": config.algorithm.objective,
    }
    for key, value in values.items():
        # A program that calls `flash.train` may have defined a class itself. Other processes do not import it.
        for path in dict.fromkeys(one for one in texts_in(value) if one.partition(":")[0] == "__main__"):
            name = path.partition(":")[2]
            message = (
                f"{path} is defined in the program that starts the run, and no other process of the run can import it: "
                f"give flash.train the object itself, or move it to a file of its own, such as my_code.py, and name it "
                f"`my_code:{name}`"
            )
            yield ConfigProblem(key, message)


def _trackers(config: Config) -> Iterator[ConfigProblem]:
    """Yield problems of trackers whose packages are not installed. Only the first node needs them."""
    if os.environ.get("FLASH_NODE_RANK", "0") == "0":
        for fault in filter(None, map(not_installed, config.track.trackers)):
            yield ConfigProblem("track.to", fault)


def _output_folders(config: Config) -> Iterator[ConfigProblem]:
    """Yield problems of folders that only the first node writes: the run directory, and its parent with the lock."""
    if os.environ.get("FLASH_NODE_RANK", "0") == "0":
        folders = dict.fromkeys(map(_nearest_existing, (config.run_dir, config.run_dir.parent)))
        for fault in filter(None, map(_fault_of_folder, folders)):
            yield ConfigProblem("run.output_dir", fault)


def _models(config: Config) -> Iterator[ConfigProblem]:
    """Yield problems of models: folders without whole weights or without a tokenizer, hub ids without a model, tiny
    models that cannot be made."""
    made = {path: key for key, path, _ in tiny_models(config)}  # models that the run makes if they are missing
    for path, key in made.items():
        if unreachable(str(path)) is not None:
            continue
        try:
            refuse_foreign(path)
        except ConfigError as error:
            yield ConfigProblem(key, str(error))
        if not path.exists() and (fault := _fault_of_folder(_nearest_existing(path))):
            yield ConfigProblem(key, fault)
    if config.model.fetch is not None:
        made[Path(config.model.path)] = "model.path"
    for key, path in {"model.path": config.model.path, **other_models(config)}.items():
        if not path or Path(path) in made or unreachable(path) is not None:
            continue
        if Path(path).is_dir() and not any(map(any, map(Path(path).glob, WEIGHTS))):
            files = " or ".join(WEIGHTS)
            yield ConfigProblem(key, f"the folder {path} holds no weights: expected a Hugging Face model, with {files}")
        elif key == "model.path" and Path(path).is_dir() and not any(map(any, map(Path(path).glob, TOKENIZERS))):
            yield ConfigProblem(
                key,
                f"the folder {path} holds no tokenizer: expected a tokenizer.json beside the weights, as "
                "`AutoTokenizer.from_pretrained(BASE).save_pretrained(FOLDER)` writes the one of the model that these "
                "weights come from",
            )
        elif Path(path).is_dir() and (fault := _fault_of_weights(Path(path))):
            yield ConfigProblem(key, f"{fault}; copy or fetch the model again")
        elif is_hub_id(path) and (fault := hugging_face_fault(path)):
            yield ConfigProblem(key, fault)


def _fault_of_weights(folder: Path) -> str:
    """Return a message about a missing, damaged or incomplete safetensors file of a model; empty if there is none.

    Reads only headers. Weights in other files (`*.bin`) have no header that could be checked.
    """
    parts = set(folder.glob("*.safetensors"))
    try:
        # A model in several files has an index, which also names files that are missing.
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        parts |= {folder / name for name in index["weight_map"].values()}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{folder / 'model.safetensors.index.json'} cannot be read ({error})"
    for part in sorted(parts):
        try:
            with safe_open(part, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            return f"{part} is missing, damaged or cut off ({error})"
    return ""


def _fetched(config: Config) -> Iterator[ConfigProblem]:
    """Yield problems of the pretrained model that the run has to make, as far as they show before it is fetched."""
    named, path = config.model.fetch, config.model.path
    if named is None or unreachable(path) is not None:
        return
    folder, source = Path(path), source_of(named)
    try:
        if why_not_there(folder, source) is None:
            return
        if fault := _fault_of_folder(_nearest_existing(folder.parent)):
            yield ConfigProblem("model.path", f"{fault}, in model.path, with model.fetch = {show(named)}")
            return
        refuse_unrecorded(folder)
        positions = check_source(source, folder)
    except ConfigError as error:
        yield ConfigProblem("model.path", str(error))
        return
    if positions is not None and config.model.max_length > positions:
        message = f"expected at most {positions}, the positions of {named}, got {config.model.max_length}"
        yield ConfigProblem("model.max_length", message)


def _hub(config: Config) -> Iterator[ConfigProblem]:
    """Yield problems of the hub's host and port.

    In a job of one node, the host must be this machine and the port free. In a job of several nodes, the hub may run on
    another one, so only the name of the host is resolved.
    """
    cluster, host = config.cluster, config.cluster.hub_host
    if host is None and cluster.hub_port == 0:
        return
    try:
        if cluster.nodes == 1:
            # Processes of the same run may still hold the port. The launch waits for them, or reports which process
            # uses the run. Any free port shows whether the host is this machine.
            port = 0 if in_use(config.run_dir) else cluster.hub_port
            run_apart(try_listening, host or advertised_host(config), port)
        elif host is not None:
            socket.getaddrinfo(host, None)
    except ConfigError as error:
        yield ConfigProblem("cluster.hub", str(error))
    except (OSError, UnicodeError, OverflowError) as error:
        yield ConfigProblem("cluster.hub", f"the host name {host} cannot be resolved: {error}")


def changes_without_effect(config: Config) -> list[ConfigProblem]:
    """Return warnings for a resumed run: keys that were changed in its configuration and do not have their full effect.

    Each has a message about the part that stays unchanged. The list is empty if no run is resumed. `flash train`,
    `flash sft` and `flash.train` print the warnings before they start anything.
    """
    if not config.run.resume or newest_complete(config.run_dir) is None:
        return []
    return partial_effects(_recorded_settings(config), _present_settings(config))


def _resumed_run(config: Config) -> Iterator[ConfigProblem]:
    """Yield problems of a resumed run: the run does not exist, keys have changed that may not, or files are damaged."""
    if not config.run.resume or not config.run_dir.is_dir():
        return
    yield from _missing_run(config)
    directory = RunDirectory(config.run_dir)
    yield from refused(_recorded_settings(config), _present_settings(config), directory.path)
    yield from _checkpoint_misfits(config)
    try:
        directory.hub_numbers.last()
    except RunDirectoryError as error:
        yield ConfigProblem("run.resume", str(error))


def too_many_steps(config: Config) -> Iterator[ConfigProblem]:
    """Yield a problem if the resumed run has already made more steps than run.steps.

    `flash train` checks this with the other problems, and `flash sft` once it has counted the rows, from which
    run.steps follows.
    """
    if unreachable(str(config.run_dir.absolute())) is not None:
        return
    if not config.run.resume or not config.run_dir.is_dir():
        return
    if (reached := version_with_metrics(config)) > config.run.steps:
        yield ConfigProblem(
            "run.steps",
            f"the run in {config.run_dir} has made {reached} steps already; expected at least as many, got "
            f"{config.run.steps}",
        )


def _missing_run(config: Config) -> Iterator[ConfigProblem]:
    """Yield a problem if nothing of a run is left to resume, if all of its checkpoints are damaged, or if its recorded
    settings cannot be read.

    Only the first node checks this, because the other nodes need not see the run directory.
    """
    if os.environ.get("FLASH_NODE_RANK", "0") != "0":
        return
    directory = RunDirectory(config.run_dir)
    whole, damaged = complete_checkpoints(directory.path), damaged_checkpoints(directory.path)
    if not whole and damaged:
        message = f"no checkpoint of {directory.path} is whole: {'; '.join(damaged)}. Bring one back from a copy"
        yield ConfigProblem("run.resume", message)
    traces = (directory.config, directory.metrics, journal_folder(directory.path))
    if not whole and not damaged and not any(trace.exists() for trace in traces):
        yield ConfigProblem("run.resume", f"there is no run to continue: nothing of one is left in {directory.path}")
    # Without the recorded settings nobody would notice a changed key, and the checkpoint may not fit the change.
    if not whole:
        return
    try:
        read_recorded(directory.config)
    except ConfigError as error:
        remedy = "Bring the file back from a copy, or put the configuration there with which the run was started"
        yield ConfigProblem("run.resume", f"{error}. The present settings are compared with that file. {remedy}")


def _checkpoint_misfits(config: Config) -> Iterator[ConfigProblem]:
    """Yield a problem for each part of the newest checkpoint that does not fit the configuration.

    The parts are weights beside the policy's (critics, references, averages), adapters, and the characters that a tiny
    model knows.
    """
    if (checkpoint := newest_complete(config.run_dir)) is None:
        return
    from flash.trainer.objective import make_objective, resolve_method

    try:
        method = resolve_method(config, make_objective(config.algorithm))
        manifest = read_manifest(checkpoint)
    except FlashError:
        return  # reported by another check
    kl = config.algorithm.kl
    # Names of the parts beside the policy, as the manifest of a checkpoint of this configuration has them in `extras`.
    wanted = ["lora"] * (config.lora is not None) + ["critic"] * method.critics + ["ewma"] * (method.proximal == "ewma")
    wanted += ["reference"] * (kl is not None and kl.refresh is not None)
    if fault := extras_mismatch(checkpoint, manifest.extras, wanted):
        yield ConfigProblem("lora" if "[lora]" in fault else "algorithm.objective", fault)
    elif config.lora is not None and (fault := alpha_mismatch(checkpoint, manifest, config.lora.alpha)):
        yield ConfigProblem("lora.alpha", fault)
    for _, path, tiny in tiny_models(config):
        with suppress(ConfigError):  # the environment has no alphabet, so it cannot be compared with the tokenizer
            if path.exists() and "alphabet" in changed_parts(path, tiny, config.env.path, config.env.options):
                message = f"the environment has other characters than the tiny model {path}, which the run trains"
                yield ConfigProblem("env.options", f"{message}: go on with the same characters, or start a new run")


def _recorded_settings(config: Config) -> dict[str, Any]:
    """Return the settings that the resumed run has recorded; empty if they cannot be read, so that nothing is compared.
    `_missing_run` reports that."""
    try:
        return read_recorded(RunDirectory(config.run_dir).config)
    except ConfigError:
        return {}


def _present_settings(config: Config) -> dict[str, Any]:
    """Return a configuration as a run records it, for the comparison with the recorded settings."""
    return tomllib.loads(dump(recorded(config)))


def _nearest_existing(folder: Path) -> Path:
    """Return the path, or its nearest parent that exists. The folder would be made there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _fault_of_folder(folder: Path) -> str:
    """Return an error message, with advice, if no file can be written in a folder; else empty."""
    # A file is written, because permissions are not enough: a file system may be read-only, full or over its quota.
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
            file.flush()
    except OSError as error:
        return f"no file can be written in {folder}: {error.strerror or error}; name a folder that can be written"
    return ""
