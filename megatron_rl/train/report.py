"""report.html: one file with the curves, the tables and some rollouts to read; no script, no network."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.evaluation.result import EvalResult, paired_bands
from megatron_rl.train.charts import bar_chart, line_chart
from megatron_rl.train.files import write_atomically
from megatron_rl.train.run_data import RunData, read_run

REPORT_FILE = "report.html"
_NUM_ROLLOUTS = 20
_MAX_TEXT_CHARS = 6000

# chart title: metric and its label; a chart without data is left out
_CHARTS: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("Reward", {"reward/mean": "mean", "reward/std": "standard deviation"}),
    (
        "Groups and cut-offs",
        {"reward/zero_advantage_frac": "zero advantage", "rollout/truncated_frac": "truncated"},
    ),
    ("SFT loss", {"sft/loss": "loss"}),
    ("Policy loss", {"policy/loss": "loss"}),
    ("Learning rate", {"optim/lr": "lr"}),
    ("Gradient norm", {"policy/grad_norm": "policy", "sft/grad_norm": "sft"}),
    ("Entropy", {"policy/entropy": "entropy"}),
    ("Clipped tokens", {"policy/clip_high_frac": "high", "policy/clip_low_frac": "low"}),
    ("Distance from the old policy", {"policy/kl_old": "KL"}),
    (
        "Trainer against engine, log-probs",
        {"mismatch/mean": "mean", "mismatch/p99": "p99", "mismatch/max": "max"},
    ),
    (
        "Trainer against engine after each transfer, fixed prompts",
        {"sync/parity_mean": "mean", "sync/parity_p99": "p99", "sync/parity_max": "max"},
    ),
    ("Response length, tokens", {"rollout/response_tokens_mean": "mean"}),
    ("Tokens per second", {"throughput/tokens_per_s": "tokens/s"}),
)

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1340px;padding:0 1rem}
body{color:#1f2328;background:#fff}
h1{margin-bottom:0}h2{margin-top:2.2rem;border-bottom:1px solid #d0d7de}h3{margin:.2rem 0;font-size:1rem}
.grid{display:flex;flex-wrap:wrap;gap:1.2rem}
.card{border:1px solid #d0d7de;border-radius:6px;padding:.6rem .8rem}
svg{max-width:100%;height:auto}svg text{font-size:11px;fill:#57606a}
.legend span{margin-right:1rem;font-size:.85rem}
.legend i{display:inline-block;width:.8rem;height:.8rem;margin-right:.3rem}
table{border-collapse:collapse}td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #d0d7de}
td:first-child,th:first-child{text-align:left}pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.3rem 0}
details{border:1px solid #d0d7de;border-radius:6px;margin:.4rem 0;padding:.3rem .8rem}
.good{color:#1a7f37}.bad{color:#d1242f}.note{color:#57606a}
"""


def write_report(run_dir: Path | str) -> Path:
    """Write report.html from what the run directory holds so far. Raises DataError if it holds no run."""
    run = read_run(run_dir)
    path = run.run_dir / REPORT_FILE
    write_atomically(path, _page(run).encode("utf-8", errors="xmlcharrefreplace"))
    return path


def _page(run: RunData) -> str:
    name = html.escape(run.run_dir.resolve().name)
    steps = len(run.lines)
    sections = [_evaluations(run), _curves(run), _time(run), _rollouts(run), _recipe(run)]
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{name}</h1>"
        f'<p class="note">{steps} steps, stages: {html.escape(", ".join(run.stages()) or "none")}</p>'
        f"{''.join(sections)}</body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<h2>{html.escape(title)}</h2>{content}" if content else ""


def _card(title: str, content: str) -> str:
    return f'<div class="card"><h3>{html.escape(title)}</h3>{content}</div>' if content else ""


def _evaluations(run: RunData) -> str:
    cards = []
    for name, points in run.eval_sets().items():
        first, last = points[0].result, points[-1].result
        curve = [(float(max(0, point.step)), 100 * point.result.avg_at_k) for point in points]
        cards.append(_card(f"{name}: avg@{last.samples}, %", line_chart({name: curve})))
        cards.append(_card(f"{name}: before and after RL, %", _band_table(first, last)))
        cards.append(_card(f"{name}: other numbers", _number_table(first, last)))
    return _section("Evaluation", f'<div class="grid">{"".join(cards)}</div>' if cards else "")


def _band_table(before: EvalResult, after: EvalResult) -> str:
    rows = []
    for band, other in paired_bands(before, after):
        change = 100 * (other.avg_at_k - band.avg_at_k)
        kind = "good" if change > 0 else "bad" if change < 0 else "note"
        rows.append(
            f"<tr><td>{html.escape(band.label)}</td><td>{band.num_problems}</td>"
            f"<td>{100 * band.avg_at_k:.1f} ± {100 * band.stderr:.1f}</td>"
            f"<td>{100 * other.avg_at_k:.1f} ± {100 * other.stderr:.1f}</td>"
            f'<td class="{kind}">{change:+.1f}</td></tr>'
        )
    head = (
        "<tr><th>difficulty</th><th>problems</th>"
        f"<th>iteration {before.iteration}</th><th>iteration {after.iteration}</th><th>change</th></tr>"
    )
    note = '<p class="note">± is the standard error over problems</p>'
    return f"<table>{head}{''.join(rows)}</table>{note}"


def _number_table(before: EvalResult, after: EvalResult) -> str:
    """pass@k, cons@k, shares of samples and lengths, by the names that they have in metrics.jsonl."""
    prefix = f"eval/{after.name}/"
    old, new = before.metrics(), after.metrics()
    names = [name for name in new if name.removeprefix(prefix) not in ("avg_at_k", "stderr")]
    rows = [
        f"<tr><td>{html.escape(name.removeprefix(prefix))}</td><td>{_number(old.get(name))}</td>"
        f"<td>{_number(new[name])}</td></tr>"
        for name in names
    ]
    head = f"<tr><th></th><th>iteration {before.iteration}</th><th>iteration {after.iteration}</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _curves(run: RunData) -> str:
    cards = [
        _card(title, line_chart({label: run.curve(name) for name, label in metrics.items()}))
        for title, metrics in _CHARTS
    ]
    return _section("Curves", f'<div class="grid">{"".join(cards)}</div>' if any(cards) else "")


def _time(run: RunData) -> str:
    seconds = {name: value for name, value in run.seconds_per_span().items() if value > 0}
    return _section("Time per span", bar_chart(seconds, unit="s"))


def _rollouts(run: RunData) -> str:
    """A spread over the latest iteration, so that right and wrong ones of several prompts are among them."""
    every = max(1, len(run.rollouts) // _NUM_ROLLOUTS)
    shown = run.rollouts[::every][:_NUM_ROLLOUTS]
    return _section("Rollouts of the latest iteration", "".join(map(_rollout, shown)))


def _rollout(line: Mapping[str, Any]) -> str:
    verdict = str(line.get("verdict", ""))
    kind = "good" if verdict == "correct" else "bad"
    parts = ", ".join(f"{name} {value}" for name, value in (line.get("parts") or {}).items())
    head = (
        f"reward {line.get('reward')} · {parts} · {line.get('finish')} · weights {line.get('weight_version')}"
    )
    return (
        f'<details><summary><b class="{kind}">{html.escape(verdict)}</b> {html.escape(head)}'
        f"</summary><h3>Prompt</h3><pre>{_text(line.get('prompt'))}</pre>"
        f"<h3>Completion</h3><pre>{_text(line.get('completion'))}</pre></details>"
    )


def _text(value: Any) -> str:
    """Escaped, and cut in the middle where a page would drown in it; the end holds the answer."""
    text = str(value)
    if len(text) > _MAX_TEXT_CHARS:
        half = _MAX_TEXT_CHARS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
    return html.escape(text)


def _recipe(run: RunData) -> str:
    content = f"<details><summary>resolved recipe</summary><pre>{html.escape(run.recipe)}</pre></details>"
    return _section("Recipe", content if run.recipe else "")
