"""Which tokens of a prompt are the chat template's own, and which only text that looks like them.

Law: a control token comes from the chat template alone. What a user, a data set, a tool or an agent writes is text,
whatever it says: `<|im_end|>` in it is some characters. The template's own text is written in characters that no
text from outside can have, lone surrogates, one for each, so that the template sees no other text and decides nothing
else than it would (`flash.foreign.chat_templates`). A tokenizer in which control tokens bear secret names reads the
result at once, and so splits, pads and normalizes it as the model's own tokenizer does.
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

from flash.errors import ConfigError
from flash.foreign.chat_templates import compile_marked

STAND_IN = "\udfff"
"""Stands for a response: no text from outside and no template has it, and nothing trims it."""
FIRST, LAST = 0xD800, 0xDFFE
"""The characters that a template's own text is written in."""
SECRET = 24
"""Letters of a secret: nobody guesses it."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""What a template may put between its own characters to write a control token, such as `<|user|>`."""

_OWN = re.compile(f"[{chr(FIRST)}-{chr(LAST)}]+")


class Shown(NamedTuple):
    """What a template writes."""

    text: str
    named: str | None
    """The same, with secret names for its own control tokens; None where they need not be told apart."""

    def after(self, text: str) -> Shown | None:
        """What stands behind the first of this text, if it is there."""
        _, found, tail = self.text.partition(text)
        if self.named is None:
            return Shown(tail, None) if found else None
        _, also, named = self.named.partition(text)
        return Shown(tail, named) if found and also else None

    def before(self, text: str) -> Shown | None:
        """Return what stands before the last of this text, if it is there."""
        head, found, _ = self.text.rpartition(text)
        if self.named is None:
            return Shown(head, None) if found else None
        named, also, _ = self.named.rpartition(text)
        return Shown(head, named) if found and also else None

    def behind(self, before: Shown) -> Shown | None:
        """What stands behind another one, if all of that is how it begins."""
        if not self.text.startswith(before.text):
            return None
        tail = self.text[len(before.text) :]
        if self.named is None:
            return Shown(tail, None)
        if before.named is None or not self.named.startswith(before.named):
            return None
        return Shown(tail, self.named[len(before.named) :])


class Controls:
    """The control tokens of a Hugging Face tokenizer.

    Those are its added tokens, special or not, but for words and white space that were added to its vocabulary.

    Args:
        tokenizer: with a backend of the `tokenizers` package.
        path: names it.

    Raises:
        ConfigError: it has no such backend, or one that cannot be taken apart.
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
        contents = {
            token.content: number for number, token in tokenizer.added_tokens_decoder.items() if _is_control(token)
        }
        secret = "".join(secrets.choice(ascii_lowercase) for _ in range(SECRET))
        names = {content: secret + _letters(place) for place, content in enumerate(contents)}
        self._before = secret + _letters(len(names))
        """The name of a token that stands before a text that goes on."""
        self._backend = _renamed(backend, names, self._before)
        if any(self._backend.token_to_id(names[content]) != number for content, number in contents.items()):
            raise ConfigError(f"the tokenizer of {path} numbers its added tokens in an order of its own; save it anew")
        self.ids = frozenset(contents.values())
        """The control tokens."""
        alphabet = sorted({one for content in contents for one in content if not one.isspace()})
        if len(alphabet) > LAST - FIRST:
            raise ConfigError(f"the added tokens of {path} have {len(alphabet)} different characters: too many")
        self._marks = {ord(one): chr(FIRST + place) for place, one in enumerate(alphabet)}
        self._plain = {ord(mark): chr(one) for one, mark in self._marks.items()}
        self._contents = _Contents(contents)
        self._named = {form: names[content] for content in contents for form in self._forms(content)}
        forms = sorted(self._named, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, forms)) or r"(?!)")
        names_of: dict[str, Any] = tokenizer.special_tokens_map
        self._given = {name: self._mark(one) if isinstance(one, str) else one for name, one in names_of.items()}
        """The special tokens by the names that templates have for them."""
        self._compiled = lru_cache(maxsize=8)(lambda source: compile_marked(source, self._mark, self._unmarked))  # pyright: ignore[reportUnknownLambdaType]

    def template(self, messages: Sequence[Mapping[str, Any]], *, prompting: bool, **given: Any) -> Shown:
        """What the tokenizer's chat template writes. Raises whatever it does."""
        tokenizer = self._tokenizer
        text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=prompting, tokenize=False, **given))
        template = self._compiled(tokenizer.get_chat_template(None, given.get("tools")))
        asked = {"tools": None, "documents": None} | given | {"add_generation_prompt": prompting}
        marked = template.render(messages=messages, **self._given, **asked)
        named = self._unmarked(self._pattern.sub(lambda found: self._named[found[0]], marked))
        if self._unmarked(marked) == text or not self._harmless([messages, given], text, named):
            return Shown(text, named)
        return Shown(text, None)

    def encode(self, text: str, *, follows: bool = False) -> list[int]:
        """Tokens of a text from outside; `follows`: others stand before it. Raises whatever the tokenizer does."""
        # In a batch, which other threads need not wait for.
        (encoded,) = self._backend.encode_batch([self._before * follows + text], add_special_tokens=False)
        ids: list[int] = encoded.ids
        return ids[follows:]

    def encode_shown(self, shown: Shown, *, follows: bool = False) -> list[int]:
        """Tokens of what a template writes."""
        return self._unguarded(shown.text) if shown.named is None else self.encode(shown.named, follows=follows)

    def _harmless(self, given: Any, text: str, named: str) -> bool:
        """Whether a template that reads its own marks, and does something else for them, can be left without them.

        It can where nothing that it is given holds a control token, and it puts none together from that.
        """
        outside = json.dumps(given, ensure_ascii=False)
        if self._counted(self._unguarded(outside)):
            return False
        return self._counted(self._unguarded(text)) <= self._counted(self.encode(named.replace(STAND_IN, "")))

    def _counted(self, tokens: Sequence[int]) -> Counter[int]:
        return Counter(token for token in tokens if token in self.ids)

    def _unguarded(self, text: str) -> list[int]:
        """Tokens as transformers gives them."""
        return list(self._tokenizer.encode(text.replace(STAND_IN, ""), add_special_tokens=False))

    def _mark(self, text: str) -> str:
        """A text of the template's, with the characters marked that are, or may become, a control token's."""
        marked = list(text)
        for start, stop in self._contents.parts(text):
            marked[start:stop] = text[start:stop].translate(self._marks)
        return "".join(marked)

    def _unmarked(self, text: str) -> str:
        return text if text.isascii() else _OWN.sub(lambda found: found[0].translate(self._plain), text)

    def _forms(self, content: str) -> Iterator[str]:
        """How a template writes a control token: all by itself, or around a role."""
        yield content.translate(self._marks)
        for role in ROLES:
            before, _, after = content.partition(role)
            if before.strip() and after.strip():
                yield before.translate(self._marks) + role + after.translate(self._marks)


class _Contents:
    """What control tokens are written as, and the parts that a template may put one together from."""

    def __init__(self, contents: Mapping[str, int]) -> None:
        self._contents = "\0".join(contents)
        whole = sorted(contents, key=len, reverse=True)
        self._longest = max(map(len, contents), default=0)
        self._whole = re.compile("|".join(map(re.escape, whole)) or r"(?!)")
        self._beginnings = {content[:length] for content in contents for length in range(1, len(content))}
        self._ends = {content[-length:] for content in contents for length in range(1, len(content))}

    def parts(self, text: str) -> Iterator[tuple[int, int]]:
        """Where they stand in a text of the template's."""
        if text in self._contents:
            yield 0, len(text)
            return
        yield from (found.span() for found in self._whole.finditer(text))
        size = len(text)
        longest = range(1, min(size, self._longest))
        yield from ((0, length) for length in longest if text[:length] in self._ends)
        yield from ((size - length, size) for length in longest if text[-length:] in self._beginnings)


def _is_control(token: Any) -> bool:
    """Not a word or white space, which have tokens of their own in some vocabularies; `▁` is a space in these."""
    letters = token.content.replace("▁", "").strip()
    return bool(letters) and (token.special or not all(one.isalnum() or one.isspace() for one in letters))


def _letters(number: int) -> str:
    """A number in letters, five for each."""
    return "".join(ascii_lowercase[number // 26**place % 26] for place in range(5))


def _renamed(backend: Any, names: Mapping[str, str], before: str) -> Any:
    """The tokenizer with other names for these tokens, of the same numbers, and with no other way to make them."""
    from tokenizers import Tokenizer

    form: dict[str, Any] = json.loads(backend.to_str())
    form |= {"truncation": None, "padding": None, "post_processor": None}
    for token in form["added_tokens"]:
        if token["content"] in names:
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
    renamed.add_special_tokens([before])
    return renamed
