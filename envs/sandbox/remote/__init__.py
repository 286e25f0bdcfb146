"""Client of a sandbox service, on this machine or another. Remote sandboxes are used like local ones.

client    SandboxClient, the client of the service, and RemoteSandbox, with its shells and jobs
host      a service as a host that another service places sandboxes on
http      calls: encoding, errors, and the calls that are repeated when a connection breaks
"""
