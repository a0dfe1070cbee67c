"""One engine process: hosts `vllm.LLM` and answers its owner over a socket until the owner is gone.

Run by `rollout.engine_process` as `python -m megatron_rl.rollout.vllm_worker --fd N --life-fd M --scratch DIR`. It
leads its own session, so ending its process group ends vLLM's workers as well.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from megatron_rl.errors import EngineError, ReshardError
from megatron_rl.model.spec import ModelSpec
from megatron_rl.platform.parent import wake_with_parent
from megatron_rl.rollout.devices import visible_devices
from megatron_rl.rollout.kv_cache import BLOCK_TOKENS, kv_cache_bytes
from megatron_rl.rollout.shared_memory import remove_shared_memory, shared_memory_of_group
from megatron_rl.rollout.vllm_plugin import BACKEND, register
from megatron_rl.rollout.wire import Message, WireClosed, recv_message, send_message

_BEAT_S = 1.0
_STEP_TOKENS = 4096  # of one step on CPU, prompts and responses; vLLM's own default


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="socket that carries requests and answers")
    parser.add_argument(
        "--life-fd",
        type=int,
        required=True,
        help="socket that closes when the owner is gone, and takes signs of life",
    )
    parser.add_argument(
        "--scratch", required=True, help="directory for temporary files; goes with this process"
    )
    args = parser.parse_args()
    # of this process and of vLLM's workers
    os.environ["TMPDIR"] = tempfile.tempdir = args.scratch
    sock, life = socket.socket(fileno=args.fd), socket.socket(fileno=args.life_fd)
    for owned in (sock, life):
        owned.set_inheritable(False)
    # stopped, it could not see that its owner is gone
    wake_with_parent()
    threading.Thread(target=_die_with_owner, args=(life, os.getppid(), args.scratch), daemon=True).start()
    # the workers that it forks must not keep them open when this process is gone
    for owned in (sock, life):
        os.register_at_fork(after_in_child=owned.close)
    # the log is appended to: this line parts what earlier processes wrote from what follows
    print(f"--- engine process {os.getpid()} started {time.strftime('%Y-%m-%d %H:%M:%S %z')}", flush=True)
    try:
        start = recv_message(sock)
        began = time.monotonic()
        server = EngineServer(build_llm(start), start["tp"], has_weights=_has_weights(start))
        print(f"--- ready in {time.monotonic() - began:.1f} s with {_versions()}", flush=True)
        send_message(sock, {"result": None})
        server.serve(sock)
        # taking vLLM apart costs seconds and frees nothing that our owner does not: it ends our group at once
        sys.stdout.flush()
        os._exit(0)
    except WireClosed:
        _end(args.scratch)
    except Exception as error:  # whatever it is, the owner must hear of it
        traceback.print_exc()
        send_message(sock, {"error": {"kind": "start", "message": _one_line(error)}})
        return 1


def _die_with_owner(life: socket.socket, owner: int, scratch: str) -> None:
    """End the whole process group once the owner closed its end or is no longer our parent; until then, beat.

    The parent is asked as well because a child that the owner forked may keep the socket open after its
    death.
    """
    life.settimeout(_BEAT_S)
    while os.getppid() == owner:
        try:
            _beat(life)
            if not life.recv(1):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    _end(scratch)


def _end(scratch: str) -> NoReturn:
    """Leave no file and no process of this group. Both threads may come here: the one that reads requests is no slower
    to see that the owner is gone, and must not end the process before the other is done."""
    print("owner is gone, ending this engine", file=sys.stderr, flush=True)
    shutil.rmtree(scratch, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        remove_shared_memory(shared_memory_of_group(os.getpid()))
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _beat(life: socket.socket) -> None:
    """A sign of life. Before we have started nobody takes it, and it may not fit any more."""
    with suppress(BlockingIOError, TimeoutError):
        life.send(b".", socket.MSG_DONTWAIT)


def _set_environment(start: Message) -> None:
    """vLLM and OpenMP read these when they are imported, and nothing else sets them in this process."""
    os.environ.update(
        {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs here: one process less
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with the trainer
            "VLLM_CPU_CI_ENV": "1",  # no warm-up on CPU: nothing is compiled
            "VLLM_DO_NOT_TRACK": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": str(start["threads"]),
            "HF_HUB_OFFLINE": "1",  # a model is a directory, never a download
            "TOKENIZERS_PARALLELISM": "false",
        }
    )
    if start["devices"] is None:
        # eager mode leaves the sampler compiled, which costs a C++ compiler run at the first sample
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    else:
        inherited = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(start["devices"], inherited)


def build_llm(start: Message) -> Any:
    _set_environment(start)
    gc.disable()  # importing vLLM makes objects that stay, and looking through them costs a second
    try:
        return _load_llm(start)
    finally:
        gc.enable()


def _load_llm(start: Message) -> Any:
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    gc.freeze()  # vLLM collects garbage several times while it starts; what was imported is none

    register()
    return LLM(
        model=start["hf_path"],
        # an imported checkpoint has config and tokenizer alone for its HF directory
        load_format="auto" if _has_weights(start) else "dummy",
        dtype=start["dtype"],
        tensor_parallel_size=start["tp"],
        max_model_len=start["max_model_len"],
        hf_overrides={"max_position_embeddings": start["max_positions"], **start["hf_overrides"]},
        max_num_seqs=start["max_concurrent"],
        seed=start["seed"],
        skip_tokenizer_init=True,
        generation_config="vllm",  # sampling is ours alone, not generation_config.json's
        logprobs_mode="processed_logprobs",
        max_logprobs=-1,  # scoring at a temperature needs the whole row
        disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        **_of_device(start),
    )


def _of_device(start: Message) -> dict[str, Any]:
    if start["devices"] is not None:
        return {"gpu_memory_utilization": start["gpu_memory_fraction"]}
    import torch

    return {
        "distributed_executor_backend": _forking_executor() if start["tp"] > 1 else None,
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        # a prompt that is split over steps ends a seeded request on CPU, whose generators cannot be turned back
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(_STEP_TOKENS, start["max_model_len"]),
        "kv_cache_memory_bytes": kv_cache_bytes(
            ModelSpec.from_hf(start["hf_path"]),
            tp=start["tp"],
            element_bytes=getattr(torch, start["dtype"]).itemsize,
            max_model_len=start["max_model_len"],
            max_concurrent=start["max_concurrent"],
            limit_gib=start["kv_cache_gib"],
        ),
    }


def _forking_executor() -> type:
    """vLLM's executor with workers that are forks of this process: each starts without importing vLLM again.

    On CPU vLLM spawns them, to preload an OpenMP library; ours is torch's, which is loaded by now and has no threads.
    """
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    class ForkingExecutor(MultiprocExecutor):
        def _init_executor(self) -> None:
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            # what was imported stays; from here on the workers, which inherit it, make garbage of their own
            gc.freeze()
            gc.enable()
            super()._init_executor()

    return ForkingExecutor


def _has_weights(start: Message) -> bool:
    return any(Path(start["hf_path"]).glob("*.safetensors"))


class EngineServer:
    """Answers one command at a time. `version` -1: the weights of the HF directory, where it has any."""

    def __init__(self, llm: Any, tp: int, *, has_weights: bool) -> None:
        self._llm, self._tp = llm, tp
        self._version = -1
        self._stale = None if has_weights else "none were transferred yet, and the model directory holds none"
        self._commands: dict[str, Callable[[Message], Any]] = {
            "generate": self._generate,
            "score": self._score,
            "status": self._status,
            "init_transfer": self._init_transfer,
            "receive": self._receive,
            "commit": self._commit,
        }

    def serve(self, sock: socket.socket) -> None:
        """Until a `shutdown` command or the end of the stream."""
        while True:
            message = recv_message(sock)
            if message["cmd"] == "shutdown":
                send_message(sock, {"result": None})
                return
            try:
                answer = {"result": self._commands[message["cmd"]](message)}
            except ReshardError as error:
                answer = {"error": {"kind": "reshard", "message": str(error)}}
            except Exception as error:  # the owner decides what a failed command means
                traceback.print_exc()
                # of a request that cannot be served we know what it did to us: nothing
                kind = "engine" if isinstance(error, EngineError | ValueError | TypeError) else "crash"
                answer = {"error": {"kind": kind, "message": _one_line(error)}}
            try:
                send_message(sock, answer)
            except WireClosed:
                raise
            except EngineError as error:  # an answer too large to send; the owner waits for one all the same
                send_message(sock, {"error": {"kind": "engine", "message": _one_line(error)}})

    def _status(self, message: Message) -> Message:
        return {"weight_version": self._version, "stale": self._stale}

    def _check_fresh(self, expected: int) -> None:
        if self._stale is not None:
            raise EngineError(f"weights are stale ({self._stale}); send all weights again before generating")
        if self._version != expected:
            raise EngineError(f"weights are version {self._version}, the request expects {expected}")

    def _generate(self, message: Message) -> list[Message]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._check_fresh(message["weight_version"])
        # a cached block was computed in another batch: its last bits must not depend on what was asked before
        self._forget_prefixes()
        requests = message["requests"]
        params = [
            SamplingParams(
                temperature=r["temperature"],
                top_p=r["top_p"],
                top_k=r["top_k"],
                seed=r["seed"],
                max_tokens=r["max_tokens"],
                stop_token_ids=r["stop_token_ids"],
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for r in requests
        ]
        prompts = [{"prompt_token_ids": r["prompt_token_ids"]} for r in requests]
        outputs = [done.outputs[0] for done in self._llm.generate(prompts, params, use_tqdm=False)]
        return [
            {
                "token_ids": list(out.token_ids),
                "logprobs": [
                    row[token].logprob for row, token in zip(out.logprobs, out.token_ids, strict=True)
                ],
                "finish": out.finish_reason,
                "weight_version": self._version,
            }
            for out in outputs
        ]

    def _score(self, message: Message) -> list[list[float]]:
        from vllm import SamplingParams

        self._check_fresh(message["weight_version"])
        prompts, temperature = message["prompts"], message["temperature"]
        # prompt log-probs are always those of temperature 1: at another one every logit of the row is needed
        rows_wanted = 0 if temperature == 1.0 else -1
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=rows_wanted, detokenize=False)
        outputs = self._llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], [params] * len(prompts), use_tqdm=False
        )
        return [
            _prompt_scores(done.prompt_logprobs[1:], ids[1:], temperature)
            for done, ids in zip(outputs, prompts, strict=True)
        ]

    def _init_transfer(self, message: Message) -> None:
        self._llm.init_weight_transfer_engine({"init_info": message["init_info"]})
        self._raise_worker_errors()

    def _receive(self, message: Message) -> None:
        """Load version `weight_version` on every worker as it arrives. Stale from here on until `commit`."""
        version = message["weight_version"]
        self._stale = f"update to version {version} did not finish"
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {"version": version}})
        self._llm.finish_weight_update()
        self._raise_worker_errors()

    def _commit(self, message: Message) -> None:
        """What was received is complete on every engine: nothing of the old weights may stay, then generate."""
        version = message["weight_version"]
        self._forget_prefixes()
        self._llm.update_weight_version(str(version))
        self._version, self._stale = version, None

    def _forget_prefixes(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise EngineError("the prefix cache could not be reset: requests are still running")
        # a block is read to its end, and where weights were not finite, what is left there makes others NaN too
        self._llm.collective_rpc(_clear_kv_cache)

    def _raise_worker_errors(self) -> None:
        if errors := [error for error in self._llm.collective_rpc(_outcome) if error is not None]:
            raise ReshardError("; ".join(errors))


def _prompt_scores(rows: Any, tokens: list[int], temperature: float) -> list[float]:
    """Log-prob of each token at `temperature`, from vLLM's rows of log-probs at temperature 1."""
    import torch

    if temperature == 1.0:
        return [row[token].logprob for row, token in zip(rows, tokens, strict=True)]
    scores = []
    for row, token in zip(rows, tokens, strict=True):
        values = torch.tensor([entry.logprob for entry in row.values()], dtype=torch.float64) / temperature
        scores.append(row[token].logprob / temperature - values.logsumexp(0).item())
    return scores


def _outcome(worker: Any) -> str | None:
    outcome: str | None = worker.weight_transfer_engine.outcome()
    return outcome


def _clear_kv_cache(worker: Any) -> None:
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def _versions() -> str:
    import torch
    import vllm

    return f"vllm {vllm.__version__}, torch {torch.__version__}"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
