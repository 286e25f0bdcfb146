"""Starts all programs such that the kernel kills them before the agent if memory runs out.

A program inherits the highest OOM score, which the agent takes on while it starts the program: a score set afterwards
would miss processes that it has started meanwhile. To keep a program from lowering its score again, a thread without
write access to /proc starts all programs, which inherit this restriction. Only Landlock gives threads different rights.
The kernel offers it from version 5.19, if enabled. Without it a program can still get the agent killed, and the sandbox
with it.
"""

import os
import struct

RULESET, RULE, RESTRICT = 444, 445, 446
"""Numbers of Landlock's system calls, the same on every architecture."""
WRITE_FILE, REFER = 1 << 1, 1 << 13
"""Rights: open a file for writing; move files between folders, which is refused unless the ruleset names it."""
ASK_VERSION = 1
NEEDED_VERSION = 2
"""Version of Landlock: the first one has no `REFER`."""
WORST = b"1000"
"""OOM score adjustment above every score from memory use."""


class Launcher:
    """Calls functions that start a process, one at a time: in its thread, or in the caller's without Landlock."""

    def __init__(self, restrict: bool) -> None:
        self.badness, self.own = -1, b""
        try:
            self.badness = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
            self.own = os.read(self.badness, 16)
        except OSError:
            pass  # The kernel does not report it.
        self.restricted = False
        self.function = self.result = None
        if restrict:
            import _thread

            self.asked, self.answered = _thread.allocate_lock(), _thread.allocate_lock()
            for lock in (self.asked, self.answered):
                lock.acquire()
            _thread.start_new_thread(self.serve, ())
            self.answered.acquire()

    def serve(self) -> None:
        """Run the thread: give up the right, then serve calls for ever."""
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
        """Call the function; returns its result or raises its error."""
        self.be(WORST)
        try:
            if not self.restricted:
                return function()
            self.function = function
            self.asked.release()
            self.answered.acquire()
        finally:
            self.be(self.own)
        value, error = self.result
        self.function = self.result = None
        if error is not None:
            raise error
        return value

    def be(self, badness: bytes) -> None:
        """Set our OOM score, which started processes inherit."""
        if self.own:
            os.pwrite(self.badness, badness, 0)


def forbid_writing_to_proc() -> bool:
    """Restrict this thread and the processes that it starts. Returns False if that is not possible."""
    try:
        import _ctypes

        address = _ctypes.dlsym(_ctypes.dlopen(None, 2), "syscall")
        if _ctypes.call_function(address, (RULESET, None, 0, ASK_VERSION)) < NEEDED_VERSION:
            return False
        rights = WRITE_FILE | REFER
        ruleset = _ctypes.call_function(address, (RULESET, struct.pack("=Q", rights), 8, 0))
        if ruleset < 0:
            return False
        # POSIX queues are opened without a check of their mount point, so that their folder is another root.
        for path in ["/dev/mqueue", *("/" + name for name in os.listdir("/") if name != "proc")]:
            if not os.path.isdir(path):
                continue
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
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
