"""What an engine answers becomes completions, or an error that names the replica."""

import pytest

from megatron_rl.data.types import Completion, Finish
from megatron_rl.errors import EngineError
from megatron_rl.rollout.vllm_engine import completion_from_wire

ANSWER = {"token_ids": [4, 7], "logprobs": [-0.5, -1.25], "weight_version": 3}


@pytest.mark.parametrize("finish", list(Finish))
def test_every_known_finish_reason_is_understood(finish):
    completion = completion_from_wire({**ANSWER, "finish": finish.value}, replica="engine replica 1")
    assert completion == Completion(token_ids=[4, 7], logprobs=[-0.5, -1.25], finish=finish, weight_version=3)


@pytest.mark.parametrize("finish", ["error", None])
def test_an_unknown_finish_reason_names_the_replica_and_the_reason(finish):
    with pytest.raises(EngineError, match=rf"engine replica 1: .* finish reason {finish!r}, known are stop"):
        completion_from_wire({**ANSWER, "finish": finish}, replica="engine replica 1")
