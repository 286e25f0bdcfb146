"""How far apart engine and trainer are on a pretrained model, by precision, where it comes from, and what finds errors.

The model is SmolLM2-135M-Instruct (`flash fetch`). All three parts need no GPU.

Engine against trainer: a real vLLM engine in each precision samples answers in chat form at temperature 1, and trainers
in each precision say of the same tokens what they make of them. `mean` and `largest` are of |d|, where d is the
difference of the two log-probs in nats; `k3` is the mean of exp(d) − 1 − d, as `mismatch_k3_age_0` in a run's metrics.
Tokens per second are the engine's, 64 sequences at once. float16 has no kernels of its own on most CPUs and is slow
there, so that a quarter of the answers is compared.

Shares: one forward pass in float32 in which only what one kind of layer makes is rounded to bfloat16. The squares of
these differences add up to about that of the whole pass; `share` is the part of their sum.

Canary: trainers in each precision against an engine that computes in another order (transformers' own attention), with
healthy weights, and with one tensor that is not the trainer's, for 100 drawn tensors: `stale` has it of one optimizer
step of 1e-5 before, `damaged` has its elements permuted. What is found by the fingerprint, which is exact, and by the
canary, which sees what is computed.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import msgspec

from benchmarks.form import Args, Row, main
from flash.config.tree import Config
from flash.types import Completion, Message

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

QUESTIONS = (
    "What is the capital of France?",
    "Tell me a short story about a dog.",
    "What is 34 + 21? Reply with only the number.",
    "List three colours.",
    "Why is the sky blue?",
    "Write a haiku.",
    "What is 3 * 7?",
    "Name a planet.",
)
MODEL = {"path": "outputs/models/smollm2-135m", "fetch": "smollm2-135m", "max_length": 256}
ANSWERS, QUICK_ANSWERS = 64, 16
NEW_TOKENS = 64
WAYS = (
    ("float32", "model"),
    ("bfloat16", "model"),
    ("bfloat16", "float32"),
    ("float16", "model"),
    ("float16", "float32"),
)
"""`model.dtype` and `model.head_dtype`."""
DRAWN, QUICK_DRAWN = 100, 10
RATE = 1e-5
"""Of the step by which a stale tensor is behind: AdamW's first step moves each element by so much."""


class Sampled(NamedTuple):
    """One answer of an engine."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def config_for(dtype: str, head: str) -> Config:
    """A run on one core."""
    return msgspec.convert(
        {
            "run": {"name": "bench-mismatch"},
            "model": MODEL | {"dtype": dtype, "head_dtype": head},
            "env": {"path": "envs.arithmetic:Arithmetic"},
            "rollout": {"max_new_tokens": NEW_TOKENS, "seeded": True},
            "engine": {"enforce_eager": True, "max_sequences": 64, "kv_cache_gib": 0.5},
            "train": {"max_tokens_per_microbatch": 4096},
            "cluster": {"gpus_per_node": 0},
            "deadlines": {"generate": 36_000, "engine_step": 3600},
        },
        Config,
    )


# -- engine against trainer ------------------------------------------------------------------------------------------


async def sample(config: Config, count: int) -> tuple[list[Sampled], float]:
    """Answers of a real engine, and its tokens per second."""
    from flash.rollout.engine import ResponseRequest
    from flash.rollout.episode.tokenizer import HfTokenizer
    from flash.rollout.vllm.engine import VLLMEngine

    engine = VLLMEngine(config, 0, [])
    await engine.start()
    tokenizer, done = HfTokenizer(config.model), list[Sampled]()
    await load_own_weights(engine, config)

    async def one(number: int) -> None:
        prompt = tokenizer.render([Message("user", QUESTIONS[number % len(QUESTIONS)])])
        asked = ResponseRequest(prompt, NEW_TOKENS, key=number)
        async for piece in engine.generate(asked):
            if isinstance(piece, Completion):
                done.append(Sampled(prompt, list(piece.token_ids), list(piece.logprobs)))

    async def all_of(numbers: Sequence[int]) -> float:
        begun = time.perf_counter()
        async with anyio.create_task_group() as group:
            for number in numbers:
                group.start_soon(one, number)
        return time.perf_counter() - begun

    try:
        await all_of(range(len(QUESTIONS)))  # kernels warm up, prompts are cached
        done.clear()
        seconds = await all_of(range(count))
    finally:
        await engine.close()
    return done, sum(len(answer.tokens) for answer in done) / seconds


async def load_own_weights(engine: Any, config: Config) -> None:
    """As the first version of a run: the output layer of a CPU engine is prepared where versions are loaded."""
    import torch

    from flash.trainer.model.model import load_model
    from flash.types import Canary, Published
    from flash.weights.publisher import HostPublisher

    model = load_model(config.model)
    publisher = HostPublisher(0, "127.0.0.1", getattr(torch, config.model.dtype), 60, 600)
    try:
        offer = publisher.publish(0, model.named_parameters())
        assert offer is not None, "this is rank 0"
        canary = Canary([0, 1], [-1.0], tolerance=1e9)
        await engine.load(Published(0, "tcp", offer.update_info, canary), keep_cache=False)
    finally:
        publisher.close()


def trained_differences(config: Config, answers: Sequence[Sampled]) -> Tensor:
    """[T]: the trainer's log-prob of each token less the engine's."""
    import numpy as np
    import torch

    from flash.trainer.mesh import trainer_mesh
    from flash.trainer.model.logprobs import token_logprobs
    from flash.trainer.model.model import load_model, shard_model
    from flash.trainer.packing import in_one_row

    whole = load_model(config.model)
    rounded(whole)
    model = shard_model(whole, trainer_mesh("cpu"), config.model)
    gaps: list[Tensor] = []
    for first in range(0, len(answers), 8):
        part = answers[first : first + 8]
        ids = [np.array([*answer.prompt, *answer.tokens]) for answer in part]
        packed = in_one_row(ids)
        starts = [int(start) + len(answer.prompt) for start, answer in zip(packed.offset_S[:-1], part, strict=True)]
        action_T = np.concatenate(
            [np.arange(start, start + len(answer.tokens)) for start, answer in zip(starts, part, strict=True)]
        )
        with torch.no_grad():
            said = token_logprobs(model, packed, action_T - 1, packed.input_P[action_T]).logp_T
        gaps.append(said.double() - torch.tensor([gap for answer in part for gap in answer.logprobs]).double())
    return torch.cat(gaps)


def rounded(model: nn.Module) -> None:
    """Hold the model's own weights, which are in bfloat16, in float32: nothing is compared but arithmetic."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())


def engines_against_trainers(args: Args) -> list[Row]:
    """The table of precisions."""
    from flash.foreign.torch import single_process_group

    rows: list[Row] = []
    ways = WAYS[:3] if args.quick else WAYS
    for dtype, head in ways:
        answers, speed = anyio.run(sample, config_for(dtype, head), QUICK_ANSWERS if args.quick else ANSWERS)
        engine = name(dtype, head)
        rows.append(Row(f"engine {engine}", "tokens_per_s", "tokens/s", speed))
        for trained in ways:
            slow = "float16" in (dtype, trained[0])
            if slow and trained not in ((dtype, head), ("float32", "model")):
                continue
            with single_process_group("gloo"):
                gaps = trained_differences(config_for(*trained), answers[:: 4 if slow else 1])
            case = f"engine {engine}, trainer {name(*trained)}"
            rows += [
                Row(case, "mean_error", "nats", float(gaps.abs().mean())),
                Row(case, "largest_error", "nats", float(gaps.abs().max())),
                Row(case, "k3_error", "", float((gaps.exp() - 1 - gaps).mean())),
            ]
            gc.collect()
    return rows


def name(dtype: str, head: str) -> str:
    """As the rows name a way."""
    return dtype if dtype == "float32" or head == "model" else f"{dtype}, head {head}"


# -- shares ----------------------------------------------------------------------------------------------------------


def kinds() -> dict[str, Callable[[str, Any], bool]]:
    """Whose results are rounded, by what a layer is called."""
    from transformers.models.llama import modeling_llama as llama

    return {
        "output layer": lambda called, layer: called == "lm_head",
        "residual stream": lambda called, layer: isinstance(layer, llama.LlamaDecoderLayer),
        "norms": lambda called, layer: isinstance(layer, llama.LlamaRMSNorm),
        "queries, keys, values": lambda called, layer: called.endswith(("q_proj", "k_proj", "v_proj")),
        "attention's output": lambda called, layer: called.endswith("o_proj"),
        "gate and up": lambda called, layer: called.endswith(("gate_proj", "up_proj")),
        "activation": lambda called, layer: called.endswith("act_fn"),
        "down": lambda called, layer: called.endswith("down_proj"),
        "rotary angles": lambda called, layer: isinstance(layer, llama.LlamaRotaryEmbedding),
    }


@contextmanager
def rounding(model: nn.Module, chosen: Callable[[str, Any], bool]) -> Iterator[None]:
    """Round what these layers make to bfloat16."""
    import torch

    def hook(layer: Any, given: Any, made: Any) -> Any:
        if isinstance(made, tuple):
            return tuple(one.bfloat16().float() if isinstance(one, torch.Tensor) else one for one in made)
        return made.bfloat16().float()

    hooks = [layer.register_forward_hook(hook) for called, layer in model.named_modules() if chosen(called, layer)]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def shares(args: Args) -> list[Row]:
    """What each kind of layer adds to the squared difference."""
    import torch

    from flash.trainer.model.model import load_model

    config = config_for("float32", "model")
    model = load_model(config.model).eval()
    rounded(model)
    texts = own_answers(model, 8 if args.quick else 32)
    with torch.no_grad():
        exact_T = plain_logprobs(model, texts)
        squares: dict[str, float] = {}
        for kind, chosen in kinds().items():
            with rounding(model, chosen):
                squares[kind] = float((plain_logprobs(model, texts) - exact_T).square().mean())
        with rounding(model, lambda called, layer: any(chosen(called, layer) for chosen in kinds().values())):
            whole = float((plain_logprobs(model, texts) - exact_T).square().mean())
    total = sum(squares.values())
    rows = [Row(f"bfloat16: {kind}", "share", "of the square", square / total) for kind, square in squares.items()]
    return [*rows, Row("bfloat16: all together over their sum", "ratio", "", whole / total)]


def own_answers(model: PreTrainedModel, count: int) -> list[tuple[Tensor, int]]:
    """What the model says to the questions at temperature 1, after how many tokens of the prompt."""
    import torch

    from flash.rollout.episode.tokenizer import HfTokenizer

    torch.manual_seed(0)
    tokenizer, answers = HfTokenizer(config_for("float32", "model").model), list[tuple[torch.Tensor, int]]()
    for number in range(count):
        prompt = tokenizer.render([Message("user", QUESTIONS[number % len(QUESTIONS)])])
        given = torch.tensor([prompt])
        said = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
        answers.append((said[0], len(prompt)))
    return answers


def plain_logprobs(model: PreTrainedModel, texts: Sequence[tuple[Tensor, int]]) -> Tensor:
    """[T]: transformers' own, of each text's tokens from the given one on, in float64."""
    import torch

    rows = [model(ids[None]).logits[0, first - 1 : -1].float().log_softmax(-1) for ids, first in texts]
    picked = [row.gather(-1, ids[first:, None])[:, 0] for row, (ids, first) in zip(rows, texts, strict=True)]
    return torch.cat(picked).double()


# -- canary ----------------------------------------------------------------------------------------------------------


def canary(args: Args) -> list[Row]:
    """What the fingerprint and the canary find."""
    rows: list[Row] = []
    for dtype in ("float32", "bfloat16") if args.quick else ("float32", "bfloat16", "float16"):
        rows += canary_in(dtype, QUICK_DRAWN if args.quick else DRAWN)
        gc.collect()
    return rows


def canary_in(dtype: str, count: int) -> list[Row]:
    """The rows of one precision."""
    import torch

    from flash.foreign.torch import single_process_group
    from flash.trainer.mesh import trainer_mesh
    from flash.trainer.model.canary import CanaryMaker, draw_canary
    from flash.trainer.model.model import load_model, shard_model
    from flash.weights.image import Fingerprint

    config = config_for(dtype, "float32")
    engine = load_model(config.model).to(getattr(torch, dtype)).eval()
    with single_process_group("gloo"):
        whole = load_model(config.model)
        text = draw_canary(whole, config)
        model = shard_model(whole, trainer_mesh("cpu"), config.model)
        maker = CanaryMaker(text, model, config)
        said = torch.tensor(maker.canary(model).logprobs).double()
    ids = [(torch.tensor(text.token_ids), 1)]

    def gap() -> float:
        with torch.no_grad():
            return float((plain_logprobs(engine, ids) - said).abs().mean())

    def fingerprint(tensor: Tensor) -> list[int]:
        made = Fingerprint()
        made.add(tensor)
        return made.sums

    healthy = gap()
    found = {"stale by the fingerprint": 0, "damaged by the fingerprint": 0, "damaged by the canary": 0}
    changed, generator = 0, torch.Generator().manual_seed(0)
    parameters = list(engine.parameters())
    for parameter in random.Random(0).choices(parameters, k=count):
        kept = parameter.detach().clone()
        signs = torch.randint(0, 2, kept.shape, generator=generator) * 2 - 1
        stale = (kept.float() + RATE * signs).to(kept.dtype)
        changed += int(not torch.equal(stale, kept))
        found["stale by the fingerprint"] += fingerprint(stale) != fingerprint(kept)
        damaged = kept.flatten()[torch.randperm(kept.numel(), generator=generator)].view_as(kept)
        # The same elements in another order have the same fingerprint, on purpose: layouts differ between engines.
        found["damaged by the fingerprint"] += fingerprint(damaged) != fingerprint(kept)
        with torch.no_grad():
            parameter.copy_(damaged)
            found["damaged by the canary"] += not gap() <= maker.tolerance
            parameter.copy_(kept)
    case = f"canary in {dtype}"
    return [
        Row(case, "healthy_error", "nats", healthy),
        Row(case, "tolerance", "nats", maker.tolerance),
        Row(f"{case}: stale tensors that differ at all", "count", f"of {count}", changed),
        *(Row(f"{case}: {what}", "count", f"of {count}", number) for what, number in found.items()),
    ]


def measure(args: Args) -> list[Row]:
    """All three parts."""
    from flash.run.models.models import make_missing_model

    make_missing_model(config_for("float32", "model"))
    return [*shares(args), *canary(args), *engines_against_trainers(args)]


if __name__ == "__main__":
    main("mismatch", __doc__ or "", measure)
