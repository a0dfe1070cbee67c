"""Which rollouts belong together: by equal ids, or by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Groups:
    """B rollouts sorted by group. There may be empty groups at the end, so that G needs no look at the ids."""

    offsets: Tensor  # [G + 1] int64: group g is at offsets[g] .. offsets[g + 1] of the sorted rollouts
    order: Tensor | None  # [B] int64: position in the batch of each sorted rollout; None: they lie in order
    index: Tensor  # [B] int64: the group of each sorted rollout


def groups_of_size(num_rollouts: int, group_size: int, device: torch.device) -> Groups:
    """Consecutive groups; `num_rollouts` is a multiple of `group_size`."""
    offsets = torch.arange(0, num_rollouts + 1, group_size, device=device)
    return Groups(offsets, None, torch.arange(num_rollouts, device=device) // group_size)


def groups_by_id(group_ids: Tensor) -> Groups:
    """Groups of equal ids, any int64 values in any order. Waits for nothing: B groups, of which many may be empty."""
    ids, order = torch.sort(group_ids, stable=True)
    index = torch.zeros_like(ids)
    index[1:] = (ids.diff() != 0).cumsum(0)
    bounds = torch.arange(len(ids) + 1, device=ids.device)
    return Groups(torch.searchsorted(index, bounds), order, index)
