"""The one owner of a model: forward, backward, log-probs and optimizer steps on megatron-core's schedules.

The arithmetic of the loss is owned here and nowhere else: a loss is a plain sum over its micro-batch divided by
one global normaliser that the caller counted beforehand; gradients are summed over micro-batches and dp ranks.
No other factor exists (`calculate_per_token_loss` turns megatron-core's own ones off).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_rl.algo.losses import TokenLoss
from megatron_rl.algo.metric import Metric
from megatron_rl.data.pack import with_old_logprobs
from megatron_rl.data.types import PackedBatch
from megatron_rl.errors import TrainingError
from megatron_rl.model.build import PolicyGPTModel, build_model, packed_seq_params, table_params
from megatron_rl.model.hf_io import load_hf, save_hf
from megatron_rl.model.hf_tables import padded_vocab
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.collectives import all_gather_object
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.platform import device as platform
from megatron_rl.platform.spans import Spans
from megatron_rl.recipe.schema import ModelConfig
from megatron_rl.recipe.stages import OptimizerConfig, ScheduleConfig
from megatron_rl.train.head import Head
from megatron_rl.train.optimizer import StageOptimizer, StepStats
from megatron_rl.train.replicas import NUM_CHECKED_STEPS, check_replicas
from megatron_rl.train.schedule_spans import ScheduleSpans

# what the loss of one micro-batch is
LossFunction = Callable[[PackedBatch], TokenLoss]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy:
    """Model chunks of this rank, wrapped for data parallelism, and the optimizer of the current stage.

    Where the recipe names a checkpoint to start from, weights are zero until that is loaded.
    """

    def __init__(self, config: ModelConfig, spec: ModelSpec, layout: ParallelLayout, *, rank: int) -> None:
        self.spec, self.layout, self._rank = spec, layout, rank
        self.tp_rank, self.dp_rank, self.pp_rank = layout.coord(rank)
        self.dtype = DTYPES[config.dtype]
        self._device = platform.device()
        self.chunks: list[PolicyGPTModel] = build_model(
            spec, layout, dtype=self.dtype, spec_kind=config.spec, recompute=config.recompute
        )
        if config.checkpoint is None:
            load_hf(self.chunks, spec, layout, hf_path=config.hf_path, rank=rank)
        self.ddp_chunks = [self._wrap(chunk.to(self._device)) for chunk in self.chunks]
        self._model_config = self.chunks[0].config
        self._model_config.finalize_model_grads_func = _finalize_without_scaling
        self._head = self._build_head(config) if self.chunks[-1].post_process else None
        self._optimizer: StageOptimizer | None = None
        self._num_steps_to_check = 0
        self.spans = Spans()  # of micro-batches and optimizer steps, while a profile is made

    def _build_head(self, config: ModelConfig) -> Head:
        rows = padded_vocab(self.spec.vocab_size, self.layout.tp) // self.layout.tp
        return Head(
            weight=self.chunks[-1].head_weight(),
            vocab_start=self.tp_rank * rows,
            vocab_size=self.spec.vocab_size,
            group=parallel_state.get_tensor_model_parallel_group() if self.layout.tp > 1 else None,
            sequence_parallel=self.layout.sp and self.layout.tp > 1,
            impl=None if config.kernels == "auto" else config.kernels,
        )

    @property
    def head(self) -> Head:
        assert self._head is not None, "only the last pipeline stage has one"
        return self._head

    def _wrap(self, chunk: PolicyGPTModel) -> DistributedDataParallel:
        module = Float16Module(chunk.config, chunk) if self.dtype is torch.bfloat16 else chunk
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
        )
        return DistributedDataParallel(chunk.config, ddp_config, module)

    def start_stage(self, optimizer: OptimizerConfig, schedule: ScheduleConfig, *, total_steps: int) -> None:
        """A fresh optimizer for a stage; moments of the stage before are not carried over."""
        # the old moments go before the new ones come
        self._optimizer = None
        self._optimizer = StageOptimizer(
            self.ddp_chunks, dtype=self.dtype, config=optimizer, schedule=schedule, total_steps=total_steps
        )
        self._num_steps_to_check = NUM_CHECKED_STEPS

    @property
    def optimizer(self) -> StageOptimizer:
        assert self._optimizer is not None, "start_stage comes first"
        return self._optimizer

    def named_params(self) -> list[dict[str, Tensor]]:
        """Parameters of each model chunk under the names of the tables; live tensors, not copies."""
        return [table_params(chunk) for chunk in self.chunks]

    def forward_backward(
        self,
        batches: Sequence[PackedBatch],
        loss_fn: LossFunction,
        *,
        temperature: float = 1.0,
        watch: Callable[[PackedBatch, Tensor], None] | None = None,
    ) -> list[list[Metric]]:
        """Accumulate gradients of all micro-batches of this dp rank; every dp rank passes equally many.

        `loss_fn` gives shares already divided by the global normaliser. Returns the metrics of every micro-batch of
        every dp rank, the same list on every rank. `watch` is told of each micro-batch and the log-probs [T] that its
        loss is of, on the last pipeline stage. Raises TrainingError on all of them for log-probs or entropies
        that cannot be.
        """
        return self._train_pass(batches, partial(self._loss, loss_fn, temperature, watch))

    def forward_backward_on_policy(
        self,
        batches: Sequence[PackedBatch],
        loss_fn: LossFunction,
        *,
        temperature: float = 1.0,
        watch: Callable[[PackedBatch, Tensor], None] | None = None,
    ) -> tuple[list[list[Metric]], list[Tensor]]:
        """As `forward_backward`, where no step came since the old policy: its log-probs are those of this very pass.

        Returns them too, bit for bit what `logprobs` gives, without a pass of their own. `loss_fn` is called with
        micro-batches that hold them.
        """
        found: list[Tensor] = []
        metrics = self._train_pass(batches, partial(self._on_policy_loss, loss_fn, temperature, watch, found))
        total = sum(batch.num_tokens for batch in batches)
        flat = self._from_last_stage(torch.cat(found) if found else None, shape=(total,))
        return metrics, list(flat.split([batch.num_tokens for batch in batches]))

    def _train_pass(self, batches: Sequence[PackedBatch], loss: Callable[..., Any]) -> list[list[Metric]]:
        for chunk in self.ddp_chunks:
            chunk.zero_grad_buffer()
        self.optimizer.inner.zero_grad()
        outputs = self._run_schedule(batches, loss, forward_only=False)
        # only tp rank 0 of the last stage reports: the others hold copies or nothing
        mine = outputs if self.tp_rank == 0 else []
        host = [[metric.on_host() for metric in metrics] for metrics in mine]
        every = all_gather_object((host, self._problem()))
        _raise_first([problem for _, problem in every])
        return [metrics for rank, _ in every for metrics in rank]

    def _problem(self) -> str | None:
        return None if self._head is None else self._head.problem()

    def optimizer_step(self) -> StepStats:
        """Clip, check, update. See StageOptimizer.step.

        The first steps of a stage and after a resume also compare what several ranks hold copies of, and raise
        TrainingError on all of them where it differs.
        """
        with self.spans.span("optimizer step"):
            stats = self.optimizer.step()
        if self._num_steps_to_check and not stats.was_skipped:
            self._num_steps_to_check -= 1
            check_replicas(
                self.chunks, self.spec, self.layout, rank=self._rank, step=self.optimizer.num_steps
            )
        return stats

    @torch.no_grad()
    def logprobs(self, batches: Sequence[PackedBatch], *, temperature: float = 1.0) -> list[Tensor]:
        """Log-prob [T] float32 of every label of every micro-batch, on every pipeline rank; no gradient.

        Positions that are not trained on hold a value too; callers mask. Raises TrainingError on all ranks for
        log-probs or entropies that cannot be.
        """
        outputs = self._run_schedule(batches, partial(self._collect, temperature), forward_only=True)
        _raise_first(all_gather_object(self._problem()))
        total = sum(batch.num_tokens for batch in batches)
        flat = self._from_last_stage(torch.cat(outputs) if outputs else None, shape=(total,))
        return list(flat.split([batch.num_tokens for batch in batches]))

    @torch.no_grad()
    def logprob_rows(
        self, batches: Sequence[PackedBatch], positions: Sequence[int], *, temperature: float = 1.0
    ) -> Tensor:
        """Log-probs [N, V] float32 of every token at `positions` of the first micro-batch, on every pipeline rank.

        Whole rows of the vocabulary: for a few positions only.
        """
        outputs = self._run_schedule(
            batches, partial(self._collect_rows, temperature, positions), forward_only=True
        )
        shape = (len(positions), self.spec.vocab_size)
        return self._from_last_stage(outputs[0] if outputs else None, shape=shape)

    def _from_last_stage(self, values: Tensor | None, *, shape: tuple[int, ...]) -> Tensor:
        """What the last pipeline stage has, float32 of `shape`, on every stage."""
        if values is None:
            values = torch.empty(shape, dtype=torch.float32, device=self._device)
        if self.layout.pp > 1:
            torch.distributed.broadcast(
                values,
                src=parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        return values

    def save_hf(self, out_dir: str, *, hf_source: str) -> None:
        """Write the weights as a Hugging Face directory; collective over all ranks."""
        save_hf(self.chunks, self.spec, self.layout, hf_source=hf_source, out_dir=out_dir)

    def _run_schedule(
        self, batches: Sequence[PackedBatch], loss: Callable[..., Any], *, forward_only: bool
    ) -> list:
        batches = [batch.to(self._device) for batch in batches]
        iterators: list[Iterator[PackedBatch]] = [iter(batches) for _ in self.ddp_chunks]
        single = len(self.ddp_chunks) == 1
        for chunk in self.ddp_chunks:
            chunk.train(not forward_only)
        self._model_config.timers = ScheduleSpans(self.spans) if self.spans.is_on else None
        return get_forward_backward_func()(
            forward_step_func=partial(_forward_step, loss, self.dtype, self.spans),
            data_iterator=iterators[0] if single else iterators,
            model=self.ddp_chunks[0] if single else self.ddp_chunks,
            num_microbatches=len(batches),
            seq_length=max(batch.num_tokens for batch in batches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _loss(
        self,
        loss_fn: LossFunction,
        temperature: float,
        watch: Callable[[PackedBatch, Tensor], None] | None,
        batch: PackedBatch,
        hidden: Tensor,
    ) -> tuple[Tensor, Tensor, list[Metric]]:
        loss = loss_fn(batch)
        result = self.head.loss(hidden, batch, loss, temperature=temperature)
        if watch is not None:
            watch(batch, result.logprob)
        # the token count is megatron-core's own normaliser, which is off here: any number does
        count = torch.zeros((), dtype=torch.int, device=hidden.device)
        return result.loss, count, loss.report(result.loss.detach(), result.metrics)

    def _on_policy_loss(
        self,
        loss_fn: LossFunction,
        temperature: float,
        watch: Callable[[PackedBatch, Tensor], None] | None,
        found: list[Tensor],
        batch: PackedBatch,
        hidden: Tensor,
    ) -> tuple[Tensor, Tensor, list[Metric]]:
        found.append(self.head.logprobs(hidden, batch.labels, temperature=temperature))
        return self._loss(loss_fn, temperature, watch, with_old_logprobs(batch, found[-1]), hidden)

    def _collect(
        self, temperature: float, batch: PackedBatch, hidden: Tensor, *, non_loss_data: bool
    ) -> Tensor:
        return self.head.logprobs(hidden, batch.labels, temperature=temperature)

    def _collect_rows(
        self,
        temperature: float,
        positions: Sequence[int],
        batch: PackedBatch,
        hidden: Tensor,
        *,
        non_loss_data: bool,
    ) -> Tensor:
        if self.layout.sp:
            hidden = gather_from_sequence_parallel_region(hidden)
        chosen = hidden.squeeze(1)[list(positions)].float()
        logits = chosen @ self.chunks[-1].head_weight().float().T / temperature  # [N, V_padded / tp]
        if self.layout.tp > 1:
            shards = [torch.empty_like(logits) for _ in range(self.layout.tp)]
            group = parallel_state.get_tensor_model_parallel_group()
            torch.distributed.all_gather(shards, logits, group=group)
            logits = torch.cat(shards, dim=1)
        return logits[:, : self.spec.vocab_size].log_softmax(1)


def _forward_step(
    loss: Callable[..., Any],
    dtype: torch.dtype,
    spans: Spans,
    batches: Iterator[PackedBatch],
    model: torch.nn.Module,
) -> tuple[Tensor, Callable[..., Any]]:
    batch = next(batches)
    spans.note(tokens=batch.num_tokens)
    # the mixed-precision wrapper would hand the last stage's hidden states on in float32
    wrapper_options = {} if dtype is torch.float32 else {"fp32_output": False}
    hidden = model(
        batch.input_ids[None],
        batch.position_ids[None],
        None,
        packed_seq_params=packed_seq_params(batch, dtype=dtype),
        **wrapper_options,
    )
    return hidden, partial(loss, batch)


def _raise_first(problems: Sequence[str | None]) -> None:
    """`problems` of every rank, in rank order."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise TrainingError(f"rank {rank}: {problem}; the step is not taken")


def _finalize_without_scaling(
    model: list[torch.nn.Module], num_tokens: Tensor | None = None, **groups: Any
) -> None:
    """Sum gradients over dp, sequence-parallel norms and tied embeddings; the normaliser is in the loss already."""
    finalize_model_grads(model, None, **groups)
