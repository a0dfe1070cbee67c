"""Messages between trainer and engine: exact floats, and a clear error for every way a stream can end."""

import math
import socket
import struct
import threading

import pytest

from megatron_rl.errors import EngineError
from megatron_rl.rollout import wire
from megatron_rl.rollout.wire import WireClosed, WireTimeout, keep_alive, recv_message, send_message


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_floats_survive_bit_for_bit(pair):
    values = [0.1, -1 / 3, 5e-324, 1.7976931348623157e308, -math.inf, 2.0**-149]
    send_message(pair[0], {"logprobs": values})
    assert recv_message(pair[1])["logprobs"] == values


def test_messages_keep_their_borders(pair):
    for i in range(3):
        send_message(pair[0], {"id": i})
    assert [recv_message(pair[1])["id"] for _ in range(3)] == [0, 1, 2]


def test_a_message_larger_than_the_socket_buffer_arrives_whole(pair):
    message = {"token_ids": list(range(300_000))}
    sender = threading.Thread(target=send_message, args=(pair[0], message))
    sender.start()
    assert recv_message(pair[1], timeout_s=30) == message
    sender.join()


def test_an_end_inside_a_message_says_how_far_it_came(pair):
    pair[0].sendall(struct.pack("<Q", 10) + b"{}")
    pair[0].close()
    with pytest.raises(WireClosed, match="after 2 of 10 bytes"):
        recv_message(pair[1])


def test_a_slow_sender_times_out_even_when_bytes_keep_coming(pair):
    pair[0].sendall(struct.pack("<Q", 10) + b"{")
    with pytest.raises(WireTimeout, match="1 of 10 bytes"):
        recv_message(pair[1], timeout_s=0.05)


def test_sending_to_one_who_never_reads_ends_in_time(pair):
    with pytest.raises(WireTimeout, match=r"\d{7} bytes were not taken in time"):
        send_message(pair[0], {"token_ids": [1234] * 1_000_000}, timeout_s=0.05)


def test_a_peer_that_the_kernel_gave_up_is_lost_and_not_late():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        with ours, theirs:
            keep_alive(ours)
            # as after DEAD_AFTER_S, for a peer that takes no bytes
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 300)
            ours.setblocking(False)
            with pytest.raises(BlockingIOError):
                while True:
                    ours.send(b"x" * (1 << 20))
            with pytest.raises(WireClosed, match=r"connection lost while receiving.*timed out"):
                recv_message(ours, timeout_s=30)


def test_no_time_left_is_a_timeout_and_sends_nothing(pair):
    with pytest.raises(WireTimeout):
        send_message(pair[0], {"id": 1}, timeout_s=0.0)
    send_message(pair[0], {"id": 2})
    assert recv_message(pair[1], timeout_s=5) == {"id": 2}


def test_a_message_too_large_to_be_accepted_is_refused_before_a_byte_leaves(pair, monkeypatch):
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 20)
    with pytest.raises(EngineError, match="30 bytes cannot be sent, at most 20 are allowed"):
        send_message(pair[0], {"text": "more than that fits"})
    send_message(pair[0], {"id": 1})
    assert recv_message(pair[1], timeout_s=5) == {"id": 1}


def test_sending_to_nobody_is_an_error(pair):
    pair[1].close()
    with pytest.raises(WireClosed):
        send_message(pair[0], {"id": 1})


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        (struct.pack("<Q", 1 << 40), "at most"),
        (struct.pack("<Q", 3) + b"\xff{}", "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "expected a JSON object, got list"),
    ],
)
def test_what_is_not_a_message_is_refused(pair, frame, match):
    pair[0].sendall(frame)
    with pytest.raises(EngineError, match=match):
        recv_message(pair[1])
