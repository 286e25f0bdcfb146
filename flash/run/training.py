"""Function `flash.train`: trains from Python as `flash train` does, with the same checks and the same processes."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import msgspec

from flash.config.check import advise
from flash.config.load import dump, load
from flash.config.tree import Config
from flash.errors import ConfigError, FlashError, error_of
from flash.observe.rundir.summary import Summary
from flash.run.checks.preflight import changes_without_effect, start_problems
from flash.run.models import make_missing_models
from flash.run.processes.launch_state import ERROR_FILE, use_torchrun_variables
from flash.run.processes.launcher import launch
from flash.run.processes.supervisor import End


def train(config: Config, *, resume: bool = False) -> Summary | None:
    """Run a configuration to its end on this machine, or this machine's part of a run on several machines.

    Must be called in the main thread. The processes of the run are children of the calling process. They import the
    classes that the configuration names by import path. So an environment must be in a module, not in the script that
    calls this function. They do not import that script, so it needs no `if __name__ == "__main__"`.

    Args:
        config: from `flash.load`, or made by hand. It is checked again, and warnings are printed to standard error.
        resume: continue the run in the run directory.

    Returns:
        The summary of the run, as in its `summary.json`; None on every node but the first.

    Raises:
        ConfigError: the configuration is wrong; nothing was started.
        FlashError: the run failed; its output on standard error shows the error with the details.
        KeyboardInterrupt: the run was interrupted; it can be resumed.
    """
    if not isinstance(config, Config):  # pyright: ignore[reportUnnecessaryIsInstance]: callers may not check types
        raise ConfigError(f"flash.train takes a flash.Config, as flash.load returns it, got {config!r}")
    use_torchrun_variables(os.environ)
    begun = time.time()
    with tempfile.TemporaryDirectory(prefix="flash-config-") as folder:
        file = Path(folder) / "config.toml"
        file.write_text(dump(config), encoding="utf-8")
        overrides = ["run.resume=true"] if resume else []
        config = load(file, overrides, also=start_problems)
    advise(config, changes_without_effect(config))
    make_missing_models(config)
    code = launch(config)
    if code == End.INTERRUPTED:
        raise KeyboardInterrupt
    if code != 0:
        raise error_left(config.run_dir, since=begun)
    if os.environ.get("FLASH_NODE_RANK", "0") != "0":
        return None
    return msgspec.json.decode((config.run_dir / "summary.json").read_bytes(), type=Summary)


def error_left(run_dir: Path, since: float) -> FlashError:
    """Return the error that ended the run, from its marker `error.json`, as an object that can be raised.

    `train` calls this after a failed launch. If this launch has left no marker, returns an error that points to the
    output. `since` is the start of this launch in Unix seconds.
    """
    try:
        row = json.loads((run_dir / ERROR_FILE).read_text())
        # An older marker belongs to an earlier launch of the same run.
        if row["time"] >= since:
            return error_of(row["error"], row["message"]) or FlashError(row["message"])
    except (OSError, ValueError, KeyError):
        pass  # no marker, or a full disk has cut it off: the output shows the error
    return FlashError(f"the run in {run_dir} failed; its output above shows the error")
