"""The agent: the program that runs inside a sandbox, on Python 3.6 or newer and the standard library only.

`envs.sandbox.engines.bundle` joins the modules in the order of `PARTS`, and sends the text into each sandbox. So no two
modules may define the same top-level name, and imports between them are only for readers and checkers. The host's side
of Flash imports only constants and `remove` from here; tests import more.
"""
