"""Imported, once, by the process from which node loops and engines are forked: what each would import for itself.

That takes seconds of a processor; a node loop or an engine that starts again takes none of them.
"""

from flash.foreign import vllm_processes

vllm_processes.import_engine()
vllm_processes.import_core()
