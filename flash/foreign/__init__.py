"""Uses of other libraries beyond their documented interface, so that a new release is checked in one place.

Each module serves one library: `torch` and `kernels` (its attention), `transformers` with `dividing` and
`chat_templates`, `peft`, multiprocessing (`forking`), asyncio and anyio (`abandoned`), and vLLM (`vllm`, `vllm_worker`,
`vllm_processes`, `vllm_parsers`, `vllm_arguments`, `grammars`). Most modules have a list `TOUCHED` of the attributes
that they use. The tests in tests/foreign look for each attribute in the installed releases. `vllm_touched` has most of
the lists for vLLM.
"""
