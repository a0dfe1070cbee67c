"""Where each replica of an engine runs: a process of this machine, or one of `engine.hosts`."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_rl.errors import EngineError, LostEngineError
from megatron_rl.platform.device import has_accelerator
from megatron_rl.recipe.hosts import is_loopback, parse_host_port
from megatron_rl.recipe.stages import EngineConfig
from megatron_rl.rollout.devices import replica_devices
from megatron_rl.rollout.engine_process import EngineProcess
from megatron_rl.rollout.handshake import read_secret
from megatron_rl.rollout.model_dir import describe_model
from megatron_rl.rollout.remote_engine import EngineAddress, HostFacts, RemoteEngine, check_host
from megatron_rl.rollout.wire import Message


class Replica(Protocol):
    """One engine, wherever it runs. Commands go one at a time; every wait is bounded."""

    @property
    def replica(self) -> int: ...

    @property
    def name(self) -> str:
        """How messages call it: number, host if it is another, process id."""
        ...

    @property
    def pid(self) -> int:
        """Leader of its process group, on its own machine."""
        ...

    @property
    def node(self) -> str:
        """Its machine, see devices.node_id."""
        ...

    @property
    def devices(self) -> tuple[int, ...] | None:
        """Positions among the GPUs that its machine shows; None without."""
        ...

    @property
    def lost(self) -> str | None:
        """Why it has to be replaced; None as long as it answers."""
        ...

    def start(self, message: Message, *, timeout_s: float) -> None: ...

    def ask(self, cmd: str, *, timeout_s: float, **fields: Any) -> Any: ...

    def give_up(self, reason: str) -> LostEngineError:
        """It cannot be relied on any more: `lost` from now on."""
        ...

    def close(self) -> None: ...


class ReplicaPlaces:
    """Where each replica of an engine runs: `open` it there, the first time and in the place of a lost one.

    Raises EngineError when GPUs are missing, and for engines on hosts what `check_hosts` raises.
    """

    def __init__(self, config: EngineConfig, *, hf_path: str | Path, log_dir: str | Path) -> None:
        self._config, self._hf_path, self._log_dir = config, hf_path, Path(log_dir)
        self._addresses = _addresses(config)
        self._run = {
            "run": uuid.uuid4().hex,
            "label": f"{socket.gethostname()}:{Path(log_dir).absolute()}",
        }
        if not config.hosts:
            visible = torch.cuda.device_count() if has_accelerator() else 0
            self._devices = _devices(config.replicas, config.tp, visible)
            return
        facts, num_hosts = check_hosts(config, hf_path=hf_path), len(self._addresses)
        # on each host they are counted from its first device
        by_host = [
            _devices(
                len(range(i, config.replicas, num_hosts)), config.tp, facts[i].gpus, machine=str(address)
            )
            for i, address in enumerate(self._addresses)
        ]
        self._devices = [by_host[i % num_hosts][i // num_hosts] for i in range(config.replicas)]

    def open(self, replica: int) -> Replica:
        """Its process, without a model yet; whoever asks for it closes it."""
        log, devices = self._log_dir / f"engine_{replica}.log", self._devices[replica]
        if not self._addresses:
            return EngineProcess(replica, log, devices=devices)
        return RemoteEngine(
            replica,
            self._addresses[replica % len(self._addresses)],
            devices=devices,
            run=self._run,
            model=describe_model(self._hf_path),
            note_path=log,
        )


def check_hosts(config: EngineConfig, *, hf_path: str | Path) -> list[HostFacts]:
    """Ask every host of `config` whether it could run engines of the model; starts nothing there.

    Raises one EngineError for all of them: not reachable, another secret, other versions, no such model there.
    """
    addresses, model = _addresses(config), describe_model(hf_path)
    with ThreadPoolExecutor(max_workers=max(1, len(addresses))) as asking:
        answers = [asking.submit(check_host, address, model) for address in addresses]
    errors = [error for answer in answers if (error := answer.exception()) is not None]
    unexpected = [error for error in errors if not isinstance(error, EngineError)]
    if errors:
        raise unexpected[0] if unexpected else EngineError("\n".join(map(str, errors)))
    facts = [answer.result() for answer in answers]
    for address, of_host in zip(addresses, facts, strict=True):
        if bool(of_host.gpus) != has_accelerator():
            raise EngineError(
                f"{address} shows {of_host.gpus} GPUs, but this machine {'has' if has_accelerator() else 'has no'} "
                f"GPU; engines and trainers have to run on machines of one kind"
            )
    return facts


def meeting_host(host: str, replicas: Sequence[Replica]) -> str:
    """Where workers of `replicas` reach this machine: `host`, or if that is a loopback address and a replica runs
    on another machine, the address from which we reach the first such replica."""
    if not is_loopback(host):
        return host
    ours = [replica.local_address for replica in replicas if isinstance(replica, RemoteEngine)]
    return next((address for address in ours if not is_loopback(address)), host)


def _addresses(config: EngineConfig) -> list[EngineAddress]:
    secret = read_secret(config.secret_file) if config.secret_file is not None else None
    return [
        EngineAddress(key=f"engine.hosts.{i}", at=parse_host_port(text), secret=secret)
        for i, text in enumerate(config.hosts)
    ]


def _devices(
    replicas: int, tp: int, visible: int, *, machine: str = "this machine"
) -> Sequence[tuple[int, ...] | None]:
    """Of each replica the devices it may use, None where there is no accelerator."""
    if not visible:
        return [None] * replicas
    return replica_devices(replicas=replicas, tp=tp, visible=visible, machine=machine)
