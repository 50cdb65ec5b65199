"""The list of methods agrees with the settings of the baselines, and gives every method what recipes ask for."""

from dataclasses import fields

from comera.baselines import (
    BASELINES,
    COMMON_METHODS,
    LINEAR_METHODS,
    METHODS,
    TABLE_METHODS,
    TOKEN_METHODS,
    BaselineConfig,
    has_own_layers,
    installed,
    rates_by_method,
)
from comera.baselines.embedding_tables import TABLES
from comera.trainer.config import TrainConfig


def test_every_method_is_listed_once_and_every_baseline_has_settings() -> None:
    assert len(set(METHODS)) == len(METHODS)
    assert METHODS[:2] == ("comera", "dense")
    assert (*LINEAR_METHODS[2:], *TOKEN_METHODS) == BASELINES == tuple(field.name for field in fields(BaselineConfig))
    for method in BASELINES:
        package = BaselineConfig()[method].package
        assert package is None or package.method == method
    assert all(installed(method) for method in ("comera", "dense", "lte", "cola", "narrow"))
    assert (*COMMON_METHODS, "narrow") == LINEAR_METHODS
    assert (*LINEAR_METHODS, *TOKEN_METHODS, *TABLE_METHODS) == METHODS
    assert tuple(TABLES) == TABLE_METHODS
    assert all(installed(method) for method in TABLE_METHODS)


def test_rates_follow_from_those_of_comera_and_dense() -> None:
    comera = TrainConfig(steps=5, lr=3e-4, core_lr=1.5e-3, warmup=0.1)
    dense = TrainConfig(steps=7, lr=1e-4)
    rates = rates_by_method(comera, dense)
    assert tuple(rates) == (*LINEAR_METHODS, *TOKEN_METHODS)
    assert (rates["comera"], rates["dense"]) == (comera, dense)
    assert {method: (rates[method].lr, rates[method].core_lr) for method in BASELINES} == {
        "galore": (1e-4, 1e-3),
        "lte": (1e-4, 1e-5),
        "cola": (1e-4, 5e-4),
        "tensorly": (3e-4, 1.5e-3),
        **dict.fromkeys(("narrow", *TOKEN_METHODS), (1e-4, 1e-4)),
    }
    assert {rates[method].steps for method in BASELINES} == {7}


def test_methods_with_layers_of_their_own() -> None:
    assert [method for method in METHODS if has_own_layers(method)] == [
        *("lte", "cola", "tensorly"),
        *TOKEN_METHODS,
        *TABLE_METHODS,
    ]
