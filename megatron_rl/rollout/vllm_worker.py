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
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from megatron_rl.errors import EngineError
from megatron_rl.model.spec import ModelSpec
from megatron_rl.platform.parent import wake_with_parent
from megatron_rl.rollout.devices import visible_devices
from megatron_rl.rollout.engine_server import EngineServer, one_line
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
        server = EngineServer(
            build_llm(start), has_weights=_has_weights(start), has_sleep_mode=start["devices"] is not None
        )
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
        send_message(sock, {"error": {"kind": "start", "message": one_line(error)}})
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


def set_environment(start: Message) -> None:
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
    set_environment(start)
    gc.disable()  # importing vLLM makes objects that stay, and looking through them costs a second
    try:
        return _load_llm(start)
    except EngineError:
        raise
    except Exception as error:
        if not start["vllm"]:
            raise
        raise EngineError(f"{one_line(error)}; {given_options(start)}") from error
    finally:
        gc.enable()


def given_options(start: Message) -> str:
    """For behind what vLLM says: what it was given."""
    given = ", ".join(f"{name}: {value}" for name, value in start["vllm"].items())
    return f"vLLM was given engine.vllm: {{{given}}}, correct or remove what it does not take"


def _load_llm(start: Message) -> Any:
    from vllm import LLM

    gc.freeze()  # vLLM collects garbage several times while it starts; what was imported is none
    return LLM(**llm_arguments(start))


def llm_arguments(start: Message) -> dict[str, Any]:
    """What `vllm.LLM` is built from."""
    from vllm.config import WeightTransferConfig

    register()
    arguments = _of_device(start) | start["vllm"]
    if start["devices"] is None and arguments["enable_chunked_prefill"]:
        raise EngineError(
            "engine.vllm.enable_chunked_prefill: got true, but on CPU a prompt that is split over steps ends a seeded "
            "request, whose generators cannot be turned back; remove it"
        )
    return {
        "model": start["hf_path"],
        # an imported checkpoint has config and tokenizer alone for its HF directory
        "load_format": "auto" if _has_weights(start) else "dummy",
        "dtype": start["dtype"],
        "tensor_parallel_size": start["tp"],
        "max_model_len": start["max_model_len"],
        "hf_overrides": {"max_position_embeddings": start["max_positions"], **start["hf_overrides"]},
        "max_num_seqs": start["max_concurrent"],
        "seed": start["seed"],
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # sampling is ours alone, not generation_config.json's
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,  # scoring at a temperature needs the whole row
        "disable_log_stats": True,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        **arguments,
    }


def _of_device(start: Message) -> dict[str, Any]:
    if start["devices"] is not None:
        return {
            "gpu_memory_utilization": start["gpu_memory_fraction"],
            # memory that can be given back has an allocator of its own
            "enable_sleep_mode": start["sleep"],
        }
    import torch

    from megatron_rl.rollout import vllm_norms

    vllm_norms.register()
    return {
        "kernel_config": {"ir_op_priority": vllm_norms.PRIORITY},
        "distributed_executor_backend": _forking_executor() if start["tp"] > 1 else None,
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        # see `llm_arguments`
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


def _versions() -> str:
    import torch
    import vllm

    return f"vllm {vllm.__version__}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
