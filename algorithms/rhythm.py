"""Advantages that follow the rhythm of attention (Li et al. 2025, arXiv 2510.13554).

Two averages of attention maps, over heads that look nearby (A_loc) and over heads that look far (A_glob), say of each
token of a response how far back the model looked for it, and how much what comes later looks at it:

    WAAD_t = Σ_{s ≤ t} A_loc[t, s] · min(t − s, W)        Δ_t = |WAAD_t − WAAD_{t+1}|
    FAI_s  = mean of A_glob[t, s] over the response's t in [s + nearest, s + farthest]

The multiplier of a token's advantage is γ = g where it plans (local: the top q of Δ), or where it anchors (global: the
top q of FAI). Coupled: an anchor t in the shadow of a plan u, so WAAD_t ≤ τ_waad and Δ_u ≥ τ_Δ with u in t − k … t − 1,
hands the share α of its extra credit to that u. WAAD and FAI are linear in A: the mean over heads may be taken after.

Of a map, `row_B` and `column_C` are the places of its rows and columns in the sequence, ascending, columns without gap.
Shape legend: H = heads, B = rows of a map, C = its columns, R = tokens of a response.
"""

from __future__ import annotations

import math
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
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Share = Annotated[float, Meta(gt=0, le=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]

SLACK = 1e-9
"""Keeps ⌈q n⌉ true where q n is a whole number that floats cannot hold."""


class Rhythm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tokens have their advantage multiplied. Defaults are the paper's where it gives any."""

    credit: Credit = "coupled"
    """`local`: plans; `global`: anchors; `coupled`: anchors that share with plans."""
    gain: Annotated[float, Meta(gt=1, le=100)] = 1.5
    """g: the multiplier."""
    top: Share = 0.4
    """q: share of a response's tokens that is chosen."""
    signs: Literal["both", "positive", "negative"] = "both"
    """Which advantages are multiplied."""
    layers: Count | list[Annotated[int, Meta(ge=0)]] = 5
    """How many, evenly from ⌊L/3⌋ to ⌊2L/3⌋ of L; or which, from 0."""
    heads: Literal["batch", "first"] = "batch"
    """Tell heads apart in each batch, or once in the first batch."""
    local_heads: Share = 0.3
    """Share of heads, of the shortest span."""
    global_heads: Share = 0.3
    """Share of heads, of the longest span."""
    window: Count = 10
    """W: largest distance in WAAD, tokens."""
    nearest: Count = 10
    """Tokens after which FAI begins to count."""
    farthest: Count = 100
    """Tokens after which it ends."""
    shift: Fraction = 0.4
    """α: what an anchor gives its plan; the paper has no value."""
    reach: Count = 3
    """k: tokens before an anchor that may be its plan."""
    low_distance: Fraction = 0.5
    """τ_waad, a quantile of WAAD; not the paper's."""
    high_change: Fraction = 0.6
    """τ_Δ, a quantile of Δ; not the paper's."""

    def __post_init__(self) -> None:
        if self.local_heads + self.global_heads > 1:
            raise ValueError(
                f"expected local_heads + global_heads ≤ 1, or a head is of both kinds; got {self.local_heads:g} and "
                f"{self.global_heads:g}"
            )
        if self.nearest > self.farthest:
            raise ValueError(f"expected nearest ≤ farthest = {self.farthest}, got {self.nearest}")
        if isinstance(self.layers, list) and (not self.layers or len(set(self.layers)) < len(self.layers)):
            raise ValueError(f"expected layers to name each layer once, and at least one, got {self.layers}")


USED_BY: dict[str, tuple[Credit, ...]] = {
    "local_heads": ("local", "coupled"),
    "window": ("local", "coupled"),
    "global_heads": ("global", "coupled"),
    "nearest": ("global", "coupled"),
    "farthest": ("global", "coupled"),
    "shift": ("coupled",),
    "reach": ("coupled",),
    "low_distance": ("coupled",),
    "high_change": ("coupled",),
}
"""Options that only some credits look at."""


def chosen_layers(layers: int | list[int], count: int) -> list[int]:
    """The layers to look at in a model of `count`.

    Raises:
        ValueError: a layer is named that the model does not have.
    """
    if isinstance(layers, list):
        if max(layers) >= count:
            raise ValueError(f"expected layers from 0 to {count - 1}, got {max(layers)}")
        return sorted(layers)
    first, last = count // 3, 2 * count // 3
    return sorted({round(place) for place in np.linspace(first, last, min(layers, last - first + 1))})


def head_kinds(span_H: FloatArray, options: Rhythm) -> tuple[IntArray, IntArray]:
    """Which heads are local, and which global: at least one of each, those of the shortest and of the longest span."""
    order_H = np.argsort(span_H, kind="stable")
    heads = len(span_H)
    near = max(min(round(options.local_heads * heads), heads - 1), 1)
    # Two shares of one half are rounded up both where the heads are odd.
    far = max(min(round(options.global_heads * heads), heads - near), 1)
    return np.sort(order_H[:near]), np.sort(order_H[-far:])


def spans(attention_HBC: Tensor, row_B: Tensor, column_C: Tensor) -> Tensor:
    """[H, B]: how far back a row looks in the mean, Σ_s A[t, s] (t − s).

    Distances from the last row, and taken back by as much as a row is before it: one product for all rows, which add to
    1, and numbers no larger than the answer and the block.
    """
    return attention_HBC @ (row_B[-1] - column_C).to(attention_HBC.dtype) + (row_B - row_B[-1])


def windowed_distance(attention_HBC: Tensor, row_B: Tensor, column_C: Tensor, window: int) -> Tensor:
    """[H, B]: each row's WAAD, Σ_s A[t, s] min(t − s, W) = W − Σ_s A[t, s] (W − t + s)⁺, since rows add to 1.

    So only the W columns up to the row count. Every row's own must be there; of those that are not, none has attention.
    """
    back_W = row_B.new_ones(min(window, len(column_C))).cumsum(0) - 1
    place_BW = (row_B - column_C[0])[:, None] - back_W
    rest_BW = ((window - back_W) * (place_BW >= 0)).to(attention_HBC.dtype)
    near_HBW = attention_HBC.gather(-1, place_BW.clamp_(min=0).expand(len(attention_HBC), -1, -1))
    return window - (near_HBW * rest_BW).sum(-1)


def future_influence(attention_HBC: Tensor, row_B: Tensor, column_C: Tensor, nearest: int, farthest: int) -> Tensor:
    """[H, C]: what the rows between `nearest` and `farthest` after a column give it.

    The sums of several blocks of rows add up; FAI is their sum over `followers`.
    """
    # From the first row, and as floats: faster to compare, and exact up to 2²⁴ tokens.
    middle = (row_B - row_B[0]).to(attention_HBC.dtype) - (nearest + farthest) / 2
    off_BC = (middle[:, None] - (column_C - row_B[0]).to(attention_HBC.dtype)).abs_()
    return (attention_HBC * (off_BC <= (farthest - nearest) / 2).to(attention_HBC.dtype)).sum(-2)


def followers(position_R: IntArray, nearest: int, farthest: int) -> IntArray:
    """[R]: how many tokens of the response come between `nearest` and `farthest` after each one, seen or not."""
    begin_R = np.searchsorted(position_R, position_R + nearest, side="left")
    return np.searchsorted(position_R, position_R + farthest, side="right") - begin_R


def changes(waad_R: FloatArray, position_R: IntArray) -> FloatArray:
    """[R]: Δ; 0 for a token whose next one is not the response's.

    `position_R` are the tokens' places in their sequence: a response may have several parts, one for each turn.
    """
    delta_R = np.zeros_like(waad_R)
    delta_R[:-1] = np.where(np.diff(position_R) == 1, np.abs(np.diff(waad_R)), 0.0)
    return delta_R


def top_share(signal_R: FloatArray, share: float) -> BoolArray:
    """[R]: the ⌈share · R⌉ tokens of the largest signal, the earlier one of equals; never one whose signal is 0."""
    count = math.ceil(share * len(signal_R) - SLACK)
    chosen_R = np.zeros(len(signal_R), dtype=np.bool_)
    chosen_R[np.argsort(-signal_R, kind="stable")[:count]] = True
    return chosen_R & (signal_R > 0)


def multiplier(options: Rhythm, waad_R: FloatArray, influence_R: FloatArray, position_R: IntArray) -> FloatArray:
    """[R]: γ of each token of one response, from its signals: WAAD of the local heads, FAI of the global ones."""
    delta_R = changes(waad_R, position_R)
    if options.credit == "local":
        return np.where(top_share(delta_R, options.top), options.gain, 1.0)
    anchor_R = top_share(influence_R, options.top)
    if options.credit == "global":
        return np.where(anchor_R, options.gain, 1.0)
    planned_R = _plans(options, waad_R, delta_R, position_R)
    shadowed_R = anchor_R & (planned_R >= 0)
    plan_R = np.zeros_like(anchor_R)
    plan_R[planned_R[shadowed_R]] = True
    moved_R = options.shift * (plan_R.astype(np.float64) - shadowed_R)
    return 1 + (options.gain - 1) * (anchor_R + moved_R)


def _plans(options: Rhythm, waad_R: FloatArray, delta_R: FloatArray, position_R: IntArray) -> IntArray:
    """[R]: the token in whose shadow each one would stand as an anchor, the nearest of equals; −1: in none."""
    low, high = np.quantile(waad_R, options.low_distance), np.quantile(delta_R, options.high_change)
    plan_R = np.full(len(waad_R), -1)
    best_R = np.zeros_like(delta_R)
    for back in range(1, min(options.reach, len(waad_R) - 1) + 1):
        earlier_R, here = delta_R[:-back], slice(back, None)
        same_turn_R = position_R[here] - position_R[:-back] == back
        better_R = same_turn_R & (earlier_R >= high) & (earlier_R > best_R[here])
        plan_R[here][better_R] = np.flatnonzero(better_R)
        best_R[here][better_R] = earlier_R[better_R]
    plan_R[waad_R > low] = -1
    return plan_R
