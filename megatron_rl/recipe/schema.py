"""What a run is: one model, one layout, a list of stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from megatron_rl.recipe.stages import RlStage, SftStage
from megatron_rl.recipe.types import (
    Bool,
    Count,
    Name,
    NonNegativeInt,
    Positions,
    PositiveInt,
    Seconds,
    Seed,
    Text,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    hf_path: Text  # directory with config.json, safetensors, tokenizer
    # weights to start from, instead of those in hf_path: an imported checkpoint, or a run or one checkpoint of it
    checkpoint: Text | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    # positions in place of config.json's max_position_embeddings, for trainer, engines and exported models: base
    # models are often published with fewer than their rotary base was made for. null: as config.json says
    max_positions: Positions | None = None
    # full: a layer keeps its input alone and is computed again on the way back; a third more computing for a small
    # part of the activations, which long responses need
    recompute: Literal["none", "full"] = "none"
    spec: Literal["auto", "local", "te"] = "auto"  # layer implementation; auto: te where installed
    # of the head (log-probs, losses); auto: triton on GPUs, portable elsewhere
    kernels: Literal["auto", "portable", "triton"] = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutConfig:
    """dp follows: world / (tp * pp)."""

    tp: PositiveInt = 1
    pp: PositiveInt = 1
    vpp: PositiveInt = 1  # model chunks per pipeline stage
    sp: Bool = False  # sequence parallel: activations sharded between tp ranks
    ep: PositiveInt = 1  # mixture of experts: ranks of a stage among which the experts are dealt out
    etp: PositiveInt | None = None  # tensor parallel inside an expert; null: as tp
    first_stage_layers: PositiveInt | None = None  # layers of the first pipeline stage; null: an even share
    last_stage_layers: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbConfig:
    """Weights & Biases, a package that has to be installed for it."""

    project: Text
    # offline: only files in the run directory, which `wandb sync` sends later
    mode: Literal["offline", "online"] = "offline"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """Some steps as a Chrome trace, RUN_DIR/profile/trace.json.gz: see train/README.md."""

    first_step: PositiveInt = 3  # counted from 1 over all stages: optimizer steps of SFT, iterations of RL
    steps: PositiveInt = 2  # of the window; one may lie across stages
    # every operator of torch (and kernel, on GPUs) besides, in a file per rank; much slower and large
    operators: Bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    seed: Seed = 1
    # the same bits from the same recipe, layout and machine: torch's deterministic algorithms, fixed workspaces of
    # cuBLAS, no sums inside the network (GPU settings are untested); slower there. null: on without an accelerator
    deterministic: Bool | None = None
    torch_threads: Count = 1  # CPU threads per process
    collective_timeout_s: Seconds = 600.0
    # a rank whose process gives no sign of life for so long ends the run
    silence_timeout_s: Seconds = 60.0
    # from a request to stop (SIGTERM, SIGUSR1) to the end at once, if no step border is reached before
    stop_grace_s: Seconds = 120.0
    # rollouts of an RL iteration whose tokens are recorded with their log-probs, for the report; 0: none
    rollout_tokens: NonNegativeInt = 16
    wandb: WandbConfig | None = None  # what TensorBoard shows, there as well
    profile: ProfileConfig | None = None  # null: none


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    every_steps: PositiveInt  # optimizer steps (SFT) or iterations (RL)
    keep: PositiveInt = 2  # newest ones that stay
    # training goes on while it is written; costs host memory of the size of a rank's part
    asynchronous: Bool = False
    timeout_s: Seconds = 600.0  # of every wait in a save: for a rank, a disk, a writer


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    name: Name  # also names the run directory
    # what keys of RL stages that are not written down are set to: klear_repo, to what Klear's released code does where
    # it differs from its paper (recipe/compat.py); none: to the paper's
    compat: Literal["none", "klear_repo"] = "none"
    model: ModelConfig
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    run: RunConfig = field(default_factory=RunConfig)
    stages: Annotated[
        tuple[Annotated[SftStage | RlStage, Field(discriminator="kind")], ...], Field(min_length=1)
    ]
    checkpoint: CheckpointConfig | None = None
