"""How a host on another machine stands, as placement sees it."""

from __future__ import annotations

from envs.sandbox.engines.machine import MachineLoad
from envs.sandbox.protocol import HostStatus, Status
from envs.sandbox.remote.host import report_of


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
