"""The options of each command that are no fields of a recipe: parsers that commands use and shells complete from."""

import argparse
from collections.abc import Callable

SHELLS = ("bash", "zsh")


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


def inspect(about: str) -> argparse.ArgumentParser:
    """`comera inspect`."""
    parser = argparse.ArgumentParser("comera inspect", description=about)
    parser.add_argument("path", metavar="RUN|CHECKPOINT", help="folder of a run or of a checkpoint")
    return parser


def export(about: str) -> argparse.ArgumentParser:
    """`comera export`."""
    parser = argparse.ArgumentParser(
        "comera export",
        description=about,
        epilog="safetensors: weights, for comera.load_pretrained; with --dense under the original names, for "
        "transformers' from_pretrained or safetensors.torch.load_model. program: model.pt2, for torch.export.load. "
        "onnx: model.onnx, for onnxruntime and other engines. The folder also gets the run's tokenizer. Every export "
        "is loaded again and compared with the model before it appears.",
    )
    parser.add_argument("path", metavar="RUN|CHECKPOINT", help="folder of a run (last checkpoint) or checkpoint")
    parser.add_argument("--to", choices=("safetensors", "program", "onnx"), required=True, help="format to write")
    parser.add_argument("--dense", action="store_true", help="with dense weights instead of compressed ones")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export in FOLDER")
    return parser


def convert(about: str) -> argparse.ArgumentParser:
    """`comera convert`."""
    parser = argparse.ArgumentParser(
        "comera convert",
        description=about,
        epilog="Weights are read, decomposed and released one by one. A conversion that was stopped goes on from "
        "OUT.partial when it is started again.",
    )
    parser.add_argument(
        "path", metavar="FOLDER", help="model that save_pretrained of transformers wrote, or a download"
    )
    parser.add_argument("--ratio", type=float, required=True, metavar="R", help="how many times smaller it becomes")
    parser.add_argument("--out", required=True, metavar="OUT", help="new folder, for from_pretrained of transformers")
    return parser


def generate(about: str) -> argparse.ArgumentParser:
    """`comera generate`."""
    parser = argparse.ArgumentParser("comera generate", description=about)
    where = "folder of a run (last checkpoint), of a checkpoint, or of an export to safetensors"
    parser.add_argument("path", metavar="RUN|CHECKPOINT|EXPORT", help=where)
    parser.add_argument("prompt", metavar="TEXT", help="the beginning of a document, such as 'def '")
    options = (
        ("max_new_tokens", int, 128, "tokens to write, at most; the context bounds them, too"),
        ("temperature", float, 0.8, "divides the logits; 0 always takes the likeliest token"),
        ("top_p", float, 0.95, "draw from the likeliest tokens that together have this probability"),
        ("seed", int, 0, "of the draws: the same seed writes the same text"),
    )
    for name, kind, default, text in options:
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default: {default})")
    return parser


def score(about: str) -> argparse.ArgumentParser:
    """`comera score`."""
    parser = argparse.ArgumentParser("comera score", description=about)
    parser.add_argument("path", metavar="RUN|CHECKPOINT", help="folder of a run (last checkpoint) or checkpoint")
    parser.add_argument("file", metavar="FILE", help="rows as in training, with or without labels, plain or .gz")
    parser.add_argument("--out", required=True, metavar="CSV", help="output: line, logit and probability of each row")
    parser.add_argument("--batch_size", type=int, default=4096, metavar="N", help="rows per batch (default: 4096)")
    parser.add_argument(
        "--max_bad_rows", type=int, default=0, metavar="N", help="malformed rows to skip before failing (default: 0)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing CSV")
    return parser


def predict(about: str) -> argparse.ArgumentParser:
    """`comera predict`."""
    parser = argparse.ArgumentParser(
        "comera predict",
        description=about,
        epilog="Each row that can be read gets a line: the line of the file that it ends in, its label, and the "
        "probability of each label. Labels in FILE are not needed; where they are, the accuracy is printed.",
    )
    parser.add_argument("path", metavar="RUN|CHECKPOINT", help="folder of a run (best checkpoint) or checkpoint")
    parser.add_argument("file", metavar="FILE", help="rows: .jsonl, .csv or .tsv, plain or .gz, or .parquet")
    parser.add_argument("--out", metavar="OUT", help="file to write (default: standard output)")
    parser.add_argument("--to", choices=("jsonl", "csv"), help="form (default: csv for an OUT that ends in .csv)")
    for name, what in (("text", "the text"), ("pair", "the second text of pairs"), ("label", "the label")):
        parser.add_argument(f"--{name}", metavar="COLUMN", help=f"column of {what} (default: as in training)")
    parser.add_argument("--batch_size", type=int, default=64, metavar="N", help="rows per batch (default: 64)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing OUT")
    return parser


def calibrate(about: str) -> argparse.ArgumentParser:
    """`comera calibrate`."""
    return argparse.ArgumentParser("comera calibrate", description=about)


def completion(about: str) -> argparse.ArgumentParser:
    """`comera completion`."""
    parser = argparse.ArgumentParser(
        "comera completion",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="once, for every later shell:\n"
        "  comera completion bash > ~/.local/share/bash-completion/completions/comera\n"
        "  comera completion zsh > FOLDER/_comera    (a folder in $fpath)",
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


WITHOUT_RECIPE: dict[str, Callable[[str], argparse.ArgumentParser]] = {
    "inspect": inspect,
    "export": export,
    "convert": convert,
    "generate": generate,
    "score": score,
    "predict": predict,
    "calibrate": calibrate,
    "completion": completion,
}
