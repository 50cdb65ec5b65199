"""Adapters in a folder, without the model that they belong to: `save_adapters` and `load_adapters_`.

    adapter_model.safetensors   the tensors, and in its header all that loading reads, as in a saved model
                                (pretrained/folder.py); "adapter" besides: order, rank and scale, and what is trained
    adapter_config.json         the same for people, with the names that PEFT gives it

Keys of tensors are PEFT's: "base_model.model.", the name of the layer, then "tt.cores.0", ..., "tt.rank_params.0", ...
of its adapter, or the parameters and buffers of a module of `also_train`, or a buffer of another module that training
has moved, such as running statistics. Ranks are those that training left.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from comera._version import __version__
from comera.adapters.attach import check_plain, place_, report_of
from comera.adapters.config import TTAdapter
from comera.adapters.record import moved_buffers, read, stored_buffers
from comera.adapters.report import AdapterReport
from comera.adapters.sites import Site, check_apart, find_sites, no_tensors
from comera.convert.select import all_names
from comera.errors import CheckpointError, ComeraError
from comera.files import replace_file
from comera.nn.adapted import type_name
from comera.nn.tensor_train import TensorTrain
from comera.pretrained.folder import FORMAT, Kind, SavedTrain, file_header, read_folder
from comera.pretrained.sharded import is_writer, whole
from comera.pretrained.stored import checksum
from comera.tt.spec import TTSpec

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model"
_ADAPTERS = Kind(
    WEIGHTS, "saved adapters", "save_adapters", "Adapters of PEFT are loaded by PEFT: see comera.integrations.peft"
)


def save_adapters(model: nn.Module, folder: str | Path) -> None:
    """Write the adapters of a model, the modules of `also_train` and the buffers that have moved to `folder`.

    The model itself is not written.

    With parameters that `fully_shard` has spread over processes, call it in every process; the first one writes.

    Args:
        model: the model that was given to `adapt_`, or a wrapper of it.
        folder: gets adapter_model.safetensors and adapter_config.json, each replaced as a whole.

    Raises:
        ConversionError: a model without adapters, or a part of one.
        CheckpointError: one on the meta device, or a folder that cannot be written. It is unchanged.

    Example:
        >>> import tempfile, torch, comera
        >>> from comera.adapters import TTAdapter, adapt_, load_adapters_, save_adapters
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        >>> base = {name: value.clone() for name, value in model.state_dict().items()}
        >>> _ = adapt_(model, TTAdapter(rank=4), targets="0", also_train="2")
        >>> _ = model[0].adapter.tt.cores[-1].data.normal_()  # as training does it
        >>> fresh = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        >>> _ = fresh.load_state_dict(base)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapters(model, folder)
        ...     report = load_adapters_(fresh, folder)
        >>> x = torch.randn(3, 64)
        >>> torch.equal(fresh(x), model(x))
        True
    """
    folder = Path(folder)
    root, record, layers = read(model, "save_adapters")
    entries, tensors = [], dict[str, Tensor]()
    for name, layer in layers.items():
        tt, at = layer.adapter.tt, _key(name, "tt")
        entries.append(SavedTrain.entry(tt, {at: type_name(layer)}))
        tensors |= {f"{at}.{key}": value for key, value in tt.state_dict(keep_vars=True).items()}
    for head in record.heads:
        state = root.get_submodule(head).state_dict(keep_vars=True)
        tensors |= {_key(head, key): value for key, value in state.items()}
    buffers = moved_buffers(root, record)
    tensors |= {_key(*name.rpartition(".")[::2]): value for name, value in buffers.items()}
    for name, value in tensors.items():
        if value.is_meta:
            raise CheckpointError(f"{name} is on the meta device: only tensors with data can be saved")
    stored = {name: whole(value.detach()).cpu().contiguous().clone() for name, value in tensors.items()}
    about = {"adapter": asdict(record.adapter), "also_train": list(record.heads), "buffers": list(buffers)}
    manifest = {
        "format": FORMAT,
        "comera": __version__,
        **about,
        "metadata": {},
        "trains": entries,
        "tied": {},
        "transient": [],
        "checksum": checksum(stored),
    }
    config = {
        "peft_type": "COMERA_TT",
        "base_model_name_or_path": getattr(getattr(root, "config", None), "_name_or_path", None) or None,
        "target_modules": list(layers),
        "modules_to_save": list(record.heads),
        "r": record.adapter.rank,
        **about,
        "comera": __version__,
        "ranks": {name: list(layer.adapter.tt.spec.inner_ranks) for name, layer in layers.items()},
    }
    if not is_writer(root.parameters()):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(f"expected a folder to save in, found a file at {folder}") from error
    try:
        replace_file(folder / WEIGHTS, lambda beside: save_file(stored, beside, file_header(manifest)))
    except SafetensorError as error:
        raise CheckpointError(f"{folder / WEIGHTS} could not be written: {error}") from error
    replace_file(folder / CONFIG, json.dumps(config, indent=1) + "\n")


@torch.no_grad()
def load_adapters_(model: nn.Module, folder: str | Path) -> AdapterReport:
    """Put the adapters that `save_adapters` wrote beside the layers of the same model, in place.

    The model must be the one that they were trained beside, with the same weights, which the folder does not hold; what
    is checked are names and sizes of its layers, which may be dense or compressed. Afterwards the model is as it was
    when the adapters were saved: they and the modules of `also_train` are trained, everything else is frozen.

    Args:
        model: without adapters.
        folder: where `save_adapters` wrote.

    Returns:
        The adapter of each layer; printable.

    Raises:
        CheckpointError: files that are missing, damaged or of something else; adapters for layers that the model does
            not have, or that have other sizes; a model that has adapters, is sharded, or is on the meta device. The
            model is unchanged.

    Example:
        >>> import tempfile, torch
        >>> from comera.adapters import TTAdapter, adapt_, load_adapters_, save_adapters
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> _ = adapt_(model, TTAdapter(rank=4), targets="0")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapters(model, folder)
        ...     load_adapters_(torch.nn.Sequential(torch.nn.Linear(64, 64)), folder)
        <AdapterReport: 1 layer adapted, 332 of 4,492 parameters trained (7.39%)>
    """
    folder = Path(folder)
    check_plain(model, CheckpointError, "load_adapters_")
    manifest, saved_trains, stored = read_folder(folder, _ADAPTERS)
    try:
        adapter, head_names = TTAdapter(**manifest["adapter"]), [str(name) for name in manifest["also_train"]]
    except (KeyError, TypeError, ComeraError) as error:
        raise CheckpointError(f"{folder / WEIGHTS}: its manifest is damaged ({error!r}): take another copy") from error
    names = all_names(model)
    sites = {name: site for site in find_sites(names) for name in site.names}
    modules = dict(model.named_modules(remove_duplicate=False))
    problems: list[str] = []
    trains: dict[Site, TensorTrain] = {}
    for saved in saved_trains:
        (at,) = saved.names
        name = at.removeprefix(_PREFIX).removesuffix("tt").strip(".")
        problem = _misfit(name, saved, sites.get(name), modules.get(name))
        problem = problem or _incomplete(at, saved, stored)
        if problem:
            problems.append(problem)
            continue
        site = sites[name]
        assert isinstance(saved.spec, TTSpec)
        train = site.train(saved.spec, saved.threshold)
        keys = list(saved.shapes(at))
        order = saved.spec.order
        train.set_(saved.spec, [stored[key] for key in keys[:order]], [stored[key] for key in keys[order:]])
        train.init_std, train.late_from = saved.init_std, saved.late_from
        trains[site] = train
    heads: dict[str, nn.Module] = {}
    states: dict[str, dict[str, Tensor]] = {}
    for name in head_names:
        start = _key(name, "")
        states[name] = {key.removeprefix(start): value for key, value in stored.items() if key.startswith(start)}
        if name not in modules:
            problems.append(f"{name}: expected a module to be trained besides, got a model without it")
            continue
        heads[name] = modules[name]
        problems += _head_misfits(name, modules[name], states[name])
    own, buffers = stored_buffers(model), dict[str, Tensor]()
    for name in map(str, manifest.get("buffers", ())):  # not of earlier versions
        key = _key(*name.rpartition(".")[::2])
        here, there = (tuple(found[at].shape) if at in found else None for found, at in ((own, name), (stored, key)))
        if here is None or here != there:
            problems.append(f"{name}: expected {here or 'no buffer'}, got {there or 'nothing'} in the file")
        else:
            buffers[name] = stored[key]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            f"{folder} holds adapters of another model than this {type(model).__name__}: {'; '.join(problems[:8])}"
            f"{more}. Nothing was loaded: build the model that they were trained beside"
        )
    check_apart(names, [site.layer for site in trains], heads)
    place_(model, adapter, trains, heads)
    for name, head in heads.items():
        head.load_state_dict(states[name])
    for name, value in buffers.items():
        own[name].copy_(value)
    return report_of(model, trains, {})


def _key(layer: str, rest: str) -> str:
    """Name of a tensor in the file."""
    return f"{_PREFIX}.{layer}.{rest}" if layer else f"{_PREFIX}.{rest}"


def _misfit(name: str, saved: SavedTrain, site: Site | None, module: nn.Module | None) -> str | None:
    """Why an adapter of the file has no place in the model, or None."""
    size = " -> ".join(map(str, saved.spec.shape))
    wanted = f"{name}: expected a linear layer {size}"
    if site is None:
        return f"{wanted}, got {'a model without it' if module is None else f'a {type(module).__name__}'}"
    if site.refused:
        return f"{wanted}, got a {type(site.layer).__name__} that cannot be adapted: {site.refused}"
    if site.shape != saved.spec.shape or not isinstance(saved.spec, TTSpec):
        return f"{wanted}, got {' -> '.join(map(str, site.shape))}"
    return f"{wanted}, got one on the meta device" if next(site.layer.parameters()).is_meta else None


def _incomplete(at: str, saved: SavedTrain, stored: Mapping[str, Tensor]) -> str | None:
    """What the file lacks of an adapter, or None."""
    for key, shape in saved.shapes(at).items():
        came = tuple(stored[key].shape) if key in stored else "nothing"
        if came != shape:
            return f"{key}: expected {shape} as the manifest says, got {came}"
    return None


def _head_misfits(name: str, module: nn.Module, stored: Mapping[str, Tensor]) -> list[str]:
    """Why a module that was trained besides cannot take its state from the file; empty if it can."""
    found = no_tensors(name, module)
    if found:
        return found
    own: dict[str, Any] = module.state_dict(keep_vars=True)
    ranked: set[str] = set()  # tensors that take other ranks
    for at, train in ((at, m) for at, m in module.named_modules() if isinstance(m, TensorTrain)):
        start = f"{at}." if at else ""
        shapes = {key: stored[start + key].shape for key in train.state_dict() if start + key in stored}
        if train.spec_for(shapes, stored.get(f"{start}{train.spec.layout_name}")) is not None:
            ranked |= {start + key for key in shapes}
    for key in sorted(own.keys() | stored.keys()):
        here = tuple(own[key].shape) if key in own else None
        there = tuple(stored[key].shape) if key in stored else None
        if here != there and key not in ranked:
            found.append(f"{name}.{key}: expected {here or 'nothing'}, got {there or 'nothing'} in the file")
        elif here is not None and own[key].is_meta:
            found.append(f"{name}.{key}: expected a tensor with data, got one on the meta device")
    return found
