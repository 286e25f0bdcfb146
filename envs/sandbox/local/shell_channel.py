"""The honest subset of a sandbox whose image has no Python: `run`, and reading and writing of files.

`ShellChannel` looks like a `Channel` and speaks the lines of `agent/box.sh`. Commands run one after another. What a
shell cannot do truthfully is refused: sessions, jobs, streams, terminals, listings and trees. Of long output the first
part is kept and not the last; CPU time and memory are not measured; a signal shows as exit code 128 and its number; a
cancelled command runs on until its timeout.

A shell cannot hide its output from the commands that it runs. So each answer carries a word that only it was told, and
whatever else comes ends the channel: a command can lose its sandbox by that, but not answer for another one.
"""

from __future__ import annotations

import base64
import re
import secrets
import shlex
from collections import deque
from collections.abc import Callable

import anyio
import msgspec

from envs.sandbox.engines.backend import Link
from envs.sandbox.local.channel import PIECE, AgentCall, AgentFrameKind, Channel
from envs.sandbox.local.commands import ANSWER_SECONDS, Ending
from flash.errors import SandboxLimitError, SandboxLostError, SandboxRefusedError

PROTOCOL = 1
LINE_BYTES = 4096
"""Longest line that says how a command ended."""
_ENCODE = msgspec.msgpack.encode
_REFUSED = "the image has no Python 3.6 or newer, and a shell alone cannot do this: {}"


class ShellChannel(Channel):
    """See the module.

    Args:
        link: to the agent, after its greeting.
        rest: what was read from it already.
        workdir: where commands start.
        lifetime: seconds that the sandbox may live.
        uid: whom commands run as.
    """

    def __init__(self, link: Link, rest: bytes, workdir: str, lifetime: float, uid: int) -> None:
        super().__init__(link)
        self._workdir = workdir
        self._lifetime = lifetime
        self._uid = uid
        self._buffer = bytearray(rest)
        self._room = LINE_BYTES
        """Bytes that may come before they are taken."""
        self._waiting: deque[tuple[int, str, dict[str, object]]] = deque()
        self._writes: dict[int, tuple[dict[str, object], bytearray]] = {}
        self._work = anyio.Event()
        self._came = anyio.Event()

    async def post(self, number: int, operation: str, argument: object) -> None:
        """Take a call, or a part of one."""
        self.check()
        if operation == "write" and isinstance(argument, dict):
            self._writes[number] = (argument, bytearray())
        elif operation in ("data", "eof") and number in self._writes and isinstance(argument, (bytes, memoryview)):
            self._writes[number][1].extend(argument)
            self._take(number, AgentFrameKind.CREDIT, len(argument))
            if operation == "eof":
                asked, data = self._writes.pop(number)
                self._waiting.append((number, "write", {**asked, "data": bytes(data)}))
        elif operation == "session_close":
            self._take(number, AgentFrameKind.RESULT, None)
        elif operation == "ping":
            self._take(number, AgentFrameKind.RESULT, 0)
        elif operation in ("run", "read", "hello") and isinstance(argument, dict):
            self._waiting.append((number, operation, argument))
        elif operation not in ("credit", "cancel"):
            self._take(number, AgentFrameKind.FAILURE, ("request", _REFUSED.format(operation)))
        self._work.set()

    async def finish(self, call: AgentCall) -> None:
        """End a call. One that waits is forgotten; one that runs goes on to its end."""
        del self._calls[call.number]
        self._writes.pop(call.number, None)
        self._waiting = deque(entry for entry in self._waiting if entry[0] != call.number)

    def _take(self, number: int, kind: AgentFrameKind, value: object) -> None:
        if (call := self._calls.get(number)) is not None:
            call.take(kind, msgspec.Raw(_ENCODE(value)))

    async def run(self) -> None:
        """Carry out calls, one after another.

        Consumes calls. Waits for one, then for the shell. Unblocked by `post` and by what the shell says. Produces the
        calls' results; returns when the link has ended.
        """
        error = SandboxLostError("the channel to the sandbox ended; the call may or may not have been carried out")
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read, tasks.cancel_scope)
                while True:
                    while not self._waiting:
                        self._work = anyio.Event()
                        await self._work.wait()
                    number, operation, asked = self._waiting.popleft()
                    try:
                        await self._carry_out(number, operation, asked)
                    except SandboxLimitError as reason:
                        self._take(number, AgentFrameKind.FAILURE, ("limit", str(reason)))
                    except SandboxRefusedError as reason:
                        self._take(number, AgentFrameKind.FAILURE, ("request", str(reason)))
                    except SandboxLostError as reason:
                        error = reason
                        tasks.cancel_scope.cancel()
        finally:
            self.break_off(error)

    async def _read(self, scope: anyio.CancelScope) -> None:
        try:
            while data := await self._link.receive():
                self._buffer += data
                if len(self._buffer) > self._room:
                    break
                self._came.set()
                self._came = anyio.Event()
                self.heard.set()
                self.heard = anyio.Event()
        except SandboxLostError:
            pass  # Like an end: `run` says what that means for the calls.
        scope.cancel()

    async def _carry_out(self, number: int, operation: str, asked: dict[str, object]) -> None:
        if operation == "hello":
            _, out, _ = await self._ask("test -w . && echo yes", 10, 100)
            self._take(number, AgentFrameKind.RESULT, self._hello(out == b"yes\n"))
        elif operation == "run":
            await self._run(number, asked)
        else:
            limit = int(str(asked.get("limit", 0)))
            ending, out, _ = await self._ask(_script(operation, asked), ANSWER_SECONDS, limit + PIECE)
            if ending.exit_code != 0:
                text = ending.stderr.decode("utf-8", "replace").strip()[-300:]
                self._take(number, AgentFrameKind.FAILURE, ("file", text or f"{operation} failed"))
                return
            for at in range(0, len(out), PIECE):
                self._take(number, AgentFrameKind.CHUNK, ("stdout", out[at : at + PIECE]))
            self._take(number, AgentFrameKind.RESULT, [0] if operation == "read" else None)

    async def _run(self, number: int, asked: dict[str, object]) -> None:
        timeout = asked["timeout"]
        assert isinstance(timeout, (int, float))
        if asked.get("stream") or asked.get("feed"):
            self._take(number, AgentFrameKind.FAILURE, ("request", _REFUSED.format("streams, and long input")))
            return
        ending, out, err = await self._ask(_script("run", asked), timeout, int(str(asked["limit"])))
        for name, data in (("stdout", out), ("stderr", err)):
            for at in range(0, len(data), PIECE):
                self._take(number, AgentFrameKind.CHUNK, (name, data[at : at + PIECE]))
        self._take(number, AgentFrameKind.RESULT, msgspec.structs.replace(ending, stdout=b"", stderr=b""))

    async def _ask(self, script: str, seconds: float, limit: int) -> tuple[Ending, bytes, bytes]:
        """Run a script; how it ended, and its output."""
        started = anyio.current_time()
        script = f"cd {shlex.quote(self._workdir)} || exit 125\n{script}\n"
        data = script.encode("utf-8", "surrogateescape")
        encoded = base64.b64encode(data).decode()
        # Busybox may sleep whole seconds only.
        word = secrets.token_hex(8)
        self._room = LINE_BYTES + 2 * (limit + 1)
        if self._buffer:
            raise SandboxLostError("something in the sandbox wrote where only its agent may")
        await self._link.send(f"RUN {word} {max(1, round(seconds))} {limit} {len(data)} {encoded}\n".encode())
        code, timed, out_size, err_size = _ending(await self._line(), word, limit + 1)
        out, err = await self._bytes(out_size), await self._bytes(err_size)
        ending = Ending(
            code, None, timed, False, out[:limit], err[:limit], out_size > limit,
            err_size > limit, anyio.current_time() - started, 0.0, 0,
        )  # fmt: skip
        return ending, out[:limit], err[:limit]

    async def _line(self) -> bytes:
        while (end := self._buffer.find(b"\n") + 1) == 0:
            await self._came.wait()
        return self._cut(end)

    async def _bytes(self, count: int) -> bytes:
        while len(self._buffer) < count:
            await self._came.wait()
        return self._cut(count)

    def _cut(self, count: int) -> bytes:
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def _hello(self, writable: bool) -> dict[str, object]:
        return {
            "protocol": PROTOCOL, "kind": "shell", "version": "", "pid": 1, "uid": self._uid, "workdir": self._workdir,
            "bash": False, "writable": writable, "protected": False, "life": self._lifetime,
        }  # fmt: skip


def _ending(line: bytes, word: str, most: int) -> tuple[int, bool, int, int]:
    """Exit code, whether it timed out, and the sizes of its output. Raises SandboxLimitError, SandboxLostError."""
    if line == f"FULL {word}\n".encode():
        raise SandboxLimitError(
            "/tmp has no room for the command or its output; it may or may not have been carried out"
        )
    given = re.fullmatch(rb"END ([0-9a-f]+) ([0-9]{1,3}) ([01]) +([0-9]{1,9}) +([0-9]{1,9})\n", line)
    if given is None or given[1] != word.encode() or max(int(given[4]), int(given[5])) > most:
        raise SandboxLostError("something in the sandbox answered instead of its agent")
    return int(given[2]), given[3] == b"1", int(given[4]), int(given[5])


def _script(operation: str, asked: dict[str, object]) -> str:
    """What the shell has to do for a call."""

    def text(name: str) -> str:
        value = asked.get(name, b"")
        return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)

    path = shlex.quote(text("path"))
    if operation == "read":
        return (
            f"test -f {path} || {{ echo {path}: not a regular file >&2; exit 1; }}\n"
            f"tail -c +{int(str(asked['offset'])) + 1} {path} | head -c {asked['limit']}"
        )
    if operation == "write":
        data = asked["data"]
        assert isinstance(data, bytes)
        target = f"{path}" if asked["append"] else f"{path}.flash-$$"
        finish = "" if asked["append"] else f" && chmod {int(str(asked['mode'])):o} {target} && mv -f {target} {path}"
        return (
            f"mkdir -p \"$(dirname {path})\" && base64 -d {'>>' if asked['append'] else '>'} {target} <<'END'{finish}\n"
            f"{base64.encodebytes(data).decode()}END"
        )
    return _command(asked, text)


def _command(asked: dict[str, object], text: Callable[[str], str]) -> str:
    lines: list[str] = []
    env = asked.get("env") or {}
    assert isinstance(env, dict)
    for name, value in env.items():
        if not re.fullmatch(rb"[A-Za-z_][A-Za-z0-9_]*", name):
            raise SandboxRefusedError(f"env: {name[:80]!r} is no name of a variable for a shell")
        lines.append(f"export {name.decode()}={shlex.quote(value.decode('utf-8', 'surrogateescape'))}")
    if "cwd" in asked:
        lines.append(f"cd {shlex.quote(text('cwd'))} || exit 125")
    argv = asked.get("argv")
    if isinstance(argv, list):
        command = " ".join(shlex.quote(word.decode("utf-8", "surrogateescape")) for word in argv)
    else:
        command = f"/bin/sh -c {shlex.quote(text('command'))}"
    stdin = asked.get("stdin")
    if isinstance(stdin, bytes) and stdin:
        lines.append(f"base64 -d <<'END' | {command}\n{base64.encodebytes(stdin).decode()}END")
    else:
        lines.append(f"exec {command}")
    return "\n".join(lines)
