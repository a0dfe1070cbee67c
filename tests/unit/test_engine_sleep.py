"""What an engine gives back while it sleeps, and that nothing of it is used before it is there again. Without vLLM."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_rl.errors import EngineError, ReshardError
from megatron_rl.rollout.sleep import Memory, Sleeper, is_marked, mark, plain_tensors


class Packed(nn.Module):
    """As vLLM leaves a linear layer on CPU: no weight, and a function that holds its packed copy."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self.bias = nn.Parameter(torch.ones(4), requires_grad=False)
        self.pack(torch.eye(4))

    def pack(self, weight):
        self.cpu_linear = lambda x, _, bias: x @ weight + bias

    def forward(self, x):
        return self.cpu_linear(x, self.weight, self.bias)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.linear = Packed()
        self.register_buffer("cos", torch.arange(4.0))
        self.scale = torch.tensor([2.0])
        self.tables = {"sin": torch.arange(3.0), "name": "x"}
        self.rows = self.embedding.weight[:2]


class Llm:
    """One worker, in this process."""

    def __init__(self):
        model = Model().requires_grad_(False)
        kv_caches = [torch.ones(2, 64), torch.ones(2, 64)]
        self.worker = SimpleNamespace(model_runner=SimpleNamespace(model=model, kv_caches=kv_caches))
        self.called = []

    def collective_rpc(self, step):
        return [step(self.worker)]

    def sleep(self, level):
        self.called.append(("sleep", level))
        # as vLLM does: whatever is no buffer is gone
        self.worker.model_runner.model.scale.fill_(-1)

    def wake_up(self, tags):
        self.called.append(("wake_up", *tags))


def sizes(llm):
    runner = llm.worker.model_runner
    return {
        name: each.untyped_storage().nbytes()
        for name, each in [*runner.model.named_parameters(), ("kv", runner.kv_caches[0]), ("cos", runner.model.cos)]
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_no_value_that_is_computed_or_sent_looks_like_the_mark(dtype):
    tensor = torch.empty(3, 5, dtype=dtype)
    mark(tensor)
    assert tensor.isnan().all() and is_marked(tensor)
    tensor[:2], tensor[2, 1:] = 1.0, float("nan")
    assert is_marked(tensor)
    tensor[2, 0] = tensor[2, 1] / float("inf")
    assert not is_marked(tensor) and tensor.isnan().any()


def test_what_has_no_mark_is_left_as_it_is():
    for tensor in (torch.arange(3), torch.empty(0), torch.ones(2, dtype=torch.float8_e4m3fn)):
        before = tensor.clone()
        mark(tensor)
        assert not is_marked(tensor) and tensor.view(torch.uint8).equal(before.view(torch.uint8))


def test_weights_and_cache_leave_no_memory_and_come_back_with_room_for_the_same():
    llm = Llm()
    sleeper, before = Sleeper(llm, has_sleep_mode=False), sizes(llm)
    for _ in range(2):
        sleeper.sleep()
    assert sizes(llm) == dict.fromkeys(before, 0) | {"cos": before["cos"]}
    with pytest.raises(EngineError, match=r"engine sleeps \(memory: asleep\); transfer weights to wake it"):
        sleeper.check_awake()
    for _ in range(2):
        sleeper.wake_weights()
    assert sizes(llm) == before | {"kv": 0}
    with pytest.raises(EngineError, match="memory: weights"):
        sleeper.check_awake()
    sleeper.wake_kv_cache()
    sleeper.check_awake()
    assert sizes(llm) == before


def test_a_tensor_that_does_not_arrive_is_named_and_a_full_transfer_recovers():
    llm = Llm()
    model, sleeper = llm.worker.model_runner.model, Sleeper(llm, has_sleep_mode=False)
    sleeper.sleep()
    sleeper.wake_weights()
    model.linear.bias.fill_(1.0)
    with pytest.raises(ReshardError, match=r"embedding\.weight \(and 1 more\) was given back while the engine slept"):
        sleeper.check_arrived()
    # a row short
    model.embedding.weight[:7] = 1.0
    model.linear.pack(torch.eye(4))
    with pytest.raises(ReshardError, match=r"weight transfer: embedding\.weight was given back .*, and did not arrive"):
        sleeper.check_arrived()
    model.embedding.weight.fill_(1.0)
    sleeper.check_arrived()
    sleeper.wake_kv_cache()
    assert sleeper.memory is Memory.AWAKE
    assert model.linear(torch.ones(4)).equal(torch.full((4,), 2.0))


def test_a_packed_weight_that_nothing_made_anew_is_named_and_cannot_be_used():
    llm = Llm()
    model, sleeper = llm.worker.model_runner.model, Sleeper(llm, has_sleep_mode=False)
    sleeper.sleep()
    sleeper.wake_weights()
    for param in model.parameters():
        param.fill_(1.0)
    with pytest.raises(ReshardError, match=r"linear\.weight was given back"):
        sleeper.check_arrived()
    with pytest.raises(EngineError, match="this weight was given back, and did not arrive since"):
        model.linear(torch.ones(4))


def test_tensors_beside_parameters_and_buffers_are_as_they_were():
    llm = Llm()
    model, sleeper = llm.worker.model_runner.model, Sleeper(llm, has_sleep_mode=True)
    assert [name for name, _ in plain_tensors(model)] == [".scale", ".tables.sin", ".rows"]
    sleeper.sleep()
    # but not views of weights, which arrive
    assert [saved.numel() for _, saved in llm.worker.megatron_rl_saved] == [1, 3]
    assert model.scale == -1
    sleeper.wake_weights()
    assert model.scale == 2
    sleeper.wake_kv_cache()
    assert llm.called == [("sleep", 2), ("wake_up", "weights"), ("wake_up", "kv_cache")]


def test_after_a_failed_transfer_it_can_go_to_sleep_again():
    llm = Llm()
    sleeper = Sleeper(llm, has_sleep_mode=False)
    before = sizes(llm)
    sleeper.sleep()
    sleeper.wake_weights()
    sleeper.sleep()
    assert sizes(llm) == dict.fromkeys(before, 0) | {"cos": before["cos"]}


def test_an_engine_that_never_slept_checks_nothing():
    llm = Llm()
    sleeper = Sleeper(llm, has_sleep_mode=False)
    mark(llm.worker.model_runner.model.embedding.weight)
    sleeper.wake_weights()
    sleeper.check_arrived()
    sleeper.wake_kv_cache()
    sleeper.check_awake()
