"""Engines on another host, without vLLM: who gets in, who has to wait, what is said, and that nothing is left."""

import json
import multiprocessing
import os
import signal
import socket
import threading
import time

import pytest

from megatron_rl.errors import EngineError, LostEngineError
from megatron_rl.recipe.hosts import HostPort, parse_host_port
from megatron_rl.recipe.stages import EngineConfig
from megatron_rl.rollout import engine_host, remote_engine
from megatron_rl.rollout.devices import node_id
from megatron_rl.rollout.engine_host import EngineHost, listen, run_engine_host
from megatron_rl.rollout.handshake import SecretRefused, admit, enter, read_secret
from megatron_rl.rollout.replicas import ReplicaPlaces, check_hosts, meeting_host
from megatron_rl.rollout.wire import recv_message, send_message
from tests.helpers import engine_hosts
from tests.helpers.processes import stop, wait_for

# Linux answers there too: a host that is not the loopback address everything defaults to
ADDRESS = "127.0.0.2"
SECRET = b"correct horse battery staple"


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "qwen2"}')
    return path


@pytest.fixture
def serve(tmp_path):
    """serve(secret=None, gpus=0): an engine host on a thread; returns its address and the lines it says."""
    over, started = threading.Event(), []

    def one(*, secret=None, gpus=0):
        lines, listener = [], listen(HostPort(ADDRESS, 0), has_secret=secret is not None)
        host = EngineHost(listener, secret=secret, log_dir=tmp_path / "there", gpus=gpus, say=lines.append)
        thread = threading.Thread(target=host.serve, args=(over,))
        thread.start()
        started.append((thread, listener))
        return f"{ADDRESS}:{listener.getsockname()[1]}", lines

    yield one
    over.set()
    for thread, listener in started:
        thread.join(60)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture
def opened(model, tmp_path):
    """opened(hosts, **config): replicas that have a process and no model yet."""
    replicas = []

    def some(*hosts, logs="logs", **config):
        config = EngineConfig(hosts=hosts, **config)
        places = ReplicaPlaces(config, hf_path=model, log_dir=tmp_path / logs)
        for number in range(config.replicas):
            replicas.append(places.open(number))
        return replicas[-config.replicas :]

    yield some
    for replica in replicas:
        replica.close()


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_replicas_go_round_the_hosts_and_end_when_they_are_closed(serve, opened, tmp_path):
    (one, said), (two, _) = serve(), serve()
    replicas = opened(one, two, replicas=3)
    assert [replica.name for replica in replicas] == [
        f"engine replica {i} on {host} (pid {replicas[i].pid})" for i, host in enumerate((one, two, one))
    ]
    assert [replica.node for replica in replicas] == [node_id()] * 3
    assert all(is_running(replica.pid) for replica in replicas)
    there = tmp_path / "there" / "engine_2.log"
    assert (tmp_path / "logs" / "engine_2.log").read_text().endswith(f"writes its log there, to {there}\n")
    for replica in replicas:
        replica.close()
    assert not any(is_running(replica.pid) for replica in replicas)
    wait_for(lambda: any("ended; waiting for the next" in line for line in said), "the end of the run")


def test_each_host_counts_its_own_gpus(serve, model, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.rollout.replicas.has_accelerator", lambda: True)
    (one, _), (two, _) = serve(gpus=4), serve(gpus=2)
    config = EngineConfig(hosts=(one, two), replicas=3, tp=2)
    places = ReplicaPlaces(config, hf_path=model, log_dir=tmp_path)
    replicas = [places.open(number) for number in range(3)]
    assert [replica.devices for replica in replicas] == [(0, 1), (0, 1), (2, 3)]
    for replica in replicas:
        replica.close()
    with pytest.raises(EngineError, match=rf"need 4 GPUs of engine\.hosts\.1: {two}, 2 are visible"):
        ReplicaPlaces(EngineConfig(hosts=(one, two), replicas=4, tp=2), hf_path=model, log_dir=tmp_path)


def test_a_host_with_gpus_does_not_serve_a_trainer_without(serve, model):
    at, _ = serve(gpus=8)
    with pytest.raises(
        EngineError, match=rf"engine\.hosts\.0: {at} shows 8 GPUs, but this machine has no GPU"
    ):
        check_hosts(EngineConfig(hosts=(at,)), hf_path=model)


def test_an_engine_that_dies_there_is_named_with_its_host_and_the_end_of_its_log(serve, opened, tmp_path):
    at, _ = serve()
    replica, other = opened(at, replicas=2)
    log = tmp_path / "there" / "engine_0.log"
    wait_for(lambda: b"started" in log.read_bytes(), "the first line of its log")
    os.kill(replica.pid, signal.SIGKILL)
    with pytest.raises(LostEngineError) as caught:
        replica.ask("status", timeout_s=30)
    assert replica.lost == str(caught.value)
    assert other.lost is None
    assert f"engine replica 0 on {at} (pid {replica.pid}): died (signal SIGKILL) while status" in str(
        caught.value
    )
    assert f"--- engine process {replica.pid} started 20" in str(caught.value)
    # and this one is told what its own process says
    with pytest.raises(EngineError, match=rf"replica 1 on {at} .* starting failed: KeyError: 'threads'"):
        other.start({}, timeout_s=30)


def test_a_lost_replica_is_opened_again_on_its_host(serve, model, tmp_path):
    (one, _), (two, said) = serve(), serve()
    places = ReplicaPlaces(EngineConfig(hosts=(one, two), replicas=2), hf_path=model, log_dir=tmp_path)
    replicas = [places.open(number) for number in range(2)]
    lost = replicas[1]
    os.kill(lost.pid, signal.SIGKILL)
    with pytest.raises(LostEngineError):
        lost.ask("status", timeout_s=30)
    lost.close()
    replicas.append(places.open(1))
    assert (replicas[2].host, replicas[2].lost) == (two, None)
    assert is_running(replicas[2].pid) and not is_running(lost.pid)
    for replica in replicas:
        replica.close()
    assert [line for line in said if "ended: the trainer closed it" in line]
    assert not any(is_running(replica.pid) for replica in replicas)


def test_an_engine_that_does_not_answer_there_is_an_error_in_time(serve, opened):
    at, _ = serve()
    (replica,) = opened(at)
    stop(replica.pid)
    expected = rf"replica 0 on {at} .*: did not answer within 0\.3 s while generate; its process {replica.pid} is stopp"
    with pytest.raises(LostEngineError, match=expected):
        replica.ask("generate", timeout_s=0.3, requests=[])
    replica.close()
    assert not is_running(replica.pid)


def test_a_busy_host_says_with_whom_and_takes_the_next_run_once_that_ended(serve, opened, monkeypatch):
    monkeypatch.setattr(engine_host, "TURN_S", 0.2)
    at, _ = serve()
    (first,) = opened(at, logs="one")
    with pytest.raises(EngineError, match=rf"hosts\.0: {at}: busy with run \S+/one from 127\.\S+ since 20"):
        opened(at, logs="two")
    monkeypatch.setattr(engine_host, "TURN_S", 30.0)
    threading.Timer(0.3, first.close).start()
    (second,) = opened(at, logs="two")
    assert not is_running(first.pid)
    assert is_running(second.pid)


def open_two_and_wait(at, model, logs, pids):
    """A trainer of its own process."""
    places = ReplicaPlaces(EngineConfig(hosts=(at,), replicas=2), hf_path=model, log_dir=logs)
    replicas = [places.open(number) for number in range(2)]
    pids.send([replica.pid for replica in replicas])
    time.sleep(600)


def test_engines_end_with_a_trainer_that_is_killed_and_with_a_host_that_is_stopped(model, tmp_path, opened):
    with engine_hosts.engine_host(tmp_path / "place", f"{ADDRESS}:0", "--log-dir", "logs") as host:
        ours, theirs = multiprocessing.Pipe()
        # forked: it needs nothing that takes seconds to import again
        trainer = multiprocessing.get_context("fork").Process(
            target=open_two_and_wait, args=(host.at, model, tmp_path / "logs", theirs)
        )
        trainer.start()
        try:
            assert ours.poll(60)
            pids = ours.recv()
            assert all(is_running(pid) for pid in pids)
        finally:
            trainer.kill()
            trainer.join()
        wait_for(lambda: not any(is_running(pid) for pid in pids), "the end of its engines", timeout_s=30.0)
        wait_for(lambda: host.says("ended; waiting for the next"), "the end of the run", timeout_s=30.0)
        (replica,) = opened(host.at)
    assert not is_running(replica.pid)
    lost = rf"engine replica 0 on {host.at} .*: lost while status \(.*`megatron-rl engine`"
    with pytest.raises(EngineError, match=lost):
        replica.ask("status", timeout_s=5)


def test_hosts_that_cannot_be_used_are_all_named(serve, model, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_engine, "CONNECT_S", 0.1)
    # nobody else gets it, and nobody listens there
    unused = socket.socket()
    unused.bind((ADDRESS, 0))
    closed = unused.getsockname()[1]
    (other, _), config = serve(), {"secret_file": str(tmp_path / "secret")}
    (tmp_path / "secret").write_bytes(SECRET)
    hosts = (f"{ADDRESS}:{closed}", "no.such.host.invalid:1", other)
    with pytest.raises(EngineError) as caught:
        check_hosts(EngineConfig(hosts=hosts, replicas=3, **config), hf_path=model)
    first, second, third = str(caught.value).splitlines()
    assert first.startswith(f"engine.hosts.0: {ADDRESS}:{closed} cannot be reached (Connection refused)")
    assert f"run `megatron-rl engine --listen {ADDRESS}:{closed}` there" in first
    assert second.startswith("engine.hosts.1: no.such.host.invalid:1 cannot be reached (")
    assert third.startswith(
        f"engine.secret_file: engine.hosts.2: {other} does not let us in: it was started without"
    )
    unused.close()


def test_a_host_may_come_up_a_little_later_than_the_trainer(model, tmp_path):
    unused = socket.socket()
    # so that nobody else gets it meanwhile; the host that listens there sets the same
    unused.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    unused.bind((ADDRESS, 0))
    at = f"{ADDRESS}:{unused.getsockname()[1]}"
    over = threading.Event()
    listeners = []

    def late():
        time.sleep(0.7)
        listeners.append(listen(parse_host_port(at), has_secret=False))
        EngineHost(listeners[0], secret=None, log_dir=tmp_path, say=lambda line: None).serve(over)

    thread = threading.Thread(target=late)
    thread.start()
    try:
        (facts,) = check_hosts(EngineConfig(hosts=(at,)), hf_path=model)
        assert facts.node == node_id()
    finally:
        over.set()
        thread.join(30)
        listeners[0].close()
        unused.close()


def test_something_else_behind_the_port_is_no_engine_host(model):
    def greet(server):
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")
            wait_for(asked.is_set, "the end of the asking")

    asked = threading.Event()
    with socket.create_server((ADDRESS, 0)) as server:
        thread = threading.Thread(target=greet, args=(server,))
        thread.start()
        with pytest.raises(EngineError, match="does not answer as `megatron-rl engine` does"):
            check_hosts(EngineConfig(hosts=(f"{ADDRESS}:{server.getsockname()[1]}",)), hf_path=model)
        asked.set()
        thread.join()


def test_a_model_that_is_not_there_or_another_is_refused(serve, model, tmp_path):
    at, _ = serve()
    config = EngineConfig(hosts=(at,))
    # both ends are this machine: a trainer that saw another file is what can differ
    message = remote_engine.EngineAddress(key="engine.hosts.0", at=parse_host_port(at), secret=None)
    with pytest.raises(EngineError, match=rf"{at}: {model}/config.json differs from the trainer's; copy"):
        remote_engine.check_host(message, {"hf_path": str(model), "config_digest": "of another"})
    with pytest.raises(
        EngineError, match=r"/no/such/config.json: No such file .* paths must be the same on all"
    ):
        remote_engine.check_host(message, {"hf_path": "/no/such", "config_digest": ""})
    assert len(check_hosts(config, hf_path=model)) == 1


def test_other_versions_on_the_host_are_refused(serve, model, monkeypatch):
    at, _ = serve()
    monkeypatch.setattr(
        remote_engine, "versions", lambda: {"megatron_rl": "0.0.1", "vllm": None, "torch": None}
    )
    with pytest.raises(
        EngineError, match=rf"{at} has megatron_rl \S+, this machine 0\.0\.1; install the same"
    ):
        check_hosts(EngineConfig(hosts=(at,)), hf_path=model)


@pytest.mark.parametrize("theirs", [b"another secret of good length", None], ids=["wrong", "none"])
def test_without_the_secret_nothing_is_started(serve, model, tmp_path, theirs):
    at, said = serve(secret=SECRET)
    config = {}
    if theirs is not None:
        (tmp_path / "secret").write_bytes(theirs)
        config["secret_file"] = str(tmp_path / "secret")
    with pytest.raises(
        EngineError, match=rf"engine\.secret_file: engine\.hosts\.0: {at} does not let us in: it"
    ):
        ReplicaPlaces(EngineConfig(hosts=(at,), **config), hf_path=model, log_dir=tmp_path)
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    config["secret_file"] = str(tmp_path / "secret")
    assert len(check_hosts(EngineConfig(hosts=(at,), **config), hf_path=model)) == 1
    assert not any("started" in line for line in said)


def meet(trainer, host):
    """Run both sides of a handshake over one connection; what each returned or raised, and all bytes sent."""
    ours, theirs = socket.socketpair()
    outcome = {}

    def run(name, side, sock):
        with sock:
            try:
                outcome[name] = side(sock)
            except EngineError as error:
                outcome[name] = error

    other = threading.Thread(target=run, args=("host", host, theirs))
    other.start()
    run("trainer", trainer, ours)
    other.join()
    return outcome["trainer"], outcome["host"]


def test_both_ends_prove_the_secret():
    facts, _ = meet(lambda sock: enter(sock, SECRET), lambda sock: admit(sock, SECRET, {"node": "x"}))
    assert facts == {"node": "x"}
    for one, other in ((SECRET, SECRET + b"!"), (SECRET, None), (None, SECRET)):
        outcome = meet(
            lambda sock, one=one: enter(sock, one), lambda sock, other=other: admit(sock, other, {})
        )
        assert isinstance(outcome[0], SecretRefused)
        assert isinstance(outcome[1], EngineError)


def test_a_host_that_sends_back_the_trainers_own_proof_is_not_believed():
    sent = []

    def mirror(sock):
        send_message(sock, {"service": "megatron-rl engine", "nonce": "ab", "has_secret": True})
        sent.append(recv_message(sock))
        send_message(sock, {"proof": sent[0]["proof"], "facts": {}})

    refused, _ = meet(lambda sock: enter(sock, SECRET), mirror)
    assert isinstance(refused, SecretRefused)
    # and what the trainer sent holds nothing of the secret
    assert SECRET.decode() not in json.dumps(sent)


def test_a_proof_that_was_listened_to_opens_no_other_connection():
    heard = []

    def listener(sock):
        send_message(sock, {"service": "megatron-rl engine", "nonce": "ab" * 32, "has_secret": True})
        heard.append(recv_message(sock))

    meet(lambda sock: enter(sock, SECRET), listener)

    def replay(sock):
        recv_message(sock)
        send_message(sock, heard[0])
        return recv_message(sock)

    answer, refused = meet(replay, lambda sock: admit(sock, SECRET, {}))
    assert answer == {"refused": True}
    assert isinstance(refused, SecretRefused)


@pytest.mark.parametrize("bad", [{}, {"nonce": 3, "proof": None}, {"nonce": "é", "proof": "é"}])
def test_who_speaks_another_language_is_refused(bad):
    def stranger(sock):
        recv_message(sock)
        send_message(sock, bad)
        return recv_message(sock)

    answer, refused = meet(stranger, lambda sock: admit(sock, SECRET, {}))
    assert answer == {"refused": True}
    assert isinstance(refused, SecretRefused)


def test_a_stranger_cannot_make_the_host_read_much():
    def stranger(sock):
        recv_message(sock)
        send_message(sock, {"nonce": "x" * 100_000, "proof": ""})

    _, refused = meet(stranger, lambda sock: admit(sock, SECRET, {}))
    assert "100" in str(refused) and "at most 16384 allowed" in str(refused)


def test_a_secret_that_is_missing_or_short_is_refused(tmp_path):
    for path, words in (
        (tmp_path / "none", "No such file"),
        (tmp_path / "short", "holds 5 bytes, at least 16"),
    ):
        (tmp_path / "short").write_text("12345\n")
        with pytest.raises(
            EngineError, match=rf"secret file {path} .*{words}.*openssl rand -hex 32 > {path}"
        ):
            read_secret(path)


def test_others_can_be_let_in_with_a_secret_only(tmp_path):
    for address in ("0.0.0.0:0", "[::]:0", "10.203.0.99:7100"):
        with pytest.raises(
            EngineError, match="whoever reaches it can start processes here; give --secret-file"
        ):
            run_engine_host(parse_host_port(address), secret_file=None, log_dir=tmp_path)
    with listen(HostPort("0.0.0.0", 0), has_secret=True) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            EngineError, match=rf"cannot listen on {ADDRESS}:{port} \(Address already in use\)"
        ):
            listen(HostPort(ADDRESS, port), has_secret=True)
    with pytest.raises(EngineError, match=r"cannot listen on 10\.203\.0\.99:7100 \(Cannot assign requested"):
        listen(HostPort("10.203.0.99", 7100), has_secret=True)


def test_workers_meet_the_trainer_where_its_first_far_host_is_reached_from():
    class At(remote_engine.RemoteEngine):
        def __init__(self, address):
            self.local_address = address

    assert meeting_host("10.0.0.1", [At("10.9.9.9")]) == "10.0.0.1"
    assert meeting_host("127.0.0.1", [At("127.0.0.1"), At("10.0.0.5"), At("10.0.1.5")]) == "10.0.0.5"
    assert meeting_host("127.0.0.1", [At("127.0.0.1")]) == meeting_host("127.0.0.1", []) == "127.0.0.1"
