"""Files of the sandbox: ranges, atomic writes, listings, removal, and trees as tar streams.

Part of the program inside a sandbox: Python 3.6, standard library only. `envs.sandbox.engines.bundle` joins all modules
into one text, so top-level names must be unique. The operations in `envs.sandbox.agent.main` call the functions here.

Paths are resolved step by step (`locate`), so that no link made by a program leads into /proc. There the descriptors
and memory of the process that follows a link are files. So a link that leads there is refused, and of the kernel's own
links in /proc only the text is used. A path that names /proc itself may be read.

No function can reach outside the sandbox. Requests are refused if they would block or never end. The functions for
trees and removal run in worker processes of the agent: they may take long, and the agent has only one thread.
"""

import binascii
import errno
import os
import stat
import sys

from envs.sandbox.agent.wire import PIECE, CallRefusal

MOST_LINKS = 40
"""Links that one path may follow, as in the kernel."""
PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to open a folder as a place in a path, without following a link."""

READ_LIMIT = 1 << 20
"""Most bytes of one read."""
LIST_LIMIT = 100000
"""Most entries of one listing."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to open a folder whose content is listed, sent or removed. A link that has replaced the folder must not be
followed."""
SNAPSHOT_FILE = "/.flash-snapshot.tar"
"""Path of a tar archive in the image of a snapshot. It has the working directory of the sandbox that was saved.

`envs.sandbox.engines.docker_images` puts it there, because a working directory in memory is not part of an image."""
SENT = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Flags to open a file for sending. A pipe that has replaced the file must not block."""
MADE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to create a file for an entry. A file or link of this name must not exist."""


def on_proc(fd: int) -> bool:
    """Return True if `fd` is an open file or folder in /proc. False if no /proc is mounted."""
    try:
        return os.fstat(fd).st_dev == os.stat("/proc").st_dev
    except OSError:
        return False


def locate(path: str, follow: bool, make: bool = False, start: int = -1) -> "tuple[int, str]":
    """Return the open folder that a path leads to, and the name in it; the name `.` is the folder itself.

    The caller closes the folder. It must open the name without following links: a program may have put a link in its
    place meanwhile. Raises OSError, and CallRefusal for a link into /proc.

    Args:
        path: the path, from the root or from `start`.
        follow: True to follow a link in the last part of the path. Links in earlier parts are always followed.
        make: True to create missing folders.
        start: open folder where the path begins; -1: the root.
    """
    here = os.dup(start) if start >= 0 else os.open("/", PLACE)
    # `ahead` has the parts of the path that are left, the next one last. `linked`: a link outside /proc was followed.
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
                # A link in /proc is the kernel's own, such as /proc/self, and may lead to another place in /proc.
                linked = linked or not on_proc(here)
                here = step(here, "/") if target.startswith("/") else here
                ahead += target.split("/")[::-1]
            elif ahead or name == "..":  # A folder on the way.
                here = step(here, name, make)
                ahead = ahead or [""]  # After a final `..` the result is the name `.` in that folder.
            else:
                return here, name
    except OSError as error:
        os.close(here)
        raise OSError(error.errno, os.strerror(error.errno or 0), path)
    except BaseException:
        os.close(here)
        raise


def link_of(here: int, name: str) -> "str | None":
    """Return the target of the link `name` in the open folder `here`; None if it is no link or does not exist.

    Raises OSError if the folder cannot be searched.
    """
    try:
        return os.readlink(name, dir_fd=here)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def step(here: int, name: str, make: bool = False) -> int:
    """Follow one part of a path: open the folder `name` in `here`, its parent (`..`) or the root (`/`), close `here`.

    With `make`, a missing folder is created. Raises OSError, also if `name` is a link; `here` then stays open.
    """
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
    """Open the file that a path leads to, following links except into /proc. Returns its descriptor.

    `flags` and `mode` are those of `os.open`; with `make`, missing folders are created. Raises OSError, and CallRefusal
    for a link into /proc.
    """
    folder, name = locate(path, follow=True, make=make)
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
    finally:
        os.close(folder)


class FolderChain:
    """Opener of folders below an open one, for the entries of a tree one after another.

    Most entries are in the last opened folder or inside it. So a path is resolved from there if possible: from the top,
    a deep tree would take quadratic time. `send_tree` and `receive_tree` use one each.
    """

    def __init__(self, top: int, follow: bool) -> None:
        """Begin at the open folder `top`. `follow` is True if links to folders are followed below it."""
        self.top, self.follow = top, follow
        self.path, self.here = "", os.dup(top)
        """Path below `top` of the folder that was opened last, and its descriptor."""

    def open(self, path: str, make: bool = False) -> int:
        """Return the open folder of this path below `top`; with `make`, missing folders are created.

        It stays open until the next call. Raises OSError, and CallRefusal for a link into /proc.
        """
        if path != self.path:
            inside = not self.path or path.startswith(self.path + "/")
            start, rest = (self.here, path[len(self.path) :]) if inside else (self.top, path)
            there = self.find(rest.strip("/"), start, make)
            os.close(self.here)
            self.path, self.here = path, there
        return self.here

    def find(self, path: str, start: int, make: bool) -> int:
        """Return the open folder `path` below `start`, which stays open. Without `follow`, a link raises OSError.

        With `make`, missing folders are created.
        """
        if self.follow:
            # The final slash makes the last part a folder to open, and not the name in it.
            return locate(path + "/", follow=True, make=make, start=start)[0]
        here = os.dup(start)
        try:
            for name in path.split("/"):
                here = step(here, name or ".", make)
        except OSError:
            os.close(here)
            raise
        return here


def refusal(path: str, error: OSError) -> CallRefusal:
    """Return the refusal of a call for an error of the file system, with the path in its message.

    The code is `limit` if disk, memory or descriptors are used up, else `file`.
    """
    code = "limit" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE) else "file"
    return CallRefusal(code, "{}: {}".format(path, os.strerror(error.errno or 0)))


def read_file(path: str, offset: int, limit: int) -> "tuple[bytes, list]":
    """Return a range of a regular file, and values that identify the file and its content.

    The values are device, number, time of modification in nanoseconds, and size. The host compares them between the
    ranges of one read. The range begins at byte `offset`, and has fewer than `limit` bytes only at the end of the file.
    Raises CallRefusal if the file cannot be read or is not a regular one.
    """
    try:
        # A pipe without a writer would block for ever.
        fd = open_found(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise refusal(path, error)
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
        raise refusal(path, error)
    finally:
        os.close(fd)


class Write:
    """A file whose new content arrives in pieces. `commit` replaces the old file; appended bytes are written at once.

    The operation `write` makes it, `data` and `eof` add to it. `receive_tree` makes one for an archive of one file.
    """

    def __init__(self, path: str, mode: int, append: bool) -> None:
        """Open the file. Raises CallRefusal if that fails.

        Args:
            path: absolute path of the file. Missing folders are created.
            mode: permissions of a new or replaced file.
            append: True to append to the file; False to replace it.
        """
        self.path = path
        self.append = append
        self.folder = self.fd = -1
        """Descriptors of the file's folder (only to replace it) and of the file; -1 if they are not open."""
        self.name = self.temporary = ""
        """Names in the folder of the file and of the temporary file; only to replace it."""
        if not os.path.basename(path):
            raise CallRefusal("file", "{}: not the name of a file".format(path))
        try:
            if append:
                self.open_to_append(mode)
            else:
                self.open_to_replace(mode)
        except OSError as error:
            self.drop()
            raise refusal(path, error)
        except CallRefusal:
            self.drop()
            raise

    def open_to_append(self, mode: int) -> None:
        """Open the existing file, or create it with `mode`, to append to it.

        Raises OSError, and CallRefusal if it is no regular file or a link leads into /proc.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
        try:
            self.fd = open_found(self.path, flags | os.O_EXCL, mode, make=True)
            os.fchmod(self.fd, mode)  # The umask has removed some permissions.
        except FileExistsError:
            self.fd = open_found(self.path, flags, mode, make=True)
        # A file of /proc is regular, too, but a write to it changes a process.
        if not stat.S_ISREG(os.fstat(self.fd).st_mode) or on_proc(self.fd):
            raise CallRefusal("file", "{}: not a regular file".format(self.path))

    def open_to_replace(self, mode: int) -> None:
        """Create a temporary file beside the target. If the target is a link, the link itself is replaced.

        Raises OSError, and CallRefusal if the target is a folder or a link leads into /proc.
        """
        self.folder, self.name = locate(self.path, follow=False, make=True)
        # Short: a name has at most 255 bytes, and a character up to four bytes.
        self.temporary = ".{}.{}".format(self.name[:48], binascii.hexlify(os.urandom(6)).decode())
        if is_folder(self.name, self.folder):
            raise CallRefusal("file", "{}: is a folder".format(self.path))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(self.temporary, flags, 0o600, dir_fd=self.folder)
        os.fchmod(self.fd, mode)  # `open` would apply the umask.

    def add(self, data: bytes) -> None:
        """Write bytes. On an error the file is dropped, and CallRefusal raised."""
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self.fd, view) :]
        except OSError as error:
            self.drop()
            raise refusal(self.path, error)

    def commit(self) -> None:
        """Move the complete file into its place, after its last bytes, and close it.

        So a program sees the old content or the new one, and never a part. Appended bytes are in the file already.
        Raises CallRefusal; the temporary file is then removed.
        """
        try:
            if not self.append:
                os.replace(self.temporary, self.name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        except OSError as error:
            raise refusal(self.path, error)
        finally:
            self.drop()

    def cancel(self) -> None:
        """Drop the file, because the host does not send the rest of it. Called for an abandoned call."""
        self.drop()

    def drop(self) -> None:
        """Close the file, and remove the temporary file if it was not moved into its place."""
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
    """Return True if `name` in the open folder `folder` is a folder; False for a link, or if it does not exist."""
    try:
        return stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode)
    except FileNotFoundError:
        return False


def describe(folder: int, name: str) -> list:
    """Return the host's `FileInfo` of the entry `name` of the open folder `folder`, as a list.

    It has the name as bytes, the kind (`file`, `folder`, `link` or `other`), the size in bytes, the permission bits,
    and the Unix time of modification. A link is described, not followed. Raises OSError if there is no such entry.
    """
    info = os.lstat(name, dir_fd=folder)
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    kind = kinds.get(stat.S_IFMT(info.st_mode), "other")
    return [os.fsencode(name), kind, info.st_size, stat.S_IMODE(info.st_mode), info.st_mtime]


def list_folder(path: str, send: object, limit: int = LIST_LIMIT) -> None:
    """Call `send` with lists of entries of a folder, as `describe` makes them. A file or a link is its own only entry.

    Raises CallRefusal if the path does not exist, or the folder cannot be read or has more than `limit` entries (not
    with Python 3.6, see `names_in`).
    """
    try:
        folder, name = locate(path, follow=False)
        try:
            if not is_folder(name, folder):
                send([describe(folder, name)])
                return
            here = os.open(name, FOLDER, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise refusal(path, error)
    try:
        send_listing(here, names_in(here, path, limit), send)
    except OSError as error:
        raise refusal(path, error)
    finally:
        os.close(here)


def names_in(here: int, path: str, limit: int) -> "list[str]":
    """Return all names in an open folder. `path` is for messages.

    Raises CallRefusal if there are more than `limit`. With Python 3.6 there is no limit.
    """
    if sys.version_info < (3, 7):
        return os.listdir(here)  # Its `scandir` takes no descriptor.
    names = []
    with os.scandir(here) as entries:
        for entry in entries:
            if len(names) == limit:
                raise CallRefusal("limit", "{}: more than the {} entries of one listing".format(path, limit))
            names.append(entry.name)
    return names


def send_listing(here: int, names: "list[str]", send: object) -> None:
    """Call `send` with the entries of these names in the open folder `here`, 200 at a time: they must fit in a frame.

    The last call may have an empty list.
    """
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
    """Remove a file or a tree, if it exists. Links are removed, not followed.

    In a sandbox it runs in a worker process. `envs.sandbox.engines.fake` calls it in its own process. Raises OSError,
    and CallRefusal for a link into /proc.
    """
    try:
        folder, name = locate(path.rstrip("/"), follow=False)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        if name == ".":  # The root, or a path that ends in `.` or `..`. A folder cannot be removed under this name.
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        if is_folder(name, folder):
            remove_tree(folder, name, path)
            return
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            pass
    finally:
        os.close(folder)


def contains(folder: str, inside: str) -> bool:
    """Return True if `folder` is the folder `inside` or one of the folders above it. Both are absolute paths.

    The folders themselves are compared, because one folder has many paths. If `folder` is a link, the result is False:
    only the link would be removed. Also False if one of the two does not exist.
    """
    try:
        wanted = os.lstat(folder.rstrip("/") or "/")
        while not os.path.samestat(wanted, os.stat(inside)):
            above = os.path.dirname(inside)
            if above == inside:
                return False
            inside = above
        return True
    except OSError:
        return False


def remove_tree(folder: int, name: str, path: str) -> None:
    """Remove the folder `name` of an open folder, however deep it is. `path` is for error messages.

    Only one folder is open at a time, and nothing recurses: `shutil.rmtree` recurses for each level and keeps all
    levels open, so a deep tree would make it fail. Raises OSError with the path of the entry that cannot be removed.
    """
    here = os.open(name, FOLDER, dir_fd=folder)
    ahead = []
    """Names of the folders that are left to remove, one list for each level. The tree is entered through the last name
    of each list; `here` is the folder in which the names of the last list are."""
    try:
        ahead.append(remove_files(here))
        while True:
            if ahead[-1]:
                here = move_to(here, ahead[-1][-1])
                ahead.append(remove_files(here))
                continue
            ahead.pop()
            if not ahead:
                break
            here = move_to(here, "..")
            os.rmdir(ahead[-1][-1], dir_fd=here)
            ahead[-1].pop()
    except OSError as error:
        place = os.path.join(path, *[names[-1] for names in ahead if names])
        raise OSError(error.errno, os.strerror(error.errno or 0), place)
    finally:
        os.close(here)
    os.rmdir(name, dir_fd=folder)


def move_to(here: int, name: str) -> int:
    """Return the opened folder `name` of `here`, or its parent for `..`, and close `here`.

    Raises OSError, also if `name` is a link; `here` then stays open.
    """
    there = os.open(name, FOLDER, dir_fd=here)
    os.close(here)
    return there


def remove_files(here: int) -> "list[str]":
    """Remove everything in the open folder `here` but its folders, and return the names of these folders.

    Raises OSError if an entry cannot be removed.
    """
    folders = []
    for name in os.listdir(here):
        if stat.S_ISDIR(os.lstat(name, dir_fd=here).st_mode):
            folders.append(name)
        else:
            os.unlink(name, dir_fd=here)
    return folders


class BytesLeft:
    """Counter of the bytes that the files of a sent tree may still have.

    Holes of files count as well, because an archive has none.
    """

    def __init__(self, most: "int | None") -> None:
        """Set the limit, in bytes; None: no limit."""
        self.most = self.left = most

    def count(self, size: int) -> None:
        """Count a file of this size. Raises OSError if the tree exceeds its limit."""
        if self.left is not None:
            self.left -= size
            if self.left < 0:
                raise OSError(errno.EFBIG, "with this file of {} bytes it has over {}".format(size, self.most))


def send_tree(path: str, most: "int | None" = None) -> None:
    """Write a tree, or one file, to standard output as a tar stream. `most` limits the bytes of its files.

    A single file becomes an archive with one member named ".", so that it can be received under any name. A link to a
    tree is followed; links in the tree are sent as links. Runs in a worker process, which ends with it: descriptors are
    left open on errors. Raises OSError, which names the entry that failed, and CallRefusal for a link into /proc; the
    worker writes either to standard error.
    """
    import tarfile  # Not at the top: only workers need it, and each start of a sandbox would take longer.

    room = BytesLeft(most)

    with os.fdopen(1, "wb", PIECE) as sink, tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        folder, name = locate(path, follow=True)
        try:
            if not is_folder(name, folder):
                send_entry(archive, folder, name, ".", room)
                return
            places = FolderChain(os.open(name, FOLDER, dir_fd=folder), follow=False)
        except OSError as error:
            raise with_path(error, path)
        # Paths, below `path`, of the folders whose content is still to be sent.
        folders = [""]
        while folders:
            inside = folders.pop()
            try:
                here = os.open(".", FOLDER, dir_fd=places.open(inside))
            except OSError as error:
                raise with_path(error, os.path.join(path, inside).rstrip("/"))
            for name in sorted(os.listdir(here)):
                member = os.path.join(inside, name)
                try:
                    if send_entry(archive, here, name, member, room):
                        folders.append(member)
                except OSError as error:
                    raise with_path(error, os.path.join(path, member))
            os.close(here)


def with_path(error: OSError, path: str) -> OSError:
    """Return the error with the path at which it occurred. Errors of `tarfile` have a message, but no number."""
    return OSError(error.errno or errno.EIO, error.strerror or str(error), path)


def send_entry(archive: object, folder: int, name: str, member: str, room: BytesLeft) -> bool:
    """Send the entry `name` of an open folder as `member` of the archive. Returns True if it is a folder.

    A folder's content is sent by the caller. Hard links become separate files, links stay links, and sockets and
    devices are left out. Raises OSError if the entry cannot be read, is no regular file any more or is cut short
    meanwhile, or if the files exceed `room`.
    """
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
        room.count(status.st_size)
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
    """Unpack a tar stream from standard input into the folder `path`, or onto the file `path`.

    An archive of one file has the single member ".", as `send_tree` makes it. In an archive of a folder, that name is
    the folder itself (`tar -c .` writes it); its mode is ignored. Missing folders are created, also `path` for an
    archive without members. Runs in a worker process. Entries before a failed one stay.

    Raises OSError, CallRefusal or `tarfile.TarError`; the worker writes the error to standard error.
    """
    import tarfile

    places, folders, single = None, [], False
    with os.fdopen(0, "rb", PIECE) as source, tarfile.open(fileobj=source, mode="r|") as archive:
        for member in archive:
            if member.name == "." and member.isfile():
                single = True
                write = Write(path, member.mode, False)
                for piece in pieces_of(archive, member):
                    write.add(piece)
                write.commit()
                continue
            places = places or FolderChain(locate(path + "/", follow=True, make=True)[0], follow=True)
            if member.name == "." and member.isdir():
                continue
            receive_entry(archive, member, places)
            if member.isdir():
                folders.append(member)
            archive.members = []  # Otherwise it keeps all members in memory.
    if places is None and not single:  # An archive of an empty folder may have no members.
        os.close(locate(path + "/", follow=True, make=True)[0])
    # Modes of folders are set last: nothing could be created in a folder without write permission.
    for member in reversed(folders):
        here = places.open(member.name)
        os.chmod(".", member.mode, dir_fd=here)
        os.utime(".", (member.mtime, member.mtime), dir_fd=here)


def receive_entry(archive: object, member: object, places: FolderChain) -> None:
    """Create the entry `member` of an archive at its path below the folder of `places`.

    Links to folders on the way are followed, also out of that folder, but not into /proc. An existing file or link with
    this name is replaced. Raises OSError if the entry cannot be created, has `..` in its name, or is neither a file, a
    folder, a symbolic link nor a pipe; CallRefusal for a link into /proc.
    """
    folder, _, name = member.name.rpartition("/")
    known = member.isfile() or member.isdir() or member.issym() or member.isfifo()
    if ".." in member.name.split("/") or name in ("", ".") or not known:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), member.name)
    here = places.open(folder, make=True)
    if member.isdir():
        places.open(member.name, make=True)
        return
    try:
        os.unlink(name, dir_fd=here)  # Not written to, because it may be a link.
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
    else:
        umask = os.umask(0)  # A pipe gets its exact mode, as files do.
        try:
            os.mkfifo(name, member.mode & 0o777, dir_fd=here)
        finally:
            os.umask(umask)


def pieces_of(archive: object, member: object) -> object:
    """Yield the bytes of an archive's member in pieces; none for a folder."""
    content = archive.extractfile(member)
    piece = content.read(PIECE) if content else b""
    while piece:
        yield piece
        piece = content.read(PIECE)


def restore_tree(path: str) -> None:
    """Unpack the archive of a snapshot's image into `path`, the working directory of this sandbox.

    Does nothing if the image has no archive: the files are then in the image itself. Runs in a worker process, at the
    start of a sandbox whose image is a snapshot.
    """
    if os.path.exists(SNAPSHOT_FILE):
        os.dup2(os.open(SNAPSHOT_FILE, os.O_RDONLY), 0)
        receive_tree(path)
