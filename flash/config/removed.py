"""Keys that earlier versions of Flash had: the replacement of each, and what to do with a file that has one.

The recorded configuration of an older run must stay readable, although it holds keys that are gone.
`flash.config.load` takes them out of the tables before it decodes these, and `flash.config.resuming` compares them with
the present settings.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from flash.config.decode import NONE, OVERRIDE, RECORDED, show, take_out
from flash.text import harmless

MOST_LISTED = 5
"""Largest number of items in a message about ignored keys, the item "and N more keys" included. The recorded
configuration of an old run may have dozens."""


class RemovedKey(NamedTuple):
    """Key that earlier versions of Flash had. The recorded configuration of an older run may still hold it."""

    default: Any
    """Default that the key had, or the value whose effect is that of no key. A file may still have this value, which is
    ignored."""
    why: str
    """Sentence, without the final dot, that says what Flash does now, and what to use instead."""


ALARM_LIMITS = {
    **dict.fromkeys(("stale", "masked", "failures"), 0.1),
    **dict.fromkeys(("ess", "clipping", "equal_rewards", "lag"), 0.5),
    **dict.fromkeys(("trainer_waits", "engines_idle"), 0.9),
    "mismatch": 0.01,
    "entropy": 0.02,
    "nonfinite": 0.0,
}
"""Defaults of the removed keys `alarms.NAME`, the limits of the alarms, by NAME."""
RHYTHM = {
    **dict.fromkeys(("local_heads", "global_heads"), 0.3),
    "window": 10,
    "reach": 3,
    "shift": 0.4,
    "low_distance": 0.5,
    "high_change": 0.6,
}
"""Defaults of the removed options of `algorithm.rhythm` that are numbers, by option."""
PASSED_OVER = (
    "Problems are issued in their order, and none is passed over; rollout.drop_equal_rewards replaces groups that "
    "teach nothing"
)
"""Field `why` of the removed keys that chose between problems."""
REMOVED: dict[str, RemovedKey] = {
    "rollout.session_s": RemovedKey(
        0.0,
        "The KV caches of episodes that wait for their environments are not counted any more; if many turns overfill "
        "the engines' KV caches, rollout.max_concurrent bounds the episodes of a node",
    ),
    "rollout.max_episode_tokens": RemovedKey(
        None, "rollout.max_turns responses of at most rollout.max_new_tokens tokens are the limit of an episode"
    ),
    "rollout.max_branches": RemovedKey(
        16, "Each branch of an episode has a response of its own, so rollout.max_turns also limits the branches"
    ),
    "rollout.quarantine": RemovedKey(
        16, "After a quarter of rollout.breaker samples of one kind, problems of this kind are left out"
    ),
    "rollout.stop_token_ids": RemovedKey([], "rollout.stop takes token ids beside texts"),
    "rollout.selection": RemovedKey("uniform", PASSED_OVER),
    "rollout.selection_floor": RemovedKey(0.1, PASSED_OVER),
    "algorithm.branches": RemovedKey("same", "Each branch gets the advantage of its episode"),
    "algorithm.entropy_target": RemovedKey(
        None, "The coefficient of the entropy bonus is the same in all steps; algorithm.entropy_bonus sets it"
    ),
    **{
        f"algorithm.rhythm.{name}": RemovedKey(value, f"It is fixed at {value:g}, as algorithms/rhythm.py says")
        for name, value in RHYTHM.items()
    },
    "train.eps": RemovedKey(1e-8, "AdamW's ε is 1e-08"),
    "train.moments": RemovedKey(
        "float32", 'Moments are in float32; train.offload = ["moments"] keeps them on the host'
    ),
    "algorithm.rhythm.signs": RemovedKey("both", "Advantages of both signs are multiplied"),
    "algorithm.rhythm.heads": RemovedKey("batch", "Heads are classified in each batch"),
    "algorithm.rhythm.layers": RemovedKey(5, "The attention of 5 layers from the middle third is used"),
    "rollout.share_drift": RemovedKey(1.0, "A domain may be one batch ahead of its share"),
    **{
        f"rollout.{name}": RemovedKey(True, f'rollout.barriers = ["{barrier}"] does what false did')
        for name, barrier in (("queue_scheduling", "batch"), ("replicate_prompts", "group"), ("env_async", "turn"))
    },
    "observe": RemovedKey({}, "track.to takes the import path of your own tracker, beside the names of others"),
    "run.log_samples_mb": RemovedKey(1000, "Readable samples have at most 1 GB; run.log_samples chooses their number"),
    "tiny_model.seed": RemovedKey(1, "The seed of a tiny model is 1; run.seed repeats a run with other random choices"),
    "tiny_model.tied": RemovedKey(True, "The embedding and the output layer of a tiny model share their weights"),
    "weights.deltas": RemovedKey(False, 'weights.backend = "tcp_deltas" does what true did'),
    "weights.canary_tokens": RemovedKey(32, "The test text has 32 tokens, or fewer if model.max_length is smaller"),
    "algorithm.constant_length": RemovedKey(None, "The aggregation `constant` divides by rollout.max_new_tokens"),
    "critic.count": RemovedKey(
        None, "The objective says how many critics it has: two for asyppo, `critics` of the class for one of your own"
    ),
    "critic.tiny_layers": RemovedKey(
        None, "With [tiny_model], a missing critic.path gets a tiny model with a third of the policy's layers"
    ),
    "critic.max_grad_norm": RemovedKey(1.0, "train.max_grad_norm also holds for the critics"),
    "checkpoint.export": RemovedKey(
        True, "After its last step a run always writes the trained model to its folder model/"
    ),
    "engine.max_restarts": RemovedKey(3, "cluster.max_restarts also limits the restarts of an engine in a row"),
    "cluster.hub_host": RemovedKey(None, 'cluster.hub = "HOST:PORT" is the address of the hub, also "HOST:0"'),
    "cluster.hub_port": RemovedKey(0, 'cluster.hub = "HOST:PORT" is the address of the hub, also ":PORT"'),
    "deadlines.batch": RemovedKey(3600, "deadlines.step also limits the wait for the groups of a step"),
    "deadlines.connect": RemovedKey(60, "deadlines.request also limits connections"),
    "deadlines.env_reset": RemovedKey(60, "deadlines.env_step also limits the reset of an environment"),
    "deadlines.hub": RemovedKey(300, "The hub has five times deadlines.request to answer"),
    "deadlines.engine_step": RemovedKey(
        300, "A step of an engine has 300 s, or half of deadlines.generate if that is shorter"
    ),
    "deadlines.sink": RemovedKey(60, "Trackers and the sink have 60 s at the end of the run"),
    "simulate.nodes": RemovedKey(1, "cluster.nodes is the number of nodes among which the engines are divided"),
    "simulate.gpus_per_engine": RemovedKey(1, "engine.tensor_parallel is the number of GPUs per engine"),
    **{
        f"alarms.{reaction}": RemovedKey([], f'alarms.reactions names the alarms, each as NAME = "{reaction}"')
        for reaction in ("off", "checkpoint", "stop")
    },
    "alarms.window": RemovedKey(10, "A metric is averaged over 10 steps before it is compared with its limit"),
    "alarms.age": RemovedKey(
        None, "The age of trained tokens raises no alarm; train.max_token_age limits it, and metrics.jsonl has it"
    ),
    **{
        f"alarms.{name}": RemovedKey(
            limit, f'The limit of this alarm is {limit:g}; alarms.reactions.{name} = "off" turns it off'
        )
        for name, limit in ALARM_LIMITS.items()
    },
}
"""Keys that were removed, by dotted path."""


class FoundKey(NamedTuple):
    """Key that earlier versions of Flash had, found in settings of such a version."""

    key: str
    """Dotted path."""
    value: Any
    """Value that the settings give it."""
    at_default: bool
    """True if the value is the default that the key had, so that Flash does the same without the key."""


def removed_keys(settings: Mapping[str, Any]) -> list[FoundKey]:
    """Return each key of `REMOVED` that `settings`, nested tables as TOML has them, hold."""
    found: list[FoundKey] = []
    for key, removed in REMOVED.items():
        *tables, name = key.split(".")
        table: Any = settings
        for outer in tables:
            # The input is not checked yet: a table may be missing, or another value may be in its place.
            table = cast("dict[str, Any]", table).get(outer) if isinstance(table, dict) else None
        if isinstance(table, dict) and name in table:
            value = cast("dict[str, Any]", table)[name]
            default = NONE if removed.default is None else removed.default  # TOML has no null: files hold this text
            # False == 0 in Python, but not in TOML.
            at_default = value == default and isinstance(value, bool) == isinstance(default, bool)
            found.append(FoundKey(key, value, at_default))
    return found


def ignore_removed(merged: dict[str, Any], origins: Mapping[str, str]) -> None:
    """Take keys that earlier versions of Flash had out of `merged`, if a file sets them to their former default.

    A run records all defaults, so the config.toml of a run of an older version holds such keys, although its user never
    set them. In such a file (RECORDED) another value is ignored, too, with a warning: the run must stay readable. Other
    values in a file that a user has written are left, and so are overrides. `load` then refuses them as unknown keys.
    One line on stderr names the keys of each file that are ignored at their default.

    `origins`: the source that set each dotted key; a key without an entry counts as an override.
    """
    at_default: dict[str, list[str]] = {}
    for removed in removed_keys(merged):
        file = origins.get(removed.key, OVERRIDE)
        if file == OVERRIDE or not (removed.at_default or Path(file).name == RECORDED):
            continue
        take_out(merged, removed.key)
        if removed.at_default:
            at_default.setdefault(file, []).append(removed.key)
        else:
            _report_without_effect(file, removed.key, show(removed.value))
    for file, keys in at_default.items():
        _report_ignored(file, tuple(keys))


@cache
def _report_ignored(file: str, keys: tuple[str, ...]) -> None:
    """Print one line on stderr about the ignored keys of a file. `@cache`: a command may read a file several times, and
    prints the line once."""
    listed = [f"`{key}`" for key in keys]
    if len(listed) > MOST_LISTED:
        listed[MOST_LISTED - 1 :] = [f"and {len(listed) - MOST_LISTED + 1} more keys"]
    were = "was removed, and it is" if len(keys) == 1 else "were removed, and they are"
    has = "it has its" if len(keys) == 1 else "they have their"
    sys.stderr.write(f"flash: {', '.join(listed)} in {harmless(file)} {were} ignored, because {has} former default\n")


@cache
def _report_without_effect(file: str, key: str, value: str) -> None:
    """Print the warning on stderr about a removed key to which a recorded configuration gives another value than its
    default. `@cache`: the warning is printed once, although a command may read the file several times."""
    message = f"was removed, so {harmless(value)} in {harmless(file)} has no effect. {REMOVED[key].why}"
    sys.stderr.write(f"flash: warning: `{key}` {message}\n")
