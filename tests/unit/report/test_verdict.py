"""The verdict says who is ahead, by how much, and at what cost: also where ours is behind."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from comera.report.run import RunData, read_run
from comera.report.verdict import energy_text, is_better, of_comparison, of_run
from comera.trainer.metrics import Summary, to_json

from ...helpers.run_folders import late_run, records, write_run


def judged(folder: Path, method: str, losses: dict[float, float], **summary: object) -> RunData:
    """A run whose held-out losses are these, by seconds of training."""
    run = write_run(folder, method=method)
    rows = [row for row in records(run) if row["kind"] != "eval"]
    rows += [{"kind": "eval", "step": int(t), "time": t, "loss": y, "tokens": 1} for t, y in losses.items()]
    (run / "metrics.jsonl").write_text("".join(f"{to_json(row)}\n" for row in rows))
    found = Summary.read(run / "summary.json")
    assert found is not None
    replace(found, **summary).write(run / "summary.json")  # type: ignore[arg-type]
    return read_run(run)


def test_a_compressed_run_that_is_behind_is_said_to_be(tmp_path: Path) -> None:
    runs = {
        "dense": judged(tmp_path / "dense", "dense", {50.0: 5.0, 100.0: 4.0}),
        "narrow": judged(tmp_path / "narrow", "narrow", {50.0: 3.5, 100.0: 3.0}),
        "comera": judged(tmp_path / "comera", "comera", {50.0: 4.0, 100.0: 3.3}, energy={"cpu": 72.0 * 30}),
    }
    ranking, ours, cost, seeds = of_comparison(runs)
    assert ranking == (
        "After 100 s of training each, narrow is ahead with a held-out loss of 3.00; comera has 3.30 (10.0 % behind) "
        "and dense has 4.00 (33.3 % behind)."
    )
    assert ours == "So the compressed model is behind narrow and ahead of dense."
    assert cost.startswith("comera beside dense: model ")
    assert "step 4.00× faster and estimated energy per token 2.00× smaller." in cost
    assert seeds.startswith("One run each")


def test_what_was_not_measured_is_neither_better_nor_worse(tmp_path: Path) -> None:
    run = judged(tmp_path / "run", "comera", {100.0: float("nan")})
    (tmp_path / "run" / "references.json").write_text('{"loss": {"guessing": 1.0}}')
    text = of_run(read_run(tmp_path / "run"))
    assert text.endswith("it cannot be measured on these held-out rows, which may have a single label.")
    assert run.evals


def test_values_are_compared_at_the_end_of_the_shortest_run(tmp_path: Path) -> None:
    runs = {
        "dense": judged(tmp_path / "dense", "dense", {100.0: 5.0, 300.0: 3.0}),
        "comera": judged(tmp_path / "comera", "comera", {100.0: 4.5, 200.0: 3.5}),
        "slow": judged(tmp_path / "slow", "galore", {250.0: 1.0}),
    }
    text = " ".join(of_comparison(runs))
    assert "After 200 s of training each, comera is ahead with a held-out loss of 3.50; dense has 4.00" in text
    assert "Some trained longer, up to 300 s" in text
    assert "slow: not evaluated by then" in text
    assert "So the compressed" not in text


def test_runs_that_end_a_step_late_are_compared_at_their_ends(tmp_path: Path) -> None:
    """A budget of time ends with the step that passes it, which takes a dense model longer: nobody is left out."""
    runs = {
        "dense": judged(tmp_path / "dense", "dense", {15.6: 6.7}),
        "narrow": judged(tmp_path / "narrow", "narrow", {15.0: 5.8}),
        "comera": judged(tmp_path / "comera", "comera", {5.0: 9.9, 15.1: 5.6}),
    }
    ranking = of_comparison(runs)[0]
    assert ranking == (
        "After 15.0 s of training each, comera is ahead with a held-out loss of 5.60; narrow has 5.80 (3.6 % behind) "
        "and dense has 6.70 (19.6 % behind)."
    )


def test_equal_values_are_level(tmp_path: Path) -> None:
    runs = {name: judged(tmp_path / name, name, {100.0: 3.0}) for name in ("dense", "comera")}
    assert of_comparison(runs)[0].endswith("dense and comera are level at a held-out loss of 3.00.")


def test_runs_that_go_on_from_others_are_not_ranked(tmp_path: Path) -> None:
    (write_run(tmp_path / "late") / "provenance.json").write_text('[{"start_from": {"step": 3}}]')
    runs = {"early": read_run(write_run(tmp_path / "early")), "late": read_run(tmp_path / "late")}
    assert of_comparison(runs) == ["late goes on from another run, so its time counts from there and it is not ranked."]


def test_a_run_is_held_against_its_references(tmp_path: Path) -> None:
    run = late_run(tmp_path / "run")
    (run / "references.json").write_text(json.dumps({"accuracy": {"always neutral": 0.35, "a simple model": 0.5}}))
    text = of_run(read_run(run))
    assert "Held-out accuracy is 46.0 % after 60 steps: better than always neutral (35.0 %), " in text
    assert "but no better than a simple model (50.0 %)." in text
    assert text.count(". ") == 0


def test_a_metric_that_is_counted_reads_as_one(tmp_path: Path) -> None:
    runs = {}
    for name in ("dense", "comera"):
        run = late_run(tmp_path / name)
        text = (run / "metrics.jsonl").read_text().replace('"accuracy"', '"nats_per_byte"')
        (run / "metrics.jsonl").write_text("".join(line for line in text.splitlines(True) if '"stage", ' not in line))
        runs[name] = read_run(run)
    assert of_comparison(runs)[0].endswith("dense and comera are level at 0.460 nats per byte on held-out data.")


def test_without_evaluations_nothing_is_claimed(tmp_path: Path) -> None:
    runs = {name: read_run(write_run(tmp_path / name, method=name, evals=False)) for name in ("dense", "comera")}
    assert of_comparison(runs) == ["dense and comera: not evaluated on held-out data."]
    assert of_run(runs["dense"]).startswith("There was no evaluation on held-out data yet")


@pytest.mark.parametrize(
    ("name", "less"), [("loss", True), ("nats_per_byte", True), ("log_loss", True), ("accuracy", False), ("auc", False)]
)
def test_what_is_better_depends_on_the_metric(name: str, less: bool) -> None:
    assert is_better(name, 0.4, 0.5) is less


def test_energy_has_a_unit_and_says_when_it_is_a_guess() -> None:
    assert energy_text({}) == "–"
    assert energy_text({"cpu": 35.0}) == "35 J"
    assert energy_text({"cpu": 1800.0, "gpu": 1800.0}) == "1.00 Wh"
    assert energy_text({"cpu": 3.6e6, "gpu_estimated": 3.6e6}) == "2.00 kWh (estimated)"
