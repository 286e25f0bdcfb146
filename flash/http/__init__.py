"""The one HTTP server: what agents take for the OpenAI API, `flash view` and the sandbox service listen by it.

    server       sockets and TLS; an application served for the time of a block, and its orderly end
    connections  what a client holds open: in time by its own progress, in number, and in bytes of bodies
    bodies       a request's body, bounded in size, in time, and in what it would cost to decode

Ways in: `server.open_socket`, then `server.serving` with the application and its `HttpLimits`; within the application
`bodies.read_body`. What is refused here is a `starlette.exceptions.HTTPException`, which each application answers in
the form of its own errors.

Law: a client never holds the loop for longer than one small piece of what it sent takes, nor more memory than the
limits say.
"""
