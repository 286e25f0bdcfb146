"""What a person is warned of, and how often."""

from __future__ import annotations

import pytest

from flash.observe.alarms import ROWS, Alarms
from tests.observe.sample_rows import metrics_row


def told(alarms: Alarms, steps: int, **row: float) -> list[str]:
    return [text for step in range(steps) for text in alarms.step(metrics_row(step, **row))]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"stale_share": 0.4}, "40% of the tokens were too old"),
        ({"masked_cap_share": 0.2, "masked_correction_share": 0.1}, "30% of the trained tokens got weight 0"),
        ({"failures": 16}, "20% of the episodes failed"),
        ({"mismatch_k3_age_0": 0.02}, "0.02 is the mismatch of engine and trainer at equal weights (mean"),
    ],
)
def test_a_share_above_a_tenth_is_told_once_with_what_to_do(row: dict[str, float], said: str) -> None:
    texts = told(Alarms(), 3 * ROWS, **row)
    assert len(texts) == 1
    assert texts[0].startswith(said)


def test_the_mismatch_is_told_by_environment() -> None:
    row = {"mismatch_k3_age_0": 0.02, "mismatch_k3_env_code": 0.04, "mismatch_k3_env_math": 0.0001}
    texts = told(Alarms(), 3 * ROWS, **row)
    assert len(texts) == 1
    assert texts[0].startswith("0.04 is the mismatch of engine and trainer at equal weights in 'code'")


def test_steps_without_a_token_of_age_0_say_nothing_of_the_mismatch() -> None:
    assert told(Alarms(), ROWS, mismatch_k3=0.5, mismatch_kl=0.5) == []


def test_a_healthy_run_is_not_warned_of() -> None:
    assert told(Alarms(), 3 * ROWS) == []


def test_steps_are_weighed_by_their_tokens() -> None:
    alarms = Alarms()
    assert told(alarms, ROWS - 1, trained_tokens=1000) + told(alarms, 1, trained_tokens=1, stale_share=1.0) == []


def test_a_share_that_was_well_again_is_told_again() -> None:
    alarms = Alarms()
    assert len(told(alarms, ROWS, stale_share=0.2)) == 1
    assert told(alarms, ROWS, stale_share=0.07) == []
    assert told(alarms, ROWS, stale_share=0.2) == []
    assert told(alarms, ROWS, stale_share=0.0) == []
    assert len(told(alarms, ROWS, stale_share=0.2)) == 1
