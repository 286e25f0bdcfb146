"""Chat templates of some forty models, as the package `trl` ships them, against transformers' own rendering.

For each template and each kind of conversation, the prompt that an engine is shown and the answer that `flash sft`
learns are those of `apply_chat_template`, or the conversation is refused, or a warning says what the template leaves
out. `trl_templates.json` holds the outcome of each pair. The tokenizers are made here: a vocabulary of bytes, with the
control tokens that a template writes. `python -m tests.rollout.test_trl_templates` writes the file anew.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flash.config.tree import ModelConfig
from flash.errors import EnvError
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.service.chat import ChatMessage, messages_of

EXPECTED = Path(__file__).with_name("trl_templates.json")
FOUND = find_spec("trl")
FOLDER = Path(FOUND.origin).parent / "chat_templates" if FOUND is not None and FOUND.origin else Path("nowhere")
NAMES = sorted(file.stem for file in FOLDER.glob("*.jinja") if not file.stem.endswith("_training"))
"""The templates as models have them. Those for training differ by marks for transformers, which writes nothing."""

CONTROL = re.compile(
    r"""<\|[^|>' "]+\|>|<[a-z_"]+\|>|<\|[a-z_"/]+>|<\|"\|>|<｜[^｜]+｜>|\[/?INST\]|</s>|"""
    r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>|"
    r"<(?:start_of_turn|end_of_turn|start_of_image|end_of_utterance|image|sop)>"
)
"""Control tokens, as templates write them."""
SHOWN = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")
"""Control tokens that are not special tokens."""
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "diffusion": "<eos>",
    "gemma": "<eos>",
    "glm": "<|endoftext|>",
    "gptoss": "<|return|>",
    "idefics3": "<|end_of_text|>",
    "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llava": "</s>",
    "muse": "<|eot|>",
    "nemotron": "<|im_end|>",
    "phi3": "<|endoftext|>",
    "qwen": "<|im_end|>",
    "smolvlm": "<|im_end|>",
}
"""The tokenizers' ends of text, by how templates are called."""
BEGINS = {"cohere": "<BOS>", "deepseek": "<｜begin｜>", "gemma": "<bos>", "diffusion": "<bos>", "llama3": "<|begin|>"}
BEGINS |= {"lfm2": "<|startoftext|>", "llava": "<s>", "phi3": "<s>"}
TURN_ENDS = {
    "cohere2": ["<|END_OF_TURN_TOKEN|>"],
    "gemma": ["<end_of_turn>", "<eos>"],
    "gemma4": ["<eos>", "<turn|>", "<|tool_response>"],
    "glm4moe": ["<|endoftext|>"],
    "gptoss": ["<|call|>", "<|return|>"],
    "idefics3": ["<end_of_utterance>", "<|end_of_text|>"],
    "llama3_1": ["<|eot_id|>"],
    "muse_glimmer": ["<|eot|>"],
    "phi3": ["<|end|>", "<|endoftext|>"],
    "qwen3": ["<|im_end|>"],
}
"""All tokens that end a response."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Return the {name}",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "a town"}},
                "required": ["place"],
            },
        },
    }
    for name in ("weather", "time")
]
ASKED = {"role": "user", "content": "How is it in Rome?"}
SAID = {"role": "assistant", "content": "It is fine, and noon."}
AGAIN = {"role": "user", "content": "And in Oslo?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def thought(message: dict[str, Any], text: str) -> dict[str, Any]:
    """Return a message with its reasoning under each key that a template may read."""
    return {**message, "reasoning_content": text, "reasoning": text, "thinking": text}


def calls(*names: str) -> dict[str, Any]:
    """Return an assistant's message that calls these functions, in the form of chat templates."""
    made = [
        {"id": f"abcdefgh{place}", "type": "function", "function": {"name": name, "arguments": '{"place": "Rome"}'}}
        for place, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def results(*names: str) -> list[dict[str, Any]]:
    """Return a result for each call of `calls`, in the form of chat templates."""
    return [
        {"role": "tool", "tool_call_id": f"abcdefgh{place}", "name": name, "content": f"fine {place}"}
        for place, name in enumerate(names)
    ]


CASES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "user": ([ASKED, SAID], []),
    "turns": ([ASKED, SAID, AGAIN, {**SAID, "content": "It rains."}], []),
    "system": ([SYSTEM, ASKED, SAID], []),
    "tools": ([ASKED, calls("weather"), *results("weather"), SAID], TOOLS),
    "parallel": ([ASKED, calls("weather", "time"), *results("weather", "time"), SAID], TOOLS),
    "thinking": ([ASKED, thought(SAID, "Rome is sunny.")], []),
    "thinking twice": ([ASKED, thought(SAID, "Rome is sunny."), AGAIN, thought(SAID, "Oslo too.")], []),
    "thinking calls": ([ASKED, thought(calls("weather"), "I look."), *results("weather"), SAID], TOOLS),
    "spoken calls": ([ASKED, {**calls("weather"), "content": "I look."}, *results("weather"), SAID], TOOLS),
    "no thinking": ([ASKED, SAID], []),
    "prefilled": ([ASKED, {**SAID, "content": "It is"}], []),
}


def of(table: dict[str, str], name: str) -> str | None:
    """Return the value of the first key of `table` with which `name` begins; None if there is none."""
    return next((value for key, value in table.items() if name.startswith(key)), None)


def made(name: str, folder: Path) -> HfTokenizer:
    """Return a tokenizer with this template."""
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    given = {"eos_token": of(ENDS, name), "bos_token": of(BEGINS, name)}
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **given)
    found = set(CONTROL.findall(source)) | {f"<|{role}|>" for role in ("user", "assistant", "system") if "phi3" in name}
    tokens = sorted(found | {one for one in given.values() if one})
    fast.add_tokens([AddedToken(one, special=SHOWN.fullmatch(one) is None, normalized=False) for one in tokens])
    fast.chat_template = source
    fast.save_pretrained(folder)
    return HfTokenizer(ModelConfig(path=str(folder)))


def manners(messages: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield a conversation in the forms that different templates expect."""
    for parts, silent, as_text in product((False, True), ("", None), (False, True)):
        shown: list[dict[str, Any]] = []
        for message in messages:
            one = dict(message)
            if "tool_calls" in one:
                one["content"] = one["content"] or silent
                if not as_text:
                    one["tool_calls"] = [
                        {**call, "function": {**call["function"], "arguments": {"place": "Rome"}}}
                        for call in one["tool_calls"]
                    ]
            if parts and one["content"] is not None:
                one["content"] = [{"type": "text", "text": one["content"]}]
            shown.append(one)
        yield shown


def rendered(tokenizer: HfTokenizer, messages: Sequence[dict[str, Any]], tools: Any, **more: Any) -> list[int]:
    """Return the tokens that transformers makes of a conversation, in the first form of which it shows most."""
    best = ""
    for shown in manners(messages):
        try:
            text = tokenizer.inner.apply_chat_template(shown, tools=tools or None, tokenize=False, **more)
        except Exception:
            continue
        if not best or text.count("Rome") > best.count("Rome"):
            best = text
    assert best, "transformers shows the conversation in no form"
    return list(tokenizer.inner.encode(best, add_special_tokens=False))


def outcome(tokenizer: HfTokenizer, case: str) -> str:
    """Return `equal`, `told` with the part that a warning names, or `refused` with the reason.

    `moved`: equal, but an episode keeps its turns in the order in which they were said, and the template does not.

    Raises:
        AssertionError: something else is shown or learned, without a warning or an error.
    """
    conversation, tools = CASES[case]
    messages = messages_of(msgspec.convert(conversation, list[ChatMessage]))
    tokenizer._reported.clear()
    given = {"enable_thinking": False} if case == "no thinking" else {}
    tokenizer = tokenizer.with_arguments(given)
    if given and tokenizer._reported:
        return "told: never reads enable_thinking"
    answers = [place for place, one in enumerate(conversation) if one["role"] == "assistant"]
    moved = ""
    try:
        if case == "prefilled":
            opened = rendered(tokenizer, conversation, (), continue_final_message=True)
            assert tokenizer.render(messages) == opened, "the prompt that is gone on with"
            return "equal"
        for place in answers:
            shown = tokenizer.render(messages[:place], tools)
            prompt, answer = tokenizer.prompt_and_answer(messages[: place + 1], tools)
            asked = rendered(tokenizer, conversation[:place], tools, add_generation_prompt=True, **given)
            assert shown == asked, "the prompt of an episode"
            assert prompt == asked, "the prompt of what is learned"
            whole, both = rendered(tokenizer, conversation[: place + 1], tools, **given), prompt + answer
            if whole[: len(prompt)] != prompt:
                # The template drops reasoning once the final answer is there; an engine has been shown it.
                behind = next(at for at in range(len(whole), 0, -1) if whole[:at][-len(answer) :] == answer)
                both = whole[:behind]
            if answer[-1:] == tokenizer.end and whole[: len(both)] == both[:-1]:
                both = both[:-1]  # the template ends the turn with nothing
            assert whole[: len(both)] == both, "what is learned"
            assert not tokenizer.decode(whole[len(both) :]).strip(), "all of it is learned"
            news = next((later for later in answers if later > place), None)
            if news is not None:
                asked = rendered(tokenizer, conversation[:news], tools, add_generation_prompt=True)
                both, after = prompt + answer, messages[place + 1 : news]
                follows, cut = (tokenizer.follow(after, end, tools) for end in (answer[-1], None))
                if asked[: len(both)] == both:
                    assert asked[len(both) :] == follows, "what follows in an episode"
                elif asked[-len(follows) :] != follows:
                    moved = "moved: the template shows earlier turns in another order than they were said"
                    continue
                assert asked[-len(cut) :] == cut, "what follows a response that was cut"
    except EnvError as error:
        return f"refused: {reason(str(error))}"
    if tokenizer._reported:
        return f"told: {reason(next(iter(tokenizer._reported)))}"
    return moved or "equal"


def reason(text: str) -> str:
    """Return the part of a message that names the reason."""
    text = re.sub(r"the chat template of \S+ ", "", text)
    return re.split(r", so that|, so the|; |, where|: the reasoning|: it is", text)[0]


def outcomes(name: str) -> dict[str, str]:
    """Return the outcome of each of `CASES` with the template `name`, by the name of the case."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = made(name, Path(folder))
        return {case: outcome(tokenizer, case) for case in CASES}


@pytest.mark.skipif(not NAMES, reason="the package trl is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_each_template_shows_and_teaches_what_transformers_renders_or_says_what_it_leaves_out(name: str) -> None:
    assert outcomes(name) == json.loads(EXPECTED.read_text())[name]


@pytest.mark.skipif(not NAMES, reason="the package trl is not installed")
@pytest.mark.parametrize("name", TURN_ENDS)
def test_the_ends_of_turns_are_those_that_the_template_shows(name: str, tmp_path: Path) -> None:
    tokenizer = made(name, tmp_path)
    assert sorted(tokenizer.token_texts(tokenizer.ends)) == sorted(TURN_ENDS[name])


if __name__ == "__main__":
    found = {name: outcomes(name) for name in NAMES}
    EXPECTED.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    counts = Counter(one.partition(":")[0] for cases in found.values() for one in cases.values())
    sys.stdout.write(f"{dict(counts)}\n")
