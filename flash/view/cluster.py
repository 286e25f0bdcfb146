"""Cluster page: the newest snapshot of the cluster, and its numbers as text.

A run replaces its `cluster.json` every two seconds (`flash.observe.cluster`). A *tile* of the page shows a number of
the whole cluster.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec

from flash.observe.cluster import CLUSTER_NUMBERS, ENGINE_NUMBERS, Cluster, engines_of, read_cluster
from flash.observe.columns.column import capital
from flash.observe.columns.table import columns
from flash.observe.rundir.rundir import RunDirectory


class ShownNumber(msgspec.Struct, frozen=True):
    """Number with its explanation: a tile, or a column of the table of engines."""

    title: str
    means: str
    """Meaning, as whole sentences."""
    worry: str
    """Sentence that completes "worry when", and advice."""
    text: str = ""
    """Value of a tile; empty for a column."""


class ShownCluster(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the cluster page."""

    picture: Cluster | None
    """Newest snapshot; None if there is none, or if the content of the file is not a snapshot."""
    now: float
    """Time of this machine's clock, in Unix seconds."""
    there: bool
    """True if the file exists. If `picture` is None although the file exists, another version of Flash has probably
    written the file."""
    tiles: Sequence[ShownNumber] = ()
    """Numbers of the whole cluster."""
    figures: Sequence[ShownNumber] = ()
    """Columns of the table of engines."""
    engines: dict[int, list[str]] = {}
    """Rows of the table of engines, by the engine's number: a text for each column of `figures`."""


FIGURES = [
    ShownNumber(capital(column.label), engine_number.means, engine_number.worry)
    for column, engine_number in zip(columns("engine"), ENGINE_NUMBERS, strict=True)
]
"""Columns of the table of engines, without values. `ENGINE_NUMBERS` has an item for each of these columns."""


def show_cluster(directory: RunDirectory) -> ShownCluster:
    """Return the cluster page of a run, from the newest snapshot.

    Raises:
        RunDirectoryError: `cluster.json` is no regular file, or it may not be read.
    """
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
    """Yield a tile for each number that the snapshot has. A number without a text has nothing to count."""
    for shown in CLUSTER_NUMBERS:
        if text := shown.text(picture):
            yield ShownNumber(shown.title, shown.means, shown.worry, text)
