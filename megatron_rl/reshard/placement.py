"""Where trainer ranks and engine workers run: which node, and which device of it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.errors import ReshardError


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Node of every trainer rank and worker, and its device on that node (None: no device of its own, a CPU).

    Two members of the same node and device share memory: what goes from one to the other is copied, not sent.
    """

    trainer_nodes: tuple[int, ...]
    worker_nodes: tuple[int, ...]
    trainer_devices: tuple[int | None, ...]
    worker_devices: tuple[int | None, ...]

    def __post_init__(self) -> None:
        for side in ("trainer", "worker"):
            nodes, devices = getattr(self, f"{side}_nodes"), getattr(self, f"{side}_devices")
            if len(nodes) != len(devices):
                raise ReshardError(
                    f"placement: {len(nodes)} {side}_nodes but {len(devices)} {side}_devices; give one of "
                    f"each per {side}"
                )

    @classmethod
    def one_node(cls, trainers: int, workers: int) -> Placement:
        """Everybody on one machine without devices, the case of a CPU."""
        return cls(
            trainer_nodes=(0,) * trainers,
            worker_nodes=(0,) * workers,
            trainer_devices=(None,) * trainers,
            worker_devices=(None,) * workers,
        )

    @classmethod
    def packed(cls, trainers: int, workers: int, per_node: int = 8, colocated: bool = False) -> Placement:
        """One member per device, nodes of `per_node` devices filled in order of rank.

        Workers take nodes after the trainers' ones, or with `colocated` the same devices from the first on.
        """
        if per_node < 1:
            raise ReshardError(f"placement: got {per_node} devices per node, must be at least 1")
        first = 0 if colocated else -(-trainers // per_node)
        return cls(
            trainer_nodes=tuple(rank // per_node for rank in range(trainers)),
            worker_nodes=tuple(first + worker // per_node for worker in range(workers)),
            trainer_devices=tuple(rank % per_node for rank in range(trainers)),
            worker_devices=tuple(worker % per_node for worker in range(workers)),
        )

    @property
    def num_nodes(self) -> int:
        return len({*self.trainer_nodes, *self.worker_nodes})

    def node(self, member: int) -> int:
        """Node of a member of the transfer group: trainer ranks first, then workers."""
        trainers = len(self.trainer_nodes)
        return self.trainer_nodes[member] if member < trainers else self.worker_nodes[member - trainers]

    def device(self, member: int) -> tuple[int, int] | None:
        """(node, device) of a member, None on a CPU."""
        trainers = len(self.trainer_devices)
        device = self.trainer_devices[member] if member < trainers else self.worker_devices[member - trainers]
        return None if device is None else (self.node(member), device)

    def share_device(self, one: int, other: int) -> bool:
        return self.device(one) is not None and self.device(one) == self.device(other)
