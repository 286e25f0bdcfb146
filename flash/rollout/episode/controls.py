"""Control tokens: make them where the chat template writes them, and not where other text has the same characters.

A control token is a token such as `<|im_end|>`, with which many models end a turn. Invariant: only the chat template
makes control tokens. Text *from outside* (of a user, a data set, a tool or an agent) stays text: `<|im_end|>` in it
becomes tokens of ordinary characters. Otherwise such a text could end the turn of a user and speak as the assistant.
`ChatTemplate` renders with `ControlTokens`, and `HfTokenizer` encodes all text with it.

Two steps keep the invariant:

1. The template is compiled so that the characters of its own control tokens are written as lone surrogates. This file
   calls them marks. Text from outside contains no marks, because text with lone surrogates is refused. The template
   still decides as it would without marks (`flash.foreign.chat_templates`).
2. A copy of the tokenizer, in which control tokens have secret names, encodes the result: marked control tokens are
   replaced by their secret names, and all other marks by the characters that they stand for. The text with secret names
   is called *guarded*. The copy splits and normalizes text as the model's own tokenizer does.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from string import ascii_lowercase
from typing import Any, NamedTuple

from flash.errors import ConfigError, EnvError
from flash.foreign.chat_templates import compile_marked

STAND_IN = "\udfff"
"""Character that takes the place of a response in a conversation. No text from outside and no template contains it, and
a template that strips white space keeps it."""
FIRST_MARK, LAST_MARK = 0xD800, 0xDFFE
"""Range of the marks: lone surrogates, one for each character that occurs in a control token."""
SECRET_LETTERS = 24
"""Number of letters of the secret with which the names of control tokens begin: too many to guess."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a template may put between its own characters to write a control token, such as `<|user|>`."""

# The pattern finds one or more marks, which `_unmark` replaces.
_MARKS = re.compile(f"[{chr(FIRST_MARK)}-{chr(LAST_MARK)}]+")


class TemplateText(NamedTuple):
    """Text that a chat template has written, or a part of it."""

    text: str
    guarded: str | None
    """Copy of `text` with secret names in place of the template's own control tokens. None if `text` can be encoded
    unchanged, because it contains nothing from outside that looks like a control token."""

    def after(self, part: str) -> TemplateText | None:
        """Return the text after the first occurrence of `part`; None if `part` does not occur.

        `part` is `STAND_IN`: the text after it shows what follows a response.
        """
        _, found, tail = self.text.partition(part)
        if self.guarded is None:
            return TemplateText(tail, None) if found else None
        _, found_guarded, guarded = self.guarded.partition(part)
        return TemplateText(tail, guarded) if found and found_guarded else None

    def before(self, part: str) -> TemplateText | None:
        """Return the text before the last occurrence of `part`; None if `part` does not occur.

        `part` is `STAND_IN`: it marks the end of a message that the policy continues.
        """
        head, found, _ = self.text.rpartition(part)
        if self.guarded is None:
            return TemplateText(head, None) if found else None
        guarded, found_guarded, _ = self.guarded.rpartition(part)
        return TemplateText(head, guarded) if found and found_guarded else None

    def without_prefix(self, prefix: TemplateText) -> TemplateText | None:
        """Return the text behind `prefix`; `ChatTemplate` cuts an answer from its prompt with this.

        None if the text does not begin with the text of `prefix`. If this text has a guarded copy, it must also begin
        with the guarded copy of `prefix`; otherwise the result is None.
        """
        if not self.text.startswith(prefix.text):
            return None
        tail = self.text[len(prefix.text) :]
        if self.guarded is None:
            return TemplateText(tail, None)
        if prefix.guarded is None or not self.guarded.startswith(prefix.guarded):
            return None
        return TemplateText(tail, self.guarded[len(prefix.guarded) :])


class ControlTokens:
    """The control tokens of a Hugging Face tokenizer, and an encoder that makes them only where a template wrote them.

    The control tokens are the tokenizer's added tokens, special or not, except words and white space that were added to
    the vocabulary.

    Args:
        tokenizer: a transformers tokenizer with a backend of the `tokenizers` package.
        path: the model's path, for error messages.

    Raises:
        ConfigError: the tokenizer has no such backend, numbers its added tokens in an unusual order, or has too many
            different characters in them.
    """

    def __init__(self, tokenizer: Any, path: str) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"the tokenizer of {path} is a {type(tokenizer).__name__}, written in Python: it cannot tell text from "
                "control tokens; expected one with a tokenizer.json, which "
                "`AutoTokenizer.from_pretrained(…).save_pretrained(…)` writes for most models"
            )
        self._tokenizer = tokenizer
        self._path = path
        # Step 2 of the module: a copy of the tokenizer in which the control tokens have secret names.
        contents = {
            token.content: number for number, token in tokenizer.added_tokens_decoder.items() if _is_control(token)
        }
        secret = "".join(secrets.choice(ascii_lowercase) for _ in range(SECRET_LETTERS))
        names = {content: secret + _five_letters(place) for place, content in enumerate(contents)}
        self._predecessor = secret + _five_letters(len(names))
        """Secret name of a token that is put before text which continues other text, because a tokenizer may treat the
        beginning of a text differently."""
        self._backend = _with_secret_names(backend, names, self._predecessor)
        if any(self._backend.token_to_id(names[content]) != number for content, number in contents.items()):
            raise ConfigError(
                f"the tokenizer of {path} does not number its added tokens in the order in which its tokenizer.json "
                "lists them; load it with `AutoTokenizer.from_pretrained(…)` and save it with `save_pretrained(…)`"
            )
        self.texts = tuple(contents)
        """Texts of the control tokens."""
        self.ids = frozenset(contents.values())
        """Ids of the control tokens."""
        # Step 1 of the module: a mark for each character that occurs in a control token, except white space, and the
        # texts with marks by which the control tokens are found in the output of the template.
        alphabet = sorted({letter for content in contents for letter in content if not letter.isspace()})
        if len(alphabet) > LAST_MARK - FIRST_MARK:
            raise ConfigError(
                f"the added tokens of the tokenizer of {path} have {len(alphabet)} different characters; expected at "
                f"most {LAST_MARK - FIRST_MARK}: remove the tokens that the chat template does not write"
            )
        # Tables for `str.translate`, from characters to marks and back.
        self._marks = {ord(letter): chr(FIRST_MARK + place) for place, letter in enumerate(alphabet)}
        self._letters = {ord(mark): chr(letter) for letter, mark in self._marks.items()}
        self._finder = _ControlTextFinder(contents)
        """Finds the control tokens, and pieces of them, in the text of a template."""
        self._names = {form: names[content] for content in contents for form in self._marked_forms(content)}
        """Secret names by the marked forms in which a template may write a control token."""
        forms = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, forms)) or r"(?!)")
        """Pattern of the keys of `_names`, the longest first. It matches nothing if there are no control tokens."""
        named_tokens: dict[str, Any] = tokenizer.special_tokens_map
        self._template_globals = {
            name: self._mark(token) if isinstance(token, str) else token for name, token in named_tokens.items()
        }
        """Special tokens, marked, under the names that templates have for them, such as `eos_token`."""
        # This function compiles a template from its source, and marks the template's own text with `_mark`. The eight
        # results that were used last are kept.
        self._compiled = lru_cache(maxsize=8)(lambda source: compile_marked(source, self._mark, self._unmark))  # pyright: ignore[reportUnknownLambdaType]

    def render(self, messages: Sequence[Mapping[str, Any]], *, prompting: bool, **arguments: Any) -> TemplateText:
        """Return the text that the chat template writes for messages. The template runs twice: with and without marks.

        Args:
            messages: messages in the form that the template takes.
            prompting: True if the text ends with the beginning of an assistant's answer.
            arguments: further arguments of the template, such as `tools`.

        Raises:
            Exception: anything that the template raises.
        """
        tokenizer = self._tokenizer
        text = str(
            tokenizer.apply_chat_template(messages, add_generation_prompt=prompting, tokenize=False, **arguments)
        )
        template = self._compiled(tokenizer.get_chat_template(None, arguments.get("tools")))
        variables = {"tools": None, "documents": None} | arguments | {"add_generation_prompt": prompting}
        marked = template.render(messages=messages, **self._template_globals, **variables)
        guarded = self._unmark(self._pattern.sub(lambda found: self._names[found[0]], marked))
        # A template that inspects its own output, by slicing for example, sees the marks and may write another text.
        # Then the text without marks is used if that is safe. Otherwise the text with marks is used, although it
        # differs: a conversation that is shown in an odd way does less harm than a forged control token.
        if self._unmark(marked) != text and self._is_safe_unguarded([messages, arguments], text, guarded):
            return TemplateText(text, None)
        return TemplateText(text, guarded)

    def encode(self, text: str | TemplateText, *, follows: bool = False) -> list[int]:
        """Return the tokens of a text from outside (a str), or of text that a template has written.

        `follows`: True if the text continues other text, so that it is not treated as the beginning of a text.

        Raises:
            EnvError: the tokenizer cannot take the text, for example because its vocabulary lacks a character.
        """
        try:
            if not isinstance(text, TemplateText):
                return self._encode_guarded(text, follows=follows)
            if text.guarded is None:
                return self._encode_unguarded(text.text)
            return self._encode_guarded(text.guarded, follows=follows)
        except Exception as error:  # each tokenizer raises errors of its own
            plain = text.text if isinstance(text, TemplateText) else text
            raise EnvError(f"the tokenizer of {self._path} cannot take {plain[:80]!r}: {error}") from error

    def _encode_guarded(self, text: str, *, follows: bool = False) -> list[int]:
        """Return the tokens of a text in which only secret names become control tokens.

        `follows`: True if the text continues other text. Then `_predecessor` is put before it, and its token is left
        out of the result.
        """
        # A batch is encoded without Python's global lock, so that other threads need not wait.
        (encoded,) = self._backend.encode_batch([self._predecessor * follows + text], add_special_tokens=False)
        ids: list[int] = encoded.ids
        return ids[follows:]

    def _encode_unguarded(self, text: str) -> list[int]:
        """Return the tokens that transformers gives, in which any text may become a control token.

        Stand-ins in the text are left out.
        """
        return list(self._tokenizer.encode(text.replace(STAND_IN, ""), add_special_tokens=False))

    def _is_safe_unguarded(self, given: Any, text: str, guarded: str) -> bool:
        """Return True if the model's own tokenizer may encode `text`, without secret names.

        This is safe under two conditions. The template's input `given` must hold no control token. And `text` must not
        have more control tokens than the guarded text; otherwise the template has formed a control token from pieces of
        its input.
        """
        if self._count_controls(self._encode_unguarded(json.dumps(given, ensure_ascii=False))):
            return False
        written = self._count_controls(self._encode_guarded(guarded.replace(STAND_IN, "")))
        return self._count_controls(self._encode_unguarded(text)) <= written

    def _count_controls(self, tokens: Sequence[int]) -> Counter[int]:
        """Return the number of times that each control token occurs in `tokens`."""
        return Counter(token for token in tokens if token in self.ids)

    def _mark(self, text: str) -> str:
        """Return a text of the template with marks in place of characters that are, or may become, a control token.

        The text is a literal of the template's source, or a special token that is given to the template. A template may
        put a control token together from several such pieces.
        """
        marked = list(text)
        for start, stop in self._finder.spans(text):
            marked[start:stop] = text[start:stop].translate(self._marks)
        return "".join(marked)

    def _unmark(self, text: str) -> str:
        """Return a text in which each mark is replaced by the character for which it stands."""
        return text if text.isascii() else _MARKS.sub(lambda found: found[0].translate(self._letters), text)

    def _marked_forms(self, content: str) -> Iterator[str]:
        """Yield the forms in which a template writes a control token: marked as a whole, or marked around a role.

        A template may write `<|`, the role of the message and `|>`. The role is from outside, so it has no marks.
        """
        yield content.translate(self._marks)
        for role in ROLES:
            before, _, after = content.partition(role)
            if before.strip() and after.strip():
                yield before.translate(self._marks) + role + after.translate(self._marks)


class _ControlTextFinder:
    """Finds control tokens in the text of a template, and pieces from which the template may put one together.

    Args:
        contents: ids of the control tokens, by their text.
    """

    def __init__(self, contents: Mapping[str, int]) -> None:
        # A text that is contained in `_joined` is a piece of one control token: no text spans two, because of the \0.
        self._joined = "\0".join(contents)
        longest_first = sorted(contents, key=len, reverse=True)
        self._longest = max(map(len, contents), default=0)
        """Number of characters of the longest control token; 0 if there is none."""
        self._complete = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        """Pattern of a whole control token. It matches nothing if there is none."""
        self._beginnings = {content[:length] for content in contents for length in range(1, len(content))}
        """All beginnings of control tokens, without the whole tokens."""
        self._ends = {content[-length:] for content in contents for length in range(1, len(content))}
        """All ends of control tokens, without the whole tokens."""

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield start and stop of each control token, and of each piece of one, in a text of the template. They may
        overlap.

        A piece of a control token is a beginning of it at the end of the text, an end of it at the beginning of the
        text, or the whole text.
        """
        if text in self._joined:
            yield 0, len(text)
            return
        yield from (found.span() for found in self._complete.finditer(text))
        size = len(text)
        lengths = range(1, min(size, self._longest))
        yield from ((0, length) for length in lengths if text[:length] in self._ends)
        yield from ((size - length, size) for length in lengths if text[-length:] in self._beginnings)


def _is_control(token: Any) -> bool:
    """Return True unless an added token is a word or white space, which some vocabularies add as ordinary text."""
    letters = token.content.replace("▁", "").strip()  # "▁" is a space in SentencePiece's vocabularies
    return bool(letters) and (token.special or not all(letter.isalnum() or letter.isspace() for letter in letters))


def _five_letters(number: int) -> str:
    """Return a number in base 26, written in five letters: the end of the secret name of a token."""
    return "".join(ascii_lowercase[number // 26**place % 26] for place in range(5))


def _with_secret_names(backend: Any, names: Mapping[str, str], predecessor: str) -> Any:
    """Return a copy of a tokenizer in which control tokens have secret names and the same ids.

    The old names become ordinary text. A BPE model joins pieces of text by rules, its merges. A merge is removed if it
    joins an old name to another piece, or if its result is an old name, so that no merge makes a control token.

    Args:
        backend: the tokenizer, an object of the library `tokenizers`.
        names: the secret name of each control token, by the token's text.
        predecessor: name of one more token. `_encode_guarded` puts it before text that continues other text.
    """
    from tokenizers import Tokenizer

    form: dict[str, Any] = json.loads(backend.to_str())
    # The copy must encode exactly the given text: it cuts nothing and adds no tokens.
    form |= {"truncation": None, "padding": None, "post_processor": None}
    for token in form["added_tokens"]:
        if token["content"] in names:
            # The name is searched for in the text before the text is normalized, so it is found exactly as it is.
            token |= {"content": names[token["content"]], "normalized": False}
    model = form["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(word, word): number for word, number in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(word, word), score] for word, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not any(one in names for one in (*pair, "".join(pair)))]
    renamed = Tokenizer.from_str(json.dumps(form))
    renamed.add_special_tokens([predecessor])
    return renamed
