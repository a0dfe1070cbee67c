"""The weight transfer of an RL stage, planned before anything runs: what `check` can say about it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megatron_rl.model.hf_tables import hf_tensors
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.hosts import parse_host_port
from megatron_rl.recipe.problems import Problem
from megatron_rl.recipe.stages import EngineConfig, RlStage
from megatron_rl.reshard.placement import Placement
from megatron_rl.reshard.plan import plan_reshard

RANKS_PER_NODE = 8  # assumed where no machine type is named; a run asks every rank where it is
_MOST_BUCKETS = 2**16  # each is planned, and costs every member a round
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


def transfer_summary(
    spec: ModelSpec,
    layout: ParallelLayout,
    stage: RlStage,
    *,
    dtype: str,
    gpus_per_node: int = RANKS_PER_NODE,
) -> dict[str, Any]:
    """`ReshardPlan.summary` of the transfers from `layout` to a stage's engines, of elements of `dtype`."""
    engine = stage.engine
    return plan_reshard(
        spec,
        layout,
        target_tp=engine.tp,
        replicas=engine.replicas,
        element_bytes=_ELEMENT_BYTES[dtype],
        placement=_placement(layout, stage, gpus_per_node),
        bucket_bytes=engine.bucket_mib * 2**20,
        two_tier=engine.two_tier,
    ).summary()


def bucket_problems(stage: RlStage, path: str, spec: ModelSpec, *, dtype: str) -> Iterator[Problem]:
    """Buckets so small that a transfer would be nothing but their starts."""
    engine = stage.engine
    elements = sum(math.prod(shape) for shape in hf_tensors(spec).values())
    least = math.ceil(elements * _ELEMENT_BYTES[dtype] / engine.tp / _MOST_BUCKETS / 2**20)
    if engine.bucket_mib < least:
        yield Problem(
            f"{path}.engine.bucket_mib",
            f"got {engine.bucket_mib}, which would cut the weights of this model into more than {_MOST_BUCKETS:,} "
            f"buckets; use at least {least}, better 256",
        )


def is_colocated(stage: RlStage) -> bool:
    """Whether engines are on the trainer's own GPUs, as far as a recipe says: see `EngineConfig.colocated`."""
    engine = stage.engine
    if engine.colocated is not None:
        return engine.colocated
    if stage.overlap != "none":
        return False
    return engine.sleep or all(parse_host_port(text).is_loopback() for text in engine.hosts)


def host_machines(engine: EngineConfig) -> list[int]:
    """Of each host the machine that it is on: 0 is this one where an address is loopback, the others as named first."""
    addresses = [parse_host_port(text) for text in engine.hosts]
    names = ["" if address.is_loopback() else address.host for address in addresses]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(sorted(names, key=bool)))}
    return [numbers[name] for name in names]


def engine_ranks(stage: RlStage, layout: ParallelLayout, *, gpus_per_node: int) -> frozenset[int]:
    """Trainer ranks that have an engine worker on their GPU: replicas take a machine's first GPUs, each the next."""
    if not is_colocated(stage):
        return frozenset()
    machines = -(-layout.world_size // gpus_per_node)
    nodes = _engine_nodes(stage, num_trainer_nodes=machines, gpus_per_node=gpus_per_node)
    taken = dict.fromkeys(nodes, 0)
    ranks: set[int] = set()
    for replica in range(stage.engine.replicas):
        node = nodes[replica % len(nodes)]
        first = node * gpus_per_node + taken[node]
        ranks |= set(range(first, first + stage.engine.tp))
        taken[node] += stage.engine.tp
    return frozenset(ranks & set(range(layout.world_size)))


def _placement(layout: ParallelLayout, stage: RlStage, gpus_per_node: int) -> Placement:
    """Trainer ranks fill machines. Whether members share a GPU shows only when they run, so nothing counts as a copy
    on one device."""
    engine = stage.engine
    trainers = tuple(rank // gpus_per_node for rank in range(layout.world_size))
    nodes = _engine_nodes(stage, num_trainer_nodes=trainers[-1] + 1, gpus_per_node=gpus_per_node)
    workers = tuple(
        nodes[replica % len(nodes)] for replica in range(engine.replicas) for _ in range(engine.tp)
    )
    return Placement(
        trainer_nodes=trainers,
        worker_nodes=workers,
        trainer_devices=(None,) * len(trainers),
        worker_devices=(None,) * len(workers),
    )


def _engine_nodes(stage: RlStage, *, num_trainer_nodes: int, gpus_per_node: int) -> list[int]:
    """Machines that take a replica in turn. Colocated: hosts are the trainer's machines in order; without any it is the
    first one or, where that has too few GPUs, all of them, as `launch/slurm_multinode.sh` places engines. On GPUs of
    their own: the machines behind the trainer's, this one where hosts are loopback, and without hosts one after the
    other as they fill."""
    engine = stage.engine
    if is_colocated(stage):
        if engine.hosts:
            return [machine % num_trainer_nodes for machine in host_machines(engine)]
        return list(range(num_trainer_nodes)) if engine.replicas * engine.tp > gpus_per_node else [0]
    if not engine.hosts:
        at_once = max(1, gpus_per_node // engine.tp)
        return [num_trainer_nodes + replica // at_once for replica in range(engine.replicas)]
    is_here = any(parse_host_port(text).is_loopback() for text in engine.hosts)
    machines = host_machines(engine)
    return [0 if is_here and machine == 0 else num_trainer_nodes - is_here + machine for machine in machines]
