"""The listening end."""

from __future__ import annotations

import socket

from envs.sandbox.service.server import Address, open_socket


def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_head():
    with open_socket(Address(port=0)) as bound:
        # Where asyncio looks before it turns Nagle's algorithm off.
        assert bound.proto == socket.IPPROTO_TCP
