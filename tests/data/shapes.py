"""Rows as users of other systems have them, each with the form that it is read in.

The rows follow the documents of TRL (dataset formats), verl (its GSM8K script), LLaMA-Factory, OpenAI (fine-tuning),
axolotl and ms-swift, and the cards of GSM8K, ultrachat, Alpaca, Dolly and glaive on the Hugging Face hub.
"""

from __future__ import annotations

import json
from typing import Any

from flash.data.shapes import Conversation, Text

Row = dict[str, Any]

USER = {"role": "user", "content": "What color is the sky?"}
BLUE = {"role": "assistant", "content": "It is blue."}
GREEN = {"role": "assistant", "content": "It is green."}
SYSTEM = {"role": "system", "content": "Be brief."}
LIGHT = {
    "type": "function",
    "function": {
        "name": "control_light",
        "description": "Controls the lights in a room.",
        "parameters": {"type": "object", "properties": {"room": {"type": "string"}}},
    },
}
ARGUMENTS = {"room": "living room"}
PADDED = {"room": "living room", "city": None}
"""Arguments with the names of another tool's, as a table gives them to all."""
PADDED_PARAMETERS = {"type": "object", "properties": {"room": {"type": "string", "enum": None}, "city": None}}
ARGUMENTS_TEXT = '{"room":"living room"}'
CALL = {"type": "function", "function": {"name": "control_light", "arguments": ARGUMENTS_TEXT}}
NAMED = {"id": "call_1", **CALL}
ASKED = {"role": "user", "content": "Turn on the lights."}
DONE = {"role": "assistant", "content": "Done!"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "on"}
CALLED = [ASKED, {"role": "assistant", "tool_calls": [NAMED]}, RESULT, DONE]
OLD_NAME = "call01000"
"""Name that a call of an older form is given."""
OLD_CALLED = [
    ASKED,
    {"role": "assistant", "tool_calls": [{"id": OLD_NAME, **CALL}]},
    {"role": "tool", "tool_call_id": OLD_NAME, "content": "on"},
    DONE,
]
SUM = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = 72 clips altogether.\n#### 72"


def talk(shape: str, *messages: Row, shown: int = 0, tools: list[Row] | None = None, **template: Any) -> Conversation:
    """Return a conversation of these messages, of which the first `shown` are not trained."""
    return Conversation(shape, list(messages), shown, tools or [], template)


LEARNED: dict[str, tuple[Row, Conversation | Text]] = {
    "TRL, language modelling": ({"text": "The sky is blue."}, Text("text", "", "The sky is blue.")),
    "TRL, language modelling, conversational": ({"messages": [USER, BLUE]}, talk("messages", USER, BLUE)),
    "TRL, prompt and completion": (
        {"prompt": "The sky is", "completion": " blue."},
        Text("prompt and completion", "The sky is", " blue."),
    ),
    "TRL, prompt and completion, conversational": (
        {"prompt": [USER], "completion": [BLUE]},
        talk("prompt and completion", USER, BLUE, shown=1),
    ),
    "TRL, tools": (
        {
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "tool_calls": [{"type": "function", "function": {"name": "control_light", "arguments": ARGUMENTS}}],
                },
                {"role": "tool", "name": "control_light", "content": "on"},
                DONE,
            ],
            "tools": [LIGHT],
        },
        talk(
            "messages",
            ASKED,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "name": "control_light", "content": "on"},
            DONE,
            tools=[LIGHT],
        ),
    ),
    "TRL, template arguments": (
        {"messages": [USER, BLUE], "chat_template_kwargs": {"enable_thinking": False}},
        talk("messages", USER, BLUE, enable_thinking=False),
    ),
    "TRL, Harmony": (
        {"messages": [{**SYSTEM, "role": "developer"}, USER, {**BLUE, "thinking": "Deep reflection..."}]},
        talk("messages", {**SYSTEM, "role": "developer"}, USER, {**BLUE, "thinking": "Deep reflection..."}),
    ),
    "OpenAI, fine-tuning": (
        {
            "messages": [SYSTEM, *CALLED[:2], RESULT, {**DONE, "weight": 0}],
            "tools": [LIGHT],
            "parallel_tool_calls": False,
        },
        talk("messages", SYSTEM, *CALLED[:2], RESULT, {**DONE, "weight": 0}, tools=[LIGHT]),
    ),
    "OpenAI, content parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "What color is the sky?"}]}, BLUE]},
        talk("messages", {"role": "user", "content": [{"type": "text", "text": "What color is the sky?"}]}, BLUE),
    ),
    "OpenAI, functions of old": (
        {
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "control_light", "arguments": ARGUMENTS_TEXT},
                },
                {"role": "function", "name": "control_light", "content": "on"},
                DONE,
            ],
            "functions": [LIGHT["function"]],
        },
        talk("messages", *OLD_CALLED[:2], {**OLD_CALLED[2], "name": "control_light"}, DONE, tools=[LIGHT]),
    ),
    "fields that Parquet has padded": (
        {
            "messages": [
                {**ASKED, "name": None, "tool_calls": None, "tool_call_id": None},
                {"role": "assistant", "content": None, "tool_calls": [{**NAMED, "index": None}], "tool_call_id": None},
                {**RESULT, "tool_calls": None},
                {**DONE, "tool_calls": None},
            ],
            "tools": None,
            "prompt": None,
        },
        talk("messages", *CALLED),
    ),
    "a call with arguments that are null, and tools as JSON text": (
        {
            "messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "go", "arguments": None}}]}],
            "tools": json.dumps([LIGHT]),
        },
        talk(
            "messages",
            ASKED,
            {
                "role": "assistant",
                "tool_calls": [{"type": "function", "function": {"name": "go", "arguments": "{}"}}],
            },
            tools=[LIGHT],
        ),
    ),
    "an answer in JSON": (
        {"question": "[1, 2] as an object?", "answer": '{"first": 1, "second": 2}'},
        talk(
            "question and answer",
            {"role": "user", "content": "[1, 2] as an object?"},
            {"role": "assistant", "content": '{"first": 1, "second": 2}'},
        ),
    ),
    "a prompt and a completion in JSON": (
        {"prompt": "[[0, 1], [1, 0]]", "completion": "[[1, 0], [0, 1]]"},
        Text("prompt and completion", "[[0, 1], [1, 0]]", "[[1, 0], [0, 1]]"),
    ),
    "messages as JSON text": ({"messages": json.dumps([USER, BLUE])}, talk("messages", USER, BLUE)),
    "ultrachat": (
        {"prompt": "What color is the sky?", "prompt_id": "f0e37e9f", "messages": [USER, BLUE]},
        talk("messages", USER, BLUE),
    ),
    "ultrafeedback, with messages for fine-tuning": (
        {
            "prompt": "What color is the sky?",
            "chosen": [USER, BLUE],
            "rejected": [USER, GREEN],
            "messages": [USER, BLUE],
            "score_chosen": 8.5,
        },
        talk("messages", USER, BLUE),
    ),
    "ShareGPT": (
        {
            "id": "QWJhYvA_0",
            "conversations": [
                {"from": "human", "value": "What color is the sky?"},
                {"from": "gpt", "value": "It is blue."},
            ],
        },
        talk("conversations", USER, BLUE),
    ),
    "ShareGPT of LLaMA-Factory, with tools": (
        {
            "conversations": [
                {"from": "human", "value": "Turn on the lights."},
                {"from": "function_call", "value": json.dumps({"name": "control_light", "arguments": ARGUMENTS})},
                {"from": "observation", "value": "on"},
                {"from": "gpt", "value": "Done!"},
            ],
            "system": "Be brief.",
            "tools": json.dumps([LIGHT["function"]]),
        },
        talk("conversations", SYSTEM, *OLD_CALLED, tools=[LIGHT]),
    ),
    "ShareGPT of axolotl, with masks": (
        {
            "conversations": [
                {"from": "human", "value": "What color is the sky?", "weight": None},
                {"from": "gpt", "value": "It is green.", "weight": 0},
                {"from": "human", "value": "What color is the sky?"},
                {"from": "gpt", "value": "It is blue.", "train": True},
            ]
        },
        talk("conversations", USER, {**GREEN, "weight": 0}, USER, {**BLUE, "weight": 1}),
    ),
    "verl, with masks": (
        {
            "messages": [
                USER,
                {**GREEN, "loss_mask": 0},
                USER,
                {**GREEN, "trainable": False},
                USER,
                {**BLUE, "train": 1},
            ]
        },
        talk("messages", USER, {**GREEN, "weight": 0}, USER, {**GREEN, "weight": 0}, USER, {**BLUE, "weight": 1}),
    ),
    "ms-swift, with a scale of the loss": (
        {"messages": [USER, {**GREEN, "loss_scale": 0.0}, USER, BLUE]},
        talk("messages", USER, {**GREEN, "weight": 0.0}, USER, BLUE),
    ),
    "OpenOrca": (
        {"id": "t0.1", "system_prompt": "Be brief.", "question": "What color is the sky?", "response": "It is blue."},
        talk("question and response", SYSTEM, USER, BLUE),
    ),
    "OpenRLHF, input and output": (
        {"input": "What color is the sky?", "output": "It is blue."},
        talk("input and output", USER, BLUE),
    ),
    "questions of a context": (
        {
            "question": "How many heads?",
            "context": "CREATE TABLE head (age INTEGER)",
            "answer": "SELECT COUNT(*) FROM head",
        },
        talk(
            "question and answer",
            {"role": "user", "content": "How many heads?\nCREATE TABLE head (age INTEGER)"},
            {"role": "assistant", "content": "SELECT COUNT(*) FROM head"},
        ),
    ),
    "a question that shows its context and its choices": (
        {"question": "(A) red (B) blue. Sky?", "context": "Sky?", "choices": {"text": ["red", "blue"]}, "answer": "B"},
        talk(
            "question and answer",
            {"role": "user", "content": "(A) red (B) blue. Sky?"},
            {"role": "assistant", "content": "B"},
        ),
    ),
    "tools and arguments that a table has padded, as JSON": (
        {
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "tool_calls": [{**NAMED, "function": {"name": "control_light", "arguments": PADDED}}],
                },
                RESULT,
                DONE,
            ],
            "tools": [{**LIGHT, "function": {**LIGHT["function"], "parameters": PADDED_PARAMETERS}}],
        },
        talk("messages", *CALLED, tools=[LIGHT]),
    ),
    "a text that shows its system message and its tools": (
        {"text": "Be brief. Use control_light.", "system": "Be brief.", "tools": [LIGHT]},
        Text("text", "", "Be brief. Use control_light."),
    ),
    "ms-swift": (
        {
            "messages": [
                ASKED,
                {"role": "tool_call", "content": json.dumps({"name": "control_light", "arguments": ARGUMENTS})},
                {"role": "tool_response", "content": "on"},
                {**DONE, "loss": False},
            ],
            "tools": json.dumps([LIGHT]),
        },
        talk("messages", *OLD_CALLED[:3], {**DONE, "weight": 0}, tools=[LIGHT]),
    ),
    "Alpaca": (
        {"instruction": "What color is the sky?", "input": "", "output": "It is blue."},
        talk("instruction and output", USER, BLUE),
    ),
    "Alpaca, with an input and a history": (
        {
            "instruction": "Sum up:",
            "input": "The sky is blue.",
            "output": "Blue.",
            "system": "Be brief.",
            "history": [["What color is the sky?", "It is blue."]],
        },
        talk(
            "instruction and output",
            SYSTEM,
            USER,
            BLUE,
            {"role": "user", "content": "Sum up:\nThe sky is blue."},
            {"role": "assistant", "content": "Blue."},
        ),
    ),
    "Dolly": (
        {"instruction": "Sum up:", "context": "The sky is blue.", "response": "Blue.", "category": "summarization"},
        talk(
            "instruction and response",
            {"role": "user", "content": "Sum up:\nThe sky is blue."},
            {"role": "assistant", "content": "Blue."},
        ),
    ),
    "GSM8K": (
        {"question": "How many clips?", "answer": SUM},
        talk(
            "question and answer", {"role": "user", "content": "How many clips?"}, {"role": "assistant", "content": SUM}
        ),
    ),
    "verl, fine-tuning over several turns": (
        {"messages": [USER, BLUE], "tools": None, "enable_thinking": True},
        talk("messages", USER, BLUE, enable_thinking=True),
    ),
    "what a tool returned, as an object": (
        {"messages": [ASKED, {"role": "assistant", "tool_calls": [NAMED]}, {**RESULT, "content": {"on": True}}, DONE]},
        talk("messages", *CALLED[:2], {**RESULT, "content": '{"on":true}'}, DONE),
    ),
}
"""Rows for `flash sft`."""

MIXED = {"OpenAI, content parts", "what a tool returned, as an object", "content parts"}
"""Rows whose columns mix types, which Arrow does not."""

PROMPTED: dict[str, tuple[Row, Row, Any, str]] = {
    "TRL, prompt only": ({"prompt": "The sky is", "answer": "blue"}, {}, "The sky is", "blue"),
    "TRL, prompt only, conversational": ({"prompt": [USER], "answer": "blue"}, {}, [USER], "blue"),
    "verl": (
        {
            "data_source": "openai/gsm8k",
            "prompt": [USER],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "72"},
            "extra_info": {"split": "train", "index": 0, "answer": SUM, "question": "How many clips?"},
        },
        {},
        [USER],
        "72",
    ),
    "verl, another column": (
        {"prompt": [USER], "reward_model": {"ground_truth": "72"}, "extra_info": {"answer": SUM}},
        {"answer": "extra_info.answer"},
        [USER],
        "72",
    ),
    "GSM8K": ({"question": "How many clips?", "answer": SUM}, {}, "How many clips?", "72"),
    "GSM8K, thousands": ({"question": "How many?", "answer": "So.\n#### 1,080"}, {}, "How many?", "1080"),
    "GSM8K, millions": ({"question": "How many?", "answer": "#### -12,345,678.5"}, {}, "How many?", "-12345678.5"),
    "GSM8K, a pair": ({"question": "Where?", "answer": "So.\n#### 1,2"}, {}, "Where?", "1,2"),
    "GSM8K, a pair of longer numbers": ({"question": "Where?", "answer": "#### 1234,567"}, {}, "Where?", "1234,567"),
    "GSM8K, a list": ({"question": "Which?", "answer": "#### 1,22,333"}, {}, "Which?", "1,22,333"),
    "MATH": (
        {"problem": "Find x.", "solution": r"It is $\boxed{\frac12}$.", "level": "Level 5"},
        {},
        "Find x.",
        r"It is $\boxed{\frac12}$.",
    ),
    "Alpaca": ({"instruction": "Add:", "input": "1 and 2", "output": "3"}, {}, "Add:\n1 and 2", "3"),
    "a question of a context": (
        {"question": "How many heads?", "context": "CREATE TABLE head (age INTEGER)", "answer": "1"},
        {},
        "How many heads?\nCREATE TABLE head (age INTEGER)",
        "1",
    ),
    "a question that shows its choices": (
        {"question": "Red or blue?", "choices": ["Red", "blue"], "answer": "blue"},
        {},
        "Red or blue?",
        "blue",
    ),
    "a prompt beside a context": ({"prompt": "p", "context": "for the verifier", "answer": "a"}, {}, "p", "a"),
    "a system column": (
        {"prompt": [USER], "system": "Be brief.", "answer": "blue"},
        {},
        [SYSTEM, USER],
        "blue",
    ),
    "content parts": (
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "answer": "a"},
        {},
        [{"role": "user", "content": "Hi"}],
        "a",
    ),
    "padded by Parquet": (
        {"prompt": [{"role": "user", "content": "Hi", "name": None, "tool_calls": None}], "answer": "a"},
        {},
        [{"role": "user", "content": "Hi"}],
        "a",
    ),
    "a container image": ({"prompt": "p", "image": "python:3.11-slim", "answer": "a"}, {}, "p", "a"),
    "a prompt in JSON": ({"prompt": '[{"x": 1}]', "answer": "[1]"}, {}, '[{"x": 1}]', "[1]"),
    "an integer": ({"prompt": "p", "answer": 7}, {}, "p", "7"),
    "a double": ({"prompt": "p", "answer": 7.0}, {}, "p", "7"),
    "a fraction": ({"prompt": "p", "answer": -0.25}, {}, "p", "-0.25"),
    "the first double after which whole numbers are missing": ({"prompt": "p", "answer": 2.0**53}, {}, "p", str(2**53)),
    "a double of 16 digits": ({"prompt": "p", "answer": -9999999999999998.0}, {}, "p", "-9999999999999998"),
    "a great double": ({"prompt": "p", "answer": 1e300}, {}, "p", "1e+300"),
    "a boolean": ({"prompt": "p", "answer": True}, {}, "p", "true"),
    "a list of one": ({"prompt": "p", "golden": ["Paris"]}, {"answer": "golden"}, "p", "Paris"),
    "a list": ({"prompt": "p", "golden": ["Paris", "paris"]}, {"answer": "golden"}, "p", '["Paris","paris"]'),
    "an object": ({"prompt": "p", "answer": {"target": 3, "of": [1, 2]}}, {}, "p", '{"target":3,"of":[1,2]}'),
}
"""Rows for environments: the row, columns that are named, the prompt and the answer."""

PICTURE = {"type": "image_url", "image_url": {"url": "data:"}}

UNLEARNED: list[tuple[Row, str]] = [
    (
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
        "a preference row .* column `completion`",
    ),
    ({"chosen": [USER, BLUE], "rejected": [USER, GREEN]}, "a preference row .* column `messages`"),
    ({"prompt": "The sky is", "completion": " blue.", "label": True}, "an unpaired preference row"),
    ({"instruction": "a", "output": "b", "kto_tag": False}, "an unpaired preference row"),
    ({"prompt": "p", "completions": ["a"], "labels": [True]}, "a row of stepwise supervision"),
    ({"prompt": "The sky is"}, "has a prompt and nothing to learn behind it; expected `completion`"),
    ({"prompt": [USER], "reward_model": {"ground_truth": "72"}}, "nothing to learn behind it"),
    ({"messages": [USER]}, "there is no message of the assistant to learn"),
    ({"prompt": [BLUE], "completion": [USER]}, "there is no message of the assistant to learn"),
    ({"messages": []}, "there is no message of the assistant to learn"),
    ({"title": "x", "body": "y"}, "none of the known shapes: expected `messages` .*; got 'title', 'body'"),
    ({"messages": [USER, BLUE], "prompt": "Another one"}, "a `prompt` that is none of them"),
    ({"messages": [USER, BLUE], "prompt": "x", "completion": "y"}, "leave one of them out"),
    ({"messages": [USER, BLUE], "image": "refcoco/0001.JPG"}, "has 'image': models are trained on text here"),
    ({"messages": [USER, BLUE], "images": ["a.png"]}, "has 'images': models are trained on text here"),
    ({"messages": [{"role": "user", "content": [PICTURE]}, BLUE]}, r"messages\[0\] has a part of type 'image_url'"),
    ({"messages": [{"role": "user", "content": 7}, BLUE]}, r"messages\[0\]: `content` must be text"),
    ({"messages": [{"role": "user"}, BLUE]}, r"messages\[0\] has no content"),
    ({"messages": [{"content": "x"}]}, r"messages\[0\] must have `role` and `content`, or `from` and `value`"),
    ({"messages": ["hello"]}, r"messages\[0\] must be an object with `role` and `content`"),
    ({"messages": 7}, "'messages' must be text or a list of messages"),
    ({"messages": [SYSTEM, USER, BLUE], "system": "Be long."}, "a `system` column and another system message"),
    ({"messages": [ASKED, {"role": "assistant", "tool_calls": "go"}]}, r"messages\[1\]: `tool_calls` must be a list"),
    ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "a call must have the `name`"),
    ({"messages": [USER, BLUE], "tools": "none"}, "`tools` must be a list or JSON text"),
    ({"messages": [USER, BLUE], "tools": [{"type": "function"}]}, "a tool must have the `name`"),
    ({"instruction": "a", "output": "b", "history": ["x"]}, "`history` must be a list of pairs"),
    ({"prompt": "p", "completion": "c", "system": "Be brief."}, "plain text, .* shows nothing of `system`; give `mess"),
    ({"text": "p", "tools": [LIGHT]}, "plain text, .* shows nothing of `tools`"),
    ({"prompt": "p", "completion": "c", "history": [["a", "b"]]}, "plain text, .* shows nothing of `history`"),
    ({"prompt": "p", "response": "r"}, "`prompt` and `response`, .* name them `question` and `response`"),
    ({"question": "q", "choices": ["x", "y"], "answer": "x"}, "has 'choices', which its prompt does not show"),
    (
        {"instruction": "q", "context": ["x", "y"], "output": "z"},
        "'context' must be text, which follows the instruction",
    ),
]
"""Rows that `flash sft` refuses, with a part of the message."""

UNASKED: list[tuple[Row, str]] = [
    ({"prompt": 3, "answer": "a"}, "row 1: 'prompt' must be text or a list of messages, but is 3"),
    ({"prompt": None, "answer": "a"}, "row 1: 'prompt' is null; expected a value, or leave the row out"),
    ({"prompt": [USER, BLUE], "answer": "a"}, "row 1: 'prompt' ends with a message of the assistant"),
    ({"prompt": [], "answer": "a"}, "row 1: 'prompt' has no messages"),
    ({"prompt": [{"role": "robot", "content": "x"}], "answer": "a"}, r"row 1, messages\[0\]: Roles are"),
    ({"prompt": "<image> What?", "answer": "a", "images": ["a.png"]}, "row 1 has 'images'"),
    ({"prompt": "p", "answer": "a", "tools": [LIGHT]}, "row 1 has 'tools', which this environment does not show"),
    ({"prompt": "p", "choices": ["x", "y"], "answer": 1}, "row 1 has 'choices', which its prompt does not show"),
    ({"prompt": [USER], "options": '["x", "y"]', "answer": 1}, "row 1 has 'options', which its prompt does not show"),
    ({"prompt": "p", "answer": None}, "row 1: 'answer' is null"),
    ({"prompt": "p", "answer": []}, "row 1: 'answer' is empty"),
    ({"prompt": "p", "answer": float("nan")}, "row 1: 'answer' is nan, which is no answer"),
]
"""Rows that environments refuse, with a part of the message."""
