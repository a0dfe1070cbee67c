"""From the user's recipe to the one that a proof runs, as a file in the proof's directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.load import LoadedRecipe, load_recipe
from megatron_rl.recipe.origins import format_resolved, leaves
from megatron_rl.recipe.resolve import check_recipe, smallest_world
from megatron_rl.recipe.schema import Recipe
from megatron_rl.verify.place import say
from megatron_rl.verify.shorten import shorten

RECIPE_FILE = "recipe.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A recipe that has passed `check`, and its file."""

    recipe: Recipe
    path: Path
    place: Path
    world_size: int  # processes that it is run on


def prepare(
    source: str,
    overrides: Sequence[str],
    place: Path,
    *,
    shrink: bool,
    trains: bool = False,
    layouts: Sequence[ParallelLayout] = (),
) -> Prepared:
    """Load, shorten, shrink if asked for, and check. `trains`: the whole run is made, not a part of it.

    Raises RecipeError, DataError or ModelError for what cannot be used.
    """
    loaded = load_recipe(source, overrides)
    recipe = shorten(loaded.recipe) if trains else loaded.recipe
    if shrink:
        # needs torch, whose import takes seconds: a mistyped recipe is told of at once
        from megatron_rl.verify.shrink import shrink as shrunk

        small, changes = shrunk(recipe, place, layouts=layouts, trains=trains)
        say(f"shrunk: {len(changes)} changes")
        print("\n".join(f"          {change}" for change in changes), flush=True)
        recipe = small
    else:
        check_recipe(loaded, world_size=smallest_world(recipe))
        recipe = _with_hf_weights(recipe, place) if not trains else recipe
    return write_recipe(recipe, place)


def write_recipe(recipe: Recipe, place: Path, *, world_size: int | None = None) -> Prepared:
    """Write the recipe below `place` and check it as a run would; by default on the fewest processes.

    Raises RecipeError.
    """
    path, nproc = place / RECIPE_FILE, world_size or smallest_world(recipe)
    origins = {".".join(keys): "file" for keys, _ in leaves(recipe)}
    path.write_text(format_resolved(recipe, origins), encoding="utf-8")  # type: ignore[arg-type]
    loaded: LoadedRecipe = load_recipe(path)
    check_recipe(loaded, world_size=nproc)
    return Prepared(recipe=loaded.recipe, path=path, place=place, world_size=nproc)


def _with_hf_weights(recipe: Recipe, place: Path) -> Recipe:
    """The weights of model.checkpoint as a Hugging Face directory, which is what proofs read."""
    if recipe.model.checkpoint is None:
        return recipe
    from megatron_rl.model.convert import export_hf, open_model

    out = place / "model"
    with open_model(Path(recipe.model.checkpoint), hf_source=Path(recipe.model.hf_path)) as model:
        export_hf(model, out)
    return replace(recipe, model=replace(recipe.model, hf_path=str(out), checkpoint=None))
