"""Making of bundles for `flash bundle`: `flash.run.bundle` describes the file and reads it.

`own_sources` finds the user's code that an objective needs, and `make_bundle` does everything else. It writes the
members to a temporary folder beside the output, trains the steps from that folder alone, packs the folder, and renames
the archive. A bundle with code of the user is replayed once more before that, in a process that has no other code of
the user. So a bundle appears completely or not at all, and one that appears can be replayed. Only chosen settings
and files are copied. A secret elsewhere in the run or in the folder of a model stays there.

Terms: a *member* is a file in the archive, and the *head* is its first member, which describes the others. A *replay*
trains recorded batches again (`flash.run.replay`). A *version* is the number of steps that a policy was trained.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec

import flash
from flash.config.load import dump, load_recorded
from flash.config.models import is_hub_id
from flash.config.objects import IMPORT_PATH, own_folders
from flash.config.tree import ClusterConfig, Config, EnvConfig, ModelConfig, ParallelConfig, RunConfig
from flash.errors import ConfigError
from flash.observe.rundir.recording import batch_file
from flash.observe.rundir.rundir import RunDirectory, writing
from flash.run.bundle import (
    BATCHES,
    BLOCK,
    CODE,
    CODE_OF_MODELS,
    CONFIG,
    CRITIC,
    FORMAT,
    HEAD,
    LONGEST_NAME,
    MEMBER,
    METRICS,
    MODEL,
    NAMES_OF_PATHS,
    REFERENCE,
    SHIPPED,
    STATE,
    SUMS,
    TEACHER,
    BundleHead,
    MetricRow,
    build_of,
    metric_row,
    on_this_machine,
    place,
    runs_foreign_code,
    tar_header,
)
from flash.run.replay import (
    Comparison,
    RecordedWeights,
    ReplayPlan,
    TensorRecord,
    one_rank,
    record_tensors,
    replay,
    threads_of,
    weights_of,
)
from flash.trainer.checkpoint_files import READ_SIZE, Manifest

if TYPE_CHECKING:
    from flash.trainer.step import Trainer

LEFT_OUT = "http://left-out"
"""Address in place of the address of a teacher's server. A replay asks no server: the log-probs of the teacher are part
of the recorded samples."""


class Part(NamedTuple):
    """Part of a bundle, for the list of sizes."""

    name: str
    """Name of the file or, with a slash at the end, of the folder."""
    size: int
    """Size in bytes."""


def own_sources(objective: str, imported: Collection[str]) -> dict[str, Path]:
    """Return the source files of the user's own modules that an objective consists of, by their names in a bundle.

    These are the objective's module, the packages around it, and modules that it has imported. Installed packages and
    Flash are left out: whoever replays the bundle installs them. So the result is empty for an objective of Flash.

    Args:
        objective: value of `algorithm.objective`.
        imported: names of the modules that were imported for it, all of which are in `sys.modules`.

    Returns:
        Dict from the name of the member, such as `code/package/module.py`, to the source file.

    Raises:
        ConfigError: a module cannot be carried: it is compiled, or its name is unusual.
    """
    if not runs_foreign_code(objective):
        return {}
    parts = objective.partition(":")[0].split(".")
    around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    folders = own_folders()
    found: dict[str, Path] = {}
    for name in sorted({*around, *imported}):
        source = getattr(sys.modules.get(name), "__file__", None)
        if source is None or name.partition(".")[0] in ("flash", "envs", SHIPPED):  # the packages of Flash
            continue
        # Links are not resolved: a linked module lies where the link is.
        file = Path(os.path.abspath(source))
        stem = name.replace(".", "/") + "/__init__" * file.name.startswith("__init__.")
        # A module is the user's own if it lies in an own folder at the place that its name says. An installed package
        # below such a folder, for example in a virtual environment, lies elsewhere.
        if any(str(file).startswith(os.path.join(folder, f"{stem}.")) for folder in folders):
            path = f"{CODE}/{stem}.py"
            if file.suffix != ".py" or not MEMBER.fullmatch(path) or len(path) > LONGEST_NAME:
                raise ConfigError(
                    f"algorithm.objective: the module {name} ({file}) cannot be put into a bundle: expected Python "
                    "source (.py), and a name of ASCII letters, digits and _ of at most "
                    f"{LONGEST_NAME} characters with its packages; rename it, or install the package that it is in"
                )
            found[path] = file
    return found


def make_bundle(
    directory: RunDirectory,
    config: Config,
    planned: ReplayPlan,
    output: Path,
    *,
    with_weights: bool,
    code: Mapping[str, Path],
    on_step: Callable[[dict[str, float]], None],
    on_comparison: Callable[[Comparison], None],
) -> list[Part]:
    """Write a bundle of the steps of a plan, completely or not at all, and return its parts.

    The steps are trained from the parts alone before the file appears, with `code` also in a process of its own.

    Args:
        directory: directory of the run.
        config: configuration of the run.
        planned: the steps, from `flash.run.replay.plan_step`.
        output: file to write; an earlier file of this name is replaced.
        with_weights: False leaves out the weights of `model/`.
        code: source files of the objective, from `own_sources`.
        on_step: called with the metrics of each replayed step.
        on_comparison: called with the difference of the replayed weights to those of the run, if it has kept them.

    Raises:
        ConfigError: the model consists of code of its own, or the objective's code does not work without other files.
        FlashError: a model, checkpoint or batch cannot be read, a replay fails, or the file cannot be written.
    """
    if config.model.trust_remote_code:
        raise ConfigError(
            "model.trust_remote_code: the model consists of Python code that comes with it, which a bundle does not "
            "hold; expected false. Share the run's folder instead, for `flash replay RUN_DIR`"
        )
    used = on_this_machine(config)
    with (
        writing(output),
        tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.absolute().parent) as scratch,
    ):
        folder = Path(scratch) / "members"
        (folder / BATCHES).mkdir(parents=True)
        steps = range(planned.first, planned.last)
        for step in steps:
            shutil.copyfile(batch_file(directory.batches, step), batch_file(folder / BATCHES, step))
        for name, source in code.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)
        rows = {row.get("step"): row for row in directory.read_metrics()}
        # The run may have no row of a step, if it was stopped before it wrote one.
        kept = [metric_row(rows[step]) for step in steps if step in rows]
        (folder / METRICS).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in kept))
        with _quiet():
            start = _write_models(used, planned, folder)
        (folder / CONFIG).write_text(dump(_carried(config, folder)), encoding="utf-8")
        head = BundleHead(
            format=FORMAT,
            run=config.run.name,
            first=planned.first,
            step=planned.last - 1,
            ranks=config.trainer_world_size,
            threads=threads_of(used),
            build=build_of(used),
            weights=with_weights,
            origin=_origin(config, planned),
            start=start.tensors,
            manifest=start.manifest,
            results=[] if start.result is None else [start.result],
            replayed=[],
        )
        replayed: list[MetricRow] = []
        records: list[TensorRecord] = []

        def keep_step(row: dict[str, float]) -> None:
            """Keep the metrics of a replayed step for the head, and pass them on."""
            replayed.append(metric_row(row))
            on_step(row)

        # The configuration of the replay has paths of this machine, so it lies outside of the folder of the members.
        bundle = place(head, folder, Path(scratch) / CONFIG, None)
        replay(
            on_this_machine(load_recorded([bundle.config])),
            bundle.planned,
            folder=bundle.batches,
            on_step=keep_step,
            on_comparison=on_comparison,
            on_end=records.extend,
        )
        again = RecordedWeights(planned.last, "those of the replay that made the bundle", records)
        head = msgspec.structs.replace(head, results=[*head.results, again], replayed=replayed)
        (folder / HEAD).write_bytes(msgspec.json.format(msgspec.json.encode(head), indent=1) + b"\n")
        aside, model = Path(scratch) / "bundle.tar", None
        if not with_weights:
            # The weights were needed for the replay above, and are kept outside of the archive for `_check_code`.
            model = Path(scratch) / MODEL
            shutil.copytree(folder / MODEL, model)
            for file in (folder / MODEL).glob("*.safetensors*"):
                file.unlink()
        parts = _write_tar(folder, aside)
        if code:
            _check_code(aside, model, Path(scratch))
        aside.replace(output)
        return parts


def _check_code(bundle: Path, model: Path | None, scratch: Path) -> None:
    """Replay a bundle with code in a process that cannot import the user's own modules from their folders.

    The replay in this process does not show that a module or a data file is missing, because the objective is already
    imported from its own folder.

    Args:
        bundle: the archive.
        model: folder of the weights that it lacks; None if it has them.
        scratch: folder for temporary files.

    Raises:
        ConfigError: the replay did not reach its end.
    """
    empty, result = scratch / "empty", scratch / "result.json"
    empty.mkdir()
    # Flash is imported from its own folder if it is not installed. -P keeps the working folder off the import path.
    home = str(Path(flash.__file__).parents[1])
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", IMPORT_PATH)}
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "flash", "replay", str(bundle), "--trust", "--json", str(result)),
            *(() if model is None else ("--model", str(model))),
        ],
        cwd=empty,
        env=variables | ({"PYTHONPATH": home} if home in own_folders() else {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",  # the user's code may print bytes that are no text
        check=False,
    )
    # The file is the last thing that the command writes. Its exit code is also 1 if results differ.
    if not result.is_file():
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(
            "algorithm.objective: the bundle would not replay on another machine, so it was not written: "
            f"{why.removeprefix('flash: error: ')}; a bundle holds the modules that are imported with the objective's "
            "module, and no data files: import all of them at the top of modules, and write data as Python source, or "
            "install both as a package"
        )


class _Start(NamedTuple):
    """Beginning of a bundle's steps, which `_write_models` has written."""

    tensors: list[TensorRecord]
    """All parameters of the policy."""
    manifest: Manifest | None
    """Numbers of the trainer; None at version 0."""
    result: RecordedWeights | None
    """Weights of the run after the last step; None if it has no checkpoint of them."""


def _write_models(config: Config, planned: ReplayPlan, folder: Path) -> _Start:
    """Write the policy at the first version, the trainer's state and all other models to the folder of a bundle.

    A trainer is made for it as for a replay of the run, and is gone when this returns.

    Args:
        config: the run's configuration, on the CPU if this machine has no GPU.
        planned: the steps of the bundle.
        folder: folder of the members.

    Raises:
        FlashError: a model or checkpoint cannot be read, or does not fit the configuration.
    """
    from flash.rollout.episode.tokenizer import HfTokenizer
    from flash.trainer import checkpoint
    from flash.trainer.model.model import load_model
    from flash.trainer.step import Trainer

    def save(path: str, name: str) -> None:
        """Write the model at `path` to the folder `name` of the bundle."""
        # Models are read and written again, and not copied. So hub ids, pickled weights and all other forms become the
        # same few files. Nothing else in the folder of a model can get into the bundle.
        load_model(msgspec.structs.replace(config.model, path=path)).save_pretrained(folder / name)

    tokenizer = HfTokenizer(config.model).inner
    # True: `model/` gets the policy of a checkpoint, which the trainer exports below. False: it gets the model with
    # which the run began, which is the policy at version 0, or the base of adapters.
    whole = planned.checkpoint is not None and config.lora is None
    if not whole:
        save(config.model.path, MODEL)
        tokenizer.save_pretrained(folder / MODEL)
    for name, path in _other_models(config, whole=whole).items():
        save(path, name)
    with one_rank(config):
        trainer: Trainer = Trainer(msgspec.structs.replace(config, parallel=ParallelConfig()))
        manifest: Manifest | None = None
        if planned.checkpoint is not None:
            checkpoint.load(planned.checkpoint, trainer)
            manifest = checkpoint.write_state(folder / STATE, trainer)
        if whole:
            checkpoint.export_hf(trainer.model, tokenizer, folder / MODEL)
        tensors = record_tensors(weights_of(trainer, frozen=True))
        result: RecordedWeights | None = None
        if (path := planned.compared.get(planned.last)) is not None:
            before = weights_of(trainer)
            held = checkpoint.read_weights(path, trainer)  # the run's own weights after the last step
            theirs = record_tensors({name: held[name] for name in before}, before)
            result = RecordedWeights(planned.last, f"the run's (checkpoint {path.name})", theirs)
        del trainer
        gc.collect()  # reference cycles of FSDP hold the model, and the replay makes another one
    for name in (MODEL, CRITIC, REFERENCE, TEACHER):
        if (folder / name).is_dir():
            _shrink(folder / name)
            _forget_paths(folder / name)
    return _Start(tensors, manifest, result)


def _other_models(config: Config, *, whole: bool) -> dict[str, str]:
    """Return the models beside `model/` that a bundle needs, because the trainer loads them.

    Returns a dict from the name of the model's folder in the bundle to its path: a folder, or an id of the Hugging Face
    hub. `whole` is True if `model/` holds the policy of a later version. Then a KL without a `reference` needs the
    model with which the run began, too.
    """
    kl, teacher, critic = config.algorithm.kl, config.algorithm.teacher, config.critic
    found = {
        # None: the run has no critics, or they begin as the model in `model/`. A checkpoint has their own weights.
        CRITIC: None if critic is None else critic.path,
        REFERENCE: None if kl is None else kl.reference or (config.model.path if whole else None),
        # None: there is no teacher, or it is a server, whose log-probs are part of the recorded samples.
        TEACHER: None if teacher is None else teacher.path,
    }
    # With adapters the base is the reference, without a second copy in memory, and `model/` is the base.
    if config.lora is not None and found[REFERENCE] == config.model.path:
        found[REFERENCE] = None
    return {name: path for name, path in found.items() if path is not None}


def _carried(config: Config, folder: Path) -> Config:
    """Return the configuration that a bundle holds: the settings that a replay uses, and defaults otherwise.

    Settings are chosen, rather than secrets removed: options of environments, addresses, commands and paths stay away
    because nothing here copies them. Models get the names of their folders in the bundle, `folder`, so these must have
    been written before.
    """
    replace = msgspec.structs.replace

    def name(one: str) -> str | None:
        """Return the name of a model's folder, `one`; None if the bundle does not have this model."""
        return one if (folder / one).is_dir() else None

    algorithm, kl, teacher, critic = config.algorithm, config.algorithm.kl, config.algorithm.teacher, config.critic
    if teacher is not None:
        teacher = replace(teacher, path=name(TEACHER), url=None if teacher.url is None else LEFT_OUT)
    model = config.model
    return Config(
        run=RunConfig(name=config.run.name, seed=config.run.seed, steps=config.run.steps, log_samples=0),
        model=ModelConfig(path=MODEL, dtype=model.dtype, head_dtype=model.head_dtype, max_length=model.max_length),
        env=EnvConfig(path=""),
        rollout=config.rollout,
        train=replace(config.train, profile=""),
        lora=config.lora,
        algorithm=replace(algorithm, kl=kl and replace(kl, reference=name(REFERENCE)), teacher=teacher),
        critic=critic and replace(critic, path=name(CRITIC)),
        cluster=ClusterConfig(
            gpus_per_node=config.gpus_per_node,
            trainer_ranks=config.cluster.trainer_ranks,
            trainer_nodes=config.cluster.trainer_nodes,
        ),
        parallel=config.parallel,
    )


def _origin(config: Config, planned: ReplayPlan) -> str:
    """Return where the weights of `model/` can be found, as a noun phrase without a path of this machine.

    `planned` has the checkpoint that the bundle begins with; None: the run's first model.
    """
    path, source = config.model.path, config.model.fetch
    if planned.checkpoint is not None and config.lora is None:
        name = f"{config.run.name}/checkpoints/{planned.checkpoint.name}"
        return f"version {planned.first} of the run, which `flash export {name} FOLDER --dtype float32` writes"
    if is_hub_id(path):
        return f"{path} of the Hugging Face hub"
    fetched = "" if source is None else f", made from {Path(source).name}"
    return f"the model {Path(path).name}{fetched}, with which the run {config.run.name} began"


def _shrink(folder: Path) -> None:
    """Store float32 tensors of a model folder as bfloat16 or float16 if that changes no bit of their values.

    Models are read in float32. Weights that were stored in 16 bits would otherwise take twice their size.
    """
    import torch
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        tensors, changed = load_file(file), False
        for name, tensor in tensors.items():
            for dtype in (torch.bfloat16, torch.float16) if tensor.dtype == torch.float32 else ():
                small = tensor.to(dtype)
                if torch.equal(small.float().view(torch.int32), tensor.view(torch.int32)):
                    tensors[name], changed = small, True
                    break
        if changed:
            # The tensors that stay as they are may be mapped from `file`, so it must not be overwritten.
            aside = file.with_suffix(".tmp")
            save_file(tensors, aside, metadata={"format": "pt"})
            aside.replace(file)


def _forget_paths(folder: Path) -> None:
    """Remove paths of this machine from the JSON files in `folder` that describe a model and its tokenizer.

    Keys that name code are removed, too, because a reader of bundles refuses them (`flash.run.bundle`).
    """
    for file in folder.glob("*config.json"):
        described: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        kept = {
            key: value
            for key, value in described.items()
            if key not in NAMES_OF_PATHS
            and not key.strip("_").startswith(CODE_OF_MODELS)
            and not (isinstance(value, str) and len(value) > 1 and os.path.isabs(value))
        }
        file.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_tar(folder: Path, file: Path) -> list[Part]:
    """Write the members in `folder` as a tar archive to `file`, and return the parts with their sizes.

    The checksums of all members are appended as the last member. Files whose names no member may have are left out.
    Raises OSError.
    """
    files = [file for file in folder.rglob("*") if file.is_file()]
    # The head comes first, so that `tar` shows it at once.
    names = sorted((str(file.relative_to(folder)) for file in files), key=lambda name: (name != HEAD, name))
    parts: dict[str, int] = {}
    sums = ""
    with file.open("wb") as out:

        def add(name: str, size: int, source: BinaryIO) -> str:
            """Append a member of `size` bytes, the content of `source`, and return its SHA-256."""
            out.write(tar_header(name, size))
            digest = hashlib.sha256()
            while block := source.read(READ_SIZE):
                digest.update(block)
                out.write(block)
            out.write(bytes(-size % BLOCK))  # zeros up to a whole block
            top, slash, _ = name.partition("/")
            parts[top + slash] = parts.get(top + slash, 0) + size
            return digest.hexdigest()

        for name in names:
            # transformers may write other files for some tokenizers, which no replay reads.
            if MEMBER.fullmatch(name) and len(name) <= LONGEST_NAME:
                with (folder / name).open("rb") as source:
                    sums += f"{add(name, (folder / name).stat().st_size, source)}  {name}\n"
        add(SUMS, len(sums), io.BytesIO(sums.encode("ascii")))
        out.write(bytes(2 * BLOCK))  # two blocks of zeros end an archive
        out.flush()
        os.fsync(out.fileno())
    return [Part(name, size) for name, size in parts.items()]


@contextmanager
def _quiet() -> Generator[None]:
    """Hide progress bars of transformers, and the warning that torch.distributed is disabled, during the block."""
    from flash.foreign.transformers import hidden_progress_bars

    with hidden_progress_bars(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
