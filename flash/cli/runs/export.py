"""`flash export`: the weights of a run or of a checkpoint as a model folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flash.cli.arguments import CommandParsers, check_folder_writable, run_directory
from flash.cli.sampling import of_run
from flash.config.load import load
from flash.run.models.models import export_model
from flash.trainer.state.stored import MANIFEST


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("export", help="write a run's weights as a Hugging Face model folder")
    parser.add_argument("weights", type=Path, metavar="RUN_DIR|CHECKPOINT", help="of a run, its newest weights")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new one")
    parser.add_argument("--merge", action="store_true", help="of a run with [lora], the whole model, not its adapters")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Write the folder, and say what is in it."""
    named: Path = arguments.weights.absolute()
    folder: Path = arguments.folder
    check_folder_writable(folder)
    # A checkpoint lies in RUN_DIR/checkpoints.
    directory = run_directory(named.parent.parent if (named / MANIFEST).is_file() else named)
    config = load([directory.config], of_run(str(named)))
    chosen = export_model(str(named), config, folder, merged=arguments.merge)
    what, use = "the weights of", "model.path may name it, as may vLLM"
    if config.lora is not None and not arguments.merge:
        what, use = "the adapters of", f"peft loads them on {config.model.path}, as may vLLM; --merge writes the model"
    sys.stdout.write(f"{folder}: {what} {chosen}, with their tokenizer; {use}\n")
    return 0
