"""The shell: comera train | compare | inspect | estimate | export | score.

Each command imports what it needs when it runs, so that help and typing errors answer at once. The options of a recipe:
see `options`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from comera import __version__
from comera.cli.options import first_line, parse, saved_config
from comera.errors import ComeraError, ConfigError, TrainingError
from comera.recipes.registry import RECIPES

INTERRUPTED = 130  # exit code of a shell for SIGINT
_ARGUMENTS = "arguments.json"  # of a comparison, in its folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 when training failed, 2 for bad input, 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser("comera", description="Rank-adaptive tensor-compressed training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"comera {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=first_line(command), add_help=False)
    command = COMMANDS[parser.parse_args(arguments[:1]).command]
    try:
        return command(arguments[1:])
    except ComeraError as error:
        print(f"comera: {error}", file=sys.stderr)
        return 1 if isinstance(error, TrainingError) else 2
    except KeyboardInterrupt:
        print("comera: interrupted", file=sys.stderr)
        return INTERRUPTED


def train(argv: list[str]) -> int:
    """Train a recipe: progress bar, metrics, checkpoints, and a report at the end."""
    name, rest = _take_recipe("train", train, argv)
    recipe, config, resume = parse("train", name, rest)
    summary = recipe.run(config, resume=resume)

    from accelerate import PartialState

    if PartialState().is_main_process:
        from comera import report

        runs = {name: folder for name, folder in recipe.runs(config).items() if folder.exists()}
        for folder in runs.values():
            print(f"report: {report.render(folder)}", file=sys.stderr)
        if len(runs) > 1 and summary.finished:
            print(report.compare(runs, config.folder))
            print(f"side by side: {config.folder / 'compare.html'}", file=sys.stderr)
        if not summary.finished:
            go_on = shlex.join(["comera", "train", name, "--out", str(config.folder), "--resume"])
            print(f"interrupted after step {summary.steps:,}; to go on: {go_on}", file=sys.stderr)
    return 0 if summary.finished else INTERRUPTED


def compare(argv: list[str]) -> int:
    """Train a recipe with several methods, each in a process of its own; ends with the table of all runs."""
    name, rest = _take_recipe("compare", compare, argv)
    options, shared = _comparison(name, rest)
    out = Path(options.out).expanduser()
    commands: dict[str, list[str]] = {}
    runs: dict[str, Path] = {}
    for method in options.methods.split(","):
        own = ["--method", method]
        if options.seconds is not None:
            own += ["--train.steps", "null", "--train.max_seconds", str(options.seconds)]
        commands[method] = [*shared, *own, "--out", str(out / method)]
    for method, arguments in commands.items():  # all mistakes come to light before the first run
        recipe, config, _ = parse("compare", name, arguments)
        runs.update(recipe.runs(config))
        if (out / method).exists() and not options.resume:
            raise ConfigError(
                f"expected a new folder for the comparison, got {out}, which has runs: --resume goes on with them, "
                "another --out begins anew"
            )
    if not options.resume:
        from comera.files import replace_file

        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / _ARGUMENTS, json.dumps(rest))
    for arguments in commands.values():
        again = ["--resume"] if options.resume else []
        code, interrupted = _run([sys.executable, "-m", "comera", "train", name, *arguments, *again])
        if interrupted or code == INTERRUPTED:
            go_on = shlex.join(["comera", "compare", name, "--out", str(out), "--resume"])
            print(f"interrupted; to go on: {go_on}", file=sys.stderr)
            return INTERRUPTED
        if code:
            raise TrainingError(f"`comera train {name} {shlex.join(arguments)}` ended with exit code {code}, see above")

    from comera import report

    print(report.compare(runs, out))
    return 0


def _comparison(name: str, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of a comparison and those that hold for all its runs; with --resume the ones it was begun with."""
    parser = argparse.ArgumentParser(
        f"comera compare {name}",
        description=first_line(compare),
        epilog=f"Every option of `comera train {name}` may follow; it holds for all methods.",
        allow_abbrev=False,
    )
    parser.add_argument("--methods", default="dense,comera", help="methods to train (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, help="seconds of training for each method; left out: as long as the configuration says"
    )
    parser.add_argument("--out", default=f"runs/compare-{name}", help="folder of the runs (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with the comparison in --out, as it was begun")
    options, shared = parser.parse_known_args(argv)
    if not options.resume:
        return options, shared
    file = Path(options.out).expanduser() / _ARGUMENTS
    try:
        begun_with = json.loads(file.read_text())
    except (OSError, ValueError):
        raise ConfigError(
            f"expected a comparison to resume, got {options.out} without a readable {file.name}"
        ) from None
    alone = ["--out", options.out, "--resume"]
    if parser.parse_known_args(alone) != (options, shared):
        raise ConfigError(
            f"a comparison resumes with the options it was begun with ({shlex.join(begun_with)}), got others: "
            "give --out and --resume alone"
        )
    return parser.parse_known_args([*begun_with, *alone])


def _run(command: list[str]) -> tuple[int, bool]:
    """Exit code of a command, and whether it was to stop before its end.

    It ends in its own way: SIGINT reaches it from the terminal too, so all that is passed on is SIGTERM.
    """
    seen = False
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen = True
        if child is not None:
            child.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        child = subprocess.Popen(command)
        if seen:  # before there was a child to tell
            child.terminate()
        return child.wait(), seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def inspect(argv: list[str]) -> int:
    """Show a run or a checkpoint: layers, modes, ranks, sizes."""
    parser = argparse.ArgumentParser("comera inspect", description=first_line(inspect))
    parser.add_argument("path", help="folder of a run or of a checkpoint")
    path = parser.parse_args(argv).path

    from comera import report

    print(report.inspect(Path(path)))
    return 0


def estimate(argv: list[str]) -> int:
    """Memory and FLOPs of a recipe's training step by part, before any training."""
    name, rest = _take_recipe("estimate", estimate, argv)
    recipe, config, _ = parse("estimate", name, rest)
    from comera.report.tables import Table, megabytes, number, times

    estimates = recipe.estimate(config)
    dense = estimates["dense"]
    parts = ("weights", "gradients", "optimizer", "activations", "total")
    header = ("one training step", *(f"{part} MB" for part in parts), "GFLOPs", "less memory", "less compute")
    rows = [
        (
            method,
            *(megabytes(getattr(step, part)) for part in parts),
            number(step.flops / 1e9),
            times(dense.total / step.total),
            times(dense.flops / step.flops),
        )
        for method, step in sorted(estimates.items(), key=lambda item: item[0] != "dense")
    ]
    print(Table(header, "l" + "r" * (len(header) - 1), tuple(rows)).text())
    return 0


def export(argv: list[str]) -> int:
    """Write a trained model as weights, compressed or dense, or as a program that needs torch alone."""
    parser = argparse.ArgumentParser(
        "comera export",
        description=first_line(export),
        epilog="safetensors: a folder for comera.load_pretrained. dense: a folder with the weights under the names of "
        "the original architecture, for load_state_dict or from_pretrained. program: a file for torch.export.load, "
        "for batches of any size. Each is loaded again and compared with the model before it takes its name.",
    )
    parser.add_argument("path", metavar="RUN|CHECKPOINT", help="folder of a run (its last checkpoint) or a checkpoint")
    parser.add_argument(
        "--to", choices=("safetensors", "dense", "program", "onnx"), required=True, help="what to write"
    )
    parser.add_argument("--out", required=True, metavar="PATH", help="folder, or file of a program (.pt2)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export at PATH")
    options = parser.parse_args(argv)

    from comera.export.runs import export_run
    from comera.recipes.trained import open_trained

    out = Path(options.out).expanduser()
    print(export_run(open_trained(Path(options.path), saved_config), options.to, out, overwrite=options.overwrite))
    return 0


def score(argv: list[str]) -> int:
    """Score a file of rows with a trained dlrm run, from its compressed tables."""
    parser = argparse.ArgumentParser("comera score", description=first_line(score))
    parser.add_argument("path", metavar="RUN|CHECKPOINT", help="folder of a run (its last checkpoint) or a checkpoint")
    parser.add_argument("file", metavar="FILE", help="rows in Criteo's form, with or without labels, plain or .gz")
    parser.add_argument("--out", required=True, metavar="CSV", help="file for line, logit and probability of each row")
    parser.add_argument("--batch_size", type=int, default=4096, help="rows at a time (default: %(default)s)")
    parser.add_argument(
        "--max_bad_rows", type=int, default=0, help="bad rows to leave out before it is an error (default: %(default)s)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file CSV")
    options = parser.parse_args(argv)

    from comera.recipes.dlrm.score import score as score_file
    from comera.recipes.trained import open_trained

    trained = open_trained(Path(options.path), saved_config)
    file, out = Path(options.file).expanduser(), Path(options.out).expanduser()
    limits = {"batch_size": options.batch_size, "max_bad_rows": options.max_bad_rows}
    print(score_file(trained, file, out, **limits, overwrite=options.overwrite))
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "compare": compare,
    "inspect": inspect,
    "estimate": estimate,
    "export": export,
    "score": score,
}


def _take_recipe(name: str, command: Callable[..., int], argv: list[str]) -> tuple[str, list[str]]:
    """The recipe's name and the arguments after it."""
    parser = argparse.ArgumentParser(
        f"comera {name}", description=first_line(command), epilog=f"`comera {name} RECIPE --help` lists all options."
    )
    known = "; ".join(f"{name}: {recipe.summary}" for name, recipe in RECIPES.items())
    parser.add_argument("recipe", choices=sorted(RECIPES), metavar="RECIPE", help=known)
    return parser.parse_args(argv[:1]).recipe, argv[1:]
