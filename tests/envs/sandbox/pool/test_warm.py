"""How many sandboxes stand ready."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from envs.sandbox.pool.local_host import WarmPolicy


@given(asked=st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 10)), max_size=50), window=st.floats(0.1, 20))
def test_a_kind_is_kept_ready_as_often_as_it_was_asked_for_lately(asked, window):
    policy = WarmPolicy(fixed={"a": 1}, learned_max=5, window=window)
    now = 0.0
    times: dict[str, list[float]] = {"a": [], "b": []}
    for key, later in asked:
        now += later
        policy.record_request(key, hit=False, now=now)
        times[key].append(now)
    for key, fixed in (("a", 1), ("b", 0)):
        recent = sum(time > now - window for time in times[key])
        assert policy.target(key, now) == max(fixed, min(5, recent))
    assert policy.targets(now + window + 1) == {"a": 1}
    assert (policy.hits, policy.misses) == (0, len(asked))
