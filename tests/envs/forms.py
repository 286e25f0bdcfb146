"""Small tokenizers and chat templates of the forms that models of today have.

None is a model's own: templates of Qwen3, Llama 3, Mistral and GPT-OSS come with their weights, which are not here.
These keep what matters for appending: where tools stand, how calls and their results are written, what ends a turn,
what a template refuses, and what it cuts out of earlier turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flash.environment import Spoken
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.types import Message, Tool, ToolCall

QWEN = """\
{%- if tools -%}
{{- '<|im_start|>system\\n# Tools\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}{{- '\\n</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if m.reasoning_content and loop.index0 > last.user -%}
{{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] -%}
{%- if m.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{%- set f = call.function -%}
{{- '<tool_call>\\n{"name": "' + f.name + '", "arguments": ' -}}
{{- f.arguments if f.arguments is string else f.arguments | tojson -}}{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""Reasoning apart, cut out before the last user's message; results of parallel calls in one turn of the user's."""

LLAMA = """\
{{- '<|begin_of_text|>' -}}
{%- set first = namespace(user=true) -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and m.tool_calls -%}
{%- if m.tool_calls | length != 1 -%}{{- raise_exception('one call at a time') -}}{%- endif -%}
{%- set f = m.tool_calls[0].function -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + f.name + '", "parameters": ' -}}
{{- f.arguments | tojson -}}{{- '}<|eot_id|>' -}}
{%- elif m.role == 'tool' -%}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' -}}
{%- else -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' -}}
{%- if m.role == 'user' and first.user and tools -%}
{{- 'Functions:\\n' -}}{%- for tool in tools -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}
{%- endif -%}
{%- if m.role == 'user' -%}{%- set first.user = false -%}{%- endif -%}
{{- m.content | trim -}}{{- '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""
"""Tools in the user's first message; no more than one call in a message."""

MISTRAL = """\
{{- '<s>' -}}
{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{%- if tools and loop.index0 == last.user -%}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}
{%- endif -%}
{{- '[INST] ' + m.content + '[/INST]' -}}
{%- elif m.role == 'tool' -%}
{%- if m.tool_call_id | length != 9 -%}{{- raise_exception('a call is named by nine letters') -}}{%- endif -%}
{{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' -}}
{%- elif m.role == 'assistant' and m.tool_calls -%}
{{- '[TOOL_CALLS] [' -}}
{%- for call in m.tool_calls -%}
{%- if call.id | length != 9 -%}{{- raise_exception('a call is named by nine letters') -}}{%- endif -%}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) -}}
{{- ', "id": "' + call.id + '"}' -}}{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
{%- endfor -%}
{{- ']</s>' -}}
{%- elif m.role == 'assistant' -%}{{- ' ' + m.content + '</s>' -}}
{%- else -%}{{- raise_exception('there is no ' + m.role) -}}
{%- endif -%}
{%- endfor -%}
"""
"""Tools before the last user's message; calls have names, which their results repeat."""

GPT_OSS = """\
{%- if tools -%}
{{- '<|start|>developer<|message|># Tools\\n' -}}{%- for tool in tools -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- set last = namespace(name=none) -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and m.tool_calls -%}
{%- set f = m.tool_calls[0].function -%}
{%- set last.name = f.name -%}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' -}}
{{- f.arguments | tojson -}}{{- '<|call|>' -}}
{%- elif m.role == 'assistant' -%}
{%- set last.name = none -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content -}}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -}}
{%- elif m.role == 'tool' -%}
{%- if last.name is none -%}{{- raise_exception('a result without a call') -}}{%- endif -%}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' -}}
{{- (m.content | tojson) + '<|end|>' -}}
{%- else -%}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""
"""Channels; a call ends with a token of its own; results bear the function's name, which only the call before has."""

SPECIAL = {
    "qwen": ["<|im_start|>", "<|im_end|>"],
    "llama": ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"],
    "mistral": [
        *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
        *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ],
    "gpt_oss": ["<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"],
}
SHOWN = {"qwen": ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]}
"""Tokens of their own that are part of the text."""

MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the"), ("e", "r"), ('"', ":")]
"""So that a text has several sequences of tokens: what was sampled is not what the tokenizer makes of it."""


class Form:
    """How one family of models writes.

    Args:
        template: for its chats.
        end: the token that ends an answer.
        call_end: the one that ends an answer that calls.
        write: what a response is as text, given its reasoning, its content and its calls.
        tool_parser: vLLM's for it.
        reasoning_parser: the same.
        most_calls: in one answer.
    """

    def __init__(
        self,
        name: str,
        template: str,
        end: str,
        call_end: str,
        write: Callable[[str, str, Sequence[ToolCall]], str],
        *,
        tool_parser: str,
        reasoning_parser: str | None = None,
        most_calls: int = 3,
    ) -> None:
        self.name = name
        self.template = template
        self.end = end
        self.call_end = call_end
        self.write = write
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        self.most_calls = most_calls

    def save(self, folder: Path) -> str:
        """Write its tokenizer; the path for `model.path`."""
        marks = [*SPECIAL[self.name], *SHOWN.get(self.name, [])]
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = [*alphabet, *(left + right for left, right in MERGES), *marks]
        inner = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=MERGES))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
        fast = PreTrainedTokenizerFast(
            tokenizer_object=inner,
            eos_token=self.end,
            additional_special_tokens=SPECIAL[self.name],
            clean_up_tokenization_spaces=False,
        )
        fast.add_tokens(SHOWN.get(self.name, []))
        fast.chat_template = self.template
        fast.save_pretrained(folder)
        return str(folder)


def _object(call: ToolCall, arguments: str) -> str:
    return f'{{"name": {json.dumps(call.name)}, "{arguments}": {call.arguments}}}'


def _qwen(reasoning: str, content: str, calls: Sequence[ToolCall]) -> str:
    thought = f"<think>\n{reasoning}\n</think>\n\n"
    return thought + content + "".join(f"\n<tool_call>\n{_object(call, 'arguments')}\n</tool_call>" for call in calls)


def _llama(reasoning: str, content: str, calls: Sequence[ToolCall]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls) if calls else content


def _mistral(reasoning: str, content: str, calls: Sequence[ToolCall]) -> str:
    objects = ", ".join(_object(call, "arguments") for call in calls)
    return f"[TOOL_CALLS] [{objects}]" if calls else f" {content}"


def _gpt_oss(reasoning: str, content: str, calls: Sequence[ToolCall]) -> str:
    thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant"
    if not calls:
        return f"{thought}<|channel|>final<|message|>{content}"
    return f"{thought} to=functions.{calls[0].name}<|channel|>commentary json<|message|>{calls[0].arguments}"


FORMS = {
    form.name: form
    for form in (
        Form("qwen", QWEN, "<|im_end|>", "<|im_end|>", _qwen, tool_parser="hermes", reasoning_parser="qwen3"),
        Form("llama", LLAMA, "<|eot_id|>", "<|eot_id|>", _llama, tool_parser="llama3_json"),
        Form("mistral", MISTRAL, "</s>", "</s>", _mistral, tool_parser="mistral"),
        Form("gpt_oss", GPT_OSS, "<|return|>", "<|call|>", _gpt_oss, tool_parser="openai", most_calls=1),
    )
}


class HarmonyTokenizer(HfTokenizer):
    """Reads the channels of GPT-OSS itself: vLLM's parser of them loads its vocabulary from the network."""

    def check_reads_calls(self) -> None:
        """They are read here."""

    def read_response(
        self, token_ids: Sequence[int], stopped: bool, prompt: Sequence[int], tools: Sequence[Tool], *, calling: bool
    ) -> Spoken:
        text = self.inner.decode(list(token_ids), skip_special_tokens=False)
        thought = re.search(r"<\|channel\|>analysis<\|message\|>(.*?)<\|end\|>", text, re.DOTALL)
        call = re.search(
            r" to=functions\.(\w+)<\|channel\|>commentary json<\|message\|>(.*)<\|call\|>$", text, re.DOTALL
        )
        said = re.search(r"<\|channel\|>final<\|message\|>(.*?)(<\|return\|>)?$", text, re.DOTALL)
        calls = (ToolCall(f"{len(prompt):09d}", call[1], call[2]),) if call and calling else ()
        return Spoken(Message("assistant", said[1] if said else "", thought[1] if thought else "", calls))


ADD: dict[str, object] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "string"}}},
    },
}


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        return False
