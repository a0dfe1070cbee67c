"""The other side of bench_loop.py, run by an interpreter that has TRL: one job, read from a JSON file, one result.

Usage: bench_loop_peer.py JOB.json RESULT.json. Nothing of megatron_rl is imported here. A result is a list of steps,
each with its `seconds` and `cpu_seconds`, and the `lengths` or `tokens` that it trained on.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

# what both trainers share: float32 on one thread, nothing written, nothing logged
COMMON = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "logging_steps": 10**9,
    "disable_tqdm": True,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "seed": 1,
}


class Clock(TrainerCallback):
    """Seconds of every optimizer step with all that leads to it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._began = (0.0, 0.0)

    def on_step_begin(self, *_args, **_kwargs) -> None:
        self._began = (time.perf_counter(), time.process_time())

    def on_step_end(self, *_args, **_kwargs) -> None:
        wall, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        self.steps.append({"seconds": wall, "cpu_seconds": cpu})


def grpo(job: dict, out: str) -> list[dict]:
    """One step is an iteration: rollouts of all prompts, one optimizer step over them."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    lengths: list[list[int]] = []

    def coin(completions, completion_ids, **_columns) -> list[float]:
        lengths.append([len(ids) for ids in completion_ids])
        return [float(hashlib.sha256(text.encode()).digest()[0] & 1) for text in completions]

    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    prompts = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for messages in job["prompts"]
    ]
    rollouts, clock = len(prompts) * job["group_size"], Clock()
    config = GRPOConfig(
        output_dir=out,
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=rollouts // job["micro_batch"],
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens"],
        max_steps=job["steps"],
        learning_rate=job["lr"],
        beta=0.0,
        temperature=1.0,
        epsilon=0.2,
        epsilon_high=0.28,
        **COMMON,
    )
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=coin,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    return [step | {"lengths": n} for step, n in zip(clock.steps, lengths, strict=True)]


def sft(job: dict, out: str) -> list[dict]:
    """Plain Trainer over token ids and labels, each micro-batch padded to its longest sample."""
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    rows, clock = job["rows"], Clock()
    tokens: list[int] = []

    def collate(batch: list[dict]) -> dict[str, torch.Tensor]:
        longest = max(len(row["ids"]) for row in batch)
        tokens.append(sum(len(row["ids"]) - 1 for row in batch))
        padding = [longest - len(row["ids"]) for row in batch]
        pairs = list(zip(batch, padding, strict=True))
        return {
            "input_ids": torch.tensor([row["ids"] + [0] * n for row, n in pairs]),
            "attention_mask": torch.tensor([[1] * len(row["ids"]) + [0] * n for row, n in pairs]),
            "labels": torch.tensor([row["labels"] + [-100] * n for row, n in pairs]),
        }

    parts = job["batch"] // job["micro_batch"]
    config = TrainingArguments(
        output_dir=out,
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=parts,
        max_steps=job["steps"],
        learning_rate=job["lr"],
        remove_unused_columns=False,
        **COMMON,
    )
    Trainer(model=model, args=config, train_dataset=rows, data_collator=collate, callbacks=[clock]).train()
    return [
        step | {"tokens": sum(tokens[number * parts : (number + 1) * parts])}
        for number, step in enumerate(clock.steps)
    ]


def main() -> int:
    job_path, result_path = map(Path, sys.argv[1:])
    job = json.loads(job_path.read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    steps = {"grpo": grpo, "sft": sft}[job["kind"]](job, str(result_path.parent / "peer"))
    versions = {name: version(name) for name in ("trl", "transformers", "accelerate", "torch")}
    result_path.write_text(json.dumps({"steps": steps, "versions": versions}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
