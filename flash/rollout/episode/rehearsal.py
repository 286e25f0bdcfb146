"""Rehearsal: one turn is played before any engine starts, so that a broken environment is found within seconds.

`rehearse` runs the real `EpisodePlayer`, with its deadlines and its checks, on a response that needs no model. One
problem that can be played is enough, because an environment that fails only sometimes does not stop a run either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from flash.environment.interface import Environment
from flash.errors import ConfigError
from flash.rollout.engine import ResponseRequest
from flash.rollout.episode.episode import EpisodePlayer, EpisodeProgress, EpisodeSettings
from flash.rollout.episode.phases import Phases
from flash.rollout.episode.tokenizer import Tokenizer
from flash.samples.tasks import SEED_STRIDE
from flash.sampling import Sampling
from flash.types import Completion, Failure, Lease, Task, Trajectory, VersionRun

PROBLEMS = 3
"""Number of problems that are tried; one of them must be playable. With 3 problems, an environment that fails for half
of its problems passes in seven of eight runs."""


class Echo:
    """A `Responder` that answers at once with the last token of the prompt, in place of the engines."""

    async def generate(self, request: ResponseRequest) -> Completion:
        """Return a response of one token, of version 0 and with the made-up log-prob −1. It is never trained."""
        last = request.prompt[-1:]
        request.on_tokens(last)
        # One token does not have the form that a grammar asks for. So the response is marked as cut off by its limit:
        # an agent has to expect that such a response is incomplete, but not that a complete one has another form.
        return Completion(last, [-1.0], [VersionRun(0, 1)], "stop" if request.grammar is None else "length")


async def rehearse(
    tokenizer: Tokenizer,
    make_env: Callable[[str], Environment],
    kind_of: Callable[[int], str],
    settings: EpisodeSettings,
    *,
    samplings: Mapping[str, Sampling],
    run_seed: int,
    now: Callable[[], float],
) -> Trajectory:
    """Play one turn of the first training problem, or of the next problems if it fails, and return the trajectory.

    The node calls this before it starts its engines, and `flash train --dry-run` calls it without engines.

    Args:
        tokenizer: the model's tokenizer.
        make_env: makes an environment for a kind of problems.
        kind_of: returns the kind of the problem of a seed.
        settings: limits and deadlines of the run and of its domains; only one turn is played.
        samplings: sampling settings by kind, of which an agent is told; those under the empty name hold for all other
            kinds.
        run_seed: the run's seed, from which the seeds of its training problems follow.
        now: returns the present time in seconds, on any clock.

    Raises:
        ConfigError: `PROBLEMS` problems failed; the error names the reason of the last one.
        FlashError: `kind_of` has raised it.
    """
    # Problems are named by seeds. The training problems of a run have consecutive seeds, from this one on.
    first = run_seed * SEED_STRIDE
    failures: list[Failure] = []
    for number in range(PROBLEMS):
        kind = kind_of(first + number)
        own = msgspec.structs.replace(settings.for_kind(kind), max_turns=1)
        player = EpisodePlayer(make_env, tokenizer, Echo(), own, Phases(), now=now)
        sampling = samplings.get(kind, samplings[""])
        task = Task(number, number, 0, first + number, kind=kind, sampling=sampling)
        played = await player.play(Lease(number, task, 0), EpisodeProgress())
        if isinstance(played, Trajectory):
            return played
        failures.append(played)
    last = failures[-1]
    raise ConfigError(
        f"env.path: the environment cannot be played; {PROBLEMS} problems were tried before any engine, the last one "
        f"ended in {last.outcome}: {last.message}"
    )
