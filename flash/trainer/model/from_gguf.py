"""Conversion of a GGUF file to a Hugging Face folder, which has the tokenizer and the weights as bfloat16 numbers.

GGUF is the file format of llama.cpp: one file with a model's weights, mostly *quantised* (stored with few bits each),
its configuration and its tokenizer. To *dequantise* is to turn such weights into plain numbers, which can be trained.

`flash.run.models` calls `examine` before a run starts and `convert` when it makes the folder. The dry run calls
`describe` and `save_tokenizer`. transformers reads GGUF files with the packages gguf and accelerate. A file that
transformers cannot read is refused before any work: `examine` reads the file's header, and `describe` lets transformers
build the model without its weights.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flash.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "model.gguf"
"""Name of the link to the GGUF file, in a folder that holds nothing else (`_folder_with_link`)."""
PACKAGES = ("gguf", "accelerate")
"""Packages that transformers needs to read GGUF files. Nothing else in Flash needs them."""
REMEDY = "expected a whole GGUF file of a causal language model that transformers can dequantise"
"""Advice at the end of error messages about a file that cannot be used."""


class Header(NamedTuple):
    """Facts about the model from the header of a GGUF file."""

    positions: int | None
    """Longest sequence, in tokens; None if the header does not have it."""
    weights_bytes: int
    """Bytes of the converted weights, in bfloat16."""


def examine(file: Path) -> Header:
    """Read the file's header, and check that its tensors are complete and of types that can be dequantised.

    `flash.run.models` calls this before a run starts: it needs the longest sequence to check `model.max_length`, and
    the size of the weights to see whether the disk has room.

    Raises:
        ConfigError: the file cannot be read, is damaged, or holds tensors that cannot be dequantised.
    """
    if lacking := [name for name in PACKAGES if find_spec(name) is None]:
        raise ConfigError(
            f"{file} cannot be read without the packages {' and '.join(lacking)}: `flash install` installs all packages"
        )
    import gguf
    import numpy as np

    try:
        reader = gguf.GGUFReader(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a damaged file makes numpy or Python raise errors of any type
        raise ConfigError(f"{file} is no whole GGUF file ({type(error).__name__}: {error}): {REMEDY}") from error
    if not reader.tensors:
        raise ConfigError(f"{file} holds no tensors: {REMEDY}")
    # Dequantise one block of zeros of each type, to learn whether the package gguf can do it.
    for kind in {tensor.tensor_type for tensor in reader.tensors}:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            raise ConfigError(f"{file} holds tensors of the type {kind.name}, which cannot be dequantised") from None
    architecture = reader.get_field("general.architecture")
    length = architecture and reader.get_field(f"{architecture.contents()}.context_length")
    # The converted weights are bfloat16, with two bytes each.
    return Header(length and int(length.contents()), 2 * sum(int(tensor.n_elements) for tensor in reader.tensors))


def describe(file: Path) -> str:
    """Return a phrase with the model's class and number of parameters, for a dry run. No weight is read.

    Raises:
        ConfigError: the file cannot be read, is damaged, or holds a model that transformers does not know.
        OSError: the temporary folder cannot be made, or transformers cannot read the file.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from flash.trainer.model.model import described

    examine(file)
    with _folder_with_link(file) as folder, _conversion_errors(file):
        config = AutoConfig.from_pretrained(folder, gguf_file=NAME)
        with torch.device("meta"):
            return described(AutoModelForCausalLM.from_config(config))


def save_tokenizer(file: Path, folder: Path) -> None:
    """Write the tokenizer of a GGUF file, with the configuration that it needs, into a folder.

    If the tokenizer allows longer sequences than the model, its limit is set to the model's limit.

    Raises:
        ConfigError: the file has no tokenizer that transformers supports.
        OSError: the file cannot be read, or the tokenizer cannot be written.
    """
    from transformers import AutoConfig, AutoTokenizer

    with _folder_with_link(file) as linked, _conversion_errors(file):
        config = AutoConfig.from_pretrained(linked, gguf_file=NAME)
        tokenizer: Any = AutoTokenizer.from_pretrained(linked, gguf_file=NAME)
        positions = getattr(config, "max_position_embeddings", None)
        if isinstance(positions, int):
            tokenizer.model_max_length = min(positions, tokenizer.model_max_length)
        tokenizer.save_pretrained(str(folder))


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file into an empty folder, and check that it can be loaded from this folder.

    The folder gets the weights, the configuration and the tokenizer. The weight files get the same read permission as
    config.json.

    Raises:
        ConfigError: the file cannot be converted, lacks tensors, or holds numbers that are not finite.
        OSError: the file cannot be read, or the folder cannot be written.
        MemoryError: the machine has too little memory for the weights.
    """
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    from flash.foreign.transformers import hidden_progress_bars, make_weights_readable

    with _folder_with_link(file) as linked, _conversion_errors(file), hidden_progress_bars(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries warn about how they read and dequantise
        # 1. Write the tokenizer, and read the weights as plain numbers.
        save_tokenizer(file, folder)
        with redirect_stderr(StringIO()):  # the only way to hide transformers' progress bar for dequantising
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                linked,
                gguf_file=NAME,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
            )
        # 2. Write the weights, and load them as the trainer and the engines will.
        _save(_check_complete(file, *loaded), folder)
        make_weights_readable(folder)
        reloaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, local_files_only=True, output_loading_info=True
        )
        _check_complete(file, *reloaded)


@contextmanager
def _folder_with_link(file: Path) -> Generator[str]:
    """Provide a temporary folder that holds nothing but a link to the file.

    transformers takes a folder. In the folder of the GGUF file it might read a config.json or tokenizer files of
    another model.
    """
    with tempfile.TemporaryDirectory(prefix="flash-gguf-") as folder:
        (Path(folder) / NAME).symlink_to(file.resolve())
        yield folder


@contextmanager
def _conversion_errors(file: Path) -> Generator[None]:
    """Turn errors of the block, in which transformers reads the file, into a ConfigError that names the file.

    An OSError, a MemoryError or a ConfigError is passed on unchanged: it is a fault of the machine, or has a clear
    message already.

    Raises:
        ConfigError: the block raised any other error, because transformers does not support the file.
    """
    try:
        yield
    except (OSError, MemoryError, ConfigError):
        raise
    except Exception as error:  # for an unknown architecture or tokenizer, transformers raises errors of many classes
        raise ConfigError(f"{file} cannot be converted ({type(error).__name__}: {error}): {REMEDY}") from error


def _check_complete(file: Path, model: PreTrainedModel, info: dict[str, Any]) -> PreTrainedModel:
    """Return the model if every parameter was found and is finite; `info` is transformers' loading report.

    transformers only warns about missing tensors and fills them with random numbers, so that the run would train a
    partly random model.

    Raises:
        ConfigError: a parameter is missing or not finite.
    """
    import torch

    if missing := sorted({*info["missing_keys"], *map(str, info["mismatched_keys"])}):
        raise ConfigError(f"{file} lacks tensors of its model, such as {missing[0]}: {REMEDY}")
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ConfigError(f"{file} holds numbers that are not finite in its tensor {name}: {REMEDY}")
    return model


def _save(loaded: PreTrainedModel, folder: Path) -> None:
    """Save the weights of a dequantised model as a Hugging Face folder.

    The weights are moved into a fresh model, because transformers refuses to save a model that was loaded in quantised
    form.
    """
    import torch

    config: Any = loaded.config
    for name in ("quantization_config", "_model_name_or_path"):
        vars(config).pop(name, None)
    with torch.device("meta"):
        fresh: Any = type(loaded)(config)
    fresh.load_state_dict(loaded.state_dict(), assign=True)
    fresh.tie_weights()
    fresh.generation_config = loaded.generation_config
    fresh.save_pretrained(folder)
