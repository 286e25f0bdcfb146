"""Checks of a configuration that look at this machine: folders to reach, models to fetch, cores, vLLM's parsers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from flash.config.decode import ConfigProblem, nearest, show, suggest
from flash.config.packaged import PACKAGED, gguf_folder, is_gguf
from flash.config.tree import Config
from flash.foreign.vllm_parsers import Package, names

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""`name` or `owner/name`: anything else is a path."""

SHOWN = 6
"""Folders that are named in place of one that is not there."""


def fetch_rule(config: Config) -> Iterator[ConfigProblem]:
    """The model to be fetched is known, or its file is there, and nothing else says what `model.path` is made from."""
    fetch, path = config.model.fetch, config.model.path
    if fetch is None:
        return
    # Of a GGUF file that model.path has named, that is the key that its user knows.
    key = "model.path" if is_gguf(fetch) and path == gguf_folder(fetch) else "model.fetch"
    if config.tiny_model is not None:
        yield ConfigProblem(
            key, "[tiny_model] stands beside it, and both say what the model is made from: leave one out"
        )
    if is_gguf(path):
        message = f"expected the folder that model.fetch is made into, or no model.fetch (`none`), got the file {path}"
        yield ConfigProblem("model.path", message)
    if is_gguf(fetch):
        if not os.path.isfile(fetch) and not os.path.isfile(os.path.join(path, "config.json")):
            yield ConfigProblem(key, f"there is no file {fetch}: expected a GGUF file")
    elif fetch not in PACKAGED:
        known = " or ".join(map(show, PACKAGED))
        yield ConfigProblem(key, f"expected {known}, or a .gguf file, got {show(fetch)}{suggest(fetch, PACKAGED)}")
    elif config.model.max_length > (limit := PACKAGED[fetch].positions):
        message = f"expected at most {limit}, the positions of {fetch}, got {config.model.max_length}"
        yield ConfigProblem("model.max_length", message)


def parser_rule(config: Config) -> Iterator[ConfigProblem]:
    """vLLM, where it is installed, has the parsers that are named."""
    named: dict[Package, tuple[str, str | None]] = {
        "tool_parsers": ("tool_parser", config.model.tool_parser),
        "reasoning": ("reasoning_parser", config.model.reasoning_parser),
    }
    for package, (key, name) in named.items():
        if name is not None and (known := names(package)) and name not in known:
            yield ConfigProblem(f"model.{key}", f"vLLM has no {name!r}; it has {', '.join(known)}")


def is_hub_id(text: str) -> bool:
    """Whether a text can only be the name of a model on the hub: nothing here has that path, nor could have."""
    path = Path(text)
    named = HUB_ID.fullmatch(text) is not None and (path.parent == Path() or not path.parent.exists())
    return named and not path.exists()


def no_model(path: Path) -> str:
    """What is wrong with a path that is no model folder."""
    if is_gguf(str(path)):
        return f"{path} is a GGUF file (`flash fetch {path}` makes the folder {gguf_folder(str(path))} of it)"
    if path.is_dir():
        return f"the folder {path} has no config.json"
    if path.parts[0].startswith("~"):
        return f"the folder {path} does not exist (only shells read ~ as {Path.home()})"
    return f"the folder {path} does not exist"


def beside(path: Path) -> str:
    """`; FOLDER has A, B`: what stands where something that is not there was looked for; nothing where nothing is."""
    found = [] if path.exists() else sorted(other.name for other in path.parent.glob("[!.]*/"))
    if path.parent == Path():
        found = [name for name in (nearest(path.name, found),) if name]
    return f"; {path.parent.absolute()} has {', '.join(found[-SHOWN:])}" if found else ""


PROCESSES_PER_CORE = 4
"""Processes of one kind that a core may carry: beyond, starting them alone outlasts every deadline."""


def unreachable(path: str) -> str | None:
    """Why the file system cannot even say whether there is something at a path."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return error.strerror
    return None


def cpu_rule(config: Config) -> Iterator[ConfigProblem]:
    """Cores that are named are among those of this machine, each once."""
    cores = os.cpu_count() or 1
    for key, cpus in (
        ("cluster.node_cpus", config.cluster.node_cpus),
        ("cluster.trainer_cpus", config.cluster.trainer_cpus),
    ):
        if cpus is not None and (not cpus or max(cpus) >= cores or len(set(cpus)) < len(cpus)):
            message = f"expected one or more of this machine's cores 0 to {cores - 1}, each once, got {cpus}"
            yield ConfigProblem(key, message)


def process_rule(config: Config) -> Iterator[ConfigProblem]:
    """Without GPUs, the processes of a node find cores."""
    if config.gpus_per_node > 0:
        return
    most = PROCESSES_PER_CORE * (os.cpu_count() or 1)
    workers = config.engine.count * config.engine.tensor_parallel
    for key, wanted in (
        ("cluster.trainer_ranks", config.cluster.trainer_ranks),
        ("engine.count" if config.engine.count > config.engine.tensor_parallel else "engine.tensor_parallel", workers),
    ):
        if wanted > most:
            yield ConfigProblem(key, f"expected at most {most} processes, {PROCESSES_PER_CORE} to a core, got {wanted}")


def memory_rule(config: Config) -> Iterator[ConfigProblem]:
    """Without GPUs, the KV caches of a node fit into its memory."""
    if config.gpus_per_node > 0:
        return
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if config.engine.kv_cache_gib * config.engine.count >= memory_gib:
        message = (
            f"expected less than the {memory_gib:.0f} GiB of this machine's memory for {config.engine.count} engine(s) "
            f"together, got {config.engine.kv_cache_gib:g} for each"
        )
        yield ConfigProblem("engine.kv_cache_gib", message)


def output_rule(config: Config) -> Iterator[ConfigProblem]:
    """The run directory can be made."""
    folder = config.run_dir.absolute()
    if (fault := unreachable(str(folder))) is not None:
        yield ConfigProblem("run.output_dir", f"{show(str(folder))} cannot be used: {fault}")
        return
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        yield ConfigProblem("run.output_dir", f"expected a folder, and {folder} is none")
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield ConfigProblem("run.output_dir", f"expected a folder that can be written, and {folder} cannot")


MACHINE_RULES: tuple[Callable[[Config], Iterator[ConfigProblem]], ...] = (
    parser_rule,
    cpu_rule,
    process_rule,
    memory_rule,
    output_rule,
)
