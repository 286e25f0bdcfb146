"""LocalHost: a `Host` over one container engine, and EngineMaker, which creates its sandboxes.

`open_engine_host` opens both; `open_sandboxes` and `flash sandbox serve` call it and give the host to a pool. The host
keeps sandboxes ready (the warm pool, by `WarmPolicy`), checks the engine's health, and removes containers
without an owner. Each sandbox lives in a task of the maker. Leaving `open_maker` ends all of them and removes their
containers.

Conservation: every container with our service's label is known here (starting, ready or in use), or is removed at the
next check. So neither a failed close nor a start whose response was lost can leak a container.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from envs.sandbox.api import Spec
from envs.sandbox.engines.backend import SNAPSHOT_LABEL, Backend, from_snapshot
from envs.sandbox.engines.machine import MachineLoad, MachineMeter
from envs.sandbox.local.sandbox import LocalSandbox, SandboxSettings
from envs.sandbox.pool.admission import NOTHING, Demand
from envs.sandbox.pool.host import (
    Container,
    HostReport,
    HostSettings,
    Maker,
    Settled,
    Ticket,
    demand,
    ignore,
    new_sandbox_id,
    warm_key,
)
from envs.sandbox.pool.ownership import PREFIX, Identity, Labels, OwnerAlive, Reaper, owner_alive
from envs.sandbox.pool.state import Quarantine
from envs.sandbox.sandbox import Sandbox
from flash.errors import SandboxError, SandboxStartError
from flash.waiting import unwrapped_group

_log = logging.getLogger(__name__)

_MIB = 1 << 20
"""Bytes of a MiB."""


class WarmPolicy:
    """Policy that decides how many sandboxes of each kind are kept ready, from fixed numbers and recent requests.

    A kind is a `warm_key`: sandboxes of equal keys can replace each other.
    """

    def __init__(self, *, fixed: Mapping[str, int], learned_max: int, window: float) -> None:
        """Create a policy without requests.

        Args:
            fixed: number of sandboxes of each kind that are always kept ready.
            learned_max: most sandboxes of one kind that are kept ready because of requests; 0: only the fixed ones.
            window: seconds for which a request counts.
        """
        self._fixed = dict(fixed)
        """Number of sandboxes of each kind that are always kept ready."""
        self._learned_max = learned_max
        self._window = window
        self._requests: dict[str, deque[float]] = {}
        """Times of the last requests of each kind on the event loop's clock, oldest first; at most `learned_max`."""
        self.hits = self.misses = 0
        """Number of requests that found a ready sandbox, and of those that found none."""

    def record_request(self, key: str, *, hit: bool, now: float) -> None:
        """Record a request for a sandbox of this kind. `hit` is True if a ready one was found.

        `now` is the time on the event loop's clock.
        """
        self.hits += hit
        self.misses += not hit
        if self._learned_max:
            self._requests.setdefault(key, deque(maxlen=self._learned_max)).append(now)

    def target(self, key: str, now: float) -> int:
        """Return the number of sandboxes of this kind to keep ready.

        It is the number of requests within the window, at most `learned_max`, or the fixed number if that is larger.
        Requests before the window are dropped. `now` is the time on the event loop's clock.
        """
        times = self._requests.get(key)
        while times and times[0] <= now - self._window:
            times.popleft()
        if times is not None and not times:  # kinds that are not requested any more must not pile up
            del self._requests[key]
        return max(self._fixed.get(key, 0), len(times or ()))

    def targets(self, now: float) -> dict[str, int]:
        """Return the number of sandboxes to keep ready of each kind; kinds with 0 are left out."""
        wanted = {key: self.target(key, now) for key in [*self._fixed, *self._requests]}
        return {key: number for key, number in wanted.items() if number}

    def next_change(self, now: float) -> float | None:
        """Return the seconds until the oldest request leaves the window, so that a target may fall; None: no request
        is in it."""
        oldest = min((times[0] for times in self._requests.values() if times), default=None)
        return None if oldest is None else max(0.0, oldest + self._window - now)


class _Ready(msgspec.Struct):
    """A ready sandbox that waits for a request."""

    sandbox: Sandbox
    """The sandbox, which `take` hands to the request."""
    key: str
    """Kind of the sandbox, as a `warm_key`."""
    ends: float
    """Time on the event loop's clock at which its own deadline closes it, at the earliest."""


class LocalHost:
    """A `Host` over one engine. The pool calls `recover`, then `run` as a task, and `take` and `start` for leases."""

    def __init__(
        self,
        name: str,
        maker: Maker,
        identity: Identity,
        *,
        settings: HostSettings | None = None,
        warm: Sequence[tuple[Spec, int]] = (),
        alive: Callable[[Labels, str], OwnerAlive] = owner_alive,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Create a host, which takes no sandboxes until `recover`.

        Args:
            name: name of the host in the pool.
            maker: creates sandboxes on the engine.
            identity: identity of the service that the host belongs to, for the labels of containers.
            settings: settings of the host.
            warm: pairs of a spec and the number of sandboxes of it that are always kept ready.
            alive: function that finds out if the owner of a container still runs. Only tests replace it.
            wall: function that returns the unix time. Only tests replace it.
        """
        self._name = name
        self._maker = maker
        self._identity = identity
        self._settings = settings or HostSettings()
        fixed = {warm_key(spec): number for spec, number in warm}
        self._specs: dict[str, Spec] = {}
        """Spec with the longest deadline of each kind that is kept ready or was requested lately."""
        for spec, _ in warm:
            self._keep_longest(spec)
        self._policy = WarmPolicy(fixed=fixed, learned_max=self._settings.warm_max, window=self._settings.idle_warm_s)
        """Policy that decides how many sandboxes are kept ready."""
        self._warm_failures = Quarantine(threshold=1, cooldown=5.0)
        """Kinds whose last ready sandbox could not be made. They are not tried for some seconds."""
        self._wall = wall
        self._capacity = NOTHING
        """Resources that may be promised to sandboxes; `NOTHING` until the engine has answered."""
        self._refusal = "the engine was not asked yet"
        """Reason why this host takes no sandboxes; empty if it takes them."""
        self._known: dict[str, Demand] = {}
        """Demand of each of our sandboxes by its id, from before it is created until its container is gone, or its
        removal was given up."""
        self._ready: list[_Ready] = []
        """Ready sandboxes that no lease has yet."""
        self._warming: Counter[str] = Counter()
        """Number of ready sandboxes of each kind that are being started; no entry for 0."""
        self._load: MachineLoad | None = None
        """Load of the engine's machine at the last check; None if it is not measured."""
        self._reaper = Reaper(maker, identity, self._settings, alive=alive, wall=wall)
        """Removes containers and snapshots without an owner."""
        self._starts = anyio.Semaphore(self._settings.starts_at_once)
        """Semaphore with one place for each sandbox that is starting."""
        self._wake = anyio.Event()
        """Event that makes `_keep_warm` look again: a request, freed capacity, a finished start of a ready sandbox, or
        a change of `_refusal`."""
        self._changed: Callable[[], None] = lambda: None
        """Function that notifies the pool of a changed report; `run` sets it."""
        self._tasks: TaskGroup | None = None
        """Task group of `run`; None before and after it."""
        self._unwatched: list[tuple[str, Sandbox]] = []
        """Sandboxes that were adopted before `run` began."""

    @property
    def name(self) -> str:
        """Name of the host in the pool."""
        return self._name

    def report(self) -> HostReport:
        """Return the current state of the host, which the pool uses for placement and shows in its status."""
        return HostReport(
            capacity=self._capacity,
            accepts=not self._refusal,
            why=self._refusal,
            warm=dict(Counter(each.key for each in self._ready)),
            hits=self._policy.hits,
            misses=self._policy.misses,
            orphans_removed=self._reaper.removed,
            load=self._load,
        )

    def take(self, spec: Spec) -> Sandbox | None:
        """Take a ready sandbox of this kind that lives as long as the spec allows; None if there is none.

        Each request is recorded, also one that finds none: the number of ready sandboxes follows the requests. None for
        a spec that begins with a snapshot, which is not recorded.
        """
        # Sandboxes that begin with a snapshot are not kept ready: the snapshot of a fork is not requested again.
        if from_snapshot(spec):
            return None
        key, now = warm_key(spec), anyio.current_time()
        fit = (each for each in self._ready if each.key == key and now + spec.deadline_s <= each.ends)
        found = next((each for each in fit if each.sandbox.state == "ready"), None)
        self._keep_longest(spec)
        self._policy.record_request(key, hit=found is not None, now=now)
        if found is not None:
            self._ready.remove(found)
        self._wake.set()
        return found.sandbox if found else None

    async def start(self, ticket: Ticket) -> Sandbox:
        """Start the sandbox of a ticket. Closes ready sandboxes first, oldest first, if there is no room.

        The lease has a place on this host, so it goes before sandboxes that nobody has asked for yet. Leaves no record
        if the start fails. Raises SandboxError.
        """
        self._known[ticket.sandbox_id] = demand(ticket.spec)
        try:
            while self._ready and not self._committed().fits(self._capacity):
                await self._discard(self._ready.pop(0))
            return await self._make(ticket, self._wall() + ticket.spec.deadline_s)
        except BaseException:
            # Also when cancelled: the engine may have created the container all the same, and the next check removes a
            # container that is not in `_known`.
            self._drop(ticket.sandbox_id)
            raise

    async def forget(self, image: str) -> None:
        """Remove a snapshot, now or at a later check. The pool calls this when nobody needs the snapshot any more."""
        await self._reaper.forget(image)

    async def recover(
        self, tickets: Sequence[Ticket], *, answered: Callable[[], None] = ignore, settled: Settled = ignore
    ) -> dict[str, Sandbox]:
        """Adopt the sandboxes of `tickets` that still run, and remove all other containers of this service.

        See `Host.recover` for `answered` and `settled`. The host takes sandboxes from here on.

        Raises:
            SandboxError, TimeoutError: the engine does not answer.
        """
        with anyio.fail_after(self._settings.answer_s):
            self._capacity = self._promised(await self._maker.capacity())
            containers = await self._maker.containers()
        self._refusal = ""
        made = [each for each in containers if not each.image and self._reaper.is_ours(each)]
        # While a snapshot is being made, a second container has the labels of its sandbox. It never runs. The running
        # one is sorted last, so it is the one that stays in the dict.
        ours = {each.labels[f"{PREFIX}box"]: each for each in sorted(made, key=lambda each: each.running)}
        adopted: dict[str, Sandbox] = {}
        lost: set[str] = set()
        answered()

        async def adopt(ticket: Ticket, container: Container) -> None:
            """Take over the container of one ticket, or count its sandbox as lost."""
            self._known[ticket.sandbox_id] = demand(ticket.spec)
            try:
                with anyio.fail_after(self._settings.adopt_s):
                    adopted[ticket.sandbox_id] = await self._maker.adopt(container, ticket.spec)
            except (SandboxError, TimeoutError) as error:
                _log.warning(
                    "sandbox %s of lease %s was lost in the restart: %s",
                    ticket.sandbox_id,
                    ticket.lease,
                    error or f"it did not answer within {self._settings.adopt_s:g} s",
                )
                self._drop(ticket.sandbox_id)
                lost.add(ticket.sandbox_id)
            else:
                self._watch(ticket.sandbox_id, adopted[ticket.sandbox_id])
            settled(ticket.sandbox_id, adopted.get(ticket.sandbox_id))

        try:
            async with anyio.create_task_group() as tasks:
                for ticket in tickets:
                    if (container := ours.get(ticket.sandbox_id)) is not None and container.running:
                        tasks.start_soon(adopt, ticket, container)
                    else:
                        how = "is gone" if container is None else "does not run"
                        _log.warning("sandbox %s of lease %s: its container %s", ticket.sandbox_id, ticket.lease, how)
                        lost.add(ticket.sandbox_id)
                        settled(ticket.sandbox_id, None)
        finally:
            # Also when the pool ends meanwhile: the next run recovers only the containers that leases have, and does
            # not know of others.
            with anyio.CancelScope(shield=True):
                kept = {ours[id].id for id in {ticket.sandbox_id for ticket in tickets} - lost}
                self._reaper.restored(tickets)
                images = [each for each in containers if each.image and self._reaper.is_unreported(each)]
                await self._reaper.remove_all([*(each for each in made if each.id not in kept), *images])
        return adopted

    async def run(
        self, changed: Callable[[], None], *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep sandboxes ready, and check the engine and its containers, until cancelled. Closes the ready sandboxes at
        the end.

        The pool calls this once, after `recover`. `changed` is called when the report of this host has changed.
        """
        self._changed = changed
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                for sandbox_id, sandbox in self._unwatched:
                    self._watch(sandbox_id, sandbox)
                self._unwatched.clear()
                tasks.start_soon(self._check_engine)
                tasks.start_soon(self._keep_warm)
                task_status.started()
        finally:
            self._tasks = None
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as closing:
                    for each in self._ready:
                        closing.start_soon(self._discard, each)

    # ---- starting

    async def _make(self, ticket: Ticket, deadline: float) -> Sandbox:
        """Start a sandbox with labels of this service. At most `starts_at_once` start at the same time.

        `deadline` is the unix time after which other services remove the container if they cannot tell that this one
        still runs. Raises the SandboxError of the start; the container may exist then.
        """
        identity = self._identity
        labels = Labels(
            sandbox_id=ticket.sandbox_id,
            service=identity.service,
            deadline=deadline,
            lock=identity.lock,
            machine=identity.machine,
            lease=ticket.lease,
            owner=ticket.owner,
            run=identity.run,
        )
        async with self._starts:
            try:
                with anyio.fail_after(self._settings.start_s):
                    sandbox = await self._maker.make(ticket.spec, ticket.sandbox_id, labels.as_dict())
            except TimeoutError:
                raise SandboxStartError(
                    f"waited {self._settings.start_s:g} s for a sandbox of {ticket.spec.image} on {self._name}; look "
                    "at the engine's log there"
                ) from None
        self._watch(ticket.sandbox_id, sandbox)
        return sandbox

    def _watch(self, sandbox_id: str, sandbox: Sandbox) -> None:
        """Start a task that waits for the end of a sandbox.

        Before `run` there is no task group, so the sandbox is noted, and `run` starts the task.
        """
        if self._tasks is None:
            self._unwatched.append((sandbox_id, sandbox))
        else:
            self._tasks.start_soon(self._until_ended, sandbox_id, sandbox)

    async def _until_ended(self, sandbox_id: str, sandbox: Sandbox) -> None:
        """Remove a sandbox from the records once it has ended."""
        await sandbox.wait_ended()
        self._ready = [each for each in self._ready if each.sandbox is not sandbox]
        self._drop(sandbox_id)
        self._changed()

    def _drop(self, sandbox_id: str) -> None:
        """Remove a sandbox from `_known`, and let `_keep_warm` use the share of the capacity that this frees."""
        self._known.pop(sandbox_id, None)
        self._wake.set()

    async def _discard(self, ready: _Ready) -> None:
        """Close a ready sandbox that is not needed any more, and forget it even if that fails.

        The next check of the engine, or the next start of the service, then removes the container.
        """
        with anyio.move_on_after(self._settings.close_s, shield=True):
            try:
                await ready.sandbox.close()
            except SandboxError as error:
                _log.warning("closing the ready sandbox %s failed: %s", ready.sandbox.sandbox_id, error)
        self._drop(ready.sandbox.sandbox_id)

    def _committed(self) -> Demand:
        """Return the resources of all sandboxes of this host that live, start, or are ready."""
        return sum(self._known.values(), NOTHING)

    def _promised(self, whole: Demand) -> Demand:
        """Return the capacity that may be promised, from the resources of the whole machine."""
        settings = self._settings
        return Demand(int(whole.millicpus * settings.cpu_factor), int(whole.memory_mib * settings.memory_factor))

    # ---- warm pool

    def _keep_longest(self, spec: Spec) -> None:
        """Record a spec in `_specs`, unless one of its kind has a deadline as long."""
        known = self._specs.setdefault(warm_key(spec), spec)
        if spec.deadline_s > known.deadline_s:
            self._specs[warm_key(spec)] = spec

    async def _keep_warm(self) -> None:
        """Keep as many sandboxes ready as the policy wants, until cancelled.

        The numbers are computed again after each request and each end of a sandbox, and when time passes: a target
        falls, or a ready sandbox grows too old: it would end before a lease of the longest deadline of its kind.
        """
        assert self._tasks is not None
        while True:
            self._wake = anyio.Event()
            now = anyio.current_time()
            targets = self._policy.targets(now)
            self._specs = {key: spec for key, spec in self._specs.items() if key in targets}
            for ready in self._surplus(targets, now):
                self._ready.remove(ready)
                self._tasks.start_soon(self._discard, ready)
            for key in targets:
                self._warm_up(key, targets[key], now)
            self._changed()
            with anyio.move_on_after(self._next_wake(now)):
                await self._wake.wait()

    def _surplus(self, targets: Mapping[str, int], now: float) -> list[_Ready]:
        """Return the ready sandboxes that are too old, or too many of their kind. Those that live longest are kept.

        `targets` has the number to keep of each kind, and `now` is the time on the event loop's clock.
        """
        left = dict(targets)
        surplus: list[_Ready] = []
        for ready in sorted(self._ready, key=lambda each: -each.ends):
            if left.get(ready.key, 0) == 0 or self._useful_until(ready) <= now:
                surplus.append(ready)
            else:
                left[ready.key] -= 1
        return surplus

    def _useful_until(self, ready: _Ready) -> float:
        """Return the latest time at which a lease of the longest deadline of its kind can take a ready sandbox."""
        return ready.ends - self._specs[ready.key].deadline_s

    def _warm_up(self, key: str, target: int, now: float) -> None:
        """Start the ready sandboxes of one kind that are missing for its target, as many as fit.

        Does nothing while the kind is in quarantine or the host takes no sandboxes.
        """
        assert self._tasks is not None
        spec = self._specs[key]
        have = sum(each.key == key for each in self._ready) + self._warming[key]
        while have < target and not self._refusal and not self._warm_failures.remaining(key, now):
            if not (self._committed() + demand(spec)).fits(self._capacity):
                return
            sandbox_id = new_sandbox_id()
            self._known[sandbox_id] = demand(spec)
            self._warming[key] += 1
            self._tasks.start_soon(self._make_ready, key, spec, sandbox_id)
            have += 1

    async def _make_ready(self, key: str, spec: Spec, sandbox_id: str) -> None:
        """Create one sandbox and add it to the ready ones.

        A failure stops the warm pool of this kind for some seconds, and is only logged: no holder waits for this
        sandbox.
        """
        # The lease that takes the sandbox enforces the lifetimes of its own spec. So this sandbox has no idle time, and
        # lives longer than any lease of its kind by the time that it may wait.
        lasting = msgspec.structs.replace(spec, deadline_s=spec.deadline_s + self._settings.warm_age_s, idle_s=None)
        ends = anyio.current_time() + lasting.deadline_s
        kept = False
        try:
            ticket = Ticket(sandbox_id, lease="", owner="", spec=lasting)
            sandbox = await self._make(ticket, self._wall() + lasting.deadline_s)
            self._warm_failures.succeeded(key)
            if sandbox.state == "ready":
                self._ready.append(_Ready(sandbox, key, ends))
                kept = True
        except SandboxError as error:
            self._warm_failures.failed(key, str(error), anyio.current_time())
            _log.warning("a ready sandbox of %s cannot be made: %s", spec.image, error)
        finally:
            if not kept:
                self._drop(sandbox_id)
            self._warming -= Counter([key])
            self._wake.set()
            self._changed()

    def _next_wake(self, now: float) -> float | None:
        """Return the seconds until the targets, ages or quarantines change next; None: never by time alone."""
        times = [self._useful_until(ready) - now for ready in self._ready]
        times += [self._warm_failures.remaining(key, now) for key in self._warm_failures.listed(now)]
        if (change := self._policy.next_change(now)) is not None:
            times.append(change)
        return max(0.0, min(times)) if times else None

    # ---- checks of the engine

    async def _check_engine(self) -> None:
        """Check if the engine answers, remove containers without an owner, and renew the lock file, until cancelled.

        `look_s` passes between two checks: the engine sends no event for a container that its owner forgot. The host
        takes no sandboxes while the engine does not answer.
        """
        while True:
            with suppress(OSError):
                os.utime(self._identity.lock)  # The lock may be in /tmp, from which the system removes old files.
            try:
                with anyio.fail_after(self._settings.answer_s):
                    self._capacity = self._promised(await self._maker.capacity())
                    containers = await self._maker.containers()
            except (SandboxError, TimeoutError) as error:
                self._set_refusal(f"the engine does not answer: {error or type(error).__name__}")
            else:
                self._load = self._maker.load()
                self._set_refusal(self._too_full())
                await self._reaper.remove_all(self._reaper.leftovers(containers, self._known))
            await anyio.sleep(self._settings.look_s)

    def _too_full(self) -> str:
        """Return a message if the machine has too little free memory for another sandbox; empty if it has enough.

        The memory promised to sandboxes does not show this, because other programs run on the machine too.
        """
        if self._load is None:
            return ""
        free, whole = self._load.memory_mib - self._load.memory_used_mib, self._load.memory_mib
        if free >= self._settings.memory_reserve * whole:
            return ""
        return f"its machine has {free} of {whole} MiB of memory free; sandboxes wait until other programs free some"

    def _set_refusal(self, refusal: str) -> None:
        """Record the reason why the host takes no sandboxes (empty if it takes them), and notify the pool."""
        if refusal and not self._refusal:
            _log.warning("host %s takes no sandboxes: %s", self._name, refusal)
        if bool(refusal) != bool(self._refusal):
            self._wake.set()
        self._refusal = refusal
        self._changed()


class EngineMaker:
    """The `Maker` of one engine: creates, finds and removes its sandboxes. `open_maker` opens it."""

    def __init__(self, backend: Backend, tasks: TaskGroup, settings: SandboxSettings) -> None:
        """Create a maker for the engine `backend`. `settings` are the deadlines of its sandboxes."""
        self._backend = backend
        self._tasks = tasks
        """Task group in which each sandbox lives."""
        self._settings = settings
        self._capacity: Demand | None = None
        """Resources of the engine's machine; None until the engine has answered."""
        self._meter: MachineMeter | None = None
        """Meter of the engine's machine; None if that is another machine than this one."""

    async def capacity(self) -> Demand:
        """Return the resources of the engine's machine. Raises SandboxError if the engine does not answer at first."""
        if self._capacity is None:
            # Only once: a new meter has no earlier reading to compare with.
            info = await self._backend.info()
            self._capacity = Demand(1000 * info.cpus, info.memory // _MIB)
            self._meter = MachineMeter() if info.here else None
        return self._capacity

    def load(self) -> MachineLoad | None:
        """Return the load of the engine's machine; None if that is another machine than this one."""
        return self._meter.read() if self._meter else None

    async def make(self, spec: Spec, sandbox_id: str, labels: Mapping[str, str]) -> Sandbox:
        """Start a sandbox in a new container named `sandbox_id`, and return it once it is ready.

        Raises the SandboxError of a failed start.
        """
        return await self._start_in_own_task(
            LocalSandbox(self._backend, spec, name=sandbox_id, labels=labels, settings=self._settings)
        )

    async def adopt(self, container: Container, spec: Spec) -> Sandbox:
        """Take over a running container of an earlier run, and return its sandbox once its agent answers.

        Raises SandboxError if it does not, and removes the container.
        """
        return await self._start_in_own_task(
            LocalSandbox(self._backend, spec, adopt=container.id, settings=self._settings)
        )

    async def containers(self) -> list[Container]:
        """Return every container and snapshot that has our labels, of any service.

        `LocalHost` compares them with its records, and removes those that have no owner. Raises SandboxError.
        """
        containers = await self._backend.containers.list({f"{PREFIX}service": ""})
        images = await self._backend.images.list({SNAPSHOT_LABEL: ""})
        return [
            *(Container(each.container_id, each.labels, each.running) for each in containers),
            *(Container(name, labels, running=False, image=True) for name, labels in images.items()),
        ]

    async def remove(self, id: str, *, image: bool) -> None:
        """Remove the image of a snapshot by its name, or a container by its id. Raises SandboxError."""
        if image:
            await self._backend.images.remove(id)
        else:
            await self._backend.containers.delete(id)

    async def _start_in_own_task(self, sandbox: LocalSandbox) -> LocalSandbox:
        """Start a sandbox in a task of its own, and return it once it is ready.

        The task goes on until the end of the sandbox. If the caller is cancelled before the sandbox is ready, the
        sandbox ends. Raises the SandboxError of a failed start.
        """
        outcome = await self._tasks.start(self._live, sandbox)
        if isinstance(outcome, SandboxError):
            raise outcome
        return sandbox

    async def _live(self, sandbox: LocalSandbox, *, task_status: TaskStatus[SandboxError | None]) -> None:
        """Run one sandbox until it has ended. The started value is None once it is ready, or the error of its start.

        The sandbox has a task of its own because its block must be left by the task that has entered it, and the caller
        of `make` goes on before.
        """
        started = False
        try:
            async with sandbox:
                started = True
                task_status.started(None)
                await sandbox.wait_ended()
        except SandboxError as error:
            if not started:
                task_status.started(error)
        except Exception:  # boundary of a sandbox: a bug ends this sandbox, not the service
            _log.exception("sandbox %s failed", sandbox.sandbox_id)
            if not started:
                task_status.started(SandboxStartError(f"sandbox {sandbox.sandbox_id} failed; the log says why"))


@asynccontextmanager
async def open_maker(backend: Backend, settings: SandboxSettings | None = None) -> AsyncGenerator[EngineMaker]:
    """Open a maker for the time of the block. At the end it ends all its sandboxes and removes their containers."""
    async with unwrapped_group() as tasks:
        yield EngineMaker(backend, tasks, settings or SandboxSettings())
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def open_engine_host(
    backend: Backend,
    identity: Identity,
    *,
    name: str | None = None,
    settings: HostSettings | None = None,
    warm: Sequence[tuple[Spec, int]] = (),
) -> AsyncGenerator[LocalHost]:
    """Open a host over this engine for the time of the block.

    Args:
        backend: the engine.
        identity: identity of the service that the host belongs to.
        name: name of the host; the machine's name by default.
        settings: settings of the host.
        warm: pairs of a spec and the number of sandboxes of it that are always kept ready.
    """
    async with open_maker(backend) as maker:
        yield LocalHost(name or os.uname().nodename, maker, identity, settings=settings, warm=warm)
