"""Where the weight channel listens, and that every member can meet at an address that is not loopback."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.transports import LOOPBACK, Membership, open_store
from megatron_rl.reshard.transports.gloo import GlooTransport
from megatron_rl.reshard.transports.rendezvous import join_store

# Linux answers on all of 127/8; these two are not the one that `LOOPBACK` names
HOST, ANOTHER = "127.0.0.2", "127.0.0.3"


def reaches(address, port):
    try:
        socket.create_connection((address, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_store_on_loopback_is_hidden_from_other_addresses():
    store = open_store(LOOPBACK, 0, timeout_s=5.0)
    assert reaches(LOOPBACK, store.port)
    assert not reaches(ANOTHER, store.port)


def test_a_store_for_other_hosts_listens_on_every_address():
    store = open_store(HOST, 0, timeout_s=5.0)
    assert reaches(HOST, store.port)
    assert reaches(ANOTHER, store.port)


def membership(host, port, rank, timeout_s):
    return Membership(rank=rank, num_trainers=1, num_workers=1, host=host, port=port, timeout_s=timeout_s)


def join(host, store, rank):
    member = membership(host, store.port, rank, 20.0)
    return GlooTransport(member, store if rank == 0 else join_store(member))


@pytest.mark.parametrize("host", [LOOPBACK, HOST, "localhost"])
def test_members_meet_at_the_host_they_are_given(host):
    store = open_store(host, 0, timeout_s=20.0)
    with ThreadPoolExecutor(2) as pool:
        sender, receiver = pool.map(lambda rank: join(host, store, rank), (0, 1))
    inbox, outbox = receiver.inbox(3, [0]), sender.outbox(3, [1])
    inbox.post([(3, 0)])
    buffer = outbox.slot()
    buffer.copy_(torch.tensor([1, 2, 3]))
    outbox.send([(buffer, 1)])
    outbox.flush()
    assert inbox.wait()[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("host", [LOOPBACK, HOST])
def test_a_taken_port_names_the_setting(host):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ReshardError, match=rf"engine\.port: cannot listen on {host}:{port}"):
            open_store(host, port, timeout_s=5.0)


def test_an_unknown_host_is_named():
    with pytest.raises(ReshardError, match=r"no route to nowhere\.invalid:1"):
        GlooTransport(membership("nowhere.invalid", 1, 1, 5.0), None)
