"""The tcp backend without an engine: pulled tensors equal the published ones, or a typed error gives the reason."""

from __future__ import annotations

import socket
import struct
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from flash.errors import DeadlineError, TransportError, VersionGoneError, WeightsError
from flash.transport.auth import MAGIC, NONCE_BYTES, PROOF_BYTES
from flash.weights.broadcast import BroadcastRequest, VersionReceived
from flash.weights.image import make_image
from flash.weights.publisher import HostPublisher, Offer
from flash.weights.tcp import CHUNK_BYTES, TcpReceiver, WeightServer, WeightSource, pull, receive_message
from flash.weights.versions import decode_update

Tensors = list[tuple[str, torch.Tensor]]


@pytest.fixture
def publisher() -> Iterator[HostPublisher]:
    """Yield the publisher of rank 0, for engines in bfloat16."""
    publisher = HostPublisher(0, "127.0.0.1", torch.bfloat16, 5.0, 5.0)
    yield publisher
    publisher.close()


@pytest.fixture
def server() -> Iterator[WeightServer]:
    """Yield a server to which a test gives its own images."""
    server = WeightServer("127.0.0.1", 5.0, 5.0)
    yield server
    server.close()


def publish(publisher: HostPublisher, version: int, tensors: Tensors) -> WeightSource:
    """Publish a version, and return the source that engines would be told."""
    return WeightSource(**decode_update(offered(publisher, version, tensors).update_info).update)


def offered(publisher: HostPublisher, version: int, tensors: Tensors) -> Offer:
    """Publish a version, and return the publisher's offer."""
    offer = publisher.publish(version, iter(tensors))
    assert offer is not None
    return offer


def some_tensors() -> Tensors:
    """Return tensors of many forms; the last one is sent in several chunks."""
    return [
        ("matrix", torch.randn(7, 5)),
        ("transposed", torch.randn(3, 4).t()),
        ("scalar", torch.tensor(2.5)),
        ("empty", torch.empty(0, 3)),
        ("counts", torch.arange(6)),
        ("large", torch.randn(CHUNK_BYTES // 2 + 11)),
    ]


def test_every_tensor_arrives_as_it_was_in_the_engines_dtype(publisher: HostPublisher) -> None:
    tensors = some_tensors()
    pulled = dict(pull(publish(publisher, 1, tensors)))
    assert list(pulled) == [name for name, _ in tensors]
    for name, tensor in tensors:
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert pulled[name].dtype == expected.dtype
        assert torch.equal(pulled[name], expected)


def test_a_published_version_is_immutable(publisher: HostPublisher) -> None:
    weight = torch.ones(8, dtype=torch.bfloat16)
    source = publish(publisher, 1, [("weight", weight)])
    weight.zero_()
    assert torch.equal(dict(pull(source))["weight"], torch.ones(8, dtype=torch.bfloat16))


def test_only_the_newest_two_versions_are_held(publisher: HostPublisher) -> None:
    sources = [publish(publisher, version, [("weight", torch.full((4,), float(version)))]) for version in range(3)]
    with pytest.raises(VersionGoneError, match=r"version 0 is not held any more; held are \[1, 2\]"):
        list(pull(sources[0]))
    assert [dict(pull(source))["weight"][0].item() for source in sources[1:]] == [1.0, 2.0]


def test_a_damaged_tensor_is_named_with_both_checksums(server: WeightServer) -> None:
    image = make_image([("good", torch.ones(4)), ("bad", torch.ones(4))])
    published = image.payloads[1].tobytes()
    image.payloads[1][5] ^= 0xFF
    received = []
    with pytest.raises(WeightsError, match="tensor bad of version 4 is damaged") as caught:
        received += pull(server.hold(4, image))
    assert f"{zlib.crc32(published):08x} was published" in str(caught.value)


def test_a_manifest_other_than_the_announced_one_is_refused(server: WeightServer) -> None:
    source = server.hold(1, make_image([("weight", torch.ones(4))]))
    server.hold(1, make_image([("weight", torch.zeros(4))]))
    with pytest.raises(WeightsError, match="manifest of version 1"):
        list(pull(source))


def test_a_worker_refuses_a_trainer_without_the_token(server: WeightServer) -> None:
    source = server.hold(1, make_image([("weight", torch.ones(4))]))
    source.token = bytes(NONCE_BYTES).hex()
    with pytest.raises(TransportError, match=r"no weights from 127\.0\.0\.1:.* does not prove our token"):
        list(pull(source))


def test_a_trainer_sends_nothing_to_a_worker_without_the_token(server: WeightServer) -> None:
    source = server.hold(1, make_image([("weight", torch.ones(4))]))
    with socket.create_connection((source.host, source.port), timeout=5) as connection:
        connection.sendall(MAGIC + bytes(NONCE_BYTES))
        challenge = b""
        while len(challenge) < len(MAGIC) + NONCE_BYTES + PROOF_BYTES:
            challenge += connection.recv(4096)
        # The trainer's own proof, sent back without a name: the roles in the proofs must keep it from passing.
        connection.sendall(challenge[-PROOF_BYTES:] + bytes([0]))
        assert connection.recv(4096) == b""


def test_a_silent_trainer_is_a_deadline_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = WeightSource("127.0.0.1", silent.getsockname()[1], "00", 1, "", 0.2)
        with pytest.raises(DeadlineError, match="weights version 1"):
            list(pull(source))


def test_a_closed_publisher_cannot_be_reached(publisher: HostPublisher) -> None:
    source = publish(publisher, 1, [("weight", torch.ones(2))])
    publisher.close()
    with pytest.raises(TransportError, match="cannot be pulled"):
        list(pull(source))


def test_the_other_ranks_take_part_in_the_gather_and_offer_nothing() -> None:
    gathered = iter(some_tensors())
    other = HostPublisher(1, "127.0.0.1", torch.bfloat16, 5.0, 5.0)
    assert other.publish(1, gathered) is None
    other.close()
    assert next(gathered, None) is None


@pytest.fixture
def deltas() -> Iterator[HostPublisher]:
    """Yield the publisher of rank 0 that sends changes to workers which hold the version before."""
    publisher = HostPublisher(0, "127.0.0.1", torch.bfloat16, 5.0, 5.0, partial(WeightServer, deltas=True))
    yield publisher
    publisher.close()


def stepped(tensors: Tensors, share: float) -> Tensors:
    """Return the next version: this share of elements changes, and all elements of the tensor "matrix"."""
    return [
        (name, torch.where(torch.rand(one.shape) < (1.0 if name == "matrix" else share), one + 1, one))
        for name, one in tensors
    ]


def exact(pulled: dict[str, torch.Tensor], tensors: Tensors) -> bool:
    """Return True if the pulled tensors equal the published ones in the engines' dtype, in the same order."""
    return list(pulled) == [name for name, _ in tensors] and all(
        torch.equal(pulled[name], one.bfloat16() if one.is_floating_point() else one) for name, one in tensors
    )


def test_a_worker_that_holds_the_version_before_gets_only_changes(deltas: HostPublisher) -> None:
    tensors, held = some_tensors(), TcpReceiver()
    whole = offered(deltas, 0, tensors).sent_bytes
    assert exact(dict(pull(publish(deltas, 1, tensors), held.receive)), tensors)
    for version in range(2, 6):
        tensors = stepped(tensors, 0.01)
        given = dict(pull(publish(deltas, version, tensors), held.receive))
        assert exact(given, tensors)
        for one in given.values():  # a model may write to the tensors that it gets
            one.view(-1)[:1] = 7
    tensors = stepped(tensors, 0.01)
    assert offered(deltas, 6, tensors).sent_bytes < 0.05 * whole
    assert offered(deltas, 7, stepped(tensors, 1.0)).sent_bytes == whole


def test_a_worker_that_missed_a_version_or_has_none_gets_whole_tensors(deltas: HostPublisher) -> None:
    tensors = some_tensors()
    late, new = TcpReceiver(), TcpReceiver()
    dict(pull(publish(deltas, 0, tensors), late.receive))
    publish(deltas, 1, tensors := stepped(tensors, 0.1))
    source = publish(deltas, 2, tensors := stepped(tensors, 0.1))
    assert exact(dict(pull(source, late.receive)), tensors)
    assert exact(dict(pull(source, new.receive)), tensors)
    assert exact(dict(pull(source)), tensors)
    source = publish(deltas, 3, tensors := stepped(tensors, 0.1))
    assert all(exact(dict(pull(source, one.receive)), tensors) for one in (late, new))


def test_changes_of_another_trainer_are_not_applied_to_held_tensors(deltas: HostPublisher) -> None:
    """This happens after a restart of the trainer ranks, which publish the same version numbers again."""
    held, other = (
        TcpReceiver(),
        HostPublisher(0, "127.0.0.1", torch.bfloat16, 5.0, 5.0, partial(WeightServer, deltas=True)),
    )
    tensors = some_tensors()
    dict(pull(publish(deltas, 1, tensors), held.receive))
    publish(other, 1, tensors := stepped(tensors, 0.1))
    source = publish(other, 2, tensors := stepped(tensors, 0.1))
    assert exact(dict(pull(source, held.receive)), tensors)
    other.close()


@pytest.mark.parametrize("place", [0, 2**31 - 1])
def test_damaged_changes_are_refused_and_the_next_pull_is_whole(place: int) -> None:
    server, held = WeightServer("127.0.0.1", 5.0, 5.0, deltas=True), TcpReceiver()
    weights = torch.randn(1000)
    dict(pull(server.hold(1, make_image([("weight", weights.clone())])), held.receive))
    weights[5] = 9.0
    source = server.hold(2, make_image([("weight", weights.clone())]))
    hidden: Any = server
    (change,) = hidden._changes[2]
    change.places[0] = place
    with pytest.raises(WeightsError, match="tensor weight of version 2 is damaged"):
        dict(pull(source, held.receive))
    assert torch.equal(dict(pull(source, held.receive))["weight"], weights)
    server.close()


@pytest.mark.parametrize("word", [b"\x81\xa4type\xa3As\xeb", b"\x81\xa1x" + b"\x91" * 9000, b"\xc1"])
def test_a_message_that_cannot_be_decoded_is_a_transport_error(word: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack("!I", len(word)) + word)
        with pytest.raises(TransportError, match="cannot be decoded"):
            receive_message(ours, msgspec.msgpack.Decoder(VersionReceived | BroadcastRequest))
