"""What every benchmark should reach: the rows of docs/benchmarks.md's first table, which page.py writes."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from comera.__main__ import SPIN_COUNT

Rows = list[dict[str, str]]
Tables = dict[str, Rows]  # by results file


def one(column: str, **wanted: str) -> Callable[[Rows], float]:
    """The figure in `column` of the first row with the wanted values."""
    return lambda rows: [float(row[column]) for row in _where(rows, wanted) if row[column]][0]  # noqa: RUF015


def _over(column: str, method: str, other: str, **wanted: str) -> Callable[[Rows], float]:
    """The figure of a method over that of another."""
    return lambda rows: one(column, method=method, **wanted)(rows) / one(column, method=other, **wanted)(rows)


def _least(column: str, **wanted: str) -> Callable[[Rows], float]:
    return lambda rows: min(float(row[column]) for row in _where(rows, wanted))


def _largest(column: str, **wanted: str) -> Callable[[Rows], float]:
    return lambda rows: max(float(row[column]) for row in _where(rows, wanted))


def _mean(column: str, **wanted: str) -> Callable[[Rows], float]:
    return lambda rows: statistics.mean(float(row[column]) for row in _where(rows, wanted))


def _best(rows: Rows, *kinds: str) -> float:
    """The lowest loss of CodeBERT in small, of cases whose names begin with one of these words."""
    own = [row for row in _where(rows, {"seconds": "840"}) if row["case"].startswith(kinds)]
    return min(float(row["loss"]) for row in own)


def _where(rows: Rows, wanted: dict[str, str]) -> Rows:
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    if not found:
        raise LookupError(f"no row with {wanted}")
    return found


# what, results file, goal, whether the goal is an upper bound, how to find the figure
GOALS: list[tuple[str, str, float, bool, Callable[[Rows], float]]] = [
    (
        "step, batch 32 × 128, float32: times dense",
        "step",
        10,
        False,
        one("times_dense", case="batch 32", side="fused, graph"),
    ),
    ("step, batch 1: times dense", "step", 9, False, one("times_dense", case="batch 1", side="fused, graph")),
    (
        "step, batch 1, bf16: times dense",
        "step",
        2,
        False,
        one("times_dense", case="batch 1, bf16", side="fused, graph"),
    ),
    (
        "step, batch 32, bf16: times dense in float32",
        "step",
        2,
        False,
        one("times_dense", case="batch 32", side="fused, bf16"),
    ),
    (
        "step, Llama-style 12 × 768, 4 × 256: times dense",
        "step",
        5,
        False,
        one("times_dense", case="Llama-style, 4 × 256", side="fused, graph"),
    ),
    (
        "memory with recomputation, of dense",
        "recompute",
        0.09,
        True,
        one("added_of_dense", side="fused, recompute"),
    ),
    (
        "two encoders, 768 wide, one text: MB of tensors in training",
        "tiny",
        28.5,
        True,
        one("live_mb", case="compressed, batch 1, adamw"),
    ),
    (
        "time with recomputation, of that without",
        "recompute",
        1.08,
        True,
        one("time_of_plain", side="fused, recompute"),
    ),
    ("GaLore, batch 1: times our step", "peers", 10, False, one("times_comera", case="batch 1", side="galore, graph")),
    (
        "GaLore, batch 1: times our memory, with recomputation",
        "peers",
        20,
        False,
        lambda rows: (
            one("memory_mb", case="batch 1", side="galore")(rows)
            / _least("memory_mb", case="batch 1", side="comera, recompute")(rows)
        ),
    ),
    ("LTE, batch 32: times our step", "peers", 9, False, one("times_comera", case="batch 32", side="lte")),
    (
        "LTE, batch 32: times our memory, with recomputation",
        "peers",
        12,
        False,
        lambda rows: (
            one("memory_mb", case="batch 32", side="lte")(rows)
            / _least("memory_mb", case="batch 32", side="comera, recompute")(rows)
        ),
    ),
    (
        "tensorly-torch, batch 32: times our step",
        "peers",
        11,
        False,
        one("times_comera", case="batch 32", side="tensorly"),
    ),
    ("CodeBERT, 12 encoders, phase 1: times smaller", "codebert", 4.23, False, one("times_smaller", side="phase 1")),
    ("CodeBERT, 12 encoders, phase 1: times dense", "codebert", 2.5, False, one("times_faster", side="phase 1")),
    (
        "CodeBERT in small, 840 seconds each: loss, of the best dense model's of any width",
        "codebert_small",
        1,
        True,
        lambda rows: _best(rows, "btt", "tt", "low-rank-table") / _best(rows, "dense"),
    ),
    (
        "CodeBERT in small, 840 seconds each: loss, of dense with as many parameters",
        "codebert_small",
        1,
        True,
        lambda rows: _best(rows, "low-rank-table-96") / _best(rows, "dense-72"),
    ),
    (
        "one busy neighbour on two cores, as comera runs: ratio to dense, of the idle one",
        "busy",
        0.9,
        False,
        one("kept", spin_count=SPIN_COUNT, load="one core busy"),
    ),
    (
        "100 Mbit/s, 2 processes: dense DDP step over compressed",
        "links",
        20,
        False,
        one("times_dense", processes="2", link="100 Mbit/s, 10 ms", side="compressed"),
    ),
    ("encoder layer: least ratio, any width, float32", "layer", 1, False, _least("ratio", precision="fp32")),
    ("encoder layer: least ratio, any width, bf16", "layer", 1, False, _least("ratio", precision="bf16")),
    ("encoder layer: width 4096, float32", "layer", 8, False, _least("ratio", precision="fp32", width="4096")),
    (
        "block tensor trains: most time over low rank's, forward and backward",
        "block_product",
        1,
        True,
        _largest("times_low_rank", products="forward and backward"),
    ),
    (
        "SST-2 from scratch, 20 times smaller: accuracy, of dense's less half a point",
        "sst2",
        1,
        False,
        lambda rows: one("dev", case="tt-20", passes="1")(rows) / (one("dev", case="dense-512")(rows) - 0.5),
    ),
    (
        "SST-2 from scratch, 20 times smaller: accuracy, of that of dense at the same step time",
        "sst2",
        1,
        False,
        lambda rows: one("dev", case="tt-20", passes="1")(rows) / one("dev", case="dense-256", passes="1")(rows),
    ),
    (
        "SST-2 from scratch, 20 times smaller, in dense's time: accuracy, of dense's less half a point",
        "sst2",
        1,
        False,
        lambda rows: one("dev", case="tt-20", passes="3")(rows) / (one("dev", case="dense-512")(rows) - 0.5),
    ),
    (
        "SST-2 from scratch, 20 times smaller, in dense's time: accuracy, of the best narrow dense's",
        "sst2",
        1,
        False,
        lambda rows: one("dev", case="tt-20", passes="3")(rows) / _largest("dev", case="dense-256")(rows),
    ),
    ("SST-2 from scratch, 20 times smaller: step, times dense", "sst2", 3, False, one("times_dense", case="tt-20")),
    (
        "MNLI from scratch on 41,379 pairs, late stage to 0.2: per cent right",
        "mnli",
        55,
        False,
        _mean("accuracy", case="comera", stage="late 0.2", pairs="41379"),
    ),
    (
        "MNLI from scratch on 41,379 pairs, late stage to 0.2: of the best dense model's of any size",
        "mnli",
        1,
        False,
        lambda rows: (
            _mean("accuracy", case="comera", stage="late 0.2", pairs="41379")(rows)
            / max(_mean("accuracy", case=case)(rows) for case in ("dense", "narrow", "small"))
        ),
    ),
    (
        "lookup in 10 M × 64: times the plain one",
        "lookup",
        5,
        False,
        _least("times_plain", table="10000000 x 64", side="comera"),
    ),
    (
        "step after the cut to 0.2: times before",
        "shrunk_step",
        1.5,
        False,
        one("speed", model="after the cut to 0.2", multiple="1", dropout="0.1"),
    ),
    (
        "DLRM, D = 128: model, times smaller",
        "dlrm",
        150,
        False,
        one("value", figure="model, times smaller", method="comera", dim="128"),
    ),
    (
        "DLRM, D = 128: tables, times smaller",
        "dlrm",
        200,
        False,
        one("value", figure="tables, times smaller", method="comera", dim="128"),
    ),
    (
        "DLRM, D = 16: peak memory, times lower",
        "dlrm",
        10,
        False,
        one("value", figure="peak, times lower", method="comera", dim="16"),
    ),
    (
        "DLRM, D = 128: peak MB",
        "dlrm",
        2000,
        True,
        one("value", figure="peak MB", method="comera", dim="128"),
    ),
    (
        "DLRM, D = 16, tables of the sample: cross-entropy above dense, %",
        "dlrm",
        0.5,
        True,
        one("value", figure="nce above dense, %", method="late 0.5, sample"),
    ),
    (
        "DLRM, D = 16, tables of the full data: cross-entropy above dense, %",
        "dlrm",
        0.5,
        True,
        one("value", figure="nce above dense, %", method="late 0.5, kaggle"),
    ),
    *(
        (
            f"DLRM, D = {dim}, 200 times: cross-entropy above {reference}, %",
            "dlrm_tables",
            0.5,
            True,
            one(column, dim=dim, ratio="200", method="comera"),
        )
        for dim in ("16", "64")
        for column, reference in (
            ("above_dense", "dense"),
            ("above_own_rows", "a row for each category"),
        )
    ),
    *(
        (
            f"DLRM, D = {dim}, {ratio} times: cross-entropy, times {name}'s",
            "dlrm_tables",
            1,
            True,
            _over("nce", "comera", method, dim=dim, ratio=ratio),
        )
        for dim, ratio in (("16", "50"), ("16", "200"), ("64", "200"))
        for method, name in (("hashing", "hashing"), ("quotient_remainder", "quotient-remainder"))
    ),
    (
        "DLRM, D = 16: samples/s, times dense Adagrad",
        "dlrm",
        1.3,
        False,
        one("value", figure="times faster than dense adagrad", optimizer="adagrad"),
    ),
    (
        "DLRM, D = 16: samples/s, times dense AdamW",
        "dlrm",
        1,
        False,
        one("value", figure="times faster than dense adamw", method="comera"),
    ),
    (
        "click data: rows/s from train.txt.gz",
        "criteo_prepare",
        150_000,
        False,
        _least("rows_per_second", form="txt.gz"),
    ),
    (
        "GPU step, bf16, batch 128: times dense",
        "gpu_step",
        2.5,
        False,
        lambda rows: max(float(row["times_dense"]) for row in _where(rows, {"precision": "bf16", "batch": "128"})),
    ),
]


def _dense_over_least(case: str) -> Callable[[Tables], float]:
    """The fastest dense step over the least time that ours can take; see roofline.py."""

    def figure(tables: Tables) -> float:
        _check_machine(tables, case, "step", "roofline")
        dense = [row for row in _where(tables["step"], {"case": case}) if row["side"].startswith("dense")]
        least_ms = one("least_ms", case=case, side="fused")(tables["roofline"])
        return min(float(row["p50_ms"]) for row in dense) / least_ms

    return figure


def _peer_over_least(case: str, side: str) -> Callable[[Tables], float]:
    """The same for the step of another side, measured beside ours."""

    def figure(tables: Tables) -> float:
        _check_machine(tables, case, "peers", "roofline")
        least_ms = one("least_ms", case=case, side="fused")(tables["roofline"])
        return one("step_ms", case=case, side=side)(tables["peers"]) / least_ms

    return figure


def _least_over(case: str, side: str, other: str) -> Callable[[Tables], float]:
    """The least time of one side of ours over that of another; see roofline.py."""

    def figure(tables: Tables) -> float:
        least = (one("least_ms", case=case, side=each)(tables["roofline"]) for each in (side, other))
        return next(least) / next(least)

    return figure


def _check_machine(tables: Tables, case: str, *results: str) -> None:
    """Raises LookupError if these results are of several machines."""
    machines = {row["machine"] for name in results for row in tables[name] if row["case"] == case}
    if len(machines) > 1:
        raise LookupError(f"{case}: {' and '.join(results)} are of {' and '.join(machines)}")


# what -> the most that ours can reach, measured
LIMITS: dict[str, Callable[[Tables], float]] = {
    "step, batch 32 × 128, float32: times dense": _dense_over_least("batch 32"),
    "step, batch 1: times dense": _dense_over_least("batch 1"),
    "step, Llama-style 12 × 768, 4 × 256: times dense": _dense_over_least("Llama-style, 4 × 256"),
    "GaLore, batch 1: times our step": _peer_over_least("batch 1", "galore, graph"),
    "LTE, batch 32: times our step": _peer_over_least("batch 32", "lte"),
    "tensorly-torch, batch 32: times our step": _peer_over_least("batch 32", "tensorly"),
    "memory with recomputation, of dense": lambda tables: one("least_of_dense", side="fused, recompute")(
        tables["recompute"]
    ),
    "LTE, batch 32: times our memory, with recomputation": lambda tables: (
        one("memory_mb", case="batch 32", side="lte")(tables["peers"])
        / one("least_mb", side="fused, recompute")(tables["recompute"])
    ),
    "time with recomputation, of that without": _least_over("batch 32", "fused, recompute", "fused"),
    "step after the cut to 0.2: times before": _least_over("32 × 48, cut to 0.2", "before", "after"),
    "DLRM, D = 16: samples/s, times dense Adagrad": lambda tables: one(
        "value", figure="times faster than dense adagrad", method="without tables"
    )(tables["dlrm"]),
}
