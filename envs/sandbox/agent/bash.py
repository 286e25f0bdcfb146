"""The bash of a session: it reads each command as one quoted string, and answers on a descriptor of its own.

Law: whatever a command prints, reads, redefines or leaves open, the answer to it is told from all others by a random
token, which the shell reads only after the command has ended, and which nobody else can read.

For that, the shell is a copy of bash that may not be read: programs run as the same user, and could otherwise open its
descriptors by their names in /proc, take the next command and its token from them, and answer in its place. Programs
that a command leaves behind are ended before the next one; jobs of the shell itself (`&`) go on.

After each command the shell writes down its state. When a command ends the shell (`exit`, `set -e`, a timeout), the
next one runs in a new shell with the state from before.
"""

import fcntl
import os

from envs.sandbox.agent.command import NO_SPACE
from envs.sandbox.agent.proc import CLOCK_TICK, Stat
from envs.sandbox.agent.process import Pipe, spawn, unreadable_copy, uptime
from envs.sandbox.agent.wire import CallRefusal

TELL = 199
"""The shell's descriptor for answers: above what scripts use, and below what bash moves its own to."""
PROGRAM = 198
"""The shell's descriptor for its own program, until it has begun."""
ENTER = "exec -a bash /proc/self/fd/%d --noprofile --norc -s" % PROGRAM
"""Becomes the shell."""
LEAVE = b"exec %d<&-\n" % PROGRAM
"""The shell's first command."""
BEGIN = b'_flash_status() { return "$1"; }\n_flash_set=\n'
TURN = rb"""
{ _flash=; \builtin test "${_flash_set#*v}" = "$_flash_set" || \builtin set -v; } 2>/dev/null; LINE
%s\builtin eval %s </dev/null TELL>&-; { _flash=$? _flash_set=$-; \builtin set +v; } 2>/dev/null

{ _flash=${_flash:-$?}; %s
} 2>/dev/null
""".replace(b"LINE\n", b"").replace(b"TELL", str(TELL).encode())
"""What to run, without our descriptors, and what to say when it has ended. The shell reads it as lines of its script: a
loop of ours would be ended by a stray `break`. The first empty line ends what others have written there, the second one
what the parser still waits for after a syntax error. A name is quoted against aliases. `set -v` shows nothing of it, no
token either: that is off between commands, and on again with the next one, in the line that holds it."""
SAY = r"""\builtin printf '%s\0' TOKEN "$_flash" "$PWD" >&TELL
{ \builtin declare -p; \builtin declare -f; \builtin set +o; \builtin shopt -p; \builtin umask -p
  \builtin printf '\0'; } >&TELL""".replace("TELL", str(TELL))
RESTORE = "{ builtin cd %s; builtin eval %s; } >/dev/null 2>&1"
STATE_LIMIT = 1 << 22
"""Bytes of a shell's state that are kept; one with more starts anew after a command that ended it."""
ANSWER_LIMIT = 1 << 20
"""Bytes of an exit code and a directory: what is longer is no answer."""
CODES = tuple(str(code).encode() for code in range(256))
"""Exit codes, as a shell says them."""


class StatefulBash:
    """One shell after another, each with the state that the last one wrote down.

    Its owner is told when a command has ended (`finish`), or that nobody knows how it has (`untold`).
    """

    def __init__(self, agent: object, owner: object, outputs: "list[int]") -> None:
        self.agent = agent
        self.owner = owner
        self.outputs = outputs
        """Where commands write to: their output, and their errors."""
        self.number = owner.number
        self.pid = -1
        self.leaders = []
        """Every shell of this session, the present one last."""
        self.state = b""
        self.cwd = agent.resolve(".")
        self.status = 0
        self.token = None
        """Of the command whose answer is waited for."""
        self.answer = bytearray()
        self.settling = False
        """The answer to the last command has come, but the state after it has not."""
        self.overflowing = False
        self.ask = self.tell = None

    def start(self) -> None:
        """Start a shell with the state that was written down last."""
        asks, tells = os.pipe(), os.pipe()
        # Above the numbers that the shell gets: copying one must not overwrite the next.
        tell = fcntl.fcntl(tells[1], fcntl.F_DUPFD_CLOEXEC, TELL + 1)
        files = {0: asks[0], 1: self.outputs[0], 2: self.outputs[1], TELL: tell}
        env = dict(self.agent.env)
        argv, begin = ["bash", "--noprofile", "--norc", "-s"], BEGIN
        # A new copy each time: a shell can make its own readable, and so that of every other one that ran the same.
        own = unreadable_copy(self.agent.bash)
        program = fcntl.fcntl(own, fcntl.F_DUPFD_CLOEXEC, TELL + 1) if own >= 0 else -1
        if program >= 0:
            argv[-1:], begin = ["-c", ENTER], LEAVE + BEGIN
            files[PROGRAM] = program
        try:
            cwd = self.agent.resolve(".")
            self.pid = self.agent.launcher.call(
                lambda: spawn(self.agent.bash, argv, env, cwd, files, False, self.number)
            )
        except OSError as error:
            os.close(asks[1])
            os.close(tells[0])
            self.pid = -1
            code = "limit" if error.errno in NO_SPACE else "file"
            raise CallRefusal(code, "no shell can be started: {}".format(os.strerror(error.errno)))
        finally:
            for fd in (asks[0], tells[1], tell, own, program):
                if fd >= 0:
                    os.close(fd)
        self.agent.children[self.pid] = self.owner
        self.leaders.append(self.pid)
        self.answer = bytearray()
        self.ask, self.outgoing = asks[1], bytearray(begin)
        os.set_blocking(self.ask, False)
        self.tell = Pipe(self.agent.loop, tells[0], self.hear)
        if self.state:
            cwd = quote(self.cwd.encode("utf-8", "surrogateescape"))
            self.say(RESTORE.encode() % (cwd, quote(self.state)), b":")

    def measure(self) -> "tuple[int, int]":
        """CPU ticks of the shell and what it waited for; the time now in ticks since the machine started."""
        try:
            ticks = Stat(self.pid).ticks
        except (OSError, ValueError, IndexError):
            ticks = 0
        return ticks, int(uptime() * CLOCK_TICK)

    def say(self, command: bytes, answer: bytes) -> None:
        """Send one command to the shell, and what to answer."""
        status = b"_flash_status %d; " % self.status if self.status else b""
        self.outgoing += TURN % (status, quote(command), answer)
        self.write()

    def write(self) -> None:
        try:
            while self.outgoing:
                del self.outgoing[: os.write(self.ask, memoryview(self.outgoing)[: 1 << 16])]
        except BlockingIOError:
            pass
        except OSError:
            self.outgoing = bytearray()  # The shell is gone; its end is on the way.
        self.agent.loop.watch(self.ask, None, self.write if self.outgoing else None)

    def hear(self, data: bytes) -> None:
        """The shell answers: exit code and directory at once, its state a moment later."""
        self.answer += data
        while True:
            if self.settling:
                if not self.settle():
                    return
                continue
            if self.token is None:
                self.answer = bytearray()
                return
            at = self.answer.find(self.token + b"\0")
            if at < 0:
                del self.answer[: -len(self.token) - 1]
                return
            fields = bytes(self.answer[at:]).split(b"\0", 3)
            if (len(fields) > 1 and fields[1] not in CODES) or (len(fields) < 4 and len(self.answer) > ANSWER_LIMIT):
                # A trap changes what our own commands say.
                self.token = None
                self.owner.untold()
                return
            if len(fields) < 4:
                return
            self.status = int(fields[1])
            self.cwd = fields[2].decode("utf-8", "surrogateescape")
            self.answer = bytearray(fields[3])
            self.settling = True
            self.token = None
            self.owner.finish({"exit_code": self.status, "signal": None})

    def settle(self) -> bool:
        """Take the state that follows an answer; False while it is not complete."""
        state, end, rest = self.answer.partition(b"\0")
        if len(state) > STATE_LIMIT:
            self.overflowing = True
            state = bytearray()
        if not end:
            self.answer = bytearray(state)
            return False
        self.state = b"" if self.overflowing else bytes(state)
        self.answer = bytearray(rest)
        self.settling = self.overflowing = False
        return True

    def gone(self) -> None:
        """The shell has ended: take what it said last."""
        self.tell.drain()
        self.tell.close()
        self.agent.loop.watch(self.ask)
        os.close(self.ask)
        self.pid = -1
        self.settling = self.overflowing = False
        self.status = 0


def quote(text: bytes) -> bytes:
    """One word for the shell."""
    return b"'" + text.replace(b"'", b"'\\''") + b"'"
