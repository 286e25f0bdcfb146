"""Trees of files on this machine: packed for a sandbox, and unpacked from an untrusted one.

`envs.sandbox.sandbox.Files` packs for `upload` and unpacks for `download`, in a thread.

An archive from a sandbox is unpacked into a new folder, which replaces the target only if everything was correct. No
file is written through a link: links are created last, and only those that stay inside. Owners, special modes, devices,
pipes and hard links are never taken over. Files are packed through open folders, so that a folder which is replaced by
a link meanwhile leads nowhere. All functions block; run them in a thread.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
import tempfile
from pathlib import Path
from typing import IO

import msgspec

from flash.errors import SandboxError, SandboxFileError, SandboxLimitError

COPY_BYTES = 1 << 18
"""Bytes that are copied at a time."""
HEADER_BYTES = 1 << 20
"""Most bytes of an archive that are read at once. Headers of names and attributes declare their own length."""
MOST_LINKS = 40
"""Most links that one path may lead through; Linux has the same limit."""
HEAD_BYTES = 2048
"""Bytes of an archive that one entry takes beside its content: a header with a long name, and padding."""
FILE_MEMBER = "."
"""Name of the only member of an archive that holds one file instead of a tree."""
MACHINE_FAULTS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE,
    errno.EROFS, errno.EACCES, errno.EPERM,
)  # fmt: skip
"""Numbers of the errors that no content of a tree causes: this machine has no room, descriptor or memory left, or its
disk fails or may not be used."""
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Flags for opening files for an upload. A pipe that has replaced a file must not block."""


class TreeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one upload or download."""

    total: int = 1 << 28
    """Total bytes of all files, without the headers of the archive."""
    entries: int = 20_000
    """Number of files, folders and links, including folders that exist only in the paths of other entries."""
    depth: int = 200
    """Depth of nested folders. Python's own functions that copy or remove a tree recurse once per level."""


def pack(source: Path, sink: IO[bytes], limits: TreeLimits) -> None:
    """Write a file, or the content of a folder, to `sink` as a tar archive.

    Raises:
        SandboxFileError: the source cannot be read, or has an entry that is neither a file, a folder nor a link; or
            the sink cannot be written.
        SandboxLimitError: the source exceeds the limits.
        SandboxError: this machine is at fault (`MACHINE_FAULTS`), for example because the disk of the sink is full.
    """
    try:
        # The end of this block writes the end of the archive, for which the sink may have no room.
        with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
            packing = _Packing(archive, limits)
            if source.is_dir():
                packing.tree(os.open(source, _READ | os.O_DIRECTORY))
            else:
                packing.file(FILE_MEMBER, os.open(source, _READ))
    except (OSError, tarfile.TarError) as error:
        raise _local_error(f"{source} cannot be uploaded: {error}", error) from error


def _local_error(message: str, error: Exception) -> SandboxError:
    """Return the error of a transfer that failed at a file of this machine.

    Environments count a SandboxFileError as a fault of the policy's files, and give no reward for them. So a fault of
    this machine is a plain SandboxError, and only errors such as a name that is too long are left for the other class.
    """
    at_fault = isinstance(error, OSError) and error.errno in MACHINE_FAULTS
    return SandboxError(message) if at_fault else SandboxFileError(message)


class _Packing:
    """State of one call of `pack`: the archive, and its entries so far."""

    def __init__(self, archive: tarfile.TarFile, limits: TreeLimits) -> None:
        """Begin with an empty `archive`, which is open for writing."""
        self._archive = archive
        self._limits = limits
        self._bytes = 0
        """Bytes of all files so far."""
        self._entries = 0
        """Number of files, folders and links so far."""

    def tree(self, top: int) -> None:
        """Add the content of the open folder `top`, and close it.

        Raises SandboxLimitError if it is too deep, OSError if a folder cannot be read, and the errors of `entry`.
        """

        def complain(error: OSError) -> None:
            """Raise an error of `os.fwalk`, which by default leaves out folders that it cannot read."""
            raise error

        try:
            # If a folder was replaced by a link since it was listed, `os.fwalk` does not follow the link.
            for path, folders, files, folder in os.fwalk(".", dir_fd=top, onerror=complain):
                check_depth(path.count("/"), "upload", self._limits)
                for name in sorted(folders + files):
                    self.entry(os.path.normpath(os.path.join(path, name)), name, folder)
        finally:
            os.close(top)

    def entry(self, member: str, name: str, folder: int) -> None:
        """Add the entry `name` of the open folder `folder` as `member` of the archive. Links are not followed.

        Raises OSError if it cannot be read, SandboxLimitError beyond the limits, and the errors of `file`.
        """
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            info = self._info(member, status)
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=folder)
            self._add(info)
        elif stat.S_ISDIR(status.st_mode):
            info = self._info(member, status)
            info.type = tarfile.DIRTYPE
            self._add(info)
        else:
            self.file(member, os.open(name, _READ | os.O_NOFOLLOW, dir_fd=folder))

    def file(self, member: str, descriptor: int) -> None:
        """Add the open file `descriptor` as `member` of the archive, and close it.

        Raises SandboxFileError if it is no regular file, SandboxLimitError beyond the limits, and OSError if the file
        becomes shorter meanwhile.
        """
        with open(descriptor, "rb") as content:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise SandboxFileError(f"{member} is neither a file, a folder nor a link")
            info = self._info(member, status)
            info.size = status.st_size
            self._add(info, content)

    def _info(self, member: str, status: os.stat_result) -> tarfile.TarInfo:
        """Return the header of an entry, with the permissions and the time of the original."""
        info = tarfile.TarInfo(member)
        info.mode, info.mtime = stat.S_IMODE(status.st_mode), status.st_mtime
        return info

    def _add(self, info: tarfile.TarInfo, content: IO[bytes] | None = None) -> None:
        """Add one entry to the archive; `content` is the open file of a regular one.

        Raises SandboxLimitError if the upload then exceeds the limits.
        """
        self._entries += 1
        if self._entries > self._limits.entries:
            raise SandboxLimitError(f"the upload has more than {self._limits.entries} entries")
        self._bytes += info.size
        if self._bytes > self._limits.total:
            raise SandboxLimitError(f"{info.name} brings the upload over {self._limits.total} bytes")
        self._archive.addfile(info, content)
        self._archive.members = []  # type: ignore[attr-defined]  # else the archive keeps every member


def unpack(source: IO[bytes], target: Path, limits: TreeLimits, *, what: str = "download") -> None:
    """Unpack the archive `source`, which a sandbox sent, as `target`, which must not exist or be an empty folder.

    An archive of one file may replace a file. `what` names the transfer in error messages.

    Raises:
        SandboxLimitError: the archive is too large or damaged, names a file or link twice, or tries to leave the tree.
        SandboxFileError: the target exists or cannot be written.
        SandboxError: this machine is at fault (`MACHINE_FAULTS`), for example because the disk of the target is full.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        place = tempfile.TemporaryDirectory(prefix=".flash-download-", dir=target.parent)
    except OSError as error:
        raise _local_error(f"{target} cannot be written: {error}", error) from error
    with place as folder:
        root = Path(folder, "root")
        try:
            single = _Unpacking(root, limits, what).run(source)
            if single:
                (root / "file").replace(target)
                return
            if target.is_symlink() or target.is_file() or (target.exists() and any(target.iterdir())):
                raise SandboxFileError(f"{target} exists; {what} into a new or empty folder")
            root.chmod(0o755)
            root.replace(target)
        except (tarfile.TarError, ValueError, OverflowError, RecursionError, EOFError) as error:
            # Errors of `tarfile` for headers that no archive program writes.
            raise SandboxLimitError(f"the {what} is a damaged archive: {error}") from error
        except OSError as error:
            raise _local_error(f"{target} cannot be written: {error}", error) from error


class _Bounded:
    """File object of an archive that limits the length of each read."""

    def __init__(self, source: IO[bytes], what: str) -> None:
        """Wrap the archive `source`. `what` names the transfer in error messages."""
        self._source = source
        self._what = what
        self.seek = source.seek
        self.tell = source.tell

    def read(self, count: int) -> bytes:
        """Return at most `count` bytes. Raises SandboxLimitError if `count` is too large."""
        if not 0 <= count <= HEADER_BYTES:
            raise SandboxLimitError(f"the {self._what} has a header of {count} bytes")
        return self._source.read(count)


class _Unpacking:
    """State of one call of `unpack`: the new folder, and the entries of the archive so far."""

    def __init__(self, root: Path, limits: TreeLimits, what: str) -> None:
        """Begin without entries. `run` creates the folder `root`. `what` names the transfer in error messages."""
        self._root = root
        self._what = what
        self._limits = limits
        self._bytes = 0
        """Bytes of all files so far."""
        self._entries = 0
        """Number of files, folders and links so far."""
        self._folders = {root}
        """Folders that this archive has created."""
        self._links: dict[Path, str] = {}
        """Targets of links that are created at the end, by path."""

    def run(self, source: IO[bytes]) -> bool:
        """Unpack the archive. Returns True if it holds one file instead of a tree.

        Links are created at the end, so that no entry is written through one. Raises SandboxLimitError for an archive
        that `unpack` refuses, and the errors of `tarfile` and of writing.
        """
        self._root.mkdir()
        single = False
        with tarfile.open(fileobj=_Bounded(source, self._what), mode="r:") as archive:  # type: ignore[arg-type]
            for count, member in enumerate(archive, start=1):
                single = member.name == FILE_MEMBER and count == 1 and member.isreg()
                self._unpack_entry(archive, member, self._root / "file" if single else self._place(member.name))
                archive.members = []  # type: ignore[attr-defined]  # else the archive keeps every member
                if single:
                    break
        for path, link in self._links.items():
            if not self._stays(path):
                name = path.relative_to(self._root)
                raise SandboxLimitError(f"the link {name} leads out of the {self._what}: {link}")
            path.symlink_to(link)
        return single

    def _stays(self, path: Path) -> bool:
        """Return True if a link leads to a path below the root, whether that path exists or not.

        The link is followed step by step, and may not step out of the root even to return into it: the root still has
        another name than the target, and files beside the target do not belong to the tree.
        """
        here, ahead, followed = path.parent, self._links[path].split("/")[::-1], 0
        while ahead:
            name = ahead.pop()
            if name == "..":
                if here == self._root:
                    return False
                here = here.parent
            elif here / name in self._links:
                followed += 1
                if followed > MOST_LINKS:
                    return False
                ahead += self._links[here / name].split("/")[::-1]
            else:
                here /= name
        return True

    def _place(self, name: str) -> Path:
        """Return the path below the root for an entry. Raises SandboxLimitError if the name could lead out of it."""
        parts = name.split("/")
        if name.startswith("/") or not name or any(part in ("", "..", ".") or "\0" in part for part in parts):
            raise SandboxLimitError(f"the {self._what} has an entry with the name {name!r}")
        return self._root.joinpath(*parts)

    def _unpack_entry(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
        """Unpack one entry as `path`. A link is only recorded, and `run` creates it at the end.

        Raises SandboxLimitError for an entry that a tree may not have, and for a path that was used before; only a
        folder may be named again.
        """
        if not member.isdir():
            self._count()
        folder = path if member.isdir() else path.parent
        check_depth(len(folder.parts) - len(self._root.parts), self._what, self._limits)
        self._folder(folder)
        if member.issym():
            if os.path.isabs(member.linkname) or "\0" in member.linkname:
                raise SandboxLimitError(f"the link {member.name} leads out of the {self._what}: {member.linkname}")
            self._check_new(path)
            self._links[path] = member.linkname
        elif member.isreg():
            self._file(archive, member, path)
        elif member.islnk():
            raise SandboxLimitError(
                f"{member.name} is a second name of {member.linkname}; send it as a file of its own"
            )
        elif not member.isdir():
            raise SandboxLimitError(f"{member.name} is neither a file, a folder nor a link")

    def _folder(self, path: Path) -> None:
        """Create a folder and its missing parents. Its mode in the archive is ignored.

        Each counts as an entry: one name may imply thousands of folders. Raises SandboxLimitError for too many entries,
        or if a file or link has the path of a folder.
        """
        missing: list[Path] = []
        while path not in self._folders:
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            self._count()
            self._check_new(folder)
            folder.mkdir()
            self._folders.add(folder)

    def _check_new(self, path: Path) -> None:
        """Raise SandboxLimitError if an earlier entry of the archive has this path."""
        if path in self._links or os.path.lexists(path):
            raise SandboxLimitError(f"the {self._what} has {path.relative_to(self._root)} twice")

    def _count(self) -> None:
        """Count one entry. Raises SandboxLimitError if there are too many."""
        self._entries += 1
        if self._entries > self._limits.entries:
            raise SandboxLimitError(f"the {self._what} has more than {self._limits.entries} entries")

    def _file(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
        """Write the content of one file. Of its mode, only the bits 0o755 are taken over; its owner may always write.

        Raises SandboxLimitError if the file is sparse, too large or cut off, or if its path was used before.
        """
        if member.sparse is not None:  # type: ignore[attr-defined]
            # The archive holds few bytes of a sparse file that claims to be huge. Archives of our agent have none.
            raise SandboxLimitError(f"{member.name} is a sparse file")
        self._bytes += member.size
        if member.size < 0 or self._bytes > self._limits.total:
            raise SandboxLimitError(f"the {self._what} has more than {self._limits.total} bytes")
        self._check_new(path)
        content = archive.extractfile(member)
        assert content is not None
        with content, path.open("xb") as file:
            left = member.size
            while piece := content.read(min(COPY_BYTES, left)):
                left -= len(piece)
                file.write(piece)
        if left:
            raise SandboxLimitError(f"the {self._what} is a damaged archive: {member.name} is cut off")
        path.chmod(stat.S_IMODE(member.mode) & 0o755 | 0o600)


def check_depth(depth: int, what: str, limits: TreeLimits) -> None:
    """Check the depth of nested folders. Raises SandboxLimitError beyond `limits.depth`. `what` names the transfer."""
    if depth > limits.depth:
        raise SandboxLimitError(f"the {what} has more than {limits.depth} folders in one another; make it flatter")
