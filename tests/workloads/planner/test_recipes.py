"""Recipes name their sources, and their meshes can carry their models."""

from parbench.workloads.planner.models import MODELS
from parbench.workloads.planner.recipes import RECIPES, recipe_document


def test_recipes_can_run() -> None:
    for recipe in RECIPES:
        assert recipe.model in MODELS
        assert recipe.source.startswith("arXiv")
        run = recipe.predict()
        if recipe.preset:
            assert run is not None
            assert run.spec.find_broken_rule() is None, recipe.model
            assert 0.1 < run.mfu < 0.7


def test_recipe_table_has_every_model() -> None:
    [table] = recipe_document().parts[0].tables
    models = {"olmo-7b", "deepseek-67b", "yi-34b", "llama3-405b", "gemma2-27b"}
    assert models | {"deepseek-v3", "gpt-175b", "gpt-1t"} == {row[0] for row in table.rows}
