"""The reference policy of a KL term: weights of another moment or model, scored by the trainer in its own layout.

A second model would cost device memory for as long as the stage lasts. Here each rank keeps its part of the weights in
host memory, and lends them the place of the trained ones for the passes that score: two copies of a part to the host
at a time, none more on the device.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.data.types import PackedBatch
from megatron_rl.errors import CheckpointError
from megatron_rl.model.hf_io import load_hf
from megatron_rl.recipe.schema import Recipe
from megatron_rl.recipe.stages import RlStage
from megatron_rl.train.context import RunContext
from megatron_rl.train.policy import Policy
from megatron_rl.train.progress import Progress

Weights = list[dict[str, Tensor]]  # of each model chunk of this rank, by name

REFERENCE_DIR = "reference"  # in a run directory: the starting weights of stages


class ReferencePolicy:
    """Weights that never change, on the host, of one rank's part of the model."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    @classmethod
    def of_now(cls, policy: Policy) -> ReferencePolicy:
        """The weights that the policy has at this moment."""
        return cls(_on_host(policy))

    @classmethod
    def from_hf(cls, policy: Policy, hf_path: str | Path, *, rank: int) -> ReferencePolicy:
        """Of a Hugging Face directory of a model of the same shape; the policy is as before. Raises ModelError."""
        own = _on_host(policy)
        try:
            load_hf(policy.chunks, policy.spec, policy.layout, hf_path=hf_path, rank=rank)
            return cls(_on_host(policy))
        finally:
            _fill(policy, own)

    def logprobs(
        self, policy: Policy, updates: Sequence[Sequence[PackedBatch]], *, temperature: float
    ) -> list[list[Tensor]]:
        """`Policy.logprobs` of the micro-batches of each update, by the reference. Collective."""
        with self._in_place(policy):
            return [policy.logprobs(batches, temperature=temperature) for batches in updates]

    @contextmanager
    def _in_place(self, policy: Policy) -> Iterator[None]:
        # the trained weights come back bit for bit, an error that ends the run included
        own = _on_host(policy)
        _fill(policy, self._weights)
        try:
            yield
        finally:
            _fill(policy, own)


def open_reference(stage: RlStage, progress: Progress, run: RunContext) -> ReferencePolicy | None:
    """The reference of a stage that is about to begin or to go on; None where its recipe has none. Collective.

    The weights at the stage's start are those of model.hf_path in a first stage that begins there. Else they are
    written below the run directory before the first step, so that a run that resumes later has them in any layout.
    Raises CheckpointError where they are gone, ModelError for a directory that does not fit the model.
    """
    kl = stage.algorithm.kl
    if kl is None:
        return None
    if kl.reference is not None:
        return ReferencePolicy.from_hf(run.policy, kl.reference, rank=run.rank)
    source = _source(run.recipe, progress.stage)
    kept = run.run_dir / REFERENCE_DIR / f"stage_{progress.stage}"
    if progress.step == 0:
        if source is None:
            if run.is_driver:
                # of a start that was killed; the weights at hand are the same again
                shutil.rmtree(kept, ignore_errors=True)
            run.policy.save_hf(str(kept), hf_source=run.recipe.model.hf_path)
        return ReferencePolicy.of_now(run.policy)
    if source is not None:
        return ReferencePolicy.from_hf(run.policy, source, rank=run.rank)
    if not run.from_driver(kept.is_dir()):
        raise CheckpointError(
            f"{kept}: the weights that stage {progress.stage} began with, reference of its KL term, are not there; put "
            "the directory back, or start the run anew"
        )
    return ReferencePolicy.from_hf(run.policy, kept, rank=run.rank)


def _source(recipe: Recipe, stage: int) -> str | None:
    """The directory that a stage's starting weights are still to be read from; None: they are the run's own."""
    return recipe.model.hf_path if stage == 0 and recipe.model.checkpoint is None else None


@torch.no_grad()
def _on_host(policy: Policy) -> Weights:
    return [
        {name: param.detach().to("cpu", copy=True) for name, param in params.items()}
        for params in policy.named_params()
    ]


@torch.no_grad()
def _fill(policy: Policy, weights: Weights) -> None:
    for params, of_chunk in zip(policy.named_params(), weights, strict=True):
        for name, param in params.items():
            param.copy_(of_chunk[name])
