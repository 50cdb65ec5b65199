"""Models, runs and configurations stored by an earlier version load in this one.

tests/data/before was written by commit 5140b46, before the code was reorganized:

    model/, model_output.safetensors   `save_pretrained` of a pruned model with tied weights; an input and its output
    run/, went_on.jsonl                a run of `fit`, interrupted in its late stage; what it logged when it went on
    code-lm.yaml                       config.yaml of a run of code-lm

Parameters come back to the bit. Outputs and losses may differ by rounding: other CPUs and other versions of torch add
in another order.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

import comera
from comera.cli.options import parse
from comera.rank.objective import EarlyStage, LateStage
from comera.recipes.code_lm import recipe as code_lm
from comera.recipes.lm import recipe as lm
from comera.trainer.config import TrainConfig
from comera.trainer.loop import fit
from comera.trainer.task import Task

from ..helpers.run_folders import records

STORED = Path(__file__).parents[1] / "data" / "before"
VOCABULARY, LENGTH, BATCH = 24, 6, 4


class Net(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.up, self.across, self.down = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 8)
        self.more = nn.Linear(12, 12)
        self.head = nn.Linear(8, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.embed(input)))
        hidden = hidden + self.more(F.gelu(self.across(hidden)))
        return self.head(self.down(hidden))


class Toy(Task):
    """Each token is the one before it plus five."""

    name = "toy"
    counted = "characters"

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model: nn.Module = Net(tied=False)
        formats = {"linear": comera.TT(order=4, rank=4), "embedding": comera.TTM(order=2, rank=4)}
        comera.tensorize_(self.model, comera.TensorizeConfig(**formats, overrides={"head": None}))

    def train_batch(self, step: int, micro: int, rank: int, world: int) -> Tensor:
        return self.rows(1000 * step + micro)

    def eval_batches(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(7)
        for _ in range(2):
            yield self.rows(generator)

    def rows(self, seed: int | torch.Generator) -> Tensor:
        generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        return (start + 5 * torch.arange(LENGTH)) % VOCABULARY

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def tokens(self, batch: Tensor) -> int:
        return batch.numel()


TOY = TrainConfig(
    steps=20,
    batch_size=BATCH,
    accumulation=2,
    lr=1e-2,
    rank_lr=0.02,
    max_grad_norm=0.5,
    schedule="constant",
    rates="flat",
    warmup=0.0,
    early=EarlyStage(size_weight=0.1),
    late=LateStage(target_size=0.6, start_step=6, steps=10),
    prune_every=4,
    eval_every=5,
    save_every=0,
    log_every=1,
    progress=False,
    threads=1,
    device="cpu",
)


def test_a_stored_model_loads() -> None:
    model = comera.load_pretrained(Net(tied=True), STORED / "model").eval()
    example = load_file(STORED / "model_output.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(model(example["input"]), example["output"], rtol=1e-6, atol=1e-6)
    stored, loaded = load_file(STORED / "model" / "model.safetensors"), model.state_dict()
    assert {name for name in stored if not torch.equal(stored[name], loaded[name])} == set()
    tied = {"head.tt.cores.0", "head.tt.cores.1", "head.tt.rank_params.0"}
    assert loaded.keys() - stored.keys() == tied


def test_a_stored_run_resumes(tmp_path: Path) -> None:
    run = shutil.copytree(STORED / "run", tmp_path / "run")
    summary = fit(Toy(), TOY, run, resume=True)
    assert (summary.steps, summary.stopped) == (20, "steps")
    expected = [json.loads(line) for line in (STORED / "went_on.jsonl").read_text().splitlines()]
    came = [line for line in records(run, *(line["kind"] for line in expected)) if line["step"] > 10]
    for line, stored in zip(came, expected, strict=True):
        assert {key: line[key] for key in stored} == {key: near(value) for key, value in stored.items()}


def near(value: Any) -> Any:
    return pytest.approx(value, rel=1e-5) if isinstance(value, float) else value


def test_a_stored_configuration_is_understood() -> None:
    _, config, _ = parse("train", code_lm.NAME, ["--config", str(STORED / "code-lm.yaml")])
    default = replace(code_lm.preset(preset="base"), preset="small")  # which that version did not store
    late = LateStage(target_size=0.3, start_step=50)
    train = replace(default.train, steps=123, max_grad_norm=0.25, late=late, rates="flat")
    assert config == replace(default, out="runs/code-lm-comera", train=train)


def test_a_stored_run_of_small_from_before_n_grams_has_none(tmp_path: Path) -> None:
    content = asdict(replace(lm.preset(), out="runs/lm"))
    del content["compress"]["ngrams"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(content))), "utf-8")
    _, config, _ = parse("train", lm.NAME, ["--config", str(tmp_path / "config.yaml")])
    assert lm.preset().compress.ngrams == 4
    assert config.compress == replace(lm.preset().compress, ngrams=None)
