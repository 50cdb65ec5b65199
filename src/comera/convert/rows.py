"""The rows of a conversion report: every parameter of the model counts in exactly one of them."""

from collections.abc import Collection, Iterator, Mapping

from torch import nn

from comera.convert.config import TensorizeConfig
from comera.convert.packed import packed_converter
from comera.convert.registry import converters
from comera.convert.report import LayerRow
from comera.convert.select import Site, open_to
from comera.nn.packed import HELD
from comera.nn.tensor_train import CompressedLayer, TensorTrain

# Why matrices of these types stay dense; those of others have no layer of their own.
_REASONS: dict[type[nn.Module], str] = {
    nn.modules.conv._ConvNd: "a convolution",
    nn.RNNCellBase: "each step would make them dense again; nn.LSTM, nn.GRU and nn.RNN make them once for a sequence",
}


def rows_of(
    model: nn.Module,
    names: Mapping[nn.Module, list[str]],
    sites: list[Site],
    errors: Mapping[TensorTrain, float],
    config: TensorizeConfig,
) -> Iterator[LayerRow]:
    """A row for each module that has parameters of its own: what became of it, or why it stays dense.

    model: after the conversion. names: every module before it. errors: of decompositions. config: of the conversion. A
    weight counts in the row that keeps it or else in the first that had it, and a tensor train in the first that has
    it, so that columns add up.
    """
    by_layer = {site.layer: site for site in sites if site.converter.layout is None}
    by_module: dict[nn.Module, list[Site]] = {}
    for part in sites:
        if part.converter.layout is not None:
            by_module.setdefault(part.layer, []).append(part)
    kinds = (CompressedLayer, TensorTrain, *open_to(config))
    inside = {part for module in names if isinstance(module, TensorTrain) for part in module.modules()} - {
        module for module in names if isinstance(module, TensorTrain)
    }
    after = dict(model.named_modules(remove_duplicate=False))  # an attribute may hide a module of its name
    counted: set[object] = set()

    def once(key: object, count: int) -> int:
        known = key in counted
        counted.add(key)
        return 0 if known else count

    def parameters(module: nn.Module, besides: Collection[str] = ()) -> int:
        own = [p for name, p in module._parameters.items() if p is not None and name not in besides]
        counted.update(own)  # tied to a layer's weight, it is not that layer's once more
        return sum(once(("stored", p), p.numel()) for p in own)

    def row(site: Site | None, name: str, before: str, new: nn.Module, tt: TensorTrain, bias: int) -> LayerRow:
        remarks = [site.note, site.converter.remark] if site else ["already compressed"]
        weight = tt if site is None else site.weight
        dense = 0 if tt.counts_elsewhere else once(weight, tt.spec.dense_numel)
        stored = once(("stored", tt), tt.spec.numel + tt.spec.rank_numel)
        note = "; ".join(filter(None, remarks))
        return LayerRow(name, before, type(new).__name__, tt.spec, dense, stored, errors.get(tt), note, bias)

    def dense_row(name: str, kind: str, weight: nn.Parameter | None, note: str, bias: int) -> LayerRow:
        count = weight.numel() if weight is not None else 0
        dense, stored = once(weight, count), once(("stored", weight), count)
        return LayerRow(name, kind, kind, None, dense, stored, None, note, bias)

    for old, (name, *_) in names.items():
        new, site = after[name], by_layer.get(old)
        before = type(old).__name__
        for part in by_module.get(old, ()):
            held = old._modules[HELD][part.leaf] if part.leaf not in old._parameters else None  # type: ignore[index]
            if isinstance(held, CompressedLayer):
                yield row(part, part.name, before, held, held.tt, 0)
            else:
                yield dense_row(part.name, before, part.weight, part.note, 0)
        tt = new if isinstance(new, TensorTrain) else new.tt if isinstance(new, CompressedLayer) else None
        if old in inside or (isinstance(old, TensorTrain) and ("stored", old) in counted):
            continue
        if site is None and not isinstance(old, kinds):
            leaves = [own.leaf for own in by_module.get(old, ())]
            if any(p is not None and leaf not in leaves for leaf, p in old._parameters.items()):
                count = parameters(old, leaves)
                note = _why_dense(old, leaves)
                yield LayerRow(name, before, before, None, count, count, None, note, layer=False)
        elif tt is not None:
            yield row(site, name, before, new, tt, 0 if tt is new else parameters(new))
        else:
            note = site.note if site else "a subclass of a known layer; register_converter adds it"
            yield dense_row(name, before, old._parameters.get("weight"), note, parameters(old, ["weight"]))


def _why_dense(module: nn.Module, besides: Collection[str]) -> str:
    """Why the parameters of a module that is no linear layer or table stay dense. besides: what has rows of its own."""
    held = {name: p for name, p in module._parameters.items() if p is not None and name not in besides}
    own = {name: tuple(p.shape) for name, p in held.items()}
    matrices = {name: shape for name, shape in own.items() if sum(size > 1 for size in shape) > 1}
    if not matrices:
        return "no matrix"
    shapes = ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in matrices.items())
    if type(module) in converters():  # and not open to the configuration
        return f"{shapes}: a convolution, which TensorizeConfig(conv=comera.TT()) would compress"
    kind_of = packed_converter(module)
    if kind_of is not None and kind_of.experts and not besides:
        return f"{shapes}: matrices of experts, which TensorizeConfig(experts=comera.TT(order=3)) would compress"
    reasons = [reason for kind, reason in _REASONS.items() if isinstance(module, kind)]
    return f"{shapes}: {reasons[0] if reasons else 'no linear layer or table of a type that can be converted'}"
