"""The runs that may go on from the state in a checkpoint."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flash.config.tree import Config
from flash.errors import CheckpointError, ConfigError
from flash.hub.recovery import HubState
from tests.samples.cases import make_buffer


def make_config(**tables: Any) -> Config:
    """Return a run of 4 steps of 16 samples in groups of 4. `tables` replaces settings, by table."""
    base = {
        "run": {"name": "test", "steps": 4},
        "model": {"path": "fake"},
        "env": {"path": "fake:Fake"},
        "train": {"batch_size": 16},
        "rollout": {"group_size": 4},
        "cluster": {"gpus_per_node": 0},
    }
    return msgspec.convert({name: base.get(name, {}) | tables.get(name, {}) for name in base | tables}, Config)


def stored_state() -> bytes:
    """Return the encoded state of such a run at version 3, without samples."""
    return msgspec.msgpack.encode(HubState(3, make_buffer(batch=16, group=4).samples.snapshot(), journal=0))


def test_a_state_comes_back_for_the_run_that_made_it() -> None:
    changed = make_config(run={"steps": 90}, train={"async_ratio": 3.0})
    assert HubState.restore(stored_state(), make_config()).version == 3
    assert HubState.restore(stored_state(), changed).version == 3


@pytest.mark.parametrize(
    ("table", "name", "held", "wanted"),
    [("rollout", "group_size", 4, 8), ("rollout", "extra_per_group", 0, 1), ("train", "batch_size", 16, 32)],
)
def test_a_run_that_counts_its_groups_otherwise_is_refused(table: str, name: str, held: int, wanted: int) -> None:
    config = make_config(**{table: {name: wanted}})
    with pytest.raises(ConfigError, match=rf"{table}\.{name}: .* version 3 was made with {held}.*got {wanted}\. Go on"):
        HubState.restore(stored_state(), config)


def test_a_state_of_another_form_is_one_clear_error() -> None:
    with pytest.raises(CheckpointError, match="another version of Flash"):
        HubState.restore(msgspec.msgpack.encode({"version": 3}), make_config())
