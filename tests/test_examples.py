"""Every example resolves, on any machine."""

import importlib.util
import json
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from flash.cli.main import parse
from flash.config.check import check
from flash.config.load import dump, load
from flash.config.schema import schema
from flash.config.waits import grace_s

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.rglob("*.toml"))
MANIFESTS = sorted(FOLDER.rglob("*.yaml"))
COMPILED = {"reasoning_gym": "pycosat", "textworld": "jericho"}
"""What an example's environment needs, and a C compiler makes when `make env` finds one."""
Overrides = Callable[[Path], list[str]]


@pytest.fixture
def overrides(tmp_path: Path, imports: None, monkeypatch: pytest.MonkeyPatch) -> Overrides:
    """Return the overrides of an example: its data and its run directory, where it names them, are in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    rows = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(20)]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stand_ins = {
        "envs.dataset": f"env.options.path={data}",
        # The absolute folder of a shared volume, which only root could make here.
        "output_dir =": f"run.output_dir={tmp_path / 'outputs'}",
    }
    return lambda example: [override for word, override in stand_ins.items() if word in example.read_text()]


def test_there_is_an_example_for_each_reference_setting() -> None:
    names = {example.stem for example in EXAMPLES}
    assert names == {
        "quickstart",
        "smollm2",
        "tiny",
        "one_gpu",
        "one_node_8gpu",
        "slurm_multinode",
        "simulate",
        "multi_turn",
        "domains",
        "code",
        "ppo_critic",
        "rhythm",
        "agent_openai",
        "asyppo",
        "swe",
        "code_tools",
        "reasoning_gym",
        "textworld",
        "frozen_lake",
        "agent_frozen_lake",
        "run",
    }


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_resolves_and_survives_being_written_down(
    example: Path, overrides: Overrides, tmp_path: Path
) -> None:
    if (package := COMPILED.get(example.stem)) and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} needs a C compiler when the environment is made")
    config = load([example], overrides(example))
    (tmp_path / "resolved.toml").write_text(dump(config))
    assert load([tmp_path / "resolved.toml"]) == config
    assert check(config) == []
    # An editor must find no mistake in what a run records.
    assert list(validator().iter_errors(tomllib.loads(dump(config)))) == []


@cache
def validator() -> Any:
    """Return the validator of the configuration. Making its schema takes longer than a test."""
    return jsonschema.Draft7Validator(schema())


def test_every_example_says_what_it_wants_and_whether_it_was_run() -> None:
    for example in EXAMPLES:
        head = example.read_text().partition("[run]")[0]
        assert "# Wants: " in head, example
        assert "# Run with: " in head or "Not run: " in head, example


@pytest.mark.parametrize(
    ("name", "backend", "trainers", "engines"),
    [
        ("quickstart", "tcp", [1], [1]),
        ("one_gpu", "ipc", [1], [1]),
        ("one_node_8gpu", "nccl", [4], [4]),
        ("slurm_multinode", "nccl", [8, 0, 0, 0], [0, 8, 8, 8]),
        ("run", "tcp", [4], [4]),
    ],
)
def test_an_example_places_its_processes_as_it_says(
    name: str, backend: str, trainers: list[int], engines: list[int], overrides: Overrides
) -> None:
    example = next(example for example in EXAMPLES if example.stem == name)
    config = load([example], overrides(example))
    nodes = range(config.cluster.nodes)
    assert config.weights_backend == backend
    assert [config.cluster.trainer_ranks_on(node) for node in nodes] == trainers
    assert [config.engines_on(node) for node in nodes] == engines


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest.stem)
def test_kubernetes_knows_every_word_of_a_manifest(manifest: Path) -> None:
    resources = list(yaml.safe_load_all(manifest.read_text()))
    assert resources
    for resource in resources:
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def pods() -> dict[str, Any]:
    """The pods' containers and how long they have to end, by the name of what makes them."""
    found: dict[str, Any] = {}
    for manifest in MANIFESTS:
        for resource in yaml.safe_load_all(manifest.read_text()):
            if "template" in resource["spec"]:
                pod = resource["spec"]["template"]["spec"]
                found[resource["metadata"]["name"]] = (
                    pod["containers"][0]["args"],
                    pod["terminationGracePeriodSeconds"],
                )
    return found


def test_the_pods_run_commands_that_exist_and_may_end_in_order(overrides: Overrides) -> None:
    example = FOLDER / "kubernetes" / "run.toml"
    config = load([example], overrides(example))
    (train, train_s), (join, join_s) = pods()["flash-trainer"], pods()["flash-rollout"]
    assert train_s == join_s >= grace_s(config)
    assert parse(train[1:3] + train[4:]).resume
    hub = parse(join[1:]).hub
    assert hub == f"flash-trainer:{config.cluster.hub_port}"
    cluster = load([example], [*overrides(example), train[3].replace("$(POD_IP)", "10.0.0.1")]).cluster
    assert (cluster.hub_host, cluster.hub_port) == ("10.0.0.1", config.cluster.hub_port)


def test_the_workflow_that_checks_an_environment_has_steps_with_valid_commands() -> None:
    workflow = yaml.safe_load((FOLDER / "check-env.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert all(("uses" in step) != ("run" in step) for step in job["steps"])
    commands = [line for step in job["steps"] for line in step.get("run", "").splitlines() if line.startswith("flash ")]
    (arguments,) = (parse(command.split()[1:]) for command in commands)
    assert (arguments.command, arguments.no_training) == ("check-env", True)
    assert job["timeout-minutes"] > arguments.minutes
    (clone,) = (line for step in job["steps"] for line in step.get("run", "").splitlines() if "git clone" in line)
    assert clone.endswith('"$RUNNER_TEMP/flash"'), "in the working directory it would hide the package"
