"""Bundles: they replay bit for bit from nothing but themselves, hold no secrets, and harm nobody who opens them."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import json
import os
import py_compile
import re
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from safetensors.torch import load, load_file, save_file
from transformers import AutoModelForCausalLM

from flash.cli.main import main
from flash.config.load import dump
from flash.errors import ConfigError, FlashError, RecordingError
from flash.observe.rundir.recording import append_frame, read_frames
from flash.observe.rundir.rundir import RunDirectory
from flash.run.bundle import BundleHead, open_bundle
from flash.run.bundling import make_bundle, own_sources
from flash.run.replay import plan_step
from flash.trainer.checkpoint_files import step_folder
from tests.run.bundle_cases import (
    add,
    batch_of,
    config_of,
    make_run,
    members_of,
    model_at,
    packed,
    train_on_two_ranks,
)
from tests.trainer.trainer_cases import run_ranks

pytestmark = pytest.mark.timeout(300)

SECRETS: dict[str, dict[str, Any]] = {
    "env": {"options": {"api_key": "SECRET-option"}, "folders": ["/home/SECRET-user/modules"]},
    "model": {"chat_template_kwargs": {"key": "SECRET-argument"}, "tool_parser": "SECRET-parser"},
    "engine": {"vllm": {"hf_token": "SECRET-engine"}},
    "alarms": {"command": "curl https://SECRET-address"},
    "track": {"to": ["SECRET_module:sink"], "project": "SECRET-project"},
    "cluster": {"hub": "SECRET-host:1"},
}
"""Tables of a run with a secret wherever a user might have one."""


class Made(NamedTuple):
    """Bundles of a run whose directory and model are deleted."""

    whole: Path
    """Step 3, which begins at the checkpoint of version 2."""
    light: Path
    """Bundle of step 3 without weights."""
    folder: Path
    """Folder in which the run was."""
    batch: bytes
    """Recorded batch of step 3 of the run."""
    output: str
    """Output of `flash bundle` for `whole`."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return bundles of a run of four steps, whose run directory and model are deleted."""
    folder, kept = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("kept")
    model = model_at(folder / "model")
    (model / ".env").write_text("TOKEN=SECRET-file")
    (model / "notes.txt").write_text("SECRET-notes")
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(described | {"_name_or_path": str(model)}))
    config = config_of(folder, model, **SECRETS)
    run = make_run(config, 4)
    whole, light = kept / "step.flash", kept / "light.flash"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASH_TOKEN", "SECRET-variable")
        told = command("bundle", run, "--step", 3, "-o", whole)
        command("bundle", run, "--step", 3, "-o", light, "--without-weights")
    batch = (run / "batches" / "step-000003.bin").read_bytes()
    shutil.rmtree(folder)
    return Made(whole, light, folder, batch, told)


def command(*words: object, code: int = 0) -> str:
    """Run a command in this process, and check its exit code. Returns its output, or its error message if `code` is not
    0."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main([str(word) for word in words]) == code, err.getvalue()
    return out.getvalue() if code == 0 else err.getvalue()


@pytest.mark.slow
def test_a_bundle_replays_bit_for_bit_without_the_run_its_model_and_its_environment(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, result = shutil.copy(made.whole, tmp_path / "mine.flash"), tmp_path / "result.json"
    told = command("replay", file, "--json", result)
    assert "[step 3 of the run run: training steps 2 to 3 again, from version 2]" in told
    assert "version 4: every weight equals the run's (checkpoint step-000004), bit for bit" in told
    assert "version 4: every weight equals those of the replay that made the bundle, bit for bit" in told
    (counted,) = re.findall(r"metrics: all (\d+) equal the run's, bit for bit", told)
    assert int(counted) > 20
    found = json.loads(result.read_text())
    assert [row["step"] for row in found["steps"]] == [2, 3]
    assert [one["different"] for one in found["comparisons"]] == [0, 0]
    assert [one["different"] for one in found["metrics"]] == [[], []]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.flash", "result.json"]


def test_making_a_bundle_names_earlier_steps_and_the_size_of_each_part(made: Made) -> None:
    assert (
        "[version 3 has no checkpoint: the bundle begins at version 2, with the batches of steps 2 to 3]" in made.output
    )
    assert "version 4: every weight equals the run's (checkpoint step-000004), bit for bit" in made.output
    sizes = {name: int(size.replace(",", "")) for size, name in re.findall(r"^ +([\d,]+)  (\S+)", made.output, re.M)}
    members = members_of(made.whole)
    assert sizes["batches/"] == sum(len(data) for name, data in members.items() if name.startswith("batches/"))
    assert sum(sizes.values()) == sum(map(len, members.values()))
    assert f"{made.whole}: {made.whole.stat().st_size:,} bytes" in made.output


def test_standard_tools_look_into_a_bundle(made: Made, tmp_path: Path) -> None:
    members = members_of(made.whole)
    with tarfile.open(made.whole, "r:") as archive:
        assert {(info.uid, info.gid, info.uname, info.gname, info.mtime) for info in archive} == {(0, 0, "", "", 0)}
        archive.extractall(tmp_path, filter="data")
    checked = subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path, check=False)
    assert checked.returncode == 0
    assert members["batches/step-000003.bin"] == made.batch
    head = msgspec.json.decode(members["bundle.json"], type=BundleHead)
    weights: Any = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert {record.name for record in head.start} == set(weights)
    state = load(members["state.safetensors"])
    moments = {name for name in state if name.endswith("/exp_avg")}
    assert moments == {f"optimizer/state/{name}/exp_avg" for name in weights}
    assert all(state[name].any() for name in moments)
    rows = [json.loads(line) for line in members["metrics.jsonl"].splitlines()]
    assert [(row["step"], row["hub_only"]) for row in rows] == [(2, 1.5), (3, 1.5)]


def test_a_bundle_holds_no_secrets_paths_or_hosts(made: Made) -> None:
    for file in (made.whole, made.light):
        data = file.read_bytes()
        assert b"SECRET" not in data
        for private in (str(made.folder), str(Path.home()) + "/", "a-host", socket.gethostname() + "."):
            assert private.encode() not in data, private


def test_settings_can_be_changed_and_the_first_other_tensor_is_named(made: Made) -> None:
    told = command("replay", made.whole, "train.learning_rate=2e-3")
    (first,) = re.findall(
        r"version 4: \d+ of \d+ tensors differ from the run's \(checkpoint step-000004\), the first is (\S+);", told
    )
    assert first == "model.embed_tokens.weight"
    assert "differ from the run's; the largest relative differences" in told
    assert "train.batch_size`: has no effect" in command("replay", made.whole, "train.batch_size=8", code=2)
    for words, why in (
        (["model.path=elsewhere"], "model.path: expected the bundle's model"),
        (["--to-step", 3], "a bundle is replayed as a whole"),
        (["--model", made.folder], "the bundle holds the weights itself; leave --model out"),
    ):
        assert why in command("replay", made.whole, *words, code=2)


@pytest.mark.slow
def test_a_replay_that_differs_on_the_same_build_is_a_finding(made: Made, tmp_path: Path) -> None:
    members = members_of(made.whole)
    first, second = members["metrics.jsonl"].splitlines()
    row = json.loads(second)
    members["metrics.jsonl"] = first + b"\n" + json.dumps(row | {"loss": row["loss"] + 1.0}).encode() + b"\n"
    other = packed(members, tmp_path / "other.flash")
    command("replay", other, code=1)
    command("replay", other, "train.learning_rate=2e-3")
    head = json.loads(members["bundle.json"])
    for name, change in (("build", {"build": head["build"] | {"torch": "0.1"}}), ("ranks", {"ranks": 2})):
        in_head(**change)(members)
        assert "differ from the run's" in command("replay", packed(members, tmp_path / f"{name}.flash"))
        in_head(**head)(members)
    head["replayed"][1]["loss"] += 1.0
    in_head(replayed=head["replayed"], ranks=2)(members)
    command("replay", packed(members, tmp_path / "maker.flash"), code=1)


@pytest.mark.slow
def test_a_bundle_without_weights_takes_them_from_a_folder_that_has_the_same(made: Made, tmp_path: Path) -> None:
    assert not [name for name in members_of(made.light) if name.startswith("model/") and "safetensors" in name]
    assert made.light.stat().st_size < made.whole.stat().st_size
    told = command("replay", made.light, code=2)
    assert "name the folder of the model with --model FOLDER" in told
    assert "`flash export run/checkpoints/step-000002 FOLDER --dtype float32` writes" in told
    with tarfile.open(made.whole, "r:") as archive:
        archive.extractall(tmp_path, filter="data")
    model = tmp_path / "model"
    assert "bit for bit" in command("replay", made.light, "--model", model)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    told = command("replay", made.light, "--model", model, code=2)
    assert re.search(r"1 of \d+ tensors differ, the first is model\.layers\.1\.mlp\.up_proj\.weight; expected", told)
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(described | {"rms_norm_eps": 0.5}))
    told = command("replay", made.light, "--model", model, code=2)
    assert "rms_norm_eps is 0.5 in its config.json, expected 1e-06" in told
    (model / "config.json").write_text(json.dumps(described | {"num_hidden_layers": "two"}))
    assert "its config.json cannot be read: " in command("replay", made.light, "--model", model, code=2)
    assert "it has no config.json" in command("replay", made.light, "--model", tmp_path, code=2)


OWN = """
from my_own.factor import FACTOR
from algorithms.base import Objective, ObjectiveOutput

class Scaled(Objective, frozen=True):
    corrects_staleness = True

    def __call__(self, tokens):
        return ObjectiveOutput(-FACTOR * tokens.advantage_T * tokens.logp_T, {})
"""
"""Module of a user with an objective, which imports another module of the user."""


@pytest.mark.slow
def test_code_of_a_bundle_runs_only_if_it_is_trusted(
    tmp_path: Path, imports: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, output = tmp_path / "code" / "my_own", tmp_path / "own.flash"
    package.mkdir(parents=True)
    for name, text in (("__init__", ""), ("scaled", OWN), ("factor", "FACTOR = 3.0\n")):
        (package / f"{name}.py").write_text(text)
    objective = {"algorithm": {"objective": "my_own.scaled:Scaled"}, "env": {"folders": [str(package.parent)]}}
    config = config_of(tmp_path, model_at(tmp_path / "model"), **objective)
    monkeypatch.syspath_prepend(package.parent)
    run = make_run(config, 2)
    own = ["my_own", "my_own.scaled", "my_own.factor"]
    for name in own:
        del sys.modules[name]
    told = command("bundle", run, "--step", 1, "-o", output)
    assert "[code/my_own/scaled.py is source code of yours" in told
    code = {name for name in members_of(output) if name.startswith("code/")}
    assert code == {"code/my_own/__init__.py", "code/my_own/factor.py", "code/my_own/scaled.py"}
    # Nothing is left to import but the bundle.
    shutil.rmtree(package.parent)
    for name in own:
        del sys.modules[name]
    told = command("replay", output, code=2)
    assert told.count("\n") == 1
    assert "would run code: its objective my_own.scaled:Scaled, from code/my_own/__init__.py, code/my_own/fac" in told
    assert f"read it with `tar -xOf {output} code`" in told
    assert "repeat the command with --trust" in told
    assert not set(own) & sys.modules.keys()
    told = command("replay", output, "algorithm.objective=cispo")
    assert "tensors differ from the run's" in told
    assert not set(own) & sys.modules.keys(), "another objective needs no code of the bundle"
    try:
        told = command("replay", output, "--trust")
    finally:
        for name in own:
            sys.modules.pop(name, None)
    assert "[running code of the bundle: my_own.scaled:Scaled, from code/my_own/__init__.py" in told
    assert "version 2: every weight equals the run's (checkpoint step-000002), bit for bit" in told


INCOMPLETE = {
    "a data file": ('(Path(__file__).parent / "table.json").read_text()', "table.json"),
    "a module that is imported late": ('importlib.import_module("late_own.late")', "late_own.late"),
}
"""Expressions of an objective that need something outside of a bundle, with the text that names it."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", INCOMPLETE)
def test_a_bundle_that_lacks_a_part_of_the_objective_does_not_appear(
    kind: str, tmp_path: Path, imports: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, output = tmp_path / "code" / "late_own", tmp_path / "own.flash"
    package.mkdir(parents=True)
    expression, missing = INCOMPLETE[kind]
    call = f"        {expression}\n        return ObjectiveOutput"
    own = "import importlib\nfrom pathlib import Path\n" + OWN.replace("my_own", "late_own")
    own = own.replace("        return ObjectiveOutput", call)
    factor = 'import os\nos.write(2, b"\\xff: no text\\n")\nFACTOR = 3.0\n'
    for name, text in (("__init__", ""), ("scaled", own), ("factor", factor), ("late", "")):
        (package / f"{name}.py").write_text(text)
    (package / "table.json").write_text("{}")
    objective = {"algorithm": {"objective": "late_own.scaled:Scaled"}, "env": {"folders": [str(package.parent)]}}
    config = config_of(tmp_path, model_at(tmp_path / "model"), **objective)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=os.pathsep)
    run = make_run(config, 2)
    for name in [name for name in sys.modules if name.partition(".")[0] == "late_own"]:
        del sys.modules[name]
    told = command("bundle", run, "--step", 1, "-o", output, *(["--without-weights"] if "late" in kind else []), code=2)
    assert told.count("\n") == 1
    assert "algorithm.objective: the bundle would not replay on another machine" in told
    assert missing in told
    assert "no data files" in told
    assert not [path for path in tmp_path.iterdir() if "flash" in path.name]


def test_a_linked_module_is_put_into_a_bundle_and_a_compiled_one_is_refused(
    tmp_path: Path, imports: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, shared = tmp_path / "own", tmp_path / "shared"
    own.mkdir()
    shared.mkdir()
    (shared / "linked_one.py").write_text("")
    (own / "linked_one.py").symlink_to(shared / "linked_one.py")
    py_compile.compile(str(shared / "linked_one.py"), str(own / "compiled_one.pyc"))
    monkeypatch.syspath_prepend(own)
    for name in ("linked_one", "compiled_one"):
        importlib.import_module(name)
    assert own_sources("linked_one:X", []) == {"code/linked_one.py": own / "linked_one.py"}
    for objective, others in (("compiled_one:X", []), ("linked_one:X", ["compiled_one"])):
        with pytest.raises(ConfigError, match=r"module compiled_one .* expected Python source"):
            own_sources(objective, others)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "the model in 16 bits": (0, {}),
    "adapters": (3, {"lora": {"rank": 2}}),
    "adapters at version 0": (0, {"lora": {"rank": 2}}),
    "a reference and an average": (
        3,
        {"algorithm": {"kl": {"coefficient": 0.1}, "objective": "decoupled_ppo", "options": {"proximal": "ewma"}}},
    ),
    "a critic": (3, {"algorithm": {"objective": "ppo"}, "critic": {"learning_rate": 1e-3}}),
}
"""Settings of a trainer with further state, each with the step that is bundled."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_everything_that_a_trainer_keeps_is_in_a_bundle(name: str, tmp_path: Path) -> None:
    step, tables = CASES[name]
    model = model_at(tmp_path / "model")
    stored = {key: tensor.bfloat16() for key, tensor in load_file(model / "model.safetensors").items()}
    save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
    run, output = make_run(config_of(tmp_path, model, **tables), 4), tmp_path / "step.flash"
    command("bundle", run, "--step", step, "-o", output)
    members = members_of(output)
    if step == 0 or "lora" in tables:
        # Stored in 16 bits as the run's model is, although models are read in float32.
        held = load(members["model/model.safetensors"])
        assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
        assert all(torch.equal(held[key], stored[key]) for key in held)
    assert ("state.safetensors" in members) == (step > 0)
    assert ("reference/model.safetensors" in members) == ("average" in name)
    shutil.rmtree(run)
    shutil.rmtree(model)
    told = command("replay", output)
    assert told.count("every weight equals") == (2 if step == 3 else 1)
    assert "tensors differ" not in told
    if step == 0:
        assert "[step 0 of the run run: training step 0 again, from version 0]" in told
        assert "[the run has kept no weights of version 1: only metrics are compared with it]" in told
    assert re.search(r"metrics: all \d+ equal the run's, bit for bit", told)
    if name == "adapters at version 0":
        assert "tensors differ from" in command("replay", output, "lora.rank=3"), (
            "new adapters follow from the settings"
        )


@pytest.mark.integration
def test_a_run_of_two_ranks_differs_from_its_replay_by_rounding_and_by_how_much_is_shown(tmp_path: Path) -> None:
    config = config_of(tmp_path, model_at(tmp_path / "model"), cluster={"trainer_ranks": 2})
    RunDirectory.open(config.run_dir, dump(config))
    run_ranks(train_on_two_ranks, 2, config, 2)
    output, result = tmp_path / "two.flash", tmp_path / "result.json"
    command("bundle", config.run_dir, "--step", 1, "-o", output)
    told = command("replay", output, "--json", result)
    assert "[the run trained on 2 ranks, a replay on one" in told
    assert re.search(r"\d+ of \d+ tensors differ from the run's \(checkpoint step-000002\), the first is model\.", told)
    assert "every weight equals those of the replay that made the bundle, bit for bit" in told
    of_run, of_maker = json.loads(result.read_text())["comparisons"]
    assert 0 < of_run["apart"] < 1e-3
    assert of_maker["different"] == 0
    metrics = json.loads(result.read_text())["metrics"][0]["different"]
    # The share of tokens that sequences of a rank have in common depends on the division among ranks.
    rounded = [one for one in metrics if one["metric"] != "shared_token_share"]
    assert rounded
    assert all(one["here"] == pytest.approx(one["there"], rel=1e-3, abs=1e-5) for one in rounded)


@pytest.mark.slow
def test_a_failed_bundle_leaves_no_file(tmp_path: Path) -> None:
    config = config_of(tmp_path, model_at(tmp_path / "model"))
    run = make_run(config, 2)
    (run / "batches" / "step-000001.bin").write_bytes(b"no batch")
    output = tmp_path / "out" / "step.flash"
    output.parent.mkdir()
    assert "step-000001.bin is damaged" in command("bundle", run, "--step", 1, "-o", output, code=2)
    assert list(output.parent.iterdir()) == []


def test_a_step_that_cannot_be_bundled_is_refused_with_those_that_can(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path / "run", "")
    for step in (0, 1, 5):
        directory.write_batch(batch_of(step), keep_all=True)
    assert (plan_step(directory.path, 1).first, plan_step(directory.path, 1).last) == (0, 2)
    for step in (3, 5, 9, -1):
        with pytest.raises(ConfigError, match=f"--step: expected one of steps 0 to 1, got {step}"):
            plan_step(directory.path, step)


def test_a_model_with_code_of_its_own_is_refused_before_any_work(tmp_path: Path) -> None:
    config = config_of(tmp_path, tmp_path, model={"trust_remote_code": True})
    directory = RunDirectory.open(tmp_path / "run", "")
    directory.write_batch(batch_of(0), keep_all=True)
    with pytest.raises(ConfigError, match=r"model\.trust_remote_code: .* Share the run's folder instead"):
        make_bundle(
            directory,
            config,
            plan_step(directory.path, 0),
            tmp_path / "step.flash",
            with_weights=True,
            code={},
            on_step=lambda row: None,
            on_comparison=lambda found: None,
        )


# -- damaged and hostile files -----------------------------------------------------------------------------------------


def refusal(file: Path) -> str:
    """Return the error message for a file that is no whole bundle, and check its type and beginning."""
    with pytest.raises(FlashError) as error, open_bundle(file):
        pass
    assert type(error.value) is RecordingError
    assert str(error.value).startswith(f"{file} is damaged, or is no bundle of this version of Flash: ")
    return str(error.value)


@pytest.mark.slow
def test_no_byte_of_a_bundle_can_change_unseen(made: Made, tmp_path: Path) -> None:
    whole, file = made.light.read_bytes(), tmp_path / "step.flash"
    places = [*range(0, 1024, 5), *range(1024, len(whole), 4999), *range(len(whole) - 1500, len(whole), 7)]
    for place in places:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        refusal(file)
    for end in [*range(0, 1024, 100), *range(1024, len(whole), 19_999), *range(len(whole) - 1500, len(whole), 100)]:
        file.write_bytes(whole[:end])
        refusal(file)
    file.write_bytes(whole + b"\0")
    refusal(file)
    file.write_bytes(gzip.compress(whole))
    refusal(file)


def test_an_error_is_one_line_that_says_what_to_do(made: Made, tmp_path: Path) -> None:
    file = tmp_path / "step.flash"
    file.write_bytes(made.whole.read_bytes()[:5000])
    told = command("replay", file, code=2)
    assert told.count("\n") == 1
    assert "is cut off" in told
    assert "expected a file that `flash bundle` has written: get another copy" in told


MEMBERS: dict[str, Callable[[tarfile.TarFile], None]] = {
    "a path to the parent": lambda archive: add(archive, "model/../../escaped.json", b"{}"),
    "an absolute name": lambda archive: add(archive, "/tmp/escaped.json", b"{}"),
    "a symlink": lambda archive: add(archive, "model/link.json", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a hard link": lambda archive: add(archive, "model/link.json", type=tarfile.LNKTYPE, linkname="bundle.json"),
    "a folder": lambda archive: add(archive, "model", type=tarfile.DIRTYPE),
    "a device": lambda archive: add(archive, "model/zero.json", type=tarfile.CHRTYPE, devmajor=1, devminor=5),
    "a pipe": lambda archive: add(archive, "model/pipe.json", type=tarfile.FIFOTYPE),
    "a long name": lambda archive: add(archive, f"model/{'a' * 120}.json", b"{}"),
    "a sparse file": lambda archive: add(archive, "model/sparse.json", type=tarfile.GNUTYPE_SPARSE),
    "pickled weights": lambda archive: add(archive, "model/pytorch_model.bin", b"\x80"),
    "code of a model": lambda archive: add(archive, "model/modeling.py", b"pass"),
    "a module for the start of Python": lambda archive: add(archive, "sitecustomize.py", b"pass"),
    "a file twice": lambda archive: add(archive, "config.toml", b""),
}
"""Members that no bundle has, each as a function that adds it to an archive."""


@pytest.mark.parametrize("kind", MEMBERS)
def test_members_that_no_bundle_has_are_refused(kind: str, made: Made, tmp_path: Path) -> None:
    file = packed(members_of(made.light), tmp_path / "step.flash", MEMBERS[kind])
    assert re.search("which no bundle has|twice", refusal(file))
    assert [path.name for path in tmp_path.iterdir()] == ["step.flash"]
    assert not Path("/tmp/escaped.json").exists()


@pytest.mark.parametrize("size", [10**6, 2**33, 2**62, -1])
def test_a_size_beyond_the_file_is_refused_before_it_is_used(size: int, made: Made, tmp_path: Path) -> None:
    info = tarfile.TarInfo("config.toml")
    info.size = abs(size)
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    if size < 0:  # tar stores large and negative numbers in base 256
        header[124:136] = b"\xff" * 12
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
    file = tmp_path / "step.flash"
    file.write_bytes(bytes(header) + bytes(2048))
    assert "bytes are declared" in refusal(file)


def test_a_bundle_of_the_same_members_is_accepted(made: Made, tmp_path: Path) -> None:
    """Show that the refusals of this file have no other cause than the change that each test makes."""
    with open_bundle(packed(members_of(made.whole), tmp_path / "step.flash")) as bundle:
        assert bundle.head.step == 3


def in_config(old: str, new: str) -> Callable[[dict[str, bytes]], None]:
    """Return a function that replaces a text in the configuration of a bundle."""

    def change(members: dict[str, bytes]) -> None:
        text = members["config.toml"].decode()
        assert old in text
        members["config.toml"] = text.replace(old, new, 1).encode()

    return change


def in_head(**fields: Any) -> Callable[[dict[str, bytes]], None]:
    """Return a function that changes fields in the head of a bundle."""

    def change(members: dict[str, bytes]) -> None:
        members["bundle.json"] = json.dumps(json.loads(members["bundle.json"]) | fields).encode()

    return change


def in_manifest(**fields: Any) -> Callable[[dict[str, bytes]], None]:
    """Return a function that changes fields of the trainer's numbers in the head of a bundle."""

    def change(members: dict[str, bytes]) -> None:
        manifest = json.loads(members["bundle.json"])["manifest"]
        in_head(manifest=manifest | fields)(members)

    return change


def in_batch(change: Callable[[list[Any]], None]) -> Callable[[dict[str, bytes]], None]:
    """Return a function that changes the decoded records of the batch of step 3: the head of the batch, and its
    samples."""

    def apply(members: dict[str, bytes]) -> None:
        records = [msgspec.msgpack.decode(one) for one in read_frames(io.BytesIO(members["batches/step-000003.bin"]))]
        change(records)
        frame = bytearray()
        for one in records:
            append_frame(frame, one)
        members["batches/step-000003.bin"] = bytes(frame)

    return apply


def huge_record(members: dict[str, bytes]) -> None:
    """Append a header to the batch of step 3 that announces a record of 4 GB."""
    members["batches/step-000003.bin"] += struct.pack("<II", 2**32 - 1, 0)


def without(name: str) -> Callable[[dict[str, bytes]], None]:
    """Return a function that removes a member."""
    return lambda members: members.__delitem__(name)


CHANGES: dict[str, tuple[Callable[[dict[str, bytes]], None], str]] = {
    "a folder to import from": (in_config("folders = []", 'folders = ["/tmp"]'), "code or models from outside"),
    "code of a model": (in_config("trust_remote_code = false", "trust_remote_code = true"), "code or models from"),
    "a model of the hub": (in_config('path = "model"', 'path = "owner/name"'), "names the model owner/name"),
    "a folder of this machine": (in_config('path = "model"', 'path = "/etc"'), "names the model /etc"),
    "attention from the hub": (
        lambda members: members.update(
            {"model/config.json": b'{"text_config": {"_attn_implementation": "owner/name"}}'}
        ),
        "asks for code, with _attn_implementation",
    ),
    "an unknown setting": (in_config("[run]", "[run]\nunknown = 1"), "`run.unknown`"),
    "a config that is no text": (lambda members: members.update({"config.toml": b"\xff"}), "not UTF-8"),
    "no head": (without("bundle.json"), "it has no bundle.json"),
    "a head of another format": (in_head(format=2), "Invalid enum value 2"),
    "deep nesting": (lambda members: members.update({"bundle.json": b"[" * 10**6}), "bundle of this version"),
    "more steps than batches": (in_head(step=10**15), "expected 999999999999999 of each"),
    "negative steps": (in_head(first=-5), "its steps go from -5 to 3"),
    "no ranks": (in_head(ranks=-1), "-1 ranks"),
    "more ranks than can be": (in_head(ranks=10**19), "10000000000000000000 ranks"),
    "negative skipped steps": (in_manifest(skipped_steps=-5), "-5 skipped steps"),
    "more skipped steps than can be": (in_manifest(skipped_steps=10**19), "10000000000000000000 skipped steps"),
    "a million threads": (in_head(threads=10**6), "1000000 threads"),
    "a damaged row of metrics": (lambda members: members.update({"metrics.jsonl": b'{"step": '}), "truncated"),
    "no batch": (without("batches/step-000002.bin"), "it has 1 batches"),
    "no state": (without("state.safetensors"), "state.safetensors does not fit"),
    "no weights": (without("model/model.safetensors"), "the weights in model/ do not fit"),
    "no description of the model": (without("model/config.json"), "names the model model"),
    "a huge record": (huge_record, "a record of step-000003.bin is cut off"),
    "a sample without tokens": (
        in_batch(lambda records: records[1].update(token_ids=b"", action_spans=[])), "has a sample with"
    ),
    "rounds that do not sum up": (in_batch(lambda records: records[0].update(rounds=[1])), "samples in rounds of [1]"),
}  # fmt: skip
"""Changes of members that no longer fit each other, each with a part of the error message."""


@pytest.mark.parametrize("kind", CHANGES)
def test_contents_that_do_not_fit_are_refused_with_right_checksums(kind: str, made: Made, tmp_path: Path) -> None:
    members = members_of(made.whole)
    change, why = CHANGES[kind]
    change(members)
    assert why in refusal(packed(members, tmp_path / "step.flash"))


@pytest.mark.slow
def test_tokens_and_states_that_the_model_does_not_have_are_refused(made: Made, tmp_path: Path) -> None:
    def beyond(records: list[Any]) -> None:
        """Replace the first token of the first sample by one that the model does not have."""
        ids = records[1]["token_ids"]
        records[1]["token_ids"] = struct.pack("<i", 4000) + ids[4:]

    members = members_of(made.whole)
    in_batch(beyond)(members)
    told = command("replay", packed(members, tmp_path / "token.flash"), code=2)
    assert "the batch of step 3 has the token 4000, and the model has 40 tokens" in told
    members = members_of(made.whole)
    state = load(members["state.safetensors"])
    name = next(name for name in state if name.endswith("exp_avg"))
    save_file({**state, name: torch.zeros(3)}, tmp_path / "state")
    members["state.safetensors"] = (tmp_path / "state").read_bytes()
    told = command("replay", packed(members, tmp_path / "state.flash"), code=2)
    assert f"does not fit the configuration: {name} is torch.float32 [3]" in told
    members["state.safetensors"] = b"\xff" * 100
    assert "is damaged" in command("replay", packed(members, tmp_path / "state.flash"), code=2)


DESCRIPTIONS = [
    {"vocab_size": 5},
    {"num_attention_heads": 0},
    {"tie_word_embeddings": "a"},
    {"num_hidden_layers": 10**6},
    {"hidden_size": 10**9},
]
"""Keys of a crafted config.json with which no model can be made."""


@pytest.mark.parametrize("described", DESCRIPTIONS, ids=lambda one: next(iter(one)))
def test_a_description_of_which_no_model_can_be_made_is_refused(
    described: dict[str, Any], made: Made, tmp_path: Path
) -> None:
    members = members_of(made.whole)
    members["model/config.json"] = json.dumps(json.loads(members["model/config.json"]) | described).encode()
    told = command("replay", packed(members, tmp_path / "step.flash"), code=2)
    assert "cannot load a causal language model" in told


def test_options_of_a_bundle_are_refused_for_a_run_directory(made: Made, tmp_path: Path) -> None:
    step_folder(tmp_path, 0).mkdir(parents=True)
    assert "expected a bundle with them" in command("replay", tmp_path, "--trust", code=2)
    assert "there is no run" in command("replay", tmp_path / "gone.flash", code=2)
