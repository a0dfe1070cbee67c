"""Whether engines find GPUs, on machines of one type: what `check --gpu` refuses before an engine does at its start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from megatron_rl.recipe.problems import Problem
from megatron_rl.recipe.stages import EngineConfig, RlStage
from megatron_rl.recipe.transfer import host_machines, is_colocated


def place_problems(stage: RlStage, path: str, num_ranks: int, *, gpus_per_node: int) -> Iterator[Problem]:
    """Engines that have no GPUs beside a trainer of `num_ranks`; `path` is that of the stage's `engine`.

    Engines on machines of their own without hosts always do: nothing says how many those are.
    """
    engine, most = stage.engine, gpus_per_node // stage.engine.tp
    machines = -(-num_ranks // gpus_per_node)
    its = f"the trainer's {num_ranks} processes are on {machines} machine{'s' * (machines > 1)} of {gpus_per_node} GPUs"
    if not most:
        yield Problem(
            f"{path}.tp",
            f"got {engine.tp}, but an engine runs on one machine, which has {gpus_per_node} GPUs; use at most "
            f"{gpus_per_node}",
        )
        return
    if engine.hosts:
        yield from _host_problems(engine, path, gpus_per_node)
    elif is_colocated(stage) and engine.replicas > machines * most:
        yield Problem(
            f"{path}.replicas",
            f"got {engine.replicas} of tp {engine.tp}, on {engine.replicas * engine.tp} GPUs, but {its}; use at most "
            f"{machines * most}, or machines of their own (engine.colocated: false)",
        )
    named = len(set(host_machines(engine)))
    if is_colocated(stage) and named > machines:
        why = "sleep" if engine.colocated is None else "colocated"
        yield Problem(
            f"{path}.hosts",
            f"are {named} machines, which engine.{why} says are the trainer's, but {its}; name at most {machines}",
        )


def _host_problems(engine: EngineConfig, path: str, gpus_per_node: int) -> Iterator[Problem]:
    most, hosts = gpus_per_node // engine.tp, len(engine.hosts)
    busiest = _busiest(engine, engine.replicas)
    if busiest <= most:
        return
    fits = max((n for n in range(hosts, engine.replicas) if _busiest(engine, n) <= most), default=0)
    yield Problem(
        f"{path}.replicas",
        f"got {engine.replicas} of tp {engine.tp} on {hosts} host{'s' * (hosts > 1)}, of which one would run "
        f"{busiest} on {gpus_per_node} GPUs; "
        + (f"use at most {fits}, or " if fits else "")
        + "name more machines in engine.hosts",
    )


def _busiest(engine: EngineConfig, replicas: int) -> int:
    """Engines of the machine that runs most of them; several hosts may be on one."""
    machines = host_machines(engine)
    return max(Counter(machines[replica % len(machines)] for replica in range(replicas)).values())
