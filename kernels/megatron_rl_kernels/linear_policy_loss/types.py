"""What `linear_policy_loss` takes and returns besides the head: policy inputs per token, result, statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyInputs:
    """Constants of N tokens, aligned to `target`. Where `mask` is False all others may hold anything, NaN included."""

    advantage: Tensor  # [N] float
    mask: Tensor  # [N] bool, True where the token is trained on
    token_weight: Tensor  # [N] float32, aggregation weight / global normaliser, not negative
    old_logprob: Tensor | None = (
        None  # [N] float; None: on-policy, this pass's own log-probs, ratio exactly 1
    )
    ref_logprob: Tensor | None = None  # [N] float, needed by a KL term
    correction: Tensor | None = None  # [N] float, factor of the surrogate alone
    nll_weight: Tensor | None = None  # [N] float, adds nll_weight * -logprob, outside token_weight
    cu_seqlens: Tensor | None = None  # [S + 1] int32 or int64 from 0 to N; gspo and gmpo need it

    def map(self, function: Callable[[Tensor], Tensor]) -> PolicyInputs:
        """The same with `function` applied to every tensor of [N]; `cu_seqlens` stays."""
        named = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name != "cu_seqlens"
        }
        return replace(self, **{name: function(one) for name, one in named.items() if one is not None})


@dataclass(frozen=True, slots=True)
class LinearPolicyLoss:
    """Result for N tokens. Only `loss` has a gradient, in `hidden` and `weight`."""

    loss: Tensor  # 0-dim float32 (float64 for float64 inputs); shares of micro-batches add up
    logprob: Tensor  # [N] same dtype, in nats; 0 where `mask` is False
    entropy: Tensor  # [N] same dtype, of the whole next-token distribution; 0 where `mask` is False
    metrics: Tensor  # [len(METRICS)] float32, as `megatron_rl_kernels.policy_loss` defines them


@dataclass(frozen=True, slots=True)
class TokenValues:
    """What the statistics of all shards say about n tokens. All ranks of a group hold the same bits."""

    logprob: Tensor  # [n], NaN where no shard (or more than one) owns the target
    entropy: Tensor  # [n]
    top: Tensor  # [n] base of `log_sum`: the largest logit, or near it
    log_sum: Tensor  # [n] log sum exp(z - top); apart from `top`, whose size would cost it digits
