"""CoMERA for PyTorch: rank-adaptive tensor-compressed training.

Names are imported on first use (PEP 562), so that `comera --help` does not wait for torch; type checkers and editors
read them in `__init__.pyi`. Where a program uses transformers, its `from_pretrained` learns to load compressed models.
"""

from importlib import import_module

from comera._on_import import import_after, warn_if_newer
from comera._version import __version__ as __version__

# public name -> module that defines it
_HOMES = {
    "BTT": "convert",
    "TT": "convert",
    "TTM": "convert",
    "ComeraError": "errors",
    "EarlyStage": "rank",
    "LateStage": "rank",
    "RankController": "rank",
    "TensorizeConfig": "convert",
    "compress": "run",
    "fp8_": "fp8",
    "fuse_": "fusion",
    "load_pretrained": "pretrained",
    "materialize_": "convert",
    "ngrams_": "convert",
    "model_size": "nn",
    "param_groups": "optim.param_groups",
    "recompute_": "memory.recompute",
    "round_": "rank",
    "save_pretrained": "pretrained",
    "tensorize_": "convert",
}
# imported as attributes: comera.nn.TTLinear
_ROOMS = frozenset(
    "adapters contrib convert distributed fp8 fusion memory nn optim pretrained rank recompute tt".split()  # noqa: SIM905
)

# the first releases that pyproject.toml does not admit
_UNTESTED = {"torch": "2.16", "transformers": "5.25"}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    value: object
    if name in _HOMES:
        value = getattr(import_module(f"comera.{_HOMES[name]}"), name)
    elif name in _ROOMS:
        value = import_module(f"comera.{name}")
    else:
        raise AttributeError(f"module 'comera' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES, *_ROOMS]


for _library, _release in _UNTESTED.items():
    warn_if_newer(_library, _release)
import_after("transformers.quantizers.auto", "comera.integrations.transformers_formats")
import_after("transformers.modeling_utils", "comera.integrations.transformers_formats", "note_when_saved_")
import_after("peft", "comera.integrations.peft_prompts", "find_compressed_tables_")
for _library in ("huggingface_hub.hub_mixin", "diffusers.models.modeling_utils"):
    import_after(_library, "comera.integrations.other_savers", "refuse_compressed_everywhere_")
