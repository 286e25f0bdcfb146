"""How files are found: step by step, so that no link that a program has made leads into /proc.

There the descriptors and the memory of whoever follows a link are files. So a link to there is refused, and what the
kernel shows there as links is only ever taken by its text. Who names /proc itself may read there.
"""

import errno
import os

from envs.sandbox.agent.wire import CallRefusal

MOST_LINKS = 40
"""That one path leads through, as in the kernel."""
PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def on_proc(fd: int) -> bool:
    """Whether something open is in /proc."""
    try:
        return os.fstat(fd).st_dev == os.stat("/proc").st_dev
    except OSError:
        return False


def locate(path: str, follow: bool, make: bool = False, start: int = -1) -> "tuple[int, str]":
    """The open folder of a path, which the caller closes, and the name in it: `.` where it is that folder itself.

    A path begins at the root, or at the folder `start`. Its last part is followed where it is a link, if wanted; what
    has the name must still be opened without following. Raises OSError, and Refusal for a link into /proc.
    """
    here = os.dup(start) if start >= 0 else os.open("/", PLACE)
    ahead, links, linked = path.split("/")[::-1], 0, False
    try:
        while True:
            if linked and on_proc(here):
                raise CallRefusal("file", "{}: a link leads into /proc".format(path))
            name = ahead.pop() or "."
            if name == "." and ahead:
                continue
            target = link_of(here, name) if ahead or follow else None
            if target is not None:
                links += 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, "")
                linked = linked or not on_proc(here)
                here = step(here, "/") if target.startswith("/") else here
                ahead += target.split("/")[::-1]
            elif ahead or name == "..":
                here = step(here, name, make)
                ahead = ahead or [""]
            else:
                return here, name
    except OSError as error:
        os.close(here)
        raise OSError(error.errno, os.strerror(error.errno or 0), path)
    except BaseException:
        os.close(here)
        raise


def link_of(here: int, name: str) -> "str | None":
    """Where a link leads; None for what is none, or is not there."""
    try:
        return os.readlink(name, dir_fd=here)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def step(here: int, name: str, make: bool = False) -> int:
    """From an open folder to one beside, above or in it, which is made if wanted."""
    try:
        there = os.open(name, PLACE, dir_fd=here)
    except FileNotFoundError:
        if not make:
            raise
        try:
            os.mkdir(name, dir_fd=here)
        except FileExistsError:
            pass  # Somebody else was faster.
        there = os.open(name, PLACE, dir_fd=here)
    os.close(here)
    return there


def open_found(path: str, flags: int, mode: int = 0o777, make: bool = False) -> int:
    """Open what a path leads to. Raises OSError and Refusal."""
    folder, name = locate(path, True, make)
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
    finally:
        os.close(folder)


class FolderChain:
    """Folders below an open one: the next is found from the last where it lies in that."""

    def __init__(self, top: int, follow: bool) -> None:
        self.top, self.follow = top, follow
        self.path, self.here = "", os.dup(top)

    def open(self, path: str, make: bool = False) -> int:
        """One of them, open until the next is asked for."""
        if path != self.path:
            inside = not self.path or path.startswith(self.path + "/")
            start, rest = (self.here, path[len(self.path) :]) if inside else (self.top, path)
            there = self.find(rest.strip("/"), start, make)
            os.close(self.here)
            self.path, self.here = path, there
        return self.here

    def find(self, path: str, start: int, make: bool) -> int:
        if self.follow:
            return locate(path + "/", True, make, start)[0]
        here = os.dup(start)
        try:
            for name in path.split("/"):
                here = step(here, name or ".", make)
        except OSError:
            os.close(here)
            raise
        return here
