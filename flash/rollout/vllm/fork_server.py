"""Module that a fork server imports once: it imports everything of vLLM that a node loop or an engine needs.

These imports take seconds of CPU time. Node loops and the processes of engines are forked from the fork server, so they
start without imports. `flash.rollout.vllm.processes` and `flash.run.processes.forked` name this module.
"""

from flash.foreign import vllm_processes
from flash.weights.engine_process import silence_triton

silence_triton()
vllm_processes.import_engine()
vllm_processes.import_core()
