"""Imported, once, by the process from which a node loop forks its engines: what each would import for itself.

That takes seconds of a processor; an engine that starts again takes none of them. The process ends when the node loop
does, and when that has no engine left; a SIGTERM, which Slurm sends to all of a job, is for the engines alone.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal

from flash.foreign import vllm
from flash.weights.plugin import NODE_PID, follow

signal.signal(signal.SIGTERM, signal.SIG_IGN)
# Out of reach of the signals that the launcher's process group gets: the node loop closes its engines in order.
os.setpgid(0, 0)
follow(int(os.environ[NODE_PID]))
# What is imported is for good: collecting meanwhile takes a fifth of the time, and no collection of a forked process is
# to look at it, which would copy it.
gc.disable()
vllm.import_core()
gc.freeze()
gc.enable()
# Nothing is to be tidied up, which would take another second.
atexit.register(os._exit, 0)
