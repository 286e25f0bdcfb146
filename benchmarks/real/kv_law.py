"""The law that limits an engine's requests by its KV cache, over vLLM and over the simulator's engine.

A real `LLMProxy` is given the same queue of responses for both: short prompts, lengths drawn beforehand and known to
the engine alone, and one engine whose cache holds far fewer than it may run. vLLM runs on the CPU with a tiny model and
a cache of a few MiB, of which the simulator's has as many tokens. Times differ, so figures are of events: how many
responses run, and how full the cache is, in the mean over the deliveries of the middle half; how many responses are put
back for want of cache. A *storm* is more of these than responses.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from random import Random

import anyio
import msgspec

from benchmarks.form import Args, Row, main
from benchmarks.real.engine_efficiency import endless_model
from benchmarks.real.mismatch import load_own_weights
from benchmarks.simulated.configure import TWO_ENGINES, configure
from flash.config.tree import Config
from flash.rollout.engine import Engine, Pressure, Progress, ResponseRequest
from flash.rollout.engine_state import OutageClock
from flash.rollout.fake_engine import WrappedEngine
from flash.rollout.proxy import LLMProxy, ProxySettings
from flash.simulate.clock import VirtualLoop
from flash.simulate.engine import SimEngine
from flash.types import Canary, Completion, Published

RESPONSES, QUICK_RESPONSES = 600, 150
PROMPT = 16
"""Tokens."""
LONGEST = 1000
"""Tokens that a response may have, as far as the law knows."""
CEILING = 128
"""Most sequences of an engine."""
INTERVAL = 16
"""Tokens of a delivery."""
CACHE_GIB = 1 / 64
PREEMPTED_GOAL = 0.25
"""Responses that are put back, per response."""
AGREED = 0.1
"""Most relative difference of what the simulator says."""
LENGTHS = {
    "long tail": lambda rng: rng.lognormvariate(5.2, 0.9),
    "all lengths": lambda rng: rng.uniform(1, LONGEST),
    "equal": lambda rng: 300.0,
}
"""Of responses, in tokens."""


class Drawn(WrappedEngine[Engine]):
    """An engine whose responses have the lengths that were drawn, which the proxy does not know."""

    def __init__(self, engine: Engine, lengths: Sequence[int]) -> None:
        super().__init__(engine)
        self._lengths = lengths
        self.seen: list[Pressure] = []
        """At each delivery."""

    async def generate(self, request: ResponseRequest) -> AsyncGenerator[Progress | Completion, None]:
        """See `Engine`."""
        left = self._lengths[request.key] - request.generated
        async with aclosing(super().generate(msgspec.structs.replace(request, max_new_tokens=left))) as pieces:
            async for piece in pieces:
                self.seen.append(self.pressure)
                yield piece


class Found(msgspec.Struct, frozen=True):
    """What the law made of an engine."""

    running: float
    used: float
    """Share of the cache."""
    preempted: float
    """Per response."""


async def all_through(engine: Drawn, count: int) -> Found:
    """Ask for all responses at once."""
    settings = ProxySettings(CEILING, "recompute", bind_groups=False, swap_s=600, drain_s=600)
    proxy = LLMProxy([engine], 0, settings, OutageClock(), on_room=lambda: None, now=anyio.current_time)
    before = engine.pressure.preemptions

    async def one(number: int) -> None:
        prompt = [5 + number % 7] * PROMPT
        await proxy.generate(ResponseRequest(prompt, LONGEST, key=number, group_id=number, task_id=number))

    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(one, number)
    middle = engine.seen[len(engine.seen) // 4 : -len(engine.seen) // 4]
    assert middle, "each response is delivered at least once"
    mean = [sum(values) / len(middle) for values in zip(*((one.running, one.kv_used) for one in middle), strict=True)]
    return Found(mean[0], mean[1], (engine.pressure.preemptions - before) / count)


def vllm_config(model: Path) -> Config:
    """Of one CPU engine with a small cache."""
    return msgspec.convert(
        {
            "run": {"name": "bench-kv-law"},
            "model": {"path": str(model), "dtype": "float32", "max_length": PROMPT + LONGEST},
            "env": {"path": "envs.arithmetic:Arithmetic"},
            "rollout": {"max_new_tokens": LONGEST},
            "engine": {
                "enforce_eager": True,
                "max_sequences": CEILING,
                "kv_cache_gib": CACHE_GIB,
                "stream_interval": INTERVAL,
            },
            "cluster": {"gpus_per_node": 0},
            "deadlines": {"generate": 36_000, "engine_step": 3600},
        },
        Config,
    )


async def over_vllm(model: Path, cases: Sequence[Sequence[int]]) -> tuple[int, list[Found]]:
    """Tokens of its cache, and what was found of each case."""
    from flash.rollout.vllm.engine import VLLMEngine

    config = vllm_config(model)
    engine = VLLMEngine(config, 0, [])
    await engine.start()
    try:
        await load_own_weights(engine, config)
        found = [await all_through(Drawn(engine, lengths), len(lengths)) for lengths in cases]
        return engine.pressure.kv_tokens, found
    finally:
        await engine.close()


async def over_simulator(kv_tokens: int, lengths: Sequence[int]) -> Found:
    """The same on the virtual clock."""
    settings = configure(simulate=TWO_ENGINES | {"kv_tokens": kv_tokens}).simulate
    assert settings is not None
    engine = SimEngine(settings, CEILING, lambda key: lengths[key], INTERVAL)
    await engine.load(Published(0, "tcp", b"", Canary([], [])), keep_cache=False)
    return await all_through(Drawn(engine, lengths), len(lengths))


def run(args: Args) -> list[Row]:
    """Both engines, for each kind of lengths."""
    count, rng = QUICK_RESPONSES if args.quick else RESPONSES, Random(0)
    cases = {name: [max(1, min(LONGEST, int(draw(rng)))) for _ in range(count)] for name, draw in LENGTHS.items()}
    with tempfile.TemporaryDirectory() as folder:
        kv_tokens, real = anyio.run(over_vllm, endless_model(Path(folder) / "model"), list(cases.values()))
    rows: list[Row] = []
    for (name, lengths), ours in zip(cases.items(), real, strict=True):
        simulated = anyio.run(
            over_simulator, kv_tokens, lengths, backend="asyncio", backend_options={"loop_factory": VirtualLoop}
        )
        case = f"{name}, cache of {kv_tokens:,} tokens"
        rows += [
            Row(case, "running", "responses", ours.running, reference=simulated.running),
            Row(case, "cache_used", "share", ours.used, reference=simulated.used),
            Row(
                case,
                "put_back_left",
                "per response",
                ours.preempted,
                reference=simulated.preempted,
                goal=PREEMPTED_GOAL,
            ),
            Row(case, "running_error", "", abs(simulated.running / ours.running - 1), goal=AGREED),
            Row(case, "cache_error", "", abs(simulated.used / ours.used - 1), goal=AGREED),
        ]
    return rows


if __name__ == "__main__":
    main("kv_law", __doc__ or "", run)
