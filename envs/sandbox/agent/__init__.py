"""The agent: the program that runs inside a sandbox, on Python 3.6 or newer and the standard library only.

Flash does not import these modules. `bundle` joins them in the order of `PARTS` and sends the result. So no two modules
may define the same top-level name. Imports between them are only for readers and checkers.
"""
