"""The container engine that `benchmarks.sandbox.run` runs on: the one of DOCKER_HOST, or a Podman service of its own.

The own one keeps its storage in a new folder under /var/tmp: it sees nobody else's containers, and nobody sees its own.
Leaving the block ends it with everything that runs in it, also on ctrl-C and SIGTERM. Images are made of Debian
packages by `envs.sandbox.images`; their archives are kept under build/sandbox: making one takes longer than importing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio

from benchmarks.form import ROOT, terminated_like_interrupted
from envs.sandbox import images
from envs.sandbox.engines.backend import Images
from flash.errors import ConfigError

ARCHIVES = ROOT / "build" / "sandbox"
IMAGE = "flash-sandbox-python"
BOOT_S = 60.0
"""Longest wait for Podman's socket."""
REMOVE_S = 20.0
"""Longest wait for its storage to be removed."""
LOOK_S = 0.05
"""Between two looks at either: the file system tells nobody."""
COMMAND_S = 300.0
"""Longest wait for one Podman command; removing many containers takes a while on a slow disk."""


@contextmanager
def engine() -> Generator[str]:
    """The address of an engine for the time of the block.

    Raises:
        ConfigError: there is none, and Podman is missing or does not start.
    """
    if url := os.environ.get("DOCKER_HOST"):
        yield url
        return
    missing = [name for name in ("podman", "runc") if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} not found: `apt-get install podman runc`, or set DOCKER_HOST; "
            "`--case scheduler` needs no engine"
        )
    with terminated_like_interrupted(), _own_podman() as url:
        yield url


async def ensure_image(kept: Images, name: str = IMAGE) -> None:
    """Make an image, unless the engine has it.

    Raises:
        ConfigError: its packages cannot be had.
    """
    there = await kept.list({})
    if any(name in known for known in there):
        return
    print(f"making image {name} (once per engine)", flush=True)
    archive = await anyio.to_thread.run_sync(_archive, name)
    await kept.make(archive, name)


def _archive(name: str) -> Path:
    """The image's root file system, kept from an earlier call if it was made by the same recipe."""
    recipe = repr(images.RECIPES[name]).encode() + Path(images.__file__).read_bytes()
    file = ARCHIVES / f"{name}-{hashlib.sha256(recipe).hexdigest()[:12]}.tar"
    if not file.exists():
        ARCHIVES.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        images.build(images.RECIPES[name], unfinished)
        unfinished.rename(file)
    return file


@contextmanager
def _own_podman() -> Generator[str]:
    """A Podman service with storage of its own."""
    work = Path(tempfile.mkdtemp(prefix="flash-bench.", dir="/var/tmp"))
    socket, log = work / "podman.sock", work / "podman.log"
    podman, service = ["podman"], None
    try:
        podman += _options(work)
        with log.open("wb") as output:
            service = subprocess.Popen(
                [*podman, "system", "service", "--time=0", f"unix://{socket}"],
                # Podman leaves a copy of each imported image in its folder for temporary files, and its conmon an
                # empty file `oom` in its working folder for each container that ran out of memory.
                env=os.environ | {"TMPDIR": str(work)},
                cwd=work,
                stdout=output,
                stderr=output,
                # ctrl-C reaches every process of the terminal; the service must outlive ours to clean up.
                start_new_session=True,
            )
        _wait_for(socket, service, log)
        yield f"unix://{socket}"
    finally:
        with _undisturbed():
            if service is not None:
                _run([*podman, "rm", "--all", "--force", "--time", "0"])
                service.kill()
                service.wait()
            _remove(work)


def _options(work: Path) -> list[str]:
    """Overlay does not work on every file system, for instance on top of another overlay."""
    common = ["--root", str(work / "root"), "--runroot", str(work / "run"), "--cgroup-manager", "cgroupfs"]
    common += ["--runtime", "runc", "--events-backend", "file", "--storage-driver"]
    if _run(["podman", *common, "overlay", "info"]):
        return [*common, "overlay"]
    for name in ("root", "run"):
        shutil.rmtree(work / name, ignore_errors=True)
    return [*common, "vfs"]


def _remove(work: Path) -> None:
    """Remove the storage. What Podman runs after the end of a container may still use it, and make it again."""
    end = time.monotonic() + REMOVE_S
    while True:
        _run(["umount", str(work / "root" / "overlay")])
        shutil.rmtree(work, ignore_errors=True)
        if not work.exists():
            return
        if time.monotonic() > end:
            print(f"{work} could not be removed", flush=True)
            return
        time.sleep(LOOK_S)


def _wait_for(socket: Path, service: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + BOOT_S
    while not socket.exists():
        if service.poll() is not None or time.monotonic() > end:
            said = log.read_text(errors="replace").strip()[-800:]
            raise ConfigError(f"Podman gave no socket within {BOOT_S:g} s; it said: {said or 'nothing'}")
        time.sleep(LOOK_S)


def _run(command: Sequence[str]) -> bool:
    """Whether a command succeeds."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_S, start_new_session=True
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


@contextmanager
def _undisturbed() -> Generator[None]:
    """A second ctrl-C does not stop the clean-up after the first."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
