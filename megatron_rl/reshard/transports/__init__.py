"""The channels that weights travel on. torch only: the trainer never imports the engine.

`base` says what an executor asks, `router` chooses and sets up, the others carry.
"""

from megatron_rl.reshard.transports.base import LOOPBACK, Inbox, Membership, Outbox, Transport
from megatron_rl.reshard.transports.local import LocalHub
from megatron_rl.reshard.transports.rendezvous import open_store
from megatron_rl.reshard.transports.router import Router, TransportKind, connect, connect_in_process

__all__ = [
    "LOOPBACK",
    "Inbox",
    "LocalHub",
    "Membership",
    "Outbox",
    "Router",
    "Transport",
    "TransportKind",
    "connect",
    "connect_in_process",
    "open_store",
]
