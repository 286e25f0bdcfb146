"""When an engine hangs: requests, and no step."""

from __future__ import annotations

from flash.rollout.vllm.gauges import StepWatch


def test_an_engine_hangs_when_it_has_requests_and_makes_no_step_for_the_limit() -> None:
    watch = StepWatch(10.0)
    watch.begins(100.0)
    assert watch.left(104.0) == 6.0
    watch.steps(104.0)
    watch.begins(105.0)
    assert watch.left(110.0) == 4.0, "a request that comes later is no step"
    assert watch.left(114.0) == 0.0
    assert watch.left(200.0) == 0.0


def test_an_idle_engine_never_hangs() -> None:
    watch = StepWatch(10.0)
    assert watch.left(1000.0) == 10.0
    watch.begins(1000.0)
    watch.begins(1001.0)
    watch.ends()
    watch.ends()
    assert watch.left(2000.0) == 10.0
    watch.begins(2000.0)
    assert watch.left(2001.0) == 9.0, "its time begins with the request"


def test_a_pause_is_nobodys_fault_and_the_time_begins_after_it() -> None:
    watch = StepWatch(10.0)
    watch.begins(0.0)
    watch.pauses()
    assert watch.left(50.0) == 10.0
    watch.goes_on(50.0)
    assert watch.left(55.0) == 5.0
