"""Federated fine-tuning with TT adapters (FedTT): clients keep their texts, and only adapters travel.

Each client is a process on this machine with texts of its own, more of some labels than of others. In a round, the
server (process 0) sends what is trained to all clients, each takes some steps on its own texts and sends the result
back, and the mean, weighted by numbers of texts, is the next model (FedAvg). A client that goes away, or does not
answer in time, is left out from then on. Rates fall linearly over the rounds. Methods:

    tt     tensor trains beside the linear layers of the encoder, and the head        FedTT, arXiv:2410.13097
    tt+    the same, one core of each in turn: the mean of such adapters is exact, and a round sends less (FedTT+ also
           freezes some cores in a round, by a rule of its own)
    lora   LoRA: adapters of order 2
    full   every parameter
    head   the head alone, for what adapters add

The encoder is pre-trained first, on the texts without labels, by the words that are left out of them. Texts are
generated: two clauses, each in a good or in a bad mood; do the moods agree? Or your own: --data FOLDER with train.tsv
and test.tsv, "text TAB label" a line.

    python examples/federated.py --methods tt lora full --rounds 20 --out runs/federated
"""

import argparse
import csv
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import comera
from comera.adapters import TTAdapter, adapt_, save_adapters

METHODS = ("tt", "tt+", "lora", "full", "head")
RATES = {"tt": 3e-3, "tt+": 3e-3, "lora": 3e-3, "full": 1e-3, "head": 1e-2}
PAD, MASK, UNKNOWN = 0, 1, 2
LENGTH, WORDS = 16, 8_000  # of a text; known words, at most


@dataclass(frozen=True)
class Settings:
    """Of one run; what has a default can be given as an option."""

    out: str
    method: str = "tt"
    data: str = ""  # folder of train.tsv and test.tsv; "": generated texts
    clients: int = 3
    rounds: int = 20
    steps: int = 10  # of each client in a round
    batch: int = 32
    rank: int = 2  # of the tensor trains
    order: int = 4
    lora_rank: int = 8
    lr: float = 0.0  # 0: that of the method
    skew: float = 0.5  # of labels over clients, Dirichlet's alpha: small is uneven
    hidden: int = 64
    pretrain_steps: int = 600
    timeout: float = 120.0  # seconds until a silent client is left out
    vanish: int = 0  # a client that is killed in the second round, to see the others go on; 0: none
    seed: int = 0


# --- texts ----------------------------------------------------------------------------------------------------------


def generated(count: int, seed: int) -> list[tuple[str, str]]:
    """Texts of two clauses, and whether their moods agree."""
    drawn, rows = random.Random(seed), []
    for _ in range(count):
        moods = drawn.choice(("good", "bad")), drawn.choice(("good", "bad"))
        clauses = [" ".join(f"{mood}{drawn.randrange(40)}" for _ in range(drawn.randint(3, 6))) for mood in moods]
        rows.append((" then ".join(clauses), "agree" if moods[0] == moods[1] else "differ"))
    return rows


def read(file: Path) -> list[tuple[str, str]]:
    """Lines "text TAB label"; a first line without one of the other lines' labels is a header."""
    with file.open(newline="", encoding="utf-8") as lines:
        rows = [(row[0], row[1]) for row in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if len(row) > 1]
    return rows[1:] if rows and rows[0][1] not in {label for _, label in rows[1:]} else rows


@dataclass
class Texts:
    """Ids (N, LENGTH) and labels (N,) for training and testing; how many words, the special ones too, and labels."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    words: int
    labels: int

    @classmethod
    def of(cls, settings: Settings) -> "Texts":
        """The texts that the settings name, the same in every process."""
        if settings.data:
            train, test = (read(Path(settings.data) / f"{part}.tsv") for part in ("train", "test"))
        else:
            train, test = generated(4000, seed=1000), generated(1000, seed=2000)
        counted = Counter(word for text, _ in train for word in text.lower().split())
        ids = {word: k + 3 for k, (word, _) in enumerate(counted.most_common(WORDS))}
        names = sorted({label for _, label in train})

        def encoded(rows: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
            table = torch.full((len(rows), LENGTH), PAD)
            for row, (text, _) in zip(table, rows, strict=True):
                found = [ids.get(word, UNKNOWN) for word in text.lower().split()][:LENGTH]
                row[: len(found)] = torch.tensor(found)
            return table, torch.tensor([names.index(label) for _, label in rows])

        return cls(encoded(train), encoded(test), len(ids) + 3, len(names))


def shards(labels: Tensor, settings: Settings) -> list[Tensor]:
    """Which texts each client has: those of each label are split in shares drawn from a Dirichlet distribution."""
    generator = torch.Generator().manual_seed(settings.seed)
    drawn = torch.full((int(labels.max()) + 1, settings.clients), settings.skew)
    shares = torch._sample_dirichlet(drawn, generator)
    found: list[list[Tensor]] = [[] for _ in range(settings.clients)]
    for label, share in enumerate(shares):
        own = (labels == label).nonzero()[:, 0]
        own = own[torch.randperm(len(own), generator=generator)]
        ends = (share.cumsum(0) * len(own)).round().long().tolist()
        for client, (start, end) in enumerate(zip([0, *ends], [*ends[:-1], len(own)], strict=False)):
            found[client].append(own[start:end])
    return [torch.cat(parts) for parts in found]


# --- model ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """An encoder."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value, self.project = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x (B, T, hidden); mask (B, T), False where there is no word."""
        y = self.norm1(x)
        query, key, value = (f(y).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None])
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Classifier(nn.Module):
    """Two encoders, and a linear head on the mean over words; `words` predicts words that are left out."""

    def __init__(self, words: int, labels: int, hidden: int) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(words, hidden), nn.Parameter(0.1 * torch.randn(LENGTH, hidden))
        self.encoder = nn.ModuleList(Block(hidden) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, labels)

    def encode(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, hidden)."""
        x = self.table(ids) + self.places
        for block in self.encoder:
            x = block(x, ids != PAD)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, labels)."""
        present = (ids != PAD)[..., None]
        return self.head((self.encode(ids) * present).sum(1) / present.sum(1))


def pretrained(texts: Texts, settings: Settings) -> Classifier:
    """The encoder, trained to predict a sixth of the words from the others."""
    torch.manual_seed(settings.seed)
    model = Classifier(texts.words, texts.labels, settings.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(settings.pretrain_steps):
        ids = texts.train[0][torch.randint(len(texts.train[0]), (64,))]
        hidden = (torch.rand(ids.shape) < 1 / 6) & (ids != PAD)
        states = model.encode(ids.masked_fill(hidden, MASK))[hidden]
        loss = F.cross_entropy(states @ model.table.weight.t(), ids[hidden])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def adapted(texts: Texts, settings: Settings) -> Classifier:
    """The pre-trained model as a method trains it, the same in every process."""
    model = Classifier(texts.words, texts.labels, settings.hidden)
    model.load_state_dict(torch.load(Path(settings.out) / "pretrained.pt"))
    generator = torch.Generator().manual_seed(settings.seed)
    if settings.method == "head":
        model.requires_grad_(False)
        model.head.requires_grad_(True)
    elif settings.method != "full":
        lora = settings.method == "lora"
        adapter = TTAdapter(order=2, rank=settings.lora_rank) if lora else TTAdapter(settings.order, settings.rank)
        adapt_(model, adapter, targets="encoder.*", also_train="head", generator=generator)
    return model


def travelling(model: nn.Module, settings: Settings, round_: int) -> list[nn.Parameter]:
    """What is trained in a round, and sent to the server. For tt+ one core of each adapter, the last one first, which
    starts at zero: an adapter is linear in each of its cores, so the mean over clients is that of the adapters."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if settings.method != "tt+":
        return list(trained.values())
    turn = f".cores.{settings.order - 1 - round_ % settings.order}"
    return [p for name, p in trained.items() if name.endswith(turn) or ".adapter." not in name]


def changed(model: nn.Module, settings: Settings, round_: int) -> list[nn.Parameter]:
    """What clients need before a round: the means of the last one, in the place of what each had made of them."""
    return travelling(model, settings, max(round_ - 1, 0))


# --- rounds ---------------------------------------------------------------------------------------------------------


def vector(parameters: Sequence[Tensor]) -> Tensor:
    """All elements, one after the other."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


@torch.no_grad()
def fill_(parameters: Sequence[Tensor], values: Tensor) -> None:
    """The reverse of `vector`, in place."""
    for parameter, part in zip(parameters, values.split([p.numel() for p in parameters]), strict=True):
        parameter.copy_(part.view_as(parameter))


def weighted_mean(answers: Sequence[Tensor]) -> Tensor:
    """The mean of what clients sent: elements, and the number of texts as the last one, which weighs them."""
    stacked = torch.stack(list(answers)).double()
    weights = stacked[:, -1:] / stacked[:, -1].sum()
    return (weights * stacked[:, :-1]).sum(0).float()


def local_steps(model: nn.Module, ids: Tensor, labels: Tensor, settings: Settings, round_: int, client: int) -> None:
    """A client's steps of a round, on its own texts."""
    chosen = set(travelling(model, settings, round_))
    lr = (settings.lr or RATES[settings.method]) * (1 - round_ / settings.rounds)
    groups = comera.param_groups(model, lr=lr)
    groups = [{**group, "params": [p for p in group["params"] if p in chosen]} for group in groups]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
    seed = (settings.seed * settings.rounds + round_) * settings.clients + client
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.steps):
        picked = torch.randint(len(ids), (settings.batch,), generator=generator)
        loss = F.cross_entropy(model(ids[picked]), labels[picked])
        model.zero_grad()
        loss.backward()
        optimizer.step()


def serve(settings: Settings, texts: Texts) -> None:
    """Process 0: sends, waits, averages and tests; writes METHOD.json."""
    model, clients, rounds = adapted(texts, settings), list(range(1, settings.clients + 1)), []
    for round_ in range(settings.rounds):
        parameters = travelling(model, settings, round_)
        current = vector(changed(model, settings, round_))
        down = up = 0
        told, answers = [], dict[int, Tensor]()
        for client in clients:
            with suppress(RuntimeError):  # what gloo raises where nobody is, or nobody answers in time
                dist.send(current, client)
                told.append(client)
                down += current.nbytes
        for client in told:
            answer = torch.empty(len(vector(parameters)) + 1)
            with suppress(RuntimeError):
                dist.recv(answer, client)
                answers[client] = answer
                up += answer.nbytes
        for client in clients:
            if client not in answers:
                print(f"round {round_}: client {client} has gone, {len(answers)} go on", flush=True)
        clients = list(answers)
        if not answers:
            raise SystemExit(f"round {round_}: no client is left")
        fill_(parameters, weighted_mean(list(answers.values())))
        right = accuracy(model, *texts.test)
        rounds.append({"accuracy": right, "up": up, "down": down, "clients": clients})
        print(f"round {round_}: accuracy {right:.4f}, bytes up {up:,} down {down:,}", flush=True)
    folder = Path(settings.out)
    if settings.method not in ("full", "head"):
        save_adapters(model, folder / f"adapters-{settings.method}")
    (folder / f"{settings.method}.json").write_text(json.dumps(rounds, indent=1))


def take_part(settings: Settings, texts: Texts, client: int) -> None:
    """A client's process."""
    model, own = adapted(texts, settings), shards(texts.train[1], settings)[client - 1]
    ids, labels = (tensor[own] for tensor in texts.train)
    for round_ in range(settings.rounds):
        news = changed(model, settings, round_)
        received = torch.empty(sum(p.numel() for p in news))
        dist.recv(received, 0)
        fill_(news, received)
        if client == settings.vanish and round_ == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if len(own):
            local_steps(model, ids, labels, settings, round_, client)
        answer = vector(travelling(model, settings, round_))
        dist.send(torch.cat([answer, torch.tensor([float(len(own))])]), 0)


@torch.no_grad()
def accuracy(model: nn.Module, ids: Tensor, labels: Tensor) -> float:
    """Share of right answers."""
    return float(torch.cat([model(part).argmax(1) for part in ids.split(500)]).eq(labels).float().mean())


def process(rank: int, store: str, settings: Settings) -> None:
    """The server, or a client."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    texts = Texts.of(settings)
    patience = settings.timeout * (1 if rank == 0 else settings.clients + 1)  # clients wait while others are waited for
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=settings.clients + 1,
        timeout=timedelta(seconds=patience),
    )
    if rank == 0:
        serve(settings, texts)
    else:
        take_part(settings, texts, rank)
    dist.destroy_process_group()


def run(settings: Settings) -> list[dict[str, object]]:
    """Accuracy, bytes up and down, and the clients of each round."""
    Path(settings.out).mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "comera.adapters"])  # imported once for all processes
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, str(Path(folder, "store")), settings) for rank in range(settings.clients + 1)]
        processes = [context.Process(target=process, args=given, daemon=True) for given in arguments]
        for started in processes:
            started.start()
        processes[0].join()
        for started in processes[1:]:
            started.join(10)
            started.kill()  # only one that waits for ever is still there
    if processes[0].exitcode:
        raise SystemExit(f"the server ended with {processes[0].exitcode}")
    rounds: list[dict[str, object]] = json.loads((Path(settings.out) / f"{settings.method}.json").read_text())
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/federated")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["tt", "tt+", "lora", "full", "head"])
    defaults = Settings(out="")
    for name in Settings.__dataclass_fields__:
        if name not in ("out", "method"):
            value = getattr(defaults, name)
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    given = vars(parser.parse_args())
    methods = given.pop("methods")
    settings = Settings(**given)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the processes end, too
    torch.set_num_threads(1)  # so that the seed decides everything
    texts = Texts.of(settings)
    Path(settings.out).mkdir(parents=True, exist_ok=True)
    model = pretrained(texts, settings)
    torch.save(model.state_dict(), Path(settings.out) / "pretrained.pt")
    rows = []
    for method in methods:
        print(f"{method}:", flush=True)
        rounds = run(replace(settings, method=method))
        last = rounds[-5:]
        mean = sum(float(str(each["accuracy"])) for each in last) / len(last)
        sent = sum(int(str(each[way])) for each in rounds for way in ("up", "down")) / len(rounds)
        rows.append(
            f"{method:>5}: accuracy {mean:.4f} (mean of the last {len(last)} rounds), {sent:,.0f} bytes a round"
        )
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
