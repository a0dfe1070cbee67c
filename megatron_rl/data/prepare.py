"""One training set out of several sources: verifiable, without repeats, apart from evaluation problems.

Two passes. The first reads every source row by row and spools what stays to disk, so memory holds a digest and a few
numbers of each row; pass rates may be measured on it. The second selects and writes. The same arguments give the same
bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

from megatron_rl.data.curriculum import row_pass_rate
from megatron_rl.data.golds import first_gold, gold_fault
from megatron_rl.data.overlap import EvaluationIndex, normalised, problem_text
from megatron_rl.data.prompts import content_hash, prompts_from_rows
from megatron_rl.data.rows import iter_rows
from megatron_rl.data.types import Prompt
from megatron_rl.data.whole_files import WholeFiles
from megatron_rl.errors import DataError
from megatron_rl.recipe.dataset import DatasetConfig
from megatron_rl.rewards.protocol import Reward, RewardInput

_BATCH = 512  # golds graded at a time
_EXAMPLES = 5  # ids of each reason in the report


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A file of its own for the selected problems whose number lies in [low, high]."""

    name: str
    by: str  # pass_rate or difficulty
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to read, what to leave out, what to write."""

    sources: Sequence[Path]
    against: Sequence[Path] = ()  # evaluation files
    ngram: int = 9  # words
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    difficulties: tuple[float, float] | None = None  # that are sound: rows with another one are left out
    pass_rate: tuple[float, float] | None = None  # problems outside, and those without one, are left out
    limit: int | None = None  # problems, drawn by seed
    seed: int = 1
    cuts: Sequence[Cut] = ()

    def label(self, path: Path) -> str:
        """How reports call a file: its name, or its path where another one has the same name."""
        same = [other for other in (*self.sources, *self.against) if other.name == path.name]
        return path.name if len(same) == 1 else str(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A problem that stayed, with the place of its row in the spool."""

    id: str
    source: str
    offset: int
    key: str  # digest of its normalised text
    difficulty: float | None
    pass_rate: float | None


@dataclass(kw_only=True, slots=True)
class Report:
    """Counts by source and reason; `num_rows` of a source = kept + sum(dropped)."""

    options: Mapping[str, Any]
    num_rows: Counter[str] = field(default_factory=Counter)
    dropped: dict[str, Counter[str]] = field(default_factory=dict)  # source: reason: rows
    examples: dict[str, list[str]] = field(default_factory=dict)  # reason: ids
    kept: Counter[str] = field(default_factory=Counter)
    evaluation: dict[str, int] = field(default_factory=dict)  # file: problems
    contaminated_by: dict[str, int] = field(default_factory=dict)  # file: training problems that overlap
    common_runs: dict[str, int] = field(default_factory=dict)  # words that most of them were found by
    difficulty: dict[str, int] = field(default_factory=dict)
    pass_rate: dict[str, int] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)

    def drop(self, source: str, reason: str, row_id: str) -> None:
        self.dropped.setdefault(source, Counter())[reason] += 1
        listed = self.examples.setdefault(reason, [])
        if len(listed) < _EXAMPLES:
            listed.append(row_id)

    def reasons(self) -> Counter[str]:
        """Rows left out by reason, over all sources."""
        return sum(self.dropped.values(), Counter())


# problems that stayed, as (prompt, row as written) -> pass rate by id
Measure = Callable[[Iterable[Prompt]], Mapping[str, float]]


def prepare(options: Options, out: Path, *, grader: Reward, measure: Measure | None = None) -> Report:
    """Write train.jsonl, a file per cut, dropped.jsonl, report.json and report.txt into `out` once all are complete.

    Raises DataError for a file that cannot be read and when no problem is left.
    """
    from megatron_rl.data.prepare_report import report_data, report_text

    for path in (*options.sources, *options.against):
        next(iter_rows(path), None)
    report = Report(options=_described(options))
    out.mkdir(parents=True, exist_ok=True)
    files = WholeFiles(out)
    try:
        with files.open("spool.jsonl") as spool, files.open("dropped.jsonl") as dropped:
            index = _evaluation_index(options, report)
            entries = list(_first_pass(options, report, spool, dropped, grader, index))
            spool.flush()
            rates = measure(_spooled(files.path("spool.jsonl"), entries)) if measure is not None else {}
            chosen = _selected(options, report, entries, rates, dropped)
        if not chosen:
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(report.reasons().items()))
            raise DataError(
                f"no problem is left of {sum(report.num_rows.values())} rows (dropped: {reasons}); "
                "`megatron-rl data FILE` shows what is read, megatron_rl/data/README.md what the reasons mean"
            )
        _write(options, report, files, chosen, rates)
        report.contaminated_by, report.common_runs = dict(index.hits), dict(index.common_runs.most_common(10))
        files.text("report.json", json.dumps(report_data(report), indent=2) + "\n")
        files.text("report.txt", report_text(report))
        files.keep("spool.jsonl")
    finally:
        files.discard()
    return report


def _evaluation_index(options: Options, report: Report) -> EvaluationIndex:
    index = EvaluationIndex(options.ngram)
    for path in options.against:
        prompts, _, _ = prompts_from_rows(_with_gold(iter_rows(path)))
        for prompt in prompts:
            index.add(problem_text(prompt.messages), name=options.label(path), problem_id=prompt.id)
        report.evaluation[options.label(path)] = len(prompts)
        if not prompts:
            raise DataError(f"{path}: no evaluation problem can be read; `megatron-rl data {path}` says why")
    return index


def _with_gold(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Evaluation files may come without answers: their texts count all the same."""
    for row in rows:
        has_gold = any(row.get(key) is not None for key in ("answer", "final_answer", "expected_answer"))
        is_plain = "reward_model" not in row and "question_content" not in row
        yield {**row, "answer": "?"} if is_plain and not has_gold else row


def _first_pass(
    options: Options,
    report: Report,
    spool: IO[str],
    dropped: IO[str],
    grader: Reward,
    index: EvaluationIndex,
) -> Iterator[Entry]:
    seen_ids: set[str] = set()
    exact: set[str] = set()
    golds: dict[str, str] = {}  # digest of the normalised text: gold of the first that had it
    offset = 0

    def leave_out(source: str, reason: str, row_id: str, detail: str = "") -> None:
        report.drop(source, reason, row_id)
        dropped.write(_line({"id": row_id, "source": source, "reason": reason, "detail": detail}))

    for source in options.sources:
        name = options.label(source)
        readable = _readable(source, name, options.dataset, report, leave_out)
        while batch := list(islice(readable, _BATCH)):
            for prompt, fault in zip(batch, _gold_faults(batch, grader), strict=True):
                text = problem_text(prompt.messages)
                digest, key = content_hash(prompt.messages, prompt.answer), _digest(normalised(text))
                if fault is not None:
                    leave_out(name, fault, prompt.id, repr(prompt.answer)[:200])
                elif not _is_sound(prompt.difficulty, options.difficulties):
                    leave_out(name, "bad_difficulty", prompt.id, str(prompt.difficulty))
                elif digest in exact:
                    leave_out(name, "duplicate", prompt.id)
                elif key in golds:
                    reason = _repeat(golds[key], prompt.answer, grader)
                    leave_out(name, reason, prompt.id, key if reason == "conflicting_answer" else "")
                elif (place := index.find(text)) is not None:
                    leave_out(name, "contaminated", prompt.id, place)
                else:
                    # the id of one source may be taken in another
                    row_id = prompt.id if prompt.id not in seen_ids else f"{prompt.id}-{digest}"
                    row = _line(_row(prompt, row_id, prompt.data_source or source.stem))
                    spool.write(row)
                    yield Entry(
                        id=row_id,
                        source=name,
                        offset=offset,
                        key=key,
                        difficulty=prompt.difficulty,
                        pass_rate=row_pass_rate(prompt),
                    )
                    offset += len(row.encode(errors="backslashreplace"))
                    seen_ids.add(row_id)
                    exact.add(digest)
                    golds[key] = _short(prompt.answer)


def _is_sound(difficulty: float | None, window: tuple[float, float] | None) -> bool:
    return difficulty is None or window is None or window[0] <= difficulty <= window[1]


def _readable(
    source: Path, name: str, dataset: DatasetConfig, report: Report, leave_out: Callable[..., None]
) -> Iterator[Prompt]:
    for number, row in enumerate(iter_rows(source), start=1):
        report.num_rows[name] += 1
        prompts, reasons, _ = prompts_from_rows([row], dataset=dataset, place=f"{source}:{number}")
        yield from prompts
        for reason in reasons:
            leave_out(name, reason, str(row.get("id", f"{name}:{number}")))


def _gold_faults(prompts: Sequence[Prompt], grader: Reward) -> list[str | None]:
    """Of each gold, why it cannot be used: by its form, or because the grader does not take it for itself."""
    faults = [gold_fault(prompt.answer) for prompt in prompts]
    asked = [i for i, fault in enumerate(faults) if fault is None]
    grades = grader.grade(
        [
            RewardInput(answer=prompts[i].answer, text=f"\\boxed{{{first_gold(prompts[i].answer)}}}")
            for i in asked
        ]
    )
    for i, grade in zip(asked, grades, strict=True):
        if grade.verdict is None or not grade.verdict.is_correct():
            faults[i] = "bad_gold"
    return faults


def _repeat(known: str, answer: Any, grader: Reward) -> str:
    """`repeated_text` where the golds agree, else `conflicting_answer`: then both are left out."""
    (grade,) = grader.grade([RewardInput(answer=known, text=f"\\boxed{{{first_gold(answer)}}}")])
    agree = grade.verdict is not None and grade.verdict.is_correct()
    return "repeated_text" if agree else "conflicting_answer"


def _selected(
    options: Options, report: Report, entries: Sequence[Entry], rates: Mapping[str, float], dropped: IO[str]
) -> list[Entry]:
    """Entries in the order of their sources: in the window, without disputed golds, `limit` of them by seed."""
    dropped.flush()
    disputed = {
        line["detail"]
        for line in map(json.loads, _lines_of(dropped))
        if line["reason"] == "conflicting_answer"
    }
    stayed = []

    def leave_out(entry: Entry, reason: str) -> None:
        report.drop(entry.source, reason, entry.id)
        dropped.write(_line({"id": entry.id, "source": entry.source, "reason": reason, "detail": ""}))

    for entry in entries:
        rate = rates.get(entry.id, entry.pass_rate)
        reason = "conflicting_answer" if entry.key in disputed else _outside(options.pass_rate, rate)
        if reason is None:
            stayed.append(entry)
        else:
            leave_out(entry, reason)
    if options.limit is None or len(stayed) <= options.limit:
        return stayed
    drawn = sorted(stayed, key=lambda entry: _digest(f"{options.seed}:{entry.id}"))
    for entry in drawn[options.limit :]:
        leave_out(entry, "over_limit")
    return sorted(drawn[: options.limit], key=lambda entry: entry.offset)


def _outside(window: tuple[float, float] | None, rate: float | None) -> str | None:
    if window is None:
        return None
    if rate is None:
        return "no_pass_rate"
    return "too_hard" if rate < window[0] else "too_easy" if rate > window[1] else None


def _write(
    options: Options, report: Report, files: WholeFiles, chosen: Sequence[Entry], rates: Mapping[str, float]
) -> None:
    from megatron_rl.data.survey import histogram

    with (
        files.path("spool.jsonl").open("rb") as spool,
        files.open("train.jsonl") as train,
    ):
        cuts = {cut.name: files.open(f"{cut.name}.jsonl") for cut in options.cuts}
        report.cuts = dict.fromkeys(cuts, 0)
        for index, entry in enumerate(chosen):
            spool.seek(entry.offset)
            row = json.loads(spool.readline())
            rate = rates.get(entry.id, entry.pass_rate)
            row["extra_info"] = {"index": index} | row["extra_info"]
            if rate is not None:
                row["extra_info"] |= {"pass_rate": rate}
            line = _line(row)
            train.write(line)
            report.kept[entry.source] += 1
            for cut in options.cuts:
                value = rate if cut.by == "pass_rate" else entry.difficulty
                if value is not None and cut.low <= value <= cut.high:
                    cuts[cut.name].write(line)
                    report.cuts[cut.name] += 1
        for stream in cuts.values():
            stream.close()
    report.difficulty = histogram([entry.difficulty for entry in chosen])
    report.pass_rate = histogram([rates.get(entry.id, entry.pass_rate) for entry in chosen])


def _spooled(spool: Path, entries: Sequence[Entry]) -> Iterator[Prompt]:
    with spool.open("rb") as stream:
        for entry in entries:
            stream.seek(entry.offset)
            row = json.loads(stream.readline())
            gold = row["reward_model"]["ground_truth"]
            yield Prompt(id=entry.id, messages=row["prompt"], answer=gold, data_source=row["data_source"])


def _row(prompt: Prompt, row_id: str, source: str) -> dict[str, Any]:
    """In the schema of Klear's MathSub-30K."""
    extra = {} if prompt.difficulty is None else {"difficulty": prompt.difficulty}
    return {
        "id": row_id,
        "data_source": source,
        "prompt": [dict(message) for message in prompt.messages],
        "ability": "math",
        "reward_model": {"ground_truth": prompt.answer, "style": "rule"},
        "extra_info": extra,
    }


def _described(options: Options) -> dict[str, Any]:
    return {
        "sources": [options.label(path) for path in options.sources],
        "against": [options.label(path) for path in options.against],
        "ngram": options.ngram,
        "difficulties": options.difficulties,
        "pass_rate": options.pass_rate,
        "limit": options.limit,
        "seed": options.seed,
    }


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()


def _short(answer: Any) -> str:
    return first_gold(answer)[:500]


def _line(data: Mapping[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False) + "\n"


def _lines_of(stream: IO[str]) -> Iterator[str]:
    with Path(stream.name).open(encoding="utf-8") as again:
        yield from again
