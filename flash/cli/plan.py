"""`flash plan`: the memory that a configuration needs, and what to change where that is too much."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flash.cli.arguments import CommandParsers
from flash.config.load import load, split_arguments
from flash.config.tree import Config

if TYPE_CHECKING:
    from flash.trainer.memory import RankMemory

GIB = 2**30
RANKS = 512
"""Most trainer ranks that are proposed."""


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "plan", help="say what memory a config needs, and what to change; needs no GPU, no weights"
    )
    parser.add_argument("config", nargs="+", metavar="CONFIG|KEY=VALUE", help="TOML files, then dotted overrides")
    parser.add_argument(
        "--card-gib", type=float, default=80.0, help="memory of a GPU, or of a rank without; default: 80"
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print it; 1 where the trainer ranks do not fit."""
    from flash.trainer.memory import engine_memory, rank_memory

    paths, overrides = split_arguments(arguments.config)
    config, card = load(paths, overrides), arguments.card_gib * GIB
    shared = config.engine.memory_fraction if config.engine.share_gpus else 0.0
    room = card * (1 - shared)
    memory = rank_memory(config, _ranks(config))
    write = sys.stdout.write
    write(f"{memory.parameters / 1e9:.3g}B parameters\n\n{_trainer(config, memory)}")
    fits = memory.total <= room
    less = f", {shared:.0%} of which the engine takes" if shared else ""
    write(f"  {'fits' if fits else 'DOES NOT FIT'} in {arguments.card_gib:g} GiB{less}\n")
    if not fits:
        write(_remedy(paths, overrides, config, room))
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


def _ranks(config: Config) -> int:
    return config.cluster.trainer_ranks * config.cluster.trainer_nodes


def _trainer(config: Config, memory: RankMemory) -> str:
    tokens = config.train.max_tokens_per_microbatch
    kept = "float32" if config.lora is None else f"{config.model.dtype}, adapters in float32"
    rows = [
        ("weights", memory.weights, f"{kept}, its part"),
        ("gradients", memory.gradients, ""),
        ("moments", memory.moments, "of AdamW"),
        ("others", memory.others, "critics, reference, average of the weights"),
        ("at work", memory.at_work, f"gathered layers, activations and logits of {tokens:,} tokens"),
        ("together", memory.total, ""),
    ]
    lines = [f"  {name:11s} {size / GIB:8.1f} GiB  {about}".rstrip() for name, size, about in rows if size]
    return "\n".join([f"each of {_ranks(config)} trainer ranks, at most", *lines, ""])


def _remedy(paths: list[Path], overrides: list[str], config: Config, room: float) -> str:
    """The first changes, of those in the order of what they cost, after which it fits; each was tried."""
    from flash.trainer.memory import rank_memory

    said = ""
    for changes in _changes(config):
        changed = load(paths, [*overrides, *changes])
        memory = rank_memory(changed, _ranks(changed))
        if memory.total <= room:
            return f"  it would, with {memory.total / GIB:.1f} GiB: {' '.join(changes)}\n"
        said = f"  nor with {' '.join(changes)}: {memory.total / GIB:.1f} GiB\n"
    return said


def _changes(config: Config) -> Iterator[list[str]]:
    """Recomputation, shorter micro-batches, more nodes; all before goes on."""
    changes: list[str] = []
    if not config.train.activation_checkpointing:
        changes = ["train.activation_checkpointing=true"]
        yield changes
    tokens, before = config.train.max_tokens_per_microbatch, changes
    while tokens // 2 >= config.model.max_length:
        tokens //= 2
        changes = [*before, f"train.max_tokens_per_microbatch={tokens}"]
        yield changes
    nodes = config.cluster.trainer_nodes
    while (nodes := 2 * nodes) * config.cluster.trainer_ranks <= RANKS:
        more = config.cluster.nodes + nodes - config.cluster.trainer_nodes
        yield [*changes, f"cluster.trainer_nodes={nodes}", f"cluster.nodes={more}"]
