"""The frontier: what a language model learns for what it costs, compressed, dense of any width, and by other methods.

Every case trains the recipe lm for the same time and is read in nats per held-out byte. The baseline is the best of the
dense models of all widths: narrower ones take more steps, wider ones hold more. All run with fused kernels and the
same optimizer. The held-out text has two halves: rates are chosen on one, figures are read from the other. Rates are
tuned alike: the same base rates for each case, at a fifth of a budget of time, at the whole of one of steps. (At a
fifth of the steps too high a rate looks best: dense 96 wide was 0.08 worse for it on prose.)

    python benchmarks/frontier.py costs                       parameters and FLOPs of every case; trains nothing
    python benchmarks/frontier.py speed                       seconds of a step, the cases in turns, on a quiet machine
    python benchmarks/frontier.py tune  --budget 600s         every case at every rate, a fifth of the time each
    python benchmarks/frontier.py final --budget 600s --seeds 3 --cases dense-192 btt2-384
    options: --text code|packages|prose, --prose FOLDER|FILE, --vocab 256|8192|32768, --cases NAMES, --rates RATES,
             --jobs N, --budget 1600steps, --optimizer muon|adamw, --runs FOLDER

A budget is one of time, and a case takes as many steps as fit in it by the seconds that `speed` has measured; or one of
steps, the same for all. So losses do not depend on what else the machine does, and several runs may go at once (--jobs)
or be stopped and continued: rows are written one by one to results/frontier.csv, and runs that it holds are not
repeated without --again. With --runs a run that was stopped goes on from its last checkpoint, too.
"""

from __future__ import annotations

import argparse
import json
import re
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from children import run_children
from common import about, measured, step_times, update

from comera.baselines import BaselineConfig, HashedNGrams, Method, SummedTables
from comera.baselines.tokens import add_short_convs_
from comera.recipes.base import step_flops
from comera.recipes.lm.data import Batch, LMDataConfig, prepare
from comera.recipes.lm.model import CompressConfig, ModelConfig
from comera.recipes.lm.recipe import METRIC, LMConfig, LMTask, build_model, meta_step
from comera.recipes.lm.tokenizer import BYTES
from comera.trainer.config import TrainConfig
from comera.trainer.loop import fit

KEY = ("part", "text", "vocab", "budget", "optimizer", "case", "lr", "seed")
RATES = {"adamw": (1e-3, 2e-3, 4e-3), "muon": (4e-3, 8e-3, 16e-3)}
BLOCK, ROWS, LAYERS, HEAD = 256, 4, 4, 64
TUNING = 5  # times shorter than the run of some time that is tuned
BUDGET = r"(\d+)(s|steps)"
HELD_OUT = 64  # batches of the evaluation at the end
SAVE_EVERY = 1000  # steps, with --runs
STEPS = 20  # of each run of `speed`


class Case(NamedTuple):
    """A model: its method and width, the formats of its layers or the settings of its method, the taps of short
    convolutions that it has besides, and the rate of its tables as a multiple of the base rate, 0 for the rule's."""

    method: Method
    hidden: int
    layers: int = LAYERS
    compress: CompressConfig | None = None
    baselines: BaselineConfig = BaselineConfig()
    taps: int = 0
    tables: int = 0


CASES = [f"dense-{hidden}" for hidden in (64, 96, 128, 192, 256, 384, 512)]
CASES += [f"dense-{hidden}-{layers}" for hidden in (128, 256) for layers in (2, 8)]
CASES += [f"btt8b4-{hidden}" for hidden in (192, 256, 384, 512, 768)]
CASES += [f"btt{rank}b{blocks}-256" for rank, blocks in ((4, 8), (16, 2), (32, 1))]  # about as many parameters as 8, 4
CASES += ["btt2-256", "btt2-384", "tt2r64-384", "tt4r64-384", "tt6r30-384", "tt6r64-384"]
CASES += [f"{method}-{hidden}" for method in ("cola", "galore", "lte") for hidden in (192, 384)]
CASES += ["densen6r160-128", "densen6r160c4-128", "hashed6r2840d24-128", "summed6-128", "densec4-128"]
CASES += ["densev32n4r160-64", "densev32n4r160q2c4-64", "hashed4r16384d24-48"]
NAME = re.compile(
    r"(?:(?P<method>dense|cola|galore|lte)|btt(?P<btt>\d+)(?:b(?P<blocks>\d+))?|tt(?P<order>\d+)r(?P<tt>\d+)"
    r"|hashed(?P<hashed>\d+)r(?P<rows>\d+)d(?P<dim>\d+)(?:x(?P<hashes>\d+))?|summed(?P<summed>\d+))"
    r"(?:v(?P<vocabulary>\d+))?(?:e(?P<embedding>\d+))?(?:h(?P<head>\d+)(?:b(?P<head_blocks>\d+))?)?"
    r"(?:n(?P<ngrams>\d+)r(?P<ngram_rank>\d+)(?:t(?P<ngram_heads>\d+))?)?(?:q(?P<tables>\d+))?(?:c(?P<taps>\d+))?"
    r"-(?P<hidden>\d+)(?:-(?P<layers>\d+))?"
)


def parse(name: str) -> Case:
    """The case of a name: the method or the format of the layers, then the width, then the blocks if not 4.

    dense-256-8, cola-384; btt2-384: rank 2 in blocks of about the square root of the features; btt8b4-384: rank 8 in
    4 x 4 blocks; tt6r30-384: order 6, rank 30; btt4b4e8h1-256: the ranks of the token embedding and of the head, too;
    btt8b4h8b4-256: a head of rank 8 in 4 x 4 blocks; btt8b4v32-192: token embedding and head are one table of plain low
    rank, 32; densev32-128: that table, and layers that stay dense. densen6r160-128: dense layers and a table of n-grams
    to 6 of rank 160, a CP, densen6r32t4-128: a tensor train of 4 heads; hashed6r2840d24-128: hashed tables of n-grams
    to 6, 2,840 rows of 24 features an order, x2: two an order; summed6-128: tables of the 5 ids before, summed. c4
    after any of these: short causal convolutions of 4 taps, densec4-128: these alone. q2 before that: compressed tables
    at twice the base rate.
    """
    found = NAME.fullmatch(name)
    if found is None:
        raise SystemExit(f"unknown case {name!r}: expected a name such as {', '.join(CASES[::5])}")
    part = {key: int(value) for key, value in found.groupdict().items() if value and key != "method"}
    hidden, layers, taps = part["hidden"], part.get("layers", LAYERS), part.get("taps", 0)
    if "hashed" in part:
        sizes = {"order": part["hashed"], "rows": part["rows"], "dim": part["dim"], "hashes": part.get("hashes", 1)}
        hashed = BaselineConfig(hashed_ngrams=HashedNGrams(hidden=hidden, **sizes))
        return Case("hashed_ngrams", hidden, layers, None, hashed, taps)
    if "summed" in part:
        summed = BaselineConfig(summed_tables=SummedTables(hidden=hidden, order=part["summed"]))
        return Case("summed_tables", hidden, layers, None, summed, taps)
    if found["method"] and not {"vocabulary", "ngrams"} & set(part):
        return Case(cast(Method, found["method"]), hidden, layers, taps=taps)
    ranks: dict[str, Any] = {"embedding": "ttm", "head": "untie", "embedding_rank": part.get("embedding", 32)}
    if "vocabulary" in part:
        ranks = {"embedding": "low_rank", "head": "share", "embedding_rank": part["vocabulary"]}
    if found["method"]:
        ranks |= {"format": "dense"}
    elif "tt" in part:
        ranks |= {"format": "tt", "order": part["order"], "rank": part["tt"], "head_rank": part.get("head", part["tt"])}
    else:
        rank, blocks = part["btt"], part.get("blocks")
        ranks |= {"format": "btt", "rank": rank, "blocks": blocks and (blocks, blocks)}
        ranks |= {"head_rank": part.get("head", 2 if blocks else rank)}
        ranks |= {"head_blocks": (part["head_blocks"],) * 2} if "head_blocks" in part else {}
    ranks |= {name: part.get(name) for name in ("ngrams", "ngram_rank", "ngram_heads")}
    if found["method"] and "vocabulary" not in part:
        ranks |= {"embedding": "dense", "head": "dense"}
    return Case("comera", hidden, layers, CompressConfig(**ranks), taps=taps, tables=part.get("tables", 0))


class Half(LMTask):
    """The recipe, evaluated on every other held-out batch. half: 0 to choose by, 1 to read figures from. taps: of short
    convolutions besides. before_step: called before each step of training."""

    half = 0
    before_step: Callable[[], object]

    def __init__(self, config: LMConfig, data: Any, taps: int = 0) -> None:
        super().__init__(config, data)
        self.before_step = lambda: None
        if taps:
            add_short_convs_(self.model, taps)
            self.identity["taps"] = taps  # type: ignore[index]

    def train_batch(self, step: int, micro: int, rank: int, world: int) -> Batch:
        self.before_step()
        batch: Batch = super().train_batch(step, micro, rank, world)
        return batch

    def eval_batches(self) -> Iterator[Batch]:
        return (batch for k, batch in enumerate(super().eval_batches()) if k % 2 == self.half)


def configuration(options: argparse.Namespace, case: Case, lr: float, seed: int, steps: int) -> LMConfig:
    """A run of the recipe."""
    source: dict[str, Any] = {"path": options.prose} if options.text == "prose" else {}
    if options.text == "packages":  # ten times the text of Python's own library, so that an hour repeats none of it
        source = {"path": sysconfig.get_paths()["purelib"], "suffixes": (".py",)}
    data = LMDataConfig(**source, vocab_size=options.vocab, block_size=BLOCK, cache=options.cache)
    # bytes have a small table; of larger vocabularies it is most of a small model
    compress, heads = case.compress or CompressConfig(), max(1, case.hidden // HEAD)
    if options.vocab == BYTES:
        compress = replace(compress, head="dense", embedding="dense")
    model = ModelConfig(hidden=case.hidden, layers=case.layers, heads=heads, tie=options.vocab > BYTES)
    train = TrainConfig(
        steps=steps,
        lr=lr,
        table_lr=case.tables * lr or None,
        optimizer=options.optimizer,
        seed=seed,
        batch_size=ROWS,
        betas=(0.9, 0.95),
        eval_every=0,
        eval_batches=HELD_OUT,
        save_every=SAVE_EVERY if options.runs else 0,
        progress=False,
        device="cpu",
    )
    return LMConfig(
        method=case.method, data=data, model=model, compress=compress, baselines=case.baselines, train=train
    )


def run(
    config: LMConfig, half: int, folder: Path, taps: int = 0, before_step: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Train in this process, a fresh one, from the last checkpoint in the folder if it has one; the run's figures."""
    data = prepare(config.data, quiet=True)
    task = Half(config, data, taps)
    task.half, task.before_step = half, before_step
    summary = fit(task, config.train, folder, resume=True)
    if summary.stopped == "interrupted":
        raise SystemExit(f"stopped after {summary.steps} of {config.train.steps} steps; the same command goes on")
    tokens = config.train.batch_size * config.data.block_size
    return {
        "nats_per_byte": summary.metrics[METRIC],
        "steps": summary.steps,
        "parameters": summary.parameters,
        "model_mb": summary.size_bytes / 1e6,
        "mflops_token": step_flops(config, meta_step, data.vocab_size) / tokens / 1e6,
        "peak_mb": summary.peak_memory / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("costs", "speed", "tune", "final", "one"))
    parser.add_argument(
        "--text", choices=("code", "packages", "prose"), default="code", help="Python's library, the packages installed"
    )
    parser.add_argument("--prose", help="file or folder of text for --text prose")
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument(
        "--budget", default="600s", help="of a run: seconds (600s), or steps, the same for all (1600steps)"
    )
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="NAME")
    parser.add_argument(
        "--rates", nargs="+", type=float, help="to tune; one alone: of `final`; default: three of each optimizer"
    )
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="muon")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, which share the cores")
    parser.add_argument("--cache", help="folder for prepared text")
    parser.add_argument("--runs", help="folder that keeps the runs, so that stopped ones can go on")
    parser.add_argument("--again", action="store_true", help="repeat runs that the results hold already")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rates = options.rates or list(RATES[options.optimizer])
    if not re.fullmatch(BUDGET, options.budget):
        parser.error(f"--budget: expected seconds or steps, as 600s or 1600steps, got {options.budget!r}")
    if options.text == "prose" and not options.prose:
        parser.error("--text prose needs --prose, a file or folder of text")
    if options.again and options.runs:
        parser.error("--again repeats runs that --runs keeps: give another folder and leave --again out")
    known = {name: parse(name) for name in options.cases}
    if options.part == "one":
        wanted = json.loads(options.run)
        settings = (wanted[name] for name in ("lr", "seed", "steps"))
        case = parse(wanted["case"])
        config = configuration(options, case, *settings)
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(run(config, wanted["half"], Path(wanted["folder"] or folder), case.taps)))
    elif options.part == "costs":
        costs(options, known)
    elif options.part == "speed":
        speed(options, known)
    else:
        for row in campaign(options):
            print(" ".join(f"{row[name]:>9}" for name in (*KEY, "nats_per_byte", "steps", "peak_mb")), flush=True)
            update("frontier", [row], KEY)


def costs(options: argparse.Namespace, known: dict[str, Case]) -> None:
    """Write what each case stores and computes, before any of them has run."""
    rows = []
    for name in options.cases:
        config = configuration(options, known[name], 1e-3, 0, 1)
        model, _ = build_model(config, options.vocab)
        if known[name].taps:
            add_short_convs_(model, known[name].taps)
        parameters = sum(p.numel() for p in model.parameters())
        flops = step_flops(config, meta_step, options.vocab) / (ROWS * BLOCK)
        row = {"vocab": options.vocab, "case": name, "parameters": parameters, "mflops_token": f"{flops / 1e6:.3g}"}
        rows.append({**row, "flops_per_parameter": f"{flops / parameters:.3g}", **about()})
        print(row, flush=True)
    update("frontier_costs", rows, ("vocab", "case"))


def speed(options: argparse.Namespace, known: dict[str, Case]) -> None:
    """Write the milliseconds of each case's step."""
    data = prepare(configuration(options, known[options.cases[0]], 1e-3, 0, STEPS).data, quiet=True)

    def step_time(name: str) -> float:
        config = configuration(options, known[name], 1e-3, 0, STEPS)
        config = replace(config, train=replace(config.train, eval_batches=1))
        with tempfile.TemporaryDirectory() as folder:
            return fit(Half(config, data, known[name].taps), config.train, Path(folder)).step_time

    place = {"vocab": options.vocab, "optimizer": options.optimizer}
    rows = [{**place, "case": name, **row, **about()} for name, row in step_times(options.cases, step_time).items()]
    update("frontier_speed", rows, ("vocab", "optimizer", "case"))


def campaign(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The runs that are missing, each in a process of its own, `--jobs` of them at a time."""
    done = {tuple(row[name] for name in KEY): int(row["steps"]) for row in measured("frontier")}
    runs = []
    for name in options.cases:
        if options.part == "tune":
            share = 1 if options.budget.endswith("steps") else 1 / TUNING
            wanted = [(lr, 0, share, 0) for lr in options.rates]
        else:
            lr = options.rates[0] if len(options.rates) == 1 else best_rate(options, name)
            wanted = [(lr, seed, 1, 1) for seed in range(options.seeds)]
        for lr, seed, share, half in wanted:
            place = (*setting(options), name, f"{lr:g}", seed)
            steps = max(1, int(share * budget_steps(options, name)))
            # a run of other steps is from a time when a step took longer or shorter
            if done.get(tuple(map(str, place))) != steps or options.again:
                folder = options.runs and str(Path(options.runs).absolute() / "-".join(map(str, place)))
                run_settings = {"case": name, "lr": lr, "seed": seed, "steps": steps, "half": half, "folder": folder}
                runs.append((place, run_settings))
    commands = {place: _command(options, settings) for place, settings in runs}
    for place, figures in run_children(commands, options.jobs):
        shown = {figure: f"{value:.5g}" for figure, value in figures.items()}
        yield {**dict(zip(KEY, place, strict=True)), **shown, **about()}


def _command(options: argparse.Namespace, settings: dict[str, Any]) -> list[str]:
    """One run, for Python to run."""
    command = [__file__, "one", "--text", options.text, "--vocab", str(options.vocab)]
    command += ["--optimizer", options.optimizer]
    command += ["--prose", options.prose] if options.prose else []
    command += ["--cache", options.cache] if options.cache else []
    command += ["--runs", options.runs] if options.runs else []
    return [*command, "--run", json.dumps(settings)]


def budget_steps(options: argparse.Namespace, name: str) -> float:
    """How many steps of a case the budget allows."""
    number, unit = re.fullmatch(BUDGET, options.budget).groups()  # type: ignore[union-attr]
    if unit == "steps":
        return int(number)
    for row in measured("frontier_speed"):
        if (row["vocab"], row["optimizer"], row["case"]) == (str(options.vocab), options.optimizer, name):
            return int(number) / (float(row["step_ms"]) / 1e3)
    raise SystemExit(
        f"{name} has no measured step for this vocabulary and optimizer: run the part speed first, on a quiet machine"
    )


def setting(options: argparse.Namespace, part: str | None = None) -> tuple[object, ...]:
    """What the cases of a table have in common."""
    return part or options.part, options.text, options.vocab, options.budget, options.optimizer


def best_rate(options: argparse.Namespace, name: str) -> float:
    """The rate that was tuned for a case."""
    place = tuple(map(str, (*setting(options, "tune"), name)))
    tuned = [row for row in measured("frontier") if tuple(row[key] for key in KEY[:6]) == place]
    if not tuned:
        raise SystemExit(f"{name} has no tuned rate for this text, vocabulary and budget: run the part tune first")
    return float(min(tuned, key=lambda row: float(row["nats_per_byte"]))["lr"])


if __name__ == "__main__":
    main()
