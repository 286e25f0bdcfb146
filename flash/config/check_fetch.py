"""What `model.fetch` can get wrong: where a pretrained model comes from, and the folder that it becomes."""

from __future__ import annotations

import os
from collections.abc import Iterator

from flash.config.decode import Problem, show, suggest
from flash.config.packaged import PACKAGED, gguf_folder, is_gguf
from flash.config.tree import Config


def fetch_rule(config: Config) -> Iterator[Problem]:
    """The model to be fetched is known, or its file is there, and nothing else says what `model.path` is made from."""
    fetch, path = config.model.fetch, config.model.path
    if fetch is None:
        return
    # Of a GGUF file that model.path has named, that is the key that its user knows.
    key = "model.path" if is_gguf(fetch) and path == gguf_folder(fetch) else "model.fetch"
    if config.tiny_model is not None:
        yield Problem(key, "[tiny_model] stands beside it, and both say what the model is made from: leave one out")
    if is_gguf(path):
        message = f"expected the folder that model.fetch is made into, or no model.fetch (`none`), got the file {path}"
        yield Problem("model.path", message)
    if is_gguf(fetch):
        if not os.path.isfile(fetch) and not os.path.isfile(os.path.join(path, "config.json")):
            yield Problem(key, f"there is no file {fetch}: expected a GGUF file")
    elif fetch not in PACKAGED:
        known = " or ".join(map(show, PACKAGED))
        yield Problem(key, f"expected {known}, or a .gguf file, got {show(fetch)}{suggest(fetch, PACKAGED)}")
    elif config.model.max_length > (limit := PACKAGED[fetch].positions):
        message = f"expected at most {limit}, the positions of {fetch}, got {config.model.max_length}"
        yield Problem("model.max_length", message)
