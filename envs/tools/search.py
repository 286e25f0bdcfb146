"""Search: a tool of the policy that searches the texts of a folder by exact BM25, in the form that Lucene uses.

    score(q, d) = sum over terms t of q: idf(t) · f(t, d) / (f(t, d) + k1 · (1 - b + b · |d| / mean |d|))
    idf(t) = ln(1 + (N - n(t) + 0.5) / (n(t) + 0.5))

f(t, d) is the number of occurrences of t in passage d, and n(t) is the number of passages, of N, that contain t
(Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009, eq. 3.15). A passage consists
of consecutive paragraphs of one file.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec

from envs.tools.runner import Runner, ToolPlace, within
from flash.environment import shared
from flash.errors import ConfigError

K1, B = 1.2, 0.75
"""k1: saturation of repeated terms. b: strength of the length normalization. Both values are Lucene's."""

MOST_RESULTS = 100
"""Largest number of passages that a call may ask for, unless the option `results` is larger. The policy chooses the
number in its call; without a bound, one call could make the node join all texts of the folder."""

_TERM = re.compile(r"\w+")
"""Pattern of a term: a word or a number."""


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Texts to search, and the size of the results.

    Raises:
        ConfigError: there are no texts, or a number is not positive.
    """

    folder: str
    """Folder of the texts. Its subfolders are searched as well."""
    pattern: str = "*.txt"
    """Glob pattern of the files' names."""
    passage: int = 1000
    """Characters after which a passage ends, at the next end of a paragraph."""
    results: int = 3
    """Number of passages that a call returns, unless the call gives another number."""
    timeout: float = 10.0
    """Seconds that one call may take."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        for name in ("passage", "results", "timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, but is {getattr(self, name)!r}")
        try:
            found = _files(self)
        except (NotImplementedError, ValueError) as error:  # the errors of `rglob`
            raise ConfigError(f"pattern {self.pattern!r} is no pattern of files' names: {error}") from None
        if not found:
            raise ConfigError(f"there are no files {self.pattern} in {self.folder}")


def _files(options: SearchOptions) -> list[Path]:
    """Return the files with the texts, in the order of their paths. A folder whose name fits is no file."""
    return sorted(path for path in Path(options.folder).rglob(options.pattern) if path.is_file())


class Passage(msgspec.Struct, frozen=True):
    """A piece of a file, which a search can return."""

    path: str
    """Path of the file below the folder of texts."""
    text: str
    """Text of the passage."""


class Index:
    """Inverted index: for each term, the passages that contain it.

    `Search.open` makes one per node, which all episodes there share. It never changes.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        """Count the terms of all passages. Takes long for many texts, so `Search.open` calls it in a thread."""
        self.passages = passages
        counts = [Counter(terms(passage.text)) for passage in passages]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / max(1, len(lengths)) or 1.0  # 1 if no passage has a term
        # For each passage, the part of the formula's denominator that depends on the passage alone.
        self._length_terms = [K1 * (1 - B + B * length / mean) for length in lengths]
        self._postings: dict[str, list[tuple[int, int]]] = {}
        """For each term, the index of each passage that contains it, and the number of occurrences there."""
        for number, count in enumerate(counts):
            for term, occurrences in count.items():
                self._postings.setdefault(term, []).append((number, occurrences))

    def search(self, query: str, most: int) -> list[tuple[float, Passage]]:
        """Return the `most` best passages with their scores, best first; of equal scores, the earlier passage.

        Passages without a query term are left out. A term that the query repeats counts each time.
        """
        scores: dict[int, float] = {}
        for term in terms(query):
            found = self._postings.get(term, [])
            idf = math.log(1 + (len(self.passages) - len(found) + 0.5) / (len(found) + 0.5))
            for number, occurrences in found:
                gain = idf * occurrences / (occurrences + self._length_terms[number])
                scores[number] = scores.get(number, 0.0) + gain
        best = sorted(scores, key=lambda number: (-scores[number], number))[:most]
        return [(scores[number], self.passages[number]) for number in best]


class Search:
    """Toolset with `search(query, results)`."""

    def __init__(self, options: SearchOptions) -> None:
        self._options = options

    async def open(self, place: ToolPlace) -> Sequence[Runner]:
        """Return the tool. The texts are read once per node. Raises OSError if a text cannot be read."""
        options = self._options

        @asynccontextmanager
        async def open_index() -> AsyncGenerator[Index]:
            """Read the texts in a thread, and provide the index for the life of the node."""
            yield await anyio.to_thread.run_sync(lambda: Index(passages(options)))

        index = await shared(("envs.tools.search", options), open_index)

        async def best_passages(arguments: dict[str, Any]) -> str:
            """Return the passages that fit the query of a call, each after its path."""
            most = min(max(1, int(arguments.get("results", options.results))), max(MOST_RESULTS, options.results))
            # In a thread, because the search of a large folder takes long.
            best = await anyio.to_thread.run_sync(index.search, arguments["query"], most, abandon_on_cancel=True)
            return "\n\n".join(f"[{passage.path}]\n{passage.text}" for _, passage in best) or "nothing was found"

        async def call(arguments: dict[str, Any]) -> str:
            """Search, within the option `timeout`."""
            return await within(options.timeout, best_passages(arguments))

        query = {"type": "string", "description": "Words to look for."}
        results = {"type": "integer", "description": f"Passages to give; {options.results} if left out."}
        parameters = {"type": "object", "properties": {"query": query, "results": results}, "required": ["query"]}
        about = "Searches the documents by words and gives the passages that fit best."
        return [Runner(name="search", description=about, parameters=parameters, call=call)]

    async def close(self) -> None:
        """Do nothing: the index belongs to the node."""


def terms(text: str) -> list[str]:
    """Return the words and numbers of a text, in lower case."""
    return _TERM.findall(text.lower())


def passages(options: SearchOptions) -> list[Passage]:
    """Read the files of a folder and return their passages, in the order of the files' paths. Blocks.

    A passage ends at the first end of a paragraph after `options.passage` characters, or at the end of its file. Bytes
    that are no UTF-8 are replaced. Raises OSError if a file cannot be read.
    """
    found: list[Passage] = []
    root = Path(options.folder)
    for path in _files(options):
        name, text = str(path.relative_to(root)), ""
        for paragraph in re.split(r"\n\s*\n", path.read_text(encoding="utf-8", errors="replace")):
            text += f"\n\n{paragraph.strip()}" if text else paragraph.strip()
            if len(text) >= options.passage:
                found.append(Passage(name, text))
                text = ""
        if text:
            found.append(Passage(name, text))
    return found
