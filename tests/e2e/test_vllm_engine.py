"""Real vLLM on CPU, in its own process: what it samples, what it runs on after an update, and how it fails.

The tests share one engine of two replicas on a tied model and leave it fresh; the last two end replicas.
"""

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.data.types import Finish, Prompt
from megatron_rl.errors import EngineError, LostEngineError, ReshardError, TrainingError
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.stages import EngineConfig
from megatron_rl.reshard.execute import WeightSender, connect_plan
from megatron_rl.reshard.transports import LOOPBACK, open_store
from megatron_rl.reshard.verify import max_gap
from megatron_rl.rewards.combine import RewardModel
from megatron_rl.rollout.collect import Collector, Draw
from megatron_rl.rollout.engine import GenerateRequest
from megatron_rl.rollout.open_groups import OpenGroup, go_on
from megatron_rl.rollout.shared_memory import shared_memory_of_group
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.rollout.weight_sync import WeightSync
from megatron_rl.rollout.wire import WireClosed, recv_message, send_message
from megatron_rl.train.launcher import free_port
from tests.helpers.engine import hf_logprobs, hf_weights, qwen2_spec, rank_params, write_qwen2
from tests.helpers.tokenizers import CHATML, write_hf_tokenizer
from tests.helpers.transfer import Tampered, flip_byte, member_of

SPEC = qwen2_spec(tied=True)
CONFIG = EngineConfig(replicas=2, max_concurrent=32, request_timeout_s=60.0)
BOUND = 1e-4  # float32 against float32, other kernels
LONG_PROMPT = [(7 * i) % 251 for i in range(100)]
# Linux answers there too: a way to meet that is not the loopback address everything defaults to
OTHER_HOST = "127.0.0.2"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {seed: write_qwen2(root / str(seed), seed=seed, tied=True) for seed in (1, 2)}


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def engine(models, log_dir):
    with VllmEngine.start(
        CONFIG, hf_path=models[1], dtype="float32", spec=SPEC, max_model_len=160, seed=0, log_dir=log_dir,
    ) as started:  # fmt: skip
        yield started


@pytest.fixture(scope="module")
def push(engine, models):
    """push(version, seed): transfer the weights of model `seed` as `version`."""
    chosen = {}
    sync = WeightSync(
        lambda: chosen["params"], spec=SPEC, layout=ParallelLayout(), rank=0, engine=engine, config=CONFIG,
        dtype=torch.float32,
    )  # fmt: skip
    weights = {
        seed: rank_params(SPEC, ParallelLayout(), 0, hf_weights(path)) for seed, path in models.items()
    }

    def transfer(version, seed, *, without=None):
        chosen["params"] = [{k: v for k, v in chunk.items() if k != without} for chunk in weights[seed]]
        return sync.push(version)

    transfer.sync, transfer.weights = sync, weights
    return transfer


def request(prompt, seed, *, max_tokens=16, temperature=1.0, **fields):
    return GenerateRequest(
        prompt_token_ids=prompt, seed=seed, max_tokens=max_tokens, temperature=temperature, **fields
    )


def gap_to_hf(model, prompt, completion, *, temperature=1.0):
    expected = hf_logprobs(model, [*prompt, *completion.token_ids], temperature=temperature)
    return max(abs(a - b) for a, b in zip(expected[len(prompt) - 1 :], completion.logprobs, strict=True))


def test_a_sample_depends_on_its_own_seed_alone(engine):
    requests = [request([5, i, 99], seed=i % 3) for i in range(12)]
    together = engine.generate(requests)
    assert engine.generate(requests[4:5]) == together[4:5]
    again = engine.generate([request([5, 4, 99], seed=77)])
    assert again[0].token_ids != together[4].token_ids


def test_every_replica_norms_by_the_kernels(engine, log_dir):
    logs = sorted(log_dir.glob("*.log"))
    assert len(logs) == CONFIG.replicas
    for log in logs:
        assert "fused_add_rms_norm=['megatron_rl', 'native']" in log.read_text()


def test_two_replicas_draw_the_samples_of_one_and_none_twice(engine):
    requests = [request([5, 4, 99], seed=i) for i in range(9)]
    shared_out = engine.generate(requests)
    # a request that comes alone goes to the first replica; turned round, most change sides
    assert [engine.generate([each])[0] for each in requests] == shared_out
    assert engine.generate(requests[::-1]) == shared_out[::-1]
    assert len({tuple(completion.token_ids) for completion in shared_out}) == len(requests)


def test_generation_depends_on_the_requests_alone_not_on_what_was_asked_before(engine):
    """Prefixes of more than one cache block, computed in other batches before, leave no trace in the last bit."""
    first = [request([*LONG_PROMPT[:70], i % 3, *LONG_PROMPT[:i]], seed=i) for i in range(12)]
    other = [request([*LONG_PROMPT[:70], i % 2, 9, 9], seed=i, max_tokens=5) for i in range(5)]
    fresh = engine.generate(first)
    engine.score_all([LONG_PROMPT, [*LONG_PROMPT[:70], 1]])
    between = engine.generate(other)
    assert engine.generate(first) == fresh
    assert engine.generate(other) == between


def test_two_replicas_draw_the_samples_of_one_with_long_shared_prefixes(engine):
    requests = [request([*LONG_PROMPT[:70], i // 3], seed=i) for i in range(9)]
    together = engine.generate(requests)
    # a request that comes alone goes to the first replica
    alone = [engine.generate([each])[0] for each in requests]
    assert [each.token_ids for each in alone] == [each.token_ids for each in together]
    assert max(max_gap(a.logprobs, b.logprobs) for a, b in zip(alone, together, strict=True)) < 1e-6
    assert len({tuple(each.token_ids) for each in together}) == len(requests)


def test_completions_are_handed_out_while_others_run_and_come_and_are_cancelled(engine):
    """What was cut off is the beginning of what it would have been."""
    short = [request([5, i, 99], seed=i, max_tokens=4) for i in range(8)]
    long = [request([5, i, 99], seed=i, max_tokens=120) for i in range(24)]
    alone = engine.generate(short), engine.generate(long)
    # where the processor is given to others, all of them may be done before they can be cancelled
    for _ in range(20):
        running = engine.submit(long)
        # it decodes beside them: once it is done some have begun, and have far to go
        engine.wait(engine.submit([request([5, 4, 99], seed=77, max_tokens=4)]))
        partial = engine.cancel(running[::2])
        if any(0 < len(one.token_ids) < 120 for one in partial.values()):
            break
        engine.wait(running[1::2])
    later = engine.submit(short)
    early = engine.wait(later, count=1)
    scores = engine.score_all([LONG_PROMPT])
    early |= engine.wait([ticket for ticket in later if ticket not in early])
    whole = engine.wait(running[1::2])
    assert [early[ticket].token_ids for ticket in later] == [one.token_ids for one in alone[0]]
    assert [one.token_ids for one in whole.values()] == [one.token_ids for one in alone[1][1::2]]
    for cut, full in zip(partial.values(), alone[1][::2], strict=True):
        count = len(cut.token_ids)
        assert cut.finish is (Finish.ABORT if count < 120 else Finish.LENGTH)
        assert cut.token_ids == full.token_ids[:count]
        assert cut.logprobs == pytest.approx(full.logprobs[:count], abs=1e-6)
    assert any(0 < len(one.token_ids) < 120 for one in partial.values())
    # after all of that the engine is as it was
    assert engine.generate(long) == alone[1]
    assert engine.score_all([LONG_PROMPT])[0][0] == pytest.approx(scores[0][0], abs=1e-6)


def test_weights_wait_for_requests_that_run(engine, push):
    # more than are decoded at once, so that they last until the channel is there
    running = engine.submit([request([5, 4], seed=i, max_tokens=150) for i in range(300)])
    with pytest.raises(
        ReshardError, match=r"weight transfer: \d+ requests are still running; wait for them, or cancel"
    ):
        push(1, 1)
    engine.cancel(running)
    push.sync.disconnect()
    push(0, 1)


def test_logprobs_are_those_of_the_sampling_temperature(engine, models):
    prompt = [3, 7, 9]
    (completion,) = engine.generate([request(prompt, 1, temperature=0.7)])
    assert gap_to_hf(models[1], prompt, completion, temperature=0.7) < BOUND
    assert gap_to_hf(models[1], prompt, completion) > 0.01


def test_finish_reason_and_end_token_come_from_the_engine(engine):
    (free,) = engine.generate([request([3, 7, 9], 1)])
    assert (free.finish, len(free.token_ids)) == (Finish.LENGTH, 16)
    end = free.token_ids[5]
    (stopped,) = engine.generate([request([3, 7, 9], 1, stop_token_ids=(end,))])
    first = free.token_ids.index(end)
    assert stopped.finish is Finish.STOP
    assert stopped.token_ids == free.token_ids[: first + 1]


def test_scores_equal_hf_at_two_temperatures(engine, models):
    for temperature in (1.0, 0.6):
        scores = engine.score([3, 7, 9, 250, 0], temperature=temperature)
        expected = hf_logprobs(models[1], [3, 7, 9, 250, 0], temperature=temperature)
        assert max_gap(expected, scores) < BOUND


def test_a_request_longer_than_the_engine_is_named(engine):
    with pytest.raises(EngineError, match=r"request 1 has 150 prompt tokens and may add 16"):
        engine.generate([request([1], 0), request([1] * 150, 0)])


def test_pushed_weights_answer_at_once_with_tied_head_and_fresh_prefix_cache(engine, models, push):
    # the same long prompt on both sides of each push: a cached prefix would carry the old weights
    for version, seed in ((1, 2), (2, 1), (3, 2), (4, 1)):
        result = push(version, seed)
        of_each_replica = engine.generate([request(LONG_PROMPT, 5), request(LONG_PROMPT, 6)])
        for completion in of_each_replica:
            assert gap_to_hf(models[seed], LONG_PROMPT, completion) < BOUND
            assert completion.weight_version == engine.weight_version == result.version == version
        assert engine.status() == [{"weight_version": version, "stale": None}] * 2
    size = sum(t.numel() for t in push.weights[1][0].values()) * 4 - (256 - 251) * 64 * 4
    assert result.bytes == 2 * size


def test_what_goes_on_after_a_transfer_has_the_log_probs_of_each_version(engine, models, push):
    long = request([3, 7, 9], 5, max_tokens=40)
    (whole,) = engine.generate([long])
    begun = replace(whole, token_ids=whole.token_ids[:15], logprobs=whole.logprobs[:15], finish=Finish.ABORT)
    group = OpenGroup(
        prompt=Prompt(id="p", messages=[], answer="1"), prompt_token_ids=[3, 7, 9], parts=(begun, None)
    )
    old = engine.weight_version
    push(5, 2)
    again = replace(long, seed=6)
    (after,) = go_on(engine, [group], lambda group, index: again, needed=1, check=lambda new: None)
    continued, fresh = after.parts
    assert continued.runs == ((15, old), (25, 5)) and continued.weight_version == old
    assert continued.token_ids[:15] == begun.token_ids and len(continued.token_ids) == 40
    assert (fresh.runs, continued.finish) == (((40, 5),), Finish.LENGTH)
    by_version = [hf_logprobs(models[seed], [3, 7, 9, *continued.token_ids])[2:] for seed in (1, 2)]
    assert max_gap(by_version[0][:15], continued.logprobs[:15]) < BOUND
    assert max_gap(by_version[1][15:], continued.logprobs[15:]) < BOUND
    push(4, 1)


def test_what_the_trainer_does_after_a_push_does_not_reach_the_engine(engine, models, push):
    weights = hf_weights(models[2])
    chunks = rank_params(SPEC, ParallelLayout(), 0, weights)
    sync = WeightSync(
        lambda: chunks, spec=SPEC, layout=ParallelLayout(), rank=0, engine=engine, config=CONFIG,
        dtype=torch.float32,
    )  # fmt: skip
    sync.push(5)
    for param in chunks[0].values():
        param.fill_(float("nan"))
    for replica in engine.score_all([LONG_PROMPT]):
        assert max_gap(hf_logprobs(models[2], LONG_PROMPT), replica[0]) < BOUND
    # nor does what the next transfer brings in the same buffers, before it is loaded
    push.sync.disconnect()
    push(6, 1)
    for replica in engine.score_all([LONG_PROMPT]):
        assert max_gap(hf_logprobs(models[1], LONG_PROMPT), replica[0]) < BOUND


def test_an_engine_that_slept_gives_its_memory_back_and_draws_what_it_would_have(engine, push):
    push.sync.disconnect()
    push(7, 1)
    requests = [request([*LONG_PROMPT, i], i) for i in range(12)]
    wanted, scores = engine.generate(requests), engine.score_all([LONG_PROMPT])
    awake = [resident(pid) for pid in engine.pids]
    engine.sleep()
    # 193 blocks of KV cache are 3 MiB here
    assert all(before - resident(pid) > 1.5 * 2**20 for before, pid in zip(awake, engine.pids, strict=True))
    with pytest.raises(
        EngineError, match=r"weights are stale \(the engine sleeps: its memory was given back"
    ):
        engine.generate(requests)
    # what fails halfway leaves it neither awake nor asleep; then nothing of it is used either
    push.sync.disconnect()
    with pytest.raises(ReshardError, match="does not exist"):
        push(8, 2, without="decoder.layers.1.mlp.linear_fc2.weight")
    assert_stale_until_full_push(engine, None, push, 9)
    assert engine.generate(requests) == [replace(one, weight_version=9) for one in wanted]
    assert engine.score_all([LONG_PROMPT]) == scores


def resident(pid):
    """Bytes of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def answers_changed(engine, change):
    """What replica 0 says is changed on its way to us, message by message."""
    channel = engine._replicas[0]._channel
    direct, (ours, theirs) = channel._sock, socket.socketpair()

    def carry():
        with suppress(WireClosed):
            while True:
                send_message(direct, recv_message(theirs))
                send_message(theirs, change(recv_message(direct)))

    carrier = threading.Thread(target=carry)
    carrier.start()
    channel._sock = ours
    try:
        yield
    finally:
        channel._sock = direct
        ours.close()
        carrier.join(timeout=30)
        theirs.close()


def test_completions_of_another_weight_version_are_refused(engine, push, tmp_path):
    push(7, 1)
    tokenizer = load_tokenizer(write_hf_tokenizer(tmp_path / "tokenizer", template=CHATML))
    prompts = [Prompt(id=str(i), messages=[{"role": "user", "content": "1"}], answer="1") for i in range(4)]
    draw = Draw(samples=2, seed=lambda prompt, index: index, max_tokens=4, temperature=1.0)

    def collect():
        with RewardModel({"math_answer": 1.0}) as grader:
            collector = Collector(engine, grader, tokenizer, stop_token_ids=())
            token_ids = {prompt.id: [3, 7, 9] for prompt in prompts}
            return collector.collect(
                prompts, token_ids, draw, weight_version=7, span=lambda name: nullcontext()
            )

    def older(message):
        for completion in message["result"][2:]:
            completion["weight_version"] = 6
        return message

    with (
        answers_changed(engine, older),
        pytest.raises(
            TrainingError,
            match=r"2 of 8 completions were sampled from weight version 6 \(the first is number 2\), but .* version 7",
        ),
    ):
        collect()
    with answers_changed(engine, lambda message: message):
        assert {r.completion.weight_version for group in collect() for r in group.rollouts} == {7}


def assert_stale_until_full_push(engine, models, push, version):
    assert [status["stale"] is not None for status in engine.status()] == [True, True]
    with pytest.raises(EngineError, match=r"engine replica 0 .* stale"):
        engine.generate([request([1, 2], 0)])
    push(version, 1)
    for completion in engine.generate([request(LONG_PROMPT, 5)] * 2) if models else ():
        assert gap_to_hf(models[1], LONG_PROMPT, completion) < BOUND


def test_damaged_bytes_are_refused_and_a_full_push_recovers(engine, models, push):
    plan, store = push.sync.plan, open_store(LOOPBACK, 0, timeout_s=20.0)
    joining = engine.begin_join(plan, host=LOOPBACK, port=store.port, timeout_s=20.0, canary=True)
    router = connect_plan(plan, member_of(plan, 0, store.port), store=store)
    joining.result()
    sender = WeightSender(plan, Tampered(router, flip_byte(0)), dtype=torch.float32)
    receiving = engine.begin_update(10, timeout_s=20.0)
    sender.send(push.weights[2], version=10)
    with pytest.raises(ReshardError, match="from trainer rank 0 do not match their digest"):
        receiving.result()
    router.close()
    fresh = WeightSync(
        lambda: push.weights[1], spec=SPEC, layout=ParallelLayout(), rank=0, engine=engine, config=CONFIG,
        dtype=torch.float32, host=OTHER_HOST,
    )  # fmt: skip
    assert_stale_until_full_push(engine, models, lambda version, _: fresh.push(version), 11)


def test_a_missing_tensor_is_named_and_a_full_push_recovers(engine, models, push):
    push.sync.disconnect()
    with pytest.raises(ReshardError, match=r"model\.layers\.1\.mlp\.down_proj\.weight .* does not exist"):
        push(20, 2, without="decoder.layers.1.mlp.linear_fc2.weight")
    assert_stale_until_full_push(engine, models, push, 21)


def push_three_times(rank, port, chunks, engine):
    """One of two trainer ranks: rank 1 lacks a parameter in the second push. Returns what was raised then."""
    store = dist.TCPStore(LOOPBACK, port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        chosen = {}
        sync = WeightSync(
            lambda: chosen["params"], spec=SPEC, layout=ParallelLayout(tp=2), rank=rank, engine=engine,
            config=CONFIG, dtype=torch.float32,
        )  # fmt: skip
        chosen["params"] = chunks
        sync.push(30)
        if rank == 1:
            chosen["params"] = [{}]
        with pytest.raises(ReshardError) as error:
            sync.push(31)
        chosen["params"] = chunks
        sync.push(32)
        return str(error.value)
    finally:
        dist.destroy_process_group()


def test_two_trainer_ranks_push_together_and_fail_together(engine, models):
    weights, port = hf_weights(models[1]), free_port()
    chunks = [rank_params(SPEC, ParallelLayout(tp=2), rank, weights) for rank in (0, 1)]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        other = pool.submit(push_three_times, 1, port, chunks[1], None)
        messages = [push_three_times(0, port, chunks[0], engine), other.result(timeout=60)]
    for message in messages:
        assert "trainer rank 1: weight transfer: model.embed_tokens.weight is planned from" in message
    (completion,) = engine.generate([request(LONG_PROMPT, 5)])
    assert completion.weight_version == 32
    assert gap_to_hf(models[1], LONG_PROMPT, completion) < BOUND


def test_a_taken_port_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=rf"engine\.port: port {port} cannot be used"):
            VllmEngine.start(
                EngineConfig(port=port), hf_path=tmp_path, dtype="float32", spec=SPEC, max_model_len=64,
                seed=0, log_dir=tmp_path,
            )  # fmt: skip


def test_an_engine_that_cannot_start_is_named_with_its_log(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "architectures": ["NoSuchModel"]}')
    with pytest.raises(EngineError, match=r"replica 0 \(pid \d+\).*starting failed(.|\n)*engine_0\.log"):
        VllmEngine.start(
            EngineConfig(), hf_path=tmp_path, dtype="float32", spec=SPEC, max_model_len=64, seed=0,
            log_dir=tmp_path,
        )  # fmt: skip


def test_two_workers_share_an_untied_model_and_die_with_their_owner(tmp_path):
    old = write_qwen2(tmp_path / "old", seed=3, tied=False)
    new = write_qwen2(tmp_path / "new", seed=4, tied=False)
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.engine_owner", old, new, tmp_path],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    try:
        report = json.loads(owner.stdout.readline())
        shared = shared_memory_of_group(report["pid"])
        assert_workers_do_not_hold_the_sockets_of(report["pid"])
        for key, model in (("old", old), ("new", new)):
            assert max_gap(hf_logprobs(model, [3, 7, 9, 11, 250]), report[key]) < BOUND
    finally:
        owner.kill()
        owner.wait()
    assert wait_until(lambda: not group_members(report["pid"]), timeout_s=15.0), group_members(report["pid"])
    assert shared and not any(file.exists() for file in shared)


@pytest.mark.timeout(600)
def test_a_killed_replica_is_named_and_a_fresh_one_redoes_its_block_to_the_last_bit(engine, push):
    push.sync.disconnect()
    push(40, 2)
    requests = [request([5, i], i, max_tokens=100) for i in range(32)]
    wanted = engine.generate(requests)
    survivor, victim = engine.pids
    threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
    died = rf"engine replica 1 \(pid {victim}\): died \(signal SIGKILL\) while generate"
    with pytest.raises(LostEngineError, match=died):
        for _ in range(200):
            engine.generate(requests)
    assert [(replica, bool(re.match(died, why))) for replica, why in engine.find_lost().items()] == [
        (1, True)
    ]
    kept = [engine._dispatcher._flights[ticket].completion for ticket in engine._failed_call.tickets[:16]]
    assert None not in kept
    engine.restart([1])
    assert engine.pids[0] == survivor and group_members(victim) == [] and engine.find_lost() == {}
    with pytest.raises(
        EngineError, match=r"engine replica 1 .* weights are version -1, the request expects 40"
    ):
        engine.generate(requests)
    push.sync.disconnect()
    push(40, 2)
    redone = engine.generate(requests)
    assert redone == wanted
    assert all(one is other for one, other in zip(redone, kept, strict=False))


def test_replicas_that_end_leave_nothing(engine):
    """The first is lost and closed, the second is closed while it works."""
    pids, left = engine.pids, {replica._scratch.path for replica in engine._replicas}
    for pid in pids:
        left |= shared_memory_of_group(pid)
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(LostEngineError):
        engine.generate([request([5, i], i, max_tokens=100) for i in range(64)])
    engine.close()
    assert [group_members(pid) for pid in pids] == [[], []]
    assert not any(file.exists() for file in left)


def assert_workers_do_not_hold_the_sockets_of(leader):
    """Else its owner would not see the end of it, which they may outlive."""
    arguments = Path(f"/proc/{leader}/cmdline").read_text().split("\0")
    numbers = [arguments[arguments.index(name) + 1] for name in ("--fd", "--life-fd")]
    owned = {os.readlink(f"/proc/{leader}/fd/{number}") for number in numbers}
    workers = [pid for pid in group_members(leader) if pid != leader]
    assert len(owned) == 2 and len(workers) >= 2
    for pid in workers:
        assert not owned & {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}


def group_members(leader):
    """Process ids of the group that `leader` led, zombies left out."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) == leader and state != "Z":
            members.append(int(stat.parent.name))
    return members


def wait_until(condition, *, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
