"""Command line `flash sandbox …`: the service and its client commands.

`flash.cli` calls `add_sandbox` to describe the options, and `run_sandbox` for the chosen action. Modules that need the
packages of the extra `sandbox` are imported in the actions only.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import anyio

from flash.errors import ConfigError, FlashError, SandboxRefusedError, advice_for_extra
from flash.text import harmless, one_line

SILENCE_S = 2.0
"""Seconds without any input after which `run` prints what it waits for."""

DEFAULT_URL = "http://127.0.0.1:8700"
"""Address of a service on this machine that was started without options."""
FAILED = 125
"""Exit code of `run` if there is no result of the command, as with other container tools."""


async def standard_input() -> bytes:
    """Read the standard input to its end. Returns no bytes if it is a terminal.

    Raises:
        SandboxRefusedError: the input has more than `STREAM_INPUT` bytes.
    """
    from envs.sandbox.api import STREAM_INPUT

    if sys.stdin is None or sys.stdin.isatty():
        return b""
    data, silence_s = bytearray(), SILENCE_S
    while len(data) <= STREAM_INPUT:
        with anyio.move_on_after(silence_s) as silence:
            # A regular file cannot be polled (PermissionError), and can always be read.
            with suppress(PermissionError):
                await anyio.wait_readable(sys.stdin)
        if silence.cancelled_caught:
            sys.stderr.write("flash: reading the standard input to its end; give `< /dev/null` for none\n")
            silence_s = math.inf  # This is printed only once.
            continue
        piece = os.read(sys.stdin.fileno(), 1 << 16)
        if not piece:
            return bytes(data)
        data += piece
    raise SandboxRefusedError(
        f"the standard input has more than {STREAM_INPUT} bytes; write it to a file of a sandbox from Python, and run "
        "the command with --in"
    )


if TYPE_CHECKING:
    from envs.sandbox.api import Spec
    from envs.sandbox.pool.host import Host
    from envs.sandbox.pool.ownership import OwnerLock
    from envs.sandbox.remote.client import SandboxClient
    from flash.http.server import HttpAddress


class _Parser(argparse.ArgumentParser):
    """Parser of one action. For `run`, a wrong command line also exits with `FAILED`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        """Parse the arguments of the action. The main parser calls this, and would report unknown ones with code 2."""
        found, rest = super().parse_known_args(args, namespace)
        if rest and self._runs():
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit. `argparse` calls this for a wrong command line."""
        self.print_usage(sys.stderr)
        self.exit(FAILED if self._runs() else 2, f"{self.prog}: error: {message}\n")

    def _runs(self) -> bool:
        """Return True if this is the parser of the action `run`."""
        return self.prog.endswith(" run")


def add_sandbox(commands: Any) -> argparse.ArgumentParser:
    """Add `sandbox` with its actions to the command line, and return its parser.

    `commands` is the result of `add_subparsers` of the main parser.
    """
    sandbox: argparse.ArgumentParser = commands.add_parser(
        "sandbox",
        help="Run a service of sandboxes (containers for programs that are not trusted), use it, and test it.",
    )
    actions = sandbox.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=_Parser)

    serve = actions.add_parser("serve", help="Offer sandboxes of this machine, or of other services, over HTTP.")
    serve.add_argument(
        "--listen",
        default="127.0.0.1:8700",
        metavar="HOST:PORT|unix:PATH",
        help="Address or Unix socket of the service. Default: 127.0.0.1:8700.",
    )
    serve.add_argument(
        "--certificate",
        type=Path,
        metavar="FILE.pem",
        help="Certificate for TLS, together with --key. Clients on other machines need TLS.",
    )
    serve.add_argument("--key", type=Path, metavar="FILE.pem", help="Private key of the certificate.")
    serve.add_argument(
        "--engine", metavar="URL", help="Address of the container engine. Default: DOCKER_HOST, then the usual sockets."
    )
    serve.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME=URL=TOKENFILE",
        help="Another service, on which this one places sandboxes. May be given several times.",
    )
    _add_ca(serve, "Certificate of the authority that has signed the certificates of the services of --host.")
    serve.add_argument(
        "--warm",
        action="append",
        default=[],
        metavar="IMAGE=NUMBER",
        help="Number of sandboxes of an image that are kept ready. May be given several times.",
    )
    serve.add_argument("--users", metavar="FIRST-LAST", help="Range of user numbers. Each sandbox gets one of its own.")
    serve.add_argument(
        "--state",
        type=Path,
        default=_state_folder(),
        metavar="FOLDER",
        help="Folder for journal, lock and tokens of the service.",
    )
    serve.add_argument(
        "--keep",
        action="store_true",
        help="Leave the sandboxes for the next start of the service, instead of ending them.",
    )

    run = actions.add_parser("run", help="Run one command in a new sandbox, or in one that exists.")
    _add_client(run)
    _add_spec(run)
    run.add_argument("--in", dest="sandbox", metavar="ID", help="Id of a sandbox that exists, in place of a new one.")
    run.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="Time limit of the command. Default: 600 seconds.",
    )
    run.add_argument(
        "command_line",
        nargs="+",
        metavar="COMMAND",
        help="Command to run. A single word is given to the shell; several words are run as they are.",
    )

    _add_client(actions.add_parser("ls", help="List the sandboxes of a service."))
    remove = actions.add_parser("rm", help="End sandboxes of a service.")
    _add_client(remove)
    remove.add_argument("sandbox", nargs="+", metavar="ID", help="Ids of the sandboxes to end.")

    doctor = actions.add_parser("doctor", help="Measure from inside what a sandbox may do, and try to escape from it.")
    _add_spec(doctor)
    doctor.add_argument(
        "--engine", metavar="URL", help="Address of the container engine. Default: DOCKER_HOST, then the usual sockets."
    )
    sandbox.set_defaults(run=run_sandbox)
    return sandbox


def _add_client(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a service and a token. `_client` reads them."""
    parser.add_argument(
        "--url",
        default=os.environ.get("FLASH_SANDBOX_URL", DEFAULT_URL),
        metavar="URL|unix:PATH",
        help="Address of the service. Default: FLASH_SANDBOX_URL, then this machine's.",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        default=_state_folder() / "tokens",
        metavar="FILE",
        help="File with the token of the service. Default: that of a service on this machine.",
    )
    _add_ca(parser, "Certificate of the authority that has signed the service's certificate.")


def _add_ca(parser: argparse.ArgumentParser, help: str) -> None:
    """Add the option `--ca`. Without it, the certificates of services must be signed by a public authority.

    `help` says which service's certificate is meant.
    """
    parser.add_argument("--ca", type=Path, metavar="FILE.pem", help=f"{help} Default: the public authorities.")


def _add_spec(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a new sandbox, for the actions `run` and `doctor`. `_spec` reads them.

    The defaults repeat those of `Spec`: the actions import it only when they run, so that the help text is fast.
    """
    parser.add_argument(
        "--image", default="flash-sandbox-python", help="Image of the sandbox. Default: flash-sandbox-python."
    )
    parser.add_argument(
        "--profile",
        choices=("strict", "build", "compat"),
        default="strict",
        help="Rights of the sandbox. Default: strict, the fewest.",
    )
    parser.add_argument("--cpus", type=float, default=1.0, help="Number of cores that the sandbox may use. Default: 1.")
    parser.add_argument(
        "--memory", type=int, default=512, metavar="MIB", help="Memory that the sandbox may use. Default: 512 MiB."
    )
    parser.add_argument(
        "--network", choices=("none", "bridge"), default="none", help="Network of the sandbox. Default: none."
    )
    parser.add_argument("--runtime", metavar="NAME", help="Container runtime that is required, such as runsc.")


def _state_folder() -> Path:
    """Return the default folder of a service's journal, lock and tokens."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "flash" / "sandbox"


def run_sandbox(arguments: argparse.Namespace) -> int:
    """Run one action and return the exit code.

    Raises:
        FlashError: the action failed; `run` instead prints the error and returns `FAILED`.
    """
    actions: dict[str, Callable[[argparse.Namespace], Awaitable[int]]] = {
        "serve": _serve,
        "run": _run,
        "ls": _list,
        "rm": _remove,
        "doctor": _doctor,
    }
    try:
        return anyio.run(actions[arguments.action], arguments)
    except BrokenPipeError:
        # The reader of our output has closed the pipe. At exit, Python must not try to write the rest there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except FlashError as error:
        return _failed(arguments, error)
    except ModuleNotFoundError as error:
        return _failed(arguments, ConfigError(f"{error.name} is not installed: {advice_for_extra('sandbox')}"))


def _failed(arguments: argparse.Namespace, error: FlashError) -> int:
    """Print the error of `run` and return `FAILED`, which no command uses by custom. Other actions raise the error."""
    if arguments.action != "run":
        raise error
    sys.stderr.write(f"flash: error: {harmless(str(error))}\n")
    return FAILED


def _spec(arguments: argparse.Namespace) -> Spec:
    """Return the spec that the options of the action `run` or `doctor` describe.

    Raises:
        ConfigError: an option has a value that no spec may have.
    """
    import msgspec

    from envs.sandbox.api import Spec

    wanted = {
        "image": arguments.image,
        "profile": arguments.profile,
        "cpus": arguments.cpus,
        "memory_mib": arguments.memory,
        "network": arguments.network,
        "runtime": arguments.runtime,
    }
    try:
        return msgspec.convert(wanted, Spec)
    except msgspec.ValidationError as error:
        # The error names a field of `Spec`, but the user knows only the option.
        text = str(error).replace("$.memory_mib", "--memory").replace("$.", "--")
        raise ConfigError(f"sandbox: {text}") from None


# ---- the service


async def _serve(arguments: argparse.Namespace) -> int:
    """Serve sandboxes until SIGTERM or SIGINT. With `--keep` the process then exits and leaves the sandboxes.

    The lock is taken before the hosts are opened: two services with one state folder would remove each other's
    sandboxes.

    Raises:
        ConfigError: the state folder, the token file, the address, `--host`, `--warm`, `--users` or `--ca` cannot be
            used, or another service uses the state folder or the address.
    """
    from envs.sandbox.pool.journal import SqliteJournal
    from envs.sandbox.pool.ownership import OwnerLock
    from envs.sandbox.pool.pool import open_pool
    from envs.sandbox.service.service import open_service
    from envs.sandbox.service.web import make_app, write_to_stderr
    from envs.sandbox.tokens import Tokens, read_tokens
    from flash.http.server import open_socket, serving

    write_to_stderr()
    # Each client and each sandbox takes a few descriptors; the usual limit of 1,024 is too low for a service.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    state: Path = arguments.state
    try:
        await anyio.Path(state).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--state {state}: {error.strerror}; name a folder that can be made") from error
    tokens = Tokens(read_tokens(state / "tokens"))
    address = parse_address(arguments.listen, arguments.certificate, arguments.key)
    async with AsyncExitStack() as stack:
        lock = stack.enter_context(OwnerLock(state / "lock"))
        listening = stack.enter_context(open_socket(address))
        journal = SqliteJournal(state / "journal.sqlite")
        stack.callback(journal.close)
        stops = stack.enter_context(anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT))
        hosts = await _hosts(arguments, stack, _service_id(state), lock)
        pool = await stack.enter_async_context(open_pool(hosts, journal=journal))
        service = await stack.enter_async_context(open_service(pool, tokens, os.uname().nodename))
        url = await stack.enter_async_context(serving(make_app(service), listening, address))
        sys.stdout.write(f"sandboxes at {url}, tokens in {state / 'tokens'}\n")
        sys.stdout.flush()
        async for _ in stops:
            break
        if arguments.keep:
            # This ends like `kill -9`, from which the next start recovers: the journal and the containers are always
            # consistent.
            os._exit(0)
    return 0


async def _hosts(arguments: argparse.Namespace, stack: AsyncExitStack, service: str, lock: OwnerLock) -> list[Host]:
    """Return the hosts of the service: the services of `--host`, or else this machine's engine. `stack` closes them.

    `--engine`, `--warm` and `--users` are about this machine's engine, and have no effect with `--host`. `service` is
    the id of this service and `lock` its lock; both are in the labels of its containers.

    Raises:
        ConfigError: an option, a token file or the certificate cannot be used, or there is no engine.
        SandboxError: a service of `--host` cannot be reached, or does not accept its token.
    """
    from envs.sandbox.engines.docker import DockerBackend
    from envs.sandbox.engines.docker_containers import USERS, parse_users
    from envs.sandbox.pool.local_host import open_engine_host
    from envs.sandbox.pool.ownership import Identity
    from envs.sandbox.remote.client import SandboxClient, certificate_check, service_token
    from envs.sandbox.remote.host import RemoteHost

    hosts: list[Host] = []
    for text in arguments.host:
        name, url, path = _named_service(text)
        client = SandboxClient(url, service_token(Path(path)), verify=certificate_check(arguments.ca))
        hosts.append(RemoteHost(name, await stack.enter_async_context(client), service))
    if not hosts:
        users = parse_users(arguments.users) if arguments.users else USERS
        backend = await stack.enter_async_context(DockerBackend(arguments.engine, users=users))
        warm = [_warm(text) for text in arguments.warm]
        hosts.append(await stack.enter_async_context(open_engine_host(backend, Identity.of(service, lock), warm=warm)))
    return hosts


def _service_id(state: Path) -> str:
    """Return the id of the service, which stays the same after each start with this state folder.

    Raises:
        ConfigError: the file of the id is empty.
    """
    from uuid import uuid4

    path = state / "service"
    if not path.exists():
        # Moved to its place when it is complete. A service that is killed here, or whose disk is full, would otherwise
        # begin again with an empty id, and two of them would remove each other's sandboxes.
        new = state / "service.new"
        new.write_text(uuid4().hex)
        new.replace(path)
    if not (found := path.read_text().strip()):
        raise ConfigError(f"{path} is empty, and should hold the id of the service; remove it to get a new one")
    return found


def _named_service(text: str) -> tuple[str, str, str]:
    """Return the name, the address and the token file of `--host`. Raises ConfigError for another form."""
    name, _, rest = text.partition("=")
    url, _, path = rest.rpartition("=")
    if not (name and url and path):
        raise ConfigError(f"--host {text!r}: expected NAME=URL=TOKENFILE")
    return name, url, path


def _warm(text: str) -> tuple[Spec, int]:
    """Return the spec and the number of sandboxes of `--warm`. Raises ConfigError for another form."""
    import msgspec

    from envs.sandbox.api import Spec

    image, _, number = text.rpartition("=")
    if not image or not number.isdecimal():
        raise ConfigError(f"--warm {text!r}: expected IMAGE=NUMBER")
    try:
        # The constructor of a struct checks nothing. The engine would refuse a wrong name again and again.
        return msgspec.convert({"image": image}, Spec), int(number)
    except msgspec.ValidationError:
        raise ConfigError(f"--warm {text!r}: {image!r} cannot be the name of an image") from None


def parse_address(listen: str, certificate: Path | None, key: Path | None) -> HttpAddress:
    """Return the address to listen on, for TLS with a certificate and its key. Raises ConfigError for another form."""
    from flash.http.server import HttpAddress

    if listen.startswith("unix:"):
        return HttpAddress(unix=Path(listen.removeprefix("unix:")), certificate=certificate, key=key)
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--listen {listen!r}: expected HOST:PORT or unix:PATH")
    return HttpAddress(host=host.strip("[]"), port=int(port), certificate=certificate, key=key)


# ---- the client commands


@asynccontextmanager
async def _client(arguments: argparse.Namespace) -> AsyncGenerator[SandboxClient]:
    """Connect to the service that the options name, for the time of the block.

    FLASH_SANDBOX_TOKEN takes precedence over the token file, whose `admin` token is used.

    Raises:
        ConfigError: the address, the token or the certificate cannot be used.
        SandboxError: the service cannot be reached, or does not accept the token.
    """
    from envs.sandbox.remote.client import SandboxClient, certificate_check, service_token

    verify = certificate_check(arguments.ca)
    token = os.environ.get("FLASH_SANDBOX_TOKEN") or service_token(arguments.token_file)
    async with SandboxClient(arguments.url, token, verify=verify) as client:
        yield client


@asynccontextmanager
async def _sandbox(arguments: argparse.Namespace) -> AsyncGenerator[Any]:
    """Yield the sandbox that `--in` names, or else a new one that ends with the block.

    Raises SandboxError if there is no such sandbox, or none can be started.
    """
    spec = None if arguments.sandbox else _spec(arguments)
    async with _client(arguments) as client:
        if spec is None:
            yield await client.find(arguments.sandbox)
        else:
            async with client.acquire(spec, owner="cli") as sandbox:
                yield sandbox


async def _run(arguments: argparse.Namespace) -> int:
    """Run one command, and print its output as it arrives.

    Returns an exit code as a shell would: that of the command, 124 after a timeout, or 128 and the number of the signal
    that ended it; `FAILED` without a result.
    """
    from envs.sandbox.api import Chunk

    words: list[str] = arguments.command_line
    stdin = await standard_input()
    async with _sandbox(arguments) as sandbox:
        command = words[0] if len(words) == 1 else words
        async for item in sandbox.stream(command, timeout=arguments.timeout, stdin=stdin):
            if isinstance(item, Chunk):
                target = sys.stdout if item.stream == "stdout" else sys.stderr
                target.buffer.write(item.data)
                target.buffer.flush()
                continue
            if item.timed_out:
                sys.stderr.write(f"flash: killed after {arguments.timeout:g} s\n")
                return 124
            if item.signal is not None:
                return 128 + int(getattr(signal, item.signal, 0))
            return item.exit_code if item.exit_code is not None else FAILED
    return FAILED


async def _list(arguments: argparse.Namespace) -> int:
    """Print one line for each sandbox that the token may use: id, state, owner, host (`-` without one) and image."""
    async with _client(arguments) as client:
        for info in await client.list():
            columns = (info.id, info.state, info.owner, info.host or "-", info.spec.image)
            sys.stdout.write("  ".join(map(one_line, columns)) + "\n")
    return 0


async def _remove(arguments: argparse.Namespace) -> int:
    """End the named sandboxes one after another, and print the id of each when it is removed."""
    async with _client(arguments) as client:
        for id in arguments.sandbox:
            await client.end(id)
            sys.stdout.write(f"{id}\n")
    return 0


async def _doctor(arguments: argparse.Namespace) -> int:
    """Measure a sandbox of this machine's engine, and print the findings. Returns 1 if a check failed, else 0."""
    from envs.sandbox.doctor import doctor, lines
    from envs.sandbox.engines.docker import DockerBackend

    async with DockerBackend(arguments.engine) as backend:
        diagnosis = await doctor(backend, _spec(arguments))
    for line in lines(diagnosis):
        sys.stdout.write(f"{one_line(line)}\n")
    return 0 if diagnosis.ok else 1
