"""Typed requests and replies between processes: framed msgpack over authenticated TCP."""

from __future__ import annotations

from flash.transport.auth import new_token
from flash.transport.blocking import BlockingClient
from flash.transport.client import Client, connect
from flash.transport.request import Request
from flash.transport.server import Handler, Peer, serve

__all__ = ["serve", "Peer", "Handler", "connect", "Client", "BlockingClient", "Request", "new_token"]
