"""Compile the kernels for a GPU that need not be here, and compare what they ask of it with what is expected.

    kernel_gates.py                    check against kernels/gates/expected/*.json
    kernel_gates.py --update           write them anew (the rules below still hold)
    kernel_gates.py --venv DIR         check the rules with another Triton, in an environment made in DIR

Every kernel is compiled as production launches it (kernels/gates/calls.py). Figures of the same sources and the same
Triton come from a cache. Exit code 0: as expected; 1: a rule is broken or a figure differs; 2: nothing was compiled.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import venv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GATES = ROOT / "kernels" / "gates"
EXPECTED = GATES / "expected"
CACHE = Path.home() / ".cache" / "megatron_rl_kernels" / "gates"
TIMEOUT_S = 1200

SM_90 = 90
MAX_SHARED_BYTES, MAX_REGISTERS = 227 * 1024, 255
# what the forward with entropy may keep there between its two halves of a tile
MAX_PRODUCT_STACK_BYTES = 160
# kernels for which wide loads have no meaning, and why
NARROW = {
    "group_advantage.group_kernel": "a group is a handful of rewards",
    "logprob_from_logits.merge_kernel": "5 numbers for each row of each shard",
    "policy_loss.merge_parts_kernel": "one number for each block of tokens",
    "policy_loss.sequence_log_ratio_kernel": "a sequence starts at any token",
}
# a pinned compiler gives the same code; registers may follow small changes of a kernel
TOLERANCE = {"registers": 8}

Figures = dict[str, int]


class NothingCompiled(Exception):
    """The compiler's process did not give figures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """One kernel in one configuration, as kernels/gates/measure.py reports it."""

    op: str
    kernel: str
    config: str
    is_product: bool
    seconds: float
    figures: Figures

    @property
    def where(self) -> str:
        return f"{self.kernel} [{self.config}]"

    @property
    def is_float32(self) -> bool:
        """Products of float32 are exact here, which no tensor core makes."""
        return "bf16" not in self.config and "fp16" not in self.config


def broken_rules(launched: Launched) -> Iterator[str]:
    """What no expectation excuses."""
    found = launched.figures
    if found["shared_bytes"] > MAX_SHARED_BYTES:
        yield f"shared_bytes = {found['shared_bytes']}, an SM of sm_90 gives a block {MAX_SHARED_BYTES}"
    if found["registers"] > MAX_REGISTERS:
        yield f"registers = {found['registers']}, a thread has {MAX_REGISTERS}"
    if found["fp64"]:
        yield f"{found['fp64']} float64 instructions; a Python float has met a tensor of float64"
    if found["tf32"]:
        yield f"{found['tf32']} tf32 instructions; pass input_precision to the product"
    if launched.is_product:
        if not launched.is_float32 and not found["hgmma"]:
            yield "no HGMMA: the tensor cores of sm_90 are not used"
        if found["hmma"]:
            yield f"{found['hmma']} HMMA, the slow way to the tensor cores of sm_90"
        if found["stack_bytes"] > MAX_PRODUCT_STACK_BYTES:
            yield f"stack_bytes = {found['stack_bytes']}, at most {MAX_PRODUCT_STACK_BYTES}: use a smaller tile"
        return
    if found["stack_bytes"]:
        yield f"stack_bytes = {found['stack_bytes']}, must be 0: use smaller blocks or more warps"
    if launched.kernel not in NARROW and not found["loads_16_bytes"]:
        yield "no load of 16 bytes: an alignment is not promised, or lanes read with a stride"


def differences(launched: Launched, wanted: Figures, tolerance: Mapping[str, int]) -> Iterator[str]:
    for name, want in wanted.items():
        got = launched.figures.get(name)
        allowed = tolerance.get(name, 0)
        if got is None or abs(got - want) > allowed:
            yield f"{name} = {got}, expected {want}" + (f" +- {allowed}" if allowed else "")


def measured(python: Path, capability: int, op: str | None) -> dict[str, Any]:
    """Figures by the Triton of that Python, from the cache if sources and Triton are the same."""
    path = CACHE / f"{_source_hash(python, capability, op)}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    # a process decides once, at its start, whether Triton compiles or interprets
    command = ["env", "-u", "TRITON_INTERPRET", f"PYTHONPATH={ROOT / 'kernels'}", str(python)]
    command += [str(GATES / "measure.py"), "--capability", str(capability), *(["--op", op] if op else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NothingCompiled(f"no figures within {TIMEOUT_S} s") from error
    if done.returncode:
        raise NothingCompiled(done.stderr.strip() or f"{python} ended with {done.returncode}")
    data: dict[str, Any] = json.loads(done.stdout)
    if not data["failed"]:
        CACHE.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{hashlib.sha256(done.stdout.encode()).hexdigest()[:8]}")
        draft.write_text(done.stdout, encoding="utf-8")
        draft.replace(path)
    return data


def _source_hash(python: Path, capability: int, op: str | None) -> str:
    digest = hashlib.sha256(f"{triton_version(python)} {capability} {op}".encode())
    for base in (ROOT / "kernels" / "megatron_rl_kernels", GATES):
        for path in sorted(base.rglob("*.py")):
            digest.update(f"\0{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def triton_version(python: Path) -> str:
    command = [str(python), "-c", "from importlib.metadata import version; print(version('triton'))"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise NothingCompiled(f"{python} has no Triton: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout.strip()


def make_environment(directory: Path, version: str) -> Path:
    """Python of an environment with that Triton, and everything else as here."""
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", f"triton=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            raise NothingCompiled(f"pip could not install triton=={version} in {directory}: {done.stderr}")
        # behind its own packages on the path: only Triton differs
        own = next(directory.glob("lib/python*/site-packages"))
        here = next(path for path in sys.path if path.endswith("site-packages"))
        (own / "rest.pth").write_text(here + "\n", encoding="utf-8")
    return python


def load_expected() -> dict[str, dict[str, Any]]:
    """Kernel name -> its file."""
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(EXPECTED.glob("*.json"))
    }


def check(
    launched: Sequence[Launched],
    expected: Mapping[str, Mapping[str, Any]],
    *,
    version: str,
    capability: int,
    is_all: bool = True,
) -> list[str]:
    """Problems. Figures are compared where they were written with this Triton for this architecture; that
    something expected is missing is one only where all ops were called. Rules are those of sm_90."""
    judged = launched if capability == SM_90 else ()
    problems = [f"{one.where}: {problem}" for one in judged for problem in broken_rules(one)]
    by_kernel: dict[str, dict[str, Launched]] = {}
    for one in launched:
        by_kernel.setdefault(one.kernel, {})[one.config] = one
    for kernel, configs in by_kernel.items():
        if kernel not in expected:
            problems.append(f"{kernel}: no expectation; run tools/kernel_gates.py --update")
        elif (expected[kernel]["triton"], expected[kernel]["capability"]) == (version, capability):
            problems += _compared(configs, expected[kernel], is_all=is_all)
    if is_all:
        gone = sorted(set(expected) - set(by_kernel))
        problems += [f"{kernel}: expected, not launched; delete its file" for kernel in gone]
    return problems


def _compared(configs: Mapping[str, Launched], file: Mapping[str, Any], *, is_all: bool) -> Iterator[str]:
    """Problems of the configurations of one kernel."""
    wanted = file["configs"]
    for config, one in configs.items():
        if config not in wanted:
            yield f"{one.where}: not expected"
        else:
            yield from (f"{one.where}: {it}" for it in differences(one, wanted[config], file["tolerance"]))
    if is_all:
        stale = (config for config in wanted if config not in configs)
        yield from (f"{file['kernel']} [{config}]: expected, not launched" for config in stale)


def update(launched: Iterable[Launched], *, version: str, capability: int) -> list[Path]:
    """Write an expectation for each kernel; tolerances that were written by hand stay."""
    files: dict[str, dict[str, Any]] = {}
    known = load_expected()
    for one in launched:
        tolerance = known.get(one.kernel, {}).get("tolerance", TOLERANCE)
        head = {"kernel": one.kernel, "op": one.op, "triton": version, "capability": capability}
        file = files.setdefault(one.kernel, {**head, "tolerance": tolerance, "configs": {}})
        file["configs"][one.config] = one.figures
    EXPECTED.mkdir(exist_ok=True)
    paths = []
    for kernel, file in files.items():
        file["configs"] = dict(sorted(file["configs"].items()))
        paths.append(EXPECTED / f"{kernel}.json")
        paths[-1].write_text(json.dumps(file, indent=1) + "\n", encoding="utf-8")
    return paths


def table(launched: Iterable[Launched]) -> Iterator[str]:
    shown = {
        "registers": "reg", "stack_bytes": "stack", "shared_bytes": "shared", "hgmma": "HGMMA", "tma_loads": "TMA",
        "loads_16_bytes": "ld16", "stores_16_bytes": "st16",
    }  # fmt: skip
    yield " ".join(f"{title:>7}" for title in shown.values()) + "  kernel [configuration]"
    for one in launched:
        yield " ".join(f"{one.figures[name]:7}" for name in shown) + f"  {one.where}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare with the expectations (the default)")
    what.add_argument("--update", action="store_true", help="write the expectations")
    parser.add_argument("--only", metavar="NAME", help="an op, or a kernel that has an expectation")
    parser.add_argument(
        "--capability", type=int, choices=(SM_90, 100), default=SM_90, help="default: %(default)s"
    )
    parser.add_argument("--triton-python", type=Path, default=Path(sys.executable), metavar="PATH")
    parser.add_argument(
        "--venv", type=Path, metavar="DIR", help="make an environment with another Triton there"
    )
    parser.add_argument("--triton", default="3.6.0", help="of --venv (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="print problems alone")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    expected = load_expected()
    op = expected.get(args.only, {}).get("op", args.only)
    try:
        python = make_environment(args.venv, args.triton) if args.venv else args.triton_python
        data = measured(python, args.capability, op)
    except NothingCompiled as error:
        print(f"kernel_gates: {error}", file=sys.stderr)
        return 2
    launched = [Launched(**one) for one in data["launched"] if args.only in (None, one["op"], one["kernel"])]
    version, capability = data["triton"], args.capability
    if not args.quiet:
        print(f"Triton {version}, torch {data['torch']}, sm_{capability}", *table(launched), sep="\n")
    problems = [f"{call}: does not compile\n{trace}" for call, trace in data["failed"].items()]
    if args.update:
        # of an op of which a call does not compile, configurations would be lost
        broken = {call.split(":")[0] for call in data["failed"]}
        update((one for one in launched if one.op not in broken), version=version, capability=capability)
        expected = load_expected()
    is_all = args.only is None
    problems += check(launched, expected, version=version, capability=capability, is_all=is_all)
    for problem in problems:
        print(f"kernel_gates: {problem}", file=sys.stderr)
    if not problems and not args.quiet:
        print(
            f"{len(launched)} configurations of {len({one.kernel for one in launched})} kernels: as expected"
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
