"""Source files, rows and vocabularies to mine functions from, small and written anew for each test."""

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ROBERTA = ("<s>", "<pad>", "</s>", "<unk>")  # and <mask>, at the end


def function(k: int, *, documented: bool, lines: int = 1) -> str:
    """A function; every one differs."""
    docstring = f'    """Adds {k} to a value, one of many."""\n' if documented else ""
    body = "".join(f"    value = value + {k} * {line}\n" for line in range(lines))
    return f"def add_{k}(value):\n{docstring}{body}    return value\n"


def write_modules(folder: Path, count: int = 12, each: int = 6) -> Path:
    """Modules of functions of many lengths; every other function has a docstring."""
    folder.mkdir(parents=True, exist_ok=True)
    for module in range(count):
        numbers = range(module * each, (module + 1) * each)
        texts = [function(k, documented=k % 2 == 0, lines=1 + k % 5) for k in numbers]
        (folder / f"module{module}.py").write_text("\n\n".join(texts))
    return folder


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """JSON lines, packed if the name says so."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


def write_roberta(folder: Path, texts: Iterable[str], size: int = 300) -> Path:
    """vocab.json and merges.txt as RoBERTa has them: four special tokens first and <mask> last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1, special_tokens=list(ROBERTA), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.model.save(str(folder))
    vocab = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(vocab | {"<mask>": len(vocab)}))
    return folder
