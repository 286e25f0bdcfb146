"""What a change of each key does to a run that goes on with `--resume`.

Law: a change takes effect in all that is still to be done, unless it is refused before any work, or a line says what
does not follow from it. The tables hold dotted keys, `table.*` for all keys of a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flash.config.decode import ConfigProblem, show
from flash.config.load import key_paths
from flash.sampling import Sampling

COUNTED = "its unfinished groups are counted by it"
MADE = "the weights that it goes on with were made with it"
CHOSEN = "its heads were chosen by it in the first batch"

REFUSED: dict[str, str] = {
    "train.batch_size": COUNTED,
    "rollout.group_size": COUNTED,
    "rollout.extra_per_group": COUNTED,
    "tiny_model.*": MADE,
    "lora.*": MADE,
    "critic.tiny_layers": MADE,
    "train.optimizer": "its moments are those of that one",
}
"""Why the run needs what it had; `flash.run.checks.preflight` says it."""

WEIGHTS = "the newest checkpoint's weights stay; it gives only {}"
PROBLEMS = "groups of the former environment begin nothing more: those with finished samples are trained, others leave"
SAMPLED = "groups that were begun go on as they began"
TOLD: dict[str, str] = {
    "model.path": WEIGHTS.format("the tokenizer, and the reference of a KL that names none"),
    "model.fetch": WEIGHTS.format("the tokenizer, and the reference of a KL that names none"),
    "critic.path": WEIGHTS.format("the shapes alone"),
    "sft.data": "steps that are made had the former rows",
    "env.path": PROBLEMS,
    "env.options": PROBLEMS,
    **{f"rollout.{name}": SAMPLED for name in Sampling.__struct_fields__},
    "simulate.*": "only `flash simulate` reads it",
}
"""What does not follow from the change."""
BESIDE = "the adapters go on, and only beside the weights that they were trained beside"
"""With `[lora]` of another `model.path`, whose weights count then: the trainer compares them."""

LIMITS: dict[str, str] = {
    "run.steps": "at least the steps that are made",
    "algorithm.rhythm": 'the same `layers`, `local_heads` and `global_heads` where `heads = "first"`, since ' + CHOSEN,
    "algorithm.objective, algorithm.options, algorithm.advantage, critic.count": "as many critics as before, and a "
    'moving average (`proximal = "ewma"`) where there was one: the checkpoint holds them',
}
"""Of keys that take effect, what is refused all the same."""

CHOOSES = ("layers", "local_heads", "global_heads")
"""Options of rhythm that choose heads."""

Settings = Mapping[str, Any]


def refused(had: Settings, now: Settings, where: Path) -> Iterator[ConfigProblem]:
    """The keys that the run at `where` had otherwise and cannot go on with, and why.

    Both settings are as `dump` writes them, read again.
    """
    for key, before, after in _changed(REFUSED, had, now):
        yield ConfigProblem(key, _refusal(REFUSED[_entry(REFUSED, key)], before, after, where))
    rhythms = [_value(settings, "algorithm.rhythm") for settings in (had, now)]
    if all(isinstance(rhythm, dict) and rhythm.get("heads") == "first" for rhythm in rhythms):
        before, after = rhythms
        for name in CHOOSES:
            if before.get(name) != after.get(name):
                yield ConfigProblem(
                    f"algorithm.rhythm.{name}", _refusal(CHOSEN, before.get(name), after.get(name), where)
                )


def told(had: Settings, now: Settings) -> list[ConfigProblem]:
    """The keys whose change leaves something as it was, and what."""
    adapted = dict.fromkeys(("model.path", "model.fetch"), BESIDE) if isinstance(now.get("lora"), dict) else {}
    words = TOLD | adapted
    return [ConfigProblem(key, words[_entry(TOLD, key)]) for key, *_ in _changed(TOLD, had, now)]


def _changed(table: Mapping[str, str], had: Settings, now: Settings) -> Iterator[tuple[str, Any, Any]]:
    """Those keys of a table that both have, with other values."""
    for key in key_paths():
        before, after = _value(had, key), _value(now, key)
        if before is not None and after is not None and before != after and _entry(table, key) in table:
            yield key, before, after


def _entry(table: Mapping[str, str], key: str) -> str:
    """Under what a key stands in a table, if it does."""
    return key if key in table else key.partition(".")[0] + ".*"


def _value(settings: Settings, key: str) -> Any:
    section, _, name = key.partition(".")
    return settings.get(section, {}).get(name)


def _refusal(why: str, before: Any, after: Any, where: Path) -> str:
    return (
        f"the run in {where} was made with {show(before)}, and {why}; got {show(after)}. Go on with {show(before)}, or "
        "start a new run under another run.name"
    )
