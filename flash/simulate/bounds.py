"""Theoretical bounds on the time of a step, and the quantities that they are computed from.

`flash simulate` calls `bounds` and `quantities` after a simulated run, and prints the bounds beside its step time. A
bound that the run misses by far shows a bottleneck, or an error of the simulator. A step trains one batch. α is
`train.async_ratio`: it bounds the age of trained tokens, in training steps since the weights that sampled them. The
bounds are propositions 1 and 2 of the paper "Part II: ROLL Flash". A step has N samples on K workers, E epochs and Q
samples in flight. μ and L are the mean and the longest generation time, and μ_tr is the training time per sample. If
filters remove samples, N counts these too, and μ_tr is a mean over all N:

    queue scheduling   mean completion per sample ≤ μ/K + L/Q
    synchronous        T ≤ N·μ/K + L + E·N·μ_tr/K
    asynchronous       T ≤ (N/K)·(μ + E·μ_tr) + L/(α+1), at the share β* of trainers

A worker is a GPU here. μ is the GPU time of a sample while its engine is as full as the run can make it. L is the time
of the longest of the samples in flight at that speed, including the time in its environment. All times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from flash.config.simulate import SimulateConfig, sampler, uniform
from flash.config.tree import Config

EPISODES = 2048
"""Most episodes that are drawn to estimate the workload."""
DRAWS = 40_000
"""Most random draws for these episodes, so that fewer episodes with many turns are drawn. They take about 0.1
seconds."""


# The parameters of the next four functions: `samples` N, `mean` μ, `longest` L, `train` μ_tr, `workers` K, `epochs` E,
# `ratio` α and `in_flight` Q. `bounds` calls them; tests compare them with the paper.


def queue_bound(mean: float, longest: float, workers: float, in_flight: float) -> float:
    """Return the bound on the mean completion time per sample under queue scheduling: μ/K + L/Q."""
    return mean / workers + longest / in_flight


def sync_bound(samples: float, mean: float, longest: float, train: float, workers: float, epochs: int = 1) -> float:
    """Return the bound on the step time if all workers first generate and then train: N·μ/K + L + E·N·μ_tr/K."""
    return samples * mean / workers + longest + epochs * samples * train / workers


def async_bound(
    samples: float, mean: float, longest: float, train: float, workers: float, ratio: float, epochs: int = 1
) -> float:
    """Return the bound on the step time at the best split of the workers: (N/K)·(μ + E·μ_tr) + L/(α+1)."""
    return samples / workers * (mean + epochs * train) + longest / (ratio + 1)


def best_split(
    samples: float, mean: float, longest: float, train: float, workers: float, ratio: float, epochs: int = 1
) -> float:
    """Return the share of the workers that should train: β* = E·N·μ_tr / (N·μ + K·L/(α+1) + E·N·μ_tr)."""
    training = epochs * samples * train
    return training / (samples * mean + workers * longest / (ratio + 1) + training)


class Episodes(NamedTuple):
    """Statistics of randomly drawn episodes, from which `quantities` computes times."""

    tokens: list[float]
    """Response tokens of each episode."""
    env_s: list[float]
    """Seconds that each episode spends in its environment."""
    prompt: float
    """Mean tokens of an episode's first observation."""
    observations: float
    """Mean tokens of all later observations of an episode."""
    context: float
    """Mean tokens of context before a token that is decoded."""

    @property
    def mean_tokens(self) -> float:
        """Mean response tokens of an episode."""
        return sum(self.tokens) / len(self.tokens)

    @property
    def mean_env_s(self) -> float:
        """Mean seconds that an episode spends in the calls of its environment."""
        return sum(self.env_s) / len(self.env_s)

    @property
    def mean_length(self) -> float:
        """Mean tokens of an episode that the trainer processes, including observations."""
        return self.prompt + self.observations + self.mean_tokens

    def longest_s(self, samples: float, token_s: float) -> float:
        """Return the expected seconds of the longest of `samples` episodes, if a token takes `token_s` seconds.

        The k-th shortest of M drawn episodes is the longest of n samples with probability (k/M)^n − ((k−1)/M)^n.
        """
        times = sorted(tokens * token_s + env for tokens, env in zip(self.tokens, self.env_s, strict=True))
        count = len(times)
        return sum(time * ((k / count) ** samples - ((k - 1) / count) ** samples) for k, time in enumerate(times, 1))


def draw_episodes(simulate: SimulateConfig, max_new_tokens: int, max_turns: int) -> Episodes:
    """Draw episodes of the workload. Slow and dead environments (`fail_slow`, `fail_stop`) are not drawn."""
    prompt, response, observation, turns, reset, env, reward = (
        sampler(distribution)
        for distribution in (
            simulate.prompt_tokens, simulate.response_tokens, simulate.observation_tokens, simulate.turns,
            simulate.reset_s, simulate.env_s, simulate.reward_s,
        )
    )  # fmt: skip
    expected = min(max(turns.expected(), 1.0), max_turns)
    # Each turn takes up to three draws, and too few episodes would make the estimates of rare lengths inexact.
    count = max(256, min(EPISODES, int(DRAWS / (3 * expected))))
    tokens: list[float] = []
    env_s: list[float] = []
    prompts = observations = contexts = 0.0
    for i in range(count):
        # The second argument of `uniform` is a number of the quantity, so that the draws of an episode are independent.
        turn_count = min(max(round(turns.draw(uniform(i, 0))), 1), max_turns)
        context = prompt.draw(uniform(i, 1))
        prompts += context
        sampled, spent_s = 0.0, reset.draw(uniform(i, 2)) + reward.draw(uniform(i, 3))
        for turn in range(turn_count):
            if turn:
                shown = observation.draw(uniform(i, 4, turn))
                observations += shown
                context += shown
            # Stratified sampling: one draw in each of `count` equal parts, so that the lengths of single-turn episodes
            # have the exact tail of the distribution.
            u = (i + 0.5) / count if turn_count == 1 else uniform(i, 5, turn)
            length = float(min(max(round(response.draw(u)), 1), max_new_tokens))
            # Sum over the tokens of this response of the context before each.
            contexts += length * (context + length / 2)
            context += length
            sampled += length
            spent_s += env.draw(uniform(i, 6, turn))
        tokens.append(sampled)
        env_s.append(spent_s)
    return Episodes(tokens, env_s, prompts / count, observations / count, contexts / sum(tokens))


class Quantities(msgspec.Struct, frozen=True, kw_only=True):
    """Quantities that the formulas of the bounds take."""

    samples: float
    """N: samples to generate per step, including samples that filters remove."""
    in_flight: float
    """Q: most samples in flight."""
    redundant: bool
    """True if more samples are in flight than are trained. The run then prefers the samples that finish first."""
    gpus: int
    """K: number of GPUs."""
    rollout_gpus: int
    """GPUs that serve engines; the others train."""
    async_ratio: float
    """α: `train.async_ratio`."""
    per_engine: float
    """Most sequences that an engine decodes at once, with the configured split of the GPUs."""
    generate_s: float
    """μ: GPU seconds to generate a sample, with the configured split of the GPUs."""
    generate_all_s: float
    """μ if all GPUs serve engines. With few samples in flight it is larger than `generate_s`, since each engine
    then runs fewer sequences."""
    least_s: float
    """GPU seconds to generate a sample of mean length if prompts are cached. No schedule needs less, unless redundant
    samples let it prefer short ones."""
    longest_s: float
    """L: seconds of the longest sample in flight."""
    latency_s: float
    """Mean seconds of an episode that is alone on its engine."""
    train_s: float
    """μ_tr: mean GPU seconds to train on a sample. A sample that filters remove takes none."""
    pause_s: float
    """Seconds for which a new version stops an engine, including the prefill of running sequences."""
    fixed_s: float
    """Seconds of a training step that do not depend on the number of GPUs."""


def quantities(config: Config, ledger: Mapping[str, int]) -> Quantities:
    """Compute the quantities of a configuration.

    `ledger` has the counts of a simulated run, which give the share of samples that filters remove.
    """
    simulate, rollout, train = config.simulate, config.rollout, config.train
    assert simulate is not None, "check_simulated_run refuses a configuration without [simulate]"
    drawn = draw_episodes(simulate, rollout.max_new_tokens, rollout.max_turns)
    trained = ledger.get("trained", 0)
    kept = trained / (trained + ledger.get("filtered", 0)) if trained else 1.0  # share that filters do not remove
    extra = rollout.extra_groups * (rollout.group_size + rollout.extra_per_group)
    redundancy = 1 + rollout.extra_per_group / rollout.group_size
    in_flight = (1 + train.async_ratio) * train.batch_size * redundancy + extra
    if rollout.max_concurrent != "auto":
        in_flight = min(in_flight, rollout.max_concurrent * config.cluster.nodes)

    def most_sequences(gpus: int) -> float:
        """Return the most sequences that an engine decodes at once if this many GPUs serve engines.

        Limits are `engine.max_sequences`, the samples in flight, and the engine's KV cache unless `kv_tokens` is 0.
        """
        engines = max(1, gpus // config.engine.tensor_parallel)
        full = min(float(config.engine.max_sequences), in_flight / engines)
        if simulate.kv_tokens:
            full = min(full, simulate.kv_tokens / max(drawn.context, 1.0))
        return max(1.0, full)

    def token_s(running: float) -> float:
        """Return the seconds of one decoding step of an engine with this many sequences."""
        return simulate.step_s + running * (simulate.sequence_s + simulate.context_s * drawn.context)

    def sample_s(running: float, prefilled: float) -> float:
        """Return the GPU seconds to generate a sample on an engine with this many sequences.

        `prefilled` is the number of tokens of its prompt and observations that are not cached.
        """
        engine_s = drawn.mean_tokens * token_s(running) / running + prefilled * simulate.prefill_s
        return engine_s * config.engine.tensor_parallel

    per_engine, per_engine_all = most_sequences(simulate.rollout_gpus), most_sequences(simulate.gpus)
    observed = drawn.prompt + drawn.observations
    # With `abort`, a sequence moves before the swap, and the engine that it moves to prefills it again.
    recompute = rollout.swap in ("recompute", "abort")
    recomputed_s = per_engine * drawn.context * simulate.prefill_s if recompute else 0.0
    return Quantities(
        samples=train.batch_size / kept,
        in_flight=in_flight,
        redundant=rollout.extra_groups + rollout.extra_per_group > 0,
        gpus=simulate.gpus,
        rollout_gpus=simulate.rollout_gpus,
        async_ratio=train.async_ratio,
        per_engine=per_engine,
        generate_s=sample_s(per_engine, observed),
        generate_all_s=sample_s(per_engine_all, observed),
        least_s=sample_s(per_engine, drawn.prompt / rollout.group_size + drawn.observations),
        longest_s=drawn.longest_s(in_flight, token_s(per_engine)) + observed * simulate.prefill_s,
        latency_s=drawn.mean_tokens * token_s(1) + drawn.mean_env_s,
        train_s=drawn.mean_length * simulate.train_token_s * kept,
        pause_s=simulate.swap_s + recomputed_s,
        fixed_s=simulate.train_step_s,
    )


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """Bound on the time of a step."""

    name: str
    """Name of the bound for people."""
    formula: str
    """Formula of the bound, as text."""
    values: str
    """Quantities in the formula with their values, as text for the table of `flash simulate`."""
    step_s: float
    """Seconds of the bound."""
    lower: bool = False
    """True for a lower bound on the mean step of a long run; False for an upper bound."""
    part: bool = False
    """True if the bound covers only one phase of a step, so that it is not compared with a complete step."""


def bounds(q: Quantities) -> list[Bound]:
    """Return all bounds on the time of a step, in the order in which they are printed.

    The fourth is the bound of the configured split of the GPUs. The fifth is the capacity, the only lower bound. It is
    left out if samples are redundant. If filters remove samples, a run may take longer than the upper bounds: they do
    not include that a group which replaces a removed one starts later.
    """
    serving, training = q.rollout_gpus, q.gpus - q.rollout_gpus
    # Texts for `Bound.values`. E is 1, since a batch is trained once. c and w are not in the paper's formulas: seconds
    # that do not shrink with more GPUs, of a training step and of the engines' pause for a new version.
    work = f"N {q.samples:.4g}, μ {q.generate_s:.3g} GPU·s, L {q.longest_s:.4g} s"
    work_all_gpus = f"N {q.samples:.4g}, K {q.gpus}, μ {q.generate_all_s:.3g} GPU·s, L {q.longest_s:.4g} s"
    train = f"μ_tr {q.train_s:.3g} GPU·s"
    all_gpus = (q.samples, q.generate_all_s, q.longest_s, q.train_s, q.gpus)  # N, μ, L, μ_tr and K
    share = best_split(*all_gpus, q.async_ratio)
    return [
        Bound(
            name="generation alone, queued",
            formula="N·(μ/K + L/Q)",
            values=f"{work}, K {serving}, Q {q.in_flight:.4g}",
            step_s=q.samples * queue_bound(q.generate_s, q.longest_s, serving, q.in_flight),
            part=True,
        ),
        Bound(
            name="synchronous, all GPUs in turn",
            formula="N·μ/K + L + E·N·μ_tr/K + c",
            values=f"{work_all_gpus}, {train}, E 1, c {q.fixed_s + q.pause_s:.3g} s",
            step_s=sync_bound(*all_gpus) + q.fixed_s + q.pause_s,
        ),
        Bound(
            name="asynchronous, best split",
            formula="(N/K)·(μ + E·μ_tr) + L/(α+1) + c",
            values=(
                f"{work_all_gpus}, {train}, E 1, α {q.async_ratio:g}, β* {share:.2f}: {share * q.gpus:.3g} GPUs train, "
                f"c {max(q.fixed_s, q.pause_s):.3g} s"
            ),
            step_s=async_bound(*all_gpus, q.async_ratio) + max(q.fixed_s, q.pause_s),
        ),
        _this_split(q, f"{work}, {train}, {serving} + {training} GPUs"),
        # The capacity follows from mean lengths. Samples that finish first are shorter, so that no time is certain.
        *([] if q.redundant else [_capacity(q)]),
    ]


def _this_split(q: Quantities, values: str) -> Bound:
    """Return the bound for the configured split of the GPUs between engines and trainers.

    `values` is the text of the quantities that its formulas for α < 1 and α ≥ 1 share, for `Bound.values`.
    """
    # Below α = 1 no complete batch can be generated while another one is trained, so the times of both phases add up.
    generation = q.samples * q.generate_s / q.rollout_gpus
    training = q.samples * q.train_s / (q.gpus - q.rollout_gpus) + q.fixed_s
    if q.async_ratio < 1:
        return Bound(
            name="this split, synchronous",
            formula="N·μ/K_g + L + w + E·N·μ_tr/K_t + c",
            values=f"{values}, w {q.pause_s:.3g} s, c {q.fixed_s:.3g} s",
            step_s=generation + q.longest_s + q.pause_s + training,
        )
    return Bound(
        name="this split, asynchronous",
        formula="max(N·μ/K_g + L/(α+1) + w, E·N·μ_tr/K_t + c)",
        values=f"{values}, α {q.async_ratio:g}, w {q.pause_s:.3g} s, c {q.fixed_s:.3g} s",
        step_s=max(generation + q.longest_s / (q.async_ratio + 1) + q.pause_s, training),
    )


def _capacity(q: Quantities) -> Bound:
    """Return the bound on the mean time of a step that no schedule can beat in a long run without redundant samples.

    It assumes engines that are always full, a trainer that never waits, and the most episodes in flight at all times.
    Three limits give a time each: the engines' places (slots), the trainer, and the number of episodes in flight.
    """
    slots_s = q.samples * q.least_s / q.rollout_gpus
    trainer_s = q.samples * q.train_s / (q.gpus - q.rollout_gpus) + q.fixed_s
    # Little's law: with Q episodes in flight, one ends every latency/Q seconds.
    flight_s = q.samples * q.latency_s / q.in_flight
    values = f"slots {slots_s:.4g} s, trainer {trainer_s:.4g} s, {q.in_flight:.4g} episodes in flight {flight_s:.4g} s"
    if q.async_ratio == 0:  # generation and training take turns
        step_s, formula = max(slots_s, flight_s) + trainer_s, "max(slots, in flight) + trainer"
    else:
        step_s, formula = max(slots_s, flight_s, trainer_s), "max(slots, in flight, trainer)"
    assert math.isfinite(step_s), "every quantity is finite"
    return Bound(name="capacity", formula=formula, values=values, step_s=step_s, lower=True)
