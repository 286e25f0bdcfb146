"""On the CPU, engines run eagerly if nothing can compile their graphs, and bfloat16 may be slow. Warnings say so."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from flash.config.check import unwise
from flash.config.load import load
from flash.config.machine import HEADERS, advise_dtype, computes_bfloat16, missing_compiler, runs_eagerly, why_eager
from flash.config.tree import Config
from flash.rollout.vllm.start import engine_args, engine_variables
from flash.run.checks.doctor import compilers
from flash.run.node_loop import explain_engine_start


def config(*, gpus: int = 0, eager: bool = False, dtype: str = "bfloat16") -> Config:
    """Return a configuration with these values of gpus_per_node, enforce_eager and dtype."""
    tree = {
        "run": {"name": "test"},
        "model": {"path": "org/model", "dtype": dtype},
        "env": {"path": "module:Class"},
        "engine": {"enforce_eager": eager},
        "cluster": {"gpus_per_node": gpus},
    }
    return msgspec.convert(tree, Config)


def program(file: Path, code: int = 0) -> Path:
    """Write an executable file that exits with `code`, and return its path."""
    file.write_text(f"#!/bin/sh\nexit {code}\n")
    file.chmod(0o755)
    return file


WITH_HEADERS = pytest.mark.skipif(not HEADERS.is_file(), reason="no headers of Python here")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder that is the only one on PATH."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "bin"


def test_without_a_compiler_engines_on_the_cpu_run_eagerly_and_a_warning_says_how_to_compile_them(path: Path) -> None:
    assert runs_eagerly(config())
    assert engine_args(config(), 0, [])["enforce_eager"] is True
    assert engine_variables(config(), {}, [0], 7)["TORCHDYNAMO_DISABLE"] == "1"
    assert explain_engine_start(40.0, config()) == "; vLLM loads the model"
    (told,) = unwise(config())
    assert told.key == "engine.enforce_eager"
    assert "torch finds no C++ compiler (g++ is not on PATH)" in told.message
    assert "apt install g++" in told.message
    assert "\n" not in told.message


@WITH_HEADERS
def test_with_a_compiler_engines_on_the_cpu_are_compiled(path: Path) -> None:
    program(path / "g++")
    assert engine_args(config(), 0, [])["enforce_eager"] is False
    assert unwise(config()) == []


def test_there_is_no_warning_if_the_user_wants_eager_engines_or_they_run_on_gpus(path: Path) -> None:
    assert why_eager(config(eager=True)) is why_eager(config(gpus=1)) is None
    assert runs_eagerly(config(eager=True))
    assert not runs_eagerly(config(gpus=1))


def test_the_compiler_is_found_in_the_same_way_as_by_torch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = program(path / "Python.h")
    program(path / "clang++")
    program(path / "broken", code=1)
    assert missing_compiler(headers) is not None, "torch calls g++ on Linux"
    for name, found in {"clang++": True, "broken": False, "g++": False, "ccache clang++": False, "": False}.items():
        monkeypatch.setenv("CXX", name)
        assert (missing_compiler(headers) is None) is found, name
    assert missing_compiler() == "torch finds no C++ compiler ('', which CXX names, does not run)"


def test_a_compiler_is_of_no_use_without_pythons_headers(path: Path) -> None:
    program(path / "g++")
    assert missing_compiler(path / "Python.h") == f"Python's headers are not installed ({path / 'Python.h'})"


def test_the_doctor_names_a_compiler_that_is_not_there(path: Path) -> None:
    assert compilers(None).state == compilers(config()).state == "not needed"
    assert "without compiled graphs, slower: torch finds no C++ compiler (g++ is not on PATH)" in compilers(None).text
    assert "nothing is compiled" in compilers(config(eager=True)).text
    assert "GPUs" in compilers(config(gpus=1)).text


@WITH_HEADERS
def test_the_doctor_finds_a_compiler(path: Path) -> None:
    program(path / "g++")
    assert compilers(None).state == compilers(config()).state == "ok"


@pytest.mark.parametrize(
    ("features", "is_slow"),
    [
        ("flags\t\t: fpu avx2 sha_ni", True),
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", False),
        ("Features\t: fp asimd", True),
        ("Features\t: fp asimd bf16", False),
        ("model name: a machine without a list of features", False),
    ],
)
def test_bfloat16_on_a_cpu_without_instructions_for_it_is_reported(
    tmp_path: Path, features: str, is_slow: bool
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\n{features}\nbugs\t\t: bf16\n")
    half = config(dtype="bfloat16")
    assert [problem.key for problem in advise_dtype(half, info)] == ["model.dtype"] * is_slow
    assert [*advise_dtype(config(gpus=1, dtype="bfloat16"), info)] == []
    assert [*advise_dtype(config(dtype="float32"), info)] == []
    assert [*advise_dtype(half, tmp_path / "missing")] == []


def test_the_precision_is_by_default_one_that_the_hardware_computes_fast() -> None:
    overrides = [["model.dtype=auto", f"cluster.gpus_per_node={gpus}"] for gpus in (8, 0)]
    with_gpus, without = (load("examples/simulate.toml", keys, simulated=True).model.dtype for keys in overrides)
    assert with_gpus == "bfloat16"
    assert without == ("bfloat16" if computes_bfloat16() else "float32")
