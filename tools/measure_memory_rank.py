"""One rank of tools/measure_memory.py: the most bytes of live tensors in each phase of training, beside the estimate.

With an accelerator its caching allocator counts. On CPU `live_bytes.cpp` does, an allocator in front of torch's own:
every storage is seen, temporaries inside operators and those of other threads included.
"""

from __future__ import annotations

import ctypes
import gc
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from megatron_rl.algo.aggregate import normaliser
from megatron_rl.algo.losses import sft_loss
from megatron_rl.data.types import TrainSample
from megatron_rl.errors import MegatronRLError
from megatron_rl.estimate.memory import ELEMENT_BYTES, TrainShape, rank_memory
from megatron_rl.estimate.memory_types import Device
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.platform.device import has_accelerator
from megatron_rl.recipe.schema import ModelConfig
from megatron_rl.recipe.stages import OptimizerConfig, RlStage, SamplingConfig, ScheduleConfig
from megatron_rl.train.batches import step_batches
from megatron_rl.train.policy import Policy
from megatron_rl.train.updates import Update, add_old_logprobs, update_loss

_SOURCE = Path(__file__).with_name("live_bytes.cpp")
_COMPILER_S = 120
# gloo's threads let go of what they sent a moment after it has arrived
_SETTLE_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is trained. Sequences are of one length, so that every micro-batch is full."""

    hf_path: str
    layout: ParallelLayout
    dtype: Literal["float32", "bfloat16"]
    recompute: Literal["none", "full"]
    tokens: int  # of a micro-batch
    sequence: int  # positions of a sequence, an even number that divides `tokens`
    microbatches: int  # of a step, on each dp rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One phase on one rank, in bytes."""

    pp_rank: int
    phase: str
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted / self.measured - 1


class LiveBytes:
    """Bytes of live tensors of this process; on CPU of those made after this was."""

    def __init__(self, counter: Path | None) -> None:
        """`counter`: the library that `build_counter` made, not read with an accelerator."""
        self._library: ctypes.CDLL | None = None
        if not has_accelerator():
            assert counter is not None, "the CPU needs one"
            self._library = ctypes.CDLL(str(counter))
            self._library.live_bytes.restype = self._library.peak_bytes.restype = ctypes.c_int64
            self._library.count_tensors()
        self.peaks: dict[str, int] = {}

    @property
    def now(self) -> int:
        return int(torch.cuda.memory_allocated() if self._library is None else self._library.live_bytes())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Keep the most bytes that live inside as `peaks[name]`; of several phases of a name the highest."""
        if self._library is None:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            self._library.forget_peak()
        yield
        time.sleep(_SETTLE_S)
        if self._library is None:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
        else:
            peak = self._library.peak_bytes()
        self.peaks[name] = max(self.peaks.get(name, 0), int(peak))


def build_counter(place: Path) -> Path:
    """Compile the counter into the directory `place`. Raises MegatronRLError without a compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise MegatronRLError(
            "measuring on a CPU needs a C++ compiler, and no g++ or clang++ was found; install one"
        )
    torch_dir, out = Path(torch.__file__).parent, place / "live_bytes.so"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{torch_dir}/include", str(_SOURCE)]
    command += ["-o", str(out), f"-L{torch_dir}/lib", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILER_S, check=False)
    if done.returncode:
        raise MegatronRLError(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stderr}")
    return out


def measure(setting: Setting, *, rank: int, live: LiveBytes) -> list[Found]:
    """Load, two steps of SFT, of which the first makes the moments, and one of RL. Collective.

    The process groups of the layout exist.
    """
    gc.collect()
    live.peaks.clear()
    before = live.now
    spec = ModelSpec.from_hf(setting.hf_path)
    model = ModelConfig(hf_path=setting.hf_path, dtype=setting.dtype, recompute=setting.recompute)
    with live.phase("load"):
        policy = Policy(model, spec, setting.layout, rank=rank)
        policy.start_stage(OptimizerConfig(lr=1e-6), ScheduleConfig(), total_steps=4)
    sft = _update(setting, policy, is_rl=False)
    loss = partial(sft_loss, normaliser=normaliser(sft.samples, "token_mean"))
    for _ in range(2):
        with live.phase("sft train"):
            policy.forward_backward(sft.batches, loss)
        with live.phase("sft step"):
            policy.optimizer_step()
    del sft, loss
    rl = _update(setting, policy, is_rl=True)
    with live.phase("rl logprob"):
        scored = add_old_logprobs(policy, rl, temperature=1.0)
    with live.phase("rl train"):
        policy.forward_backward(scored.batches, update_loss(scored, _stage(setting)))
    with live.phase("rl step"):
        policy.optimizer_step()
    return list(_compared(setting, spec, live.peaks, before=before, pp_rank=policy.pp_rank))


def _compared(
    setting: Setting, spec: ModelSpec, peaks: dict[str, int], *, before: int, pp_rank: int
) -> Iterator[Found]:
    device: Device = "gpu" if has_accelerator() else "cpu"
    for name, peak in peaks.items():
        kind, _, phase = name.rpartition(" ")
        shape = TrainShape(
            spec=spec,
            layout=setting.layout,
            element_bytes=ELEMENT_BYTES[setting.dtype],
            recompute=setting.recompute,
            device=device,
            tokens=setting.tokens,
            trained=setting.tokens // 2,
            microbatches=setting.microbatches,
            is_rl=kind == "rl",
            padding=1.0,
        )
        found = rank_memory(shape, pp_rank=pp_rank).phase(phase)
        assert found is not None, phase
        # what no tensor holds is an allowance
        predicted = found.total - found.parts.get("reserve", 0)
        yield Found(pp_rank=pp_rank, phase=name, predicted=predicted, measured=peak - before)


def _update(setting: Setting, policy: Policy, *, is_rl: bool) -> Update:
    """Full micro-batches of random tokens; the second half of each sample is trained on."""
    draw = random.Random(0)
    count = setting.microbatches * setting.layout.dp * (setting.tokens // setting.sequence)
    length = setting.sequence + 1
    samples = [
        TrainSample(
            token_ids=[draw.randrange(policy.spec.vocab_size) for _ in range(length)],
            loss_mask=[position > length // 2 for position in range(length)],
            rollout_logprobs=[-1.0] * length if is_rl else None,
            advantage=draw.choice((-1.0, 1.0)),
        )
        for _ in range(count)
    ]
    step = step_batches(samples, setting.layout, dp_rank=policy.dp_rank, tokens_per_microbatch=setting.tokens)
    assert len(step.batches) == setting.microbatches, (len(step.batches), setting)
    return Update(samples=samples, batches=step.batches, load=step.load)


def _stage(setting: Setting) -> RlStage:
    """GPPO with the defaults of a recipe."""
    return RlStage(
        kind="rl",
        prompts="",
        rewards={},
        iterations=1,
        prompts_per_iteration=1,
        group_size=1,
        sampling=SamplingConfig(max_response_tokens=setting.sequence),
        optimizer=OptimizerConfig(lr=1e-6),
    )
