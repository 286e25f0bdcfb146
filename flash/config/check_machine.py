"""What this machine cannot give: cores, memory, a folder to write to.

A configuration is checked where it runs; what it says of other machines of the job is theirs to check.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from flash.config.decode import Problem, show
from flash.config.tree import Config

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


def cpu_rule(config: Config) -> Iterator[Problem]:
    """Cores that are named are among those of this machine, each once."""
    cores = os.cpu_count() or 1
    for key, cpus in (
        ("cluster.node_cpus", config.cluster.node_cpus),
        ("cluster.trainer_cpus", config.cluster.trainer_cpus),
    ):
        if cpus is not None and (not cpus or max(cpus) >= cores or len(set(cpus)) < len(cpus)):
            message = f"expected one or more of this machine's cores 0 to {cores - 1}, each once, got {cpus}"
            yield Problem(key, message)


def process_rule(config: Config) -> Iterator[Problem]:
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
            yield Problem(key, f"expected at most {most} processes, {PROCESSES_PER_CORE} to a core, got {wanted}")


def memory_rule(config: Config) -> Iterator[Problem]:
    """Without GPUs, the KV caches of a node fit into its memory."""
    if config.gpus_per_node > 0:
        return
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if config.engine.kv_cache_gib * config.engine.count >= memory_gib:
        message = (
            f"expected less than the {memory_gib:.0f} GiB of this machine's memory for {config.engine.count} engine(s) "
            f"together, got {config.engine.kv_cache_gib:g} for each"
        )
        yield Problem("engine.kv_cache_gib", message)


def output_rule(config: Config) -> Iterator[Problem]:
    """The run directory can be made."""
    folder = config.run_dir.absolute()
    if (fault := unreachable(str(folder))) is not None:
        yield Problem("run.output_dir", f"{show(str(folder))} cannot be used: {fault}")
        return
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        yield Problem("run.output_dir", f"expected a folder, and {folder} is none")
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield Problem("run.output_dir", f"expected a folder that can be written, and {folder} cannot")


MACHINE_RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (cpu_rule, process_rule, memory_rule, output_rule)
