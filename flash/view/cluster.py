"""What the page of the cluster shows: the newest picture, and its numbers as people read them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec

from flash.observe.cluster import Cluster, read_cluster
from flash.observe.cluster_counts import COUNTS, EACH_ENGINE, engines_of
from flash.observe.columns.column import capital, without_marks
from flash.observe.columns.table import columns
from flash.observe.rundir.rundir import RunDirectory


class ShownNumber(msgspec.Struct, frozen=True):
    """A tile, or a column of the table of engines."""

    title: str
    means: str
    worry: str
    text: str = ""
    """Of a tile."""


class ShownCluster(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to show."""

    picture: Cluster | None
    now: float
    """By this machine's clock, in Unix seconds."""
    there: bool
    """Whether there is a file: without a picture, it is none that this version reads."""
    tiles: Sequence[ShownNumber] = ()
    figures: Sequence[ShownNumber] = ()
    """Columns of the table of engines."""
    engines: dict[int, list[str]] = {}
    """By their numbers, a text for each of these columns."""


FIGURES = [
    ShownNumber(capital(column.label), count.means, count.worry)
    for column, count in zip(columns("engine"), EACH_ENGINE, strict=True)
]


def show_cluster(directory: RunDirectory) -> ShownCluster:
    """The newest picture of a run's cluster."""
    picture = read_cluster(directory)
    there, now = directory.cluster.exists(), time.time()
    if picture is None:
        return ShownCluster(picture=None, now=now, there=there)
    return ShownCluster(
        picture=picture,
        now=now,
        there=there,
        tiles=list(_tiles(picture)),
        figures=FIGURES,
        engines={
            engine.number: [column.text(column.value_in(engine.figures)) for column in columns("engine")]
            for engine in engines_of(picture)
        },
    )


def _tiles(picture: Cluster) -> Iterator[ShownNumber]:
    for count in COUNTS:
        if text := count.text(picture):
            yield ShownNumber(count.title, count.means, without_marks(count.worry), text)
