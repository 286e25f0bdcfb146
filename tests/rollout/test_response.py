"""A response that moves between engines stays one response."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flash.rollout.engine import Progress, ResponseRequest
from flash.rollout.proxy import PartialResponse
from flash.sampling import Kept
from flash.types import Completion, VersionRun

TOKENS = st.lists(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 3)), max_size=5), min_size=1, max_size=5)
"""For each engine that has the response: the tokens it samples, and their versions."""


def piece(token: int, version: int) -> Progress:
    """Return a piece of one token, whose log-prob and kept set follow from the token."""
    return Progress([token], [-float(token)], [VersionRun(version, 1)], kept([token]))


def kept(tokens: list[int]) -> Kept:
    """Return kept sets that have as many other tokens for each token as its last digit says."""
    return Kept.of([other for token in tokens for other in range(token % 10)], [token % 10 for token in tokens])


def versions_of(completion: Completion) -> list[int]:
    """Return the version of each token of a response."""
    return [run.version for run in completion.versions for _ in range(run.count)]


@given(TOKENS)
def test_law_4_tokens_logprobs_versions_and_kept_sets_stay_aligned_over_any_number_of_moves(
    engines: list[list[tuple[int, int]]],
) -> None:
    response = PartialResponse(ResponseRequest([1, 2], 100, key=5))
    expected: list[tuple[int, int]] = []
    for sampled in engines[:-1]:
        rest = response.rest()
        assert rest.prompt == [1, 2, *(token for token, _ in expected)]
        assert rest.generated == len(expected)
        assert rest.max_new_tokens == 100 - len(expected)
        assert rest.key == 5
        for token, version in sampled:
            response.add(piece(token, version))
        expected += sampled
    last = engines[-1]
    response.rest()
    for token, version in last[:2]:
        response.add(piece(token, version))
    tokens = [token for token, _ in last]
    runs = [VersionRun(version, 1) for _, version in last]
    end = Completion(tokens, [-float(token) for token in tokens], runs, "stop", kept(tokens))
    whole = response.complete(end)
    expected += last
    assert list(zip(whole.token_ids, versions_of(whole), strict=True)) == expected
    assert whole.logprobs == [-float(token) for token in whole.token_ids]
    assert whole.finish == "stop"
    assert whole.kept == kept(whole.token_ids)


def test_a_response_that_reached_its_limit_before_it_moved_is_complete() -> None:
    response = PartialResponse(ResponseRequest([1], 2, key=0))
    response.rest()
    response.add(piece(7, 0))
    assert response.exhausted() is None
    response.add(piece(8, 0))
    assert response.exhausted() == Completion([7, 8], [-7.0, -8.0], [VersionRun(0, 2)], "length", kept([7, 8]))
