"""How a host on another machine stands, as placement sees it."""

from __future__ import annotations

import anyio
import msgspec

from envs.sandbox.engines.machine import MachineLoad
from envs.sandbox.protocol import HostStatus, Status
from envs.sandbox.remote.host import RemoteHost, report_of
from flash.errors import SandboxLostError
from flash.simulate.clock import run_virtual


def test_a_front_adds_up_the_loads_of_a_hosts_machines():
    def host(load: MachineLoad | None) -> HostStatus:
        return HostStatus("h", 4.0, 1000, 1.0, 100, "", 1, 0, 0, 0, 0, load)

    def status(*loads: MachineLoad | None) -> Status:
        return Status(1, "s", "b", [host(load) for load in loads], {}, {}, None, {}, [], {}, [])

    one = MachineLoad(0.5, 2, 100, 1000)
    assert report_of(status(one, one)).load == MachineLoad(1.0, 4, 200, 2000)
    assert report_of(status(one, MachineLoad(None, 2, 100, 1000))).load == MachineLoad(None, 4, 200, 2000)
    assert report_of(status(one, None)).load is None
    assert report_of(status()).load is None


def test_the_counters_of_a_service_do_not_fall_when_its_hosts_take_no_sandboxes():
    def status(*refusals: str) -> Status:
        hosts = [HostStatus("h", 4.0, 1000, 1.0, 100, why, 1, 2, 90, 10, 5, None) for why in refusals]
        return Status(1, "s", "b", hosts, {}, {}, None, {}, [], {}, [])

    for refusals in (("", ""), ("", "full"), ("full", "full")):
        report = report_of(status(*refusals))
        assert report.accepts is ("" in refusals)
        assert (report.hits, report.misses, report.orphans_removed, report.warm) == (180, 20, 10, {"": 4})
    assert report_of(status("full", "full")).why == "h: full; h: full"


class Client:
    """A client of a service that answers once."""

    def __init__(self) -> None:
        host = HostStatus("h", 4.0, 1000, 1.0, 100, "", 1, 2, 90, 10, 5, MachineLoad(0.5, 2, 100, 1000))
        self.answers = [Status(1, "s", "b", [host], {}, {}, None, {}, [], {}, [])]

    async def status(self, **_: object) -> Status:
        if not self.answers:
            raise SandboxLostError("no answer")
        return self.answers.pop()


def test_the_counters_of_a_service_that_cannot_be_reached_stay():
    async def main():
        host = RemoteHost("a", Client(), "front")
        await host.recover([])
        before = host.report()
        async with anyio.create_task_group() as tasks:
            await tasks.start(host.run, lambda: None)
            await anyio.sleep(1)
            tasks.cancel_scope.cancel()
        assert host.report() == msgspec.structs.replace(before, accepts=False, why="no answer", warm={}, load=None)
        assert host.report().hits == 90

    run_virtual(main)
