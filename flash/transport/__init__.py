"""Typed requests and replies between the processes of a run: framed msgpack over authenticated TCP connections.

The hub calls `serve`. Node loops call it through `connect` and `Client`, trainer ranks through `BlockingClient`.
Weights travel on connections of their own (`flash.weights`), which use the proof of `auth` and nothing else from here.

    client (connect, Client, BlockingClient)                      server (serve, Peer, Handler)
        call(request) → REQUEST frame ──►  FrameConnection  ──► handler(peer, request)
        reply         ◄── REPLY or ERROR ◄──  (connection)  ◄── reply struct or FlashError

    auth    both ends prove that they hold the run's token, before the first frame
    frames  requests, their replies' types, their bytes, and one stream of frames in each direction with bounded buffers

Security: the token is proven in both directions and never sent (`auth`). Every size is checked against a bound before
memory is allocated for it (`auth`, `frames.FrameDecoder`). Connections without a proof are few and short-lived
(`server`). Messages are msgpack, decoded into declared structs: no pickle, so that bytes cannot run code.
"""

from __future__ import annotations

from flash.transport.auth import new_token
from flash.transport.client import BlockingClient, Client, connect
from flash.transport.frames import Request
from flash.transport.server import Handler, Peer, serve

__all__ = ["serve", "Peer", "Handler", "connect", "Client", "BlockingClient", "Request", "new_token"]
