"""What follows a response: appended tokens equal the chat template of the whole conversation."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flash.config.tree import ModelConfig
from flash.errors import EnvError
from flash.rollout.episode.tokenizer import KEPT_PROMPTS, HfTokenizer
from flash.types import Message

LOOP = "{% for m in messages %}"
REASONING = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') -%}
{%- else -%}
{%- set content = m.content -%}
{%- endif -%}
{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""As Qwen3's: markers around each message, the reasoning of earlier answers cut out."""
ALTERNATING = (
    "{{ '<s>' }}" + LOOP + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' </s>' }}{% endif %}{% endfor %}"
)
"""As Llama 2's: white space before the end of turn, and a user must speak first."""
OTHER_END = (
    LOOP + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""As Gemma's: the end of a turn is not the tokenizer's end of text."""
UNENDED = (
    LOOP
    + "{{ '<|' + m.role + '|>' + m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Nothing ends a turn but the beginning of the next one."""
HIDING = LOOP + "{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>"]

Make = Callable[..., HfTokenizer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a tokenizer of single characters with a chat template."""

    def made(template: str | None, eos: str = "<|im_end|>") -> HfTokenizer:
        vocabulary = {token: number for number, token in enumerate([*string.printable, *SPECIAL, "<eos>"])}
        inner = Tokenizer(models.WordLevel(vocabulary))
        inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        inner.decoder = decoders.Fuse()
        fast = PreTrainedTokenizerFast(
            tokenizer_object=inner, eos_token=eos, additional_special_tokens=SPECIAL, clean_up_tokenization_spaces=False
        )
        fast.chat_template = template
        fast.save_pretrained(tmp_path / "model")
        return HfTokenizer(ModelConfig(path=str(tmp_path / "model")))

    return made


def user(text: str) -> Message:
    return Message("user", text)


def whole(tokenizer: HfTokenizer, messages: Sequence[Message], *, prompting: bool = True) -> list[int]:
    """The template of the whole conversation, tokenized at once."""
    shown = [{"role": m.role, "content": m.content} for m in messages]
    rendered: Any = tokenizer.inner.apply_chat_template(
        shown, add_generation_prompt=prompting, tokenize=True, return_dict=False
    )
    return list(rendered)


def sampled(tokenizer: HfTokenizer, text: str, end: str) -> list[int]:
    """A response that the model ended."""
    return tokenizer.inner.encode(text + end, add_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "eos", "end"),
    [
        (REASONING, "<|im_end|>", "<|im_end|>"),
        (ALTERNATING, "</s>", " </s>"),
        (OTHER_END, "<eos>", "<end_of_turn>"),
    ],
    ids=["reasoning", "alternating", "other end"],
)
def test_appended_turns_equal_the_template_of_the_whole_conversation(
    make: Make, template: str, eos: str, end: str
) -> None:
    tokenizer = make(template, eos)
    answer = " two" if template is ALTERNATING else "two"
    tokens = tokenizer.render([user("one")])
    for text in ("three", "five", "seven"):
        tokens += sampled(tokenizer, answer, end)
        tokens += tokenizer.follow([user(text)], stopped=True)
    said = Message("assistant", "two")
    assert tokens == whole(tokenizer, [user("one"), said, user("three"), said, user("five"), said, user("seven")])


def test_a_response_that_was_cut_off_is_ended_by_what_follows(make: Make) -> None:
    tokenizer = make(REASONING)
    tokens = tokenizer.render([user("one")]) + sampled(tokenizer, "tw", "")
    tokens += tokenizer.follow([user("three")], stopped=False)
    assert tokens == whole(tokenizer, [user("one"), Message("assistant", "tw"), user("three")])


def test_reasoning_that_the_template_would_cut_out_stays_as_it_was_sampled(make: Make) -> None:
    tokenizer = make(REASONING)
    answer = sampled(tokenizer, "<think>\nhm\n</think>\n\ntwo", "<|im_end|>")
    tokens = tokenizer.render([user("one")]) + answer
    following = tokenizer.follow([user("three")], stopped=True)
    assert tokenizer.inner.decode(tokens + following) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\ntwo<|im_end|>\n"
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )


def test_several_messages_of_any_role_follow_at_once(make: Make) -> None:
    tokenizer = make(REASONING)
    news = [Message("tool", "4"), user("and now?")]
    tokens = tokenizer.render([user("one")]) + sampled(tokenizer, "two", "<|im_end|>")
    tokens += tokenizer.follow(news, stopped=True)
    assert tokens == whole(tokenizer, [user("one"), Message("assistant", "two"), *news])


def test_a_message_that_quotes_the_stand_in_for_the_response_is_shown_whole(make: Make) -> None:
    tokenizer = make(REASONING)
    text = "flash-question flash-answer flash-answer"
    following = tokenizer.follow([user(text)], stopped=True)
    assert tokenizer.inner.decode(following) == f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_the_beginning_of_the_next_turn_is_kept_when_the_template_ends_none(make: Make) -> None:
    tokenizer = make(UNENDED, "<eos>")
    following = tokenizer.follow([user("three")], stopped=True)
    assert tokenizer.inner.decode(following) == "<|user|>three<|assistant|>"


def test_text_follows_as_it_is(make: Make) -> None:
    tokenizer = make(None)
    assert tokenizer.follow("ab", stopped=True) == tokenizer.follow("ab", stopped=False) == tokenizer.render("ab")
    assert tokenizer.follow("", stopped=True) == []


@pytest.mark.parametrize(
    ("template", "news", "text"),
    [
        (
            ALTERNATING,
            [Message("tool", "4"), user("x")],
            r"cannot show .*\(user, assistant, tool, user\).*must alternate",
        ),
        (HIDING, [user("x")], "does not show an assistant's message as it is"),
        (None, [user("x")], "chat_template is not set"),
    ],
    ids=["refused", "hidden", "missing"],
)
def test_a_template_that_cannot_be_followed_is_an_error_of_the_environment(
    make: Make, template: str | None, news: list[Message], text: str
) -> None:
    tokenizer = make(template)
    with pytest.raises(EnvError, match=text):
        tokenizer.follow(news, stopped=True)


def test_a_first_observation_that_the_template_refuses_is_an_error_of_the_environment(make: Make) -> None:
    with pytest.raises(EnvError, match="must alternate"):
        make(ALTERNATING).render([Message("assistant", "hello")])


def test_text_that_the_tokenizer_cannot_take_is_an_error_of_the_environment(make: Make) -> None:
    with pytest.raises(EnvError, match=r"cannot take 'caf\\udce9'"):
        make(None).render("caf\udce9")


def test_special_tokens_are_not_part_of_the_action_that_the_environment_sees(make: Make) -> None:
    tokenizer = make(REASONING)
    assert tokenizer.decode(sampled(tokenizer, "two\n", "<|im_end|>")) == "two\n"


def test_a_prompt_that_was_shown_before_has_the_same_tokens_whatever_became_of_those(make: Make) -> None:
    tokenizer = make(REASONING)
    shown = [[user(f"{number}")] for number in range(KEPT_PROMPTS + 1)]
    for messages in (*shown, *shown, "{}", [user("{}")]):
        tokens = tokenizer.render(messages)
        said = messages if isinstance(messages, str) else whole(tokenizer, messages)
        assert tokens == (tokenizer.inner.encode(said, add_special_tokens=False) if isinstance(said, str) else said)
        tokens.append(0)
