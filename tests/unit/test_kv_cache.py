"""The KV cache of an engine on CPU: what its sequences can fill, within the recipe's bound."""

from megatron_rl.rollout.kv_cache import BLOCK_TOKENS, GIB, kv_cache_bytes
from tests.helpers.engine import qwen2_spec

SPEC = qwen2_spec(tied=True)
# keys and values of one block for one kv head, in float32
HEAD_BLOCK = 2 * SPEC.num_layers * SPEC.head_dim * BLOCK_TOKENS * 4


def size(**changed: int) -> int:
    sizes = {
        "tp": 1,
        "element_bytes": 4,
        "max_model_len": 3 * BLOCK_TOKENS,
        "max_concurrent": 5,
        "limit_gib": 1,
    }
    return kv_cache_bytes(SPEC, **(sizes | changed))


def test_every_sequence_has_room_for_all_its_tokens_and_a_block_to_spare() -> None:
    assert size() == SPEC.num_kv_heads * HEAD_BLOCK * (5 * (3 + 1) + 1)
    assert size(max_model_len=2 * BLOCK_TOKENS + 1) == size()
    assert size(element_bytes=2) * 2 == size()


def test_workers_divide_the_kv_heads_as_far_as_there_are_enough() -> None:
    assert size(tp=SPEC.num_kv_heads) * SPEC.num_kv_heads == size()
    assert size(tp=4 * SPEC.num_kv_heads) == size(tp=SPEC.num_kv_heads)


def test_the_recipe_bounds_it() -> None:
    assert size(max_concurrent=10**9) == GIB
    assert size(max_concurrent=10**9, limit_gib=3) == 3 * GIB
