"""Checkpoints as files: which there are, whether they are whole, and which one a run goes on from. Needs no torch.

A checkpoint is a folder `step-000020` whose manifest names every file with its size and CRC. It is written aside and
renamed, so a folder of that name was whole once. `step-000020.replaced` is what stood there before it was written
again; it counts while the new one is missing. `damaged-step-000020` is one that was passed over, kept for people.
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

from flash.errors import CheckpointError

MANIFEST = "manifest.json"
HUB_STATE = "hub.bin"
"""Written by the hub itself, in the node loop beside trainer rank 0."""
TMP = ".tmp-"
"""Begins the name of what is being written."""
REPLACED = ".replaced"
"""Ends the name of what was moved out of the way of its successor."""
_NAME = re.compile(rf"step-([0-9]{{6,}})({re.escape(REPLACED)})?")
ASIDE = ".making-"
"""In the name of the folder in which another is put together."""
READ_SIZE = 1 << 20
"""Bytes read at a time for a CRC."""


EXTRAS = {
    "lora": "adapters in place of weights (the [lora] table)",
    "critic": "a critic (the [critic] table)",
    "ewma": 'an average of the policy\'s weights (proximal = "ewma")',
    "reference": "a reference that is refreshed (algorithm.kl.refresh)",
    "rhythm": 'the heads that rhythm chose in the first batch (algorithm.rhythm.heads = "first")',
}
"""What a trainer may keep beside the policy, and in words what asks for it."""


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a checkpoint; `path` is relative to its folder."""

    path: str
    size: int
    crc32: int


class Manifest(msgspec.Struct, frozen=True):
    """What a complete checkpoint holds."""

    version: int
    """The policy version of its weights."""
    skipped_steps: int
    files: list[FileEntry]
    extras: tuple[str, ...] = ()
    """What it holds beside the policy, by the names of `EXTRAS`."""
    rates: dict[int, float] = {}
    """With `algorithm.lag`, the mean learning rate that was applied to each of the last versions."""
    scales: tuple[tuple[float, int], ...] = ()
    """With float16, of the policy and each critic: what losses are multiplied by, and finite updates since it moved."""
    apart: tuple[float, float] = (0.0, 0.0)
    """With `algorithm.lag`: see `flash.trainer.optimizer.LagLimiter`."""
    base: tuple[int, ...] = ()
    """Where it holds adapters, the fingerprint of the weights that they go with."""
    alpha: float | None = None
    """With which `lora.alpha` adapters were trained. Nothing: it holds none, or is of a time when nobody noted it."""


class ChosenCheckpoint(NamedTuple):
    """What a resumed run goes on from."""

    path: Path | None
    """None: there is no checkpoint, begin at version 0."""
    notes: list[str]
    """What people should know: newer checkpoints that are damaged."""


def step_folder(run_dir: Path, version: int) -> Path:
    """The checkpoint of a version."""
    return run_dir / "checkpoints" / f"step-{version:06d}"


def temporary_of(folder: Path) -> Path:
    """Where a folder is written before it is renamed."""
    return folder.with_name(TMP + folder.name)


def choose_checkpoint(run_dir: Path) -> ChosenCheckpoint:
    """The newest whole checkpoint; every byte of it is read. Newer ones are set aside under `damaged-…`.

    Raises:
        CheckpointError: there are checkpoints, and none is whole.
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
    """Out of the way of the steps that will be done again, which would write under its name."""
    names = (f"damaged-{folder.name}{f'.{number}' if number > 1 else ''}" for number in count(1))
    kept = next(path for path in map(folder.with_name, names) if not path.exists())
    folder.rename(kept)
    return f"{fault}; the run goes on from {instead.name}, and the damaged checkpoint is kept as {kept.name}"


def newest_complete(run_dir: Path) -> Path | None:
    """The checkpoint with the highest version whose files are all there in their full size."""
    found = complete_checkpoints(run_dir)
    return found[0] if found else None


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """All checkpoints whose files are there in their full size, newest first."""
    return [folder for folder in _folders(run_dir) if not _lacks(folder)]


def damaged_checkpoints(run_dir: Path) -> list[str]:
    """What is wrong with the other checkpoints, newest first."""
    return list(filter(None, map(_lacks, _folders(run_dir))))


def _folders(run_dir: Path) -> list[Path]:
    """Newest first; one that was replaced comes after its successor. What others have put there is not ours."""
    named = ((folder, _NAME.fullmatch(folder.name)) for folder in (run_dir / "checkpoints").glob("step-*"))
    found = [(int(match[1]), match[2] is None, folder) for folder, match in named if match is not None]
    return [folder for _, _, folder in sorted(found, reverse=True)]


def read_manifest(path: Path) -> Manifest:
    """The manifest of one checkpoint.

    Raises:
        CheckpointError: it is missing or unreadable.
    """
    try:
        return msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {error}") from error


@contextmanager
def hub_state(path: Path) -> Generator[memoryview]:
    """The hub's state of one checkpoint, checked against the manifest, for the length of the block.

    Mapped, not read: it may be as large as the memory that it is decoded to.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    check_files(path, [entry for entry in read_manifest(path).files if entry.path == HUB_STATE])
    with (
        (path / HUB_STATE).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
    ):
        yield view


def check_files(folder: Path, entries: Iterable[FileEntry]) -> None:
    """Read these files and compare their checksums, several at a time.

    Raises:
        CheckpointError: one differs from what was written.
    """
    entries = list(entries)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = [fault for fault in pool.map(lambda entry: _fault(folder, entry), entries) if fault]
    if faults:
        raise CheckpointError("; ".join(faults))


def _fault(folder: Path, entry: FileEntry) -> str:
    file = folder / entry.path
    try:
        found = crc32_of(file)
    except OSError as error:
        return f"{file} is damaged: it cannot be read: {error}"
    return "" if found == entry.crc32 else f"{file} is damaged: CRC {found:08x}, written as {entry.crc32:08x}"


def file_entry(file: Path, folder: Path) -> FileEntry:
    """A file of a checkpoint as the manifest names it."""
    return FileEntry(str(file.relative_to(folder)), file.stat().st_size, crc32_of(file))


def crc32_of(file: Path) -> int:
    """The CRC-32 of a file's content."""
    crc = 0
    with file.open("rb") as stream:
        while block := stream.read(READ_SIZE):
            crc = zlib.crc32(block, crc)
    return crc


def extras_mismatch(path: Path, held: Sequence[str], wanted: Sequence[str]) -> str:
    """Why a run that wants these cannot go on from a checkpoint that holds those; empty: it can.

    A run goes on with what it had: a critic that starts from nothing would mislead the policy it is given.
    """
    for name, words in EXTRAS.items():
        there, here = held.count(name), wanted.count(name)
        if here and not there:
            return f"{path} was written without {words}, which this run has: go on without, or start a new run"
        if there and not here:
            return f"{path} holds {words}, which this run lacks: configure it, or start a new run"
        if there != here:
            return f"{path} holds {there} {name}s, and this run has {here}: set {name}.count = {there}"
    return ""


def alpha_mismatch(path: Path, manifest: Manifest, alpha: float | None) -> str:
    """Why adapters would count otherwise with this `lora.alpha` than they did in training; empty: they would not."""
    if manifest.alpha in (None, alpha):
        return ""
    return f"{path} holds adapters that were trained with lora.alpha = {manifest.alpha:g}: expected that, got {alpha:g}"


def make_empty(aside: Path, leftovers: Iterable[Path] = ()) -> None:
    """An empty folder to write into. Leftovers of writes that were killed go first: they may be what fills the disk."""
    for folder in {*leftovers, aside}:
        if folder.exists():
            shutil.rmtree(folder)
    aside.mkdir(parents=True)


def move_into_place(aside: Path, folder: Path) -> None:
    """Rename. An earlier folder of that name is moved out of the way, and goes when the new one is in its place."""
    old = folder.with_name(folder.name + REPLACED)
    if folder.exists():
        if old.exists():
            shutil.rmtree(old)
        folder.rename(old)
    aside.rename(folder)
    sync_to_disk(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def prune(run_dir: Path, keep: int) -> None:
    """Delete all but the newest complete checkpoints."""
    by_version: dict[str, Path] = {}
    for folder in complete_checkpoints(run_dir):
        by_version.setdefault(folder.name.removesuffix(REPLACED), folder)
    kept = list(by_version.values())[:keep]
    for folder in _folders(run_dir):
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def _lacks(folder: Path) -> str:
    """What is wrong with a checkpoint, as far as it shows without reading its files; empty: nothing."""
    try:
        for entry in read_manifest(folder).files:
            if (size := (folder / entry.path).stat().st_size) != entry.size:
                return f"{folder / entry.path} is damaged: {size} bytes, written as {entry.size}"
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename} is damaged: it cannot be read: {error.strerror}"
    return ""


def sync_to_disk(path: Path) -> None:
    """Force a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_folder(path: Path) -> Generator[Path]:
    """A new folder beside `path` that takes its place when the block ends well, and vanishes when it does not.

    What stands beside the new folder, in its parent, vanishes in either case.
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
    """Remove what processes have left beside `path` that were killed while they put a folder there.

    To be called while no other process is about to.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}{ASIDE}*"):
        shutil.rmtree(left, ignore_errors=True)
