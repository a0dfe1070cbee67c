"""Gloo gets the network that leads to the first machine, whatever name this machine gives itself."""

from __future__ import annotations

import socket

import psutil
import pytest

from megatron_rl.errors import MegatronRLError
from megatron_rl.platform.network import choose_gloo_interface, interface_of, own_address


def test_an_address_is_known_by_the_interface_that_has_it():
    loopback = next(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(each.address == "127.0.0.1" for each in addresses)
    )
    assert interface_of("127.0.0.1") == loopback
    assert interface_of("203.0.113.1") is None


def test_the_way_to_a_loopback_address_begins_there():
    assert own_address("127.0.0.1", 1) == "127.0.0.1"


def test_what_the_user_chose_stays():
    environment = {"GLOO_SOCKET_IFNAME": "ib0"}
    choose_gloo_interface(environment, host="no such host", port=1)
    assert environment == {"GLOO_SOCKET_IFNAME": "ib0"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_that_leads_to_this_machine_alone_is_refused(host):
    with pytest.raises(
        MegatronRLError,
        match=rf"MASTER_ADDR: {host}( is 127\S+ here and)? leads to this machine alone.*GLOO_SOCKET",
    ):
        choose_gloo_interface({}, host=host, port=1)


def test_an_address_without_a_way_there_is_named(monkeypatch):
    def refuse(*_, **__):
        raise OSError(113, "No route to host")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(
        MegatronRLError, match=r"MASTER_ADDR: no way to node1 from this machine \(No route to host\)"
    ):
        choose_gloo_interface({}, host="node1", port=1)
