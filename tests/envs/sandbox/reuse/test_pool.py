from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from envs.sandbox.api import Spec
from envs.sandbox.reuse.pool import IDLE_S, open_reuse_pool
from envs.sandbox.reuse.wipe import KILL_AFTER_S
from flash.errors import SandboxBusyError, SandboxLostError, SandboxStartError
from flash.types import Stock
from tests.envs.sandboxes import FINE, ScriptedProvider, result

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]

SPEC = Spec(image="img")
MOUNTS = b"81 52 0:40 / / ro,relatime - overlay\n84 81 0:44 / /work rw,nosuid - tmpfs\n"
LOOK = b"d 1777 0 0  /work\n1 (cat) R " + b" 0" * 50


def like(state=lambda: LOOK):
    """Answers of a sandbox that looks like this."""

    def answer(command, stdin):
        if command[0] == "sleep":
            return result(exit_code=None, signal="SIGTERM", timed_out=True)
        if command[0] == "cat":
            return result(stdout=MOUNTS)
        if command[0] == "/bin/sh":
            return result(stdout=state())
        return FINE

    return answer


async def test_a_clean_sandbox_is_used_again_and_given_back_with_the_pool():
    provider = ScriptedProvider(like())
    async with open_reuse_pool(provider, owner="run", most=2) as pool:
        for _ in range(5):
            async with pool.borrow(SPEC, 10):
                pass
        assert (pool.made, pool.used_again, provider.out) == (1, 4, 1)
    assert provider.out == 0
    assert provider.owners == {"run"}


@pytest.mark.parametrize("change", [b"d 1777 0 0  /work\nf 644 1000 1000  /work/x\n1 (cat) R " + b" 0" * 50, b""])
async def test_a_sandbox_that_looks_different_is_not_used_again(change):
    states = iter([LOOK, change, change] * 9)  # looked at twice before it is given up
    provider = ScriptedProvider(like(lambda: next(states)))
    async with open_reuse_pool(provider, owner="run", most=2) as pool:
        for _ in range(3):
            async with pool.borrow(SPEC, 10):
                pass
        await anyio.lowlevel.checkpoint()
        assert (pool.made, pool.used_again, provider.out) == (3, 0, 0)


@pytest.mark.parametrize(
    "answer",
    [
        lambda command, stdin: result(exit_code=91) if command[0] == "/bin/sh" else FINE,
        lambda command, stdin: result(stdout=LOOK, stdout_truncated=True),
        # The command whose end takes everything along ended by itself.
        lambda command, stdin: result(stdout=LOOK),
    ],
)
async def test_a_sandbox_that_cannot_be_told_to_be_clean_is_not_used_again(answer):
    provider = ScriptedProvider(answer)
    async with open_reuse_pool(provider, owner="run", most=2) as pool:
        for _ in range(3):
            async with pool.borrow(SPEC, 10):
                pass
        assert pool.used_again == 0


async def test_another_profile_than_strict_is_never_used_again():
    provider = ScriptedProvider(like())
    async with open_reuse_pool(provider, owner="run", most=1) as pool:
        for _ in range(2):
            async with pool.borrow(Spec(image="img", profile="build"), 10):
                pass
        assert (pool.made, pool.used_again) == (2, 0)


async def test_without_reuse_each_use_gets_a_new_one_and_nothing_is_looked_at():
    provider = ScriptedProvider(like())
    async with open_reuse_pool(provider, owner="run", most=1, reuse=False) as pool:
        for _ in range(3):
            async with pool.borrow(SPEC, 10):
                pass
    assert [sandbox.seen for sandbox in provider.sandboxes] == [[], [], []]


async def test_in_use_and_in_stock_together_are_never_more_than_allowed():
    provider = ScriptedProvider(like(), start_s=1.0)
    async with open_reuse_pool(provider, owner="run", most=3) as pool:

        async def use(number: int) -> None:
            async with pool.borrow(Spec(image=f"img-{number % 5}"), 1000):
                await anyio.sleep(0.5)

        async with anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(use, number)
        assert provider.most <= 3
        assert pool.made + pool.used_again == 40


async def test_who_looks_sees_what_is_in_use_ready_and_waited_for():
    async with open_reuse_pool(ScriptedProvider(like()), owner="run", most=1) as pool:
        may = anyio.Event()

        async def use() -> None:
            async with pool.borrow(SPEC, 100):
                await may.wait()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(use)
            tasks.start_soon(use)
            await anyio.sleep(5)
            assert pool.stock() == Stock("sandboxes", in_use=1, ready=0, waiting=1, most=1, made=1)
            may.set()
        assert pool.stock() == Stock("sandboxes", in_use=0, ready=1, waiting=0, most=1, made=1)


async def test_what_nobody_wants_is_given_back_after_a_while():
    provider = ScriptedProvider(like())
    async with open_reuse_pool(provider, owner="run", most=2) as pool:
        async with pool.borrow(SPEC, 10):
            pass
        await anyio.sleep(IDLE_S / 2)
        assert provider.out == 1
        await anyio.sleep(IDLE_S)
        assert provider.out == 0
        async with pool.borrow(SPEC, 10):
            await anyio.sleep(2 * IDLE_S)  # in use is not idle
            assert provider.out == 1


async def test_a_sandbox_past_half_of_its_life_is_not_used_again():
    provider = ScriptedProvider(like())
    async with open_reuse_pool(provider, owner="run", most=2) as pool:
        async with pool.borrow(Spec(image="img", deadline_s=100), 10):
            await anyio.sleep(51)
        await anyio.lowlevel.checkpoint()
        assert provider.out == 0


async def test_a_ready_sandbox_that_was_lost_is_not_given_out():
    provider = ScriptedProvider(like())
    async with open_reuse_pool(provider, owner="run", most=2) as pool:
        async with pool.borrow(SPEC, 10):
            pass
        provider.sandboxes[0].state = "lost"
        async with pool.borrow(SPEC, 10) as sandbox:
            assert sandbox is provider.sandboxes[1]


async def test_no_room_in_time_is_busy_and_an_error_of_a_start_is_told():
    provider = ScriptedProvider(like())
    async with open_reuse_pool(provider, owner="run", most=1) as pool:
        async with pool.borrow(SPEC, 10):
            with pytest.raises(SandboxBusyError, match="waited 5 s while all 1 sandboxes"):
                async with pool.borrow(SPEC, 5):
                    pass
        provider.failures, provider.error = 1, SandboxStartError("no such image")
        with pytest.raises(SandboxStartError, match="no such image"):
            async with pool.borrow(Spec(image="other"), 5):
                pass
        async with pool.borrow(SPEC, 5):
            pass


@pytest.mark.parametrize("after", [0.5, 1.5])
async def test_a_cancelled_use_gives_its_sandbox_back_and_its_place(after):
    provider = ScriptedProvider(like(), start_s=1.0)
    async with open_reuse_pool(provider, owner="run", most=1) as pool:
        with anyio.move_on_after(after):
            async with pool.borrow(SPEC, 10):
                await anyio.sleep_forever()
        await anyio.sleep(2)
        assert provider.out == 0
        async with pool.borrow(SPEC, 10):
            assert provider.out == 1


async def test_a_use_that_fails_gives_its_sandbox_back():
    provider = ScriptedProvider(like())
    async with open_reuse_pool(provider, owner="run", most=1) as pool:

        async def use() -> None:
            async with pool.borrow(SPEC, 10) as sandbox:
                provider.sandboxes[0].state = "lost"
                await sandbox.run(["true"], timeout=1)

        with pytest.raises(SandboxLostError):
            await use()
        await anyio.lowlevel.checkpoint()
        assert provider.out == 0


def test_the_command_whose_end_takes_everything_along_cannot_end_before():
    assert KILL_AFTER_S < 1
