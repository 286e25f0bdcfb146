"""The bash of a session: it reads each command as one quoted string, and answers on its own descriptor.

Law: whatever a command prints, reads, redefines or leaves open, its answer is recognised by a random token. The shell
reads the token only after the command has ended, and no other process can read it.

Programs run as the same user. They could open the shell's descriptors in /proc, read the next command and its token
there, and answer in its place. So the shell is a copy of bash without read permission. Programs that a command leaves
behind are killed before the next one; the shell's own jobs (`&`) go on.

After each command the shell writes its state. If a command ends the shell (`exit`, `set -e`, a timeout), the next
command runs in a new shell with the state from before.
"""

import fcntl
import os

from envs.sandbox.agent.command import NO_SPACE
from envs.sandbox.agent.proc import CLOCK_TICK, Stat
from envs.sandbox.agent.process import Pipe, spawn, unreadable_copy, uptime
from envs.sandbox.agent.wire import CallRefusal

TELL = 199
"""The shell's descriptor for answers. Scripts use lower ones; bash moves its own to higher ones."""
PROGRAM = 198
"""The shell's descriptor for its own program, until it has started."""
ENTER = "exec -a bash /proc/self/fd/%d --noprofile --norc -s" % PROGRAM
"""Command that replaces the first bash by the unreadable copy."""
LEAVE = b"exec %d<&-\n" % PROGRAM
"""First command of the shell: close the descriptor of its program."""
BEGIN = b'_flash_status() { return "$1"; }\n_flash_set=\n'
"""First definitions in the shell."""
TURN = rb"""
{ _flash=; \builtin test "${_flash_set#*v}" = "$_flash_set" || \builtin set -v; } 2>/dev/null; LINE
%s\builtin eval %s </dev/null TELL>&-; { _flash=$? _flash_set=$-; \builtin set +v; } 2>/dev/null

{ _flash=${_flash:-$?}; %s
} 2>/dev/null
""".replace(b"LINE\n", b"").replace(b"TELL", str(TELL).encode())
"""Lines of a turn: a command, run without our descriptors, and then its answer. The shell reads them as its script,
since a stray `break` would end a loop of ours. The first empty line ends text that others have written there. The
second one ends text that the parser still expects after a syntax error. Quoting a name prevents aliases. `set -v` shows
neither these lines nor a token: it is off between commands, and on again in the line with the next command."""
SAY = r"""\builtin printf '%s\0' TOKEN "$_flash" "$PWD" >&TELL
{ \builtin declare -p; \builtin declare -f; \builtin set +o; \builtin shopt -p; \builtin umask -p
  \builtin printf '\0'; } >&TELL""".replace("TELL", str(TELL))
"""Command that prints the answer, and then the state."""
RESTORE = "{ builtin cd %s; builtin eval %s; } >/dev/null 2>&1"
"""Command that restores directory and state."""
STATE_LIMIT = 1 << 22
"""Most bytes of a shell's state. A larger state is lost when a command ends the shell."""
ANSWER_LIMIT = 1 << 20
"""Most bytes of an exit code and a directory. Anything longer is not an answer."""
CODES = tuple(str(code).encode() for code in range(256))
"""Exit codes, as a shell prints them."""


class StatefulBash:
    """Runs one shell after another, each with the state that the previous one wrote.

    Notifies its owner when a command has ended (`finish`), or ended in an unknown way (`untold`).
    """

    def __init__(self, agent: object, owner: object, outputs: "list[int]") -> None:
        self.agent = agent
        self.owner = owner
        self.outputs = outputs
        """Descriptors for the output and the errors of commands."""
        self.number = owner.number
        self.pid = -1
        self.leaders = []
        """Process ids of all shells of this session, the current one last."""
        self.state = b""
        self.cwd = agent.resolve(".")
        self.status = 0
        self.token = None
        """Token of the running command; None if no answer is expected."""
        self.answer = bytearray()
        self.settling = False
        """True after the answer to the last command, until its state has arrived."""
        self.overflowing = False
        self.ask = self.tell = None

    def start(self) -> None:
        """Start a shell with the last state."""
        asks, tells = os.pipe(), os.pipe()
        # Above the shell's numbers: `dup2` to one of them must not overwrite another.
        tell = fcntl.fcntl(tells[1], fcntl.F_DUPFD_CLOEXEC, TELL + 1)
        files = {0: asks[0], 1: self.outputs[0], 2: self.outputs[1], TELL: tell}
        env = dict(self.agent.env)
        argv, begin = ["bash", "--noprofile", "--norc", "-s"], BEGIN
        # A new copy each time: a shell can make its copy readable, and so that of all shells that run the same copy.
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
        """Return the CPU ticks of the shell and its reaped children, and the machine's uptime in ticks."""
        try:
            ticks = Stat(self.pid).ticks
        except (OSError, ValueError, IndexError):
            ticks = 0
        return ticks, int(uptime() * CLOCK_TICK)

    def say(self, command: bytes, answer: bytes) -> None:
        """Send one command to the shell, and the command that prints its answer."""
        status = b"_flash_status %d; " % self.status if self.status else b""
        self.outgoing += TURN % (status, quote(command), answer)
        self.write()

    def write(self) -> None:
        """Write as much as the shell takes."""
        try:
            while self.outgoing:
                del self.outgoing[: os.write(self.ask, memoryview(self.outgoing)[: 1 << 16])]
        except BlockingIOError:
            pass
        except OSError:
            self.outgoing = bytearray()  # The shell has ended; it will be reaped.
        self.agent.loop.watch(self.ask, None, self.write if self.outgoing else None)

    def hear(self, data: bytes) -> None:
        """Process bytes from the shell: exit code and directory first, its state later."""
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
                # A trap changes the output of our own commands.
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
        """Read the state that follows an answer. Returns False while it is incomplete."""
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
        """Clean up after the shell's end. Its last output is read first."""
        self.tell.drain()
        self.tell.close()
        self.agent.loop.watch(self.ask)
        os.close(self.ask)
        self.pid = -1
        self.settling = self.overflowing = False
        self.status = 0


def quote(text: bytes) -> bytes:
    """Quote text as one word for the shell."""
    return b"'" + text.replace(b"'", b"'\\''") + b"'"
