"""On-policy distillation: the policy samples, and learns what a teacher would have said in its place.

Per token, the reverse KL divergence of the policy π from the teacher π_T, at the token that was sampled (Agarwal et
al. 2023, "GKD", arXiv 2306.13649, with λ = 1 and the reverse KL; Gu et al. 2023, "MiniLLM", arXiv 2306.08543, without
its long-term part; Thinking Machines Lab 2025, "On-Policy Distillation"):

    A_t = A_t of the rewards − β (log π(y_t | y_<t) − log π_T(y_t | y_<t))

What a token costs is its own alone: nothing is discounted back to earlier ones. Under the objective's importance ratio
r = π / π_behaviour, E[−r A_t ∇ log π] is then β times the gradient of Σ_t KL(π(· | y_<t) ‖ π_T(· | y_<t)) at the
prefixes y_<t that were sampled, whatever version sampled them: log π is that of the weights that the loss is taken at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from torch import Tensor


class Teacher(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that the policy learns to speak as, at what it samples itself."""

    path: str | None = None
    """Folder or hub id, with the policy's tokenizer: the trainer holds it."""
    url: str | None = None
    """Of a vLLM server that holds it, `http://HOST:PORT`."""
    coefficient: Annotated[float, Meta(gt=0)] = 1.0
    """β, the factor of log π − log π_teacher."""
    reward: bool = False
    """Whether the advantages of the rewards count beside it."""


def distilled(advantage_T: Tensor, logp_T: Tensor, teacher_T: Tensor, coefficient: float) -> Tensor:
    """[T], no gradient: the advantages less what the tokens are beyond the teacher."""
    return advantage_T - coefficient * (logp_T.detach() - teacher_T)
