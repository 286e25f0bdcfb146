"""A command, from its start to its result: `run`, `stream`, a job, a terminal, or a worker of the agent.

Part of the program inside a sandbox: Python 3.6, standard library only. `envs.sandbox.engines.bundle` joins all modules
into one text, so top-level names must be unique. A worker is a child process in which the agent runs a function of its
own. The *host* is the process of Flash that controls the agent.

Before a command begins, `end_leftovers` kills the processes that ended commands have left behind.
"""

import _signal
import errno
import os
import time

from envs.sandbox.agent.process import (
    CLOCK_TICK,
    InputFeed,
    Pipe,
    Ring,
    adopted,
    cpu_use,
    fail,
    find_program,
    fork_call,
    now,
    number_of,
    processes,
    send_signal,
    send_to_group,
    signal_name,
    spawn,
    tree,
)
from envs.sandbox.agent.wire import CHUNK, CREDIT, PIECE, PIECE_COST, RESULT, CallRefusal

ROUNDS = 300
"""Most rounds of killing leftovers before the new command is refused: 0.3 s, in which the agent does nothing else."""

GRACE = 0.5
"""Seconds between SIGTERM and SIGKILL."""
MEASURE = 0.2
"""Seconds between two measurements of the CPU time of a command with `patience`."""
CHECK = 0.05
"""Seconds between two checks, during the grace, for processes that are left."""
NO_SPACE = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC)
"""Errors that mean that no process can be started for lack of a resource; ENOSPC: there is no pseudo-terminal left."""


class System:
    """The functions on this machine's processes that `end_leftovers` calls. Tests give it a simulated class instead."""

    adopted, processes, number_of = staticmethod(adopted), staticmethod(processes), staticmethod(number_of)
    send_signal = staticmethod(send_signal)
    pause = 0.001
    """Seconds between two rounds, for processes to die."""


def end_leftovers(agent: object, shell: object = None, system: object = System) -> None:
    """Kill the processes that ended commands left behind; they could tamper with the next command.

    A process was left behind if it has lost its parent, and belongs neither to a running command or job nor to a
    running command of a session other than `shell`. Its descendants are killed with it. Jobs (`&`) of a session are
    spared, also if their shell has ended. Raises CallRefusal if the processes cannot be ended.

    Args:
        agent: the `BoxAgent`, which knows the running commands.
        shell: session whose next command is about to begin; None for a command outside of sessions.
        system: functions on processes.
    """
    ended = set()
    for _ in range(ROUNDS):
        left = leftovers(agent, shell, system) - ended
        if not left:
            return
        living = {stat.pid for stat in system.processes()}
        # Zombies. If one has ended only after `leftovers` looked, its children have become ours since then, so the next
        # round looks once more. An id stays valid, because nothing reaps a zombie before this function returns.
        ended.update((left - living).intersection(system.adopted()))
        system.send_signal(left & living, _signal.SIGKILL)
        time.sleep(system.pause)
    raise CallRefusal("limit", "what an earlier command left behind multiplies faster than it can be ended")


def leftovers(agent: object, shell: object, system: object) -> "set[int]":
    """Return the ids of left-behind processes, including adopted ones that have ended and were not reaped.

    The arguments are those of `end_leftovers`.
    """
    # An orphan with the number of a running command belongs to that command.
    running = {command.number for command in agent.active}
    running.update(other.number for other in agent.shells.values() if other is not shell and other.current)
    # `agent.children` are processes that the agent itself has started: they are no orphans.
    spared = {pid for other in agent.shells.values() for pid in other.living_jobs()}.union(agent.children)
    found = {pid for pid in system.adopted() if pid not in spared and system.number_of(pid) not in running}
    return found.union(stat.pid for stat in descendants(found, system))


def descendants(roots: "set[int]", system: object = System) -> list:
    """Return the `Stat` of each living descendant of these processes, without the roots themselves.

    `system` has the functions on processes, as in `end_leftovers`.
    """
    if not roots:
        return []  # Most commands leave nothing behind.
    inside, every, grown = set(roots), system.processes(), True
    while grown:
        grown = False
        for stat in every:
            if stat.parent in inside and stat.pid not in inside:
                inside.add(stat.pid)
                grown = True
    return [stat for stat in every if stat.pid in inside and stat.pid not in roots]


class Command:
    """A command, its processes and its output. It runs from its first process's start to that process's end.

    The operations `run`, `start` and `work` make it. `BoxAgent.reap` calls `reaped` when its first process has ended.
    """

    def __init__(self, agent: object, reply: object, request: dict) -> None:
        """Start the command. Raises CallRefusal if that fails.

        Args:
            agent: the `BoxAgent`.
            reply: function `(kind, body)` that sends the host a frame of the command's call.
            request: argument of the operation. It has `command`, `argv` or `function` (a worker's), and `limit`, the
                bytes to keep of each output stream. The fields below explain its options, such as `timeout`.
        """
        self.agent = agent
        self.reply = reply
        self.number = agent.numbers.new()
        """Number that all processes of the command carry; see `envs.sandbox.agent.process`."""
        self.is_job = request.get("job", False)
        """True for a job, which outlives the call that started it."""
        self.streaming = request.get("stream", False)
        """True if output is sent while it is written. Otherwise it is kept, and sent with the result."""
        self.rings = {"stdout": Ring(request["limit"]), "stderr": Ring(request["limit"])}
        """`Ring` of each stream: the first and the last bytes of the output, at most `limit` of each stream."""
        self.credit = request.get("credit", 0)
        """Bytes of streamed output that the host still accepts."""
        self.pipes = {}
        """`Pipe` of each output stream; a terminal has only `stdout`."""
        self.feed = None
        """`InputFeed` of a command whose input the host sends; None if it has none, or all input is there already."""
        self.timed_out = False
        """True once its time is over."""
        self.ended_body = None
        """Result without the output; None until the command has ended."""
        self.waiters = set()
        """`JobWaiter`s of a job: the calls that wait for its result."""
        self.pid = -1
        """Process id of the first process."""
        self.timer = None
        """Timer for the next step of the command's end: `expire`, `kill` or `reaped`."""
        self.stopping = None
        """Time at which the command was first asked to stop; None until then."""
        # What earlier commands left behind could tamper with a program. A worker runs only code of the agent.
        if "function" not in request:
            end_leftovers(agent)
        # Only now, so that the command does not pay for the end of others.
        self.started = self.measured = now()
        """Times of the start and of the last measurement."""
        self.timeout = request.get("timeout")
        """Seconds after which the command is stopped; None: never."""
        self.patience = request.get("patience")
        """Most seconds on the clock, for a command whose waits for a CPU do not count against `timeout`. None: they
        count, and nothing is measured."""
        self.counted_s = 0.0
        """Seconds up to the last measurement that count against `timeout`: it ran or slept, and did not wait for a
        CPU."""
        self.ticks = 0
        """CPU ticks of its processes at the last measurement."""
        self.oom_before = agent.oom.read()
        """Number of processes that the kernel had killed for lack of memory when the command began."""
        self.start(request)
        # `BoxAgent.reap` finds the command by its first process. The command stays active until its result is complete,
        # which may be later than the end of that process.
        agent.children[self.pid] = self
        agent.active.add(self)
        if self.timeout is not None:
            first = self.timeout if self.patience is None else min(self.timeout, MEASURE)
            self.timer = agent.loop.later(first, self.expire)

    def start(self, request: dict) -> None:
        """Open the pipes or the terminal of the command, and start its process.

        Raises:
            CallRefusal: the process cannot be started. No descriptor stays open.
        """
        files, ours, theirs = {}, [], []
        try:
            if request.get("tty"):
                files = open_terminal(ours, theirs)
            else:
                files = open_pipes(self.agent.null, request, ours, theirs)
            self.pid = self.launch(request, files)
        except BaseException as error:
            # Also an error that is no OSError, such as MemoryError, must leave no descriptor open.
            for fd in ours:
                os.close(fd)
            if not isinstance(error, OSError):
                raise
            if error.errno in NO_SPACE:
                raise CallRefusal("limit", "no process can be started: {}".format(os.strerror(error.errno)))
            # `launch` turns the errors of a program into results, so the folder is at fault.
            cwd = self.agent.resolve(request.get("cwd") or "")
            raise CallRefusal("file", "{}: {}".format(cwd, os.strerror(error.errno)))
        finally:
            for fd in theirs:
                os.close(fd)
        self.connect(request, ours)

    def launch(self, request: dict, files: "dict[int, int]") -> int:
        """Start the process and return its id.

        A program that is missing or cannot be run fails like in a shell: a process writes the error message to standard
        error, and exits with 127 or 126. So the caller gets a result, and not a refusal. Raises OSError if no process
        can be started, or if there is no folder `cwd`.
        """
        call = self.agent.launcher.call
        if "function" in request:
            return call(lambda: fork_call(request["function"], files))
        env = dict(self.agent.env)
        env.update(request.get("env") or {})
        cwd = self.agent.resolve(request.get("cwd") or "")
        argv = request.get("argv") or [self.agent.shell, "-c", request["command"]]
        tty = bool(request.get("tty"))
        path = find_program(argv[0], env, cwd)
        if path is None:
            # A missing folder is a refusal, as it is for a program that is found. The agent itself uses no relative
            # path, so its own folder may change.
            os.chdir(cwd)
            return call(lambda: fork_call(lambda: fail(127, "{}: not found".format(argv[0])), files))
        try:
            return call(lambda: spawn(path, argv, env, cwd, files, tty, self.number))
        except OSError as error:
            if error.errno in NO_SPACE or not os.path.isdir(cwd):
                raise
            text = "{}: {}".format(argv[0], os.strerror(error.errno))
            return call(lambda: fork_call(lambda: fail(126, text), files))

    def connect(self, request: dict, ours: "list[int]") -> None:
        """Watch the agent's ends of the pipes, and send the input that came with the request.

        `ours` has the ends in the order of `open_pipes` or `open_terminal`.
        """
        loop = self.agent.loop
        # A terminal's ends are output and input; pipes are input, if there is any, output and errors.
        if len(ours) > 2 or request.get("tty"):
            self.feed = InputFeed(loop, ours.pop(1 if request.get("tty") else 0), lambda n: self.reply(CREDIT, n))
            if request.get("stdin"):
                self.feed.add(request["stdin"], not request.get("feed"))
        for name, fd in zip(("stdout", "stderr"), ours):  # noqa: B905  # a terminal has one output, and Python 3.6 no `strict`
            self.pipes[name] = Pipe(loop, fd, lambda data, name=name: self.take_output(name, data))

    def take_output(self, name: str, data: bytes) -> None:
        """Process output of the stream `name`: keep it, or stream it and pause the pipes when the credit is used up."""
        if not self.streaming:
            self.rings[name].add(data)
            return
        self.reply(CHUNK, [name, data])
        self.credit -= len(data) + PIECE_COST
        if self.credit <= 0:
            for pipe in self.pipes.values():
                pipe.pause(True)

    def add_credit(self, count: int) -> None:
        """Add credit from the host for more output."""
        before, self.credit = self.credit, self.credit + count
        if before <= 0 < self.credit:
            for pipe in self.pipes.values():
                pipe.pause(False)

    def expire(self) -> None:
        """Stop the command if its time is over. With `patience`, measure first, and check again later if time is left.

        The timer calls this after `timeout` seconds, and with `patience` every `MEASURE` seconds.
        """
        if self.patience is not None:
            self.measure_time()
            left = min(self.timeout - self.counted_s, self.patience - (self.measured - self.started))
            if left > 0:
                # At least 10 ms: while the command waits for a CPU, `left` hardly shrinks.
                self.timer = self.agent.loop.later(min(max(left, 0.01), MEASURE), self.expire)
                return
        self.timed_out = True
        self.stop()

    def measure_time(self) -> None:
        """Measure the processes, and add to `counted_s` the part of the time since the last measurement that counts.

        If a thread is ready to run now, it is assumed to have waited for a CPU whenever it did not run, so only the CPU
        time counts. Else all of the time counts.
        """
        ticks, ready = cpu_use(tree(self.pid, self.number))
        at = now()
        passed, cpu = at - self.measured, max(0, ticks - self.ticks) / CLOCK_TICK
        self.counted_s += min(cpu, passed) if ready else passed
        self.measured, self.ticks = at, ticks

    def cancel(self) -> None:
        """Stop the command, because its caller does not wait for the result any more."""
        self.stop()

    def stop(self) -> None:
        """End the command: SIGTERM to all its processes, and SIGKILL to the processes left after the grace.

        Does nothing if the command is being stopped or has ended.
        """
        if self.stopping is not None or self.ended_body is not None:
            return
        self.stopping = now()
        send_signal(tree(self.pid, self.number), _signal.SIGTERM)
        self.agent.loop.cancel(self.timer)
        self.timer = self.agent.loop.later(GRACE, self.kill)

    def kill(self) -> None:
        """Kill all processes of the command.

        Called at the end of the grace, after the end of a stopped command's first process, and for SIGKILL to a job.
        """
        send_to_group(self.pid, _signal.SIGKILL)
        if self.agent.is_init and self.agent.active <= {self} and not self.agent.shells:
            # With one command and no session, every process of our user belongs to it, and one call reaches all at
            # once. The process that connects a host to us after a takeover is root's, which we cannot signal.
            send_signal([-1], _signal.SIGKILL)
            return
        kill_all(lambda: tree(self.pid, self.number))

    def signal(self, number: int) -> None:
        """Send the signal `number` to the process group of a job. SIGKILL reaches all processes of the command.

        Does nothing once the job has ended: its process id may be another's.
        """
        if self.ended_body is None:
            if number == _signal.SIGKILL:
                self.kill()
            else:
                send_to_group(self.pid, number)

    def reaped(self, status: int, usage: object) -> None:
        """Finish after the end of the first process. The rest of its group is killed, at once or after the grace.

        During the grace this function calls itself again until no process of the command is left. A job keeps its
        result for later calls; another command sends it.

        Args:
            status: wait status of the first process, from which `ending` takes the exit code.
            usage: CPU time and memory of the first process and the children that it waited for, from `os.wait4`.
        """
        self.agent.loop.cancel(self.timer)
        if self.stopping is None:
            # Processes that have left the group are killed before the next command (`end_leftovers`).
            send_to_group(self.pid, _signal.SIGKILL)
        elif now() < self.stopping + GRACE and tree(self.pid, self.number):
            self.timer = self.agent.loop.later(CHECK, lambda: self.reaped(status, usage))
            return
        else:
            self.kill()
        self.agent.active.discard(self)
        for pipe in self.pipes.values():
            pipe.drain()
            pipe.close()
        if self.feed is not None:
            self.feed.close()
        self.ended_body = ending(status)
        self.ended_body.update(
            {
                "timed_out": self.timed_out,
                "oom_killed": self.agent.oom.read() > self.oom_before,
                "wall_s": now() - self.started,
                # Time that did not count against `timeout`; 0 without `patience`.
                "waited_s": max(0.0, self.measured - self.started - self.counted_s),
                "cpu_s": usage.ru_utime + usage.ru_stime,
                "max_rss": usage.ru_maxrss * 1024,  # The kernel counts KiB.
            }
        )
        if self.is_job:
            waiters, self.waiters = self.waiters, set()
            for waiter in waiters:
                self.send_result(waiter.reply)
        else:
            self.send_result(self.reply)

    def send_result(self, reply: object) -> None:
        """Send the result with `reply`, the function of the command's own call, or of a call that waited for a job."""
        assert self.ended_body is not None
        send_result(reply, self.ended_body, self.rings, self.streaming)


class JobWaiter:
    """A call of the operation `job_wait` that waits for the result of a job. A job may have several."""

    def __init__(self, job: Command, reply: object) -> None:
        """Begin to wait. `reply` is the function `(kind, body)` that sends the host a frame of the waiting call."""
        self.job = job
        self.reply = reply
        job.waiters.add(self)

    def cancel(self) -> None:
        """Stop waiting, because the caller does not. Otherwise the job would keep each such call until it ends."""
        self.job.waiters.discard(self)


def open_pipes(null: int, request: dict, ours: "list[int]", theirs: "list[int]") -> "dict[int, int]":
    """Open the pipes of a process, and return our descriptor for each of its descriptors 0 to 2.

    Our ends of the pipes are added to `ours`: input if `request` has any, output, errors. The other ends are added to
    `theirs`; the caller closes those after the start. Without input, the process reads from `null`. Raises OSError; the
    two lists then have the descriptors that the caller must close.
    """
    files = {0: null}
    if request.get("stdin") or request.get("feed"):
        reading, writing = os.pipe()
        theirs.append(reading)
        ours.append(writing)
        files[0] = reading
    for number in (1, 2):
        reading, writing = os.pipe()
        ours.append(reading)
        theirs.append(writing)
        files[number] = writing
    return files


def open_terminal(ours: "list[int]", theirs: "list[int]") -> "dict[int, int]":
    """Open a pseudo-terminal, and return our descriptor for each of the process's descriptors 0 to 2: the terminal.

    Two descriptors of our end are added to `ours`: for output, and for input. The other end is added to `theirs`.
    Raises OSError; the two lists then have the descriptors that the caller must close.
    """
    master, slave = os.openpty()
    ours.append(master)
    theirs.append(slave)
    ours.append(os.dup(master))
    return {0: slave, 1: slave, 2: slave}


def send_result(reply: object, body: dict, rings: dict, streaming: bool) -> None:
    """Send the result of a command or of a session's command. Long output is sent in pieces before it; short output is
    part of it, which saves a frame.

    Args:
        reply: function that sends a frame of the call.
        body: fields of the result without the output.
        rings: kept output by stream.
        streaming: True if the output was sent while it was written.
    """
    body = dict(body)
    for name, ring in rings.items():
        content = ring.content()
        body[name + "_truncated"] = not streaming and ring.truncated()
        # The two rests, each at most half a piece, fit in one frame.
        while len(content) > PIECE // 2:
            reply(CHUNK, [name, content[:PIECE]])
            content = content[PIECE:]
        body[name] = content
    reply(RESULT, body)


def ending(status: int) -> dict:
    """Return the exit code and the signal of a wait status, as fields of a result."""
    if os.WIFSIGNALED(status):
        return {"exit_code": None, "signal": signal_name(os.WTERMSIG(status))}
    return {"exit_code": os.WEXITSTATUS(status), "signal": None}


def kill_all(find: object) -> None:
    """Send SIGKILL to the processes that `find` returns, until it returns none: they may fork meanwhile.

    After 50 rounds it gives up, because the agent does nothing else meanwhile. `end_leftovers` tries again later.
    """
    for _ in range(50):
        left = find()
        if not left:
            return
        send_signal(left, _signal.SIGKILL)
