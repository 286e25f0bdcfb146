"""Results of environments are checked and brought into one form, and blocking environments run in threads."""

import math
import threading
from fractions import Fraction

import anyio
import numpy as np
import pytest

from envs.arithmetic import Arithmetic, ArithmeticOptions
from envs.dataset import DatasetEnv
from flash.environment import HELD_OUT, Checked, Environment, WarmStart, is_held_out, wrap
from flash.environment.results import NOTE_LENGTH, check_reset_result, check_step_result, metrics_of, note_of
from flash.errors import EnvError, RewardError
from flash.types import Message


class HalfMade:
    """Object whose `repr` raises an error."""

    def __repr__(self):
        raise AttributeError("half made")


DEEP = []  # a list that is nested too deeply for `repr`
for _ in range(10_000):
    DEEP = [DEEP]


@pytest.mark.parametrize("value", [HalfMade(), DEEP, "x" * 10_000_000], ids=["half made", "deep", "long"])
def test_a_value_that_cannot_be_shown_is_refused_like_any_other(value):
    for step in (("", value, True, False, {}), ("", 1.0, value, False, {}), ("", 1.0, True, False, value), value):
        with pytest.raises(EnvError) as caught:
            check_step_result(step)
        assert len(str(caught.value)) < 500
    for info in ({"metrics": value}, {"metrics": {"x": value}}):
        with pytest.raises(EnvError):
            metrics_of(info)
    with pytest.raises(EnvError):
        check_reset_result(([value], {}))


def test_seeds_from_held_out_on_are_held_out():
    assert not is_held_out(HELD_OUT - 1)
    assert is_held_out(HELD_OUT)


@pytest.mark.parametrize("result", [None, "prompt", ("prompt",), ("prompt", {}, 1), ["prompt", {}]])
def test_a_reset_result_that_is_no_pair_is_refused(result):
    with pytest.raises(EnvError, match=r"reset\(\) must return \(observation, info\)"):
        check_reset_result(result)


@pytest.mark.parametrize(
    "observation",
    [
        None,
        3,
        b"bytes",
        {"role": "user", "content": "x"},
        ["text"],
        [{"role": "user"}],
        [{"role": "user", "content": 1}],
    ],
)
def test_an_observation_that_is_neither_text_nor_messages_is_refused(observation):
    with pytest.raises(EnvError, match=r"of reset\(\) must be"):
        check_reset_result((observation, {}))


@pytest.mark.parametrize("info", [None, [], "info"])
def test_info_that_is_no_dict_is_refused(info):
    with pytest.raises(EnvError, match="info of reset"):
        check_reset_result(("prompt", info))


def test_the_metrics_of_a_step_are_finite_numbers_with_names():
    assert metrics_of({}) == {}
    assert metrics_of({"metrics": {"steps": 3, "won": True, "loss": np.float32(0.5)}, "other": object()}) == {
        "steps": 3.0,
        "won": 1.0,
        "loss": 0.5,
    }


@pytest.mark.parametrize("metrics", [None, [1.0], {"x": "1"}, {"x": float("nan")}, {"": 1.0}, {3: 1.0}, {"x": None}])
def test_metrics_that_are_no_numbers_are_refused(metrics):
    with pytest.raises(EnvError, match=r"info\['metrics'\] of step\(\) must map names to"):
        metrics_of({"metrics": metrics})


def test_a_note_is_text_of_bounded_length():
    assert note_of({}) == ""
    assert note_of({"note": "lost"}) == "lost"
    assert len(note_of({"note": "x" * 10_000})) == NOTE_LENGTH
    with pytest.raises(EnvError, match="must be text"):
        note_of({"note": 3})


LONE = "caf\udce9.txt"
"""Text with a lone surrogate, which UTF-8 cannot encode."""


@pytest.mark.parametrize("observation", [LONE, [{"role": "user", "content": LONE}], [Message("user", LONE)]])
def test_text_that_cannot_be_sent_is_refused_as_an_observation(observation):
    with pytest.raises(EnvError, match=r"of reset\(\) has a lone surrogate at \d+, .*'\\udce9.txt'"):
        check_reset_result((observation, {}))


def test_text_that_cannot_be_sent_is_refused_as_a_note_and_as_a_name():
    with pytest.raises(EnvError, match=r"info\['note'\] of step\(\) has a lone surrogate at 3"):
        note_of({"note": LONE})
    with pytest.raises(EnvError, match=r"a name in .* has a lone surrogate"):
        metrics_of({"metrics": {LONE: 1.0}})


def test_message_dicts_become_messages():
    shown = [{"role": "system", "content": "be brief"}, Message("user", "1+1=")]
    assert check_reset_result((shown, {})) == ([Message("system", "be brief"), Message("user", "1+1=")], {})


@pytest.mark.parametrize(
    "result", [None, 1.0, ("", 1.0, True, {}), ("", 1.0, True, False, {}, 0), ["", 1.0, True, False, {}]]
)
def test_a_step_result_that_is_no_quintuple_is_refused(result):
    with pytest.raises(EnvError, match=r"step\(\) must return \(observation, reward, terminated, truncated, info\)"):
        check_step_result(result)


def test_the_refusal_of_an_old_gym_tuple_names_its_parts():
    with pytest.raises(EnvError, match=r"a tuple of 4 \(str, float, bool, dict\)"):
        check_step_result(("", 1.0, True, {}))


@pytest.mark.parametrize("reward", [None, "1.0", math.nan, math.inf, -math.inf, 1j, [1.0]])
def test_a_reward_that_is_no_finite_number_is_a_reward_error(reward):
    with pytest.raises(RewardError, match="must be a finite number"):
        check_step_result(("", reward, True, False, {}))


@pytest.mark.parametrize("reward", [1, True, 1.0, np.float32(1), np.int64(1), np.True_, Fraction(1)])
def test_any_finite_number_becomes_a_plain_float(reward):
    _, number, _, _, _ = check_step_result(("", reward, True, False, {}))
    assert type(number) is float
    assert number == 1.0


@pytest.mark.parametrize(("terminated", "truncated", "name"), [(1, False, "terminated"), (True, None, "truncated")])
def test_a_flag_that_is_no_bool_is_refused(terminated, truncated, name):
    with pytest.raises(EnvError, match=f"{name} of step"):
        check_step_result(("", 1.0, terminated, truncated, {}))


def test_numpy_flags_become_plain_bools():
    assert check_step_result(("", 0.0, np.True_, np.False_, {})) == ("", 0.0, True, False, {})


class Blocking:
    """A Gym-style environment that records its calls and waits in `step` until it may go on."""

    def __init__(self):
        self.calls = []
        self.threads = set()
        self.entered = threading.Event()
        self.may_go_on = threading.Event()
        self.closed = threading.Event()

    def reset(self, seed):
        self.threads.add(threading.current_thread())
        self.calls.append("reset")
        return f"problem {seed}", {}

    def step(self, action):
        self.entered.set()
        self.may_go_on.wait(20)
        self.calls.append("step")
        return "", 1.0, True, False, {}

    def close(self):
        self.calls.append("close")
        self.closed.set()


def test_an_asynchronous_environment_is_not_wrapped():
    env = Arithmetic(ArithmeticOptions())
    assert wrap(env) is env


@pytest.mark.parametrize("blocking", ["reset", "step", "close"])
def test_an_environment_that_is_informed_of_its_episode_may_not_block(blocking):
    class Knowing(Arithmetic):
        def inform(self, episode):
            pass

    env = Knowing(ArithmeticOptions())
    assert wrap(env) is env
    setattr(Knowing, blocking, getattr(Blocking, blocking))
    with pytest.raises(EnvError, match="Knowing has `inform`, so its reset, step and close must be `async def`"):
        wrap(env)


@pytest.mark.anyio
async def test_a_blocking_environment_runs_in_another_thread():
    inner = Blocking()
    inner.may_go_on.set()
    env = wrap(inner)
    assert isinstance(env, Environment)
    assert await env.reset(7) == ("problem 7", {})
    assert await env.step("x") == ("", 1.0, True, False, {})
    await env.close()
    assert inner.calls == ["reset", "step", "close"]
    assert threading.current_thread() not in inner.threads


@pytest.mark.anyio
async def test_an_exception_of_a_blocking_environment_reaches_the_caller():
    class Broken(Blocking):
        def reset(self, seed):
            raise KeyError("no such level")

    with pytest.raises(KeyError, match="no such level"):
        await wrap(Broken()).reset(0)


@pytest.mark.anyio
async def test_a_deadline_does_not_wait_for_a_blocked_call_and_close_follows_it():
    inner = Blocking()
    env = wrap(inner)
    await env.reset(0)
    with anyio.move_on_after(0.05) as scope:
        await env.step("x")
    assert scope.cancelled_caught
    await anyio.to_thread.run_sync(inner.entered.wait)
    await env.close()
    assert inner.calls == ["reset"]
    inner.may_go_on.set()
    assert await anyio.to_thread.run_sync(inner.closed.wait, 20)
    assert inner.calls == ["reset", "step", "close"]


@pytest.mark.anyio
async def test_calls_during_an_abandoned_one_are_refused():
    inner = Blocking()
    env = wrap(inner)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(env.step, "x")
        await anyio.to_thread.run_sync(inner.entered.wait)
        tasks.cancel_scope.cancel()
    with pytest.raises(EnvError, match="still busy"):
        await env.step("y")
    inner.may_go_on.set()


@pytest.mark.anyio
async def test_a_call_after_close_is_refused():
    inner = Blocking()
    env = wrap(inner)
    await env.close()
    with pytest.raises(EnvError, match="is closed"):
        await env.reset(0)
    assert inner.calls == ["close"]


def test_environments_with_optional_methods_are_recognised():
    assert isinstance(DatasetEnv, Checked)
    assert isinstance(Arithmetic(ArithmeticOptions()), WarmStart)
    assert not isinstance(Blocking, Checked)
    assert not isinstance(Blocking(), WarmStart)


@pytest.mark.anyio
async def test_a_class_with_blocking_and_asynchronous_methods_runs_the_blocking_ones_in_a_thread():
    class Mixed:
        def __init__(self):
            self.threads = []

        async def reset(self, seed):
            self.threads.append(threading.current_thread())
            return f"problem {seed}", {}

        def step(self, action):
            self.threads.append(threading.current_thread())
            return "", 1.0, True, False, {}

        async def close(self):
            self.threads.append(threading.current_thread())

    inner = Mixed()
    env = wrap(inner)
    assert await env.reset(7) == ("problem 7", {})
    assert await env.step("x") == ("", 1.0, True, False, {})
    await env.close()
    here = threading.current_thread()
    assert [thread is here for thread in inner.threads] == [True, False, True]


@pytest.mark.anyio
async def test_asynchronous_methods_behind_a_decorator_run_to_their_end():
    def decorated(method):
        """Return a plain `def` around a method, which hides that the method is an `async def`."""

        def call(*args):
            return method(*args)

        return call

    class Decorated:
        def __init__(self):
            self.calls = []

        @decorated
        async def reset(self, seed):
            self.calls.append("reset")
            return f"problem {seed}", {}

        @decorated
        async def step(self, action):
            self.calls.append("step")
            return "", 1.0, True, False, {}

        @decorated
        async def close(self):
            self.calls.append("close")

    inner = Decorated()
    env = wrap(inner)
    await env.reset(7)
    await env.step("x")
    await env.close()
    assert inner.calls == ["reset", "step", "close"]


@pytest.mark.anyio
async def test_an_asynchronous_close_follows_an_abandoned_call():
    class Mixed(Blocking):
        async def close(self):
            self.calls.append("close")
            self.closed.set()

    inner = Mixed()
    env = wrap(inner)
    with anyio.move_on_after(0.05):
        await env.step("x")
    await anyio.to_thread.run_sync(inner.entered.wait)
    await env.close()
    assert inner.calls == []
    inner.may_go_on.set()
    assert await anyio.to_thread.run_sync(inner.closed.wait, 20)
    assert inner.calls == ["step", "close"]
