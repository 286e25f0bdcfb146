"""What an environment sees of its episode's transcript, and how it wants the next responses: an `EpisodeView`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from flash.environment.interface import Expected, Said, Spoken
from flash.errors import EnvError
from flash.rollout.episode.asking import Asking, Wanted
from flash.rollout.episode.reading import PlainReading
from flash.rollout.episode.tokenizer import Tokenizer
from flash.rollout.episode.transcript import Branch, BranchForm, EpisodeLimits, Transcript, least_tokens
from flash.sampling import Sampling
from flash.types import Piece, Span


class TranscriptView(Transcript):
    """A transcript as its environment sees it. What it asks of the next response holds for that one.

    Args: as of `Transcript`; `sampling` says how its responses are drawn.
    """

    def __init__(self, tokenizer: Tokenizer, limits: EpisodeLimits, sampling: Sampling) -> None:
        super().__init__(tokenizer, limits)
        self.sampling = sampling
        self._most = limits.max_length
        """Tokens that the next response may have."""
        self._stop: tuple[str, ...] = ()
        """Texts that end it."""
        self._hears: tuple[Callable[[Piece], None], bool] | None = None
        """Who hears it, and whether its calls are told apart."""
        self._name = ""
        """By which the next response may be expected."""
        self._asking: Asking | None = None

    @property
    def last(self) -> Said:
        """The last response."""
        branch, span = self._spoke()
        return Said(span.start, span.stop - span.start, branch.ends[-1].cut)

    def scored(self) -> list[tuple[str, float]]:
        """Text and log-prob of each token of the last response."""
        branch, span = self._spoke()
        texts = self.tokenizer.token_texts(branch.tokens[span.start : span.stop])
        return list(zip(texts, branch.logprobs[-len(texts) :], strict=True))

    def spoken(self, *, calling: bool = True) -> Spoken:
        """The last response, read by the parsers of the run."""
        branch, span = self._spoke()
        said, before = branch.tokens[span.start : span.stop], branch.tokens[: span.start]
        return self.tokenizer.read(said, branch.ends[-1].ended, before, branch.form.tools, calling=calling)

    def _spoke(self) -> tuple[Branch, Span]:
        assert self.spoke is not None, "nothing was said yet"
        return self.spoke, self.spoke.spans[-1]

    def limit(self, tokens: int) -> None:
        """Let the next response have at most so many tokens."""
        self._most = tokens

    def stop_at(self, texts: Sequence[str]) -> None:
        """Let the next response end with the first of these texts that comes."""
        self._stop = tuple(texts)

    def listen(self, hear: Callable[[Piece], None], *, calling: bool = True) -> None:
        """Let this hear the next response while it is sampled."""
        self._hears = hear, calling

    def expect(self, expected: Expected) -> None:
        """Let a later response be sampled from now on, where the limits have room for it, whatever else is."""
        if self._asking is None or (waiting := self._asking.waiting) is None:
            return
        under_way = waiting + 1
        longest, most = self.limits.max_length, self.limits.max_new_tokens
        together = sum(len(branch.tokens) for branch in self.branches) + (under_way + 1) * longest
        if together > self.limits.max_tokens or min(self.turns_left, self.branches_left) <= under_way:
            return
        if least_tokens(expected.observation, expected.tools) > longest:
            return
        with suppress(EnvError):  # which the one who shows it will hear
            prompt, form = self._expected_prompt(expected)
            room = longest - len(prompt)
            if room < 1:
                return
            hear = expected.hear
            hears = _unheard if hear is None else self._heard(prompt, form, hear, expected.calling)
            most = min(most, room, room if expected.tokens is None else expected.tokens)
            self._asking.expect(Wanted(prompt, most, expected.stop, hears, expected.name))

    def comes(self, name: str) -> None:
        """What is shown next was expected by this name, or has none that was."""
        self._name = name

    def _expected_prompt(self, expected: Expected) -> tuple[list[int], BranchForm]:
        """Its tokens, as `render` and `show` will have them. Raises EnvError."""
        observation, tools = expected.observation, expected.tools
        if not expected.responses:
            if tools:
                self.tokenizer.check_calls()
            form = BranchForm(not isinstance(observation, str), list(tools))
            return self.tokenizer.render(observation, tools), form
        branch = self.branches[expected.branch]
        shown = self.follow(branch, expected.responses, observation)
        return branch.tokens[: branch.ends[expected.responses - 1].place] + shown, branch.form

    def asks(self, asking: Asking) -> None:
        """Responses are asked for here."""
        self._asking = asking

    def _listening(self) -> Callable[[Sequence[int]], None]:
        """What is to be told the tokens of the next response as they come."""
        heard, self._hears = self._hears, None
        branch = self.branches[self.branch]
        return _unheard if heard is None else self._heard(branch.tokens, branch.form, *heard)

    def _heard(
        self, prompt: Sequence[int], form: BranchForm, hear: Callable[[Piece], None], calling: bool
    ) -> Callable[[Sequence[int]], None]:
        if form.chat:
            reading = self.tokenizer.reading(prompt, form.tools, calling=calling)
        else:
            reading = PlainReading(self.tokenizer.decode)

        def hears(tokens: Sequence[int]) -> None:
            piece = reading.add(tokens)
            if piece.content or piece.reasoning:
                hear(piece)

        return hears

    def wanted(self) -> Wanted:
        """The next response."""
        most, stop, name = min(self.left(), self._most, self.limits.max_new_tokens), self._stop, self._name
        self._most, self._stop, self._name = self.limits.max_length, (), ""
        return Wanted(list(self.tokens), most, stop, self._listening(), name)


def _unheard(tokens: Sequence[int]) -> None:
    """Nobody listens."""
