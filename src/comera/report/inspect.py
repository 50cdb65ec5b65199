"""What a run or a saved model holds: layers, modes, ranks, sizes, FLOPs. Reads headers only, never the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

from comera.errors import CheckpointError
from comera.ops.planner.plan import plan_linear, plan_lookup, plan_projection
from comera.pretrained import MANIFEST, WEIGHTS, read_manifest
from comera.report.run import RunData, read_run
from comera.report.tables import Table, count, duration, megabytes, number, times
from comera.trainer.checkpoint import find_checkpoint
from comera.tt.spec import Spec, TTSpec, spec_from_dict

TOKENS = 1024  # of the batch for which FLOPs are planned
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}  # other types hold ids, no numbers


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    numel: int
    bytes: int


class _Row(NamedTuple):
    """A layer: numbers it stores and had dense; FLOPs a token, now and dense (None where its kind is unknown)."""

    name: str
    kind: str
    modes: str
    ranks: str
    stored: int
    dense: int
    flops: float | None = None
    dense_flops: float | None = None


def inspect(path: Path) -> str:
    """A printable account of a run folder (its last checkpoint), a checkpoint, or a folder of `save_pretrained`.

    Raises CheckpointError for a folder that holds none of them, or a truncated or foreign file; DataError for a run
    folder that is malformed.
    """
    path = Path(path)
    if (path / WEIGHTS).exists() or (path / MANIFEST).exists():
        return account(path)
    inside = sorted(metrics.parent.name for metrics in path.glob("*/metrics.jsonl"))
    if inside and not (path / "metrics.jsonl").exists():
        raise CheckpointError(
            f"expected one run, got {path} with several ({', '.join(inside)}): name one, such as {path / inside[0]}"
        )
    if any((path / name).exists() for name in ("config.yaml", "metrics.jsonl")):
        run, checkpoint = read_run(path), find_checkpoint(path)
        kinds = {layer.name: layer.after for layer in run.layers if layer.after != layer.before}
        return f"{_course(run)}\ncheckpoint {checkpoint.name}\n\n{account(checkpoint, kinds)}"
    what = "a folder without either" if path.is_dir() else "a file" if path.exists() else "nothing"
    raise CheckpointError(
        f"expected a run folder or a saved model at {path}, found {what}: give a folder that `comera train` or "
        f"comera.save_pretrained wrote (one with config.yaml, or with {WEIGHTS})"
    )


def account(folder: Path, kinds: Mapping[str, str] | None = None) -> str:
    """The layers of a saved model as a table, and its totals. Raises CheckpointError as `read_manifest` does.

    kinds: types of layers by name, of those that are neither dense nor in chains.
    """
    manifest = read_manifest(folder)
    specs = [(entry["names"], spec_from_dict(entry["spec"])) for entry in manifest["trains"]]
    transient = set(manifest["transient"])
    tensors = {key: tensor for key, tensor in _tensors(folder).items() if key not in transient}
    inside = tuple(f"{name}." for names, _ in specs for name in names)
    loose = {key: tensor for key, tensor in tensors.items() if not key.startswith(inside or "\0")}
    chains = [_chain_row(names, spec) for names, spec in specs]
    dense = [
        _Row(key, _kind(key, kinds or {}), "×".join(map(str, tensor.shape)), "", tensor.numel, tensor.numel)
        for key, tensor in loose.items()
        if len(tensor.shape) > 1
    ]
    vectors = [tensor.numel for tensor in loose.values() if len(tensor.shape) < 2]
    if vectors:
        dense.append(_Row(f"{len(vectors)} vectors (biases, norms)", "dense", "", "", sum(vectors), sum(vectors)))

    lines = [_table(chains, dense).text(), ""]
    stored, was = sum(row.stored for row in [*chains, *dense]), sum(row.dense for row in [*chains, *dense])
    size = f"{stored:,} numbers, {megabytes(sum(tensor.bytes for tensor in tensors.values()))} MB"
    if not chains:
        return "\n".join([*lines, f"model       {size}{'' if kinds else ', no layer compressed'}"])
    size_of_chains = megabytes(sum(tensor.bytes for key, tensor in tensors.items() if key.startswith(inside)))
    stored_in_chains, was_in_chains = sum(row.stored for row in chains), sum(row.dense for row in chains)
    ratio = _ratio(was_in_chains, stored_in_chains)
    lines += [
        f"model       {size}, {_ratio(was, stored)} smaller than dense",
        f"tensorized  {stored_in_chains:,} numbers, {size_of_chains} MB, {ratio} smaller",
        f"FLOPs       forward and backward, a token in batches of {TOKENS:,}, compressed layers only",
    ]
    return "\n".join(lines)


def _kind(tensor: str, kinds: Mapping[str, str]) -> str:
    """Type of the layer that a tensor belongs to, "dense" for a layer of torch's own."""
    return next((kind for layer, kind in kinds.items() if tensor.startswith(f"{layer}.")), "dense")


def _course(run: RunData) -> str:
    parts = []
    if run.train:
        last = run.train[-1]
        parts.append(f"{last.step:,} steps in {duration(last.time)}, {count(last.tokens)} {run.counted}")
    if run.evals:
        parts.append(f"held-out loss {run.evals[-1].loss:.3f}")
    return f"{run.recipe}, {run.method}: {', '.join(parts) or 'no step yet'}"


def _table(chains: list[_Row], dense: list[_Row]) -> Table:
    header = ("layer", "is", "modes", "ranks", "stored", "dense", "ratio", "kFLOP", "dense kFLOP")
    total = _Row(
        "all layers",
        "",
        "",
        "",
        sum(row.stored for row in [*chains, *dense]),
        sum(row.dense for row in [*chains, *dense]),
        sum(row.flops or 0 for row in chains) if chains else None,
        sum(row.dense_flops or 0 for row in chains) if chains else None,
    )
    return Table(header, "llllrrrrr", tuple(map(_cells, [*chains, *dense, total])), total=True)


def _cells(row: _Row) -> tuple[str, ...]:
    flops = [number(value / 1e3) if value is not None else "" for value in (row.flops, row.dense_flops)]
    ratio = _ratio(row.dense, row.stored) if row.dense != row.stored else ""
    return (row.name, row.kind, row.modes, row.ranks, f"{row.stored:,}", f"{row.dense:,}", ratio, *flops)


def _ratio(dense: int, stored: int) -> str:
    return times(dense / stored if stored else float("inf"))


def _chain_row(names: Mapping[str, str], spec: Spec) -> _Row:
    """A chain, with all the layers that share it."""
    modes, _, ranks = str(spec).partition(" ranks ")
    flops, dense_flops = map(sum, zip(*(_flops(kind, spec) for kind in names.values()), strict=True))
    return _Row(
        " + ".join(name.removesuffix(".tt") for name in names),
        " + ".join(names.values()),
        modes,
        ranks,
        spec.numel + spec.rank_numel,
        spec.dense_numel,
        flops,
        dense_flops,
    )


def _flops(kind: str, spec: Spec) -> tuple[float, float]:
    """Operations a token, forward and backward, of a layer on its chain and of the dense layer that it stands for."""
    dense = 6.0 * spec.dense_numel  # 2 in·out forward, twice that backward
    if isinstance(spec, TTSpec):
        return plan_linear(spec, TOKENS).flops / TOKENS, dense
    if kind == "TTMProjection":
        return plan_projection(spec, TOKENS).flops / TOKENS, dense
    return plan_lookup(spec, TOKENS).flops / TOKENS, 0.0  # a dense table is only read


def _tensors(folder: Path) -> dict[str, _Tensor]:
    """Shapes of the tensors that hold numbers, from the file's header."""
    tensors = {}
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        keys: Iterable[str] = file.keys()
        for key in keys:
            part = file.get_slice(key)
            shape, itemsize = tuple(part.get_shape()), _BYTES.get(part.get_dtype())
            if itemsize is not None:
                tensors[key] = _Tensor(shape, prod(shape), prod(shape) * itemsize)
    return tensors
