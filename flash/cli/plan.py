"""`flash plan`: compute the memory that a configuration needs, and what to change if that is too much."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flash.cli.arguments import CommandParsers
from flash.config.decode import ConfigProblem
from flash.config.load import load, split_arguments
from flash.config.models import is_hub_id
from flash.config.tree import Config
from flash.errors import ConfigError
from flash.run.fetch import hub_fault
from flash.text import harmless

if TYPE_CHECKING:
    from flash.trainer.memory import RankMemory

GIB = 2**30
RANKS = 512
"""Largest number of trainer ranks that is proposed."""
OFFLOADED: dict[Literal["activations", "moments", "weights"], str] = {
    "activations": "inputs of layers wait on the host; copied twice a step",
    "moments": "moments are on the host; copied there and back in each update",
    "weights": "weights and gradients, too, updated there; of each weight 12 bytes are copied in each micro-batch",
}
"""Values of `train.offload`, with the effect and the cost of each."""


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "plan", help="Predict the memory that a configuration needs, and name changes that make it fit."
    )
    parser.add_argument(
        "config",
        nargs="+",
        metavar="CONFIG|KEY=VALUE",
        help="Configuration files (TOML; later ones take precedence), and settings such as train.async_ratio=2.",
    )
    parser.add_argument(
        "--card-gib",
        type=float,
        default=80.0,
        help="Memory of one GPU, in GiB. Without GPUs: memory of one trainer rank. Default: 80.",
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the memory of trainer ranks and engines. Returns 1 if the trainer ranks do not fit."""
    from flash.trainer.memory import engine_memory, rank_memory

    paths, overrides = split_arguments(arguments.config)
    config, card = load(paths, overrides, also=_unreachable), arguments.card_gib * GIB
    shared = config.engine.memory_fraction if config.engine.share_gpus else 0.0
    room = card * (1 - shared)
    memory = rank_memory(config, _ranks(config))
    write = sys.stdout.write
    write(f"{memory.parameters / 1e9:.3g}B parameters\n\n{_trainer(config, memory)}")
    fits = memory.total <= room
    less = f", {shared:.0%} of which the engine takes" if shared else ""
    write(f"  {'fits' if fits else 'DOES NOT FIT'} in {arguments.card_gib:g} GiB{less}\n")
    if not fits:
        write(harmless(_remedy(paths, overrides, config, room)))
    if config.gpus_per_node:
        engine = engine_memory(config, memory.parameters)
        cache = config.engine.memory_fraction * card - engine.weights
        write(f"\neach of an engine's {config.engine.tensor_parallel} GPUs\n")
        write(f"  weights     {engine.weights / GIB:8.1f} GiB\n")
        if cache > 0:
            longest = config.model.max_length
            write(f"  KV cache    {cache / GIB:8.1f} GiB  less activations; engine.memory_fraction is counted\n")
            write(f"  which holds {cache / engine.token / longest:8.1f} sequences of {longest:,} tokens\n")
        else:
            write(f"  DOES NOT FIT in {config.engine.memory_fraction:.0%} of it: raise engine.tensor_parallel\n")
    return 0 if fits else 1


def _unreachable(config: Config) -> Iterator[ConfigProblem]:
    """Yield a problem if the hub of `model.path` cannot be reached, since the library would repeat the request five
    times."""
    if is_hub_id(config.model.path) and (fault := hub_fault(config.model.path)):
        yield ConfigProblem("model.path", fault)


def _ranks(config: Config) -> int:
    return config.cluster.trainer_ranks * config.cluster.trainer_nodes


def _trainer(config: Config, memory: RankMemory) -> str:
    """Return the table of a trainer rank's memory."""
    tokens = config.train.max_tokens_per_microbatch
    kept = "float32" if config.lora is None else f"{config.model.dtype}, adapters in float32"
    rows = [
        ("weights", memory.weights, f"{kept}, its part"),
        ("gradients", memory.gradients, ""),
        ("moments", memory.moments, f"{config.train.optimizer}, {config.train.moments}"),
        ("others", memory.others, "critics, reference, average of the weights"),
        ("at work", memory.at_work, f"gathered layers, activations and logits of {tokens:,} tokens"),
        ("to begin", memory.loading if config.lora is not None else 0, "no step yet: the base in float32 beside"),
        ("at most", memory.total, ""),
        ("of the host", memory.host, "beside: what train.offload names"),
    ]
    lines = [f"  {name:11s} {size / GIB:8.1f} GiB  {about}".rstrip() for name, size, about in rows if size]
    return "\n".join([f"each of {_ranks(config)} trainer ranks, at most", *lines, ""])


def _remedy(paths: list[Path], overrides: list[str], config: Config, room: float) -> str:
    """Return the first changes, in the order of their cost, after which the trainer ranks fit, and why. Each was
    computed."""
    from flash.trainer.memory import rank_memory

    said = ""
    for changes, why in _changes(config):
        try:
            changed = load(paths, [*overrides, *changes])
            memory = rank_memory(changed, _ranks(changed))
        except ConfigError as error:  # later changes contain this one, so they would be refused too
            return f"{said}  nothing further: {' '.join(changes)} is refused: {error}\n"
        if memory.total <= room:
            return f"{said}  it would, with {memory.total / GIB:.1f} GiB: {' '.join(changes)}\n    {why}\n"
        said += f"  nor with {memory.total / GIB:.1f} GiB: {' '.join(changes)}\n    {why}\n"
    return said


def _changes(config: Config) -> Iterator[tuple[list[str], str]]:
    """Yield changes of the configuration in the order of their cost, each with its effect and cost. Earlier changes
    stay."""
    train, cluster = config.train, config.cluster
    changes: list[str] = []
    if not train.activation_checkpointing:
        changes = ["train.activation_checkpointing=true"]
        yield changes, "of a layer its input is kept, it runs again in the backward pass: a third more time"
    tokens, before = train.max_tokens_per_microbatch, changes
    while tokens // 2 >= config.model.max_length:
        tokens //= 2
        changes = [*before, f"train.max_tokens_per_microbatch={tokens}"]
        yield changes, "activations of half as many tokens; layers are gathered twice as often"
    offload = [*train.offload]
    for name, why in OFFLOADED.items() if config.gpus_per_node > 0 else ():
        alone = train.optimizer == "adamw" and "weights" not in offload
        if name not in offload and (name != "moments" or alone):
            offload.append(name)
            before = [change for change in changes if not change.startswith("train.offload")]
            changes = [*before, f"train.offload={json.dumps(offload, separators=(',', ':'))}"]
            yield changes, why
    if train.moments == "float32" and not {"moments", "weights"} & {*offload} and train.optimizer == "adamw":
        changes = [*changes, 'train.moments="bfloat16"']
        yield changes, "two bytes of each weight for four, twice; rounded at random"
    nodes = cluster.trainer_nodes
    while (nodes := 2 * nodes) * cluster.trainer_ranks <= RANKS:
        more = cluster.nodes + nodes - cluster.trainer_nodes
        yield [*changes, f"cluster.trainer_nodes={nodes}", f"cluster.nodes={more}"], "each rank keeps half as much"
