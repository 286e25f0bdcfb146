"""Tokenizers: tokens appended behind a response equal the chat template of the whole conversation."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast

from flash.config.tree import Config, ModelConfig
from flash.errors import ConfigError, EnvError
from flash.rollout.episode.tokenizer import KEPT_PROMPTS, HfTokenizer
from flash.rollout.episode.transcript import min_tokens
from flash.trainer.references import check_tokenizer
from flash.types import Message, ToolCall
from tests.envs.forms import FORMS

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
"""A template like Qwen3's: it writes marks around each message, and leaves out the reasoning of earlier answers."""
ALTERNATING = (
    "{{ '<s>' }}" + LOOP + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' </s>' }}{% endif %}{% endfor %}"
)
"""A template like Llama 2's: it writes white space before the end of a turn, and wants a user to speak first."""
OTHER_END = (
    LOOP + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""A template like Gemma's: the end of a turn is not the tokenizer's end of text."""
UNENDED = (
    LOOP
    + "{{ '<|' + m.role + '|>' + m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""A template in which only the beginning of the next turn ends a turn."""
BASE = (
    LOOP + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '(no)' }}{% endif %}{% endif %}"
)
"""A template for a base model: the end of a turn is not the end of text. An argument changes how an answer begins."""
HIDING = LOOP + "{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>"]

Make = Callable[..., HfTokenizer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that makes a tokenizer of single characters with a chat template."""

    def made(template: str | None, eos: str = "<|im_end|>") -> HfTokenizer:
        """Save and return a tokenizer with this template and end of text."""
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
    """Return a message of the user."""
    return Message("user", text)


def whole(tokenizer: HfTokenizer, messages: Sequence[Message], *, prompting: bool = True) -> list[int]:
    """Return the tokens that transformers makes of the whole conversation at once."""
    shown = [{"role": m.role, "content": m.content} for m in messages]
    rendered: Any = tokenizer.inner.apply_chat_template(
        shown, add_generation_prompt=prompting, tokenize=True, return_dict=False
    )
    return list(rendered)


def sampled(tokenizer: HfTokenizer, text: str, end: str) -> list[int]:
    """Return the tokens of a response that the model ended with `end`."""
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
        tokens += tokenizer.follow([user(text)], tokens[-1])
    said = Message("assistant", "two")
    assert tokens == whole(tokenizer, [user("one"), said, user("three"), said, user("five"), said, user("seven")])


def test_a_response_that_was_cut_off_is_ended_by_what_follows(make: Make) -> None:
    tokenizer = make(REASONING)
    tokens = tokenizer.render([user("one")]) + sampled(tokenizer, "tw", "")
    tokens += tokenizer.follow([user("three")], None)
    assert tokens == whole(tokenizer, [user("one"), Message("assistant", "tw"), user("three")])


def test_reasoning_that_the_template_would_cut_out_stays_as_it_was_sampled(make: Make) -> None:
    tokenizer = make(REASONING)
    answer = sampled(tokenizer, "<think>\nhm\n</think>\n\ntwo", "<|im_end|>")
    tokens = tokenizer.render([user("one")]) + answer
    following = tokenizer.follow([user("three")], answer[-1])
    assert tokenizer.inner.decode(tokens + following) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\ntwo<|im_end|>\n"
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )


def test_several_messages_of_any_role_follow_at_once(make: Make) -> None:
    tokenizer = make(REASONING)
    news = [Message("tool", "4"), user("and now?")]
    tokens = tokenizer.render([user("one")]) + sampled(tokenizer, "two", "<|im_end|>")
    tokens += tokenizer.follow(news, tokens[-1])
    assert tokens == whole(tokenizer, [user("one"), Message("assistant", "two"), *news])


def test_a_message_that_quotes_the_stand_in_for_the_response_is_shown_whole(make: Make) -> None:
    tokenizer = make(REASONING)
    text = "flash-question flash-answer flash-answer"
    following = tokenizer.follow([user(text)], tokenizer.end[0])
    assert tokenizer.inner.decode(following) == f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_the_beginning_of_the_next_turn_is_kept_when_the_template_ends_none(make: Make) -> None:
    tokenizer = make(UNENDED, "<eos>")
    following = tokenizer.follow([user("three")], tokenizer.end[0])
    assert tokenizer.inner.decode(following) == "<|user|>three<|assistant|>"


@pytest.mark.parametrize("form", ["<s> $A", "<s> $A <eos>", "$A <eos>", "$A"])
def test_a_text_begins_as_the_tokenizer_begins_texts_and_messages_only_as_their_template_does(
    tmp_path: Path, make: Make, form: str
) -> None:
    inner = make(ALTERNATING).inner
    numbers = {token: inner.convert_tokens_to_ids(token) for token in ("<s>", "<eos>")}
    inner.backend_tokenizer.post_processor = processors.TemplateProcessing(form, special_tokens=list(numbers.items()))
    inner.save_pretrained(tmp_path / "model")
    tokenizer = HfTokenizer(ModelConfig(path=str(tmp_path / "model")))
    letters = inner.convert_tokens_to_ids(list("<s>ab"))
    start = [numbers["<s>"]] * form.startswith("<s>")
    assert tokenizer.render("<s>ab") == [*start, *letters]
    assert tokenizer.render("") == start
    assert tokenizer.follow("<s>ab", None) == letters
    assert tokenizer.render([Message("user", "ab")]).count(numbers["<s>"]) == 1


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"version": "1.0"}'),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"tokenizer_class": 3}'),
    ],
)
def test_a_damaged_tokenizer_is_a_config_error_for_the_policy_and_none_for_other_models(
    file: str, content: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError, match=r"model\.path = .* has no usable tokenizer: "):
        HfTokenizer(ModelConfig(path=str(tmp_path)))
    config = msgspec.convert(
        {"run": {"name": "x"}, "model": {"path": str(tmp_path)}, "env": {"path": "fake:Fake"}}, Config
    )
    check_tokenizer(config, "critic.path", str(tmp_path / "other"))


def test_text_follows_as_it_is(make: Make) -> None:
    tokenizer = make(None)
    assert tokenizer.follow("ab", 1) == tokenizer.follow("ab", None) == tokenizer.render("ab")
    assert tokenizer.follow("", 1) == []


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
        tokenizer.follow(news, tokenizer.end[0])


@pytest.mark.parametrize("template", [HIDING, None], ids=["hidden", "missing"])
def test_without_a_usable_template_a_response_ends_with_the_end_of_text(make: Make, template: str | None) -> None:
    tokenizer = make(template)
    assert tokenizer.ends == tokenizer.end
    assert tokenizer.ends_turn(tokenizer.end[0])
    assert not tokenizer.ends_turn(tokenizer.end[0] + 1)


def test_an_error_about_a_long_conversation_lists_its_first_roles_only(make: Make) -> None:
    with pytest.raises(EnvError, match="must alternate") as error:
        make(ALTERNATING).render([user("x")] * 5000)
    assert len(str(error.value)) < 1000
    assert "5000 messages" in str(error.value)


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


NO_THINKING = {"enable_thinking": False}


def text_of(tokenizer: HfTokenizer, tokens: list[int]) -> str:
    """Return the text of tokens, special tokens included."""
    return tokenizer.inner.decode(tokens)


def test_arguments_of_the_chat_template_reach_prompts_what_follows_and_what_is_learned(make: Make) -> None:
    plain = make(BASE)
    under = plain.with_arguments(NO_THINKING)
    assert plain.with_arguments({}) is plain
    assert under is plain.with_arguments(dict(NO_THINKING))
    for tokenizer, begun in ((plain, "assistant\n"), (under, "assistant\n(no)")):
        assert text_of(tokenizer, tokenizer.render([user("one")])).endswith(begun)
        assert text_of(tokenizer, tokenizer.follow([user("two")], tokenizer.end[0])).endswith(begun)
    prompt, answer = under.prompt_and_answer([user("one"), Message("assistant", "(no)two")])
    assert text_of(under, prompt).endswith("(no)")
    assert text_of(under, answer) == "two<|im_end|>"


def test_arguments_of_the_run_come_behind_those_of_a_row(make: Make, tmp_path: Path) -> None:
    make(BASE)
    config = ModelConfig(path=str(tmp_path / "model"), chat_template_kwargs=NO_THINKING)
    tokenizer = HfTokenizer(config).ready()
    assert text_of(tokenizer, tokenizer.render([user("one")])).endswith("(no)")
    thinking = tokenizer.with_arguments({"enable_thinking": True})
    assert text_of(thinking, thinking.render([user("one")])).endswith("assistant\n")


def test_an_argument_that_the_template_never_reads_is_an_error_of_the_run_and_a_warning_elsewhere(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make(BASE)
    for _ in range(2):
        tokenizer.with_arguments({"enable_thinkin": False})
    assert [record.message for record in caplog.records] == [
        f"the chat template of {tmp_path / 'model'} never reads enable_thinkin: without effect"
    ]
    config = ModelConfig(path=str(tmp_path / "model"), chat_template_kwargs={"enable_thinkin": False})
    with pytest.raises(ConfigError, match=r"chat_template_kwargs: .* never reads enable_thinkin; .*: enable_thinking"):
        HfTokenizer(config).ready()


def test_what_is_set_by_the_caller_is_no_argument_of_the_template(make: Make) -> None:
    with pytest.raises(EnvError, match="must not have add_generation_prompt, tools"):
        make(BASE).with_arguments({"tools": [], "add_generation_prompt": False})


def test_the_policy_goes_on_with_a_last_message_of_the_assistant(make: Make) -> None:
    tokenizer = make(BASE)
    shown = [user("one"), Message("assistant", "The answer")]
    assert text_of(tokenizer, tokenizer.render(shown)).endswith("<|im_start|>assistant\nThe answer")
    assert text_of(tokenizer, tokenizer.follow(shown, tokenizer.end[0])).endswith("<|im_start|>assistant\nThe answer")


def test_an_answer_is_learned_to_the_first_end_of_its_turn(make: Make) -> None:
    tokenizer = make(BASE.replace("{% endfor %}", "{% endfor %}{{ eos_token if not add_generation_prompt }}"), "<eos>")
    assert sorted(tokenizer.token_texts(tokenizer.ends)) == ["<eos>", "<|im_end|>"]
    _, answer = tokenizer.prompt_and_answer([user("one"), Message("assistant", "two")])
    assert text_of(tokenizer, answer) == "two<|im_end|>"


def test_a_template_that_writes_no_end_of_a_turn_is_followed_behind_the_token_that_the_model_ends_it_with(
    make: Make,
) -> None:
    tokenizer = make(UNENDED, "<eos>")
    assert tokenizer.token_texts(tokenizer.ends) == ["<eos>"]
    end = tokenizer.inner.convert_tokens_to_ids("<|user|>")
    assert text_of(tokenizer, tokenizer.follow([user("three")], end)) == "three<|assistant|>"


def test_tools_that_a_template_leaves_out_are_refused_and_reasoning_is_reported_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make(BASE)
    with pytest.raises(EnvError, match="shows nothing of tools, so that the model would never see it"):
        tokenizer.render([user("one")], [{"type": "function", "function": {"name": "add"}}])
    silent = make(BASE.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"))
    with pytest.raises(EnvError, match="shows nothing of a system message"):
        silent.render([Message("system", "be brief"), user("one")])
    for text in ("one", "two"):
        tokenizer.prompt_and_answer([user(text), Message("assistant", "two", "in thought")])
    assert [record.message.partition("shows ")[2] for record in caplog.records] == [
        "nothing of an assistant's reasoning: the reasoning in a conversation is neither shown to the model nor learned"
    ]


def test_a_template_that_reads_contents_as_parts_is_given_parts(make: Make) -> None:
    parts = BASE.replace("m.content", "m.content | map(attribute='text') | join")
    assert (
        text_of(make(parts), make(parts).render([user("one")]))
        == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_models_generation_config_is_told_the_ends_that_it_does_not_name(make: Make, tmp_path: Path) -> None:
    tokenizer = make(BASE, "<eos>")
    end, eos = tokenizer.inner.convert_tokens_to_ids(["<|im_end|>", "<eos>"])
    for named, then in ((eos, [eos, end]), ([eos, 3], [eos, 3, end]), (None, sorted([eos, end]))):
        generation = GenerationConfig(eos_token_id=named)
        tokenizer.add_ends(generation)
        assert generation.eos_token_id == then
    assert tokenizer.add_ends(generation) == []
    assert tokenizer.missing_ends() == "", "the model is still to be made"
    GenerationConfig(eos_token_id=eos).save_pretrained(tmp_path / "model")
    assert "ends turns with '<|im_end|>', which the model's generation_config does not name" in tokenizer.missing_ends()


# -- bounds on tokens, with which an observation that is too long is refused without being rendered -------------------


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
