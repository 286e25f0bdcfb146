"""A real vLLM engine that serves the versions of a run's adapters, against Hugging Face's merged weights."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import msgspec
import pytest

from flash.config.learning import LoraConfig, TrainConfig
from flash.errors import EngineError, WeightsError
from flash.foreign import vllm
from flash.rollout.engine import Progress
from flash.rollout.vllm.engine import VLLMEngine
from flash.types import Canary, Completion, Published
from flash.weights.versions import decode_update, encode_update
from tests.rollout import engine_contract as contract
from tests.rollout.engine_contract import ENDLESS, LONG, complete
from tests.rollout.test_vllm_engine import VOCABULARY, ask, in_flight, make_config, make_model, next_logprobs

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

RANK = 4
PROMPT = [7, 8, 9] * 60
"""More than a block of the prefix cache."""


@dataclass
class Served:
    """A base model, an engine that serves adapters of it, and the publisher of the versions."""

    base: Any
    engine: VLLMEngine
    publisher: Any
    call: Callable[..., Any]
    models: dict[int, Any] = field(default_factory=dict)
    """Models that compute the expected log-probs, by version."""
    canary: list[int] = field(default_factory=lambda: random.Random(0).choices(range(VOCABULARY), k=24))
    versions: Iterator[int] = field(default_factory=lambda: iter(range(1000)))

    def publish(self) -> Published:
        """Publish adapters with random weights as the next version."""
        import torch

        version = next(self.versions)
        generator = torch.Generator().manual_seed(version)
        model, tensors = copy.deepcopy(self.base), dict[str, Any]()
        for name, layer in model.named_modules():
            if type(layer) is torch.nn.Linear and "layers" in name:
                down = torch.randn(RANK, layer.in_features, generator=generator) * 0.1
                up = torch.randn(layer.out_features, RANK, generator=generator) * 0.1
                tensors[f"base_model.model.{name}.lora_A.weight"] = down
                tensors[f"base_model.model.{name}.lora_B.weight"] = up
                with torch.no_grad():
                    layer.weight += up @ down
        self.models[version] = model
        offer = self.publisher.publish(version, tensors.items())
        canary = Canary(self.canary, next_logprobs(model, self.canary), 1e-4)
        return Published(version, "tcp", offer.update_info, canary)

    def load(self, published: Published, *, keep_cache: bool = False) -> float:
        """Load a version into the engine, from the test's thread."""
        return self.call(functools.partial(self.engine.load, published, keep_cache=keep_cache))

    def check(self, prompt: list[int], completion: Completion) -> None:
        """Check the log-prob of each token against the merged weights of the version with which it is labelled."""
        start = len(prompt) - 1
        for run in completion.versions:
            stop = start + run.count
            expected = next_logprobs(self.models[run.version], prompt + completion.token_ids)[start:stop]
            first = start - len(prompt) + 1
            assert completion.logprobs[first : first + run.count] == pytest.approx(expected, abs=1e-4)
            start = stop


@contextlib.contextmanager
def serving(folder: Path, swap: str) -> Generator[Served]:
    """Give the block a started engine of a LoRA run, and the publisher of its versions. `swap`: a value of
    `rollout.swap`."""
    from flash.weights.publisher import make_publisher

    base, config = make_model(folder), make_config(folder)
    rollout = msgspec.structs.replace(config.rollout, swap=swap)
    config = msgspec.structs.replace(
        config, rollout=rollout, lora=LoraConfig(rank=RANK), train=TrainConfig(async_ratio=2.0, max_token_age=2)
    )
    publisher = make_publisher(config, 0, "127.0.0.1")
    with anyio.from_thread.start_blocking_portal() as portal:
        engine = portal.call(functools.partial(VLLMEngine, config, 0))
        portal.call(engine.start)
        try:
            yield Served(base, engine, publisher, portal.call)
        finally:
            portal.call(engine.close)
            publisher.close()


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve with room for one adapter: each version replaces the one before."""
    with serving(tmp_path_factory.mktemp("model"), "recompute") as served:
        yield served


@pytest.fixture(scope="module")
def staying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve with room for several adapters, which stay beside each other."""
    with serving(tmp_path_factory.mktemp("model"), "drain") as served:
        yield served


@pytest.mark.parametrize("check", contract.WHILE_IT_LIVES, ids=lambda check: check.__name__)
def test_it_keeps_the_contract_of_engines(moving: Served, check: Callable[[contract.Subject], Any]) -> None:
    moving.call(check, moving)


@pytest.mark.parametrize("keep_cache", [False, True])
def test_what_runs_goes_on_under_the_adapter_that_takes_the_place_of_its_own(moving: Served, keep_cache: bool) -> None:
    moving.load(moving.publish())
    before, published = moving.engine.version, moving.publish()
    gaps: list[float] = []

    async def swap() -> None:
        gaps.append(await moving.engine.load(published, keep_cache=keep_cache))

    done = moving.call(in_flight, moving.engine, 16, swap)
    assert gaps[0] <= 1e-5
    for prompt, completion in done:
        assert [run.version for run in completion.versions] == [before, before + 1]
        assert sum(run.count for run in completion.versions) == LONG
        if not keep_cache:
            moving.check(prompt, completion)


def test_what_runs_ends_under_the_adapter_that_it_began_with_and_new_requests_have_the_next(staying: Served) -> None:
    staying.load(staying.publish())
    before, new = staying.engine.version, list[tuple[list[int], Completion]]()

    async def swap() -> None:
        for version in (before + 1, before + 2):
            await staying.engine.load(await anyio.to_thread.run_sync(staying.publish), keep_cache=False)
            assert staying.engine.version == version
            new.append((PROMPT, await complete(staying.engine, ask(PROMPT, 20))))

    old = staying.call(in_flight, staying.engine, 16, swap)
    assert {run.version for _, completion in old for run in completion.versions} == {before}
    assert [[run.version for run in completion.versions] for _, completion in new] == [[before + 1], [before + 2]]
    for prompt, completion in old + new:
        staying.check(prompt, completion)


def test_an_adapter_leaves_with_its_last_request_and_waits_for_it(staying: Served) -> None:
    async def held() -> set[int]:
        """Return the numbers of the adapters in vLLM."""
        return await staying.engine._llm.list_loras()  # pyright: ignore[reportPrivateUsage]

    async def course() -> list[int]:
        """Return the numbers of adapters that are held: with three requests, after the fourth load, and after the
        fifth."""
        counts: list[int] = []
        # With a request under each there is room for three; the fourth waits for the first one's end.
        streams = []
        for _ in range(3):
            await staying.engine.load(await anyio.to_thread.run_sync(staying.publish), keep_cache=False)
            stream = staying.engine.generate(ask([2, 3, 4], ENDLESS))
            assert isinstance(await anext(stream), Progress)
            streams.append(stream)
        counts.append(len(await held()))
        published = await anyio.to_thread.run_sync(staying.publish)
        async with anyio.create_task_group() as group:
            group.start_soon(functools.partial(staying.engine.load, published, keep_cache=False))
            await anyio.sleep(0.5)
            assert staying.engine.version == published.version - 1
            await streams[0].aclose()
        assert staying.engine.version == published.version
        counts.append(len(await held()))
        for stream in streams[1:]:
            await stream.aclose()
        await staying.engine.load(await anyio.to_thread.run_sync(staying.publish), keep_cache=False)
        counts.append(len(await held()))
        return counts

    assert staying.call(course) == [3, 3, 2]


@pytest.mark.parametrize("name", ["moving", "staying"])
def test_no_block_of_the_prefix_cache_serves_another_version(name: str, request: pytest.FixtureRequest) -> None:
    served: Served = request.getfixturevalue(name)
    for _ in range(3):
        served.load(served.publish(), keep_cache=True)
        for _ in range(2):
            completion = served.call(complete, served.engine, ask(PROMPT, 4))
            assert [run.version for run in completion.versions] == [served.engine.version]
            served.check(PROMPT, completion)
    share = served.engine.pressure.prefix_hit_share
    assert share is not None
    assert share > 0, "the second one of a version finds the first one's blocks"


def test_an_engine_that_serves_on_after_a_failed_load_is_still_watched_for_hangs(staying: Served) -> None:
    staying.load(staying.publish())
    published = staying.publish()
    broken = msgspec.structs.replace(decode_update(published.update_info), update={"no such argument": 1})
    with pytest.raises(EngineError):
        staying.load(msgspec.structs.replace(published, update_info=encode_update(broken)))
    watch = staying.engine._steps  # pyright: ignore[reportPrivateUsage]

    async def seconds_left() -> float:
        """Return the seconds until the engine hangs, with a request that got no token for a long time."""
        watch.begin_request(anyio.current_time() - 1e6)
        left = watch.seconds_left(anyio.current_time())
        watch.end_request()
        return left

    assert staying.call(seconds_left) == 0, "a request without a step for so long means that the engine hangs"
    staying.load(staying.publish())


@pytest.mark.parametrize("name", ["moving", "staying"])
def test_an_adapter_that_vllm_has_not_put_in_place_is_found_out(name: str, request: pytest.FixtureRequest) -> None:
    served: Served = request.getfixturevalue(name)
    served.load(served.publish())
    old, new = served.publish(), served.publish()
    held, wanted = (decode_update(one.update_info) for one in (old, new))
    stale = msgspec.structs.replace(wanted, update=held.update)
    with pytest.raises(WeightsError, match=rf"version {new.version}: after loading it holds other weights than were"):
        served.load(msgspec.structs.replace(new, update_info=encode_update(stale)))
    served.load(served.publish())


def test_versions_are_exact_over_many_requests_and_swaps(staying: Served) -> None:
    """Every request is checked against the merged weights of the version that it names."""
    staying.load(staying.publish())
    done: list[tuple[list[int], Completion]] = []

    async def client(number: int) -> None:
        """Make ten requests, one after the other."""
        for turn in range(10):
            prompt = [2 + (number * 11 + turn * 7 + place) % 40 for place in range(40)]
            done.append((prompt, await complete(staying.engine, ask(prompt, 8 + number))))

    async def all_of_them() -> None:
        """Run twelve clients, and load eight versions meanwhile."""
        async with anyio.create_task_group() as group:
            for number in range(12):
                group.start_soon(client, number)
            for _ in range(8):
                await staying.engine.load(await anyio.to_thread.run_sync(staying.publish), keep_cache=False)

    staying.call(all_of_them)
    assert len(done) == 120
    seen = {run.version for _, completion in done for run in completion.versions}
    assert len(seen) > 4, "requests ran under many of them"
    for prompt, completion in done:
        assert len(completion.versions) == 1
        staying.check(prompt, completion)


def test_an_engine_holds_what_was_published_bit_for_bit(moving: Served) -> None:
    published = moving.publish()
    moving.load(published)
    held = moving.call(vllm.ask_workers, moving.engine._llm, "flash_fingerprint", 1)  # pyright: ignore[reportPrivateUsage]
    assert held == [decode_update(published.update_info).fingerprint]


def test_a_run_with_adapters_starts_its_engines_for_them(tmp_path: Path) -> None:
    from flash.rollout.vllm.start import engine_args

    make_model(tmp_path)
    config = msgspec.structs.replace(make_config(tmp_path), lora=LoraConfig(rank=20))
    args = engine_args(config, 0, [])
    assert (args["enable_lora"], args["max_loras"], args["max_lora_rank"]) == (True, 1, 32)
    layers = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert args["lora_target_modules"] == layers
    assert "enable_lora" not in engine_args(make_config(tmp_path), 0, [])
