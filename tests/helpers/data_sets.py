"""Data sets of Hugging Face's `datasets`, in a folder or as if on the hub: nothing is asked of the network."""

from pathlib import Path
from typing import Any

import datasets
import pytest


def data_set(columns: dict[str, list[Any]], **names: list[str]) -> datasets.Dataset:
    """One of these columns. names: of the labels in a column that holds numbers."""
    made = datasets.Dataset.from_dict(columns)
    features = made.features.copy() | {column: datasets.ClassLabel(names=each) for column, each in names.items()}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def save(folder: Path, splits: datasets.Dataset | dict[str, datasets.Dataset]) -> Path:
    """Write a data set, or one of several splits, as `load_from_disk` reads it."""
    datasets.disable_progress_bars()
    (datasets.DatasetDict(splits) if isinstance(splits, dict) else splits).save_to_disk(folder)
    return folder


def put_on_hub(monkeypatch: pytest.MonkeyPatch, splits: dict[str, datasets.Dataset] | Exception) -> list[str]:
    """Make every name on the hub one of this data set, or an error; returns the names that were asked for."""
    asked: list[str] = []

    def load(name: str, subset: str | None = None) -> datasets.DatasetDict:
        asked.append(name)
        if isinstance(splits, Exception):
            raise splits
        return datasets.DatasetDict(splits)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked
