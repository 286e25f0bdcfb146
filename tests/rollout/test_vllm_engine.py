"""A real vLLM engine on the CPU, against Hugging Face's forward pass of the same weights."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import msgspec
import pytest

from flash.config.tree import Config
from flash.errors import EngineDeadError, EngineError, WeightsError
from flash.rollout.engine import GenerateRequest, Pressure, Progress, SamplingSettings
from flash.rollout.vllm_engine import VLLMEngine
from flash.types import Canary, Completion, Published, VersionRun
from flash.weights.canary import canary_tokens

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

VOCABULARY = 48
WIDTH = 64
END = 1
"""The end-of-text token."""
LONG = 160
"""Tokens of a response that lasts over a swap."""


def make_model(folder: Path, *, tied: bool) -> Any:
    """A random Qwen3 and its tokenizer, saved as a model folder; channel 0 of its embeddings is a constant."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        eos_token_id=END,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    set_end_token(model, wanted=False)
    model.save_pretrained(folder)
    words = {f"t{token}": token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"t{END}", pad_token="t0").save_pretrained(folder)
    return model


def set_end_token(model: Any, *, wanted: bool) -> None:
    """Make the end-of-text token certain or impossible, through channel 0 of the hidden states, which is large."""
    import torch

    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings[:, 0] = 4.0
        outputs = model.get_output_embeddings().weight
        outputs[:, 0] = 0.0 if outputs is not embeddings else 4.0
        outputs[END] = 0.0
        outputs[END, 0] = 30.0 if wanted else -30.0


def change(model: Any, seed: int) -> None:
    """One step of a very bold optimizer."""
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    set_end_token(model, wanted=False)


def next_logprobs(model: Any, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """Log-prob of token i+1 given tokens 0…i, by Hugging Face."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0] / temperature
    rows = torch.log_softmax(logits, -1)
    return [rows[at, token].item() for at, token in enumerate(token_ids[1:])]


@dataclass
class Served:
    """A model, an engine that serves it, and the trainer's end of the wire."""

    model: Any
    config: Config
    engine: VLLMEngine
    publisher: Any
    call: Callable[..., Any]
    canary: list[int] = field(default_factory=lambda: canary_tokens(VOCABULARY, 24, 0))
    versions: Iterator[int] = field(default_factory=lambda: iter(range(1000)))

    def publish(self, *, canary_shift: float = 0.0) -> Published:
        """The model as it is now, as the next version."""
        version = next(self.versions)
        info: list[bytes] = []
        self.publisher.publish(version, self.model.named_parameters(), info.append)
        logprobs = [value + canary_shift for value in next_logprobs(self.model, self.canary)]
        return Published(version, "tcp", info[0], Canary(self.canary, logprobs))

    def load(self, published: Published, *, keep_cache: bool = False) -> float:
        return self.call(functools.partial(self.engine.load, published, keep_cache=keep_cache))

    def generate(self, prompt: list[int], count: int, temperature: float = 1.0) -> Completion:
        return self.call(complete, self.engine, ask(prompt, count, temperature))


def ask(prompt: list[int], count: int, temperature: float = 1.0) -> GenerateRequest:
    return GenerateRequest(prompt, SamplingSettings(count, temperature), key=0)


def each(versions: list[VersionRun]) -> list[int]:
    """The version of each token."""
    return [run.version for run in versions for _ in range(run.count)]


async def complete(
    engine: VLLMEngine, request: GenerateRequest, began: Callable[[], object] = lambda: None
) -> Completion:
    """Consume a stream and check that its pieces add up. `began` is called at each piece."""
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    async for piece in engine.generate(request):
        began()
        if isinstance(piece, Completion):
            assert piece.token_ids[: len(tokens)] == tokens
            assert piece.logprobs[: len(tokens)] == logprobs
            assert each(piece.versions)[: len(tokens)] == versions
            assert sum(run.count for run in piece.versions) == len(piece.token_ids) == len(piece.logprobs)
            return piece
        tokens += piece.token_ids
        logprobs += piece.logprobs
        versions += each(piece.versions)
    raise AssertionError("a stream ended without a completion")


def make_config(folder: Path) -> Config:
    tree = {
        "run": {"name": "test"},
        "model": {"path": str(folder), "dtype": "float32", "max_length": 256},
        "env": {"path": "module:Class"},
        "engine": {"enforce_eager": True, "max_sequences": 32, "kv_cache_gib": 0.25, "stream_interval": 8},
        "deadlines": {"engine_start": 110, "swap": 60, "shutdown": 20},
        "cluster": {"gpus_per_node": 0},
    }
    return msgspec.convert(tree, Config)


@contextlib.contextmanager
def serve(folder: Path, *, tied: bool) -> Iterator[Served]:
    from flash.weights.publisher import make_publisher

    model = make_model(folder, tied=tied)
    config = make_config(folder)
    publisher = make_publisher(config, 0, "127.0.0.1")
    with anyio.from_thread.start_blocking_portal() as portal:
        engine = portal.call(functools.partial(VLLMEngine, config, 0))
        portal.call(engine.start)
        try:
            yield Served(model, config, engine, publisher, portal.call)
        finally:
            portal.call(engine.close)
            publisher.close()


def engine_of(tmp_path_factory: pytest.TempPathFactory, *, tied: bool) -> contextlib.AbstractContextManager[Served]:
    return serve(tmp_path_factory.mktemp("model"), tied=tied)


@pytest.fixture(scope="module", params=["tied", "untied"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with engine_of(tmp_path_factory, tied=request.param == "tied") as served:
        yield served


@pytest.fixture(scope="module")
def doomed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine that the tests may break."""
    with engine_of(tmp_path_factory, tied=True) as served:
        yield served


async def in_flight(
    engine: VLLMEngine, count: int, between: Callable[[], Coroutine[Any, Any, Any]]
) -> list[tuple[list[int], Completion]]:
    """Start `count` long responses, do something when all of them run, and return them with their prompts."""
    done: list[tuple[list[int], Completion]] = []
    running: set[int] = set()
    all_running = anyio.Event()

    async def one(number: int) -> None:
        def began() -> None:
            running.add(number)
            if len(running) == count:
                all_running.set()

        prompt = [2 + number % 40, 3, 4]
        done.append((prompt, await complete(engine, ask(prompt, LONG), began)))

    async with anyio.create_task_group() as group:
        for number in range(count):
            group.start_soon(one, number)
        with anyio.fail_after(60):
            await all_running.wait()
        await between()
    return done


def test_after_each_swap_the_engine_computes_with_the_new_weights_and_nothing_in_flight_is_lost(served: Served) -> None:
    served.load(served.publish())
    for seed in (1, 2, 3):
        before = served.engine.version
        change(served.model, seed)
        published = served.publish()
        gaps: list[float] = []

        async def swap(published: Published = published, gaps: list[float] = gaps) -> None:
            gaps.append(await served.engine.load(published, keep_cache=False))

        done = served.call(in_flight, served.engine, 24, swap)
        assert gaps[0] <= 1e-4
        assert served.engine.version == published.version == before + 1
        assert len(done) == 24
        for _, completion in done:
            assert [run.version for run in completion.versions] == [before, before + 1]
            assert sum(run.count for run in completion.versions) == LONG


def test_tokens_after_a_swap_are_sampled_from_the_new_weights_and_the_old_prefix(served: Served) -> None:
    served.load(served.publish())
    change(served.model, 9)
    published = served.publish()

    async def swap() -> None:
        await served.engine.load(published, keep_cache=False)

    for prompt, completion in served.call(in_flight, served.engine, 16, swap):
        old = completion.versions[0].count
        expected = next_logprobs(served.model, prompt + completion.token_ids)[len(prompt) - 1 + old :]
        assert completion.logprobs[old:] == pytest.approx(expected, abs=1e-4)


def test_a_swap_that_keeps_the_cache_lets_only_running_sequences_use_it(served: Served) -> None:
    served.load(served.publish())
    prompt = [7, 8, 9] * 20
    served.generate(prompt, 4)
    before = served.engine.version
    change(served.model, 11)
    published = served.publish()

    async def swap() -> None:
        await served.engine.load(published, keep_cache=True)

    for _, completion in served.call(in_flight, served.engine, 8, swap):
        assert [run.version for run in completion.versions] == [before, before + 1]
    completion = served.generate(prompt, 4)
    expected = next_logprobs(served.model, prompt + completion.token_ids)[len(prompt) - 1 :]
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_the_engine_tells_how_full_it_is_and_blames_no_swap_for_a_full_cache(served: Served) -> None:
    served.load(served.publish())
    published = served.publish()
    seen: list[Pressure] = []

    async def swap() -> None:
        seen.append(served.engine.pressure)
        await served.engine.load(published, keep_cache=False)

    served.call(in_flight, served.engine, 8, swap)
    assert seen[0].running == 8
    assert 0 < seen[0].kv_used < 0.5
    after = served.engine.pressure
    assert (after.running, after.waiting, after.kv_used, after.preemptions) == (0, 0, 0.0, 0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_law_4_behaviour_logprobs_are_of_the_distribution_sampled_from(served: Served, temperature: float) -> None:
    served.load(served.publish())
    prompt = [5, 6, 7, 8]
    completion = served.generate(prompt, 40, temperature)
    expected = next_logprobs(served.model, prompt + completion.token_ids, temperature)[len(prompt) - 1 :]
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_greedy_response_takes_the_likeliest_token(served: Served) -> None:
    import torch

    served.load(served.publish())
    prompt = [5, 6, 7, 8]
    completion = served.generate(prompt, 12, temperature=0.0)
    with torch.no_grad():
        best = served.model(torch.tensor([prompt + completion.token_ids])).logits[0].argmax(-1).tolist()
    assert completion.token_ids == best[len(prompt) - 1 : -1]


def test_a_response_ends_with_the_models_end_token(served: Served) -> None:
    set_end_token(served.model, wanted=True)
    served.load(served.publish())
    completion = served.generate([5, 6, 7], 40)
    set_end_token(served.model, wanted=False)
    assert (completion.token_ids, completion.finish) == ([END], "stop")


def test_a_response_ends_at_its_limit_or_the_contexts(served: Served) -> None:
    served.load(served.publish())
    assert served.generate([5, 6, 7], 10).finish == "length"
    nearly_full = served.generate([5] * 250, 40)
    assert (len(nearly_full.token_ids), nearly_full.finish) == (6, "length")


@pytest.mark.parametrize("length", [0, 256, 1000])
def test_a_prompt_that_does_not_fit_is_refused_with_the_limit(served: Served, length: int) -> None:
    with pytest.raises(EngineError, match=rf"prompt of {length} tokens .* context of 256"):
        served.generate([5] * length, 10)


def test_a_prompt_outside_the_vocabulary_is_refused(served: Served) -> None:
    with pytest.raises(EngineError, match="refused a request"):
        served.generate([VOCABULARY + 5], 10)


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_an_abandoned_request_is_freed_in_the_engine(served: Served, how: str) -> None:
    served.load(served.publish())

    async def abandon() -> bool:
        stream = served.engine.generate(ask([5, 6, 7], 250))
        assert isinstance(await anext(stream), Progress)
        if how == "close":
            await stream.aclose()
        else:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await anext(stream)
        # True when no running request holds a block of the KV cache.
        return await served.engine._llm.reset_prefix_cache()

    assert served.call(abandon)


def test_law_7_weights_that_compute_something_else_fail_the_canary(served: Served) -> None:
    served.load(served.publish())
    before = served.engine.version
    with pytest.raises(WeightsError, match=rf"engine 0, version {before + 1}: the canary's log-prob at position"):
        served.load(served.publish(canary_shift=0.01))
    assert served.engine.version == before


def test_tokens_before_the_first_load_carry_no_version(doomed: Served) -> None:
    assert doomed.engine.version == -1
    assert doomed.generate([5, 6, 7], 5).versions == [VersionRun(-1, 5)]


def test_law_7_a_corrupted_tensor_is_named(doomed: Served) -> None:
    published = doomed.publish()
    image = doomed.publisher._server._images[published.version]
    names = [name for name, _ in doomed.model.named_parameters()]
    image.payloads[7][:4] = b"\xff\xff\xff\xff"
    with pytest.raises(WeightsError, match=rf"could not load version {published.version}.*{names[7]}.*is damaged"):
        doomed.load(published)


def test_an_engine_that_is_killed_fails_its_requests_and_says_so(doomed: Served) -> None:
    core = doomed.engine._core.pid

    async def kill() -> EngineDeadError:
        os.kill(core, signal.SIGKILL)
        with anyio.fail_after(30):
            return await doomed.engine.wait_dead()

    assert str(core) in str(doomed.call(kill))
    with pytest.raises(EngineDeadError):
        doomed.generate([5, 6, 7], 5)
    with pytest.raises(EngineDeadError):
        doomed.load(doomed.publish())
    doomed.call(doomed.engine.close)
    assert not processes_of_group(core)


def test_a_closed_engine_leaves_no_process(tmp_path: Path) -> None:
    with serve(tmp_path, tied=True) as served:
        core = served.engine._core.pid
        members = processes_of_group(core)
        assert len(members) >= 2, "an engine core and its worker"
    assert not processes_of_group(core)
    assert not [process for process in multiprocessing.active_children() if process.pid == core]


def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    make_model(tmp_path, tied=True)
    known = engine_children()

    async def interrupted() -> None:
        engine = VLLMEngine(make_config(tmp_path), 0)
        async with anyio.create_task_group() as group:
            group.start_soon(engine.start)
            while engine_children() == known:  # noqa: ASYNC110 (nothing tells when vLLM has spawned its process)
                await anyio.sleep(0.05)
            group.cancel_scope.cancel()

    anyio.run(interrupted)
    assert engine_children() <= known


def engine_children() -> set[int | None]:
    return {child.pid for child in multiprocessing.active_children() if child.name.startswith("EngineCore")}


def test_a_broken_model_folder_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))

    async def start() -> None:
        engine = VLLMEngine(make_config(tmp_path), 0)
        with pytest.raises(EngineError, match=r"engine 0 did not start: [\s\S]*no-such-model"):
            await engine.start()

    anyio.run(start)


def processes_of_group(group: int) -> list[int]:
    """The living: a process that ended and was not reaped by its parent is not one."""
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, found = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(found) == group and state != "Z":
                members.append(int(entry.name))
    return members


PARENT = """
import sys
from pathlib import Path
import anyio
from tests_vllm_engine import VLLMEngine, make_config
async def main():
    engine = VLLMEngine(make_config(Path(sys.argv[1])), 0)
    await engine.start()
    print(engine._core.pid, flush=True)
    await anyio.sleep_forever()
if __name__ == "__main__":
    anyio.run(main)
"""


def test_a_killed_node_loop_leaves_no_engine(tmp_path: Path) -> None:
    make_model(tmp_path / "model", tied=True)
    script = tmp_path / "parent.py"
    script.write_text(PARENT.replace("tests_vllm_engine", Path(__file__).stem))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, str(script), str(tmp_path / "model")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    with parent.stdout:
        core = int(parent.stdout.readline())
        descriptors = [os.pidfd_open(pid) for pid in processes_of_group(core)]
        assert len(descriptors) >= 2, "an engine core and its worker"
        parent.kill()
        parent.wait(20)
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 20)[0], "a process of the engine outlived its node loop"
        os.close(descriptor)
