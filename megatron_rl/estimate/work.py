"""What a token costs a model: operations, elements moved, weights to read. Counts from its sizes, no machine yet.

A multiplication with its addition is two operations, as in data sheets.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWork:
    """Forward operations of one token, and weights, in elements; of one layer unless it says head.

    Matrix products: 2 per weight that a token meets (Kaplan et al. 2020, arXiv 2001.08361, section 2.1), without the
    embedding, which is looked up. Attention: 4 * heads * head size per position attended to, for scores and for
    their sum of values (Narayanan et al. 2021, arXiv 2104.04473, appendix).
    """

    num_layers: int
    hidden_size: int
    dense_flops: float  # projections of attention, and the MLP where there are no experts
    expert_flops: float  # the experts that a token takes, and their router
    attention_flops: float  # per position attended to
    moved_elements: (
        float  # read and written between the products: norms, residuals, rotary, activation, routing
    )
    routed_elements: float  # sent to experts on other ranks, one way
    head_flops: float
    kv_elements: int  # of keys and values
    dense_weights: int
    expert_weights: int  # of one expert
    num_experts: int  # 0: none
    experts_per_token: int
    head_weights: int
    embedding_weights: int  # 0 where tied to the head

    @property
    def num_weights(self) -> int:
        layer = self.dense_weights + self.expert_weights * self.num_experts
        return layer * self.num_layers + self.head_weights + self.embedding_weights

    @property
    def model_flops(self) -> float:
        """Forward matrix products of one token over the whole model, attention left out."""
        return (self.dense_flops + self.expert_flops) * self.num_layers + self.head_flops

    def experts_met(self, tokens: float) -> float:
        """Distinct experts that `tokens` tokens take, if they choose evenly: E * (1 - (1 - k/E)^tokens)."""
        if not self.num_experts:
            return 0.0
        return self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** tokens)


def model_work(spec: ModelSpec) -> ModelWork:
    """The counts of a model of the supported families."""
    hidden, query, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    projections = hidden * (query + 2 * kv) + query * hidden
    moe = spec.moe
    # two norms and two residual sums read and write the stream; rotary reads and writes queries and keys
    moved = 10 * hidden + 2 * (query + kv)
    if moe is None:
        mlp = 3 * hidden * spec.ffn_size
        dense, expert, router, active_ffn = projections + mlp, 0, 0, spec.ffn_size
    else:
        expert, router = 3 * hidden * moe.expert_ffn_size, hidden * moe.num_experts
        dense, active_ffn = projections + router, moe.expert_ffn_size * moe.experts_per_token
        # each chosen expert's copy of the stream is gathered and scattered again
        moved += 4 * hidden * moe.experts_per_token
    active = expert * moe.experts_per_token if moe else 0
    return ModelWork(
        num_layers=spec.num_layers,
        hidden_size=hidden,
        dense_flops=2.0 * (dense - router),
        expert_flops=2.0 * (active + router),
        attention_flops=4.0 * query,
        moved_elements=moved + 3 * active_ffn,
        routed_elements=float(hidden * moe.experts_per_token) if moe else 0.0,
        head_flops=2.0 * hidden * spec.vocab_size,
        kv_elements=2 * kv,
        dense_weights=dense,
        expert_weights=expert,
        num_experts=moe.num_experts if moe else 0,
        experts_per_token=moe.experts_per_token if moe else 0,
        head_weights=hidden * spec.vocab_size,
        embedding_weights=0 if spec.tied else hidden * spec.vocab_size,
    )
