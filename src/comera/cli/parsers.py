"""The options of each command that are no fields of a recipe: parsers that commands use and shells complete from."""

import argparse
from typing import Any, NamedTuple

SHELLS = ("bash", "zsh")


class Options(NamedTuple):
    """What a command takes: the keywords of `add_argument` by name, and text for the end of its help."""

    arguments: dict[str, dict[str, Any]]
    epilog: str | None = None


def parser_of(name: str, about: str) -> argparse.ArgumentParser:
    """The parser of a command in WITHOUT_RECIPE. about: what it does."""
    options = WITHOUT_RECIPE[name]
    form = argparse.RawDescriptionHelpFormatter if "\n" in (options.epilog or "") else argparse.HelpFormatter
    parser = argparse.ArgumentParser(f"comera {name}", description=about, epilog=options.epilog, formatter_class=form)
    for argument, keywords in options.arguments.items():
        parser.add_argument(argument, **keywords)
    return parser


def compare(name: str, about: str) -> argparse.ArgumentParser:
    """`comera compare RECIPE`, without the options that its runs share."""
    parser = argparse.ArgumentParser(
        f"comera compare {name}",
        usage="%(prog)s [--methods LIST] [--seconds S] [--out FOLDER] [--resume] [OPTIONS OF TRAIN ...]",
        description=about,
        epilog=f"Every option of `comera train {name}` is accepted too and applies to all methods.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--methods", default="dense,comera", metavar="LIST", help="comma-separated methods (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="training time per method (default: as the configuration says)"
    )
    parser.add_argument(
        "--out", default=f"runs/compare-{name}", metavar="FOLDER", help="folder for the runs (default: %(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="continue the interrupted comparison in --out")
    return parser


def _number(default: float, text: str, **others: Any) -> dict[str, Any]:
    return {"type": type(default), "default": default, "help": f"{text} (default: {default})", **others}


def _switch(text: str) -> dict[str, Any]:
    return {"action": "store_true", "help": text}


def _column(what: str) -> dict[str, Any]:
    return {"metavar": "COLUMN", "help": f"column of {what} (default: as in training)"}


_RUN = {"metavar": "RUN|CHECKPOINT", "help": "folder of a run (last checkpoint) or checkpoint"}
WITHOUT_RECIPE = {
    "inspect": Options({"path": {"metavar": "RUN|CHECKPOINT", "help": "folder of a run or of a checkpoint"}}),
    "export": Options(
        {
            "path": _RUN,
            "--to": {"choices": ("safetensors", "program", "onnx"), "required": True, "help": "format to write"},
            "--dense": _switch("with dense weights instead of compressed ones"),
            "--out": {"required": True, "metavar": "FOLDER", "help": "folder to write"},
            "--overwrite": _switch("replace an earlier export in FOLDER"),
        },
        "safetensors: weights, for comera.load_pretrained; with --dense under the original names, for transformers' "
        "from_pretrained or safetensors.torch.load_model. program: model.pt2, for torch.export.load. onnx: "
        "model.onnx, for onnxruntime and other engines. The folder also gets the run's tokenizer. Every export is "
        "loaded again and compared with the model before it appears.",
    ),
    "convert": Options(
        {
            "path": {"metavar": "FOLDER", "help": "model that save_pretrained of transformers wrote, or a download"},
            "--ratio": {"type": float, "required": True, "metavar": "R", "help": "how many times smaller it becomes"},
            "--out": {"required": True, "metavar": "OUT", "help": "new folder, for from_pretrained of transformers"},
        },
        "Weights are read, decomposed and released one by one. A conversion that was stopped goes on from "
        "OUT.partial when it is started again.",
    ),
    "generate": Options(
        {
            "path": {
                "metavar": "RUN|CHECKPOINT|EXPORT",
                "help": "folder of a run (last checkpoint), of a checkpoint, or of an export to safetensors",
            },
            "prompt": {"metavar": "TEXT", "help": "the beginning of a document, such as 'def '"},
            "--max_new_tokens": _number(128, "tokens to write, at most; the context bounds them, too"),
            "--temperature": _number(0.8, "divides the logits; 0 always takes the likeliest token"),
            "--top_p": _number(0.95, "draw from the likeliest tokens that together have this probability"),
            "--seed": _number(0, "of the draws: the same seed writes the same text"),
        }
    ),
    "score": Options(
        {
            "path": _RUN,
            "file": {"metavar": "FILE", "help": "rows as in training, with or without labels, plain or .gz"},
            "--out": {"required": True, "metavar": "CSV", "help": "output: line, logit and probability of each row"},
            "--batch_size": _number(4096, "rows per batch", metavar="N"),
            "--max_bad_rows": _number(0, "malformed rows to skip before failing", metavar="N"),
            "--overwrite": _switch("replace an existing CSV"),
        }
    ),
    "predict": Options(
        {
            "path": {"metavar": "RUN|CHECKPOINT", "help": "folder of a run (best checkpoint) or checkpoint"},
            "file": {"metavar": "FILE", "help": "rows: .jsonl, .csv or .tsv, plain or .gz, or .parquet"},
            "--out": {"metavar": "OUT", "help": "file to write (default: standard output)"},
            "--to": {"choices": ("jsonl", "csv"), "help": "form (default: csv for an OUT that ends in .csv)"},
            "--text": _column("the text"),
            "--pair": _column("the second text of pairs"),
            "--label": _column("the label"),
            "--batch_size": _number(64, "rows per batch", metavar="N"),
            "--overwrite": _switch("replace an existing OUT"),
        },
        "Each row that can be read gets a line: the line of the file that it ends in, its label, and the probability "
        "of each label. Labels in FILE are not needed; where they are, the accuracy is printed.",
    ),
    "calibrate": Options({}),
    "completion": Options(
        {"shell": {"choices": SHELLS}},
        "once, for every later shell:\n"
        "  comera completion bash > ~/.local/share/bash-completion/completions/comera\n"
        "  comera completion zsh > FOLDER/_comera    (a folder in $fpath)",
    ),
}
