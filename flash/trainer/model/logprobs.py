"""What the policy says of given tokens: their log-probs and the entropies of the distributions they were drawn from.

Shape legend: P = tokens of the packed sequences, T = predicted tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from flash.errors import ConfigError
from flash.trainer.model.output_layer import KeptSets, OutputLayer, Selection
from flash.trainer.model.packed import AttentionWatch, class_name, packed_row
from flash.trainer.model.prefixes import Int64Array, PackedSequences

Float64Array = npt.NDArray[np.float64]


class TokenLogprobs(NamedTuple):
    """What the policy says of the action tokens of a micro-batch."""

    logp_T: Tensor
    """Log-prob as it was sampled, with gradient."""
    entropy_T: Tensor
    """Entropy of the distribution it was drawn from in nats, with gradient only where asked for."""


def token_logprobs(
    model: PreTrainedModel,
    sequences: PackedSequences,
    keep_T: Int64Array,
    target_T: Int64Array,
    *,
    temperature_T: Float64Array | None = None,
    kept: KeptSets | None = None,
    entropy_gradient: bool = False,
    watch: AttentionWatch | None = None,
) -> TokenLogprobs:
    """Log-prob and entropy of each target under softmax(logits / temperature), in float32; None: at 1.

    The softmax is over the tokens that are `kept`; None: over all.

    `keep_T` and `target_T` are as in `flash.trainer.packing.MicroBatch`, which is one of `sequences`; the model comes
    from `shard_model`. Only the positions in `keep_T` go through the output layer, and never all of them at once. A
    collective where the model is sharded. `watch` is told of every layer's attention.

    Raises:
        ConfigError: the model changes what comes out of its output layer, for example by a cap or a scale.
    """
    row = packed_row(sequences, model.device).watched(watch)
    layer = model.get_output_embeddings()
    assert isinstance(layer, OutputLayer), "prepare the model with shard_model"
    scale_T = np.ones(len(target_T)) if temperature_T is None else temperature_T
    target, scale = (torch.from_numpy(each).to(model.device) for each in (target_T, scale_T))
    selection = Selection(target, scale, entropy_gradient, None if kept is None else kept.to(model.device))
    rows = row.layout.row_P[torch.from_numpy(keep_T).to(model.device)]
    with layer.selecting(selection):
        output = model(
            input_ids=row.input_U.unsqueeze(0),
            position_ids=row.position_U.unsqueeze(0),
            use_cache=False,
            logits_to_keep=rows,
            packed_layout=row.layout,
        )
    # The very tensor: whatever a model does to logits, it would have done to log-probs here.
    if selection.answer is None or output.logits is not selection.answer:
        raise ConfigError(
            f"model.path: {class_name(model)} caps, scales or otherwise changes the logits after its output layer, "
            "which training does not support; choose another model"
        )
    logp_T, entropy_T = output.logits[0].unbind(-1)
    return TokenLogprobs(logp_T, entropy_T if entropy_gradient else entropy_T.detach())
