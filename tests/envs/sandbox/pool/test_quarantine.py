"""Quarantine: its length, and its end."""

from __future__ import annotations

from envs.sandbox.pool.state import Quarantine


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
