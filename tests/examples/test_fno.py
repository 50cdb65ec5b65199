"""The example of Fourier neural operators: what its weights are, and a run on random fields that meets its target."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("neuralop", reason="needs the package neuraloperator")

SCRIPT = Path(__file__).parents[2] / "examples" / "fno.py"


def test_a_spectral_weight_is_a_complex_tensor_train_in_four_modes() -> None:
    torch.manual_seed(0)
    weight = runpy.run_path(str(SCRIPT))["SpectralWeight"]((3, 5, 4, 2), 2)
    i_r, x_rs, y_st, o_t = (core.squeeze() for core in weight.tt.cores)
    y_syct = y_st.unflatten(1, (2, 2))  # of each frequency, the real and the imaginary part
    parts = torch.einsum("ir,rxs,syct,to->ioxyc", i_r, x_rs, y_syct, o_t)
    assert weight[:, :, :1].shape == (3, 5, 1, 2)
    torch.testing.assert_close(weight[...], torch.view_as_complex(parts.contiguous()))
    assert float(weight[...].detach().abs().square().mean()) == pytest.approx(2 / 8, rel=1e-4)


def test_it_trains_and_meets_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, samples in (("train", 24), ("test", 4)):
        fields = {"x": torch.rand(samples, 8, 8) > 0.5, "y": torch.rand(samples, 8, 8)}
        torch.save(fields, tmp_path / f"darcy_{name}_16.pt")
    sizes = {}
    for rank in (8, 0):
        options = ["--channels", "6", "--modes", "4", "--steps", "10", "--rank", str(rank), "--data", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        found = re.search(r"darcy_test_16: error (\S+) with (\S+) real parameters", capsys.readouterr().out)
        assert found
        assert float(found[1]) < 5
        sizes[rank] = int(found[2].replace(",", ""))
    dense, whole = 4 * 6 * 6 * 4 * 3 * 2, 4 * (6 * 6 + 6 * 4 * 8 + 8 * 6 * 6 + 6 * 6 + 6 + 8 + 6)  # of four layers
    assert sizes[8] <= sizes[0] - dense + whole / 2
