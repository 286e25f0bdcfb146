"""Service: the state behind the routes. It decides which token may use which lease and snapshot, and reports the pool.

`LeaseWork` holds the sessions, jobs and calls that the clients of one lease have open.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from uuid import uuid4

from anyio.abc import TaskGroup

from envs.sandbox.api import Snapshot
from envs.sandbox.pool.journal import KeptSnapshot
from envs.sandbox.pool.lease import LeaseOrder, SandboxLease
from envs.sandbox.pool.pool import SandboxPool
from envs.sandbox.pool.snapshots import names_snapshot
from envs.sandbox.protocol.problems import ProblemError, problem_of
from envs.sandbox.protocol.tokens import ADMIN, Tokens
from envs.sandbox.protocol.wire import HostStatus, Info, SandboxOrder, Status
from envs.sandbox.service.work import LeaseWork
from flash.errors import SandboxBusyError, SandboxRefusedError
from flash.waiting import unwrapped_group

WAITING_SHARE = 0.25
"""Share of the places in the wait queue that the requests of one token may take."""
OTHERS = "others"
"""Name that a token sees in place of the owners of other tokens."""
_ID = re.compile(r"(sha256:)?[0-9a-f]{1,64}", re.IGNORECASE)
"""Beginning of an image's id, or a complete one."""
_WHOLE_ID = re.compile(r"(sha256:)?[0-9a-f]{64}", re.IGNORECASE)
"""Complete id of an image."""


class Service:
    """State behind the routes. Made by `open_service`."""

    def __init__(self, pool: SandboxPool, tokens: Tokens, tasks: TaskGroup, name: str) -> None:
        self.pool = pool
        self.tokens = tokens
        self.name = name
        self.boot = uuid4().hex[:12]
        self._tasks = tasks
        self._works: dict[str, LeaseWork] = {}
        """Sessions, jobs and calls of each lease, by the lease's id."""
        self._snapshots_begun: Counter[str] = Counter()
        """Number of snapshots in progress, by token."""

    # ---- leases

    def order(self, order: SandboxOrder, token: str, key: str) -> SandboxLease:
        """Order a sandbox on behalf of a token.

        Raises:
            SandboxError: the token was not granted this kind, the image could be a snapshot of another token, the token
                has too many requests in the queue, or an error of `SandboxPool.order`.
        """
        self.tokens.named(token).check(token, order.spec)
        self._check_image(order.spec.image, token)
        leases = self.pool.state.leases
        if token != ADMIN and leases.find_by_key(token, key) is None:
            waiting = sum(lease.token == token and lease.state == "queued" for lease in leases.all())
            if waiting >= (most := int(WAITING_SHARE * self.pool.state.admission.max_waiting)):
                raise SandboxBusyError(
                    f"token {token} may have {most} requests waiting for a sandbox, and has them; ask again later"
                )
        owner = f"{token}/{order.owner}" if order.owner else token
        return self.pool.order(
            LeaseOrder(
                spec=order.spec,
                owner=owner,
                token=token,
                priority=order.priority,
                on_lost=order.on_lost,
                lease_s=order.lease_s,
                key=key,
            )
        )

    def _check_image(self, image: str, token: str) -> None:
        """Refuse every image name by which a token could get the files of another token. Raises SandboxRefusedError."""
        if _ID.fullmatch(image) and not (token == ADMIN and _WHOLE_ID.fullmatch(image)):
            # Engines complete the beginning of an id. A token could find snapshots by trying short beginnings.
            raise SandboxRefusedError(
                f"{image!r} could be an image's id, or the beginning of one; give a name with its tag, such as "
                f"{image[:40]}:latest"
            )
        kept = self.pool.snapshots.find(image)
        if names_snapshot(image) and token != ADMIN and (kept is None or kept.token != token):
            raise SandboxRefusedError(f"token {token} has no snapshot {image!r}; GET /v1/snapshots lists those it has")

    def lease(self, id: str, token: str) -> SandboxLease:
        """Return the lease with this id, and renew it.

        Raises:
            ProblemError: there is no such lease, or the token may not use it. The answer does not reveal which.
        """
        lease = self.pool.state.leases.find(id)
        if lease is None or not may_use(lease, token):
            raise ProblemError(404, f"there is no sandbox {id}", "SandboxClosedError")
        lease.renew()
        return lease

    def visible(self, token: str) -> list[SandboxLease]:
        """Return the leases that a token may use."""
        return [lease for lease in self.pool.state.leases.all() if may_use(lease, token)]

    def info(self, lease: SandboxLease) -> Info:
        """Return a lease in the form that clients see."""
        state = self.pool.state
        return Info(
            id=lease.id,
            owner=lease.owner,
            state=lease.state,
            sandbox_state=self.pool.handle(lease).state,
            reason=lease.reason,
            spec=lease.spec,
            host=lease.host,
            generation=lease.generation,
            created_at=lease.created_at,
            lease_s=min(lease.lease_s, 1e9),
            position=state.position(lease),
            key=lease.order.key,
            waiting_for=state.why_waiting(lease) if lease.state == "queued" and not lease.done.is_set() else "",
            problem=problem_of(lease.error) if lease.error is not None else None,
        )

    # ---- snapshots

    async def snapshot(self, lease: SandboxLease) -> Snapshot:
        """Keep the files of a lease's sandbox as a snapshot that belongs to the lease's token.

        Raises:
            SandboxRefusedError: the token already has as many snapshots as it may have.
            SandboxError: the snapshot failed.
        """
        token, most = lease.token, self.tokens.named(lease.token).snapshots
        if token != ADMIN and len(self.snapshots(token)) + self._snapshots_begun[token] >= most:
            raise SandboxRefusedError(
                f"token {token} may have {most} snapshots, and has them; remove some (GET and DELETE /v1/snapshots), "
                "or have `snapshots=NUMBER` granted in the service's token file"
            )
        self._snapshots_begun[token] += 1
        try:
            return await self.pool.snapshot(lease)
        finally:
            self._snapshots_begun[token] -= 1

    def snapshots(self, token: str) -> list[KeptSnapshot]:
        """Return the snapshots that a token may use."""
        return [kept for kept in self.pool.snapshots.all() if token in (ADMIN, kept.token)]

    async def forget(self, snapshot_id: str, token: str) -> None:
        """Remove a snapshot. Does nothing if the token has no snapshot with this id."""
        for kept in self.snapshots(token):
            if kept.snapshot_id == snapshot_id:
                await self.pool.forget(kept)

    # ---- open sessions, jobs and calls

    def work(self, lease: SandboxLease) -> LeaseWork:
        """Return the sessions, jobs and calls of a lease."""
        if lease.id not in self._works:
            self._works[lease.id] = LeaseWork(self.pool, lease, self._tasks)
            self._tasks.start_soon(self._clear, lease)
        return self._works[lease.id]

    async def _clear(self, lease: SandboxLease) -> None:
        """Wait until a lease has ended, and then forget its sessions, jobs and calls."""
        await lease.done.wait()
        self._works.pop(lease.id, None)

    # ---- status of the pool

    def status(self, token: str) -> Status:
        """Return the state of the pool at this moment, with only the details that the token may see."""
        state = self.pool.state
        hosts = [
            HostStatus(
                name=host.name,
                cpus=host.report.capacity.millicpus / 1000,
                memory_mib=host.report.capacity.memory_mib,
                cpus_promised=host.granted.millicpus / 1000,
                memory_mib_promised=host.granted.memory_mib,
                why_not=host.why_not,
                sandboxes=host.sandboxes,
                warm=sum(host.report.warm.values()),
                hits=host.report.hits,
                misses=host.report.misses,
                orphans_removed=host.report.orphans_removed,
                load=host.report.load,
            )
            for host in state.hosts()
        ]
        states: dict[str, int] = {}
        for lease in state.leases.all():
            states[lease.state] = states.get(lease.state, 0) + 1
        hits, asked = sum(host.hits for host in hosts), sum(host.hits + host.misses for host in hosts)
        return Status(
            version=state.version,
            service=self.name,
            boot=self.boot,
            hosts=hosts,
            states=states,
            queue=_queue_for(token, state.admission.waiting()),
            hit_rate=hits / asked if asked else None,
            failures=dict(state.failures.counts),
            recent_failures=list(state.failures.recent)[-10:] if token == ADMIN else [],
            images_put_aside=state.failures.images_put_aside() if token == ADMIN else {},
            sandboxes=[self.info(lease) for lease in self.visible(token)],
        )


def may_use(lease: SandboxLease, token: str) -> bool:
    """Return True if a token gives access to a lease."""
    return token in (ADMIN, lease.token)


def _queue_for(token: str, queue: dict[str, int]) -> dict[str, int]:
    """Return the wait queue as a token may see it: its own owners by name, all others in one entry."""
    if token == ADMIN:
        return queue
    shown: dict[str, int] = {}
    for owner, number in queue.items():
        name = owner if owner.partition("/")[0] == token else OTHERS
        shown[name] = shown.get(name, 0) + number
    return shown


@asynccontextmanager
async def open_service(pool: SandboxPool, tokens: Tokens, name: str = "sandboxes") -> AsyncGenerator[Service]:
    """Open a service over a pool for the time of the block. At the end, calls in progress are cancelled."""
    async with unwrapped_group() as tasks:
        yield Service(pool, tokens, tasks, name)
        tasks.cancel_scope.cancel()
