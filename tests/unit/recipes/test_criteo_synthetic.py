"""The synthetic click log: the same rows for a seed, of Criteo's form, with clicks that follow the planted model."""

from pathlib import Path

import numpy as np
import pytest

from comera.recipes.dlrm.criteo import synthetic
from comera.recipes.dlrm.criteo.rows import CriteoRows
from comera.recipes.dlrm.criteo.synthetic import CLICK_RATE, TABLES, ClickLog, Clicks


def log_of(rows: int, seed: int = 0) -> Clicks:
    chunks = list(ClickLog(seed).chunks(rows))
    fields = [np.concatenate([getattr(c, name) for c in chunks], axis=-1) for name in Clicks.__dataclass_fields__]
    return Clicks(*fields)


@pytest.fixture(scope="module")
def log() -> Clicks:
    return log_of(100_000)


def test_a_seed_makes_the_same_rows_and_a_longer_log_begins_with_the_shorter(log: Clicks) -> None:
    for rows in (1, 500, 40_000):
        short = log_of(rows)
        for name in Clicks.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(short, name), getattr(log, name)[..., :rows])
    other = log_of(500, seed=1)
    assert (other.values != log.values[:, :500]).any()
    assert (other.labels != log.labels[:500]).any()


def test_text_is_parsed_into_the_same_rows(log: Clicks, tmp_path: Path) -> None:
    path = ClickLog(0).write(tmp_path / "train.txt", 3000)
    rows = CriteoRows().parse(path.read_bytes())
    assert not rows.bad
    np.testing.assert_array_equal(rows.labels, log.labels[:3000])
    np.testing.assert_array_equal(rows.dense, log.dense()[:, :3000])
    np.testing.assert_array_equal(rows.values, log.values[:, :3000])


def test_clicks_follow_their_probabilities(log: Clicks) -> None:
    assert log.labels.mean() == pytest.approx(CLICK_RATE, abs=0.01)
    tenths = np.minimum((log.probabilities * 10).astype(int), 9)
    for tenth in range(10):
        rows = tenths == tenth
        error = 4 * np.sqrt(log.probabilities[rows].var() + 0.25) / np.sqrt(rows.sum())
        assert log.labels[rows].mean() == pytest.approx(log.probabilities[rows].mean(), abs=error)


def test_the_planted_loss_is_the_least(log: Clicks) -> None:
    entropy = -(log.probabilities * np.log(log.probabilities) + (1 - log.probabilities) * np.log(1 - log.probabilities))
    assert log.losses().mean() == pytest.approx(entropy.mean(), abs=0.01)
    rate = log.labels.mean()
    assert log.losses().mean() < 0.85 * -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    for shift in (0.9, 1.1):  # other probabilities lose
        logits = shift * np.log(log.probabilities / (1 - log.probabilities))
        worse = np.log1p(np.exp(-logits)) * log.labels + np.log1p(np.exp(logits)) * (1 - log.labels)
        assert worse.mean() > log.losses().mean()


def test_integers_and_categories_each_tell_something_of_the_clicks(log: Clicks) -> None:
    design = np.vstack([log.dense(), np.ones(len(log.labels))]).T
    weights = np.linalg.lstsq(design, log.labels.astype(float), rcond=None)[0]
    explained = np.corrcoef(design @ weights, log.labels)[0, 1]
    assert explained > 0.15
    rates = [log.labels[log.values[5] == value].mean() for value in np.unique(log.values[5])]
    assert np.ptp(rates) > 0.05


def test_categories_follow_a_power_law(log: Clicks) -> None:
    assert (log.values == 0).any()
    assert not (log.values == 0).any(axis=1).all()  # some features always have one
    for feature, size in enumerate(TABLES):
        values = log.values[feature]
        counts = np.sort(np.unique(values[values != 0], return_counts=True)[1])[::-1]
        assert len(counts) <= size
        if size > 1000:  # the tenth about a tenth as often as the first, in a power law of exponent 1
            assert counts[9] / counts[0] == pytest.approx(np.log(11 / 10) / np.log(2), rel=0.3)
            shares = np.log1p(1 / np.arange(1, size + 1)) / np.log(size + 1)
            assert len(counts) == pytest.approx((1 - (1 - shares) ** counts.sum()).sum(), rel=0.03)
    assert log.values.max() > 2**31  # spread over 32 bits, as hashes are
    assert len(np.unique(log.values)) > 0.9 * sum(len(np.unique(v)) for v in log.values)  # own values for each feature


def test_integers_are_missing_negative_and_large(log: Clicks) -> None:
    missing = log.integers == synthetic.NO_INTEGER
    assert missing.any()
    assert not missing.all(axis=1).any()
    assert (log.integers[~missing] < 0).any()
    assert log.integers.max() > 1000
    assert (log.dense()[log.integers < 0] == 0).all()
