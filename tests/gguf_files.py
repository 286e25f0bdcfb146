"""GGUF files of a tiny Llama, and packages that hold one: what `flash fetch` reads, made in a moment."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from flash.config.models import PackagedModel

LAYERS, WIDTH, INNER, HEADS, KV_HEADS, POSITIONS = 2, 64, 96, 2, 1, 512
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MEMBER = "tiny_package/tiny.gguf"
"""The file inside the package."""
WHEEL = "tiny_package-1.0-py3-none-any.whl"


def byte_texts() -> list[str]:
    """The 256 characters by which byte-level vocabularies write bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) for byte in shown] + [chr(256 + number) for number in range(len(hidden))]


def tensors(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """By their names in the file, in float32; projections are of a size that can be quantised."""
    draw, head = np.random.default_rng(seed), WIDTH // HEADS
    vocabulary = len(SPECIAL) + 257
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        for name, shape in {
            "attn_norm": (WIDTH,),
            "attn_q": (HEADS * head, WIDTH),
            "attn_k": (KV_HEADS * head, WIDTH),
            "attn_v": (KV_HEADS * head, WIDTH),
            "attn_output": (WIDTH, HEADS * head),
            "ffn_norm": (WIDTH,),
            "ffn_gate": (INNER, WIDTH),
            "ffn_up": (INNER, WIDTH),
            "ffn_down": (WIDTH, INNER),
        }.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
    return {name: draw.normal(0, 0.05, shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    *,
    seed: int = 0,
    architecture: str = "llama",
    changed: Mapping[str, np.ndarray[Any, Any] | None] | None = None,
) -> Path:
    """A chat model with random weights, its projections in Q8_0; `changed`: other tensors by their names, None: none.

    The rest is float32, an integer tensor stays one.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    texts = [*SPECIAL, *byte_texts(), "hi"]
    writer.add_vocab_size(len(texts))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(texts)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(texts) - len(SPECIAL)))
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, values in (tensors(seed) | dict(changed or {})).items():
        if values is not None and values.ndim == 2 and "blk" in name and values.dtype == np.float32:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        elif values is not None:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def package(folder: Path, file: Path, member: str = MEMBER) -> PackagedModel:
    """A wheel with a GGUF file, in a folder where pip may look, and how it is described."""
    folder.mkdir(exist_ok=True)
    wheel, information = folder / WHEEL, "tiny_package-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, member)
        archive.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.0\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    return PackagedModel(
        name="tiny",
        package="tiny-package",
        version="1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        file=MEMBER,
        wheel_bytes=wheel.stat().st_size,
        file_bytes=file.stat().st_size,
        folder_bytes=300_000,
        positions=POSITIONS,
        licence="Apache-2.0",
        about="a tiny Llama",
    )


def look_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configure pip to look into a folder and nowhere else."""
    pip_looks(monkeypatch, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(folder))


def pip_looks(monkeypatch: pytest.MonkeyPatch, **where: str) -> None:
    """Configure pip by its variables alone."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in where.items():
        monkeypatch.setenv(name, value)
