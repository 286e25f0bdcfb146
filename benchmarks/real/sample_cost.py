"""Processor time of one short sample, stage by stage, compared with the least that each stage needs.

Samples have 16 tokens after a prompt of six, in groups of eight, with environments that answer at once. *Loop* is a
rollout node (scheduler, episodes, proxy, tokenizer, environment) with an engine that computes nothing and a hub that
replies at once. Its comparison, *bare*, is one coroutine for each sample that does the same by hand. *Hub* and *wire*
are the time that the real ones add, in the same process. *Engine* is the whole path with one vLLM engine, compared with
an `AsyncLLM` that is given all requests at once; the two take turns. The core of vLLM, its worker and this process are
counted separately. `--quick` leaves the engine out.

Figures are microseconds of processor time per sample, of the fastest round, because other work on the machine only adds
time.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import anyio
import anyio.lowlevel
import msgspec

from benchmarks.form import Args, Row, main
from benchmarks.real.engine_efficiency import (
    VERSION,
    FixedEngine,
    config_for,
    endless_model,
    through_engine,
    through_flash,
)
from envs.arithmetic import Arithmetic, ArithmeticOptions
from flash.config.tree import Config
from flash.environment import Environment, wrap
from flash.errors import EngineDeadError
from flash.foreign import vllm_processes
from flash.hub import protocol as p
from flash.rollout.engine import Pressure, Progress, ResponseRequest
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.rollout.node import NodeEnvironment, RolloutNode
from flash.rollout.scheduler import HubLink
from flash.rollout.supervisor import same_engine
from flash.rollout.vllm.engine import VLLMEngine
from flash.run.node_loop import unix_clock
from flash.transport.frames import ReplyT, Request
from flash.types import Completion, Lease, Task, VersionRun

TOKENS, GROUP = 16, 8
"""Tokens of a response, and samples of a group."""
LOOP_GOAL_US, LOOP_RATIO, ENGINE_RATIO = 250.0, 4.5, 1.1
"""Goals of the loop (microseconds per sample), of its ratio to the bare one, and of the ratios to the bare engine."""


class IdleEngine:
    """Engine that responds at once, in two pieces, as vLLM does for this many tokens. `FixedEngine` completes it."""

    pressure = Pressure(running=0, waiting=0, kv_used=0.0, preemptions=0)
    """Load of the engine, which never has any."""

    async def generate(self, request: ResponseRequest) -> AsyncGenerator[Progress | Completion, None]:
        """Respond at once: one token first, as a piece, then the completion."""
        await anyio.lowlevel.checkpoint()
        tokens = [5] * TOKENS
        yield Progress(tokens[:1], [-1.0], [VersionRun(VERSION, 1)])
        await anyio.lowlevel.checkpoint()
        yield Completion(tokens, [-1.0] * TOKENS, [VersionRun(VERSION, TOKENS)], "length")

    async def wait_dead(self) -> EngineDeadError:
        """Wait forever, since this engine never dies."""
        await anyio.sleep_forever()
        raise AssertionError("it lives")


class DealingHub:
    """Stand-in for the hub and the connection to it. Leases `samples` samples, and accepts their results."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._leased = 0
        """Number of samples that were leased."""
        self.delivered = 0
        """Number of samples whose result has come."""

    async def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Answer a request of the node at once. Requests for newer versions and for cancelled leases wait forever.

        The node needs no other reply than leases, because `FixedEngine` has VERSION from the start.
        """
        match cast("object", request):
            case p.LeaseRequest():
                return cast("ReplyT", self._lease(request.capacity))
            case p.DeliverRequest():
                self.delivered += len(request.ended)
            case p.VersionRequest() | p.CancelRequest():
                await anyio.sleep_forever()
            case _:
                pass
        await anyio.lowlevel.checkpoint()
        return cast("ReplyT", p.Ack())

    def _lease(self, capacity: int) -> p.LeaseReply:
        """Lease the next samples, at most `capacity`. If none is left, the reply ends the node."""
        first, self._leased = self._leased, min(self._samples, self._leased + capacity)
        leases = [
            Lease(number, Task(number, number // GROUP, number % GROUP, number // GROUP), 0)
            for number in range(first, self._leased)
        ]
        return p.LeaseReply(leases, done=not leases)


def make_env(kind: str) -> Environment:
    """Make the environment of a sample."""
    return wrap(Arithmetic(ArithmeticOptions()))


async def through_node(config: Config, tokenizer: HfTokenizer, samples: int) -> None:
    """Send all samples through a rollout node with `IdleEngine` and `DealingHub`."""
    hub = DealingHub(samples)
    # `FixedEngine` only uses those members of a `VLLMEngine` that `IdleEngine` has.
    env, engine = NodeEnvironment(make_env), same_engine(FixedEngine(cast("VLLMEngine", IdleEngine())))
    node = RolloutNode(config, HubLink(0, 0, hub), [engine], tokenizer, env, now=unix_clock())
    await node.run()
    assert hub.delivered == samples


async def by_hand(config: Config, tokenizer: HfTokenizer, samples: int) -> None:
    """Play all samples in one coroutine each, as many at once as the engine has places.

    This is the least work that playing a sample needs, with which `through_node` is compared.
    """
    engine, places = IdleEngine(), anyio.Semaphore(config.engine.max_sequences)

    async def one(number: int) -> float:
        """Play one sample, and return its reward."""
        env = make_env("")
        observation, _ = await env.reset(number // GROUP)
        request = ResponseRequest(tokenizer.render(observation), TOKENS, number)
        sampled: list[int] = []
        async for piece in engine.generate(request):
            sampled = piece.token_ids
        result = await env.step(tokenizer.decode(sampled))
        await env.close()
        places.release()
        return result[1]

    async with anyio.create_task_group() as group:
        for number in range(samples):
            await places.acquire()
            group.start_soon(one, number)


class Clocks:
    """Reads the processor time of this process and, if there is one, of the processes of a vLLM engine.

    Args:
        core: process id of the engine's core; None: there is no engine.
    """

    def __init__(self, core: int | None = None) -> None:
        workers = vllm_processes.worker_pids(core) if core is not None else []
        self._pids = {"core": [core], "worker": workers} if core is not None else {}
        """Process ids of the engine, by the name of the clock."""

    def read(self) -> dict[str, float]:
        """Return the seconds of processor time of each process since its start. `node` is this process."""
        engine = {name: sum(map(_seconds, pids)) for name, pids in self._pids.items()}
        return {"node": time.process_time(), **engine}

    async def measure(self, work: Callable[[], Awaitable[object]], samples: int) -> dict[str, float]:
        """Do the work, and return its microseconds per sample in each process."""
        before = self.read()
        await work()
        return {name: (now - before[name]) / samples * 1e6 for name, now in self.read().items()}


def _seconds(pid: int) -> float:
    """Return the processor seconds of the threads of a process. Threads that have ended do not count."""
    # The first number of `schedstat` is in nanoseconds. The times in `stat` are too coarse.
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def least(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the least value of each clock over the rounds."""
    return {name: min(each[name] for each in rounds) for name in rounds[0]}


async def loop_costs(model: Path, samples: int, rounds: int) -> dict[str, float]:
    """Measure a node's loop, alone and with hub and wire, and the bare loop, in turns.

    Returns the microseconds of this process per sample of each, in the fastest of `rounds` rounds, after one round that
    is not counted.
    """
    config = config_for(model, TOKENS, samples)
    tokenizer, clocks = HfTokenizer(config.model).ready(), Clocks()
    works: dict[str, Callable[[], Awaitable[object]]] = {
        "loop": lambda: through_node(config, tokenizer, samples),
        "with hub": lambda: through_flash(config, cast("VLLMEngine", IdleEngine()), tokenizer),
        "bare": lambda: by_hand(config, tokenizer, samples),
    }
    found = [
        {name: (await clocks.measure(work, samples))["node"] for name, work in works.items()} for _ in range(rounds + 1)
    ]
    return least(found[1:])


async def engine_costs(model: Path, samples: int, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Measure the whole path with a vLLM engine, and a bare `AsyncLLM`, in turns.

    Returns the microseconds per sample of each process through the whole path, then those of the bare engine. Each is
    that of the process's fastest of `rounds` rounds, after one round that is not counted.
    """
    config = config_for(model, TOKENS, samples)
    # The bare engine samples without seeds, too.
    config = msgspec.structs.replace(config, rollout=msgspec.structs.replace(config.rollout, seeded=False))
    tokenizer = HfTokenizer(config.model).ready()
    prompts = [
        tokenizer.render(f"{number // GROUP % 90 + 10}+{number // GROUP % 89 + 10}=") for number in range(samples)
    ]
    engine = VLLMEngine(config, 0)
    await engine.start()
    try:
        # Label of all tokens. With vLLM's label at the start they would be older than VERSION, and too old to train.
        await engine._llm.update_weight_version(str(VERSION))
        clocks = Clocks(engine._processes.core)  # the private attribute on purpose: no interface gives the process id
        ours: list[dict[str, float]] = []
        bare: list[dict[str, float]] = []
        for _ in range(rounds + 1):
            bare.append(await clocks.measure(lambda: through_engine(engine._llm, prompts, TOKENS), samples))
            ours.append(await clocks.measure(partial(through_flash, config, engine, tokenizer), samples))
        return least(ours[1:]), least(bare[1:])
    finally:
        await engine.close()


def rows(args: Args) -> list[Row]:
    """Measure the loop and, in full runs, the engine; return the rows."""
    model = endless_model(Path("outputs") / "models" / "bench-endless")
    loop = anyio.run(loop_costs, model, 1024 if args.quick else 4096, 3 if args.quick else 9)
    case = f"{TOKENS} tokens, a node's loop without an engine"
    found = [
        Row(case, "loop_us", "µs", loop["loop"], loop["bare"], at_most=LOOP_GOAL_US),
        Row(case, "ratio_to_bare", "×", loop["loop"] / loop["bare"], at_most=LOOP_RATIO),
        Row(f"{TOKENS} tokens, hub and wire", "added_us", "µs", loop["with hub"] - loop["loop"]),
    ]
    if args.quick:
        return found
    ours, bare = anyio.run(engine_costs, model, 1024, 7)
    case = f"{TOKENS} tokens, the whole path around vLLM"
    found += [Row(case, f"{name}_us", "µs", ours[name], bare[name]) for name in ours]
    for name, processes in (("all", ours.keys()), ("core and worker", ours.keys() - {"node"})):
        spent = [sum(times[process] for process in processes) for times in (ours, bare)]
        found.append(Row(f"{case}, {name}", "ratio_to_bare", "×", spent[0] / spent[1], at_most=ENGINE_RATIO))
    return found


if __name__ == "__main__":
    main("sample_cost", __doc__ or "", rows)
