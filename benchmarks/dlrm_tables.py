"""DLRM at equal bytes: compressed tables against the hashing trick, quotient-remainder and narrower dense tables.

Tables have the sizes of the full Kaggle data, and all methods read the same ids: categories hashed into these sizes.
They train one pass with AdamW at a constant rate and have one rate to tune, out of the same few. `own_rows` is dense
with a row for each category of the data instead, so that none share one by the hashing; `frequent_rows` the same for
categories that the training rows have twice or more, all others sharing a row (`--data.min_count 2`).

    python benchmarks/dlrm_tables.py tune  --path train.txt.gz     one seed, read on the validation rows
    python benchmarks/dlrm_tables.py final --path train.txt.gz     the tuned rate, read on the test rows, three seeds
    options: --methods, --ratios, --dims, --rates, --seeds, --cache, --again

A sample of the data touches few rows of such tables, and under Adam without weight decay a row that no id reaches never
moves. So tables that are looked up by rows are trained in the rows that the data touches, which gives the same figures
in a fraction of the time and lets dense tables of 9 GB take part. Bytes, and memory of a step (the estimate of
`comera estimate dlrm`), are those of the whole tables.

Losses do not depend on what else the machine does. Rows are written one by one to results/dlrm_tables.csv; runs that it
holds are not repeated without --again.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from common import about, measured, update
from torch import Tensor, nn

from comera.baselines import Method
from comera.errors import ConfigError
from comera.recipes.dlrm import recipe as dlrm
from comera.recipes.dlrm.click_metrics import click_metrics
from comera.recipes.dlrm.criteo import ClickData, prepare
from comera.recipes.dlrm.criteo.batches import PARTS
from comera.recipes.dlrm.model import DLRM, DLRMConfig
from comera.recipes.dlrm.recipe import DLRMTaskConfig, build_model, click_loss
from comera.trainer.optimizer import named_optimizer
from comera.trainer.step import TrainStep

FIGURES = ("auc", "nce", "tables_mb", "step_mb", "steps")
KEY = ("part", "method", "ratio", "dim", "lr", "seed")
RATES = (1.5e-3, 3e-3, 6e-3)
RATIOS = (10, 50, 200)
DIMS = (16, 64)
OWN, FREQUENT = "own_rows", "frequent_rows"
METHODS = (OWN, FREQUENT, *dlrm.METHODS)
EVALUATED = {"tune": "validation", "final": "test"}
MB = 10**6

Row = dict[str, Any]


class Touched(nn.Module):
    """The rows of an embedding table that the data touches. seen: their ids, in ascending order. bags: whether it sums
    over bags, as nn.EmbeddingBag does."""

    def __init__(self, table: nn.Embedding | nn.EmbeddingBag, seen: Tensor) -> None:
        super().__init__()
        self.seen, self.bags = seen, isinstance(table, nn.EmbeddingBag)
        self.num_embeddings = table.num_embeddings  # of which SmallerTable draws the rows
        self.weight = nn.Parameter(torch.empty(len(seen), table.embedding_dim, device="meta"))

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.searchsorted(self.seen, ids)
        return F.embedding_bag(places, self.weight, mode="sum") if self.bags else F.embedding(places, self.weight)


class Recorder(nn.Module):
    """Stands for an embedding table and keeps the ids that reach it."""

    def __init__(self, table: nn.Embedding | nn.EmbeddingBag) -> None:
        super().__init__()
        self.table, self.seen = table, torch.empty(0, dtype=torch.int64)

    def forward(self, ids: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, ids.flatten()]).unique()
        shape = ids.shape[:1] if isinstance(self.table, nn.EmbeddingBag) else ids.shape
        return torch.zeros(*shape, self.table.embedding_dim, device="meta")


def keep_touched_(model: DLRM, data: ClickData) -> None:
    """Replace the embedding tables of a model on the meta device by the rows of them that the data touches."""
    places: list[tuple[nn.Module, str, nn.Embedding | nn.EmbeddingBag]] = [
        (parent, name, table)
        for parent in list(model.modules())
        for name, table in parent.named_children()
        if isinstance(table, nn.Embedding | nn.EmbeddingBag)
    ]
    recorders = []
    for parent, name, table in places:
        recorders.append(Recorder(table))
        setattr(parent, name, recorders[-1])
    for lookup, ids in zip(model.tables, all_ids(data).unbind(1), strict=True):
        if any(isinstance(part, Recorder) for part in lookup.modules()):
            lookup(ids.unsqueeze(1))
    for (parent, name, table), recorder in zip(places, recorders, strict=True):
        setattr(parent, name, Touched(table, recorder.seen))


def all_ids(data: ClickData) -> Tensor:
    """The ids of all rows, (rows, features)."""
    return torch.cat([batch.ids for part in PARTS for batch in data.batches(part, 4096)])


def configuration(
    options: argparse.Namespace, method: str, ratio: int, dim: int, lr: float, seed: int
) -> DLRMTaskConfig:
    """The preset kaggle at this ratio and rate; that of compressed tables keeps its ratio to the rate."""
    of_rows = method in (OWN, FREQUENT)
    config = dlrm.preset("dense", "sample") if of_rows else dlrm.preset(cast(Method, method), "kaggle")
    core_lr = config.train.core_lr and config.train.core_lr * lr / config.train.lr
    train = replace(config.train, lr=lr, core_lr=core_lr, seed=seed, device="cpu", progress=False)
    data = replace(config.data, path=options.path, cache=options.cache, min_count=2 if method == FREQUENT else 1)
    compress = replace(config.compress, ratio=float(ratio))
    return replace(config, data=data, train=train, compress=compress, model=DLRMConfig(dim=dim))


def run(config: DLRMTaskConfig, part: str) -> dict[str, float]:
    """The figures of one pass over the training rows, read on another part of the data."""
    data = prepare(config.data, quiet=True)
    with torch.device("meta"):
        model, _ = build_model(config, data.table_sizes)
    elements = sum(p.numel() for p in model.tables.parameters())
    step_memory = dlrm.estimate(config, (config.method,))[config.method].total
    keep_touched_(model, data)
    torch.manual_seed(config.train.seed)
    model.to_empty(device="cpu").reset_parameters()
    train = TrainStep(model, click_loss, named_optimizer(model, config.train))
    steps = data.steps_per_epoch(config.train.batch_size)
    for step in range(steps):
        train([data.train_batch(step, config.train.batch_size, config.train.seed)])
    model.eval()
    with torch.no_grad():
        rows = [torch.stack([model(batch.dense, batch.ids), batch.labels], 1) for batch in data.batches(part, 4096)]
    figures = click_metrics(*torch.cat(rows).unbind(1))
    return {**figures, "tables_mb": 4 * elements / MB, "step_mb": step_memory / MB, "steps": steps}


def best_rate(method: str, ratio: int, dim: int) -> float:
    """The rate that was tuned for a case."""
    place = ("tune", method, str(ratio), str(dim))
    tuned = [row for row in measured("dlrm_tables") if tuple(row[key] for key in KEY[:4]) == place and row["nce"]]
    if not tuned:
        raise SystemExit(f"{method} {ratio} x, {dim} columns, has no tuned rate: run the part tune first")
    return float(min(tuned, key=lambda row: float(row["nce"]))["lr"])


def campaign(options: argparse.Namespace) -> Iterator[Row]:
    """The runs that are missing."""
    done = {tuple(row[key] for key in KEY) for row in measured("dlrm_tables")}
    for dim in options.dims:
        for ratio in options.ratios:
            for method in options.methods:
                smaller = 1 if method in ("dense", OWN, FREQUENT) else ratio
                if options.part == "tune":
                    runs = [(lr, 0) for lr in options.rates]
                elif possible(options, method, ratio, dim):
                    runs = [(best_rate(method, smaller, dim), seed) for seed in range(options.seeds)]
                else:
                    runs = [(options.rates[0], 0)]  # to say why there is no figure
                for lr, seed in runs:
                    place = (options.part, method, smaller, dim, f"{lr:g}", seed)
                    key = tuple(map(str, place))
                    if key in done and not options.again:
                        continue
                    done.add(key)
                    config = configuration(options, method, ratio, dim, lr, seed)
                    figures: dict[str, float | None]
                    try:
                        figures, note = {**run(config, EVALUATED[options.part])}, ""
                    except ConfigError as error:
                        if options.part == "tune":
                            continue
                        figures, note = dict.fromkeys(FIGURES), str(error).rpartition(": ")[2]
                    shown = {name: "" if value is None else f"{value:.5g}" for name, value in figures.items()}
                    yield {**dict(zip(KEY, place, strict=True)), **shown, "note": note}


def possible(options: argparse.Namespace, method: str, ratio: int, dim: int) -> bool:
    """Whether the method has tables as small as that."""
    config = configuration(options, method, ratio, dim, 1e-3, 0)
    try:
        with torch.device("meta"):
            build_model(config, config.data.hashed_sizes or (1,))
    except ConfigError:
        return False
    return True


def summary(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The final figures of each case, means over its seeds: how they compare with dense tables, on the same ids and
    with rows of their own. spread: half the range of the seeds; over_comera: `difference` at the same ratio."""
    cases: dict[tuple[int, int, str], list[dict[str, str]]] = {}
    for row in rows:
        if row["part"] == "final":
            cases.setdefault((int(row["dim"]), int(row["ratio"]), row["method"]), []).append(row)
    nce = {case: [float(row["nce"]) for row in found if row["nce"]] for case, found in cases.items()}
    lines = []
    for case in sorted(cases):
        dim, ratio, method = case
        first, values = cases[case][0], nce[case]
        line = {"dim": str(dim), "ratio": str(ratio), "method": method, "lr": first["lr"], "seeds": str(len(values))}
        line |= dict.fromkeys(("nce", "spread", "over_comera", "above_dense", "above_own_rows", "auc"), "")
        line |= {name: first[name] for name in ("tables_mb", "step_mb", "note")}
        if values:
            mean = statistics.mean(values)
            line |= {"nce": f"{mean:.5f}", "spread": f"{(max(values) - min(values)) / 2:.4f}"}
            if method != "comera":
                line["over_comera"] = difference(cases[case], cases.get((dim, ratio, "comera"), []))
            line["auc"] = f"{statistics.mean(float(row['auc']) for row in cases[case]):.4f}"
            for name, other in (("above_dense", "dense"), ("above_own_rows", OWN)):
                if reference := nce.get((dim, 1, other)):
                    line[name] = f"{100 * (mean / statistics.mean(reference) - 1):.2f}"
        lines.append({**line, **{name: first[name] for name in about()}})
    return lines


def difference(rows: Sequence[dict[str, str]], others: Sequence[dict[str, str]]) -> str:
    """How far `nce` is above that of other rows with the same seeds, and the standard error of that mean."""
    of = {row["seed"]: float(row["nce"]) for row in others if row["nce"]}
    each = [float(row["nce"]) - of[row["seed"]] for row in rows if row["nce"] and row["seed"] in of]
    if len(each) < 2:
        return ""
    return f"{statistics.mean(each):.4f} ± {statistics.stdev(each) / len(each) ** 0.5:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=tuple(EVALUATED))
    parser.add_argument("--path", required=True, help="Criteo's train.txt, plain or .gz")
    parser.add_argument("--cache", help="folder for prepared data")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--ratios", nargs="+", type=int, default=list(RATIOS))
    parser.add_argument("--dims", nargs="+", type=int, default=list(DIMS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="repeat runs that the results hold already")
    options = parser.parse_args()
    for row in campaign(options):
        print(" ".join(f"{value!s:<10}" for value in row.values()), flush=True)
        update("dlrm_tables", [{**row, **about()}], KEY)


if __name__ == "__main__":
    main()
