"""What a program has to import for `from_pretrained` to load a compressed model."""

import subprocess
import sys

import pytest

from comera.nn.embedding import TTMEmbedding

from ...helpers.compressed_bert import compressed_bert


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


LOAD = (
    "model = AutoModelForMaskedLM.from_pretrained(folder)\nprint(type(model.bert.embeddings.word_embeddings).__name__)"
)
IMPORTS = (
    "import comera\nfrom transformers import AutoModelForMaskedLM",
    "from transformers import AutoModelForMaskedLM\nimport comera",
    "from transformers import AutoModelForMaskedLM\nimport transformers.quantizers\nimport comera",
    "from transformers import AutoModelForMaskedLM\nimport comera.integrations.transformers",
)
WITHOUT = "from transformers import AutoModelForMaskedLM"
# A process that has imported neither library, only what both need and is slow to import, runs each program in a fork.
FORKS = """
import gc, os, sys
gc.disable()
from pathlib import Path
import huggingface_hub, safetensors.torch, scipy.optimize, tokenizers
import torch, torch._dynamo, torch._functorch.config, torch._inductor.config, torch.distributed.tensor
assert not {"comera", "transformers"} & set(sys.modules)
for folder in map(Path, sys.argv[1:]):
    if not os.fork():
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
        exec((folder / "code").read_text(), {"__name__": "__main__"})
        sys.exit()
    _, status = os.wait()
    (folder / "status").write_text(str(os.waitstatus_to_exitcode(status)))
"""
Shown = tuple[int, str, str]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shown]:
    """Exit status, output and errors of a program that imports this and loads a compressed model, by its imports."""
    saved = tmp_path_factory.mktemp("saved")
    compressed_bert().save_pretrained(saved)
    folders = {imports: tmp_path_factory.mktemp("program") for imports in (*IMPORTS, WITHOUT)}
    for imports, folder in folders.items():
        (folder / "code").write_text(f"folder = {str(saved)!r}\n{imports}\n{LOAD}\n")
    done = run(FORKS, *map(str, folders.values()))
    assert done.returncode == 0, done.stderr
    read = {
        imports: [(folder / name).read_text() for name in ("status", "out", "err")]
        for imports, folder in folders.items()
    }
    return {imports: (int(status), out, err) for imports, (status, out, err) in read.items()}


@pytest.mark.parametrize("imports", IMPORTS)
def test_importing_comera_is_enough(imports: str, shown: dict[str, Shown]) -> None:
    _, out, err = shown[imports]
    assert out.strip() == TTMEmbedding.__name__, err


def test_without_comera_the_error_says_what_to_import(shown: dict[str, Shown]) -> None:
    status, _, err = shown[WITHOUT]
    assert status == 1
    assert err.splitlines()[-1] == (
        "ValueError: Unknown fusion type: comera (this model is compressed: `import comera` before from_pretrained)"
    )


def test_a_library_that_is_too_old_is_no_obstacle() -> None:
    code = """
import sys, types, warnings
warnings.simplefilter("error")
library = types.ModuleType("transformers.quantizers.auto")
sys.modules |= {"transformers": types.ModuleType("transformers"), library.__name__: library}
sys.modules["transformers.quantizers"] = types.ModuleType("transformers.quantizers")
warnings.simplefilter("always")
import comera
print(comera.__version__)
"""
    done = run(code)
    assert done.returncode == 0
    assert "comera.integrations.transformers_formats cannot be used" in done.stderr
