"""Observations that are too long are refused without being rendered: the bound is never above the truth."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from flash.config.tree import ModelConfig
from flash.errors import EnvError
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.rollout.episode.transcript import min_tokens
from flash.types import Message, ToolCall
from tests.envs.forms import FORMS


@pytest.mark.parametrize("name", FORMS)
def test_no_conversation_has_fewer_tokens_than_its_bound(name: str, tmp_path: Path) -> None:
    tokenizer, rng, shown = HfTokenizer(ModelConfig(path=FORMS[name].save(tmp_path))), random.Random(name), 0
    for _ in range(300):
        messages = [Message("user", "")]
        for _ in range(rng.randrange(30)):
            role = rng.choice(["user", "assistant", "system", "tool"])
            calls = (ToolCall("123456789", "f", "{}"),) if role == "assistant" and rng.random() < 0.3 else ()
            messages.append(Message(role, rng.choice(["", "a"]), "", calls, "123456789" * (role == "tool")))
        try:
            tokens = len(tokenizer.render(messages))
        except EnvError:
            continue
        shown += 1
        assert min_tokens(messages, (), tokenizer.min_message_tokens) <= tokens
    assert shown > 5


def test_the_bound_of_countless_short_messages_is_near_the_truth(tmp_path: Path) -> None:
    tokenizer = HfTokenizer(ModelConfig(path=FORMS["qwen"].save(tmp_path)))
    messages = [Message("user", "a")] * 500
    assert min_tokens(messages, (), tokenizer.min_message_tokens) > 0.8 * len(tokenizer.render(messages))
