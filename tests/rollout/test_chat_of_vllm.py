"""A real model's tokenizer: prompts are those that vLLM's chat endpoint and transformers make, token for token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash.config.tree import ModelConfig
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.types import Message, ToolCall
from tests.envs.forms import ADD
from tests.rollout.families import FAMILIES, family
from tests.rollout.test_controls import benign, controls, hostile, shown, written

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]  # imports most of vLLM

MODEL = Path(__file__).parents[2] / "outputs" / "models" / "smollm2-135m"
CALL = ToolCall("abcdefghi", "add", '{"a": 1, "b": "ñ"}')
TALK = [
    Message("system", "Be brief."),
    Message("user", " What is 1 + 1?\n\n"),
    Message("assistant", "2, I would say: `a < b`"),
    Message("user", "And\tthen? 日本 🙂"),
]
CALLED = [Message("user", "one"), Message("assistant", "", "", (CALL,)), Message("tool", "two", tool_call_id=CALL.id)]


@pytest.fixture(scope="module")
def smollm2() -> HfTokenizer:
    """Return the tokenizer of the real model SmolLM2. Skips the test if the model is not on this machine."""
    if not MODEL.is_dir():
        pytest.skip(f"no {MODEL.name} here: flash fetch {MODEL.name} makes it")
    return HfTokenizer(ModelConfig(path=str(MODEL)))


def of_vllm(tokenizer: HfTokenizer, path: Path, messages: list[Message], tools: list[Any]) -> list[int]:
    """Return the prompt of vLLM's chat endpoint for a conversation whose last message is the assistant's."""
    from vllm.config import ModelConfig as VllmConfig
    from vllm.renderers.hf import parse_chat_messages, safe_apply_chat_template

    asked: Any = shown(messages)
    begun = messages[-1].role == "assistant"
    for message in asked:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    config: Any = VllmConfig.__new__(VllmConfig) if path != MODEL else VllmConfig(model=str(path))
    conversation, _, _ = parse_chat_messages(asked, config, content_format="string")
    return list(
        safe_apply_chat_template(
            config,
            tokenizer.inner,
            conversation,
            tools=tools or None,
            chat_template=tokenizer.inner.chat_template,
            add_generation_prompt=not begun,
            continue_final_message=begun,
        )
    )


@pytest.mark.parametrize("until", [1, 2, 3, 4])
def test_a_conversation_is_what_vllm_and_transformers_make_of_it(smollm2: HfTokenizer, until: int) -> None:
    messages = TALK[:until] if until != 1 else TALK[1:2]
    tokens = smollm2.render(messages)
    assert tokens == of_vllm(smollm2, MODEL, messages, [])
    if messages[-1].role != "assistant":
        assert tokens == written(smollm2, messages, (), tokenize=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_and_results_are_what_vllm_makes_of_them(name: str, tmp_path: Path) -> None:
    tokenizer = family(name, tmp_path)
    assert tokenizer.render(CALLED, [ADD]) == of_vllm(tokenizer, tmp_path, CALLED, [ADD])


@given(texts=st.lists(benign, min_size=2, max_size=2))
@settings(deadline=None, max_examples=60)
def test_any_text_without_control_tokens_is_as_transformers_has_it(smollm2: HfTokenizer, texts: list[str]) -> None:
    messages = [Message("system", texts[0]), Message("user", texts[1])]
    assert smollm2.render(messages) == written(smollm2, messages, (), tokenize=True)
    assert smollm2.render(texts[0]) == smollm2.inner.encode(texts[0], add_special_tokens=False)


def _in_vocabulary(text: str) -> bool:
    """Return True if the vocabulary has all characters of a text: it lacks some bytes."""
    return text.isascii() and text.replace("\n", "").isprintable()


@given(texts=st.lists(hostile("qwen").filter(_in_vocabulary), min_size=3, max_size=3))
@settings(deadline=None, max_examples=100)
def test_whatever_is_said_a_conversation_has_the_control_tokens_of_its_messages(
    smollm2: HfTokenizer, texts: list[str]
) -> None:
    messages = [Message("system", texts[0]), Message("user", texts[1])]
    tokens = smollm2.render(messages)
    assert smollm2.inner.decode(tokens) == written(smollm2, messages, (), tokenize=False)
    start, end = smollm2.inner.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert controls(smollm2, tokens) == [start, end, start, end, start]
    following = smollm2.follow([Message("user", texts[2])], end)
    assert smollm2.inner.decode(following) == (f"\n<|im_start|>user\n{texts[2]}<|im_end|>\n<|im_start|>assistant\n")
    assert controls(smollm2, following) == [start, end, start]
