"""Fine-tuning by forward passes alone (AdaZeta, arXiv:2406.18060): TT adapters beside a frozen encoder, and gradients
estimated from ever more queries. It needs hardly more memory than inference.

A query is a random direction z of signs, one for each of the d trained elements w, and two forward passes:

    g = (1/Q) Σ_q [L(w + ε z_q) − L(w − ε z_q)] / 2ε · z_q,    E‖g − ∇L‖² = (d − 1) ‖∇L‖² / Q
    Q_e = min(max(⌊α e^β⌋, 1), most)                           queries of each step in epoch e, from 0

Tensor trains keep d small, and Q_e grows, since late steps need better estimates. An epoch here is one of --epochs
equal parts of the run, in the paper a pass over the texts. AdamW takes the step, with betas of 0.9 and 0.99: estimates
spread less and less, which a slower second moment would follow too late. Methods:

    head          the classification head alone, by a backward
    first-order   adapters and head, by a backward: what adazeta is measured by
    adazeta       the same parameters, by ever more queries
    mezo          every parameter, one query a step, SGD (MeZO, arXiv:2305.17333; here with a copy of the parameters)
    mezo-tt       the parameters and optimizer of adazeta, one query a step

The mezo methods take as many forward passes as adazeta. Rates fall linearly. A method trains with each of its rates,
and the one with the best validation accuracy is tested, once.

The encoder is a BERT that is made here first, without labels: token vectors from co-occurrence, then training to fill
in words; it stays in --out. Or give one with --encoder: a folder that transformers reads, tokenizer included. Texts:
--data FOLDER with sst2_train.tsv.gz, sst2_valid.tsv.gz and sst2_dev.tsv.gz, columns sentence and label; by default
they are generated, and figures mean little.

    python examples/adazeta.py --methods head first-order adazeta mezo mezo-tt --out runs/adazeta
"""

import argparse
import gzip
import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertForMaskedLM, BertModel
from transformers.utils import logging

import comera
from comera.adapters import TTAdapter, adapt_, save_adapters
from comera.errors import CheckpointError, ComeraError, ConfigError, DataError
from comera.memory.live import LiveMemory
from comera.optim import ZerothOrder, adaptive_queries
from comera.recipes.bert import ModelConfig
from comera.recipes.classify.data import ClassifyDataConfig, PreparedExamples, prepare
from comera.recipes.data.prepared import ExampleBatch, Examples

RATES = {"head": (3e-3, 1e-2), "first-order": (3e-3, 1e-2), "adazeta": (2e-3, 5e-3), "mezo-tt": (5e-4, 1e-3)}
RATES["mezo"] = (1e-4, 1e-3)
WINDOW, WHITENING = 4, 0.01  # tokens that are near; of the mean variance, added to each
LENGTH = 64  # tokens of a text, at most
COLUMNS = ("method", "rate", "valid", "dev", "gain_valid", "gain_dev", "trained", "steps", "passes")
COLUMNS += ("step_mb", "inference_mb", "memory")


@dataclass(frozen=True)
class Settings:
    """Of all runs; each can be given as an option."""

    out: str = "runs/adazeta"
    data: str = ""  # folder; "": generated texts
    encoder: str = ""  # folder; "": one is trained
    hidden: int = 128
    layers: int = 2
    vocab: int = 8_000  # tokens, at most
    pretrain_steps: int = 1_500
    steps: int = 1_000  # of head and first-order
    zeroth_steps: int = 2_400  # of adazeta
    batch: int = 64
    order: int = 4  # of the adapters' tensor trains
    rank: int = 2
    targets: str = "*.query,*.value"  # the layers that have one
    epochs: int = 10
    alpha: float = 2.0
    beta: float = 0.5
    most: int = 8
    eps: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "pretrain_steps", "steps", "zeroth_steps", "batch", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(self, name)}")
        self.queries(0)

    def queries(self, step: int) -> int:
        """Of a step of adazeta."""
        epoch = step * self.epochs // self.zeroth_steps
        return adaptive_queries(epoch, alpha=self.alpha, beta=self.beta, maximum=self.most)


def generate(folder: Path) -> None:
    """Write texts of good, bad and other words, of which "not" turns the next one; the label is the mood that wins."""
    folder.mkdir(exist_ok=True)
    for part, count in {"train": 4000, "valid": 500, "dev": 500}.items():
        drawn, lines = random.Random(part), ["sentence\tlabel"]
        while len(lines) <= count:
            size, mood, score, words = drawn.randint(4, 12), drawn.choice((1, -1)), 0, list[str]()
            for kind in drawn.choices((mood, -mood, 0), (2, 1, 1), k=size):
                turned = drawn.random() < 0.2
                score += -kind if turned else kind
                words += ["not"] * turned + [("word", "good", "bad")[kind] + str(drawn.randrange(40))]
            if score:
                lines.append(f"{' '.join(words)}\t{int(score > 0)}")
        (folder / f"sst2_{part}.tsv.gz").write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))


def prepared(settings: Settings) -> PreparedExamples:
    """The texts as tokens, those of the encoder where one is given."""
    folder = Path(settings.data or Path(settings.out) / "generated")
    if not settings.data:
        print("texts are generated: these figures say that it runs, and little else; --data FOLDER has others")
        generate(folder)
    files = [folder / f"sst2_{part}.tsv.gz" for part in ("train", "valid", "dev")]
    if missing := [file.name for file in files if not file.is_file()]:
        raise DataError(f"--data: expected {missing[0]} in {folder}, found none")
    if settings.encoder and not Path(settings.encoder, "config.json").is_file():
        raise CheckpointError(f"--encoder: expected a BERT with its config.json, found none in {settings.encoder}")
    train, valid, dev = map(str, files)
    data = ClassifyDataConfig(train, text="sentence", label="label", valid=valid, test=dev, max_length=LENGTH)
    own = {"buckets": LENGTH // 4, "tokenizer": settings.encoder or None, "cache": str(Path(settings.out) / "data")}
    return prepare(replace(data, vocab_size=settings.vocab, **own), quiet=True)


def word_vectors(data: PreparedExamples, width: int) -> Tensor:
    """(tokens, width): singular vectors of which tokens are near each other (positive PMI, Levy & Goldberg 2014)."""
    ids, lengths = (torch.from_numpy(found.astype("int64")) for found in (data.train.tokens, data.train.lengths))
    text = torch.arange(len(lengths)).repeat_interleave(lengths)
    near = [torch.stack([ids[:-k], ids[k:]])[:, text[k:] == text[:-k]] for k in range(1, WINDOW + 1)]
    pairs = torch.cat([*near, *(pair.flip(0) for pair in near)], 1)
    counted, size = torch.ones(pairs.shape[1]), (data.vocab_size, data.vocab_size)
    table = torch.sparse_coo_tensor(pairs, counted, size, check_invariants=True).coalesce()
    (row, column), often = table.indices(), table.sum(1).to_dense()
    share = often**0.75 / (often**0.75).sum()
    table.values().div_(often[row] * share[column]).log_().clamp_min_(0)
    vectors = torch.svd_lowrank(table, q=width, niter=3)[0]
    return 0.05 * vectors / vectors.std()


def pretrain(data: PreparedExamples, folder: Path, settings: Settings) -> None:
    """Train a BERT to fill in a sixth of the tokens, and write it to a folder as transformers does. Its token table
    starts from `word_vectors`, since few texts are too few to learn them so."""
    names, roles = data.tokenizer.tokenizer, data.tokenizer.roles
    mask, special = names.token_to_id(roles["mask_token"]), torch.tensor([names.token_to_id(r) for r in roles.values()])
    torch.manual_seed(settings.seed)
    sizes = ModelConfig(settings.hidden, settings.layers, max(1, settings.hidden // 32), 4 * settings.hidden)
    model = BertForMaskedLM(sizes.bert(data.vocab_size, pad_token_id=data.tokenizer.pad))
    model.bert.embeddings.word_embeddings.weight.data.copy_(word_vectors(data, settings.hidden))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(settings.pretrain_steps):
        ids, _, present, _ = data.train_batch(step, settings.batch, settings.seed)
        hidden = (torch.rand(ids.shape) < 1 / 6) & ~torch.isin(ids, special)
        hidden[0, 1] = True  # one at least
        states = model.bert(ids.masked_fill(hidden, mask), attention_mask=present).last_hidden_state
        loss = F.cross_entropy(model.cls(states[hidden]), ids[hidden])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 500 == 0:
            print(f"encoder: step {step}, loss {loss.item():.3f}", flush=True)
    model.bert.save_pretrained(folder)


def encoder_folder(data: PreparedExamples, settings: Settings) -> Path:
    """Where the encoder is; it is trained first if there is none yet."""
    if settings.encoder:
        return Path(settings.encoder)
    folder = Path(settings.out) / "encoder"
    about = {name: getattr(settings, name) for name in ("hidden", "layers", "vocab", "pretrain_steps", "batch", "seed")}
    about["texts"], file = zlib.crc32(data.train.tokens.tobytes()), folder / "about.json"
    if not file.is_file():
        pretrain(data, folder, settings)
        file.write_text(json.dumps(about))  # the last one: a folder without it is not complete
    found = json.loads(file.read_text())
    others = [f"{name} {found.get(name)!r}, not {value!r}" for name, value in about.items() if found.get(name) != value]
    if others:
        raise CheckpointError(f"{folder}: expected an encoder of these options, got {others[0]}: use another --out")
    return folder


class Classifier(nn.Module):
    """An encoder, a linear head, and between them the mean over tokens, whitened: of about the same size in every
    direction, so that a random step of the head does not change the large ones alone."""

    def __init__(self, folder: Path, data: PreparedExamples, seed: int) -> None:
        super().__init__()
        try:
            self.encoder, loading = BertModel.from_pretrained(
                folder, add_pooling_layer=False, local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError):
            raise CheckpointError(f"{folder}: expected a BERT that transformers reads, found none") from None
        config, missing = self.encoder.config, sorted(loading["missing_keys"])
        if missing or config.vocab_size < data.vocab_size:
            what = f"no {missing[0]}" if missing else f"a table of {config.vocab_size}"
            raise CheckpointError(f"{folder}: expected a BERT with weights for {data.vocab_size} tokens, got {what}")
        torch.manual_seed(seed)
        self.head = nn.Linear(config.hidden_size, len(data.label_names))
        nn.init.normal_(self.head.weight, std=config.initializer_range)
        with torch.no_grad():
            found = torch.cat([self.features(data.train_batch(k, 64, seed)) for k in range(32)])
            values, vectors = torch.linalg.eigh(found.T.cov())
            self.register_buffer("center", found.mean(0))
            self.register_buffer("whiten", vectors / (values + WHITENING * values.mean()).sqrt())

    def features(self, batch: ExampleBatch) -> Tensor:
        """-> (B, hidden)."""
        present = batch.attention_mask
        states = self.encoder(batch.input_ids, attention_mask=present).last_hidden_state
        return (states * present[..., None]).sum(1) / present.sum(1, keepdim=True)

    def forward(self, batch: ExampleBatch) -> Tensor:
        """-> (B, labels)."""
        return self.head((self.features(batch) - self.center) @ self.whiten)

    @torch.no_grad()
    def accuracy(self, examples: Examples) -> float:
        """Share of right answers."""
        right = [self(batch).argmax(1) == batch.labels for batch in examples.sorted(200)]
        return float(torch.cat(right).float().mean())


class Trainer:
    """A model as a method trains it, and the steps and forward passes that this took; valid: its accuracy then."""

    def __init__(self, method: str, rate: float, folder: Path, data: PreparedExamples, settings: Settings) -> None:
        self.method, self.rate, self.settings = method, rate, settings
        self.passes, self.steps, self.valid = 0, 0, 0.0
        self.model = model = Classifier(folder, data, settings.seed).eval()
        if method == "head":
            model.encoder.requires_grad_(False)
        elif method != "mezo":
            adapter, drawn = TTAdapter(settings.order, settings.rank), torch.Generator().manual_seed(settings.seed)
            adapt_(model, adapter, targets=settings.targets.split(","), also_train="head", generator=drawn)
        self.planned, self.estimator = settings.steps, None
        if method in ("adazeta", "mezo-tt", "mezo"):
            steps = settings.zeroth_steps
            self.planned = steps if method == "adazeta" else sum(settings.queries(step) for step in range(steps))
            self.estimator = ZerothOrder(model.parameters(), eps=settings.eps, seed=settings.seed)
        groups = comera.param_groups(model, lr=rate)
        self.optimizer = torch.optim.SGD(groups) if method == "mezo" else torch.optim.AdamW(groups, betas=(0.9, 0.99))
        self.decay = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.0, self.planned)

    def step(self, batch: ExampleBatch) -> Tensor:
        """The loss before it."""

        def closure() -> Tensor:
            self.passes += 1
            return F.cross_entropy(self.model(batch), batch.labels)

        if self.estimator:
            self.estimator.queries = self.settings.queries(self.steps) if self.method == "adazeta" else 1
            loss = self.estimator.estimate(closure)
        else:
            self.optimizer.zero_grad()
            loss = closure()
            loss.backward()
        self.optimizer.step()
        self.decay.step()
        self.steps += 1
        return loss.detach()


def peaks(trainer: Trainer, batch: ExampleBatch) -> tuple[int, int]:
    """Bytes of the tensors that are alive at once, weights included: in the first training steps, and in inference."""
    stored = [*trainer.model.parameters(), *trainer.model.buffers(), *batch]
    there = sum(tensor.nbytes for tensor in stored)
    with LiveMemory(stored) as inference, torch.no_grad():
        F.cross_entropy(trainer.model(batch), batch.labels)
    with LiveMemory(stored) as training:
        for _ in range(2):  # the second one has the optimizer's state from the start
            trainer.step(batch)
    return there + training.peak, there + inference.peak


def run(method: str, rates: Sequence[float], folder: Path, data: PreparedExamples, settings: Settings) -> Any:
    """The row of a method, with the best of the rates by validation accuracy."""
    trainers: list[Trainer] = []
    for rate in rates:
        trainer, losses = Trainer(method, rate, folder, data, settings), []
        every = max(1, trainer.planned // 5)
        for step in range(trainer.planned):
            losses.append(trainer.step(data.train_batch(step, settings.batch, settings.seed + 1)))
            if trainer.steps % every == 0:
                mean = torch.stack(losses[-every:]).mean()
                print(f"{method} {rate:g}: step {trainer.steps} of {trainer.planned}, loss {mean:.4f}", flush=True)
        trainer.valid = trainer.model.accuracy(data.dev)
        print(f"{method} {rate:g}: validation accuracy {trainer.valid:.4f}", flush=True)
        trainers.append(trainer)
    best = max(trainers, key=lambda each: each.valid)
    if method not in ("head", "mezo"):
        save_adapters(best.model, Path(settings.out) / f"adapters-{method}")
    fresh = Trainer(method, best.rate, folder, data, settings)
    step, inference = peaks(fresh, data.train_batch(0, settings.batch, 0))
    trained = sum(p.numel() for p in best.model.parameters() if p.requires_grad)
    row = {"method": method, "rate": best.rate, "valid": best.valid, "dev": best.model.accuracy(data.test)}
    row |= {"trained": trained, "steps": best.steps, "passes": best.passes}
    row |= {"step_mb": step / 1e6, "inference_mb": inference / 1e6, "memory": step / inference}
    return row | {"tried": {f"{each.rate:g}": each.valid for each in trainers}}


def write(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Add the shares of first-order's gain over the untrained head; write results.json."""
    by_name = {row["method"]: row for row in rows}
    start, best = by_name["untrained"], by_name.get("first-order", {})
    for row in rows:
        for part in ("valid", "dev"):
            if whole := best.get(part, start[part]) - start[part]:
                row[f"gain_{part}"] = (row[part] - start[part]) / whole
    (out / "results.json").write_text(json.dumps(rows, indent=1))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--rates", nargs="+", type=float, help="for each method, in place of its own ones")
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    given = vars(parser.parse_args(arguments))
    methods, rates = given.pop("methods"), given.pop("rates")
    torch.set_num_threads(1)  # so that the seed decides everything
    logging.disable_progress_bar()
    try:
        settings = Settings(**given)
        Path(settings.out).mkdir(parents=True, exist_ok=True)
        data = prepared(settings)
        folder = encoder_folder(data, settings)
        start = Classifier(folder, data, settings.seed).eval()
        rows = [{"method": "untrained", "valid": start.accuracy(data.dev), "dev": start.accuracy(data.test)}]
        for method in methods:
            rows.append(run(method, rates or RATES[method], folder, data, settings))
            write(rows, Path(settings.out))
        for row in [dict(zip(COLUMNS, COLUMNS, strict=True)), *rows]:
            cells = (row.get(name, "") for name in COLUMNS)
            print(*(f"{f'{cell:.4g}' if isinstance(cell, float) else cell!s:>12}" for cell in cells))
    except ComeraError as error:
        raise SystemExit(f"adazeta: {error}") from None


if __name__ == "__main__":
    main()
