"""`load_pretrained`: everything is planned and checked before anything is changed."""

import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.convert.converter import Converter
from comera.convert.ngrams import empty_table, finish_ngrams_, ngram_place
from comera.convert.registry import dense_place, refusal
from comera.convert.swap import compress_layers_
from comera.errors import CheckpointError
from comera.nn.adapted import refuse_adapters, train_names
from comera.nn.changes import notify_conversion
from comera.nn.ngram import NGramEmbedding, NGramTable, attach_ngrams_
from comera.nn.packed import HELD, CompressedParameter
from comera.nn.tensor_train import TensorTrain
from comera.pretrained.folder import SavedTrain, read_folder
from comera.pretrained.sharded import shard_like
from comera.pretrained.stored import MAPPED, StoredTensors, packed
from comera.pretrained.transformers_folder import read_transformers_folder
from comera.rank.optimizer_state import reset_state_, unwrap
from comera.tt.ngram import NGramSpec
from comera.tt.spec import BTTSpec, Spec, TTMSpec, TTSpec


def load_pretrained(
    model: nn.Module, folder: str | Path, *, strict: bool = True, optimizers: Sequence[Optimizer] = ()
) -> nn.Module:
    """Load what `save_pretrained` wrote into a model of the same architecture, in place.

    The folder may also be that of a compressed model of transformers, from its own `save_pretrained`. Layers get the
    saved modes and ranks. Parameters keep their dtype and device; those on the meta device go to the CPU. They stay the
    same objects if a layer is compressed already, with as many cores as saved; a dense layer that becomes compressed,
    other numbers of cores and the meta device give new ones. Create optimizers after such a load.

    Args:
        model: dense (fresh, or on the meta device) or compressed.
        folder: where `save_pretrained` wrote.
        strict: whether file and model must hold the same tensors. If not, what only one of them holds is ignored, with
            a warning.
        optimizers: those that train `model`. The state of every parameter that is loaded is reset, step counts
            included, since moments of the old values mean nothing for the new ones and may differ in shape. Optimizers
            that are not passed are not known here and keep their stale state: load their own state afterwards, as a
            checkpoint does, or create them after loading.

    Returns:
        The model.

    Raises:
        CheckpointError: a file that is missing, truncated, foreign or of other shapes, a model with adapters, or an
            optimizer that holds a parameter which loading would replace by a new one. The model is unchanged.

    Example:
        >>> import tempfile, torch, comera
        >>> def build():
        ...     return torch.nn.Sequential(torch.nn.Embedding(1000, 64), torch.nn.Linear(64, 256))
        >>> model = build()
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(rank=8), comera.TTM(rank=8)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     comera.save_pretrained(model, folder)
        ...     with torch.device("meta"):
        ...         fresh = build()  # dense; no weight is ever allocated
        ...     loaded = comera.load_pretrained(fresh, folder)
        >>> type(loaded[0]).__name__, type(loaded[1]).__name__
        ('TTMEmbedding', 'TTLinear')
    """
    folder = Path(folder)
    plan = _Plan(model, folder)
    for saved in plan.trains:
        plan.place(saved)
    plan.match()
    plan.check(folder, strict=strict)
    written, replaced = plan.parameters()
    _check_optimizers(model, replaced, optimizers)
    if plan.unmatched:
        warnings.warn(f"{folder}: ignored what does not match: {'; '.join(plan.unmatched)}", stacklevel=2)
    plan.apply()
    reset_state_(written, optimizers)
    return model


def _check_optimizers(model: nn.Module, replaced: set[Tensor], optimizers: Iterable[Optimizer]) -> None:
    """Raise CheckpointError for an optimizer that would go on training a parameter which is no longer in the model."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in map(unwrap, optimizers):
        lost = [names[p] for group in optimizer.param_groups for p in group["params"] if p in replaced]
        if lost:
            raise CheckpointError(
                f"expected optimizers of parameters that can be loaded in place, but this {type(optimizer).__name__} "
                f"holds {lost[0]}, which loading replaces by new parameters (one of {len(lost)}). Nothing was loaded: "
                "load first, then create the optimizer"
            )


@dataclass
class _Placement:
    """Where a tensor train of the file goes: dense layers to replace, or modules that hold a tensor train already."""

    saved: SavedTrain
    names: list[str] = field(default_factory=list)
    dense: list[tuple[nn.Module, str]] = field(default_factory=list)  # and the names of their weights
    holders: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def held(self) -> set[TensorTrain]:
        """The tensor trains of the model where this one goes."""
        return {getattr(module, attribute) for module, attribute in self.holders}

    @property
    def in_place(self) -> TensorTrain | None:
        """The tensor train of the model whose parameters can take the new values; None if it must be a new one."""
        held = next(iter(self.held), None)
        fits = held is not None and held.spec.order == self.saved.spec.order and not held.cores[0].is_meta
        return held if fits else None


class _Plan:
    """What loading will do to a model; `apply` changes it once everything else has been checked."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        instead = "load the model first, then its adapters with comera.adapters.load_adapters_"
        refuse_adapters(model, CheckpointError, "load_pretrained", instead)
        self.model = model
        self.problems: list[str] = []  # what cannot be loaded at all
        self.unmatched: list[str] = []  # what only the file or only the model holds
        self.placements: list[_Placement] = []
        self.tables: dict[nn.Module, NGramTable] = {}  # for embeddings without one beside which the file has one
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._train_names = train_names(model)
        state = model.state_dict(keep_vars=True)
        self._versions = getattr(state, "_metadata", {})
        self.state: dict[str, Tensor] = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        buffers = model.named_buffers(remove_duplicate=False)
        self.meta_buffers = {key: buffer for key, buffer in buffers if buffer.is_meta and key not in state}
        self.trains, self.stored, self._transient = self._read(folder)
        self._left = {key: shape for key, shape in self.stored.shapes.items() if key not in self._transient}

    def _read(self, folder: Path) -> tuple[list[SavedTrain], StoredTensors, set[str]]:
        """Tensor trains, tensors and names of transient buffers in a folder."""
        found = read_transformers_folder(folder)
        if found is None:
            manifest, trains, stored = read_folder(folder)
            return trains, stored, set(manifest["transient"])
        trains, stored = found
        own = {*self.state, *(key for saved in trains for at in saved.names for key in saved.shapes(at))}
        library = sys.modules.get("transformers.modeling_utils")
        theirs: Any = self.model if library is not None and isinstance(self.model, library.PreTrainedModel) else None
        computed = own.intersection(getattr(theirs, "_keys_to_ignore_on_save", None) or ()) - stored.keys()
        if theirs is not None and (computed or not stored.keys() <= own):
            # transformers does not store what it computes, such as sinusoidal tables, and the first versions of this
            # library left it to store some models under the names and in the parts of their first release
            loaded, info = type(theirs).from_pretrained(folder, dtype="auto", output_loading_info=True)
            trains = [SavedTrain.of(SavedTrain.entry(tt, names)) for tt, names in train_names(loaded).items()]
            missing = info["missing_keys"] - computed
            stored = StoredTensors({key: value for key, value in loaded.state_dict().items() if key not in missing})
        names: dict[int, list[str]] = {}  # transformers stores tied tensors once and leaves the ties to the model
        for key, value in self.state.items():
            names.setdefault(id(value), []).append(key)
        compressed = self._replaced_by(trains)  # a tie that was cut: one of its layers has a tensor train in the file
        for tied in names.values():
            there = [key for key in tied if key in stored]
            for key in tied if there else ():
                if key not in stored and key not in compressed:
                    stored.tie(key, there[0])
        return trains, stored, set()

    def _replaced_by(self, trains: Iterable[SavedTrain]) -> set[str]:
        """Names of the model's dense parameters in whose place the file has a tensor train."""
        paths = [name.rpartition(".")[0] for saved in trains for name in saved.names]
        places = [(path, dense_place(self._modules, path)) for path in paths]
        return {_name_of(path, leaf, converter) for path, place in places if place for _, leaf, converter in [place]}

    @property
    def found(self) -> bool:
        """Whether anything of the file has a place in the model, or both are empty."""
        return bool(self.placements or self.state) or not self.stored

    def place(self, saved: SavedTrain) -> None:
        """Find the modules, by name and type of layer, where a tensor train of the file belongs."""
        placement = _Placement(saved)
        for name, kind in saved.names.items():
            path, _, attribute = name.rpartition(".")
            if isinstance(saved.spec, NGramSpec):
                self._add_table(path, saved, saved.spec)
            module = self._modules.get(path)
            for key, shape in saved.shapes(name).items():
                came = self._left.pop(key, None)
                if came != shape:
                    self.problems.append(
                        f"{key}: expected {shape} as the manifest says, got {'nothing' if came is None else came}"
                    )
                elif key == f"{name}.{saved.spec.layout_name}" and self.stored[key].tolist() != saved.spec.layout:
                    self.problems.append(f"{key}: expected what the manifest says, got others")
            held = getattr(module, attribute, None)
            there = None if isinstance(held, TensorTrain) else dense_place(self._modules, path)
            if module is None and there is None:
                self.unmatched.append(f"{path} ({kind}) is in the file only")
                continue
            if there is not None:
                layer, leaf, converter = there
                misfit = _misfit(*there, kind, saved.spec)
                placement.dense.append((layer, leaf))
                self.state.pop(_name_of(path, leaf, converter), None)
                if converter.layout is None:
                    for buffer in layer._buffers:  # they go with the layer
                        self.meta_buffers.pop(f"{path}.{buffer}", None)
            else:
                assert module is not None
                misfit = self._held_misfit(module, name, held, kind, saved.spec)
                if not misfit:
                    placement.holders.append((module, attribute))
                self._claim(f"{name}.")
            placement.names.append(name)
            if misfit:
                self.problems.append(f"{path}: expected {misfit}, got {kind} with {saved.spec} in the file")
        if placement.names:
            self.placements.append(placement)
        tied = [self._train_names[tt] for tt in placement.held]
        if placement.holders and (placement.dense or len(tied) > 1 or set(tied[0]) != set(placement.names)):
            where = ", ".join(placement.names)
            self.problems.append(f"{where}: expected to share one tensor train in the model as in the file, or dense")

    def _add_table(self, path: str, saved: SavedTrain, spec: NGramSpec) -> None:
        """Plan an empty table of n-grams at a path of the file, if that is beside an embedding without one."""
        embedding = ngram_place(self._modules, path)
        if embedding is None or embedding in self.tables or isinstance(embedding, NGramEmbedding):
            return
        like = next(embedding.parameters())
        table = self.tables[embedding] = empty_table(spec, saved.init_std, saved.threshold, like, like.device)
        for beside in [name for name, module in self._modules.items() if module is embedding]:
            at = f"{beside}.ngrams".removeprefix(".")
            self._modules[at] = table
            self._train_names.setdefault(table.tt, {})[f"{at}.tt"] = type(table).__name__
            self.state |= {f"{at}.{key}": own for key, own in table.state_dict(keep_vars=True).items()}

    def match(self) -> None:
        """Compare the other tensors of the model with what is left in the file."""
        placed = {name for placement in self.placements for name in placement.names}
        for name, kind in (pair for names in self._train_names.values() for pair in names.items()):
            if name not in placed:
                self.unmatched.append(f"{name.rpartition('.')[0]} ({kind}) is compressed in the model only")
                if any(p.is_meta for p in self._modules[name].parameters()):
                    self.problems.append(_without_values(name))
                self._claim(f"{name}.")
        first: dict[int, str] = {}
        for key, own in list(self.state.items()):
            came = self._left.pop(key, None)
            tied_to = first.setdefault(id(own), key)
            if came is None:
                self.unmatched.append(f"{key} {tuple(own.shape)} is in the model only")
                del self.state[key]
                if own.is_meta:
                    self.problems.append(_without_values(key))
            elif came != own.shape:
                self.problems.append(f"{key}: expected {tuple(own.shape)}, got {came} in the file")
            elif tied_to != key and tied_to in self.state and not torch.equal(self.stored[key], self.stored[tied_to]):
                self.problems.append(f"{key} and {tied_to} are tied in the model, but differ in the file")
        self.unmatched += [f"{key} {came} is in the file only" for key, came in self._left.items()]
        for key, buffer in self.meta_buffers.items():
            if key not in self._transient or self.stored.shapes[key] != buffer.shape:
                self.problems.append(f"buffer {key} is on the meta device and its values are not in the file")

    def check(self, folder: Path, *, strict: bool) -> None:
        """Raise CheckpointError for a file that does not fit the model."""
        problems = self.problems + (self.unmatched if strict else [])
        if problems or not self.found:
            shown = "; ".join(problems[:8]) or "it has no tensor of that name and shape"
            more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise CheckpointError(
                f"{folder} does not fit this {type(self.model).__name__}: {shown}{more}. Nothing was loaded: build the "
                "model as it was when it was saved, dense or converted in the same way"
                + ("; strict=False loads what fits" if strict and not self.problems else "")
            )

    def parameters(self) -> tuple[set[Tensor], set[Tensor]]:
        """The model's present parameters that `apply` writes in place, and those that it replaces by new ones."""
        written: set[Tensor] = set()
        replaced: set[Tensor] = set()
        for placement in self.placements:
            replaced.update(layer.get_parameter(leaf) for layer, leaf in placement.dense)
            for held in placement.held:
                (written if placement.in_place else replaced).update(held.parameters())
        for own in self.state.values():
            if isinstance(own, nn.Parameter):
                (replaced if own.is_meta else written).add(own)
        return written, replaced

    @torch.no_grad()
    def apply(self) -> None:
        """Change the model; nothing can fail any more."""
        for embedding, table in self.tables.items():
            attach_ngrams_(embedding, table)
        new: dict[tuple[nn.Module, str], TensorTrain] = {}
        for placement in self.placements:
            saved, held = placement.saved, placement.in_place
            tensors = [self.stored[key].clone() for key in saved.shapes(placement.names[0])]
            order = saved.spec.order
            cores, gates = tensors[:order], tensors[order : order + len(saved.spec.inner_ranks)]
            if held is not None:
                held.set_(saved.spec, cores, gates)  # the same Parameters, so that optimizers keep theirs
                held.init_std, held.threshold = saved.init_std, saved.threshold
                vars(held).update(saved.marks)
                continue
            old = next((tt.cores[0] for tt in placement.held), None)
            old = placement.dense[0][0].get_parameter(placement.dense[0][1]) if old is None else old
            constants = {"init_std": saved.init_std, "threshold": saved.threshold}
            device = "cpu" if old.is_meta else old.device
            tt = TensorTrain.from_tensors(saved.spec, cores, gates, **constants, dtype=old.dtype, device=device)
            tt.requires_grad_(old.requires_grad)
            vars(tt).update(saved.marks)
            new |= dict.fromkeys(placement.dense, tt)
            for module, attribute in placement.holders:
                setattr(module, attribute, tt)
        if new:
            compress_layers_(self.model, new)
        else:
            notify_conversion(self.model)

        there = {key: own for key, own in self.state.items() if not own.is_meta}
        for names in packed(there, MAPPED):
            self._load(names)
        self._load([key for key in self.state if key not in there], assign=True)
        for key, buffer in self.meta_buffers.items():
            path, _, leaf = key.rpartition(".")
            self.model.get_submodule(path)._buffers[leaf] = self.stored[key].to(buffer.dtype).clone()
        if self.tables:
            finish_ngrams_(self.model, list(self.tables))

    def _load(self, names: Sequence[str], *, assign: bool = False) -> None:
        """Load these tensors of the file into those of the model. assign: in the place of them, on the meta device."""
        made: dict[int, Tensor] = {}  # tied ones are read once, and stay tied
        for key in names:
            own = self.state[key]
            if id(own) not in made and assign:
                value = self.stored[key].to(own.dtype).clone()
                made[id(own)] = nn.Parameter(value, own.requires_grad) if isinstance(own, nn.Parameter) else value
            elif id(own) not in made:
                made[id(own)] = shard_like(self.stored[key], own)
        state = OrderedDict((key, made[id(self.state[key])]) for key in names)
        state._metadata = self._versions  # type: ignore[attr-defined]
        self.model.load_state_dict(state, strict=False, assign=assign)

    def _held_misfit(self, module: nn.Module, name: str, held: object, kind: str, spec: Spec) -> str | None:
        """What tensor train a module holds as `name`, if not one that a layer of type `kind` with this spec can
        replace."""
        if not isinstance(held, TensorTrain):
            return f"a layer that holds or can become a tensor train (not this {type(module).__name__})"
        if (self._train_names[held][name], type(held.spec), held.spec.shape) == (kind, type(spec), spec.shape):
            return None
        return f"a tensor train for a {type(module).__name__} {held.spec.shape[0]} x {held.spec.shape[1]}"

    def _claim(self, prefix: str) -> None:
        """Take the model's tensors that a tensor train replaces out of those that are loaded one by one."""
        for key in [key for key in self.state if key.startswith(prefix)]:
            del self.state[key]


def _without_values(name: str) -> str:
    return f"{name} is on the meta device and not in the file, so it would get no values"


def _name_of(path: str, leaf: str, converter: Converter) -> str:
    """The dense parameter behind the path of a compressed layer."""
    if converter.layout is None:
        return f"{path}.{leaf}"
    return f"{path.removesuffix(leaf).removesuffix('.').removesuffix(HELD)}{leaf}"


def _misfit(layer: nn.Module, leaf: str, converter: Converter, kind: str, spec: Spec) -> str | None:
    """What a dense layer can be replaced by, if not by a layer of type `kind` with this spec."""
    reason = refusal(layer, converter, leaf)
    if reason:
        return f"a layer that can be converted (not this {type(layer).__name__}: {reason})"
    rows, cols = converter.shape(layer)
    allowed: set[tuple[object, ...]]
    if converter.layout is not None:
        if kind == CompressedParameter.__name__ and converter.layout.fits(spec):
            return None
        return f"a tensor train for the parameter {leaf} {converter.layout.shape} of a {type(layer).__name__}"
    if converter.table is not None:
        allowed = {(converter.table.__name__, TTMSpec, (rows, cols))}
    elif converter.convolution is not None:
        allowed = {(converter.convolution.__name__, TTSpec, (rows, cols))}
    else:
        linear = {("TTLinear", TTSpec, (rows, cols)), ("BTTLinear", BTTSpec, (rows, cols))}
        allowed = {*linear, ("TTMProjection", TTMSpec, (cols, rows))}
    if (kind, type(spec), spec.shape) in allowed:
        return None
    return f"a tensor train for a {type(layer).__name__} {rows} -> {cols}"
