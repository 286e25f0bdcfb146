"""Supervised steps against cross entropy in float64, on a plain Hugging Face model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from flash.config.check_learning import supervised
from flash.trainer.model.packing_check import use_own_attention
from flash.types import Shard
from tests.trainer.trainer_cases import Trainer, gradient_of, make_config, random_shard, reference_model, relative_error


def padded_loss(model: PreTrainedModel, shard: Shard) -> torch.Tensor:
    """Return the loss that other libraries compute: rows padded on the right, labels of -100 at untrained tokens."""
    rows = [sample.trajectory for sample in shard.samples]
    longest = max(row.length for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for place, row in enumerate(rows):
        tokens, mask = torch.tensor(row.tokens().tolist()), torch.from_numpy(row.action_mask())
        ids[place, : row.length] = tokens
        labels[place, : row.length][mask] = tokens[mask]
    logits = model(input_ids=ids).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_gradient_and_the_loss_equal_cross_entropy(model: Path, minibatches: int) -> None:
    train = {"max_tokens_per_microbatch": 40, "minibatches": minibatches}
    trainer = Trainer(supervised(make_config(model, sft={"data": "rows.jsonl"}, train=train)))
    shard, reference = random_shard(), reference_model(model)
    loss = padded_loss(reference, shard)
    assert trainer.mean_loss(shard) == pytest.approx(loss.item(), rel=1e-5)
    metrics = trainer.train_step(shard)
    if minibatches > 1:
        return  # the second update has other weights, so the loss differs
    loss.backward()
    expected = {name: value.grad for name, value in reference.named_parameters()}
    assert relative_error(gradient_of(trainer), expected) < 1e-5
    assert metrics["nll_mean"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_a_model_with_its_own_attention_has_the_same_loss(model: Path) -> None:
    trainer = Trainer(supervised(make_config(model, sft={"data": "rows.jsonl"})))
    shard = random_shard()
    together = trainer.mean_loss(shard)
    use_own_attention(trainer.model)
    trainer._share_rows = False  # pyright: ignore[reportPrivateUsage]
    assert trainer.mean_loss(shard) == pytest.approx(together, rel=1e-5)
