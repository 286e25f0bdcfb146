"""One client process of the fault run: users who hold sandboxes, and check every answer.

    python -m tests.envs.sandbox.fault_load URL TOKEN_FILE SECONDS USERS SEED

Prints its `Tally` as one line of JSON. Each command carries a nonce and a known exit code; each file that was reported
as written is read again later, also in forks.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any, cast

import anyio
import msgspec

from envs.sandbox.api import Chunk, Result, Session, Spec
from envs.sandbox.remote.client import CLOSE_S, SandboxClient, service_token
from flash.errors import SandboxError
from tests.envs.sandbox.conftest import IMAGE
from tests.envs.sandbox.fault_tally import Proof, Tally

SPEC = Spec(image=IMAGE, memory_mib=64, cpus=0.5, pids=64, disk_mib=16)
NEVER_ENDS = 600
"""Seconds that a command sleeps which is to be killed."""
FORK_S = 60.0
"""Seconds for a fork."""
FILE_S = 30.0
"""Seconds for one small file."""
OPEN_S = 30.0
"""Seconds for a shell to open or close, and for a job to start."""


class User:
    """Holds one sandbox after the other."""

    def __init__(self, client: SandboxClient, owner: str, rng: random.Random, tally: Tally, until: float) -> None:
        self._client = client
        self._owner = owner
        self._rng = rng
        self._tally = tally
        self._until = until
        self._sandbox: Any = None
        self._files: dict[str, bytes] = {}
        """Files that must be in the sandbox, with their content."""
        self._made_again = False
        """True if the sandbox may be made again, empty, after an error."""
        self._errors = 0

    async def work(self) -> None:
        """Hold sandboxes until the time is over."""
        while time.monotonic() < self._until:
            await self._hold()

    async def _hold(self) -> None:
        rng, tally = self._rng, self._tally
        self._made_again = rng.random() < 0.4
        self._files, self._errors = {}, 0
        deadline = rng.uniform(4, 40)
        on_lost = "recreate" if self._made_again else "fail"
        held = self._client.acquire(SPEC, owner=self._owner, deadline=deadline, on_lost=on_lost)
        self._sandbox = await tally.answered("acquire", deadline, held.__aenter__)
        if self._sandbox is None:
            await anyio.sleep(rng.uniform(0.1, 1.0))
            return
        operations = [self._run] * 6 + [self._stdin, self._late, self._file, self._stream, self._session]
        operations += [self._job, self._cancel, self._together, self._fork]
        try:
            for _ in range(rng.randint(3, 12)):
                if self._errors >= 3 or self._sandbox.state != "ready":
                    break
                await rng.choice(operations)()
                await self._look_again()
        finally:
            await tally.answered("release", CLOSE_S, lambda: held.__aexit__(None, None, None))

    # ---- operations

    async def _ask(self, kind: str, deadline: float, work: Any) -> Any:
        """Make a call and count it; after an error the sandbox may be another one."""
        value = await self._tally.answered(kind, deadline, work)
        if value is None:
            self._unknown()
        return value

    def _unknown(self) -> None:
        self._errors += 1
        if self._made_again:
            self._files.clear()

    def _command(self) -> tuple[str, Proof, str]:
        """Make a command, with the result that it must have, and the file that it must write."""
        rng = self._rng
        nonce, code, name = f"{rng.getrandbits(64):016x}", rng.choice([0, 0, 1, 3, 42]), f"f{rng.randrange(1000)}"
        seconds = rng.choice([0, 0, 0, 0.05, 0.3, 1.0])
        command = (
            f"set -e; printf %s {nonce} >.part-{nonce}; sleep {seconds}; mv .part-{nonce} {name}; "
            f"echo {nonce}; echo {nonce}-{code} >&2; exit {code}"
        )
        return command, Proof(nonce, code, f"{nonce}\n".encode(), f"{nonce}-{code}\n".encode()), name

    def _judge(self, kind: str, result: Result, proof: Proof, name: str, timeout: float) -> None:
        fault = proof.fault_of(result, timeout)
        self._tally.check(not fault, f"{kind} in {self._sandbox.sandbox_id}: {fault}")
        self._tally.done += 1
        self._files.pop(name, None)
        if not fault and not result.timed_out:
            self._files[name] = proof.nonce.encode()

    async def _run(self, kind: str = "run") -> None:
        command, proof, name = self._command()
        timeout = self._rng.uniform(5, 20)
        # Not known until the answer comes.
        self._files.pop(name, None)
        result = await self._ask(kind, timeout, lambda: self._sandbox.run(command, timeout=timeout))
        if result is not None:
            self._judge(kind, result, proof, name, timeout)

    async def _stdin(self) -> None:
        data = self._rng.randbytes(self._rng.choice([10, 5_000, 200_000]))
        result = await self._ask("stdin", 10, lambda: self._sandbox.run(["cat"], timeout=10, stdin=data))
        if result is not None:
            fault = Proof("", 0, data, b"").fault_of(result, 10)
            self._tally.check(not fault, f"stdin of {len(data)} bytes: {fault[:300]}")
            self._tally.done += 1

    async def _late(self) -> None:
        timeout = self._rng.uniform(0.2, 1.5)
        command = f"echo begun; sleep {NEVER_ENDS}"
        result = await self._ask("late", timeout, lambda: self._sandbox.run(command, timeout=timeout))
        if result is not None:
            ok = result.timed_out and not result.ok and b"begun\n".startswith(result.stdout)
            self._tally.check(ok, f"late in {self._sandbox.sandbox_id}: must time out, but is {result}")
            self._tally.done += 1

    async def _file(self) -> None:
        name, data = f"g{self._rng.randrange(100)}", self._rng.randbytes(self._rng.choice([1, 1000, 100_000]))
        self._files.pop(name, None)

        async def write() -> bool:
            await self._sandbox.write(name, data)
            return True

        if await self._ask("write", FILE_S, write):
            self._files[name] = data

    async def _stream(self) -> None:
        command, proof, name = self._command()
        self._files.pop(name, None)
        output: dict[str, bytes] = {"stdout": b"", "stderr": b""}

        async def read() -> Result | None:
            last = None
            async with aclosing(self._sandbox.stream(command, timeout=10)) as items:
                async for item in items:
                    if isinstance(item, Chunk):
                        output[item.stream] += item.data
                    else:
                        last = cast("Result", item)
            return last

        result = await self._ask("stream", 10, read)
        if result is not None:
            whole = msgspec.structs.replace(result, stdout=output["stdout"], stderr=output["stderr"])
            self._judge("stream", whole, proof, name, 10)

    async def _session(self) -> None:
        async with AsyncExitStack() as stack:
            held = self._sandbox.session(f"s{self._rng.getrandbits(32):x}")
            session: Session | None = await self._ask("open session", OPEN_S, held.__aenter__)
            if session is None:
                return
            stack.push_async_callback(
                self._tally.answered, "close session", OPEN_S, lambda: held.__aexit__(None, None, None)
            )
            nonce = f"{self._rng.getrandbits(64):016x}"
            for command, code, out in (
                (f"x={nonce}; cd /tmp", 0, ""),
                ("echo $x $PWD; (exit 7)", 7, f"{nonce} /tmp\n"),
                ("set -e; false", 1, ""),
                ("set +e; echo $x", 0, f"{nonce}\n"),
            ):
                result = await self._ask("session", 10, lambda text=command: session.run(text, timeout=10))
                if result is None:
                    return
                fault = Proof("", code, out.encode(), b"").fault_of(result, 10)
                self._tally.check(not fault, f"session, {command!r}: {fault}")
                self._tally.done += 1

    async def _job(self) -> None:
        command, proof, name = self._command()
        self._files.pop(name, None)
        job = await self._ask("start job", OPEN_S, lambda: self._sandbox.start(command, timeout=20))
        if job is not None:
            result = await self._ask("job", 15, lambda: job.wait(15))
            if result is not None:
                self._judge("job", result, proof, name, 20)

    async def _cancel(self) -> None:
        work = self._rng.choice(
            [
                lambda: self._sandbox.run(f"sleep {NEVER_ENDS}", timeout=NEVER_ENDS),
                lambda: self._sandbox.start(f"sleep {NEVER_ENDS}", timeout=NEVER_ENDS),
                lambda: self._sandbox.read("no-such-file"),
                lambda: self._sandbox.fork(1),
            ]
        )
        await self._tally.cancelled("call", self._rng.uniform(0, 1.5), work)
        if self._made_again:
            self._files.clear()  # It may have been the one that was told of a loss.

    async def _together(self) -> None:
        before = self._errors
        async with anyio.create_task_group() as tasks:
            for _ in range(self._rng.randint(2, 4)):
                tasks.start_soon(self._run, "run together")
        if self._made_again and self._errors > before:
            # An answer may have come after the error, but be about the sandbox before it.
            self._files.clear()

    async def _fork(self) -> None:
        files = dict(self._files)
        count = self._rng.choice([1, 2])
        forks: Sequence[Any] | None = await self._ask("fork", FORK_S, lambda: self._within(FORK_S, count))
        if forks is None:
            return
        origin, made_again = self._sandbox, self._made_again
        for fork in forks:
            # A fork is never made again: what it has must stay.
            self._sandbox, self._files, self._made_again = fork, dict(files), False
            await self._look_again()
            await self._run("run in fork")
            if self._rng.random() < 0.5:
                await self._tally.answered("release", CLOSE_S, fork.close)
        self._sandbox, self._files, self._made_again = origin, files, made_again

    async def _within(self, seconds: float, count: int) -> Sequence[Any]:
        with anyio.move_on_after(seconds):
            return await self._sandbox.fork(count)
        raise SandboxError(f"the user waited {seconds:g} s for a fork")

    async def _look_again(self) -> None:
        """Check that a file that was reported as written is there."""
        if not self._files or self._rng.random() < 0.5:
            return
        name, data = self._rng.choice(list(self._files.items()))
        sandbox, found = self._sandbox, f"{name} in {self._sandbox.sandbox_id}"

        async def read() -> tuple[bytes | None]:
            listed = {entry.name for entry in await sandbox.list(".")}
            return ((await sandbox.read(name)) if name in listed else None,)

        answer = await self._ask("read", FILE_S, read)
        if answer is not None:
            self._tally.check(answer[0] == data, f"{found}: {(answer[0] or b'-')[:40]!r} instead of {data[:40]!r}")


async def main(url: str, token_file: str, seconds: float, users: int, seed: int) -> Tally:
    """Let users work for a while."""
    tally = Tally()
    until = time.monotonic() + seconds
    token = service_token(Path(token_file))
    async with SandboxClient(url, token) as client, anyio.create_task_group() as tasks:
        for number in range(users):
            rng = random.Random(f"{seed}/{number}")
            tasks.start_soon(User(client, f"load-{seed}", rng, tally, until).work)
    return tally


if __name__ == "__main__":
    counted = anyio.run(main, sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    sys.stdout.buffer.write(msgspec.json.encode(counted) + b"\n")
