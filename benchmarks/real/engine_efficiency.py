"""Cost of the path Hub → EpisodePlayer → LLMProxy → vLLM, compared with vLLM alone.

One engine serves the same requests in two ways, in turns, in one process: through the whole rollout path (hub over TCP,
leases, environment, trajectories sent back), and through a bare `AsyncLLM` that is given all requests at once. Answers
have a fixed length, because the model has no end-of-text token. `efficiency` is our tokens per second over those of the
bare engine, in the median of the rounds. It can exceed 1: our engine asks vLLM for its flat form of log-probs, the bare
one uses the form that `AsyncLLM` gives by default.
"""

from __future__ import annotations

import json
import secrets
import shutil
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec

from benchmarks.form import Args, Row, main
from envs.arithmetic import Arithmetic, ArithmeticOptions
from flash.config.tree import Config, TinyModelConfig
from flash.environment import Environment, wrap
from flash.errors import EngineDeadError
from flash.hub import protocol as p
from flash.hub.hub import Hub
from flash.observe.observer import MemoryObserver
from flash.rollout.engine import Pressure
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.rollout.node import NodeEnvironment, RolloutNode
from flash.rollout.scheduler import HubLink
from flash.rollout.supervisor import same_engine
from flash.rollout.vllm.engine import VLLMEngine
from flash.transport.client import connect
from flash.transport.frames import Request
from flash.transport.server import serve
from flash.types import Canary, Published

GOAL = 0.95
"""Goal of `efficiency`."""
VERSION = 10
"""Version of the weights, which never change. Versions 0 and 1, the first and the last of a run of one step, would be
evaluated."""


class FixedEngine:
    """An engine that stays up from round to round. It forwards requests to a real engine, which it never closes.

    Each round has a new node, and the node's supervisor starts and closes its engine.

    Args:
        engine: the real engine, which runs already.
    """

    version = VERSION
    """Version of the weights, as a node reads it."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine
        self.generate = engine.generate

    @property
    def pressure(self) -> Pressure:
        """Load of the real engine."""
        return self._engine.pressure

    async def start(self) -> None:
        """Return at once, since the real engine runs already."""
        await anyio.lowlevel.checkpoint()

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        """Load nothing, since the weights never change."""
        return 0.0

    def reassign(self, number: int) -> None:
        """Fail, since only a node that changes its hub calls this."""
        raise AssertionError("there is one hub")

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the real engine dies."""
        return await self._engine.wait_dead()

    async def close(self) -> None:
        """Leave the real engine running for the next round."""
        await anyio.lowlevel.checkpoint()


UNTAUGHT = TinyModelConfig(warm_start_steps=0)
"""Tiny model with random weights. Its quality does not matter, because its answers only end at the limit."""


def endless_model(folder: Path, tiny: TinyModelConfig = UNTAUGHT) -> Path:
    """Make the tiny model `tiny` in `folder`, which is replaced, and return the folder.

    The model has no end-of-text token, so that all answers have the length of the token limit, and two ways to serve
    them can be compared. `benchmarks.real.sample_cost` uses it, too.
    """
    from flash.trainer.model.tiny_model import make_tiny_model

    shutil.rmtree(folder, ignore_errors=True)
    make_tiny_model(folder, tiny, "envs.arithmetic:Arithmetic", {}, lambda step, steps, loss: None)
    remove_end_token(folder)
    return folder


def remove_end_token(folder: Path) -> None:
    """Remove the end-of-text token from the files of a model and its tokenizer. vLLM would read it from any of them."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        file = folder / name
        if file.is_file():
            content = json.loads(file.read_text())
            content = {key: value for key, value in content.items() if key not in ("eos_token_id", "eos_token")}
            file.write_text(json.dumps(content))


def config_for(model: Path, tokens: int, requests: int) -> Config:
    """Return the configuration of one training step of `requests` samples with `tokens` tokens each."""
    return msgspec.convert(
        {
            "run": {"name": "bench-engine", "steps": 1},
            "model": {"path": str(model), "dtype": "float32", "max_length": tokens + 16},
            "env": {"path": "envs.arithmetic:Arithmetic"},
            "rollout": {"group_size": 8, "max_new_tokens": tokens},
            "train": {"batch_size": requests, "async_ratio": 0.0},
            "engine": {"max_sequences": 256, "enforce_eager": True},
            "eval": {"every": 0},
            "cluster": {"gpus_per_node": 0},
        },
        Config,
    )


async def through_flash(config: Config, engine: VLLMEngine, tokenizer: HfTokenizer) -> float:
    """Send a batch of samples through the whole path: a hub over TCP, a new node, and the engine.

    This function also plays the trainer, which publishes VERSION and takes the batch. Returns the seconds from the
    start of the node to the complete batch.
    """
    now = anyio.current_time
    hub = Hub(config, MemoryObserver(), now=now)
    token = secrets.token_bytes(32)

    async def handler(peer: object, request: Request[Any]) -> msgspec.Struct:
        """Let the hub answer a request of the node."""
        return await hub.handle(request)

    def make_env(kind: str) -> Environment:
        """Make the environment of a sample."""
        return wrap(Arithmetic(ArithmeticOptions()))

    async with anyio.create_task_group() as group:
        port = await group.start(partial(serve, deadline=30.0), "127.0.0.1", 0, token, p.HubRequest, handler)
        async with connect("127.0.0.1", port, token, "node-0", 30.0) as link:
            fixed, env = [same_engine(FixedEngine(engine))], NodeEnvironment(make_env)
            node = RolloutNode(config, HubLink(0, 0, link), fixed, tokenizer, env, now=now)
            await hub.handle(p.PublishRequest(Published(VERSION, "tcp", b"", Canary([], []))))
            start = time.perf_counter()
            group.start_soon(node.run)
            await hub.handle(p.EngineReport(0, VERSION + 1, [p.EngineStatus(0, VERSION, 0.0, 0.0, 0.0)], []))
            reply = await hub.handle(p.BatchRequest(0, 0, []))
            seconds = time.perf_counter() - start
            assert reply.shard is not None
            assert len(reply.shard.samples) == config.train.batch_size
            group.cancel_scope.cancel()
    return seconds


async def through_engine(engine: Any, prompts: Sequence[list[int]], tokens: int) -> float:
    """Give all requests to a bare AsyncLLM at once, which streams its answers like Flash's engine.

    `engine` is the AsyncLLM, and `tokens` the length of each answer. Returns the seconds until all have ended.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        temperature=1.0, max_tokens=tokens, logprobs=0, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    identity = secrets.token_hex(4)  # ids of requests must differ from those of earlier rounds

    async def one(index: int) -> None:
        """Read the response to one request."""
        async for _ in engine.generate({"prompt_token_ids": prompts[index]}, params, f"{identity}.{index}"):
            pass

    start = time.perf_counter()
    async with anyio.create_task_group() as group:
        for index in range(len(prompts)):
            group.start_soon(one, index)
    return time.perf_counter() - start


async def measure(
    config: Config, prompts: list[list[int]], tokens: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Measure rounds through the whole path and through the bare engine, in turns, after one that is not counted.

    Returns the seconds of each round through the whole path, then those of the bare engine. `prompts` are those of the
    bare engine; the environment has others of the same length.
    """
    engine = VLLMEngine(config, 0)
    tokenizer = HfTokenizer(config.model)
    await engine.start()
    try:
        bare_engine = engine._llm  # no public attribute gives it
        # Label of all tokens. With vLLM's label at the start they would be older than VERSION, and too old to train.
        await bare_engine.update_weight_version(str(VERSION))
        ours: list[float] = []
        bare: list[float] = []
        for _ in range(rounds + 1):
            bare.append(await through_engine(bare_engine, prompts, tokens))
            ours.append(await through_flash(config, engine, tokenizer))
        return ours[1:], bare[1:]
    finally:
        await engine.close()


def efficiency_rows(case: str, config: Config, tokens: int, requests: int, rounds: int) -> list[Row]:
    """Measure both ways, and return the rows: the ratio of the medians, and tokens per second beside the bare engine's.

    `config` is the configuration of `requests` samples with `tokens` tokens each. `benchmarks.gpu.runs` uses this, too.
    """
    render = HfTokenizer(config.model).render
    prompts = [render(f"{index % 90 + 10}+{index % 89 + 10}=") for index in range(requests)]
    ours_s, bare_s = map(statistics.median, anyio.run(measure, config, prompts, tokens, rounds))
    total = requests * tokens
    return [
        Row(f"{case}, against bare AsyncLLM", "efficiency", "share", bare_s / ours_s, at_least=GOAL),
        Row(case, "tokens_per_second", "tokens/s", total / ours_s, total / bare_s),
    ]


def compare(args: Args) -> list[Row]:
    """Measure short and long answers, both ways, and return the rows. `benchmarks.form.main` calls this."""
    model = endless_model(Path("outputs") / "models" / "bench-endless")
    rows: list[Row] = []
    for tokens, requests in ((16, 512 if args.quick else 1024), (256, 64 if args.quick else 128)):
        case, config = f"{requests} x {tokens} tokens", config_for(model, tokens, requests)
        rows += efficiency_rows(case, config, tokens, requests, 2 if args.quick else 5)
    return rows


if __name__ == "__main__":
    main("engine_efficiency", __doc__ or "", compare)
