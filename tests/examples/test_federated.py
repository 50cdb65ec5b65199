"""The federated example: rounds agree with averaging by hand, go on without a client that is killed, and repeat."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from comera.adapters import load_adapters_

from ..helpers.fresh_python import run_script
from ..helpers.scripts import load_script

SCRIPT = Path(__file__).parents[2] / "examples" / "federated.py"


example = load_script(SCRIPT)
TINY = ("--hidden", "16", "--pretrain-steps", "3", "--rounds", "2", "--steps", "2", "--batch", "4", "--clients", "2")


def run(out: Path, *options: str, alone: bool = False) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """The rounds of each method, and what was printed. alone: in a new Python."""
    argv = ["--out", str(out), *TINY, *options]
    if alone:
        done = subprocess.run([sys.executable, str(SCRIPT), *argv], capture_output=True, text=True, check=False)
    else:
        done = run_script(SCRIPT, *argv)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {method: out / f"{method}.json" for method in example.METHODS}
    return {name: json.loads(file.read_text()) for name, file in found.items() if file.exists()}, done.stdout


def settings_of(out: Path, method: str = "tt") -> Any:
    return example.Settings(
        str(out), method, clients=2, rounds=2, steps=2, batch=4, hidden=16, pretrain_steps=3, seed=0
    )


def by_hand(settings: Any) -> torch.nn.Module:
    """The same rounds in one process, averaged parameter by parameter, in float64."""
    texts = example.Texts.of(settings)
    parts = example.shards(texts.train[1], settings)
    server = example.adapted(texts, settings)
    for round_ in range(settings.rounds):
        names = {id(p): name for name, p in server.named_parameters()}
        sent = [names[id(p)] for p in example.travelling(server, settings, round_)]
        states = []
        for client, part in enumerate(parts, 1):
            model = example.adapted(texts, settings)
            model.load_state_dict(server.state_dict())
            ids, labels = (tensor[part] for tensor in texts.train)
            example.local_steps(model, ids, labels, settings, round_, client)
            states.append(model.state_dict())
        weights = [len(part) / sum(map(len, parts)) for part in parts]
        mean = {name: sum(w * state[name].double() for w, state in zip(weights, states, strict=True)) for name in sent}
        server.load_state_dict(server.state_dict() | mean)
    return server


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    """Two rounds of three methods with two clients."""
    out = tmp_path_factory.mktemp("federated")
    return out, run(out, "--methods", "tt", "tt+", "full")[0]


@pytest.mark.parametrize("method", ["tt", "tt+"])
def test_two_rounds_agree_with_averaging_by_hand(
    method: str, rounds: tuple[Path, dict[str, list[dict[str, Any]]]]
) -> None:
    out, found = rounds
    settings = settings_of(out, method)
    expected = by_hand(settings)
    texts = example.Texts.of(settings)
    model = example.Classifier(texts.words, texts.labels, settings.hidden)
    model.load_state_dict(torch.load(out / "pretrained.pt"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    load_adapters_(model, out / f"adapters-{method}")
    changed = []
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-7)
        changed += [name] if ".adapter." in name and value.any() else []
        assert name not in before or name.startswith("head.") or torch.equal(value, before[name])
    assert any(name.endswith("cores.3") for name in changed)  # they started at zero
    assert found[method][-1]["accuracy"] == pytest.approx(example.accuracy(expected, *texts.test), abs=2e-3)


def test_bytes_are_those_of_what_is_trained(rounds: tuple[Path, dict[str, list[dict[str, Any]]]]) -> None:
    out, found = rounds
    for method, each in found.items():
        settings = settings_of(out, method)
        model = example.adapted(example.Texts.of(settings), settings)
        for round_, row in enumerate(each):
            up, down = (
                sum(p.numel() for p in which(model, settings, round_))
                for which in (example.travelling, example.changed)
            )
            assert row["down"] == 2 * 4 * down
            assert row["up"] == 2 * 4 * (up + 1)  # and the number of texts
    assert found["tt+"][0]["up"] < found["tt"][0]["up"] < found["full"][0]["up"]


def test_the_mean_is_weighted_by_texts() -> None:
    sent = [torch.tensor([1.0, -2.0, 30.0]), torch.tensor([5.0, 2.0, 10.0])]
    torch.testing.assert_close(example.weighted_mean(sent), torch.tensor([2.0, -1.0]))


def test_a_killed_client_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    found, printed = run(tmp_path, "--methods", "tt", "--rounds", "3", "--vanish", "1", "--seed", "1")
    assert [row["clients"] for row in found["tt"]] == [[1, 2], [2], [2]]
    assert "round 1: client 1 has gone, 1 go on" in printed
    settings = replace(settings_of(tmp_path), rounds=3, seed=1)
    model = example.Classifier(example.Texts.of(settings).words, 2, settings.hidden)
    assert len(load_adapters_(model, tmp_path / "adapters-tt").rows) == 12  # of the one that went on


def test_without_any_client_the_run_ends_with_the_reason(tmp_path: Path) -> None:
    options = ("--clients", "1", "--vanish", "1", "--methods", "head")
    done = run_script(SCRIPT, "--out", str(tmp_path), *TINY, *options)
    assert done.returncode == 1
    assert "round 1: no client is left" in done.stderr


def test_the_seed_decides_everything(rounds: tuple[Path, dict[str, list[dict[str, Any]]]], tmp_path: Path) -> None:
    out, found = rounds
    again, _ = run(tmp_path, "--methods", "tt", alone=True)
    assert again["tt"] == found["tt"]
    weights = Path("adapters-tt", "adapter_model.safetensors")
    assert contents(tmp_path / weights) == contents(out / weights)


def contents(file: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    """Of a file of tensors, whose header has its entries in any order."""
    with safe_open(file, framework="pt") as opened:
        return opened.metadata(), {name: opened.get_tensor(name).numpy().tobytes() for name in opened.keys()}  # noqa: SIM118


def test_shards_are_uneven_and_hold_every_text_once() -> None:
    labels = torch.arange(1000) % 2
    settings = replace(settings_of(Path("unused")), clients=4)
    parts = example.shards(labels, settings)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(1000))
    shares = [float(labels[part].float().mean()) for part in parts if len(part)]
    assert max(shares) - min(shares) > 0.2


def test_own_texts_from_files(tmp_path: Path) -> None:
    for part in ("train", "test"):
        lines = [f'it is {word} "so {k}\t{label}' for k in range(8) for word, label in (("good", "1"), ("bad", "0"))]
        (tmp_path / f"{part}.tsv").write_text("\n".join(["sentence\tlabel", *lines]))
    texts = example.Texts.of(replace(settings_of(tmp_path), data=str(tmp_path)))
    assert texts.labels == 2
    assert [len(tensor) for tensor in (*texts.train, *texts.test)] == [16] * 4
    assert texts.train[1].tolist() == [1, 0] * 8
