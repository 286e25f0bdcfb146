"""Files and trees against hostile archives, links and races, in both directions."""

from __future__ import annotations

import io
import os
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.sandbox.trees import TreeLimits, pack, unpack
from flash.errors import SandboxError, SandboxFileError, SandboxLimitError
from tests.envs.sandbox.raw import bare, bearer
from tests.envs.sandbox.services import SPEC, TOKEN, running

pytestmark = pytest.mark.anyio

LIMITS = TreeLimits(total=1 << 20, entries=100)
SECRET = b"secret of the host"


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0, **more) -> bytes:
    """One header with its content."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    for field, value in more.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT)


END = bytes(1024)


def pax(**headers: str) -> bytes:
    """An extended header for the member that follows."""
    info = tarfile.TarInfo("x")
    info.pax_headers = headers
    return info.create_pax_header(info.get_info(), "utf-8")[:-512]


BOMBS = {
    "many files": b"".join(member(f"f{n}") for n in range(200)) + END,
    "many folders in one name": pax(path="/".join("d" * 900)) + member("x") + END,
    "folders in many names": b"".join(member("/".join([str(n)] * 20)) for n in range(10)) + END,
    "many links": b"".join(member(f"l{n}", tarfile.SYMTYPE, "x") for n in range(200)) + END,
    "a huge size": member("big", size=1 << 40) + END,
    "a huge size in an extended header": pax(size=str(1 << 40)) + member("big") + END,
    "a negative size": member("big", size=-(1 << 20)) + END,
    "a sparse file": member("big", tarfile.GNUTYPE_SPARSE, size=0)[:483] + b"77777777777\0" + bytes(17) + END,
    "a sparse file of the new form": pax(
        **{"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "big", "GNU.sparse.realsize": "9" * 12}
    )
    + member("big")
    + END,
    "a long extended header": member("x", tarfile.XHDTYPE, size=1 << 30) + bytes(4096),
    "a long name": member("././@LongLink", tarfile.GNUTYPE_LONGNAME, size=1 << 30) + bytes(4096),
    "a chain of extended headers": pax(path="x") * 3000 + member("x") + END,
    "a chain of links": b"".join(member(f"l{n}", tarfile.SYMTYPE, f"l{n + 1}") for n in range(90)) + END,
    "a hard link to the host": member("passwd", tarfile.LNKTYPE, "/etc/passwd") + END,
    "a hard link out of the tree": member("x", tarfile.LNKTYPE, "../../secret") + END,
    "a hard link to a file of its own": member("a") + member("b", tarfile.LNKTYPE, "a") + END,
    "a device": member("sda", tarfile.BLKTYPE, devmajor=8) + END,
    "a character device": member("mem", tarfile.CHRTYPE, devmajor=1, devminor=1) + END,
    "a pipe": member("pipe", tarfile.FIFOTYPE) + END,
    "an absolute name": member("/etc/cron.d/x") + END,
    "an absolute name in an extended header": pax(path="/etc/cron.d/x") + member("x") + END,
    "dots": member("a/../../x") + END,
    "a name with a zero byte": pax(path="a\0b") + member("x") + END,
    "a link with a zero byte": pax(linkpath="a\0b") + member("x", tarfile.SYMTYPE) + END,
    "a link above": member("up", tarfile.SYMTYPE, "..") + member("up/x") + END,
    "a link to a link above": member("a", tarfile.SYMTYPE, "b/..") + member("b", tarfile.SYMTYPE, ".") + END,
    "an absolute link": member("etc", tarfile.SYMTYPE, "/etc") + END,
    "a folder after its link": member("d", tarfile.SYMTYPE, "/tmp") + member("d", tarfile.DIRTYPE) + END,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_hostile_archive_leaves_nothing_behind(tmp_path, name):
    (tmp_path / "secret").write_bytes(SECRET)
    with pytest.raises((SandboxLimitError, SandboxFileError)):
        unpack(io.BytesIO(BOMBS[name]), tmp_path / "in" / "target", LIMITS)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["in", "secret"]
    assert (tmp_path / "secret").read_bytes() == SECRET


@pytest.mark.parametrize("name", ["a sparse file", "an absolute name", "a hard link to the host", "a device"])
async def test_a_hostile_archive_reaches_nothing_but_the_sandbox_of_its_sender(tmp_path, name):
    async with (
        running(tmp_path) as world,
        world.client.acquire(SPEC) as sandbox,
        bare(world, **bearer(TOKEN)) as client,
    ):
        path = f"/v1/sandboxes/{sandbox.sandbox_id}/tree"
        answer = await client.put(path, params={"path": "t"}, content=BOMBS[name])
        assert answer.status_code in (204, 404, 413)
        assert (await sandbox.run("echo on", timeout=20)).stdout == b"on\n"
        assert [entry.name for entry in await sandbox.list()] in ([], ["t"])
    assert not os.path.exists("/etc/cron.d/x")  # noqa: ASYNC240


VALID = io.BytesIO()
with tarfile.open(fileobj=VALID, mode="w", format=tarfile.PAX_FORMAT) as _archive:
    for _name, _kind, _link in (("d", b"5", ""), ("d/f", b"0", ""), ("d/l", b"2", "f"), ("ü" * 90, b"0", "")):
        _info = tarfile.TarInfo(_name)
        _info.type, _info.linkname = _kind, _link
        _archive.addfile(_info)


@given(st.lists(st.tuples(st.integers(0, 4000), st.binary(min_size=1, max_size=20)), max_size=6))
def test_an_archive_with_any_bytes_changed_stays_inside(tmp_path_factory, changes):
    data = bytearray(VALID.getvalue())
    for at, piece in changes:
        data[at : at + len(piece)] = piece
        header = at // 512 * 512
        block = data[header : header + 512]
        block[148:156] = b" " * 8
        data[header + 148 : header + 156] = b"%06o\0 " % sum(block)
    folder = tmp_path_factory.mktemp("fuzz")
    try:
        unpack(io.BytesIO(data), folder / "in" / "target", LIMITS)
    except SandboxError:
        assert list((folder / "in").iterdir()) == []
    assert [path.name for path in folder.iterdir()] == ["in"]
    for path in folder.rglob("*"):
        assert path.resolve().is_relative_to(folder / "in")


# ---- links and races


@contextmanager
def swapping(place: Path, secret: Path) -> Iterator[None]:
    """A folder that is a link to another one half of the time."""
    stop = threading.Event()
    aside = place.with_name("aside")

    def swap() -> None:
        while not stop.is_set():
            place.rename(aside)
            place.symlink_to(secret)
            place.unlink()
            aside.rename(place)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_an_upload_does_not_follow_a_folder_that_becomes_a_link(tmp_path):
    """Somebody else may write to the tree that is uploaded; what it links to is not theirs to send."""
    secret = tmp_path / "host"
    secret.mkdir()
    (secret / "data").write_bytes(SECRET)
    tree = tmp_path / "tree"
    (tree / "folder").mkdir(parents=True)
    (tree / "folder" / "data").write_bytes(b"public")
    with swapping(tree / "folder", secret):
        for _ in range(200):
            sink = io.BytesIO()
            try:
                pack(tree, sink, LIMITS)
            except SandboxFileError:
                continue  # It was neither at that moment.
            assert SECRET not in sink.getvalue()


def test_a_file_that_becomes_something_else_is_not_uploaded(tmp_path):
    for name, make in (("pipe", os.mkfifo), ("device", lambda path: os.mknod(path, 0o20600, os.makedev(1, 5)))):
        tree = tmp_path / name
        tree.mkdir()
        make(tree / "x")
        with pytest.raises(SandboxFileError, match="neither a file"):
            pack(tree, io.BytesIO(), LIMITS)
    with pytest.raises(SandboxLimitError, match="entries"):
        pack(_many(tmp_path / "many"), io.BytesIO(), LIMITS)


def _many(folder: Path) -> Path:
    folder.mkdir()
    for number in range(LIMITS.entries + 1):
        (folder / str(number)).touch()
    return folder


def test_a_tree_is_uploaded_through_the_link_that_was_named(tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "f").write_bytes(b"content")
    (tmp_path / "link").symlink_to("tree")
    sink = io.BytesIO()
    pack(tmp_path / "link", sink, LIMITS)
    sink.seek(0)
    with tarfile.open(fileobj=sink) as archive:
        assert archive.getnames() == ["f"]


async def test_links_of_the_sandbox_lead_to_the_sandbox_only(bench, tmp_path):
    """A link is followed inside, where the sandbox's own files are; nothing of this machine is read or written."""
    (tmp_path / "secret").write_bytes(SECRET)
    async with bench.sandbox() as sandbox:
        for target in (tmp_path, tmp_path / "secret"):
            await sandbox.run(["ln", "-sfn", str(target), "out"], timeout=20)
            if bench.isolated:
                for path in ("out", "out/secret", str(tmp_path / "secret")):
                    with pytest.raises(SandboxFileError):
                        await sandbox.read(path)
            await sandbox.write("out", b"replaced")
            assert await sandbox.read("out") == b"replaced"
            await sandbox.run(["ln", "-sfn", str(target), "out"], timeout=20)
            with pytest.raises(SandboxError):
                await sandbox.download(".", tmp_path / "down")
            assert not (tmp_path / "down").exists()
            await sandbox.remove("out")
    assert (tmp_path / "secret").read_bytes() == SECRET
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


async def test_a_folder_that_becomes_a_link_inside_does_no_harm(bench, tmp_path):
    """Commands of the sandbox change its tree while it is read and written: every call answers, nothing gets out."""
    (tmp_path / "secret").write_bytes(SECRET)
    swap = "while :; do mv d e; ln -s %s d; rm d; mv e d; done 2>/dev/null"
    async with bench.sandbox() as sandbox:
        await sandbox.run("mkdir d; echo inside > d/secret", timeout=20)
        job = await sandbox.start(swap % tmp_path)
        for number in range(10):
            for call in (
                sandbox.read("d/secret"),
                sandbox.write("d/new", b"x"),
                sandbox.download(".", tmp_path.with_name(f"{tmp_path.name}-{number}")),
                sandbox.list("d"),
                sandbox.remove("d/new"),
            ):
                try:
                    await call
                except SandboxError:
                    continue
        await job.signal("SIGKILL")
        if bench.isolated:
            assert [path.name for path in tmp_path.iterdir()] == ["secret"]
            for path in tmp_path.parent.glob(f"{tmp_path.name}-*"):
                assert SECRET not in b"".join(each.read_bytes() for each in path.rglob("*") if each.is_file())
    assert (tmp_path / "secret").read_bytes() == SECRET


# ---- names


NAMES = ("\udcff\udcfe", "ü", "with space", "new\nline", "a+b&c=d?e#f%41", "\\", "\udcc3(", "x\udc80")
"""Names of files, as this process has them; some are no UTF-8."""


async def test_a_name_means_the_same_file_everywhere(tmp_path):
    """Listed, read, written, uploaded, downloaded and used in commands, here and over HTTP."""
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox:
        for number, name in enumerate(NAMES):
            await sandbox.write(name, str(number).encode())
        assert {entry.name for entry in await sandbox.list()} == set(NAMES)
        [lease] = world.pool.state.leases.all()
        inside = world.pool.handle(lease)
        assert {entry.name for entry in await inside.list()} == set(NAMES)
        for number, name in enumerate(NAMES):
            content = str(number).encode()
            assert await sandbox.read(name) == await inside.read(name) == content
            assert (await sandbox.run(["cat", name], timeout=10)).stdout == content
            told = await sandbox.run('cat "$N"; printf %s "$N"', env={"N": name}, timeout=10)
            assert told.stdout == content + os.fsencode(name)
        async with sandbox.session() as session:
            assert (await session.run("printf '\udcff'", timeout=10)).stdout == b"\xff"
        await sandbox.download(".", tmp_path / "down")
        assert set(os.listdir(tmp_path / "down")) == set(NAMES)
        await sandbox.upload(tmp_path / "down", "up")
        assert {entry.name for entry in await sandbox.list("up")} == set(NAMES)
        for name in NAMES:
            await sandbox.remove(name)
        assert [entry.name for entry in await sandbox.list()] == ["up"]
        for name in ("a\0b", "\ud800", ""):
            with pytest.raises(SandboxError):
                await sandbox.write(name, b"")
            with pytest.raises(SandboxError):
                await sandbox.run(["echo", name or "\0"], timeout=10)
        with pytest.raises(SandboxFileError):
            await sandbox.read("\udcff missing")


async def test_names_travel_as_the_documents_say(tmp_path):
    async with (
        running(tmp_path) as world,
        world.client.acquire(SPEC) as sandbox,
        bare(world, **bearer(TOKEN)) as client,
    ):
        base = f"/v1/sandboxes/{sandbox.sandbox_id}"
        await sandbox.write("\udcff.txt", b"content")
        listed = await client.get(f"{base}/entries")
        assert [entry["name"] for entry in listed.json()["entries"]] == ["\0ff.txt"]
        assert rb'"\u0000ff.txt"' in listed.content
        assert (await client.get(f"http://sandboxes{base}/files?path=%ff.txt")).content == b"content"
        ran = await client.post(f"{base}/run", json={"command": ["cat", "\0ff.txt"], "timeout": 10})
        assert ran.json()["exit_code"] == 0
        for wrong in ("a\0", "\0zz", "\0" + "41"):
            answer = await client.post(f"{base}/run", json={"command": wrong, "timeout": 10})
            assert (answer.status_code, answer.json()["cause"]) == (422, "SandboxRefusedError")
        missing = await client.get(f"http://sandboxes{base}/files?path=%ff.missing")
        assert missing.status_code == 404
        assert r"\udcff.missing" in missing.json()["detail"]
