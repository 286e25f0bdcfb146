"""scripts/install.py: the parts that decide, without installing anything."""

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "install.py"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """The script as a module, with its environment in a temporary folder."""
    spec = importlib.util.spec_from_file_location("flash_install", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(module, "VENV", venv)
    monkeypatch.setattr(module, "PYTHON", venv / "bin" / "python")
    monkeypatch.setattr(module, "STAMP", venv / "stamp")
    monkeypatch.setattr(module, "LOG", venv / "log")
    monkeypatch.setattr(module, "SCRATCH", venv)
    return module


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """The Python of an environment that has pip and nothing else, and an index without a package for it."""
    for name in ("FIND_LINKS", "EXTRA_INDEX_URL", "CONSTRAINT", "NO_INDEX"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", listing(tmp_path / "ordinary"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    packages = next((tmp_path / "bare" / "lib").glob("python*/site-packages"))
    # Imported here, pip would have setuptools leave the old distutils in place, with which vLLM does not start.
    (packages / "pip").symlink_to(Path(str(importlib.metadata.distribution("pip").locate_file("pip"))))
    return tmp_path / "bare" / "bin" / "python"


def listing(folder, *files):
    """An index of files on this machine that says it has these for torch."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "index.html").write_text("".join(f'<a href="{file}">{file}</a>' for file in files))
    return folder.as_uri()


CPU_WHEEL = "torch-2.13.0+cpu-py3-none-any.whl"
ORDINARY = "torch-2.13.0-py3-none-any.whl"


def put_torch(python, name, text):
    """A file of torch's into an environment."""
    packages = next((python.parent.parent / "lib").glob("python*/site-packages"))
    file = packages / name
    file.parent.mkdir()
    file.write_text(text)


def test_a_finished_environment_is_current_until_what_it_depends_on_changes(install, monkeypatch, tmp_path):
    assert not install.is_current()
    install.STAMP.write_text(install.fingerprint())
    assert install.is_current()
    (tmp_path / "lock.txt").write_text("numpy==1.0")
    monkeypatch.setattr(install, "LOCK", tmp_path / "lock.txt")
    assert not install.is_current()


def test_a_current_environment_is_left_alone(install, capsys):
    install.STAMP.write_text(install.fingerprint())
    assert install.main() == 0
    assert capsys.readouterr().out == ""


def test_an_old_python_is_refused_with_what_to_do(install, monkeypatch):
    monkeypatch.setattr(install, "OLDEST_PYTHON", (4, 0))
    with pytest.raises(
        install.InstallError, match=r"needs Python 4\.0 or newer; .* is 3\.\d+\. Name another one: make env"
    ):
        install.main()


def test_a_command_that_fails_shows_the_end_of_its_own_output(install):
    install.run("sh", "-c", "echo earlier")
    with pytest.raises(install.InstallError) as error:
        install.run("sh", "-c", "echo no such package >&2; exit 1")
    assert "no such package" in str(error.value)
    assert "earlier" not in str(error.value)


def test_commands_may_write_byte_code(install, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    install.run("sh", "-c", 'test -z "${PYTHONDONTWRITEBYTECODE-}"')


def test_what_a_user_switched_on_for_all_calls_of_pip_is_off(install, monkeypatch):
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    seen = install.variables({"TMPDIR": "/scratch"})
    assert (seen["PIP_USER"], seen["PIP_INDEX_URL"], seen["TMPDIR"]) == (
        "0",
        "https://index.example/simple",
        "/scratch",
    )
    assert not {"PIP_TARGET", "PYTHONPATH"} & seen.keys()


def test_a_disk_that_is_too_small_is_refused_with_what_is_needed_and_where(install):
    with pytest.raises(
        install.InstallError, match=r"\.venv takes 2000000\.5 GB while .* and 7\.0 GB afterwards; .* free"
    ):
        install.check_space(install.Size(fetched=0.0, making=2_000_000.5, made=7.0))


def test_what_is_resolved_is_held_to_the_lock(install):
    lines = install.pins().read_text().splitlines()
    assert len(lines) == sum(line[0].isalnum() for line in install.LOCK.read_text().splitlines())
    assert not [line for line in lines if "==" not in line or "--hash" in line or line.endswith("\\")]


@pytest.mark.integration
def test_torch_is_the_cpu_build_of_pytorchs_index_where_that_has_one(install, bare, tmp_path, monkeypatch):
    (tmp_path / CPU_WHEEL).touch()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    index = listing(tmp_path / "index", ORDINARY, CPU_WHEEL)
    found = install.find_torch(bare, index)
    assert (found.requirement, found.place, found.size) == ("torch==2.13.0+cpu", f"comes from {index}", install.CPU)
    assert dict(found.variables)["PIP_INDEX_URL"] == index


@pytest.mark.integration
@pytest.mark.parametrize("index", ["file:///nowhere", "http://127.0.0.1:9/simple"])
def test_without_that_index_torch_is_a_cpu_build_that_pip_finds(install, bare, tmp_path, monkeypatch, index):
    (tmp_path / CPU_WHEEL).touch()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    found = install.find_torch(bare, index)
    assert (found.requirement, found.variables) == ("torch==2.13.0+cpu", ())
    assert found.place == "comes from where pip is configured to look"


@pytest.mark.integration
def test_without_a_cpu_build_for_this_python_torch_comes_with_its_cuda_libraries(install, bare, tmp_path):
    index = listing(
        tmp_path / "index", ORDINARY, "torch-2.13.0+cpu-cp27-cp27m-any.whl", "torch-2.13.0+cpu.old-py3-none-any.whl"
    )
    found = install.find_torch(bare, index)
    assert (found.requirement, found.size) == ("torch==2.13.0", install.CUDA)
    assert f"{index} could not be reached or has none for this Python" in found.place


@pytest.mark.integration
def test_a_cpu_build_that_is_installed_stays(install, bare):
    put_torch(bare, "torch-2.13.0+cpu.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n")
    assert install.find_torch(bare, "file:///nowhere").place == "is installed"
    assert install.torch_needs(bare) == []


@pytest.mark.integration
def test_what_torch_requires_and_the_lock_has_not_is_found_in_its_own_metadata(install, bare):
    needs = ["nvidia-cudnn-cu13==9.20.0.48; platform_system == 'Linux'", "cuda-toolkit[cublas]==13.0.3"]
    other = ["typing_extensions>=4.10", "triton==3.7.1", "opt-einsum>=3.3; extra == 'opt-einsum'"]
    lines = "".join(f"Requires-Dist: {line}\n" for line in [*needs, *other])
    put_torch(bare, "torch-2.13.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n{lines}")
    assert install.torch_needs(bare) == needs


@pytest.mark.integration
def test_a_broken_torch_is_named_with_its_cause(install, bare, monkeypatch):
    put_torch(bare, "torch/__init__.py", "raise ImportError('libcudnn.so.9: cannot open shared object file')")
    monkeypatch.setattr(install, "PYTHON", bare)
    with pytest.raises(
        install.InstallError, match=r"(?s)torch cannot be imported: ImportError: libcudnn\.so\.9: .*rm -rf"
    ):
        install.import_once("torch.distributed")


@pytest.mark.integration
def test_a_configuration_that_installs_elsewhere_is_refused(install, bare, monkeypatch, tmp_path):
    monkeypatch.setattr(install, "PYTHON", bare)
    install.refuse_other_folders()
    (tmp_path / "pip.conf").write_text("[global]\ntarget = /elsewhere\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    with pytest.raises(install.InstallError, match=r"pip's configuration sets global\.target, which"):
        install.refuse_other_folders()


@pytest.mark.integration
def test_an_environment_without_pip_gets_it_and_stays(install, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", install.VENV], check=True)
    (install.VENV / "mine").touch()
    install.create_venv()
    install.run(install.PYTHON, "-m", "pip", "--version")
    assert (install.VENV / "mine").exists()


@pytest.mark.integration
def test_an_environment_of_another_python_is_made_again(install):
    install.PYTHON.unlink()
    install.PYTHON.write_text("#!/bin/sh\necho 3 9\n")
    install.PYTHON.chmod(0o755)
    install.create_venv()
    install.run(install.PYTHON, "-c", f"import sys; assert sys.version_info[:2] == {sys.version_info[:2]}")


@pytest.mark.integration
def test_a_broken_environment_is_made_again(install):
    install.PYTHON.unlink()
    install.PYTHON.symlink_to("/nowhere/python3")
    install.STAMP.write_text("x")
    install.create_venv()
    install.run(install.PYTHON, "-m", "pip", "--version")
    assert not install.STAMP.exists()
