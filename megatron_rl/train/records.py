"""What a run leaves in its directory, written by one rank: metrics, board events, rollouts, evaluations, transfers.

Whole files appear at once (written beside, then renamed); lines are flushed one by one. JSON stays valid: a
number that is not finite becomes null and is counted in the next line of metrics.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megatron_rl.data.types import Rollout
from megatron_rl.errors import DataError, TrainingError
from megatron_rl.evaluation.result import EvalResult
from megatron_rl.train.board import Board
from megatron_rl.train.files import (
    append_whole,
    read_jsonl,
    remove_partial,
    to_json,
    write_atomically,
    writing,
)

METRICS_FILE = "metrics.jsonl"
EVAL_FILE = "eval.jsonl"
PARITY_FILE = "parity.json"
LOAD_FILE = "load.json"
RECIPE_FILE = "recipe.resolved.yaml"
STARTS_FILE = "starts.jsonl"
ROLLOUTS = "rollouts"
TOKENS_PREFIX = "tokens_iter_"
BOARD = "tensorboard"
_MAX_SHORT_CHARS = 2000
NOT_FINITE = "records/not_finite"
_FIXED_KEYS = ("stage", "iteration", "step", "time_s")


class RunRecords:
    """The run directory. The step axis counts on over all stages and never goes backwards.

    `last_step` and `last_iteration` (RL iterations of all stages) are those of the checkpoint that a run continues
    from: later lines and rollouts are dropped, since they will be written again. Without them, a directory that
    already holds steps is continued after its last one. Whatever cannot be written is a TrainingError naming it.
    """

    def __init__(
        self, run_dir: Path | str, *, last_step: int | None = None, last_iteration: int | None = None
    ) -> None:
        self.run_dir = Path(run_dir)
        with writing(self.run_dir):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            for directory in (self.run_dir, self.run_dir / ROLLOUTS):
                remove_partial(directory)
            with _reading(self.run_dir / METRICS_FILE):
                kept = _keep_lines(self.run_dir / METRICS_FILE, last_step)
            with _reading(self.run_dir / EVAL_FILE):
                _keep_evals(self.run_dir / EVAL_FILE, last_step)
            with _reading(self.run_dir / STARTS_FILE):
                _keep_lines(self.run_dir / STARTS_FILE, last_step)
            _keep_rollouts(self.run_dir / ROLLOUTS, last_iteration)
            with _reading(self.run_dir / PARITY_FILE):
                self._syncs = _keep_syncs(self.run_dir / PARITY_FILE, last_step)
            self._metrics: IO[bytes] = (self.run_dir / METRICS_FILE).open("ab", buffering=0)
        self._last_step = int(kept[-1]["step"]) if kept else -1
        self._started = time.monotonic() - (float(kept[-1]["time_s"] or 0.0) if kept else 0.0)
        self._is_continued = last_step is not None or bool(kept)
        self._board = Board(
            self.run_dir / BOARD, purge_step=self._last_step + 1 if self._is_continued else None
        )
        self._num_not_finite = 0  # since the last line of metrics
        # of the rollouts of the step that is logged next
        self._histograms: dict[str, list[float]] = {}
        self._texts: dict[str, str] = {}

    def log_step(
        self,
        metrics: Mapping[str, float],
        *,
        stage: str,
        iteration: int,
        step: int,
    ) -> int:
        """One line of metrics.jsonl and one point per number on the board.

        Returns how many numbers were not finite in this line and in what was written since the one before; if
        there are any, the line says so as well. Raises TrainingError for a step that is not beyond the last one.
        """
        if step <= self._last_step:
            raise TrainingError(
                f"records: step {step} after step {self._last_step}; steps must go up over all stages"
            )
        clash = [name for name in metrics if name in _FIXED_KEYS]
        if clash:
            raise TrainingError(f"records: metric {clash[0]!r} has the name of a fixed key; rename it")
        line: dict[str, Any] = {
            "stage": stage,
            "iteration": iteration,
            "step": step,
            "time_s": round(time.monotonic() - self._started, 3),
        }
        for name, value in metrics.items():
            line[name] = self._finite(float(value))
        points = {name: line[name] for name in metrics if line[name] is not None}
        not_finite, self._num_not_finite = self._num_not_finite, 0
        if not_finite:
            line[NOT_FINITE] = points[NOT_FINITE] = not_finite
        self._note_start(step)
        with writing(self.run_dir / METRICS_FILE):
            self._append(self._metrics, line)
        with writing(self.run_dir / BOARD):
            self._board.add(points, step=step, histograms=self._histograms, texts=self._texts)
        self._histograms, self._texts = {}, {}
        self._last_step = step
        return not_finite

    @property
    def last_step(self) -> int:
        """The latest step that was logged; -1 before the first."""
        return self._last_step

    def missing_up_to(self, step: int) -> str:
        """Says which steps up to that of a checkpoint have no line, since no run makes them again; empty: none."""
        last = max(0, self._last_step)
        if last >= step:
            return ""
        return (
            f"{METRICS_FILE} ends at step {last} and the checkpoint is of step {step}: what is between was removed, or "
            "lost with a machine, and is not made again"
        )

    def write_eval(self, result: EvalResult, *, stage: str = "", board: bool = False) -> None:
        """One line of eval.jsonl, at the latest logged step.

        Its numbers belong into the `log_step` of that step (`result.metrics()`), which puts them on the board;
        `board` does so for an evaluation that belongs to no step; one that a stage makes again is shown once.
        Accuracy by difficulty is on the board alone.
        """
        line = {"stage": stage, "step": self._last_step, **result.to_json()}
        path = self.run_dir / EVAL_FILE
        with writing(path), path.open("ab", buffering=0) as stream:
            self._append(stream, line)
        points = {f"eval/{result.name}/difficulty {one.label}": one.avg_at_k for one in result.bands()}
        points |= result.metrics() if board else {}
        points = {name: value for name, value in points.items() if math.isfinite(value)}
        with writing(self.run_dir / BOARD):
            self._board.add_once(points, step=max(0, self._last_step))

    def write_rollouts(self, iteration: int, rollouts: Sequence[Rollout]) -> Path:
        """rollouts/iter_000012.jsonl, one line per rollout; the next `log_step` shows some of it on the board."""
        path = self.run_dir / ROLLOUTS / f"iter_{iteration:06d}.jsonl"
        lines = [to_json(self._clean(_rollout_line(rollout))) for rollout in rollouts]
        self._replace(path, b"".join(line + b"\n" for line in lines))
        self._histograms = {
            "rollout/response_tokens": [float(len(rollout.completion.token_ids)) for rollout in rollouts],
            "reward/score": [score for r in rollouts if math.isfinite(score := r.reward.score)],
        }
        self._texts = {"rollout/first": _shown(rollouts[0])} if rollouts else {}
        return path

    def write_tokens(self, iteration: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """rollouts/tokens_iter_000012.jsonl: what is known of each token of a few rollouts, one line per rollout."""
        path = self.run_dir / ROLLOUTS / f"{TOKENS_PREFIX}{iteration:06d}.jsonl"
        self._replace(path, b"".join(to_json(self._clean(line)) + b"\n" for line in lines))

    def write_recipe(self, text: str) -> None:
        """recipe.resolved.yaml."""
        self._replace(self.run_dir / RECIPE_FILE, text.encode("utf-8"))

    def write_load(self, report: Mapping[str, Any]) -> None:
        """load.json: what the checkpoint that the run began with gave."""
        self._replace(self.run_dir / LOAD_FILE, to_json(self._clean(report), indent=1) + b"\n")

    def write_plan(self, plan: str) -> None:
        """plan.json: how weights travel from trainer ranks to engine ranks; `plan` is JSON text already."""
        self._replace(self.run_dir / "plan.json", plan.encode("utf-8") + b"\n")

    def write_sync(self, record: Mapping[str, Any], *, stage: str, iteration: int, step: int) -> None:
        """One more weight transfer in parity.json, a list of them that is complete at any moment.

        A `weight_version` that the stage has recorded already, which a resumed run transfers again, replaces the
        record.
        """
        entry = {"stage": stage, "iteration": iteration, "step": step, **self._clean(record)}
        key = (stage, entry["weight_version"])
        kept = [each for each in self._syncs if (each["stage"], each["weight_version"]) != key]
        self._syncs = [*kept, entry]
        self._replace(self.run_dir / PARITY_FILE, _sync_lines(self._syncs))

    def close(self) -> None:
        """Safe to call twice."""
        self._metrics.close()
        self._board.close()

    def _note_start(self, step: int) -> None:
        """starts.jsonl: with which step the run was taken up again, and when. Nothing before a first step is made."""
        if self._is_continued:
            self._is_continued = False
            path = self.run_dir / STARTS_FILE
            with writing(path), path.open("ab", buffering=0) as stream:
                self._append(stream, {"step": step, "time": time.strftime("%Y-%m-%d %H:%M:%S %z")})

    def _append(self, stream: IO[bytes], line: Mapping[str, Any]) -> None:
        append_whole(stream, to_json(self._clean(line)) + b"\n")

    def _replace(self, path: Path, content: bytes) -> None:
        with writing(path):
            write_atomically(path, content)

    def _finite(self, value: float) -> float | None:
        if math.isfinite(value):
            return value
        self._num_not_finite += 1
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


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What an earlier start wrote, and somebody else or a crash of the machine may have changed since."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as fault:
        raise DataError(
            f"{path}: is not as a run writes it ({type(fault).__name__}: {fault}); mend it or move it away"
        ) from None


def _keep_lines(path: Path, last_step: int | None) -> list[dict[str, Any]]:
    """Lines up to `last_step`; the file is rewritten to hold just those."""
    lines = read_jsonl(path)
    kept = lines if last_step is None else [line for line in lines if int(line["step"]) <= last_step]
    _rewrite(path, kept)
    return kept


def _keep_evals(path: Path, last_step: int | None) -> None:
    """As `_keep_lines`, without the evaluation before the first iteration of a stage that begins again."""
    kept = _keep_lines(path, last_step)
    if last_step is not None:
        _rewrite(path, [line for line in kept if line["iteration"] or max(0, line["step"]) < last_step])


def _keep_syncs(path: Path, last_step: int | None) -> list[dict[str, Any]]:
    """Transfers up to `last_step`; the file is rewritten to hold just those."""
    if not path.exists():
        return []
    syncs = json.loads(path.read_bytes())
    kept = [sync for sync in syncs if last_step is None or sync["step"] <= last_step]
    if len(kept) < len(syncs):
        write_atomically(path, _sync_lines(kept))
    return kept


def _sync_lines(syncs: Sequence[Mapping[str, Any]]) -> bytes:
    """A JSON list with one transfer per line."""
    return b"[\n" + b",\n".join(map(to_json, syncs)) + b"\n]\n"


def _keep_rollouts(folder: Path, last_iteration: int | None) -> None:
    if last_iteration is None:
        return
    for path in folder.glob("*iter_*.jsonl"):
        number = path.stem.removeprefix(TOKENS_PREFIX).removeprefix("iter_")
        if number.isdecimal() and int(number) > last_iteration:
            path.unlink()


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
        "gold": _short(rollout.prompt.answer),
        # tokens and weight version of each part, where several versions sampled it
        **({"version_runs": rollout.completion.version_runs} if rollout.completion.version_runs else {}),
    }


def _shown(rollout: Rollout) -> str:
    line = _rollout_line(rollout)
    head = f"reward {line['reward']}, {line['verdict']}, {line['num_tokens']} tokens"
    return f"{head}\n\n{line['prompt']}\n\n{rollout.text[:_MAX_SHORT_CHARS]}"


def _short(gold: Any) -> str:
    """The gold as text; of the tests of a program, which may be thousands, the beginning."""
    text = gold if isinstance(gold, str) else json.dumps(gold, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_SHORT_CHARS else f"{text[:_MAX_SHORT_CHARS]} [...]"
