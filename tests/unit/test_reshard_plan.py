"""Plans of known models: sizes, balance, order, and every way in which a damaged plan is refused."""

from array import array
from dataclasses import replace

import pytest

from megatron_rl.errors import LayoutError, ModelError, ReshardError
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.reshard.placement import Placement
from megatron_rl.reshard.plan import plan_from_inputs, plan_reshard
from megatron_rl.reshard.plan_text import ranges_text, size_text, summary_rows
from megatron_rl.reshard.proof import check_plan, check_totals
from megatron_rl.reshard.tables import check_served, target_needs

QWEN3_8B = ModelSpec(
    family="qwen3",
    num_layers=36,
    hidden_size=4096,
    ffn_size=12288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_positions=40960,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied=False,
    qkv_bias=False,
    qk_norm=True,
)
QWEN2_32B = replace(
    QWEN3_8B,
    family="qwen2",
    num_layers=64,
    hidden_size=5120,
    ffn_size=27648,
    num_heads=40,
    vocab_size=152064,
    qkv_bias=True,
    qk_norm=False,
)
TINY = ModelSpec(
    family="qwen2",
    num_layers=2,
    hidden_size=8,
    ffn_size=16,
    num_heads=4,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=100,
    max_positions=64,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=True,
    qkv_bias=True,
    qk_norm=False,
)
EMBEDDING = "model.embed_tokens.weight"
QKV = "model.layers.0.self_attn.{}_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def tiny_plan(layout=None, *, target_tp=1, replicas=1, spec=TINY, **options):
    layout = layout or ParallelLayout()
    return plan_reshard(spec, layout, target_tp=target_tp, replicas=replicas, element_bytes=4, **options)


def received(plan, worker):
    """(sender, transfer) of everything that a worker receives."""
    return [(m.sender, t) for m in plan.messages_to(plan.num_trainers + worker) for t in m.transfers]


def test_qwen3_8b_moves_the_minimum_and_loads_senders_evenly():
    plan = plan_reshard(QWEN3_8B, ParallelLayout(tp=4, pp=2), target_tp=2, replicas=4, element_bytes=2)
    facts = plan.summary()
    assert facts["model_bytes"] == 16_381_470_720
    # each engine receives the model once, and every worker but the first its own copy of the norms
    norms = (36 * 2 + 1) * 4096 * 2 + 36 * 2 * 128 * 2
    assert plan.bytes_moved() == facts["minimum_bytes"] == 4 * (facts["model_bytes"] + norms)
    assert facts["send_imbalance"] < 1.05
    assert facts["receive_imbalance"] < 1.01


def test_a_plan_for_32b_is_small_and_says_what_it_moves():
    plan = plan_reshard(QWEN2_32B, ParallelLayout(tp=8, pp=4), target_tp=4, replicas=8, element_bytes=2)
    facts = plan.summary()
    assert facts["transfers"] == 45_216
    assert len(plan.segments) < 2_000
    assert facts["send_imbalance"] < 1.05
    text = plan.explain()
    assert "8 engines of tp 4: 32 workers" in text
    assert "1.000 x the minimum" in text
    assert plan.digest() in text


def test_a_single_kv_head_is_replicated_on_every_worker():
    needs = [target_needs(TINY, tp=4, rank=rank)[QKV.format("k")] for rank in range(4)]
    assert needs == [(0, 0, 4)] * 4


def test_two_kv_heads_on_four_workers_go_to_pairs():
    spec = replace(TINY, num_kv_heads=2)
    assert [target_needs(spec, tp=4, rank=rank)[QKV.format("v")][1] for rank in range(4)] == [0, 0, 4, 4]


def test_vocabulary_is_split_after_padding():
    rows = [target_needs(TINY, tp=4, rank=rank)[EMBEDDING] for rank in range(4)]
    assert rows == [(0, 0, 32), (0, 32, 32), (0, 64, 32), (0, 96, 4)]


def test_a_worker_with_only_padding_receives_no_rows():
    plan = tiny_plan(spec=replace(TINY, vocab_size=30), target_tp=2)
    assert plan.needs[1][EMBEDDING] == (0, 30, 0)
    assert EMBEDDING not in {t.hf_name for _, t in received(plan, 1)}
    assert EMBEDDING in [name for bucket in range(plan.num_buckets) for name in plan.completes(bucket)]


def test_tied_copies_share_the_load_of_the_embedding():
    plan = tiny_plan(ParallelLayout(pp=2), replicas=2)
    arriving = [*received(plan, 0), *received(plan, 1)]
    assert {sender for sender, t in arriving if t.hf_name == EMBEDDING} == {0, 1}


def test_data_parallel_copies_share_what_one_engine_needs():
    plan = tiny_plan(ParallelLayout(dp=4), bucket_bytes=16384)
    sent = plan.summary()["sent_bytes"].values()
    assert max(sent) <= 1.1 * min(sent)


def test_engines_that_need_the_same_from_one_rank_share_the_list_of_transfers():
    messages = tiny_plan(replicas=3).messages_from(0)
    assert [message.receiver for message in messages] == [1, 2, 3]
    assert messages[0].transfers is messages[1].transfers is messages[2].transfers


def test_layers_of_different_stages_take_turns_and_each_stays_together():
    spec = replace(TINY, num_layers=8, tied=False)
    plan = tiny_plan(ParallelLayout(pp=2, vpp=2), spec=spec, bucket_bytes=4096)
    order = [name for bucket in range(plan.num_buckets) for name in plan.completes(bucket)]
    layers = [int(name.split(".")[2]) for name in order if "layers" in name]
    assert list(dict.fromkeys(layers)) == [0, 2, 1, 3, 4, 6, 5, 7]  # stage 0 has 0, 1, 4 and 5
    assert [layer for i, layer in enumerate(layers) if i == 0 or layers[i - 1] != layer] == list(
        dict.fromkeys(layers)
    )
    assert order[0] == EMBEDDING
    assert order[-2:] == ["model.norm.weight", "lm_head.weight"]


def test_turns_keep_ranks_of_all_stages_busy():
    spec = replace(QWEN3_8B, num_layers=8)
    plan = plan_reshard(spec, ParallelLayout(tp=2, pp=4), target_tp=2, replicas=4, element_bytes=2)
    layer_buckets = [
        {message.bucket for message in plan.messages_from(2 * stage) if message.bytes > 2**20}
        for stage in range(4)
    ]
    first_half = [sum(bucket < plan.num_buckets / 2 for bucket in buckets) for buckets in layer_buckets]
    assert min(first_half) >= 1, "in checkpoint order the last stage would wait for all others"


def test_a_layer_that_fits_into_a_bucket_is_not_cut():
    plan = tiny_plan(bucket_bytes=4096)
    layer_of = {}
    for bucket in range(plan.num_buckets):
        for name in plan.completes(bucket):
            if "layers" in name:
                assert layer_of.setdefault(name.split(".")[2], bucket) == bucket


def test_a_tensor_larger_than_a_bucket_arrives_in_rows_and_is_complete_with_the_last():
    plan = tiny_plan(bucket_bytes=1024)
    rows = [
        (m.bucket, t.hf_start, t.length)
        for m in plan.messages_to(1)
        for t in m.transfers
        if t.hf_name == EMBEDDING
    ]
    assert rows == [(0, 0, 25), (1, 25, 25), (2, 50, 25), (3, 75, 25)]
    assert [EMBEDDING in plan.completes(bucket) for bucket in range(4)] == [False, False, False, True]


def test_a_bucket_below_the_smallest_slice_is_refused():
    with pytest.raises(
        ReshardError, match=r"bucket_bytes: got 16, but the smallest slice of .* has 32 bytes"
    ):
        tiny_plan(bucket_bytes=16)


def test_a_rank_on_the_same_device_is_preferred_then_one_on_the_same_node():
    placement = Placement.packed(4, 4, 2, colocated=True)
    plan = tiny_plan(ParallelLayout(dp=4), target_tp=1, replicas=4, placement=placement)
    assert [{m.sender for m in plan.messages_to(4 + worker)} for worker in range(4)] == [{0}, {1}, {2}, {3}]
    facts = plan.summary()
    assert facts["local_bytes"] == plan.bytes_moved()
    assert facts["sent_bytes"] == {0: 0, 1: 0, 2: 0, 3: 0}
    without_devices = replace(placement, trainer_devices=(None,) * 4)
    plan = tiny_plan(ParallelLayout(dp=4), target_tp=1, replicas=4, placement=without_devices)
    for worker in range(4):
        assert {m.sender // 2 for m in plan.messages_to(4 + worker)} == {worker // 2}


def test_with_two_tiers_workers_pass_on_what_they_receive_in_the_same_bucket():
    placement = Placement.packed(1, 4, 4)
    plan = tiny_plan(replicas=4, placement=placement, two_tier=True, bucket_bytes=2048)
    assert plan.summary()["cross_node_bytes"] == plan.summary()["model_bytes"]
    relayed = [message for worker in range(4) for message in plan.messages_from(1 + worker)]
    assert len({message.sender for message in relayed}) == 4, "all take a share of passing on"
    for message in relayed:
        own = [m for m in plan.messages_to(message.sender) if (m.bucket, m.sender) == (message.bucket, 0)]
        assert set(message.transfers) <= set(own[0].transfers)


@pytest.mark.parametrize(
    ("changes", "tp", "match"),
    [
        ({}, 3, "attention heads; use 2 or 4"),
        ({"num_heads": 6, "num_kv_heads": 3}, 2, "3 kv heads or be a multiple of them; use 1"),
        ({"ffn_size": 15}, 4, "ffn columns; use 1"),
        ({"num_heads": 12, "ffn_size": 24}, 12, "padded vocabulary rows; use 4"),
    ],
)
def test_an_engine_that_cannot_hold_the_model_is_refused_with_the_nearest_that_can(changes, tp, match):
    with pytest.raises(LayoutError, match=match):
        tiny_plan(spec=replace(TINY, **changes), target_tp=tp)


def test_a_placement_of_another_size_is_refused():
    with pytest.raises(ReshardError, match="places 2 engine workers, but there are 3"):
        tiny_plan(replicas=3, placement=Placement.one_node(1, 2))


def test_a_process_with_another_plan_is_refused():
    plan = tiny_plan(ParallelLayout(tp=2))
    with pytest.raises(ReshardError, match="same version"):
        plan_from_inputs({**plan.inputs(), "element_bytes": 2}, digest=plan.digest())


@pytest.mark.parametrize(
    "changes",
    [
        {"placement": Placement.packed(2, 2, 1)},
        {"two_tier": True},
        {"bucket_bytes": 4096},
        {"element_bytes": 2},
        {"spec": replace(TINY, rope_theta=1e6)},
    ],
    ids=["placement", "two_tier", "bucket_bytes", "element_bytes", "spec"],
)
def test_whatever_goes_into_a_plan_is_in_its_digest(changes):
    given = {"spec": TINY, "source": ParallelLayout(tp=2), "target_tp": 1, "replicas": 2, "element_bytes": 4}
    assert plan_reshard(**given).digest() == plan_reshard(**given).digest()
    assert plan_reshard(**{**given, **changes}).digest() != plan_reshard(**given).digest()


# the proof: a plan is damaged in one place, and the place is named


def segment_with(plan, name, tp_rank=0):
    """(position of the segment, position of the interval in it) of the first interval of a tensor."""
    tensor = plan.names.index(name)
    return next(
        (i, j)
        for i, segment in enumerate(plan.segments)
        for j, interval in enumerate(segment.intervals)
        if interval.tensor == tensor and tp_rank in segment.tp_ranks
    )


def with_interval(plan, name, change, *, tp_rank=0):
    """The plan with one interval replaced by those that `change` makes of it, sizes kept consistent."""
    i, j = segment_with(plan, name, tp_rank)
    segment = plan.segments[i]
    intervals = (*segment.intervals[:j], *change(segment.intervals[j]), *segment.intervals[j + 1 :])
    changed = replace(segment, intervals=intervals, bytes=sum(interval.bytes for interval in intervals))
    return replace(plan, segments=(*plan.segments[:i], changed, *plan.segments[i + 1 :]))


def with_routes(plan, name, senders):
    i, _ = segment_with(plan, name)
    return replace(plan, routes=(*plan.routes[:i], array("i", senders), *plan.routes[i + 1 :]))


def shorter(interval):
    """Without its last index."""
    row = interval.bytes // interval.length
    return [interval._replace(length=interval.length - 1, bytes=interval.bytes - row)]


def moved(interval):
    return [interval._replace(start=interval.start + 1)]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda i: [], rf"a gap in {DOWN} for tp rank 0 along dim 1: index 0 expected, got 8"),
        (shorter, rf"a gap in {DOWN} for tp rank 0 along dim 1: index 7 expected, got 8"),
        (lambda i: [i, i], rf"an overlap in {DOWN} for tp rank 0 along dim 1: index 8 expected, got 0"),
        (
            lambda i: [i._replace(bytes=i.bytes + 4)],
            rf"{DOWN}\[0:8\] along dim 1 moves 260 bytes, .* has 256",
        ),
        (moved, rf"{DOWN}\[1:9\] along dim 1 is planned from trainer rank 0, which does not hold all of it"),
    ],
    ids=["missing", "too short", "twice", "bytes", "outside its holder"],
)
def test_a_damaged_interval_is_found(change, match):
    plan = tiny_plan(ParallelLayout(tp=2))
    check_plan(plan)
    with pytest.raises(ReshardError, match=match):
        check_plan(with_interval(plan, DOWN, change))


def test_an_interval_that_ends_too_early_is_found():
    plan = tiny_plan()
    with pytest.raises(ReshardError, match=rf"{DOWN} for tp rank 0 along dim 1 ends at 15, needed up to 16"):
        check_plan(with_interval(plan, DOWN, shorter))


def test_a_whole_tensor_that_goes_twice_is_found():
    name = "model.norm.weight"
    with pytest.raises(ReshardError, match=f"{name} goes whole to tp rank 0, together with 1 other"):
        check_plan(with_interval(tiny_plan(), name, lambda i: [i, i]))


def test_a_whole_tensor_that_is_missing_is_found():
    with pytest.raises(ReshardError, match=r"model\.norm\.weight for tp rank 0 .* ends at 0, needed up to 8"):
        check_plan(with_interval(tiny_plan(), "model.norm.weight", lambda i: []))


def test_a_segment_that_counts_wrong_is_found():
    plan = tiny_plan()
    wrong = replace(plan.segments[0], bytes=plan.segments[0].bytes + 4)
    with pytest.raises(ReshardError, match="have another sum"):
        check_plan(replace(plan, segments=(wrong, *plan.segments[1:])))


@pytest.mark.parametrize(
    ("senders", "match"),
    [
        ([1, 0], "goes to worker 0 from trainer rank 1, which does not hold it"),
        ([0], "goes to 2 workers, but has 1 senders"),
        ([0, 7], "goes to worker 1 from worker 5, which must be on the same node and receive it"),
        ([2, 2], "goes to worker 0 from worker 0, which must be on the same node and receive it"),
        ([3, 2], "goes to worker 0 from worker 1, which must be on the same node and receive it"),
        ([-1, 0], "goes to worker 0 from worker -3, which must be"),
    ],
    ids=["not a holder", "no sender", "stranger", "itself", "in a circle", "nobody"],
)
def test_a_sender_that_has_nothing_to_send_is_found(senders, match):
    plan = tiny_plan(ParallelLayout(pp=2), replicas=2)
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ReshardError, match=match):
        check_plan(with_routes(plan, name, senders))


def test_a_worker_of_another_node_may_not_pass_on():
    plan = tiny_plan(replicas=2, placement=Placement.packed(1, 2, 1), two_tier=True)
    with pytest.raises(ReshardError, match="goes to worker 1 from worker 0, which must be on the same node"):
        check_plan(with_routes(plan, EMBEDDING, [0, 1]))


def test_a_missing_row_of_senders_is_found():
    plan = tiny_plan()
    with pytest.raises(ReshardError, match="segments, but senders for"):
        check_plan(replace(plan, routes=plan.routes[:-1]))


def test_a_bucket_that_is_too_full_is_found():
    plan = tiny_plan()
    with pytest.raises(ReshardError, match=r"tp rank 0 receives \d+ bytes in bucket 0, the limit is 1000"):
        check_plan(replace(plan, bucket_bytes=1000))


def test_a_tensor_that_arrives_after_its_last_bucket_is_found():
    plan = tiny_plan(bucket_bytes=1024)
    i, _ = segment_with(plan, EMBEDDING)
    late = replace(plan.segments[i], bucket=plan.num_buckets - 1)
    with pytest.raises(ReshardError, match="said to be complete in bucket 3"):
        check_plan(replace(plan, segments=(*plan.segments[:i], late, *plan.segments[i + 1 :])))


def test_a_tensor_that_no_bucket_completes_is_found():
    plan = tiny_plan()
    with pytest.raises(ReshardError, match=rf"{EMBEDDING} is never complete in the buckets"):
        check_plan(replace(plan, buckets=(plan.buckets[0][1:], *plan.buckets[1:])))


def test_a_worker_that_receives_what_it_does_not_need_is_found():
    plan = tiny_plan(target_tp=2)
    needless = replace(plan, needs=tuple({**table, EMBEDDING: (0, 0, 0)} for table in plan.needs))
    with pytest.raises(ReshardError, match=f"{EMBEDDING} for tp rank 0 .* ends at 64, needed up to 0"):
        check_plan(needless)
    with pytest.raises(ReshardError, match=r"tp rank 0 receives \d+ bytes, but needs \d+"):
        check_totals(needless)


def test_a_layer_that_no_rank_holds_is_named():
    layout = ParallelLayout(pp=2, first_stage_layers=1, last_stage_layers=1)
    with pytest.raises(ReshardError, match=r"a gap in model\.layers\.2\..*: no trainer rank holds"):
        tiny_plan(layout, spec=replace(TINY, num_layers=4))


# the plan in words


def test_one_tensor_is_shown_from_its_holders_to_its_workers():
    plan = tiny_plan(ParallelLayout(tp=2), replicas=2, placement=Placement.packed(2, 2, 2), two_tier=True)
    lines = plan.explain_tensor(DOWN).splitlines()
    assert lines[0] == f"{DOWN}  [8, 16]"
    assert "  rank 0: columns 0:8, in chunk 0 decoder.layers.1.mlp.linear_fc2.weight[0:8]" in lines
    assert "  tp rank 0 of an engine (worker 0-1): columns 0:16" in lines
    assert "  bucket 0: columns 0:8, 256 B each" in lines
    assert any(line.strip().startswith("passed on by worker") for line in lines)


def test_a_tensor_that_is_not_there_is_answered_with_the_nearest():
    with pytest.raises(ReshardError, match=r"did you mean model\.layers\.0\.mlp\.up_proj\.weight"):
        tiny_plan().explain_tensor("model.layers.0.mlp.up_proj")


def test_the_summary_has_three_lines():
    plan = tiny_plan(ParallelLayout(tp=2), replicas=2, placement=Placement.packed(2, 2, 2))
    moved, _, pieces = (value for _, value in summary_rows(plan.summary()))
    assert (
        moved
        == "17.9 KiB, 17.9 KiB of it between 2 machines, 1.00 x the minimum; whole tensors would be 17.9 KiB"
    )
    assert pieces.startswith("1 bucket of at most 256 MiB per worker, 4 messages, ")


def test_numbers_are_shown_as_ranges_and_sizes_in_the_largest_unit():
    assert ranges_text([5, 0, 1, 2, 9]) == "0-2, 5, 9"
    assert ranges_text(range(0, 200, 2)).endswith("... 88 more")
    assert [size_text(n) for n in (0, 1023, 1024, 1536, 3 * 2**30)] == [
        "0 B",
        "1,023 B",
        "1 KiB",
        "1.5 KiB",
        "3 GiB",
    ]


def test_a_model_that_vllm_would_cut_in_silence_is_refused():
    check_served(replace(TINY, head_dim=2))
    with pytest.raises(
        ModelError, match=r"head_dim = 4 with hidden_size = 8 and 4 .* use a model with head_dim = 2$"
    ):
        check_served(TINY)
