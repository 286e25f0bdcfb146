"""What happens to frames on their way, as a pure decision and between real hosts."""

from __future__ import annotations

import select
import socket
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

from benchmarks.rig.hosts import HEADER_BYTES, Wire, mac, targets
from tests.cluster.hosts import LONGEST_QUEUE_S, FaultyHosts, SlowWire, Way, Ways


@pytest.mark.anyio
@pytest.mark.virtual
@pytest.mark.parametrize("kind", [Wire, SlowWire])
async def test_a_frame_arrives_at_once_and_after_a_cut_never_in_this_direction_alone(kind: type[Wire]) -> None:
    ends = socket.socketpair()
    frames = [bytes(HEADER_BYTES) + bytes.fromhex(mac(host).replace(":", "")) for host in range(2)]
    arrived: list[list[int]] = []
    with ends[0], ends[1]:
        wire = kind(ends)
        async with anyio.create_task_group() as tasks:
            for cuts in (set(), {(0, 1)}, set()):
                wire.cuts = cuts
                wire.pass_on(frames[1], 0, tasks)
                wire.pass_on(frames[0], 1, tasks)
                # The port of a host sends to the other end of the pair.
                arrived.append([host for host in range(2) if select.select([ends[1 - host]], [], [], 0)[0]])
                for host in arrived[-1]:
                    assert ends[1 - host].recv(100) == frames[host]
    assert arrived == [[0, 1], [0], [0, 1]]


def test_a_slow_way_sends_one_frame_after_the_other_and_loses_what_would_wait_too_long() -> None:
    ways = Ways()
    ways.set(0, 1, Way(delay_s=0.5, bytes_per_s=1000))
    assert [ways.arrival(0, 1, 1000, 7.0) for _ in range(2)] == [8.5, 9.5]
    assert ways.arrival(0, 1, 1000, 20.0) == 21.5
    ways.set(0, 1, Way(bytes_per_s=1000))
    assert ways.arrival(0, 1, int(1000 * LONGEST_QUEUE_S) + 1, 30.0) is not None
    assert ways.arrival(0, 1, 1, 30.0) is None


def test_a_share_of_many_frames_is_lost_the_same_ones_every_time() -> None:
    def lost() -> list[int]:
        ways = Ways(seed=1)
        ways.set(0, 1, Way(loss=0.1))
        return [number for number in range(1000) if ways.arrival(0, 1, 1500, 0.0) is None]

    assert 50 < len(lost()) < 150
    assert lost() == lost()


def test_a_frame_goes_to_the_host_it_names_or_to_all_others() -> None:
    def frame(address: str) -> bytes:
        return bytes(HEADER_BYTES) + bytes.fromhex(address.replace(":", "")) + b"the rest"

    assert list(targets(frame(mac(2)), 0, 3)) == [2]
    assert list(targets(frame("ff:ff:ff:ff:ff:ff"), 1, 3)) == [0, 2]
    for nobody in (frame(mac(3)), frame(mac(0)), b"short"):
        assert list(targets(nobody, 0, 3)) == []


def received(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += end.recv(1 << 20)
    return data


def connection(hosts: FaultyHosts) -> tuple[socket.socket, socket.socket]:
    """The ends of a connection on host 0 and on host 1."""
    with hosts.socket(1) as listener:
        listener.bind((hosts.address(1), 0))
        listener.listen()
        end = hosts.socket(0)
        end.settimeout(10)
        end.connect(listener.getsockname())
        other, _ = listener.accept()
        other.settimeout(10)
        return end, other


@pytest.mark.integration
def test_what_a_cut_holds_back_arrives_after_all_and_a_reset_ends_a_connection_at_both_ends(hosts: FaultyHosts) -> None:
    hosts.set_way(0, 1, Way(delay_s=0.002, loss=0.02))
    ends = connection(hosts)
    data = bytes(range(256)) * (1 << 14)
    with ends[0], ends[1], ThreadPoolExecutor(2) as pool:
        for sender, receiver in (ends, reversed(ends)):
            sending = pool.submit(sender.sendall, data)
            assert received(receiver, len(data)) == data
            sending.result()
        hosts.cut(0, hears=True)
        ends[0].sendall(b"held back")
        ends[1].sendall(b"gets through")
        assert received(ends[0], 12) == b"gets through"
        ends[1].settimeout(0.3)
        with pytest.raises(TimeoutError):
            ends[1].recv(1)
        ends[1].settimeout(10)
        hosts.heal(0)
        assert received(ends[1], 9) == b"held back"
        hosts.reset(0)
        for end in ends:
            with pytest.raises(ConnectionError):
                end.recv(1)
    again = connection(hosts)
    with again[0], again[1]:
        again[0].sendall(b"anew")
        assert received(again[1], 4) == b"anew"
