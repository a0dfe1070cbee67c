"""Published speeds of other systems as inputs of our formulas: facts with their sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_rl.estimate.generation import Engines
from megatron_rl.estimate.hardware import Hardware, load_hardware
from megatron_rl.estimate.lengths import Lengths
from megatron_rl.estimate.timing import RlWork, StepTime, rl_step, sft_step
from megatron_rl.estimate.training import TRAIN, TRAIN_RECOMPUTED, Pass, Trainer
from megatron_rl.estimate.work import ModelWork, model_work
from megatron_rl.model.spec import ModelSpec, MoeSpec
from megatron_rl.parallel.layout import ParallelLayout

# torchtitan's selective checkpointing keeps every second product and computes the others again
SELECTIVE = Pass(products=3.5, attention=3.5, moved=4, head=3, exchanges=2, gathers_again=True)


def work(layers: int, hidden: int, ffn: int, heads: int, kv: int, vocab: int, **more: object) -> ModelWork:
    """Sizes of a public config.json; head size 128, which all of these have."""
    base = ModelSpec(
        family="llama", num_layers=layers, hidden_size=hidden, ffn_size=ffn, num_heads=heads, num_kv_heads=kv,
        head_dim=128, vocab_size=vocab, max_positions=131072, rope_theta=5e5, norm_eps=1e-5, tied=False,
        qkv_bias=False, qk_norm=False,
    )  # fmt: skip
    return model_work(replace(base, **more))  # type: ignore[arg-type]


LLAMA_8B = work(32, 4096, 14336, 32, 8, 128256)
LLAMA_70B = work(80, 8192, 28672, 64, 8, 128256)
QWEN3_4B = work(36, 2560, 9728, 32, 8, 151936, tied=True)
QWEN3_32B = work(64, 5120, 25600, 64, 8, 151936)
QWEN3_30B_A3B = work(
    48, 2048, 6144, 32, 4, 151936,
    moe=MoeSpec(num_experts=128, experts_per_token=8, expert_ffn_size=768, normalise_top_k=True),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One published figure: `published` in `unit`, what we compute for it, and where it stands."""

    name: str
    source: str
    unit: str  # tokens/s/GPU or s
    published: float
    compute: Callable[[dict[str, Hardware]], float]
    fitted: str = ""  # the share of the hardware files that was chosen on it
    misses: str = ""  # why ours is more than 30 % away, as far as known


def machines() -> dict[str, Hardware]:
    h100 = load_hardware("h100-80g")
    return {
        "h100": h100,
        "h200": load_hardware("h200-141g"),
        "b200": load_hardware("b200"),
        # torchtitan's: 96 GB of slower memory
        "h100-hbm2e": replace(h100, name="h100-hbm2e", memory_gib=94.0, hbm_gb_per_s=2400),
    }


def trained(
    model: ModelWork, machine: str, *, sequence: int, batch: int, dp: int, tp: int = 1, pp: int = 1, vpp: int = 1,
    ep: int = 1, micro: int = 1, fp8: bool = False, cost: Pass = TRAIN,
) -> Callable[[dict[str, Hardware]], float]:  # fmt: skip
    """Tokens per second and GPU of training on `batch` sequences per step, each of `sequence` tokens."""

    def compute(known: dict[str, Hardware]) -> float:
        trainer = Trainer(
            work=model,
            layout=ParallelLayout(tp=tp, pp=pp, vpp=vpp, dp=dp, sp=tp > 1, ep=ep),
            hardware=known[machine],
            microbatch_tokens=micro * sequence,
            fp8=fp8,
            hides_reduction=True,
        )
        step = sft_step(trainer, tokens=batch * sequence, context=sequence / 2, cost=cost)
        return step.tokens_per_s_per_gpu

    return compute


def iterated(
    model: ModelWork, known: dict[str, Hardware], *, mean: float, dp: int, tp: int = 1, pp: int = 1, ep: int = 1,
    engine_tp: int = 1, engine_gpus: int, separate: bool = False, cost: Pass = TRAIN,
) -> StepTime:  # fmt: skip
    """NeMo-RL's GRPO of its performance recipes: 64 prompts x 32, four updates, 4,096 tokens, old and reference
    log-probs; 132 prompt tokens (its tokens per second times its step time, less its mean response)."""
    layout = ParallelLayout(tp=tp, pp=pp, dp=dp, sp=tp > 1, ep=ep)
    trainer = Trainer(
        work=model, layout=layout, hardware=known["h100"], microbatch_tokens=4096, hides_reduction=True
    )
    engines = Engines(
        work=model,
        hardware=known["h100"],
        tp=engine_tp,
        replicas=engine_gpus // engine_tp,
        max_concurrent=256,
    )
    load = RlWork(
        generated=2048, trained=2048, updates=4, prompt_tokens=132, lengths=Lengths(mean=mean, longest=3964),
        scorings=2, reward_s=0.0, sync_s=0.0, overlap=separate,
    )  # fmt: skip
    num_gpus = layout.world_size + (engine_gpus if separate else 0)
    return rl_step(trainer, engines, load, cost=cost, num_gpus=num_gpus)


def phase(name: str, published: float, part: str, **fitted: str) -> Case:
    """A phase of the published step of one node."""

    def compute(known: dict[str, Hardware]) -> float:
        step = iterated(LLAMA_8B, known, mean=795, dp=4, pp=2, engine_gpus=8)
        return step.phases.get(part, step.step_s)

    return Case(
        name=f"NeMo-RL 0.3 Llama-3.1-8B GRPO, 8 H100: {name}", source="[R]", unit="s",
        published=published, compute=compute, **fitted,
    )  # fmt: skip


def iteration(name: str, published: float, model: ModelWork, *, rate: bool = False, **job: object) -> Case:
    def compute(known: dict[str, Hardware]) -> float:
        step = iterated(model, known, **job)  # type: ignore[arg-type]
        return step.tokens_per_s_per_gpu if rate else step.step_s

    return Case(
        name=f"NeMo-RL 0.4 {name}", source="[N]", unit="tokens/s/GPU" if rate else "s",
        published=published, compute=compute,
    )  # fmt: skip


_ARCHIVE = "[B]"
_TITAN = "[T]"
_PRIME = "[P]"
_ON = {"mean": 1060, "dp": 8, "pp": 2, "engine_gpus": 16, "cost": TRAIN_RECOMPUTED}
_OFF = {"mean": 1129, "dp": 4, "pp": 2, "engine_gpus": 8, "cost": TRAIN_RECOMPUTED, "separate": True}
_32B = {"dp": 2, "tp": 4, "pp": 4, "engine_gpus": 32, "engine_tp": 4}


def rate(
    name: str,
    source: str,
    published: float,
    *arguments: object,
    fitted: str = "",
    misses: str = "",
    **job: object,
) -> Case:
    return Case(
        name=name, source=source, unit="tokens/s/GPU", published=published,
        compute=trained(*arguments, **job), fitted=fitted, misses=misses,  # type: ignore[arg-type]
    )  # fmt: skip


CASES = (
    iteration("Llama-3.1-8B GRPO, 16 H100, on-policy", 1562, LLAMA_8B, rate=True, **_ON),
    iteration("Llama-3.1-8B GRPO, 16 H100, on-policy", 97.7, LLAMA_8B, **_ON),
    iteration("Llama-3.1-8B GRPO, 8 + 8 H100, one step off", 2161, LLAMA_8B, rate=True, **_OFF),
    iteration("Llama-3.1-8B GRPO, 8 + 8 H100, one step off", 74.6, LLAMA_8B, **_OFF),
    phase("training", 28, "train"),
    phase("generation", 58, "generate", fitted="decode_step_ms"),
    phase("log-probs", 18, "logprob"),
    phase("step, with refit 5", 112, "step"),
    iteration("Qwen3-32B GRPO, 32 H100, on-policy", 393, QWEN3_32B, mean=3206, **_32B),
    iteration("Qwen3-32B GRPO, 32 + 32 H100, one step off", 215, QWEN3_32B, mean=3207, separate=True, **_32B),
    iteration(
        "Qwen3-30B-A3B GRPO, 32 H100, on-policy", 225, QWEN3_30B_A3B,
        mean=3154, dp=32, ep=8, engine_gpus=32, engine_tp=2,
    ),
    rate(
        "Megatron-Bridge 25.11 Llama3-8B, 8 H100, FP8", _ARCHIVE, 14451, LLAMA_8B, "h100",
        sequence=8192, batch=128, dp=8, fp8=True, fitted="matmul_frac",
    ),
    rate(
        "Megatron-Bridge Llama3-70B SFT, 32 H100, FP8, tp 4 pp 4 vpp 5", "[B]",
        1638, LLAMA_70B, "h100", sequence=4096, batch=32, dp=2, tp=4, pp=4, vpp=5, fp8=True,
    ),
    rate(
        "Megatron-Bridge 25.11 Llama3-70B, 64 H100, FP8, tp 4 pp 8 vpp 5", _ARCHIVE, 1602, LLAMA_70B, "h100",
        sequence=8192, batch=128, dp=2, tp=4, pp=8, vpp=5, fp8=True,
    ),
    rate(
        "Megatron-Bridge 25.11 Llama3-8B, 8 B200, FP8", _ARCHIVE, 30624, LLAMA_8B, "b200",
        sequence=8192, batch=128, dp=8, micro=2, fp8=True,
    ),
    rate(
        "Megatron-Bridge 25.11 Qwen3-30B-A3B, 16 H100, FP8, pp 2 vpp 24 ep 8", _ARCHIVE, 5275, QWEN3_30B_A3B, "h100",
        sequence=4096, batch=512, dp=8, pp=2, vpp=24, ep=8, micro=2, fp8=True, fitted="expert_frac",
    ),
    rate(
        "NeMo 24.07 Llama3-8B, 8 H100, FP8, cp 2 taken as dp", "[S]", 12036, LLAMA_8B, "h100",
        sequence=8192, batch=128, dp=8, fp8=True,
    ),
    rate(
        "torchtitan Llama-3.1-8B, 8 H100 (HBM2e, 500 W), BF16", _TITAN, 6667, LLAMA_8B, "h100-hbm2e",
        sequence=8192, batch=16, dp=8, micro=2, cost=SELECTIVE, fitted="matmul_frac",
    ),
    rate(
        "torchtitan Llama-3.1-8B, 128 H100 (HBM2e, 500 W), BF16", _TITAN, 6514, LLAMA_8B, "h100-hbm2e",
        sequence=8192, batch=256, dp=128, micro=2, cost=SELECTIVE,
    ),
    rate(
        "torchtitan Llama-3.1-8B, 8 H100 (HBM2e, 500 W), FP8", _TITAN, 8532, LLAMA_8B, "h100-hbm2e",
        sequence=8192, batch=16, dp=8, micro=2, cost=SELECTIVE, fp8=True,
    ),
    rate(
        "torchtitan Llama-3.1-70B, 256 H100 (HBM2e, 500 W), FP8, tp 8", _TITAN, 829, LLAMA_70B, "h100-hbm2e",
        sequence=8192, batch=512, dp=32, tp=8, micro=16, cost=TRAIN_RECOMPUTED, fp8=True,
    ),
    rate(
        "prime-rl Qwen3-4B RL trainer, 8 H100, 65,536 tokens", _PRIME, 3621, QWEN3_4B, "h100",
        sequence=65536, batch=8, dp=8, cost=TRAIN_RECOMPUTED,
    ),
    rate(
        "prime-rl Qwen3-4B SFT, 8 H100, 16,384 tokens", _PRIME, 6215, QWEN3_4B, "h100",
        sequence=16384, batch=8, dp=8, cost=TRAIN_RECOMPUTED,
        misses="one micro-batch per step: gathering FSDP's weights is not hidden there",
    ),
    rate(
        "prime-rl Qwen3-4B RL trainer, 8 H100, 16,384 tokens", _PRIME, 3254, QWEN3_4B, "h100",
        sequence=16384, batch=8, dp=8, cost=TRAIN_RECOMPUTED,
        misses="as fast per token as at 65,536 tokens, so something else than computing binds it; unknown",
    ),
)  # fmt: skip


def table(known: dict[str, Hardware]) -> str:
    """The rows of the README, in its Markdown."""
    lines = ["| case | unit | published | ours | ours / published | |", "|---|---|---|---|---|---|"]
    for case in CASES:
        ours = case.compute(known)
        digits = 0 if case.published >= 1000 else 1
        note = f"fitted: {case.fitted}" if case.fitted else case.misses and f"misses: {case.misses}"
        lines.append(
            f"| {case.name} {case.source} | {case.unit} | {case.published:,.{digits}f} | {ours:,.{digits}f} "
            f"| {ours / case.published:.2f} | {note} |"
        )
    return "\n".join(lines)
