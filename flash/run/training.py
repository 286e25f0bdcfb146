"""Training from Python: what `flash train` does, as a function."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import msgspec

from flash.config.load import dump, load
from flash.config.tree import Config
from flash.errors import FlashError, error_of
from flash.observe.summary import Summary
from flash.run.launcher import INTERRUPTED, launch
from flash.run.worker import ERROR_FILE
from flash.trainer.tiny_model import make_missing_model


def train(config: Config, *, resume: bool = False) -> Summary | None:
    """Run a configuration to its end on this machine, or this machine's part of a run on several.

    Starts torchrun in this process, whose main thread must be the caller, and workers as processes of their own. What
    the configuration names by import path is imported there: an environment stands in a module, not in the script that
    calls this. Workers do not import that script, so it needs no guard.

    Args:
        config: from `flash.load`, or made by hand; it is checked again.
        resume: go on from the run directory's newest complete checkpoint.

    Returns:
        What the run came down to, as in its `summary.json`; None on every node but the first.

    Raises:
        ConfigError: the configuration is wrong; nothing was started.
        FlashError: the run failed; its output, on standard error, shows the error where it arose.
        KeyboardInterrupt: it was interrupted; it can be resumed.
    """
    with tempfile.TemporaryDirectory(prefix="flash-config-") as folder:
        file = Path(folder) / "config.toml"
        file.write_text(dump(config), encoding="utf-8")
        overrides = ["run.resume=true"] if resume else []
        config = load(file, overrides)
        make_missing_model(config)
        code = launch(config, [str(file)], overrides)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code != 0:
        raise _reason(config.run_dir)
    summary = config.run_dir / "summary.json"
    return msgspec.json.decode(summary.read_bytes(), type=Summary) if summary.exists() else None


def _reason(run_dir: Path) -> FlashError:
    """The error that a run has left behind because no restart could mend it."""
    try:
        row = json.loads((run_dir / ERROR_FILE).read_text())
        return error_of(row["error"], row["message"]) or FlashError(row["message"])
    except (OSError, ValueError, KeyError):
        return FlashError(f"the run in {run_dir} failed; what ended it stands in its output above")
