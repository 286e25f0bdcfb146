"""Checks of a configuration's models: the policy's, and those beside it. They look at folders and names alone.

Of hub ids `flash.run.checks.preflight` asks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from flash.config.decode import ConfigProblem, nearest, show, suggest
from flash.config.packaged import PACKAGED, gguf_folder, is_gguf
from flash.config.tree import Config
from flash.types import RESERVED_ARGUMENTS

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""`name` or `owner/name`: anything else is a path."""

SHOWN = 6
"""Folders that are named in place of one that is not there."""


def model_rule(config: Config) -> Iterator[ConfigProblem]:
    """A local model folder is one, or is to be made. Of hub ids `flash.run.checks.preflight` asks."""
    path = Path(config.model.path)
    if not config.model.path.strip():
        yield ConfigProblem("model.path", "is empty: expected a Hugging Face model folder or a hub id")
        return
    if (fault := unreachable(config.model.path)) is not None:
        yield ConfigProblem("model.path", f"{show(config.model.path)} cannot be used: {fault}")
        return
    if is_hub_id(config.model.path):
        if config.model.fetch is not None:
            yield ConfigProblem("model.path", f"{path} may be a hub id: expected ./{path}, or no model.fetch (`none`)")
        return
    if path.is_file() and not is_gguf(str(path)):  # which `fetch_rule` refuses
        yield ConfigProblem("model.path", f"expected a folder, got the file {path}")
    elif (path / "config.json").is_file():
        yield from _model_folder(config, path / "config.json")
    elif config.tiny_model is None and config.model.fetch is None:
        wanted = "expected a Hugging Face model, a hub id, or a [tiny_model] table to make one"
        yield ConfigProblem("model.path", f"{no_model(path)}: {wanted}{beside(path)}")


def template_rule(config: Config) -> Iterator[ConfigProblem]:
    """The arguments of the chat template are its own. `HfTokenizer.ready` asks if the template reads them."""
    for name in sorted(RESERVED_ARGUMENTS & set(config.model.chat_template_kwargs)):
        yield ConfigProblem(f"model.chat_template_kwargs.{name}", "is set by Flash: expected what a template reads")


def _model_folder(config: Config, file: Path) -> Iterator[ConfigProblem]:
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield ConfigProblem("model.path", f"{file} cannot be read: {error}")
        return
    if isinstance(described, dict) and described.get("quantization_config") is not None:
        message = "is quantized, and what is trained is not: expected whole weights, such as bfloat16 ones"
        yield ConfigProblem("model.path", f"{config.model.path} {message} (engine.vllm.quantization is the engines')")
    limit = described.get("max_position_embeddings") if isinstance(described, dict) else None
    if isinstance(limit, int) and config.model.max_length > limit:
        message = f"expected at most {limit}, the positions of {config.model.path}, got {config.model.max_length}"
        yield ConfigProblem("model.max_length", message)
    size = described.get("vocab_size") if isinstance(described, dict) else None
    sampling = config.rollout
    named = {"stop_token_ids": sampling.stop_token_ids, "logit_bias": [token for token, _ in sampling.logit_bias]}
    for name, tokens in named.items():
        if isinstance(size, int) and (beyond := max(tokens, default=0)) >= size:
            message = f"expected tokens below {size}, as many as {config.model.path} has, got {beyond}"
            yield ConfigProblem(f"rollout.{name}", message)


def other_models(config: Config) -> dict[str, str]:
    """The models beside the policy, by the keys that name them."""
    kl, teacher, critic = config.algorithm.kl, config.algorithm.teacher, config.critic
    named = {"algorithm.kl.reference": kl and kl.reference, "algorithm.teacher.path": teacher and teacher.path}
    named["critic.path"] = critic and critic.path
    return {key: path for key, path in named.items() if path is not None}


def other_models_rule(config: Config) -> Iterator[ConfigProblem]:
    """Local folders of the reference and of the critics are models; where they are the policy's, `model_rule` looks."""
    yield from _made_critic(config)
    made = config.critic is not None and config.critic.tiny_layers is not None
    for key, path in other_models(config).items():
        if path == config.model.path:
            continue
        if (fault := unreachable(path)) is not None:
            yield ConfigProblem(key, f"{show(path)} cannot be used: {fault}")
            continue
        if (is_hub_id(path) and not is_gguf(path)) or (key == "critic.path" and made):
            continue
        if not (Path(path) / "config.json").is_file():
            wanted = "expected a Hugging Face model, or a hub id"
            yield ConfigProblem(key, f"{no_model(Path(path))}: {wanted}{beside(Path(path))}")


def _made_critic(config: Config) -> Iterator[ConfigProblem]:
    """A critic's model that is to be made has a place of its own, and a recipe."""
    critic = config.critic
    if critic is None or critic.tiny_layers is None:
        return
    key = "critic.tiny_layers"
    if config.tiny_model is None:
        yield ConfigProblem(key, "has no effect: without a [tiny_model] table no model is made")
    elif critic.path is None or Path(critic.path) == Path(config.model.path):
        yield ConfigProblem(
            key, "needs a folder for the model: expected critic.path beside it, and another than model.path"
        )


def fetch_rule(config: Config) -> Iterator[ConfigProblem]:
    """The model to be fetched is known, or its file is there, and nothing else says what `model.path` is made from."""
    fetch, path = config.model.fetch, config.model.path
    if fetch is None:
        return
    # Of a GGUF file that model.path has named, that is the key that its user knows.
    key = "model.path" if is_gguf(fetch) and path == gguf_folder(fetch) else "model.fetch"
    if config.tiny_model is not None:
        yield ConfigProblem(
            key, "[tiny_model] stands beside it, and both say what the model is made from: leave one out"
        )
    if is_gguf(path):
        message = f"expected the folder that model.fetch is made into, or no model.fetch (`none`), got the file {path}"
        yield ConfigProblem("model.path", message)
    if is_gguf(fetch):
        if not os.path.isfile(fetch) and not os.path.isfile(os.path.join(path, "config.json")):
            yield ConfigProblem(key, f"there is no file {fetch}: expected a GGUF file")
    elif fetch not in PACKAGED:
        known = " or ".join(map(show, PACKAGED))
        yield ConfigProblem(key, f"expected {known}, or a .gguf file, got {show(fetch)}{suggest(fetch, PACKAGED)}")
    elif config.model.max_length > (limit := PACKAGED[fetch].positions):
        message = f"expected at most {limit}, the positions of {fetch}, got {config.model.max_length}"
        yield ConfigProblem("model.max_length", message)


def is_hub_id(text: str) -> bool:
    """Whether a text can only be the name of a model on the hub: nothing here has that path, nor could have."""
    path = Path(text)
    named = HUB_ID.fullmatch(text) is not None and (path.parent == Path() or not path.parent.exists())
    return named and not path.exists()


def no_model(path: Path) -> str:
    """What is wrong with a path that is no model folder."""
    if is_gguf(str(path)):
        return f"{path} is a GGUF file (`flash fetch {path}` makes the folder {gguf_folder(str(path))} of it)"
    if path.is_dir():
        return f"the folder {path} has no config.json"
    if path.parts[0].startswith("~"):
        return f"the folder {path} does not exist (only shells read ~ as {Path.home()})"
    return f"the folder {path} does not exist"


def beside(path: Path) -> str:
    """`; FOLDER has A, B`: what stands where something that is not there was looked for; nothing where nothing is."""
    found = [] if path.exists() else sorted(other.name for other in path.parent.glob("[!.]*/"))
    if path.parent == Path():
        found = [name for name in (nearest(path.name, found),) if name]
    return f"; {path.parent.absolute()} has {', '.join(found[-SHOWN:])}" if found else ""


def unreachable(path: str) -> str | None:
    """Why the file system cannot even say whether there is something at a path."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return error.strerror
    return None
