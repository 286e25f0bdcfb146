"""A real vLLM engine on the CPU, against Hugging Face's forward pass of the same weights."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import multiprocessing
import os
import random
import select
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import msgspec
import pytest

from flash.config.tree import Config
from flash.errors import ConfigError, EngineDeadError, EngineError, WeightsError
from flash.foreign import vllm
from flash.rollout.engine import Pressure, Progress, ResponseRequest
from flash.rollout.vllm.engine import VLLMEngine
from flash.sampling import Sampling
from flash.types import Canary, Completion, Published
from flash.weights.engine_process import SPIN_S
from flash.weights.image import Fingerprint
from flash.weights.versions import decode_update, encode_update
from tests.forked_command import ROOT, ForkedCommand
from tests.rollout import engine_contract as contract
from tests.rollout.engine_contract import ENDLESS, LONG, complete

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

VOCABULARY = 48
WIDTH = 64
END = 1
"""The end-of-text token."""


def make_model(folder: Path, *, tied: bool = True, mixture: bool = False) -> Any:
    """Save a random Qwen3 and its tokenizer as a model folder, and return the model. Channel 0 of its embeddings is
    constant.

    The experts of a mixture have a width that the kernels of the CPU pad.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
        "eos_token_id": END,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    model: Any
    if mixture:
        experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape, **experts))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    model.float().eval()
    set_end_token(model, wanted=False)
    model.save_pretrained(folder)
    words = {f"t{token}": token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"t{END}", pad_token="t0")
    saved.save_pretrained(folder)
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
    """Change all weights, like a step of a very bold optimizer."""
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    set_end_token(model, wanted=False)


def next_logprobs(model: Any, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """Return Hugging Face's log-prob of each token after the first one, given all tokens before it."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0] / temperature
    rows = torch.log_softmax(logits, -1)
    return [rows[at, token].item() for at, token in enumerate(token_ids[1:])]


@dataclass
class Served:
    """A model, an engine that serves it, and the publisher of its versions."""

    model: Any
    config: Config
    engine: VLLMEngine
    publisher: Any
    call: Callable[..., Any]
    canary: list[int] = field(default_factory=lambda: random.Random(0).choices(range(VOCABULARY), k=24))
    versions: Iterator[int] = field(default_factory=lambda: iter(range(1000)))
    sent: int = 0
    """Bytes of the last version."""

    def publish(self, *, canary_shift: float = 0.0) -> Published:
        """Publish the present weights of the model as the next version. `canary_shift` makes its log-probs wrong."""
        version = next(self.versions)
        offer = self.publisher.publish(version, self.model.named_parameters())
        self.sent = offer.sent_bytes
        logprobs = [value + canary_shift for value in next_logprobs(self.model, self.canary)]
        return Published(version, "tcp", offer.update_info, Canary(self.canary, logprobs, 1e-4))

    def load(self, published: Published, *, keep_cache: bool = False) -> float:
        """Load a version into the engine, from the test's thread."""
        return self.call(functools.partial(self.engine.load, published, keep_cache=keep_cache))

    def generate(
        self, prompt: list[int], count: int, temperature: float = 1.0, stop: tuple[str, ...] = ()
    ) -> Completion:
        """Return a response, from the test's thread."""
        return self.call(complete, self.engine, ask(prompt, count, temperature, stop))


def ask(prompt: list[int], count: int, temperature: float = 1.0, stop: tuple[str, ...] = ()) -> ResponseRequest:
    """Return a request for at most `count` tokens."""
    return ResponseRequest(prompt, count, key=0, sampling=Sampling(temperature), stop=stop)


def make_config(
    folder: Path,
    dtype: str = "float32",
    weights: str = "tcp",
    vllm: Mapping[str, Any] | None = None,
    reasoning_parser: str | None = None,
    **deadlines: float,
) -> Config:
    """Return the configuration of an engine on the CPU, for the model in `folder`. `vllm` are vLLM's own arguments."""
    engine = {"enforce_eager": True, "max_sequences": 32, "kv_cache_gib": 0.25, "stream_interval": 8}
    tree = {
        "weights": {"backend": weights},
        "run": {"name": "test"},
        "model": {"path": str(folder), "dtype": dtype, "max_length": 8192, "reasoning_parser": reasoning_parser},
        "env": {"path": "module:Class"},
        "rollout": {"seeded": True},
        "engine": engine | {"vllm": dict(vllm or {})},
        "deadlines": {"engine_start": 110, "swap": 60, "close": 20} | deadlines,
        "cluster": {"gpus_per_node": 0},
    }
    return msgspec.convert(tree, Config)


@contextlib.contextmanager
def serving(
    folder: Path,
    model: Any,
    dtype: str = "float32",
    weights: str = "tcp",
    vllm: Mapping[str, Any] | None = None,
    reasoning_parser: str | None = None,
    **deadlines: float,
) -> Generator[Served]:
    """Give the block a started engine for the model in `folder`, and the publisher of its versions."""
    from flash.weights.publisher import make_publisher

    config = make_config(folder, dtype, weights, vllm, reasoning_parser, **deadlines)
    publisher = make_publisher(config, 0, "127.0.0.1")
    with anyio.from_thread.start_blocking_portal() as portal:
        engine = portal.call(functools.partial(VLLMEngine, config, 0))
        portal.call(engine.start)
        try:
            yield Served(model, config, engine, publisher, portal.call)
        finally:
            portal.call(engine.close)
            publisher.close()


@pytest.fixture(scope="module", params=["tied", "mixture"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve a model of which vLLM used to lose a part in a reload: a tied output layer, or the experts of a mixture.

    Weights go over tcp to the one, as what has changed where that is less, and in a group to the other.
    """
    mixture = request.param == "mixture"
    folder = tmp_path_factory.mktemp("model")
    model = make_model(folder, tied=not mixture, mixture=mixture)
    with serving(folder, model, weights="gloo" if mixture else "tcp_deltas") as served:
        yield served


@pytest.fixture(scope="module")
def doomed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve a model with an engine that the tests may break."""
    folder = tmp_path_factory.mktemp("model")
    with serving(folder, make_model(folder)) as served:
        yield served


async def in_flight(
    engine: VLLMEngine, count: int, between: Callable[[], Coroutine[Any, Any, Any]]
) -> list[tuple[list[int], Completion]]:
    """Start `count` long responses, do something when all of them run, and return them with their prompts."""
    done: list[tuple[list[int], Completion]] = []
    running: set[int] = set()
    all_running = anyio.Event()

    async def one(number: int) -> None:
        """Sample a long response, and note when it has its first piece."""

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


@pytest.mark.parametrize("check", contract.WHILE_IT_LIVES, ids=lambda check: check.__name__)
def test_it_keeps_the_contract_of_engines(served: Served, check: Callable[[contract.Subject], Any]) -> None:
    served.call(check, served)


def test_after_each_swap_the_engine_computes_with_the_new_weights_and_nothing_in_flight_is_lost(served: Served) -> None:
    served.load(served.publish())
    for seed in (1, 2, 3):
        before = served.engine.version
        change(served.model, seed)
        published = served.publish()
        gaps: list[float] = []

        async def swap(published: Published = published, gaps: list[float] = gaps) -> None:
            gaps.append(await served.engine.load(published, keep_cache=False))

        done = served.call(in_flight, served.engine, 12, swap)
        assert gaps[0] <= 1e-5
        assert served.engine.version == published.version == before + 1
        assert len(done) == 12
        for _, completion in done:
            assert [run.version for run in completion.versions] == [before, before + 1]
            assert sum(run.count for run in completion.versions) == LONG


def test_an_engine_holds_what_was_published_bit_for_bit(served: Served) -> None:
    change(served.model, 11)
    published = served.publish()
    served.load(published)
    fingerprint = Fingerprint()
    for parameter in served.model.parameters():
        fingerprint.add(parameter)
    assert decode_update(published.update_info).fingerprint == fingerprint.sums
    assert served.call(vllm.ask_workers, served.engine._llm, "flash_fingerprint", 0) == [fingerprint.sums]


def test_an_engine_is_sent_what_has_changed_and_holds_all_of_it(served: Served) -> None:
    import torch

    served.load(served.publish())
    parameters = list(served.model.parameters())
    before, whole = [parameter.detach().clone() for parameter in parameters], sum(one.nbytes for one in parameters)
    torch.manual_seed(0)
    for _ in range(2):
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(torch.where(torch.rand_like(parameter) < 0.02, 0.5, 0.0))
        published = served.publish()
        assert served.load(published) <= 1e-5
        held = served.call(vllm.ask_workers, served.engine._llm, "flash_fingerprint", 0)
        assert held == [decode_update(published.update_info).fingerprint]
        assert served.sent < 0.1 * whole if served.config.weights.backend == "tcp_deltas" else served.sent == whole
    with torch.no_grad():  # what other tests are about
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
    served.load(served.publish())


def test_an_engine_that_kept_its_weights_is_found_out_however_close_the_canary_is(served: Served) -> None:
    import torch

    served.load(served.publish())
    old = served.publish()
    with torch.no_grad():
        next(served.model.parameters())[3, 5] += 1e-6
    new, held = (decode_update(one.update_info) for one in (served.publish(), old))
    info = msgspec.structs.replace(new, update=held.update)
    stale = msgspec.structs.replace(old, update_info=encode_update(info))
    with pytest.raises(WeightsError, match=rf"version {old.version}: after loading it holds the weights of the"):
        served.load(stale)
    assert served.load(served.publish()) <= 1e-4


def test_a_seed_draws_the_same_tokens_and_log_probs_in_any_company(served: Served) -> None:
    served.load(served.publish())
    # Together more than vLLM prefills in a step: a prompt that was cut in parts would end the engine.
    prompts = [[2 + (number * 7 + place) % 40 for place in range(200)] for number in range(16)]

    async def drawn(order: Sequence[int], seeds: int) -> list[Completion]:
        """Return the responses to these prompts, which are requested at once in this order."""
        done: dict[int, Completion] = {}

        async def one(number: int) -> None:
            request = msgspec.structs.replace(ask(prompts[number], 20), seed=seeds + number)
            done[number] = await complete(served.engine, request)

        async with anyio.create_task_group() as group:
            for number in order:
                group.start_soon(one, number)
        return [done[number] for number in sorted(done)]

    together = served.call(drawn, range(16), 1000)
    assert served.call(drawn, range(15, -1, -1), 1000) == together
    assert [served.call(drawn, [number], 1000) for number in (3, 11)] == [[together[3]], [together[11]]]
    others = served.call(drawn, range(16), 2000)
    assert not any(one.token_ids == other.token_ids for one, other in zip(together, others, strict=True))


def test_a_response_that_moved_goes_on_with_other_draws(served: Served) -> None:
    served.load(served.publish())
    request = msgspec.structs.replace(ask([2, 3, 4], 20), seed=5)
    moved_request = msgspec.structs.replace(request, generated=2)
    first, moved = (served.call(complete, served.engine, each).token_ids for each in (request, moved_request))
    assert first != moved


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


@pytest.mark.parametrize("keep_cache", [True, False])
def test_no_block_of_the_cache_outlives_a_swap_but_for_running_sequences(served: Served, keep_cache: bool) -> None:
    served.load(served.publish())
    prompt = [7, 8, 9] * 60  # more than the 128 tokens of a block, of which the cache has whole ones
    served.generate(prompt, 4)
    before = served.engine.version
    change(served.model, 11)
    published = served.publish()

    new: list[Completion] = []

    async def swap() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(functools.partial(served.engine.load, published, keep_cache=keep_cache))
            await anyio.lowlevel.checkpoint()
            # Asked while the swap is under way: it waits for the new weights.
            new.append(await complete(served.engine, ask(prompt, 4)))

    for _, completion in served.call(in_flight, served.engine, 8, swap):
        assert [run.version for run in completion.versions] == [before, before + 1]
    for completion in (*new, served.generate(prompt, 4)):
        assert [run.version for run in completion.versions] == [before + 1]
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
    assert after.prefix_hit_share is not None
    assert 0 <= after.prefix_hit_share < 1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_law_4_behaviour_logprobs_are_of_the_distribution_sampled_from(served: Served, temperature: float) -> None:
    served.load(served.publish())
    prompt = [5, 6, 7, 8]
    completion = served.generate(prompt, 40, temperature)
    expected = next_logprobs(served.model, prompt + completion.token_ids, temperature)[len(prompt) - 1 :]
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_an_engine_is_forked_from_a_process_that_has_imported_vllm_once(served: Served) -> None:
    core = served.engine._processes.core
    parent = int(Path(f"/proc/{core}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent != os.getpid()
    assert "/site-packages/vllm/" in Path(f"/proc/{parent}/maps").read_text()
    assert core in processes_of_group(core), "out of reach of the signals that the launcher's group gets"


def test_on_a_cpu_a_process_of_an_engine_spins_no_second_for_the_next_message(served: Served) -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    condition: Any = shm_broadcast.SpinCondition
    assert condition.keywords == {"busy_loop_s": SPIN_S}
    assert "busy_loop_s" in inspect.signature(condition.func).parameters


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


def test_a_response_ends_at_a_text_and_keeps_the_tokens_of_it(served: Served) -> None:
    served.load(served.publish())
    whole = served.generate([5, 6, 7, 8], 12, temperature=0.0)
    words = [f"t{token}" for token in whole.token_ids]
    stop = " ".join(words[3:5])
    stopped = served.generate([5, 6, 7, 8], 12, temperature=0.0, stop=("never", stop))
    count = next(count for count in range(1, 13) if stop in " ".join(words[:count]))
    assert (stopped.token_ids, stopped.finish) == (whole.token_ids[:count], "text")
    assert stopped.logprobs == pytest.approx(whole.logprobs[:count], abs=1e-5)


@pytest.mark.parametrize("least", [0, 7])
def test_a_text_that_ends_a_response_may_have_begun_before_it_moved(served: Served, least: int) -> None:
    served.load(served.publish())
    asked = ask([5, 6, 7, 8], 24, temperature=0.0)
    whole = served.call(complete, served.engine, asked)
    stop = f"t{whole.token_ids[8]} t{whole.token_ids[9]}"
    sampling = msgspec.structs.replace(asked.sampling, stop=(stop,), min_tokens=least)
    asked = msgspec.structs.replace(asked, sampling=sampling)
    ended = served.call(complete, served.engine, asked)
    assert ended.finish == "text"
    count = len(ended.token_ids)
    for done in {1, count // 2, count - 1}:
        rest = {"prompt": asked.prompt + whole.token_ids[:done], "max_new_tokens": 24 - done, "generated": done}
        moved = served.call(complete, served.engine, msgspec.structs.replace(asked, **rest))
        assert (moved.token_ids, moved.finish) == (whole.token_ids[done:count], "text")


def test_a_response_ends_at_its_limit_or_the_contexts(served: Served) -> None:
    served.load(served.publish())
    assert served.generate([5, 6, 7], 10).finish == "length"
    nearly_full = served.generate([5] * 8186, 40)
    assert (len(nearly_full.token_ids), nearly_full.finish) == (6, "length")


@pytest.mark.parametrize("length", [0, 8192, 9000])
def test_a_prompt_that_does_not_fit_is_refused_with_the_limit(served: Served, length: int) -> None:
    with pytest.raises(EngineError, match=rf"prompt of {length} tokens .* context of 8192"):
        served.generate([5] * length, 10)


def test_a_prompt_outside_the_vocabulary_is_refused(served: Served) -> None:
    with pytest.raises(EngineError, match="refused a request"):
        served.generate([VOCABULARY + 5], 10)


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_an_abandoned_request_is_freed_in_the_engine(served: Served, how: str) -> None:
    served.load(served.publish())

    async def abandon() -> bool:
        """Leave a response after its first piece. Returns True if no block of the KV cache is in use then."""
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


def test_tokens_of_an_aborted_request_that_were_in_no_piece_are_counted_as_lost(served: Served) -> None:
    served.load(served.publish())

    async def abandon(number: int, sampled: list[int]) -> None:
        """Leave a response after its first piece, and note the number of tokens that were sampled for it."""
        request = ask([2, 3, 4], ENDLESS)
        async with contextlib.aclosing(served.engine.generate(request)) as pieces:
            piece = await anext(pieces)
            assert isinstance(piece, Progress)
            # Nobody reads on: what comes meanwhile is in the queue, or gathers for the next piece.
            await anyio.sleep(0.05 + 0.01 * number)
        sampled.append(len(piece.token_ids) + request.tally.lost)

    async def all_of_them() -> list[int]:
        sampled: list[int] = []
        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(abandon, number, sampled)
        return sampled

    sampled = served.call(all_of_them)
    assert max(sampled) > 1
    # A piece comes after the first token, then after every eighth: most are caught between two.
    assert any(tokens % 8 != 1 for tokens in sampled)


def test_in_bfloat16_the_output_layer_that_is_kept_in_float32_is_that_of_each_version(tmp_path: Path) -> None:
    """And the engine that is closed then leaves no process."""
    with serving(tmp_path, make_model(tmp_path), dtype="bfloat16") as served:
        before: list[float] = []
        for seed in range(3):
            published = served.publish()
            canary = msgspec.structs.replace(published.canary, tolerance=10.0)
            assert served.load(msgspec.structs.replace(published, canary=canary)) < 0.1
            gaps = [abs(old - new) for old, new in zip(before, canary.logprobs, strict=False)]
            assert not before or sum(gaps) / len(gaps) > 0.3, "an old one would show"
            before = canary.logprobs
            change(served.model, seed)
        core = served.engine._processes.core
        assert len(processes_of_group(core)) >= 2, "an engine core and its worker"
    assert not processes_of_group(core)
    assert not [process for process in multiprocessing.active_children() if process.pid == core]


def test_an_engine_in_fp8_quantizes_each_version_as_it_arrives(tmp_path: Path) -> None:
    vllm_arguments = {"quantization": "fp8_per_channel"}
    with serving(tmp_path, make_model(tmp_path), dtype="bfloat16", vllm=vllm_arguments) as served:
        before: list[float] = []
        for seed in range(3):
            published = served.publish()
            canary = msgspec.structs.replace(published.canary, tolerance=10.0)
            assert 0.001 < served.load(msgspec.structs.replace(published, canary=canary)) < 0.2
            completion = served.generate([5, 6, 7, 8], 40)
            expected = next_logprobs(served.model, [5, 6, 7, 8, *completion.token_ids])[3:]
            gaps = [abs(ours - theirs) for ours, theirs in zip(completion.logprobs, expected, strict=True)]
            assert sum(gaps) / len(gaps) < 0.2
            gaps = [abs(old - new) for old, new in zip(before, canary.logprobs, strict=False)]
            assert not before or sum(gaps) / len(gaps) > 0.3, "an old one would show"
            before = canary.logprobs
            change(served.model, seed)


def test_law_7_weights_that_compute_something_else_fail_the_canary(served: Served) -> None:
    served.load(served.publish())
    before = served.engine.version
    with pytest.raises(WeightsError, match=rf"engine 0, version {before + 1}: the canary's log-probs differ by"):
        served.load(served.publish(canary_shift=0.01))
    assert served.engine.version == before


def test_a_swap_whose_publisher_dies_in_the_middle_is_done_again_with_the_next_one(doomed: Served) -> None:
    doomed.load(doomed.publish())
    before = doomed.engine.version
    change(doomed.model, 21)
    cut = doomed.publish()
    # In the middle of what vLLM puts together to one tensor.
    half = next(at for at, (name, _) in enumerate(doomed.model.named_parameters()) if "k_proj" in name)
    del doomed.publisher._server._images[cut.version].payloads[half:]
    change(doomed.model, 22)
    whole = doomed.publish()

    async def swap() -> None:
        with pytest.raises(EngineError, match="hung up") as caught:
            await doomed.engine.load(cut, keep_cache=False)
        assert caught.value.__cause__ is None  # no exception of vLLM's, which prints a traceback of each
        assert doomed.engine.version == before
        assert await doomed.engine.load(whole, keep_cache=False) <= 1e-5

    done = doomed.call(in_flight, doomed.engine, 24, swap)
    assert len(done) == 24
    for _, completion in done:
        assert [run.version for run in completion.versions] == [before, whole.version]
    assert doomed.call(vllm.ask_workers, doomed.engine._llm, "flash_fingerprint", 0) == [
        decode_update(whole.update_info).fingerprint
    ]


def test_a_request_that_vllm_ends_by_itself_is_named_with_what_vllm_says(served: Served) -> None:
    async def aborted() -> None:
        """Let vLLM abort a request by itself, and read the error."""
        stream = served.engine.generate(ask([5, 6, 7], ENDLESS))
        assert isinstance(await anext(stream), Progress)
        (running,) = served.engine._llm.output_processor.external_req_ids
        await served.engine._llm.abort(running)
        said = (
            rf"^request {running} of engine 0 was ended by vLLM, .* says 'abort' after \d+ of at most {ENDLESS} tokens"
        )
        with pytest.raises(EngineError, match=said):
            async for _ in stream:
                pass

    served.call(aborted)
    assert len(served.generate([5, 6, 7], 4).token_ids) == 4


def test_law_7_a_corrupted_tensor_is_named(doomed: Served) -> None:
    published = doomed.publish()
    image = doomed.publisher._server._images[published.version]
    names = [name for name, _ in doomed.model.named_parameters()]
    image.payloads[7][:4] = b"\xff\xff\xff\xff"
    with pytest.raises(WeightsError, match=rf"could not load version {published.version}.*{names[7]}.*is damaged"):
        doomed.load(published)


def test_an_engine_that_comes_too_late_for_a_version_is_dead_and_not_the_weights_wrong(doomed: Served) -> None:
    published = doomed.publish()
    doomed.publish()
    doomed.publish()
    with pytest.raises(EngineDeadError, match=r"too late for version .* is not held any more"):
        doomed.load(published)


def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    make_model(tmp_path)
    known = engine_children()

    async def interrupted() -> None:
        """Cancel the start of an engine when its core has begun."""
        engine = VLLMEngine(make_config(tmp_path), 0)
        async with anyio.create_task_group() as group:
            group.start_soon(engine.start)
            while engine_children() == known:  # noqa: ASYNC110 (nothing tells when vLLM has spawned its process)
                await anyio.sleep(0.05)
            group.cancel_scope.cancel()

    anyio.run(interrupted)
    assert engine_children() <= known


def engine_children() -> set[int]:
    """Return the process ids of the cores that this process has started."""
    found = multiprocessing.active_children()
    return {child.pid for child in found if child.name.startswith("EngineCore") and child.pid is not None}


def test_a_broken_model_folder_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))

    async def start() -> None:
        engine = VLLMEngine(make_config(tmp_path), 0)
        with pytest.raises(EngineError, match=r"engine 0 did not start: [\s\S]*no-such-model"):
            await engine.start()

    anyio.run(start)


def test_heads_that_the_attention_of_the_cpu_does_not_do_are_told_before_a_process_starts(tmp_path: Path) -> None:
    make_model(tmp_path)
    shape = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shape | {"head_dim": 16}))

    async def start() -> None:
        before = engine_children()
        engine = VLLMEngine(make_config(tmp_path), 0)
        with pytest.raises(ConfigError, match=r"model\.path: the heads of .* are 16 wide, .* only widths of 32, 64, "):
            await engine.start()
        assert engine_children() == before

    anyio.run(start)


def processes_of_group(group: int) -> list[int]:
    """Return the process ids of a process group, without processes that have ended and were not reaped yet."""
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
from tests.rollout.test_vllm_engine import VLLMEngine, make_config
async def main():
    engine = VLLMEngine(make_config(Path(sys.argv[1])), 0)
    await engine.start()
    print(engine._processes.core, flush=True)
    await anyio.sleep_forever()
anyio.run(main)
"""
"""Program of a node loop that has started an engine. It prints the process id of the engine's core."""


def test_a_killed_node_loop_leaves_no_engine(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    reading, writing = os.pipe()
    words = ("-c", PARENT, str(tmp_path / "model"))
    parent = ForkedCommand(words, output=writing, folder=ROOT, variables=os.environ)
    os.close(writing)
    with os.fdopen(reading) as output:
        # Libraries may print, too.
        core = next(int(line) for line in output if line.strip().isdecimal())
        descriptors = [os.pidfd_open(pid) for pid in processes_of_group(core)]
        assert len(descriptors) >= 2, "an engine core and its worker"
        parent.kill()
        parent.wait(20)
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 20)[0], "a process of the engine outlived its node loop"
        os.close(descriptor)
