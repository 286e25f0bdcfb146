"""Archives of a sandbox are not trusted: nothing of them lands outside of the target, or grows beyond the caps."""

from __future__ import annotations

import errno
import io
import os
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.sandbox.trees import TreeLimits, pack, unpack
from flash.errors import SandboxError, SandboxFileError, SandboxLimitError

LIMITS = TreeLimits(total=1 << 20, entries=50)


def archive(*members, content=b"evil"):
    """A tar archive of (name, type, link)."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for name, kind, link in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, link, 0o6777
            member.size = len(content) if kind == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(content))
    sink.seek(0)
    return sink


FILE, LINK, HARD, FOLDER = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


@pytest.mark.parametrize(
    "members",
    [
        [("../outside", FILE, "")],
        [("/tmp/flash-outside", FILE, "")],
        [("a/../../outside", FILE, "")],
        [("./outside", FILE, "")],
        [("", FILE, "")],
        [("link", LINK, "/etc")],
        [("link", LINK, "../..")],
        [("link", LINK, "..")],
        [("link", LINK, ".."), ("link/outside", FILE, "")],
        [("a", FOLDER, ""), ("a/up", LINK, ".."), ("b", LINK, "a/up/..")],
        [("one", LINK, "two/.."), ("two", LINK, "."), ("three", LINK, "one/two/..")],
        [("link", LINK, "../root/secret")],
        [("link", LINK, "../root")],
        [("a", FOLDER, ""), ("a/link", LINK, "../../target/file")],
        [("loop", LINK, "pool"), ("pool", LINK, "loop")],
        [("hard", HARD, "/etc/passwd")],
        [("device", tarfile.CHRTYPE, "")],
        [("pipe", tarfile.FIFOTYPE, "")],
        [("twice", FILE, ""), ("twice", FILE, "")],
        [("twice", LINK, "x"), ("twice", LINK, "y")],
        [(str(n), FOLDER, "") for n in range(60)],
    ],
)
def test_what_leaves_the_tree_is_refused_and_nothing_is_left(tmp_path, members):
    target = tmp_path / "in" / "target"
    with pytest.raises((SandboxLimitError, SandboxFileError)):
        unpack(archive(*members), target, LIMITS)
    assert list((tmp_path / "in").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


NAMES = st.sampled_from(["root", "target", "a", "b", "file"])
STEPS = st.sampled_from(
    ["root", "a", "b/file", "a/..", "a/../b", "..", "../a", "../root", "../root/file", "../../target/a"]
)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
MEMBERS = st.lists(st.tuples(PATHS, st.sampled_from([FOLDER, LINK, LINK, FILE]), STEPS), max_size=5)


@settings(max_examples=100)
@given(MEMBERS)
def test_no_link_of_a_tree_that_is_taken_leads_to_its_neighbours(members):
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder)
        for neighbour in ("root", "a", "b", "file"):
            (parent / neighbour).mkdir()
            (parent / neighbour / "file").write_text("secret")
        target = parent / "target"
        try:
            unpack(archive(*members), target, LIMITS)
        except (SandboxLimitError, SandboxFileError):
            return
        for path in target.rglob("*"):
            assert Path(os.path.realpath(path)).is_relative_to(os.path.realpath(target)), members


def test_a_refusal_says_what_it_was_and_of_what(tmp_path):
    with pytest.raises(SandboxLimitError, match="hard is a second name of other"):
        unpack(archive(("hard", HARD, "other")), tmp_path / "target", LIMITS)


@pytest.mark.parametrize(
    "members",
    [
        [("twice", LINK, "x"), ("twice", LINK, "y")],
        [("twice", FILE, ""), ("twice", FILE, "")],
        [("twice", FILE, ""), ("twice", FOLDER, "")],
        [("twice", FOLDER, ""), ("twice", FILE, "")],
        [("twice", FILE, ""), ("twice/inside", FILE, "")],
        [("twice", FILE, ""), ("twice", LINK, "x")],
        [("twice", LINK, "x"), ("twice", FILE, "")],
        [("twice", LINK, "x"), ("twice/inside", FILE, "")],
    ],
)
def test_an_archive_that_names_an_entry_twice_is_refused_as_such(tmp_path, members):
    with pytest.raises(SandboxLimitError, match="the upload has twice twice"):
        unpack(archive(*members), tmp_path / "target", LIMITS, what="upload")


def test_a_bomb_of_zeros_is_stopped(tmp_path):
    with pytest.raises(SandboxLimitError, match="bytes"):
        unpack(archive(("big", FILE, ""), content=b"\0" * (2 << 20)), tmp_path / "target", LIMITS)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_archive_is_refused(tmp_path):
    data = archive(("file", FILE, "")).getvalue()
    for broken in (b"", b"nonsense" * 200, data[:700], data[:100] + b"\xff" * 412 + data[512:]):
        with pytest.raises(SandboxLimitError):
            unpack(io.BytesIO(broken), tmp_path / "target", LIMITS)
    assert list(tmp_path.iterdir()) == []


def test_a_tree_comes_back_as_it_went(tmp_path):
    source = tmp_path / "source"
    (source / "folder" / "empty").mkdir(parents=True)
    (source / "folder" / "file").write_bytes(b"\0\xff content")
    (source / "folder" / "run").write_text("#!/bin/sh\n")
    (source / "folder" / "run").chmod(0o755)
    (source / "link").symlink_to("folder/file")
    (source / "dangling").symlink_to("nothing")
    sink = io.BytesIO()
    pack(source, sink, LIMITS)
    sink.seek(0)
    unpack(sink, tmp_path / "target", LIMITS)
    target = tmp_path / "target"
    assert (target / "link").read_bytes() == b"\0\xff content"
    assert (target / "folder" / "run").stat().st_mode & 0o777 == 0o755
    assert (target / "folder" / "empty").is_dir()
    assert (target / "dangling").is_symlink()


def test_modes_that_give_rights_away_are_not_taken_over(tmp_path):
    unpack(archive(("file", FILE, "")), tmp_path / "target", LIMITS)
    assert (tmp_path / "target" / "file").stat().st_mode & 0o7777 == 0o755


def test_a_download_does_not_write_over_a_folder_in_use(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").touch()
    with pytest.raises(SandboxFileError, match="new or empty"):
        unpack(archive(("file", FILE, "")), tmp_path / "target", LIMITS)
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["mine"]


def test_a_download_to_where_no_folder_can_be_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SandboxFileError, match="cannot be written"):
        unpack(archive(("file", FILE, "")), tmp_path / "file" / "target", LIMITS)


def test_what_is_too_large_is_not_uploaded(tmp_path):
    (tmp_path / "big").write_bytes(b"\0" * (2 << 20))
    with pytest.raises(SandboxLimitError, match="over"):
        pack(tmp_path, io.BytesIO(), LIMITS)


def test_only_the_content_of_files_counts_towards_the_limit_of_an_upload(tmp_path):
    for number in range(10):
        (tmp_path / str(number)).write_bytes(b"12345")
    pack(tmp_path, io.BytesIO(), TreeLimits(total=50))
    with pytest.raises(SandboxLimitError, match="over 49 bytes"):
        pack(tmp_path, io.BytesIO(), TreeLimits(total=49))


class SmallSink(io.BytesIO):
    """A file on a disk with room for so many bytes."""

    def __init__(self, room):
        super().__init__()
        self.room = room

    def write(self, data):
        if self.tell() + len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("room", range(0, 10240, 512))
def test_a_sink_without_room_for_any_part_of_the_archive_is_a_typed_error(tmp_path, room):
    (tmp_path / "file").write_bytes(b"12345")
    with pytest.raises(SandboxError, match=r"cannot be uploaded: .*No space left") as caught:
        pack(tmp_path / "file", SmallSink(room), LIMITS)
    assert type(caught.value) is SandboxError
    pack(tmp_path / "file", SmallSink(10240), LIMITS)


class FailingFile(io.BytesIO):
    """A file on a machine where each access fails with one error."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def write(self, data):
        raise OSError(self.number, os.strerror(self.number))

    def read(self, size=-1):
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_fault_of_this_machine_is_not_taken_for_one_of_the_files(tmp_path, number):
    (tmp_path / "file").write_bytes(b"12345")
    with pytest.raises(SandboxError, match="cannot be uploaded") as up:
        pack(tmp_path / "file", FailingFile(number), LIMITS)
    with pytest.raises(SandboxError, match="cannot be written") as down:
        unpack(FailingFile(number), tmp_path / "target", LIMITS)
    assert type(up.value) is type(down.value) is SandboxError


def test_a_path_that_is_too_long_for_this_machine_is_a_fault_of_the_files(tmp_path):
    name = "/".join(["n" * 200] * 30)
    with pytest.raises(SandboxFileError, match="File name too long"):
        unpack(archive((name, FILE, "")), tmp_path / "target", LIMITS)


def test_what_is_too_deep_is_neither_uploaded_nor_taken_out(tmp_path):
    limits = TreeLimits(depth=3)
    (tmp_path / "source" / "a" / "b" / "c").mkdir(parents=True)
    pack(tmp_path / "source", io.BytesIO(), limits)
    unpack(archive(("a/b/c", FOLDER, "")), tmp_path / "target", limits)
    (tmp_path / "source" / "a" / "b" / "c" / "d").mkdir()
    with pytest.raises(SandboxLimitError, match="the upload has more than 3 folders in one another"):
        pack(tmp_path / "source", io.BytesIO(), limits)
    with pytest.raises(SandboxLimitError, match="the download has more than 3 folders in one another"):
        unpack(archive(("a/b/c/d/file", FILE, "")), tmp_path / "other", limits)
    assert not (tmp_path / "other").exists()
