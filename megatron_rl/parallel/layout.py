"""Degrees of parallelism and what follows from them: ranks, coordinates, layers per stage. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.errors import LayoutError
from megatron_rl.parallel.degrees import divisors, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """How one model is spread over processes.

    Ranks follow megatron-core's default order: tp fastest, then dp, then pp. `vpp` is the number of model
    chunks per pipeline stage (1: no interleaving). `sp` shards activations between tp ranks along the tokens.

    Experts of a mixture-of-experts model are spread over the same ranks of a stage in their own way: etp
    fastest (tensor parallel inside an expert, None: as tp), then ep (which experts), then replicas.

    `first_stage_layers` and `last_stage_layers` fix the layers of the end stages; the others share the rest
    evenly. None: that stage takes an even share too.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    sp: bool = False
    ep: int = 1
    etp: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "dp", "ep", "etp", "first_stage_layers", "last_stage_layers"):
            degree = getattr(self, name)
            if degree is not None and degree < 1:
                raise LayoutError(f"layout.{name}: got {degree}, must be at least 1")
        if self.vpp > 1 and self.pp < 2:
            raise LayoutError(
                f"layout.vpp: got {self.vpp} with pp={self.pp}; interleaving needs pp >= 2, set layout.vpp to 1"
            )
        for name in ("first_stage_layers", "last_stage_layers"):
            if (layers := getattr(self, name)) is not None and self.pp < 2:
                raise LayoutError(
                    f"layout.{name}: got {layers} with pp={self.pp}; one stage holds all layers, set it to null"
                )
        stage_ranks = self.tp * self.dp
        if stage_ranks % self.expert_tp:
            raise LayoutError(
                f"layout.etp: got {self.expert_tp}, which does not divide the tp*dp = {self.tp}*{self.dp} = "
                f"{stage_ranks} ranks of a pipeline stage; use {nearest(self.expert_tp, divisors(stage_ranks))}"
            )
        expert_ranks = stage_ranks // self.expert_tp
        if expert_ranks % self.ep:
            raise LayoutError(
                f"layout.ep: got {self.ep} with etp = {self.expert_tp}, but ep*etp must divide the tp*dp = "
                f"{self.tp}*{self.dp} = {stage_ranks} ranks of a pipeline stage; "
                f"use {nearest(self.ep, divisors(expert_ranks))}"
            )

    @classmethod
    def for_world(
        cls,
        *,
        tp: int,
        pp: int,
        vpp: int,
        sp: bool,
        world_size: int,
        ep: int = 1,
        etp: int | None = None,
        first_stage_layers: int | None = None,
        last_stage_layers: int | None = None,
    ) -> ParallelLayout:
        """Derive dp = world_size / (tp * pp). Raises LayoutError when it does not come out even."""
        model_ranks = tp * pp
        if world_size % model_ranks:
            below, above = (
                world_size // model_ranks * model_ranks,
                -(-world_size // model_ranks) * model_ranks,
            )
            nearest = " or ".join(str(n) for n in (below, above) if n)
            raise LayoutError(
                f"layout: tp*pp = {tp}*{pp} = {model_ranks} does not divide the {world_size} processes of this run; "
                f"start {nearest} processes, or change layout.tp / layout.pp"
            )
        return cls(
            tp=tp,
            pp=pp,
            vpp=vpp,
            dp=world_size // model_ranks,
            sp=sp and tp > 1,
            ep=ep,
            etp=etp,
            first_stage_layers=first_stage_layers,
            last_stage_layers=last_stage_layers,
        )

    @property
    def expert_tp(self) -> int:
        """Tensor parallel degree inside an expert: `etp`, or tp."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert shard."""
        return self.tp * self.dp // (self.expert_tp * self.ep)

    @property
    def world_size(self) -> int:
        return self.tp * self.dp * self.pp

    def coord(self, rank: int) -> tuple[int, int, int]:
        """(tp_rank, dp_rank, pp_rank) of a global rank."""
        return rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)

    def rank(self, *, tp: int, dp: int, pp: int) -> int:
        """Global rank of a coordinate; the inverse of `coord`."""
        return (pp * self.dp + dp) * self.tp + tp

    def expert_coord(self, rank: int) -> tuple[int, int, int]:
        """(etp_rank, ep_rank, replica) of a global rank among the ranks of its pipeline stage."""
        shard, etp_rank = divmod(rank % (self.tp * self.dp), self.expert_tp)
        return etp_rank, shard % self.ep, shard // self.ep

    def stage_layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each pipeline stage. They add up only for a layout that `check_layout` accepts."""
        ends = (self.first_stage_layers, self.last_stage_layers)
        even_stages = self.pp - sum(end is not None for end in ends)
        rest = num_layers - sum(end or 0 for end in ends)
        stages = [rest // even_stages if even_stages else 0] * self.pp
        if self.first_stage_layers is not None:
            stages[0] = self.first_stage_layers
        if self.last_stage_layers is not None:
            stages[-1] = self.last_stage_layers
        return tuple(stages)

    def chunk_layers(self, num_layers: int, *, pp_rank: int, chunk: int) -> range:
        """Global layer indices of one model chunk, as megatron-core assigns them."""
        per_chunk = [layers // self.vpp for layers in self.stage_layers(num_layers)]
        first = chunk * sum(per_chunk) + sum(per_chunk[:pp_rank])
        return range(first, first + per_chunk[pp_rank])

    def has_embedding(self, *, pp_rank: int, chunk: int) -> bool:
        return pp_rank == 0 and chunk == 0

    def has_head(self, *, pp_rank: int, chunk: int) -> bool:
        return pp_rank == self.pp - 1 and chunk == self.vpp - 1
