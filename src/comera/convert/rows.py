"""The rows of a conversion report: every parameter of the model counts in exactly one of them."""

from collections.abc import Iterator, Mapping

from torch import nn

from comera.convert.config import TensorizeConfig
from comera.convert.registry import converters
from comera.convert.report import LayerRow
from comera.convert.select import Site, open_to
from comera.nn.tensor_train import CompressedLayer, TensorTrain

# Why matrices of these types stay dense; those of others have no layer of their own.
_REASONS: dict[type[nn.Module], str] = {
    nn.modules.conv._ConvNd: "a convolution",
    nn.MultiheadAttention: "nn.MultiheadAttention multiplies by them itself",
    nn.RNNBase: "torch's recurrent kernels read them",
    nn.RNNCellBase: "torch's recurrent kernels read them",
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
    by_layer = {site.layer: site for site in sites}
    kinds = (CompressedLayer, TensorTrain, *open_to(config))
    inside = {part for module in names if isinstance(module, TensorTrain) for part in module.modules()} - {
        module for module in names if isinstance(module, TensorTrain)
    }
    counted: set[object] = set()

    def once(key: object, count: int) -> int:
        known = key in counted
        counted.add(key)
        return 0 if known else count

    def parameters(module: nn.Module, besides: str = "") -> int:
        own = [p for name, p in module._parameters.items() if p is not None and name != besides]
        return sum(once(("stored", p), p.numel()) for p in own)

    for old, (name, *_) in names.items():
        new, site = model.get_submodule(name), by_layer.get(old)
        before, after = type(old).__name__, type(new).__name__
        tt = new if isinstance(new, TensorTrain) else new.tt if isinstance(new, CompressedLayer) else None
        if old in inside or (isinstance(old, TensorTrain) and ("stored", old) in counted):
            continue
        if site is None and not isinstance(old, kinds):
            if any(p is not None for p in old._parameters.values()):
                count = parameters(old)
                yield LayerRow(name, before, after, None, count, count, None, _why_dense(old), layer=False)
        elif tt is not None:
            remarks = [site.note, site.converter.remark] if site else ["already compressed"]
            weight = tt if site is None else old._parameters["weight"]
            dense = 0 if tt.counts_elsewhere else once(weight, tt.spec.dense_numel)
            stored = once(("stored", tt), tt.spec.numel + tt.spec.rank_numel)
            note, bias = "; ".join(filter(None, remarks)), 0 if tt is new else parameters(new)
            yield LayerRow(name, before, after, tt.spec, dense, stored, errors.get(tt), note, bias)
        else:
            weight = old._parameters.get("weight")
            count = weight.numel() if weight is not None else 0
            note = site.note if site else "a subclass of a known layer; register_converter adds it"
            dense, stored, bias = once(weight, count), once(("stored", weight), count), parameters(old, "weight")
            yield LayerRow(name, before, after, None, dense, stored, None, note, bias)


def _why_dense(module: nn.Module) -> str:
    """Why the parameters of a module that is no linear layer or table stay dense."""
    own = {name: tuple(p.shape) for name, p in module._parameters.items() if p is not None}
    matrices = {name: shape for name, shape in own.items() if sum(size > 1 for size in shape) > 1}
    if not matrices:
        return "no matrix"
    shapes = ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in matrices.items())
    if type(module) in converters():  # and not open to the configuration
        return f"{shapes}: a convolution, which TensorizeConfig(conv=comera.TT()) would compress"
    reasons = [reason for kind, reason in _REASONS.items() if isinstance(module, kind)]
    return f"{shapes}: {reasons[0] if reasons else 'no linear layer or table of a type that can be converted'}"
