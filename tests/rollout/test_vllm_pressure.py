"""PressureGauge: the load of an engine, and its lack of KV cache, from the numbers of its steps."""

from __future__ import annotations

import pytest

from flash.foreign.vllm import step_numbers
from flash.rollout.engine import Pressure
from flash.rollout.vllm.state import SHARE_STEPS, PressureGauge


def read(gauge: PressureGauge, resumed: int, *, waiting: int = 0) -> Pressure:
    """Let the gauge read a step of eight sequences, of which `resumed` run again, and return the load."""
    gauge.read(running=8, waiting=waiting, kv_used=0.5, resumed=resumed)
    return gauge.pressure


def test_sequences_that_were_put_back_count_as_preempted_when_they_go_on() -> None:
    gauge = PressureGauge()
    assert read(gauge, 0) == Pressure(running=8, waiting=0, kv_used=0.5, preemptions=0)
    assert read(gauge, 3).preemptions == 3
    assert read(gauge, 1).preemptions == 4


def test_a_swap_that_puts_all_sequences_back_is_no_want_of_cache() -> None:
    gauge = PressureGauge()
    read(gauge, 0)
    gauge.excuse_preemptions()
    assert read(gauge, 5, waiting=3).preemptions == 0
    assert read(gauge, 3).preemptions == 0
    assert read(gauge, 2).preemptions == 2, "the excuse has served"


def test_an_excuse_ends_when_nobody_waits_to_go_on() -> None:
    gauge = PressureGauge()
    read(gauge, 0)
    gauge.excuse_preemptions()
    read(gauge, 2)
    assert read(gauge, 4).preemptions == 4


def test_prefix_hits_are_those_of_late_and_unknown_before_the_first_prompt() -> None:
    gauge = PressureGauge()
    assert read(gauge, 0).prefix_hit_share is None
    gauge.read(running=1, waiting=0, kv_used=0.1, resumed=0, prompt_tokens=100, cached_tokens=25)
    gauge.read(running=1, waiting=0, kv_used=0.1, resumed=0, prompt_tokens=300, cached_tokens=275)
    assert read(gauge, 0).prefix_hit_share == 0.75, "a step that begins nothing changes nothing"
    for _ in range(SHARE_STEPS):
        gauge.read(running=1, waiting=0, kv_used=0.1, resumed=0, prompt_tokens=10, cached_tokens=0)
    assert gauge.pressure.prefix_hit_share == 0.0


def test_accepted_drafts_are_a_share_of_those_of_late() -> None:
    gauge = PressureGauge()
    assert read(gauge, 0).accepted_share is None
    for drafted, accepted in ((8, 2), (2, 1)):
        gauge.read(running=1, waiting=0, kv_used=0.1, resumed=0, drafted=drafted, accepted=accepted)
    assert read(gauge, 0).accepted_share == 0.3


@pytest.mark.integration  # imports vLLM
@pytest.mark.filterwarnings("ignore")
def test_drafts_are_counted_as_vllm_counts_them() -> None:
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    gauge = PressureGauge()
    for drafts in ([(4, 4), (3, 0)], [], [(4, 1)]):
        told = SpecDecodingStats.new(4) if drafts else None
        for drafted, accepted in drafts:
            assert told is not None
            told.observe_draft(drafted, accepted)
        gauge.read(**step_numbers(SchedulerStats(num_running_reqs=2, spec_decoding_stats=told)))
    pressure = gauge.pressure
    assert (pressure.drafted, pressure.accepted, pressure.accepted_share) == (11, 5, 5 / 11)
