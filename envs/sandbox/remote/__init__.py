"""Sandboxes of a service on this machine or another, used like local ones.

client    the service's client; way in: `SandboxClient`
sandbox   a sandbox of it, with its shells and jobs
host      a service as a host that another service places sandboxes on
http      calls: encoding, errors, and what is sent again when a connection breaks
"""
