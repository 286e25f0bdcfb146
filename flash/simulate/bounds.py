"""The bounds that a simulated run is measured against, with what is plugged into them.

Of a step of N samples on K workers, with μ and L the mean and the longest generation time, μ_tr the training time per
sample, E epochs and Q samples in flight (ROLL Flash, propositions 1 and 2):

    queue scheduling   mean completion per sample ≤ μ/K + L/Q
    synchronous        T ≤ N·μ/K + L + E·N·μ_tr/K
    asynchronous       T ≤ (N/K)·(μ + E·μ_tr) + L/(α+1), at the share β* of trainers

Here a worker is a GPU: μ is the GPU time of a sample while its engine is as full as the run can make it, L the time of
the longest of the samples in flight at that speed, its environments included. Seconds throughout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from flash.config.simulate import SimulateConfig
from flash.config.spread import parse_spread, uniform
from flash.config.tree import Config

EPISODES = 2048
"""Episodes drawn to know the workload; fewer where they have many turns."""
DRAWS = 40_000
"""Draws they may take: about a tenth of a second."""


def queue_bound(mean: float, longest: float, workers: float, in_flight: float) -> float:
    """Mean completion time per sample under queue scheduling: μ/K + L/Q."""
    return mean / workers + longest / in_flight


def sync_bound(samples: float, mean: float, longest: float, train: float, workers: float, epochs: int = 1) -> float:
    """Step time when all workers first generate and then train: N·μ/K + L + E·N·μ_tr/K."""
    return samples * mean / workers + longest + epochs * samples * train / workers


def async_bound(
    samples: float, mean: float, longest: float, train: float, workers: float, ratio: float, epochs: int = 1
) -> float:
    """Step time at the best split: (N/K)·(μ + E·μ_tr) + L/(α+1)."""
    return samples / workers * (mean + epochs * train) + longest / (ratio + 1)


def best_split(
    samples: float, mean: float, longest: float, train: float, workers: float, ratio: float, epochs: int = 1
) -> float:
    """Share of the workers that should train: β* = E·N·μ_tr / (N·μ + K·L/(α+1) + E·N·μ_tr)."""
    training = epochs * samples * train
    return training / (samples * mean + workers * longest / (ratio + 1) + training)


class Episodes(NamedTuple):
    """Drawn episodes, as means and, for the longest, one by one."""

    tokens: list[float]
    """Response tokens of each."""
    env_s: list[float]
    """Seconds each spends in its environment."""
    prompt: float
    """Mean tokens of the first observation."""
    observations: float
    """Mean tokens of the later ones, per episode."""
    context: float
    """Mean tokens of context under a token that is being decoded."""

    @property
    def mean_tokens(self) -> float:
        """Response tokens per episode."""
        return sum(self.tokens) / len(self.tokens)

    @property
    def mean_env_s(self) -> float:
        """Seconds per episode in its environment."""
        return sum(self.env_s) / len(self.env_s)

    @property
    def mean_length(self) -> float:
        """Tokens per episode that are trained on, observations included."""
        return self.prompt + self.observations + self.mean_tokens

    def longest_s(self, samples: float, step_s: float) -> float:
        """Expected time of the longest of `samples` episodes that decode a token in `step_s`.

        The k-th smallest of M drawn ones is the longest with chance (k/M)^n − ((k−1)/M)^n.
        """
        times = sorted(tokens * step_s + env for tokens, env in zip(self.tokens, self.env_s, strict=True))
        count = len(times)
        return sum(time * ((k / count) ** samples - ((k - 1) / count) ** samples) for k, time in enumerate(times, 1))


def draw_episodes(simulate: SimulateConfig, max_new_tokens: int, max_turns: int) -> Episodes:
    """Draw the workload. Slow and dead environments are left out: a bound holds without them."""
    prompt, response, observation, turns, reset, env, reward = (
        parse_spread(text)
        for text in (
            simulate.prompt_tokens, simulate.response_tokens, simulate.observation_tokens, simulate.turns,
            simulate.reset_s, simulate.env_s, simulate.reward_s,
        )
    )  # fmt: skip
    expected = min(max(turns.mean(), 1.0), max_turns)
    count = max(256, min(EPISODES, int(DRAWS / (3 * expected))))
    tokens: list[float] = []
    env_s: list[float] = []
    prompts = observations = contexts = 0.0
    for i in range(count):
        draws = min(max(round(turns.draw(uniform(i, 0))), 1), max_turns)
        seen = prompt.draw(uniform(i, 1))
        prompts += seen
        made, spent = 0.0, reset.draw(uniform(i, 2)) + reward.draw(uniform(i, 3))
        for turn in range(draws):
            if turn:
                shown = observation.draw(uniform(i, 4, turn))
                observations += shown
                seen += shown
            # One draw in each of `count` equal parts: single-turn lengths come out with their exact tail.
            u = (i + 0.5) / count if draws == 1 else uniform(i, 5, turn)
            length = float(min(max(round(response.draw(u)), 1), max_new_tokens))
            contexts += length * (seen + length / 2)
            seen += length
            made += length
            spent += env.draw(uniform(i, 6, turn))
        tokens.append(made)
        env_s.append(spent)
    return Episodes(tokens, env_s, prompts / count, observations / count, contexts / sum(tokens))


class Quantities(msgspec.Struct, frozen=True, kw_only=True):
    """What is plugged into the formulas."""

    samples: float
    """N: samples to finish per step, those that filters throw away included."""
    in_flight: float
    """Q: most samples in flight."""
    gpus: int
    """K."""
    rollout_gpus: int
    async_ratio: float
    per_engine: float
    """Sequences that an engine of this split decodes at once, at most."""
    generate_s: float
    """μ: GPU seconds to generate a sample on the engines of this split."""
    generate_all_s: float
    """μ when all GPUs serve engines: with few samples in flight, more engines mean emptier ones."""
    least_s: float
    """GPU seconds to generate a sample when prompts are cached: the least it can take."""
    longest_s: float
    """L."""
    latency_s: float
    """Mean seconds of an episode on an otherwise empty engine."""
    train_s: float
    """μ_tr: GPU seconds to train on a sample."""
    pause_s: float
    """Seconds a new version stops an engine for, prefilling again included."""
    fixed_s: float
    """Seconds of a training step that more GPUs do not shorten."""


def quantities(config: Config, ledger: Mapping[str, int]) -> Quantities:
    """Work out what a configuration's step consists of; the ledger tells how many samples filters cost."""
    simulate, rollout, train = config.simulate, config.rollout, config.train
    assert simulate is not None, "flash.config.check.simulated_rule"
    drawn = draw_episodes(simulate, rollout.max_new_tokens, rollout.max_turns)
    trained = ledger.get("trained", 0)
    kept = trained / (trained + ledger.get("filtered", 0)) if trained else 1.0
    extra = rollout.extra_groups * (rollout.group_size + rollout.extra_per_group)
    redundancy = 1 + rollout.extra_per_group / rollout.group_size
    in_flight = (1 + train.async_ratio) * train.batch_size * redundancy + extra
    if rollout.max_concurrent != "auto":
        in_flight = min(in_flight, rollout.max_concurrent * simulate.nodes)

    def fullest(gpus: int) -> float:
        engines = max(1, gpus // simulate.gpus_per_engine)
        full = min(float(config.engine.max_sequences), in_flight / engines)
        if simulate.kv_tokens:
            full = min(full, simulate.kv_tokens / max(drawn.context, 1.0))
        return max(1.0, full)

    def token_s(running: float) -> float:
        return simulate.step_s + running * (simulate.sequence_s + simulate.context_s * drawn.context)

    def sample_s(running: float, prefilled: float) -> float:
        engine_s = drawn.mean_tokens * token_s(running) / running + prefilled * simulate.prefill_s
        return engine_s * simulate.gpus_per_engine

    here, everywhere = fullest(simulate.rollout_gpus), fullest(simulate.gpus)
    observed = drawn.prompt + drawn.observations
    again = here * drawn.context * simulate.prefill_s if rollout.swap != "keep" else 0.0
    return Quantities(
        samples=train.batch_size / kept,
        in_flight=in_flight,
        gpus=simulate.gpus,
        rollout_gpus=simulate.rollout_gpus,
        async_ratio=train.async_ratio,
        per_engine=here,
        generate_s=sample_s(here, observed),
        generate_all_s=sample_s(everywhere, observed),
        least_s=sample_s(here, drawn.prompt / rollout.group_size + drawn.observations),
        longest_s=drawn.longest_s(in_flight, token_s(here)) + observed * simulate.prefill_s,
        latency_s=drawn.mean_tokens * token_s(1) + drawn.mean_env_s,
        train_s=drawn.mean_length * simulate.train_token_s,
        pause_s=simulate.swap_s + again,
        fixed_s=simulate.train_step_s,
    )


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """One bound on the seconds of a step."""

    name: str
    formula: str
    plugged: str
    """The quantities, in words."""
    step_s: float
    lower: bool = False
    """Whether no step can be shorter, rather than longer."""
    part: bool = False
    """Whether it is of one phase only, so that whole steps are not measured against it."""


def bounds(q: Quantities, batch_size: int) -> list[Bound]:
    """Every bound, the one that the run is measured against last but one, and the capacity last."""
    serving, training = q.rollout_gpus, q.gpus - q.rollout_gpus
    work = f"N {q.samples:.4g}, μ {q.generate_s:.3g} GPU·s, L {q.longest_s:.4g} s"
    everywhere = f"N {q.samples:.4g}, K {q.gpus}, μ {q.generate_all_s:.3g} GPU·s, L {q.longest_s:.4g} s"
    train = f"μ_tr {q.train_s:.3g} GPU·s"
    whole = (q.samples, q.generate_all_s, q.longest_s, q.train_s * batch_size / q.samples, q.gpus)
    share = best_split(*whole, q.async_ratio)
    return [
        Bound(
            name="generation alone, queued",
            formula="N·(μ/K + L/Q)",
            plugged=f"{work}, K {serving}, Q {q.in_flight:.4g}",
            step_s=q.samples * queue_bound(q.generate_s, q.longest_s, serving, q.in_flight),
            part=True,
        ),
        Bound(
            name="synchronous, all GPUs in turn",
            formula="N·μ/K + L + E·N·μ_tr/K + c",
            plugged=f"{everywhere}, {train}, E 1, c {q.fixed_s + q.pause_s:.3g} s",
            step_s=sync_bound(*whole) + q.fixed_s + q.pause_s,
        ),
        Bound(
            name="asynchronous, best split",
            formula="(N/K)·(μ + E·μ_tr) + L/(α+1) + c",
            plugged=(
                f"{everywhere}, {train}, E 1, α {q.async_ratio:g}, β* {share:.2f}: {share * q.gpus:.3g} GPUs train, "
                f"c {max(q.fixed_s, q.pause_s):.3g} s"
            ),
            step_s=async_bound(*whole, q.async_ratio) + max(q.fixed_s, q.pause_s),
        ),
        _this_split(q, batch_size, f"{work}, {train}, {serving} + {training} GPUs"),
        _capacity(q, batch_size),
    ]


def _this_split(q: Quantities, batch_size: int, plugged: str) -> Bound:
    """Both phases on the GPUs they have. Below α = 1 a batch is not made while another trains, not whole: they add."""
    generation = q.samples * q.generate_s / q.rollout_gpus
    training = batch_size * q.train_s / (q.gpus - q.rollout_gpus) + q.fixed_s
    if q.async_ratio < 1:
        return Bound(
            name="this split, synchronous",
            formula="N·μ/K_g + L + w + E·N·μ_tr/K_t + c",
            plugged=f"{plugged}, w {q.pause_s:.3g} s, c {q.fixed_s:.3g} s",
            step_s=generation + q.longest_s + q.pause_s + training,
        )
    return Bound(
        name="this split, asynchronous",
        formula="max(N·μ/K_g + L/(α+1) + w, E·N·μ_tr/K_t + c)",
        plugged=f"{plugged}, α {q.async_ratio:g}, w {q.pause_s:.3g} s, c {q.fixed_s:.3g} s",
        step_s=max(generation + q.longest_s / (q.async_ratio + 1) + q.pause_s, training),
    )


def _capacity(q: Quantities, batch_size: int) -> Bound:
    """What no schedule can beat: full slots, a trainer that never waits, as many episodes alive as may be."""
    slots = q.samples * q.least_s / q.rollout_gpus
    trainer = batch_size * q.train_s / (q.gpus - q.rollout_gpus) + q.fixed_s
    alive = q.samples * q.latency_s / q.in_flight
    plugged = f"slots {slots:.4g} s, trainer {trainer:.4g} s, {q.in_flight:.4g} episodes in flight {alive:.4g} s"
    if q.async_ratio == 0:
        step_s, formula = max(slots, alive) + trainer, "max(slots, in flight) + trainer"
    else:
        step_s, formula = max(slots, alive, trainer), "max(slots, in flight, trainer)"
    assert math.isfinite(step_s), "every quantity is finite"
    return Bound(name="capacity", formula=formula, plugged=plugged, step_s=step_s, lower=True)
