"""Random packed tokens, every objective with and without options, and a step that does what the trainer does."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from algorithms import OBJECTIVES
from algorithms.base import Aggregation, Objective, PackedTokens
from algorithms.corrections import Correction, correct
from algorithms.sequences import token_weights
from tests.algorithms.reference import Row

LENGTHS = (7, 1, 12, 5, 9, 3, 16, 2, 8)
"""Tokens of each sequence of `random_tokens`."""
ALL_MASKED = 3
"""The sequence without an unmasked token."""

# The options are chosen so that the bounds of the objective lie within the ratios of `random_tokens`.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "grpo": [{}, {"clip_low": 0.1, "clip_high": 0.4}],
    "dapo": [{}],
    "dr_grpo": [{}, {"clip_low": 0.3, "clip_high": 0.1}],
    "ppo": [{}, {"dual_clip": 1.3}],
    "asyppo": [
        {},
        {"mask_lowest": 0.5, "clip_high": 0.1},
        {"decoupled": True, "weight_cap": 1.2, "filter_highest": 0.4},
    ],
    "decoupled_ppo": [{}, {"clip_low": 0.1, "weight_cap": 1.2}, {"weight_cap": 1.2, "cap": "clamp"}],
    "tis": [{}, {"clip_high": 0.28, "cap": 1.1}],
    "tis_reinforce": [{}, {"low": 0.8, "high": 1.25}],
    "topr": [{}, {"low": 0.5, "high": 1.5, "split": "advantage"}],
    "topr_weighted": [{}, {"positive": 0.5, "negative": 1.5, "low": 0.2, "high": 2.0}],
    "cispo": [{}, {"clip_low": 0.2, "clip_high": 0.3}],
    "gspo": [{}, {"clip_low": 0.05, "clip_high": 0.1}],
    "reinforce_pp": [{}, {"clip_low": 0.05, "clip_high": 0.05}],
    "rloo": [{}],
    "kimi15": [{}, {"tau": 2.0}, {"penalty": "token"}],
    "aipo": [{}, {"cap": 1.1}],
    "m2po": [{}, {"tau": 0.1}],
}
"""Options with which each objective is tested, by its name in the configuration."""


def objective_class(name: str) -> Any:
    """Return the class of the objective with this name in the configuration."""
    module, kind = OBJECTIVES[name].split(":")
    return getattr(importlib.import_module(module), kind)


CASES: list[tuple[str, Objective]] = [
    (name, objective_class(name)(**options)) for name, several in OPTIONS.items() for options in several
]
"""Name and objective, for each entry of `OPTIONS`."""
DEFAULTS: list[Objective] = [objective_class(name)() for name in OPTIONS]
"""Every objective with its default options."""


def random_tokens(dtype: torch.dtype = torch.float64, seed: int = 4) -> PackedTokens:
    """Return ragged sequences of off-policy tokens. Advantages differ from token to token, as those of a critic do.

    About three of four tokens are unmasked; the sequence `ALL_MASKED` has no unmasked token, and sequence 1 is a single
    unmasked token.
    """
    generator = torch.Generator().manual_seed(seed)
    count, sequences = sum(LENGTHS), len(LENGTHS)

    def normal(scale: float, size: int = count) -> Tensor:
        # Return normal numbers with this standard deviation. They are float64, so that all dtypes get the same numbers.
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    sequence_T = torch.repeat_interleave(torch.arange(sequences), torch.tensor(LENGTHS))
    logp_T = -2 + normal(0.5)
    proximal_T = logp_T + normal(0.2)
    mask_T = torch.rand(count, generator=generator) < 0.75
    mask_T[sequence_T == 1] = True
    mask_T[sequence_T == ALL_MASKED] = False
    return PackedTokens(
        logp_T=logp_T.to(dtype),
        behaviour_T=(proximal_T + normal(0.3)).to(dtype),
        proximal_T=proximal_T.to(dtype),
        advantage_T=(normal(1.0, sequences)[sequence_T] + normal(0.3)).to(dtype),
        reward_T=torch.randint(-1, 3, (sequences,), generator=generator)[sequence_T].to(dtype),
        mask_T=mask_T,
        sequence_T=sequence_T,
        sequences=sequences,
        deviation_T=normal(0.3).abs().to(dtype),
    )


def on_policy(tokens: PackedTokens) -> PackedTokens:
    """Return the tokens as if the trained policy had sampled them, and were the proximal policy, too."""
    return tokens._replace(behaviour_T=tokens.logp_T, proximal_T=tokens.logp_T)


def rows_of(tokens: PackedTokens) -> list[Row]:
    """Return the tokens in the form that the references take, with Python floats."""
    logp = tokens.logp_T.tolist()
    columns = (tokens.behaviour_T, tokens.proximal_T, tokens.advantage_T, tokens.reward_T, tokens.deviation_T)
    return [
        Row(*row)
        for row in zip(
            logp, logp, *(c.tolist() for c in columns), tokens.mask_T.tolist(), tokens.sequence_T.tolist(), strict=True
        )
    ]


def filled(tokens: PackedTokens, garbage: float) -> PackedTokens:
    """Return the tokens with the number `garbage` in every float tensor where a token is masked."""
    fields = ("logp_T", "behaviour_T", "proximal_T", "advantage_T", "reward_T", "deviation_T")
    return tokens._replace(**{name: getattr(tokens, name).where(tokens.mask_T, garbage) for name in fields})


def with_limit(objective: Objective, parts: Sequence[PackedTokens]) -> list[PackedTokens]:
    """Return the parts of a minibatch with the objective's `limit` and `bounds`, computed from all parts together.

    The minibatch is the whole batch here.
    """
    if objective.critics > 1:
        bounds = objective.bounds(torch.cat([part.deviation_T[part.mask_T] for part in parts]))
        parts = [part._replace(bounds=bounds) for part in parts]
    if not objective.limits:
        return list(parts)
    log_ratio_N = torch.cat([(part.logp_T - part.behaviour_T)[part.mask_T] for part in parts])
    advantage_N = torch.cat([part.advantage_T[part.mask_T] for part in parts])
    limit = objective.limit(log_ratio_N, advantage_N)
    return [part._replace(limit=limit) for part in parts]


def take(tokens: PackedTokens, order: Sequence[int]) -> tuple[PackedTokens, Tensor]:
    """Pack the sequences with the indices `order` again, in this order. Also returns the former place of each token."""
    places = [torch.nonzero(tokens.sequence_T == one).flatten() for one in order]
    place_T = torch.cat(places)
    columns = {name: value[place_T] for name, value in tokens._asdict().items() if isinstance(value, Tensor)}
    lengths = torch.tensor([len(one) for one in places])
    columns["sequence_T"] = torch.repeat_interleave(torch.arange(len(order)), lengths)
    return PackedTokens(**columns, sequences=len(order), limit=tokens.limit, bounds=tokens.bounds), place_T


def step(
    objective: Objective,
    parts: Sequence[PackedTokens],
    aggregation: Aggregation | None = None,
    corrections: Sequence[Correction] = (),
) -> tuple[float, list[Tensor]]:
    """Return the loss of a minibatch that was cut into micro-batches, and the gradient of each part's log-probs.

    Computes as the trainer does: masked slots are emptied before the objective and after it, rejected tokens leave the
    mask, and the denominators count the whole minibatch.

    Args:
        objective: the objective under test.
        parts: the micro-batches.
        aggregation: way to sum the token losses; None: the objective's own.
        corrections: corrections by which tokens are weighted or rejected.
    """
    corrected = [correct(corrections, part) for part in parts]
    parts = [part._replace(mask_T=part.mask_T & one.accepted_T) for part, one in zip(parts, corrected, strict=True)]
    total_tokens = sum(int(part.mask_T.sum()) for part in parts)
    total_sequences = sum(len(part.sequence_T[part.mask_T].unique()) for part in parts)
    loss, gradients = 0.0, list[Tensor]()
    for part, one in zip(with_limit(objective, parts), corrected, strict=True):
        leaf_T = part.logp_T.clone().requires_grad_()
        emptied = filled(part._replace(logp_T=leaf_T), 0.0)
        weight_T = token_weights(
            aggregation or objective.aggregation,
            part.mask_T,
            part.sequence_T,
            part.sequences,
            total_tokens=total_tokens,
            total_sequences=total_sequences,
            constant=16.0,  # any number: it scales the loss of the aggregation `constant`
        )
        loss_T = objective(emptied).loss_T.where(part.mask_T, 0.0) * one.weight_T.where(part.mask_T, 0.0)
        share = (loss_T * weight_T).sum()
        share.backward()
        assert leaf_T.grad is not None
        loss += share.item()
        gradients.append(leaf_T.grad)
    return loss, gradients


def is_finite(loss: float, gradients: Sequence[Tensor]) -> bool:
    """Return True if a result of `step` has no number that is infinite or NaN."""
    return math.isfinite(loss) and all(bool(one.isfinite().all()) for one in gradients)
