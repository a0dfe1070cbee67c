"""A trainer whose engines run on other hosts. Does what it reads, line by line, and prints a JSON line about each.

Run as `python -m tests.helpers.remote_trainer SETTINGS`, JSON with `hosts`, `replicas`, `secret_file`, `old`, `new`
(two models of one shape), `logs` and `timeout_s`. The first line comes once the engines run on `old`.
`push N` and `confuse N` send the weights of `new` as version N, but with `confuse` the last replica expects another
version, and so refuses what arrives; `generate` asks each replica for one completion.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_rl.errors import MegatronRLError
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.stages import EngineConfig
from megatron_rl.rollout.engine import GenerateRequest
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.rollout.weight_sync import WeightSync
from tests.helpers.engine import rank_params

PROMPT = [3, 7, 9, 11, 250]


class Trainer:
    """One rank, the engines, and the transfer between them."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        spec, layout = ModelSpec.from_hf(settings["old"]), ParallelLayout()
        self._config = EngineConfig(
            hosts=tuple(settings["hosts"]), replicas=settings["replicas"], max_concurrent=8,
            secret_file=settings["secret_file"], request_timeout_s=settings["timeout_s"], bucket_mib=1,
        )  # fmt: skip
        params = rank_params(spec, layout, 0, load_file(Path(settings["new"]) / "model.safetensors"))
        self.engine = VllmEngine.start(
            self._config, hf_path=settings["old"], dtype="float32", spec=spec, max_model_len=64, seed=1,
            log_dir=settings["logs"],
        )  # fmt: skip
        self._sync = WeightSync(
            lambda: params, spec=spec, layout=layout, rank=0, engine=self.engine, config=self._config,
            dtype=torch.float32,
        )  # fmt: skip

    def do(self, word: str, *numbers: str) -> Any:
        if word == "generate":
            requests = [
                GenerateRequest(prompt_token_ids=PROMPT, seed=seed, max_tokens=8, temperature=1.0)
                for seed in range(self._config.replicas)
            ]
            return [
                {
                    "token_ids": each.token_ids,
                    "logprobs": each.logprobs,
                    "weight_version": each.weight_version,
                }
                for each in self.engine.generate(requests)
            ]
        last = self.engine._replicas[-1]
        ask = last.ask

        def ask_for_another(cmd: str, **fields: Any) -> Any:
            return ask(cmd, **fields | ({"weight_version": 99} if cmd == "receive" else {}))

        last.ask = ask_for_another if word == "confuse" else ask  # type: ignore[method-assign]
        try:
            return asdict(self._sync.push(int(numbers[0])))
        finally:
            last.ask = ask  # type: ignore[method-assign]


def main(settings: str) -> None:
    trainer = Trainer(json.loads(settings))
    with trainer.engine:
        print(json.dumps({"pids": trainer.engine.pids, "nodes": trainer.engine.worker_nodes()}), flush=True)
        for line in sys.stdin:
            began, answer = time.monotonic(), {}
            try:
                answer["result"] = trainer.do(*line.split())
            except MegatronRLError as error:
                answer["error"] = str(error)
            print(json.dumps({**answer, "seconds": time.monotonic() - began}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
