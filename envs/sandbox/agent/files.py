"""Files of the sandbox: ranges, atomic writes, listings, removal.

No function can reach outside the sandbox. Requests are refused if they would block or never end.
"""

import binascii
import errno
import os
import stat
import sys

from envs.sandbox.agent.paths import locate, on_proc, open_found
from envs.sandbox.agent.wire import CallRefusal

READ_LIMIT = 1 << 20
"""Most bytes of one read."""
LIST_LIMIT = 100000
"""Most entries of one listing."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to open a folder whose content is removed. A link that has replaced the folder must not be followed."""


def refuse(path: str, error: OSError) -> CallRefusal:
    """Return the refusal for an error of the file system."""
    code = "limit" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE) else "file"
    return CallRefusal(code, "{}: {}".format(path, os.strerror(error.errno or 0)))


def read_file(path: str, offset: int, limit: int) -> "tuple[bytes, list]":
    """Return a range of a regular file, and values that identify the file and its content."""
    try:
        # A pipe without a writer would block for ever.
        fd = open_found(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise refuse(path, error)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise CallRefusal("file", "{}: not a regular file".format(path))
        data = bytearray()
        while len(data) < limit:
            piece = os.pread(fd, limit - len(data), offset + len(data))
            if not piece:
                break
            data += piece
        return bytes(data), [info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size]
    except OSError as error:
        raise refuse(path, error)
    finally:
        os.close(fd)


class Write:
    """A file that is replaced, or appended to, while its bytes arrive."""

    def __init__(self, path: str, mode: int, append: bool) -> None:
        self.path = path
        self.append = append
        self.folder = self.fd = -1
        self.name = self.temporary = ""
        if not os.path.basename(path):
            raise CallRefusal("file", "{}: not the name of a file".format(path))
        try:
            if append:
                self.open(mode)
            else:
                self.open_new(mode)
        except OSError as error:
            self.drop()
            raise refuse(path, error)
        except CallRefusal:
            self.drop()
            raise

    def open(self, mode: int) -> None:
        """Open the existing file, or create it, to append to it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
        self.fd = open_found(self.path, flags, mode, True)
        if not stat.S_ISREG(os.fstat(self.fd).st_mode) or on_proc(self.fd):
            raise CallRefusal("file", "{}: not a regular file".format(self.path))

    def open_new(self, mode: int) -> None:
        """Create a temporary file beside the target. If the target is a link, the link itself is replaced."""
        self.folder, self.name = locate(self.path, False, True)
        # Short: a name has at most 255 bytes, and a character up to four bytes.
        self.temporary = ".{}.{}".format(self.name[:48], binascii.hexlify(os.urandom(6)).decode())
        if is_folder(self.name, self.folder):
            raise CallRefusal("file", "{}: is a folder".format(self.path))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(self.temporary, flags, 0o600, dir_fd=self.folder)
        os.fchmod(self.fd, mode)

    def add(self, data: bytes) -> None:
        """Write bytes. On an error the file is dropped."""
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self.fd, view) :]
        except OSError as error:
            self.drop()
            raise refuse(self.path, error)

    def commit(self) -> None:
        """Move the complete file into its place."""
        try:
            if not self.append:
                os.replace(self.temporary, self.name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        except OSError as error:
            raise refuse(self.path, error)
        finally:
            self.drop()

    def drop(self) -> None:
        """Close the file, and remove it if it was not committed."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            if not self.append:
                try:
                    os.unlink(self.temporary, dir_fd=self.folder)
                except OSError:
                    pass
        if self.folder >= 0:
            os.close(self.folder)
            self.folder = -1


def is_folder(name: str, folder: int) -> bool:
    """Return True if the name in an open folder is a folder."""
    try:
        return stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode)
    except FileNotFoundError:
        return False


def describe(folder: int, name: str) -> list:
    """Return name, kind, size, mode and modification time of an entry of an open folder."""
    info = os.lstat(name, dir_fd=folder)
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    kind = kinds.get(stat.S_IFMT(info.st_mode), "other")
    return [os.fsencode(name), kind, info.st_size, stat.S_IMODE(info.st_mode), info.st_mtime]


def list_folder(path: str, send: object, limit: int = LIST_LIMIT) -> None:
    """Send the entries of a folder, many at a time."""
    try:
        folder, name = locate(path, False)
        try:
            if not is_folder(name, folder):
                send([describe(folder, name)])
                return
            here = os.open(name, FOLDER, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise refuse(path, error)
    try:
        send_listing(here, names_in(here, path, limit), send)
    except OSError as error:
        raise refuse(path, error)
    finally:
        os.close(here)


def names_in(here: int, path: str, limit: int) -> "list[str]":
    """Return all names in an open folder."""
    if sys.version_info < (3, 7):
        return os.listdir(here)
    names = []
    with os.scandir(here) as entries:
        for entry in entries:
            if len(names) == limit:
                raise CallRefusal("limit", "{}: more than the {} entries of one listing".format(path, limit))
            names.append(entry.name)
    return names


def send_listing(here: int, names: "list[str]", send: object) -> None:
    """Send the entries with these names in an open folder."""
    batch = []
    for name in sorted(names):
        try:
            batch.append(describe(here, name))
        except OSError:
            continue  # Removed meanwhile.
        if len(batch) == 200:
            send(batch)
            batch = []
    send(batch)


def remove(path: str) -> None:
    """Remove a file or a tree, in a worker. Links are removed, not followed."""
    try:
        folder, name = locate(path.rstrip("/"), False)
    except (FileNotFoundError, NotADirectoryError):
        return
    if is_folder(name, folder):
        remove_tree(folder, name, path)
    else:
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            pass
    os.close(folder)


def remove_tree(folder: int, name: str, path: str) -> None:
    """Remove a folder of any depth. `shutil.rmtree` recurses for each level and keeps all levels open."""
    here = os.open(name, FOLDER, dir_fd=folder)
    ahead = []
    """For each level, the folders that are left to remove. The last one of each level is open, except in the last
    level."""
    try:
        ahead.append(remove_files(here))
        while True:
            if ahead[-1]:
                here = go(here, ahead[-1][-1])
                ahead.append(remove_files(here))
                continue
            ahead.pop()
            if not ahead:
                break
            here = go(here, "..")
            os.rmdir(ahead[-1][-1], dir_fd=here)
            ahead[-1].pop()
    except OSError as error:
        place = os.path.join(path, *[names[-1] for names in ahead if names])
        raise OSError(error.errno, os.strerror(error.errno or 0), place)
    finally:
        os.close(here)
    os.rmdir(name, dir_fd=folder)


def go(here: int, name: str) -> int:
    """Close `here` and open a folder in it, or its parent."""
    there = os.open(name, FOLDER, dir_fd=here)
    os.close(here)
    return there


def remove_files(here: int) -> "list[str]":
    """Remove everything but the folders of an open folder, and return the names of those."""
    folders = []
    for name in os.listdir(here):
        if stat.S_ISDIR(os.lstat(name, dir_fd=here).st_mode):
            folders.append(name)
        else:
            os.unlink(name, dir_fd=here)
    return folders
