"""Finds, checks and replaces the files of checkpoints. `flash.trainer.checkpoint` writes and loads their tensors.

The hub, the launcher and commands use this module to find the checkpoint from which a run resumes. It does not import
torch, which would make them start slowly.

A checkpoint is a folder such as `step-000020`. Its manifest names every file with its size and CRC-32. The folder is
written under another name and then renamed, so a folder with such a name was complete once. `step-000020.replaced` is
an older checkpoint of the same version, which exists only while a newer one replaces it. The older one counts if the
newer one is missing. `damaged-step-000020` is a damaged checkpoint that a resumed run did not use. People may want to
look at it, so it is kept. `.tmp-step-000020` is a checkpoint that is being written, or that a killed process left.
"""

from __future__ import annotations

import glob
import mmap
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec

from flash.errors import DECODE_ERRORS, CheckpointError

MANIFEST = "manifest.json"
"""File that describes a checkpoint (`Manifest`). A folder without it is no complete checkpoint."""
HUB_STATE = "hub.bin"
"""File of the state of the hub, the process that holds the samples and the progress of the run. The hub writes it
itself, because it runs on the machine of trainer rank 0."""
STATE = "state"
"""Folder of the sharded weights and moments inside a checkpoint."""
TMP = ".tmp-"
"""Prefix of the name of a folder that is being written."""
REPLACED = ".replaced"
"""Suffix of the name of a folder while another folder replaces it."""
_NAME = re.compile(rf"step-([0-9]{{6,}})({re.escape(REPLACED)})?")
"""Pattern of the names of checkpoints' folders: the version, and the suffix of a folder that is being replaced."""
ASIDE = ".making-"
"""Part of the name of the temporary folder in which `atomic_folder` works."""
READ_SIZE = 1 << 20
"""Number of bytes that are read at a time to compute a CRC, so that memory never holds a whole file."""

EXTRAS = {
    "lora": "adapters in place of weights (the [lora] table)",
    "critic": "a critic (the [critic] table)",
    "ewma": 'an average of the policy\'s weights (proximal = "ewma")',
    "reference": "a reference that is refreshed (algorithm.kl.refresh)",
}
"""Name of each part that a checkpoint may hold beside the policy, and its description in error messages."""


class FileEntry(msgspec.Struct, frozen=True):
    """Manifest entry of a file; `path` is relative to the checkpoint's folder, `size` is in bytes."""

    path: str
    size: int
    crc32: int


class Manifest(msgspec.Struct, frozen=True):
    """Description of a complete checkpoint: its files, and those numbers of the trainer that are not tensors."""

    version: int
    """Policy version of the weights: the number of training steps that made them."""
    skipped_steps: int
    """Number of optimizer updates left out so far: `Trainer.skipped_steps`."""
    files: list[FileEntry]
    """Every file of the checkpoint except the manifest itself."""
    extras: tuple[str, ...] = ()
    """Parts beside the policy, by the names of `EXTRAS`; one entry per critic."""
    rates: dict[int, float] = {}
    """Mean learning rate of each of the last versions, for `flash.trainer.lag.LagLimiter.rates`; empty without
    `algorithm.lag`."""
    scales: tuple[tuple[float, int], ...] = ()
    """For the policy and each critic, the loss scale and the number of finite updates since it last changed
    (`flash.trainer.optimizer.LossScale`)."""
    apart: tuple[float, float] = (0.0, 0.0)
    """Sums for the disagreement of engine and trainer: `flash.trainer.lag.LagLimiter.disagreement_sums`."""
    base: tuple[int, ...] = ()
    """Fingerprint of the weights that adapters were trained on, because adapters fit no other weights; empty without
    adapters."""
    alpha: float | None = None
    """`lora.alpha` that adapters were trained with. None without adapters, and in checkpoints of versions of Flash that
    did not record it."""


class ChosenCheckpoint(NamedTuple):
    """Checkpoint from which a run resumes."""

    path: Path | None
    """Folder of the checkpoint; None starts the run at version 0."""
    notes: list[str]
    """Sentences for the log, each about a newer checkpoint that is damaged."""


def step_folder(run_dir: Path, version: int) -> Path:
    """Return the folder of a version's checkpoint."""
    return run_dir / "checkpoints" / f"step-{version:06d}"


def temporary_of(folder: Path) -> Path:
    """Return the temporary folder beside `folder` in which its content is written before the renaming."""
    return folder.with_name(TMP + folder.name)


def choose_checkpoint(run_dir: Path) -> ChosenCheckpoint:
    """Return the newest undamaged checkpoint, from which a resumed run starts.

    Every file of the checkpoint is read and compared with its checksum. Newer damaged checkpoints are renamed to
    `damaged-…`.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    damaged: dict[Path, str] = {}
    for folder in _folders(run_dir):
        try:
            check_files(folder, read_manifest(folder).files)
        except CheckpointError as error:
            damaged[folder] = str(error)
            continue
        return ChosenCheckpoint(folder, [_set_aside(one, fault, folder) for one, fault in damaged.items()])
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {run_dir / 'checkpoints'} is whole: {'; '.join(damaged.values())}. "
            "Bring one back from a copy, or start a new run under another run.name"
        )
    return ChosenCheckpoint(None, [])


def _set_aside(folder: Path, fault: str, instead: Path) -> str:
    """Rename a damaged checkpoint, and return a sentence for the log.

    Without the renaming, a step that is trained again would write its checkpoint under the same name, and so delete the
    damaged one.

    Args:
        folder: the damaged checkpoint.
        fault: the damage, as a phrase.
        instead: the checkpoint from which the run continues.
    """
    names = (f"damaged-{folder.name}{f'.{number}' if number > 1 else ''}" for number in count(1))
    kept = next(path for path in map(folder.with_name, names) if not path.exists())
    folder.rename(kept)
    return f"{fault}; the run goes on from {instead.name}, and the damaged checkpoint is kept as {kept.name}"


def newest_complete(run_dir: Path) -> Path | None:
    """Return the newest checkpoint whose files all have the sizes of the manifest; None if there is none.

    The files are not read, so this is fast, but damage that keeps the size is not found. The code that later loads the
    checkpoint compares the checksums (`choose_checkpoint`, `check_files`).
    """
    found = complete_checkpoints(run_dir)
    return found[0] if found else None


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Return all checkpoints whose files all have the sizes of the manifest, newest first. The files are not read."""
    return [folder for folder in _folders(run_dir) if not _fault_of_sizes(folder)]


def damaged_checkpoints(run_dir: Path) -> list[str]:
    """Return a phrase for the fault of each checkpoint that `complete_checkpoints` leaves out, newest first.

    Messages to users name these faults, so that a user knows why a checkpoint is not used.
    """
    return list(filter(None, map(_fault_of_sizes, _folders(run_dir))))


def _folders(run_dir: Path) -> list[Path]:
    """Return the folders of all checkpoints, newest first. A replaced checkpoint comes after its replacement.

    Folders with other names, such as temporary and damaged ones, are left out.
    """
    named = ((folder, _NAME.fullmatch(folder.name)) for folder in (run_dir / "checkpoints").glob("step-*"))
    found = [(int(match[1]), match[2] is None, folder) for folder, match in named if match is not None]
    return [folder for _, _, folder in sorted(found, reverse=True)]


def _fault_of_sizes(folder: Path) -> str:
    """Compare the sizes of a checkpoint's files with its manifest, and return the first fault as a phrase.

    Returns an empty text if there is no fault. Only the manifest is read.
    """
    try:
        for entry in read_manifest(folder).files:
            if (size := (folder / entry.path).stat().st_size) != entry.size:
                return f"{folder / entry.path} is damaged: {size} bytes, written as {entry.size}"
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename} is damaged: it cannot be read: {error.strerror}"
    return ""


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint in a folder.

    Raises:
        CheckpointError: the manifest is missing or unreadable.
    """
    try:
        return msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, *DECODE_ERRORS) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {error}") from error


@contextmanager
def hub_state(path: Path) -> Generator[memoryview]:
    """Check the file of the hub's state against the manifest, and give the block a view of its bytes.

    The file is mapped and not read, because its content can take as much memory as the objects that are decoded from
    it.

    Raises:
        CheckpointError: the file or the manifest is missing or damaged.
    """
    if not (entries := [entry for entry in read_manifest(path).files if entry.path == HUB_STATE]):
        raise CheckpointError(f"{path / MANIFEST} is damaged: it does not list {HUB_STATE}")
    check_files(path, entries)
    with (
        (path / HUB_STATE).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
    ):
        yield view


def check_files(folder: Path, entries: Iterable[FileEntry]) -> None:
    """Read files, several at a time, and compare their checksums with the entries of the manifest.

    Raises:
        CheckpointError: a file cannot be read, or differs from what was written. The message names all such files.
    """

    def fault_of(entry: FileEntry) -> str:
        # Return the fault of one file as a phrase; empty if there is none. Threads help, because computing a CRC
        # releases Python's lock.
        file = folder / entry.path
        try:
            found = crc32_of(file)
        except OSError as error:
            return f"{file} is damaged: it cannot be read: {error}"
        return "" if found == entry.crc32 else f"{file} is damaged: CRC {found:08x}, written as {entry.crc32:08x}"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = list(filter(None, pool.map(fault_of, list(entries))))
    if faults:
        raise CheckpointError("; ".join(faults))


def file_entry(file: Path, folder: Path) -> FileEntry:
    """Return the manifest entry of a file in a checkpoint's folder; reads the file."""
    return FileEntry(str(file.relative_to(folder)), file.stat().st_size, crc32_of(file))


def crc32_of(file: Path) -> int:
    """Return the CRC-32 of a file's content."""
    crc = 0
    with file.open("rb") as stream:
        while block := stream.read(READ_SIZE):
            crc = zlib.crc32(block, crc)
    return crc


def extras_mismatch(path: Path, held: Sequence[str], wanted: Sequence[str]) -> str:
    """Return why a run with the extras `wanted` cannot resume from a checkpoint that holds `held`; empty if it can.

    A run resumes only with the parts that it had before. For example, a new, untrained critic would mislead a policy
    that is already trained. `path` is the checkpoint that the message names. Both the trainer ranks and the checks
    before a start call this.
    """
    for name, words in EXTRAS.items():
        there, here = held.count(name), wanted.count(name)
        if here and not there:
            return f"{path} was written without {words}, which this run has: go on without, or start a new run"
        if there and not here:
            return f"{path} holds {words}, which this run lacks: configure it, or start a new run"
        if there != here:
            advice = "continue with the objective that made it, or start a new run"
            return f"{path} holds {there} {name}s, and this run has {here}: {advice}"
    return ""


def alpha_mismatch(path: Path, manifest: Manifest, alpha: float | None) -> str:
    """Return an error message if a checkpoint's adapters were trained with another `lora.alpha`; empty if not.

    The effect of adapters is proportional to alpha, so another alpha would make another policy of them. A manifest
    without an alpha is not compared.
    """
    if manifest.alpha in (None, alpha):
        return ""
    return f"{path} holds adapters that were trained with lora.alpha = {manifest.alpha:g}: expected that, got {alpha:g}"


def make_empty(aside: Path, leftovers: Iterable[Path] = ()) -> None:
    """Make an empty folder `aside`. An earlier folder of this name, and the folders `leftovers`, are removed first.

    Killed processes have left these folders, which may fill the disk.
    """
    for folder in {*leftovers, aside}:
        if folder.exists():
            shutil.rmtree(folder)
    aside.mkdir(parents=True)


def move_into_place(aside: Path, folder: Path) -> None:
    """Rename `aside` to `folder`. An earlier folder of that name is replaced.

    The earlier folder is renamed first, and removed only when the new folder has its name. So if the process is killed
    in between, one of the two folders is found.
    """
    old = folder.with_name(folder.name + REPLACED)
    if folder.exists():
        if old.exists():
            shutil.rmtree(old)
        folder.rename(old)
    aside.rename(folder)
    sync_to_disk(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def prune(run_dir: Path, keep: int) -> None:
    """Delete all checkpoints except the complete checkpoints of the `keep` newest versions.

    Incomplete checkpoints are deleted, too, even if they are newer. Folders `damaged-…` are kept, because people may
    want to look at them.
    """
    # If a replaced folder still exists beside a complete new folder of the same version, the new folder is kept.
    by_version: dict[str, Path] = {}
    for folder in complete_checkpoints(run_dir):
        by_version.setdefault(folder.name.removesuffix(REPLACED), folder)
    kept = list(by_version.values())[:keep]
    for folder in _folders(run_dir):
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def sync_to_disk(path: Path) -> None:
    """Force a file's content, or a folder's list of entries, to the disk. It then survives a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_folder(path: Path) -> Generator[Path]:
    """Yield a new folder. It replaces `path` if the block succeeds, and is removed if the block raises.

    Models that a run makes or downloads are written in this way, so that no process finds half a model. The new folder
    is inside a temporary folder beside `path`. The temporary folder is always removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}{ASIDE}", dir=path.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        yield new
        if path.exists():
            path.rename(Path(scratch) / "old")
        new.rename(path)


def remove_leftovers(path: Path) -> None:
    """Remove temporary folders that killed processes left in `atomic_folder(path)`.

    Do not call this while another process may be inside of `atomic_folder(path)`: its folder would be removed.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}{ASIDE}*"):
        shutil.rmtree(left, ignore_errors=True)
