"""Messages after an interrupt: at once, and at the end if some work was cut short."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import msgspec
import pytest

from flash.config.tree import CheckpointConfig, Config
from flash.foreign.forking import ForkServer
from flash.run.node_loop import describe_cut, interrupt_on_signal
from flash.run.processes.forked import JobProcess, ProcessOrder
from flash.trainer.checkpoint_files import Manifest
from tests.hub.test_hub import Driver, make_config


@pytest.mark.anyio
@pytest.mark.parametrize(("number", "again"), [(signal.SIGINT, "; Ctrl-C again ends it now"), (signal.SIGTERM, "")])
async def test_the_first_signal_is_answered_at_once_with_the_work_that_is_left(number: int, again: str) -> None:
    driver, said, heard = Driver(make_config()), list[str](), anyio.Event()

    def tell(text: str) -> None:
        """Keep a message, and set `heard`."""
        said.append(text)
        heard.set()

    await driver.begin(0)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(interrupt_on_signal, driver.hub, make_config(), tell)
            await anyio.wait_all_tasks_blocked()
            for _ in range(3):
                os.kill(os.getpid(), number)
                await heard.wait()
                await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
    assert driver.hub.progress.stopping == "interrupted"
    assert said == [f"interrupted: writing a checkpoint of version 0, for at most 60 s{again}"]


class Asked(JobProcess):
    """Process that exits with 1 if it ignores SIGINT, else with 0."""

    def run(self) -> None:
        self.enter()
        os._exit(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)


def test_an_interrupt_reaches_the_processes_of_a_launcher_that_was_started_with_interrupts_ignored(
    tmp_path: Path,
) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = Asked(ForkServer("flash.run.processes.forked"), "hub", tmp_path, ProcessOrder(0), {})
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)
    process.join(60)
    assert process.exitcode == 0


def config_of(folder: Path, **checkpoint: str) -> Config:
    """Return a configuration whose run directory is in `folder`, with settings of `[checkpoint]`."""
    config = make_config()
    run = msgspec.structs.replace(config.run, output_dir=str(folder))
    return msgspec.structs.replace(config, run=run, checkpoint=msgspec.convert(checkpoint, CheckpointConfig))


def test_work_that_was_cut_short_is_reported_with_the_state_that_is_kept(tmp_path: Path) -> None:
    said = describe_cut("finishing step 12 and writing a checkpoint", config_of(tmp_path))
    assert said == (
        "interrupted: finishing step 12 and writing a checkpoint takes more than 60 s (deadlines.shutdown); "
        "the steps before it are kept with all samples that came in, and --resume goes on there"
    )


@pytest.mark.parametrize("checkpoint", [{"journal": "off"}, {"batches": "none"}])
def test_without_journal_or_batches_the_newest_checkpoint_is_kept(tmp_path: Path, checkpoint: dict[str, str]) -> None:
    config = config_of(tmp_path, **checkpoint)
    assert describe_cut("x", config).endswith("; no checkpoint is there yet, and --resume starts from the beginning")
    (config.run_dir / "checkpoints" / "step-000010").mkdir(parents=True)
    manifest = msgspec.json.encode(Manifest(version=10, skipped_steps=0, files=[]))
    (config.run_dir / "checkpoints" / "step-000010" / "manifest.json").write_bytes(manifest)
    assert describe_cut("x", config).endswith("; step-000010 is kept, and --resume goes on there")
