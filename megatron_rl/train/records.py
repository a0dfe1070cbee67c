"""What a run leaves in its directory, written by one rank: metrics, board events, rollouts, evaluations.

Whole files appear at once (written beside, then renamed); lines are flushed one by one. JSON stays valid: a
number that is not finite becomes null and is counted.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from megatron_rl.data.types import Rollout
from megatron_rl.errors import TrainingError
from megatron_rl.train.eval_result import EvalResult

METRICS_FILE = "metrics.jsonl"
EVAL_FILE = "eval.jsonl"
RECIPE_FILE = "recipe.resolved.yaml"
_FIXED_KEYS = ("stage", "iteration", "step", "time_s")


class RunRecords:
    """The run directory. The step axis counts on over all stages and never goes backwards.

    `last_step` is the step of the checkpoint that a run continues from: later lines are dropped, since they
    will be written again. Without it, a directory that already holds steps is continued after its last one.
    """

    def __init__(self, run_dir: Path | str, *, last_step: int | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        kept = _keep_lines(self.run_dir / METRICS_FILE, last_step)
        _keep_lines(self.run_dir / EVAL_FILE, last_step)
        self._last_step = int(kept[-1]["step"]) if kept else -1
        self._started = time.monotonic() - (float(kept[-1]["time_s"] or 0.0) if kept else 0.0)
        self._metrics: IO[bytes] = (self.run_dir / METRICS_FILE).open("ab")
        self._board = _open_board(self.run_dir / "tensorboard", purge_step=self._last_step + 1)
        self.num_not_finite = 0

    def log_step(
        self,
        metrics: Mapping[str, float],
        *,
        stage: str,
        iteration: int,
        step: int,
        time_s: float | None = None,
    ) -> None:
        """One line of metrics.jsonl and one point per number on the board.

        `time_s` is seconds since the run began; none: now. Raises TrainingError for a step that is not beyond
        the last one.
        """
        if step <= self._last_step:
            raise TrainingError(
                f"records: step {step} after step {self._last_step}; steps must go up over all stages"
            )
        clash = [name for name in metrics if name in _FIXED_KEYS]
        if clash:
            raise TrainingError(f"records: metric {clash[0]!r} has the name of a fixed key; rename it")
        elapsed = time.monotonic() - self._started if time_s is None else time_s
        line: dict[str, Any] = {
            "stage": stage,
            "iteration": iteration,
            "step": step,
            "time_s": round(elapsed, 3),
        }
        for name, value in metrics.items():
            line[name] = self._finite(float(value))
            if line[name] is not None:
                self._board.add_scalar(name, line[name], global_step=step)
        self._append(self._metrics, line)
        self._board.flush()
        self._last_step = step

    @property
    def last_step(self) -> int:
        """The latest step that was logged; -1 before the first."""
        return self._last_step

    def write_eval(self, result: EvalResult, *, stage: str = "", board: bool = False) -> None:
        """One line of eval.jsonl, at the latest logged step.

        Its numbers belong into the `log_step` of that step (`result.metrics()`), which puts them on the board;
        `board` does so for an evaluation that belongs to no step.
        """
        line = {"stage": stage, "step": self._last_step, **result.to_json()}
        with (self.run_dir / EVAL_FILE).open("ab") as stream:
            self._append(stream, line)
        if board:
            for name, value in result.metrics().items():
                if math.isfinite(value):
                    self._board.add_scalar(name, value, global_step=max(0, self._last_step))
            self._board.flush()

    def write_rollouts(self, iteration: int, rollouts: Sequence[Rollout]) -> Path:
        """rollouts/iter_000012.jsonl, one line per rollout."""
        path = self.run_dir / "rollouts" / f"iter_{iteration:06d}.jsonl"
        lines = [to_json(self._clean(_rollout_line(rollout))) for rollout in rollouts]
        write_atomically(path, b"".join(line + b"\n" for line in lines))
        return path

    def write_recipe(self, text: str) -> None:
        """recipe.resolved.yaml."""
        write_atomically(self.run_dir / RECIPE_FILE, text.encode("utf-8"))

    def write_plan(self, plan: str) -> None:
        """plan.json: how weights travel from trainer ranks to engine ranks; `plan` is JSON text already."""
        write_atomically(self.run_dir / "plan.json", plan.encode("utf-8") + b"\n")

    def write_parity(self, parity: Any) -> None:
        """parity.json: log-probabilities of trainer and engine on one prompt, after the latest transfer."""
        write_atomically(self.run_dir / "parity.json", to_json(self._clean(parity), indent=1) + b"\n")

    def close(self) -> None:
        """Flush and close; safe to call twice."""
        self._metrics.close()
        self._board.close()

    def _append(self, stream: IO[bytes], line: Mapping[str, Any]) -> None:
        stream.write(to_json(self._clean(line)) + b"\n")
        stream.flush()

    def _finite(self, value: float) -> float | None:
        if math.isfinite(value):
            return value
        self.num_not_finite += 1
        return None

    def _clean(self, value: Any) -> Any:
        """`value` with every number that is not finite as None."""
        if isinstance(value, float):
            return self._finite(value)
        if isinstance(value, Mapping):
            return {str(key): self._clean(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._clean(item) for item in value]
        return value


def to_json(value: Any, *, indent: int | None = None) -> bytes:
    """Valid UTF-8 JSON for any text a model can write; lone surrogates stay as escapes."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode("utf-8", errors="backslashreplace")


def write_atomically(path: Path, content: bytes) -> None:
    """The file is either as it was or complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.write_bytes(content)
    os.replace(beside, path)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a file; a last line that was cut off is left out. A missing file has no lines."""
    if not path.exists():
        return []
    raw = path.read_bytes().split(b"\n")
    # what follows the last line break was never finished
    return [json.loads(line) for line in raw[:-1] if line.strip()]


def _keep_lines(path: Path, last_step: int | None) -> list[dict[str, Any]]:
    """Lines up to `last_step`; the file is rewritten to hold just those."""
    lines = read_jsonl(path)
    kept = lines if last_step is None else [line for line in lines if int(line["step"]) <= last_step]
    _rewrite(path, kept)
    return kept


def _rewrite(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    if path.exists():
        write_atomically(path, b"".join(to_json(line) + b"\n" for line in lines))


def _rollout_line(rollout: Rollout) -> dict[str, Any]:
    return {
        "prompt": rollout.prompt.messages[-1].get("content", "") if rollout.prompt.messages else "",
        "completion": rollout.text,
        "reward": rollout.reward.score,
        "parts": dict(rollout.reward.parts),
        "finish": rollout.completion.finish.value,
        "weight_version": rollout.completion.weight_version,
        "verdict": rollout.reward.verdict.value,
        "reason": rollout.reward.reason,
        "prompt_id": rollout.prompt.id,
        "sample_index": rollout.sample_index,
        "difficulty": rollout.prompt.difficulty,
        "num_tokens": len(rollout.completion.token_ids),
    }


def _open_board(folder: Path, *, purge_step: int) -> Any:
    """TensorBoard's writer; points from `purge_step` on are hidden, since they will be written again."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=purge_step if purge_step > 0 else None, flush_secs=10)
