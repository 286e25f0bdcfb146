"""The one HTTP server: the OpenAI API for agents, `flash view` and the sandbox service listen by it.

    server       sockets and TLS, bounded request bodies, and an application served during a block
    connections  limits on the connections of a client, in time and in number; all use of uvicorn's internals

Ways in: `server.open_socket`, then `server.serving` with the application and its `HttpLimits`. The application reads
bodies with `server.read_body`. A refusal is a `starlette.exceptions.HTTPException`, which each application answers in
the form of its own errors.

Law: no client keeps the event loop longer than it takes to handle one small piece of the client's bytes, and no client
makes the process hold more memory than the limits say.
"""
