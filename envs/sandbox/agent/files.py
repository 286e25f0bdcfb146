"""Files of the sandbox: ranges, atomic writes, listings, and trees as tar streams.

Nothing here can reach outside of the sandbox; what is refused is refused because it would block or never end.
"""

import binascii
import errno
import os
import stat
import sys

from envs.sandbox.agent.command import Refusal
from envs.sandbox.agent.wire import PIECE

READ_LIMIT = 1 << 20
"""Bytes that one read gives."""
LIST_LIMIT = 100000
"""Entries that one listing gives."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""How a folder is opened whose content is removed: a link that stands where it was must not be followed."""


def refuse(path: str, error: OSError) -> Refusal:
    """What to tell the host of a failure."""
    code = "limit" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE) else "file"
    return Refusal(code, "{}: {}".format(path, os.strerror(error.errno or 0)))


def read_file(path: str, offset: int, limit: int) -> "tuple[bytes, list]":
    """A range of a regular file, and what tells this file and its content from another."""
    try:
        # A pipe nobody writes to would block for ever.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise refuse(path, error)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise Refusal("file", "{}: not a regular file".format(path))
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
    """A file that is being replaced, or appended to, as its bytes come."""

    def __init__(self, path: str, mode: int, append: bool) -> None:
        self.path = path
        self.append = append
        folder, name = os.path.split(path)
        # Short: a name has at most 255 bytes, and a character up to four of them.
        self.temporary = os.path.join(folder, ".{}.{}".format(name[:48], binascii.hexlify(os.urandom(6)).decode()))
        self.data = bytearray()
        self.fd = -1
        if not name:
            raise Refusal("file", "{}: not the name of a file".format(path))
        try:
            if folder:
                os.makedirs(folder, exist_ok=True)
            if not append:
                # What a link points to is not replaced: the link itself is.
                if os.path.isdir(path) and not os.path.islink(path):
                    raise Refusal("file", "{}: is a folder".format(path))
                self.fd = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                os.fchmod(self.fd, mode)
            else:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
                self.fd = os.open(path, flags, mode)
                if not stat.S_ISREG(os.fstat(self.fd).st_mode):
                    raise Refusal("file", "{}: not a regular file".format(path))
        except OSError as error:
            self.drop()
            raise refuse(path, error)
        except Refusal:
            self.drop()
            raise

    def add(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self.fd, view) :]
        except OSError as error:
            self.drop()
            raise refuse(self.path, error)

    def commit(self) -> None:
        """All bytes are there: show them."""
        try:
            if not self.append:
                os.replace(self.temporary, self.path)
        except OSError as error:
            raise refuse(self.path, error)
        finally:
            self.drop()

    def drop(self) -> None:
        """Remove what was written so far: the write was not committed."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            if not self.append:
                try:
                    os.unlink(self.temporary)
                except OSError:
                    pass


def describe(path: str, name: str) -> list:
    """Name, kind, size, mode, time of change."""
    info = os.lstat(path)
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    kind = kinds.get(stat.S_IFMT(info.st_mode), "other")
    return [os.fsencode(name), kind, info.st_size, stat.S_IMODE(info.st_mode), info.st_mtime]


def list_folder(path: str, send: object, limit: int = LIST_LIMIT) -> None:
    """Send the entries of a folder, many at a time."""
    names = []
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            send([describe(path, os.path.basename(path))])
            return
        with os.scandir(path) as entries:
            for entry in entries:
                if len(names) == limit:
                    raise Refusal("limit", "{}: more than the {} entries of one listing".format(path, limit))
                names.append(entry.name)
    except OSError as error:
        raise refuse(path, error)
    batch = []
    for name in sorted(names):
        try:
            batch.append(describe(os.path.join(path, name), name))
        except OSError:
            continue  # Removed meanwhile.
        if len(batch) == 200:
            send(batch)
            batch = []
    send(batch)


def remove(path: str) -> None:
    """Remove a file or a tree, for a worker. Links are removed, not followed."""
    if os.path.isdir(path) and not os.path.islink(path):
        remove_tree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def remove_tree(path: str) -> None:
    """Remove a folder, however deep: `shutil.rmtree` calls itself for each level, and has them all open."""
    here = os.open(path, FOLDER)
    ahead = []
    """The folders in each level that are still to be removed; we are in the last of each but the last level."""
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
    os.rmdir(path)


def go(here: int, name: str) -> int:
    """From an open folder to one beside or above it."""
    there = os.open(name, FOLDER, dir_fd=here)
    os.close(here)
    return there


def remove_files(here: int) -> "list[str]":
    """Remove all but the folders of an open folder, and give those."""
    folders = []
    for name in os.listdir(here):
        if stat.S_ISDIR(os.lstat(name, dir_fd=here).st_mode):
            folders.append(name)
        else:
            os.unlink(name, dir_fd=here)
    return folders


def send_tree(path: str) -> None:
    """Write a tree, or one file, to standard output as a tar stream, for a worker."""
    import tarfile

    with os.fdopen(1, "wb", PIECE) as sink, tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as archive:

        def apart(info):
            """A file with several names is sent under each as a file of its own."""
            if info.islnk():
                info.type, info.linkname = tarfile.REGTYPE, ""
                info.size = os.stat(os.path.join(path, info.name)).st_size
            return info

        if not os.path.isdir(path):
            archive.add(path, arcname=".")
            return
        folders = [""]
        while folders:
            folder = folders.pop()
            for name in sorted(os.listdir(os.path.join(path, folder))):
                inside = os.path.join(folder, name)
                full = os.path.join(path, inside)
                archive.add(full, arcname=inside, recursive=False, filter=apart)
                if os.path.isdir(full) and not os.path.islink(full):
                    folders.append(inside)


def receive_tree(path: str) -> None:
    """Unpack a tar stream from standard input into a folder, or onto one file, for a worker."""
    import tarfile

    with os.fdopen(0, "rb", PIECE) as source, tarfile.open(fileobj=source, mode="r|") as archive:
        for member in archive:
            if member.name == ".":
                os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
                write = Write(path, member.mode, False)
                content = archive.extractfile(member)
                piece = content.read(PIECE) if content else b""
                while piece:
                    write.add(piece)
                    piece = content.read(PIECE)
                write.commit()
            else:
                member.uid, member.gid = os.getuid(), os.getgid()
                os.makedirs(path, exist_ok=True)
                if sys.version_info >= (3, 12):
                    archive.extract(member, path, filter="fully_trusted")
                else:
                    archive.extract(member, path)


SNAPSHOT_FILE = "/.flash-snapshot.tar"
"""Where an image keeps the working directory of the sandbox that it was made of."""


def restore_tree(path: str) -> None:
    """Unpack the snapshot's files, if there are any, for a worker."""
    if os.path.exists(SNAPSHOT_FILE):
        os.dup2(os.open(SNAPSHOT_FILE, os.O_RDONLY), 0)
        receive_tree(path)
