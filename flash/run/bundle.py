"""Bundles: one file with recorded steps of a run and everything that training them again needs, on any machine.

`flash.run.bundling` makes bundles, and `flash replay` calls `open_bundle`. A bundle is a plain tar archive:

    bundle.json         `BundleHead`: steps, versions of packages, fingerprints of weights before and after the steps
    config.toml         the settings that a replay uses, and no others
    metrics.jsonl       the metrics that the steps gave in the run
    batches/            the recorded batches, byte for byte (flash.observe.rundir.recording)
    model/              the policy before the first step, as a Hugging Face folder; the base of adapters in their place
    state.safetensors   moments, random states and other tensors of the trainer; absent at version 0
    critic/, reference/, teacher/   other models that the configuration names
    code/               the user's own modules that the objective consists of
    SHA256SUMS          checksum of each other member, for `sha256sum --check`

The steps were trained once from these *members* alone while the bundle was made, so their result is known.

A bundle may come from anybody. Reading one unpickles nothing and imports nothing from it, accepts only regular files
with the names above, and checks all sizes before it uses them. `flash replay` runs code from a bundle only with
`--trust`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import tarfile
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec

from flash.config.load import dump, load_recorded
from flash.config.machine import count_gpus
from flash.config.section import MOST
from flash.config.tree import Config
from flash.errors import DECODE_ERRORS, ConfigError, RecordingError
from flash.hub.gate import trajectory_fault
from flash.observe.rundir.recording import HEADER, batch_file, read_batch
from flash.observe.rundir.rundir import open_regular_file, writing
from flash.run.fetch import MODEL_CONFIG
from flash.run.replay import BundledStart, RecordedWeights, ReplayPlan, TensorRecord
from flash.trainer.checkpoint_files import READ_SIZE, Manifest

FORMAT = 1
"""Version of the format. Increase it when an older Flash could misread a newer bundle."""
HEAD, CONFIG, METRICS, STATE, SUMS = "bundle.json", "config.toml", "metrics.jsonl", "state.safetensors", "SHA256SUMS"
"""Names of the single files of a bundle."""
BATCHES, MODEL, CODE = "batches", "model", "code"
"""Names of its folders, except those of other models."""
CRITIC, REFERENCE, TEACHER = "critic", "reference", "teacher"
"""Names of the folders of other models."""
MEMBER = re.compile(
    rf"{'|'.join(map(re.escape, (HEAD, CONFIG, METRICS, STATE, SUMS)))}|{BATCHES}/step-[0-9]{{6,18}}\.bin"
    rf"|(?:{MODEL}|{CRITIC}|{REFERENCE}|{TEACHER})/[A-Za-z0-9_][\w.-]*\.(?:json|safetensors|jinja|txt|model)"
    rf"|{CODE}/(?:[A-Za-z_]\w*/)*[A-Za-z_]\w*\.py",
    re.ASCII,
)
"""Pattern of the names that a member of a bundle can have. Pickled weights and code of models are not among them."""
LONGEST_NAME = 100
"""Largest length of a member's name in a header of tar. A longer one would need an extension, which is refused."""
BLOCK = tarfile.BLOCKSIZE
"""Size of a block of tar, in bytes. Each header is one block, and each member is padded to whole blocks."""
LARGEST_TEXT = 1 << 26
"""Largest size of a text member that is read into memory, in bytes."""
MOST_THREADS = 4096
"""Largest number of threads that a bundle may ask for. torch starts as many, and no machine has more cores."""
NAMES_OF_PATHS = ("_name_or_path", "name_or_path")
"""Keys with which transformers records the folder of a model."""
CODE_OF_MODELS = ("auto_map", "attn_implementation", "experts_implementation")
"""Keys of a model's description, without leading underscores, that can name code outside of transformers."""
SHIPPED = "algorithms"
"""Package of the objectives that are part of Flash."""
PACKAGES = ("flash-rl", "torch", "transformers", "safetensors", "numpy", "msgspec", "peft")
"""Packages that can change the result of a step, by the names of their distributions."""

MetricRow = dict[str, float | None]
"""Metrics of a step by name, with the number of the step. None: the value was not finite."""


class BundleHead(msgspec.Struct, frozen=True):
    """First member of a bundle. It describes the other members."""

    format: Literal[1]
    """`FORMAT`."""
    run: str
    """Name of the run."""
    first: int
    """Version at the start, which is also the first step: step N trains version N, and makes version N + 1."""
    step: int
    """Step for which the bundle was made, the last one."""
    ranks: int
    """Number of trainer ranks of the run."""
    threads: int
    """Number of threads of the replay that made the bundle."""
    build: dict[str, str]
    """Versions of packages, processor and device of that replay, as `build_of` returns them."""
    weights: bool
    """True if the bundle holds the weights of `model/`."""
    origin: str
    """Origin of these weights as a noun phrase, for somebody who has to find them."""
    start: list[TensorRecord]
    """All parameters of the policy before the first step."""
    manifest: Manifest | None
    """Numbers of the trainer before the first step; None at version 0, when it is new."""
    results: list[RecordedWeights]
    """Weights after the last step: those of the run, if it has kept them, and those of the replay."""
    replayed: list[MetricRow]
    """Metrics of the replay that made the bundle."""


class Bundle(NamedTuple):
    """Bundle whose members lie in a folder."""

    head: BundleHead
    """First member, decoded."""
    folder: Path
    """Folder of the members."""
    config: Path
    """File of the configuration, in which the paths of models are those of this machine."""
    objective: str
    """Value of `algorithm.objective` in the bundle."""
    rows: list[MetricRow]
    """Metrics of the run."""

    @property
    def batches(self) -> Path:
        """Folder of the recorded batches."""
        return self.folder / BATCHES

    @property
    def code(self) -> list[str]:
        """Names of the members with code, sorted."""
        return sorted(str(file.relative_to(self.folder)) for file in (self.folder / CODE).rglob("*.py"))

    @property
    def planned(self) -> ReplayPlan:
        """Plan of the replay of all steps."""
        head = self.head
        start = BundledStart(
            tensors=head.start,
            origin=head.origin,
            state=None if head.manifest is None else self.folder / STATE,
            manifest=head.manifest,
            threads=head.threads,
            results=head.results,
        )
        return ReplayPlan(first=head.first, last=head.step + 1, checkpoint=None, compared={}, bundled=start)


def build_of(config: Config) -> dict[str, str]:
    """Return the versions of packages, the processor and the device with which a replay runs here, by name.

    The same batch gives the same bits if all of these are the same. Names of hosts and users are not among them.
    `config` says if the replay runs on a GPU.
    """
    import torch

    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["processor"] = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    found["device"] = torch.cuda.get_device_name() if config.gpus_per_node > 0 else "cpu"
    return found


def on_this_machine(config: Config) -> Config:
    """Return the configuration of a replay on this machine.

    That is `config`, but on the CPU if the run had GPUs and this machine has none.
    """
    if config.gpus_per_node == 0 or count_gpus() > 0:
        return config
    return msgspec.structs.replace(config, cluster=msgspec.structs.replace(config.cluster, gpus_per_node=0))


def runs_foreign_code(objective: str) -> bool:
    """Return True if an objective is named by an import path `module:name` outside of Flash.

    `objective` is the value of `algorithm.objective`. A name without a colon is an objective of Flash.
    """
    return ":" in objective and objective.partition(":")[0].partition(".")[0] != SHIPPED


def metric_row(row: Mapping[str, Any]) -> MetricRow:
    """Return the numbers of a row of metrics, without its other values. A number that is not finite becomes None,
    because JSON cannot hold it."""
    numbers = {name: value for name, value in row.items() if value is None or isinstance(value, int | float)}
    return {name: None if value is None or not math.isfinite(value) else value for name, value in numbers.items()}


def tar_header(name: str, size: int) -> bytes:
    """Return the header of a member of `size` bytes: one block, and the same bytes for the same name and size.

    A fresh TarInfo names no user, group or time. The reader compares each header with the result of this function.
    """
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT, "ascii", "strict")


# -- reading a bundle --------------------------------------------------------------------------------------------------


@contextmanager
def open_bundle(path: Path, model: Path | None = None) -> Generator[Bundle]:
    """Unpack a bundle into a temporary folder, check all of it, and yield it. The folder exists while the block runs.

    Args:
        path: the file, which exists.
        model: folder of the policy's weights, for a bundle that does not hold them; None for a bundle that does.

    Raises:
        RecordingError: the file is damaged, is no bundle, or holds something that no bundle may hold.
        RunDirectoryError: the file cannot be read, or the temporary folder cannot be written.
        ConfigError: `model` is missing, is superfluous or has another architecture, or the disk has too little room.
    """
    with tempfile.TemporaryDirectory(prefix="flash-bundle-") as scratch:
        size, free = path.stat().st_size, shutil.disk_usage(scratch).free
        if size > free:
            raise ConfigError(
                f"{path} needs {size:,} bytes in {Path(scratch).parent} while it is open, and {free:,} are free there; "
                "name a larger folder in the environment variable TMPDIR"
            )
        folder = Path(scratch) / "members"
        folder.mkdir()
        try:
            with writing(folder):
                _unpack(path, folder)
            head = msgspec.json.decode(_text(folder / HEAD), type=BundleHead)
            _check_members(head, folder)
            bundle = place(head, folder, Path(scratch) / CONFIG, model)
            for step in range(head.first, head.step + 1):
                _check_batch(folder / BATCHES, step)
        except (*DECODE_ERRORS, ValueError, RecordingError) as error:
            if isinstance(error, ConfigError):  # also a ValueError
                raise
            raise RecordingError(
                f"{path} is damaged, or is no bundle of this version of Flash: {error}; expected a file that "
                "`flash bundle` has written: get another copy"
            ) from error
        if model is not None:
            _check_architecture(folder / MODEL, model)
        yield bundle


def _unpack(path: Path, folder: Path) -> None:
    """Write the members of an archive to an empty folder.

    The headers are parsed one by one, without the extensions of tar. So a member is a regular file, a name has at most
    100 characters, and no size is larger than the archive itself.

    Raises:
        ValueError: the archive is damaged, or has a member that no bundle may have.
    """
    sums: dict[str, str] = {}  # SHA-256 of each member so far, by its name
    with open_regular_file(path) as source:
        left = os.fstat(source.fileno()).st_size  # number of bytes behind the present place
        while (header := source.read(BLOCK)) != bytes(BLOCK):
            left -= len(header)
            try:
                info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
            except (tarfile.HeaderError, UnicodeDecodeError) as error:
                raise ValueError(f"the header of a member is unreadable ({error})") from error
            # A header that differs in any byte from ours may be a link, a device or an extension.
            if not MEMBER.fullmatch(info.name) or header != tar_header(info.name, info.size):
                raise ValueError(f"it has the member {info.name!r}, which no bundle has")
            if info.name in sums:
                raise ValueError(f"it has {info.name} twice")
            if not 0 <= info.size <= left:
                raise ValueError(f"{info.name} is cut off: {info.size:,} bytes are declared, {left:,} are there")
            file = folder / info.name
            file.parent.mkdir(parents=True, exist_ok=True)
            sums[info.name] = _copy_member(source, file, info.size)
            padding = source.read(-info.size % BLOCK)
            if padding != bytes(-info.size % BLOCK):
                raise ValueError(f"there is something behind {info.name}")
            left -= info.size + len(padding)
        # Two blocks of zeros end an archive. One is read already, so exactly one more must be left.
        if source.read(2 * BLOCK) != bytes(BLOCK):
            raise ValueError("its end is cut off, or there is something behind it")
    stated = sums.pop(SUMS, None)
    if stated is None:
        raise ValueError(f"it has no {SUMS}")
    pairs = (line.split("  ", 1) for line in _text(folder / SUMS).decode("ascii").splitlines())
    lines = {name: digest for digest, name in pairs}
    if wrong := sorted(name for name in sums.keys() | lines.keys() if sums.get(name) != lines.get(name)):
        raise ValueError(f"the checksum of {wrong[0]} is wrong")


def _copy_member(source: BinaryIO, file: Path, size: int) -> str:
    """Copy the next `size` bytes of an archive to a new file, and return their SHA-256 in hexadecimal.

    Raises ValueError if the archive ends before.
    """
    digest = hashlib.sha256()
    with file.open("xb") as out:
        while size:
            block = source.read(min(size, READ_SIZE))
            if not block:
                raise ValueError(f"{file.name} is cut off")
            digest.update(block)
            out.write(block)
            size -= len(block)
    return digest.hexdigest()


def _text(file: Path) -> bytes:
    """Return the content of a small member. Raises ValueError if it is missing or larger than `LARGEST_TEXT`."""
    if not file.is_file():
        raise ValueError(f"it has no {file.name}")
    if (size := file.stat().st_size) > LARGEST_TEXT:
        raise ValueError(f"{file.name} has {size:,} bytes, expected at most {LARGEST_TEXT:,}")
    return file.read_bytes()


def _check_members(head: BundleHead, folder: Path) -> None:
    """Check that a head fits the other members in `folder`, and that no model asks for code.

    Raises ValueError otherwise. The head may come from anybody, so each number is bounded before it is used.
    """
    if not 0 <= head.first <= head.step:
        raise ValueError(f"its steps go from {head.first} to {head.step}")
    if not 1 <= head.ranks <= MOST:
        raise ValueError(f"its run had {head.ranks} ranks")
    if head.manifest is not None and not 0 <= head.manifest.skipped_steps <= MOST:
        raise ValueError(f"its state has {head.manifest.skipped_steps} skipped steps")
    if not 1 <= head.threads <= MOST_THREADS:
        raise ValueError(f"it was made with {head.threads} threads")
    count = head.step + 1 - head.first
    # The number of batches comes first: a head may claim more steps than would fit into memory as a range of paths.
    found = {file.name for file in (folder / BATCHES).glob("*")}
    if len(found) != count or len(head.replayed) != count:
        raise ValueError(f"it has {len(found)} batches and {len(head.replayed)} rows, expected {count} of each")
    if missing := {batch_file(folder, step).name for step in range(head.first, head.step + 1)} - found:
        raise ValueError(f"it has no {BATCHES}/{min(missing)}")
    if (head.manifest is None) == (folder / STATE).is_file():
        raise ValueError(f"{STATE} does not fit {HEAD}")
    if head.manifest is not None and head.manifest.version != head.first:
        raise ValueError(f"its state is that of version {head.manifest.version}, and not of version {head.first}")
    if head.weights != any((folder / MODEL).glob("*.safetensors")):
        raise ValueError(f"the weights in {MODEL}/ do not fit {HEAD}")
    for file in folder.glob(f"*/{MODEL_CONFIG}"):
        json.loads(_text(file), object_hook=_refuse_code)


def _refuse_code(described: dict[str, Any]) -> None:
    """Raise ValueError if a table of a model's description names code, which transformers might fetch and run.

    The JSON parser calls this for each table, the inner ones first. Its result is not used, so None is returned.
    """
    if found := sorted(key for key in described if key.strip("_").startswith(CODE_OF_MODELS)):
        raise ValueError(f"the {MODEL_CONFIG} of a model asks for code, with {found[0]}")


def _check_batch(folder: Path, step: int) -> None:
    """Check the recorded batch of a step before it is trained. Raises ValueError or RecordingError if it is damaged.

    `folder` is the folder of the batches. A run's own batches need no check, because the hub has made these checks when
    it received the samples.
    """
    file = batch_file(folder, step)
    left = file.stat().st_size
    with file.open("rb") as source:
        # A record's length is compared with the size of the file before `read_batch` reserves memory for it.
        while header := source.read(HEADER.size):
            left -= HEADER.size + (length := HEADER.unpack(header)[0] if len(header) == HEADER.size else 0)
            if left < 0:
                raise ValueError(f"a record of {file.name} is cut off")
            source.seek(length, os.SEEK_CUR)
    batch = read_batch(folder, step)
    if not batch.trajectories or (
        batch.rounds and (min(batch.rounds) < 1 or sum(batch.rounds) != len(batch.trajectories))
    ):
        raise ValueError(f"{file.name} has {len(batch.trajectories)} samples in rounds of {batch.rounds}")
    for trajectory in batch.trajectories:
        if (fault := trajectory_fault(trajectory, step)) is not None:
            raise ValueError(f"{file.name} has a sample with {fault}")


def place(head: BundleHead, folder: Path, file: Path, model: Path | None) -> Bundle:
    """Return the bundle with its members in `folder`, and write the configuration of its replay to a file.

    `open_bundle` calls this after it has unpacked a bundle, and `flash.run.bundling` before it packs one.

    Args:
        head: head of the bundle.
        folder: folder of the members.
        file: file to write. It is the bundle's configuration, with the paths that its models have on this machine.
        model: folder of the policy's weights if the bundle does not hold them; None if it does.

    Raises:
        ValueError: the configuration names a model or a folder outside of the bundle, or a row of metrics is damaged.
        ConfigError: `model` is given for a bundle with weights, or missing for one without.
    """
    replace = msgspec.structs.replace
    _text(folder / CONFIG)
    try:
        # Unchecked, because the checks would import the objective's module.
        config = load_recorded([folder / CONFIG], checked=False)
    except ConfigError as error:
        raise ValueError(f"{CONFIG}: {error}") from error
    kl, teacher, critic = config.algorithm.kl, config.algorithm.teacher, config.critic
    named = {
        MODEL: config.model.path,
        REFERENCE: kl and kl.reference,
        TEACHER: teacher and teacher.path,
        CRITIC: critic and critic.path,
    }
    for name, path in named.items():
        if path not in (name, None) or (path is not None and not (folder / name / MODEL_CONFIG).is_file()):
            raise ValueError(f"{CONFIG} names the model {path}, expected the folder {name}/ of the bundle")
    if config.env.folders or config.model.trust_remote_code or config.model.fetch is not None or config.tiny_model:
        raise ValueError(f"{CONFIG} asks for code or models from outside of the bundle")
    here = any((folder / MODEL).glob("*.safetensors"))
    if here == (model is not None):
        raise ConfigError(
            f"--model {model}: the bundle holds the weights itself; leave --model out"
            if here
            else f"the bundle has no weights: name the folder of the model with --model FOLDER; expected {head.origin}"
        )
    placed = replace(
        config,
        model=replace(config.model, path=str((model or folder / MODEL).absolute())),
        critic=critic and replace(critic, path=critic.path and str(folder / CRITIC)),
        algorithm=replace(
            config.algorithm,
            kl=kl and replace(kl, reference=kl.reference and str(folder / REFERENCE)),
            teacher=teacher and replace(teacher, path=teacher.path and str(folder / TEACHER)),
        ),
    )
    file.write_text(dump(placed), encoding="utf-8")
    rows = [msgspec.json.decode(line, type=MetricRow) for line in _text(folder / METRICS).splitlines()]
    return Bundle(head, folder, file, config.algorithm.objective, rows)


def _check_architecture(described: Path, model: Path) -> None:
    """Compare the description of the model in the bundle's folder `described` with the user's model in folder `model`.

    The weights are compared later, when they are loaded. Equal weights with another description, such as another base
    of the rotary embedding, would give other results.

    Raises:
        ConfigError: a key differs, or a description is missing or cannot be read.
    """
    from transformers import AutoConfig

    if not (model / MODEL_CONFIG).is_file():
        raise ConfigError(f"--model {model}: expected the folder of a Hugging Face model; it has no {MODEL_CONFIG}")
    try:
        ours, theirs = (
            AutoConfig.from_pretrained(one, local_files_only=True, trust_remote_code=False).to_dict()
            for one in (described, model)
        )
    except Exception as error:  # a damaged file causes errors of many types
        raise ConfigError(f"--model {model}: its {MODEL_CONFIG} cannot be read: {error}") from error
    ignored = {*NAMES_OF_PATHS, "dtype", "torch_dtype", "transformers_version", "architectures"}
    for key in sorted((ours.keys() | theirs.keys()) - ignored):
        if ours.get(key) != theirs.get(key):
            raise ConfigError(
                f"--model {model}: it is another model than the bundle's: {key} is {theirs.get(key)!r} in its "
                f"{MODEL_CONFIG}, expected {ours.get(key)!r}"
            )
