"""The command line: comera train | compare | inspect | estimate | export | convert | generate | score | predict |
calibrate | completion.

A command imports torch and the rooms only once its arguments are parsed, so help and typing errors answer at once.
`options` makes the options of a recipe.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from comera._version import __version__
from comera.cli import parsers
from comera.cli.completion import completion
from comera.cli.imports import quick_imports
from comera.cli.interrupt import INTERRUPTED, MESSAGE, held_back, interruptible
from comera.cli.options import first_line, parse, saved_config
from comera.cli.output import UNREAD, is_unread
from comera.errors import ComeraError, ConfigError, TrainingError
from comera.extras import TRAIN, require
from comera.files import typed_path
from comera.recipes.registry import RECIPES

_PIPE = "COMERA_COMPARISON_PIPE"  # for the run that a comparison has started: the file that it watches
_ARGUMENTS = "arguments.json"  # in the folder of a comparison: its own options
_BOUNDS = ("--train.steps", "--train.epochs")  # in place of which a comparison has --seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 if training failed, 2 for bad input, 130 if interrupted,
    141 if nobody reads its output any more."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser("comera", description="Rank-adaptive tensor-compressed training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"comera {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        commands.add_parser(name, help=first_line(command), add_help=False)
    name = parser.parse_args(arguments[:1]).command
    try:
        if not {"-h", "--help"} & set(arguments):
            require(f"comera {name}", "comera[train]", *TRAIN)
        if name != "train" and (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
            raise ConfigError(f"expected one process for `comera {name}`, got {processes}: only train uses several")
        command, rest = _COMMANDS[name], arguments[1:]
        own = name in parsers.WITHOUT_RECIPE
        return command(parsers.parser_of(name, first_line(command)).parse_args(rest) if own else rest)
    except ComeraError as error:
        print(f"comera: {error}", file=sys.stderr)
        return 1 if isinstance(error, TrainingError) else 2
    except OSError as error:  # a place that cannot be read or written
        if isinstance(error, BrokenPipeError) and is_unread():
            return UNREAD
        where = f"{error.filename!r}: " if error.filename is not None else ""
        print(f"comera: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(MESSAGE, file=sys.stderr)
        return INTERRUPTED


def _train(argv: list[str]) -> int:
    """Train a recipe and write metrics, checkpoints and a report."""
    _end_with_comparison()
    name, rest = _split_recipe("train", argv)
    recipe, config, resume = parse("train", name, rest)
    from comera.trainer.lock import check_folder
    from comera.trainer.trackers import check_installed

    with interruptible():
        check_installed(config.train.trackers)  # before data are prepared
        if os.environ.get("RANK", "0") == "0":  # one process asks for all
            check_folder(config.folder)
        summary = recipe.run(config, resume=resume)

    from comera import report
    from comera.trainer.processes import open_accelerator

    accelerator = open_accelerator(config.train.device)
    if accelerator.is_main_process:
        if not summary.finished:
            resume_with = shlex.join(["comera", "train", name, "--out", str(config.folder), "--resume"])
            print(f"interrupted after step {summary.steps:,}; resume with: {resume_with}", file=sys.stderr)
        runs = {name: folder for name, folder in recipe.runs(config).items() if (folder / "metrics.jsonl").exists()}
        with interruptible():
            for folder in runs.values():
                print(f"report: {report.render(folder)}", file=sys.stderr)
            if len(runs) > 1 and summary.finished:
                _compare_runs(runs, config.folder)
    accelerator.end_training()
    return 0 if summary.finished else INTERRUPTED


def _compare(argv: list[str]) -> int:
    """Train a recipe with several methods, each in its own process, and compare the runs."""
    name, rest = _split_recipe("compare", argv)
    options, shared = _parse_comparison(name, rest)
    out = typed_path(options.out, "--out")
    commands: dict[str, list[str]] = {}
    runs: dict[str, Path] = {}
    for method in options.methods.split(","):
        commands[method] = [*shared, "--method", method, "--out", str(out / method)]
        if options.seconds is not None:
            bounds = [word for name in _BOUNDS for word in (name, "null")]  # those of the preset
            commands[method] += [*bounds, "--train.max_seconds", str(options.seconds)]
    for method, arguments in commands.items():  # report every mistake before the first run starts
        recipe, config, _ = parse("compare", name, arguments)
        own = recipe.runs(config)
        runs |= own if len(own) > 1 else dict.fromkeys([method], *own.values())
        if (out / method).exists() and not options.resume:
            raise ConfigError(
                f"expected a new folder for the comparison, got {out}, which already has runs: continue them with "
                "--resume, or choose another --out"
            )
    if not options.resume:
        from comera.files import replace_file
        from comera.trainer.lock import check_folder

        check_folder(out)
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / _ARGUMENTS, json.dumps(rest))
    for arguments in commands.values():
        resume = ["--resume"] if options.resume else []
        code, interrupted = _run([sys.executable, "-P", "-m", "comera", "train", name, *arguments, *resume])
        if interrupted or code == INTERRUPTED:
            resume_with = shlex.join(["comera", "compare", name, "--out", str(out), "--resume"])
            print(f"interrupted; resume with: {resume_with}", file=sys.stderr)
            return INTERRUPTED
        if code:
            raise TrainingError(
                f"`comera train {name} {shlex.join(arguments)}` failed with exit code {code}, see above"
            )

    _compare_runs(runs, out)
    return 0


def _compare_runs(runs: dict[str, Path], out: Path) -> None:
    """Write the comparison of finished runs; print its tables, and where its page is."""
    from comera import report

    with interruptible():
        report.compare(runs, out)
        print(report.results(runs))
        print(f"comparison: {out / 'compare.html'}", file=sys.stderr)


def _parse_comparison(name: str, argv: list[str]) -> tuple[Namespace, list[str]]:
    """The comparison's own options and those for all its runs; with --resume, the ones that it was started with."""
    parser = parsers.compare(name, first_line(_compare))
    options, shared = parser.parse_known_args(argv)
    if not options.resume:
        _check_shared(options, shared)
        return options, shared
    file = typed_path(options.out, "--out") / _ARGUMENTS
    try:
        started_with = json.loads(file.read_text())
    except (OSError, ValueError):
        raise ConfigError(
            f"expected a comparison to resume, got {options.out} without a readable {file.name}"
        ) from None
    alone = ["--out", options.out, "--resume"]
    if parser.parse_known_args(alone) != (options, shared):
        raise ConfigError(
            f"a comparison resumes with the options it was started with ({shlex.join(started_with)}), got others: "
            "pass --out and --resume only"
        )
    return parser.parse_known_args([*started_with, *alone])


def _check_shared(options: Namespace, shared: Sequence[str]) -> None:
    """Raise ConfigError for an option of all runs in whose place the comparison sets its own."""
    own = {"--method": "each run has one of --methods"}
    if options.seconds is not None:
        own |= dict.fromkeys((*_BOUNDS, "--train.max_seconds"), "each run has --seconds")
    for name in (word.partition("=")[0] for word in shared):
        if name in own:
            raise ConfigError(f"{name}: expected no such option in a comparison, where {own[name]}: leave it out")


def _run(command: list[str]) -> tuple[int, bool]:
    """Run a command; returns its exit code, and whether a signal asked it to stop.

    The command shuts down by itself. The terminal sends SIGINT to it as well, so SIGTERM is all it needs from here.
    Where this process is killed, the command sees its end of a pipe close, and stops as well.
    """
    watched, kept = os.pipe()
    signaled = False
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal signaled
        signaled = True
        if child is not None:
            child.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with held_back():
            child = subprocess.Popen(command, env={**os.environ, _PIPE: str(watched)}, pass_fds=[watched])
        if signaled:  # before the child existed
            child.terminate()
        return child.wait(), signaled
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(watched)
        os.close(kept)


def _end_with_comparison() -> None:
    """Stop this run, as SIGTERM does, when the comparison that started it has ended, even if that was killed."""
    pipe = os.environ.pop(_PIPE, None)

    def watch(pipe: int) -> None:
        os.read(pipe, 1)  # nobody writes: it returns when the other end is closed
        os.kill(os.getpid(), signal.SIGTERM)

    if pipe is not None:
        threading.Thread(target=watch, args=[int(pipe)], daemon=True).start()


def _inspect(options: Namespace) -> int:
    """Show the layers of a run or a checkpoint: modes, ranks, sizes, FLOPs."""
    with quick_imports():
        from comera import report

    with interruptible():
        print(report.inspect(typed_path(options.path, "RUN")))
    return 0


def _estimate(argv: list[str]) -> int:
    """Estimate memory and FLOPs of one training step, for every method, without training."""
    name, rest = _split_recipe("estimate", argv)
    recipe, config, _ = parse("estimate", name, rest)
    from comera.report.tables import megabytes, number, times
    from comera.tables import Table

    estimates = recipe.estimate(config)
    dense = estimates["dense"]
    parts = ("weights", "gradients", "optimizer", "activations", "total")
    header = ("MB of a step", *parts, "GFLOPs", "less memory", "less compute")
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
    print(Table(header, "l" + "r" * (len(header) - 1), tuple(rows)).fitted())
    return 0


def _export(options: Namespace) -> int:
    """Export a trained model: its weights, a program that needs torch alone, or ONNX."""
    with quick_imports():
        from comera.export.runs import export_run
        from comera.recipes.trained import open_trained

    out = typed_path(options.out, "--out")
    trained = open_trained(typed_path(options.path, "RUN"), saved_config)
    with interruptible():
        print(export_run(trained, options.to, out, dense=options.dense, overwrite=options.overwrite))
    return 0


def _convert(options: Namespace) -> int:
    """Decompose a trained model of transformers that may be too large to hold, layer by layer."""
    with quick_imports():
        from comera.integrations.decompose import convert_folder
        from comera.recipes.data.cache import Progress

    folder, out = typed_path(options.path, "FOLDER"), typed_path(options.out, "--out")

    def show(done: int, total: int) -> None:
        if not done:
            bar.start("decomposing", total, "layers")
        bar.to(done, done)

    with interruptible(), Progress(quiet=False) as bar:
        report = convert_folder(folder, out, ratio=options.ratio, progress=show)
    print(report)
    return 0


def _generate(options: Namespace) -> int:
    """Continue a text with a trained lm run; the text streams as it is written."""
    values = vars(options)
    path, prompt = values.pop("path"), values.pop("prompt")

    with quick_imports():
        from comera.recipes.lm.generate import Sampling, open_writer

    sampling = Sampling(**values)
    writer = open_writer(typed_path(path, "RUN"), saved_config)
    started = False

    def show(text: str) -> None:
        nonlocal started
        print(text if started else prompt + text, end="", flush=True)
        started = True

    with interruptible():
        ended = writer.write(prompt, sampling, show)
    print("" if started else prompt)
    if ended:
        print(f"comera: {ended}", file=sys.stderr)
    return 0


def _score(options: Namespace) -> int:
    """Score rows with a trained dlrm run, using its compressed tables."""
    with quick_imports():
        from comera.recipes.dlrm.score import score as score_file
        from comera.recipes.trained import open_trained

    trained = open_trained(typed_path(options.path, "RUN"), saved_config)
    file, out = typed_path(options.file, "FILE"), typed_path(options.out, "--out")
    limits = {"batch_size": options.batch_size, "max_bad_rows": options.max_bad_rows}
    with interruptible():
        print(score_file(trained, file, out, **limits, overwrite=options.overwrite))
    return 0


def _predict(options: Namespace) -> int:
    """Predict the labels of rows with a trained classify run."""
    with quick_imports():
        from comera.recipes.classify.predict import predict, predict_file
        from comera.recipes.trained import open_trained

    trained = open_trained(typed_path(options.path, "RUN"), saved_config, "best")
    file = typed_path(options.file, "FILE")
    out = None if options.out is None else typed_path(options.out, "--out")
    own = {name: getattr(options, name) for name in ("text", "pair", "label", "batch_size")}
    own["to"] = options.to or ("csv" if out is not None and out.suffix == ".csv" else "jsonl")
    with interruptible():
        if out is None:
            done = predict(trained, file, lambda lines: print(lines, end="", flush=True), **own)
        else:
            done = predict_file(trained, file, out, overwrite=options.overwrite, **own)
    print(f"comera: {done}", file=sys.stderr)
    return 0


def _calibrate(_: Namespace) -> int:
    """Measure which Triton kernels are faster than torch's products on this GPU, and use them from now on."""
    with quick_imports():
        from comera.cli import calibrate

    return calibrate.calibrate()


def _completion(options: Namespace) -> int:
    """Print a script that completes commands and options in bash or zsh."""
    print(completion(options.shell, _COMMANDS))
    return 0


# those with a recipe take the words after their own name, the others their options
_COMMANDS: dict[str, Callable[[Any], int]] = {
    "train": _train,
    "compare": _compare,
    "inspect": _inspect,
    "estimate": _estimate,
    "export": _export,
    "convert": _convert,
    "generate": _generate,
    "score": _score,
    "predict": _predict,
    "calibrate": _calibrate,
    "completion": _completion,
}


def _split_recipe(command: str, argv: list[str]) -> tuple[str, list[str]]:
    """The recipe's name, and the arguments after it."""
    parser = argparse.ArgumentParser(
        f"comera {command}",
        usage="%(prog)s RECIPE [OPTIONS ...]",
        description=first_line(_COMMANDS[command]),
        epilog=f"`comera {command} RECIPE --help` lists the options of a recipe.",
    )
    known = "; ".join(f"{name}: {recipe.summary}" for name, recipe in RECIPES.items())
    parser.add_argument("recipe", choices=sorted(RECIPES), metavar="RECIPE", help=known)
    return parser.parse_args(argv[:1]).recipe, argv[1:]
