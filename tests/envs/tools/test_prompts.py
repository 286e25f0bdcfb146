"""Tools in prompts of a real chat template, calls read by vLLM's parser, results appended to what was sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from envs.tools import ToolEnv, ToolOptions
from flash.config.tree import ModelConfig
from flash.environment import sharing
from flash.rollout.engine import ResponseRequest
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.simulate.clock import run_virtual
from flash.types import Outcome, ToolCall, Trajectory
from tests.envs.agents import Policy, live
from tests.envs.forms import FORMS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]  # imports most of vLLM


def test_tools_are_rendered_calls_are_read_and_results_are_appended(tmp_path: Path) -> None:
    form = FORMS["qwen"]
    tokenizer = HfTokenizer(
        ModelConfig(path=form.save(tmp_path), tool_parser=form.tool_parser, reasoning_parser=form.reasoning_parser)
    ).ready()
    (end,) = tokenizer.inner.convert_tokens_to_ids([form.end])
    calls = [ToolCall("", name, f'{{"what": "{name}"}}') for name in ("slow", "none")]
    answers = iter(
        [
            form.write("two at once", "", calls),
            form.write("oops", '\n<tool_call>\n{"name": "slow", "arg', []),
            form.write("I know", "4", []),
        ]
    )

    def say(request: ResponseRequest) -> list[int]:
        return [*tokenizer.inner.encode(next(answers), add_special_tokens=False), end]

    tasks = {"path": "tests.envs.tools.test_env:Doubles"}
    env = ToolEnv(ToolOptions(tasks=tasks, tools={"slow": {"path": "tests.envs.tools.test_env:Slow"}}))
    policy = Policy(say, ends=[end])

    async def main() -> None:
        async with sharing("test"):
            played = await live(env, policy, 2, tokenizer=tokenizer, max_new_tokens=2000, max_length=10_000)
        assert isinstance(played, Trajectory), played
        assert played.outcome == Outcome.OK
        assert sum(turn.reward for turn in played.turns) == 1.0
        prompts = [tokenizer.inner.decode(request.prompt) for request in policy.asked]
        assert '"name": "slow"' in prompts[0]
        assert "Double 2." in prompts[0]
        first, second = prompts[1].split("<tool_response>")[1:]
        assert "done with slow" in first
        assert "there is no function 'none'; there are slow, stuck" in second
        assert "could not be read" in prompts[2]
        assert played.env_metrics() == {"tool_calls": 3, "malformed_calls": 2, "late_calls": 0, "right": 1}
        assert policy.asked[2].prompt[: len(policy.asked[1].prompt)] == policy.asked[1].prompt

    run_virtual(main)


def test_a_lone_surrogate_in_a_call_is_a_malformed_call_and_no_new_try(tmp_path: Path) -> None:
    form = FORMS["qwen"]
    tokenizer = HfTokenizer(ModelConfig(path=form.save(tmp_path), tool_parser=form.tool_parser)).ready()
    (end,) = tokenizer.inner.convert_tokens_to_ids([form.end])
    calls = [ToolCall("", "slow", r'{"what": "\ud800"}'), ToolCall("", "\ud800", "{}")]
    answers = iter([form.write("", "", calls), "<|im_start|>\\ud800"])

    def say(request: ResponseRequest) -> list[int]:
        return [*tokenizer.inner.encode(next(answers), add_special_tokens=False), end]

    tasks = {"path": "tests.envs.tools.test_env:Doubles"}
    env = ToolEnv(ToolOptions(tasks=tasks, tools={"slow": {"path": "tests.envs.tools.test_env:Slow"}}))
    policy = Policy(say, ends=[end])

    async def main() -> None:
        async with sharing("test"):
            played = await live(env, policy, 2, tokenizer=tokenizer, max_new_tokens=2000, max_length=10_000)
        assert isinstance(played, Trajectory), played
        assert played.outcome == Outcome.OK
        assert played.env_metrics()["malformed_calls"] == 2
        assert "the arguments of slow are no JSON" in tokenizer.inner.decode(policy.asked[1].prompt)

    run_virtual(main)
