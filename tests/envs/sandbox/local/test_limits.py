"""What is too large for a sandbox is refused, with its size and the limit, and the sandbox goes on."""

from __future__ import annotations

import pytest

from envs.sandbox.local.agent import AgentJob
from flash.errors import SandboxError, SandboxFileError, SandboxLimitError

pytestmark = pytest.mark.anyio

LIMIT = 20.0
"""Seconds for commands that end by themselves; long, because the machine may be busy."""


async def test_a_command_is_measured_in_bytes_and_words(bench):
    async with bench.sandbox() as sandbox, sandbox.session() as session:
        with pytest.raises(SandboxLimitError, match="10000 arguments, not 100001"):
            await sandbox.run(["true"] + ["x"] * 100_000, timeout=LIMIT)
        with pytest.raises(SandboxLimitError, match="120000 bytes, not 270000"):
            await session.run("€" * 90_000, timeout=LIMIT)
        with pytest.raises(SandboxLimitError, match="10000 arguments, not 20001"):
            await sandbox.run("true", env={f"V{number}": "" for number in range(10_000)}, timeout=LIMIT)
        with pytest.raises(SandboxLimitError, match="120000 bytes, not 150005"):
            await sandbox.start("true", env={"V": "€" * 50_000})
        answer = await sandbox.run(["printenv", "V"], env={"V": "value", "W": "x"}, timeout=LIMIT)
        assert answer.stdout == b"value\n"
        assert (await sandbox.run(["echo", "one"], env={"V": "value"}, timeout=LIMIT)).stdout == b"one\n"
        # The most of everything fits.
        words = ["x" * 11] * 9_999
        answer = await sandbox.run(["echo", *words], stdin=b"x" * (1 << 16), cwd="." + "/." * 2047, timeout=LIMIT)
        assert answer.stdout == b" ".join(word.encode() for word in words) + b"\n"
        assert (await session.run("echo on", timeout=LIMIT)).stdout == b"on\n"


async def test_a_path_of_any_length_is_answered(bench, tmp_path):
    async with bench.sandbox() as sandbox:
        for path in ("x" * 4096, "€" * 100_000, "y" * 300_000):
            for ask in (
                lambda path: sandbox.read(path),
                lambda path: sandbox.write(path, b"x"),
                lambda path: sandbox.list(path),
                lambda path: sandbox.remove(path),
                lambda path: sandbox.upload(tmp_path, path),
                lambda path: sandbox.download(path, tmp_path / "new"),
                lambda path: sandbox.run("true", cwd=path, timeout=LIMIT),
            ):
                with pytest.raises(SandboxFileError, match="at most 4095 bytes, but"):
                    await ask(path)
        assert (await sandbox.run("echo on", timeout=LIMIT)).stdout == b"on\n"


async def test_nothing_that_cannot_be_sent_ends_the_sandbox(bench):
    async with bench.sandbox() as sandbox:
        job = await sandbox.start("sleep 60")
        for ask in (
            lambda: sandbox.session("s" * 300_000).__aenter__(),
            lambda: sandbox.session("\ud800").__aenter__(),
            lambda: AgentJob(sandbox, "j" * 300_000).poll(),
            lambda: job.signal("SIG" * 100_000),
            lambda: job.output(offset=1 << 70),
            lambda: sandbox.read("f", offset=1 << 70),
        ):
            with pytest.raises(SandboxError):
                await ask()
        assert (await sandbox.run("echo on", timeout=LIMIT)).stdout == b"on\n"
