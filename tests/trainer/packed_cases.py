"""Cases for the tests of the policy: packed batches of random tokens, and the results of plain Hugging Face models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PhiConfig, PhiForCausalLM, PreTrainedModel

from flash.config.tree import ModelConfig
from flash.trainer.mesh import trainer_mesh
from flash.trainer.model.logprobs import token_logprobs
from flash.trainer.model.model import load_model, shard_model
from flash.trainer.packing import in_one_row
from tests.trainer.trainer_cases import VOCABULARY

LENGTHS = (9, 3, 17, 2, 6)
"""Numbers of tokens of the sequences of `random_sequences`."""
EVEN_LENGTHS = (7, 7, 7)
"""Lengths that need no padding: attention computes on the packed row directly."""


def write_biased_model(folder: Path) -> Path:
    """Write a random Phi of two layers, whose output layer has a bias."""
    torch.manual_seed(7)
    config = PhiConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    model = PhiForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(folder)
    return folder


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "pad_token_id": 0,
}
"""Options of small models; a configuration gets the options that it has."""

# Options of models whose layers are partly linear attention, and partly Mamba.
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64, "lm_head_multiplier": 0.5},
    "falcon_mamba": {"state_size": 4},
    "gemma2": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0},
    "gemma4_text": {
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {1: {"head_dim": 16}},
        "final_logit_softcapping": 4.0,
    },
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "dots1": {"n_shared_experts": 1},
    "granite": {"logits_scaling": 8.0},
    "granitemoe": {"logits_scaling": 8.0},
    "granitemoeshared": {"logits_scaling": 8.0, "shared_intermediate_size": 16},
    "granitemoehybrid": _MAMBA | {"layer_types": ["linear_attention", "full_attention"], "logits_scaling": 8.0},
    "hyperclovax": {"logits_scaling": 0.2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "mimo_v2_flash": {"num_key_value_heads": 2, "layer_types": ["full_attention", "sliding_attention"]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 16,
    },
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
}
"""Options by kind of model. They keep the model small, or switch on all features of the kind."""


def tiny(kind: str, **options: Any) -> PreTrainedModel:
    """Return a random model of this kind. Its weights are larger than usual, so that every error is visible."""
    known = CONFIG_MAPPING[kind]()
    sizes = {name: value for name, value in SIZES.items() if name in known.to_dict() or hasattr(known, name)}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes | options), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model


def sharded(folder: Path, dtype: Any = "float32") -> PreTrainedModel:
    """Return the model in a folder, prepared and sharded as the trainer does it, with forward passes in this dtype."""
    config = ModelConfig(path=str(folder), dtype=dtype)
    return shard_model(load_model(config), trainer_mesh("cpu"), config)


def random_sequences(vocabulary: int = VOCABULARY, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    """Return token ids of sequences of these lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocabulary, (length,), generator=generator) for length in lengths]


def packed_batch(sequences: Sequence[Tensor], *temperatures: float) -> dict[str, Any]:
    """Pack sequences, and return the arguments of `token_logprobs` by name.

    Every token but the first of a sequence is predicted. The sequences have the temperatures in turn (`in_turn`).
    """
    packed = in_one_row([ids.numpy() for ids in sequences])
    before_T = np.concatenate([np.arange(start, stop - 1) for start, stop in pairwise(packed.offset_S)])
    target_T = np.concatenate([ids[1:].numpy() for ids in sequences])
    temperature_T = np.repeat(in_turn(temperatures, len(sequences)), [len(ids) - 1 for ids in sequences])
    return {"sequences": packed, "before_T": before_T, "target_T": target_T, "temperature_T": temperature_T}


def in_turn(temperatures: Sequence[float], sequences: int) -> list[float]:
    """Return a temperature for each of `sequences` sequences: the given ones again and again, or 1 if none is given."""
    return list(islice(cycle(temperatures or (1.0,)), sequences))


def one_by_one(model: PreTrainedModel, sequences: Sequence[Tensor], *temperatures: float) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of all predicted tokens, from a separate forward pass per sequence.

    The arguments are as for `packed_batch`, and so is the order of the results.
    """
    logps, entropies = [], []
    for ids, temperature in zip(sequences, in_turn(temperatures, len(sequences)), strict=True):
        log_share = (model(input_ids=ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
        logps.append(log_share.gather(-1, ids[1:, None])[:, 0])
        entropies.append(-(log_share.exp() * log_share).sum(-1))
    return torch.cat(logps), torch.cat(entropies)


def weighted(logp_T: Tensor, entropy_T: Tensor, sequences: Sequence[int]) -> Tensor:
    """Return a loss of the log-probs and entropies of these members of `random_sequences`, with a weight per token.

    `sequences` are the indices of the sequences. A token has the same weight whichever other sequences there are.
    """
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(2, length - 1, generator=generator) for length in LENGTHS]
    weight_2T = torch.cat([weights[index] for index in sequences], dim=1).to(logp_T.dtype)
    return logp_T @ weight_2T[0] + entropy_T @ weight_2T[1]


def gradient(model: PreTrainedModel, sequences: Sequence[int], scale: float = 1.0) -> dict[str, Tensor]:
    """Return the gradient of `weighted` · scale for these members of `random_sequences`, by parameter name.

    FSDP takes the mean over ranks, so `scale` is the number of ranks if the sum is wanted.
    """
    ids = random_sequences()
    batch = packed_batch([ids[index] for index in sequences], 0.8)
    result = token_logprobs(model, **batch, entropy_gradient=True)
    (weighted(*result, sequences) * scale).backward()
    grads: dict[str, Any] = {name: value.grad for name, value in model.named_parameters()}
    return {name: grad.full_tensor() for name, grad in grads.items()}
