"""Trees as tar streams, in both directions. These functions run in worker processes of the agent."""

import errno
import os
import stat

from envs.sandbox.agent.files import FOLDER, Write
from envs.sandbox.agent.paths import FolderChain, locate
from envs.sandbox.agent.wire import PIECE

SNAPSHOT_FILE = "/.flash-snapshot.tar"
"""Path at which an image keeps the working directory of the sandbox that it was made from."""
SENT = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Flags to open a file for sending. A pipe that has replaced the file must not block."""
MADE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to create a file for an entry. A file or link of this name must not exist."""


class BytesLeft:
    """Bytes that the files of a tree may still have. Holes count as well, because an archive has none."""

    def __init__(self, most: "int | None") -> None:
        self.most = self.left = most

    def take(self, size: int) -> None:
        """Count a file. Raises OSError if the tree exceeds its limit."""
        if self.left is not None:
            self.left -= size
            if self.left < 0:
                raise OSError(errno.EFBIG, "with this file of {} bytes it has over {}".format(size, self.most))


def send_tree(path: str, most: "int | None" = None) -> None:
    """Write a tree, or one file, to standard output as a tar stream. `most` limits the bytes of its files."""
    import tarfile

    room = BytesLeft(most)

    with os.fdopen(1, "wb", PIECE) as sink, tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        folder, name = locate(path, True)
        if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            send_entry(archive, folder, name, ".", room)
            return
        places = FolderChain(os.open(name, FOLDER, dir_fd=folder), False)
        folders = [""]
        while folders:
            inside = folders.pop()
            try:
                here = os.open(".", FOLDER, dir_fd=places.open(inside))
            except OSError as error:
                raise OSError(error.errno, os.strerror(error.errno or 0), os.path.join(path, inside).rstrip("/"))
            for name in sorted(os.listdir(here)):
                member = os.path.join(inside, name)
                try:
                    if send_entry(archive, here, name, member, room):
                        folders.append(member)
                except OSError as error:
                    raise OSError(error.errno, error.strerror, os.path.join(path, member))
            os.close(here)


def send_entry(archive: object, folder: int, name: str, member: str, room: BytesLeft) -> bool:
    """Send the entry `name` of an open folder. Returns True if it is a folder. Hard links become separate files."""
    import tarfile

    status = os.lstat(name, dir_fd=folder)
    info = tarfile.TarInfo(member)
    info.mode, info.mtime = stat.S_IMODE(status.st_mode), status.st_mtime
    content = None
    if stat.S_ISREG(status.st_mode):
        content = os.fdopen(os.open(name, SENT, dir_fd=folder), "rb")
        status = os.fstat(content.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        room.take(status.st_size)
        info.size = status.st_size
    elif stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=folder)
    elif stat.S_ISFIFO(status.st_mode):
        info.type = tarfile.FIFOTYPE
    else:
        return False  # A socket is useless without its listener.
    archive.addfile(info, content)
    archive.members = []  # Otherwise it keeps all members in memory.
    if content is not None:
        content.close()
    return info.isdir()


def receive_tree(path: str) -> None:
    """Unpack a tar stream from standard input into a folder, or onto one file."""
    import tarfile

    places, folders = None, []
    with os.fdopen(0, "rb", PIECE) as source, tarfile.open(fileobj=source, mode="r|") as archive:
        for member in archive:
            if member.name == ".":
                write = Write(path, member.mode, False)
                for piece in pieces_of(archive, member):
                    write.add(piece)
                write.commit()
                continue
            places = places or FolderChain(locate(path + "/", True, True)[0], True)
            receive_entry(archive, member, places)
            if member.isdir():
                folders.append(member)
            archive.members = []  # Otherwise it keeps all members in memory.
    # Modes of folders are set last: nothing could be created in a folder without write permission.
    for member in reversed(folders):
        here = places.open(member.name)
        os.chmod(".", member.mode, dir_fd=here)
        os.utime(".", (member.mtime, member.mtime), dir_fd=here)


def receive_entry(archive: object, member: object, places: FolderChain) -> None:
    """Create an archive's entry. An existing file is removed and not written to, because it may be a link."""
    folder, _, name = member.name.rpartition("/")
    if ".." in member.name.split("/") or name in ("", "."):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), member.name)
    here = places.open(folder, True)
    if member.isdir():
        places.open(member.name, True)
        return
    try:
        os.unlink(name, dir_fd=here)
    except FileNotFoundError:
        pass
    if member.isfile():
        with os.fdopen(os.open(name, MADE, 0o600, dir_fd=here), "wb") as file:
            for piece in pieces_of(archive, member):
                file.write(piece)
            file.flush()
            os.fchmod(file.fileno(), member.mode & 0o7777)
            os.utime(file.fileno(), (member.mtime, member.mtime))
    elif member.issym():
        os.symlink(member.linkname, name, dir_fd=here)
    elif member.isfifo():
        os.mkfifo(name, member.mode & 0o777, dir_fd=here)
    else:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), member.name)


def pieces_of(archive: object, member: object) -> object:
    """Yield the content of an entry."""
    content = archive.extractfile(member)
    piece = content.read(PIECE) if content else b""
    while piece:
        yield piece
        piece = content.read(PIECE)


def restore_tree(path: str) -> None:
    """Unpack the files of the snapshot, if the image has them."""
    if os.path.exists(SNAPSHOT_FILE):
        os.dup2(os.open(SNAPSHOT_FILE, os.O_RDONLY), 0)
        receive_tree(path)
