from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

BLOCKING = """
    import time
    import anyio
    import pytest
    from flash.simulate.clock import run_virtual

    def burn():
        until = time.thread_time() + 0.6
        while time.thread_time() < until:
            pass

    async def burn_in_loop():
        await anyio.sleep(0)
        burn()

    @pytest.mark.anyio
    async def test_blocks():
        await burn_in_loop()

    def test_blocks_virtually():
        run_virtual(burn_in_loop)

    @pytest.mark.anyio
    @pytest.mark.may_block
    async def test_blocks_with_leave():
        await burn_in_loop()

    @pytest.mark.anyio
    async def test_waits_long_without_blocking():
        await anyio.sleep(0.6)

    def test_computes_without_a_loop():
        burn()
"""


@pytest.mark.slow
@pytest.mark.may_block
def test_law_9_a_test_that_blocks_its_event_loop_fails(pytester: pytest.Pytester):
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile(BLOCKING)
    result = pytester.runpytest("-v")
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines(["*::test_blocks FAILED*", "*::test_blocks_virtually FAILED*"])
    result.stdout.fnmatch_lines(["*an event loop was blocked for over 0.5 s of CPU time by <Task *"])
