"""Collects the metrics of a step, and the tokens that the run's pages show.

`flash.trainer.step` adds each micro-batch (the input of one forward and backward pass) while it trains, and adds the
numbers of all ranks up once, at the end of the step. Every rank gets the same metrics.

The *age* of a token is the version that is trained minus the version that sampled the token. The *behaviour* log-prob
of a token is the log-prob that the engine reported when it sampled the token. A *correction* rejects tokens, or weights
them, by the ratio of the policy to the policy that sampled.

Importance weights here are w = exp(start − behaviour), where `start` is the log-prob under the weights at the start of
the step. They contain the mismatch of engine and trainer and the policy's drift since the token was sampled. If no pass
was made at the start of the step, `start` is the log-prob at the start of the token's minibatch. The objective's own
ratio and weight are reported beside w.

Shape legend: T = action tokens of a micro-batch, S = sequences, W = data shards, A = ages, N = bins, K = environments.
In `ShownTokens`: L = action tokens of one sample, B = action tokens of one sequence, 4 = `ROWS`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from algorithms.base import PackedTokens
from flash.ages import young_enough
from flash.branches import spans_by_turn
from flash.trainer.mesh import TrainerMesh, to_device
from flash.trainer.objective import TokenLoss
from flash.trainer.packing import MicroBatch
from flash.trainer.plan import StepPlan
from flash.types import Shard, TokenUse, TrainedSample, Trajectory, samples_to_show

OLDEST = 32
"""Age in versions from which all tokens share the last row of the histogram, which bounds its memory."""
QUANTILES = (1, 50, 99)
"""Reported quantiles of the ratio, in per cent."""
NEAR_ZERO = 1e-3
"""Log-ratio up to which all bins of `RatioHistogram` are about equally wide (`BIN` · this number). Bins of larger
log-ratios are about 2 % of the log-ratio wide."""
BIN = 0.02
"""Width of a bin, in asinh(log-ratio / NEAR_ZERO). A quantile is then exact to 1 % of the log-ratio."""
LARGEST = 300.0
"""Largest log-ratio that is counted as it is; a larger log-ratio counts as 300. The square of the weight, exp(2 · 300),
is still a finite float64."""
HALF_BINS = math.ceil(math.asinh(LARGEST / NEAR_ZERO) / BIN)
"""Number of bins on each side of the bin for 0."""
ROWS = 4
"""Number of values that `ShownTokens` keeps per token: log-prob, entropy, advantage and use."""


class StepTally:
    """Sums, minima and maxima by name, over micro-batches and then over data shards (ranks with different samples).

    All ranks must add the same names, since `reduce` exchanges the values without their names. A rank that runs out of
    samples adds micro-batches of one masked token, and so the same names.
    """

    def __init__(self, mesh: TrainerMesh) -> None:
        self._mesh = mesh
        self._sums: dict[str, Tensor] = {}
        self._least: dict[str, Tensor] = {}
        self._most: dict[str, Tensor] = {}

    def add(self, name: str, value_T: Tensor, mask_T: Tensor) -> None:
        """Add the values where `mask_T` is True to the sum under this name. Other values may be anything, even NaN."""
        total = value_T.detach().double().where(mask_T, 0.0).sum()
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def add_range(self, name: str, value_T: Tensor, mask_T: Tensor) -> None:
        """Update the smallest and the largest value under this name, over the tokens where `mask_T` is True.

        As long as there was no such token, the values are inf and -inf.
        """
        value_T = value_T.detach().double()
        least, most = value_T.where(mask_T, math.inf).amin(), value_T.where(mask_T, -math.inf).amax()
        self._least[name] = least.minimum(self._least.get(name, least))
        self._most[name] = most.maximum(self._most.get(name, most))

    def reduce(self) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Return sums, minima and maxima over all data shards, by name, on every rank. One collective."""
        # Sort by name, so that every rank puts the value of a name into the same column.
        kinds = [dict(sorted(values.items())) for values in (self._sums, self._least, self._most)]
        row = torch.stack([value for values in kinds for value in values.values()])
        rows = self._mesh.gather_rows(row).cpu().numpy()
        first, second = len(kinds[0]), len(kinds[0]) + len(kinds[1])
        columns = (rows[:, :first].sum(0), rows[:, first:second].min(0), rows[:, second:].max(0))
        sums, least, most = (
            dict(zip(values, column.tolist(), strict=True)) for values, column in zip(kinds, columns, strict=True)
        )
        return sums, least, most


class RatioHistogram:
    """Histogram of log-ratios in fixed bins, one row of bins for each age of tokens in versions.

    The quantiles over all ranks are computed from the summed counts. So no tokens are gathered, and the division of the
    batch into micro-batches does not matter.
    """

    def __init__(self, mesh: TrainerMesh) -> None:
        self._mesh = mesh
        self._counts_AN = torch.zeros(OLDEST + 1, 2 * HALF_BINS + 1, dtype=torch.int64, device=mesh.device)

    def add(self, log_ratio_T: Tensor, age_T: Tensor, mask_T: Tensor) -> None:
        """Count the tokens where `mask_T` is True.

        Log-ratios beyond ±`LARGEST` count as ±`LARGEST`, and a log-ratio that is NaN counts as 0.
        """
        log_ratio_T = log_ratio_T.double().where(mask_T, 0.0).nan_to_num(0.0, LARGEST, -LARGEST)
        bin_T = ((log_ratio_T / NEAR_ZERO).asinh() / BIN).round().long().clamp(-HALF_BINS, HALF_BINS) + HALF_BINS
        place_T = age_T.where(mask_T, 0).clamp(0, OLDEST) * self._counts_AN.shape[1] + bin_T
        self._counts_AN.view(-1).index_add_(0, place_T, mask_T.long())

    def reduce(self) -> dict[str, float]:
        """Return the quantiles of the ratio over all ranks, such as `ratio_p50_age_2`. One collective.

        An age without a token has no quantiles. Call this only once, because it adds the counts of the other ranks to
        the counts of this rank.
        """
        self._mesh.reduce_sum(self._counts_AN)
        metrics: dict[str, float] = {}
        for age, count_N in enumerate(self._counts_AN.cpu().numpy()):
            below_N = np.cumsum(count_N)
            if below_N[-1] == 0:
                continue
            for percent in QUANTILES:
                place = int(np.searchsorted(below_N, percent / 100 * below_N[-1]))
                log_ratio = NEAR_ZERO * math.sinh((place - HALF_BINS) * BIN)
                metrics[f"ratio_p{percent}_age_{age}"] = math.exp(log_ratio)
        return metrics


class StepStatistics:
    """Statistics of all micro-batches of a step.

    A step calls `add` for each micro-batch, `end_minibatch` after the last one of each minibatch, and `metrics` once at
    its end. No method but `metrics` waits for a GPU, so that the GPU gets the next micro-batch in time.
    """

    def __init__(self, mesh: TrainerMesh) -> None:
        self._mesh = mesh
        self._tally = StepTally(mesh)
        # Sum of the losses of the present minibatch, which `end_minibatch` will divide.
        self._pending = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self._ratios = RatioHistogram(mesh)
        # For each environment (a kind of problems): the number of tokens of age 0, and the sum of their k3.
        self._by_kind: dict[str, Tensor] = {}

    def add(
        self,
        tokens: PackedTokens,
        start_T: Tensor,
        entropy_T: Tensor,
        age_T: Tensor,
        kinds_S: Sequence[str],
        loss: TokenLoss,
        share_T: Tensor,
    ) -> None:
        """Add one micro-batch.

        Comparisons of policies are over all trained tokens, including tokens that a correction rejected. Statistics of
        the objective are over the tokens that no correction rejected, because the objective sees only these.

        Args:
            tokens: the objective's input, before rejected tokens are masked.
            start_T: log-probs at the start of the step.
            entropy_T: entropies of the policy.
            age_T: ages in versions.
            kinds_S: environment of each sequence in a mixture; empty names if there is one environment.
            loss: losses of the tokens.
            share_T: the amount that each token adds to the loss of its minibatch.
        """
        tally, mask_T = self._tally, tokens.mask_T
        # Add the mismatch of engine and trainer, and the drift of the policy.
        current_T = mask_T & (age_T == 0)
        log_ratio_T = (start_T - tokens.behaviour_T).where(mask_T, 0.0)
        self._ratios.add(log_ratio_T, age_T, mask_T)
        # k1 = −log w and k3 = w − 1 − log w estimate a KL divergence: the distance of the engine's log-probs from the
        # log-probs of the trainer, over all tokens and over tokens of the current version. In k3, `expm1` computes
        # w − 1 in float64, because the plain difference would lose all digits of a small log-ratio.
        limited_T = log_ratio_T.double().clamp(max=LARGEST)
        k3_T = limited_T.expm1() - limited_T
        for which, chosen_T in (("all", mask_T), ("current", current_T)):
            tally.add(f"count {which}", chosen_T, chosen_T)
            tally.add(f"k1 {which}", -log_ratio_T, chosen_T)
            tally.add(f"k3 {which}", k3_T, chosen_T)
            tally.add_range(f"gap {which}", log_ratio_T.abs(), chosen_T)
        self._add_kinds(k3_T, current_T, tokens.sequence_T, kinds_S)
        weight_T = limited_T.exp()
        tally.add("weight", weight_T, mask_T)
        tally.add("weight square", weight_T.square(), mask_T)
        # Add the loss, and numbers of the tokens in the loss.
        tally.add("count kept", loss.mask_T, mask_T)
        self._pending += share_T.detach().double().where(loss.mask_T, 0.0).sum()
        tally.add("entropy", entropy_T, mask_T)
        tally.add("advantage", tokens.advantage_T.abs(), mask_T)
        tally.add("masked correction", loss.correction_T == 0, mask_T)
        if "weight" in loss.stats:
            tally.add("masked cap", loss.stats["weight"] == 0, loss.mask_T)
        if loss.divergence_T is not None:
            tally.add("kl", loss.divergence_T, loss.mask_T)
        if loss.above_teacher_T is not None:
            tally.add("teacher", loss.above_teacher_T, loss.mask_T)
        # Add the statistics that the objective itself reports.
        for name, stat_T in loss.stats.items():
            tally.add(f"stat {name}", stat_T, loss.mask_T)
            tally.add_range(f"stat {name}", stat_T, loss.mask_T)

    def end_minibatch(self, share: float) -> None:
        """Add the loss of a minibatch, once all of its micro-batches are added.

        `share` is the part of the loss's denominator that no correction has rejected. The loss is divided by this
        share, so rejected tokens do not make it smaller. With a share of 0 it is not divided.
        """
        self._tally.add("loss", self._pending / (share or 1.0), torch.ones_like(self._pending, dtype=torch.bool))
        self._pending = torch.zeros_like(self._pending)

    def _add_kinds(self, k3_T: Tensor, current_T: Tensor, sequence_T: Tensor, kinds_S: Sequence[str]) -> None:
        """Add the mismatch of engine and trainer by environment, over the tokens where `current_T` is True.

        `k3_T` has the mismatch, measured by the estimator k3 of a KL divergence (`algorithms.references`). A run with
        one environment has one kind, with an empty name.
        """
        k3_T = k3_T.where(current_T, 0.0)
        kinds = sorted({*kinds_S})
        kind_T = to_device(np.array([kinds.index(kind) for kind in kinds_S]), k3_T.device)[sequence_T]
        sums_K2 = k3_T.new_zeros(len(kinds), 2).index_add_(0, kind_T, torch.stack([current_T.double(), k3_T], dim=-1))
        for kind, sums in zip(kinds, sums_K2, strict=True):
            self._by_kind[kind] = self._by_kind[kind] + sums if kind in self._by_kind else sums

    def _kind_metrics(self) -> dict[str, float]:
        """Return the mismatch of engine and trainer over the tokens of age 0, as `metrics` reports it.

        The mismatch is the mean of k3 = w − 1 − log w, an estimator of a KL divergence. `mismatch_k3_age_0` is over all
        tokens of age 0. If the run has several environments (kinds of problems), `mismatch_k3_env_NAME` is over the
        tokens of environment NAME. If no token has age 0, the result is empty (`metrics` then reports `mismatch_k3`
        over all ages). An environment without such a token is left out. This is a collective. Ranks may have different
        environments.
        """
        rows = self._mesh.gather_sums({kind: sums.tolist() for kind, sums in self._by_kind.items()})
        rows = {kind: (count, total) for kind, (count, total) in rows.items() if count}
        metrics = {f"mismatch_k3_env_{kind}": total / count for kind, (count, total) in rows.items() if kind}
        if rows:
            metrics["mismatch_k3_age_0"] = sum(row[1] for row in rows.values()) / sum(row[0] for row in rows.values())
        return metrics

    def metrics(self, minibatches: int, passes: int) -> dict[str, float]:
        """Return the metrics over the trained tokens of all ranks. Three collectives.

        The mismatch compares engine and trainer at equal weights, so it is over tokens of the current version. Without
        such tokens it is over all tokens, and then also contains the policy's drift since the tokens were sampled.
        `ess` is Kish's effective sample size of the weights w, as a share of the tokens. Each statistic of the
        objective becomes three metrics: mean, minimum and maximum. Only the mean of `clipped` is kept, as
        `clip_fraction`.

        Args:
            minibatches: number of minibatches of the batch.
            passes: number of times that the batch was trained. Means are over all these passes.
        """
        sums, least, most = self._tally.reduce()
        which = "current" if sums["count current"] > 0 else "all"
        count, compared = max(sums["count all"], 1.0), max(sums[f"count {which}"], 1.0)
        kept = max(sums["count kept"], 1.0)
        metrics = {
            "loss": sums["loss"] / (minibatches * passes),
            "entropy": sums["entropy"] / count,
            "trained_tokens": sums["count kept"] / passes,
            "advantage_abs_mean": sums["advantage"] / count,
            "mismatch_kl": sums[f"k1 {which}"] / compared,
            "mismatch_k3": sums[f"k3 {which}"] / compared,
            "mismatch_max": max(most[f"gap {which}"], 0.0),
            "masked_correction_share": sums["masked correction"] / count,
            "masked_cap_share": sums.get("masked cap", 0.0) / count,
        }
        if sums["weight square"] > 0:
            metrics["ess"] = sums["weight"] ** 2 / (count * sums["weight square"])
        if "kl" in sums:
            metrics["kl_reference"] = sums["kl"] / kept
        if "teacher" in sums:
            metrics["kl_teacher"] = sums["teacher"] / kept
        for name in (key.removeprefix("stat ") for key in sums if key.startswith("stat ")):
            mean = sums[f"stat {name}"] / kept
            if name == "clipped":
                metrics["clip_fraction"] = mean
            elif sums["count kept"]:
                metrics |= {
                    f"{name}_mean": mean,
                    f"{name}_min": least[f"stat {name}"],
                    f"{name}_max": most[f"stat {name}"],
                }
        return metrics | self._kind_metrics() | self._ratios.reduce()


class BatchCounts:
    """Numbers of a step's batch that do not depend on a forward pass: tokens, ages and rewards. A step adds each round.

    The numbers come from facts about the whole round and from the counts in its plan, which are over all ranks, so no
    collective is needed.
    """

    def __init__(self) -> None:
        self._rewards: list[np.ndarray] = []
        # Numbers of tokens: of the samples, packed, computed (`StepPlan`), sampled by the policy, and trained.
        self._tokens = self._packed = self._computed = self._actions = self._trained = 0
        self._ages: list[int] = []  # trained tokens of age 0, 1, …

    def add(self, shard: Shard, plan: StepPlan) -> None:
        """Add one round."""
        self._rewards.append(plan.credit.reward_B)
        self._tokens += plan.tokens
        self._packed += plan.packed_tokens
        self._computed += plan.computed_tokens
        self._actions += sum(entry.tokens for entry in shard.batch)
        self._trained += shard.total_tokens
        # Every round of a step has the same oldest version, and so equally many ages.
        before = self._ages or [0] * len(plan.age_histogram)
        self._ages = [sum(counts) for counts in zip(before, plan.age_histogram, strict=True)]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the batch."""
        reward_B = np.concatenate(self._rewards)
        counts = np.array(self._ages, dtype=np.float64)
        share = counts / max(counts.sum(), 1.0)
        ages = np.flatnonzero(counts)
        return {
            "tokens": float(self._tokens),
            "shared_token_share": 1 - self._computed / max(self._packed, 1),
            "masked_old_share": 1 - self._trained / self._actions if self._actions else 0.0,
            "age_mean": float(share @ np.arange(len(share))),
            "age_max": float(ages.max()) if ages.size else 0.0,
            **{f"age_{age}": float(share[age]) for age in ages},
            "reward_mean": float(reward_B.mean()),
            "reward_std": float(reward_B.std()),
        }


class ShownTokens:
    """Keeps numbers for the tokens of the few samples that a run shows on its pages.

    The numbers are log-prob, entropy, advantage and use (`TokenUse`: trained, clipped, rejected or too old). Training
    computes all of these anyway, so they need no forward pass of their own. A step calls `begin_round` for each round,
    `add` for each micro-batch of the round, and `gather` at its end.

    `count` is the number of samples to show: the first samples of the batch that have a token to train.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._left = count
        """Number of samples that later rounds may add."""
        self._first = 0
        """Index in the batch of the first sample of the present round."""
        self._places = np.zeros(0, dtype=np.int64)
        """Indices in the present round of the shown samples of this rank's shard."""
        self._shown: dict[int, Trajectory] = {}
        """Shown samples of this rank's shards, by their index in the batch."""
        # Each entry is a sequence: the index of its sample in the batch, the number of the sample's action tokens
        # before the sequence, and the sequence's numbers, [4, B].
        self._parts: list[tuple[int, int, Tensor]] = []

    def begin_round(self, shard: Shard) -> None:
        """Choose the samples of a round. Every rank chooses the same, and shows the ones that are in its shard."""
        trained = (young_enough(entry.oldest_version, shard.min_version) for entry in shard.batch)
        places = samples_to_show(trained, self._left)
        self._left -= len(places)
        self._first = shard.round.samples_before
        own = {one.index: one.trajectory for one in shard.samples if one.index in set(places)}
        self._places = np.array(sorted(own), dtype=np.int64)
        self._shown |= {self._first + index: trajectory for index, trajectory in own.items()}

    def add(self, micro: MicroBatch, tokens: PackedTokens, start_T: Tensor, entropy_T: Tensor, loss: TokenLoss) -> None:
        """Add one micro-batch. Call this only in the first training pass over it, so that each token is added once.

        Args:
            micro: the micro-batch.
            tokens: the objective's input, before rejected tokens are masked.
            start_T: log-probs at the start of the step.
            entropy_T: entropies of the policy.
            loss: losses of the tokens.
        """
        found_S = np.flatnonzero(np.isin(micro.index_S, self._places))
        # A micro-batch without a trained token is a dummy, whose `index_S` means nothing.
        if not len(found_S) or not micro.mask_T.any():
            return
        mask_T = tokens.mask_T
        clipped_T = loss.stats.get("clipped", torch.zeros_like(start_T)) > 0
        use_T = torch.full_like(start_T, float(TokenUse.TRAINED))
        use_T = use_T.masked_fill(clipped_T, float(TokenUse.CLIPPED))
        use_T = use_T.masked_fill(loss.correction_T == 0, float(TokenUse.REJECTED)).masked_fill(
            ~mask_T, float(TokenUse.TOO_OLD)
        )
        advantage_T = tokens.advantage_T.masked_fill(~mask_T, torch.nan)
        rows_4T = torch.stack([row.detach().float() for row in (start_T, entropy_T, advantage_T, use_T)])
        begins, ends = (np.searchsorted(micro.sequence_T, found_S + more).tolist() for more in (0, 1))
        for index, begin, end in zip(micro.index_S[found_S].tolist(), begins, ends, strict=True):
            # The action tokens of a sample are in the order of its tokens, not in the order of time. So count the
            # tokens of the turns that precede this sequence's first turn in that order.
            shown = self._shown[self._first + index]
            spans, turn = shown.action_spans, int(micro.turn_T[begin])
            start = spans_by_turn(shown)[turn].start
            place = sum(span.stop - span.start for span in spans if span.stop <= start)
            self._parts.append((self._first + index, place, rows_4T[:, begin:end]))

    def gather(self, mesh: TrainerMesh) -> list[TrainedSample]:
        """Return the shown samples of all ranks on data shard 0, and an empty list on other data shards.

        This is a collective if the run shows samples and has several data shards. Rank 0 reports the result to the hub.
        """
        if self._count == 0:
            return []
        mine = [self._sample(index, trajectory) for index, trajectory in self._shown.items()]
        return sorted(itertools.chain(*mesh.gather_objects(mine)), key=lambda sample: sample.index)

    def _sample(self, index: int, trajectory: Trajectory) -> TrainedSample:
        """Return one sample. Tokens of branches that are not trained get NaN for each number, and the use `TOO_OLD`."""
        rows_4L = np.full((ROWS, trajectory.action_count), np.nan, dtype="<f4")
        rows_4L[-1] = TokenUse.TOO_OLD
        for sample, begin, rows_4B in self._parts:
            if sample == index:
                rows_4L[:, begin : begin + rows_4B.shape[1]] = rows_4B.cpu().numpy()
        logprobs, entropies, advantages, uses = rows_4L
        return TrainedSample(
            index, logprobs.tobytes(), entropies.tobytes(), advantages.tobytes(), uses.astype(np.uint8).tobytes()
        )
