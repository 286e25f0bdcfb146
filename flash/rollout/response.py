"""A response that may move between engines: what was sampled so far, and what is still to be asked for.

Invariant: tokens, log-probs, versions and kept sets stay aligned; each token stays as its engine gave it.
"""

from __future__ import annotations

import msgspec

from flash.branches import divide_versions
from flash.rollout.engine import Progress, ResponseRequest
from flash.sampling import Kept, join_kept
from flash.types import Completion, VersionRun, append_versions


class Response:
    """A response and what is still to be asked for, over all engines it has been on."""

    def __init__(self, request: ResponseRequest) -> None:
        self._request = request
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[VersionRun] = []
        self._kept: list[Kept] = []
        self._moved_at = 0

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self._tokens)

    def rest(self) -> ResponseRequest:
        """What the next engine is asked for: it goes on after the tokens so far."""
        self._moved_at = len(self._tokens)
        if not self._tokens:
            return self._request
        request = self._request
        return msgspec.structs.replace(
            request,
            prompt=request.prompt + self._tokens,
            max_new_tokens=request.max_new_tokens - len(self._tokens),
            generated=request.generated + len(self._tokens),
        )

    def add(self, piece: Progress) -> None:
        """Take a piece from the engine that has it now."""
        self._tokens += piece.token_ids
        self._logprobs += piece.logprobs
        append_versions(self._versions, piece.versions)
        if piece.kept is not None:
            self._kept.append(piece.kept)

    def exhausted(self) -> Completion | None:
        """The whole response, when nothing is left to ask for."""
        if len(self._tokens) < self._request.max_new_tokens:
            return None
        return Completion(self._tokens, self._logprobs, self._versions, "length", self._kept_until(len(self._tokens)))

    def completed(self, last: Completion) -> Completion:
        """The whole response, from the one of the last engine, which repeats that engine's pieces."""
        at = self._moved_at
        self._tokens = self._tokens[:at] + last.token_ids
        if at == 0:
            return last
        (versions,) = divide_versions(self._versions, [at])
        append_versions(versions, last.versions)
        before = self._kept_until(at)
        kept = None if before is None or last.kept is None else join_kept((before, last.kept))
        # The last engine has computed all of it.
        return Completion(self._tokens, self._logprobs[:at] + last.logprobs, versions, last.finish, kept, last.routes)

    def _kept_until(self, tokens: int) -> Kept | None:
        return join_kept(self._kept).part(0, tokens) if self._kept else None
