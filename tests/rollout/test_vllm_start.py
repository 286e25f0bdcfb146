"""Arguments and environment of an engine's processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flash.config.machine import missing_compiler
from flash.config.tree import Config
from flash.errors import ConfigError
from flash.rollout.vllm.start import configure, engine_args, engine_environment, engine_variables, server_variables
from flash.run.processes.launch_state import SCRATCH

TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "3",
    "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "GROUP_RANK": "0",
    "ROLE_NAME": "default",
    "TORCHELASTIC_RUN_ID": "x",
}


def make_config(path: str = "org/model", gpus: int = 0, backend: str = "auto", **engine: Any) -> Config:
    """Return a configuration with this model, number of GPUs and weight backend, and these keys of `[engine]`."""
    tree = {
        "run": {"name": "test", "seed": 5},
        "model": {"path": path},
        "env": {"path": "module:Class"},
        "engine": engine,
        "weights": {"backend": backend},
        "cluster": {"gpus_per_node": gpus},
    }
    return msgspec.convert(tree, Config)


def variables(config: Config, inherited: dict[str, str] | None = None, cpus: list[int] | None = None) -> dict[str, str]:
    """Return the variables of an engine whose node loop has the process id 77."""
    return engine_variables(config, inherited or {}, cpus or [0, 1], 77)


def test_an_engine_does_not_see_the_launchers_variables() -> None:
    assert not TORCHRUN.keys() & variables(make_config(), TORCHRUN | {"PATH": "/bin"}).keys()


def test_an_engine_keeps_every_other_variable() -> None:
    assert (
        variables(make_config(), {"PATH": "/bin", "RANKING": "1"}).items() >= {"PATH": "/bin", "RANKING": "1"}.items()
    )


def test_an_engine_knows_the_process_that_it_follows() -> None:
    assert variables(make_config())["FLASH_NODE_PID"] == "77"


def test_an_eager_engine_on_the_cpu_compiles_nothing() -> None:
    assert variables(make_config(enforce_eager=True))["TORCHDYNAMO_DISABLE"] == "1"
    assert ("TORCHDYNAMO_DISABLE" in variables(make_config(enforce_eager=False))) is (missing_compiler() is not None)
    assert "TORCHDYNAMO_DISABLE" not in variables(make_config(gpus=1, enforce_eager=True))


def test_servers_whose_engines_compile_differ_from_others_and_servers_of_two_runs_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    found = []
    for scratch in ("/one", "/other"):
        monkeypatch.setenv(SCRATCH, scratch)
        found.append(server_variables(make_config(enforce_eager=True), 0))
    assert found[0] == found[1]
    assert found[0]["TORCHDYNAMO_DISABLE"] == "1"
    assert server_variables(make_config(gpus=1), 0)["TORCHDYNAMO_DISABLE"] == "0"


def test_a_local_model_is_never_looked_for_on_a_hub(tmp_path: Path) -> None:
    assert variables(make_config(str(tmp_path)))["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in variables(make_config())


@pytest.mark.parametrize(("backend", "allowed"), [("ipc", True), ("tcp", False), ("nccl", False)])
def test_pickles_are_accepted_for_the_ipc_backend_only(backend: str, allowed: bool) -> None:
    found = variables(make_config(gpus=1, backend=backend), {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"})
    assert ("VLLM_ALLOW_INSECURE_SERIALIZATION" in found) is allowed


@pytest.mark.parametrize(
    ("tensor_parallel", "cpus", "binding"),
    [(1, [0], "0"), (1, [3, 4], "3"), (1, [2, 3, 4, 5], "2,3,4"), (2, [0, 1, 2, 3, 4], "0,1|2,3"), (2, [6], "6|6")],
)
def test_a_single_engines_workers_stay_on_this_process_cores(
    tensor_parallel: int, cpus: list[int], binding: str
) -> None:
    config = make_config(tensor_parallel=tensor_parallel)
    assert variables(config, cpus=cpus)["VLLM_CPU_OMP_THREADS_BIND"] == binding


def test_several_engines_are_not_pinned_to_the_same_core() -> None:
    found = variables(make_config(count=2), cpus=[0, 1, 2, 3, 4])
    assert (found["VLLM_CPU_OMP_THREADS_BIND"], found["OMP_NUM_THREADS"]) == ("nobind", "2")


def test_seeded_responses_are_computed_by_one_thread() -> None:
    config = make_config()
    config = msgspec.structs.replace(config, rollout=msgspec.structs.replace(config.rollout, seeded=True))
    found = variables(config, cpus=[0, 1, 2, 3])
    assert (found["VLLM_CPU_OMP_THREADS_BIND"], found["OMP_NUM_THREADS"]) == ("0", "1")


@pytest.mark.parametrize(
    ("dtype", "gpus", "precision"), [("float32", 1, "ieee"), ("bfloat16", 1, None), ("float32", 0, None)]
)
def test_what_attention_computes_in_float32_on_a_gpu_has_all_bits_of_it(
    dtype: str, gpus: int, precision: str | None
) -> None:
    config = make_config(gpus=gpus)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype=dtype))
    assert variables(config).get("TRITON_F32_DEFAULT") == precision
    if precision:
        assert variables(config, {"TRITON_F32_DEFAULT": "tf32"})["TRITON_F32_DEFAULT"] == "tf32", "as was asked for"


def test_this_process_gets_its_environment_back_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with engine_environment(make_config()):
        with engine_environment(make_config()):
            os.environ["LD_PRELOAD_OF_VLLM"] = "1"
        assert "RANK" not in os.environ, "the first engine is still starting when the second one is done"
    assert dict(os.environ) == before


def test_sockets_of_an_engine_lie_in_the_jobs_folder_for_temporary_files() -> None:
    assert variables(make_config(), {SCRATCH: "/tmp/job"})["VLLM_RPC_BASE_PATH"] == "/tmp/job"
    assert "VLLM_RPC_BASE_PATH" not in variables(make_config())


@pytest.mark.parametrize(("prefix", "mended"), [("/opt/flash", False), ("/home/a b/flash", True), ("/a:b", True)])
def test_preloaded_libraries_have_paths_that_end_where_they_do(
    prefix: str, mended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = ("lib/vllm/libtcmalloc.so", "lib/torch/libgomp.so")
    monkeypatch.setenv(SCRATCH, str(tmp_path))

    def checked(arguments: dict[str, Any]) -> Any:
        """Set LD_PRELOAD as vLLM does when it checks arguments."""
        before = os.environ.get("LD_PRELOAD", "")
        if "libgomp" not in before:  # as vLLM does it
            os.environ["LD_PRELOAD"] = ":".join([f"{prefix}/{libraries[0]}", f"{prefix}/{libraries[1]}"])
        return None

    with engine_environment(make_config(count=2)):
        for index in (0, 1):
            configure(make_config(count=2), index, [], lambda step: None, maker=checked, prefix=prefix)
        named = os.environ["LD_PRELOAD"].split(":")
    place = tmp_path / "environment" if mended else prefix
    assert named == [f"{place}/{library}" for library in libraries]
    assert not mended or (tmp_path / "environment").readlink() == Path(prefix)


def test_nothing_is_preloaded_where_no_path_would_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(arguments: dict[str, Any]) -> Any:
        os.environ["LD_PRELOAD"] = "/home/a b/x.so:own.so"

    monkeypatch.setenv(SCRATCH, "/tmp/c d")
    for inherited in ("own.so", None):
        if inherited is None:
            monkeypatch.delenv("LD_PRELOAD")
        else:
            monkeypatch.setenv("LD_PRELOAD", inherited)
        with engine_environment(make_config()):
            configure(make_config(), 0, [], lambda step: None, maker=checked, prefix="/home/a b")
            assert os.environ.get("LD_PRELOAD") == inherited


def test_engines_sample_from_different_seeds() -> None:
    config = make_config()
    assert [engine_args(config, index, [])["seed"] for index in (0, 1)] == [5, 6]


def test_an_engine_on_gpus_gets_its_own() -> None:
    assert engine_args(make_config(gpus=4), 1, [2, 3])["device_ids"] == [2, 3]


def test_an_engine_gets_what_is_passed_on_to_vllm_over_what_it_gets_anyway() -> None:
    plain, passed = (make_config(gpus=1, vllm=given) for given in ({}, {"enable_prefix_caching": False, "x": [1]}))
    assert engine_args(passed, 0, [0]) == engine_args(plain, 0, [0]) | {"enable_prefix_caching": False, "x": [1]}


def test_an_argument_that_vllm_refuses_is_an_error_of_the_configuration() -> None:
    def refusing(arguments: dict[str, Any]) -> Any:
        raise ValueError("block_size has to be a power of two")

    passed = make_config(vllm={"block_size": 7})
    with engine_environment(passed), pytest.raises(ConfigError, match=r"engine.vllm: .* block_size among them: block_"):
        configure(passed, 0, [], lambda step: None, maker=refusing)
    with engine_environment(passed), pytest.raises(ValueError, match="power of two") as caught:
        configure(make_config(), 0, [], lambda step: None, maker=refusing)
    assert not isinstance(caught.value, ConfigError)


def test_an_engine_tells_its_experts_where_the_run_replays_them() -> None:
    config = make_config(gpus=4)
    rollout = msgspec.structs.replace(config.rollout, routing_replay=True)
    replayed = msgspec.structs.replace(config, rollout=rollout)
    for one, asked in ((config, False), (replayed, True)):
        assert engine_args(one, 0, [0]).get("enable_return_routed_experts", False) is asked
        assert ("VLLM_USE_V2_MODEL_RUNNER" in engine_variables(one, {}, [0], 1)) is asked


def test_importing_the_engine_needs_neither_torch_nor_vllm() -> None:
    code = "import sys, flash.rollout.vllm.engine; assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_a_core_that_may_send_pickles_answers_can_be_read_once_its_variables_are_gone(monkeypatch):
    from vllm import envs
    from vllm.v1.engine import EngineCoreOutputs, UtilityOutput
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

    from flash.foreign import vllm

    with monkeypatch.context() as core:
        core.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        answer = EngineCoreOutputs(utility_output=UtilityOutput(call_id=1, result=UtilityResult(("generate",))))
        sent = MsgpackEncoder().encode(answer)
    try:
        vllm.accept_typed_replies()
        read = MsgpackDecoder(EngineCoreOutputs).decode(sent)
    finally:
        vars(envs).pop("VLLM_ALLOW_INSECURE_SERIALIZATION", None)
    assert tuple(read.utility_output.result.result) == ("generate",)
