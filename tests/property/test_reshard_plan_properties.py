"""The plan moves every needed element exactly once, whatever the layouts: proven by executing it on numbered
tensors.
"""

import json

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_rl.model.hf_tables import hf_tensors, padded_vocab, source_pieces
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.reshard.execute import check_seal, full_tensors, pack, unpack
from megatron_rl.reshard.plan import plan_from_inputs, plan_reshard
from megatron_rl.reshard.tables import target_needs


@st.composite
def specs_and_layouts(draw):
    kv = draw(st.sampled_from([1, 2, 4]))
    heads = kv * draw(st.sampled_from([1, 2, 4]))
    tp = draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.sampled_from([1, 2, 4]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    dp = draw(st.sampled_from([1, 2, 3]))
    target_tp = draw(st.sampled_from([1, 2, 4]))
    head_dim, family = 4, draw(st.sampled_from(["qwen2", "qwen3", "llama"]))
    assume(heads % target_tp == 0 and heads % tp == 0)
    spec = ModelSpec(
        family=family,
        num_layers=pp * vpp * draw(st.sampled_from([1, 2])),
        hidden_size=6,
        ffn_size=8,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=head_dim,
        vocab_size=draw(st.integers(1, 200)),
        max_positions=64,
        rope_theta=1e4,
        norm_eps=1e-6,
        tied=draw(st.booleans()),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )
    layout = ParallelLayout(tp=tp, pp=pp, vpp=vpp, dp=dp)
    return spec, layout, target_tp, draw(st.sampled_from([1, 2]))


def numbered_tensors(spec):
    """Every element of the model has its own number, so a wrong one cannot pass for a right one."""
    tensors, first = {}, 1
    for name, shape in hf_tensors(spec).items():
        count = torch.Size(shape).numel()
        tensors[name] = torch.arange(first, first + count, dtype=torch.float64).view(shape)
        first += count
    return tensors


def megatron_params(spec, layout, rank, hf):
    """Parameters of one rank built from the source table; padding rows are poisoned with -1."""
    pieces = source_pieces(spec, layout, rank=rank)
    chunks = [{} for _ in range(layout.vpp)]
    for piece in pieces:
        tensor, params = hf[piece.hf_name], chunks[piece.chunk]
        if piece.hf_dim is None:
            params[piece.param] = tensor.clone()
            continue
        if piece.param not in params:
            shape = list(tensor.shape)
            if "embedding" in piece.param or "output_layer" in piece.param:
                shape[0] = padded_vocab(spec.vocab_size, layout.tp) // layout.tp
            else:
                shape[piece.param_dim] = max(
                    p.param_start + p.length
                    for p in pieces
                    if (p.chunk, p.param) == (piece.chunk, piece.param)
                )
            params[piece.param] = torch.full(shape, -1.0, dtype=tensor.dtype)
        params[piece.param].narrow(piece.param_dim, piece.param_start, piece.length).copy_(
            tensor.narrow(piece.hf_dim, piece.hf_start, piece.length)
        )
    return chunks


@settings(max_examples=60, deadline=None)
@given(specs_and_layouts())
def test_every_needed_element_arrives_exactly_once_with_its_value(case):
    spec, layout, target_tp, replicas = case
    plan = plan_reshard(spec, layout, target_tp=target_tp, replicas=replicas, element_bytes=8)
    hf = numbered_tensors(spec)
    params = [megatron_params(spec, layout, rank, hf) for rank in range(layout.world_size)]
    for worker in range(plan.num_workers):
        payloads = {
            (message.bucket, message.sender): check_seal(
                plan,
                pack(plan, message.transfers, params[message.sender], dtype=torch.float64, version=3),
                version=3,
                source=message.sender,
            )
            for message in plan.messages_to(plan.num_trainers + worker)
        }
        parts = unpack(plan, worker, payloads, dtype=torch.float64)
        counts = {name: torch.zeros(shape) for name, shape in plan.shapes.items()}
        for name, received in parts.items():
            for transfer, _ in received:
                place = counts[name]
                if transfer.hf_dim is not None:
                    place = place.narrow(transfer.hf_dim, transfer.hf_start, transfer.length)
                place.add_(1)
        arrived = dict(full_tensors(plan, parts, dtype=torch.float64, canary=True))
        assert list(arrived) == list(hf)
        for name, (dim, start, length) in target_needs(spec, tp=target_tp, rank=worker % target_tp).items():
            wanted = torch.zeros(hf[name].shape)
            (wanted if dim is None else wanted.narrow(dim, start, length)).fill_(1)
            assert torch.equal(counts[name], wanted), name
            assert torch.equal(arrived[name].isnan(), wanted == 0), name
            assert torch.equal(arrived[name][wanted == 1], hf[name][wanted == 1]), name


@settings(max_examples=30, deadline=None)
@given(specs_and_layouts())
def test_every_process_builds_the_same_plan_and_its_bytes_add_up(case):
    spec, layout, target_tp, replicas = case
    plan = plan_reshard(spec, layout, target_tp=target_tp, replicas=replicas, element_bytes=2)
    again = plan_from_inputs(json.loads(json.dumps(plan.inputs())), digest=plan.digest())
    assert again == plan
    summary = plan.summary()
    assert (
        sum(summary["sent_bytes"].values()) == sum(summary["received_bytes"].values()) == plan.bytes_moved()
    )
    assert summary["model_bytes"] * replicas <= plan.bytes_moved() <= summary["broadcast_bytes"]


@settings(max_examples=30, deadline=None)
@given(specs_and_layouts())
def test_target_shards_of_one_engine_cover_every_tensor(case):
    spec, _, target_tp, _ = case
    needs = [target_needs(spec, tp=target_tp, rank=rank) for rank in range(target_tp)]
    for name, shape in hf_tensors(spec).items():
        dim = needs[0][name][0]
        if dim is None:
            continue
        covered = {i for need in needs for i in range(need[name][1], need[name][1] + need[name][2])}
        assert covered == set(range(shape[dim])), name
