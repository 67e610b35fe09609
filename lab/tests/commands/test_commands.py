"""The lab joins the library by entry points, and has its version."""

import importlib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from gramwatch.inputs import networks
from gramwatch_lab.datasets import CATALOGUE, SOURCES
from gramwatch_lab.networks import NETWORKS

tomllib = pytest.importorskip("tomllib")
LAB = Path(__file__).parents[2]
PROJECT = tomllib.loads((LAB / "pyproject.toml").read_text(encoding="utf-8"))
POINTS = PROJECT["project"]["entry-points"]


@pytest.mark.parametrize("group", POINTS)
def test_what_the_lab_offers_exists(group):
    for place in POINTS[group].values():
        module, _, name = place.partition(":")
        assert getattr(importlib.import_module(module), name) is not None


@pytest.mark.parametrize("group", POINTS)
def test_the_library_is_offered_it(group):
    offered = {point.name: point.value for point in entry_points(group=group)}
    assert POINTS[group].items() <= offered.items()


def test_sets_and_networks_of_the_lab_have_names_in_the_library():
    assert SOURCES.items() <= CATALOGUE.items()
    assert NETWORKS.items() <= networks.NETWORKS.items()


def test_library_and_lab_have_one_version():
    path = (LAB / PROJECT["tool"]["hatch"]["version"]["path"]).resolve()
    assert path == LAB.parent / "src" / "gramwatch" / "files" / "__init__.py"
