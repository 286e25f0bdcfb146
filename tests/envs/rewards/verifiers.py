"""Verifiers with every way to fail, for worker processes to import."""

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


def dies(completion, answer):
    os._exit(3)


def exits(completion, answer):
    sys.exit(3)


def gives_nan(completion, answer):
    return math.nan


def gives_none(completion, answer):
    return None


not_a_function = 3
