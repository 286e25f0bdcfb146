"""Log-probs of a real vLLM engine for tokens drawn from a part of the vocabulary, against a trainer's.

Law 4: at equal weights, the ratio of trainer and engine is 1 for every token, whatever settings it was sampled with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from torch import Tensor

from flash.rollout.engine import ResponseRequest
from flash.sampling import Sampling
from flash.trainer.model.logprobs import policy_logprobs
from flash.trainer.packing import pack
from flash.types import Completion, Outcome, ShardSample, Span, Task, Trajectory, Turn
from tests.rollout.engine_contract import complete
from tests.rollout.test_vllm_engine import END, VOCABULARY, Served, make_model, serving, set_end_token
from tests.trainer.packed_cases import sharded

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

PROMPT = [5, 6, 7, 8]
"""Token ids of the prompt of all responses."""
ROUNDING = 1e-5
"""Largest difference of a log-prob between engine and trainer at temperature 1. Both round logits to float32, and a
temperature below 1 divides the difference by itself."""

# Settings of sampling, by name.
HOW = {
    "top_k": Sampling(top_k=5),
    "top_p": Sampling(top_k=40, top_p=0.6),
    "min_p": Sampling(top_k=40, min_p=0.2),
    "cold": Sampling(0.4, top_k=7),
    "all of them": Sampling(1.6, top_k=9, top_p=0.8, min_p=0.1, min_tokens=4),
    "more than there are": Sampling(top_k=1000, top_p=0.9),
    "one": Sampling(top_k=1),
    "biased": Sampling(1.3, top_k=6, logit_bias=((5, 3.0), (9, -4.0), (40, 6.0))),
    "penalised": Sampling(top_k=30, top_p=0.9, repetition_penalty=1.5),
    "rewarded": Sampling(0.8, top_k=12, repetition_penalty=0.7),
    "everything": Sampling(
        1.6, top_k=20, top_p=0.9, min_p=0.02, min_tokens=4, repetition_penalty=1.3, logit_bias=((7, 2.0), (11, -100.0))
    ),
    "none": Sampling(0.7),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a vLLM engine with a small model that has loaded version 0."""
    folder = tmp_path_factory.mktemp("model")
    with serving(folder, make_model(folder)) as served:
        served.load(served.publish())
        yield served


def drawn(served: Served, sampling: Sampling, count: int = 60, done: int = 0) -> Completion:
    """Return a response of at most `count` tokens to `PROMPT`, of which `done` tokens count as sampled before."""
    return served.call(
        complete, served.engine, ResponseRequest(PROMPT, count, key=0, sampling=sampling, seed=1, generated=done)
    )


def trajectory(completion: Completion, sampling: Sampling, group: int = 0) -> Trajectory:
    """Return the sample of one turn that consists of `PROMPT` and this response."""
    tokens = PROMPT + completion.token_ids
    return Trajectory(
        task=Task(group, group, 0, seed=0, sampling=sampling),
        outcome=Outcome.OK,
        reward=1.0,
        token_ids=np.array(tokens, dtype="<i4").tobytes(),
        action_spans=[Span(len(PROMPT), len(tokens))],
        logprobs=np.array(completion.logprobs, dtype="<f4").tobytes(),
        versions=completion.versions,
        turns=[Turn("", "", 1.0, 0.0, 0.0, 0.0)],
        kept=completion.kept,
    )


def log_ratios(served: Served, trajectories: Sequence[Trajectory]) -> Tensor:
    """Return log π − log π_behaviour of all action tokens, in one micro-batch of a trainer with the same weights."""
    samples = [ShardSample(index, one) for index, one in enumerate(trajectories)]
    (micro,) = pack(samples, min_version=0, max_tokens=4096)
    with torch.no_grad():
        now_T = policy_logprobs(sharded(Path(served.config.model.path)), micro).logp_T
    return now_T - torch.from_numpy(micro.behaviour_T)


def kept_by(logits_V: Tensor, how: Sampling, context: Sequence[int]) -> set[int]:
    """Return the tokens that the sampling rules keep after a context, computed in float64."""
    logits_V = logits_V.double()
    for token, bias in how.logit_bias:
        logits_V[token] += bias
    for token in set(context):
        logits_V[token] *= how.repetition_penalty if logits_V[token] <= 0 else 1 / how.repetition_penalty
    scaled_V = logits_V / how.temperature
    share_V = scaled_V.softmax(-1)
    scaled_V[share_V < how.min_p * share_V.max()] = -torch.inf
    if how.top_k and how.top_k < len(scaled_V):
        scaled_V[scaled_V < scaled_V.topk(how.top_k).values[-1]] = -torch.inf
    order = scaled_V.argsort(descending=True)
    before = scaled_V.softmax(-1)[order].cumsum(-1).roll(1)
    before[0] = 0.0
    return {token for token, sum in zip(order.tolist(), before.tolist(), strict=True) if sum < how.top_p} & {
        token for token, value in enumerate(scaled_V.tolist()) if value > -torch.inf
    }


@pytest.mark.parametrize("name", HOW)
def test_law_4_the_ratio_is_1_at_equal_weights_however_tokens_are_drawn(served: Served, name: str) -> None:
    how = HOW[name]
    completion = drawn(served, how)
    assert log_ratios(served, [trajectory(completion, how)]).abs().max() * min(1, how.temperature) < ROUNDING


def test_samples_that_are_drawn_in_different_ways_share_a_step_of_the_engine_and_a_micro_batch(served: Served) -> None:
    async def all_at_once() -> dict[str, Completion]:
        # Return the responses by the names of their settings, sampled in parallel.
        found: dict[str, Completion] = {}

        async def one(name: str) -> None:
            request = ResponseRequest(PROMPT, 60, key=0, sampling=HOW[name], seed=len(name))
            found[name] = await complete(served.engine, request)

        async with anyio.create_task_group() as group:
            for name in HOW:
                group.start_soon(one, name)
        return found

    found = served.call(all_at_once)
    together = [trajectory(found[name], HOW[name], group) for group, name in enumerate(HOW)]
    coldest = min(how.temperature for how in HOW.values())
    assert log_ratios(served, together).abs().max() * coldest < ROUNDING


@pytest.mark.parametrize("name", [name for name in HOW if HOW[name].has_kept_sets])
def test_the_kept_set_follows_the_rules_and_has_the_drawn_token(served: Served, name: str) -> None:
    how = HOW[name]
    completion = drawn(served, how)
    with torch.no_grad():
        logits_TV = served.model(torch.tensor([PROMPT + completion.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    assert completion.kept is not None
    assert completion.kept.tokens == len(completion.token_ids)
    for place, token in enumerate(completion.token_ids):
        others = completion.kept.part(place, place + 1).numbers()[0].tolist()
        assert token not in others
        assert {token, *others} == kept_by(logits_TV[place], how, PROMPT + completion.token_ids[:place])


def test_a_response_does_not_end_before_min_tokens_even_after_a_move(served: Served) -> None:
    set_end_token(served.model, wanted=True)
    served.load(served.publish())
    how = Sampling(top_k=VOCABULARY, min_tokens=6)
    whole, moved = drawn(served, how), drawn(served, how, done=2)
    set_end_token(served.model, wanted=False)
    served.load(served.publish())
    for completion, least in ((whole, 6), (moved, 4)):
        assert completion.token_ids.index(END) == least == len(completion.token_ids) - 1
        assert completion.finish == "stop"
        assert completion.kept is not None
        ids, counts = completion.kept.part(0, least).numbers()
        assert END not in ids
        assert counts.tolist() == [VOCABULARY - 2] * least


def test_a_response_ends_at_the_texts_and_tokens_of_its_sampling_and_keeps_them(served: Served) -> None:
    whole = drawn(served, Sampling(top_k=5))
    at = next(place for place in range(3, 60) if whole.token_ids[place] not in whole.token_ids[:place])
    token = whole.token_ids[at]
    for how in (
        Sampling(top_k=5, stop=("never", f"t{token}")),
        Sampling(top_k=5, stop_token_ids=(VOCABULARY - 1, token)),
    ):
        stopped = drawn(served, how)
        assert stopped.finish == "text"
        if how.stop_token_ids:
            assert stopped.token_ids == whole.token_ids[: at + 1]
        assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
        assert stopped.kept is not None
        assert stopped.kept.tokens == len(stopped.token_ids) == len(stopped.logprobs)
