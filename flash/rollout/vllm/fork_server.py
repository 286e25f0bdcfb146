"""Imported, once, by the process from which node loops and engines are forked: what each would import for itself.

That takes seconds of a processor; a node loop or an engine that starts again takes none of them.
"""

from flash.foreign import vllm

vllm.import_engine()
vllm.import_core()
