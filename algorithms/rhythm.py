"""Multipliers of advantages from the rhythm of attention (Li et al. 2025, arXiv 2510.13554).

The span of an attention head is the mean distance that it looks back. Two averages of attention maps, over local heads
with a short span (A_loc) and over global heads with a long span (A_glob), give two signals for each token of a response
(the action tokens of one sequence, in one or several turns). WAAD (windowed average attention distance) is the distance
that the model looked back at the token. FAI (future attention influence) is the attention that later tokens pay to it.

    WAAD_t = Σ_{s ≤ t} A_loc[t, s] · min(t − s, W)        Δ_t = |WAAD_t − WAAD_{t+1}|
    FAI_s  = mean of A_glob[t, s] over the response's t in [s + nearest, s + farthest]

The advantage of a token is multiplied by γ = g if the token is a *plan* (`local`: among the top q of Δ) or an *anchor*
(`global`: among the top q of FAI). With `coupled`, an anchor t that follows a plan u, where WAAD_t ≤ τ_waad and
Δ_u ≥ τ_Δ with u in t − k … t − 1, passes the share α of its extra credit to that u.

`flash.trainer.rhythm` observes the policy's attention in each step and calls these functions, with one block of
attention weights at a time. `row_B` are the places in the sequence of the tokens that attend, and `column_C` the places
of the tokens that they look at. Both ascend, and columns have no gaps. WAAD and FAI are linear in the attention
weights, so they are computed for each head and then averaged over heads.

Shape legend: H = heads, B = rows of a block, C = its columns, R = tokens of a response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

if TYPE_CHECKING:
    from torch import Tensor

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

Credit = Literal["local", "global", "coupled"]
"""Tokens whose advantages are multiplied (`Rhythm.credit`)."""
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
"""Number of tokens."""
Share = Annotated[float, Meta(gt=0, le=1)]
"""Share of the tokens of a response."""

SLACK = 1e-9
"""Number that is subtracted before q · n is rounded up, because the float may be slightly more than a whole q · n."""

LAYERS = 5
"""Number of layers whose attention is used. This is the paper's value."""
LOCAL_HEADS = 0.3
"""Share of heads that are local: the heads with the shortest span. This is the paper's value."""
GLOBAL_HEADS = 0.3
"""Share of heads that are global: the heads with the longest span. This is the paper's value."""
WINDOW = 10
"""W: largest distance in WAAD, in tokens. This is the paper's value."""
SHIFT = 0.4
"""α: share of an anchor's extra credit that its plan gets. The paper gives no value."""
REACH = 3
"""k: number of tokens before an anchor among which its plan is searched. This is the paper's value."""
LOW_DISTANCE = 0.5
"""τ_waad, as a quantile of WAAD. The paper gives no value."""
HIGH_CHANGE = 0.6
"""τ_Δ, as a quantile of Δ. The paper gives no value."""


class Rhythm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens whose advantages are multiplied, and the factor. Defaults are the paper's values."""

    credit: Credit = "coupled"
    """Tokens that are chosen. `local`: plans; `global`: anchors; `coupled`: anchors, which share extra credit with
    plans."""
    gain: Annotated[float, Meta(gt=1, le=100)] = 1.5
    """g: the multiplier."""
    top: Share = 0.4
    """q: share of a response's tokens that are chosen as plans, and as anchors."""
    nearest: Count = 10
    """Smallest distance in FAI, in tokens."""
    farthest: Count = 100
    """Largest distance in FAI, in tokens."""

    def __post_init__(self) -> None:
        # msgspec reports the ValueError to the user, with the key of the configuration.
        if self.nearest > self.farthest:
            raise ValueError(f"expected nearest ≤ farthest = {self.farthest}, got {self.nearest}")


def chosen_layers(attention: Sequence[int], count: int) -> list[int]:
    """Return the indices of the layers whose attention is used, ascending, in a model with `count` layers.

    `LAYERS` places are spread evenly from ⌊L/3⌋ to ⌊2L/3⌋ of L = `count`; if there are fewer layers in this range, all
    of them are places. At each place the nearest layer that is attention is used. `attention`: indices of these layers;
    there must be at least one.
    """
    first, last = count // 3, 2 * count // 3
    places = np.linspace(first, last, min(LAYERS, last - first + 1))
    return sorted({min(attention, key=lambda layer: (abs(layer - round(place)), layer)) for place in places})


def head_kinds(
    span_H: FloatArray, local_share: float = LOCAL_HEADS, global_share: float = GLOBAL_HEADS
) -> tuple[IntArray, IntArray]:
    """Return the indices of the local heads (shortest spans) and of the global heads (longest spans), ascending.

    There is at least one of each, and no head is both. `span_H` has the span of each head of the chosen layers,
    averaged over a batch; there must be at least two heads. The two shares add up to at most 1.
    """
    order_H = np.argsort(span_H, kind="stable")
    heads = len(span_H)
    local = max(min(round(local_share * heads), heads - 1), 1)
    # With two shares of one half and an odd number of heads, both counts may be rounded up, and a head would be both.
    far = max(min(round(global_share * heads), heads - local), 1)
    return np.sort(order_H[:local]), np.sort(order_H[-far:])


def spans(attention_HBC: Tensor, row_B: Tensor, column_C: Tensor) -> Tensor:
    """Return [H, B]: the mean distance that each row looks back, Σ_s A[t, s] (t − s).

    Its sum over all rows decides which heads are local and which are global (`head_kinds`).
    """
    # The weights of a row add up to 1. So with the last row t' of the block, the span is Σ_s A[t, s] (t' − s) −
    # (t' − t), and one matrix product serves all rows. The product is larger than the span only by t' − t, which costs
    # hardly any digits.
    return attention_HBC @ (row_B[-1] - column_C).to(attention_HBC.dtype) + (row_B - row_B[-1])


def windowed_distance(attention_HBC: Tensor, row_B: Tensor, column_C: Tensor, window: int = WINDOW) -> Tensor:
    """Return [H, B]: the WAAD of each row, Σ_s A[t, s] min(t − s, W).

    The weights of a row add up to 1, so this equals W − Σ_s A[t, s] (W − t + s)⁺, and only the W columns up to the row
    are needed. The block must contain each row's own column, and no row may have attention outside of the block's
    columns.
    """
    # back_W has t − s of the W columns up to each row. Places before the block's first column get the weight 0.
    back_W = row_B.new_ones(min(window, len(column_C))).cumsum(0) - 1
    place_BW = (row_B - column_C[0])[:, None] - back_W
    rest_BW = ((window - back_W) * (place_BW >= 0)).to(attention_HBC.dtype)
    near_HBW = attention_HBC.gather(-1, place_BW.clamp_(min=0).expand(len(attention_HBC), -1, -1))
    return window - (near_HBW * rest_BW).sum(-1)


def future_influence(attention_HBC: Tensor, row_B: Tensor, column_C: Tensor, nearest: int, farthest: int) -> Tensor:
    """Return [H, C]: the attention that each column gets from the rows `nearest` to `farthest` tokens after it.

    The caller adds the results of all blocks of rows and divides by `followers` to get FAI.
    """
    # Places are relative to the first row and floats, which are faster to compare than integers, and exact up to 2²⁴
    # tokens. A row counts if its distance from the middle of the range is at most half the range.
    middle = (row_B - row_B[0]).to(attention_HBC.dtype) - (nearest + farthest) / 2
    off_BC = (middle[:, None] - (column_C - row_B[0]).to(attention_HBC.dtype)).abs_()
    return (attention_HBC * (off_BC <= (farthest - nearest) / 2).to(attention_HBC.dtype)).sum(-2)


def followers(position_R: IntArray, nearest: int, farthest: int) -> IntArray:
    """Return [R]: the number of tokens of the response that lie `nearest` to `farthest` tokens after each token.

    FAI is the mean over these tokens. `position_R` are the places of the response's tokens in their sequence,
    ascending.
    """
    begin_R = np.searchsorted(position_R, position_R + nearest, side="left")
    return np.searchsorted(position_R, position_R + farthest, side="right") - begin_R


def changes(waad_R: FloatArray, position_R: IntArray) -> FloatArray:
    """Return [R]: Δ of each token; 0 for a token whose next token is not part of the response.

    `position_R` are the places of the tokens in their sequence, ascending. A gap is the end of a turn.
    """
    delta_R = np.zeros_like(waad_R)
    delta_R[:-1] = np.where(np.diff(position_R) == 1, np.abs(np.diff(waad_R)), 0.0)
    return delta_R


def top_share(signal_R: FloatArray, share: float) -> BoolArray:
    """Return bool [R]: True for the ⌈share · R⌉ tokens with the largest signal. Tokens with signal 0 are never chosen.

    This chooses plans by Δ and anchors by FAI. Of tokens with equal signals, earlier ones are chosen first.
    """
    count = math.ceil(share * len(signal_R) - SLACK)
    chosen_R = np.zeros(len(signal_R), dtype=np.bool_)
    chosen_R[np.argsort(-signal_R, kind="stable")[:count]] = True
    return chosen_R & (signal_R > 0)


def multiplier(options: Rhythm, waad_R: FloatArray, influence_R: FloatArray, position_R: IntArray) -> FloatArray:
    """Return [R]: γ of each token of one response, by which the trainer multiplies the token's advantage.

    Args:
        options: the rule.
        waad_R: WAAD of each token, averaged over the local heads.
        influence_R: FAI of each token, averaged over the global heads.
        position_R: places of the tokens in their sequence, ascending.
    """
    delta_R = changes(waad_R, position_R)
    if options.credit == "local":
        return np.where(top_share(delta_R, options.top), options.gain, 1.0)
    anchor_R = top_share(influence_R, options.top)
    if options.credit == "global":
        return np.where(anchor_R, options.gain, 1.0)
    plan_of_R = _plan_before(waad_R, delta_R, position_R)
    # Anchors that have a plan lose the share α of their extra credit, g − 1. Each plan gets this share once, however
    # many anchors follow it.
    dominated_R = anchor_R & (plan_of_R >= 0)
    plan_R = np.zeros_like(anchor_R)
    plan_R[plan_of_R[dominated_R]] = True
    moved_R = SHIFT * (plan_R.astype(np.float64) - dominated_R)
    return 1 + (options.gain - 1) * (anchor_R + moved_R)


def _plan_before(waad_R: FloatArray, delta_R: FloatArray, position_R: IntArray) -> IntArray:
    """Return [R]: for each token, the index of the plan to which it would pass credit if it is an anchor; −1 for none.

    The plan is the token with the largest Δ among the `REACH` tokens of the same turn before this token; if several
    have this Δ, the nearest. There is no plan if the largest Δ is 0 or below τ_Δ, or if the WAAD of this token is above
    τ_waad.
    """
    low, high = np.quantile(waad_R, LOW_DISTANCE), np.quantile(delta_R, HIGH_CHANGE)
    plan_R = np.full(len(waad_R), -1)
    best_R = np.zeros_like(delta_R)
    for back in range(1, min(REACH, len(waad_R) - 1) + 1):
        earlier_R, here = delta_R[:-back], slice(back, None)
        # Within a turn, the places are consecutive.
        same_turn_R = position_R[here] - position_R[:-back] == back
        better_R = same_turn_R & (earlier_R >= high) & (earlier_R > best_R[here])
        plan_R[here][better_R] = np.flatnonzero(better_R)
        best_R[here][better_R] = earlier_R[better_R]
    plan_R[waad_R > low] = -1
    return plan_R
