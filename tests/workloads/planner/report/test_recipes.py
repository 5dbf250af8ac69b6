"""Recipes name their sources, and their meshes are those of the devices."""

from parbench.workloads.mesh.dims import ParallelDims
from parbench.workloads.planner.report.recipes import RECIPES


def test_recipe_meshes_have_the_devices() -> None:
    for recipe in RECIPES:
        assert recipe.source.startswith("arXiv")
        if recipe.mesh:
            assert ParallelDims.parse(recipe.mesh).ranks == int(recipe.devices.split()[0])
