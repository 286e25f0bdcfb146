"""Sandboxes over HTTP, for programs on this machine or others: `flash.http` serves it, `envs.sandbox.remote` asks it.

web              the application, behind the guard that asks for a token, and its log; way in: `make_app`
endpoint         what a table of endpoints is: checked calls, answers, errors as problem+json
routes*          the tables: leases, snapshots and files; commands
openapi          the document made of them
service          the state behind the routes: who may use what; way in: `open_service`
work             what the clients of one lease have open
"""
