"""The trainer ranks of tools/prove_bridge.py, which starts them. Rank 0 also asks transformers and drives vLLM.

They measure and report; what the numbers must be is decided there.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_rl.algo.losses import sft_loss
from megatron_rl.data.chat import render_prompt, stop_token_ids
from megatron_rl.data.pack import unpack_per_token
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.data.types import PackedBatch, TrainSample
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.collectives import all_gather_object, broadcast_object
from megatron_rl.parallel.groups import destroy_process_groups, init_process_groups, new_driver_group
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.schema import ModelConfig
from megatron_rl.recipe.stages import EngineConfig, OptimizerConfig, ScheduleConfig
from megatron_rl.rollout.engine import GenerateRequest
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.rollout.weight_sync import WeightSync
from megatron_rl.train.batches import local_batches
from megatron_rl.train.policy import Policy

PROMPTS = ("What is the capital of France?", "What is 2 + 3?", "Write one sentence about the sea.")
DTYPE: Literal["float32"] = "float32"
TRAINED_LR = 1e-4  # of the one optimizer step: large enough to be seen in every answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every rank is told."""

    model: Path
    scrambled: Path  # a model of the same shape that means nothing
    exported: Path  # to be written, as are the next two
    report: Path
    logs: Path
    layout: ParallelLayout
    engine_tp: int
    max_tokens: int  # of an answer
    port: int  # where the ranks meet
    timeout_s: float  # of everything together, so of each wait


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What transformers says to one prompt when it decodes greedily."""

    prompt: str
    prompt_ids: list[int]
    answer_ids: list[int]
    text: str
    logprobs: list[float]  # of all tokens but the first of prompt and answer

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.answer_ids


@dataclass(kw_only=True, slots=True)
class Report:
    """Everything measured. Gaps are the largest |difference of log-probs| in nats over all tokens."""

    answers: list[dict[str, str]] = field(default_factory=list)  # prompt, and what each side answered
    num_tokens: int = 0
    trainer_to_transformers: float = 0.0
    scrambled_engine_gap: float = 0.0
    scrambled_answers_equal: int = 0
    engine_to_trainer: float = 0.0
    engine_to_transformers: float = 0.0
    answers_equal: int = 0
    sync_bytes: int = 0
    sync_s: list[float] = field(default_factory=list)
    step_moved: float = 0.0
    trained_engine_to_trainer: float = 0.0
    peak_rss_mib: list[int] = field(default_factory=list)  # of each rank
    seconds: dict[str, float] = field(default_factory=dict)  # since the ranks began, at the end of each part


def run_rank(job: Job, *, rank: int) -> None:
    """The whole proof on this rank; all ranks call it. Rank 0 leaves the report."""
    torch.set_num_threads(1)
    init_process_groups(
        job.layout,
        rank=rank,
        world_size=job.layout.world_size,
        master_addr="127.0.0.1",
        master_port=job.port,
        timeout_s=job.timeout_s,
    )
    proof = _Proof(job, rank=rank)
    with ExitStack() as closing:
        proof.read_models()
        proof.start_engine(closing)
        proof.synchronise()
        proof.export()
        proof.train_one_step()
    proof.write_report()
    destroy_process_groups()


class _Proof:
    """One rank's share of the chain; every method but the private ones is collective."""

    def __init__(self, job: Job, *, rank: int) -> None:
        self._job, self._layout, self._rank = job, job.layout, rank
        self._report, self._began = Report(), time.monotonic()
        self._spec = ModelSpec.from_hf(job.model)
        self._driver_group = new_driver_group()
        self._engine: VllmEngine | None = None
        self._engine_config = EngineConfig(
            tp=job.engine_tp,
            max_concurrent=len(PROMPTS),
            start_timeout_s=job.timeout_s,
            request_timeout_s=job.timeout_s,
        )

    def read_models(self) -> None:
        """transformers answers, then the same tokens go through this project's model."""
        self._policy = Policy(
            ModelConfig(hf_path=str(self._job.model), dtype=DTYPE), self._spec, self._layout, rank=self._rank
        )
        self._say(f"megatron-core holds the model on {self._layout.world_size} ranks")
        answers: list[Answer] = []
        if self._rank == 0:
            self._tokenizer = load_tokenizer(self._job.model)
            self._stop = stop_token_ids(self._tokenizer)
            answers = self._ask_transformers()
        self._answers = broadcast_object(answers, src=0, group=self._driver_group)
        self._report.num_tokens = sum(len(answer.logprobs) for answer in self._answers)
        self._say(f"transformers answered {len(self._answers)} prompts")
        self._trained = self._trainer_logprobs()
        self._report.trainer_to_transformers = _gap([a.logprobs for a in self._answers], self._trained)
        self._say("megatron-core scored the same tokens")

    def start_engine(self, closing: ExitStack) -> None:
        """vLLM on weights that mean nothing, so that only a transfer can make it speak."""
        if self._rank == 0:
            self._engine = closing.enter_context(
                VllmEngine.start(
                    self._engine_config,
                    hf_path=self._job.scrambled,
                    dtype=DTYPE,
                    spec=self._spec,
                    max_model_len=max(len(a.prompt_ids) for a in self._answers) + self._job.max_tokens + 1,
                    seed=0,
                    log_dir=self._job.logs,
                )
            )
            self._say("vLLM runs on scrambled weights")
            self._report.scrambled_engine_gap = _gap(self._engine_logprobs(), self._trained)
            self._report.scrambled_answers_equal = self._ask_engine("before")
        broadcast_object(None, src=0, group=self._driver_group)

    def synchronise(self) -> None:
        """The weights of the ranks into the engine, which then must say what transformers said."""
        self._sync = WeightSync(
            self._policy.named_params,
            spec=self._spec,
            layout=self._layout,
            rank=self._rank,
            engine=self._engine,
            config=self._engine_config,
            dtype=self._policy.dtype,
            trainers=self._driver_group,
        )
        self._push(1)
        if self._engine is not None:
            found = self._engine_logprobs()
            self._report.engine_to_trainer = _gap(found, self._trained)
            self._report.engine_to_transformers = _gap(found, [a.logprobs for a in self._answers])
            self._report.answers_equal = self._ask_engine("after")
        self._say("vLLM answered on the weights it was given")

    def export(self) -> None:
        """Back to a Hugging Face directory, to be compared with the one it came from."""
        self._policy.save_hf(str(self._job.exported), hf_source=str(self._job.model))
        self._say("exported")

    def train_one_step(self) -> None:
        """One real optimizer step on the answers, and a second transfer."""
        samples = [
            TrainSample(
                token_ids=answer.token_ids,
                loss_mask=[False] * len(answer.prompt_ids) + [True] * len(answer.answer_ids),
                sample_id=answer.prompt,
            )
            for answer in self._answers
        ]
        self._policy.start_stage(OptimizerConfig(lr=TRAINED_LR), ScheduleConfig(), total_steps=1)
        batches = self._batches(samples)
        tokens = sum(sample.num_trained_tokens for sample in samples)
        self._policy.forward_backward(batches, partial(sft_loss, normaliser=float(tokens)))
        self._policy.optimizer_step()
        before, self._trained = self._trained, self._trainer_logprobs()
        self._report.step_moved = _gap(before, self._trained)
        self._push(2)
        if self._engine is not None:
            self._report.trained_engine_to_trainer = _gap(self._engine_logprobs(), self._trained)
        self._say("trained one step, transferred and scored again")

    def write_report(self) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        self._report.peak_rss_mib = all_gather_object(peak)
        if self._rank == 0:
            self._job.report.write_text(json.dumps(asdict(self._report), indent=2) + "\n")

    def _ask_transformers(self) -> list[Answer]:
        # slow to import, and this rank alone asks it
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(
            self._job.model, dtype=torch.float32, local_files_only=True
        ).eval()
        answers = []
        for prompt in PROMPTS:
            prompt_ids = render_prompt(self._tokenizer, [{"role": "user", "content": prompt}])
            given = torch.tensor([prompt_ids])
            with torch.no_grad():
                whole = model.generate(
                    given,
                    attention_mask=torch.ones_like(given),
                    max_new_tokens=self._job.max_tokens,
                    do_sample=False,
                    eos_token_id=list(self._stop),
                    pad_token_id=self._stop[0],
                )
                rows = model(whole).logits[0, :-1].double().log_softmax(-1)
            answer_ids = whole[0, len(prompt_ids) :].tolist()
            answers.append(
                Answer(
                    prompt=prompt,
                    prompt_ids=prompt_ids,
                    answer_ids=answer_ids,
                    text=self._text(answer_ids),
                    logprobs=rows.gather(1, whole[0, 1:, None])[:, 0].tolist(),
                )
            )
        return answers

    def _trainer_logprobs(self) -> list[list[float]]:
        samples = [
            TrainSample(token_ids=a.token_ids, loss_mask=[True] * len(a.token_ids), sample_id=a.prompt)
            for a in self._answers
        ]
        found: dict[int, list[float]] = {}
        batches = self._batches(samples)
        for batch, values in zip(batches, self._policy.logprobs(batches), strict=True):
            of_sample = zip(batch.sample_index, unpack_per_token(batch, values), strict=True)
            found |= {index: logprobs.tolist() for index, logprobs in of_sample}
        return [found[index] for index in range(len(samples))]

    def _batches(self, samples: Sequence[TrainSample]) -> list[PackedBatch]:
        """All samples in one micro-batch."""
        tokens = sum(sample.packed_length for sample in samples)
        return local_batches(
            samples, self._layout, dp_rank=self._policy.dp_rank, tokens_per_microbatch=tokens
        )

    def _push(self, version: int) -> None:
        result = self._sync.push(version)
        self._report.sync_bytes = result.bytes
        self._report.sync_s.append(result.seconds)
        self._say(f"transferred {result.bytes / 1e6:,.1f} MB in {result.seconds:.2f} s")

    def _engine_logprobs(self) -> list[list[float]]:
        assert self._engine is not None
        return [self._engine.score(answer.token_ids) for answer in self._answers]

    def _ask_engine(self, when: str) -> int:
        """Greedy answers of the engine into the report; how many are those of transformers, token by token."""
        assert self._engine is not None
        completions = self._engine.generate(
            [
                GenerateRequest(
                    prompt_token_ids=answer.prompt_ids,
                    seed=0,
                    max_tokens=self._job.max_tokens,
                    temperature=0.0,
                    stop_token_ids=self._stop,
                )
                for answer in self._answers
            ]
        )
        self._report.answers = self._report.answers or [
            {"prompt": answer.prompt, "transformers": answer.text} for answer in self._answers
        ]
        for shown, completion in zip(self._report.answers, completions, strict=True):
            shown[when] = self._text(completion.token_ids)
        pairs = zip(completions, self._answers, strict=True)
        return sum(list(completion.token_ids) == answer.answer_ids for completion, answer in pairs)

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def _say(self, what: str) -> None:
        if self._rank == 0:
            seconds = time.monotonic() - self._began
            self._report.seconds[what] = round(seconds, 1)
            print(f"{seconds:6.1f} s  {what}", flush=True)


def _gap(some: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """Largest |difference|; NaN as soon as one value is NaN."""
    a, b = (
        torch.tensor([value for row in rows for value in row], dtype=torch.float64) for rows in (some, others)
    )
    return float((a - b).abs().max())
