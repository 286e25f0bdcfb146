"""What one client may ask of the service, and how slow it may be."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on requests and connections. The defaults suit the internet; tests make them small."""

    head_bytes: int = 32 << 10
    """Largest head of a request."""
    head_s: float = 10.0
    """Seconds for the head of a request to arrive, and for the rest of a body that nobody wants any more."""
    body_bytes: int = 64 << 20
    """Largest request body."""
    receive_s: float = 15.0
    """Seconds between two pieces of a request body."""
    bytes_per_s: int = 4096
    """Slowest average at which a body may arrive, or an answer be taken: a byte now and then holds nothing open."""
    stall_s: float = 30.0
    """Seconds over which the taking of an answer is measured."""
    idle_s: float = 75.0
    """Seconds for which a connection may stay open between two requests."""
    message_bytes: int = 1 << 20
    """Largest message on a websocket."""
    connections: int = 4096
    """Open at a time, or half of what the process may open, if that is less. Beyond them requests get 503."""
    strangers: int = 512
    """Of these, connections that have not shown a valid token yet; one more ends the oldest of them."""
