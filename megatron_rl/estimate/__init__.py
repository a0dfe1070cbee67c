"""Memory and time of a recipe before anything starts: arithmetic on what the recipe, the model and a GPU are."""
