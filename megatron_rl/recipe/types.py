"""Value types of the schema: strict (neither `true` nor `2.5` nor text for an int), with ranges.

Each description ends the sentence "got X, must be ..." of an error message.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

Int = Annotated[int, Field(strict=True, description="a whole number")]
PositiveInt = Annotated[int, Field(strict=True, gt=0, description="a whole number of at least 1")]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0, description="a whole number of at least 0")]
# of processes, threads and the like, each of which costs something
Count = Annotated[
    int, Field(strict=True, gt=0, le=2**16, description="a whole number of at least 1 and at most 65,536")
]
# of engines, whose every worker has a place in the plan of transfers
Replicas = Annotated[
    int, Field(strict=True, gt=0, le=2**12, description="a whole number of at least 1 and at most 4,096")
]
# of prompts, rollouts and samples that are in memory at once
Batch = Annotated[
    int, Field(strict=True, gt=0, le=2**20, description="a whole number of at least 1 and at most 1,048,576")
]
Mebibytes = Annotated[
    int,
    Field(strict=True, gt=0, le=2**30, description="a whole number of at least 1 and at most 1,073,741,824"),
]
WholeGibibytes = Annotated[
    int, Field(strict=True, gt=0, le=2**20, description="a whole number of at least 1 and at most 1,048,576")
]
Gibibytes = Annotated[
    float,
    Field(
        strict=True, gt=0, le=2**20, allow_inf_nan=False, description="a number above 0 and at most 1,048,576"
    ),
]
# tables of rotary frequencies have a row for each
Positions = Annotated[
    int,
    Field(strict=True, gt=0, le=2**27, description="a whole number of at least 1 and at most 134,217,728"),
]
# what numpy takes, and with it vLLM
Seed = Annotated[
    int, Field(strict=True, ge=0, lt=2**32, description="a whole number from 0 to 4,294,967,295")
]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False, description="a number")]
PositiveFloat = Annotated[
    float, Field(strict=True, gt=0, allow_inf_nan=False, description="a number above 0")
]
NonNegativeFloat = Annotated[
    float, Field(strict=True, ge=0, allow_inf_nan=False, description="a number of at least 0")
]
# vLLM raises lower ones to 0.01 without an error, so that trainer and engine would differ
Temperature = Annotated[
    float, Field(strict=True, ge=0.01, le=100, allow_inf_nan=False, description="a number from 0.01 to 100")
]
# of Adam, whose steps are of this size
LearningRate = Annotated[
    float,
    Field(strict=True, gt=0, le=1, allow_inf_nan=False, description="a number above 0 and at most 1"),
]
# to wait for: operating systems take no more than 24 days, in milliseconds
Seconds = Annotated[
    float,
    Field(
        strict=True, gt=0, le=1e6, allow_inf_nan=False, description="a number above 0 and at most 1,000,000"
    ),
]
Fraction = Annotated[
    float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False, description="a number from 0 to below 1")
]
Probability = Annotated[
    float, Field(strict=True, gt=0, le=1, allow_inf_nan=False, description="a number above 0 and at most 1")
]
Share = Annotated[
    float, Field(strict=True, ge=0, le=1, allow_inf_nan=False, description="a number from 0 to 1")
]
Bool = Annotated[bool, Field(strict=True, description="true or false")]
Text = Annotated[str, Field(strict=True, min_length=1, description="text that is not empty")]
# part of a directory name
Name = Annotated[
    str,
    Field(
        strict=True,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        max_length=100,
        description="letters, digits, '_', '-' and '.', starting with a letter or digit, at most 100 of them",
    ),
]
# part of a dotted path or of a metric name, so without dots
Key = Annotated[
    str,
    Field(
        strict=True,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
        max_length=100,
        description="letters, digits, '_' and '-', starting with a letter or digit, at most 100 of them",
    ),
]


def _scalar(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str):
        raise ValueError("no scalar")
    return value


Scalar = Annotated[Any, AfterValidator(_scalar), Field(description="a number, text, true or false")]
