"""What `flash eval` and `flash rollout` share: a model on a config's environment, without training.

Both take what `flash train` takes, and `--model` in place of `model.path`. Nothing is written to the run directory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from flash.config.load import load, split_arguments
from flash.config.tree import Config
from flash.observe.rundir import Sample, readable, write_atomically

INDENT = "    "


def add_options(parser: argparse.ArgumentParser) -> None:
    """What both commands take."""
    parser.add_argument("config", nargs="+", metavar="CONFIG|KEY=VALUE", help="as for train")
    parser.add_argument(
        "--model", metavar="PATH", help="a model folder, hub id, checkpoint or run directory; default: model.path"
    )
    parser.add_argument("--transcripts", type=Path, metavar="FILE.jsonl", help="write every episode, readably")


def transcript(sample: Sample) -> str:
    """An episode as people read it."""
    tokens = sum(span.stop - span.start for span in sample.action_spans)
    lines = [f"--- seed {sample.seed}: {sample.outcome}, reward {sample.reward:g}, {tokens} tokens"]
    for number, turn in enumerate(sample.turns, 1):
        lines += [f"[{number}] shown:", _indented(turn.observation), f"[{number}] answer, reward {turn.reward:g}:"]
        lines.append(_indented(turn.action))
        lines += [f"[{number}] note: {turn.note}"] if turn.note else []
    return "\n".join(lines)


def _indented(text: str) -> str:
    """Without what would command the terminal: models write anything."""
    return "\n".join(INDENT + "".join(c if c.isprintable() else " " for c in line) for line in text.split("\n"))


def write_transcripts(file: Path | None, samples: Sequence[Sample]) -> None:
    """One episode per line, as in a run's trajectories, where a file was asked for."""
    if file is not None:
        write_atomically(file, b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples))


def sample(arguments: argparse.Namespace, play: Any) -> tuple[Any, list[Sample]]:
    """Start engines, play, and describe what was played."""
    import anyio

    from flash.environment.load import LoadedEnvironment
    from flash.rollout.resident import Resident
    from flash.rollout.tokenizer import HfTokenizer
    from flash.rollout.vllm_engine import VLLMEngine
    from flash.run.models import make_missing_model, model_folder

    paths, overrides = split_arguments(arguments.config)
    config = load(paths, overrides)
    if arguments.model is None:
        make_missing_model(config)
    named = arguments.model or config.model.path
    sys.stderr.write(f"[reading {named}]\n")
    with model_folder(named, config) as path:
        model = msgspec.structs.replace(config.model, path=path)
        config = msgspec.structs.replace(config, model=model)
        tokenizer = HfTokenizer(config.model)
        env = LoadedEnvironment(config.env.path, config.env.options)

        def engines(config: Config) -> list[Callable[[int], Resident]]:
            return [partial(resident, config)] * config.engines_on(0)

        def resident(config: Config, number: int) -> Resident:
            return Resident(VLLMEngine(config, number, config.engine_gpus(0, number)))

        def tell(text: str) -> None:
            sys.stderr.write(f"[{text}]\n")

        async def go() -> Any:
            return await play(config=config, env=env, tokenizer=tokenizer, engines=engines, tell=tell)

        sampled = anyio.run(go)
    for note in sampled.notes:
        sys.stderr.write(f"{note}\n")
    texts = tokenizer.token_texts
    return sampled, [readable(played, 0, texts(played.tokens().tolist())) for played in sampled.trajectories]
