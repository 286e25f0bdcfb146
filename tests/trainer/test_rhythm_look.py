"""Looking at responses: the signals are those of training, the maps those of eager attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from flash.trainer.mesh import trainer_mesh
from flash.trainer.packing import pack
from flash.trainer.rhythm import attention_maps, observe_responses
from tests.algorithms import rhythm_reference as reference
from tests.trainer.packed_cases import tiny
from tests.trainer.test_rhythm import KINDS, OPTIONS, eager_maps, long_shard, micro_batch, prepared, seen
from tests.trainer.trainer_cases import aged_shard, sampled_at


def test_signals_heads_and_multipliers_are_those_of_a_step() -> None:
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


def test_entropies_are_those_of_the_distributions_that_the_tokens_were_drawn_from() -> None:
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
    heads, _ = observe_responses(model, trainer_mesh("cpu"), [micro], replace(OPTIONS, local_heads=0.5))
    found = attention_maps(model, micro, heads, part)
    for place, wanted in enumerate(("local", "global")):
        chosen = [layers[one.layer][one.head].tolist() for one in heads if one.kind == wanted]
        expected = np.array(reference.mean_map(chosen))[part, part]
        assert np.abs(found[place] - expected).max() < 1e-5
