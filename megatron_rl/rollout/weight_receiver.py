"""The half of a weight transfer that runs inside each vLLM worker, as its `WeightTransferEngine`.

Weights go into the model bucket by bucket, through vLLM's own loaders, each bucket verified before its first
tensor is loaded. From the first bucket on the engine is neither old nor new, so its driver marks it stale
before and clears that when all workers of all engines are done; after a failure a full resend loads again.

No method raises through vLLM's RPC: with several workers the executor stops reading at the first failure and
would take the others' answers for those of the next call. `outcome` tells instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.execute import connect_plan
from megatron_rl.reshard.plan import ReshardPlan, plan_from_inputs
from megatron_rl.reshard.receive import WeightStream
from megatron_rl.reshard.transports import Membership, Router, TransportKind
from megatron_rl.rollout.watch import Board, watch_engines


@dataclass
class ReceiverInit(WeightTransferInitInfo):
    """Where the group meets, and the plan as its inputs and digest."""

    host: str
    port: int
    timeout_s: float
    first_worker: int  # plan worker index of this engine's worker 0
    plan: dict[str, Any]
    plan_digest: str
    transport: TransportKind
    canary: bool


@dataclass
class ReceiverUpdate(WeightTransferUpdateInfo):
    version: int


class WeightReceiver(WeightTransferEngine[ReceiverInit, ReceiverUpdate]):
    """Receives the plan's bytes and feeds them to vLLM's own loaders."""

    init_info_cls = ReceiverInit
    update_info_cls = ReceiverUpdate

    _plan: ReshardPlan | None = None
    _router: Router | None = None
    _stream: WeightStream | None = None
    _worker = -1
    _error: str | None = None

    def init_transfer_engine(self, init_info: ReceiverInit) -> None:
        self._run(self._connect, init_info)

    def start_weight_update(self) -> None:
        """Nothing: an update is one call of `receive_weights`, which also puts the model back when it fails."""

    def receive_weights(self, update_info: ReceiverUpdate) -> None:
        self._run(self._load, update_info)

    def finish_weight_update(self) -> None:
        """Nothing, see `start_weight_update`."""

    def outcome(self) -> str | None:
        """What went wrong in the last call on this worker, None when nothing did."""
        return self._error

    def shutdown(self) -> None:
        self._leave()

    def _run(self, step: Callable[[Any], None], argument: Any) -> None:
        self._error = None
        try:
            step(argument)
        except Exception as error:  # every failure is reported by `outcome`, see above
            self._error = f"engine worker {self._worker}: {type(error).__name__}: {error}"

    def _connect(self, info: ReceiverInit) -> None:
        self._leave()
        self._worker = info.first_worker + self.parallel_config.rank
        self._plan = plan = plan_from_inputs(info.plan, digest=info.plan_digest)
        member = Membership(
            rank=plan.num_trainers + self._worker,
            num_trainers=plan.num_trainers,
            num_workers=plan.num_workers,
            host=info.host,
            port=info.port,
            timeout_s=info.timeout_s,
        )
        # a member that will not come must not keep this worker waiting
        self._router = watch_engines(
            lambda: connect_plan(plan, member, kind=info.transport), None, Board(member)
        )
        dtype = self.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        self._stream = WeightStream(plan, self._router, dtype=dtype, device=self.device, canary=info.canary)

    def _leave(self) -> None:
        if self._router is not None:
            self._router.close()
        self._router = self._stream = None

    def _load(self, info: ReceiverUpdate) -> None:
        plan, stream = self._plan, self._stream
        if plan is None or stream is None:
            raise ReshardError("weight transfer: weights announced before the group was set up")
        try:
            reload_model(
                self.model,
                stream.tensors(version=info.version),
                model_config=self.model_config,
                names=plan.shapes,
                is_tied=plan.spec.tied,
            )
        except BaseException:
            stream.drain()
            raise


def reload_model(
    model: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    model_config: ModelConfig,
    names: Collection[str],
    is_tied: bool,
) -> None:
    """Load HF tensors, full in shape, into a live vLLM model; `names` are those that it must take.

    Raises ReshardError when one of them was not taken or a parameter was left without values; whatever is
    raised, another reload can follow.
    """
    offered: set[str] = set()

    def counted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            offered.add(name)
            yield name, tensor
            del tensor  # before the next one is made

    loader: Any = model  # every vLLM model has `load_weights`; its base class does not declare it
    if current_platform.is_cpu():
        _let_experts_be_packed_again(model)
    initialize_layerwise_reload(model)
    try:
        loader.load_weights(counted())
    finally:
        # also after a failure: it puts every parameter back
        finalize_layerwise_reload(model, model_config)
    if missing := sorted(set(names) - offered):
        raise ReshardError(
            f"weight transfer: vLLM's loader stopped before {missing[0]} (and {len(missing) - 1} more)"
        )
    if is_tied:
        _repack_tied_head(model)
    for name, param in model.named_parameters():
        if param.is_meta:  # a layer for which vLLM saw too few elements
            raise ReshardError(f"weight transfer: vLLM left {name} without values")


def _let_experts_be_packed_again(model: nn.Module) -> None:
    """On CPU experts multiply by packed copies, which vLLM makes only where they have no kernel yet.

    Otherwise it would put plain weights in their place: other numbers, or an error where packing adds columns.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


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
