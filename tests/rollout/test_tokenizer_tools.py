"""Tools in chat templates of several forms: what follows a response that called functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash.config.tree import ModelConfig
from flash.errors import ConfigError, EnvError
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.types import Message, ToolCall
from tests.envs.forms import ADD, FORMS, QWEN

CALL = ToolCall("abcdefghi", "add", '{"a": 1, "b": "ñ"}')
ASKED = Message("user", "one")
CALLED = Message("assistant", "", "", (CALL,))
RESULT = Message("tool", "two", tool_call_id=CALL.id, name="add")


def tokenizer_of(name: str, folder: Path, template: str | None = None) -> HfTokenizer:
    """Save and return the tokenizer of a model's family; `template` replaces its chat template."""
    tokenizer = HfTokenizer(ModelConfig(path=FORMS[name].save(folder)))
    if template is not None:
        tokenizer.inner.chat_template = template
    return tokenizer


def token(tokenizer: HfTokenizer, text: str) -> int:
    """Return the id of the token with this text."""
    return tokenizer.inner.convert_tokens_to_ids(text)


def whole(tokenizer: HfTokenizer, messages: list[Message]) -> str:
    """Return the text of a rendered conversation that offers the tool `ADD`."""
    return tokenizer.inner.decode(tokenizer.render(messages, [ADD]))


@pytest.mark.parametrize("name", FORMS)
def test_results_follow_a_call_as_the_template_of_the_whole_conversation_has_them(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name, tmp_path)
    first = tokenizer.inner.decode(tokenizer.render([ASKED], [ADD]))
    after = tokenizer.inner.decode(tokenizer.follow([RESULT], token(tokenizer, FORMS[name].call_end), [ADD]))
    assert '"name": "add"' in first
    conversation = whole(tokenizer, [ASKED, CALLED, RESULT])
    assert conversation.startswith(first)
    said, end, rest = conversation.removeprefix(first).partition(FORMS[name].call_end)
    assert ("add" in said, CALL.arguments[:-4] in said, rest) == (True, True, after)
    cut = tokenizer.inner.decode(tokenizer.follow([RESULT], None, [ADD]))
    assert cut == end + after


def test_results_of_parallel_calls_share_a_turn_where_the_template_has_it_so(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen", tmp_path)
    following = tokenizer.follow([RESULT, RESULT, Message("user", "and?")], token(tokenizer, "<|im_end|>"), [ADD])
    assert tokenizer.inner.decode(following) == (
        "\n<|im_start|>user" + "\n<tool_response>\ntwo\n</tool_response>" * 2 + "<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_result_that_quotes_the_stand_in_is_shown_whole(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen", tmp_path)
    quoting = Message("tool", "flash-answer<|im_end|>flash-answer", tool_call_id=CALL.id, name="add")
    assert quoting.content in tokenizer.inner.decode(tokenizer.follow([quoting], token(tokenizer, "<|im_end|>"), [ADD]))


def test_where_nothing_ends_a_call_results_follow_the_end_that_the_model_has_found(tmp_path: Path) -> None:
    unended = QWEN.replace("<|im_end|>", "").replace("<|im_start|>", "")
    tokenizer = tokenizer_of("qwen", tmp_path, unended)
    following = tokenizer.inner.decode(tokenizer.follow([RESULT], tokenizer.end[0], [ADD]))
    assert following.strip() == "user\n<tool_response>\ntwo\n</tool_response>\nassistant"


def test_calls_without_a_parser_are_refused_with_the_parsers_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"model\.tool_parser.*hermes.*llama3_json"):
        tokenizer_of("qwen", tmp_path).check_reads_calls()


@pytest.mark.integration  # imports most of vLLM
def test_a_parser_that_cannot_work_with_the_tokenizer_is_refused_before_it_is_needed(tmp_path: Path) -> None:
    config = ModelConfig(path=FORMS["qwen"].save(tmp_path), tool_parser="mistral")
    with pytest.raises(ConfigError, match=r"model\.tool_parser = 'mistral'.*could not locate the tool call token"):
        HfTokenizer(config).ready()
