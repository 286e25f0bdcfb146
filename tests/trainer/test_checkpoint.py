"""Checkpoints and exports: saving, loading, damage, failed writes, and a writer that is killed.

A checkpoint holds the policy, its optimizer, and the *extras*: critics, an average of the weights, a reference.
"""

from __future__ import annotations

import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from flash.config.tree import ModelConfig
from flash.errors import CheckpointError, PeerLostError
from flash.trainer import checkpoint, checkpoint_files
from flash.trainer.mesh import trainer_mesh
from flash.trainer.model.model import shard_model
from tests.full_disk import small_disk
from tests.trainer.packed_cases import tiny
from tests.trainer.trainer_cases import Rank, Trainer, kept, make_config, random_shard, state_of, weights_of

# A tokenizer that exports need; its two tokens mean nothing.
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))
HUB = b"the hub's state"
"""State of the hub in the checkpoints of these tests."""


EXTRAS: dict[str, dict[str, Any]] = {
    "critic": {"algorithm": {"objective": "ppo"}, "critic": {"learning_rate": 1e-3}},
    "ewma": {"algorithm": {"objective": "decoupled_ppo", "options": {"proximal": "ewma"}}},
    "reference": {"algorithm": {"kl": {"coefficient": 0.1, "refresh": 1}}},
}
"""Tables of runs that keep more state than the policy's."""
CRITICS: dict[str, Any] = {"algorithm": {"objective": "asyppo"}, "critic": {"learning_rate": 1e-3}}
"""Tables of a run with two critics."""
KEPT = EXTRAS | {"critics": CRITICS}
"""Tables of all runs that keep more state than the policy's."""


def trained(model: Path, steps: int, **tables: dict[str, Any]) -> Trainer:
    """Return a new trainer after this many steps. `tables` are tables of its configuration."""
    trainer = Trainer(make_config(model, **tables))
    train(trainer, steps)
    return trainer


def train(trainer: Trainer, steps: int) -> None:
    """Take this many steps, each with the batch of its version, so that equal trainers stay equal."""
    for _ in range(steps):
        trainer.train_step(msgspec.structs.replace(fresh_shard(trainer.version), step=trainer.version))


def fresh_shard(version: int):
    """Return a batch whose tokens all come from this version."""
    shard = random_shard(version)
    samples = [
        msgspec.structs.replace(
            one,
            trajectory=msgspec.structs.replace(
                one.trajectory,
                versions=[msgspec.structs.replace(run, version=version) for run in one.trajectory.versions],
            ),
        )
        for one in shard.samples
    ]
    return msgspec.structs.replace(shard, samples=samples)


def same_weights(one: Trainer, other: Trainer) -> bool:
    """Return True if the policies of two trainers have equal weights, bit for bit."""
    theirs = weights_of(other)
    return all(torch.equal(value, theirs[name]) for name, value in weights_of(one).items())


def extras_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return all state besides the policy's, by name, as full copies."""
    found: dict[str, Any] = dict(trainer.average or {})
    if trainer.refreshes and trainer.reference is not None:
        found |= {f"reference {name}": value.detach() for name, value in trainer.reference.named_parameters()}
    for index, critic in enumerate(trainer.critics):
        for name, parameter in critic.model.named_parameters():
            found[f"critic {index} {name}"] = parameter.detach()
            for moment, value in critic.optimizer.state[parameter].items():
                found[f"critic {index} {name} {moment}"] = value
    full = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
    return {name: value.clone() for name, value in full.items()}


def names(run_dir: Path) -> list[str]:
    """Return the names of everything in a run's folder of checkpoints, sorted."""
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "steps", "offload"),
    [(True, 0, []), (False, 2, []), (True, 2, ["moments"])],
    ids=["tied", "untied", "aside"],
)
def test_a_loaded_checkpoint_is_bit_equal_and_continues_identically(
    tied_model: Path, untied_model: Path, tmp_path: Path, tied: bool, steps: int, offload: list[str]
) -> None:
    model = tied_model if tied else untied_model
    learning: dict[str, Any] = {"train": {"offload": offload}}
    original = trained(model, steps, **learning)
    path = checkpoint.save(tmp_path, original, kept(HUB), keep=2)
    random_state = torch.get_rng_state()
    torch.manual_seed(99)
    # The trainer has trained on something else. The load must replace all of that.
    restored = trained(model, 1, **learning)
    checkpoint.load(path, restored)
    assert state_of(path) == HUB
    assert torch.equal(torch.get_rng_state(), random_state)
    assert restored.version == steps
    assert same_weights(original, restored)
    for ours, theirs in zip(original.model.parameters(), restored.model.parameters(), strict=True):
        mine, yours = original.optimizer.state[ours], restored.optimizer.state[theirs]
        assert int(mine["step"]) == int(yours["step"]) == steps
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(mine[name].full_tensor(), yours[name].full_tensor())
    train(original, 2)
    train(restored, 2)
    assert same_weights(original, restored)


@pytest.mark.slow
def test_the_momentum_of_muon_is_saved_and_loaded(tied_model: Path, tmp_path: Path) -> None:
    muon = {"optimizer": "muon"}
    original, restored = trained(tied_model, 2, train=muon), trained(tied_model, 1, train=muon)
    checkpoint.load(checkpoint.save(tmp_path, original, kept(HUB), keep=1), restored)
    train(original, 2)
    train(restored, 2)
    assert same_weights(original, restored)


@pytest.mark.slow
@pytest.mark.parametrize("extra", KEPT)
def test_extras_are_loaded_bit_equal_and_continue_identically(tied_model: Path, tmp_path: Path, extra: str) -> None:
    original = trained(tied_model, 2, **KEPT[extra])
    path = checkpoint.save(tmp_path, original, kept(HUB), keep=2)
    assert checkpoint_files.read_manifest(path).extras == (("critic", "critic") if extra == "critics" else (extra,))
    restored = trained(tied_model, 1, **KEPT[extra])
    before, saved = extras_of(restored), extras_of(original)
    assert any(not torch.equal(value, before[name]) for name, value in saved.items())
    checkpoint.load(path, restored)
    assert state_of(path) == HUB
    for steps in (0, 2):
        train(original, steps)
        train(restored, steps)
        theirs = extras_of(restored)
        assert all(torch.equal(value, theirs[name]) for name, value in extras_of(original).items())
        assert same_weights(original, restored)
    assert any(not torch.equal(value, saved[name]) for name, value in theirs.items())


@pytest.mark.slow
def test_a_resumed_run_uses_the_optimizer_options_of_its_own_configuration(tied_model: Path, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, trained(tied_model, 1, **CRITICS), kept(HUB), keep=1)
    options = {"weight_decay": 0.5, "betas": [0.8, 0.9]}
    resumed = trained(tied_model, 1, train=options, **CRITICS)
    checkpoint.load(path, resumed)
    for one in (resumed, *resumed.critics):
        (group,) = one.optimizer.param_groups
        assert [group[name] for name in options] == [0.5, (0.8, 0.9)]


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_run_and_its_checkpoint_must_have_the_same_extras(tied_model: Path, tmp_path: Path, extra: str) -> None:
    plain, more = trained(tied_model, 1), trained(tied_model, 1, **EXTRAS[extra])
    weights, extras = weights_of(more), extras_of(more)
    words = {"critic": "a critic", "ewma": "an average of the policy's weights", "reference": "a reference"}[extra]
    without = checkpoint.save(tmp_path / "plain", plain, kept(HUB), keep=1)
    with pytest.raises(CheckpointError, match=f"step-000001 was written without {words}.*start a new run"):
        checkpoint.load(without, more)
    holding = checkpoint.save(tmp_path / "more", more, kept(HUB), keep=1)
    with pytest.raises(CheckpointError, match=f"step-000001 holds {words}.*this run lacks"):
        checkpoint.load(holding, plain)
    assert all(torch.equal(value, weights[name]) for name, value in weights_of(more).items())
    assert all(torch.equal(value, extras[name]) for name, value in extras_of(more).items())


@pytest.mark.slow
def test_a_run_must_have_as_many_critics_as_its_checkpoint(tied_model: Path, tmp_path: Path) -> None:
    two, three = (
        trained(tied_model, 1, **CRITICS | {"algorithm": {"objective": objective}})
        for objective in ("asyppo", "tests.trainer.test_asyppo:ThreeCritics")
    )
    before = extras_of(three)
    path = checkpoint.save(tmp_path, two, kept(HUB), keep=1)
    with pytest.raises(CheckpointError, match=r"holds 2 critics, and this run has 3: continue with the objective"):
        checkpoint.load(path, three)
    assert all(torch.equal(value, before[name]) for name, value in extras_of(three).items())


@pytest.mark.slow
@pytest.mark.parametrize("tables", [{}, CRITICS], ids=["policy", "critics"])
def test_saving_before_the_first_step_does_not_change_the_run(
    tied_model: Path, tmp_path: Path, tables: dict[str, Any]
) -> None:
    saved, untouched = trained(tied_model, 0, **tables), trained(tied_model, 0, **tables)
    checkpoint.save(tmp_path, saved, kept(HUB), keep=1)
    train(saved, 2)
    train(untouched, 2)
    assert same_weights(saved, untouched)
    theirs = extras_of(untouched)
    assert all(torch.equal(value, theirs[name]) for name, value in extras_of(saved).items())


def test_the_newest_complete_checkpoint_is_found_and_older_ones_are_pruned(tied_model: Path, tmp_path: Path) -> None:
    assert checkpoint_files.newest_complete(tmp_path) is None
    trainer = trained(tied_model, 0)
    path = tmp_path
    for _ in range(3):
        train(trainer, 1)
        path = checkpoint.save(tmp_path, trainer, kept(HUB), keep=2)
        assert checkpoint_files.newest_complete(tmp_path) == path
    assert names(tmp_path) == ["step-000002", "step-000003"]
    checkpoint.save(tmp_path, trainer, kept(b"again"), keep=2)
    assert names(tmp_path) == ["step-000002", "step-000003"]
    assert state_of(path) == b"again"


def test_other_folders_beside_checkpoints_are_neither_chosen_nor_deleted(tmp_path: Path) -> None:
    for name in ("step-000010", "step-000010-best", "step-999999", "step-1000000", "step-1000000.replaced", "step-x"):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        manifest = checkpoint_files.Manifest(version=0, skipped_steps=0, files=[])
        (folder / checkpoint_files.MANIFEST).write_bytes(msgspec.json.encode(manifest))
    assert checkpoint_files.newest_complete(tmp_path) == tmp_path / "checkpoints" / "step-1000000"
    checkpoint_files.prune(tmp_path, keep=1)
    assert names(tmp_path) == ["step-000010-best", "step-1000000", "step-x"]


@pytest.fixture(scope="module")
def two_checkpoints(tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    """Return the folder of a run with the checkpoints of steps 1 and 2, and its trainer. Tests change copies of it."""
    folder, trainer = tmp_path_factory.mktemp("two"), trained(tied_model, 1)
    checkpoint.save(folder, trainer, kept(HUB), keep=3)
    train(trainer, 1)
    checkpoint.save(folder, trainer, kept(HUB), keep=3)
    return folder, trainer


@pytest.mark.parametrize("damage", ["truncated", "missing", "unfinished"])
def test_a_damaged_or_unfinished_checkpoint_is_passed_over(
    two_checkpoints: tuple[Path, Trainer], tmp_path: Path, damage: str
) -> None:
    folder = Path(shutil.copytree(two_checkpoints[0], tmp_path / "run"))
    good, bad = (folder / "checkpoints" / name for name in names(folder))
    assert checkpoint_files.newest_complete(folder) == bad
    shard = next((bad / checkpoint.STATE).glob("__0_*"))
    if damage == "truncated":
        os.truncate(shard, shard.stat().st_size - 1)
    elif damage == "missing":
        shard.unlink()
    else:
        (bad / checkpoint_files.MANIFEST).unlink()
    (folder / "checkpoints" / ".tmp-step-000009").mkdir()
    assert checkpoint_files.newest_complete(folder) == good


def flip(file: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", ["weights", "hub", "manifest", "truncated"])
def test_a_run_goes_on_from_the_newest_whole_checkpoint_and_says_which_file_of_a_newer_one_is_damaged(
    two_checkpoints: tuple[Path, Trainer], tied_model: Path, tmp_path: Path, damage: str
) -> None:
    folder = Path(shutil.copytree(two_checkpoints[0], tmp_path / "run"))
    good, bad = (folder / "checkpoints" / name for name in names(folder))
    assert checkpoint_files.choose_checkpoint(folder) == (bad, [])
    shard = next((bad / checkpoint.STATE).glob("__0_*"))
    if damage == "truncated":
        os.truncate(shard, shard.stat().st_size - 1)
    elif damage == "manifest":
        (bad / checkpoint_files.MANIFEST).write_bytes(b"\xff{")
    else:
        flip(shard if damage == "weights" else bad / checkpoint_files.HUB_STATE)
    chosen, (note,) = checkpoint_files.choose_checkpoint(folder)
    assert chosen is not None
    assert chosen == good
    name = {"hub": checkpoint_files.HUB_STATE, "manifest": checkpoint_files.MANIFEST}.get(damage, shard.name)
    assert f"{name} is damaged" in note
    assert "goes on from step-000001, and the damaged checkpoint is kept as damaged-step-000002" in note
    assert names(folder) == ["damaged-step-000002", "step-000001"]
    if damage == "weights":
        restored = trained(tied_model, 0)
        checkpoint.load(chosen, restored)
        train(restored, 1)
        checkpoint.save(folder, restored, kept(HUB), keep=1)
        assert names(folder) == ["damaged-step-000002", "step-000002"]
        assert same_weights(restored, two_checkpoints[1])


def test_if_no_checkpoint_is_whole_the_run_is_refused_and_nothing_is_moved(tied_model: Path, tmp_path: Path) -> None:
    assert checkpoint_files.choose_checkpoint(tmp_path) == (None, [])
    trainer = trained(tied_model, 1)
    for _ in range(2):
        flip(checkpoint.save(tmp_path, trainer, kept(HUB), keep=2) / checkpoint_files.HUB_STATE)
        train(trainer, 1)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole: .*step-000002/hub\.bin is damaged: CRC .*"
                       r"step-000001/hub\.bin is damaged.*start a new run"):  # fmt: skip
        checkpoint_files.choose_checkpoint(tmp_path)
    assert names(tmp_path) == ["step-000001", "step-000002"]


class KilledError(BaseException):
    """Stands for the death of the process: no code may catch it."""


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2])
def test_while_a_version_is_written_again_one_of_its_checkpoints_is_always_complete(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The writer dies after its first rename (old folder aside) or its second one (new folder in place)."""
    trainer = trained(tied_model, 1)
    checkpoint.save(tmp_path, trainer, kept(HUB), keep=1)
    rename, renamed = Path.rename, list[Path]()

    def until_killed(path: Path, target: Path) -> Path:
        # Rename, and raise after rename number `after` of a checkpoint's folder.
        result = rename(path, target)
        if path.parent == tmp_path / "checkpoints":
            renamed.append(path)
            if len(renamed) == after:
                raise KilledError
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", until_killed)
        with pytest.raises(KilledError):
            checkpoint.save(tmp_path, trainer, kept(b"again"), keep=1)
    assert len(renamed) == after
    chosen, notes = checkpoint_files.choose_checkpoint(tmp_path)
    assert chosen is not None
    assert notes == []
    restored = trained(tied_model, 0)
    checkpoint.load(chosen, restored)
    assert state_of(chosen) == (HUB if after == 1 else b"again")
    train(restored, 1)
    checkpoint.save(tmp_path, restored, kept(HUB), keep=2)
    assert names(tmp_path) == [chosen.name, "step-000002"], "the next save keeps what it found"
    restored.version = 1
    checkpoint.save(tmp_path, restored, kept(b"third"), keep=2)
    assert names(tmp_path) == ["step-000001", "step-000002"]
    assert state_of(tmp_path / "checkpoints" / "step-000001") == b"third"


def test_a_flipped_bit_is_refused_and_its_file_is_named(tied_model: Path, tmp_path: Path) -> None:
    trainer = trained(tied_model, 1)
    path = checkpoint.save(tmp_path, trainer, kept(HUB), keep=1)
    (path / checkpoint_files.HUB_STATE).write_bytes(b"the hub's stata")
    with pytest.raises(CheckpointError, match=r"hub\.bin is damaged"):
        state_of(path)
    (path / checkpoint_files.HUB_STATE).write_bytes(HUB)
    shard = next((path / checkpoint.STATE).glob("__0_*"))
    flip(shard)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged"):
        checkpoint.load(path, trainer)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged"):
        checkpoint.read_weights(path, trainer)


def test_a_manifest_that_does_not_list_the_hub_state_is_damaged(tmp_path: Path) -> None:
    manifest = checkpoint_files.Manifest(version=1, skipped_steps=0, files=[])
    (tmp_path / checkpoint_files.MANIFEST).write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: it does not list hub\.bin"):
        state_of(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(tied_model: Path, untied_model: Path, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, trained(tied_model, 1), kept(HUB), keep=1)
    with pytest.raises(CheckpointError, match="cannot load"):
        checkpoint.load(path, trained(untied_model, 0))


def test_at_every_sync_of_a_write_the_previous_checkpoint_is_the_newest(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each `fsync`, the test looks at the state that a crash at this point would leave."""
    trainer = trained(tied_model, 1)
    previous = checkpoint.save(tmp_path, trainer, kept(HUB), keep=2)
    train(trainer, 1)
    seen: list[Path | None] = []
    sync = os.fsync

    def watched(descriptor: int) -> None:
        sync(descriptor)
        seen.append(checkpoint_files.newest_complete(tmp_path))

    monkeypatch.setattr(os, "fsync", watched)
    newest = checkpoint.save(tmp_path, trainer, kept(HUB), keep=2)
    assert set(seen[:-1]) == {previous}
    assert len(seen) > 5
    assert seen[-1] == newest


@pytest.fixture
def collected() -> Iterator[None]:
    """Collect garbage after the test."""
    # From Python 3.13 on, torch's file object that could not be closed warns when it is collected. That must happen in
    # this test, not in a later one.
    yield
    gc.collect()


# Filter for the warning of a file object of torch that is collected although it could not be closed.
FILE_OF_TORCH = "ignore:Exception ignored in. <torch.distributed:pytest.PytestUnraisableExceptionWarning"


@pytest.mark.usefixtures("collected")
@pytest.mark.filterwarnings(FILE_OF_TORCH)
def test_a_write_that_fails_is_one_clear_error_and_leaves_the_previous_checkpoint(
    untied_model: Path, tmp_path: Path
) -> None:
    trainer = trained(untied_model, 1)
    previous = checkpoint.save(tmp_path, trainer, kept(HUB), keep=2)
    before = {path: path.read_bytes() for path in previous.rglob("*") if path.is_file()}
    train(trainer, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Limit the size of a file, so that writes fail in the middle, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"step-000002.*needs about [\d,]+ bytes, [\d,]+ are free"):
            checkpoint.save(tmp_path, trainer, kept(HUB), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step-000001"]
    assert checkpoint_files.newest_complete(tmp_path) == previous
    assert {path: path.read_bytes() for path in previous.rglob("*") if path.is_file()} == before
    assert checkpoint.save(tmp_path, trainer, kept(HUB), keep=1).name == "step-000002"


@pytest.mark.parametrize("room", [0, 8192, 65536])
@pytest.mark.usefixtures("collected")
@pytest.mark.filterwarnings(FILE_OF_TORCH)
def test_a_full_disk_is_named_as_the_cause_with_the_path(untied_model: Path, tmp_path: Path, room: int) -> None:
    trainer = trained(untied_model, 1)
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        disk.leave(room)
        with pytest.raises(CheckpointError) as error:
            checkpoint.save(disk.path, trainer, kept(HUB), keep=2)
        told = str(error.value)
        assert told.startswith(f"cannot write {disk.path / 'checkpoints' / 'step-000001'}: ")
        assert "No space left on device" in told
        assert "needs about " in told
        assert "inline_container" not in told
        with pytest.raises(CheckpointError, match=r"cannot export .*disk/model: .*No space left on device"):
            checkpoint.export_hf(trainer.model, TOKENIZER, disk.path / "model")


def test_a_read_only_disk_is_not_reported_as_full(untied_model: Path, tmp_path: Path) -> None:
    trainer = trained(untied_model, 1)
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        disk.read_only()
        with pytest.raises(CheckpointError, match=r"disk/checkpoints.*Read-only file system.*you may write") as error:
            checkpoint.save(disk.path, trainer, kept(HUB), keep=2)
        assert " free there" not in str(error.value)
        with pytest.raises(CheckpointError, match=r"disk/model: .*Read-only file system.*you may write"):
            checkpoint.export_hf(trainer.model, TOKENIZER, disk.path / "model")


def test_the_advice_after_a_failed_write_does_not_depend_on_the_names_of_folders(
    tied_model: Path, tmp_path: Path
) -> None:
    def full(file: Path) -> checkpoint_files.FileEntry:
        raise CheckpointError(f"{file}: No space left on device")

    with pytest.raises(CheckpointError, match=r"Permission denied/checkpoints/.* bytes, [\d,]+ are free there$"):
        checkpoint.save(tmp_path / "Permission denied", trained(tied_model, 0), full, keep=1)


def test_a_lost_hub_raises_its_own_error_and_no_checkpoint_error(tied_model: Path, tmp_path: Path) -> None:
    def lost(file: Path) -> checkpoint_files.FileEntry:
        raise PeerLostError("the connection to hub ended")

    with pytest.raises(PeerLostError, match="the connection to hub ended"):
        checkpoint.save(tmp_path, trained(tied_model, 0), lost, keep=1)


@pytest.mark.parametrize("most_bytes", [checkpoint.EXPORTED_BYTES, 10_000], ids=["whole", "by shards"])
def test_an_export_loads_as_an_ordinary_hugging_face_folder(model: Path, tmp_path: Path, most_bytes: int) -> None:
    trainer = trained(model, 1)
    folder = tmp_path / "model"
    for _ in range(2):
        checkpoint.export_hf(trainer.model, TOKENIZER, folder, most_bytes)
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    assert (len(sizes) > 1) == (most_bytes == 10_000) == (folder / "model.safetensors.index.json").exists()
    assert max(sizes) < most_bytes + 2_000, "a header beside"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1, "who may read some may read all"
    loaded = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    expected = weights_of(trainer)
    for name, value in loaded.named_parameters():
        assert torch.equal(value, expected.pop(name))
    assert not expected
    assert AutoTokenizer.from_pretrained(folder, local_files_only=True).convert_tokens_to_ids("b") == 1


def test_an_export_has_the_bias_for_the_choice_of_experts(tmp_path: Path) -> None:
    model: Any = tiny("deepseek_v3")
    model.model.layers[1].mlp.gate.e_score_correction_bias.normal_()
    model = shard_model(model, trainer_mesh("cpu"), ModelConfig(path="", dtype="float32"))
    checkpoint.export_hf(model, TOKENIZER, tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as file:
        bias = file.get_tensor("model.layers.1.mlp.gate.e_score_correction_bias")
    assert torch.equal(bias, model.model.layers[1].mlp.gate.e_score_correction_bias)


def test_an_export_that_cannot_be_written_is_a_checkpoint_error(tied_model: Path, tmp_path: Path) -> None:
    trainer = trained(tied_model, 0)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot export"):
        checkpoint.export_hf(trainer.model, PreTrainedTokenizerFast, tmp_path / "file" / "model")


@pytest.mark.integration
def test_the_hub_state_is_read_without_torch(tied_model: Path, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, trained(tied_model, 0), kept(HUB), keep=1)
    code = (
        "import sys, pathlib\n"
        "from flash.trainer.checkpoint_files import hub_state, newest_complete\n"
        "with hub_state(newest_complete(pathlib.Path(sys.argv[1]))) as data:\n"
        "    assert data == sys.argv[2].encode()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), HUB.decode()], check=True, timeout=60)


@pytest.mark.integration
def test_kill_9_during_a_write_leaves_the_previous_checkpoint_usable(tied_model: Path, tmp_path: Path) -> None:
    from tests.trainer import killed_writer  # which imports this module

    writer = Rank(target=killed_writer.main, args=(tied_model, tmp_path), daemon=True)
    writer.start()
    while not (tmp_path / "writing").exists():
        assert writer.is_alive()
        time.sleep(0.05)
    writer.kill()
    writer.join(30)
    assert writer.exitcode == -signal.SIGKILL
    assert names(tmp_path) == [".tmp-step-000002", "step-000001"]
    previous = checkpoint_files.newest_complete(tmp_path)
    assert previous is not None
    assert previous.name == "step-000001"
    trainer = trained(tied_model, 0)
    checkpoint.load(previous, trainer)
    assert state_of(previous) == HUB
    assert same_weights(trainer, trained(tied_model, 1))
    train(trainer, 1)
    checkpoint.save(tmp_path, trainer, kept(HUB), keep=2)
    assert names(tmp_path) == ["step-000001", "step-000002"]
