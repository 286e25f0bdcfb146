"""The journal on disk: what it remembers, and what it refuses to take for one."""

from __future__ import annotations

import msgspec
import pytest

from envs.sandbox.api import Spec
from envs.sandbox.pool.journal import Entry, SqliteJournal
from flash.errors import ConfigError, SandboxError
from tests.full_disk import small_disk


def entry(lease: str, sandbox_id: str = "") -> Entry:
    return Entry(
        lease=lease,
        owner="o",
        token="t",
        spec=Spec(image="i", env={"A": "b"}),
        priority=1,
        on_lost="fail",
        lease_s=None,
        hard_until=5.0,
        sandbox_id=sandbox_id,
    )


@pytest.mark.anyio
async def test_the_journal_remembers_and_forgets(tmp_path):
    journal = SqliteJournal(tmp_path / "j")
    await journal.leases.put("a", entry("a"))
    await journal.leases.put("b", entry("b"))
    await journal.leases.put("a", entry("a", "box"))
    await journal.leases.drop("b")
    # As after kill -9: nobody closed it.
    again = SqliteJournal(tmp_path / "j")
    assert await again.leases.load() == [entry("a", "box")]
    assert (tmp_path / "j").stat().st_mode & 0o077 == 0
    again.close()
    journal.close()


@pytest.mark.anyio
@pytest.mark.parametrize("row", [b"{}", b'{"lease": "\xff', b'{"lease": "\xff"}', b"[" * 100_000])
async def test_a_row_that_cannot_be_read_is_skipped(tmp_path, row):
    journal = SqliteJournal(tmp_path / "j")
    await journal.run("INSERT INTO leases VALUES (?, ?)", "a", row)
    assert await journal.leases.load() == []
    journal.close()


@pytest.mark.anyio
async def test_a_row_for_which_the_disk_has_no_room_is_an_error_of_its_sandbox_alone(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        journal = SqliteJournal(disk.path / "j")
        await journal.leases.put("first", entry("first"))
        disk.leave(0)
        large = msgspec.structs.replace(entry("large"), spec=Spec(image="i", env={"A": "b" * (1 << 20)}))
        with pytest.raises(SandboxError, match="journal of the service cannot be written"):
            await journal.leases.put("large", large)
        await journal.leases.drop("first")
        disk.clear()
        await journal.leases.put("last", entry("last"))
        assert (await journal.leases.load())[-1] == entry("last")
        journal.close()


def test_what_is_no_journal_is_refused(tmp_path):
    (tmp_path / "j").write_bytes(b"something else" * 100)
    for path in (tmp_path / "j", tmp_path / "missing" / "j"):
        with pytest.raises(ConfigError, match="cannot be opened"):
            SqliteJournal(path)
