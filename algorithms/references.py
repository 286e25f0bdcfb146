"""Comparisons with another policy: KL to a reference, distillation from a teacher, and an interpolated proximal policy.

`flash.trainer.objective` calls these functions for each micro-batch. For a KL in the reward, `flash.trainer.plan` calls
`kl`.

KL divergence from a reference policy is estimated at the sampled tokens (Schulman 2020, "Approximating KL divergence").
With δ = log π − log π_ref at a token that π sampled:

| estimator | value | its mean under π | expected gradient as a loss |
|---|---|---|---|
| k1 | δ | KL(π ‖ π_ref) | **zero**: E[∇ log π] = 0, so it adds noise and no pull at all |
| k2 | δ² / 2 | about KL, second order in δ | ∇ KL(π ‖ π_ref), exactly |
| k3 | exp(−δ) − 1 + δ | KL(π ‖ π_ref) | ∇ KL(π_ref ‖ π), equal to ∇ KL(π ‖ π_ref) to first order in δ |

An estimator with the right value may have the wrong gradient. k1 is right when it is subtracted from the *reward*,
where the policy gradient supplies ∇ log π; in the loss it is refused. On samples of an older policy all three
estimators are biased by the distance to that policy.

On-policy distillation: the policy samples, and a teacher π_T scores each sampled token (`distilled`).

Shape legend: T = packed action tokens of a micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
"""Estimator of a KL divergence; the table above has the formulas."""


class Kl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pull of the policy towards a reference policy."""

    estimator: Estimator = "k3"
    """Estimator of the [KL](algorithms.md#kl-to-a-reference-algorithmkl). k1: the log-ratio δ, refused in the loss. k2:
    half the square of δ. k3: the estimator of GRPO, which is never negative."""
    coefficient: Annotated[float, Meta(gt=0)]
    """β, the factor of the estimate."""
    place: Literal["loss", "reward"] = "loss"
    """loss: add the estimate to the token's loss. reward: subtract it from the token's reward."""
    reference: str | None = None
    """Folder of the reference model, or its id on the Hugging Face hub. None: the policy at the start of the run."""
    refresh: Annotated[int, Meta(gt=0)] | None = None
    """Steps after which the current policy becomes the reference (arXiv 2505.24864). None: never."""


class Teacher(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Teacher of on-policy distillation: a model that scores the tokens that the policy samples."""

    path: str | None = None
    """Folder, or id on the Hugging Face hub, of a model with the policy's tokenizer, which the trainer holds in memory.
    None: `url` must be set."""
    url: str | None = None
    """Address of a vLLM server that serves the teacher, `http://HOST:PORT`. None: `path` must be set."""
    coefficient: Annotated[float, Meta(gt=0)] = 1.0
    """β, the factor of log π − log π_teacher."""
    reward: bool = False
    """True: the teacher's term is added to the advantages from the rewards. False: the rewards are not used, and the
    advantage is the teacher's term alone."""


def kl(estimator: Estimator, logp_T: Tensor, reference_T: Tensor) -> Tensor:
    """Return [T]: the KL estimate at each token. The gradient flows through `logp_T`.

    δ = `logp_T` − `reference_T`. In k3, `expm1` computes exp(−δ) − 1, because the plain difference would lose digits of
    a small δ.
    """
    delta_T = logp_T - reference_T
    if estimator == "k1":
        return delta_T
    if estimator == "k2":
        return delta_T.square() / 2
    return (-delta_T).expm1() + delta_T


def distilled(advantage_T: Tensor, logp_T: Tensor, teacher_T: Tensor, coefficient: float) -> Tensor:
    """Return [T], no gradient: the advantage A_t + D_t, with the added term D_t = −β (log π − log π_T).

    A_t is the advantage from the rewards, which is 0 if `Teacher.reward` is false. β is `coefficient`, and `logp_T` is
    log π under the weights at which the loss is computed. The trainer calls this before the objective
    (`flash.trainer.objective`).

    The rule is on-policy distillation (Agarwal et al. 2023, "GKD", arXiv 2306.13649, with λ = 1 and the reverse KL; Gu
    et al. 2023, "MiniLLM", arXiv 2306.08543, without its long-term part; Thinking Machines Lab 2025, "On-Policy
    Distillation").

    D_t uses only the log-probs of this token, not of later tokens. So it estimates the KL divergence at each
    token, given the prefix y_<t of sampled tokens: with the objective's importance ratio r = π / π_behaviour,
    E[−r D_t ∇ log π] is β times the gradient of Σ_t KL(π(· | y_<t) ‖ π_T(· | y_<t)). This holds whichever version
    sampled the prefixes.
    """
    return advantage_T - coefficient * (logp_T.detach() - teacher_T)


def loglinear(logp_T: Tensor, behaviour_T: Tensor, age_T: Tensor) -> Tensor:
    """Return [T], no gradient: log-probs of a proximal policy, computed without a forward pass of that policy.

        proximal = behaviour + a (logp − behaviour),   a = (v_proximal − v_behaviour) / (v_θ − v_behaviour)

    (AReaL; A-3PO, arXiv 2512.06547.) The proximal policy lies between the policy that sampled the token and the current
    policy. The older the token, the nearer it is to the current policy. The policy in training is one version ahead of
    the policy at the start of the step, v_θ = v_proximal + 1. So with `age_T` = v_proximal − v_behaviour in versions,
    a = age / (age + 1). For a token of the current version, proximal = behaviour.
    """
    age_T = age_T.to(behaviour_T.dtype)
    return behaviour_T + age_T / (age_T + 1) * (logp_T.detach() - behaviour_T)
