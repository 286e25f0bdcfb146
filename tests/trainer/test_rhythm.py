"""The policy's attention as rhythm observes it, against transformers' eager attention, and its effect on a step.

`algorithms.rhythm` explains WAAD and FAI (the signals), and local and global heads.

Shape legend: H = heads, L = tokens of a sequence, N = heads of all chosen layers, T = action tokens.
"""

from __future__ import annotations

from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from algorithms.rhythm import WINDOW, Rhythm
from flash.config.tree import Config, ModelConfig
from flash.errors import ConfigError
from flash.trainer.mesh import trainer_mesh
from flash.trainer.model.attention import ROWS_PER_BLOCK, attention_rows, blocks, make_scratch
from flash.trainer.model.logprobs import watch_attention
from flash.trainer.model.model import shard_model
from flash.trainer.objective import make_objective, resolve_method
from flash.trainer.packing import MicroBatch, pack
from flash.trainer.plan import plan_step
from flash.trainer.rhythm import RhythmPass, attention_maps, observe_responses, trained_responses
from flash.types import Shard, VersionRun
from tests.algorithms import rhythm_reference as reference
from tests.trainer.packed_cases import tiny
from tests.trainer.trainer_cases import (
    Trainer,
    aged_shard,
    gradient_of,
    make_config,
    make_shard,
    make_trajectory,
    relative_error,
    sampled_at,
    trainer_at,
)

# Models by a name for the test: the kind in transformers, and options of its configuration.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3, shared keys": ("qwen3", {"num_key_value_heads": 2}),
    "qwen3, some layers windowed": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_key_value_heads": 1},
    ),
    "llama": ("llama", {"num_key_value_heads": 2}),
    "mistral, windowed": ("mistral", {"sliding_window": 8, "num_key_value_heads": 2}),
    "gemma3, windowed": ("gemma3_text", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2}),
    "deepseek, unlike widths": ("deepseek_v3", {"first_k_dense_replace": 2}),
}
OPTIONS = Rhythm(nearest=2, farthest=12)
"""Rule with distances that fit into the short sequences of these tests."""
DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
TABLE = {"nearest": 2, "farthest": 12}
"""`OPTIONS` as a table of the configuration."""


def micro_batch(shard: Shard) -> MicroBatch:
    """Return the complete batch in one row."""
    (micro,) = pack(shard.samples, min_version=shard.min_version, max_tokens=100_000)
    return micro


def eager_maps(model: PreTrainedModel, micro: MicroBatch) -> list[list[Tensor]]:
    """Return attention maps, [H, L, L], by layer and sequence: each sequence alone, with eager attention."""
    model.eval().set_attn_implementation("eager")
    maps = []
    for start, stop in zip(micro.offset_S, micro.offset_S[1:], strict=False):
        ids = torch.from_numpy(micro.input_P[start:stop])
        with torch.no_grad():
            attentions = model(input_ids=ids[None], output_attentions=True).attentions
        assert attentions is not None
        maps.append([one[0] for one in attentions])
    return maps


class Recorder:
    """Watch of a forward pass that keeps the attention maps of all layers, computed with `attention_rows`."""

    def __init__(self, micro: MicroBatch) -> None:
        self._offset_S = micro.offset_S
        self.maps: dict[int, list[Tensor]] = {}
        """Map [H, L, L] of each sequence, by layer."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, scaling: float | None, sliding_window: int | None
    ) -> None:
        """Keep the maps of one layer. The model calls this once for each layer, in order (`AttentionWatch`)."""
        self.maps[len(self.maps)] = [
            self._map(query[0, :, start:stop], key[0, :, start:stop], scaling, sliding_window)
            for start, stop in zip(self._offset_S, self._offset_S[1:], strict=False)
        ]

    def _map(self, query: Tensor, key: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """Return the map of one sequence, which must be short enough for a single block of rows."""
        place_L = np.arange(query.shape[1])
        (block,) = blocks(place_L, window)
        rows = torch.from_numpy(place_L)
        scratch = make_scratch(query, [block])
        return attention_rows(query, key, rows, rows, scaling, window, ahead=block.ahead, scratch=scratch)


def prepared(model: PreTrainedModel, dtype: Literal["float32", "bfloat16"] = "float32") -> PreTrainedModel:
    """Return the model as the trainer prepares it, with forward passes in this dtype."""
    return shard_model(model, trainer_mesh("cpu"), ModelConfig(path="", dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_equal_eager_attention(kind: str) -> None:
    name, options = KINDS[kind]
    micro = micro_batch(aged_shard())
    expected = eager_maps(tiny(name, **options).double(), micro)
    recorder = Recorder(micro)
    with torch.no_grad():
        watch_attention(prepared(tiny(name, **options).double()), micro, recorder)
    assert sorted(recorder.maps) == [0, 1]
    for layer, found in recorder.maps.items():
        for one, maps in zip(found, expected, strict=True):
            assert one.shape == maps[layer].shape
            assert float((one - maps[layer]).abs().max()) < 1e-6


def seen(model: PreTrainedModel, micro: MicroBatch, options: Rhythm = OPTIONS) -> tuple[RhythmPass, Any]:
    """Return a new `RhythmPass` that has collected this micro-batch, and the `MicroSignals` of the micro-batch."""
    with torch.no_grad():
        rhythm = RhythmPass(options, model)
        watch = rhythm.watch(micro)
        watch_attention(model, micro, watch)
    return rhythm, rhythm.collect(watch)


@pytest.mark.parametrize("kind", KINDS)
def test_the_signals_and_multipliers_follow_from_eager_attention(kind: str) -> None:
    name, options = KINDS[kind]
    shard = aged_shard()
    micro = micro_batch(shard)
    maps = eager_maps(tiny(name, **options), micro)
    rhythm, found = seen(prepared(tiny(name, **options)), micro)
    *told_N, told_rows, _, _ = rhythm.tally
    span_N, count = np.zeros(len(told_N)), 0
    for sequence, (tokens, _, _, position_R) in zip(trained(micro), trained_responses(micro), strict=True):
        heads = torch.cat(maps[sequence]).double().tolist()
        rows = position_R.tolist()
        for head, one in enumerate(heads):
            span_N[head] += len(rows) * reference.head_span(one, rows)
            waad, fai = reference.waad(one, rows, WINDOW), reference.fai(one, rows, 2, 12)
            assert found.waad_NT[head, tokens].tolist() == pytest.approx(waad, rel=1e-4, abs=1e-5)
            assert found.influence_NT[head, tokens].tolist() == pytest.approx(fai, rel=1e-4, abs=1e-5)
        count += len(rows)
    assert told_N == pytest.approx(span_N.tolist(), rel=1e-4)
    assert told_rows == count

    order = sorted(range(len(span_N)), key=lambda head: span_N[head])
    take = max(round(0.3 * len(order)), 1)
    rhythm.choose_heads(trainer_mesh("cpu"))
    gamma_T = rhythm.multiply(np.ones(len(micro.target_T)), found, micro)
    for sequence, (tokens, _, _, position_R) in zip(trained(micro), trained_responses(micro), strict=True):
        heads = torch.cat(maps[sequence]).double()
        near, far = heads[order[:take]].mean(0), heads[order[-take:]].mean(0)
        expected = reference.gamma(OPTIONS, near.tolist(), far.tolist(), position_R.tolist())
        assert gamma_T[tokens].tolist() == pytest.approx(expected)


def trained(micro: MicroBatch) -> list[int]:
    """Return the indices of the sequences that have a token to train."""
    return np.unique(micro.sequence_T[micro.mask_T]).tolist()


def long_shard(actions: int) -> Shard:
    """Return a shard of a single sample with this many action tokens."""
    rng = np.random.default_rng(3)
    return make_shard([make_trajectory(0, 0, [VersionRun(0, actions)], rng, reward=1.0)])


def test_signals_in_half_precision_are_near_those_in_float32() -> None:
    name, kind = KINDS["llama"]
    (_, exact), (_, half) = (seen(prepared(tiny(name, **kind), dtype), micro_batch(aged_shard())) for dtype in DTYPES)
    for seen_NT, exact_NT in ((half.waad_NT, exact.waad_NT), (half.influence_NT, exact.influence_NT)):
        assert np.abs(seen_NT - exact_NT).mean() < 0.05 * np.abs(exact_NT).mean()


@pytest.mark.parametrize("kind", ["llama", "mistral, windowed"])
def test_a_response_of_several_blocks_has_the_signals_of_the_whole_map(kind: str) -> None:
    name, options = KINDS[kind]
    sizes = options | {"max_position_embeddings": 1024}
    micro = micro_batch(long_shard(2 * ROWS_PER_BLOCK + 40))
    (maps,) = eager_maps(tiny(name, **sizes), micro)
    rhythm, found = seen(prepared(tiny(name, **sizes)), micro, replace(OPTIONS, farthest=ROWS_PER_BLOCK + 10))
    ((_, _, _, position_R),) = trained_responses(micro)
    weights = torch.cat(maps)[:, torch.from_numpy(position_R)].double()
    distance = torch.from_numpy(position_R)[:, None] - torch.arange(weights.shape[-1])
    counted = (distance >= 2) & (distance <= ROWS_PER_BLOCK + 10)
    fai = ((weights * counted).sum(1) / counted.sum(0).clamp(min=1))[:, torch.from_numpy(position_R)]
    assert np.allclose(found.waad_NT, (weights * distance.clamp(max=WINDOW)).sum(-1).numpy(), rtol=1e-3, atol=1e-5)
    assert np.allclose(found.influence_NT, fai.numpy(), rtol=1e-3, atol=1e-6)
    assert np.allclose(rhythm.tally[:-3], (weights * distance).sum((1, 2)).numpy(), rtol=1e-3)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of torch, and look at the tensors that it returns."""
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, Tensor):
                Largest.numbers = max(Largest.numbers, one.numel())
        return made


def test_no_tensor_holds_more_than_a_block_of_rows_of_a_layer() -> None:
    micro = micro_batch(long_shard(8 * ROWS_PER_BLOCK))
    rhythm, _ = seen(prepared(tiny("llama", max_position_embeddings=2048)), micro)
    watch = rhythm.watch(micro)
    length, heads = len(micro.input_P), 4
    attention: Any = nn.Module()
    attention.layer_idx = 0
    compared = torch.randn(1, heads, length, 8)
    with Largest():
        watch(attention, compared, compared, None, None)
    assert ROWS_PER_BLOCK * (length - ROWS_PER_BLOCK) * heads < Largest.numbers <= ROWS_PER_BLOCK * length * heads


def trainer_with(model: Path, rhythm: dict[str, Any], **tables: Any) -> Trainer:
    """Return a new trainer at version 3, as `aged_shard` needs it, with these options of `algorithm.rhythm`."""
    algorithm = {"rhythm": rhythm} | tables.pop("algorithm", {})
    train = {"learning_rate": 1e-3, "max_grad_norm": 1e9, "max_tokens_per_microbatch": 64, "async_ratio": 2.0}
    trainer = Trainer(make_config(model, algorithm=algorithm, train=train | tables.pop("train", {}), **tables))
    trainer.version = 3
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [25, 40, 10_000])
def test_the_gradient_does_not_depend_on_the_cut_into_micro_batches(untied_model: Path, tokens: int) -> None:
    whole, cut = (
        trainer_with(untied_model, TABLE, train={"max_tokens_per_microbatch": budget}) for budget in (100, tokens)
    )
    expected, found = whole.train_step(aged_shard()), cut.train_step(aged_shard())
    assert relative_error(gradient_of(cut), gradient_of(whole)) < 1e-5
    # The number of shared tokens depends on the sequences that are in one micro-batch.
    expected["shared_token_share"] = found["shared_token_share"]
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_heads_are_chosen_over_the_whole_batch_whatever_its_minibatches(untied_model: Path) -> None:
    """Two minibatches need a first pass that observes attention and also gives log-probs."""
    one, two = (trainer_with(untied_model, TABLE, train={"minibatches": count}) for count in (1, 2))
    expected, found = one.train_step(aged_shard()), two.train_step(aged_shard())
    for name in ("rhythm_share", "rhythm_span_local", "rhythm_span_global", "advantage_abs_mean"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


def test_only_sequences_with_a_token_to_train_count(untied_model: Path) -> None:
    """Check that all others neither enter the spans by which heads are chosen, nor have their advantages multiplied."""
    shard = aged_shard()
    young = replace(shard, min_version=3, total_tokens=0, total_sequences=0)
    counts = [one.trajectory.trained_tokens(3) for one in shard.samples]
    young = replace(
        young,
        batch=[one.trajectory.batch_sample(3) for one in shard.samples],
        total_tokens=sum(counts),
        total_sequences=sum(count > 0 for count in counts),
    )
    micro = micro_batch(young)
    emptied = with_fields(micro, mask_T=micro.sequence_T != 0)
    model = prepared(tiny("llama"))
    rhythm, found = seen(model, emptied)
    assert rhythm.tally[-3] == (micro.sequence_T != 0).sum()
    rhythm.choose_heads(trainer_mesh("cpu"))
    gamma_T = rhythm.multiply(np.ones(len(micro.target_T)), found, emptied)
    assert (gamma_T[micro.sequence_T == 0] == 1).all()
    assert (gamma_T[micro.sequence_T != 0] > 1).any()
    metrics = trainer_with(untied_model, TABLE).train_step(young)
    assert 0 < metrics["rhythm_share"] < 1


@pytest.mark.parametrize("objective", ["decoupled_ppo", "reinforce_pp", "rloo", "m2po"])
def test_the_advantages_of_both_signs_are_multiplied(untied_model: Path, objective: str) -> None:
    """Check `top = 1`, so that all tokens with an FAI are anchors, whose advantages are multiplied by 1.5."""
    rhythm = {"credit": "global", "nearest": 1, "farthest": 50, "top": 1.0}
    facts, plain_facts = (
        advantages(trainer_at(3, untied_model, **tables), make_config(untied_model, **tables))
        for tables in (
            {"train": {"async_ratio": 2.0}, "algorithm": {"objective": objective} | more}
            for more in ({"rhythm": rhythm}, {})
        )
    )
    quotient, signs = facts[plain_facts != 0] / plain_facts[plain_facts != 0], np.sign(plain_facts[plain_facts != 0])
    assert quotient.tolist() == pytest.approx(np.where(quotient > 1.2, 1.5, 1.0).tolist())
    assert {*signs[quotient > 1.2].tolist()} == {-1.0, 1.0}


@pytest.mark.slow
def test_every_update_of_a_batch_uses_the_attention_at_the_start_of_the_step(untied_model: Path) -> None:
    found = []
    for passes in (1, 3):
        train = {"updates_per_batch": passes, "learning_rate": 1e-1}
        algorithm = {"objective": "decoupled_ppo", "options": {"proximal": "loglinear"}}
        trainer = trainer_with(untied_model, TABLE, algorithm=algorithm, train=train)
        found.append(trainer.train_step(aged_shard())["advantage_abs_mean"])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def advantages(trainer: Trainer, config: Config) -> Any:
    """Return the advantages of all tokens before the first update."""
    method = resolve_method(config, make_objective(config.algorithm))
    plan = plan_step(aged_shard(), config, method, trainer.version, trainer.mesh, share_rows=True)
    inputs = trainer.loss_inputs(plan)
    return np.concatenate([one.advantage_T.double().numpy() for one in inputs])


@pytest.mark.slow
def test_the_targets_of_the_critic_are_not_multiplied(untied_model: Path) -> None:
    algorithm = {"objective": "ppo"}
    ours = trainer_with(untied_model, TABLE, algorithm=algorithm, critic={})
    plain = Trainer(make_config(untied_model, algorithm=algorithm, critic={}, train={"async_ratio": 2.0}))
    plain.version = 3
    found, expected = ours.train_step(aged_shard()), plain.train_step(aged_shard())
    assert found["advantage_abs_mean"] > expected["advantage_abs_mean"]
    assert {name: found[name] for name in ("critic_loss", "return_mean")} == pytest.approx(
        {name: expected[name] for name in ("critic_loss", "return_mean")}, rel=1e-5
    )


def test_layers_that_are_not_attention_are_left_out() -> None:
    rhythm, _ = seen(prepared(tiny("lfm2_moe", layer_types=["full_attention", "conv"])), micro_batch(aged_shard()))
    rhythm.choose_heads(trainer_mesh("cpu"))
    assert {one.layer for one in rhythm.heads()} == {0}


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.rhythm: no layer of Lfm2\w+ is attention"):
        seen(prepared(tiny("lfm2_moe", layer_types=["conv", "conv"])), micro_batch(aged_shard()))


def test_one_head_cannot_be_of_both_kinds() -> None:
    with pytest.raises(ConfigError, match="have one head"):
        seen(
            prepared(tiny("llama", num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)),
            micro_batch(aged_shard()),
        )


def test_attention_that_does_not_know_its_layer_is_refused() -> None:
    model = prepared(tiny("llama"))
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "layer_idx")]
    for module in modules:
        module.layer_idx = None
    with pytest.raises(ConfigError, match=r"the attention of LlamaForCausalLM, LlamaAttention, does not report"):
        seen(model, micro_batch(aged_shard()))


def test_observed_responses_have_the_signals_heads_and_multipliers_of_a_step() -> None:
    name, kind = KINDS["qwen3, shared keys"]
    shard = aged_shard()
    whole = micro_batch(shard)
    rhythm, said = seen(prepared(tiny(name, **kind)), whole)
    rhythm.choose_heads(trainer_mesh("cpu"))
    waad_T, influence_T = rhythm.head_means(said)
    gamma_T = rhythm.multiply(np.ones(len(whole.target_T)), said, whole)

    parts = pack(shard.samples, min_version=shard.min_version, max_tokens=30)
    heads, found = observe_responses(prepared(tiny(name, **kind)), trainer_mesh("cpu"), parts, OPTIONS)
    assert [(one.layer, one.head, one.kind) for one in heads] == [
        (one.layer, one.head, one.kind) for one in rhythm.heads()
    ]
    assert [one.span for one in heads] == pytest.approx([one.span for one in rhythm.heads()], rel=1e-5)
    assert sorted(one.sample for one in found) == sorted(set(whole.index_T[whole.mask_T].tolist()))
    for one in found:
        here = whole.index_T == one.sample
        assert one.signals.waad_R.tolist() == pytest.approx(waad_T[here].tolist(), rel=1e-4, abs=1e-5)
        assert one.signals.influence_R.tolist() == pytest.approx(influence_T[here].tolist(), rel=1e-4, abs=1e-5)
        assert one.multiplier_R.tolist() == pytest.approx(gamma_T[here].tolist())


def test_entropies_are_of_the_distributions_at_the_temperature_of_sampling() -> None:
    micro = micro_batch(sampled_at(long_shard(20), 0.7))
    model = tiny("llama")
    (_, (found,)) = observe_responses(prepared(tiny("llama")), trainer_mesh("cpu"), [micro], OPTIONS)
    with torch.no_grad():
        logp = (model(input_ids=torch.from_numpy(micro.input_P)[None]).logits[0] / 0.7).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)[found.signals.position_R - 1]
    assert found.signals.entropy_R.tolist() == pytest.approx(entropy.tolist(), rel=1e-4)


@pytest.mark.parametrize("kind", ["qwen3, shared keys", "mistral, windowed"])
@pytest.mark.parametrize("part", [slice(0, 12), slice(130, 170)])
def test_the_maps_are_the_means_of_eager_maps_over_the_heads_of_a_kind(kind: str, part: slice) -> None:
    name, options = KINDS[kind]
    sizes = options | {"max_position_embeddings": 512}
    micro = micro_batch(long_shard(170))
    (layers,) = eager_maps(tiny(name, **sizes), micro)
    model = prepared(tiny(name, **sizes))
    heads, _ = observe_responses(model, trainer_mesh("cpu"), [micro], OPTIONS)
    found = attention_maps(model, micro, heads, part)
    for place, wanted in enumerate(("local", "global")):
        chosen = [layers[one.layer][one.head].tolist() for one in heads if one.kind == wanted]
        expected = np.array(reference.mean_map(chosen))[part, part]
        assert np.abs(found[place] - expected).max() < 1e-5
