"""`flash.play`, the first turn before a run, and programs of agents, where a user's code misbehaves."""

from __future__ import annotations

import re
import sys
from typing import Any

import anyio
import msgspec
import pytest

import flash
from envs.programs import run_command
from flash.config.tree import Config
from flash.errors import ConfigError, EnvError
from flash.rollout.episode.rehearsal import rehearse
from flash.samples.tasks import PLAIN_FOR_ALL
from tests.misuse import misbehaving as m
from tests.rollout.test_episode import SETTINGS, CharTokenizer


class Named(m.Misbehaving):
    """Misbehaves as its options name it."""

    def __init__(self, place: str = "", raises: str = "", hangs: str = "") -> None:
        super().__init__(place, m.raising(m.EXCEPTIONS[raises]) if raises else m.HANGS[hangs][0])


def config(**options: str) -> Config:
    tree: dict[str, Any] = {
        "run": {"name": "test"},
        "model": {"path": "none"},
        "env": {"path": f"{__name__}:Named", "options": options},
        "cluster": {"gpus_per_node": 0},
        "deadlines": {"env_step": 0.1, "close": 0.1},
    }
    return msgspec.convert(tree, Config)


@pytest.mark.parametrize("place", ["start", "reset", "step", "close"])
def test_play_tells_whatever_is_raised_as_an_error_of_the_environment(place: str) -> None:
    for name in m.EXCEPTIONS:
        with pytest.raises(EnvError) as caught:
            flash.play(config(place=place, raises=name), ["2"])
        assert name in ("reward", "sandbox") or "misbehaving.py:" in str(caught.value), name
    assert flash.play(config(hangs="sleep"), ["2"]).reward == 1.0


@pytest.mark.parametrize(
    "name", ["sleep", "swallows", "swallows in a scope", "swallows in a group", "spins", "retries"]
)
def test_play_lets_go_of_what_hangs(name: str) -> None:
    with pytest.raises(EnvError, match=r"took longer than 0.1 s, at .*misbehaving.py:\d+"):
        flash.play(config(place="step", hangs=name), ["2"])


@pytest.mark.anyio
@pytest.mark.parametrize("name", m.EXCEPTIONS)
async def test_the_first_turn_before_a_run_tells_whatever_is_raised(name: str) -> None:
    def make(kind: str) -> Any:
        return m.Misbehaving("step", m.raising(m.EXCEPTIONS[name]))

    with pytest.raises(ConfigError, match="the environment cannot be played"):
        await rehearse(
            *(CharTokenizer(), make, str, SETTINGS), samplings=PLAIN_FOR_ALL, run_seed=0, now=anyio.current_time
        )


@pytest.mark.anyio
async def test_both_ends_of_what_a_program_complains_of_are_told() -> None:
    program = "import sys; sys.stderr.write('the cause' + 'x' * 3_000_000 + 'the last word'); sys.exit(3)"
    with pytest.raises(EnvError) as caught:
        await run_command([sys.executable, "-c", program], "", "", "task")
    assert re.search("exit code 3: the cause.*characters.*the last word$", str(caught.value))
    assert len(str(caught.value)) < 2000
