"""The weight transfer of an RL stage, planned before anything runs: what `check` can say about it."""

from __future__ import annotations

from typing import Any

from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.hosts import parse_host_port
from megatron_rl.recipe.stages import EngineConfig
from megatron_rl.reshard.placement import Placement
from megatron_rl.reshard.plan import plan_reshard

RANKS_PER_NODE = 8  # assumed; a run asks every rank where it is
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


def transfer_summary(
    spec: ModelSpec, layout: ParallelLayout, engine: EngineConfig, *, dtype: str
) -> dict[str, Any]:
    """`ReshardPlan.summary` of the transfers from `layout` to a stage's engines, of elements of `dtype`."""
    return plan_reshard(
        spec,
        layout,
        target_tp=engine.tp,
        replicas=engine.replicas,
        element_bytes=_ELEMENT_BYTES[dtype],
        placement=_placement(layout, engine),
        bucket_bytes=engine.bucket_mib * 2**20,
        two_tier=engine.two_tier,
    ).summary()


def _placement(layout: ParallelLayout, engine: EngineConfig) -> Placement:
    """Trainer ranks fill machines; engines are on the machines that hosts name. Without any they are on the first one,
    or, where it has too few GPUs, in turn on all of the trainer's, as `launch/slurm_multinode.sh` places them.

    Whether members share a GPU shows only when they run, so nothing counts as a copy on one device.
    """
    trainers = tuple(rank // RANKS_PER_NODE for rank in range(layout.world_size))
    addresses = [parse_host_port(text) for text in engine.hosts]
    own = dict.fromkeys(address.host for address in addresses if not address.is_loopback())
    node_of_host = {host: trainers[-1] + 1 + number for number, host in enumerate(own)}
    nodes = [node_of_host.get(address.host, 0) for address in addresses] or [0]
    if not addresses and engine.replicas * engine.tp > RANKS_PER_NODE:
        nodes = list(range(trainers[-1] + 1))
    workers = tuple(
        nodes[replica % len(nodes)] for replica in range(engine.replicas) for _ in range(engine.tp)
    )
    return Placement(
        trainer_nodes=trainers,
        worker_nodes=workers,
        trainer_devices=(None,) * len(trainers),
        worker_devices=(None,) * len(workers),
    )
