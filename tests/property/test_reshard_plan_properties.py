"""The plan moves every needed element exactly once, whatever the layouts: proven by carrying it out on numbered
tensors.
"""

import json
from math import prod

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_rl.model.hf_tables import hf_tensors, source_pieces
from megatron_rl.model.spec import ModelSpec, MoeSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.reshard.placement import Placement
from megatron_rl.reshard.plan import DEFAULT_BUCKET_BYTES, plan_from_inputs, plan_reshard
from megatron_rl.reshard.tables import target_needs
from tests.helpers.numbered import Delivery, cut, megatron_params, numbered_tensors

DEGREES = st.sampled_from([1, 2, 4])


@st.composite
def specs(draw, *, layers, tp, ep):
    kv = draw(DEGREES)
    heads = kv * draw(DEGREES)
    assume(heads % tp == 0)
    family = "qwen3_moe" if ep > 1 else draw(st.sampled_from(["qwen2", "qwen3", "llama", "qwen3_moe"]))
    experts = MoeSpec(num_experts=4, experts_per_token=2, expert_ffn_size=8, normalise_top_k=True)
    return ModelSpec(
        family=family,
        num_layers=layers,
        hidden_size=6,
        ffn_size=8,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=4,
        vocab_size=draw(st.integers(1, 200)),
        max_positions=64,
        rope_theta=1e4,
        norm_eps=1e-6,
        tied=draw(st.booleans()),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        moe=experts if family == "qwen3_moe" else None,
    )


@st.composite
def models(draw):
    """Arguments of `plan_reshard`: a model, its layout in training and the degree of the engines."""
    tp, pp, ep, target_tp = draw(DEGREES), draw(DEGREES), draw(st.sampled_from([1, 1, 2])), draw(DEGREES)
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    layers = pp * vpp * draw(st.sampled_from([1, 2]))
    more = pp > 1 and vpp == 1 and draw(st.booleans())  # one more layer, which the first stage takes
    layout = ParallelLayout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        dp=ep * draw(st.sampled_from([1, 2, 3])),
        ep=ep,
        etp=draw(st.sampled_from([None, 1])),
        first_stage_layers=layers // pp + 1 if more else None,
    )
    spec = draw(specs(layers=layers + more, tp=tp, ep=ep))
    assume(spec.num_heads % target_tp == 0)
    return {"spec": spec, "source": layout, "target_tp": target_tp, "element_bytes": 8}


@st.composite
def cases(draw):
    """All arguments of `plan_reshard`: also any placement, and the smallest buckets or the usual ones."""
    case = draw(models())
    replicas, per_node = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3, 8]))
    members = case["source"].world_size, case["target_tp"] * replicas
    placements = (
        None,
        Placement.packed(*members, per_node),
        Placement.packed(*members, per_node, colocated=True),
    )
    return case | {
        "replicas": replicas,
        "placement": draw(st.sampled_from(placements)),
        "bucket_bytes": draw(st.sampled_from([smallest_bucket(case["spec"]), 1000, DEFAULT_BUCKET_BYTES])),
        "two_tier": draw(st.booleans()),
    }


def smallest_bucket(spec):
    """Bytes of the largest slice that is not cut further: a column of o_proj and down_proj, a row of others."""
    cut_dims = {name: dim or 0 for name, (dim, _, _) in target_needs(spec, tp=1, rank=0).items()}
    return 8 * max(prod(shape) // shape[cut_dims[name]] for name, shape in hf_tensors(spec).items())


def delivered(plan):
    hf = numbered_tensors(plan.spec)
    params = [megatron_params(plan.spec, plan.source, rank, hf) for rank in range(plan.num_trainers)]
    delivery = Delivery(plan, params)
    delivery.run()
    return hf, delivery


@settings(max_examples=50, deadline=None)
@given(cases())
def test_every_needed_element_arrives_exactly_once_with_its_value(case):
    plan = plan_reshard(**case)
    hf, delivery = delivered(plan)
    for worker in range(plan.num_workers):
        for name, need in plan.needs[worker % plan.target_tp].items():
            wanted = np.zeros(hf[name].shape, dtype=int)
            cut(wanted, *need)[...] = 1
            assert np.array_equal(delivery.arrivals[worker][name], wanted), name
            assert np.array_equal(cut(delivery.tensors[worker][name], *need), cut(hf[name], *need)), name


@settings(max_examples=30, deadline=None)
@given(cases())
def test_with_two_tiers_each_byte_enters_a_node_at_most_once_and_never_where_it_is(case):
    plan = plan_reshard(**case)
    _, delivery = delivered(plan)
    entered = int(sum(count.sum() for count in delivery.entered.values())) * plan.element_bytes
    facts = plan.summary()
    assert entered == facts["cross_node_bytes"] >= facts["cross_node_minimum_bytes"]
    if plan.two_tier:
        assert entered == facts["cross_node_minimum_bytes"]
        assert all(count.max() == 1 for count in delivery.entered.values())
    for rank, node in enumerate(plan.placement.trainer_nodes):
        for piece in source_pieces(plan.spec, plan.source, rank=rank):
            if (count := delivery.entered.get((node, piece.hf_name))) is not None:
                held = cut(count, piece.hf_dim, piece.hf_start, piece.length)
                assert not held.any(), f"{piece.hf_name} came to node {node}, which holds it"


@settings(max_examples=25, deadline=None)
@given(cases())
def test_every_process_builds_the_same_plan_and_its_bytes_add_up(case):
    plan = plan_reshard(**case)
    again = plan_from_inputs(json.loads(json.dumps(plan.inputs())), digest=plan.digest())
    assert again.inputs() == plan.inputs()
    facts = plan.summary()
    moved = plan.bytes_moved()
    assert sum(facts["received_bytes"].values()) == moved - facts["local_bytes"]
    assert (
        sum(facts["sent_bytes"].values()) + sum(facts["relayed_bytes"].values())
        == moved - facts["local_bytes"]
    )
    assert facts["local_bytes"] + facts["intra_node_bytes"] + facts["cross_node_bytes"] == moved
    assert facts["model_bytes"] * plan.replicas <= moved <= facts["broadcast_bytes"]
    assert facts["ratio_to_minimum"] == 1.0, "what a worker's device holds is never sent"


@settings(max_examples=25, deadline=None)
@given(cases())
def test_buckets_have_a_limit_and_messages_a_fixed_order(case):
    plan = plan_reshard(**case)
    for member in range(plan.num_trainers + plan.num_workers):
        messages, fill = plan.messages_to(member), [0] * plan.num_buckets
        for message in messages:
            fill[message.bucket] += message.bytes
        assert max(fill) <= plan.bucket_bytes
        into = [(m.bucket, m.sender) for m in messages]
        out = [(m.bucket, m.receiver) for m in plan.messages_from(member)]
        assert into == sorted(set(into)), "one message for each bucket and sender"
        assert out == sorted(set(out)), "one message for each bucket and receiver"


@settings(max_examples=30, deadline=None)
@given(models())
def test_ranks_that_are_planned_together_hold_the_same(case):
    """The plan reads the table of one rank of each kind."""
    plan = plan_reshard(**case, replicas=1)
    for rank in range(plan.num_trainers):
        held = plan.holdings[plan.holding_of[rank]].pieces
        pieces = {piece for group in held.values() for piece in group}
        assert pieces == set(source_pieces(plan.spec, plan.source, rank=rank))


@settings(max_examples=30, deadline=None)
@given(
    tp=st.sampled_from([1, 2]),
    pp=DEGREES,
    dp=st.integers(1, 6),
    target_tp=DEGREES,
    replicas=st.integers(1, 6),
    two_tier=st.booleans(),
)
def test_ranks_that_hold_the_same_send_about_the_same(tp, pp, dp, target_tp, replicas, two_tier):
    spec = ModelSpec(
        family="llama", num_layers=8, hidden_size=64, ffn_size=128, num_heads=8, num_kv_heads=4, head_dim=8,
        vocab_size=512, max_positions=64, rope_theta=1e4, norm_eps=1e-6, tied=False, qkv_bias=False, qk_norm=False,
    )  # fmt: skip
    layout = ParallelLayout(tp=tp, pp=pp, dp=dp)
    facts = plan_reshard(
        spec,
        layout,
        target_tp=target_tp,
        replicas=replicas,
        element_bytes=2,
        placement=Placement.packed(layout.world_size, target_tp * replicas, 8),
        bucket_bytes=2**16,
        two_tier=two_tier,
    ).summary()
    for stage in range(pp):
        for shard in range(tp):
            ranks = [layout.rank(tp=shard, dp=copy, pp=stage) for copy in range(dp)]
            loads = [facts["sent_bytes"][rank] for rank in ranks]
            assert max(loads) <= 1.1 * sum(loads) / dp


@settings(max_examples=30, deadline=None)
@given(models())
def test_target_shards_of_one_engine_cover_every_tensor(case):
    spec, tp = case["spec"], case["target_tp"]
    needs = [target_needs(spec, tp=tp, rank=rank) for rank in range(tp)]
    for name, shape in hf_tensors(spec).items():
        dim = needs[0][name][0]
        if dim is None:
            continue
        covered = {i for need in needs for i in range(need[name][1], need[name][1] + need[name][2])}
        assert covered == set(range(shape[dim])), name
