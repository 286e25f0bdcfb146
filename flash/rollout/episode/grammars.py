"""Grammars: the forms of responses that environments and agents ask for, as engines understand them.

A `ResponseForm` asks for a JSON schema of the text (`schema`), or for a call of an offered function (`call`). A grammar
has the same form as a *structural tag*: JSON that describes the possible texts of a response. The package xgrammar, in
the engines, forbids all tokens that do not lead to such a text.

`HfTokenizer` has one `Grammars`, because the format of a call depends on the model's parsers. The transcript of an
episode asks it for the grammar of a `ResponseForm` before the response is requested, so that an invalid form is refused
before anything is sampled.

A schema of few letters may take xgrammar minutes. So a process of its own, `GrammarProcess`, makes each grammar and
compiles it as an engine would. It is killed after `MOST_S`, and then the form is refused.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from flash.config.tree import ModelConfig
from flash.errors import EngineError, EnvError, describe_exit_code
from flash.foreign.forking import ForkedProcess, set_process_title
from flash.foreign.grammars import TagChecker, schema_fault, text_tag
from flash.foreign.vllm_parsers import Parsers
from flash.rollout.episode.chat_template import load_tokenizer
from flash.rollout.vllm.processes import SERVER
from flash.sampling import Grammar
from flash.types import ANY_CALL, ResponseForm, Tool
from flash.weights.engine_process import follow

KEPT_GRAMMARS = 256
"""Number of forms whose grammars, or faults, are kept. Episodes of one group ask for the same forms."""
MOST_BYTES = 1 << 20
"""Largest size in bytes of a form with its tools, as JSON. It bounds the memory of the kept grammars."""
MOST_S = 10.0
"""Seconds that making a grammar may take. Most take milliseconds. Engines take the same time, in which no other form of
theirs begins, and an engine without steps for minutes counts as dead."""
START_S = 120.0
"""Seconds that the process may take to start. Without a fork server it imports vLLM first."""
ENDS_S = 2.0
"""Seconds that the process has to end after it has closed its pipe."""


class Grammars:
    """The grammars of forms, for one model. The newest grammars are kept, because making one takes time.

    Args:
        config: names the model's folder and its parsers.
        most_s: seconds that making a grammar may take.
    """

    def __init__(self, config: ModelConfig, most_s: float = MOST_S) -> None:
        self._reasons = config.reasoning_parser is not None
        self._process = GrammarProcess(config, most_s)
        self._making = anyio.Lock()
        """Lock that is held while a grammar is made. Equal forms that are asked for meanwhile wait for that grammar."""
        self._known: dict[bytes, Grammar | str] = {}
        """Grammars or faults of the last `KEPT_GRAMMARS` forms, oldest first, by the digest of the form, the tools and
        the arguments of the chat template."""

    async def of(self, form: ResponseForm, tools: Sequence[Tool], arguments: Mapping[str, Any]) -> Grammar:
        """Return the grammar of the responses that have a form, if the prompt offers these tools.

        Calls have the format that the model's tool parser reads. The reasoning before the response is free.

        Args:
            form: the form.
            tools: functions that the prompt offers.
            arguments: arguments of the chat template, from which some parsers find out if the model reasons.

        Raises:
            EnvError: the form is invalid, engines cannot enforce it, or its grammar takes too much time. The message
                names the fault.
            EngineError: the process that makes grammars does not start, or has ended. The form may be right, so the
                episode fails, and no agent is told that its form is refused.
        """
        try:
            # The order of names counts: a response has its properties in the order of the schema.
            asked = msgspec.json.encode((form, tools, arguments))
        except (TypeError, UnicodeEncodeError, RecursionError) as error:
            raise EnvError(f"a response cannot have this form: it cannot be written as JSON: {error}") from error
        if len(asked) > MOST_BYTES:
            raise EnvError(
                f"a response cannot have this form: with the tools it has {len(asked):,} bytes as JSON, and at most "
                f"{MOST_BYTES:,} are possible"
            )
        key = blake2b(asked, digest_size=16).digest()
        known = self._known.get(key)
        if known is None:
            async with self._making:
                known = self._known.get(key)
                if known is None:
                    # The thread only waits. A caller that is cancelled does not wait for it.
                    tag, fault = await anyio.to_thread.run_sync(
                        self._process.call, asked, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
                    )
                    known = fault or Grammar(tag, dict(arguments) if self._reasons else None)
                    self._known[key] = known
                    if len(self._known) > KEPT_GRAMMARS:
                        del self._known[next(iter(self._known))]
        if isinstance(known, str):
            raise EnvError(known)
        return known


class GrammarProcess:
    """Handle of the process that makes the grammars of one model. The first call starts the process.

    The process is killed if a call takes too long, and the next call starts it again. It ends with this process.

    Args:
        config: names the model's folder and its parsers.
        most_s: seconds that a call may take, without the start of the process.
    """

    def __init__(self, config: ModelConfig, most_s: float) -> None:
        self._config = config
        self._most_s = most_s
        self._calling = threading.Lock()
        """Lock that is held by a call. The caller of a former one may be cancelled, but its thread still runs."""
        self._process: _Maker | None = None
        """The process; None while none is started."""
        self._pipe: Connection | None = None
        """Pipe to the process; None while none is started."""

    def call(self, asked: bytes) -> tuple[str, str]:
        """Make a grammar. Blocks, so it is called in a thread.

        `asked`: the form, the tools and the arguments of the chat template, as JSON. Returns the structural tag and an
        empty text, or an empty text and the fault for which the form is refused.

        Raises:
            EngineError: the process does not start, or ends during the call. The next call may work.
        """
        with self._calling:
            pipe = self._started()
            try:
                pipe.send_bytes(asked)
                if not pipe.poll(self._most_s):
                    self._end()
                    return "", f"a response cannot have this form: its grammar takes more than {self._most_s:g} s"
                tag, fault = msgspec.json.decode(pipe.recv_bytes(), type=tuple[str, str])
            except (OSError, EOFError) as error:
                # The process has closed the pipe, or is about to end: its exit code says why.
                assert self._process is not None
                self._process.join(ENDS_S)
                raise EngineError(f"the process that made the grammar of a form {self._end()}") from error
            return tag, fault

    def _started(self) -> Connection:
        """Return the pipe to the running process. Starts the process if none runs, and waits until it is ready.

        Raises:
            EngineError: the process does not start.
        """
        if self._process is not None and not self._process.is_alive():
            self._end()
        if self._pipe is None:
            self._pipe, other = Pipe()
            self._process = _Maker(self._config, other, os.getpid())
            try:
                self._process.start()
                other.close()
                if not self._pipe.poll(START_S):
                    raise TimeoutError(f"it was not ready after {START_S:g} s")
                self._pipe.recv_bytes()
            except (OSError, EOFError) as error:
                reason = str(error) or f"it {self._end()}"
                self._end()
                raise EngineError(f"the process that makes the grammars of forms did not start: {reason}") from error
        return self._pipe

    def _end(self) -> str:
        """Kill the process if it runs, and forget it. Returns how it has ended, as a text."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if pipe is not None:
            pipe.close()
        if process is None or process.pid is None:
            return "was not started"
        process.kill()
        process.join()
        return describe_exit_code(process.exitcode or 0)


class _Maker(ForkedProcess):
    """The process that makes grammars, one after the other.

    Args:
        config: names the model's folder and its parsers.
        pipe: pipe with the calls and their results.
        owner: process id of the process that owns this one.
    """

    server = SERVER

    def __init__(self, config: ModelConfig, pipe: Connection, owner: int) -> None:
        # multiprocessing kills a daemon at the end of its owner, and would wait for another process.
        super().__init__(name="grammars", daemon=True)
        self._model = config
        self._calls = pipe
        self._owner = owner

    def run(self) -> None:
        """Make grammars until the owner ends. This is the whole life of the process."""
        self.enter()
        follow(self._owner)
        set_process_title("flash.rollout.episode.grammars")
        # If memory runs out, the kernel then kills this process before the run's own.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        inner = load_tokenizer(self._model)
        checker = TagChecker(inner)
        parsers = dict[bytes, Parsers | None]()
        self._calls.send_bytes(b"")
        decoder = msgspec.json.Decoder(tuple[ResponseForm, list[Tool], dict[str, Any]])
        with suppress(EOFError):
            while True:
                form, tools, arguments = decoder.decode(self._calls.recv_bytes())
                try:
                    key = msgspec.json.encode(arguments, order="deterministic")
                    if key not in parsers:
                        parsers.clear()  # an agent may use any number of different arguments
                        parsers[key] = _parsers(self._model, inner, arguments)
                    tag, fault = make_tag(parsers[key], form, tools), ""
                    checker.check(tag)
                except EnvError as error:
                    tag, fault = "", str(error)
                # xgrammar raises errors of many types. And JSON may be too deep here that was not too deep before.
                except Exception as error:
                    reason = str(error) or type(error).__name__
                    tag, fault = "", f"a response cannot have this form: {reason}"
                self._calls.send_bytes(msgspec.json.encode((tag, fault)))
        os._exit(0)


def _parsers(config: ModelConfig, inner: Any, arguments: Mapping[str, Any]) -> Parsers | None:
    """Return the model's parsers of responses for arguments of the chat template; None if it has none."""
    if config.tool_parser is None and config.reasoning_parser is None:
        return None
    return Parsers(inner, config.tool_parser, config.reasoning_parser, arguments)


def make_tag(parsers: Parsers | None, form: ResponseForm, tools: Sequence[Tool]) -> str:
    """Return the structural tag of the responses that have a form.

    `form.call` is empty if no call is required, `ANY_CALL` if any function may be called, else a function's name. With
    `form.calling` a response may also call a function if none is required.

    Args:
        parsers: the model's parsers of responses; None if it has none.
        form: the form.
        tools: functions that the prompt offers.

    Raises:
        EnvError: the form is invalid, or engines cannot enforce it.
        ValueError: the same, found by vLLM.
    """
    offered = {tool["function"]["name"]: tool for tool in tools}
    if form.call and not offered:
        raise EnvError("a call is required, but no function is offered")
    if form.call not in ("", ANY_CALL, *offered):
        raise EnvError(f"the function {form.call!r} must be called, but is not offered")
    schemas: dict[str, dict[str, Any]] = {}
    if form.schema is not None and not form.call:
        schemas["the JSON schema"] = form.schema
    for name, tool in offered.items() if form.calling else ():
        schemas[f"the schema of the function {name}"] = tool["function"].get("parameters") or {}
    for of, schema in schemas.items():
        if (fault := schema_fault(schema)) is not None:
            raise EnvError(f"a response cannot have this form: in {of}, {fault}")
    # The choice of a call as the parsers take it: a name, "required", "auto" (a call or text), or None (no call).
    call = {"": "auto", ANY_CALL: "required"}.get(form.call, form.call) if form.calling else None
    if parsers is not None:
        return parsers.tag(None if form.call else form.schema, tools, call=call, single=form.single)
    assert form.schema is not None, "functions are offered only with a parser"
    return text_tag(form.schema)
