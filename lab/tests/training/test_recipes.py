"""Recipes of trainings."""

import dataclasses

from gramwatch.inputs import networks
from gramwatch_lab import training
from gramwatch_lab.training import objective_of, recipe
from lab.tests.training.small import run


def test_recipes_are_for_networks_that_exist_and_fit_the_loop():
    foreign = {name for name in training.RECIPES if ":" in name}
    assert set(training.RECIPES) - foreign <= set(networks.NETWORKS)
    assert all(networks.record_of(name, 128).shape == (3, 128, 128) for name in foreign)
    for name in networks.NETWORKS:
        assert recipe(name).augment == (networks.NETWORKS[name].shape[0] == 3)
    tuning = recipe("wrn40_2", fine_tuning=True)
    assert (tuning.epochs, tuning.learning_rate) == (10, 0.001)
    run(objective_of("cross_entropy"), **vars(dataclasses.replace(recipe("mlp_300"), epochs=1)))
