"""BM25 against the formula, worked out from the texts alone."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.tools.runner import ToolPlace
from envs.tools.search import K1, MOST_RESULTS, B, Index, Passage, Search, SearchOptions, passages, terms
from flash.environment import sharing
from flash.errors import ConfigError

WORDS = st.lists(st.sampled_from(["ox", "Ox", "bee", "cat", "d7", "."]), max_size=6).map(" ".join)


def score(query: str, text: str, texts: list[str]) -> float:
    """The formula, term by term of the query, over all texts."""
    mean = sum(len(terms(one)) for one in texts) / len(texts) or 1.0
    total = 0.0
    for term in terms(query):
        holding = sum(term in terms(one) for one in texts)
        often = terms(text).count(term)
        idf = math.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))
        total += idf * often / (often + K1 * (1 - B + B * len(terms(text)) / mean))
    return total


@given(texts=st.lists(WORDS, min_size=1, max_size=6), query=WORDS, most=st.integers(1, 4))
def test_scores_are_those_of_the_formula_and_the_best_come_first(texts: list[str], query: str, most: int) -> None:
    index = Index([Passage(str(place), text) for place, text in enumerate(texts)])
    expected = sorted(((-score(query, text, texts), place) for place, text in enumerate(texts)))
    found = index.search(query, most)
    kept = [(-value, place) for value, place in expected if value < 0][:most]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in kept])
    assert all(value == pytest.approx(score(query, passage.text, texts)) for value, passage in found)


def test_a_rare_word_weighs_more_than_a_common_one() -> None:
    index = Index([Passage("a", "the cat"), Passage("b", "the dog"), Passage("c", "the end")])
    assert [passage.path for _, passage in index.search("the DOG", 2)] == ["b", "a"]
    assert index.search("zebra", 3) == []


def test_files_are_divided_into_passages_at_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_text("one\n\ntwo two\n \nthree")
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "other.md").write_text("no")
    options = SearchOptions(folder=str(tmp_path), passage=9)
    assert passages(options) == [Passage("deep/b.txt", "one\n\ntwo two"), Passage("deep/b.txt", "three")]
    everything = SearchOptions(folder=str(tmp_path), pattern="*")
    assert [passage.path for passage in passages(everything)] == ["deep/b.txt", "other.md"]


@pytest.mark.anyio
async def test_a_call_cannot_ask_for_more_passages_than_the_bound(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(["ox"] * (MOST_RESULTS + 20)))
    async with sharing("test"):
        for results, most in ((3, MOST_RESULTS), (MOST_RESULTS + 10, MOST_RESULTS + 10)):
            search = Search(SearchOptions(folder=str(tmp_path), passage=1, results=results))
            (runner,) = await search.open(cast("ToolPlace", None))
            text = await runner.call({"query": "ox", "results": 10**9})
            assert text.count("[a.txt]") == most


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there are no files \*\.txt in"):
        SearchOptions(folder=str(tmp_path))
    (tmp_path / "a.txt").write_text(str(random.Random(1).random()))
    for pattern in ("/a.txt", "", "["):
        with pytest.raises(ConfigError, match=r"is no pattern of files' names|there are no files"):
            SearchOptions(folder=str(tmp_path), pattern=pattern)
    with pytest.raises(ConfigError, match="passage must be above 0"):
        SearchOptions(folder=str(tmp_path), passage=0)
