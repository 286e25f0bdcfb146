"""Reference of every objective: one token at a time, in Python floats, with gradients by hand.

`test_objectives.py` compares each objective of `algorithms` with its function in `REFERENCES`. The class of the
objective has the formula and the source. Here `o` is the objective, whose fields are its options, `rows` are all tokens
of a micro-batch, and `t` is the index of the token whose loss is wanted. r is the ratio π_θ / π_behaviour of a token
unless a function says otherwise; A is the advantage. *Flat* means that a clip has removed the gradient.

`logp` has a gradient; `fixed` is the same number where the formula has a stop-gradient. They are equal except
for a finite difference, which moves `logp` alone. Nothing here is shared with `algorithms`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """Numbers of a single token."""

    logp: float
    """Log-prob under the trained policy, where the formula has a gradient."""
    fixed: float
    """Log-prob under the trained policy, where the formula has a stop-gradient."""
    behaviour: float
    """Log-prob under the policy that sampled the token."""
    proximal: float
    """Log-prob under the proximal policy."""
    advantage: float
    reward: float
    deviation: float
    """σ: standard deviation of the critics' values before the token."""
    mask: bool
    """True if the token is trained."""
    sequence: int
    """Index of the token's sequence."""


@dataclass
class Expected:
    """Expected output of an objective for one token."""

    loss: float
    gradient: dict[int, float]
    """Derivative of this token's loss by the logp of each token, by token."""
    stats: dict[str, float] = field(default_factory=dict)
    """Statistics of this token, by name."""


Reference = Callable[[Any, Sequence[Row], int], Expected]
"""Function from an objective, the tokens of a micro-batch, and the index of a token to the token's expected output."""


def clip(x: float, low: float, high: float) -> float:
    """Return x, moved into [low, high]."""
    return max(low, min(x, high))


def mates(rows: Sequence[Row], t: int) -> list[int]:
    """Return the indices of the unmasked tokens of the sequence of token `t`, itself included if it is unmasked."""
    return [u for u, row in enumerate(rows) if row.mask and row.sequence == rows[t].sequence]


def surrogate(ratio: float, a: float, o: Any) -> tuple[float, bool]:
    """Return min(r A, clip(r) A) with the clip range of objective `o`, and True if it is flat there."""
    value = min(ratio * a, clip(ratio, 1 - o.clip_low, 1 + o.clip_high) * a)
    return value, (a > 0 and ratio > 1 + o.clip_high) or (a < 0 and ratio < 1 - o.clip_low)


def clipped_to_behaviour(o: Any, rows: Sequence[Row], t: int) -> Expected:
    """Return the clipped surrogate of r: the formula of grpo, dapo, dr_grpo and reinforce_pp."""
    row = rows[t]
    ratio = math.exp(row.logp - row.behaviour)
    value, flat = surrogate(ratio, row.advantage, o)
    return Expected(-value, {t: 0.0 if flat else -ratio * row.advantage}, {"ratio": ratio, "clipped": float(flat)})


def ppo(o: Any, rows: Sequence[Row], t: int) -> Expected:
    """Return the clipped surrogate of r, which with A < 0 is at least `dual_clip` · A."""
    row = rows[t]
    ratio, a = math.exp(row.logp - row.behaviour), row.advantage
    value, flat = surrogate(ratio, a, o)
    if o.dual_clip is not None and a < 0 and value < o.dual_clip * a:
        value, flat = o.dual_clip * a, True
    return Expected(-value, {t: 0.0 if flat else -ratio * a}, {"ratio": ratio, "clipped": float(flat)})


def decoupled_ppo(o: Any, rows: Sequence[Row], t: int) -> Expected:
    """Return w times the clipped surrogate of r = π_θ / π_proximal, with w = π_proximal / π_behaviour.

    A w above `weight_cap` becomes 0, or `weight_cap` if `cap` is not "mask".
    """
    row = rows[t]
    ratio, weight = math.exp(row.logp - row.proximal), math.exp(row.proximal - row.behaviour)
    if weight > o.weight_cap:
        weight = 0.0 if o.cap == "mask" else o.weight_cap
    value, flat = surrogate(ratio, row.advantage, o)
    gradient = 0.0 if flat else -weight * ratio * row.advantage
    return Expected(-weight * value, {t: gradient}, {"ratio": ratio, "clipped": float(flat), "weight": weight})


def asyppo(o: Any, rows: Sequence[Row], t: int) -> Expected:
    """Return the surrogate of either form, or 0 for a token on which the critics disagree too little.

    The rank of the token's σ among all trained tokens decides, and also decides about its bonus.
    """
    row = rows[t]
    centre = row.proximal if o.decoupled else row.behaviour
    ratio, weight = math.exp(row.logp - centre), math.exp(centre - row.behaviour)
    if o.decoupled and weight > o.weight_cap:
        weight = 0.0 if o.cap == "mask" else o.weight_cap
    value, flat = surrogate(ratio, row.advantage, o)
    trained = [one.deviation for one in rows if one.mask]
    below = sum(other < row.deviation for other in trained)
    above = sum(other > row.deviation for other in trained)
    learned = 0.0 if below < math.floor(o.mask_lowest * len(trained) + 1e-9) else 1.0
    bonus = 0.0 if above < math.floor(o.filter_highest * len(trained) + 1e-9) else 1.0
    gradient = 0.0 if flat else -learned * weight * ratio * row.advantage
    stats = {"ratio": ratio, "clipped": float(flat), "weight": weight}
    stats |= {"deviation": row.deviation, "learned": learned, "bonus": bonus}
    return Expected(-learned * weight * value, {t: gradient}, stats)


def tis(o: Any, rows: Sequence[Row], t: int) -> Expected:
    """Return min(w, cap) times the clipped surrogate of r = π_θ / π_proximal, with w = π_proximal / π_behaviour."""
    row = rows[t]
    ratio, weight = math.exp(row.logp - row.proximal), min(math.exp(row.proximal - row.behaviour), o.cap)
    value, flat = surrogate(ratio, row.advantage, o)
    gradient = 0.0 if flat else -weight * ratio * row.advantage
    return Expected(-weight * value, {t: gradient}, {"ratio": ratio, "clipped": float(flat), "weight": weight})


def weighted_reinforce(row: Row, t: int, weight: float, ratio: float, cut: bool) -> Expected:
    """Return weight · A · log π with a weight that has no gradient. `cut` is True if a bound has changed the weight."""
    stats = {"ratio": ratio, "clipped": float(cut), "weight": weight}
    return Expected(-weight * row.advantage * row.logp, {t: -weight * row.advantage}, stats)


def tis_reinforce(o: Any, rows: Sequence[Row], t: int) -> Expected:
    """Return A · log π, weighted by r within [low, high]."""
    ratio = math.exp(rows[t].fixed - rows[t].behaviour)
    return weighted_reinforce(rows[t], t, clip(ratio, o.low, o.high), ratio, not o.low <= ratio <= o.high)


def cispo(o: Any, rows: Sequence[Row], t: int) -> Expected:
    """Return A · log π, weighted by r within [1 − clip_low, 1 + clip_high]."""
    ratio = math.exp(rows[t].fixed - rows[t].behaviour)
    low, high = 1 - o.clip_low, 1 + o.clip_high
    return weighted_reinforce(rows[t], t, clip(ratio, low, high), ratio, not low <= ratio <= high)


def aipo(o: Any, rows: Sequence[Row], t: int) -> Expected:
    """Return A · log π, weighted by min(r, cap)."""
    ratio = math.exp(rows[t].fixed - rows[t].behaviour)
    return weighted_reinforce(rows[t], t, min(ratio, o.cap), ratio, ratio > o.cap)


def topr(o: Any, rows: Sequence[Row], t: int) -> Expected:
    """Return A · log π, weighted by 1 in a good sequence, else by the product of r over it, within [low, high]."""
    row = rows[t]
    product = 1.0
    for u in mates(rows, t):
        product *= math.exp(rows[u].fixed) / math.exp(rows[u].behaviour)
    good = (row.reward if o.split == "reward" else row.advantage) > 0
    weight = 1.0 if good else clip(product, o.low, o.high)
    return weighted_reinforce(row, t, weight, product, not good and not o.low <= product <= o.high)


def topr_weighted(o: Any, rows: Sequence[Row], t: int) -> Expected:
    """Return `topr`, times the option `positive` in a good sequence and times `negative` in a bad one."""
    plain = topr(o, rows, t)
    good = (rows[t].reward if o.split == "reward" else rows[t].advantage) > 0
    factor = o.positive if good else o.negative
    weight = factor * plain.stats["weight"]
    return weighted_reinforce(rows[t], t, weight, plain.stats["ratio"], bool(plain.stats["clipped"]))


def gspo(o: Any, rows: Sequence[Row], t: int) -> Expected:
    """Return GSPO-token: the clipped surrogate of the sequence's geometric mean of r.

    The mean has no gradient. It is multiplied by exp(logp − fixed) of the token, which is 1 and has the gradient.
    """
    row, group = rows[t], mates(rows, t)
    mean = math.fsum(rows[u].fixed - rows[u].behaviour for u in group) / len(group)
    ratio = math.exp(mean) * math.exp(row.logp) / math.exp(row.fixed)
    value, flat = surrogate(ratio, row.advantage, o)
    return Expected(-value, {t: 0.0 if flat else -ratio * row.advantage}, {"ratio": ratio, "clipped": float(flat)})


def rloo(o: Any, rows: Sequence[Row], t: int) -> Expected:
    """Return A · log π."""
    return Expected(-rows[t].advantage * rows[t].logp, {t: -rows[t].advantage})


def kimi15(o: Any, rows: Sequence[Row], t: int) -> Expected:
    """Return A · log π − τ/2 · (squared log-ratio of the response, or of the token if `penalty` is "token").

    Each token of a response gets an equal share of the response's square, and so has a gradient for all its tokens.
    """
    row, group = rows[t], mates(rows, t) if o.penalty == "sequence" else [t]
    gap = math.fsum(rows[u].logp - rows[u].behaviour for u in group)
    slope: float = o.tau * gap / len(group)
    gradient = dict.fromkeys(group, slope)
    gradient[t] -= row.advantage
    loss = o.tau / 2 * gap**2 / len(group) - row.advantage * row.logp
    return Expected(loss, gradient, {"ratio": math.exp(row.logp - row.behaviour)})


def m2po(o: Any, rows: Sequence[Row], t: int) -> Expected:
    """Return r A, or 0 for a token that `m2po_dropped` names."""
    row = rows[t]
    ratio = math.exp(row.logp - row.behaviour)
    dropped = t in m2po_dropped(o.tau, rows)
    loss = 0.0 if dropped else -ratio * row.advantage
    return Expected(loss, {t: loss}, {"ratio": ratio, "clipped": float(dropped)})


def m2po_dropped(tau: float, rows: Sequence[Row]) -> set[int]:
    """Return the indices of the dropped tokens, chosen one after the other.

    Only tokens whose ratio the objective pushes further from 1 can be dropped. The token with the largest squared
    log-ratio goes first, until the mean of the others is at most `tau`.
    """
    charge = {}
    for t, row in enumerate(rows):
        ratio = math.exp(row.fixed - row.behaviour)
        if row.mask and ((row.advantage > 0 and ratio > 1) or (row.advantage < 0 and ratio < 1)):
            charge[t] = (row.fixed - row.behaviour) ** 2
    dropped: set[int] = set()
    while charge and sum(charge.values()) / len(charge) > tau:
        largest = max(charge, key=lambda t: charge[t])
        dropped.add(largest)
        del charge[largest]
    return dropped


REFERENCES: dict[str, Reference] = {
    "grpo": clipped_to_behaviour,
    "dapo": clipped_to_behaviour,
    "dr_grpo": clipped_to_behaviour,
    "ppo": ppo,
    "asyppo": asyppo,
    "decoupled_ppo": decoupled_ppo,
    "tis": tis,
    "tis_reinforce": tis_reinforce,
    "topr": topr,
    "topr_weighted": topr_weighted,
    "cispo": cispo,
    "gspo": gspo,
    "reinforce_pp": clipped_to_behaviour,
    "rloo": rloo,
    "kimi15": kimi15,
    "aipo": aipo,
    "m2po": m2po,
}
"""Reference by the objective's name in the configuration."""
