"""transformers' `save_pretrained` and `from_pretrained` for compressed models.

`save_pretrained` writes the modes of all tensor trains into config.json, as a quantization method does, for whatever
model it is called on: a conversion may have been handed only a part of it. `from_pretrained` builds the model on the
meta device, asks the quantizer below to put compressed layers in, with the ranks of the stored tensors, and loads them
like any other parameters: dtype, device maps and shards work as for a dense model. Afterwards nothing is left of the
quantizer, and the model trains.

A conversion also notes the modes in the config of the model that it was handed, for a config that is written by itself.

transformers stores some families under the names and in the parts of their first release: it renames tensors, joins
those of three layers, or permutes them. Cores are no weights, so a compressed model keeps the names that it has.

`import comera` registers the method, now or as soon as the program imports the quantizers of transformers. In a program
that does not, transformers would only log that it does not know the method and go on with random dense weights. So the
config also requests a fusion whose name says what to do: transformers raises for one that it does not know.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from comera._version import __version__
from comera.convert.ngrams import empty_table, finish_ngrams_, ngram_place
from comera.convert.registry import converters, dense_place, refusal
from comera.convert.swap import compress_layers_, materialize_layers_
from comera.errors import CheckpointError, ConversionError
from comera.nn.changes import when_converted
from comera.nn.ngram import NGramTable, attach_ngrams_
from comera.nn.tensor_train import CompressedLayer, TensorTrain, named_trains
from comera.pretrained.folder import SavedTrain, with_stored_layout
from comera.pretrained.transformers_folder import QUANT_METHOD, entries_of, read_entries, with_stored_ranks
from comera.tt.ngram import NGramSpec
from comera.tt.spec import Spec, TTMSpec, TTSpec

__all__ = ["ComeraConfig", "ComeraQuantizer", "note_formats_"]

_HINT = "comera (this model is compressed: `import comera` before from_pretrained)"
_SET = ("quantization_config", "fusion_config", "_weight_conversions")  # of configs and model, while it is saved
_WRAPPER = "_checkpoint_wrapped_module."  # torch's checkpoint_wrapper, which FSDP2 of Accelerate uses
_BLOCK_RANKS = r"\.block_ranks$"


@register_quantization_config(QUANT_METHOD)
class ComeraConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of a compressed model.

    trains: names, modes, std and threshold of each tensor train, JSON-ready; ranks are those of the stored tensors.
    as_named: whether tensors are stored under the names that the model has, and not under those of its first release,
    as the first versions of this library left it.

    See `note_formats_`.
    """

    def __init__(
        self, trains: Sequence[Mapping[str, Any]], version: str = __version__, as_named: bool = False, **_: Any
    ) -> None:
        self.quant_method: Any = QUANT_METHOD
        self.version = version
        self.trains = list(trains)
        self.as_named = as_named


def note_formats_(model: nn.Module) -> None:
    """Write the modes of a model's tensor trains into its config, or take them out if it has none any more.

    Every conversion calls it, and every late stage that begins. `save_pretrained` needs no call. Call it for a model of
    which only a part was handed to `tensorize_`, if you write its config by other means, such as
    `model.config.save_pretrained`.

    Example:
        >>> import comera
        >>> from comera.integrations.transformers_formats import note_formats_
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=99))
        >>> _ = comera.tensorize_(model.encoder, ratio=4)  # a part, which has no config of its own
        >>> note_formats_(model)
        >>> len(model.config.quantization_config.trains)
        6
    """
    library: Any = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return
    noted: set[int] = set()
    for module in model.modules():  # a model before its submodels, which mostly share its config
        if not isinstance(module, library.PreTrainedModel) or id(module.config) in noted:
            continue
        config: Any = module.config
        noted.add(id(config))
        entries = _entries(module)
        if _other_method(config) is None:
            _note(config, entries)
        elif entries:
            warnings.warn(_refusal(module, config), stacklevel=2)


def _note(config: Any, entries: Sequence[Mapping[str, Any]]) -> None:
    """Let a config hold these entries and the hint, or neither if there are none."""
    if entries:
        config.quantization_config = ComeraConfig(entries, as_named=True)
        config.fusion_config = {**(getattr(config, "fusion_config", None) or {}), _HINT: True}
    elif getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
        _drop_hint(config)


def _entries(model: nn.Module) -> list[dict[str, Any]]:
    """`entries_of` a model, under the names in its state dict, of which some wrappers are no part."""
    entries = entries_of(model)
    for entry in entries:
        entry["names"] = {name.replace(_WRAPPER, ""): kind for name, kind in entry["names"].items()}
    return entries


@contextmanager
def _noted(model: Any) -> Iterator[None]:
    """While a model is saved: its formats in its config, none in the configs inside that one, and the names that its
    tensors have in the model.

    Models share configs, and parts of them, with their submodels and with models of other formats, and a conversion
    of a part does not reach the config of the whole. So nothing in a config is trusted, and all are left as they were.
    Raises ConversionError where one holds another quantization method.
    """
    adapters_alone = getattr(model, "_hf_peft_config_loaded", False)  # then transformers writes no config
    entries = [] if adapters_alone else _entries(model)
    configs = list(_configs(model.config))
    for config in configs:
        if entries and _other_method(config) is not None:
            raise ConversionError(_refusal(model, config))
    configs = [config for config in configs if _other_method(config) is None]
    holders = [vars(one) for one in (model, *configs)]
    held = [{name: own[name] for name in _SET if name in own} for own in holders]
    try:
        for config in configs:
            _note(config, ())
        if entries:
            _note(model.config, entries)
            model._weight_conversions = []  # None would be those of its class
        yield
    finally:
        for own, before in zip(holders, held, strict=True):
            for name in _SET:
                own.pop(name, None)
            own.update(before)


def _configs(config: Any) -> Iterator[Any]:
    """A config, and those inside it, such as of encoder and decoder."""
    yield config
    for inner in vars(config).values():
        if isinstance(inner, PreTrainedConfig):
            yield from _configs(inner)


def _other_method(config: Any) -> Any:
    """The quantization method that a config holds, if it is not this one."""
    formats = getattr(config, "quantization_config", None)
    method = _method(formats)
    return None if formats is None or method == QUANT_METHOD else method


def _refusal(model: nn.Module, config: Any) -> str:
    return (
        f"expected a config without another quantization method, got {_other_method(config)!r} in the "
        f"{type(config).__name__} of a {type(model).__name__} with compressed layers, whose formats save_pretrained "
        "would have to write there: save it with comera.save_pretrained"
    )


def _method(formats: Any) -> Any:
    return formats.get("quant_method") if isinstance(formats, dict) else getattr(formats, "quant_method", None)


def _drop_hint(config: Any) -> None:
    fusions = dict(getattr(config, "fusion_config", None) or {})
    if not fusions.pop(_HINT, None):
        return
    if fusions:
        config.fusion_config = fusions
    else:
        del config.fusion_config


@register_quantizer(QUANT_METHOD)
class ComeraQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts compressed layers into a model that `from_pretrained` has built on the meta device.

    Example:
        >>> import tempfile, comera
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=99))
        >>> _ = comera.tensorize_(model, ratio=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     loaded = BertModel.from_pretrained(folder)  # transformers finds the quantizer by the config
        >>> type(loaded.encoder.layer[0].intermediate.dense).__name__
        'BTTLinear'
    """

    quantization_config: ComeraConfig

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to compress what is stored dense."""
        if not self.pre_quantized:
            raise CheckpointError(
                "expected a folder of a compressed model, got a dense one and the quantization_config of a compressed "
                "one: load the dense model without it, then call comera.tensorize_(model, ...) with init='decompose'"
            )

    def update_attn_implementation(self, config: Any) -> Any:
        """The config before the model is built: the hint has done its work."""
        _drop_hint(config)
        return config

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        if not checkpoint_files:
            raise CheckpointError(
                "expected files with the weights of a compressed model, whose shapes tell its ranks, got a state_dict: "
                "give from_pretrained the folder, or use comera.load_pretrained"
            )
        where = model.config.name_or_path or checkpoint_files[0]
        modules = dict(model.named_modules(remove_duplicate=False))
        placed = [
            replace(saved, names=_names_in(model, modules, saved))
            for saved in read_entries(self.quantization_config.trains, where)
        ]
        placed = [saved for saved in placed if saved.names]
        stored = Stored(model, placed, checkpoint_files, as_named=self.quantization_config.as_named)
        self._as_named = stored.as_named
        trains: dict[tuple[nn.Module, str], TensorTrain] = {}
        tables: dict[str, NGramTable] = {}
        ties: dict[str, str] = {}
        own = {f"{name}.cores.0" for saved in placed for name in saved.names} & stored.shapes.keys()
        for found in placed:
            saved = with_stored_ranks(found, stored.shapes, where)
            if saved is None:
                continue
            if isinstance(saved.spec, NGramSpec):
                (name,) = saved.names
                at = ngram_place(modules, name.rpartition(".")[0])
                assert at is not None  # `_names_in` found it
                table = empty_table(saved.spec, saved.init_std, saved.threshold, next(at.parameters()), "meta")
                vars(table.tt).update(saved.marks)
                tables[name.removesuffix(".ngrams.tt")] = table
                continue
            first = next(name for name in saved.names if f"{name}.cores.0" in own)
            spec: Spec = saved.spec
            if spec.layout_name:  # the shapes of cores and gates do not show all of it
                spec = with_stored_layout(spec, stored.read(f"{first}.{spec.layout_name}"), first, where)
            others = [name for name in saved.names if name != first]
            others += [
                name for name in _tied_to(model, [first, *others], stored.shapes) if f"{name}.cores.0" not in own
            ]
            paths = list(dict.fromkeys([first, *others]))
            places = [_fitting_place(modules, name, spec, where) for name in paths]
            _keep_tied(model, {layer for layer, _ in places}, paths)
            dtype = places[0][0].get_parameter(places[0][1]).dtype
            tt = TensorTrain(spec, init_std=saved.init_std, threshold=saved.threshold, dtype=dtype, device="meta")
            vars(tt).update(saved.marks)
            tt._buffers.pop("block_ranks", None)  # read already, and no parameter, as ties of theirs have to be
            trains |= dict.fromkeys(places, tt)
            for name in paths[1:]:
                ties |= {f"{name}.{key}": f"{first}.{key}" for key, _ in tt.named_parameters()}
        compress_layers_(model, trains)
        embeddings = [model.get_submodule(name) for name in tables]
        for embedding, table in zip(embeddings, tables.values(), strict=True):
            attach_ngrams_(embedding, table)
        finish_ngrams_(model, embeddings)
        model.all_tied_weights_keys |= ties  # what the file stores once is not missing under its other names
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), _BLOCK_RANKS}
        self._missing = []
        for path, layer in model.named_modules():
            if isinstance(layer, CompressedLayer):
                vars(layer)["reset_parameters"] = (
                    _leave  # initializations may call it, and spare loaded values of others
                )
                bias, name = layer._parameters.get("bias"), f"{path}.bias"
                if (
                    bias is not None
                    and stored.shapes.get(name) != bias.shape
                    and name not in model.all_tied_weights_keys
                ):
                    self._missing.append(path)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Those that the caller of `from_pretrained` gave, for a model that is stored under the names that it has."""
        known = conversions(model)
        return weight_conversions[: len(weight_conversions) - len(known)] if self._as_named else weight_conversions

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        """Leave a model like one that `tensorize_` has compressed."""
        meta = [name for name, tt in named_trains(model) if any(p.is_meta for p in tt.parameters())]
        if meta:
            raise CheckpointError(
                f"expected a device for {meta[0]}, but device_map offloads it (one of {len(meta)} compressed layers), "
                "and accelerate cannot fetch their cores: they are small, so give them a device"
            )
        for name, tt in named_trains(model):
            if isinstance(tt.spec, NGramSpec):
                tt.spec = with_stored_layout(
                    tt.spec, tt.get_buffer(tt.spec.layout_name), name, model.config.name_or_path
                )
        for module in model.modules():
            if isinstance(module, CompressedLayer):
                vars(module).pop("reset_parameters", None)
                module.tt.note_layout_()
        for path in self._missing:
            _draw_bias_(model, path)
        model._keys_to_ignore_on_load_unexpected.discard(_BLOCK_RANKS)
        if self._as_named:
            model._weight_conversions = None  # of its class, once it is dense
        forget_quantizer_(model)
        note_formats_(model)

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        materialize_layers_(model)
        return model.to(dtype)

    def is_serializable(self) -> bool:
        """Whether the model can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained."""
        return True


def forget_quantizer_(model: Any) -> None:
    """Leave nothing of a quantizer in a loaded model but its config's `quantization_config`."""
    for module in model.modules():
        if hasattr(vars(module).get("config"), "_is_quantized"):
            del module.config._is_quantized
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        vars(model).pop(name, None)


def _names_in(model: Any, modules: Mapping[str, nn.Module], saved: SavedTrain) -> dict[str, str]:
    """A train's names in this model, which may be the base of the one that was saved, or have it as its base."""
    prefix = f"{model.base_model_prefix}."
    names: dict[str, str] = {}
    for name, kind in saved.names.items():
        candidates = (name, name.removeprefix(prefix), prefix + name)
        paths = {at: at.rpartition(".")[0] for at in candidates}
        at = next((at for at, path in paths.items() if _has_place(modules, path)), None)
        if at is not None:
            names[at] = kind
    return names


def _has_place(modules: Mapping[str, nn.Module], path: str) -> bool:
    return path in modules or bool(dense_place(modules, path) or ngram_place(modules, path))


class Stored:
    """What files hold, by the names in the model that transformers will load it to.

    as_named: whether these are the names in the files. A dense model may share the config of a compressed one, and
    is stored as transformers does it: so a core has to be among them.
    """

    def __init__(self, model: Any, placed: Sequence[SavedTrain], files: Sequence[str], *, as_named: bool) -> None:
        # not before a model is loaded: this module is imported while these are
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
        from transformers.modeling_utils import load_state_dict

        headers = {
            key: (file, value.shape)
            for file in files
            for key, value in load_state_dict(file, map_location="meta").items()
        }
        known: dict[str, Any] = model.state_dict()
        known |= {key: shape for saved in placed for name in saved.names for key, shape in saved.shapes(name).items()}

        def renamed(changes: Sequence[Any]) -> dict[str, str]:
            renamings = [change for change in changes if isinstance(change, WeightRenaming)]
            joins = [change for change in changes if isinstance(change, WeightConverter)]
            prefix = model.base_model_prefix
            return {rename_source_key(key, renamings, joins, prefix, known)[0]: key for key in headers}

        keys = renamed([])
        self.as_named = as_named and any(f"{name}.cores.0" in keys for saved in placed for name in saved.names)
        keys = keys if self.as_named else renamed(conversions(model))
        self._open: dict[str, Any] = {}
        self._places = {name: (headers[key][0], key) for name, key in keys.items()}
        self.shapes = {name: tuple(headers[key][1]) for name, key in keys.items()}

    def read(self, name: str) -> Tensor:
        """One of the tensors."""
        file, key = self._places[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt") if file.endswith(".safetensors") else torch.load(file)
        held = self._open[file]
        tensor: Tensor = held[key] if isinstance(held, dict) else held.get_tensor(key)
        return tensor


def conversions(model: Any) -> list[Any]:
    """How transformers renames and joins what it loads into this class of model."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    found: list[Any] = get_model_conversion_mapping(model)
    return found


def _leave(*_: object, **__: object) -> None:
    """In place of `reset_parameters` while a model is loaded."""


def _draw_bias_(model: Any, path: str) -> None:
    """Initialize the bias of a compressed layer, which the file has not, as the model does it for the dense layer."""
    layer = model.get_submodule(path)
    above = [path.rsplit(".", k)[0] for k in range(path.count(".") + 1)]
    owner = next((part for part in map(model.get_submodule, above) if hasattr(part, "_init_weights")), model)
    with torch.device("meta"):
        dense = converters()[layer.dense_type].build(layer)
    dense.register_parameter("bias", layer.bias)
    with torch.no_grad():
        layer.bias.zero_()
        owner._init_weights(dense)


def _keep_tied(model: Any, layers: set[nn.Module], paths: Sequence[str]) -> None:
    """Say that table and head, whose layers these are, stay tied where the caller has asked for others."""
    untied = len(layers) > 1 and getattr(model.config, "tie_word_embeddings", None) is False
    if untied and {model.get_input_embeddings(), model.get_output_embeddings()} <= layers:
        model.config.tie_word_embeddings = True
        warnings.warn(
            f"tie_word_embeddings=False, but the folder holds one tensor train for {' and '.join(paths)}: they stay "
            "tied. For layers of their own, materialize_ the loaded model, untie it, and tensorize_ it again",
            stacklevel=2,
        )


def _tied_to(model: Any, trains: Sequence[str], shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Other names that tensor trains with these names have, in layers that the model declares to share a weight with
    theirs, such as a head that was not saved with its base."""
    more: list[str] = []
    for pair in model.all_tied_weights_keys.items():
        for one, other in (pair, pair[::-1]):
            here, there = (weight.removesuffix(".weight") for weight in (one, other))
            if f"{there}.tt" in trains and f"{here}.tt" not in trains and one not in shapes and one != here:
                more.append(f"{here}.tt")
    return more


def _fitting_place(modules: Mapping[str, nn.Module], name: str, spec: Spec, where: object) -> tuple[nn.Module, str]:
    """The layer that a tensor train of this name replaces, and the name of its weight.

    Raises CheckpointError, naming `where`, unless it can be replaced by one with this spec.
    """
    path = name.rpartition(".")[0]
    place, layer, leaf = dense_place(modules, path), modules.get(path), "weight"
    reason: str | None = "it is of no type that can be compressed"
    if place is not None:
        layer, leaf, converter = place
        reason = refusal(layer, converter, leaf)
    if place is not None and reason is None and converter.layout is not None:
        reason = None if converter.layout.fits(spec) else f"its parameter {leaf} is {converter.layout.shape}"
    elif place is not None and reason is None:
        shape = converter.shape(layer)
        transposed = converter.table is None and isinstance(spec, TTMSpec)
        fits = isinstance(spec, TTMSpec) if converter.table is not None else True
        fits = isinstance(spec, TTSpec) if converter.convolution is not None else fits
        if not fits or spec.shape != (shape[::-1] if transposed else shape):
            reason = f"its sizes are {shape[0]} and {shape[1]}"
    if reason is not None or layer is None:
        raise CheckpointError(
            f"{where}: expected a layer at {path} that {spec} can replace, got a "
            f"{type(layer).__name__}: {reason}. Load it with the class of model that was saved"
        )
    return layer, leaf


def note_when_saved_() -> None:
    """Let `save_pretrained` of PreTrainedModel write the formats of whatever model it is called on."""
    kind: Any = sys.modules["transformers.modeling_utils"].PreTrainedModel
    own = kind.save_pretrained

    @functools.wraps(own)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _noted(self):
            return own(self, *args, **kwargs)

    kind.save_pretrained = save_pretrained


when_converted(note_formats_)
