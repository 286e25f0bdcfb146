"""Verifiers that misbehave: each failure is a RewardError, and no answer of a worker is taken for another one's."""

from __future__ import annotations

import anyio
import pytest

from envs.rewards.verifier import verify
from flash.errors import RewardError
from tests.misuse import misbehaving as m
from tests.misuse import verifiers as v

HERE = "tests.misuse.verifiers"


async def fails(name: str, completion: str, timeout: float = 60.0) -> str:
    with pytest.raises(RewardError) as caught:
        await verify(f"{HERE}:{name}", completion, "", timeout)
    assert len(str(caught.value)) < 3000, (name, completion)
    return str(caught.value)


OWN = [("raises_later", one) for one in ("sandbox", "ours, long", "unspeakable of ours")]
"""Errors of ours that an asynchronous verifier may raise: they keep their type."""


@pytest.mark.anyio
@pytest.mark.timeout(300)
async def test_whatever_a_verifier_raises_is_a_reward_error_with_file_and_line() -> None:
    for completion in m.EXCEPTIONS:
        for name in ("raises", "raises_later"):
            if (name, completion) in OWN:
                continue
            said = await fails(name, completion)
            assert completion == "reward" or "verifiers.py:" in said or "misbehaving.py:" in said, (name, completion)


@pytest.mark.anyio
@pytest.mark.timeout(300)
async def test_an_asynchronous_verifier_that_hangs_ends_at_its_deadline() -> None:
    async def one(completion: str) -> None:
        said = await fails("hangs_later", completion, 0.1)
        assert "no answer within 0.1 s, at " in said
        assert "misbehaving.py:" in said or "verifiers.py:" in said
        assert ("was abandoned" in said) == (completion not in m.ENDS)

    async with anyio.create_task_group() as tasks:
        for completion in m.HANGS:
            tasks.start_soon(one, completion)


@pytest.mark.anyio
@pytest.mark.timeout(300)
async def test_a_wrong_reward_is_refused_and_each_kind_of_number_is_taken() -> None:
    for completion in m.REWARDS:
        await fails("gives", completion)
    for completion in m.GOOD_REWARDS:
        assert await verify(f"{HERE}:gives", completion, "", 60) == 1.0


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.timeout(300)
async def test_what_a_verifier_does_to_its_process_reaches_no_other_answer() -> None:
    for completion in v.ACTS:
        assert await verify(f"{HERE}:acts", completion, "", 60) == 1.0, completion
        assert await verify(f"{HERE}:gives", "int", "", 60) == 1.0, completion
        assert "nan" in await fails("gives", "nan"), completion
    for completion in v.DEATHS:
        said = await fails("dies", completion, 1.0)
        assert "its worker process died" in said or "no answer within 1 s" in said, completion
        assert await verify(f"{HERE}:gives", "bool", "", 60) == 1.0, completion
