"""Whether vLLM takes the arguments of an engine, asked of a process of its own that starts no engine.

For stages that engines wait behind: a value that vLLM refuses must not cost those before. `python -m
megatron_rl.rollout.vllm_trial` reads the message that an engine would be started with as JSON and answers in one line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from megatron_rl.errors import EngineError
from megatron_rl.platform.parent import end_with_parent
from megatron_rl.rollout.engine_server import one_line
from megatron_rl.rollout.vllm_worker import given_options, llm_arguments, set_environment
from megatron_rl.rollout.wire import Message

_MARK = "vllm trial: "


def refusal(start: Message, *, timeout_s: float) -> str | None:
    """What vLLM says against `engine.vllm` of `start`; None where it takes it, or could not be asked in time."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(start),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return None
    answers = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    said: str | None = json.loads(answers[-1].removeprefix(_MARK)) if answers else None
    return said


def main() -> int:
    end_with_parent()
    start = json.load(sys.stdin)
    set_environment(start)
    print(_MARK + json.dumps(_try(start)), flush=True)
    return 0


def _try(start: Message) -> str | None:
    from vllm.engine.arg_utils import EngineArgs

    try:
        arguments: dict[str, Any] = llm_arguments(start)
        # `LLM` has a spelling of its own for it
        if isinstance(arguments.get("compilation_config"), int):
            del arguments["compilation_config"]
        EngineArgs(**arguments).create_engine_config()
    except EngineError as error:
        return str(error)
    except Exception as error:
        return f"{one_line(error)}; {given_options(start)}"
    return None


if __name__ == "__main__":
    sys.exit(main())
