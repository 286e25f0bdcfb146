"""Sandboxes over HTTP, for programs on this machine or on others. `envs.sandbox.remote` is the client.

web              the application, behind a guard that checks the token, and the log; entry point: `make_app`
endpoint         a table of endpoints: checked calls, answers, errors as problem+json
routes*          the tables: leases, snapshots and files; commands
openapi          the OpenAPI document, made from the tables
service          the state behind the routes: which token may use which lease; entry point: `open_service`
work             the sessions, jobs and repeated calls of one lease

`flash.http` is the HTTP server in which the application runs.
"""
