"""What a program has to import for `from_pretrained` to load a compressed model."""

import subprocess
import sys
from pathlib import Path

import pytest

from comera.nn.embedding import TTMEmbedding

from ...helpers.compressed_bert import compressed_bert


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = f"folder = {str(folder)!r}\n{code}\n"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


LOAD = (
    "model = AutoModelForMaskedLM.from_pretrained(folder)\nprint(type(model.bert.embeddings.word_embeddings).__name__)"
)


@pytest.mark.parametrize(
    "imports",
    [
        "import comera\nfrom transformers import AutoModelForMaskedLM",
        "from transformers import AutoModelForMaskedLM\nimport comera",
        "from transformers import AutoModelForMaskedLM\nimport transformers.quantizers\nimport comera",
        "from transformers import AutoModelForMaskedLM\nimport comera.integrations.transformers",
    ],
)
def test_importing_comera_is_enough(imports: str, tmp_path: Path) -> None:
    compressed_bert().save_pretrained(tmp_path)
    shown = run(f"{imports}\n{LOAD}", tmp_path)
    assert shown.stdout.strip() == TTMEmbedding.__name__, shown.stderr


def test_without_comera_the_error_says_what_to_import(tmp_path: Path) -> None:
    compressed_bert().save_pretrained(tmp_path)
    shown = run(f"from transformers import AutoModelForMaskedLM\n{LOAD}", tmp_path)
    assert shown.returncode == 1
    assert shown.stderr.splitlines()[-1] == (
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
    shown = run(code, Path())
    assert shown.returncode == 0
    assert "comera.integrations.transformers_formats cannot be used" in shown.stderr
