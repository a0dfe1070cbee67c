"""Errors that a user can act on. Each says where, what was got, what is allowed, and what to change.

The command line prints them as one block and exits with code 2; anything else that escapes is a bug of ours.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class MegatronRLError(Exception):
    """Base of every error meant for the user."""


def raise_together(errors: Sequence[MegatronRLError]) -> None:
    """Raise the one there is as it is, several as one that lists them all; nothing where there is none."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        listed = "".join("\n  " + str(error).replace("\n", "\n  ") for error in errors)
        raise MegatronRLError(f"{len(errors)} problems{listed}")


@contextmanager
def kept_in(errors: list[MegatronRLError]) -> Iterator[None]:
    """What goes wrong inside is kept, so that what follows can be looked at too."""
    try:
        yield
    except MegatronRLError as error:
        errors.append(error)


class RecipeError(MegatronRLError):
    """A recipe, or an override of it, that cannot be run."""


class LayoutError(MegatronRLError):
    """Degrees of parallelism that do not fit the world or the model."""


class DataError(MegatronRLError):
    """A data file, a row of it, or a tokenizer that cannot be used."""


class ModelError(MegatronRLError):
    """A Hugging Face directory that cannot become a model."""


class ReshardError(MegatronRLError):
    """Weights that did not arrive completely, or arrived different from what was sent."""


class EngineError(MegatronRLError):
    """A generation engine that did not start, stopped, or answered wrongly."""


class LostEngineError(EngineError):
    """An engine that died or no longer answers: a fresh one in its place can do what this one was asked for."""


class RewardError(MegatronRLError):
    """A reward that could not be computed for reasons that are not the completion's."""


class CheckpointError(MegatronRLError):
    """A checkpoint that cannot be written, or that does not belong to this run."""


class TrainingError(MegatronRLError):
    """A run that must stop: a loss or a gradient that is not finite, or ranks that do not meet."""


class LostPeerError(TrainingError):
    """Another rank stopped or fell silent: a consequence, never the cause to report first."""
