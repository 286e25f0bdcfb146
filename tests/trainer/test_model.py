from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from flash.config import ModelConfig
from flash.errors import ConfigError
from flash.trainer.model import (
    CHUNK,
    canary_logprobs,
    load_model,
    named_full_tensors,
    shard_model,
    token_logprobs,
    trainer_mesh,
)
from tests.trainer.trainer_cases import VOCABULARY, reference_model, relative_error, write_model

LENGTHS = (9, 3, 17, 2, 6)


def sharded(folder: Path, dtype: Any = "float32") -> PreTrainedModel:
    return shard_model(load_model(ModelConfig(path=str(folder), dtype=dtype)), trainer_mesh("cpu"), dtype)


def packed_batch(seed: int = 0) -> dict[str, Any]:
    """Sequences of LENGTHS; every token but the first of each is predicted."""
    ids = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))
    offset = torch.tensor([0, *LENGTHS]).cumsum(0)
    keep = torch.cat([torch.arange(int(a), int(b) - 1) for a, b in pairwise(offset)])
    return {
        "input_P": ids,
        "position_P": torch.cat([torch.arange(length) for length in LENGTHS]),
        "offset_S": offset,
        "keep_T": keep,
        "target_T": ids[keep + 1],
        "longest": max(LENGTHS),
    }


def one_by_one(model: PreTrainedModel, batch: dict[str, Any], temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies from a separate forward pass per sequence."""
    logps, entropies = [], []
    for ids in batch["input_P"].split(LENGTHS):
        logits = model(input_ids=ids[None]).logits[0, :-1] / temperature
        logps.append(logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0])
        entropies.append(torch.distributions.Categorical(logits=logits).entropy())
    return torch.cat(logps), torch.cat(entropies)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_log_probs_equal_an_unpacked_eager_forward(model: Path, temperature: float) -> None:
    batch = packed_batch()
    result = token_logprobs(sharded(model), **batch, temperature=temperature)
    with torch.no_grad():
        logp_T, entropy_T = one_by_one(reference_model(model), batch, temperature)
    torch.testing.assert_close(result.logp_T.double(), logp_T, rtol=0, atol=5e-6)
    torch.testing.assert_close(result.entropy_T.double(), entropy_T, rtol=0, atol=5e-6)
    assert result.logp_T.dtype == torch.float32


def test_packed_gradients_equal_an_unpacked_eager_backward(model: Path) -> None:
    batch = packed_batch()
    weight_T = torch.randn(len(batch["keep_T"]), generator=torch.Generator().manual_seed(1))
    ours = sharded(model)
    (token_logprobs(ours, **batch, temperature=0.8).logp_T * weight_T).sum().backward()
    reference = reference_model(model)
    (one_by_one(reference, batch, 0.8)[0] * weight_T).sum().backward()
    found = {name: value.grad.full_tensor() for name, value in ours.named_parameters()}
    expected = {name: value.grad for name, value in reference.named_parameters()}
    assert relative_error(found, expected) < 1e-5


def test_a_sliding_window_sees_only_its_window(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tied=False, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    batch = packed_batch()
    result = token_logprobs(sharded(folder), **batch, temperature=1.0)
    with torch.no_grad():
        logp_T, _ = one_by_one(reference_model(folder), batch, 1.0)
    torch.testing.assert_close(result.logp_T.double(), logp_T, rtol=0, atol=5e-6)


def test_more_rows_than_a_chunk_give_the_same_log_probs(untied_model: Path) -> None:
    model = sharded(untied_model)
    count = CHUNK + 5
    ids = torch.arange(count) % VOCABULARY
    batch = {
        "input_P": ids,
        "position_P": torch.zeros(count, dtype=torch.int64),
        "offset_S": torch.arange(count + 1),
        "target_T": ids,
        "longest": 1,
    }
    whole = token_logprobs(model, **batch, keep_T=torch.arange(count), temperature=1.0).logp_T
    last = token_logprobs(model, **batch | {"target_T": ids[-7:]}, keep_T=torch.arange(count)[-7:], temperature=1.0)
    torch.testing.assert_close(whole[-7:], last.logp_T)


def test_half_precision_runs_close_to_full_and_keeps_float32_weights(model: Path) -> None:
    batch = packed_batch()
    half = sharded(model, "bfloat16")
    result = token_logprobs(half, **batch, temperature=1.0)
    result.logp_T.sum().backward()
    full = token_logprobs(sharded(model), **batch, temperature=1.0)
    assert result.logp_T.dtype == torch.float32
    assert 0 < (result.logp_T - full.logp_T).abs().mean() < 0.1
    assert all(value.dtype == value.grad.dtype == torch.float32 for value in half.parameters())


def test_full_tensors_have_hugging_face_names_without_the_tied_copy(tied_model: Path, untied_model: Path) -> None:
    for folder, tied in ((tied_model, True), (untied_model, False)):
        expected = dict(load_model(ModelConfig(path=str(folder))).state_dict())
        if tied:
            del expected["lm_head.weight"]
        found = dict(named_full_tensors(sharded(folder)))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_canary_is_the_plain_log_prob_of_each_next_token(model: Path) -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.no_grad():
        logits = reference_model(model)(input_ids=torch.tensor([tokens])).logits[0]
    expected = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert canary_logprobs(sharded(model), tokens) == pytest.approx(expected.tolist(), abs=5e-6)


def test_the_canary_follows_the_weights_although_it_has_no_backward(model: Path) -> None:
    ours, reference = sharded(model), reference_model(model)
    # What an optimizer holds on to.
    parameters = [*ours.parameters(), *reference.parameters()]
    before = canary_logprobs(ours, [1, 2, 3, 4])
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(1.1)
        logits = reference(input_ids=torch.tensor([[1, 2, 3, 4]])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor([[2], [3], [4]]))[:, 0]
    after = canary_logprobs(ours, [1, 2, 3, 4])
    assert after == pytest.approx(expected.tolist(), abs=5e-6)
    assert after != before


def test_a_folder_that_holds_no_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_model(ModelConfig(path=str(tmp_path)))


def test_a_model_without_the_attention_interface_is_refused(tied_model: Path) -> None:
    model = load_model(ModelConfig(path=str(tied_model)))
    model._supports_attention_backend = False
    with pytest.raises(ConfigError, match="attention interface"):
        shard_model(model, trainer_mesh("cpu"), "float32")
