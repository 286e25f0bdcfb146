"""The small parts of the pool and the service."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.sandbox.api import Spec
from envs.sandbox.engines.machine import Load, MachineMeter
from envs.sandbox.pool.host import demand
from envs.sandbox.pool.journal import Entry, SqliteJournal
from envs.sandbox.pool.ownership import Alive, Labels, OwnerLock, Verdict, machine, owner_alive, verdict
from envs.sandbox.pool.quarantine import Quarantine
from envs.sandbox.pool.warm import WarmPolicy
from envs.sandbox.protocol.problems import STATUS, error_of, problem_of
from envs.sandbox.protocol.wire import HostStatus, Status
from envs.sandbox.remote.host import report_of
from envs.sandbox.service.openapi import document
from envs.sandbox.service.server import Address, open_socket
from envs.sandbox.service.web import ENDPOINTS
from flash import errors
from flash.errors import ConfigError

LABELS = Labels("box", "svc", 100.0, "/nowhere", "machine", "lease", "owner", "run")


def test_labels_survive_the_engine():
    assert Labels.read(LABELS.as_dict()) == LABELS
    assert Labels.read({"other": "label"}) is None
    assert Labels.read({**LABELS.as_dict(), "flash.sandbox.deadline": "soon"}) is None


def test_too_small_a_share_of_a_cpu_is_refused_and_not_taken_for_no_limit():
    with pytest.raises(msgspec.ValidationError, match=r">= 0.01 - at `\$.cpus`"):
        msgspec.convert({"image": "i", "cpus": 1e-10}, Spec)
    assert demand(msgspec.convert({"image": "i", "cpus": 0.01}, Spec)).millicpus == 10


def test_a_lock_tells_whether_its_owner_lives(tmp_path):
    path = tmp_path / "lock"
    mine = Labels("b", "s", 0.0, str(path), machine())
    assert owner_alive(mine, machine()) is Alive.NO
    with OwnerLock(path):
        assert owner_alive(mine, machine()) is Alive.YES
        with pytest.raises(ConfigError, match="runs already"):
            OwnerLock(path).__enter__()
    assert owner_alive(mine, machine()) is Alive.NO
    assert owner_alive(mine, "another boot") is Alive.UNKNOWN


def test_a_lock_dies_with_its_process(tmp_path):
    path = tmp_path / "lock"
    code = (
        "import sys, os, signal, pathlib; from envs.sandbox.pool.ownership import OwnerLock\n"
        "OwnerLock(pathlib.Path(sys.argv[1])).__enter__(); print('held', flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        mine = Labels("b", "s", 0.0, str(path), machine())
        assert owner_alive(mine, machine()) is Alive.YES
        process.kill()
        process.wait()
        assert owner_alive(mine, machine()) is Alive.NO


def test_the_load_of_a_machine_is_measured_between_two_readings(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    (tmp_path / "meminfo").write_text(
        "MemTotal: 4096000 kB\nMemFree: 1 kB\nMemAvailable: 1024000 kB\nHugePages_Total: 0\n"
    )
    # User, nice, system, idle, iowait, irq, softirq, steal; the guest's time is part of the user's.
    (tmp_path / "stat").write_text("cpu  100 0 50 800 50 0 0 0 100 0\ncpu0 1 2 3\n")
    meter = MachineMeter(tmp_path)
    assert meter.read() == Load(None, 4, 3000, 4000)
    (tmp_path / "stat").write_text("cpu  150 0 60 1100 80 5 5 5 150 0\ncpu0 1 2 3\n")
    # 75 of 405 ticks.
    assert meter.read() == Load(0.74, 4, 3000, 4000)


def test_a_front_adds_up_the_loads_of_a_hosts_machines():
    def host(load: Load | None) -> HostStatus:
        return HostStatus("h", 4.0, 1000, 1.0, 100, "", 1, 0, 0, 0, 0, load)

    def status(*loads: Load | None) -> Status:
        return Status(1, "s", "b", [host(load) for load in loads], {}, {}, None, {}, [], {}, [])

    one = Load(0.5, 2, 100, 1000)
    assert report_of(status(one, one)).load == Load(1.0, 4, 200, 2000)
    assert report_of(status(one, Load(None, 2, 100, 1000))).load == Load(None, 4, 200, 2000)
    assert report_of(status(one, None)).load is None
    assert report_of(status()).load is None


def test_who_may_be_removed():
    assert verdict(LABELS, Alive.YES, 1e12) is Verdict.KEEP
    assert verdict(LABELS, Alive.NO, 0.0) is Verdict.ORPHAN
    assert verdict(LABELS, Alive.UNKNOWN, 120.0) is Verdict.KEEP
    assert verdict(LABELS, Alive.UNKNOWN, 161.0) is Verdict.REMOVE


@pytest.mark.anyio
async def test_the_journal_remembers_and_forgets(tmp_path):
    def entry(lease: str, sandbox_id: str = "") -> Entry:
        spec = Spec(image="i", env={"A": "b"})
        return Entry(
            lease=lease,
            owner="o",
            token="t",
            spec=spec,
            priority=1,
            on_lost="fail",
            lease_s=None,
            hard_until=5.0,
            sandbox_id=sandbox_id,
        )

    journal = SqliteJournal(tmp_path / "j")
    await journal.put(entry("a"))
    await journal.put(entry("b"))
    await journal.put(entry("a", "box"))
    await journal.drop("b")
    # As after kill -9: nobody closed it.
    again = SqliteJournal(tmp_path / "j")
    assert await again.load() == [entry("a", "box")]
    assert (tmp_path / "j").stat().st_mode & 0o077 == 0
    again.close()
    journal.close()


def test_what_is_no_journal_is_refused(tmp_path):
    (tmp_path / "j").write_bytes(b"something else" * 100)
    with pytest.raises(ConfigError, match="cannot be opened"):
        SqliteJournal(tmp_path / "j")


def test_quarantine_grows_and_ends_with_a_success():
    quarantine = Quarantine(threshold=2, cooldown=10)
    assert not quarantine.failed("a", "one", 0.0)
    assert quarantine.failed("a", "two", 0.0)
    assert (quarantine.remaining("a", 4.0), quarantine.why("a")) == (6.0, "two")
    assert quarantine.remaining("b", 4.0) == 0.0
    assert quarantine.failed("a", "three", 11.0)
    assert quarantine.remaining("a", 11.0) == 20.0
    quarantine.succeeded("a")
    assert quarantine.listed(12.0) == {}
    assert not quarantine.failed("a", "one", 12.0)


@given(asked=st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 10)), max_size=50), window=st.floats(0.1, 20))
def test_a_kind_is_kept_ready_as_often_as_it_was_asked_for_lately(asked, window):
    policy = WarmPolicy(fixed={"a": 1}, learned_max=5, window=window)
    now = 0.0
    times: dict[str, list[float]] = {"a": [], "b": []}
    for key, later in asked:
        now += later
        policy.asked(key, hit=False, now=now)
        times[key].append(now)
    for key, fixed in (("a", 1), ("b", 0)):
        recent = sum(time > now - window for time in times[key])
        assert policy.target(key, now) == max(fixed, min(5, recent))
    assert policy.targets(now + window + 1) == {"a": 1}


@pytest.mark.parametrize("name", [name for name in STATUS if name.startswith("Sandbox")])
def test_an_error_travels_as_itself(name):
    error = getattr(errors, name)("what happened")
    problem = problem_of(error)
    assert problem.status == STATUS[name]
    again = error_of(problem)
    assert type(again) is type(error)
    assert str(again) == "what happened"


def test_the_openapi_document_describes_every_endpoint():
    made = json.loads(json.dumps(document(ENDPOINTS)))
    assert made["openapi"] == "3.1.0"
    for endpoint in ENDPOINTS:
        operation = made["paths"][endpoint.path][endpoint.method.lower()]
        assert str(endpoint.status) in operation["responses"]
        assert {p["name"] for p in operation["parameters"] if p["in"] == "path"} == {
            part[1:-1] for part in endpoint.path.split("/") if part.startswith("{")
        }
    names = set(made["components"]["schemas"])
    found = {part.split('"')[0] for part in json.dumps(made).split("#/components/schemas/")[1:]}
    assert found <= names
    assert {"Order", "Spec", "Result", "Problem"} <= names
    ids = [o["operationId"] for path in made["paths"].values() for o in path.values()]
    assert made["security"] == [{"token": []}]
    assert all(ids)


def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_head():
    with open_socket(Address(port=0)) as bound:
        # Where asyncio looks before it turns Nagle's algorithm off.
        assert bound.proto == socket.IPPROTO_TCP
