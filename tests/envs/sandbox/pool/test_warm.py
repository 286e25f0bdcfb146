"""How many sandboxes stand ready."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.sandbox.api import Spec
from envs.sandbox.pool.host import Ticket, new_sandbox_id
from envs.sandbox.pool.local_host import WarmPolicy
from flash.errors import SandboxStartError
from flash.simulate.clock import run_virtual
from tests.envs.sandbox.pools import SPEC, engine, host


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


def test_a_start_that_fails_gives_its_room_back_to_the_warm_pool():
    async def main():
        maker = engine(cpus=1)
        maker.bad_images.add("bad")
        full = host("a", maker, warm=[(SPEC, 1)])
        await full.recover([])
        async with anyio.create_task_group() as tasks:
            await tasks.start(full.run, lambda: None)
            await anyio.sleep(5)
            assert sum(full.report().warm.values()) == 1
            with pytest.raises(SandboxStartError):
                await full.start(Ticket(new_sandbox_id(), "lease", "", Spec(image="bad")))
            await anyio.sleep(60)
            assert sum(full.report().warm.values()) == 1
            tasks.cancel_scope.cancel()

    run_virtual(main)
