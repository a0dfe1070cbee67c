"""Gate: the sharded megatron-core model computes what Hugging Face transformers computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from safetensors.torch import load_file

from megatron_rl.data.types import PackedBatch
from megatron_rl.model.build import build_model, packed_seq_params
from megatron_rl.model.hf_io import load_hf, save_hf
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.groups import build_model_groups, destroy_model_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.platform import device
from tests.helpers.distributed import run_distributed
from tests.helpers.models import make_tiny_hf

# float32 logits of magnitude ~10: sums over 64 to 128 products in another order
TOLERANCE = 1e-5
SEQUENCES = ((5, 17, 99, 3, 42, 7, 200, 250, 11), (8, 1, 0), (101, 33, 250, 249, 6, 90, 91, 92, 93, 2, 2, 64))


@dataclass(frozen=True)
class Case:
    model: str
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    sp: bool = False
    ep: int = 1
    etp: int | None = None
    first: int | None = None
    last: int | None = None

    @property
    def name(self) -> str:
        plain = asdict(Case(self.model, sp=self.sp))
        degrees = [f"{key}{value}" for key, value in asdict(self).items() if value != plain[key]]
        return "-".join([self.model, *degrees, *["sp"] * self.sp])

    def layout(self, world_size: int) -> ParallelLayout:
        return ParallelLayout.for_world(
            tp=self.tp,
            pp=self.pp,
            vpp=self.vpp,
            sp=self.sp,
            ep=self.ep,
            etp=self.etp,
            first_stage_layers=self.first,
            last_stage_layers=self.last,
            world_size=world_size,
        )


MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"family": "qwen2"},
    "qwen2-tied": {"family": "qwen2", "tied": True},
    "qwen2-onekv": {"family": "qwen2", "kv_heads": 1},
    "qwen3": {"family": "qwen3"},
    "qwen3-tied": {"family": "qwen3", "tied": True},
    "llama": {"family": "llama"},
    "llama-scaled": {"family": "llama", "rope_factor": 8.0, "tied": True},
    "moe": {"family": "qwen3_moe"},
    "moe-raw": {"family": "qwen3_moe", "norm_topk_prob": False, "experts_per_token": 3, "tied": True},
}
# all of them in one world of four: data parallelism fills what the model does not use
WORLD_SIZE = 4
CASES = [
    *(Case(model) for model in MODELS),
    Case("qwen2", tp=2),
    Case("qwen2", tp=2, sp=True),
    Case("qwen2", pp=2),
    Case("qwen2", pp=2, vpp=2),
    Case("qwen2-tied", tp=2),
    Case("qwen2-tied", pp=2),
    Case("qwen2-tied", pp=2, vpp=2),
    Case("qwen3", tp=2),
    Case("qwen3", tp=2, sp=True),
    Case("llama", tp=2, sp=True),
    Case("llama-scaled", pp=2),
    Case("qwen2", tp=4),
    Case("qwen2", pp=4),
    Case("qwen2", tp=2, pp=2),
    Case("qwen2-tied", tp=2, pp=2, sp=True),
    Case("qwen2-onekv", tp=4),
    Case("qwen2-onekv", tp=4, sp=True),
    Case("qwen3", tp=4),
    Case("qwen3-tied", tp=2, pp=2, vpp=2, sp=True),
    Case("llama-scaled", tp=2, pp=2),
    Case("qwen2", pp=2, first=1),
    Case("qwen2-tied", tp=2, pp=2, last=3),
    Case("qwen3", pp=2, first=3, last=1),
    Case("qwen2-tied", pp=4, first=1, last=1),
    Case("moe", ep=2),
    Case("moe", ep=4),
    Case("moe", tp=2, sp=True),
    Case("moe", tp=2, sp=True, ep=2, etp=1),
    Case("moe", tp=2, sp=True, ep=2),
    Case("moe", ep=2, etp=2),
    Case("moe", tp=4, sp=True, ep=2, etp=2),
    Case("moe", pp=2, ep=2),
    Case("moe-raw", tp=2, sp=True, ep=4, etp=1),
    Case("moe-raw", tp=2, pp=2, vpp=2, sp=True, ep=2, etp=1),
]
# those whose weights are also written back
EXPORTED = [
    Case("qwen2", tp=2, pp=2),
    Case("qwen2-tied", tp=2, pp=2, sp=True),
    Case("qwen2-onekv", tp=4),
    Case("qwen3-tied", tp=2, pp=2, vpp=2, sp=True),
    Case("llama"),
    Case("qwen2-tied", tp=2, pp=2, last=3),
    Case("moe", tp=2, sp=True, ep=2),
    Case("moe-raw", tp=2, pp=2, vpp=2, sp=True, ep=2, etp=1),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, options in MODELS.items():
        make_tiny_hf(root / name, **options)
    return root


def packed(sequences: tuple[tuple[int, ...], ...]) -> PackedBatch:
    lengths = torch.tensor([0, *map(len, sequences)])
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    return PackedBatch(
        input_ids=tokens,
        labels=tokens,
        position_ids=torch.cat([torch.arange(len(sequence)) for sequence in sequences]),
        cu_seqlens=lengths.cumsum(0).to(torch.int32),
        loss_mask=torch.ones_like(tokens, dtype=torch.bool),
    )


def hf_logits(path: Path) -> torch.Tensor:
    """[T, V] of the sequences one by one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.cat([model(torch.tensor([sequence])).logits[0] for sequence in SEQUENCES])


def megatron_logits(chunks: list[Any], spec: ModelSpec, layout: ParallelLayout) -> torch.Tensor | None:
    """[T, V] on the last stage, gathered over tp; None elsewhere."""
    batch = packed(SEQUENCES)
    collected: list[torch.Tensor] = []

    def forward_step(batches: Iterator[PackedBatch], model: Any) -> Any:
        micro = next(batches)
        hidden = model(
            micro.input_ids[None],
            micro.position_ids[None],
            None,
            packed_seq_params=packed_seq_params(micro, dtype=torch.float32),
        )

        def take(output: torch.Tensor) -> Any:
            collected.append(whole_logits(output[:, 0], model.head_weight(), layout)[:, : spec.vocab_size])
            return output.sum(), torch.tensor(1), {}

        return hidden, take

    # interleaving wants a multiple of pp micro-batches
    iterators = [iter([batch] * layout.pp) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if layout.vpp > 1 else iterators[0],
        model=chunks if layout.vpp > 1 else chunks[0],
        num_microbatches=layout.pp,
        seq_length=batch.num_tokens,
        micro_batch_size=1,
        forward_only=True,
    )
    if not collected:
        return None
    assert torch.equal(collected[0], collected[-1]), "equal micro-batches must give equal logits"
    return collected[0]


def whole_logits(hidden: torch.Tensor, head: torch.Tensor, layout: ParallelLayout) -> torch.Tensor:
    """[T, V_padded] from this rank's hidden states (a token shard with sp) and rows of the head."""
    if layout.sp:
        hidden = gather_over_tp(hidden, layout, dim=0)
    return gather_over_tp(hidden @ head.T, layout, dim=1)


def gather_over_tp(shard: torch.Tensor, layout: ParallelLayout, *, dim: int) -> torch.Tensor:
    shards = [torch.empty_like(shard) for _ in range(layout.tp)]
    dist.all_gather(shards, shard.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(shards, dim=dim)


@contextlib.contextmanager
def loaded_model(root: Path, case: Case, rank: int, world_size: int) -> Iterator[Any]:
    """(chunks, spec, layout) of one case on this rank, inside its own groups of the one world."""
    layout = case.layout(world_size)
    build_model_groups(layout, timeout_s=60.0)
    spec = ModelSpec.from_hf(root / case.model)
    chunks = build_model(spec, layout, dtype=torch.float32)
    load_hf(chunks, spec, layout, hf_path=root / case.model, rank=rank)
    yield chunks, spec, layout
    destroy_model_groups()


def run_cases(rank: int, world_size: int, root: Path, exports: Path) -> dict[str, torch.Tensor | None]:
    """On every rank: one case after the other in one process, since starting costs more than computing."""
    device.activate()
    dist.init_process_group("gloo")
    results: dict[str, torch.Tensor | None] = {}
    for case in CASES:
        with loaded_model(root, case, rank, world_size) as (chunks, spec, layout):
            logits = megatron_logits(chunks, spec, layout)
            results[case.name] = None if logits is None else logits.detach()
            if case in EXPORTED:
                source, target = root / case.model, exports / case.name
                save_hf(chunks, spec, layout, hf_source=source, out_dir=target, dtype=torch.float32)
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def logits(models: Path, exports: Path) -> dict[str, list[torch.Tensor]]:
    """Case name -> the logits of every rank of a last stage."""
    found: dict[str, list[torch.Tensor]] = {}
    for of_rank in run_distributed(run_cases, WORLD_SIZE, models, exports, timeout_s=240.0):
        for name, value in of_rank.items():
            if value is not None:
                found.setdefault(name, []).append(value)
    return found


@pytest.fixture(scope="module")
def expected(models: Path) -> dict[str, torch.Tensor]:
    return {name: hf_logits(models / name) for name in MODELS}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_match_hf(
    case: Case, logits: dict[str, list[torch.Tensor]], expected: dict[str, torch.Tensor]
) -> None:
    # the last stage of every data-parallel replica, each of its tensor-parallel ranks
    assert len(logits[case.name]) == WORLD_SIZE // case.pp
    for got in logits[case.name]:
        assert got.shape == expected[case.model].shape
        torch.testing.assert_close(got, expected[case.model], rtol=0.0, atol=TOLERANCE)


def test_scaled_rope_changes_the_logits(expected: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """The scaled case above proves something only if scaling matters at these lengths."""
    plain = hf_logits(make_tiny_hf(tmp_path, family="llama", tied=True))
    assert (plain - expected["llama-scaled"]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("case", EXPORTED, ids=lambda case: case.name)
def test_export_after_import_gives_back_every_tensor_bit_by_bit(
    case: Case, models: Path, exports: Path, logits: dict[str, list[torch.Tensor]]
) -> None:
    assert case.name in logits
    before = load_file(models / case.model / "model.safetensors")
    after = load_file(exports / case.name / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert ModelSpec.from_hf(exports / case.name) == ModelSpec.from_hf(models / case.model)


def test_export_leaves_nothing_half_written(exports: Path, logits: dict[str, list[torch.Tensor]]) -> None:
    assert {case.name for case in EXPORTED} <= logits.keys()
    assert sorted(path.name for path in exports.iterdir()) == sorted(case.name for case in EXPORTED)
