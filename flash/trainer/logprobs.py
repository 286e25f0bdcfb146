"""What the policy says of given tokens: their log-probs and the entropies of the distributions they were drawn from.

Shape legend: P = packed tokens, T = predicted tokens, S = sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flash.errors import ConfigError
from flash.trainer.model import AttentionWatch, class_name, packed_layout, reshard
from flash.trainer.output_layer import OutputLayer, Selection


class TokenLogprobs(NamedTuple):
    """What the policy says of the action tokens of a micro-batch."""

    logp_T: Tensor
    """Log-prob at the sampling temperature, with gradient."""
    entropy_T: Tensor
    """Entropy of the whole distribution in nats, with gradient only where asked for."""


def token_logprobs(
    model: PreTrainedModel,
    *,
    input_P: Tensor,
    position_P: Tensor,
    offset_S: Tensor,
    keep_T: Tensor,
    target_T: Tensor,
    longest: int,
    temperature: float,
    entropy_gradient: bool = False,
    watch: AttentionWatch | None = None,
) -> TokenLogprobs:
    """Log-prob and entropy of each target under softmax(logits / temperature), in float32.

    The fields are those of `flash.trainer.packing.MicroBatch`, on the model's device; the model comes from
    `shard_model`. Only the positions in `keep_T` go through the output layer, and never all of them at once. A
    collective where the model is sharded. `watch` is told of every layer's attention.

    Raises:
        ConfigError: the model changes what comes out of its output layer, for example by a cap or a scale.
    """
    layer = model.get_output_embeddings()
    assert isinstance(layer, OutputLayer), "prepare the model with shard_model"
    selection = Selection(target_T, temperature, entropy_gradient)
    with layer.selecting(selection):
        output = model(
            input_ids=input_P.unsqueeze(0),
            position_ids=position_P.unsqueeze(0),
            use_cache=False,
            logits_to_keep=keep_T,
            packed_layout=packed_layout(position_P, offset_S, longest)._replace(watch=watch),
        )
    # The very tensor: whatever a model does to logits, it would have done to log-probs here.
    if selection.answer is None or output.logits is not selection.answer:
        raise ConfigError(
            f"model.path: {class_name(model)} caps, scales or otherwise changes the logits after its output layer, "
            "which training does not support; choose another model"
        )
    logp_T, entropy_T = output.logits[0].unbind(-1)
    return TokenLogprobs(logp_T, entropy_T if entropy_gradient else entropy_T.detach())


@torch.no_grad()
def canary_logprobs(model: PreTrainedModel, token_ids: Sequence[int]) -> list[float]:
    """Log-prob of token i + 1 given tokens 0…i, at temperature 1. Every rank calls it and gets the same answer."""
    count = len(token_ids)
    input_P = torch.tensor(token_ids, dtype=torch.int64, device=model.device)
    position_P = torch.arange(count, device=model.device)
    result = token_logprobs(
        model,
        input_P=input_P,
        position_P=position_P,
        offset_S=torch.tensor([0, count], device=model.device),
        keep_T=position_P[:-1],
        target_T=input_P[1:],
        longest=count,
        temperature=1.0,
    )
    reshard(model)
    return result.logp_T.tolist()
