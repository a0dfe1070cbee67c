"""What a compiled kernel asks of the GPU, read from its machine code: registers, stack, shared memory, instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton.backends.nvidia as nvidia

TOOL = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
TIMEOUT_S = 60
_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


def figures(kernel: Any) -> dict[str, int]:
    """Figures of a Triton `CompiledKernel`, by the names that expectations use."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _dump("--dump-resource-usage", file.name)
        opcodes = Counter(_LINE.findall(_dump("--dump-sass", file.name)))
    return {
        "registers": _usage(usage, "REG"),
        # spilled registers live there
        "stack_bytes": _usage(usage, "STACK"),
        "shared_bytes": int(kernel.metadata.shared),
        # machine code does not say what an HGMMA multiplies
        "tf32": len(re.findall(r"^\s*(?:@%p\d+ )?w?g?mma\.\S*tf32", kernel.asm["ptx"], re.MULTILINE)),
        **instructions(opcodes),
    }


def instructions(opcodes: Counter[str]) -> dict[str, int]:
    """Counts of the instructions that decide speed or numerics."""

    def count(pattern: str) -> int:
        return sum(number for opcode, number in opcodes.items() if re.search(pattern, opcode))

    return {
        "hgmma": count(r"^HGMMA"),
        "hmma": count(r"^HMMA"),
        "fp64": count(r"^D(ADD|MUL|FMA|SETP|MNMX)\b|\.F64"),
        "tma_loads": count(r"^UTMALDG"),
        "loads_16_bytes": count(r"^(LDG|LDGSTS)\b.*\.128\b"),
        "loads_2_bytes": count(r"^LDG\b.*\.[US]16\b"),
        "stores_16_bytes": count(r"^STG\b.*\.128\b"),
        "spill_stores": count(r"^STL"),
        "spill_loads": count(r"^LDL"),
    }


def _dump(what: str, path: str) -> str:
    done = subprocess.run(
        [str(TOOL), what, path], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    return done.stdout


def _usage(text: str, name: str) -> int:
    found = re.search(rf"\b{name}:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump names no {name} in {text!r}")
    return int(found[1])
