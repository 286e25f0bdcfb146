"""Module that the fork server imports once: everything that a node loop or an engine would import for itself.

The imports take seconds of a processor. Node loops and engines are forked from the fork server, so a restart needs none
of them.
"""

from flash.foreign import vllm_processes

vllm_processes.import_engine()
vllm_processes.import_core()
