"""Conversion of rows of all common shapes to conversations, prompts and answers of one form.

Messages have the form of OpenAI's API, as plain dictionaries: roles `system`, `developer`, `user`, `assistant` and
`tool`; `content` as text or text parts; `tool_calls` with arguments as JSON text. Null fields are removed. Fields that
this module does not know (`reasoning_content`, `thinking`, `weight`, …) are kept unchanged. `place`, an argument of
most functions, names the file and the row for error messages, and sometimes the column. `values` are the values of a
row by column. Every function raises ConfigError, with the place, for a value that it cannot convert.

`flash sft` trains on `example_of`; environments show `prompt_of` and compare with `answer_of`. Supported shapes: TRL's
language modelling and prompt-completion, OpenAI's fine-tuning rows, ultrachat, ShareGPT, Alpaca, pairs of question and
answer, and verl's prompts and answers. Preference rows and rows with images are refused with an error, because no part
of a row may be ignored silently.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, cast

import msgspec

from flash.data.tables import Row, json_of, suggested, value_of, without_nulls
from flash.errors import ConfigError
from flash.service.chat import ChatMessage, messages_of
from flash.service.fields import ApiError
from flash.types import ASSISTANT, TOOL, Message

Given = dict[str, Any]
"""A message, a call or a tool in the form of OpenAI's API."""

ALIASES = {
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "bing", "bard"), ASSISTANT),
    **dict.fromkeys(("function", "observation", "tool_response", "function_response", "ipython"), TOOL),
}
"""OpenAI's names for the roles of ShareGPT, LLaMA-Factory, ms-swift and others."""
CALLS = ("function_call", "tool_call")
"""Roles of messages whose content is a call as JSON text."""
CONVERSATIONS = ("messages", "conversations", "conversation")
"""Columns that hold a list of messages."""
PAIRS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("problem", "solution"),
    ("query", "response"),
    ("input", "output"),
)
"""Pairs of columns with a text of the user and the answer to it. The chat template is applied to both."""
INPUTS = {
    "instruction": ("input", "context"),
    **dict.fromkeys(("question", "problem", "query"), ("context",)),
}
"""Columns whose text is appended to a prompt, by the name of the prompt's column."""
CHOICES = ("choices", "options")
"""Columns with the options of a multiple-choice question, which the prompt must show."""
MASKS = ("train", "trainable", "loss", "loss_mask", "loss_scale")
"""Names of a message's `weight` in axolotl, verl and ms-swift."""
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
"""Columns of images, videos and audio."""
MEDIA_FILES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tiff", ".mp4", ".webm", ".mp3", ".wav", ".flac")
"""Suffixes of media files. Any other text in a column of `MEDIA`, such as the name of a container image, is allowed."""
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "messages", "conversations")
"""Usual names of the column with the prompt, the most reliable first."""
ANSWERS = ("answer", "reward_model.ground_truth", "ground_truth", "solution", "target", "output")
"""Usual names of the column with the answer, the most reliable first."""
FORMS = (
    "`messages` (or ShareGPT's `conversations`), `prompt` and `completion`, `instruction` and `output`, `question` and "
    "`answer`, or `text`"
)
"""Supported shapes, as part of error messages."""
MARK = "####"
"""Mark before the final answer in the last line of GSM8K's solutions."""
GROUPED = re.compile(r"-?[1-9][0-9]{0,2}(,[0-9]{3})+(\.[0-9]*)?")
"""Number whose thousands are grouped by commas, such as `1,234.5`."""
EXPONENT_FROM = 1e16
"""Magnitude from which Python writes a float with an exponent. Answers keep this form."""


class Conversation(msgspec.Struct, frozen=True):
    """A conversation, in which the messages of the assistant are trained."""

    shape: str
    """Columns of the row that hold the messages, for people."""
    messages: list[Given]
    """All messages, the first one first."""
    shown: int = 0
    """Number of messages at the beginning that are not trained."""
    tools: list[Given] = []
    """Functions that the assistant may call."""
    template: dict[str, Any] = {}
    """Arguments for the chat template, from the row (see `template_of`)."""


class Text(msgspec.Struct, frozen=True):
    """A text and its continuation, without a chat template. The continuation is trained."""

    shape: str
    """Columns of the row that hold the text, for people."""
    prompt: str
    """Text that is not trained; may be empty."""
    completion: str
    """Text that is trained."""


def example_of(row: Row) -> Conversation | Text:
    """Return the conversation or the text that a row trains.

    The first shape that the row has decides. A shape may have several columns, and some columns, such as `tools` and
    `system`, belong to every shape.

    Raises:
        ConfigError: the row has none of the shapes, or a part of it is not supported.
    """
    values = {name: value for name, value in row.values.items() if value is not None}
    place, names = row.place, values.keys()
    refuse_media(row)
    _refuse_preferences(values, place)
    if {"prompt", "completion"} <= names:
        if given := next((name for name in CONVERSATIONS if name in names), None):
            raise ConfigError(f"{place} has `prompt` and `completion` and also {given!r}; leave one of them out")
        prompt, completion = values["prompt"], values["completion"]
        # As in TRL: two texts are plain text, and messages get a chat template.
        if isinstance(prompt, str) and isinstance(completion, str) and _messages_in(prompt) is None:
            return _text("prompt and completion", values, place, prompt, completion)
        before = _messages(prompt, place, "prompt", "user")
        after = _messages(completion, place, "completion", ASSISTANT)
        return _conversation("prompt and completion", values, place, [*before, *after], len(before))
    for name in CONVERSATIONS:
        if name in names:
            messages = _messages(values[name], place, name, "user")
            _check_same_prompt(values, messages, place)
            return _conversation(name, values, place, messages, 0)
    for asked, answered in PAIRS:
        if asked in names and answered in names:
            messages = [*_history(values, place), *_user_messages(values, values[asked], asked, place)]
            answer = values[answered]
            # The answer to a question of arithmetic may be a number.
            if isinstance(answer, int | float | Decimal):
                answer = _answer(answer, f"{place}: {answered!r}")
            messages += _messages(answer, place, answered, ASSISTANT)
            return _conversation(f"{asked} and {answered}", values, place, messages, 0)
    if isinstance(values.get("text"), str):
        return _text("text", values, place, "", values["text"])
    # The row has none of the shapes. For two mistakes that are common, the error says what to do.
    if {"prompt", "response"} <= names:
        raise ConfigError(
            f"{place} has `prompt` and `response`, which does not say if a chat template belongs around them; name "
            "them `question` and `response` for one, or `prompt` and `completion` for plain text"
        )
    if "prompt" in names:
        raise ConfigError(f"{place} has a prompt and nothing to learn behind it; expected `completion` beside it")
    raise ConfigError(f"{place} has none of the known shapes: expected {FORMS}; got {', '.join(map(repr, names))}")


def prompt_of(row: Row, column: str) -> str | tuple[Message, ...]:
    """Return the prompt in a column: text, or the messages of a conversation that an answer may follow.

    The prompt gets the text of the columns that belong to it (`INPUTS`, and `system` for messages).

    Raises:
        ConfigError: the column has no prompt, or a part of the row is not supported.
    """
    value, place = value_of(row, column), row.place
    refuse_media(row)
    for name in ("tools", "functions", "chat_template_kwargs"):
        # An empty value says nothing. CSV files have it as text.
        if row.values.get(name) not in (None, "", "[]", "{}", [], {}):
            raise ConfigError(f"{place} has {name!r}, which this environment does not show; leave the column out")
    if isinstance(value, str) and _messages_in(value) is None:
        if not value.strip():
            raise ConfigError(f"{place}: {column!r} is empty; expected a prompt, or leave the row out")
        (asked,) = _user_messages(row.values, value, column, place)  # a text becomes one message
        return str(asked["content"])
    messages = _messages(value, place, column, "user")
    _check_choices(row.values, messages, place)
    messages = _with_system(messages, row.values, place)
    if not messages:
        raise ConfigError(f"{place}: {column!r} has no messages")
    if messages[-1]["role"] == ASSISTANT:
        raise ConfigError(
            f"{place}: {column!r} ends with a message of the assistant, behind which no answer is asked for; leave "
            "that message out"
        )
    return tuple(spoken(messages, place))


def answer_of(row: Row, column: str) -> str:
    """Return the answer in a column as text: a number without `.0`, a boolean, list or object as JSON text.

    A list of one value counts as that value. If the last line of a text begins with `####`, as in GSM8K, the answer is
    the rest of that line. Commas that group the thousands of such a number are removed. A float from `EXPONENT_FROM` on
    has an exponent.

    Raises:
        ConfigError: the column has no answer, or its number is infinite or NaN.
    """
    place = f"{row.place}: {column!r}"
    answer = _answer(value_of(row, column), place)
    # An empty answer is a fault of the data. A verifier that looks for the answer in the completion always finds it.
    if not answer.strip():
        raise ConfigError(
            f'{place} is empty; expected an answer, or leave the row out. Write "-" if the verifier needs no answer'
        )
    return answer


def find_column(names: Sequence[str], given: str | None, usual: Sequence[str], option: str, file: str) -> str:
    """Return the name of a column of a table: the `given` one, or else the first of its `usual` names that exists.

    Args:
        names: names of the table's columns.
        given: name that the user has set; None if no name was set.
        usual: usual names of the column, the most reliable first.
        option: name of the setting for the column, for error messages.
        file: name of the table, for error messages.

    Raises:
        ConfigError: the table has no such column.
    """
    listed = ", ".join(map(repr, names)) or "none"
    there = next((name for name in usual if name in names), None)
    if given is None:
        if there is None:
            raise ConfigError(f"{file} has none of the columns {', '.join(usual)}, only {listed}; set {option}")
        return there
    if given not in names:
        near = suggested(given, names) or (f"; did you mean {there!r}?" if there else "")
        raise ConfigError(f"{file} has no column {given!r} ({option}), only {listed}{near}")
    return given


def spoken(messages: Iterable[Given], place: str) -> list[Message]:
    """Return messages in the form that chat templates take.

    Raises:
        ConfigError: a message has an unknown role, or a field of a wrong type.
    """
    # The code that reads requests of the chat API also checks these messages. Its errors name the wrong field.
    try:
        return messages_of(msgspec.convert(list(messages), list[ChatMessage]))
    except ApiError as error:
        raise ConfigError(f"{place}, {error.content['error']['param']}: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {error}") from None


def refuse_media(row: Row) -> None:
    """Raise ConfigError if a row has images, videos or audio, because models get text only.

    A text in a column of `MEDIA` is refused only if it is JSON, a `data:` URL or the name of a media file. Empty values
    are allowed.
    """
    for name in MEDIA:
        value = row.values.get(name)
        named = isinstance(value, str) and json_of(value) is None  # It may be the name of a container image.
        if named and not str(value).startswith("data:") and not str(value).lower().endswith(MEDIA_FILES):
            continue
        if value not in (None, "", "[]", [], {}):
            raise ConfigError(
                f"{row.place} has {name!r}: models are trained on text here, and nothing else is shown to them; leave "
                "such rows out, or drop the column if the text says all"
            )


def _refuse_preferences(values: Mapping[str, Any], place: str) -> None:
    """Raise ConfigError for rows that rate answers or compare them with each other.

    Each shape of such rows has an error of its own, which says how to train on a part of them.
    """
    names = values.keys()
    # With messages beside it, `chosen` is not needed: the messages are trained.
    if {"chosen", "rejected"} & names and not {*CONVERSATIONS} & names:
        # Without a prompt, `chosen` is a whole conversation, and no completion of a prompt.
        whole = "prompt" not in names and not isinstance(values.get("chosen"), str)
        raise ConfigError(
            f"{place} is a preference row (`chosen`, `rejected`), and supervised fine-tuning would learn `chosen` "
            f"alone; if that is meant, name that column `{'messages' if whole else 'completion'}` and leave `rejected` "
            "out"
        )
    for name in ("label", "kto_tag"):
        if isinstance(values.get(name), bool) and {"completion", "output", *CONVERSATIONS} & names:
            raise ConfigError(
                f"{place} is an unpaired preference row (`{name}`), and supervised fine-tuning would learn the answers "
                f"labelled false, too; keep the rows labelled true, and leave {name!r} out"
            )
    if {"completions", "labels"} <= names:
        raise ConfigError(
            f"{place} is a row of stepwise supervision (`completions`, `labels`), which supervised fine-tuning does "
            f"not learn; expected {FORMS}"
        )


def _conversation(shape: str, values: Mapping[str, Any], place: str, messages: list[Given], shown: int) -> Conversation:
    """Return a conversation from a row's messages, with the row's system message, tools and arguments of the template.

    `shape` names the columns, for people. The first `shown` messages are not trained; a system message that is added
    before them is not trained either.

    Raises:
        ConfigError: no message of the assistant is left to train, or another column has a wrong value.
    """
    complete = _with_system(messages, values, place)
    # With `shown` = 0 all messages of the assistant are trained, and a system message never is.
    shown += len(complete) - len(messages) if shown else 0
    if not any(message["role"] == ASSISTANT for message in complete[shown:]):
        raise ConfigError(f"{place}: there is no message of the assistant to learn")
    return Conversation(shape, complete, shown, _tools(values, place), template_of(values, place))


def _text(shape: str, values: Mapping[str, Any], place: str, prompt: str, completion: str) -> Text:
    """Return a row of plain text. `shape` names the columns, for people.

    A chat template would show the system text, the tools and the history. Plain text has no template, so the text must
    contain the first two itself, and a history is refused.

    Raises:
        ConfigError: the row has a `history`, or the text does not contain the row's `system` text or the names of its
            tools.
    """
    whole = prompt + completion
    system = values.get("system") or values.get("system_prompt")
    unseen = ["`system`"] if system and not (isinstance(system, str) and system.strip() in whole) else []
    if any(tool["function"]["name"] not in whole for tool in _tools(values, place)):
        unseen.append("`tools`")
    if values.get("history") not in (None, "", "[]", []):
        unseen.append("`history`")
    if unseen:
        raise ConfigError(
            f"{place} is plain text, which is learned without a chat template, and shows nothing of {unseen[0]}; give "
            "`messages`, or `prompt` and `completion` as lists of messages, or leave that column out"
        )
    return Text(shape, prompt, completion)


def _with_system(messages: list[Given], values: Mapping[str, Any], place: str) -> list[Given]:
    """Return the messages with the text of the `system` column as first message, if the row has that column.

    The column may also be named `system_prompt`. Messages that begin with the same system text are returned unchanged.

    Raises:
        ConfigError: the column is no text, or the messages begin with another system message.
    """
    system = values.get("system") or values.get("system_prompt")
    if not system:
        return messages
    if not isinstance(system, str):
        raise ConfigError(f"{place}: `system` must be text, but is {system!r:.100}")
    if messages and messages[0]["role"] == "system":
        if messages[0].get("content") != system:
            raise ConfigError(f"{place} has a `system` column and another system message; leave one of them out")
        return messages
    return [{"role": "system", "content": system}, *messages]


def _check_same_prompt(values: Mapping[str, Any], messages: Sequence[Given], place: str) -> None:
    """Raise ConfigError if a row has messages and also a prompt, as in ultrachat, that is not among the messages."""
    prompt = values.get("prompt")
    if not prompt:
        return
    # A text must be one of the user's messages, and a list of messages must be their beginning.
    if isinstance(prompt, str) and _messages_in(prompt) is None:
        asked = (message.get("content") for message in messages if message["role"] == "user")
        same = any(isinstance(text, str) and text.strip() == prompt.strip() for text in asked)
    else:
        before = _messages(prompt, place, "prompt", "user")
        same = list(messages[: len(before)]) == before
    if not same:
        raise ConfigError(
            f"{place} has `messages` and also a `prompt` that is none of them; expected `messages` alone, or `prompt` "
            "and `completion`"
        )


def _user_messages(values: Mapping[str, Any], value: Any, column: str, place: str) -> list[Given]:
    """Return the messages of the user in the value of a column.

    The texts of the columns in `INPUTS` are appended to the last message, on new lines. They are not appended to a
    message that contains them already, or that has its content in parts.

    Raises:
        ConfigError: a value is not text, or the row has choices that the messages do not show.
    """
    messages = _messages(value, place, column, "user")
    for name in INPUTS.get(column, ()):
        more = values.get(name)
        if more in (None, "", [], {}) or not messages or not isinstance(messages[-1]["content"], str):
            continue
        if not isinstance(more, str):
            raise ConfigError(
                f"{place}: {name!r} must be text, which follows the {column}, but is {more!r:.100}; write it into the "
                f"{column}, or leave the column out"
            )
        if more not in messages[-1]["content"]:
            messages[-1]["content"] += f"\n{more}"
    _check_choices(values, messages, place)
    return messages


def _check_choices(values: Mapping[str, Any], messages: Sequence[Given], place: str) -> None:
    """Raise ConfigError if a row has options of a multiple-choice question that no message shows."""
    for name in CHOICES:
        given = values.get(name)
        # The options may be a list, an object with a list in it, or the JSON text of either.
        texts = list(_texts_in(json_of(given) or given if isinstance(given, str) else given))
        shown = "\n".join(text for message in messages for text in _texts_in(message.get("content")))
        if any(text.strip() not in shown for text in texts):
            raise ConfigError(
                f"{place} has {name!r}, which its prompt does not show: nobody could choose; write them into the "
                "prompt, or leave the column out"
            )


def _texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a value, including those in nested lists and objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in cast("list[Any]", value):
            yield from _texts_in(one)
    elif isinstance(value, dict):
        yield from _texts_in(list(cast("Given", value).values()))


def _history(values: Mapping[str, Any], place: str) -> list[Given]:
    """Return the messages of Alpaca's `history`, which is a list of pairs of a question and its answer.

    The list may be JSON text. Returns an empty list if the row has no history.

    Raises:
        ConfigError: the history is anything else.
    """
    rounds = values.get("history") or []
    rounds = (json_of(rounds) or [rounds]) if isinstance(rounds, str) else rounds
    messages: list[Given] = []
    for one in cast("list[Any]", rounds) if isinstance(rounds, list) else [rounds]:
        pair = cast("list[Any]", one) if isinstance(one, list) else []
        if [type(text) for text in pair] != [str, str]:
            raise ConfigError(f"{place}: `history` must be a list of pairs of texts, but has {one!r:.100}")
        messages += [{"role": "user", "content": pair[0]}, {"role": ASSISTANT, "content": pair[1]}]
    return messages


def _messages_in(text: str) -> list[Any] | None:
    """Return the messages if a text is a JSON list of messages; None for any other text, including other JSON."""
    listed = json_of(text)
    if not isinstance(listed, list) or not listed:
        return None
    some = cast("list[Any]", listed)
    # A message has a `role`, or `from` in ShareGPT's form.
    return some if all(isinstance(one, dict) and {"role", "from"} & one.keys() for one in some) else None


def _messages(value: Any, place: str, column: str, role: str) -> list[Given]:
    """Return the messages of a column: a list of messages, its JSON text, or one message.

    Any other text becomes one message with the given role.

    Raises:
        ConfigError: the value is none of these, or a message is wrong (`_message`).
    """
    if isinstance(value, str):
        parsed = _messages_in(value)
        if parsed is None:
            return [{"role": role, "content": value}]
        value = parsed
    if isinstance(value, dict):  # A single message.
        value = [value]
    if not isinstance(value, list):
        raise ConfigError(f"{place}: {column!r} must be text or a list of messages, but is {value!r:.100}")
    messages: list[Given] = []
    open_calls: list[str] = []
    for index, given in enumerate(cast("list[Any]", value)):
        messages.append(_message(given, f"{place}, {column}[{index}]", len(messages), open_calls))
    return messages


def _message(given: Any, place: str, number: int, open_calls: list[str]) -> Given:
    """Return a message in OpenAI's form.

    Args:
        given: the message of the row.
        place: place of the message in the data, for errors.
        number: number of the message, from which ids of calls without an id are made.
        open_calls: ids of calls in an older form that no message has answered yet, in order. A message with such calls
            replaces the list, and a result without an id takes the first one.

    Raises:
        ConfigError: the message has no role or no content, or a field of a wrong type.
    """
    if not isinstance(given, dict):
        raise ConfigError(f"{place} must be an object with `role` and `content`, but is {given!r:.100}")
    fields = cast("Given", given).items()
    message = {name: value for name, value in fields if value is not None}
    # ShareGPT's form.
    if "role" not in message and "from" in message:
        message = {"role": message.pop("from"), "content": message.pop("value", None), **message}
    role = message.get("role")
    if not isinstance(role, str):
        raise ConfigError(f"{place} must have `role` and `content`, or `from` and `value`, but is {given!r:.100}")
    role = role.lower()
    message["role"] = role = ALIASES.get(role, role)
    for mask in MASKS:
        if mask in message:  # Invalid weights are refused later, with those of the `weight` field itself.
            message.setdefault("weight", message.pop(mask))
    # OpenAI's weights are 0 and 1.
    if isinstance(message.get("weight"), bool):
        message["weight"] = int(message["weight"])
    # `old` is a call in an older form, which has no id: OpenAI's `function_call`, or a content of ShareGPT's form.
    old = message.pop("function_call", None)
    if role in CALLS:
        message["role"] = role = ASSISTANT
        old = json_of(message["content"]) if isinstance(message.get("content"), str) else message.get("content")
        # A text that is no JSON stays the content of the message.
        if old is not None:
            del message["content"]
    if "content" in message:
        message["content"] = _content(message["content"], place, role)
    if old is not None:
        some = cast("list[Any]", old) if isinstance(old, list) else [old]
        # Some chat templates require ids of nine letters and digits.
        calls = [_call(one, place, f"call{number:02}{index:03}") for index, one in enumerate(some)]
        message["tool_calls"] = calls
        open_calls[:] = [call["id"] for call in calls]
    elif "tool_calls" in message:
        calls = json_of(message["tool_calls"]) if isinstance(message["tool_calls"], str) else message["tool_calls"]
        if not isinstance(calls, list):
            raise ConfigError(f"{place}: `tool_calls` must be a list, but is {message['tool_calls']!r:.100}")
        message["tool_calls"] = [_call(one, place, "") for one in cast("list[Any]", calls)]
        if not message["tool_calls"]:  # Some data has an empty list in each message without calls.
            del message["tool_calls"]
    elif role == TOOL and "tool_call_id" not in message and open_calls:
        # The results of calls in an older form follow in the order of the calls.
        message["tool_call_id"] = open_calls.pop(0)
    if message.get("content") is None and "tool_calls" not in message:
        # Only a message of the assistant may have no content, if it has reasoning or a refusal instead.
        if not (role == ASSISTANT and message.keys() & {"reasoning_content", "reasoning", "thinking", "refusal"}):
            raise ConfigError(f"{place} has no content")
        message.pop("content", None)
    return message


def _content(content: Any, place: str, role: str) -> Any:
    """Return the content of a message with this role as text or text parts; None if it is None.

    An object or list that a tool returned becomes JSON text.

    Raises:
        ConfigError: the content of another role is neither, or has a part that `_part` refuses.
    """
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and not (role == TOOL and not _are_parts(cast("list[Any]", content))):
        return [_part(part, place) for part in cast("list[Any]", content)]
    if role == TOOL:
        return msgspec.json.encode(content).decode()
    raise ConfigError(f"{place}: `content` must be text or a list of text parts, but is {content!r:.100}")


def _are_parts(content: Sequence[Any]) -> bool:
    """Return True if a list is content in parts, and not a list that a tool returned."""
    return all(isinstance(part, dict) and "type" in part for part in content)


def _part(part: Any, place: str) -> Given:
    """Return a part of a content in OpenAI's form. Parts of unknown types, such as `thinking`, are kept.

    Raises:
        ConfigError: the part is an image, a video, audio or a file, or it is neither text nor an object.
    """
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise ConfigError(f"{place}: a part of the content must be an object or text, but is {part!r:.100}")
    fields = {name: value for name, value in cast("Given", part).items() if value is not None}
    kind = fields.setdefault("type", "text")
    if isinstance(kind, str) and any(medium in kind for medium in ("image", "video", "audio", "file")):
        raise ConfigError(
            f"{place} has a part of type {kind!r}: models are trained on text here, and nothing else is shown to them; "
            "leave such rows out"
        )
    return fields


def _call(given: Any, place: str, name: str) -> Given:
    """Return a call in OpenAI's form. A bare `{name, arguments}` becomes the `function` of a call.

    Args:
        given: the call, or its JSON text. Arguments may be named `parameters`, and need not be JSON text.
        place: place of the message, for errors.
        name: id of a call that has none. Empty: such a call stays without an id.

    Raises:
        ConfigError: the call or its function is not an object, or the function has no name.
    """
    call = _object(given, place, "a call")
    function = _object(call.get("function", call), place, "the function of a call")
    if not isinstance(function.get("name"), str):
        raise ConfigError(f"{place}: a call must have the `name` of a function, but is {given!r:.100}")
    arguments = function.get("arguments", function.get("parameters"))
    if not isinstance(arguments, str):
        arguments = without_nulls(arguments)
        arguments = msgspec.json.encode({} if arguments is None else arguments).decode()
    made: Given = {"type": call.get("type", "function"), "function": {"name": function["name"], "arguments": arguments}}
    identity = call.get("id") or name
    return {"id": identity, **made} if identity else made


def _object(value: Any, place: str, what: str) -> Given:
    """Return the fields of an object that are not null. `value` may be the object or its JSON text.

    Raises ConfigError for any other value; `what` names the value in the error.
    """
    parsed = json_of(value) if isinstance(value, str) else value
    if not isinstance(parsed, dict):
        raise ConfigError(f"{place}: {what} must be an object, but is {value!r:.100}")
    return {name: inner for name, inner in cast("Given", parsed).items() if inner is not None}


def _tools(values: Mapping[str, Any], place: str) -> list[Given]:
    """Return the functions that a row offers, in OpenAI's form.

    The row has them as a list, as one object, or as JSON text. Each is a function alone or the object of OpenAI's API
    around it. Returns an empty list if the row offers none.

    Raises:
        ConfigError: the value is none of these, or a function has no name.
    """
    # `functions` is the older name of OpenAI's API.
    given = values.get("tools") or values.get("functions") or []
    if isinstance(given, str):
        parsed = json_of(given)
        if parsed is None and given.strip():
            raise ConfigError(f"{place}: `tools` must be a list or JSON text, but is {given!r:.100}")
        given = parsed or []
    tools: list[Given] = []
    for one in cast("list[Any]", given) if isinstance(given, list) else [given]:
        # Nulls are removed in JSON rows too: JSON that was written from an Arrow table is padded with nulls as well.
        tool = cast("Given", without_nulls(_object(one, place, "a tool")))
        function = _object(tool.get("function", tool), place, "the function of a tool")
        if isinstance(function.get("parameters"), str):
            function["parameters"] = _object(function["parameters"], place, "the `parameters` of a tool")
        function = cast("Given", without_nulls(function))
        if not isinstance(function.get("name"), str):
            raise ConfigError(f"{place}: a tool must have the `name` of a function, but is {one!r:.100}")
        # A function alone may have a `type` among its own fields, which belongs to the object around it.
        kind = tool.get("type", "function") if "function" in tool else "function"
        tools.append({"type": kind, "function": {key: value for key, value in function.items() if key != "type"}})
    return tools


def template_of(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the arguments for the chat template in a row, including verl's column `enable_thinking`.

    Returns an empty dictionary if the row has none. An argument in `chat_template_kwargs` comes before the column.

    Raises:
        ConfigError: `chat_template_kwargs` is neither an object nor its JSON text.
    """
    given = values.get("chat_template_kwargs") or {}
    arguments = _object(given, place, "`chat_template_kwargs`") if given else {}
    thinking = str(values.get("enable_thinking", "")).lower()
    if thinking in ("true", "false"):  # CSV files have it as text.
        arguments.setdefault("enable_thinking", thinking == "true")
    return arguments


def _answer(value: Any, place: str) -> str:
    """Return an answer as text, which may be empty. `answer_of` describes the text.

    Raises:
        ConfigError: the answer is null, an empty list or object, infinite, NaN, or of a type that JSON cannot express.
    """
    if isinstance(value, str):
        last = value.rstrip().rpartition("\n")[2]
        if not last.startswith(MARK):
            return value
        final = last.removeprefix(MARK).strip()
        return final.replace(",", "") if GROUPED.fullmatch(final) else final
    if isinstance(value, bool):  # a bool is also an int, so this comes first
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigError(f"{place} is {value}, which is no answer; leave the row out")
        return str(int(value)) if value.is_integer() and abs(value) < EXPONENT_FROM else repr(value)
    if isinstance(value, Decimal):  # from Parquet or Arrow; written without an exponent and without zeros at its end
        return f"{value.normalize():f}"
    if isinstance(value, list) and len(cast("list[Any]", value)) == 1:
        return _answer(value[0], place)
    if value is None or value in ([], {}):
        raise ConfigError(f"{place} is empty; expected an answer, or leave the row out")
    try:
        return msgspec.json.encode(value).decode().strip('"')  # A date becomes its text without quotes.
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{place} cannot be an answer: {error}") from None
