"""Degrees of parallelism and what follows from them: ranks, coordinates, layers per stage. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.errors import LayoutError


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """How one model is spread over processes.

    Ranks follow megatron-core's default order: tp fastest, then dp, then pp. `vpp` is the number of model
    chunks per pipeline stage (1: no interleaving). `sp` shards activations between tp ranks along the tokens.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    sp: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "dp"):
            degree = getattr(self, name)
            if degree < 1:
                raise LayoutError(f"layout.{name}: got {degree}, must be at least 1")
        if self.vpp > 1 and self.pp < 2:
            raise LayoutError(
                f"layout.vpp: got {self.vpp} with pp={self.pp}; interleaving needs pp >= 2, set layout.vpp to 1"
            )

    @classmethod
    def for_world(cls, *, tp: int, pp: int, vpp: int, sp: bool, world_size: int) -> ParallelLayout:
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
        return cls(tp=tp, pp=pp, vpp=vpp, dp=world_size // model_ranks, sp=sp and tp > 1)

    @property
    def world_size(self) -> int:
        return self.tp * self.dp * self.pp

    def coord(self, rank: int) -> tuple[int, int, int]:
        """(tp_rank, dp_rank, pp_rank) of a global rank."""
        return rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)

    def rank(self, *, tp: int, dp: int, pp: int) -> int:
        """Global rank of a coordinate; the inverse of `coord`."""
        return (pp * self.dp + dp) * self.tp + tp

    def chunk_layers(self, num_layers: int, *, pp_rank: int, chunk: int) -> range:
        """Global layer indices of one model chunk (even split, as megatron-core assigns them)."""
        per_chunk = num_layers // (self.pp * self.vpp)
        first = chunk * (num_layers // self.vpp) + pp_rank * per_chunk
        return range(first, first + per_chunk)

    def has_embedding(self, *, pp_rank: int, chunk: int) -> bool:
        return pp_rank == 0 and chunk == 0

    def has_head(self, *, pp_rank: int, chunk: int) -> bool:
        return pp_rank == self.pp - 1 and chunk == self.vpp - 1
