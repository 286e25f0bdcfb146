"""Verifiers that misbehave, each in a worker process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time

from tests.misuse import misbehaving as m


def raises(completion: str, answer: str) -> float:
    raise m.EXCEPTIONS[completion]()


async def raises_later(completion: str, answer: str) -> float:
    raise m.EXCEPTIONS[completion]()


async def hangs_later(completion: str, answer: str) -> float:
    await m.HANGS[completion][0]()
    return 1.0


def gives(completion: str, answer: str) -> object:
    return {**m.REWARDS, **m.GOOD_REWARDS}[completion]


def acts(completion: str, answer: str) -> float:
    """Do something to the process, and give 1 all the same."""
    match completion:
        case "prints":
            sys.stdout.write("x" * 1_000_000)
            sys.stderr.write("x" * 1_000_000)
        case "writes to the stream of answers":
            os.write(1, b"RETURN 4\nabcd" * 1000)
        case "starts a program that prints":
            subprocess.run(["echo", "RETURN 4"], check=True)
        case "closes its streams":
            os.close(0)
            os.close(1)
        case "closes stdout":
            sys.stdout.close()
        case "forks":
            os.fork()
        case "forks and exits":
            if not os.fork():
                sys.exit(0)
        case "leaves a thread":
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        case "runs a loop":
            asyncio.run(asyncio.sleep(0))
        case _:
            raise AssertionError(completion)
    return 1.0


def dies(completion: str, answer: str) -> float:
    """Never answer."""
    match completion:
        case "exits":
            os._exit(0)
        case "is killed":
            os.kill(os.getpid(), 9)
        case "sleeps":
            time.sleep(1000)
        case "holds the interpreter":
            return float(sum(range(10**13)))
        case "ignores signals":
            while True:
                try:
                    time.sleep(1000)
                except BaseException:
                    continue
        case _:
            raise AssertionError(completion)
    return 1.0


ACTS = (
    *("prints", "writes to the stream of answers", "starts a program that prints", "closes its streams"),
    *("closes stdout", "forks", "forks and exits", "leaves a thread", "runs a loop"),
)
DEATHS = ("exits", "is killed", "sleeps", "holds the interpreter", "ignores signals")
