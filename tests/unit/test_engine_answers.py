"""What an engine answers becomes completions, or an error that names the replica."""

import socket
import threading

import pytest

from megatron_rl.data.types import Completion, Finish
from megatron_rl.errors import EngineError
from megatron_rl.rollout.dispatch import completion_from_wire
from megatron_rl.rollout.engine_server import EngineServer
from megatron_rl.rollout.wire import recv_message, send_message

ANSWER = {"token_ids": [4, 7], "logprobs": [-0.5, -1.25], "weight_version": 3}


@pytest.mark.parametrize("finish", list(Finish))
def test_every_known_finish_reason_is_understood(finish):
    completion = completion_from_wire({**ANSWER, "finish": finish.value}, replica="engine replica 1")
    assert completion == Completion(token_ids=[4, 7], logprobs=[-0.5, -1.25], finish=finish, weight_version=3)


@pytest.mark.parametrize("finish", ["error", None])
def test_an_unknown_finish_reason_names_the_replica_and_the_reason(finish):
    with pytest.raises(EngineError, match=rf"engine replica 1: .* finish reason {finish!r}, known are stop"):
        completion_from_wire({**ANSWER, "finish": finish}, replica="engine replica 1")


def asked(server, message):
    """The answer of a server, which stops after it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        serving = threading.Thread(target=server.serve, args=(theirs,))
        serving.start()
        send_message(ours, message)
        answer = recv_message(ours)
        send_message(ours, {"cmd": "shutdown"})
        serving.join(timeout=30)
    return answer


def test_an_engine_that_started_without_weights_generates_nothing_before_it_has_some():
    server = EngineServer(llm=None, has_weights=False)
    request = {"cmd": "generate", "weight_version": -1, "requests": [{"ticket": 0}], "cancel": [], "wait_s": 1.0}
    error = asked(server, request)["error"]
    assert error["kind"] == "engine"
    assert (
        "weights are stale (none were transferred yet, and the model directory holds none)"
        in error["message"]
    )
