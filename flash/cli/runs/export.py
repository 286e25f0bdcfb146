"""`flash export`: write the weights of a run or of a checkpoint as a model folder."""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path
from typing import get_args

from flash.cli.arguments import CommandParsers, check_folder_writable, run_directory
from flash.cli.sampling import of_run
from flash.config.load import load
from flash.errors import ConfigError
from flash.run.models import Dtype, export_model, own_dtype
from flash.text import one_line
from flash.trainer.checkpoint_files import MANIFEST


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("export", help="Write the weights of a run as a Hugging Face model folder.")
    parser.add_argument(
        "weights",
        type=Path,
        metavar="RUN_DIR|CHECKPOINT",
        help="Folder of a run, for its newest weights, or of one checkpoint.",
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="Folder to write. It is empty, or does not exist yet."
    )
    parser.add_argument(
        "--merge", action="store_true", help="Write the whole model of a run with [lora], not only its adapters."
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        help="Data type of the weights. Default: that of the model with which the run began.",
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Write the folder, and print what it contains."""
    named: Path = arguments.weights.absolute()
    folder: Path = arguments.folder
    check_folder_writable(folder)
    # Checkpoints are folders of RUN_DIR/checkpoints.
    directory = run_directory(named.parent.parent if (named / MANIFEST).is_file() else named)
    config = load([directory.config], of_run(str(named)))
    if arguments.dtype is not None and config.lora is not None and not arguments.merge:
        raise ConfigError("--dtype has no effect on adapters, which stay in float32: expected --merge beside it")
    began = tomllib.loads(directory.config.read_text(encoding="utf-8"))["model"]["path"]
    dtype = arguments.dtype or own_dtype(began)
    chosen = export_model(str(named), config, folder, merged=arguments.merge, dtype=dtype)
    what, use = "the weights of", "model.path may name it, as may vLLM"
    if config.lora is not None and not arguments.merge:
        what, use = "the adapters of", f"peft loads them on {config.model.path}, as may vLLM; --merge writes the model"
    sys.stdout.write(f"{folder}: {what} {one_line(str(chosen))}, with their tokenizer; {use}\n")
    return 0
