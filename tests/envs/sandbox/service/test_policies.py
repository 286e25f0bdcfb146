"""What a token may ask for: kinds of sandboxes, and snapshots, which belong to it alone."""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec
import pytest

from envs.sandbox.engines.fake import FakeBackend
from envs.sandbox.pool.journal import SqliteJournal
from envs.sandbox.pool.state import PoolSettings, names_snapshot
from envs.sandbox.remote.client import SandboxClient
from envs.sandbox.tokens import ADMIN, Token, Tokens, read_tokens
from flash.errors import ConfigError, SandboxRefusedError
from tests.envs.sandbox.services import OTHER_TOKEN, SPEC, TOKEN, Running, running

pytestmark = pytest.mark.anyio

THIRD_TOKEN = "p" * 32


class WatchedJournal(SqliteJournal):
    """Says when it has forgotten a snapshot."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.dropped = anyio.Event()

    async def run(self, query: str, *values):
        rows = await super().run(query, *values)
        if query.startswith("DELETE FROM snapshots"):
            self.dropped.set()
        return rows


def changed(**fields):
    return msgspec.structs.replace(SPEC, **fields)


async def order(world: Running, token: str, spec):
    async with (
        SandboxClient(world.url, token) as client,
        client.acquire(spec, owner="o", deadline=20) as sandbox,
    ):
        return (await sandbox.run("cat kept 2>/dev/null; true", timeout=10)).stdout


@pytest.mark.parametrize(
    ("fields", "grants"),
    [
        ({"profile": "build"}, {"build"}),
        ({"profile": "compat"}, {"compat"}),
        ({"profile": "compat", "network": "bridge"}, {"compat", "bridge"}),
        ({"runtime": "runc"}, {"runtime"}),
    ],
)
async def test_a_token_gets_only_the_kinds_that_it_was_granted(fields, grants):
    spec = changed(**fields)
    Token("x", frozenset(grants)).check("some", spec)
    Token("x").check(ADMIN, spec)
    for missing in grants:
        with pytest.raises(SandboxRefusedError, match=f"token some may not have sandboxes with {missing}"):
            Token("x", frozenset(grants - {missing})).check("some", spec)


async def test_the_service_refuses_what_was_not_granted_before_it_makes_anything(tmp_path):
    async with running(tmp_path) as world:
        with pytest.raises(SandboxRefusedError, match=r"compat and bridge.*other TOKEN compat bridge"):
            await order(world, OTHER_TOKEN, changed(profile="compat", network="bridge"))
        assert world.pool.state.leases.all() == []
        await order(world, TOKEN, changed(profile="compat"))


async def test_a_snapshot_belongs_to_its_token(tmp_path):
    tokens = Tokens({ADMIN: Token(TOKEN), "other": Token(OTHER_TOKEN), "third": Token(THIRD_TOKEN)})
    async with running(tmp_path, tokens=tokens) as world, SandboxClient(world.url, OTHER_TOKEN) as mine:
        async with mine.acquire(SPEC, owner="o", deadline=20) as sandbox:
            await sandbox.write("kept", b"precious")
            snapshot = await sandbox.snapshot()
        assert await order(world, OTHER_TOKEN, snapshot.spec) == b"precious"
        assert await order(world, TOKEN, snapshot.spec) == b"precious"
        tag = snapshot.spec.image.partition(":")[2]
        for spelling in (snapshot.spec.image, f"flash-snapshot:{tag}", f"Localhost/Flash-snapshot:{tag}", "f" * 64):
            with pytest.raises(SandboxRefusedError):
                await order(world, THIRD_TOKEN, changed(image=spelling))
        async with SandboxClient(world.url, THIRD_TOKEN) as theirs:
            assert await theirs.snapshots() == []
            await theirs.forget(snapshot.snapshot_id)
        [listed] = await mine.snapshots()
        assert (listed.snapshot_id, listed.image) == (snapshot.snapshot_id, snapshot.spec.image)
        assert listed.expires_at == pytest.approx(listed.made_at + PoolSettings().snapshot_s)
        await mine.forget(snapshot.snapshot_id)
        assert await mine.snapshots() == []
        assert world.backend.images.kept == {}
        with pytest.raises(SandboxRefusedError, match="no snapshot"):
            await order(world, OTHER_TOKEN, snapshot.spec)


async def test_a_token_has_only_so_many_snapshots(tmp_path):
    tokens = Tokens({ADMIN: Token(TOKEN), "other": Token(OTHER_TOKEN, snapshots=2)})
    async with (
        running(tmp_path, tokens=tokens) as world,
        SandboxClient(world.url, OTHER_TOKEN) as mine,
        mine.acquire(SPEC, owner="o", deadline=20) as sandbox,
    ):
        made = [await sandbox.snapshot() for _ in range(2)]
        with pytest.raises(SandboxRefusedError, match="may have 2 snapshots"):
            await sandbox.snapshot()
        await mine.forget(made[0].snapshot_id)
        made.append(await sandbox.snapshot())
        for each in made:
            await mine.forget(each.snapshot_id)


async def test_snapshots_are_known_after_a_restart_and_removed_when_their_time_is_over(tmp_path):
    async with FakeBackend() as backend:
        journal = SqliteJournal(tmp_path / "j")
        async with (
            running(tmp_path, backend=backend, journal=journal) as world,
            world.client.acquire(SPEC, owner="o", deadline=20) as sandbox,
        ):
            snapshot = await sandbox.snapshot()
        journal.close()
        journal = WatchedJournal(tmp_path / "j")
        async with running(tmp_path, backend=backend, journal=journal) as world:
            assert [each.snapshot_id for each in await world.client.snapshots()] == [snapshot.snapshot_id]
            [kept] = world.pool.snapshots.all()
            short = msgspec.structs.replace(kept, until=kept.made_at)
            world.pool.snapshots.add(short)
            with anyio.fail_after(10):
                await journal.dropped.wait()
            assert backend.images.kept == {}
            assert await world.client.snapshots() == []
        assert await journal.snapshots.load() == []
        journal.close()


def test_every_spelling_of_a_snapshot_is_one():
    for image in ("localhost/flash-snapshot:a", "flash-snapshot:a", "x/y/flash-snapshot@sha256:0", "FLASH-snapshot"):
        assert names_snapshot(image), image
    for image in ("localhost/flash-sandbox-python", "my-flash-snapshot:a", "flash-snapshots:a", "python:3"):
        assert not names_snapshot(image), image


def test_grants_stand_in_the_token_file(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"admin {TOKEN}\nteam {OTHER_TOKEN} build bridge snapshots=7\n")
    path.chmod(0o600)
    tokens = read_tokens(path)
    assert tokens["team"] == Token(OTHER_TOKEN, frozenset({"build", "bridge"}), 7)
    path.write_text(f"team {OTHER_TOKEN} {THIRD_TOKEN}\n")
    with pytest.raises(ConfigError, match="grants something unknown") as refused:
        read_tokens(path)
    assert THIRD_TOKEN not in str(refused.value)
