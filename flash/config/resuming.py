"""Resuming: the effect of a changed key on a run that continues with `--resume`.

Law: a changed key takes effect in all work that is still to be done. Otherwise the change is refused before any work
(`refused`), or a line says which part of the change has no effect (`told`). The tables hold dotted keys; `table.*`
stands for all keys of a table.
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
"""Keys that must not change, with the reason. `flash.run.checks.preflight` reports them."""

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
"""Keys that have only a limited effect when they are changed, with the part that stays as it was."""
BESIDE = "the adapters go on, and only beside the weights that they were trained beside"
"""Text for a changed `model.path` or `model.fetch` of a run with `[lora]`. There the weights of that model matter, and
the trainer compares them."""

LIMITS: dict[str, str] = {
    "run.steps": "at least the steps that are made",
    "algorithm.rhythm": 'the same `layers`, `local_heads` and `global_heads` where `heads = "first"`, since ' + CHOSEN,
    "algorithm.objective, algorithm.options, algorithm.advantage, critic.count": "as many critics as before, and a "
    'moving average (`proximal = "ewma"`) where there was one: the checkpoint holds them',
}
"""Keys that take effect when they are changed, with the changes that are refused anyway."""

CHOOSES = ("layers", "local_heads", "global_heads")
"""Options of `algorithm.rhythm` that decide which heads are chosen."""

Settings = Mapping[str, Any]


def refused(had: Settings, now: Settings, where: Path) -> Iterator[ConfigProblem]:
    """Yield each key that was changed although the run at `where` cannot continue with the change, and why.

    Both settings are TOML tables as `dump` writes them.
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
    """Return each changed key that has only a limited effect, with the part that stays as it was."""
    adapted = dict.fromkeys(("model.path", "model.fetch"), BESIDE) if isinstance(now.get("lora"), dict) else {}
    words = TOLD | adapted
    return [ConfigProblem(key, words[_entry(TOLD, key)]) for key, *_ in _changed(TOLD, had, now)]


def _changed(table: Mapping[str, str], had: Settings, now: Settings) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key of a table that is set in both settings with different values: key, old value, new value."""
    for key in key_paths():
        before, after = _value(had, key), _value(now, key)
        if before is not None and after is not None and before != after and _entry(table, key) in table:
            yield key, before, after


def _entry(table: Mapping[str, str], key: str) -> str:
    """Return the name of the entry for a key in a table: the key itself, or `table.*`."""
    return key if key in table else key.partition(".")[0] + ".*"


def _value(settings: Settings, key: str) -> Any:
    section, _, name = key.partition(".")
    return settings.get(section, {}).get(name)


def _refusal(why: str, before: Any, after: Any, where: Path) -> str:
    return (
        f"the run in {where} was made with {show(before)}, and {why}; got {show(after)}. Go on with {show(before)}, or "
        "start a new run under another run.name"
    )
