"""The environments that docs/environments.md shows do what it says of them, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from flash.environment import HELD_OUT, Environment, SolvedExample, WarmStart
from flash.environment.load import LoadedEnvironment
from flash.environment.results import check_reset_result, check_step_result
from flash.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
BLOCKS: list[str] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def block(words: str) -> str:
    """The one block that has these words."""
    (found,) = [code for code in BLOCKS if words in code]
    return found


@pytest.fixture
def beside(tmp_path: Path, imports: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that modules are found in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.anyio
async def test_your_environment_in_twenty_lines(beside: Path) -> None:
    code = block("# my_env.py")
    assert len(code.splitlines()) <= 20
    (beside / "my_env.py").write_text(code)
    loaded = LoadedEnvironment("my_env:Reverse", {"length": 5})
    for seed in (3, HELD_OUT + 3):
        env = loaded.make()
        assert isinstance(env, Environment)
        prompt, _ = check_reset_result(await env.reset(seed))
        assert isinstance(prompt, str)
        assert check_reset_result(await env.reset(seed))[0] == prompt
        word = prompt.removeprefix("Reverse ").removesuffix(": ")
        assert len(word) == 5
        assert check_step_result(await env.step(word[::-1]))[1:4] == (1.0, True, False)
        assert check_step_result(await env.step("?"))[1] == 0.0
        await env.close()
    env = loaded.make()
    trained = {(await env.reset(seed))[0] for seed in range(100)}
    assert not trained & {(await env.reset(HELD_OUT + seed))[0] for seed in range(100)}
    with pytest.raises(ConfigError, match="width"):
        LoadedEnvironment("my_env:Reverse", {"width": 5})


def test_its_options_may_be_a_struct(beside: Path) -> None:
    before = block("# my_env.py").replace("class Reverse:", "class Before:")
    then = block("class ReverseOptions").replace("class Reverse:", "class Reverse(Before):")
    (beside / "my_env.py").write_text(f"import msgspec\nfrom flash.errors import ConfigError\n{before}\n{then}")
    env: Any = LoadedEnvironment("my_env:Reverse", {"length": 7}).make()
    assert env.length == 7
    with pytest.raises(ConfigError, match="length must be at least 1"):
        LoadedEnvironment("my_env:Reverse", {"length": 0})


@pytest.mark.anyio
async def test_an_environment_of_many_turns(beside: Path) -> None:
    (beside / "my_env.py").write_text("import random\n" + block("class Guess"))
    env = LoadedEnvironment("my_env:Guess", {}).make()
    await env.reset(1)
    low, high, turns = 0, 99, 0
    over = False
    while not over:
        middle, turns = (low + high) // 2, turns + 1
        shown, reward, over, _, _ = check_step_result(await env.step(str(middle)))
        if "larger" in shown:
            low = middle + 1
        else:
            high = middle - 1
    assert reward == 1.0
    assert turns <= 7


def test_two_methods_more_teach_a_tiny_model(beside: Path) -> None:
    methods = block("class Reverse:\n    …").partition("…\n")[2]
    (beside / "my_env.py").write_text("from flash.environment import SolvedExample\n" + block("# my_env.py") + methods)
    env: Any = LoadedEnvironment("my_env:Reverse", {}).make()
    assert isinstance(env, WarmStart)
    (example,) = env.solved_examples(1, 1)
    assert isinstance(example, SolvedExample)
    assert set(example.prompt + example.answer) <= set(env.alphabet())
