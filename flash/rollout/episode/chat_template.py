"""Chat templates: turn a conversation into tokens, and later messages into the tokens that follow a response.

`HfTokenizer` calls `ChatTemplate` for observations that are chat messages. The first observation is rendered as a whole
(`prompt`). A later observation is never rendered together with the responses before it, because a template may show a
response differently than it was sampled. Instead, a short conversation is rendered in which `STAND_IN` takes the place
of the response (`follow`): the text after the stand-in closes the turn and shows the new messages.

A *control token* is a token that only the template may write, such as `<|im_end|>`, with which many models end a turn
(`flash.rollout.episode.controls`). A *call* is a call of a function (a tool) that a response contains.

Templates expect some parts of a message in different forms, and leave out other parts. The forms, and the parts that a
template leaves out, are found by rendering short trials, once for each template.

Invariant: a part of a conversation that the template leaves out is never lost silently. A template that leaves out
tools, calls, results of calls or system messages is refused with an `EnvError`. If it leaves out reasoning, a warning
is logged once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from flash.config.tree import ModelConfig
from flash.errors import ConfigError, EnvError
from flash.foreign.chat_templates import arguments_of
from flash.rollout.episode.controls import STAND_IN, ControlTokens, TemplateText
from flash.types import ASSISTANT, RESERVED_ARGUMENTS, TOOL, Message, Tool, ToolCall

log = logging.getLogger("flash")

QUESTION = Message("user", "flash-question")
"""Message that stands for the conversation before a response. Many templates require a user's message first."""
RESPONSE = Message(ASSISTANT, STAND_IN)
"""Message that stands for a response without calls."""
TOOL_NAME = "flash_tool"
"""Name of the function in trial calls."""
TRIAL_TOOL: Tool = {
    "type": "function",
    "function": {"name": TOOL_NAME, "description": "", "parameters": {"type": "object", "properties": {}}},
}
"""Tool that is offered in trials of a chat template."""
CALL_ID = "flashcall"
"""Id of trial calls. Some templates require ids of nine letters."""
MARKED_CALL = ToolCall(CALL_ID, TOOL_NAME, json.dumps({"flash": STAND_IN}, ensure_ascii=False))
"""Trial call whose arguments hold the stand-in."""
EMPTY_CALL = ToolCall(CALL_ID, TOOL_NAME, "{}")
"""Trial call without arguments."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which the chat templates of Qwen, Gemma and GPT-OSS read the reasoning of a message."""
SHOWN_ROLES = 20
"""Largest number of messages whose roles an error message lists. A conversation may have thousands of messages."""
THINKING = frozenset({"enable_thinking", "thinking", "reasoning_effort"})
"""Arguments of chat templates that change how an answer begins. An error message advises the user to set the arguments
that the template reads."""


class _Part(NamedTuple):
    """A part of a conversation that a chat template may leave out, and a conversation to find out whether it does."""

    words: str
    """The part as an error message names it."""
    messages: list[Message]
    """Messages of the trial, which have the part."""
    tools: list[Tool]
    """Tools that are offered in the trial."""
    expected: str
    """Text that the template writes if it shows the part."""


PARTS = {
    "system": _Part("a system message", [Message("system", STAND_IN), QUESTION], [], STAND_IN),
    "assistant": _Part("an assistant's message", [QUESTION, RESPONSE], [], STAND_IN),
    "tools": _Part("tools", [QUESTION], [TRIAL_TOOL], TOOL_NAME),
    "calls": _Part(
        "an assistant's calls of tools",
        [QUESTION, Message(ASSISTANT, "", tool_calls=(MARKED_CALL,))],
        [TRIAL_TOOL],
        STAND_IN,
    ),
    "parallel": _Part(
        "a second call in one message",
        [QUESTION, Message(ASSISTANT, "", tool_calls=(EMPTY_CALL, MARKED_CALL))],
        [TRIAL_TOOL],
        STAND_IN,
    ),
    "results": _Part(
        "the results of tools",
        [
            QUESTION,
            Message(ASSISTANT, "", tool_calls=(EMPTY_CALL,)),
            Message(TOOL, STAND_IN, tool_call_id=CALL_ID, name=TOOL_NAME),
        ],
        [TRIAL_TOOL],
        STAND_IN,
    ),
    "reasoning": _Part("an assistant's reasoning", [QUESTION, Message(ASSISTANT, "flash", STAND_IN)], [], STAND_IN),
}
"""Parts of a conversation that chat templates may leave out. If several are missing, an error names the first one."""

TemplateMessage = dict[str, Any]
"""A message as a chat template takes it: a dict in the form of `_MessageForm`."""


class _MessageForm(NamedTuple):
    """The form in which a chat template takes messages, where templates differ.

    Trials find it (`ChatTemplate._form`).
    """

    content_as_parts: bool = False
    """True if the template reads the content as a list of parts, and does not show a content that is a text."""
    empty_content: str | None = ""
    """Content that a message with calls and without text is given: an empty text or None."""
    arguments_as_text: bool = False
    """True if the template takes the arguments of a call as JSON text, not as an object."""


class ChatTemplate:
    """The chat template of a model, with the arguments that it is given.

    The parameter `tools` of the methods is the list of functions that the prompt offers to the policy; empty: none.

    Args:
        tokenizer: the transformers tokenizer that has the template.
        controls: the control tokens of the tokenizer. They render the template and encode its text.
        path: the model's path, for error messages.
        arguments: arguments of the template, such as `enable_thinking`.
        reported: warnings that were logged already, so that each is logged once. `warn_once` adds to it.
    """

    def __init__(
        self, tokenizer: Any, controls: ControlTokens, path: str, arguments: Mapping[str, Any], reported: set[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._controls = controls
        self._path = path
        self._arguments = arguments
        self._reported = reported
        self._left_out: dict[str, bool] = {}
        """Results of the trials of `PARTS`, by the key of the part: True if the template leaves the part out."""

    # -- tokens of conversations -------------------------------------------------------------------------------------

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens of the first observation, up to the beginning of the assistant's answer.

        If the last message is from the assistant and has no calls, the policy continues that message.

        Raises:
            EnvError: the chat template is missing, refuses the messages, or leaves out a part of them.
        """
        text = self._prompt_text(messages, tools)
        self._refuse_left_out(messages, tools)
        return self._controls.encode(text)

    def follow(self, messages: Sequence[Message], end: int | None, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens that show messages after a response. The tokens are appended to the response as it was
        sampled.

        The template writes the end of the response and the messages after a stand-in for the response. Tokens of this
        end that the response already contains are left out of the result.

        `end`: the token with which the model ended the response. None if a limit or a stop text ended it: then the
        result begins with the tokens that end the turn.

        Raises:
            EnvError: the chat template is missing, refuses the messages, leaves out a part of them, or does not show
                the response unchanged.
        """
        self.cache_key(messages, tools)  # this raises for lone surrogates
        self._refuse_left_out(messages, tools)
        # Messages that begin with results of tools follow a response that has made the calls.
        results = 0
        while tools and results < len(messages) and messages[results].role == TOOL:
            results += 1
        responses = _responses_with_calls(messages[:results]) if results else [RESPONSE]
        alone, tokens = self._tokens_after_stand_in(responses, messages, tools)
        # The tokens before `closing` are the same whether or not messages follow: they close the response. Later tokens
        # show the messages.
        closing = _common_prefix(alone, tokens)
        controls = [at for at in range(closing) if tokens[at] in self._control_ids]
        if end is None:
            if not (controls and results):
                return tokens
            # The response has calls, so it was sampled at least up to the token that ends the last call. Only a token
            # that ends the turn is still missing.
            last = controls[-1]
            return tokens[last if tokens[last] in self.turn_ends else last + 1 :]
        if end in tokens[:closing]:
            # The response ends with this token, so the result begins after it.
            return tokens[max(at for at in range(closing) if tokens[at] == end) + 1 :]
        first = next((at for at in range(closing, len(tokens)) if tokens[at] in self._control_ids), None)
        if first is not None and tokens[first] == end:
            # Some templates write no end of a turn: the model ends a turn with the first token of the next turn.
            return tokens[first + 1 :]
        # The model ended its turn with a token that the template does not write here. Leave out the template's end.
        if controls:
            return tokens[controls[-1] + 1 :]
        # The template writes no end. After a response with calls, the closing text ends the last call, which the
        # response already has. After a response without calls the closing text is kept, because it may separate turns,
        # such as a line break.
        return tokens[closing if results else 0 :]

    def prompt_and_answer(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[list[int], list[int]]:
        """Return two lists of tokens for supervised training (`flash sft`): the prompt, and the answer.

        The answer is the last message, which is from the assistant. The prompt has all messages before it. The answer
        ends with a token that ends a turn, even if the template writes no such token or writes more text after it.

        Raises:
            EnvError: the chat template is missing, leaves out a part of the messages, does not show the answer behind
                its prompt, or ends the turn in the middle of the answer.
        """
        self.cache_key(messages, tools)  # this raises for lone surrogates
        shown = list(map(self._in_form, messages))
        prompt = self._render(shown[:-1], tools, prompting=True)
        conversation = self._render(shown, tools, prompting=False)
        self._refuse_left_out(messages, tools)
        self._refuse_left_out_of_last(messages, shown, tools, conversation)
        # The answer is the text behind the prompt. With some templates the conversation does not begin with the prompt,
        # because they show earlier messages in another way once the answer is there. Then the text of the answer after
        # a short question is used.
        answer = conversation.without_prefix(prompt) or self._answer_to_question(shown[-1], tools, conversation)
        if answer is None:
            known = sorted(self.read_arguments & THINKING)
            change = f"; set chat_template_kwargs ({', '.join(known)}) as the answer has it" if known else ""
            raise EnvError(
                f"the chat template of {self._path} does not show an assistant's message behind the prompt for it, so "
                f"the tokens to learn would differ from the tokens that an engine samples{change}; or give prompt and "
                "completion as text"
            )
        tokens = self._controls.encode(answer, follows=True)
        # The model must learn to end its turn, and nothing after that: an engine stops there.
        end = next((at for at, token in enumerate(tokens) if token in self.turn_ends), None)
        if end is None:
            return self._controls.encode(prompt), [*tokens, *end_of_text(self._tokenizer)]
        if self._tokenizer.decode(tokens[end + 1 :], skip_special_tokens=True).strip():
            raise EnvError(
                f"the chat template of {self._path} ends the turn in the middle of this message, where an engine would "
                "stop: give its parts as messages of their own, or use a model with another template"
            )
        return self._controls.encode(prompt), tokens[: end + 1]

    @cached_property
    def turn_ends(self) -> frozenset[int]:
        """Tokens that end a response: the end of text, and the tokens with which the template ends a turn.

        A turn may have calls or none. Engines stop at these tokens (`HfTokenizer.ends`).

        Raises:
            EnvError: the chat template is missing, or does not show an assistant's message unchanged.
        """
        ends = set(end_of_text(self._tokenizer))
        answer = self._closing_token([RESPONSE], [QUESTION], ())
        if answer is not None:
            ends.add(answer)
        # A response with calls may end with a different token than a response without calls.
        result = Message(TOOL, "flash", tool_call_id=CALL_ID, name=TOOL_NAME)
        call, two_calls = None, None
        try:
            call = self._closing_token(_responses_with_calls([result]), [result], [TRIAL_TOOL])
            two_calls = self._text_after_stand_in(
                _response_with_calls([result, result], marked=0), [], [TRIAL_TOOL], prompting=False
            )
        except EnvError:  # the template shows no calls, or refuses two calls at once
            pass
        # `two_calls` is the text after the first of two calls. A token that ends the turn occurs once in it. A token
        # that ends each call occurs twice, and is not added.
        if call is not None and (two_calls is None or self._controls.encode(two_calls, follows=True).count(call) == 1):
            ends.add(call)
        return frozenset(ends)

    @cached_property
    def min_message_tokens(self) -> int:
        """Lower bound on the tokens that one more message takes, even without content. At least 1.

        The bound does not hold for results of tools, of which a template may show several as one message. `Transcript`
        uses the bound to refuse conversations of far too many messages. The bound is found by comparing a prompt with
        one more message, or pair of messages, and a prompt with nine more, for several roles.
        """
        count, least = 8, list[int]()
        for roles in (["user"], [ASSISTANT], ["user", ASSISTANT], ["system"]):
            more = [Message(role, "") for role in roles]
            try:
                once, often = (len(self.prompt([QUESTION, *more * times])) for times in (1, 1 + count))
            except EnvError:
                continue  # the template refuses such messages, however many there are, so none can be shown
            least.append((often - once) // (count * len(roles)))
        return max(1, min(least, default=1))

    # -- arguments of the template -----------------------------------------------------------------------------------

    @cached_property
    def read_arguments(self) -> frozenset[str]:
        """Names of the arguments that the chat template reads, without the arguments that Flash and transformers set.

        Users may set these arguments in `model.chat_template_kwargs`.
        """
        template = self._tokenizer.chat_template
        sources = template.values() if isinstance(template, dict) else [template] if template else []
        given = RESERVED_ARGUMENTS | set(self._tokenizer.special_tokens_map)
        return frozenset(name for source in sources for name in arguments_of(source)) - given

    def unread(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the names of arguments that the chat template never reads, sorted. Such names are probably
        misspelled."""
        return sorted(set(arguments) - self.read_arguments)

    def warn_once(self, text: str) -> None:
        """Log a warning, unless the same text was logged before, because every episode would repeat it."""
        if text not in self._reported:
            self._reported.add(text)
            log.warning("%s", text)

    def cache_key(self, messages: Sequence[Message], tools: Sequence[Tool]) -> bytes:
        """Refuse lone surrogates in messages and tools, and return a key for them, which is their JSON.

        `HfTokenizer.render` keeps the tokens of first observations under this key. `follow` and `prompt_and_answer`
        call this method only to refuse lone surrogates. `prompt` does not call it, because `render` has called it
        before.

        Raises:
            EnvError: a text has a lone surrogate, which is a character that UTF-8 cannot encode. Lone surrogates mark
                the text that the template itself writes (`ControlTokens`), so text from outside must have none.
        """
        try:
            return msgspec.json.encode((messages, tools))
        except UnicodeEncodeError as error:
            raise EnvError(
                f"the tokenizer of {self._path} cannot take {error.object[:80]!r}: it has a lone surrogate at "
                f'{error.start}; let the environment show text.encode("utf-8", "replace").decode() instead'
            ) from None

    # -- parts that a template leaves out ----------------------------------------------------------------------------

    def _refuse_left_out(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        """Raise EnvError if the template leaves out a part of a conversation, which the model would never see.

        If that part is the reasoning, only a warning is logged: many templates leave out earlier reasoning on purpose.
        """
        present = {message.role if message.role != TOOL else "results" for message in messages}
        present |= {"tools"} if tools else set()
        for message in messages:
            if message.tool_calls:
                present |= {"calls", "parallel"} if len(message.tool_calls) > 1 else {"calls"}
            if message.reasoning:
                present.add("reasoning")
        for part in PARTS:
            if part in present and self._leaves_out(part):
                if part != "reasoning":
                    raise EnvError(self._left_out_message(part))
                self.warn_once(self._left_out_message(part))

    def _leaves_out(self, part: str) -> bool:
        """Return True if the template accepts a part, a key of `PARTS`, and shows nothing of it.

        The result of the trial is kept.
        """
        if part not in self._left_out:
            trial = PARTS[part]
            try:
                shown = self._render(list(map(self._in_form, trial.messages)), trial.tools, prompting=False)
                self._left_out[part] = trial.expected not in shown.text
            except EnvError:
                # The template refuses such messages. Rendering the real messages raises that error.
                self._left_out[part] = False
        return self._left_out[part]

    def _left_out_message(self, part: str) -> str:
        """Return the text of the error, or of the warning, about a part that the template leaves out."""
        shows_nothing = f"the chat template of {self._path} shows nothing of {PARTS[part].words}"
        if part == "reasoning":
            return f"{shows_nothing}: the reasoning in a conversation is neither shown to the model nor learned"
        return (
            f"{shows_nothing}, so that the model would never see it; leave it out, or use a model with another template"
        )

    def _refuse_left_out_of_last(
        self,
        messages: Sequence[Message],
        shown: Sequence[TemplateMessage],
        tools: Sequence[Tool],
        conversation: TemplateText,
    ) -> None:
        """Raise EnvError if the template leaves out a call of the last message; log a warning if it is the reasoning.

        Some templates show calls or reasoning only in some places of a conversation, so the trials of `PARTS` do not
        show whether this conversation loses a part. Therefore this conversation is rendered again without the part: if
        the text stays the same, the template does not show the part.

        `prompt_and_answer` calls this, because the model learns the last message. `shown`: the messages as the template
        takes them; `conversation`: the text of all messages.
        """
        last, calls = shown[-1], messages[-1].tool_calls
        if calls:
            fewer = {key: value for key, value in last.items() if key != "tool_calls"}
            if len(calls) > 1:
                fewer["tool_calls"] = last["tool_calls"][:-1]
            elif fewer["content"] is None:
                # None stands for an empty content only beside calls (`_MessageForm.empty_content`).
                fewer["content"] = ""
            if self._render([*shown[:-1], fewer], tools, prompting=False).text == conversation.text:
                raise EnvError(self._left_out_message("parallel" if len(calls) > 1 else "calls"))
        if messages[-1].reasoning:
            without = {key: value for key, value in last.items() if key not in REASONING}
            if self._render([*shown[:-1], without], tools, prompting=False).text == conversation.text:
                self.warn_once(self._left_out_message("reasoning"))

    # -- texts of the template ---------------------------------------------------------------------------------------

    def _prompt_text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TemplateText:
        """Return the text of messages up to the place where the policy's response begins.

        Raises:
            EnvError: the template refuses the messages, or the policy cannot continue the last message because the
                template changes it.
        """
        last = messages[-1] if messages else None
        if last is None or last.role != ASSISTANT or last.tool_calls:
            return self._render(list(map(self._in_form, messages)), tools, prompting=True)
        # The policy continues this message: cut the text before the end of the turn that the template writes.
        open_ended = [*messages[:-1], msgspec.structs.replace(last, content=last.content + STAND_IN)]
        shown = self._render(list(map(self._in_form, open_ended)), tools, prompting=False).before(STAND_IN)
        if shown is None:
            raise EnvError(
                f"the chat template of {self._path} does not show an assistant's message as it is, so that the model "
                "cannot go on with one: let a user's message be the last"
            )
        return shown

    def _text_after_stand_in(
        self, response: Message, messages: Sequence[Message], tools: Sequence[Tool], *, prompting: bool
    ) -> TemplateText:
        """Return the text that the template writes after the stand-in in `response`, which `messages` follow.

        `prompting`: True if the text ends where the next response begins; False if it ends with the last message.

        Raises:
            EnvError: the template refuses the messages, or does not show the stand-in unchanged.
        """
        conversation = [QUESTION, response, *messages]
        if prompting:
            text = self._prompt_text(conversation, tools)
        else:
            text = self._render(list(map(self._in_form, conversation)), tools, prompting=False)
        tail = text.after(STAND_IN)
        if tail is None:
            raise EnvError(
                f"the chat template of {self._path} does not show an assistant's message as it is, so that no message "
                "can follow one; let the environment show text, or use a model with another template"
            )
        return tail

    def _tokens_after_stand_in(
        self, responses: Sequence[Message], messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[int], list[int]]:
        """Return two lists of tokens that the template writes after `STAND_IN`, which stands for a response.

        In the first list, the response is the last message. In the second list, `messages` follow the response, and the
        list ends where the next response begins. The tokens with which both lists begin close the response.

        `responses`: messages that may stand for the response. The first one for which the template writes both texts,
        with the stand-in unchanged, is used.

        Raises:
            EnvError: there is no such message; the error is the one that the last message caused.
        """
        for response in responses:
            try:
                alone = self._text_after_stand_in(response, [], tools, prompting=False)
                followed = self._text_after_stand_in(response, messages, tools, prompting=True)
                return self._controls.encode(alone, follows=True), self._controls.encode(followed, follows=True)
            except EnvError:
                if response is responses[-1]:
                    raise
        raise AssertionError("at least one response is tried")

    def _closing_token(
        self, responses: Sequence[Message], messages: Sequence[Message], tools: Sequence[Tool]
    ) -> int | None:
        """Return the control token with which the template closes a response; None if there is no such token.

        The tokens that the template writes after a response whether or not `messages` follow it close the response. The
        last control token among them is returned. `_tokens_after_stand_in` describes the arguments.

        Raises:
            EnvError: the template is missing, refuses the messages, or does not show the stand-in unchanged.
        """
        alone, followed = self._tokens_after_stand_in(responses, messages, tools)
        closing = [token for token in alone[: _common_prefix(alone, followed)] if token in self._control_ids]
        if closing:
            return closing[-1]
        # Some templates close the last response of a conversation with another token than earlier responses: GPT-OSS
        # writes <|return|> there, and <|end|> before other messages. Then no token is common to both texts. While the
        # model samples, its response is the last message. So it ends with the first control token that the template
        # writes after the last message. Later control tokens, such as the end of the text, are not sampled by the
        # model.
        return next((token for token in alone if token in self._control_ids), None)

    def _answer_to_question(
        self, answer: TemplateMessage, tools: Sequence[Tool], conversation: TemplateText
    ) -> TemplateText | None:
        """Return the text of an answer to a question alone; None if the conversation does not end with that text.

        GPT-OSS's template leaves out the reasoning of earlier calls when the conversation has a final answer. Then the
        conversation does not begin with the prompt for its last answer, although the answer is shown in the same way.

        Raises:
            EnvError: the template refuses the question or the answer.
        """
        question = self._in_form(QUESTION)
        prompt = self._render([question], tools, prompting=True)
        text = self._render([question, answer], tools, prompting=False).without_prefix(prompt)
        return text if text is not None and text.text and conversation.text.endswith(text.text) else None

    def _render(self, shown: Sequence[TemplateMessage], tools: Sequence[Tool], *, prompting: bool) -> TemplateText:
        """Return the text that the template writes for messages and tools.

        `shown`: the messages as the template takes them (`_in_form`). `prompting`: True if the text ends with the
        beginning of an assistant's answer.

        Raises:
            EnvError: the tokenizer has no chat template, or the template refuses the messages or fails.
        """
        arguments = {**self._arguments, **({"tools": list(tools)} if tools else {})}
        try:
            return self._controls.render(shown, prompting=prompting, **arguments)
        except Exception as error:  # a template is code of the model's author and may raise any error
            roles = ", ".join(message["role"] for message in shown[:SHOWN_ROLES])
            roles += f", … {len(shown)} messages" if len(shown) > SHOWN_ROLES else ""
            raise EnvError(
                f"the chat template of {self._path} cannot show these messages ({roles}): {error}; let the environment "
                'show text (a data set with template = "plain") or other messages, or use a model with another template'
            ) from error

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        """Ids of all control tokens and of the tokenizer's special tokens."""
        return self._controls.ids | set(self._tokenizer.all_special_ids)

    # -- forms of messages -------------------------------------------------------------------------------------------

    def _in_form(self, message: Message) -> TemplateMessage:
        """Return a message in the form in which this template takes it, which trials have found."""
        return _formed(message, self._form_with_calls if message.tool_calls else self._form)

    @cached_property
    def _form(self) -> _MessageForm:
        """Form of messages without calls: the first in which the template shows their content, or else the default."""
        for form in (_MessageForm(), _MessageForm(content_as_parts=True)):
            if self._shows([_formed(QUESTION, form)], (), QUESTION.content):
                return form
        return _MessageForm()

    @cached_property
    def _form_with_calls(self) -> _MessageForm:
        """Form of messages with calls: the first form in which the template shows the arguments of a call.

        If it shows them in no form, this is `_form`; then `_refuse_left_out` reports that calls are left out.
        """
        calling = Message(ASSISTANT, "", tool_calls=(MARKED_CALL,))
        for arguments_as_text in (False, True):
            for empty_content in ("", None):
                form = self._form._replace(empty_content=empty_content, arguments_as_text=arguments_as_text)
                if self._shows([_formed(QUESTION, form), _formed(calling, form)], [TRIAL_TOOL], STAND_IN):
                    return form
        return self._form

    def _shows(self, shown: Sequence[TemplateMessage], tools: Sequence[Tool], text: str) -> bool:
        """Return True if the template accepts the messages `shown`, in its form, and writes `text`, which they have."""
        try:
            return text in self._render(shown, tools, prompting=False).text
        except EnvError:
            return False


def load_tokenizer(config: ModelConfig) -> Any:
    """Return the transformers tokenizer of a model. Raises ConfigError if the model has no usable tokenizer."""
    from transformers import AutoTokenizer

    local = Path(config.path).is_dir()
    try:
        return AutoTokenizer.from_pretrained(
            config.path, local_files_only=local, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # damaged files cause errors of many types, and a model's own code may raise any
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model.path = {config.path!r} has no usable tokenizer: {reason}") from error


def end_of_text(tokenizer: Any) -> list[int]:
    """Return a list of the token with which a transformers tokenizer ends a text; empty if it has none."""
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _response_with_calls(results: Sequence[Message], marked: int) -> Message:
    """Return a message that stands for the response whose calls had these results (messages of the role `tool`).

    The real calls are in the response as tokens and are not read again, so calls with invented arguments take their
    place. `marked`: index of the call whose arguments hold the stand-in.
    """
    calls: list[ToolCall] = []
    for index, result in enumerate(results):
        arguments = json.dumps({"flash": STAND_IN if index == marked else "flash"}, ensure_ascii=False)
        calls.append(ToolCall(result.tool_call_id or CALL_ID, result.name or TOOL_NAME, arguments))
    return Message(ASSISTANT, "", tool_calls=tuple(calls))


def _responses_with_calls(results: Sequence[Message]) -> list[Message]:
    """Return alternatives for the one message that stands for the response whose calls had these results.

    `_tokens_after_stand_in` uses the first alternative that the template accepts. The first one has all calls, with the
    stand-in in the last call. If there are several calls, a second one has only the first call: a model may make two
    calls at once, but its template may refuse to show more than one.
    """
    alternatives = [_response_with_calls(results, marked=len(results) - 1)]
    if len(results) > 1:
        alternatives.append(_response_with_calls(results[:1], marked=0))
    return alternatives


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two token lists."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))


def _formed(message: Message, form: _MessageForm) -> TemplateMessage:
    """Return a message as a chat template takes it in this form. Fields that the message lacks are left out."""
    content: Any = form.empty_content if message.tool_calls and not message.content else message.content
    if form.content_as_parts and content is not None:
        content = [{"type": "text", "text": content}]
    shown: TemplateMessage = {"role": message.role, "content": content}
    if message.reasoning:
        shown |= dict.fromkeys(REASONING, message.reasoning)
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if form.arguments_as_text else _arguments_object(call),
                },
            }
            for call in message.tool_calls
        ]
    if message.role == TOOL:
        shown |= {key: value for key in ("tool_call_id", "name") if (value := getattr(message, key))}
    return shown


def _arguments_object(call: ToolCall) -> Any:
    """Return the arguments of a call as an object, which most templates expect; as text if they are no object."""
    try:
        # msgspec refuses the stand-in, which is a lone surrogate.
        value: Any = json.loads(call.arguments) if STAND_IN in call.arguments else msgspec.json.decode(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments
    return value if isinstance(value, dict) else call.arguments
