import json

import pytest

from envs.dataset import DatasetEnv, DatasetOptions
from envs.rewards.code import code_verifier
from envs.rewards.verifier import load_verifier, verify
from flash.environment import sharing
from flash.errors import ConfigError, EnvError, RewardError, SandboxLostError
from tests.envs.sandboxes import ScriptedProvider, local_processes

TESTS = {
    "language": "python",
    "tests": [{"stdin": "2", "stdout": "4"}, {"call": "f", "args": [3], "returns": 9}],
}
RIGHT = "```python\ndef f(x): return x * x\nif __name__ == '__main__': print(f(int(input())))\n```"

share = code_verifier(opener=local_processes)
every = code_verifier(reward="all", opener=local_processes)
lost = code_verifier(opener=ScriptedProvider(failures=99, error=SandboxLostError("gone")).open)


@pytest.mark.anyio
async def test_programs_are_judged_by_the_tests_in_the_answer_column():
    answer = json.dumps(TESTS)
    async with sharing("test"):
        assert await verify(f"{__name__}:share", RIGHT, answer, 60) == 1.0
        assert await verify(f"{__name__}:every", RIGHT, answer, 60) == 1.0
        assert await verify(f"{__name__}:share", "print(4)", answer, 60) == 0.5
        assert await verify(f"{__name__}:every", "print(4)", answer, 60) == 0.0


@pytest.mark.anyio
async def test_a_data_set_environment_scores_with_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"square {n}", "answer": json.dumps(TESTS)} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = DatasetOptions(path=str(path), held_out_fraction=0.25, verifier=f"{__name__}:share")
    DatasetEnv.check(options)
    async with sharing("test"):
        env = DatasetEnv(options)
        await env.reset(0)
        assert (await env.step(RIGHT))[1] == 1.0


@pytest.mark.anyio
@pytest.mark.parametrize(
    "answer",
    [
        "",
        "4",
        '{"tests": []}',
        '{"language": "cobol", "tests": [{"stdout": "1"}]}',
        '{"language": "python", "tests": [{"program": "import main"}]}',
    ],
)
async def test_an_answer_that_holds_no_tests_is_an_error_and_not_a_zero(answer):
    async with sharing("test"):
        with pytest.raises(RewardError, match="does not hold tests"):
            await verify(f"{__name__}:share", RIGHT, answer, 60)


@pytest.mark.anyio
@pytest.mark.virtual
async def test_law_5_a_lost_sandbox_keeps_its_type_through_the_verifier():
    async with sharing("test"):
        with pytest.raises(SandboxLostError):
            await verify(f"{__name__}:lost", RIGHT, json.dumps(TESTS), 60)


@pytest.mark.anyio
async def test_on_no_node_it_says_so():
    with pytest.raises(EnvError, match="nothing is shared here"):
        await verify("envs.rewards.code:all_passed", RIGHT, json.dumps(TESTS), 60)


def test_the_ready_made_ones_are_there_and_wrong_arguments_are_refused():
    assert load_verifier("envs.rewards.code:passed_share") is not load_verifier("envs.rewards.code:all_passed")
    with pytest.raises(ConfigError, match=r"limits\.timeout"):
        code_verifier(limits={"timeout": 0})
