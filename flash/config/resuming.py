"""Resuming: the effect of a changed key on a run that continues with `--resume`.

Law: a changed key takes effect in all work that is still to be done. Otherwise the change is refused before any work
(`refused`), or a warning says which part of the change has no effect (`partial_effects`). The tables hold dotted
keys; `table.*` stands for all keys of a table. docs/configuration.md shows their sentences.

`flash.run.checks.preflight` compares the configuration that the run has recorded (`flash.config.load.read_recorded`)
with the present one, both as TOML tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from flash.config.decode import ConfigProblem, show
from flash.config.load import key_paths
from flash.config.removed import REMOVED, removed_keys
from flash.config.section import SAMPLING_KEYS

# Reasons that several entries of the tables share. In each sentence "it" is the key.
COUNTED = "Groups that are not finished have a size that follows from it."
MADE = "The weights with which the run continues were made with it."

REFUSED: dict[str, str] = {
    "train.batch_size": COUNTED,
    "rollout.group_size": COUNTED,
    "rollout.extra_per_group": COUNTED,
    "tiny_model.*": MADE,
    "lora.*": MADE,
    "train.optimizer": "The checkpoint holds the moments of the former optimizer.",
}
"""Keys that must not change: the reason, as a sentence in which "it" is the key."""

# Sentences that several entries of `PARTIAL` share. The gap in `WEIGHTS` is for the parts that a model gives.
WEIGHTS = "The weights of the newest checkpoint stay. The newly named model gives only {}."
TOKENIZER = WEIGHTS.format("the tokenizer, and the reference of `algorithm.kl` if that names none")
PROBLEMS = (
    "Groups of the former environment start no further samples. Groups with finished samples are trained, and the "
    "others are dropped."
)
SAMPLED = "Groups that have begun are sampled to their end with the former value."
PARTIAL: dict[str, str] = {
    "model.path": TOKENIZER,
    "model.fetch": TOKENIZER,
    "critic.path": WEIGHTS.format("the shapes"),
    "sft.data": "Steps that the run has already made were trained on the former rows.",
    "env.path": PROBLEMS,
    "env.options": PROBLEMS,
    **{f"rollout.{name}": SAMPLED for name in SAMPLING_KEYS},
    "simulate.*": "Only `flash simulate` reads this table.",
}
"""Keys that have only a limited effect when they are changed: the part of the change without an effect, as a
sentence."""
BESIDE = (
    "The adapters of the newest checkpoint stay. They fit only the model beside which they were trained, which "
    "the trainer checks."
)
"""Sentence for a changed `model.path` or `model.fetch` of a run with `[lora]`, in place of the one in `PARTIAL`: in
such a run the weights of that model are used."""

CONDITIONS: dict[str, str] = {
    "run.steps": "It must be at least the number of steps that the run has made.",
    "algorithm.objective, algorithm.options, algorithm.advantage": "The number of critics must stay, and "
    'so must a moving average (`proximal = "ewma"`), because the checkpoint holds them.',
}
"""Keys that take effect when they are changed: the changes that are refused anyway, as sentences. The table is only for
docs/configuration.md: `flash.run.checks.preflight` makes the checks."""

Settings = Mapping[str, Any]
"""Configuration as nested TOML tables. A key that is None is left out, if that is its default."""


def refused(had: Settings, now: Settings, where: Path) -> Iterator[ConfigProblem]:
    """Yield a problem for each key that was changed although the run cannot continue with the change.

    The check before the start of a resumed run (`flash.run.checks.preflight`) reports these problems as errors.

    Args:
        had: the settings that the run has recorded.
        now: the present settings, as the run would record them.
        where: the run directory.
    """
    for change in _changed(REFUSED, had, now):
        yield ConfigProblem(change.key, _refusal(REFUSED[change.entry], change.before, change.after, where))


def partial_effects(had: Settings, now: Settings) -> list[ConfigProblem]:
    """Return each changed key that has only a limited effect, with a sentence about the part without an effect.

    `flash train --resume` prints them as warnings before anything starts. A removed key that the run was recorded with
    counts as changed, unless it had its default: the run continues without its effect. The same applies to a key or a
    table that this version of Flash does not have.

    Args:
        had: the settings that the run has recorded.
        now: the present settings, as the run would record them.
    """
    adapted = dict.fromkeys(("model.path", "model.fetch"), BESIDE) if isinstance(now.get("lora"), dict) else {}
    sentences = PARTIAL | adapted
    found = [ConfigProblem(change.key, sentences[change.entry]) for change in _changed(PARTIAL, had, now)]
    for key, value, at_default in removed_keys(had):
        if not at_default:
            message = f"The run was recorded with {show(value)}, and continues without this key, which was removed."
            found.append(ConfigProblem(key, f"{message} {REMOVED[key].why}."))
    for key in _unknown(had):
        message = "The run was recorded with it. This version of Flash does not have it, and continues without it."
        found.append(ConfigProblem(key, message))
    return found


def _unknown(had: Settings) -> list[str]:
    """Return the names of recorded tables, and the dotted keys in the other recorded tables, that this version of Flash
    does not have and does not know as removed. `partial_effects` warns of them."""
    known = set(key_paths()) | set(REMOVED)
    sections = {key.partition(".")[0] for key in known}
    found = [section for section in had if section not in sections]
    for section, table in had.items():
        if section in sections and section not in REMOVED and isinstance(table, dict):
            names = cast("dict[str, Any]", table)
            found += [key for key in (f"{section}.{name}" for name in names) if key not in known]
    return found


class Change(NamedTuple):
    """Key that is set in the recorded and in the present settings, with different values."""

    key: str
    """Dotted path."""
    entry: str
    """Entry for the key in `REFUSED` or `PARTIAL`: the key itself, or `table.*`."""
    before: Any
    """Recorded value."""
    after: Any
    """Present value."""


def _changed(entries: Collection[str], had: Settings, now: Settings) -> Iterator[Change]:
    """Yield each changed key for which `entries`, the keys of `REFUSED` or `PARTIAL`, have an entry.

    A key that is not set on one side is left out: it is None there, or its table is missing. Other checks compare a
    table such as `[lora]` with the checkpoint.
    """
    for key in key_paths():
        entry = key if key in entries else key.partition(".")[0] + ".*"
        before, after = _value(had, key), _value(now, key)
        if entry in entries and before is not None and after is not None and before != after:
            yield Change(key, entry, before, after)


def _value(settings: Settings, key: str) -> Any:
    """Return the value of a dotted key; None if it is not set."""
    section, _, name = key.partition(".")
    # In a damaged config.toml a section may be no table.
    table = settings.get(section)
    return cast("Settings", table).get(name) if isinstance(table, dict) else None


def _refusal(why: str, before: Any, after: Any, where: Path) -> str:
    """Return the error message for a change that the run in the folder `where` refuses. `why`: a sentence in which "it"
    is the key."""
    return (
        f"the run in {where} was made with {show(before)}, got {show(after)}. {why} Continue with {show(before)}, or "
        "start a new run under another run.name"
    )
