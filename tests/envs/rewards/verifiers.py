"""Verifiers with every way to fail, for worker processes to import."""

import asyncio
import functools
import math
import os
import sys
import time


def length(completion, answer):
    return len(completion) - len(answer)


def process_id(completion, answer):
    return os.getpid()


def raises(completion, answer):
    raise LookupError("no such answer")


def raises_unpicklable(completion, answer):
    class Local(Exception):
        pass

    raise Local(lambda: None)


def hangs(completion, answer):
    time.sleep(3600)


def computes(completion, answer):
    while completion != answer:
        pass
    return 1.0


def waits_for_a_server(completion, answer):
    if completion != answer:
        time.sleep(3600)
    return 1.0


def dies(completion, answer):
    os._exit(3)


def exits(completion, answer):
    sys.exit(3)


def gives_nan(completion, answer):
    return math.nan


def gives_none(completion, answer):
    return None


class Judge:
    async def __call__(self, completion, answer):
        await asyncio.sleep(0)
        return float(completion == answer)


judge = Judge()
judge_in_part = functools.partial(judge)


def gives_a_coroutine(completion, answer):
    return judge(completion, answer)


not_a_function = 3


def points(answer, row):
    return row["points"] * len(row["tags"])


async def takes_points(answer, row):
    return row.pop("points")


def computes_on_a_row(answer, row):
    return computes(answer, row["answer"])
