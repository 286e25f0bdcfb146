"""The processes of a sandbox: the command to which each belongs, and starting, watching and killing them.

Part of the program inside a sandbox: Python 3.6, standard library only. `envs.sandbox.engines.bundle` joins all modules
into one text, so top-level names must be unique. `Command` and `Shell` (the modules after this one) use it.

Each command has a number. Its processes carry it in two of their hard limits. One limit rises with the number, the
other falls. A process may lower its hard limits and never raise them. So it cannot take the number of another command,
nor lose its own, whatever it executes, forks or calls itself. Neither limit has an effect here: Linux no longer uses
the one, and the other is about real-time priorities.

`Launcher` starts all programs such that the kernel kills them before the agent if memory runs out. A program inherits
the highest OOM score, which the agent takes on while it starts the program: a score set afterwards would miss processes
that it has started meanwhile. To keep a program from lowering its score again, a thread without write access to /proc
starts all programs, which inherit this restriction. Only Landlock gives threads different rights. The kernel offers it
from version 5.19, if enabled. Without it a program can still get the agent killed, and the sandbox with it.
"""

import _signal
import errno
import fcntl
import os
import resource
import select
import struct
import termios
import time

from envs.sandbox.agent.loop import READ_BYTES

RULESET, RULE, RESTRICT = 444, 445, 446
"""Numbers of Landlock's system calls: create a ruleset, add a rule, restrict this thread. The same on every
architecture."""
WRITE_FILE, REFER = 1 << 1, 1 << 13
"""Rights: open a file for writing; move files between folders, which is refused unless the ruleset names it."""
ASK_VERSION = 1
"""Flag with which the first of these system calls only returns Landlock's version."""
NEEDED_VERSION = 2
"""Lowest version of Landlock that can be used: version 1 has no `REFER`."""
WORST = b"1000"
"""OOM score adjustment above every score from memory use."""

MEMFD_CLOEXEC, MEMFD_EXEC = 1, 16
"""Flags of `memfd_create`: close the file at exec; allow it to be run."""
LAST_FD = 1 << 16
"""Number above all descriptors that the agent may have, if no smaller limit applies."""
BEGIN_MS = 250
"""Milliseconds for a program to begin. The agent does nothing else meanwhile."""
DEFAULT_SIGNALS = (_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP)
"""Signals that Python or the agent ignores; programs expect the default."""

UP, DOWN = 15, 10
"""RLIMIT_RTTIME and RLIMIT_LOCKS, the limits that carry a command's number. The first one is `MIDDLE` plus the number,
the second one `MIDDLE` minus it. Python has no name for the second one."""
CLOCK_TICK = os.sysconf("SC_CLK_TCK")
"""Clock ticks per second of CPU time."""
ENDED = (b"Z", b"X")
"""States of threads that have ended."""
MIDDLE = 1 << 42
"""Value of both limits for the number 0, far above every number of a command."""


class Launcher:
    """Caller of the functions that start a process, one at a time; the agent has one launcher.

    With Landlock the functions run in a thread of the launcher, which may not write to /proc; without, in the caller's
    thread.
    """

    def __init__(self, restrict: bool) -> None:
        """Open our OOM score. If `restrict` is True, start the thread; it ends at once if the kernel has no Landlock.

        `restrict` is False in tests, and if the root folder is writable: Landlock would refuse new files there.
        """
        self.score_file = -1
        """Descriptor of our OOM score adjustment in /proc; -1 if there is none."""
        self.own_score = b""
        """OOM score adjustment of the agent itself, as text; empty if it is not known."""
        try:
            self.score_file = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
            self.own_score = os.read(self.score_file, 16)
        except OSError:
            pass  # The kernel does not report it.
        self.restricted = False
        """True if the thread runs and may not write to /proc."""
        self.function = self.result = None
        """Function that the thread is to call, and the pair (result, error) of that call; one of the pair is None."""
        if restrict:
            # Not `threading`, whose import takes long.
            import _thread

            # Two locks pass the turn: the caller releases `asked`, the thread releases `answered`.
            self.asked, self.answered = _thread.allocate_lock(), _thread.allocate_lock()
            for lock in (self.asked, self.answered):
                lock.acquire()
            _thread.start_new_thread(self.serve, ())
            self.answered.acquire()

    def serve(self) -> None:
        """Run the thread: forbid it to write to /proc, then serve calls for ever. Ends if it cannot be restricted."""
        self.restricted = forbid_writing_to_proc()
        self.answered.release()
        while self.restricted:
            self.asked.acquire()
            try:
                self.result = (self.function(), None)
            except BaseException as error:
                # Every error belongs to the caller.
                self.result = (None, error)
            self.answered.release()

    def call(self, function: object) -> object:
        """Call the function with the highest OOM score; return its result or raise its error.

        `function` starts a process, which inherits the score. With Landlock it runs in the restricted thread, while the
        caller waits.
        """
        # All threads of a process have one score, so setting it here counts for the other thread, too.
        self.set_own_score(WORST)
        try:
            if not self.restricted:
                return function()
            self.function = function
            self.asked.release()
            self.answered.acquire()
        finally:
            self.set_own_score(self.own_score)
        value, error = self.result
        self.function = self.result = None
        if error is not None:
            raise error
        return value

    def set_own_score(self, score: bytes) -> None:
        """Set the agent's OOM score adjustment, which processes that it starts inherit.

        Does nothing if the agent's own score is not known, because it could not be restored.
        """
        if self.own_score:
            os.pwrite(self.score_file, score, 0)


def forbid_writing_to_proc() -> bool:
    """Forbid this thread, and the processes that it starts, to write to files in /proc. Returns False on failure.

    Without write access to /proc no program can lower its OOM score. Landlock has only rules that allow, so there is
    one for each folder of the root except /proc. The kernel accepts the rules because engines start sandboxes with
    no_new_privs.
    """
    try:
        import _ctypes

        address = _ctypes.dlsym(_ctypes.dlopen(None, 2), "syscall")  # 2: RTLD_NOW
        if _ctypes.call_function(address, (RULESET, None, 0, ASK_VERSION)) < NEEDED_VERSION:
            return False
        rights = WRITE_FILE | REFER
        ruleset = _ctypes.call_function(address, (RULESET, struct.pack("=Q", rights), 8, 0))
        if ruleset < 0:
            return False
        # The kernel opens POSIX queues through a mount of its own, so the rule for /dev does not cover them.
        for path in ["/dev/mqueue", *("/" + name for name in os.listdir("/") if name != "proc")]:
            if not os.path.isdir(path):
                continue
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            # 1: the rule allows these rights below a folder.
            done = _ctypes.call_function(address, (RULE, ruleset, 1, struct.pack("=Qi", rights, folder), 0))
            os.close(folder)
            if done != 0:
                return False
        done = _ctypes.call_function(address, (RESTRICT, ruleset, 0))
        os.close(ruleset)
        return done == 0
    except Exception:
        # Small images have no ctypes, and the library could be anything.
        return False


def spawn(
    path: str, argv: "list[str]", env: "dict[str, str]", cwd: str, files: "dict[int, int]", tty: bool, number: int
) -> int:
    """Start a program in its own session and return its process id.

    Forks, so that the child carries the command's number before it runs anything. While another process holds a file
    lease (`F_SETLEASE`) on the program, exec blocks for up to a minute. So the agent waits for `BEGIN_MS` only, and
    then takes the program for started. The child writes a later failure to its standard error, and exits with 126.

    Raises OSError if no process can be started, or if the child fails within that time: `cwd` is no folder, or the
    program cannot be run.

    Args:
        path: file of the program.
        argv: name of the program and its arguments.
        env: environment variables of the program.
        cwd: folder where it starts.
        files: our descriptor for each of the program's descriptors.
        tty: True if its standard input is a terminal, which becomes its controlling terminal.
        number: number of the command that the process belongs to.
    """
    error_read, error_write = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        # At the limit of processes this happens again and again, so the pipe must not stay open.
        os.close(error_read)
        os.close(error_write)
        raise
    if pid:
        os.close(error_write)
        answers = select.poll()
        answers.register(error_read, select.POLLIN)
        # A successful exec closes the child's end of the pipe, and `read` returns no bytes. Else it returns the errno.
        failed = os.read(error_read, 16) if answers.poll(BEGIN_MS) else b""
        os.close(error_read)
        if failed:
            os.waitpid(pid, 0)
            raise OSError(int(failed), os.strerror(int(failed)))
        return pid
    try:
        os.setsid()
        os.chdir(cwd)
        for signal in DEFAULT_SIGNALS:
            _signal.signal(signal, _signal.SIG_DFL)
        set_number(number)
        for theirs, ours in files.items():
            os.dup2(ours, theirs)
        if tty:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.execve(path, argv, env)
    except (OSError, ValueError) as error:
        # A limit that cannot be set, and a zero byte in a text, raise ValueError, which has no errno.
        code = getattr(error, "errno", errno.EPERM)
        # The agent may have closed its end of the pipe already.
        _signal.signal(_signal.SIGPIPE, _signal.SIG_IGN)
        try:
            os.write(error_write, str(code).encode())
        except OSError:
            fail(126, "{}: {}".format(argv[0], os.strerror(code)))
    finally:
        # The child must never return into the agent's code.
        os._exit(127)


def fail(code: int, text: str) -> None:
    """End a child process like a shell that cannot run a program: with this exit code and this error message.

    Called in the child of `spawn` or `fork_call`. Its standard error is already the command's.
    """
    os.write(2, text.encode("utf-8", "surrogateescape") + b"\n")
    os._exit(code)


def fork_call(function: object, files: "dict[int, int]") -> int:
    """Run `function` in a child process in a session of its own, and return its process id.

    Used for a worker of the agent, such as one that unpacks a tree, and for a program that cannot be run: the child
    then writes the error and exits as a shell would (`fail`). The child carries no command's number; `tree` finds it by
    its session. An error of the function is written to the child's standard error, with exit code 1. Raises OSError if
    no process can be started.

    `files` maps the child's descriptors, which are 0 to 2, to ours. Higher ones are closed, so that a path through
    /proc/self/fd reaches none of ours.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _signal.set_wakeup_fd(-1)  # a signal in the child must not write to the loop's pipe
        os.setsid()
        for theirs, ours in files.items():
            os.dup2(ours, theirs)
        os.closerange(3, min(os.sysconf("SC_OPEN_MAX"), LAST_FD))
        function()
        code = 0
    except BaseException as error:
        os.write(2, "{}: {}".format(type(error).__name__, error).encode("utf-8", "replace")[:4096])
    finally:
        os._exit(code)


def find_program(name: str, env: "dict[str, str]", cwd: str) -> "str | None":
    """Return the file that a shell would run for this name, with PATH from `env`; None if there is none.

    A name with a slash is a path, relative to `cwd`, the folder where the program starts. It is returned if the file
    exists, also if nobody may run it: exec then reports why.
    """
    if "/" in name:
        return name if os.path.exists(os.path.join(cwd, name)) else None
    for folder in env.get("PATH", "/usr/local/bin:/usr/bin:/bin").split(":"):
        path = os.path.join(cwd, folder, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def unreadable_copy(path: str) -> int:
    """Return a descriptor of a copy of a program that can be run but not read; -1 if that is impossible.

    A session's shell runs from such a copy of bash. The kernel then shows other processes of the user nothing of the
    shell: no descriptors, memory or tracing. The caller closes the descriptor.
    """
    writing = -1
    for flags in (MEMFD_CLOEXEC | MEMFD_EXEC, MEMFD_CLOEXEC):
        try:
            writing = os.memfd_create("program", flags)
            break
        except (AttributeError, OSError):
            continue  # Needs Python 3.8; before Linux 6.3 the flag is unknown.
    if writing < 0:
        return -1
    try:
        # A file of the user may be under a lease, which would block.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            content = file.read()
        # A script cannot be run without read permission: its interpreter opens it.
        if content[:4] != b"\x7fELF":
            return -1
        if os.write(writing, content) < len(content):
            return -1  # Memory has run out. A part of the program must not be run.
        # A file that is open for writing cannot be run, so `writing` is closed below.
        reading = os.open("/proc/self/fd/{}".format(writing), os.O_RDONLY | os.O_CLOEXEC)
        os.fchmod(writing, 0o111)
        return reading
    except OSError:
        return -1
    finally:
        os.close(writing)


def send_signal(pids: "list[int]", number: int) -> None:
    """Send the signal `number` to each process that still lives; the id -1: to every one that we may signal, except us.

    A SIGCONT follows every signal but SIGKILL and SIGSTOP, because a stopped process handles a signal only when it
    goes on. `Shell.interrupt` depends on that: it stops the shell first. `pids` may be any collection.
    """
    for pid in pids:
        try:
            os.kill(pid, number)
            if number not in (_signal.SIGKILL, _signal.SIGSTOP):
                os.kill(pid, _signal.SIGCONT)
        except OSError:
            pass


def send_to_group(group: int, number: int) -> None:
    """Send the signal `number` to a process group, if it exists. All members get it at once, so no fork escapes it."""
    try:
        os.killpg(group, number)
    except OSError:
        pass


class Ring:
    """Kept part of an output stream: its first and its last `limit` / 2 bytes. The bytes between are dropped.

    Each command has one for its output and one for its errors. They stay empty if the output is streamed.
    """

    def __init__(self, limit: int) -> None:
        """Begin with an empty stream. `limit` is the number of bytes to keep."""
        self.head_limit = limit - limit // 2
        self.tail_limit = limit // 2
        """Most bytes kept of the end of the stream; `head_limit` is that of its beginning."""
        self.head = bytearray()
        """First bytes of the stream."""
        self.tail = bytearray()
        """Last bytes of the stream after the head; more than `tail_limit` until `content` or `add` cuts it."""
        self.total = 0
        """Number of bytes of the stream so far, dropped ones included."""

    def add(self, data: bytes) -> None:
        """Add bytes of the stream."""
        self.total += len(data)
        room = self.head_limit - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        # Not at each piece: moving the bytes costs as much as a copy.
        if len(self.tail) > 2 * self.tail_limit + READ_BYTES:
            del self.tail[: len(self.tail) - self.tail_limit]

    def content(self) -> bytes:
        """Return all kept bytes."""
        del self.tail[: max(0, len(self.tail) - self.tail_limit)]
        return bytes(self.head + self.tail)

    def truncated(self) -> bool:
        """Return True if bytes in the middle were dropped."""
        return self.total > self.head_limit + self.tail_limit

    def part(self, offset: int, limit: int) -> "tuple[int, bytes]":
        """Return kept bytes from `offset` on, at most `limit`, as a pair: the offset where they begin, and the bytes.

        Offsets count from the beginning of the stream. If the bytes at `offset` were dropped, the result begins with
        the next kept ones. At or after the end of the stream it is the offset of the end, and no bytes.
        """
        content = self.content()
        if offset < len(self.head):
            # The result must not continue beyond a gap, because the host counts its bytes from the returned offset.
            return offset, content[offset : min(offset + limit, len(self.head) if self.truncated() else self.total)]
        begin = self.total - len(self.tail)
        start = min(max(offset, begin), self.total)
        return start, bytes(self.tail[start - begin : start - begin + limit])


class Pipe:
    """Our reading end of an output of a command or of a session. `Command` and `Shell` make one for each stream."""

    def __init__(self, loop: object, fd: int, on_data: object) -> None:
        """Begin to read from the descriptor `fd`. `on_data` is called with each piece of bytes."""
        self.loop = loop
        self.fd = fd
        """Descriptor; -1 once it is closed."""
        self.on_data = on_data
        os.set_blocking(fd, False)
        loop.watch(fd, self.read)

    def read(self) -> None:
        """Read once, and close the pipe at its end. The loop calls this when there is output."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            # A terminal whose last program is gone gives an error at the end.
            data = b""
        if data:
            self.on_data(data)
        else:
            self.close()

    def pause(self, paused: bool) -> None:
        """Stop reading if `paused` is True, so that the writer waits; else go on. `Command` pauses without credit."""
        if self.fd >= 0:
            self.loop.watch(self.fd, None if paused else self.read)

    def drain(self) -> None:
        """Read the bytes that are in the pipe now, and no more: a writer may go on for ever.

        Called when a command has ended, so that its result has all of its output.
        """
        if self.fd < 0:
            return
        # The last bytes written to a terminal may not be counted yet; only reading fetches them.
        waiting = max(READ_BYTES, struct.unpack("i", fcntl.ioctl(self.fd, termios.FIONREAD, b"\0" * 4))[0])
        while waiting > 0 and self.fd >= 0:
            try:
                data = os.read(self.fd, min(waiting, READ_BYTES))
            except OSError:
                return
            if not data:
                return
            waiting -= len(data)
            self.on_data(data)

    def close(self) -> None:
        """Close the descriptor, at the end of the output or of the command. A second call does nothing."""
        if self.fd >= 0:
            self.loop.watch(self.fd)
            os.close(self.fd)
            self.fd = -1


class InputFeed:
    """Our writing end of the input of a command, with the bytes that the command has not read yet. `Command` makes it.

    The host sends no more bytes than it has credit for, so the number of waiting bytes is bounded.
    """

    def __init__(self, loop: object, fd: int, grant: object) -> None:
        """Take over the descriptor `fd`. `grant` is called with a number of bytes: the host's new credit."""
        self.loop = loop
        self.fd = fd
        """Descriptor; -1 once it is closed."""
        self.grant = grant
        self.waiting = bytearray()
        """Bytes that the command has not read yet."""
        self.ending = False
        """True if no more bytes come; the input is closed after the waiting ones."""
        os.set_blocking(fd, False)

    def add(self, data: bytes, last: bool = False) -> None:
        """Queue bytes for the command. `last` is True if the input ends after them."""
        if self.fd < 0:
            # The input is closed, but the host may go on sending. Without credit it would wait for ever.
            self.grant(len(data))
            return
        self.waiting += data
        self.ending = self.ending or last
        self.write()

    def write(self) -> None:
        """Write as much as the command takes, and give the host credit for it. The loop calls this when it takes more.

        If the command has closed its input, the rest is dropped, and the host gets credit as if it had been taken.
        """
        done = 0
        try:
            while self.waiting:
                count = os.write(self.fd, memoryview(self.waiting)[:READ_BYTES])
                del self.waiting[:count]
                done += count
        except BlockingIOError:
            pass
        except OSError:
            done += len(self.waiting)
            self.waiting = bytearray()
            self.ending = True
        if done:
            self.grant(done)
        if self.waiting:
            self.loop.watch(self.fd, None, self.write)
        elif self.ending:
            self.close()
        else:
            self.loop.watch(self.fd)

    def close(self) -> None:
        """Close the descriptor, after the last bytes or at the command's end. A second call does nothing."""
        if self.fd >= 0:
            self.loop.watch(self.fd)
            os.close(self.fd)
            self.fd = -1


class OomCounter:
    """Counter of the processes of the sandbox that the kernel has killed for lack of memory."""

    PATHS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
    """Files with the count, under version 2 and version 1 of control groups."""

    def __init__(self, enabled: bool) -> None:
        """Open the kernel's file. `enabled` is False if /sys/fs/cgroup does not describe this sandbox alone."""
        self.fd = -1
        """Descriptor of the file; -1 if there is none."""
        for path in self.PATHS if enabled else ():
            try:
                self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                break
            except OSError:
                continue

    def read(self) -> int:
        """Return the number of processes killed since the sandbox's start; 0 if it is not known."""
        if self.fd < 0:
            return 0
        for line in os.pread(self.fd, 4096, 0).splitlines():
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
        return 0


def signal_name(number: int) -> str:
    """Return the name of a signal: `SIGKILL` for 9."""
    for name in dir(_signal):
        # Names such as SIG_DFL stand for handlers, whose numbers are also those of signals.
        if name.startswith("SIG") and name[3:4] != "_" and getattr(_signal, name) == number:
            return name
    return "SIG{}".format(number)


def now() -> float:
    """Return seconds on a monotonic clock."""
    return time.monotonic()


class Stat:
    """Fields of /proc/PID/stat, read once. Raises OSError, ValueError or IndexError if the process is gone."""

    def __init__(self, pid: int) -> None:
        """Read the file of the process `pid`."""
        with open("/proc/{}/stat".format(pid), "rb") as file:
            # The name of the program, in parentheses before these fields, may contain spaces and parentheses.
            fields = file.read().rpartition(b")")[2].split()
        self.pid = pid
        self.state = fields[0]
        """State of the first thread, such as b"R" (running) or b"Z" (zombie)."""
        self.parent, self.group, self.session = (int(field) for field in fields[1:4])
        """Ids of the parent process, the process group and the session."""
        self.ticks = sum(int(field) for field in fields[11:15])
        """CPU time, in ticks, of the process and its reaped children."""
        self.threads = int(fields[17])
        """Threads left. The first one always counts; 0 during exec or while it is reaped."""
        self.start = int(fields[19])
        """Start time, in ticks since the machine started."""

    def ended(self) -> bool:
        """Return True if no thread runs. The state is that of the first thread, which may end before the others."""
        return self.state in ENDED and self.threads == 1


def processes() -> "list[Stat]":
    """Return the `Stat` of each process of the sandbox, without the agent, zombies and those that end meanwhile."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                stat = Stat(int(name))
            except (OSError, ValueError, IndexError):
                continue
            if not stat.ended():
                found.append(stat)
    return found


def adopted() -> "list[int]":
    """Return the ids of our children: orphans that the kernel gave to us, and processes that this thread has started.

    `end_leftovers` finds the processes here that ended commands have left behind. Children that the thread of
    `Launcher` has started may be missing. `end_leftovers` does not need them: they are in `BoxAgent.children`.
    """
    own = os.getpid()
    try:
        with open("/proc/self/task/{}/children".format(own), "rb") as file:
            return [int(word) for word in file.read().split()]
    except OSError:  # A kernel may be built without this file. Children that have ended are then missing.
        return [stat.pid for stat in processes() if stat.parent == own]


def tree(leader: int, number: int) -> "list[int]":
    """Return the ids of a command's living processes: its session, its group, their descendants, all with its number.

    No single criterion is enough: a program can leave its session and lose its parent. Workers of the agent carry no
    number, and the number of another user's process cannot be read.

    Args:
        leader: id of the process that the command started with; its session and its group have the same id.
        number: number of the command.
    """
    inside = {leader}
    every = processes()
    grown = True
    while grown:
        grown = False
        for stat in every:
            if stat.pid not in inside and (stat.session == leader or stat.group == leader or stat.parent in inside):
                inside.add(stat.pid)
                grown = True
    inside.update(stat.pid for stat in every if stat.pid not in inside and number_of(stat.pid) == number)
    return [stat.pid for stat in every if stat.pid in inside]


def still_used(ids: "list[int]") -> "list[int]":
    """Return those ids of ended processes that living processes still have as their session or group.

    The kernel may give any other id to a new process, which must not be taken for the old one.
    """
    used = {number for stat in processes() for number in (stat.session, stat.group)}
    return [number for number in ids if number in used]


def cpu_use(pids: "list[int]") -> "tuple[int, bool]":
    """Return the CPU ticks of processes and their reaped children, and True if a thread is running or ready to run."""
    ticks, ready = 0, False
    for pid in pids:
        try:
            ticks += Stat(pid).ticks
            # Once one ready thread is found, the others are not read.
            for thread in [] if ready else os.listdir("/proc/{}/task".format(pid)):
                with open("/proc/{}/task/{}/stat".format(pid, thread), "rb") as file:
                    ready = ready or file.read().rpartition(b")")[2].split()[0] == b"R"
        except (OSError, ValueError, IndexError):
            continue  # It has ended meanwhile.
    return ticks, ready


class CommandNumbers:
    """Source of the numbers of commands and sessions. It starts at random: tests run several agents on one machine,
    which must not take each other's processes for their own."""

    def __init__(self) -> None:
        # Each of the 2^24 starts has room for 65,536 numbers. All stay below 2^40, and so far below `MIDDLE`.
        self.last = int.from_bytes(os.urandom(3), "big") << 16
        """Number that was given last."""

    def new(self) -> int:
        """Return the next number."""
        self.last += 1
        return self.last


def set_number(number: int) -> None:
    """Give this process, and all that it starts later, the number of a command.

    Raises OSError or ValueError if a limit cannot be set, because the process has a lower hard limit already.
    """
    resource.setrlimit(UP, (MIDDLE + number, MIDDLE + number))
    resource.setrlimit(DOWN, (MIDDLE - number, MIDDLE - number))


def number_of(pid: int) -> "int | None":
    """Return the number of a process's command; None if it has none, is gone, or is not readable for us."""
    try:
        up, down = resource.prlimit(pid, UP)[1], resource.prlimit(pid, DOWN)[1]
    except (OSError, ValueError):
        return None
    return up - MIDDLE if up != resource.RLIM_INFINITY and up - MIDDLE == MIDDLE - down else None
