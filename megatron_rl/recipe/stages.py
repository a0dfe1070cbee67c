"""What one stage of a run does. Stages are tagged by `kind`; every field says its unit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron_rl.recipe.algorithm import (
    AdvantageName,
    AggregateName,
    CorrectionConfig,
    EntropyConfig,
    KlConfig,
    SurrogateName,
)
from megatron_rl.recipe.batch import (
    DynamicSamplingConfig,
    OverlongConfig,
    PromoteConfig,
    RescoreConfig,
    StragglersConfig,
)
from megatron_rl.recipe.dataset import ConversationConfig, DatasetConfig
from megatron_rl.recipe.sandbox import SandboxConfig
from megatron_rl.recipe.types import (
    Batch,
    Bool,
    Count,
    Float,
    Fraction,
    Gibibytes,
    Int,
    Key,
    LearningRate,
    Mebibytes,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Replicas,
    Scalar,
    Seconds,
    Temperature,
    Text,
    WholeGibibytes,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW. `max_grad_norm` is the global L2 norm that gradients are clipped to."""

    lr: LearningRate
    weight_decay: NonNegativeFloat = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: PositiveFloat = 1e-8
    max_grad_norm: PositiveFloat = 1.0
    # steps in a row that are left out for NaN or inf in a gradient; one more ends the run
    max_skipped_steps: NonNegativeInt = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Learning rate over the optimizer steps of the stage: linear warm-up, then `kind` down to `min_lr`.

    In RL it is laid out over iterations * updates_per_rollout steps. Iterations whose groups are dropped take
    fewer, and `promote` may end the stage, so its end may not be reached. The next stage begins its own.
    """

    kind: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: NonNegativeInt = 0
    min_lr: NonNegativeFloat = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SftStage:
    """Supervised fine-tuning on conversations; loss on assistant tokens, their mean in the global batch."""

    kind: Literal["sft"]
    data: Text  # JSONL, JSON or parquet of conversations
    columns: ConversationConfig = field(default_factory=ConversationConfig)
    steps: NonNegativeInt = 0  # optimizer steps; 0: those of `epochs`
    epochs: PositiveFloat | None = None  # passes over the rows of `data`, instead of steps
    global_batch_size: Batch  # samples per optimizer step
    tokens_per_microbatch: PositiveInt  # packed tokens per forward on one dp rank
    max_sample_tokens: PositiveInt = 4096  # longer samples are dropped and counted
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How the engine samples in training rollouts."""

    temperature: Temperature = 1.0
    top_p: Probability = 1.0
    top_k: Int = -1  # -1: no limit
    max_response_tokens: PositiveInt
    max_prompt_tokens: PositiveInt = 1024
    prompt_truncation: Literal["drop", "left"] = (
        "drop"  # longer prompts: out, or without their first tokens; counted
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    """Advantage, surrogate, how tokens are averaged, and what is added. null: the surrogate's own value.

    Which surrogate reads which option, and its own values: `recipe.algorithm.SURROGATE_OPTIONS`.
    """

    surrogate: SurrogateName = "gppo"
    clip_low: Fraction | None = None  # ratio is clipped below 1 - clip_low; gmpo: log-ratio below -clip_low
    clip_high: NonNegativeFloat | None = None  # and above 1 + clip_high; gmpo: log-ratio above clip_high
    dual_clip: PositiveFloat | None = None  # ratio bound for negative advantages, > 1; null: none
    beta_low: NonNegativeFloat | None = None  # gppo: scale of the low clipped branch
    beta_high: NonNegativeFloat | None = None  # gppo: scale of the high clipped branch
    unified_mask: Bool = False  # cispo: no gradient where PPO's clip gives none
    tau_positive: PositiveFloat | None = None  # sapo: steepness of its gate for positive advantages
    tau_negative: PositiveFloat | None = None  # and for negative ones
    tau: PositiveFloat | None = None  # dro: weight of the squared log-ratio
    advantage: AdvantageName = "group_std"
    advantage_std: Literal["population", "unbiased"] = (
        "population"  # group_std: divides squares by n, or n - 1
    )
    aggregate: AggregateName = "token_mean"
    # token_sum_norm: the constant length, tokens; null: sampling.max_response_tokens
    loss_length: PositiveInt | None = None
    # step: one count over the optimizer step. micro_batch (token_mean alone): tokens are averaged in each
    # micro-batch, micro-batches by their sequences, so that results depend on the layout; as Klear's code does
    normaliser: Literal["step", "micro_batch"] = "step"
    kl: KlConfig | None = None
    entropy: EntropyConfig | None = None
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    sft_on_positives: NonNegativeFloat = 0.0  # weight of the NLL on correct rollouts
    drop_zero_advantage: Bool = True  # groups whose rollouts all had the same outcome; also all-correct ones
    # what outcome means there, whatever the reward was made of. verdict: correct or not; score: the judge's own, such
    # as a share of tests; all_pass: whether that score is 1
    zero_advantage_by: Literal["verdict", "score", "all_pass"] = "verdict"


@dataclass(frozen=True, kw_only=True, slots=True)
class CurriculumWindow:
    """For `iterations` iterations draw only prompts in [low, high] of `difficulty` or of `pass_rate`, one of them."""

    iterations: PositiveInt  # at most, with `promote`
    difficulty: tuple[Float, Float] | None = None  # of the row
    pass_rate: tuple[Float, Float] | None = None  # 0 to 1: of the row, or as `rescore` measures it
    promote: PromoteConfig | None = None  # null: the stage's


@dataclass(frozen=True, kw_only=True, slots=True)
class GraderConfig:
    """The process pool that grades answers, and what the judge's score becomes in the reward of training.

    Evaluation counts correct answers and knows neither `scale` nor the rules of tags.
    """

    workers: Count = 1
    timeout_s: Seconds = 5.0  # per answer; the worker is killed beyond it
    # of one call with all its answers; those unsettled then are timeouts, or errors where none of their time was used
    batch_timeout_s: Seconds = 120.0
    memory_gib: Gibibytes = 2.0  # address space of one worker; an answer that needs more is an error
    # required: a response without </think> has no answer; auto: only one that opens <think> and never closes it
    reasoning: Literal["auto", "required"] = "auto"
    scale: tuple[Float, Float] = (0.0, 1.0)  # score s counts as low + s * (high - low)
    all_or_nothing: Bool = False  # code_tests: a program that fails a test has the score 0, not a share of 1
    # a response without </think>, else one without <think>, is not correct and counts this much; null: no such rule.
    # They are searched in the response alone: a chat template that opens <think> itself must not be used with them
    missing_think_close: Float | None = None
    missing_think_open: Float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Generation engines, each in its own processes."""

    kind: Literal["vllm"] = "vllm"
    tp: PositiveInt = 1  # tensor-parallel workers of one engine
    replicas: Replicas = 1  # engines
    # which replica answers which request. even: equal blocks in their order, so that a run is the same to the last
    # bit. least_loaded: group by group to the one with the fewest tokens outstanding; the same seeds and tokens, but
    # batches depend on time, and with them the last bits of log-probs where kernels are not batch-invariant
    routing: Literal["even", "least_loaded"] = "even"
    # HOST:PORT of each machine that runs `megatron-rl engine`: replica i is started on host i modulo their number.
    # Empty: all on the machine of trainer rank 0. Paths must be the same on all machines
    hosts: tuple[Text, ...] = ()
    secret_file: Text | None = None  # what those were given as --secret-file
    # whether engines are on the trainer's own GPUs, for what `check` counts and plans: a run asks its machines. null:
    # if they sleep, or without hosts of other machines and without overlap. launch/slurm_multinode.sh sets it
    colocated: Bool | None = None
    port: NonNegativeInt = 0  # the one port of weight transfer; 0: any free one
    # auto: memory that both share on one GPU or without GPUs, NCCL between GPUs, else sockets (gloo)
    transport: Literal["auto", "gloo", "nccl", "shared"] = "auto"
    bucket_mib: Mebibytes = (
        256  # of weights that one worker receives at a time; two such buffers on each side
    )
    two_tier: bool = False  # several engine machines: weights enter each once, its workers pass them on
    max_concurrent: Batch = 256  # sequences decoded at once by one engine
    # CPU: largest KV cache of one worker; less where max_concurrent needs less
    kv_cache_gib: WholeGibibytes = 1
    # GPU: share of all memory of each of its GPUs that an engine takes for weights and KV cache. Trainer ranks
    # live on the same GPUs, so leave them the rest: weights, gradients, optimizer state, activations
    gpu_memory_fraction: Probability = 0.85
    # engines give the memory of weights and KV cache back after the rollouts of an iteration, and get it again for
    # the next transfer: for GPUs that trainer ranks share. The trainer's own memory stays where it is
    sleep: Bool = False
    start_timeout_s: Seconds = 300.0
    # of one call with all its requests: an engine's share of an iteration, or of an evaluation set
    request_timeout_s: Seconds = 600.0
    # an engine that started and whose process then gives no sign of life for so long is lost
    heartbeat_timeout_s: Seconds = 60.0
    restarts: NonNegativeInt = (
        3  # of lost engines in the stage, over all replicas; the next loss ends the run
    )
    # arguments of vLLM by its own names, such as max_num_batched_tokens: 8192; those that another key sets are refused
    vllm: dict[Key, Scalar] = field(default_factory=dict)
    parity_bound: PositiveFloat | None = None  # largest allowed log-prob gap; none: 3e-4 fp32, 0.2 bf16


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """avg@k on held-out prompts, by the same engine and reward code as training."""

    every: PositiveInt  # iterations; also before the first and after the last
    sets: dict[Key, Text]  # name: prompt file
    samples: Batch = 1  # k
    pass_at: tuple[PositiveInt, ...] = ()  # each K of pass@K to report, at most `samples`
    temperature: Temperature = 1.0
    top_p: Probability = 1.0
    top_k: Int = -1  # -1: no limit
    max_response_tokens: PositiveInt | None = None  # none: those of sampling
    # set name: [since, until], days as YYYY-MM-DD: only its problems dated on the first or later, and before the second
    windows: dict[Key, tuple[Text, Text]] = field(default_factory=dict)
    max_prompts: PositiveInt | None = None  # the first so many of each set


@dataclass(frozen=True, kw_only=True, slots=True)
class RlStage:
    """Reinforcement learning with verifiable rewards."""

    kind: Literal["rl"]
    prompts: Text  # JSONL, JSON or parquet of prompts
    dataset: DatasetConfig = field(default_factory=DatasetConfig)  # how `prompts` is read
    prompt_template: Text = "{problem}"  # text around each problem, in training and evaluation
    rewards: dict[Key, Float]  # reward name: weight
    iterations: PositiveInt  # rounds of generate, grade, train, transfer
    prompts_per_iteration: Batch
    group_size: Batch  # rollouts per prompt
    updates_per_rollout: Batch = 1  # optimizer steps per iteration
    tokens_per_microbatch: PositiveInt = 8192
    sampling: SamplingConfig
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    dynamic_sampling: DynamicSamplingConfig | None = None
    overlong: OverlongConfig | None = None
    curriculum: tuple[CurriculumWindow, ...] = ()  # empty: all prompts, always
    promote: PromoteConfig | None = None  # of every window without its own; without windows, of the stage
    rescore: RescoreConfig | None = None
    grader: GraderConfig = field(default_factory=GraderConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)  # of the reward code_tests
    engine: EngineConfig = field(default_factory=EngineConfig)
    # none: generate, then train. one_step: while the trainer trains on the rollouts of an iteration, the engines make
    # those of the next, with the weights transferred last; for engines on devices of their own, with a correction.
    # partial: the same, and what `stragglers` does not wait for goes on in the next iteration
    overlap: Literal["none", "one_step", "partial"] = "none"
    stragglers: StragglersConfig | None = None
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    eval: EvalConfig | None = None


Stage = SftStage | RlStage
