"""A model in a folder: its numbers in `model.safetensors`, and what its chains look like in a manifest.

The manifest stands in the header of model.safetensors, so one rename replaces numbers and manifest together and a kill
never leaves a pair that does not match; `comera.json` is a copy of it for people, which loading does not read.

    {"format": 1, "comera": version, "metadata": {...},
     "trains": [{"names": {"encoder.0.tt": "TTLinear"}, "spec": {...}, "init_std": 0.02, "threshold": 0.01}],
     "tied": {"head.tt.cores.0": "embed.tt.cores.0"},      a tied tensor is stored once, under its first name
     "transient": ["embed.positions"]}      buffers with persistent=False: for models on the meta device, else not read
"""

from __future__ import annotations

import json
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from comera._version import __version__
from comera.convert.registry import converters, refusal
from comera.convert.swap import compress_layers_
from comera.errors import CheckpointError, SpecError
from comera.files import replace_file
from comera.nn.tensor_train import TensorTrain
from comera.tt.spec import Spec, TTSpec, spec_from_dict

WEIGHTS, MANIFEST = "model.safetensors", "comera.json"
_FORMAT = 1


def save_pretrained(model: nn.Module, folder: str | Path, *, metadata: Mapping[str, Any] | None = None) -> None:
    """Write a model, compressed or dense, to `folder`: model.safetensors and comera.json, each replaced as a whole.

    metadata: JSON-ready values to keep in the manifest. Tied tensors are stored once.
    Raises CheckpointError, the folder as it was, for a model on the meta device or with state that is no tensor.
    """
    folder = Path(folder)
    tensors, tied, transient = _stored_tensors(model)
    manifest = {
        "format": _FORMAT,
        "comera": __version__,
        "metadata": dict(metadata or {}),
        "trains": [
            {"names": names, "spec": tt.spec.to_dict(), "init_std": tt.init_std, "threshold": tt.threshold}
            for tt, names in _train_names(model).items()
        ],
        "tied": tied,
        "transient": transient,
    }
    try:
        header = {"format": "pt", "comera": json.dumps(manifest, allow_nan=False)}
        folder.mkdir(parents=True, exist_ok=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"metadata for {folder} must be JSON-ready, but: {error}") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(f"expected a folder to save in, found a file at {folder}") from error
    try:
        replace_file(folder / WEIGHTS, lambda beside: save_file(tensors, beside, header))
    except SafetensorError as error:
        raise CheckpointError(f"{folder / WEIGHTS} could not be written: {error}") from error
    replace_file(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a saved model; reads no more than the header of model.safetensors.

    Raises CheckpointError for a file that is missing, truncated, foreign or of a later format.
    """
    return _read(Path(folder), with_tensors=False)[0]


def load_pretrained(model: nn.Module, folder: str | Path, *, strict: bool = True) -> nn.Module:
    """Load what `save_pretrained` wrote into a model of the same architecture, in place; returns the model.

    model: dense (fresh, or on the meta device) or converted already; its layers get the saved modes and ranks, its
        numbers keep their dtype and device (those on the meta device go to the CPU). Parameters stay the same objects
        where a layer is converted already and its order is the saved one.
    strict: whether the file and the model must hold the same tensors; if not, what is only in one of them is left
        out, with a warning.
    Raises CheckpointError, the model untouched, for a file that is missing, truncated, foreign or of other shapes.
    """
    folder = Path(folder)
    manifest, stored = _read(folder)
    plan = _Plan(model, stored, set(manifest["transient"]))
    for entry in manifest["trains"]:
        plan.place(_Chain.of(entry), entry["names"])
    plan.match()
    problems = plan.problems + (plan.unmatched if strict else [])
    if problems or not plan.found:
        shown = "; ".join(problems[:8]) or "it has no tensor of that name and shape"
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            f"{folder} does not fit this {type(model).__name__}: {shown}{more}. Nothing was loaded: build the model as "
            "it was when it was saved, dense or converted in the same way"
            + ("; strict=False loads what fits" if strict and not plan.problems else "")
        )
    if plan.unmatched:
        warnings.warn(f"{folder}: left out what does not match: {'; '.join(plan.unmatched)}", stacklevel=2)
    plan.apply()
    return model


@dataclass
class _Chain:
    """A chain of the file, and where it goes: dense layers to replace, or modules that hold a chain already."""

    spec: Spec
    init_std: float
    threshold: float
    names: list[str] = field(default_factory=list)
    dense: list[nn.Module] = field(default_factory=list)
    holders: list[tuple[nn.Module, str]] = field(default_factory=list)

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> _Chain:
        return cls(spec_from_dict(entry["spec"]), float(entry["init_std"]), float(entry["threshold"]))

    @property
    def held(self) -> set[TensorTrain]:
        """The chains that are in the model where this one goes."""
        return {getattr(module, attribute) for module, attribute in self.holders}

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Names and shapes of its tensors in the file, for the chain that is registered as `name`: cores first."""
        cores = {f"{name}.cores.{k}": shape for k, shape in enumerate(self.spec.core_shapes)}
        return cores | {f"{name}.rank_params.{k}": (rank,) for k, rank in enumerate(self.spec.inner_ranks)}


class _Plan:
    """What loading will do to a model; everything is looked at before `apply` changes anything.

    problems: what cannot be loaded at all. unmatched: what is only in the file or only in the model.
    """

    def __init__(self, model: nn.Module, stored: Mapping[str, Tensor], transient: set[str]) -> None:
        self.model, self.stored, self._transient = model, stored, transient
        self.problems: list[str] = []
        self.unmatched: list[str] = []
        self.chains: list[_Chain] = []
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._train_names = _train_names(model)
        self._left = {key: value for key, value in stored.items() if key not in transient}
        state = model.state_dict(keep_vars=True)
        self.state: dict[str, Tensor] = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        self.meta_buffers = {key: b for key, b in _transient_buffers(model).items() if b.is_meta}

    @property
    def found(self) -> bool:
        """Whether anything of the file has a place in the model, or both are empty."""
        return bool(self.chains or self.state) or not self.stored

    def place(self, chain: _Chain, names: Mapping[str, str]) -> None:
        """Find the modules, by name of the chain and kind of layer, where a chain of the file belongs."""
        for name, kind in names.items():
            path, _, attribute = name.rpartition(".")
            module = self._modules.get(path)
            for key, shape in chain.shapes(name).items():
                came = self._left.pop(key, None)
                if came is None or came.shape != shape:
                    got = "nothing" if came is None else str(tuple(came.shape))
                    self.problems.append(f"{key}: expected {shape} as the manifest says, got {got}")
            if module is None:
                self.unmatched.append(f"{path} ({kind}) is in the file only")
                continue
            if type(module) in converters():
                misfit = _misfit(module, kind, chain.spec)
                chain.dense.append(module)
                self._forget(f"{path}.weight")
            else:
                misfit = _held_misfit(module, attribute, kind, chain.spec)
                if not misfit:
                    chain.holders.append((module, attribute))
                self._forget(f"{name}.")
            chain.names.append(name)
            if misfit:
                self.problems.append(f"{path}: expected {misfit}, got {kind} with {chain.spec} in the file")
        if chain.names:
            self.chains.append(chain)
        tied = [self._train_names[tt] for tt in chain.held]
        if chain.holders and (chain.dense or len(tied) > 1 or set(tied[0]) != set(chain.names)):
            where = ", ".join(chain.names)
            self.problems.append(f"{where}: expected to share one chain in the model as in the file, or to be dense")

    def match(self) -> None:
        """Compare the other tensors of the model with what is left in the file."""
        placed = {name for chain in self.chains for name in chain.names}
        for name, kind in (pair for names in self._train_names.values() for pair in names.items()):
            if name not in placed:
                self.unmatched.append(f"{name.rpartition('.')[0]} ({kind}) is compressed in the model only")
                if any(p.is_meta for p in self._modules[name].parameters()):
                    self.problems.append(
                        f"{name} is on the meta device and not in the file, so it would get no numbers"
                    )
                self._forget(f"{name}.")
        first: dict[int, str] = {}
        for key, own in list(self.state.items()):
            came = self._left.pop(key, None)
            twin = first.setdefault(id(own), key)
            if came is None:
                self.unmatched.append(f"{key} {tuple(own.shape)} is in the model only")
                del self.state[key]
                if own.is_meta:
                    self.problems.append(f"{key} is on the meta device and not in the file, so it would get no numbers")
            elif came.shape != own.shape:
                self.problems.append(f"{key}: expected {tuple(own.shape)}, got {tuple(came.shape)} in the file")
            elif twin != key and twin in self.state and not torch.equal(came, self.stored[twin]):
                self.problems.append(f"{key} and {twin} are tied in the model, but differ in the file")
        self.unmatched += [f"{key} {tuple(came.shape)} is in the file only" for key, came in self._left.items()]
        for key, buffer in self.meta_buffers.items():
            if key not in self._transient or self.stored[key].shape != buffer.shape:
                self.problems.append(f"buffer {key} is on the meta device and its numbers are not in the file")

    @torch.no_grad()
    def apply(self) -> None:
        """Change the model; nothing is left to fail."""
        replaced: dict[nn.Module, TensorTrain] = {}
        for chain in self.chains:
            tensors = [self.stored[key].clone() for key in chain.shapes(chain.names[0])]
            numbers = chain.spec, tensors[: chain.spec.order], tensors[chain.spec.order :]
            held = next(iter(chain.held), None)
            if held is not None and held.spec.order == chain.spec.order and not held.cores[0].is_meta:
                held.set_(*numbers)  # the same Parameters, so that optimizers keep theirs
                held.init_std, held.threshold = chain.init_std, chain.threshold
                continue
            like = held.cores[0] if held is not None else chain.dense[0].get_parameter("weight")
            device = "cpu" if like.is_meta else like.device
            tt = TensorTrain.from_tensors(
                *numbers, init_std=chain.init_std, threshold=chain.threshold, dtype=like.dtype, device=device
            )
            tt.requires_grad_(like.requires_grad)
            replaced |= dict.fromkeys(chain.dense, tt)
            for module, attribute in chain.holders:
                setattr(module, attribute, tt)
        compress_layers_(self.model, replaced)

        self._load({key: self.stored[key] for key, own in self.state.items() if not own.is_meta})
        made: dict[int, Tensor] = {}  # tied ones stay tied
        for key, own in self.state.items():
            if own.is_meta and id(own) not in made:
                value = self.stored[key].to(own.dtype).clone()
                made[id(own)] = nn.Parameter(value, own.requires_grad) if isinstance(own, nn.Parameter) else value
        self._load({key: made[id(own)] for key, own in self.state.items() if own.is_meta}, assign=True)
        for key, buffer in self.meta_buffers.items():
            path, _, leaf = key.rpartition(".")
            self.model.get_submodule(path)._buffers[leaf] = self.stored[key].to(buffer.dtype).clone()

    def _load(self, tensors: Mapping[str, Tensor], *, assign: bool = False) -> None:
        state = OrderedDict(tensors)
        state._metadata = self.model.state_dict()._metadata  # type: ignore[attr-defined]  # versions of the modules
        self.model.load_state_dict(state, strict=False, assign=assign)

    def _forget(self, prefix: str) -> None:
        """Tensors of the model that the chains of the file stand for."""
        for key in [key for key in self.state if key.startswith(prefix)]:
            del self.state[key]


def _misfit(layer: nn.Module, kind: str, spec: Spec) -> str | None:
    """What a dense layer could be replaced by, if not by a `kind` of this spec."""
    converter = converters()[type(layer)]
    reason = refusal(layer, converter)
    if reason:
        return f"a layer that can be converted (not this {type(layer).__name__}: {reason})"
    rows, cols = converter.shape(layer)
    if converter.format == "ttm":
        allowed = {(converter.table.__name__, "ttm", (rows, cols))}
    else:
        allowed = {("TTLinear", "tt", (rows, cols)), ("TTMProjection", "ttm", (cols, rows))}
    if (kind, _format(spec), spec.shape) in allowed:
        return None
    return f"a chain for a {type(layer).__name__} {rows} -> {cols}"


def _held_misfit(module: nn.Module, attribute: str, kind: str, spec: Spec) -> str | None:
    """What chain a module holds, if not one that a `kind` of this spec could take the place of."""
    held = getattr(module, attribute, None)
    if not isinstance(held, TensorTrain):
        return f"a layer that holds or can become a chain (not this {type(module).__name__})"
    if type(module).__name__ == kind and _format(held.spec) == _format(spec) and held.spec.shape == spec.shape:
        return None
    return f"a chain for a {type(module).__name__} {held.spec.shape[0]} x {held.spec.shape[1]}"


def _format(spec: Spec) -> str:
    return "tt" if isinstance(spec, TTSpec) else "ttm"


def _train_names(model: nn.Module) -> dict[TensorTrain, dict[str, str]]:
    """Every chain with all of its names, and the kind of layer that holds it there."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names: dict[TensorTrain, dict[str, str]] = {}
    for name, module in modules.items():
        if isinstance(module, TensorTrain):
            names.setdefault(module, {})[name] = type(modules[name.rpartition(".")[0]]).__name__
    return names


def _transient_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that `state_dict` leaves out (persistent=False)."""
    saved = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name not in saved}


def _stored_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """The tensors of a model, each once, in memory of its own; for other names of a tied one, the stored name; and
    the names of those that are no part of the state."""
    transient = _transient_buffers(model)
    first: dict[int, str] = {}
    memory: set[int] = set()
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, value in {**model.state_dict(keep_vars=True), **transient}.items():
        if not isinstance(value, Tensor) or value.is_meta:
            state = "is on the meta device" if isinstance(value, Tensor) else f"is a {type(value).__name__}, no tensor"
            raise CheckpointError(f"{name} of this {type(model).__name__} {state}: only tensors with numbers are saved")
        if id(value) in first:
            tied[name] = first[id(value)]
            continue
        first[id(value)] = name
        tensor = value.detach().cpu().contiguous()
        where = tensor.untyped_storage().data_ptr()
        if where in memory and tensor.numel():  # another view of the same memory, which safetensors refuses
            tensor = tensor.clone()
        memory.add(where)
        tensors[name] = tensor
    return tensors, tied, list(transient)


def _read(folder: Path, *, with_tensors: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Manifest and tensors of a saved model, tied ones under each of their names; from one open file."""
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("comera")
            tensors = {name: file.get_tensor(name) for name in (file.keys() if with_tensors else ())}
    except FileNotFoundError as error:
        raise CheckpointError(f"expected a saved model in {folder}, but it has no {WEIGHTS}") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is truncated or no safetensors file ({error}): take another copy") from error
    if text is None:
        raise CheckpointError(
            f"{path} was not written by save_pretrained of this library: it has no manifest. To start from the weights "
            "of a dense model, load them into it and call tensorize_ with init='decompose'"
        )
    try:
        manifest: dict[str, Any] = json.loads(text)
        if manifest["format"] != _FORMAT:
            raise CheckpointError(
                f"{path}: expected manifest format {_FORMAT}, got {manifest['format']} "
                f"(written by version {manifest['comera']}): update this library"
            )
        for entry in manifest["trains"]:
            _Chain.of(entry)
            dict(entry["names"])
        if with_tensors:
            tensors |= {name: tensors[source] for name, source in manifest["tied"].items()}
            if not set(manifest["transient"]) <= tensors.keys():
                raise KeyError("transient")
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, SpecError) as error:
        raise CheckpointError(f"{path}: its manifest is damaged ({error!r}): take another copy") from error
    return manifest, tensors
