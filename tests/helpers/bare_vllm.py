"""What a live vLLM does on CPU when weights are updated through its own interface, without our defences; then with.

Run as `python -m tests.helpers.bare_vllm OLD NEW` on two models of `write_qwen2(..., tied=True)`; prints one JSON
object. NaN stands there for log-probs that are no numbers.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

PROMPT = [(7 * i) % 251 for i in range(100)]
FAIL_AFTER = 9  # tensors in the order of their names: keys are there by then, queries and values are not
DROPPED = "model.layers.1.self_attn.k_proj.weight"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1", "VLLM_PLUGINS": "",
}  # fmt: skip


def stored(
    path: str, *, without: str | None = None, fail_after: int | None = None
) -> Iterator[tuple[str, Any]]:
    """Every tensor of a model directory, but for `without`; raises once `fail_after` are out."""
    with safe_open(Path(path) / "model.safetensors", "pt") as file:
        for number, name in enumerate(sorted(file.keys())):
            if number == fail_after:
                raise ConnectionError("the sender is gone")
            if name != without:
                yield name, file.get_tensor(name)


def build(path: str) -> Any:
    """An engine whose backend does what vLLM's own ones do: layerwise reload, `load_weights`, finish."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class Init(WeightTransferInitInfo):
        pass

    @dataclass
    class Update(WeightTransferUpdateInfo):
        path: str
        without: str | None = None
        fail_after: int | None = None

    class Bare(WeightTransferEngine[Init, Update]):
        init_info_cls = Init
        update_info_cls = Update

        def init_transfer_engine(self, init_info: Init) -> None:
            pass

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Update) -> None:
            model: Any = self.model
            model.load_weights(
                stored(update_info.path, without=update_info.without, fail_after=update_info.fail_after)
            )

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

    gc.freeze()
    WeightTransferEngineFactory.register_engine("bare", Bare)
    llm = LLM(
        model=path, dtype="float32", max_model_len=160, max_num_seqs=8, skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs", disable_log_stats=True, enforce_eager=True, block_size=32,
        weight_transfer_config=WeightTransferConfig(backend="bare"),
    )  # fmt: skip
    llm.init_weight_transfer_engine({"init_info": {}})
    return llm


class Bench:
    """One engine, and the two models by log-probs of transformers."""

    def __init__(self, old: str, new: str) -> None:
        from tests.helpers.engine import hf_logprobs

        self.old, self.new, self._hf_logprobs = old, new, hf_logprobs
        self.llm = build(old)

    def update(self, path: str, **options: Any) -> None:
        """Through vLLM's own calls."""
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"path": path, **options}})
        self.llm.finish_weight_update()

    def reload(self, path: str, **options: Any) -> None:
        """Through what our receiver does with the tensors that it got."""
        from megatron_rl.rollout.weight_receiver import reload_model

        names = [name for name, _ in stored(path)]
        config = self.llm.llm_engine.model_config
        self.llm.apply_model(
            lambda model: reload_model(
                model, stored(path, **options), model_config=config, names=names, is_tied=True
            )
        )

    def load_plainly(self, path: str) -> None:
        """Into the live parameters, without a layerwise reload."""
        self.llm.apply_model(lambda model: model.load_weights(stored(path)) and None)

    def without_values(self) -> list[str]:
        """Parameters that have no storage."""
        (names,) = self.llm.apply_model(
            lambda model: [name for name, param in model.named_parameters() if param.is_meta]
        )
        return names

    def score_gap(self, path: str) -> float:
        """Of log-probs of the prompt, which no cached prefix takes part in."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        (done,) = self.llm.generate([{"prompt_token_ids": PROMPT}], [params], use_tqdm=False)
        rows = zip(done.prompt_logprobs[1:], PROMPT[1:], strict=True)
        return largest(self._hf_logprobs(Path(path), PROMPT), [row[token].logprob for row, token in rows])

    def sample_gap(self, path: str) -> float:
        """Of log-probs of tokens sampled after the prompt."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=1.0, max_tokens=8, seed=5, logprobs=0, ignore_eos=True, detokenize=False
        )
        (done,) = self.llm.generate([{"prompt_token_ids": PROMPT}], [params], use_tqdm=False)
        out = done.outputs[0]
        expected = self._hf_logprobs(Path(path), [*PROMPT, *out.token_ids])[len(PROMPT) - 1 :]
        return largest(
            expected, [row[token].logprob for row, token in zip(out.logprobs, out.token_ids, strict=True)]
        )

    def checksums(self) -> dict[str, str]:
        (of_worker,) = self.llm.collective_rpc("compute_weight_checksums")
        return of_worker


def largest(ours: list[float], theirs: list[float]) -> float:
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return math.nan if any(map(math.isnan, gaps)) else max(gaps)


def failure(step: Callable[[], Any]) -> str | None:
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def tied_head_and_checksums(bench: Bench) -> dict[str, Any]:
    before = bench.checksums()
    bench.update(bench.new)
    after = bench.checksums()
    bare = bench.score_gap(bench.new)
    bench.reload(bench.new)
    return {
        "tied_head": {"bare": bare, "ours": bench.score_gap(bench.new)},
        "checksums": {
            "all": sorted(before),
            "changed": [name for name in before if before[name] != after[name]],
        },
    }


def prefix_cache(bench: Bench) -> dict[str, float]:
    bench.reload(bench.old)
    bench.llm.reset_prefix_cache()
    bench.sample_gap(bench.old)
    bench.reload(bench.new)
    kept = bench.sample_gap(bench.new)
    bench.llm.reset_prefix_cache()
    return {"bare": kept, "ours": bench.sample_gap(bench.new)}


def missing_tensor(bench: Bench) -> dict[str, Any]:
    bench.reload(bench.old)
    bare = failure(lambda: bench.update(bench.new, without=DROPPED))
    gap = bench.score_gap(bench.new)
    ours = failure(lambda: bench.reload(bench.new, without=DROPPED))
    bench.reload(bench.new)
    return {"bare": bare, "bare_gap": gap, "ours": ours, "ours_gap_after": bench.score_gap(bench.new)}


def failed_update(bench: Bench) -> dict[str, Any]:
    """The sender is gone in the middle of a fused parameter; then everything is sent again."""
    bench.reload(bench.old)
    ours, left = failure(lambda: bench.reload(bench.new, fail_after=FAIL_AFTER)), bench.without_values()
    bench.reload(bench.new)
    report = {"ours": ours, "ours_without_values": left, "ours_gap": bench.score_gap(bench.new)}
    # last, because no bare engine survives the question
    return report | {
        "bare": failure(lambda: bench.update(bench.old, fail_after=FAIL_AFTER)),
        "bare_without_values": bench.without_values(),
        "bare_retry": failure(lambda: bench.update(bench.old)),
        "bare_answer": failure(lambda: bench.score_gap(bench.old)),
    }


def main(old: str, new: str) -> None:
    os.environ.update(ENVIRONMENT)
    bench = Bench(old, new)
    report = tied_head_and_checksums(bench)
    report["prefix_cache"] = prefix_cache(bench)
    report["missing_tensor"] = missing_tensor(bench)
    report["plain_load"] = failure(lambda: bench.load_plainly(bench.old))
    report["failed_update"] = failed_update(bench)
    print(json.dumps(report), flush=True)
    os._exit(0)  # taking vLLM apart costs seconds


if __name__ == "__main__":
    main(*sys.argv[1:])
