from __future__ import annotations

import json
import subprocess
import sys

import anyio
import pyarrow
import pyarrow.parquet
import pytest

from envs.code import CodeEnv, CodeOptions
from envs.mixture import Mixture, MixtureOptions
from flash.config.objects import check_options
from flash.environment import HELD_OUT, Checked, Prepared, WarmStart, sharing
from flash.environment.results import metrics_of, note_of
from flash.errors import ConfigError, EnvError, SandboxLostError, SandboxStartError
from tests.envs.sandboxes import ScriptedProvider, local_processes

ROWS = [
    {
        "prompt": f"Add {n} to the input.",
        "language": "python",
        "tests": [{"stdin": "1", "stdout": str(n + 1)}, {"stdin": "5", "stdout": str(n + 5)}],
    }
    for n in range(20)
] + [
    {"prompt": f"Print {n}.", "language": "bash", "tests": json.dumps([{"stdout": str(n)}]), "timeout": 3}
    for n in range(20)
]


class Local(CodeEnv):
    """In local processes."""

    opener = staticmethod(local_processes)


@pytest.fixture
def data(tmp_path):
    def write(rows):
        path = tmp_path / "problems.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


async def judged(env: CodeEnv, seed: int, answer: str):
    await env.reset(seed)
    observation, reward, terminated, truncated, info = await env.step(answer)
    await env.close()
    assert (observation, terminated, truncated) == ("", True, False)
    return reward, info


def test_it_offers_what_an_environment_may_offer():
    assert isinstance(CodeEnv, Checked)
    assert isinstance(CodeEnv, Prepared)
    assert isinstance(CodeEnv(CodeOptions()), WarmStart)


@pytest.mark.anyio
@pytest.mark.parametrize("language", ["bash", "python"])
async def test_made_problems_are_solved_by_their_examples_and_by_any_program_that_does_the_same(language):
    env = Local(CodeOptions(language=language))
    examples = env.solved_examples(2, seed=1)
    assert examples == env.solved_examples(2, seed=1)
    async with sharing("test"):
        prompts = {}
        for seed in range(3000):
            prompt, _ = await env.reset(seed)
            prompts.setdefault(prompt, seed)
        for example in examples:
            reward, info = await judged(env, prompts[example.prompt], example.answer)
            assert (reward, info["cause"], info["passed"]) == (1.0, "passed", 3)
        reward, info = await judged(env, 5, "exit 3")
        assert (reward, info["cause"]) == (0.0, "crash")
        assert metrics_of(info) == {
            "tests_passed": 0.0,
            "no_program": 0.0,
            "compile": 0.0,
            "wrong_output": 0.0,
            "too_much_output": 0.0,
            "crash": 1.0,
            "timeout": 0.0,
            "memory": 0.0,
            "sandbox_lost": 0.0,
        }
        assert note_of(info).startswith("crash: ")
    characters = set("".join(example.prompt + example.answer for example in env.solved_examples(500, seed=2)))
    assert characters == set(env.alphabet())
    assert len(set(env.alphabet())) == len(env.alphabet())


@pytest.mark.anyio
async def test_the_same_seed_asks_the_same_and_held_out_problems_are_apart():
    async def prompt(seed: int) -> str:
        shown, info = await CodeEnv(CodeOptions()).reset(seed)
        assert info == {"language": "bash"}
        await anyio.lowlevel.checkpoint()
        return shown

    assert await prompt(7) == await prompt(7)
    train = {await prompt(seed) for seed in range(500)}
    held_out = {await prompt(HELD_OUT + seed) for seed in range(200)}
    assert not train & held_out
    assert {example.prompt for example in CodeEnv(CodeOptions()).solved_examples(2000, seed=3)}.isdisjoint(held_out)


@pytest.mark.anyio
async def test_a_data_set_may_hold_several_languages(data):
    env = Local(CodeOptions(path=data(ROWS), held_out_fraction=0.1))
    async with sharing("test"):
        seen = set()
        for seed in range(36):
            (message,), info = await env.reset(seed)
            number = next(word for word in message.content.replace(".", "").split() if word.isdigit())
            if info["language"] in seen:
                continue
            seen.add(info["language"])
            right = {"python": f"Like so:\n```python\nprint(int(input()) + {number})\n```", "bash": f"echo {number}"}
            assert (await judged(env, seed, right[info["language"]]))[0] == 1.0
            assert (await judged(env, seed, "no idea"))[0] == 0.0
    assert seen == {"python", "bash"}


@pytest.mark.anyio
async def test_rows_say_what_their_programs_may_use_also_in_tables_of_columns(tmp_path):
    tests = [{"stdin": "1", "stdout": "1"}, {"program": "true"}]
    rows = [{"prompt": f"p{n}", "tests": tests, "memory_mib": n or None, "timeout": 2.5} for n in (0, 99)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match="row 1: a test `program` runs in one process with the answer"):
        CodeEnv.check(CodeOptions(path=str(tmp_path / "rows.parquet")))
    provider = ScriptedProvider()

    class Scripted(CodeEnv):
        opener = staticmethod(provider.open)

    async with sharing("test"):
        for seed in (0, HELD_OUT):
            options = CodeOptions(path=str(tmp_path / "rows.parquet"), held_out_fraction=0.5, test_programs=True)
            await judged(Scripted(options), seed, "true")
    assert {sandbox.spec.memory_mib for sandbox in provider.sandboxes} == {256, 99}


def test_a_csv_may_have_the_optional_columns_and_leave_their_cells_empty(tmp_path):
    tests = '"[{""stdout"": ""1""}]"'
    path = tmp_path / "rows.csv"
    path.write_text(f"prompt,tests,language,timeout,memory_mib\np,{tests},python,2.5,64\nq,{tests},,,\n")
    CodeEnv.check(CodeOptions(path=str(path)))
    path.write_text(f"prompt,tests,memory_mib\np,{tests},2\n")
    with pytest.raises(ConfigError, match="row 1: 'memory_mib' is '2': Expected `int` >= 16"):
        CodeEnv.check(CodeOptions(path=str(path)))


@pytest.mark.anyio
async def test_the_reward_may_be_the_share_of_tests(data):
    row = {"prompt": "p", "tests": [{"stdin": "1", "stdout": "1"}, {"stdin": "2", "stdout": "2"}]}
    path = data([row, {**row, "prompt": "q"}])
    async with sharing("test"):
        for reward, expected in [("share", 0.5), ("all", 0.0)]:
            options = CodeOptions(path=path, held_out_fraction=0.5, language="bash", reward=reward, template="plain")
            got, info = await judged(Local(options), 0, "echo 1")
            assert (got, info["passed"], info["total"], info["cause"]) == (expected, 1, 2, "wrong output")


@pytest.mark.anyio
async def test_episodes_of_a_node_share_one_provider_which_acts_for_the_run():
    provider, opened = ScriptedProvider(), []

    class Scripted(CodeEnv):
        @staticmethod
        def opener(source):
            opened.append(source)
            return provider.open(source)

    async with sharing("my run"), anyio.create_task_group() as tasks:
        for seed in range(10):
            tasks.start_soon(judged, Scripted(CodeOptions()), seed, "true")
    assert len(opened) == 1
    assert provider.owners == {"my-run"}
    assert provider.most <= 8
    assert provider.out == 0


@pytest.mark.anyio
@pytest.mark.virtual
async def test_law_5_a_sandbox_that_keeps_failing_is_an_error_and_never_a_reward():
    class Lost(CodeEnv):
        opener = staticmethod(ScriptedProvider(failures=99, error=SandboxLostError("gone")).open)

    async with sharing("test"):
        env = Lost(CodeOptions())
        await env.reset(0)
        with pytest.raises(SandboxLostError):
            await env.step("echo 1")


class PreparedEnv(CodeEnv):
    """Of the test that follows, which a mixture finds by its name."""

    provider = ScriptedProvider()
    opener = staticmethod(provider.open)


@pytest.mark.anyio
async def test_preparing_starts_a_sandbox_of_each_language_in_use_and_tells_what_is_missing(data):
    provider = PreparedEnv.provider
    rows = [*ROWS, {"prompt": "x", "language": "lua", "tests": [{"stdout": "1"}]}]
    lua = {"image": "lua-image", "file": "m.lua", "run": ["lua", "m.lua"]}
    async with sharing("test"):
        await PreparedEnv.prepare(CodeOptions(path=data(rows), languages={"lua": lua}))
        assert {sandbox.spec.image for sandbox in provider.sandboxes} == {"flash-sandbox-python", "lua-image"}
        kinds = {"code": {"path": f"{__name__}:PreparedEnv", "options": {"limits": {"memory_mib": 99}}}}
        await Mixture.prepare(MixtureOptions(kinds=kinds))
        assert provider.sandboxes[-1].spec.memory_mib == 99
        provider.failures, provider.error = 9, SandboxStartError("no such image")
        with pytest.raises(SandboxStartError, match="no such image"):
            await PreparedEnv.prepare(CodeOptions(limits={"memory_mib": 77}))


@pytest.mark.anyio
async def test_a_step_without_a_reset_and_a_step_on_no_node_are_errors():
    env = CodeEnv(CodeOptions())
    with pytest.raises(EnvError, match="before reset"):
        await env.step("")
    await env.reset(1)
    with pytest.raises(EnvError, match="nothing is shared here"):
        await env.step("")


def test_right_options_pass_the_check(data):
    CodeEnv.check(CodeOptions())
    limits, sandboxes = {"timeout": 1}, {"parallel": 2}
    CodeEnv.check(CodeOptions(path=data(ROWS), reward="share", limits=limits, sandboxes=sandboxes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"language": "cobol"}, "there is no language 'cobol'"),
        ({"language": "c"}, "problems are made for bash and python"),
        ({"largest": 1}, "largest must be"),
        ({"tests": 0}, "tests must be"),
        ({"limits": {"timeout": 0}}, r"`limits\.timeout`: expected a number above 0"),
        ({"limits": {"memory": 5}}, "did you mean `memory_mib`"),
        ({"sandboxes": {"parallel": 0}}, r"`sandboxes\.parallel`: expected an integer from 1"),
        ({"sandboxes": {"at": "somewhere"}}, "at must be `local`"),
        ({"sandboxes": {"token_file": "x"}}, "belongs to a service"),
        ({"sandboxes": {"at": "http://x", "token_file": "/none"}}, "there is no file /none"),
        ({"languages": {"lua": {"image": "i"}}}, r"`languages\.lua\.file`: is missing"),
        ({"path": "/nowhere.jsonl"}, "there is no data set"),
        ({"held_out_path": "/x"}, "held_out_path needs a path"),
        ({"reward": "some"}, "reward"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options, message):
    with pytest.raises(ConfigError, match=message):
        CodeEnv.check(**check_options(CodeEnv, options, "env.options"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tests": [{"stdin": "1"}]}, r"row 2: 'tests' must list tests .* either `stdout`"),
        ({"tests": []}, "length >= 1"),
        ({"tests": "{"}, "row 2: 'tests' must list"),
        ({"tests": 5}, "row 2: 'tests' must list"),
        ({"tests": [5]}, "row 2: 'tests' must list"),
        ({"tests": [{"stdout": "1"}], "prompt": 5}, "row 2: .prompt. must be"),
        ({"tests": [{"stdout": "1"}], "language": "cobol"}, "row 2: there is no language 'cobol'"),
        ({"tests": [{"stdout": "1"}], "timeout": -1}, "row 2: 'timeout' is -1: Expected `float` > 0"),
        ({"tests": [{"stdout": "1"}], "timeout": "soon"}, "row 2: 'timeout' is 'soon': Expected `float"),
        ({"tests": [{"stdout": "1"}], "language": 3}, "row 2: 'language' is 3: Expected `str`"),
        ({"tests": "[" * 100_000}, "row 2: 'tests' must list"),
    ],
)
def test_wrong_rows_are_named_before_anything_starts(data, row, message):
    path = data([{"prompt": "p", "tests": [{"stdout": "1"}]}, {"prompt": "p", **row}])
    with pytest.raises(ConfigError, match=message):
        CodeEnv.check(CodeOptions(path=path))


def test_a_data_set_needs_its_columns_and_has_no_solved_examples(data):
    with pytest.raises(ConfigError, match="has no column 'tests', only"):
        CodeEnv.check(CodeOptions(path=data([{"prompt": "p"}])))
    with pytest.raises(ConfigError, match=r"set model\.path"):
        CodeEnv(CodeOptions(path=data(ROWS))).solved_examples(1, 0)


def test_importing_it_needs_no_container_engine_and_no_torch():
    heavy = "aiodocker", "aiohttp", "httpx", "torch"
    code = f"import sys, envs.code, envs.rewards.code; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
