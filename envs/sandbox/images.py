"""Images made of Debian packages, for machines without a registry: `python -m envs.sandbox.images [NAME …]`.

An image consists of the packages of its recipe and all their dependencies, unpacked by `dpkg-deb` (no maintainer script
runs), plus the user and folders that sandboxes expect. Packages come from the sources of this machine's apt, which
checks them. They are kept in a cache folder, so that a second image takes seconds. Needs Debian, apt and tar.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flash.errors import ConfigError, FlashError, advice_for_extra

RECIPES: dict[str, tuple[str, ...]] = {
    "flash-sandbox-python": ("bash", "coreutils", "findutils", "grep", "sed", "tar", "procps", "python3"),
    "flash-sandbox-c": ("bash", "coreutils", "findutils", "tar", "procps", "python3", "tcc", "libc6-dev"),
}
"""Packages of each image, by the image's name."""

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flash" / "debian"
"""Folder in which packages are cached."""
USER_ID = 1000
"""User id that commands run as."""

_MERGED = ("bin", "sbin", "lib", "lib64")
"""Folders that are links into /usr, as on every Debian."""
_NEVER = re.compile(r"dpkg|debconf|usrmerge|init-system-helpers|perl|libperl[\d.]+|perl-modules-[\d.]+")
"""Packages that only maintainer scripts need, which do not run here. perl-base stays."""
_LEFT_OUT = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/lintian")
"""Folders of documentation, which no sandbox needs."""


def download(packages: Sequence[str], cache: Path = CACHE) -> list[Path]:
    """Download the packages and all their dependencies into the folder `cache`. Returns their .deb files.

    Apt gets an empty list of installed packages, because it otherwise leaves out what this machine has already.

    Raises:
        ConfigError: apt is missing, or cannot download them.
    """
    (cache / "partial").mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile() as nothing_installed:
        options = [
            f"Dir::State::status={nothing_installed.name}",
            f"Dir::Cache::archives={cache}",
            "APT::Install-Recommends=false",
            "Debug::NoLocking=1",
            "APT::Sandbox::User=root",
        ]
        apt = ["apt-get", "--yes", *(part for option in options for part in ("-o", option))]
        _run([*apt, "--download-only", "install", *packages])
        # With an empty cache, apt lists all files, also those that it has just downloaded.
        listing = _run(
            [*apt, "--print-uris", "--reinstall", "install", *packages, "-o", "Dir::Cache::archives=/nowhere"]
        )
    names = [line.split()[1] for line in listing.splitlines() if line.startswith("'")]
    return [cache / name for name in names if not _NEVER.fullmatch(name.split("_")[0])]


def unpack(debs: Sequence[Path], root: Path) -> None:
    """Unpack packages (.deb files) into the folder `root`, a new root file system.

    Raises ConfigError if one cannot be unpacked.
    """
    for name in _MERGED:
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    for deb in debs:
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE) as content:
            _run(["tar", "-x", "--keep-directory-symlink", "-C", str(root)], stdin=content.stdout)
        if content.returncode != 0:
            raise ConfigError(f"{deb} cannot be unpacked; remove it and try again")
    for name in _LEFT_OUT:
        shutil.rmtree(root / name, ignore_errors=True)


def finish(root: Path) -> None:
    """Add the files to the root file system `root` that maintainer scripts would have made, if sandboxes need them.

    Raises ConfigError if a program of the image that does part of this fails.
    """
    for name in ("etc", "work", "tmp", "run", "var/tmp", "proc", "sys", "dev", "root"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "etc/passwd").write_text(
        f"root:x:0:0:root:/root:/bin/sh\nuser:x:{USER_ID}:{USER_ID}:user:/work:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/bin/sh\n"
    )
    (root / "etc/group").write_text(f"root:x:0:\nuser:x:{USER_ID}:\nnogroup:x:65534:\n")
    # A file system in memory takes over this mode, but not the folder's owner, so every user must be able to write.
    for name in ("run", "tmp", "var/tmp", "work"):
        (root / name).chmod(0o1777)
    # For a recipe with busybox in place of bash and coreutils.
    busybox = root / "usr/bin/busybox"
    if busybox.exists() and not (root / "usr/bin/bash").exists():
        for applet in _run([str(busybox), "--list"]).split():
            link = root / "usr/bin" / applet
            if not link.exists():
                link.symlink_to("busybox")
    elif not (root / "usr/bin/sh").exists():
        (root / "usr/bin/sh").symlink_to("bash")
    for library in (root / "usr/lib").glob("python3.*"):
        # Without bytecode, which only a maintainer script would make, each start of Python compiles what it imports.
        _run(["chroot", str(root), "/usr/bin/python3", "-m", "compileall", "-q", f"/usr/lib/{library.name}"])
    ldconfig = root / "usr/sbin/ldconfig"
    if ldconfig.exists():
        _run([str(ldconfig), "-r", str(root)])


def build(packages: Sequence[str], target: Path, cache: Path = CACHE) -> None:
    """Write the root file system of an image as the tar file `target`. `cache` is the folder of downloaded packages.

    Raises:
        ConfigError: a package cannot be downloaded, or this machine is not a Debian.
    """
    with tempfile.TemporaryDirectory(prefix="flash-image-") as folder:
        root = Path(folder) / "root"
        root.mkdir()
        unpack(download(packages, cache), root)
        finish(root)
        _run(["tar", "-c", "--numeric-owner", "-C", str(root), "-f", str(target), "."])


def _run(command: Sequence[str], stdin: object = None, *, timeout_s: float = 600.0) -> str:
    """Run a command and return its output. `stdin` is its input, an open file; None: that of this process.

    Raises ConfigError, with the end of the output, if it fails, is missing, or runs for more than `timeout_s` seconds.
    """
    try:
        done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, check=False, timeout=timeout_s)  # type: ignore[call-overload]
    except OSError as error:
        raise ConfigError(f"images are made of Debian packages, which needs `{command[0]}`: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{' '.join(command[:4])} … did not end within {timeout_s:g} s; try again") from error
    if done.returncode != 0:
        raise ConfigError(f"{' '.join(command[:4])} … failed: {(done.stderr or done.stdout).strip()[-800:]}")
    return done.stdout


async def _main(names: Sequence[str]) -> None:
    """Build the named images and give them to this machine's engine.

    Raises:
        ConfigError: there is no recipe of a name, there is no engine, or an image cannot be built.
        SandboxError: the engine does not answer, or does not take an image.
    """
    if unknown := [name for name in names if name not in RECIPES]:
        raise ConfigError(f"there is no recipe of {', '.join(unknown)}; expected {' or '.join(RECIPES)}")
    try:
        # Not at the top: it needs aiodocker, which the recipes do not need.
        from envs.sandbox.engines.docker import DockerBackend
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: {advice_for_extra('sandbox')}") from error

    async with DockerBackend() as engine:
        # Asked first: the downloads would be in vain without an engine that answers.
        await engine.info()
        for name in names:
            with tempfile.TemporaryDirectory(prefix="flash-image-") as folder:
                archive = Path(folder) / "root.tar"
                await asyncio.to_thread(build, RECIPES[name], archive)
                await engine.images.make(archive, name)
            sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m envs.sandbox.images", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{' or '.join(RECIPES)}; default: all")
    try:
        asyncio.run(_main(parser.parse_args().names or list(RECIPES)))
    except FlashError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
