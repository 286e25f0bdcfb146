"""Starts all programs, such that the kernel kills them rather than the agent when memory is short.

They inherit the greatest badness, which the agent takes on for that moment: set afterwards, it would miss what they
have started meanwhile. So that none makes itself worth more again, they are started by a thread that may not write to
/proc, and hand that on. Rights of threads differ by Landlock only; the kernel offers that from version 5.19 on, where
it is switched on. Elsewhere a program can still get its agent killed, and with it its sandbox.
"""

import os
import struct

RULESET, RULE, RESTRICT = 444, 445, 446
"""Numbers of Landlock's system calls, the same on every architecture."""
WRITE_FILE, REFER = 1 << 1, 1 << 13
"""Rights: to open a file for writing; to move files between folders, which is refused unless it is named."""
ASK_VERSION = 1
NEEDED_VERSION = 2
"""Of Landlock: the first one knows no `REFER`."""
WORST = b"1000"
"""Badness beyond all that memory says."""


class Launcher:
    """Calls functions that start a process, one at a time: in its thread, or without Landlock in the caller's."""

    def __init__(self, restrict: bool) -> None:
        self.badness, self.own = -1, b""
        try:
            self.badness = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
            self.own = os.read(self.badness, 16)
        except OSError:
            pass  # The kernel does not say.
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
        """The thread: gives up the right, and then works for ever."""
        self.restricted = forbid_writing_to_proc()
        self.answered.release()
        while self.restricted:
            self.asked.acquire()
            try:
                self.result = (self.function(), None)
            except BaseException as error:
                # Whatever it is, it belongs to the caller.
                self.result = (None, error)
            self.answered.release()

    def call(self, function: object) -> object:
        """What the function gives or raises."""
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
        """Take this badness on; what is started has it from its first moment."""
        if self.own:
            os.pwrite(self.badness, badness, 0)


def forbid_writing_to_proc() -> bool:
    """For this thread and what it starts; False where it cannot be had."""
    try:
        import _ctypes

        address = _ctypes.dlsym(_ctypes.dlopen(None, 2), "syscall")
        if _ctypes.call_function(address, (RULESET, None, 0, ASK_VERSION)) < NEEDED_VERSION:
            return False
        rights = WRITE_FILE | REFER
        ruleset = _ctypes.call_function(address, (RULESET, struct.pack("=Q", rights), 8, 0))
        if ruleset < 0:
            return False
        # POSIX queues are opened without a look at where they are mounted, which makes their folder one more root.
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
        # Small images have no ctypes; what it would be loaded from may be anything.
        return False
