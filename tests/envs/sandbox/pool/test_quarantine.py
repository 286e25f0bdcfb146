"""Quarantine: its length, its end, and the bound of its records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from envs.sandbox.api import Spec
from envs.sandbox.pool.lease import SandboxLease
from envs.sandbox.pool.state import KINDS_KEPT, PoolFailures, Quarantine


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


def test_only_the_keys_that_failed_last_are_remembered():
    quarantine = Quarantine(threshold=1, cooldown=10)
    for number in range(KINDS_KEPT):
        quarantine.failed(str(number), "", 0.0)
    quarantine.failed("0", "again", 0.0)
    quarantine.failed("new", "", 0.0)
    assert len(quarantine.listed(1.0)) == KINDS_KEPT
    assert (quarantine.why("0"), quarantine.remaining("1", 1.0)) == ("again", 0.0)


def test_only_the_kinds_that_started_last_are_remembered():
    failures = PoolFailures(threshold=3, cooldown=30.0, wall=lambda: 0.0, changed=lambda: None)
    good = vars(failures)["_good_kinds"]
    good.update(dict.fromkeys(map(str, range(KINDS_KEPT))))
    failures.started(cast("SandboxLease", SimpleNamespace(spec=Spec(image="new"), host="a")))
    assert len(good) == KINDS_KEPT
    assert "0" not in good
