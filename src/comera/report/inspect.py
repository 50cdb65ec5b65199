"""Describes a run or a saved model: layers, modes, ranks, sizes, FLOPs. Reads headers only, never the weights."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from comera.errors import CheckpointError
from comera.nn.size import ModelSize
from comera.ops.planner.plan import plan_linear, plan_lookup, plan_projection
from comera.pretrained import MANIFEST, WEIGHTS, read_manifest, tensor_headers
from comera.pretrained.folder import SavedTrain
from comera.report.run import RunData, read_run
from comera.report.tables import count, duration, join_ranks, megabytes, modes_of, number, times
from comera.tables import Table
from comera.trainer.checkpoint import find_checkpoint, run_in
from comera.tt.format import spec_size
from comera.tt.ngram import NGramSpec
from comera.tt.spec import BTTSpec, Spec, TTSpec

TOKENS = 1024  # batch size for which FLOPs are planned
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}  # other types hold ids, not parameters


class _Row(NamedTuple):
    """A layer: its parameters and those of the dense layer; FLOPs per token of both (None for layers left dense)."""

    name: str
    kind: str
    modes: str
    ranks: str
    stored: int
    dense: int
    flops: float | None = None
    dense_flops: float | None = None


def inspect(path: str | Path) -> str:
    """Describe a run folder (its last checkpoint), a checkpoint, or a folder written by `save_pretrained`.

    Raises CheckpointError for a folder that is none of them or has a truncated or foreign file, DataError for a
    malformed run folder.

    Example:
        >>> import tempfile, torch, comera
        >>> from comera.report import inspect
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU())
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.BTT(rank=1)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     comera.save_pretrained(model, folder)
        ...     print(inspect(folder).splitlines()[-3])
        model       3,456 parameters, 0.0132 MB, 4.81× smaller than dense
    """
    path = Path(path)
    if (path / WEIGHTS).exists() or (path / MANIFEST).exists():
        return _describe(path)
    path = run_in(path)
    if any((path / name).exists() for name in ("config.yaml", "metrics.jsonl")):
        run, checkpoint = read_run(path), find_checkpoint(path)
        kinds = {layer.name: layer.after for layer in run.layers if layer.after != layer.before}
        return f"{_progress(run)}\ncheckpoint {checkpoint.name}\n\n{_describe(checkpoint, kinds)}"
    what = "a folder without either" if path.is_dir() else "a file" if path.exists() else "nothing"
    raise CheckpointError(
        f"expected a run folder or a saved model at {path}, found {what}: give a folder that `comera train` or "
        f"comera.save_pretrained wrote (one with config.yaml, or with {WEIGHTS})"
    )


def _describe(folder: Path, kinds: Mapping[str, str] | None = None) -> str:
    """The layers of a saved model as a table, and its totals. Raises CheckpointError as `read_manifest` does.

    kinds: layer name -> type, for the layers that are neither dense nor tensor trains (those of a baseline).
    """
    manifest = read_manifest(folder)
    saved = [SavedTrain.of(entry) for entry in manifest["trains"]]
    headers, transient = tensor_headers(folder), manifest["transient"]
    shapes = {key: shape for key, (shape, dtype) in headers.items() if dtype in _BYTES and key not in transient}
    nbytes = {key: prod(shape) * _BYTES[headers[key][1]] for key, shape in shapes.items()}
    prefixes = tuple(f"{name}." for train in saved for name in train.names)
    others = {key: shape for key, shape in shapes.items() if not key.startswith(prefixes)}
    trains, dense = [_train_row(train) for train in saved], []
    for key, shape in others.items():
        if len(shape) > 1:
            kind = next((kind for layer, kind in (kinds or {}).items() if key.startswith(f"{layer}.")), "dense")
            dense.append(_Row(key, kind, "×".join(map(str, shape)), "", prod(shape), prod(shape)))
    if vectors := [prod(shape) for shape in others.values() if len(shape) < 2]:
        dense.append(_Row(f"{len(vectors)} vectors (biases, norms)", "dense", "", "", sum(vectors), sum(vectors)))

    total, tensorized = _total([*trains, *dense]), _total(trains)
    rows = [*trains, *dense, total if trains else total._replace(flops=None, dense_flops=None)]
    header = ("layer", "format", "ranks", "parameters", "ratio", "kFLOPs", "dense")
    table = Table(header, "lllrrrr", tuple(map(_cells, rows)), total=True)
    size = f"{total.stored:,} parameters, {megabytes(sum(nbytes.values()))} MB"
    if not trains:
        return f"{table.fitted()}\n\nmodel       {size}{'' if kinds else ', no layer compressed'}"
    train_size = megabytes(sum(nbytes.values()) - sum(nbytes[key] for key in others))
    ratios = ModelSize(total.stored, tensorized.stored, total.dense, tensorized.dense, sum(nbytes.values()))
    lines = (
        table.fitted(),
        "",
        f"model       {size}, {times(ratios.ratio)} smaller than dense",
        f"tensorized  {tensorized.stored:,} parameters, {train_size} MB, {times(ratios.tensorized_ratio)} smaller",
        f"kFLOPs      forward and backward, per token in batches of {TOKENS:,}: of compressed layers, and dense ones",
    )
    return "\n".join(lines)


def _progress(run: RunData) -> str:
    parts = []
    if run.train:
        last = run.train[-1]
        parts.append(f"{last.step:,} steps in {duration(last.time)}, {count(last.tokens)} {run.unit}")
    if run.evals:
        parts.append(f"held-out loss {run.evals[-1].loss:.3f}")
    return f"{run.recipe}, {run.method}: {', '.join(parts) or 'no step yet'}"


def _total(rows: Sequence[_Row]) -> _Row:
    stored, dense = sum(row.stored for row in rows), sum(row.dense for row in rows)
    flops, dense_flops = sum(row.flops or 0 for row in rows), sum(row.dense_flops or 0 for row in rows)
    return _Row("all layers", "", "", "", stored, dense, flops, dense_flops)


def _cells(row: _Row) -> tuple[str, ...]:
    flops = [number(value / 1e3) if value is not None else "" for value in (row.flops, row.dense_flops)]
    ratio = times(row.dense / row.stored if row.stored else float("inf")) if row.dense not in (0, row.stored) else ""
    form = row.modes if row.ranks else f"{row.kind} {row.modes}".rstrip()
    return (row.name, form, row.ranks, f"{row.stored:,}", ratio, *flops)


def _train_row(train: SavedTrain) -> _Row:
    """A tensor train, with all the layers that share it."""
    names, spec = train.names, train.spec
    flops, dense_flops = map(sum, zip(*(_flops(kind, spec) for kind in names.values()), strict=True))
    return _Row(
        " + ".join(name.removesuffix(".tt") for name in names),
        " + ".join(names.values()),
        modes_of(spec),
        join_ranks(spec.inner_ranks, spec),
        spec_size(spec),
        0 if train.counts_elsewhere else spec.dense_numel,
        flops,
        dense_flops,
    )


def _flops(kind: str, spec: Spec) -> tuple[float, float]:
    """FLOPs per token, forward and backward, of a layer and of the dense layer that it replaces."""
    dense = 6.0 * spec.dense_numel  # 2 in·out forward, twice that backward
    if isinstance(spec, BTTSpec):
        return 6.0 * spec.numel, dense
    if isinstance(spec, TTSpec):
        return plan_linear(spec, TOKENS).flops / TOKENS, dense
    if isinstance(spec, NGramSpec):
        return 6.0 * (prod(spec.core_shapes[-1]) + sum(spec.inner_ranks)), 0.0
    if kind == "TTMProjection":
        return plan_projection(spec, TOKENS).flops / TOKENS, dense
    return plan_lookup(spec, TOKENS).flops / TOKENS, 0.0  # a dense lookup only reads
