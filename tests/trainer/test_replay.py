"""Routing replay: the policy uses the experts that its engine chose, and its routers learn from their own scores.

A *route* is the experts to which the router of a layer sends a token.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from transformers import PreTrainedModel

from flash.errors import ConfigError, ContractError
from flash.foreign.transformers import routers
from flash.rollout.episode.transcript import EpisodeLimits, Transcript
from flash.sampling import Routes, join_routes
from flash.trainer.mesh import trainer_mesh
from flash.trainer.model.logprobs import token_logprobs
from flash.trainer.model.model import shard_model
from flash.trainer.model.packing_check import replay_routing
from flash.trainer.packing import in_one_row, pack, select_sequences
from flash.types import Completion, Outcome, Task, Trajectory, Turn, VersionRun
from tests.rollout.test_episode import CharTokenizer
from tests.trainer.packed_cases import packed_batch, random_sequences, tiny
from tests.trainer.trainer_cases import Trainer, make_config, make_shard, random_shard, relative_error, write_model

# Kinds of models with experts, whose routers choose in different ways.
KINDS = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe", "glm4_moe", "minimax_m2"]


class Recorder:
    """Records the experts that the routers of a model choose in each forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.seen: dict[int, Tensor] = {}
        """Chosen experts of each token in the last pass, [tokens, experts of a token], by layer."""
        self._layers = int(model.config.num_hidden_layers)
        for router in routers(model):
            router.module.register_forward_hook(lambda _, __, output, at=router.layer: self._see(at, output))

    def _see(self, layer: int, output: Any) -> None:
        """Keep the chosen experts of a layer: the only integer tensor among a router's outputs."""
        self.seen[layer] = next(one for one in output if one.dtype == torch.int64)

    def routes(self) -> np.ndarray:
        """Return [tokens, layers, experts of a token] of the last pass; 0 in layers without experts."""
        some = next(iter(self.seen.values()))
        return torch.stack([self.seen.get(at, torch.zeros_like(some)) for at in range(self._layers)], 1).numpy()


class HfEngine:
    """Engine with a Hugging Face model, which reports log-probs and experts of its tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._recorder = model.eval(), Recorder(model)
        self._generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def generate(self, prompt: list[int], count: int) -> Completion:
        """Return `count` sampled tokens."""
        ids, logprobs = list(prompt), list[float]()
        for _ in range(count):
            rows = self._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
            ids.append(int(torch.multinomial(rows[-1].exp(), 1, generator=self._generator)))
            logprobs.append(float(rows[-1][ids[-1]]))
        routes = Routes.of(self._recorder.routes())
        return Completion(ids[len(prompt) :], logprobs, [VersionRun(0, count)], "stop", None, routes)


def sharded(model: PreTrainedModel, *, recompute: bool = False) -> PreTrainedModel:
    """Return a copy of the model, prepared as the trainer does it."""
    config = make_config(Path("unused")).model
    return shard_model(deepcopy(model), trainer_mesh("cpu"), config, recompute=recompute)


def learned(model: PreTrainedModel, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probs of a batch of `packed_batch`, and the gradient of a weighted sum of them, by parameter."""
    logp_T = token_logprobs(model, **batch).logp_T
    (logp_T @ torch.linspace(-1, 1, len(logp_T))).backward()
    grads: dict[str, Any] = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return logp_T.detach(), {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in grads.items()}


def noisy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy as an engine's model: noise in its routers, instead of rounding, changes many tokens' experts."""
    other = deepcopy(model).eval()
    with torch.no_grad():
        for router in routers(other):
            router.module.weight += 0.2 * torch.randn(router.module.weight.shape)
    return other


def experts_of(model: PreTrainedModel, sequences: list[Tensor]) -> Routes:
    """Return the experts of all tokens, sequence by sequence."""
    recorder, found = Recorder(model), list[np.ndarray]()
    for ids in sequences:
        with torch.no_grad():
            model(input_ids=ids[None], use_cache=False)
        found.append(recorder.routes())
    return Routes.of(np.concatenate(found))


def tree() -> list[Tensor]:
    """Return four sequences, of which the last begins with the first 12 tokens of the third."""
    sequences = random_sequences(64, (9, 5, 21))
    return [*sequences, torch.cat([sequences[-1][:12], sequences[0]])]


@pytest.mark.parametrize("kind", KINDS)
def test_the_recorded_experts_are_used_and_routers_learn(kind: str) -> None:
    plain = tiny(kind)
    sequences = tree()
    model = sharded(plain)
    replay_routing(model)
    recorder, batch = Recorder(model), packed_batch(sequences)
    own = experts_of(deepcopy(plain).eval(), sequences)
    told = experts_of(noisy(plain), sequences)
    assert np.mean(own.numbers() != told.numbers()) > 0.05
    row = batch["sequences"].computed.place_U
    _, found = learned(model, batch | {"sequences": batch["sequences"]._replace(routes=told)})
    chosen = np.stack([recorder.seen[router.layer].numpy() for router in routers(model)], 1)
    with_experts = [router.layer for router in routers(model)]
    assert sorted(map(tuple, chosen.reshape(len(row), -1))) == sorted(
        map(tuple, told.numbers()[row][:, with_experts].reshape(len(row), -1))
    )
    weights = [grad for name, grad in found.items() if name.endswith(("gate.weight", "router.weight"))]
    assert len(weights) == len(with_experts)
    assert all(grad.abs().max() > 0 for grad in weights)
    # With the experts that it would choose itself, the model gives the results without replay.
    expected_T, expected = learned(sharded(plain), batch)
    model.zero_grad()
    same_T, same = learned(model, batch | {"sequences": batch["sequences"]._replace(routes=own)})
    torch.testing.assert_close(same_T, expected_T, rtol=0, atol=2e-5)
    assert relative_error(same, expected) < 1e-5


class Forced(nn.Module):
    """Router of Qwen 3 that takes given experts, written without replay."""

    def __init__(self, router: Any, routes: np.ndarray) -> None:
        """Share the weight of `router`. `routes` has the experts of each token, [tokens, experts of a token]."""
        super().__init__()
        self.weight, self.routes = router.weight, torch.from_numpy(routes).long()

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores of all experts, weights of the given ones, and the given ones."""
        scores = (hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T).softmax(-1)
        best = scores.gather(-1, self.routes)
        return scores, best / best.sum(-1, keepdim=True), self.routes


@pytest.mark.parametrize("recompute", [False, True])
def test_log_probs_and_gradients_equal_a_model_with_the_given_experts(recompute: bool) -> None:
    plain = tiny("qwen3_moe", norm_topk_prob=True).eval()
    sequences = tree()
    told = experts_of(noisy(plain), sequences)
    # A shared prefix is computed with the experts of the first sequence that has it.
    place_U, row_P = in_one_row([ids.numpy() for ids in sequences]).computed
    numbers = told.numbers()[place_U][row_P]
    model = sharded(plain, recompute=recompute)
    replay_routing(model)
    batch = packed_batch(sequences)
    logp_T, found = learned(model, batch | {"sequences": batch["sequences"]._replace(routes=told)})
    expected_T, total = [], dict[str, Tensor]()
    weight_T = torch.linspace(-1, 1, len(logp_T))
    offsets = np.cumsum([0, *map(len, sequences)])
    for number, (ids, (start, stop)) in enumerate(zip(sequences, pairwise(offsets), strict=True)):
        alone: Any = deepcopy(plain)
        for at, layer in enumerate(alone.model.layers):
            layer.mlp.gate = Forced(layer.mlp.gate, numbers[start:stop, at])
        rows = alone(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        expected_T.append(rows.gather(-1, ids[1:, None])[:, 0])
        (expected_T[-1] @ weight_T[start - number : stop - number - 1]).backward()
        for name, parameter in alone.named_parameters():
            total[name] = total.get(name, 0) + parameter.grad
    torch.testing.assert_close(logp_T, torch.cat(expected_T).detach(), rtol=0, atol=2e-5)
    assert relative_error(found, total) < 1e-5


def two_turns(engine: HfEngine, number: int, *, told: bool = True) -> Trajectory:
    """Return an episode of two responses. They report their experts unless `told` is False."""
    limits = EpisodeLimits(max_length=64, max_turns=2, max_new_tokens=8)
    transcript = Transcript(CharTokenizer(), limits)
    rng = np.random.default_rng(number // 4)
    for count in (7, 6):
        transcript.add_observation(rng.integers(0, 60, 4).tolist())
        said = engine.generate(list(transcript.tokens), count)
        transcript.add_response(said if told else replace(said, routes=None))
        transcript.turns.append(Turn("", "", float(number % 2), 0.0, 0.0, 0.0))
    return transcript.trajectory(Task(number, number // 4, number % 4, seed=number), Outcome.OK, 0)


@pytest.mark.slow
def test_replay_reduces_the_mismatch_of_engine_and_trainer(tmp_path: Path) -> None:
    plain = tiny("qwen3_moe", num_experts=32, num_local_experts=32, num_experts_per_tok=4)
    plain.save_pretrained(tmp_path / "moe")
    engine = HfEngine(deepcopy(plain).to(torch.bfloat16))
    made = [two_turns(engine, number) for number in range(8)]
    assert all(one.routes is not None and one.routes.fault(one.length) is None for one in made)
    gaps: list[float] = []
    for replay in (False, True):
        config = make_config(tmp_path / "moe", rollout={"routing_replay": replay}, algorithm={"objective": "grpo"})
        gaps.append(Trainer(config).train_step(make_shard(made))["mismatch_k3"])
    assert gaps[1] < gaps[0] / 2


def test_the_experts_of_earlier_tokens_stay_as_first_reported() -> None:
    """The engine reports the experts of its whole context again. Tokens that have experts already keep them."""
    first = Completion([5, 6], [0.0, 0.0], [VersionRun(0, 2)], "stop", None, Routes.of(np.full((3, 1, 2), 1)))
    limits = EpisodeLimits(max_length=64, max_turns=3, max_new_tokens=8)
    transcript = Transcript(CharTokenizer(), limits)
    transcript.add_observation([1, 2])
    transcript.add_response(first)
    transcript.turns.append(Turn("", "", 0.0, 0.0, 0.0, 0.0))
    transcript.add_observation([3])
    transcript.add_response(replace(first, routes=Routes.of(np.full((6, 1, 2), 300))))
    transcript.turns.append(Turn("", "", 0.0, 0.0, 0.0, 0.0))
    routes = transcript.trajectory(Task(0, 0, 0, seed=0), Outcome.OK, 0).routes
    assert routes is not None
    assert routes.numbers()[:, 0, 0].tolist() == [1, 1, 1, 300, 300, 300, -1]


def test_micro_batches_have_the_experts_of_their_tokens_as_far_as_they_are_known() -> None:
    shard = random_shard()
    given = [
        replace(one.trajectory, routes=Routes.of(np.full((one.trajectory.length, 2, 2), one.index)))
        if one.index % 3
        else one.trajectory
        for one in shard.samples
    ]
    for micro in pack(make_shard(given).samples, min_version=0, max_tokens=64):
        assert micro.routes is not None
        index_P = np.repeat(micro.index_S, np.diff(micro.offset_S))
        expected_P = np.where(index_P % 3, index_P, -1)
        assert (micro.routes.numbers()[:, 1, 0] == expected_P).all()
        keep_S = micro.index_S % 2 == 0
        if 0 < keep_S.sum() < len(keep_S):
            part = select_sequences(micro, keep_S).routes
            assert part is not None
            assert (part.numbers()[:, 0, 1] == expected_P[index_P % 2 == 0]).all()
    assert all(micro.routes is None for micro in pack(shard.samples, min_version=0, max_tokens=64))


def test_routes_of_parts_join_to_the_whole_whatever_their_width() -> None:
    """Routes with experts below 255 take 8 bits, others 16; parts without routes become −1."""
    rng = np.random.default_rng(0)
    narrow, wide = rng.integers(-1, 255, (5, 3, 2)), rng.integers(-1, 256, (4, 3, 2))
    wide[0] = 255
    parts = [Routes.of(narrow), None, Routes.of(wide)]
    assert [part and part.bits for part in parts] == [8, None, 16]
    whole = join_routes(parts, [6, 2, 4])
    assert whole is not None
    expected = np.concatenate([narrow, np.full((3, 3, 2), -1), wide])
    assert (whole.numbers() == expected).all()
    assert whole.tokens == 12
    assert (whole.part(4, 9).numbers() == expected[4:9]).all()
    assert whole.fault(12) is None
    assert all(one.fault(12) for one in (whole.part(0, 11), replace(whole, bits=7), replace(whole, layers=0)))
    assert join_routes([None, None], [1, 2]) is None


@pytest.mark.parametrize("kind", ["qwen3", "jetmoe"])
def test_a_model_without_known_routers_is_refused(kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tied=False)
    if kind != "qwen3":
        tiny(kind).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"rollout\.routing_replay: .* is known to choose experts"):
        Trainer(make_config(folder, rollout={"routing_replay": True}))


def test_unknown_ways_to_choose_experts_and_unknown_experts_are_refused() -> None:
    model: Any = tiny("qwen3_moe")
    kind = type(model.model.layers[0].mlp.gate)

    class Other(kind):
        # Chooses experts by sorting, which replay cannot intercept.
        def forward(self, hidden_states: Tensor) -> Any:
            scores = (hidden_states @ self.weight.T).softmax(-1)
            best = scores.sort(-1, descending=True)
            return scores, best.values[:, :2], best.indices[:, :2]

    for layer in model.model.layers:
        layer.mlp.gate.__class__ = Other
    with pytest.raises(ConfigError, match=r"rollout\.routing_replay: Other chooses its experts in a way"):
        replay_routing(sharded(model))
    told = sharded(tiny("qwen3_moe"))
    replay_routing(told)
    batch = packed_batch(tree())
    for layers, expert, each, message in (
        (1, 0, 2, "experts up to 0 in 1 layers; the policy has 2 layers of 4"),
        (2, 4, 2, "experts up to 4 in 2 layers; the policy has 2 layers of 4"),
        (2, 0, 1, "1 experts for each token; the policy takes 2"),
        (2, 0, 3, "3 experts for each token; the policy takes 2"),
    ):
        routes = Routes.of(np.full((len(batch["sequences"].input_P), layers, each), expert))
        with pytest.raises(ContractError, match=message):
            token_logprobs(told, **batch | {"sequences": batch["sequences"]._replace(routes=routes)})
