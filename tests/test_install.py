"""scripts/install.py: the parts that decide, without installing anything."""

import importlib.util
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
    return module


def test_a_finished_environment_is_current_until_what_it_depends_on_changes(install, monkeypatch):
    assert not install.is_current()
    install.STAMP.write_text(install.fingerprint())
    assert install.is_current()
    monkeypatch.setenv("FLASH_TORCH_SPEC", "torch==2.13.0+cpu")
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


@pytest.mark.integration
def test_a_broken_environment_is_made_again(install):
    install.PYTHON.unlink()
    install.PYTHON.symlink_to("/nowhere/python3")
    install.STAMP.write_text("x")
    install.create_venv()
    install.run(install.PYTHON, "-m", "pip", "--version")
    assert not install.STAMP.exists()
