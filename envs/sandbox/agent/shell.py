"""A session: commands that run one after another in a bash, which is replaced when a command ends it.

Part of the program inside a sandbox: Python 3.6, standard library only. `envs.sandbox.engines.bundle` joins all modules
into one text, so top-level names must be unique. The operation `session_open` makes a `Shell`; `session_run` gives it
commands.

The bash (`StatefulBash`) reads each command as one quoted string, and answers on its own descriptor.

Law: whatever a command prints, reads, redefines or leaves open, its answer is recognised by a random token. The shell
reads the token only after the command has ended, and no other process can read it.

Programs run as the same user. They could open the shell's descriptors in /proc, read the next command and its token
there, and answer in its place. So the shell is a copy of bash without read permission. Programs that a command leaves
behind are killed before the next one; the shell's own jobs (`&`) go on.

After each command the shell writes its state. If a command ends the shell (`exit`, `set -e`, a timeout), the next
command runs in a new shell with the state from before. Jobs of the commands before it go on; those that the command
itself has started end.
"""

import _signal
import binascii
import fcntl
import os

from envs.sandbox.agent.command import (
    CHECK,
    GRACE,
    NO_SPACE,
    descendants,
    end_leftovers,
    ending,
    kill_all,
    send_result,
)
from envs.sandbox.agent.process import (
    CLOCK_TICK,
    Pipe,
    Ring,
    Stat,
    now,
    processes,
    send_signal,
    spawn,
    still_used,
    tree,
    unreadable_copy,
)
from envs.sandbox.agent.wire import FAILURE, CallRefusal

ANSWER_FD = 199
"""The shell's descriptor for answers. Scripts use lower ones; bash moves its own to higher ones."""
PROGRAM_FD = 198
"""The shell's descriptor for its own program, until it has started."""
ENTER = "exec -a bash /proc/self/fd/%d --noprofile --norc -s" % PROGRAM_FD
"""Command that replaces the first bash by the unreadable copy."""
LEAVE = b"exec %d<&-\n" % PROGRAM_FD
"""First command of the shell: close the descriptor of its program."""
BEGIN = b'_flash_status() { return "$1"; }\n_flash_set=\n'
"""First definitions in the shell, for `TURN`: a function that sets `$?`, and the shell's options (see there)."""
TURN = rb"""
{ _flash=; \builtin test "${_flash_set#*v}" = "$_flash_set" || \builtin set -v; } 2>/dev/null; LINE
%s\builtin eval %s </dev/null ANSWER_FD>&-; { _flash=$? _flash_set=$-; \builtin set +v; } 2>/dev/null

{ _flash=${_flash:-$?}; %s
} 2>/dev/null
""".replace(b"LINE\n", b"").replace(b"ANSWER_FD", str(ANSWER_FD).encode())
"""Lines of a turn: a command, run without our descriptors, and then its answer.

The three `%s` are a call of `_flash_status` or nothing, the quoted command, and the shell code that prints the answer.
`_flash` becomes the command's exit code. It stays empty if an error drops the rest of the line with the command; then
`$?` has the code. `_flash_set` becomes the shell's options.

The shell reads the lines as its script, since a stray `break` would end a loop of ours. The first empty line ends text
that others have written there. The second one ends text that the parser still expects after a syntax error. Quoting a
name prevents aliases. `set -v` shows neither these lines nor a token: it is off between commands, and on again in the
line with the next command."""
REPORT = r"""\builtin printf '%s\0' TOKEN "$_flash" "$PWD" >&ANSWER_FD
{ \builtin declare -p; \builtin declare -f; \builtin set +o; \builtin shopt -p; \builtin umask -p
  \builtin printf '\0'; } >&ANSWER_FD""".replace("ANSWER_FD", str(ANSWER_FD))
"""Shell code that prints the answer (token, exit code, directory; each ends with a zero byte), and then the state."""
RESTORE = "{ builtin cd %s; builtin eval %s; } >/dev/null 2>&1"
"""Command that restores directory and state in a new bash; the two `%s` are both, quoted."""
STATE_LIMIT = 1 << 22
"""Most bytes of a shell's state. A larger state is lost when a command ends the shell."""
ANSWER_LIMIT = 1 << 20
"""Most bytes of an exit code and a directory. Anything longer is not an answer."""
CODES = tuple(str(code).encode() for code in range(256))
"""Exit codes, as a shell prints them."""


class StatefulBash:
    """The bash processes of a session, one after another, each with the state that the previous one wrote.

    Notifies its owner, a `Shell`, when a command has ended (`finish`), or ended in an unknown way (`stop_unreported`).
    """

    def __init__(self, agent: object, owner: object, outputs: "list[int]") -> None:
        """Describe a session without a running bash. `agent` is the `BoxAgent`, and `owner` the `Shell`."""
        self.agent = agent
        self.owner = owner
        self.outputs = outputs
        """Descriptors for the output and the errors of commands."""
        self.number = owner.number
        """Number that all processes of the session carry; see `envs.sandbox.agent.process`."""
        self.pid = -1
        """Process id of the running bash; -1 if none runs."""
        self.leaders = []
        """Process ids of the shells of this session, the current one last; ended ones while `still_used`."""
        self.state = b""
        """Commands that restore variables, functions and options of the last finished command."""
        self.cwd = agent.workdir
        """Working directory after the last finished command."""
        self.status = 0
        """Exit code of the last finished command, which the next one finds in `$?`."""
        self.token = None
        """Token of the running command; None if no answer is expected."""
        self.answer = bytearray()
        """Bytes from bash that are not processed yet."""
        self.reading_state = False
        """True after the answer to the last command, until its state has arrived."""
        self.overflowing = False
        """True if the state that arrives is longer than `STATE_LIMIT`, so it is dropped."""
        self.command_pipe = self.answer_pipe = None
        """Descriptor to which commands are written, and the `Pipe` of bash's answers."""
        self.outgoing = bytearray()
        """Bytes for bash that it has not read yet."""

    def start(self) -> None:
        """Start a bash, and let it restore the last state. `Shell` calls this at first, and before the next command
        after the end of a bash.

        Raises:
            CallRefusal: no shell can be started. No descriptor stays open.
        """
        ours, theirs = [], []
        env = dict(self.agent.env)
        argv, begin = ["bash", "--noprofile", "--norc", "-s"], BEGIN
        try:
            commands, command_pipe = os.pipe()
            theirs.append(commands)
            ours.append(command_pipe)
            answer_pipe, answers = os.pipe()
            ours.append(answer_pipe)
            theirs.append(answers)
            # Above the shell's numbers: `dup2` to one of them must not overwrite another.
            theirs.append(fcntl.fcntl(answers, fcntl.F_DUPFD_CLOEXEC, ANSWER_FD + 1))
            files = {0: commands, 1: self.outputs[0], 2: self.outputs[1], ANSWER_FD: theirs[-1]}
            # A new copy each time: a shell can make its copy readable, and so that of all shells that run the same
            # copy.
            program = unreadable_copy(self.agent.bash)
            if program >= 0:
                theirs.append(program)
                theirs.append(fcntl.fcntl(program, fcntl.F_DUPFD_CLOEXEC, ANSWER_FD + 1))
                # The readable bash only executes the copy. Without a copy it is the shell itself.
                argv, begin = ["bash", "--noprofile", "--norc", "-c", ENTER], LEAVE + BEGIN
                files[PROGRAM_FD] = theirs[-1]
            cwd = self.agent.workdir
            self.pid = self.agent.launcher.call(
                lambda: spawn(self.agent.bash, argv, env, cwd, files, False, self.number)
            )
        except BaseException as error:
            # Also an error that is no OSError, such as MemoryError, must leave no descriptor open.
            for fd in ours:
                os.close(fd)
            if not isinstance(error, OSError):
                raise
            code = "limit" if error.errno in NO_SPACE else "file"
            raise CallRefusal(code, "no shell can be started: {}".format(os.strerror(error.errno)))
        finally:
            for fd in theirs:
                os.close(fd)
        self.agent.children[self.pid] = self.owner
        self.leaders = [*still_used(self.leaders), self.pid]
        self.answer = bytearray()
        self.command_pipe, self.outgoing = command_pipe, bytearray(begin)
        os.set_blocking(self.command_pipe, False)
        self.answer_pipe = Pipe(self.agent.loop, answer_pipe, self.take_answer)
        if self.state:
            quoted_cwd = quote(self.cwd.encode("utf-8", "surrogateescape"))
            # The answer is the command `:`, which prints nothing.
            self.send_command(RESTORE.encode() % (quoted_cwd, quote(self.state)), b":")

    def ticks(self) -> int:
        """Return the CPU ticks of the shell and its reaped children; 0 if no shell runs.

        The difference between the begin and the end of a command is the command's CPU time.
        """
        try:
            return Stat(self.pid).ticks
        except (OSError, ValueError, IndexError):
            return 0

    def send_command(self, command: bytes, answer: bytes) -> None:
        """Send one command to the shell, and then the shell code `answer`, which prints the answer to the command.

        The command finds the exit code of the last one in `$?`.
        """
        status = b"_flash_status %d; " % self.status if self.status else b""
        self.outgoing += TURN % (status, quote(command), answer)
        self.write()

    def write(self) -> None:
        """Write as much as the shell takes. The loop calls this again when it takes more."""
        try:
            while self.outgoing:
                del self.outgoing[: os.write(self.command_pipe, memoryview(self.outgoing)[: 1 << 16])]
        except BlockingIOError:
            pass
        except OSError:
            self.outgoing = bytearray()  # The shell has ended; it will be reaped.
        self.agent.loop.watch(self.command_pipe, None, self.write if self.outgoing else None)

    def take_answer(self, data: bytes) -> None:
        """Process bytes from the shell: exit code and directory of the command first, the shell's state later.

        The loop calls this when there are some. Bytes before the token of the running command are dropped: they are not
        ours. An answer that is malformed or too long ends the command as unreported.
        """
        self.answer += data
        while True:
            if self.reading_state:
                if not self.take_state():
                    return
                continue
            if self.token is None:
                self.answer = bytearray()
                return
            at = self.answer.find(self.token + b"\0")
            if at < 0:
                # The last bytes may be the first part of the token.
                del self.answer[: -len(self.token) - 1]
                return
            # The token, the exit code, the directory, and the begin of the state.
            fields = bytes(self.answer[at:]).split(b"\0", 3)
            if (len(fields) > 1 and fields[1] not in CODES) or (len(fields) < 4 and len(self.answer) > ANSWER_LIMIT):
                # A trap changes the output of our own commands.
                self.token = None
                self.owner.stop_unreported()
                return
            if len(fields) < 4:
                return
            self.status = int(fields[1])
            self.cwd = fields[2].decode("utf-8", "surrogateescape")
            self.answer = bytearray(fields[3])
            self.reading_state = True
            self.token = None
            # This may begin the next command, and so set its token. The shell writes this command's state before.
            self.owner.finish({"exit_code": self.status, "signal": None})

    def take_state(self) -> bool:
        """Read the state that follows an answer, up to its zero byte. Returns False while it is incomplete."""
        state, end, after = self.answer.partition(b"\0")
        if len(state) > STATE_LIMIT:
            self.overflowing = True
            state = bytearray()  # Of a state that is too long, nothing is kept in memory.
        if not end:
            self.answer = bytearray(state)
            return False
        self.state = b"" if self.overflowing else bytes(state)
        self.answer = bytearray(after)
        self.reading_state = self.overflowing = False
        return True

    def clean_up(self) -> None:
        """Close the pipes of a bash that has ended and was reaped. Its last answer is read first."""
        self.answer_pipe.drain()
        self.answer_pipe.close()
        self.agent.loop.watch(self.command_pipe)
        os.close(self.command_pipe)
        self.pid = -1
        self.reading_state = self.overflowing = False
        self.status = 0  # A new shell begins with 0.


def quote(text: bytes) -> bytes:
    """Quote text as one word for the shell."""
    return b"'" + text.replace(b"'", b"'\\''") + b"'"


class Running:
    """A command of a session, running or in its queue. The operation `session_run` makes it."""

    def __init__(self, shell: object, reply: object, request: dict) -> None:
        """Describe the command; `Shell.run` queues it.

        Args:
            shell: the `Shell` of the session.
            reply: function `(kind, body)` that sends the host a frame of the command's call.
            request: argument of the operation `session_run`. It has `command`, `timeout` in seconds from the command's
                begin (and again for its wait in the queue), and `limit`, the bytes to keep of each output stream.
        """
        self.shell = shell
        self.reply = reply
        self.request = request
        self.text = request["command"]
        """Shell code of the command."""
        self.rings = {"stdout": Ring(request["limit"]), "stderr": Ring(request["limit"])}
        """Kept output by stream."""
        self.token = binascii.hexlify(os.urandom(12))
        """Random text by which the shell's answer to this command is recognised."""
        self.timed_out = False
        """True once its time is over."""
        self.unreported = False
        """True if the shell's answer did not report how the command ended."""
        self.stopping = None
        """Time at which the command was first asked to stop; None until then."""
        self.timer = None
        """Timer for the next step of the command's end: `give_up`, `expire` or `check`."""
        self.started = now()
        """Time at which it was queued, and later at which it began."""
        self.cpu_before = 0
        """CPU ticks of the shell and its reaped children when the command began."""
        self.oom_before = 0
        """Number of processes that the kernel had killed for lack of memory when the command began."""

    def cancel(self) -> None:
        """Stop the command, or take it out of the queue, because its caller does not wait for the result any more."""
        if self is self.shell.current:
            self.stop()
        elif self in self.shell.queue:
            self.shell.agent.loop.cancel(self.timer)
            self.shell.queue.remove(self)

    def give_up(self) -> None:
        """Fail the command in the queue after its timeout: the commands before it took all of its time."""
        self.shell.queue.remove(self)
        self.reply(FAILURE, ["busy", "the session was busy with other commands for all of the command's time"])

    def expire(self) -> None:
        """Stop the command because its time is over."""
        self.timed_out = True
        self.stop()

    def stop(self) -> None:
        """End the shell and the processes that the command has started. The jobs of earlier commands go on.

        Called at the timeout, when the call is cancelled, and if the shell does not report the command's end.
        """
        if self.stopping is not None:
            return
        self.stopping = now()
        # Otherwise the shell would begin the next command of its list once the current one is dead.
        send_signal([self.shell.bash.pid], _signal.SIGSTOP)
        send_signal(self.started_by(), _signal.SIGTERM)
        self.shell.agent.loop.cancel(self.timer)
        self.check()

    def check(self) -> None:
        """Wait for the processes to end, for at most the grace, and then kill them and the shell.

        Each call looks once; a timer calls it again. The end of the shell (`Shell.reaped`) finishes the command.
        """
        if now() < self.stopping + GRACE and self.started_by():
            self.timer = self.shell.agent.loop.later(CHECK, self.check)
            return
        kill_all(self.started_by)
        # The shell may have been killed by another process, and reaped, during the grace.
        if self.shell.bash.pid > 0:
            send_signal([self.shell.bash.pid], _signal.SIGKILL)

    def started_by(self) -> "list[int]":
        """Return the ids of the living processes that the command has started.

        These are all of the session, except its shells, the jobs of earlier commands, and what those jobs have started.
        """
        bash, jobs = self.shell.bash, self.shell.living_jobs()
        others = {*bash.leaders, *jobs, *(stat.pid for stat in descendants(jobs))}
        return [pid for pid in tree(bash.pid, bash.number) if pid not in others]


class Shell:
    """A session: a `StatefulBash` with a queue of commands."""

    def __init__(self, agent: object, name: str) -> None:
        """Open the session and start its bash. Raises CallRefusal if the image has no bash, or it cannot be started."""
        if agent.bash is None:
            raise CallRefusal("request", "sessions need bash, which this image does not have")
        self.agent = agent
        self.name = name
        self.number = agent.numbers.new()
        """Number that all processes of the session carry; see `envs.sandbox.agent.process`."""
        self.queue = []
        """`Running` commands that wait for their turn."""
        self.current = None
        """`Running` command that the shell executes; None if it is idle."""
        self.idle = {"stdout": Ring(1 << 16), "stderr": Ring(1 << 16)}
        """Output of background processes while no command ran. The next command gets it, like in a terminal."""
        self.jobs = set()
        """Jobs (`&`) of the finished commands, as pairs of process id and start time: an id alone may be given to
        another process. They may have ended."""
        self.restarts = 0
        """Number of times that bash was replaced by a new one."""
        self.closed = False
        """True once the session is being closed."""
        self.pipes = {}
        """`Pipe` of each output stream."""
        self.writing_ends = []
        """Descriptors of the writing ends of these pipes. They stay open here: each new bash gets copies of them."""
        try:
            for stream in ("stdout", "stderr"):
                reading, writing = os.pipe()
                self.writing_ends.append(writing)
                self.pipes[stream] = Pipe(agent.loop, reading, lambda data, name=stream: self.take_output(name, data))
            self.bash = StatefulBash(agent, self, self.writing_ends)
            self.bash.start()
        except BaseException:
            # The host may open the session again and again while the sandbox has no room for another process.
            self.release()
            raise
        agent.shells[self.name] = self

    def run(self, running: Running) -> None:
        """Queue the command `running`. It waits for the earlier ones, for at most its timeout.

        Raises CallRefusal if it has a zero byte, at which bash would cut it off.
        """
        if "\0" in running.text:
            raise CallRefusal("request", "a command cannot contain a zero byte")
        self.queue.append(running)
        running.timer = self.agent.loop.later(running.request["timeout"], running.give_up)
        self.proceed()

    def proceed(self) -> None:
        """Give the shell its next command, if it is idle. A command that cannot begin fails, and the next one is tried.

        A shell that was ended by the last command is started again only now, so that a session without further commands
        takes no process.
        """
        while self.current is None and self.queue and not self.closed:
            running = self.queue.pop(0)
            try:
                if self.bash.pid < 0:
                    self.bash.start()
                self.begin(running)
            except CallRefusal as refusal:
                self.agent.loop.cancel(running.timer)
                running.reply(FAILURE, [refusal.code, str(refusal)])

    def begin(self, running: Running) -> None:
        """Give the command `running` to the shell, and kill what earlier commands have left behind.

        Output that background processes wrote since the last command becomes the first output of this one. Raises
        CallRefusal if the leftovers cannot be ended.
        """
        end_leftovers(self.agent, self)
        self.current = running
        self.agent.loop.cancel(running.timer)
        running.started = now()
        running.oom_before = self.agent.oom.read()
        for name, ring in running.rings.items():
            ring.add(self.idle[name].content())
        self.idle = {"stdout": Ring(1 << 16), "stderr": Ring(1 << 16)}
        running.cpu_before = self.bash.ticks()
        running.timer = self.agent.loop.later(running.request["timeout"], running.expire)
        self.bash.token = running.token
        self.bash.send_command(
            running.text.encode("utf-8", "surrogateescape"), REPORT.encode().replace(b"TOKEN", running.token)
        )

    def take_output(self, name: str, data: bytes) -> None:
        """Add output of the stream `name` to the running command, or keep it for the next one."""
        (self.idle if self.current is None else self.current.rings)[name].add(data)

    def finish(self, body: dict) -> None:
        """Reply with the result of the running command, and begin the next one.

        `body` has the exit code and the signal. Called for the shell's answer, and when the shell has ended.
        """
        running = self.current
        self.agent.loop.cancel(running.timer)
        # The output before the end is in the pipes; later output belongs to background processes.
        for pipe in self.pipes.values():
            pipe.drain()
        self.current = self.bash.token = None
        body.update(
            {
                "timed_out": running.timed_out,
                "oom_killed": self.agent.oom.read() > running.oom_before,
                "wall_s": now() - running.started,
                # 0 if the command has ended the shell, whose ticks are gone then.
                "cpu_s": max(0, self.bash.ticks() - running.cpu_before) / CLOCK_TICK,
                # The kernel counts it only for a whole shell, not for one command.
                "max_rss": 0,
                "restarts": self.restarts,
            }
        )
        # Recorded while the shell lives: after its end, its jobs cannot be told from other orphans.
        self.jobs = {
            (stat.pid, stat.start)
            for stat in processes()
            if stat.parent == self.bash.pid or (stat.pid, stat.start) in self.jobs
        }
        send_result(running.reply, body, running.rings, False)
        self.proceed()

    def living_jobs(self) -> "set[int]":
        """Return the process ids of the jobs of finished commands that have not ended."""
        return {stat.pid for stat in processes() if (stat.pid, stat.start) in self.jobs} if self.jobs else set()

    def stop_unreported(self) -> None:
        """Stop the running command: the shell's answer does not report how it ended.

        The end of the shell then fails the command (`reaped`).
        """
        self.current.unreported = True
        self.current.stop()

    def fail_unreported(self, message: str) -> None:
        """Reply to the running command with a failure, because it is unknown how it ended, and begin the next one."""
        running, self.current = self.current, None
        self.agent.loop.cancel(running.timer)
        running.reply(FAILURE, ["request", message])
        self.proceed()

    def interrupt(self) -> bool:
        """Send SIGINT to the running command's processes and to the shell. Returns False if no command runs."""
        if self.current is None:
            return False
        # A shell that finds its child dead before its own signal arrives would begin the next command of its list. So
        # it is stopped, and goes on with its own signal: `send_signal` sends a SIGCONT after it.
        send_signal([self.bash.pid], _signal.SIGSTOP)
        send_signal([*self.current.started_by(), self.bash.pid], _signal.SIGINT)
        return True

    def reaped(self, status: int, usage: object) -> None:
        """Clean up after the shell's end: by `exit`, by a signal, or because we killed it.

        The running command's result has the shell's own exit code or signal, from the wait status `status`. The next
        command starts a new shell. `usage` is not used: it is the sum of all commands of this shell. `BoxAgent.reap`
        calls this.
        """
        self.bash.clean_up()
        self.restarts += 1
        if self.closed:
            self.release()
        elif self.current is not None and self.current.unreported:
            self.fail_unreported(
                "the shell does not say how the command ended, and was replaced: a trap or option changes that"
            )
        elif self.current is not None:
            self.finish(ending(status))

    def close(self) -> None:
        """End the shell and every process that it started. Calls in progress and in the queue fail.

        The pipes are closed when the shell is reaped, or at once if no shell runs.
        """
        if self.closed:
            return
        self.closed = True
        self.agent.shells.pop(self.name, None)
        for running in self.queue:
            self.agent.loop.cancel(running.timer)
            running.reply(FAILURE, ["gone", "the session was closed"])
        self.queue = []
        if self.current is not None:
            self.agent.loop.cancel(self.current.timer)
            self.current.reply(FAILURE, ["gone", "the session was closed"])
            self.current = self.bash.token = None
        for leader in self.bash.leaders:
            kill_all(lambda leader=leader: tree(leader, self.number))
        if self.bash.pid < 0:
            self.release()

    def release(self) -> None:
        """Close the pipes of a session that is closed, or that could not be started."""
        for pipe in self.pipes.values():
            pipe.close()
        for fd in self.writing_ends:
            os.close(fd)
        self.writing_ends = []
