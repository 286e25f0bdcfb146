"""StepWatch: an engine hangs if it has requests and makes no step."""

from __future__ import annotations

from flash.rollout.vllm.state import StepWatch


def test_an_engine_hangs_when_it_has_requests_and_makes_no_step_for_the_limit() -> None:
    watch = StepWatch(10.0)
    watch.begin_request(100.0)
    assert watch.seconds_left(104.0) == 6.0
    watch.step(104.0)
    watch.begin_request(105.0)
    assert watch.seconds_left(110.0) == 4.0, "a request that comes later is no step"
    assert watch.seconds_left(114.0) == 0.0
    assert watch.seconds_left(200.0) == 0.0


def test_an_idle_engine_never_hangs() -> None:
    watch = StepWatch(10.0)
    assert watch.seconds_left(1000.0) == 10.0
    watch.begin_request(1000.0)
    watch.begin_request(1001.0)
    watch.end_request()
    watch.end_request()
    assert watch.seconds_left(2000.0) == 10.0
    watch.begin_request(2000.0)
    assert watch.seconds_left(2001.0) == 9.0, "its time begins with the request"


def test_a_pause_is_nobodys_fault_and_the_time_begins_after_it() -> None:
    watch = StepWatch(10.0)
    watch.begin_request(0.0)
    watch.pause()
    assert watch.seconds_left(50.0) == 10.0
    watch.resume(50.0)
    assert watch.seconds_left(55.0) == 5.0
