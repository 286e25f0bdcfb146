"""Messages of a run before its first step."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any, ClassVar

import anyio
import msgspec
import pytest

from flash.config.tree import Config
from flash.environment.load import LoadedEnvironment
from flash.run.checks.dry_run import try_arguments, try_own_answer
from flash.run.node_loop import explain_engine_start, limit_held_out_problems, report_startup
from tests.hub.test_hub import Driver, make_config
from tests.hub.test_stages import version


def config_of(*, eager: bool = False) -> Config:
    """Return a configuration for one GPU, for which the compiler of this machine has no meaning."""
    config, change = make_config(), msgspec.structs.replace
    engine, cluster = change(config.engine, enforce_eager=eager), change(config.cluster, gpus_per_node=1)
    return change(config, engine=engine, cluster=cluster)


@pytest.mark.parametrize(
    ("seconds", "eager", "said"),
    [
        (10.0, False, ""),
        (40.0, False, "; vLLM compiles, for minutes at its first start here"),
        (40.0, True, "; vLLM loads the model"),
        (460.0, False, "; at most 900 s (deadlines.engine_start)"),
    ],
)
def test_engines_that_start_for_long_are_explained(seconds: float, eager: bool, said: str) -> None:
    assert explain_engine_start(seconds, config_of(eager=eager)) == said


@pytest.mark.anyio
@pytest.mark.parametrize(("asked", "problems"), [(128, 3), (3, 3), (2, 2)])
async def test_an_evaluation_asks_no_held_out_row_twice(tmp_path: Path, asked: int, problems: int) -> None:
    for name, count in (("train", 9), ("test", 3)):
        rows = (f'{{"question": "{name} {number}", "answer": 7.0}}\n' for number in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    files = {"path": str(tmp_path / "train.jsonl"), "held_out_path": str(tmp_path / "test.jsonl")}
    config, said = make_config(), list[str]()
    config = msgspec.structs.replace(config, eval=msgspec.structs.replace(config.eval, problems=asked))
    tools = {"notes": {"path": "envs.tools.memory:Memory"}}
    tasks = {"tasks": {"path": "envs.dataset:DatasetEnv", "options": files}, "tools": tools}
    env = LoadedEnvironment("envs.tools:ToolEnv", tasks)  # also around the environment that has the rows
    config = await limit_held_out_problems(config, env, said.append)
    assert config.eval.problems == problems
    assert said == ["evaluations ask all 3 held-out problems: there are no more, and eval.problems = 128"] * (asked > 3)


@pytest.mark.anyio
async def test_problems_that_are_made_have_no_last_one() -> None:
    env, config = LoadedEnvironment("envs.arithmetic:Arithmetic", {}), make_config()
    assert await limit_held_out_problems(config, env, lambda line: None) is config


@pytest.mark.anyio
@pytest.mark.virtual
async def test_a_phase_of_the_start_is_shown_with_its_seconds_and_its_reason() -> None:
    driver, said = Driver(make_config()), list[str]()
    with anyio.move_on_after(50):
        async with anyio.create_task_group() as group:
            group.start_soon(report_startup, driver.hub, config_of(), said.append)
            await anyio.sleep(25)
            await driver.hub.handle(version(0))
            await anyio.sleep_forever()
    assert said == [
        "starting engines and trainers … 0 s",
        "starting engines and trainers … 10 s",
        "starting engines and trainers … 20 s",
        "starting engines … 25 s",
        "starting engines … 35 s; vLLM compiles, for minutes at its first start here",
        "starting engines … 45 s; vLLM compiles, for minutes at its first start here",
    ]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "verifier", "said"),
    [
        (7.0, "envs.rewards.exact:exact_match", "own answer '7' as the answer gets reward 1"),
        ("7", "tests.envs.rewards.verifiers:length", "gets reward 0: perhaps no answer is ever"),
        ("7", "tests.envs.rewards.verifiers:raises", "as the answer fails: .*LookupError"),
    ],
)
async def test_a_dry_run_tries_the_answer_of_a_row(tmp_path: Path, answer: object, verifier: str, said: str) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_bytes(msgspec.json.encode({"question": name, "answer": answer}))
    files = {"path": str(tmp_path / "train.jsonl"), "held_out_path": str(tmp_path / "test.jsonl")}
    env = LoadedEnvironment("envs.dataset:DatasetEnv", {**files, "verifier": verifier})
    (line,) = await try_own_answer(make_config(), env, 0)
    assert re.search(said, line)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, [6, 7]), (2, [0, 1])])
def test_a_dry_run_has_vllm_check_its_arguments_with_the_gpus_of_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, gpus: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    (tmp_path / "config.json").touch()
    config, change, given = make_config(), msgspec.structs.replace, list[dict[str, Any]]()
    # With two nodes the first one has trainer ranks alone.
    cluster = change(config.cluster, nodes=nodes, gpus_per_node=8, trainer_ranks=4 + 2 * nodes)
    engine = change(config.engine, tensor_parallel=2, count=1, vllm={"max_num_batched_tokens": 4096})
    config = change(config, cluster=cluster, engine=engine, model=change(config.model, path=str(tmp_path)))

    def maker(arguments: dict[str, Any]) -> Any:
        """Note the arguments in place of vLLM's own check."""
        given.append(arguments)

    assert try_arguments(config, maker) == "vLLM takes max_num_batched_tokens"
    assert given[0]["device_ids"] == gpus


class SleepsInStep:
    """Blocking environment whose step takes too long, and whose close fails."""

    def reset(self, seed: int) -> Any:
        return "asks", {}

    def step(self, text: str) -> Any:
        time.sleep(0.5)
        return "", 1.0, True, False, {}

    def close(self) -> None:
        raise RuntimeError("cannot be closed")

    @classmethod
    def solution_of(cls, seed: int) -> str:
        return "7"


@pytest.mark.anyio
async def test_a_dry_run_names_the_line_that_hangs_and_an_error_of_close() -> None:
    env, config = LoadedEnvironment("tests.run.test_startup:SleepsInStep", {}), make_config()
    (line,) = await try_own_answer(config, env, 0)
    assert "environment close (seed 0) raised RuntimeError: cannot be closed" in line
    config = msgspec.structs.replace(config, deadlines=msgspec.structs.replace(config.deadlines, env_step=0.1))
    (line,) = await try_own_answer(config, env, 0)
    assert "environment step 1 (seed 0) took longer than 0.1 s, at " in line
    assert "test_startup.py:" in line


class Judge:
    """Environment with a fault that only the problem's own answer or a class method shows. `open` counts its open
    episodes."""

    open: ClassVar[int] = 0

    def __init__(self, fault: str = "") -> None:
        self._fault = fault
        if fault == "start":
            raise SystemExit("no licence")
        Judge.open += 1

    async def reset(self, seed: int) -> Any:
        return "asks", {}

    async def step(self, action: str) -> Any:
        if self._fault == "step":
            return "x"
        reward = {"reward": None, "nan": math.nan, "text": "1.0"}.get(self._fault, 1.0)
        return "", reward, True, False, {}

    async def close(self) -> None:
        Judge.open -= 1

    @classmethod
    def solution_of(cls, seed: int, fault: str = "") -> Any:
        if fault == "raises":
            raise KeyError("no column")
        if fault == "exits":
            raise SystemExit(3)
        return 42 if fault == "number" else "42"


class InformedJudge(Judge):
    """Environment `Judge` that gets the view of its episode."""

    def inform(self, episode: Any) -> None: ...


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", "own answer '42' as the answer gets reward 1"),
        ("reward", "fails: .*the reward must be a finite number, but is None"),
        ("nan", "fails: .*the reward must be a finite number, but is nan"),
        ("text", r"fails: .*return float\(…\) of it"),
        ("step", r"fails: .*step\(\) must return \(observation, reward"),
        ("start", r"fails: environment start \(seed 5\) raised SystemExit: no licence"),
        (
            "raises",
            r"cannot be tried: environment solution_of \(seed 5\) raised KeyError: 'no column' \(.*test_startup",
        ),
        ("exits", r"cannot be tried: environment solution_of \(seed 5\) raised SystemExit: 3"),
        ("number", r"cannot be tried: .*solution_of \(seed 5\) must return str or None, but returned 42 of type int"),
    ],
)
async def test_a_fault_that_the_own_answer_of_a_problem_shows_is_a_line_of_the_dry_run(fault: str, said: str) -> None:
    (line,) = await try_own_answer(make_config(), LoadedEnvironment(f"{__name__}:Judge", {"fault": fault}), 5)
    assert re.search(said, line)
    assert Judge.open == 0


@pytest.mark.anyio
async def test_a_dry_run_makes_no_environment_that_expects_tokens_for_a_text() -> None:
    env = LoadedEnvironment(f"{__name__}:InformedJudge", {})
    assert await try_own_answer(make_config(), env, 5) == []
    assert Judge.open == 0
