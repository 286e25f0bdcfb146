"""The HTTP server of all services: the APIs for agents, `flash view` and the sandbox service.

    server       sockets and TLS, bounded request bodies, and an application served during a block
    connections  limits on the connections of a client, in time and in number; all use of uvicorn's internals

Usage: call `server.open_socket`, then `server.serving` with the application and its `HttpLimits`. The application reads
bodies with `server.read_body`. A refusal is a `starlette.exceptions.HTTPException`, which each application answers in
the format of its own errors.

Law: no client keeps the event loop busy longer than one small piece of its bytes takes. No client makes the process
hold more memory than the limits allow.
"""
