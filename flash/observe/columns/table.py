"""The table of columns, of what the rooms beside it say, and the charts of `flash view` that draw them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from flash.observe.columns.column import Column, ColumnGroup
from flash.observe.columns.engine import ENGINE
from flash.observe.columns.evaluation import EVALUATION
from flash.observe.columns.speed import SPEED
from flash.observe.columns.training import BATCH, CRITIC, LAG, LOSS, OFF_POLICY, RHYTHM, SFT

Kind = Literal["step", "evaluation", "engine"]
"""Of a row: in `metrics.jsonl`, in `evals.jsonl`, of an engine in `cluster.json`."""

APART = ("step", "time")
"""Of each row: trackers are told them beside the values."""
GROUPS: Mapping[Kind, Sequence[ColumnGroup]] = {
    "step": (BATCH, LOSS, OFF_POLICY, LAG, CRITIC, RHYTHM, SFT, SPEED),
    "evaluation": (EVALUATION,),
    "engine": (ENGINE,),
}


class Chart(msgspec.Struct, frozen=True):
    """One picture of `flash view`, of the columns that name it: their words are its words."""

    id: str
    title: str
    of: Kind = "step"
    log: bool = False
    from_zero: bool = True
    """Whether a linear axis shows 0."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """What it draws; where several name it, its limit and unit are those of the first."""
        return tuple(column for column in columns(self.of) if column.chart == self.id)


CHARTS = (
    Chart("reward", "Reward while training", from_zero=False),
    Chart("held_out", "Held-out reward", "evaluation", from_zero=False),
    Chart("nll", "Loss of what is learned", from_zero=False),
    Chart("held_out_nll", "The same, held out", "evaluation", from_zero=False),
    Chart("entropy", "Entropy"),
    Chart("kl", "KL"),
    Chart("grad_norm", "Gradient norm"),
    Chart("ages", "Age of the trained tokens"),
    Chart("ess", "Effective sample size"),
    Chart("mismatch", "Mismatch of engine and trainer", log=True),
    Chart("left_out", "Tokens that do not count"),
    Chart("throughput", "Throughput"),
    Chart("waits", "Who waits for whom"),
    Chart("seconds", "Seconds per step"),
    Chart("memory", "Memory of a trainer rank"),
    Chart("mfu", "Model FLOPs utilisation"),
    Chart("failures", "Failures"),
    Chart("environment", "What the environment measures"),
)
"""In the order in which they are shown."""


def columns(of: Kind) -> Iterable[Column]:
    """All of a kind of rows."""
    return (column for group in GROUPS[of] for column in group.columns)


_NAMED: Mapping[Kind, Mapping[str, Column]] = {
    kind: {column.name: column for column in columns(kind)} for kind in GROUPS
}
_OF_KINDS = {kind: [column for column in named.values() if column.of_kinds] for kind, named in _NAMED.items()}


def named(name: str, of: Kind = "step") -> Column:
    """The column that the table has under this name."""
    return _NAMED[of][name]


def column_of(key: str, of: Kind) -> Column | None:
    """The column of a row's key; None: the table has none, as of what one's own objective reports."""
    found = _NAMED[of].get(key)
    return found or next((column for column in _OF_KINDS[of] if column.kind(key) is not None), None)
