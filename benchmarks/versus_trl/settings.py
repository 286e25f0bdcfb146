"""Settings of TRL that correspond to a Flash configuration.

`benchmarks.versus_trl.runner` passes them to TRL. Each value that both systems have is the value of the configuration.
All other settings of TRL have their default, except where a comment gives the reason for another value.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from algorithms.objectives.clipped import Grpo
from flash.config.learning import TrainConfig
from flash.config.tree import Config

LOSS_TYPES = {"token_mean": "dapo", "seq_mean_token_mean": "grpo"}
"""Aggregation of Flash → `loss_type` of TRL with the same denominator: the tokens of the whole batch, or first the
tokens of each sequence and then the sequences."""


class TrlChoices(msgspec.Struct, frozen=True):
    """Choices that a user of TRL makes for speed."""

    micro_batches: int = 1
    """Parts in which a batch goes through the forward and backward pass."""
    continuous_batching: bool = False
    """Generate with transformers' continuous batching instead of one padded batch."""


def grpo_arguments(config: Config, choices: TrlChoices) -> dict[str, Any]:
    """Return the keyword arguments of TRL's `GRPOConfig`.

    Raises:
        ValueError: the configuration asks for something that has no exact counterpart in TRL.
    """
    train, rollout, algorithm = config.train, config.rollout, config.algorithm
    if algorithm.objective != "grpo" or algorithm.advantage not in (None, "group"):
        raise ValueError(f"objective {algorithm.objective} with advantage {algorithm.advantage} is not TRL's GRPO")
    if train.minibatches != 1 or train.decay != "constant":
        raise ValueError("train.minibatches and train.decay have no counterpart in the comparison")
    objective = Grpo(**algorithm.options)
    if train.batch_size % (choices.micro_batches * rollout.group_size):
        raise ValueError(f"a batch of {train.batch_size} cannot be cut into {choices.micro_batches} parts of groups")
    return {
        "max_steps": config.run.steps,
        "seed": config.run.seed,
        # The prompts in the order in which Flash issues them.
        "shuffle_dataset": False,
        "per_device_train_batch_size": train.batch_size // choices.micro_batches,
        "gradient_accumulation_steps": choices.micro_batches,
        # TRL's steps are forward and backward passes here.
        "steps_per_generation": choices.micro_batches,
        "num_generations": rollout.group_size,
        "num_iterations": 1,
        "max_completion_length": rollout.max_new_tokens,
        # Plain sampling: no filter that would change the distribution.
        "temperature": rollout.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "use_vllm": False,
        "use_transformers_continuous_batching": choices.continuous_batching,
        # Of the machine's memory, for the KV cache; TRL's half of it would leave too little for the rest.
        "transformers_continuous_batching_config": {"max_memory_percent": 0.1},
        "beta": 0.0,
        "loss_type": LOSS_TYPES[algorithm.aggregation or objective.aggregation],
        "importance_sampling_level": "token",
        "epsilon": objective.clip_low,
        "epsilon_high": objective.clip_high,
        "scale_rewards": "group",
        # Flash trains on truncated answers too.
        "mask_truncated_completions": False,
        # TRL divides by the sample deviation of a group of G, Flash by the population's, so that TRL's gradient is
        # sqrt((G − 1) / G) times Flash's. AdamW does not see the factor; the clipping sees it, and so it is scaled too.
        "max_grad_norm": train.max_grad_norm * math.sqrt((rollout.group_size - 1) / rollout.group_size),
        "use_cpu": True,
        # TRL's defaults are bfloat16 and recomputed activations: the one as in the configuration, the other is slower.
        "bf16": config.model.dtype == "bfloat16",
        "gradient_checkpointing": False,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def adamw_arguments(train: TrainConfig) -> dict[str, Any]:
    """Return the keyword arguments of `torch.optim.AdamW`. Fused is TRL's own default, and the fastest."""
    return {"lr": train.learning_rate, "betas": train.betas, "weight_decay": train.weight_decay, "fused": True}
