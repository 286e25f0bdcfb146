"""docs/metrics.md lists the metrics that a training step reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.metrics_page import unlisted
from tests.trainer.trainer_cases import aged_shard, trainer_at


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {
            "algorithm": {
                "objective": "cispo",
                "kl": {"coefficient": 0.1},
                "corrections": [{"kind": "geometric", "low": 0.9, "high": 1.1}],
                "staleness": {"kind": "linear"},
            }
        },
        {"algorithm": {"objective": "ppo"}, "critic": {}},
        {"algorithm": {"rhythm": {}}},
        {"algorithm": {"lag": {}}},
        {"algorithm": {"objective": "asyppo", "entropy_bonus": 0.1}, "critic": {}},
    ],
)
def test_every_name_of_a_step_is_listed(tied_model: Path, tables: dict[str, Any]) -> None:
    row = trainer_at(3, tied_model, train={"async_ratio": 2}, **tables).train_step(aged_shard())
    assert {"age_1", "ratio_p50_age_1", "ess"} <= row.keys()
    assert unlisted(row) == []
