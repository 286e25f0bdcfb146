"""Scenario: the configuration and the faults of one seed, how they are drawn, and how a failing one is made smaller.

`flash.simulate.faults.play` plays scenarios. A seed gives the same scenario everywhere: each draw follows from the ones
before it, so a new draw in the middle changes all scenarios.

Names: the *hub* holds the state of the run, and runs in one process with node 0. A *node* runs engines and episodes. A
*rank* is a process that trains. `Settings` are keys of the run's configuration with a dot, such as `run.steps`, and
their values. All times are seconds of the virtual clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from flash.config.check import check_eval, check_rollout
from flash.config.check_learning import check_algorithm, check_batch, check_lora, check_train
from flash.config.tree import Config
from flash.environment.interface import Domain
from flash.errors import ConfigError
from flash.hub.protocol import (
    BatchRequest,
    CancelRequest,
    ClaimRequest,
    Commit,
    DeliverRequest,
    EngineReport,
    IncarnationRequest,
    JoinRequest,
    LeaseRequest,
    Leave,
    PublishRequest,
    SnapshotRequest,
    VersionRequest,
)
from flash.samples.rules import ProblemKinds

Kind = Literal[
    "crash hub",
    "lose machine of hub",
    "crash node",
    "lose machine of node",
    "crash rank",
    "hang hub",
    "hang node",
    "hang rank",
    "slow network",
    "full disk",
    "slow disk",
    "engine dies",
    "engines refuse to start",
    "engine hangs",
    "engines are slow",
    "environments raise",
    "environments hang",
    "lose connection",
    "cut one way",
    "cut both ways",
    "join",
    "drain",
    "drain slowly",
    "interrupt",
]
"""Kind of a fault, or of an event that a person causes. `flash.simulate.faults.play._happen` does each of them:

- crash: the process is killed. lose machine: its processes vanish without ending their connections, and unsynced data
  of the hub's machine is lost. hang: the process stops for a while (SIGSTOP).
- slow network: all messages of a machine are late. lose connection: one connection breaks. cut: no bytes pass between
  a machine and the hub's machine, in one direction or both.
- full disk, slow disk: the disk of the hub's machine. engine …, environments …: see the names.
- join: one more node. drain: a person asks a node to leave, maybe over a slow network. interrupt: a person interrupts
  the run, and resumes it, maybe with other settings.
"""
WEIGHTS: dict[Kind, int] = {
    "crash hub": 8,
    "lose machine of hub": 3,
    "crash node": 4,
    "lose machine of node": 2,
    "crash rank": 4,
    "hang hub": 2,
    "hang node": 4,
    "hang rank": 2,
    "slow network": 2,
    "full disk": 1,
    "slow disk": 2,
    "engine dies": 4,
    "engines refuse to start": 1,
    "engine hangs": 1,
    "engines are slow": 1,
    "environments raise": 2,
    "environments hang": 2,
    "lose connection": 5,
    "cut one way": 2,
    "cut both ways": 3,
    "join": 2,
    "drain": 3,
    "drain slowly": 3,
    "interrupt": 5,
}
"""Relative frequencies of the kinds. The most frequent one is a crash of the hub, after which a run recovers from its
files."""
MESSAGES = tuple(
    each.__name__
    for each in (
        *(DeliverRequest, DeliverRequest, DeliverRequest, LeaseRequest, CancelRequest, ClaimRequest, VersionRequest),
        *(EngineReport, IncarnationRequest, BatchRequest, Commit, Commit, PublishRequest, SnapshotRequest),
        *(JoinRequest, Leave),
    )
)
"""Messages at whose arrival at the hub a fault may happen, by name. A name that comes more often is drawn more often,
as in the other tuples below."""
ANSWERED = " answered"
"""End of the text in `Fault.on` for the arrival of a reply at the process that has sent the message."""
_PROMISES = tuple(each.__name__ + ANSWERED for each in (DeliverRequest, Commit, BatchRequest, BatchRequest))
"""Moments at which the hub has promised something that the next hub has to keep."""
_NEW_TASKS = tuple(each.__name__ + ANSWERED for each in (LeaseRequest, Commit, PublishRequest))
"""Moments at which nodes ask for tasks."""
MOMENTS: dict[Kind, tuple[str, ...]] = {
    "crash hub": _PROMISES,
    "lose machine of hub": _PROMISES,
    "drain": _NEW_TASKS,
    "drain slowly": _NEW_TASKS,
    "interrupt": (
        *(BatchRequest.__name__ + ANSWERED, BatchRequest.__name__ + ANSWERED),
        *(BatchRequest.__name__, Commit.__name__, SnapshotRequest.__name__),
    ),
}
"""Moments at which certain kinds of faults do the most harm. Half of these faults happen there."""
_OF_HUB: frozenset[Kind] = frozenset({"crash hub", "lose machine of hub", "interrupt"})
"""Kinds of faults after which another hub process goes on."""
HORIZON_S = 30.0
"""Seconds since the start of the simulation in which the drawn faults begin."""
AGAIN = 0.3
"""Share of the runs in which a fault happens once or twice more, since a recovery may spoil what the next one needs."""
MOST_DRAWS = 50
"""Most draws of a configuration until the checks of a real run accept one."""


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """One fault: when it happens, to whom, and for how long."""

    kind: Kind
    at: float
    """Seconds since the start of the simulation."""
    who: int = 0
    """Number from which the affected node, rank, engine or connection follows, by its remainder."""
    seconds: float = 0.0
    """Seconds that the fault lasts; 0 for kinds that happen at once. If a node or its machine is lost: seconds until
    the next process of the node may start."""
    on: str = ""
    """Message whose next arrival at the hub after `at` is the moment of the fault; with `ANSWERED` at its end, the next
    arrival of a reply to such a message. Empty: `at` is the moment."""
    passes: int = 0
    """Number of passes of the event loop between that moment and the fault, in which the processes go on."""
    wait: float = 0.0
    """Seconds between these passes and the fault."""
    settings: dict[str, Any] = {}
    """Settings with which the run is resumed after an interrupt; empty: they do not change. The key `domains`, which is
    no setting, has the new weights of the domains."""


class Scenario(msgspec.Struct, frozen=True):
    """Configuration and faults of one simulated run. Equal scenarios give equal runs."""

    seed: int
    settings: dict[str, Any]
    """Settings of the run that are not in `BASE`, or differ from it."""
    nodes: int
    """Number of nodes that join node 0 at the start."""
    domains: dict[str, float]
    """Weight of each domain, a kind of problems, by name. Problems are drawn by these weights. Empty: no domains."""
    faults: list[Fault]
    """Faults, in any order."""

    def config(self, output_dir: str) -> Config:
        """Return the configuration of the run, whose folder is made in `output_dir`."""
        return configured(self.settings | {"run.output_dir": output_dir})


BASE: dict[str, Any] = {
    "run.name": "faults",
    "model.path": "simulated",
    "model.max_length": 1000,
    "env.path": "envs.arithmetic:Arithmetic",
    "rollout.max_new_tokens": 120,
    "rollout.breaker": 100_000,
    "rollout.max_concurrent": 16,
    "engine.max_sequences": 4,
    "engine.stream_interval": 4,
    "cluster.gpus_per_node": 0,
    "deadlines.rendezvous": 60.0,
    "deadlines.request": 12.0,
    "deadlines.engine_start": 20.0,
    "deadlines.generate": 60.0,
    "deadlines.env_step": 10.0,
    "deadlines.episode": 120.0,
    "deadlines.swap": 10.0,
    # The last evaluation may wait for an episode of training, and for the evaluation before it: three episodes in all.
    "deadlines.step": 400.0,
    "deadlines.collective": 20.0,
    "deadlines.close": 2.0,
    "deadlines.shutdown": 20.0,
    "simulate.step_s": 0.05,
    "simulate.sequence_s": 0.0,
    "simulate.context_s": 0.0,
    "simulate.prefill_s": 0.0,
    "simulate.swap_s": 0.3,
    "simulate.train_step_s": 1.0,
    "simulate.train_token_s": 0.002,
    "simulate.prompt_tokens": 10.0,
    "simulate.response_tokens": {"kind": "lognormal", "mean": 40, "deviation": 30, "low": 1, "high": 120},
    "simulate.env_s": [0.1, 0.5],
}
"""Settings of all simulated runs. Deadlines are short, so that a run recovers in a minute or two of virtual time."""


def configured(settings: dict[str, Any]) -> Config:
    """Return the configuration with `BASE` and these settings, which come first if both have a key.

    The rules between keys are not checked (`faults_of` does). Raises ValidationError if a key or value is unknown.
    """
    tables: dict[str, Any] = {}
    for key, value in (BASE | settings).items():
        section, _, name = key.partition(".")
        table = tables.setdefault(section, {})
        if name:  # a key without a dot names a whole table, which gets its defaults
            table[name] = value
    config = msgspec.convert(tables, Config)
    return replace(config, model=replace(config.model, dtype="float32"))


def problems_of(domains: dict[str, float], config: Config) -> ProblemKinds:
    """Return the kinds of the problems of a run with these domains: which kind a seed has, and their weights.

    `domains` has the weight of each domain by name. Without domains, all problems have the one kind "".
    """
    names = sorted(domains)
    return ProblemKinds.of(
        config,
        lambda seed: names[seed % len(names)] if names else "",
        {name: Domain(weight=weight) for name, weight in domains.items()},
    )


# -- drawing -----------------------------------------------------------------------------------------------------------


def draw(seed: int) -> Scenario:
    """Return the scenario of a seed. `play_seed` plays it."""
    dice = random.Random(f"scenario {seed}")
    settings = _draw_settings(dice, seed)
    domains = {}
    # A real run refuses `fifo_window`, which delivers groups nearly in order, together with domains.
    if "rollout.fifo_window" not in settings and dice.random() < 0.25:
        domains = {name: float(dice.choice([1, 1, 2, 5])) for name in ("a", "b", "c")[: dice.randint(2, 3)]}
    faults = [_draw_fault(dice, settings, domains) for _ in range(dice.choice([1, 1, 2, 2, 3, 4, 6]))]
    if dice.random() < AGAIN:
        # The files of the run have to carry it over several hubs, so a fault that ends a hub is preferred.
        again = dice.choice([fault for fault in faults if fault.kind in _OF_HUB] or faults)
        for _ in range(dice.choice([1, 2])):
            again = replace(again, at=round(again.at + dice.uniform(1, 20), 2))
            faults.append(again)
    faults.sort(key=lambda fault: fault.at)
    return Scenario(seed, settings, dice.choice([0, 1, 1, 2, 2, 3]), domains, faults)


def _draw_settings(dice: random.Random, seed: int) -> dict[str, Any]:
    """Return drawn settings that the checks of a real run accept. `seed` becomes the seed of the run."""
    for _ in range(MOST_DRAWS):
        settings = _draw_any_settings(dice, seed)
        if not faults_of(settings):
            return settings
    raise AssertionError("the checks accept hardly any drawn configuration")


def faults_of(settings: dict[str, Any]) -> list[str]:
    """Return the problems that the checks of a real run find in these settings, as sentences; empty if there is none.

    Checks of the machine, such as of its GPUs, are left out.
    """
    config = configured(settings)
    checks = (check_batch, check_rollout, check_train, check_lora, check_algorithm, check_eval)
    try:
        return [str(problem) for one in checks for problem in one(config)]
    except ConfigError as error:
        return [str(error)]


def _draw_any_settings(dice: random.Random, seed: int) -> dict[str, Any]:
    """Return drawn settings that may contradict each other. Runs are small, so that a simulation takes a second."""
    group = dice.choice([2, 2, 3, 4])
    groups = dice.choice([1, 2, 3, 4, 4, 6])
    settings: dict[str, Any] = {
        "run.seed": seed,
        "run.steps": dice.randint(3, 6),
        "rollout.group_size": group,
        "rollout.retries": dice.randint(1, 3),
        "rollout.extra_per_group": dice.choice([0, 0, 0, 1]),
        "rollout.max_concurrent": dice.choice([2, 2, 4, "auto"]),
        "train.batch_size": group * groups,
        "train.minibatches": dice.choice([1, 1, 2]) if groups % 2 == 0 else 1,
        "engine.count": dice.choice([1, 1, 2]),
        "cluster.max_restarts": dice.choice([1, 3]),
        "eval.every": dice.choice([0, 1, 2]),
        "eval.problems": dice.randint(1, 4),
        "checkpoint.every": dice.choice([1, 2, 3, 10, 10]),
        "checkpoint.keep": dice.choice([1, 2]),
        "checkpoint.batches": dice.choice(["kept", "kept", "kept", "all", "none"]),
        "checkpoint.journal": dice.choice(["write", "write", "fsync", "fsync", "off"]),
        "cluster.trainer_ranks": dice.choice([1, 1, 2]),
        "simulate.turns": dice.choice([1.0, [1.0, 2.0]]),
        "simulate.fail_stop": dice.choice([0.0, 0.0, 0.05]),
    }
    if dice.random() < 0.2:
        settings["rollout.drop_equal_rewards"] = True
    if dice.random() < 0.15:
        settings["rollout.accuracy_bounds"] = [0.0, 0.9]
    if barriers := [name for name in ("batch", "group", "turn") if dice.random() < 0.12]:
        settings["rollout.barriers"] = barriers
    if dice.random() < 0.2:
        settings["lora.rank"] = 4
    return settings | _draw_resumable(dice)


def _draw_resumable(dice: random.Random) -> dict[str, Any]:
    """Return drawn values for the keys that may change when a run is resumed."""
    alpha = dice.choice([0.0, 0.5, 1.0, 1.0, 2.0, round(dice.uniform(0, 2), 2)])
    settings: dict[str, Any] = {
        "train.async_ratio": alpha,
        "train.stream": dice.random() < 0.4,
        "rollout.on_expire": dice.choice(["mask", "mask", "requeue", "wait"]),
        "rollout.swap": dice.choice(["recompute", "keep", "abort", "drain"]),
        "rollout.extra_groups": dice.choice([0, 0, 0, 1]),
        # Runs are short, so the default is drawn rarely: under it hardly a token becomes too old.
        "train.max_token_age": math.ceil(alpha) if alpha and dice.random() >= 0.2 else None,
    }
    if dice.random() < 0.2:
        settings["rollout.fifo_window"] = dice.choice([1.0, 1.5, 2.0])
    return settings


def _draw_fault(dice: random.Random, settings: dict[str, Any], domains: dict[str, float]) -> Fault:
    """Return a fault that happens at a random time, or at a random message.

    `settings` and `domains` are those of the run, which an interrupt may change.
    """
    kind = dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    fault = Fault(kind, round(dice.uniform(0, HORIZON_S), 2), dice.randrange(1000))
    on = ""
    if kind in MOMENTS and dice.random() < 0.5:
        on = dice.choice(MOMENTS[kind])
    elif dice.random() < 0.5:
        on = dice.choice(MESSAGES) + dice.choice(["", "", ANSWERED])
    if on:
        # A run may be over before a message that comes after a late time.
        fault = replace(fault, at=round(fault.at / 2, 2), on=on)
        fault = replace(fault, passes=dice.choice([0, 1, 3, dice.randrange(40)]), wait=_draw_wait(dice))
    seconds = 0.0
    # Some durations are longer than the deadlines that notice the fault, and some are shorter: a short fault must not
    # end anything. A hub that hangs is restarted after 60 s, and a cut connection is lost after 60 s.
    if kind in ("hang hub", "hang node", "hang rank"):
        seconds = dice.choice([3.0, 8.0, 15.0, 40.0, 100.0, 100.0])
    elif kind in ("cut one way", "cut both ways"):
        seconds = dice.choice([1.0, 5.0, 20.0, 50.0, 80.0])
    elif kind in ("full disk", "slow disk", "slow network", "engines are slow"):
        seconds = dice.uniform(2, 30)
    elif kind in ("engines refuse to start", "environments raise", "environments hang"):
        seconds = dice.uniform(5, 40)
    elif kind in ("drain", "lose machine of node", "crash node", "interrupt"):
        seconds = dice.choice([1.0, 3.0, 20.0])  # until the process comes back
    elif kind == "drain slowly":
        seconds = dice.uniform(5, 30)
    fault = replace(fault, seconds=round(seconds, 2))
    if kind == "interrupt" and dice.random() < 0.6:
        fault = replace(fault, settings=_draw_change(dice, settings, domains))
    return fault


def _draw_change(dice: random.Random, settings: dict[str, Any], domains: dict[str, float]) -> dict[str, Any]:
    """Return settings with which a run is resumed after an interrupt, as in `Fault.settings`.

    Empty: no setting changes, because the drawn ones contradict the `settings` of the run.
    """
    if domains and dice.random() < 0.4:
        return {"domains": {name: float(dice.choice([1, 3, 8])) for name in domains}}
    if dice.random() < 0.15:  # another size of groups, which the resume has to refuse
        size = settings["rollout.group_size"]
        return {"rollout.group_size": size + 1, "train.batch_size": settings["train.batch_size"] // size * (size + 1)}
    changed = _draw_resumable(dice)
    return {} if faults_of(settings | changed) else changed


def _draw_wait(dice: random.Random) -> float:
    """Return the seconds between a message and a fault: mostly less than a write to the disk takes (0.04 s)."""
    return round(dice.choice([0.0, *(dice.uniform(0, most) for most in (0.01, 0.05, 0.05, 2.0))]), 4)


# -- making a scenario smaller -----------------------------------------------------------------------------------------


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yield scenarios that are a little smaller than this one: fewer faults, fewer steps and nodes, fewer settings.

    Each differs from `scenario` in one place. Those with half of the faults come first, since `shrink` takes the first
    one that still fails. Settings are removed only if the checks of a real run accept the rest.
    """
    faults = scenario.faults
    for half in (faults[: len(faults) // 2], faults[len(faults) // 2 :]):
        if 1 < len(faults) != len(half):
            yield replace(scenario, faults=half)
    for index, fault in enumerate(faults):
        yield replace(scenario, faults=[*faults[:index], *faults[index + 1 :]])
        for simpler in (replace(fault, settings={}), replace(fault, passes=0), replace(fault, wait=0.0)):
            if simpler != fault:
                yield replace(scenario, faults=[*faults[:index], simpler, *faults[index + 1 :]])
    if scenario.domains:
        yield replace(scenario, domains={})
    if scenario.nodes:
        yield replace(scenario, nodes=scenario.nodes - 1)
    steps = scenario.settings["run.steps"]
    if steps > 1:
        yield replace(scenario, settings=scenario.settings | {"run.steps": steps - 1})
    needed = ("run.seed", "run.steps", "rollout.group_size", "train.batch_size")  # without these a run is larger
    for key in scenario.settings:
        if key not in needed:
            fewer = {name: value for name, value in scenario.settings.items() if name != key}
            if not faults_of(fewer):
                yield replace(scenario, settings=fewer)
