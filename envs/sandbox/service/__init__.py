"""Sandboxes over HTTP, for programs on this machine or others: `flash.http` serves it, `envs.sandbox.remote` asks it.

web              the application, behind the guard that asks for a token; way in: `make_app`
endpoint         what a table of endpoints is: checked calls, answers, errors as problem+json
routes*          the tables: leases and snapshots, commands, files
openapi          the document made of them
terminal         a shell over a websocket
service          the state behind the routes: who may use what; way in: `open_service`
work             what the clients of one lease have open
logs             one line per record
"""
