"""Recipes name their sources, and their meshes are those of the devices."""

from parbench.workloads.parallel.dims import ParallelDims
from parbench.workloads.planner.recipes import RECIPES, recipe_document


def test_recipe_meshes_have_the_devices() -> None:
    for recipe in RECIPES:
        assert recipe.source.startswith("arXiv")
        if recipe.mesh:
            assert ParallelDims.parse(recipe.mesh).ranks == int(recipe.devices.split()[0])


def test_recipe_table_has_every_model() -> None:
    [table] = recipe_document().sections[0].tables
    models = {"olmo-7b", "deepseek-67b", "yi-34b", "llama3-405b", "gemma2-27b"}
    assert models | {"deepseek-v3", "gpt-175b", "gpt-1t"} == {
        row["model"] for row in table.rows
    }
