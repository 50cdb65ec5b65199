"""`convert_folder`: trained dense weights that are too large to hold become a compressed model, layer by layer.

`from_pretrained` of transformers makes the model on the meta device and reads one tensor after the other; to one that
quantizes what it reads, it hands each weight as the model has it, whatever the files call it or how they cut it. The
quantizer below decomposes it and lets it go. So no more than one dense weight that is compressed ever exists.

    OUT.partial/request.json            what is converted to what, so that a conversion that was killed goes on
    OUT.partial/LAYER.safetensors       the cores of a layer that is done
    OUT.partial/whole/                  what becomes OUT
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import WeightConverter
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from comera.convert.config import TensorizeConfig
from comera.convert.report import TensorizeReport
from comera.convert.tensorize import Plan
from comera.errors import CheckpointError, ConversionError
from comera.files import flush, replace_file, replace_folder
from comera.integrations.transformers_formats import Stored, conversions, forget_quantizer_
from comera.memory.estimate import free_memory
from comera.nn.tensor_train import TensorTrain
from comera.pretrained.stored import INDEX, WEIGHTS, StoredTensors
from comera.pretrained.transformers_folder import CONFIG, QUANT_METHOD
from comera.tt.format import spec_size
from comera.tt.spec import spec_from_dict

__all__ = ["convert_folder"]

_METHOD = "comera_decompose"
_SHARD = "4GB"  # of what is written, at most
_BESIDE = (".json", ".jinja", ".model", ".txt")  # what else makes a folder of transformers usable: tokenizers


def convert_folder(
    folder: str | Path,
    out: str | Path,
    config: TensorizeConfig | None = None,
    *,
    ratio: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TensorizeReport:
    """Decompose the dense weights of a transformers model, from its folder to a new one, without holding them all.

    Each weight is read, decomposed and released, so that memory holds the result and what the decomposition of one
    weight takes. The result is that of `tensorize_(model, ..., init="decompose")` on the loaded model. A conversion
    that was killed goes on where it was when it is called again; `out` appears when it is whole.

    Args:
        folder: config.json and safetensors, in one file or in shards.
        out: a new folder, for `from_pretrained` after `import comera`; files of tokenizers are copied to it.
        config, ratio: as for `tensorize_`.
        progress: called with the number of layers that are done, and of all.

    Returns:
        What became of each layer, as from `tensorize_`.

    Raises:
        CheckpointError: a folder without config.json, with a shard that is missing or damaged, or without weights of
            the model. Nothing is written.
        ConversionError: what `tensorize_` raises, an `out` that exists, too little memory or disk, or a partial
            conversion to other formats or of other files. Nothing is written.
        SpecError: weights that hold NaN or infinity. Layers that are done are kept.

    Example:
        >>> import tempfile, comera
        >>> from comera.integrations.decompose import convert_folder
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=99))
        >>> with tempfile.TemporaryDirectory() as place:
        ...     model.save_pretrained(f"{place}/dense")
        ...     report = convert_folder(f"{place}/dense", f"{place}/small", ratio=4)
        ...     small = BertModel.from_pretrained(f"{place}/small")
        >>> print(f"{report.ratio:.1f} times smaller", sum(p.numel() for p in small.parameters()) == report.total)
        4.0 times smaller True
    """
    folder, out = Path(folder), Path(out)
    if out.exists():
        raise ConversionError(f"expected a new folder for the compressed model, got {out}, which exists: give another")
    kind, files = _model_in(folder)
    request = _Request(config, ratio, files, out.with_name(f"{out.name}.partial"), progress)
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()  # it counts tensors that are read
    try:
        model, found = kind.from_pretrained(
            folder, dtype="auto", use_safetensors=True, quantization_config=request, output_loading_info=True
        )
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
    if found["missing_keys"]:
        raise _missing(folder, found["missing_keys"])
    _write(model, folder, request.partial, out)
    assert request.report is not None
    return request.report


def _write(model: Any, folder: Path, partial: Path, out: Path) -> None:
    whole = partial / "whole"
    shutil.rmtree(whole, ignore_errors=True)
    model.save_pretrained(whole, max_shard_size=_SHARD)
    for file in folder.iterdir():
        if file.suffix in _BESIDE and not file.name.endswith(INDEX) and not (whole / file.name).exists():
            shutil.copyfile(file, whole / file.name)
    for written in whole.iterdir():
        shutil.copymode(whole / CONFIG, written)  # safetensors lets the owner alone read what it writes
        flush(written)
    flush(whole)
    replace_folder(whole, out)
    shutil.rmtree(partial)


def _model_in(folder: Path) -> tuple[Any, list[Path]]:
    """The class of the model in a folder, and the files of its weights, each of which could be read."""
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
        formats = config.get("quantization_config")
        (name, *_) = config["architectures"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"expected a folder that save_pretrained of transformers wrote, got {folder} without a {CONFIG} that names "
            f"its architecture ({error!r})"
        ) from error
    if formats is not None:
        method = formats.get("quant_method")
        instead = "is compressed already" if method == QUANT_METHOD else f"is quantized ({method})"
        raise ConversionError(f"expected a folder of dense weights, but the model in {folder} {instead}")
    kind = getattr(transformers, name, None)
    if kind is None:
        raise ConversionError(
            f"expected a model of transformers, got {name} in {folder / CONFIG}: load it, then call tensorize_ with "
            "init='decompose'"
        )
    try:
        return kind, StoredTensors.open(folder).files
    except FileNotFoundError as error:
        raise CheckpointError(
            f"expected weights in {folder}, in {WEIGHTS} or in shards with {WEIGHTS}{INDEX}, got {error!r}"
        ) from error


class _Request(QuantizationConfigMixin):  # type: ignore[misc]
    """A conversion, as `from_pretrained` takes it. partial: where layers are kept that are done. report: once it is."""

    def __init__(
        self,
        config: TensorizeConfig | None,
        ratio: float | None,
        files: list[Path],
        partial: Path,
        progress: Callable[[int, int], None],
    ) -> None:
        self.quant_method: Any = _METHOD
        self.config, self.ratio, self.files, self.partial, self.progress = config, ratio, files, partial, progress
        self.report: TensorizeReport | None = None

    def __deepcopy__(self, memo: Any) -> _Request:  # configs are copied
        return self


@register_quantizer(_METHOD)
class _Decomposer(HfQuantizer):  # type: ignore[misc]
    """Takes the weights that are compressed from `from_pretrained`, as it reads them."""

    quantization_config: _Request

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        """Decide everything while nothing is read; afterwards only the values of a weight can be wrong."""
        request = self.quantization_config
        stored = Stored(model, [], [str(file) for file in request.files], as_named=False)
        absent = model.state_dict().keys() - stored.shapes.keys()
        for tied, source in model.all_tied_weights_keys.items():  # not made yet while a model is loaded
            if absent & {tied, source} or torch.equal(stored.read(tied), stored.read(source)):
                path, _, leaf = tied.rpartition(".")
                setattr(model.get_submodule(path), leaf, model.get_parameter_or_buffer(source))
        state = model.state_dict(keep_vars=True)
        there = {id(state[name]) for name in state.keys() - absent}
        absent = {name for name in absent if id(state[name]) not in there}
        ignored = model._keys_to_ignore_on_load_missing or ()
        absent = {name for name in absent if not any(re.search(pattern, name) for pattern in ignored)}
        if absent and not any(isinstance(change, WeightConverter) for change in conversions(model)):
            raise _missing(request.files[0].parent, sorted(absent))
        self.plan = Plan.of(model, request.config, request.ratio, "decompose")
        self._group: dict[str, int] = {}
        places = {site.place: k for k, group in enumerate(self.plan.groups) for site in group.sites}
        for path, module in model.named_modules(remove_duplicate=False):
            for leaf in module._parameters:
                if (module, leaf) in places:
                    self._group[f"{path}.{leaf}".removeprefix(".")] = places[module, leaf]
        self.made: dict[int, tuple[TensorTrain, float]] = {}
        self.failed: Exception | None = None
        _check_room(self.plan, request.partial)
        _begin(self.plan, request)
        request.progress(0, len(self.plan.groups))

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Whether a weight is compressed."""
        return param_name in self._group

    def get_quantize_ops(self) -> Any:
        """What is done to such a weight."""
        return self

    def convert(self, values: dict[str, Any], *, model: Any, missing_keys: set[str], **_: Any) -> dict[str, Any]:
        """Decompose those of the weights just read that are compressed, and hand back the others."""
        for name in self._group.keys() & values.keys():
            value = values.pop(name)
            missing_keys.discard(name)
            try:
                self._make(self._group[name], value[0] if isinstance(value, list) else value)
            except Exception as error:  # transformers would go on, and say at the end that something was wrong
                self.failed = self.failed or error
        return values

    def _make(self, k: int, weight: Tensor) -> None:
        if k in self.made or self.failed:
            return
        group, request = self.plan.groups[k], self.quantization_config
        file = request.partial / f"{group.leader.name}.safetensors"
        if not file.exists():
            expected = group.leader.dense
            if weight.shape != expected.shape:
                raise CheckpointError(
                    f"{group.leader}: expected a weight {tuple(expected.shape)}, got {tuple(weight.shape)}"
                )
            tt, error = self.plan.decompose(group, weight.to(expected.dtype))
            about = {"spec": tt.spec.to_dict(), "init_std": tt.init_std, "error": error, "padding_row": tt.padding_row}
            stored = {str(n): core.detach().contiguous() for n, core in enumerate(tt.cores)}
            replace_file(file, lambda beside: save_file(stored, beside, {"layer": json.dumps(about)}))
        with safe_open(file, framework="pt") as opened:
            about = json.loads(opened.metadata()["layer"])
            cores = [opened.get_tensor(name) for name in sorted(opened.keys(), key=int)]
        settings = {"init_std": about["init_std"], "threshold": self.plan.config.threshold}
        tt = TensorTrain.from_tensors(spec_from_dict(about["spec"]), cores, **settings)
        tt.padding_row = about.get("padding_row", False)  # absent from files of earlier versions
        self.made[k] = tt, about["error"]
        request.progress(len(self.made), len(self.plan.groups))

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        if self.failed:
            raise self.failed
        forget_quantizer_(model)
        for module in model.modules():
            if isinstance(getattr(vars(module).get("config"), "quantization_config", None), _Request):
                del module.config.quantization_config
        lost = [group.leader.name for k, group in enumerate(self.plan.groups) if k not in self.made]
        if lost:
            raise _missing(self.quantization_config.files[0].parent, lost)
        self.quantization_config.report = self.plan.apply_([self.made[k] for k in range(len(self.made))])

    def is_serializable(self) -> bool:
        """Whether the model can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained."""
        return True


def _missing(folder: Path, names: list[str]) -> CheckpointError:
    more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
    return CheckpointError(
        f"expected trained weights for all of the model, but {folder} has none for {', '.join(names[:3])}{more}: load "
        "it, train or drop these parts, and save it before it is converted"
    )


def _sizes(plan: Plan) -> tuple[int, int, int]:
    """Bytes of the tensor trains, of what stays dense, and of the largest weight to decompose, in float64."""
    compressed = {group.leader.dense: spec_size(group.spec) for group in plan.groups}
    trains = sum(count * weight.element_size() for weight, count in compressed.items())
    kept = {*plan.model.parameters(), *plan.model.buffers()} - {*compressed}
    return trains, sum(tensor.nbytes for tensor in kept), max((8 * weight.numel() for weight in compressed), default=0)


def _check_room(plan: Plan, partial: Path) -> None:
    """Raise ConversionError where disk or memory cannot hold what is certain to be there at once."""
    trains, dense, largest = _sizes(plan)
    there = next(place for place in partial.absolute().parents if place.exists())
    done = sum(file.stat().st_size for file in partial.glob("*.safetensors"))
    disk, room = 2 * trains + dense - done, shutil.disk_usage(there).free
    memory, free = trains + dense + 2 * largest, free_memory("cpu")
    for need, has, what, why in (
        (disk, room, f"on the disk of {there}", "layers that are done and then the whole"),
        (memory, free, "of memory", f"the result, and an SVD of {largest / 1e9:,.1f} GB in float64"),
    ):
        if 0 < has < need:
            raise ConversionError(
                f"the conversion needs {need / 1e9:,.1f} GB {what}, {has / 1e9:,.1f} are free ({why}): make room, or "
                "take a larger ratio"
            )


def _begin(plan: Plan, request: _Request) -> None:
    """Make the folder of a conversion, or see that the one there is of the same."""
    layers = {group.leader.name: str(group.spec) for group in plan.groups}
    files = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in request.files}
    config = plan.config
    asked = {"files": files, "layers": layers, "threshold": config.threshold, "init_std": config.init_std}
    text, file = json.dumps(asked, indent=1), request.partial / "request.json"
    if request.partial.exists() and (not file.exists() or file.read_text("utf-8") != text):
        raise ConversionError(
            f"expected {request.partial} to hold the layers of this conversion, got those of another one (other files, "
            "ratio or formats): repeat that one, or delete the folder"
        )
    request.partial.mkdir(parents=True, exist_ok=True)
    replace_file(file, text)
