"""The program inside a sandbox: Python 3.6+, standard library only, sent to the sandbox as one piece (see `bundle`).

These modules are not imported by Flash; `bundle` joins them in the order of `PARTS`. Hence no module may have a name
at its top level that another one has, and imports between them are for readers and checkers only.
"""
