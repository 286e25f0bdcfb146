"""Sandboxes over HTTP, for programs on this machine or on others. `envs.sandbox.remote` is the client.

web              the application, behind a guard that checks the token, and the log; entry point: `make_app`
endpoint         a table of endpoints: checked calls, answers, errors as problem+json, the OpenAPI document
routes           the table: leases, snapshots, files and commands
service          the state behind the routes, with the sessions, jobs and calls of each lease; entry point:
                 `open_service`

`flash.http` is the HTTP server in which the application runs.
"""
