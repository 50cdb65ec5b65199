"""What others could not read back they do not save: no compressed model comes back dense and without weights."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import nn

import comera
from comera.errors import ConversionError


class Net(nn.Module, PyTorchModelHubMixin):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)


def test_a_compressed_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = Net()
    comera.tensorize_(model, ratio=2)
    with pytest.raises(ConversionError, match=r"comera\.save_pretrained.*comera\.load_pretrained\(Net"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    comera.save_pretrained(model, tmp_path / "ours")
    same = comera.load_pretrained(Net(), tmp_path / "ours")
    assert torch.equal(same.up.weight, model.up.weight)


def test_dense_models_are_saved_as_before_and_so_are_those_that_became_dense_again(tmp_path: Path) -> None:
    model = Net(width=64)
    model.save_pretrained(tmp_path)
    assert torch.equal(Net.from_pretrained(tmp_path).up.weight, model.up.weight)
    comera.tensorize_(model, ratio=2)
    comera.materialize_(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(Net.from_pretrained(tmp_path).up.weight, model.up.weight)


def test_it_holds_whichever_is_imported_first() -> None:
    code = (
        "import sys; {0}; import torch; "
        "m = type('M', (torch.nn.Module, PyTorchModelHubMixin), {{}})(); m.l = torch.nn.Linear(64, 64); "
        "comera.tensorize_(m, ratio=1.5)\n"
        "try: m.save_pretrained(sys.argv[1])\n"
        "except comera.errors.ConversionError: print('refused')"
    )
    imports = ["import comera, comera.errors", "from huggingface_hub import PyTorchModelHubMixin"]
    for order in (imports, imports[::-1]):
        command = [sys.executable, "-c", code.format("; ".join(order)), "unused"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout == "refused\n", done.stderr
