"""The proximal policy without a forward pass of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def loglinear(logp_T: Tensor, behaviour_T: Tensor, age_T: Tensor) -> Tensor:
    """[T], detached: a point between behaviour and now, the further along the older the token (AReaL; A-3PO,
    arXiv 2512.06547).

        proximal = behaviour + a (logp − behaviour),   a = (v_proximal − v_behaviour) / (v_θ − v_behaviour)

    The policy in training is one version beyond the one at the start of the step, v_θ = v_proximal + 1, so with
    `age_T` = v_proximal − v_behaviour: a = age / (age + 1). A token of the current version has proximal = behaviour.
    """
    age_T = age_T.to(behaviour_T.dtype)
    return behaviour_T + age_T / (age_T + 1) * (logp_T.detach() - behaviour_T)
