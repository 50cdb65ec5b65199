"""The Triton kernels: their numerics under Triton's interpreter, and where they are used."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import comera.kernels
from comera.cli import calibrate
from comera.cli.main import main
from comera.errors import ConfigError
from comera.kernels import select
from comera.ops.linear import tt_linear
from comera.ops.lookup import ttm_bag
from comera.ops.planner.plan import plan_linear, plan_lookup
from comera.tt.dense import materialize
from comera.tt.spec import TTMSpec, TTSpec

CUDA = torch.device("cuda")


@pytest.mark.skipif(not select.triton_available(), reason="triton is not installed")
def test_numerics_under_the_interpreter():
    tests = Path(__file__).parents[2] / "helpers" / "interpreted_kernels.py"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(tests)]
    run = subprocess.run(command, env=environment, cwd=tests.parents[2], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout


def test_importing_the_library_imports_no_triton_code():
    code = "import sys, comera; assert 'comera.kernels.triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """As if triton and a GPU were here, and a cache of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(select, "versions", lambda: "torch 9")
    select.calibrated.cache_clear()
    monkeypatch.setattr(select, "triton_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.delenv("COMERA_KERNELS", raising=False)


def enabled(device=CUDA):
    return {name for name in select.TRITON if select.triton_enabled(name, device)}


def write_calibration(text):
    select.calibration_file().parent.mkdir()
    select.calibration_file().write_text(text)


@pytest.mark.usefixtures("gpu")
def test_off_where_nothing_was_measured():
    assert not enabled()


@pytest.mark.usefixtures("gpu")
def test_on_where_it_was_measured_to_be_faster(monkeypatch):
    calibrate.keep("Other GPU", {"low_rank"})
    assert not enabled()
    calibrate.keep("Some GPU", {"lookup_rows"})
    assert enabled() == {"lookup_rows"}
    assert not enabled("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Other GPU")
    assert enabled() == {"low_rank"}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "AttributeError"),
        ('{"Some GPU": {"faster": ["low_rank"]}}', "KeyError"),
        ('{"Some GPU": {"faster": ["what"], "versions": "torch 9"}}', "expected names of low_rank"),
        ('{"Some GPU": {"faster": ["low_rank"], "versions": "torch 8"}}', "it is of torch 8, here are torch 9"),
    ],
)
def test_a_damaged_or_old_calibration_is_said_and_made_anew(text, said):
    write_calibration(text)
    with pytest.warns(UserWarning, match=f"{said}.*run `comera calibrate` again"):
        assert not enabled()
    calibrate.keep("Some GPU", {"low_rank"})
    assert enabled() == {"low_rank"}


def test_without_a_gpu_there_is_nothing_to_calibrate(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["calibrate"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.usefixtures("gpu")
def test_a_kernel_that_is_slower_in_one_case_does_not_run(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    rounds = {"low_rank": [1.0, 3.0], "block_product": [1.0, 1.0], "lookup_rows": [1.0]}
    made = [(kernel, "float32", "", ours, 2.0) for kernel, times in rounds.items() for ours in times]
    monkeypatch.setattr(calibrate, "cases", lambda device: iter(made))
    monkeypatch.setattr(calibrate, "medians", lambda ours, torchs: (ours, torchs))
    assert main(["calibrate"]) == 0
    assert enabled() == {"block_product", "lookup_rows"}
    assert "Some GPU: block_product, lookup_rows will run" in capsys.readouterr().out


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("all", {"low_rank", "block_product", "lookup_rows"}),
        ("none", set()),
        ("lookup_rows", {"lookup_rows"}),
        ("lookup_rows,low_rank", {"low_rank", "lookup_rows"}),
    ],
)
def test_the_environment_overrules_the_measurement(setting, expected, monkeypatch):
    calibrate.keep("Some GPU", {"lookup_rows"})
    monkeypatch.setenv("COMERA_KERNELS", setting)
    assert enabled() == expected


def test_an_unknown_kernel_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", "lookup_rows,columns")
    with pytest.raises(ConfigError, match=r"some of low_rank, block_product, .*; got 'lookup_rows,columns'"):
        select.asked("lookup_rows")


@pytest.mark.usefixtures("gpu")
def test_off_without_triton(monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", "all")
    monkeypatch.setattr(select, "triton_available", lambda: False)
    assert not enabled()


def test_never_used_on_a_cpu(monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", "all")
    assert select.low_rank_backend(torch.zeros(4, 6), [torch.zeros(2, 6), torch.zeros(2, 5)]) != "triton"
    assert select.block_product_backend([torch.zeros(4, 6), torch.zeros(3, 8), torch.zeros(8, 2), None]) != "triton"
    assert select.lookup_rows_backend(torch.zeros(4, 6, 2), torch.zeros(3, 2, 5)) == "torch"


def test_products_and_lookups_go_where_they_are_enabled(monkeypatch):
    called = []

    def product(x_BI, a_RI, b_RO, bias=None):
        called.append("low_rank")
        p_BR = x_BI @ a_RI.t()
        return p_BR @ b_RO + bias, p_BR

    def rows(ids_U, left_MNR, right_MRN):
        called.append("lookup_rows")
        return (left_MNR[ids_U // right_MRN.shape[0]] @ right_MRN[ids_U % right_MRN.shape[0]]).flatten(1)

    launchers = SimpleNamespace(low_rank=product, lookup_rows=rows)
    monkeypatch.setitem(sys.modules, "comera.kernels.triton", launchers)
    monkeypatch.setattr(comera.kernels, "triton", launchers, raising=False)
    for name in ("low_rank", "lookup_rows"):
        monkeypatch.setattr(select, f"{name}_backend", lambda *operands: "triton")
    linear, table = TTSpec(6, 6, (2, 3), (3, 2), (1, 2, 4, 2, 1)), TTMSpec(12, 6, (4, 3), (2, 3), (1, 5, 1))
    cores, rows_cores = ([torch.randn(shape) for shape in spec.core_shapes] for spec in (linear, table))
    x, bias, ids = torch.randn(5, 6), torch.randn(6), torch.tensor([3, 11, 3])
    y = tt_linear(x, linear, cores, bias, plan=plan_linear(linear, 5).using("low_rank"))
    found = ttm_bag(ids[None], None, table, rows_cores, mode="sum", plan=plan_lookup(table, 3).using("two_parts"))
    torch.testing.assert_close(y, x @ materialize(linear, cores) + bias, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, materialize(table, rows_cores)[ids].sum(0, True), rtol=1e-4, atol=1e-4)
    assert called == ["low_rank", "lookup_rows"]
