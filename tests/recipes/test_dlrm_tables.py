"""DLRM with what one would pick instead of compressed tables: hashing, quotient-remainder, narrower ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from comera.baselines import TABLE_METHODS
from comera.errors import ConfigError
from comera.nn.size import model_size
from comera.recipes.dlrm import recipe as dlrm
from comera.recipes.dlrm.recipe import METHODS, DLRMTask, DLRMTaskConfig, build_model

from ..helpers.recipe_runs import cut_off
from ..helpers.run_folders import history
from ..helpers.small_dlrm import TABLES, small_log, small_run


@pytest.fixture
def config(tmp_path: Path) -> DLRMTaskConfig:
    return small_run(small_log(tmp_path / "cache"), tmp_path / "run")


@pytest.mark.parametrize("method", TABLE_METHODS)
def test_other_tables_have_the_budget_and_resume(config: DLRMTaskConfig, method: Any, tmp_path: Path) -> None:
    train = replace(config.train, optimizer="adagrad", save_every=2, steps=4)
    compress = replace(config.compress, ratio=3.0, min_rows=100)
    config = replace(config, method=method, compress=compress, train=train, late_targets=())
    model, report = build_model(config, TABLES)
    assert report is not None
    assert sum(row.stored for row in report.rows) == sum(p.numel() for p in model.tables.parameters())
    assert 0.9 < 3 * sum(row.stored for row in report.rows) / (8 * sum(TABLES)) <= 1
    assert report.dense_total == model_size(build_model(replace(config, method="dense"), TABLES)[0]).total
    inner = [part for part in model.tables.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    assert all(part.sparse for part in inner)
    summary = dlrm.run(config)
    assert summary.steps == 4
    assert summary.ratio == pytest.approx(report.dense_total / model_size(model).total)
    stopped = replace(config, out=str(tmp_path / "stopped"))
    cut_off(DLRMTask, 3, lambda: dlrm.run(stopped))
    dlrm.run(stopped, resume=True)
    assert history(stopped.folder, "train") == history(config.folder, "train")
    need = dlrm.estimate(config)
    assert set(need) == set(METHODS)
    assert need[method].weights == sum(p.nbytes for p in model.parameters())
    assert need[method].weights < need["dense"].weights / 2


def test_a_method_that_cannot_be_so_small_has_no_estimate(
    config: DLRMTaskConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(config, compress=replace(config.compress, ratio=8.0))
    assert set(dlrm.estimate(config)) == set(METHODS) - {"narrow_tables"}
    assert "dlrm: no estimate of narrow_tables: compress.ratio 8 leaves" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"compress.ratio 8 leaves .* the method narrow_tables"):
        dlrm.run(replace(config, method="narrow_tables"))
