"""The half of a weight transfer that runs inside each vLLM worker, as its `WeightTransferEngine`.

Two phases: `receive_weights` stages verified bytes and touches nothing, `finish_weight_update` loads what is
staged. The driver asks `outcome` of every worker in between, so either all workers of an engine load or none
does.

No method raises through vLLM's RPC: with several workers the executor stops reading at the first failure and
would take the others' answers for those of the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.execute import Payloads, full_tensors, receive_weights, unpack
from megatron_rl.reshard.plan import ReshardPlan, plan_from_inputs
from megatron_rl.reshard.transports import Transport, make_group


@dataclass
class ReceiverInit(WeightTransferInitInfo):
    """Where the group meets, and the plan as its inputs and digest."""

    host: str
    port: int
    timeout_s: float
    first_worker: int  # plan worker index of this engine's worker 0
    plan: dict[str, Any]
    plan_digest: str
    canary: bool


@dataclass
class ReceiverUpdate(WeightTransferUpdateInfo):
    version: int


class WeightReceiver(WeightTransferEngine[ReceiverInit, ReceiverUpdate]):
    """Receives the plan's bytes and feeds them to vLLM's own loaders."""

    init_info_cls = ReceiverInit
    update_info_cls = ReceiverUpdate

    _plan: ReshardPlan | None = None
    _group: Transport | None = None
    _worker = -1
    _canary = True
    _staged: Payloads | None = None
    _error: str | None = None

    def init_transfer_engine(self, init_info: ReceiverInit) -> None:
        self._run(self._connect, init_info)

    def start_weight_update(self) -> None:
        """Nothing yet: parameters stay in place until every worker has verified its bytes."""
        self._staged, self._error = None, None

    def receive_weights(self, update_info: ReceiverUpdate) -> None:
        self._run(self._stage, update_info)

    def finish_weight_update(self) -> None:
        if self._staged is not None:
            self._run(self._load, self._staged)
            self._staged = None

    def discard(self) -> None:
        """Drop what is staged: another worker or engine failed."""
        self._staged = None

    def outcome(self) -> str | None:
        """What went wrong in the last call on this worker, None when nothing did."""
        return self._error

    def shutdown(self) -> None:
        self._group = self._staged = None

    def _run(self, step: Callable[[Any], None], argument: Any) -> None:
        self._error = None
        try:
            step(argument)
        except Exception as error:  # every failure is reported by `outcome`, see above
            self._staged = None
            self._error = f"engine worker {self._worker}: {type(error).__name__}: {error}"

    def _connect(self, info: ReceiverInit) -> None:
        self._group = None
        self._worker = info.first_worker + self.parallel_config.rank
        self._plan = plan_from_inputs(info.plan, digest=info.plan_digest)
        self._canary = info.canary
        trainers = self._plan.source.world_size
        self._group = make_group(
            info.host, info.port, trainers + self._worker, trainers + self._plan.num_workers, info.timeout_s
        )

    def _stage(self, info: ReceiverUpdate) -> None:
        if self._plan is None or self._group is None:
            raise ReshardError("weight transfer: weights announced before the group was set up")
        self._staged = receive_weights(self._plan, self._worker, self._group, version=info.version)

    def _load(self, payloads: Payloads) -> None:
        plan = self._plan
        assert plan is not None
        dtype = self.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        parts = unpack(plan, self._worker, payloads, dtype=dtype)
        offered: set[str] = set()

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in full_tensors(plan, parts, dtype=dtype, canary=self._canary):
                offered.add(name)
                yield name, tensor

        loader: Any = self.model  # every vLLM model has `load_weights`; its base class does not declare it
        initialize_layerwise_reload(self.model)
        try:
            loader.load_weights(tensors())
        finally:
            # also after a failure: it puts every parameter back, so that a full resend can load
            finalize_layerwise_reload(self.model, self.model_config)
        if missing := sorted(set(plan.shapes) - offered):
            raise ReshardError(
                f"weight transfer: vLLM's loader stopped before {missing[0]} (and {len(missing) - 1} more)"
            )
        if plan.spec.tied:
            _repack_tied_head(self.model)
        self._check_complete()

    def _check_complete(self) -> None:
        """No parameter may be left without storage: that is a layer for which vLLM saw too few elements."""
        for name, param in self.model.named_parameters():
            if param.is_meta:
                raise ReshardError(f"weight transfer: vLLM left {name} without values")


def _repack_tied_head(model: nn.Module) -> None:
    """On CPU the tied head multiplies by its own packed copy, which no arriving tensor ever rebuilds."""
    head = getattr(model, "lm_head", None)
    if head is None:
        raise ReshardError("weight transfer: the model is tied, but vLLM built it without a head to refresh")
    embedding = model.get_parameter("model.embed_tokens.weight")
    if head.weight.data_ptr() != embedding.data_ptr():
        raise ReshardError(
            "weight transfer: config.json says tie_word_embeddings, but vLLM built a separate head, so "
            "the checkpoint "
            "holds an lm_head.weight that differs; set tie_word_embeddings to false or drop that tensor"
        )
    with torch.no_grad():
        head.quant_method.process_weights_after_loading(head)
