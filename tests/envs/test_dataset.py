import json

import anyio
import pyarrow
import pyarrow.parquet
import pytest

from envs import dataset
from envs.dataset import DatasetEnv, DatasetOptions
from flash.config.objects import check_options
from flash.environment import HELD_OUT, Checked, Environment
from flash.errors import ConfigError, EnvError, RewardError
from flash.types import Message


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def rows(tmp_path):
    """100 rows, each prompt twice."""
    return write(tmp_path / "rows.jsonl", [{"prompt": f"q{i % 50}", "answer": f"a{i}"} for i in range(100)])


def env_of(path, **options):
    return DatasetEnv(DatasetOptions(path=path, **{"template": "plain", **options}))


async def prompts(path, seeds, **options):
    return [(await env_of(path, **options).reset(seed))[0] for seed in seeds]


def test_it_is_an_environment_that_checks_its_options(rows):
    assert isinstance(env_of(rows), Environment)
    assert isinstance(DatasetEnv, Checked)
    DatasetEnv.check(DatasetOptions(path=rows))


@pytest.mark.anyio
async def test_the_same_seed_shows_the_same_row(rows):
    for seed in (0, 3, 1234, HELD_OUT, HELD_OUT + 3):
        assert await prompts(rows, [seed]) == await prompts(rows, [seed])


@pytest.mark.anyio
async def test_each_epoch_shows_each_training_row_once_in_another_order(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": f"q{i}", "answer": "a"} for i in range(40)])
    held_out = write(tmp_path / "held.jsonl", [{"prompt": "h", "answer": "a"}])
    first = await prompts(path, range(40), held_out_path=held_out)
    second = await prompts(path, range(40, 80), held_out_path=held_out)
    assert sorted(first) == sorted(second) == sorted(f"q{i}" for i in range(40))
    assert first != second
    assert first != sorted(first)


@pytest.mark.anyio
async def test_every_epoch_shows_each_training_row_once(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": f"q{i}", "answer": "a"} for i in range(40)])
    shown = await prompts(path, range(180), held_out_fraction=0.1)
    assert all(len({*shown[start : start + 36]}) == 36 for start in range(0, 180, 36))
    assert len({*shown}) == 36


@pytest.mark.anyio
async def test_training_and_held_out_prompts_never_meet(rows):
    train = await prompts(rows, range(500), held_out_fraction=0.2)
    held_out = await prompts(rows, range(HELD_OUT, HELD_OUT + 100), held_out_fraction=0.2)
    assert not set(train) & set(held_out)
    assert len(set(held_out)) == 10
    assert len(set(train)) == 40


@pytest.mark.anyio
async def test_a_prompt_of_the_held_out_file_is_not_trained_on(rows, tmp_path):
    held_out = write(tmp_path / "held.jsonl", [{"prompt": "q7", "answer": "a"}])
    assert "q7" not in await prompts(rows, range(500), held_out_path=held_out)
    assert await prompts(rows, [HELD_OUT, HELD_OUT + 1], held_out_path=held_out) == ["q7", "q7"]


@pytest.mark.anyio
async def test_a_data_set_that_is_held_out_whole_is_refused(rows):
    with pytest.raises(ConfigError, match="leaves 0 rows to train on"):
        await prompts(rows, [0], held_out_path=rows)


@pytest.mark.anyio
async def test_episodes_that_start_together_read_the_files_once(rows):
    before = dataset._load.cache_info().misses
    async with anyio.create_task_group() as tasks:
        for seed in range(20):
            tasks.start_soon(env_of(rows).reset, seed)
    assert dataset._load.cache_info().misses == before + 1


@pytest.mark.anyio
async def test_each_data_set_of_a_large_mixture_is_read_once(tmp_path):
    paths = [
        write(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {i}", "answer": "a"} for i in range(9)])
        for name in "abcdefgh"
    ]
    before = dataset._load.cache_info().misses
    for seed in range(3):
        for path in paths:
            await env_of(path).reset(seed)
    assert dataset._load.cache_info().misses == before + len(paths)


@pytest.mark.anyio
async def test_a_prompt_goes_through_the_chat_template_or_stays_plain(rows):
    text = (await prompts(rows, [5]))[0]
    chat = DatasetEnv(DatasetOptions(path=rows, system_prompt="Think."))
    assert (await chat.reset(5))[0] == [Message("system", "Think."), Message("user", text)]
    plain = env_of(rows, system_prompt="Think. ")
    assert (await plain.reset(5))[0] == f"Think. {text}"


@pytest.mark.anyio
async def test_a_chat_with_a_system_message_gets_no_second_one(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    path = write(tmp_path / "rows.jsonl", [{"prompt": chat, "answer": 1}])
    held_out = write(tmp_path / "held.jsonl", [{"prompt": "h", "answer": 1}])
    env = DatasetEnv(DatasetOptions(path=path, held_out_path=held_out, system_prompt="Think."))
    assert (await env.reset(0))[0] == [Message("system", "Think.\n\nBe brief."), Message("user", "hello")]


@pytest.mark.anyio
async def test_a_prompt_may_be_a_chat(tmp_path):
    chat = [{"role": "user", "content": "hello"}]
    path = write(tmp_path / "rows.jsonl", [{"prompt": chat, "answer": 1}])
    held_out = write(tmp_path / "held.jsonl", [{"prompt": "h", "answer": 1}])
    env = DatasetEnv(DatasetOptions(path=path, held_out_path=held_out))
    assert (await env.reset(0))[0] == [Message("user", "hello")]


@pytest.mark.anyio
@pytest.mark.parametrize("row", [{"prompt": 3, "answer": "a"}, {"prompt": "p", "answer": None}])
async def test_a_row_of_a_wrong_kind_is_named(tmp_path, row):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "q", "answer": "a"}, row])
    with pytest.raises(ConfigError, match=r"row 2: '(prompt|answer)' (must be|is null)"):
        await prompts(path, [0])


@pytest.mark.anyio
@pytest.mark.parametrize("row", [{"prompt": " ", "answer": "a"}, {"prompt": "p", "answer": ""}])
@pytest.mark.parametrize("verifier", ["envs.rewards.exact:exact_match", "tests.envs.rewards.verifiers:length"])
async def test_an_empty_prompt_or_answer_is_refused(tmp_path, row, verifier):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "q", "answer": "a"}, row])
    with pytest.raises(ConfigError, match=r"row 2: '(prompt|answer)' is empty"):
        await prompts(path, [0], verifier=verifier)


@pytest.mark.anyio
async def test_the_answer_is_scored_by_the_verifier(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": f"q{i}", "answer": 42} for i in range(9)])
    env = env_of(path)
    await env.reset(0)
    assert await env.step(" 42\n") == ("", 1.0, True, False, {})
    assert await env.step("43") == ("", 0.0, True, False, {})


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "timeout", "message"), [("raises", 60, "LookupError"), ("hangs", 0.2, "no answer within")]
)
async def test_a_failing_verifier_is_a_reward_error(rows, name, timeout, message):
    env = env_of(rows, verifier=f"tests.envs.rewards.verifiers:{name}", timeout=timeout)
    await env.reset(0)
    with pytest.raises(RewardError, match=message):
        await env.step("x")


@pytest.mark.anyio
async def test_a_step_before_reset_is_an_environment_error(rows):
    with pytest.raises(EnvError, match="before reset"):
        await env_of(rows).step("x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "nowhere/rows.jsonl"}, "no data set at nowhere"),
        ({"answer_column": "answers"}, "did you mean 'answer'"),
        ({"held_out_path": "nowhere.jsonl"}, "no data set at nowhere"),
        ({"held_out_fraction": 0.0}, "held_out_fraction must lie"),
        ({"held_out_fraction": 1.0}, "held_out_fraction must lie"),
        ({"verifier": "envs.rewards.exact:nothing"}, "no verifier"),
        ({"template": "xml"}, 'expected "chat" or "plain", got "xml"'),
        ({"timeout": 0}, "timeout must be"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(rows, options, message):
    with pytest.raises(ConfigError, match=message):
        DatasetEnv.check(**check_options(DatasetEnv, {"path": rows, **options}, "env.options"))


@pytest.mark.anyio
async def test_rows_of_other_systems_need_no_columns_named(tmp_path):
    rows = [
        {
            "prompt": [{"role": "user", "content": f"q{i}"}],
            "reward_model": {"ground_truth": float(i), "style": "rule"},
            "data_source": "x",
        }
        for i in range(9)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    env = DatasetEnv(DatasetOptions(path=str(tmp_path / "rows.parquet")))
    ((shown,), _) = await env.reset(0)
    assert (await env.step(shown.content.removeprefix("q")))[1] == 1.0


@pytest.mark.anyio
async def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path, caplog):
    rows = [{"prompt": f"q{i}", "answer": "a"} for i in range(20)]
    path = write(tmp_path / "rows.jsonl", [*rows, {"prompt": "long " * 9, "answer": "a"}])
    options = DatasetOptions(path=path, longest_prompt=30)
    with caplog.at_level("INFO", logger="flash"):
        await DatasetEnv.prepare(options)
    assert "20 rows with 'prompt' and 'answer', 1 left out (prompts longer than longest_prompt = 30)" in caplog.text
    assert "19 rows to train on, 1 held out" in caplog.text
    assert DatasetEnv.held_out_problems(options) == 1
    assert all(len(shown) < 30 for shown in await prompts(path, range(19), longest_prompt=30))


@pytest.mark.anyio
async def test_all_wrong_rows_are_named_before_an_engine_starts(tmp_path):
    rows = [{"prompt": "a", "answer": ["b", "c"]}, {"prompt": "d", "answer": "e"}, {"prompt": "f", "answer": None}]
    path = write(tmp_path / "rows.jsonl", [*rows, {"prompt": "<image>", "answer": "e", "images": ["x.png"]}])
    with pytest.raises(ConfigError) as caught:
        await DatasetEnv.prepare(DatasetOptions(path=path))
    first, second, third = str(caught.value).split("\n")
    assert "row 1: 'answer' holds several values, and envs.rewards.exact:exact_match compares with one" in first
    assert "row 3: 'answer' is null" in second
    assert "row 4 has 'images'" in third
    own = DatasetOptions(path=write(tmp_path / "rows.jsonl", rows[:2]), verifier="tests.envs.rewards.verifiers:length")
    await DatasetEnv.prepare(own)
    assert sorted(DatasetEnv.solution_of(seed, own) for seed in (0, HELD_OUT)) == ['["b","c"]', "e"]


SEEN = "tests.envs.rewards.verifiers:points"


@pytest.mark.anyio
async def test_a_reward_gets_the_whole_row_and_needs_no_answer(tmp_path):
    rows = [{"prompt": f"q{i}", "points": i, "tags": ["a", "b"]} for i in range(9)]
    path = write(tmp_path / "rows.jsonl", rows)
    env = env_of(path, reward=SEEN)
    shown, _ = await env.reset(0)
    assert (await env.step("a b"))[1] == 2 * int(shown.removeprefix("q"))
    assert DatasetEnv.solution_of(0, DatasetOptions(path=path, reward=SEEN)) is None
    with pytest.raises(ConfigError, match="none of the columns answer, "):
        DatasetEnv.check(DatasetOptions(path=path))


@pytest.mark.anyio
async def test_a_reward_takes_rows_that_a_verifier_could_not_compare(tmp_path):
    rows = [{"prompt": "q0", "points": 1, "answer": ["b", "c"]}, {"prompt": "q1", "points": 1, "answer": None}]
    path = write(tmp_path / "rows.jsonl", rows)
    await DatasetEnv.prepare(DatasetOptions(path=path, reward=SEEN))


@pytest.mark.anyio
async def test_a_reward_that_changes_its_row_changes_it_for_itself_alone(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": f"q{i}", "points": 1} for i in range(2)])
    for _ in range(2):
        env = env_of(path, reward="tests.envs.rewards.verifiers:takes_points")
        await env.reset(0)
        assert (await env.step(""))[1] == 1.0


def test_a_reward_and_a_verifier_are_not_both_given(rows):
    with pytest.raises(ConfigError, match="expected one of `reward` and `verifier`"):
        DatasetOptions(path=rows, reward=SEEN, verifier="envs.rewards.math:math_equal")
    with pytest.raises(ConfigError, match=r"no verifier 'envs\.rewards\.exact:nothing'"):
        DatasetEnv.check(DatasetOptions(path=rows, reward="envs.rewards.exact:nothing"))
    with pytest.raises(ConfigError, match="has no column 'answr'"):
        DatasetEnv.check(DatasetOptions(path=rows, reward=SEEN, answer_column="answr"))
