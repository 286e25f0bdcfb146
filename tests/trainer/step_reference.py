"""Reference for a complete training step: loops over samples and tokens in float64, on a plain Hugging Face model.

A test makes the trained tokens of a batch with `tokens_of`, and their loss with `reference_loss` and a `Recipe`. The
recipe has a function that sets the tokens' advantages (*credit*), and one that sets their other factors (*adjust*).
Both get the shard, which is the whole batch, and its trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from flash.types import Shard, Trajectory
from tests.trainer.critic_cases import Reference


@dataclass
class Token:
    """A trained token and the quantities of its loss."""

    sample: int
    """Index of its sample in the batch."""
    place: int
    """Index among the action tokens of its sample."""
    turn: int
    """Number of its turn (response) in the sample."""
    age: int
    """Age in versions."""
    behaviour: float
    """Log-prob under the policy that sampled the token."""
    logp: torch.Tensor
    """Log-prob under the trained policy, with gradient."""
    entropy: torch.Tensor
    """Entropy of the policy's distribution, with gradient."""
    reference: float = 0.0
    """Log-prob under the reference or the teacher; 0 without one."""
    value: float = 0.0
    """Critic's value of the state before the token; 0 without a critic."""
    penalty: float = 0.0
    """Penalty that is subtracted from its reward."""
    advantage: float = 0.0
    correction: float = 1.0
    """Product of the factors of the corrections."""
    rejected: bool = False
    """True if a correction rejected the token, which then counts as if it had not been sampled."""
    staleness: float = 1.0
    """Weight of the token's sample by its age."""


@dataclass
class Recipe:
    """Parts of the step under test."""

    credit: Callable[[Shard, list[Token]], None]
    """Function that sets the tokens' advantages."""
    adjust: Callable[[Shard, list[Token]], None] = lambda shard, tokens: None
    """Function that sets the tokens' corrections and weights."""
    kl: Callable[[torch.Tensor, float], torch.Tensor] | None = None
    """Function from the log-probs under policy and reference to the KL term of a token's loss; None: no such term."""
    entropy_bonus: float = 0.0
    """Factor of the entropy, which is subtracted from the loss."""
    scale: Callable[[Shard, list[Token], Token], float] = lambda shard, tokens, token: 1 / len(tokens)
    """Function for the weight of a token's loss. Its second argument is the list of tokens that were not rejected."""


def tokens_of(model: PreTrainedModel, reference: PreTrainedModel | None, shard: Shard) -> list[Token]:
    """Return every trained token of the batch, in the order of the samples.

    `reference` is the model for `Token.reference`; None leaves it 0.
    """
    found: list[Token] = []
    for sample in shard.samples:
        trajectory = sample.trajectory
        positions = np.flatnonzero(trajectory.action_mask())
        rows = distributions(model, trajectory, positions)
        with torch.no_grad():
            frozen = None if reference is None else distributions(reference, trajectory, positions)
        ids = trajectory.tokens()
        versions, behaviour = trajectory.action_versions().tolist(), trajectory.behaviour().tolist()
        for place, (at, version) in enumerate(zip(positions, versions, strict=True)):
            if version < shard.min_version:
                continue
            found.append(
                Token(
                    sample=sample.index,
                    place=place,
                    turn=sum(at >= span.stop for span in trajectory.action_spans),
                    age=shard.step - version,
                    behaviour=behaviour[place],
                    logp=rows[place][ids[at]],
                    entropy=-(rows[place].exp() * rows[place]).sum(),
                    reference=0.0 if frozen is None else frozen[place][ids[at]].item(),
                )
            )
    return found


def distributions(model: PreTrainedModel, trajectory: Trajectory, positions: np.ndarray) -> torch.Tensor:
    """Return log-probs, [A, V], of all tokens of the vocabulary (V) at the positions of the action tokens (A)."""
    ids = torch.tensor(trajectory.tokens().tolist())
    return model(input_ids=ids[None]).logits[0][positions - 1].log_softmax(-1)


def reference_loss(tokens: list[Token], shard: Shard, recipe: Recipe) -> torch.Tensor:
    """Return the loss of the batch: GRPO's clipped surrogate, with everything that the recipe adds to it."""
    recipe.credit(shard, tokens)
    recipe.adjust(shard, tokens)
    total = torch.zeros((), dtype=torch.float64)
    tokens = [token for token in tokens if not token.rejected]
    for token in tokens:
        ratio = (token.logp - token.behaviour).exp()
        surrogate = torch.minimum(ratio * token.advantage, ratio.clamp(0.8, 1.2) * token.advantage)
        loss = -surrogate * token.correction * token.staleness
        if recipe.kl is not None:
            loss = loss + recipe.kl(token.logp, token.reference)
        loss = loss - recipe.entropy_bonus * token.entropy
        total = total + loss * recipe.scale(shard, tokens, token)
    return total


def sequences(tokens: Sequence[Token]) -> list[list[Token]]:
    """Return the trained tokens, sample by sample."""
    return [[token for token in tokens if token.sample == index] for index in sorted({one.sample for one in tokens})]


def group_credit(shard: Shard, tokens: list[Token]) -> None:
    """Set each advantage to (R − mean) / std over the group."""
    for token in tokens:
        entry = shard.batch[token.sample]
        members = [other.reward for other in shard.batch if other.group_id == entry.group_id]
        mean = sum(members) / len(members)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in members) / len(members))
        token.advantage = (entry.reward - mean) / std if std > 0 else 0.0


def whitened_credit(beta: float) -> Callable[[Shard, list[Token]], None]:
    """Return credit: R minus β · (sum of the k1 estimates of this and all later tokens), whitened over the batch.

    This is the estimator `batch` with a KL in the reward.
    """

    def credit(shard: Shard, tokens: list[Token]) -> None:
        # Set the advantage of each token.
        for sequence in sequences(tokens):
            for place, token in enumerate(sequence):
                later = sum(one.logp.item() - one.reference for one in sequence[place:])
                token.advantage = shard.batch[token.sample].reward - beta * later
        mean = sum(token.advantage for token in tokens) / len(tokens)
        std = math.sqrt(sum((token.advantage - mean) ** 2 for token in tokens) / len(tokens))
        for token in tokens:
            token.advantage = (token.advantage - mean) / std

    return credit


Adjust = Callable[[Shard, list[Token]], None]
"""Function that changes the trained tokens of a batch."""


def teacher_credit(beta: float, rewards: Adjust = lambda shard, tokens: None) -> Adjust:
    """Return credit: the advantage by rewards, minus β · (log-prob − the teacher's log-prob).

    `rewards` sets the advantage by rewards; by default it is 0.
    """

    def credit(shard: Shard, tokens: list[Token]) -> None:
        # Set the advantage of each token.
        rewards(shard, tokens)
        for token in tokens:
            token.advantage -= beta * (token.logp.item() - token.reference)

    return credit


def weight(token: Token) -> float:
    """Return the ratio of the trained policy to the policy that sampled the token."""
    return math.exp(token.logp.item() - token.behaviour)


def by_token(keep: Callable[[float], float]) -> Adjust:
    """Return an adjustment that corrects each token by `keep(weight)`."""

    def adjust(shard: Shard, tokens: list[Token]) -> None:
        for token in tokens:
            token.correction = keep(weight(token))

    return adjust


def by_sequence(low: float, high: float, *, mean: bool) -> Adjust:
    """Return an adjustment that rejects each sequence whose ratio lies outside of [low, high].

    The ratio is the geometric mean of the tokens' weights if `mean` is set, else their product.
    """

    def adjust(shard: Shard, tokens: list[Token]) -> None:
        for sequence in sequences(tokens):
            total = sum(math.log(weight(token)) for token in sequence) / (len(sequence) if mean else 1)
            for token in sequence:
                token.correction = float(low <= math.exp(total) <= high)
                token.rejected = token.correction == 0

    return adjust


def by_age(decay: float) -> Adjust:
    """Return an adjustment that weights each sample by decay^(age of its oldest token), divided by the mean weight."""

    def adjust(shard: Shard, tokens: list[Token]) -> None:
        ages = {sequence[0].sample: max(token.age for token in sequence) for sequence in sequences(tokens)}
        mean = sum(decay**age for age in ages.values()) / len(ages)
        for token in tokens:
            token.staleness = decay ** ages[token.sample] / mean

    return adjust


def gae_credit(gamma: float, lam: float) -> Callable[[Shard, list[Token]], None]:
    """Return credit: generalised advantage estimation, Σ (γλ)^k δ over each sequence.

    A turn's reward is at its last trained token. After the last token of a sequence, V is 0.
    """

    def credit(shard: Shard, tokens: list[Token]) -> None:
        # Go from the last token of a sequence to the first.
        for sequence in sequences(tokens):
            following, next_value = 0.0, 0.0
            for token, after in zip(reversed(sequence), [None, *reversed(sequence[1:])], strict=True):
                ends = after is None or after.turn != token.turn
                reward = shard.batch[token.sample].turns[token.turn] if ends else 0.0
                delta = reward - token.penalty + gamma * next_value - token.value
                following = delta + gamma * lam * following
                token.advantage, next_value = following, token.value

    return credit


def by_sample(shard: Shard, tokens: list[Token]) -> list[list[Token]]:
    """Return the trained tokens of each sample of the shard; empty for a sample without any, unlike `sequences`."""
    return [[token for token in tokens if token.sample == sample.index] for sample in shard.samples]


def naive_values(model: Reference, trajectory: Any) -> list[float]:
    """Return V of the state before each action token of a trajectory."""
    ids = torch.tensor(trajectory.tokens().tolist())
    with torch.no_grad():
        hidden = model.backbone(input_ids=ids[None]).last_hidden_state[0]
        return [
            float(hidden[at - 1] @ model.weight[0] + model.bias[0]) for at in np.flatnonzero(trajectory.action_mask())
        ]
