"""A real vLLM engine loses one of its processes: it is dead then, whatever is left of it, and says what ended it."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest

from flash.errors import EngineDeadError
from flash.foreign import vllm_processes
from flash.rollout.vllm.engine import VLLMEngine
from tests.rollout import engine_contract as contract
from tests.rollout.test_vllm_engine import engine_children, make_config, make_model, processes_of_group, serving

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


def vllm_said(captured: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines that the engine's processes have printed since the last call."""
    output = captured.readouterr()
    return [line for line in (output.out + output.err).splitlines() if line.strip()]


def test_a_killed_worker_is_the_engines_death_and_nothing_else_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path, make_model(tmp_path)) as served:
        core = served.engine._processes.core
        (worker,) = vllm_processes.worker_pids(core)

        async def kill() -> None:
            os.kill(worker, signal.SIGKILL)

        served.call(contract.tokens_before_the_first_load_carry_no_version, served)
        capfd.readouterr()
        reason = served.call(contract.a_death_ends_everything_at_once, served, kill)
        assert reason.startswith(f"engine 0 is dead: its worker process {worker} was killed by signal 9 (SIGKILL)")
        served.call(contract.a_closed_engine_serves_nobody, served)
        assert not processes_of_group(core)
    assert vllm_said(capfd) == []


@pytest.mark.parametrize(
    ("which", "told"),
    [
        ("core", r"its process \d+ was killed by signal 9"),
        ("worker", "one of its worker processes was killed by signal 9"),
    ],
)
def test_an_engine_that_is_killed_while_it_starts_is_dead_and_nothing_else_is_printed(
    which: str, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path)
    known = engine_children()
    capfd.readouterr()

    async def kill() -> None:
        """Kill the core, or its worker, as soon as it exists."""
        while not (begun := engine_children() - known):  # noqa: ASYNC110 (nothing tells when a process has begun)
            await anyio.sleep(0.05)
        victims = list(begun)
        if which == "worker":
            while not (victims := children_of(*begun)):  # noqa: ASYNC110 (as above)
                await anyio.sleep(0.01)
        os.kill(victims[0], signal.SIGKILL)

    async def start() -> None:
        """Start an engine that is killed meanwhile."""
        engine = VLLMEngine(make_config(tmp_path), 0)
        async with anyio.create_task_group() as group:
            group.start_soon(kill)
            with pytest.raises(EngineDeadError, match=f"^engine 0 is dead: while it started, {told}"):
                await engine.start()

    anyio.run(start)
    assert engine_children() <= known
    assert vllm_said(capfd) == []


def children_of(core: int) -> list[int]:
    """Return the process ids of a core's children."""
    children: list[int] = []
    for thread in Path(f"/proc/{core}/task").iterdir():
        children += map(int, (thread / "children").read_text().split())
    return children


def test_a_killed_core_ends_the_swap_that_goes_on_and_names_the_signal(tmp_path: Path) -> None:
    with serving(tmp_path, make_model(tmp_path)) as served:
        core = served.engine._processes.core

        async def kill() -> None:
            os.kill(core, signal.SIGKILL)

        async def reason() -> str:
            with anyio.fail_after(30):
                return str(await served.engine.wait_dead())

        served.call(contract.a_death_in_a_swap_ends_the_swap, served, kill)
        assert served.call(reason).startswith(f"engine 0 is dead: its process {core} was killed by signal 9 (SIGKILL)")
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            served.generate([5, 6, 7], 5)
        served.call(served.engine.close)
        assert not processes_of_group(core)


def test_a_stopped_worker_is_a_hang_as_soon_as_there_are_requests_and_is_ended_with_the_engine(tmp_path: Path) -> None:
    with serving(tmp_path, make_model(tmp_path), generate=2) as served:
        core = served.engine._processes.core
        (worker,) = vllm_processes.worker_pids(core)
        served.call(contract.a_response_streams_and_ends_at_its_limit, served)

        async def stop() -> str:
            """Stop the worker, first without a request and then with one. Returns how the engine died."""
            os.kill(worker, signal.SIGSTOP)
            with anyio.move_on_after(2.5) as idle:
                await served.engine.wait_dead()
            assert idle.cancelled_caught, "without requests there is nothing to step for"
            with anyio.fail_after(30):
                async with anyio.create_task_group() as group:
                    group.start_soon(served.engine.wait_dead)
                    with pytest.raises(EngineDeadError):
                        await contract.complete(served.engine, contract.ask(5))
            return str(await served.engine.wait_dead())

        reason = served.call(stop)
        assert reason.startswith("engine 0 is dead: it has made no step for 1 s, while requests run")
        served.call(contract.a_closed_engine_serves_nobody, served)
        assert not processes_of_group(core)


def test_a_hang_is_noticed_while_a_swap_waits_for_the_step_that_hangs(tmp_path: Path) -> None:
    with serving(tmp_path, make_model(tmp_path), generate=2) as served:
        core = served.engine._processes.core
        (worker,) = vllm_processes.worker_pids(core)

        async def stop() -> str:
            """Stop the worker before a swap. Returns how the engine died."""
            await served.engine.load(served.publish(), keep_cache=False)
            streams = await contract.begin(served.engine)
            published = served.publish()
            os.kill(worker, signal.SIGSTOP)
            with anyio.fail_after(30):
                async with anyio.create_task_group() as group:
                    group.start_soon(served.engine.wait_dead)
                    with pytest.raises(EngineDeadError):
                        await served.engine.load(published, keep_cache=False)
            for stream in streams:
                await stream.aclose()
            return str(await served.engine.wait_dead())

        assert served.call(stop).startswith("engine 0 is dead: it has made no step for 1 s, while requests run")
        served.call(served.engine.close)
        assert not processes_of_group(core)


def test_an_engine_that_is_left_in_the_middle_of_a_swap_counts_as_dead(tmp_path: Path) -> None:
    with serving(tmp_path, make_model(tmp_path)) as served:
        (worker,) = vllm_processes.worker_pids(served.engine._processes.core)

        async def leave() -> str:
            """Cancel a swap while the worker is stopped. Returns how the engine died."""
            published = served.publish()
            os.kill(worker, signal.SIGSTOP)
            with anyio.move_on_after(1):
                await served.engine.load(published, keep_cache=False)
            os.kill(worker, signal.SIGCONT)
            return str(await served.engine.wait_dead())

        assert "engine 0 is dead: it was left in the middle of a swap" in served.call(leave)
