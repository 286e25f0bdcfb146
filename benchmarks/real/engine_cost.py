"""Cost of the path Hub → EpisodePlayer → LLMProxy → vLLM, compared with vLLM alone: `engine_efficiency`, `sample_cost`.

One engine serves as many requests of the same lengths in two ways, in turns, in one process: through the whole rollout
path (hub over TCP, leases, environment, trajectories sent back), and through a bare `AsyncLLM` that is given all
requests at once. Answers have a fixed length, because the model has no end-of-text token. A lease is a sample that the
hub has given to a rollout node; the node plays it as an episode and sends back its trajectory, tokens and reward.
`benchmarks.gpu` measures on a card with this module.
"""

from __future__ import annotations

import json
import secrets
import shutil
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
import anyio.lowlevel
import msgspec

from benchmarks.form import Args, Row, main_of
from envs.arithmetic import Arithmetic, ArithmeticOptions
from flash.config.tree import Config, TinyModelConfig
from flash.environment import Environment, wrap
from flash.errors import EngineDeadError
from flash.foreign import vllm_processes
from flash.hub import protocol as p
from flash.hub.hub import Hub
from flash.observe.observer import MemoryObserver
from flash.rollout.engine import Pressure, Progress, ResponseRequest
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.rollout.fake_engine import WrappedEngine
from flash.rollout.node import NodeEnvironment, RolloutNode
from flash.rollout.scheduler import HubLink
from flash.rollout.supervisor import same_engine
from flash.rollout.vllm.engine import VLLMEngine
from flash.run.node_loop import unix_clock
from flash.transport.client import connect
from flash.transport.frames import ReplyT, Request
from flash.transport.server import serve
from flash.types import Canary, Completion, Lease, Published, Task, VersionRun

GOAL = 0.95
"""Goal of `efficiency`."""
TOKENS, GROUP = 16, 8
"""Tokens of a response of `sample_cost`, and samples of a group."""
LOOP_GOAL_US, LOOP_RATIO, ENGINE_RATIO = 250.0, 4.5, 1.1
"""Goals of the loop (microseconds per sample), of its ratio to the bare one, and of the ratios to the bare engine."""
VERSION = 10
"""Version of the weights, which never change. Versions 0 and 1, the first and the last of a run of one step, would be
evaluated."""
Found = TypeVar("Found")
Work = Callable[[], Awaitable[float]]
"""Serves all requests of a round in one of the ways. Returns the seconds that it took."""


class FixedEngine(WrappedEngine[Any]):
    """An engine that stays up from round to round. It forwards requests to a real engine, which it never closes.

    Each round has a new node, and the node's supervisor starts and closes its engine.
    """

    @property
    def version(self) -> int:
        """Version of the weights."""
        return VERSION

    async def start(self) -> None:
        """Return at once, since the real engine runs already."""
        await anyio.lowlevel.checkpoint()

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        """Load nothing, since the weights never change."""
        return 0.0

    async def close(self) -> None:
        """Leave the real engine running for the next round."""
        await anyio.lowlevel.checkpoint()


def endless_model(folder: Path) -> Path:
    """Make a tiny model of random weights in `folder`, which is replaced, and return the folder.

    The model has no end-of-text token, so that all answers have the length of the token limit, and two ways to serve
    them can be compared.
    """
    from flash.trainer.model.tiny_model import make_tiny_model

    shutil.rmtree(folder, ignore_errors=True)
    make_tiny_model(
        folder, TinyModelConfig(warm_start_steps=0), "envs.arithmetic:Arithmetic", {}, lambda step, steps, loss: None
    )
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
    """Return the configuration of one training step of `requests` samples with `tokens` tokens each, on the CPU."""
    # A prompt has about six tokens, so 16 more than the answer are enough for both.
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


def make_env(kind: str) -> Environment:
    """Make the environment of a sample. `kind` is unused: `NodeEnvironment` passes it, and there is only one kind."""
    return wrap(Arithmetic(ArithmeticOptions()))


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

    async with anyio.create_task_group() as group:
        port = await group.start(partial(serve, deadline=30.0), "127.0.0.1", 0, token, p.HubRequest, handler)
        async with connect("127.0.0.1", port, token, "node-0", 30.0) as link:
            fixed, env = [same_engine(FixedEngine(engine))], NodeEnvironment(make_env)
            node = RolloutNode(config, HubLink(0, 0, link), fixed, tokenizer, env, now=now)
            await hub.handle(p.PublishRequest(Published(VERSION, "tcp", b"", Canary([], []))))
            start = time.perf_counter()
            group.start_soon(node.run)
            # Engine 0 of node 0 has VERSION. The hub ignores the node's own reports, whose numbers are smaller.
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


async def in_turns(
    config: Config,
    tokens: int,
    requests: int,
    rounds: int,
    measure: Callable[[VLLMEngine], Callable[[Work], Awaitable[Found]]],
) -> tuple[list[Found], list[Found]]:
    """Measure rounds through the whole path and through the bare engine, in turns, after one that is not counted.

    A round has `requests` answers of `tokens` tokens. The prompts of the bare engine are as long as those of the
    environment. `measure` gets the running engine, and returns a function that does the work of a round and measures
    it. Returns the measurements of each round through the whole path, then those of the bare engine.
    """
    engine = VLLMEngine(config, 0)
    tokenizer = HfTokenizer(config.model).ready()
    sums = [number // GROUP for number in range(requests)]  # as in a run, all samples of a group ask the same sum
    # Two-digit sums are as long as those of the environment. No two of them are equal.
    prompts = [tokenizer.render(f"{number % 90 + 10}+{number % 89 + 10}=") for number in sums]
    await engine.start()
    try:
        bare_engine = engine._llm  # no public attribute gives it
        # Label of all tokens. With vLLM's label at the start they would be older than VERSION, and too old to train.
        await bare_engine.update_weight_version(str(VERSION))
        measured = measure(engine)
        ours: list[Found] = []
        bare: list[Found] = []
        for _ in range(rounds + 1):
            bare.append(await measured(partial(through_engine, bare_engine, prompts, tokens)))
            ours.append(await measured(partial(through_flash, config, engine, tokenizer)))
        return ours[1:], bare[1:]
    finally:
        await engine.close()


def efficiency_rows(case: str, config: Config, tokens: int, requests: int, rounds: int) -> list[Row]:
    """Measure both ways, and return the rows: the ratio of the medians, and tokens per second beside the bare engine's.

    `config` is the configuration of `requests` samples with `tokens` tokens each.
    """
    found = anyio.run(in_turns, config, tokens, requests, rounds, lambda engine: lambda work: work())
    ours_s, bare_s = map(statistics.median, found)
    total = requests * tokens
    return [
        Row(f"{case}, against bare AsyncLLM", "efficiency", "share", bare_s / ours_s, at_least=GOAL),
        Row(case, "tokens_per_second", "tokens/s", total / ours_s, total / bare_s),
    ]


def engine_efficiency(args: Args) -> list[Row]:
    """Compare the throughput of short and long answers, both ways.

    `efficiency` is our tokens per second over those of the bare engine, in the median of the rounds. It can exceed 1:
    our engine asks vLLM for its flat form of log-probs, the bare one uses the form that `AsyncLLM` gives by default.
    """
    model = endless_model(Path("outputs") / "models" / "bench-endless")
    rows: list[Row] = []
    for tokens, requests in ((16, 512 if args.quick else 1024), (256, 64 if args.quick else 128)):
        case, config = f"{requests} x {tokens} tokens", config_for(model, tokens, requests)
        rows += efficiency_rows(case, config, tokens, requests, 2 if args.quick else 5)
    return rows


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
                first, self._leased = self._leased, min(self._samples, self._leased + request.capacity)
                leases = [
                    Lease(number, Task(number, number // GROUP, number % GROUP, number // GROUP), 0)
                    for number in range(first, self._leased)
                ]
                # Without a lease, the reply ends the node.
                return cast("ReplyT", p.LeaseReply(leases, done=not leases))
            case p.DeliverRequest():
                self.delivered += len(request.ended)
            case p.VersionRequest() | p.CancelRequest():
                await anyio.sleep_forever()
            case _:
                pass
        await anyio.lowlevel.checkpoint()
        return cast("ReplyT", p.Ack())


async def through_node(config: Config, tokenizer: HfTokenizer, samples: int) -> None:
    """Send all samples through a rollout node with `IdleEngine` and `DealingHub`."""
    hub = DealingHub(samples)
    # A fixed engine calls no more methods than `IdleEngine` has.
    env, engine = NodeEnvironment(make_env), same_engine(FixedEngine(IdleEngine()))
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


def processor_seconds(core: int | None) -> dict[str, float]:
    """Return the processor time of this process, and of the processes of a vLLM engine, since they started.

    The times are in seconds, by process: `node` is this one; `core` and `worker` are those of the engine. `core` is the
    process id of the engine's core; None: there is no engine. Threads that have ended do not count.
    """
    pids = {} if core is None else {"core": [core], "worker": vllm_processes.worker_pids(core)}
    found = {"node": time.process_time()}
    for name, processes in pids.items():
        threads = [thread for pid in processes for thread in Path(f"/proc/{pid}/task").iterdir()]
        # The first number of `schedstat` is in nanoseconds. The times in `stat` are too coarse.
        found[name] = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
    return found


async def cost(samples: int, work: Callable[[], Awaitable[object]], core: int | None = None) -> dict[str, float]:
    """Do the work of so many samples. Returns its microseconds per sample in each process of `processor_seconds`."""
    before = processor_seconds(core)
    await work()
    return {name: (now - before[name]) / samples * 1e6 for name, now in processor_seconds(core).items()}


def least(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the least value of each process over the rounds. All rounds have values of the same processes."""
    return {name: min(each[name] for each in rounds) for name in rounds[0]}


async def loop_costs(model: Path, samples: int, rounds: int) -> dict[str, float]:
    """Measure a node's loop, and the bare loop, in turns.

    Returns the microseconds of this process per sample of each, in the fastest of `rounds` rounds, after one round that
    is not counted.
    """
    config = config_for(model, TOKENS, samples)
    tokenizer = HfTokenizer(config.model).ready()
    works = {"loop": through_node, "bare": by_hand}
    found = [
        {name: (await cost(samples, partial(work, config, tokenizer, samples)))["node"] for name, work in works.items()}
        for _ in range(rounds + 1)
    ]
    return least(found[1:])


def engine_costs(model: Path, samples: int, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Measure the whole path with a vLLM engine, and a bare `AsyncLLM`, in turns.

    Returns the microseconds per sample of each process through the whole path, then those of the bare engine. Each is
    that of the process's fastest of `rounds` rounds.
    """
    config = config_for(model, TOKENS, samples)
    # The bare engine samples without seeds, too.
    config = msgspec.structs.replace(config, rollout=msgspec.structs.replace(config.rollout, seeded=False))

    # The private attribute on purpose: no interface gives the process id.
    ours, bare = anyio.run(
        *(in_turns, config, TOKENS, samples, rounds),
        lambda engine: lambda work: cost(samples, work, engine._processes.core),
    )
    return least(ours), least(bare)


def sample_cost(args: Args) -> list[Row]:
    """Compare the processor time of one short sample with the least that each stage needs.

    Samples have 16 tokens after a prompt of six, in groups of eight, with environments that answer at once. *Loop* is a
    rollout node (scheduler, episodes, proxy, tokenizer, environment) with an engine that computes nothing and a hub
    that replies at once. Its comparison, *bare*, is one coroutine for each sample that does the same by hand. Then the
    whole path with one vLLM engine is compared with a bare `AsyncLLM`. The core of vLLM, its worker and this process
    are counted separately. Figures are microseconds of processor time per sample, of the fastest round, because other
    work on the machine only adds time. `--quick` leaves the engine out.
    """
    model = endless_model(Path("outputs") / "models" / "bench-endless")
    loop = anyio.run(loop_costs, model, 1024 if args.quick else 4096, 3 if args.quick else 9)
    case = f"{TOKENS} tokens, a node's loop without an engine"
    found = [
        Row(case, "loop_us", "µs", loop["loop"], loop["bare"], at_most=LOOP_GOAL_US),
        Row(case, "ratio_to_bare", "×", loop["loop"] / loop["bare"], at_most=LOOP_RATIO),
    ]
    if args.quick:
        return found
    ours, bare = engine_costs(model, 1024, 7)
    case = f"{TOKENS} tokens, the whole path around vLLM"
    for name, processes in (("all", ours.keys()), ("core and worker", ours.keys() - {"node"})):
        spent = [sum(times[process] for process in processes) for times in (ours, bare)]
        found.append(Row(f"{case}, {name}", "ratio_to_bare", "×", spent[0] / spent[1], at_most=ENGINE_RATIO))
    return found


COSTS = {"engine_efficiency": (engine_efficiency, None), "sample_cost": (sample_cost, None)}
"""Benchmarks of this file; none has a plot."""


if __name__ == "__main__":
    main_of(COSTS)
