"""Time formulas: counts against the model's own tables, limits that can be worked out by hand, what grows with what."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl import estimate
from megatron_rl.estimate.generation import Engines, generation_time
from megatron_rl.estimate.hardware import load_hardware
from megatron_rl.estimate.lengths import Lengths
from megatron_rl.estimate.models import named_spec
from megatron_rl.estimate.stage_time import transfer_time
from megatron_rl.estimate.timing import RlWork, TransferLoad, rl_step, sync_s
from megatron_rl.estimate.training import FORWARD, TRAIN, TRAIN_RECOMPUTED, Trainer, pass_time, update_s
from megatron_rl.estimate.work import model_work
from megatron_rl.model.hf_tables import hf_tensors
from megatron_rl.model.spec import ModelSpec, MoeSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.reshard.placement import Placement
from megatron_rl.reshard.plan import plan_reshard

README = Path(estimate.__file__).parent / "README.md"
H100 = load_hardware("h100-80g")
# all of the peak, nothing else: what is left can be computed by hand
IDEAL = replace(
    H100, matmul_frac=1.0, attention_frac=1.0, hbm_frac=1.0, link_frac=1.0, hidden_frac=0.0, collective_us=0.0,
    decode_step_ms=0.0, decode_sequence_us=0.0,
)  # fmt: skip
SPEC = ModelSpec(
    family="llama", num_layers=32, hidden_size=4096, ffn_size=14336, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=128256, max_positions=8192, rope_theta=5e5, norm_eps=1e-5, tied=False, qkv_bias=False, qk_norm=False,
)  # fmt: skip
EXPERTS = MoeSpec(num_experts=64, experts_per_token=4, expert_ffn_size=1024, normalise_top_k=True)
MOE = replace(SPEC, family="qwen3_moe", moe=EXPERTS)
WORK = model_work(SPEC)


def trainer(hardware=H100, *, microbatch_tokens=8192, **layout):
    return Trainer(
        work=WORK,
        layout=ParallelLayout(**layout),
        hardware=hardware,
        microbatch_tokens=microbatch_tokens,
    )


def engines(hardware=H100, *, work=WORK, tp=1, replicas=1, max_concurrent=256, kv_tokens=math.inf):
    return Engines(
        work=work, hardware=hardware, tp=tp, replicas=replicas, max_concurrent=max_concurrent, kv_tokens=kv_tokens
    )  # fmt: skip


@pytest.mark.parametrize("spec", [SPEC, MOE, replace(SPEC, tied=True)], ids=["dense", "experts", "tied"])
def test_weights_are_those_of_the_model_without_its_norms(spec):
    matrices = sum(math.prod(shape) for shape in hf_tensors(spec).values() if len(shape) > 1)
    assert model_work(spec).num_weights == matrices


def test_a_token_takes_two_operations_per_weight_it_meets_and_looks_its_embedding_up():
    assert WORK.model_flops == 2 * (WORK.num_weights - WORK.embedding_weights)


def test_a_token_meets_its_own_experts_alone():
    work = model_work(MOE)
    assert work.expert_flops == 2 * (4 * 3 * 4096 * 1024 + 4096 * 64)
    assert work.experts_met(1) == pytest.approx(4)
    assert 63.9 < work.experts_met(1000) <= 64


@pytest.mark.parametrize("mean", [50.0, 1000.0, 3900.0, 4096.0])
def test_lengths_have_the_mean_that_was_asked_for_after_the_cut(mean):
    lengths = Lengths(mean=mean, longest=4096)
    found = lengths.quantiles(256)
    assert sum(found) / 256 == pytest.approx(mean, rel=1e-3)
    assert min(found) >= 1 and max(found) <= 4096 and found == sorted(found)
    assert lengths.mean_square >= mean**2 * 0.99


def test_a_forward_of_an_ideal_machine_takes_its_operations_over_its_peak():
    ideal = replace(IDEAL, hbm_gb_per_s=1e12)
    time = pass_time(trainer(ideal), FORWARD, tokens=1000, context=0)
    assert time.total_s == pytest.approx(1000 * WORK.model_flops / 989.4e12, rel=1e-3)


def test_recompute_costs_one_more_forward_of_the_layers():
    plain, again, forward = (
        pass_time(trainer(), cost, tokens=1e5, context=2048).compute_s for cost in (TRAIN, TRAIN_RECOMPUTED, FORWARD)
    )  # fmt: skip
    head = 1e5 * WORK.head_flops / (989.4e12 * H100.matmul_frac)
    assert again - plain == pytest.approx(forward - head)


@pytest.mark.parametrize(("vpp", "idle"), [(1, 3), (4, 3 / 4)])
def test_a_pipeline_idles_for_its_other_stages_and_less_with_more_chunks(vpp, idle):
    piped = trainer(replace(H100, hidden_frac=1.0), pp=4, vpp=vpp, microbatch_tokens=1000)
    time = pass_time(piped, TRAIN, tokens=10_000, context=0)
    assert time.bubble_s == pytest.approx(time.compute_s / 10 * idle)


def test_twice_the_ranks_of_data_parallel_take_half_the_time():
    one, two = (pass_time(trainer(dp=dp), TRAIN, tokens=1e6, context=1000).total_s for dp in (1, 2))
    assert two == pytest.approx(one / 2)


def test_tensor_parallel_over_nodes_is_slower_than_inside_one():
    inside, over = (pass_time(trainer(tp=tp, sp=True), TRAIN, tokens=1e5, context=1000) for tp in (8, 16))
    assert over.compute_s < inside.compute_s and over.exchange_s > 4 * inside.exchange_s


def test_the_bytes_that_tensor_parallel_sends_are_those_of_a_ring():
    time = pass_time(trainer(IDEAL, tp=4), FORWARD, tokens=1000, context=0)
    assert time.exchange_s == pytest.approx(32 * 1000 * 4 * 4096 * 2 * 3 / 4 / 450e9)


def test_an_optimizer_step_reduces_over_the_network_between_nodes():
    alone, inside, over = (update_s(trainer(dp=dp)) for dp in (1, 8, 16))
    assert alone == pytest.approx(WORK.num_weights * 34 / (3350e9 * H100.hbm_frac))
    moved = WORK.num_weights * 6 * 15 / 16 / (50e9 * H100.network_frac)
    assert over == pytest.approx(alone / 16 + moved)
    assert inside < over


def test_one_sequence_decodes_at_the_speed_that_weights_are_read():
    lengths = Lengths(mean=100, longest=100)
    time = generation_time(engines(IDEAL), sequences=1, prompt_tokens=1, lengths=lengths)
    read = (WORK.num_weights - WORK.embedding_weights) * 2 / 3350e9
    assert time.weights_s == pytest.approx(100 * read)
    assert (time.steps, time.mean_batch, time.overhead_s) == (pytest.approx(100), 1, 0)


def test_keys_and_values_are_read_once_per_step_and_position():
    lengths = Lengths(mean=100, longest=100)
    time = generation_time(engines(IDEAL), sequences=64, prompt_tokens=500, lengths=lengths)
    assert time.kv_s == pytest.approx(64 * 100 * 550 * 2 * 1024 * 32 * 2 / 3350e9)


def test_the_tail_costs_steps_of_a_small_batch():
    even, tailed = (
        generation_time(engines(), sequences=128, prompt_tokens=100, lengths=Lengths(mean=1000, longest=longest))
        for longest in (1000, 8000)
    )  # fmt: skip
    assert tailed.steps > 3 * even.steps
    assert tailed.mean_batch < even.mean_batch / 3
    assert tailed.total_s > 1.5 * even.total_s


@pytest.mark.parametrize(
    "limit", [{"max_concurrent": 32}, {"kv_tokens": 32 * 1100.0}], ids=["places", "cache"]
)
def test_fewer_places_make_more_steps_for_the_same_tokens(limit):
    lengths = Lengths(mean=1000, longest=4000)
    free = generation_time(engines(), sequences=256, prompt_tokens=100, lengths=lengths)
    few = generation_time(engines(**limit), sequences=256, prompt_tokens=100, lengths=lengths)
    assert few.steps > 1.5 * free.steps and few.mean_batch <= 32
    assert few.steps * few.mean_batch == pytest.approx(free.steps * free.mean_batch)


def test_more_replicas_shorten_generation_and_never_below_the_longest_response():
    lengths = Lengths(mean=1000, longest=4000)
    times = [
        generation_time(engines(replicas=n), sequences=512, prompt_tokens=100, lengths=lengths)
        for n in (1, 4, 64)
    ]
    assert times[0].total_s > times[1].total_s > times[2].total_s
    assert times[2].steps > 2000


def test_a_step_of_experts_reads_those_that_its_tokens_meet():
    work = model_work(MOE)
    lengths = Lengths(mean=10, longest=10)
    one, many = (
        generation_time(engines(IDEAL, work=work), sequences=n, prompt_tokens=1, lengths=lengths)
        for n in (1, 64)
    )
    assert one.weights_s < 0.3 * many.weights_s


def rl_work(**changes):
    lengths = Lengths(mean=1000, longest=4000)
    base = {
        "generated": 512, "trained": 512, "updates": 4, "prompt_tokens": 100, "lengths": lengths, "scorings": 2,
        "reward_s": 1.0, "sync_s": 2.0,
    }  # fmt: skip
    return RlWork(**(base | changes))


def test_phases_follow_one_another_and_overlap_takes_the_slower_side():
    sides = {}
    for overlap in (False, True):
        step = rl_step(trainer(dp=8), engines(replicas=8), rl_work(overlap=overlap), cost=TRAIN, num_gpus=16)
        assert tuple(step.phases) == ("generate", "reward", "logprob", "train", "sync")
        sides[overlap] = step
    phases = sides[False].phases
    assert sides[False].step_s == pytest.approx(sum(phases.values()))
    making, using = phases["generate"] + 1.0, phases["logprob"] + phases["train"]
    assert sides[True].step_s == pytest.approx(max(making, using) + 2.0)
    assert sides[True].tokens_per_s_per_gpu == pytest.approx(512 * 1100 / sides[True].step_s / 16)
    assert sides[True].gpu_hours(3600) == pytest.approx(sides[True].step_s * 16)


def test_trained_tokens_attend_to_half_their_sample_and_more_the_more_lengths_differ():
    even = rl_work(lengths=Lengths(mean=1000, longest=1000))
    assert even.context == pytest.approx(550)
    assert rl_work().context > 600


def transfer(**changes: float) -> TransferLoad:
    nothing = {"sent_bytes": 0.0, "received_bytes": 0.0, "crossing_frac": 0.0, "messages": 0.0, "tensors": 0}
    return TransferLoad(**(nothing | changes))


def test_a_transfer_takes_its_wires_and_its_copies_and_longer_between_nodes():
    wires, copies = 45e9 / 450e9, 7 * 45e9 / 3350e9
    assert sync_s(IDEAL, transfer(received_bytes=45e9)) == pytest.approx(wires + copies)
    # both directions of a wire at once, copies one after the other
    both = transfer(received_bytes=45e9, sent_bytes=45e9)
    assert sync_s(IDEAL, both) == pytest.approx(wires + copies * 10 / 7)
    inside, between = (sync_s(H100, transfer(sent_bytes=45e9, crossing_frac=frac)) for frac in (0, 1))
    assert between > 4 * inside


def test_a_transfer_of_nothing_still_costs_its_messages_and_what_loaders_take_per_tensor():
    assert sync_s(H100, transfer(messages=1000)) == pytest.approx(0.015)
    assert sync_s(H100, transfer(tensors=1000)) == pytest.approx(0.3)


# published times of the same transfers: the table of estimate/README.md
TRANSFERS = (
    ("qwen3-4b", ParallelLayout(dp=8), 8, 1, (0.07, 0.34)),
    ("qwen3-30b-a3b", ParallelLayout(dp=8, pp=2, ep=8, etp=1), 8, 2, (0.5, 7.0)),
    ("qwen2.5-32b", ParallelLayout(tp=8, dp=2), 8, 2, (0.0, 14.2)),
)


@pytest.mark.parametrize(
    ("model", "layout", "tp", "replicas", "published"), TRANSFERS, ids=lambda v: str(v)[:14]
)
def test_planned_transfers_are_in_the_range_of_published_ones_and_in_the_readme(
    model, layout, tp, replicas, published
):
    trainers = tuple(rank // 8 for rank in range(layout.world_size))
    workers = tuple(trainers[-1] + 1 + rank // 8 for rank in range(tp * replicas))
    place = Placement(
        trainer_nodes=trainers,
        worker_nodes=workers,
        trainer_devices=(None,) * len(trainers),
        worker_devices=(None,) * len(workers),
    )
    plan = plan_reshard(
        named_spec(model), layout, target_tp=tp, replicas=replicas, element_bytes=2, placement=place
    )
    ours = transfer_time(plan.summary(), H100)
    low, high = published
    assert low <= ours <= high
    row = next(line for line in README.read_text().splitlines() if line.lower().startswith(f"| {model} "))
    assert f"| {ours:.2g} s |" in row.replace("0.50 s", "0.5 s")
