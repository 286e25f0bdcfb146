"""Resolution of paths, step by step, so that no link made by a program leads into /proc.

In /proc, the descriptors and memory of the process that follows a link are files. So a link that leads there is
refused, and of the kernel's own links in /proc only the text is used. A path that names /proc itself may be read.
"""

import errno
import os

from envs.sandbox.agent.wire import CallRefusal

MOST_LINKS = 40
"""Links that one path may follow, as in the kernel."""
PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to open a folder as a place in a path, without following a link."""


def on_proc(fd: int) -> bool:
    """Return True if an open file is in /proc."""
    try:
        return os.fstat(fd).st_dev == os.stat("/proc").st_dev
    except OSError:
        return False


def locate(path: str, follow: bool, make: bool = False, start: int = -1) -> "tuple[int, str]":
    """Return the path's open folder, which the caller closes, and the name in it; `.` is the folder itself.

    A path begins at the root, or at the folder `start`. With `follow`, a link in its last part is followed. The caller
    must open the name without following links. Raises OSError, and CallRefusal for a link into /proc.
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
    """Return the target of a link; None if the name is no link or does not exist."""
    try:
        return os.readlink(name, dir_fd=here)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def step(here: int, name: str, make: bool = False) -> int:
    """Close `here` and open a folder in it, its parent, or the root; with `make`, create it."""
    try:
        there = os.open(name, PLACE, dir_fd=here)
    except FileNotFoundError:
        if not make:
            raise
        try:
            os.mkdir(name, dir_fd=here)
        except FileExistsError:
            pass  # Another process was faster.
        there = os.open(name, PLACE, dir_fd=here)
    os.close(here)
    return there


def open_found(path: str, flags: int, mode: int = 0o777, make: bool = False) -> int:
    """Open the file that a path leads to. Raises OSError and CallRefusal."""
    folder, name = locate(path, True, make)
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
    finally:
        os.close(folder)


class FolderChain:
    """Folders below an open one. A folder inside the last opened one is resolved from there."""

    def __init__(self, top: int, follow: bool) -> None:
        self.top, self.follow = top, follow
        self.path, self.here = "", os.dup(top)

    def open(self, path: str, make: bool = False) -> int:
        """Return the open folder of this path. It stays open until the next call."""
        if path != self.path:
            inside = not self.path or path.startswith(self.path + "/")
            start, rest = (self.here, path[len(self.path) :]) if inside else (self.top, path)
            there = self.find(rest.strip("/"), start, make)
            os.close(self.here)
            self.path, self.here = path, there
        return self.here

    def find(self, path: str, start: int, make: bool) -> int:
        """Open a folder below `start`, through links only with `follow`."""
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
