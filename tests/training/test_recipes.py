"""Recipes of trainings."""

import dataclasses

from gramwatch import networks, training
from gramwatch.training import objective_of, recipe
from tests.training.small import run


def test_recipes_are_for_networks_that_exist_and_fit_the_loop():
    assert set(training.RECIPES) <= set(networks.NETWORKS)
    for name in networks.NETWORKS:
        assert recipe(name).augment == (networks.NETWORKS[name].shape[0] == 3)
    tuning = recipe("wrn40_2", fine_tuning=True)
    assert (tuning.epochs, tuning.learning_rate) == (10, 0.001)
    run(objective_of("cross_entropy"), **vars(dataclasses.replace(recipe("mlp_300"), epochs=1)))
