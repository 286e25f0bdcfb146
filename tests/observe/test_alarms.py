"""Alarms: the conditions that cause a warning, and the number of warnings."""

from __future__ import annotations

import math
from typing import Any, get_args

import msgspec
import pytest

from flash.config.check import check_alarms
from flash.config.removed import ALARM_LIMITS
from flash.config.tree import AlarmName, AlarmsConfig, Config
from flash.observe.alarms import ALARMS, WINDOW, Alarms
from tests.observe.sample_rows import metrics_row

ROWS = WINDOW
MIN_STEPS = ALARMS["stale_share"][1].min_steps


def told(alarms: Alarms, steps: int, **row: float) -> list[str]:
    """Return the texts of the alarms that `steps` equal rows raise."""
    return [given.text for step in range(steps) for given in alarms.step(metrics_row(step, **row))]


CASES: list[tuple[AlarmName, dict[str, float], str]] = [
    ("stale", {"stale_share": 0.4}, "40% of the tokens were too old"),
    ("masked", {"masked_cap_share": 0.2, "masked_correction_share": 0.1}, "30% of the tokens got weight 0"),
    ("failures", {"failures": 16}, "20% of the episodes failed"),
    ("mismatch", {"mismatch_k3_age_0": 0.02}, "0.02 is the mismatch of engine and trainer at equal weights (mean"),
    ("ess", {"ess": 0.3}, "30% is the effective share of the tokens"),
    ("clipping", {"clip_fraction": 0.6}, "60% of the tokens have their gradient clipped"),
    ("entropy", {"entropy": 0.004}, "0.004 nats is the entropy of the policy"),
    ("equal_rewards", {"advantage_abs_mean": 0.0}, "100% of the steps had nothing to learn from"),
    ("lag", {"lag_scale": 0.4}, "40% of the learning rate is left by algorithm.lag"),
    ("trainer_waits", {"trainer_wait_share": 0.95}, "95% of its time the trainer waited for batches"),
    ("engines_idle", {"engine_idle_share": 0.95}, "95% of their time the engines had no request"),
    ("nonfinite", {"loss": math.nan}, "100% of the steps had a loss or a gradient that is no finite number"),
]


@pytest.mark.parametrize(("name", "row", "said"), CASES)
def test_a_number_beyond_its_limit_is_told_once_with_what_to_do(
    name: AlarmName, row: dict[str, float], said: str
) -> None:
    texts = told(Alarms(), 3 * ROWS, **row)
    assert len(texts) == 1
    assert texts[0].startswith(said)
    assert ": " in texts[0], "advice"
    assert told(Alarms(off=[name]), 3 * ROWS, **row) == []


def test_each_alarm_is_tried_here() -> None:
    assert {alarm.name for _, alarm in ALARMS.values()} == {*get_args(AlarmName)} == {name for name, _, _ in CASES}


def test_the_limits_are_those_that_earlier_versions_had_as_defaults() -> None:
    assert {alarm.name: alarm.limit for _, alarm in ALARMS.values()} == ALARM_LIMITS


def test_the_first_steps_of_a_run_are_not_told_of_unless_nothing_is_finite() -> None:
    assert told(Alarms(), MIN_STEPS - 1, stale_share=0.9) == []
    assert len(told(Alarms(), 1, grad_norm=math.inf)) == 1
    assert told(Alarms(), 1, grad_norm=math.inf)[0].endswith("(the last step)")


def test_an_update_that_was_left_out_is_told_when_it_happens() -> None:
    alarms = Alarms()
    assert told(alarms, 2, skipped_steps=7.0) == []
    assert len(told(alarms, 1, skipped_steps=8.0)) == 1
    assert told(alarms, ROWS, skipped_steps=8.0) == []
    assert len(told(alarms, 1, skipped_steps=9.0)) == 1


def test_the_mismatch_is_told_by_environment() -> None:
    row = {"mismatch_k3_age_0": 0.02, "mismatch_k3_env_code": 0.04, "mismatch_k3_env_math": 0.0001}
    texts = told(Alarms(), 3 * ROWS, **row)
    assert len(texts) == 1
    assert texts[0].startswith("0.04 is the mismatch of engine and trainer at equal weights in 'code'")


def test_steps_without_a_token_of_age_0_say_nothing_of_the_mismatch() -> None:
    assert told(Alarms(), ROWS, mismatch_k3=0.5, mismatch_kl=0.5) == []


def test_a_healthy_run_is_not_warned_of() -> None:
    assert told(Alarms(), 3 * ROWS) == []


@pytest.mark.parametrize("restart", ["engine_restarts", "trainer_restarts"])
def test_who_waited_for_a_restart_is_not_warned_of(restart: str) -> None:
    alarms, idle = Alarms(), {"engine_idle_share": 1.0, "trainer_wait_share": 1.0, "interval_s": 600.0}
    lost = {"failures": 64, "failures_cancelled": 64}
    assert told(alarms, ROWS) + told(alarms, 1, **{restart: 1}, **idle) + told(alarms, 1, **idle, **lost) == []
    assert len(told(alarms, 1, **idle)) == 2


def test_steps_are_weighed_by_their_tokens() -> None:
    alarms = Alarms()
    assert told(alarms, ROWS - 1, trained_tokens=1000) + told(alarms, 1, trained_tokens=1, stale_share=1.0) == []


@pytest.mark.parametrize(("name", "bad", "hovering", "well"), [("stale_share", 0.2, 0.07, 0.0), ("ess", 0.4, 0.6, 0.9)])
def test_a_number_that_was_well_again_is_told_again(name: str, bad: float, hovering: float, well: float) -> None:
    alarms = Alarms()
    assert len(told(alarms, ROWS, **{name: bad})) == 1
    assert told(alarms, ROWS, **{name: hovering}) == []
    assert told(alarms, ROWS, **{name: bad}) == []
    assert told(alarms, ROWS, **{name: well}) == []
    assert len(told(alarms, ROWS, **{name: bad})) == 1


@pytest.mark.parametrize(
    ("alarms", "key", "message"),
    [
        ({"command": ""}, "alarms.command", "expected a program and its arguments"),
        (
            {"command": "no-such-program now"},
            "alarms.command",
            'there is no program "no-such-program" on PATH: install',
        ),
        ({"command": "/no/such now"}, "alarms.command", 'there is no program "/no/such": install it'),
        ({"command": "sh -c 'open"}, "alarms.command", "cannot be split into words"),
    ],
)
def test_what_an_alarm_cannot_do_is_refused(config: Config, alarms: dict[str, Any], key: str, message: str) -> None:
    (problem,) = check_alarms(msgspec.structs.replace(config, alarms=AlarmsConfig(**alarms)))
    assert problem.key == key
    assert problem.message.startswith(message)


def test_what_an_alarm_can_do_is_taken(config: Config) -> None:
    alarms = AlarmsConfig(reactions={"nonfinite": "stop"}, command="sh -c 'cat >/dev/null'")
    assert list(check_alarms(msgspec.structs.replace(config, alarms=alarms))) == []
