"""torch's profiler around the steps that are ordered, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flash.profile.order import VARIABLE, ProfileOrder, ordered
from flash.profile.parts import parts_in, read_part
from flash.profile.recording import RankProfile

pytestmark = pytest.mark.filterwarnings("ignore")


def train(profile: RankProfile, versions: range) -> None:
    """Steps as a trainer rank makes them, each with an operator of its own size."""
    for version in versions:
        profile.begins(version)
        torch.ones(version + 1).sum()


def shapes(folder: Path) -> list[int]:
    """The sizes that were summed while it recorded."""
    import json

    part, _ = read_part(folder / "trainer-0.json.gz")
    events = [json.loads(bytes(event)) for event in part.events]
    return [event["args"]["Input Dims"][0][0] for event in events if event["name"] == "aten::sum"][::2]


def test_the_steps_that_are_ordered_are_recorded_and_no_others(tmp_path: Path) -> None:
    profile = RankProfile(ProfileOrder(str(tmp_path), 2, 4), 0, cuda=False)
    train(profile, range(2))
    assert parts_in(tmp_path) == []
    train(profile, range(2, 6))
    (file,) = parts_in(tmp_path)
    _, facts = read_part(file)
    assert (facts.who, facts.steps, facts.snapshot) == ("trainer 0", 2, None)
    assert facts.begin < facts.end
    assert facts.resident > 1 << 20
    assert set(shapes(tmp_path)) == {3, 4}
    before = file.stat()
    profile.ends()
    train(profile, range(2, 6))
    assert file.stat() == before, "a rank that goes back records nothing twice"


def test_an_early_end_leaves_what_there_is_and_a_new_incarnation_the_rest(tmp_path: Path) -> None:
    order = ProfileOrder(str(tmp_path), 1, 9)
    profile = RankProfile(order, 0, cuda=False)
    train(profile, range(3))
    profile.begins(3)  # and then there is no batch
    profile.ends()
    assert read_part(parts_in(tmp_path)[0])[1].steps == 2
    train(RankProfile(order, 0, cuda=False), range(5, 10))
    assert read_part(parts_in(tmp_path)[0])[1].steps == 4


def test_a_folder_that_takes_nothing_costs_the_profile_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile = RankProfile(ProfileOrder(str(tmp_path / "gone"), 0, 1), 0, cuda=False)
    train(profile, range(3))
    assert "the profile of trainer 0 was not written to" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_without_an_order_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert ordered() is None
    order = ProfileOrder(str(tmp_path), 1, 2)
    monkeypatch.setenv(VARIABLE, "")
    for name in ("KINETO_LOG_LEVEL", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(name, "ERROR")
    order.give()
    assert ordered() == order
