"""A GGUF file becomes an ordinary Hugging Face folder: weights in bfloat16, in no quantised form, and its tokenizer.

`transformers` reads such files with the packages gguf and accelerate. What it cannot read is refused before any work:
by `examine`, which looks at the file's header, and by `described`, which asks transformers about all but the weights.
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
"""Of the link by which transformers is given a file: with nothing beside it that it might read instead."""
PACKAGES = ("gguf", "accelerate")
"""Both are needed by transformers for such files, and for nothing else."""
REMEDY = "expected a whole GGUF file of a causal language model that transformers can dequantise"


class Header(NamedTuple):
    """What a file says of its model."""

    positions: int | None
    """Longest sequence, in tokens."""
    weights_bytes: int
    """Of the folder's weights, in bfloat16."""


def examine(file: Path) -> Header:
    """Read the file's header, and see that its tensors are all there, in forms that can be dequantised.

    Raises:
        ConfigError: it cannot be read, is damaged, or holds what cannot be dequantised.
    """
    if lacking := [name for name in PACKAGES if find_spec(name) is None]:
        raise ConfigError(
            f"{file} cannot be read without the packages {' and '.join(lacking)}: make the environment anew with "
            f"`make env`, or install them with `pip install {' '.join(lacking)}`"
        )
    import gguf
    import numpy as np

    try:
        reader = gguf.GGUFReader(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a damaged file raises whatever numpy and Python find in it
        raise ConfigError(f"{file} is no whole GGUF file ({type(error).__name__}: {error}): {REMEDY}") from error
    if not reader.tensors:
        raise ConfigError(f"{file} holds no tensors: {REMEDY}")
    for kind in {tensor.tensor_type for tensor in reader.tensors}:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            raise ConfigError(f"{file} holds tensors of the type {kind.name}, which cannot be dequantised") from None
    architecture = reader.get_field("general.architecture")
    length = architecture and reader.get_field(f"{architecture.contents()}.context_length")
    return Header(length and int(length.contents()), 2 * sum(int(tensor.n_elements) for tensor in reader.tensors))


def described(file: Path) -> str:
    """The model's class and size.

    Raises:
        ConfigError: as `examine`; or transformers does not know such a model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    examine(file)
    with _alone(file) as folder, _refusals(file):
        config = AutoConfig.from_pretrained(folder, gguf_file=NAME)
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(config)
    size = sum(parameter.numel() for parameter in made.parameters())
    return f"a {type(made).__name__} of {size / 1e6:.3g}M parameters"


def save_tokenizer(file: Path, folder: Path) -> None:
    """Write the tokenizer of a GGUF file, and the configuration that it needs beside it.

    Raises:
        ConfigError: it has none that can be read.
    """
    from transformers import AutoConfig, AutoTokenizer

    with _alone(file) as alone, _refusals(file):
        config = AutoConfig.from_pretrained(alone, gguf_file=NAME)
        tokenizer: Any = AutoTokenizer.from_pretrained(alone, gguf_file=NAME)
        positions = getattr(config, "max_position_embeddings", None)
        if isinstance(positions, int):
            tokenizer.model_max_length = min(positions, tokenizer.model_max_length)
        tokenizer.save_pretrained(str(folder))


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file into an empty folder, and see that it can be loaded.

    Raises:
        ConfigError: it cannot be converted; tensors are missing or hold no numbers.
    """
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    from flash.foreign.transformers import open_weights, without_bars

    with _alone(file) as alone, _refusals(file), without_bars(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, on how they read and dequantise
        save_tokenizer(file, folder)
        with redirect_stderr(StringIO()):  # its bar, which nothing else turns off
            read: Any = AutoModelForCausalLM.from_pretrained(
                alone,
                gguf_file=NAME,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
            )
        _save(_whole(file, *read), folder)
        open_weights(folder)
        again: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, local_files_only=True, output_loading_info=True
        )
        _whole(file, *again)


@contextmanager
def _alone(file: Path) -> Generator[str]:
    with tempfile.TemporaryDirectory(prefix="flash-gguf-") as folder:
        (Path(folder) / NAME).symlink_to(file.resolve())
        yield folder


@contextmanager
def _refusals(file: Path) -> Generator[None]:
    """What transformers raises of a file that it cannot take, as one clear error."""
    try:
        yield
    except (OSError, MemoryError, ConfigError):  # the machine's matter, or said already
        raise
    except Exception as error:  # of an architecture or a tokenizer that it does not know it raises a dozen classes
        raise ConfigError(f"{file} cannot be converted ({type(error).__name__}: {error}): {REMEDY}") from error


def _whole(file: Path, model: PreTrainedModel, told: dict[str, Any]) -> PreTrainedModel:
    """The model, if every parameter was found and holds numbers."""
    import torch

    if missing := sorted({*told["missing_keys"], *map(str, told["mismatched_keys"])}):
        raise ConfigError(f"{file} lacks tensors of its model, such as {missing[0]}: {REMEDY}")
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ConfigError(f"{file} holds no numbers in its tensor {name}: {REMEDY}")
    return model


def _save(read: PreTrainedModel, folder: Path) -> None:
    """The same weights in a model that counts as none of a quantised form, which could not be saved."""
    import torch

    config: Any = read.config
    for name in ("quantization_config", "_model_name_or_path"):
        vars(config).pop(name, None)
    with torch.device("meta"):
        fresh: Any = type(read)(config)
    fresh.load_state_dict(read.state_dict(), assign=True)
    fresh.tie_weights()
    fresh.generation_config = read.generation_config
    fresh.save_pretrained(folder)
