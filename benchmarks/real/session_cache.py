"""Session admission on real vLLM: episodes of many turns whose KV caches exceed the engine's, on the CPU.

One engine and our proxy in front of it serve sessions that all begin at once: a long prompt, a few turns, and a pause
between two, as for an environment. Their contexts at the end of a turn are twice the engine's KV cache in the mean.
With and without `session_s`, in turns, with other tokens each time; the median of the rounds. `session_s` follows the
rule of the docs, from a prefill that is timed first.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec

from benchmarks.form import Args, Row, main
from benchmarks.real.engine_efficiency import endless_model
from flash.config.tree import Config, TinyModelConfig
from flash.rollout.engine import EpisodeRequest, GenerateRequest
from flash.rollout.outage import OutageClock
from flash.rollout.proxy import LLMProxy, ProxySettings
from flash.rollout.vllm.engine import VLLMEngine

LAYERS, WIDTH = 4, 256
TURNS, PROMPT, ANSWER, SHOWN = 8, 600, 24, 100
"""Responses of a session; tokens of its prompt, of a response, and of what its environment shows after it."""
SESSIONS = 24
PAUSE_S = 0.5
"""Mean seconds of a pause."""
CONTEXT = PROMPT + (TURNS - 1) / 2 * (ANSWER + SHOWN) + ANSWER
"""Mean tokens of a session at the end of a turn."""
RATIO = 2
KV_BYTES = LAYERS * 2 * WIDTH * 4
"""Of a token, in float32."""
LONGEST = 2048
TOKENS = 12
"""Token ids that the model has, at least."""
DEADLINE_S = 600
SWAP_S = 60


def config_for(model: Path) -> Config:
    """One engine whose cache holds half of what the sessions come to."""
    tokens = SESSIONS * CONTEXT / RATIO
    return msgspec.convert(
        {
            "run": {"name": "bench-sessions"},
            "model": {"path": str(model), "dtype": "float32", "max_length": LONGEST},
            "env": {"path": "none:None"},
            "engine": {"max_sequences": 64, "enforce_eager": True, "kv_cache_gib": tokens * KV_BYTES / 2**30},
            "cluster": {"gpus_per_node": 0},
        },
        Config,
    )


async def play(engine: VLLMEngine, session_s: float, dice: random.Random) -> float:
    """Seconds in which all sessions end, through a proxy that counts their caches or does not."""
    settings = ProxySettings(
        max_sequences=64, swap="recompute", bind_groups=False, swap_s=SWAP_S, drain_s=SWAP_S, session_s=session_s
    )
    proxy = LLMProxy([engine], 0, settings, OutageClock(), on_room=lambda: None, now=anyio.current_time)
    pauses = [[dice.expovariate(1 / PAUSE_S) for _ in range(TURNS)] for _ in range(SESSIONS)]
    prompts = [_tokens(dice, PROMPT) for _ in range(SESSIONS)]
    shown = [[_tokens(dice, SHOWN) for _ in range(TURNS)] for _ in range(SESSIONS)]

    async def session(number: int) -> None:
        context = prompts[number]
        for turn in range(TURNS):
            asked = EpisodeRequest(
                GenerateRequest(context, ANSWER, key=number * TURNS + turn),
                min_version=0,
                affinity=(number, number),
                session=number,
                progress=lambda tokens: None,
                timeout=DEADLINE_S,
            )
            done = await proxy.generate(asked)
            await anyio.sleep(pauses[number][turn])
            context = context + done.token_ids + shown[number][turn]
        proxy.leave(number)

    start = time.perf_counter()
    async with anyio.create_task_group() as group:
        for number in range(SESSIONS):
            group.start_soon(session, number)
    return time.perf_counter() - start


async def measure(config: Config, rounds: int) -> tuple[float, int, list[float], list[float]]:
    """`session_s`, the tokens of the engine's cache, and the seconds of each round without and with it."""
    engine, dice = VLLMEngine(config, 0), random.Random(0)
    await engine.start()
    try:
        await engine.adopt(0)
        tokens = engine.pressure.kv_tokens
        await _prefill(engine, dice)
        keep_s = statistics.median([await _prefill(engine, dice) for _ in range(3)]) / LONGEST * tokens / 2
        seconds: tuple[list[float], list[float]] = ([], [])
        for _, (into, session_s) in itertools.product(range(rounds), zip(seconds, (0.0, keep_s), strict=True)):
            into.append(await play(engine, session_s, dice))
        return keep_s, tokens, *seconds
    finally:
        await engine.close()


async def _prefill(engine: VLLMEngine, dice: random.Random) -> float:
    """Seconds of the first token after a prompt that the engine does not know."""
    request = GenerateRequest(_tokens(dice, LONGEST - 8), 1, key=0)
    start = time.perf_counter()
    async for _ in engine.generate(request):
        pass
    return time.perf_counter() - start


def _tokens(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(1, TOKENS) for _ in range(count)]


def rows_of(keep_s: float, tokens: int, without: Sequence[float], counted: Sequence[float]) -> list[Row]:
    """The rates, and the gain."""
    before, after = statistics.median(without), statistics.median(counted)
    case = f"{SESSIONS * CONTEXT / tokens:.1f}:1, pauses {PAUSE_S:g} s"
    return [
        Row(case, "session_s", "s", keep_s),
        Row(case, "without_sessions_per_s", "sessions/s", SESSIONS / before),
        Row(case, "sessions_per_s", "sessions/s", SESSIONS / after),
        Row(case, "speedup", "x", before / after, None, 1.5),
    ]


def compare(args: Args) -> list[Row]:
    """With session admission over without it."""
    tiny = TinyModelConfig(layers=LAYERS, width=WIDTH, warm_start_steps=0)
    model = endless_model(Path("outputs") / "models" / "bench-sessions", tiny)
    return rows_of(*anyio.run(measure, config_for(model), 1 if args.quick else 2))


if __name__ == "__main__":
    main("session_cache_real", __doc__ or "", compare)
