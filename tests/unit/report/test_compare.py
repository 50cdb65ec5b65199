"""The comparison of finished runs: tables, page."""

import json
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest

from comera.convert import LayerRow
from comera.errors import DataError
from comera.report import compare, render, results
from comera.trainer.metrics import Summary
from comera.tt.shapes import btt_spec

from ...helpers.run_folders import TT, Page, assert_self_contained, records, write_run


def cells(table: str) -> list[dict[str, str]]:
    """The first Markdown table of a text, one dictionary per row."""
    lines = table.split("\n\n")[0].splitlines()
    head, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("| --")
    ]
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_compare_writes_tables_and_page(tmp_path: Path) -> None:
    runs = {name: write_run(tmp_path / name, method=name) for name in ("dense", "comera")}
    text = compare(runs, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"compare.html", "compare.json", "compare.md"}
    dense, comera = cells(text)
    assert {"accuracy %", "epoch", "examples"}.isdisjoint(dense)  # empty for both runs
    assert [dense[c] for c in ("method", "tensorized ratio", "step ms", "speed", "peak MB")] == [
        *("dense", "–", "1,000", "1.00×", "256")
    ]
    assert [comera[c] for c in ("method", "tensorized ratio", "step ms", "speed", "peak MB")] == [
        *("comera", "8.00×", "250", "4.00×", "256")
    ]
    assert [comera[c] for c in ("steps", "tokens", "held-out loss")] == ["60", "60.0 k", "4.500"]
    assert text in (tmp_path / "out" / "compare.md").read_text("utf-8")
    assert max(map(len, results({f"{name} {k}": run for name, run in runs.items() for k in "abc"}).splitlines())) <= 100
    rows = json.loads((tmp_path / "out" / "compare.json").read_text("utf-8"))
    assert [(row["name"], row["held_out_loss"]) for row in rows] == [("dense", 4.5), ("comera", 4.5)]
    page = Page(tmp_path / "out" / "compare.html")
    assert_self_contained(page)
    assert list(page.charts) == ["Held-out loss", "Size and held-out loss"]
    assert set(page.charts["Held-out loss"]["axes"]) == {"time", "tokens", "energy"}
    assert [line["name"] for line in page.charts["Held-out loss"]["lines"]] == ["dense", "comera"]
    assert page.tags.count("table") == 2  # results, ranks
    assert (dense["estimated Wh"], comera["estimated Wh"]) == ("1.20", "1.20")
    (verdict,) = re.findall(r'<p class="verdict">(.*?)</p>', page.source)
    assert verdict == "After 20.0 min of training each, dense and comera are level at a held-out loss of 4.33."
    (tiles,) = re.findall(r'<dl class="tiles">(.*?)</dl>', page.source, re.DOTALL)
    assert re.findall("<dt>(.*?)</dt><dd>(.*?)<small>(.*?)</small>", tiles) == [
        ("dense", "4.33", "held-out loss, 0.134 MB, 1,000 ms a step"),
        ("comera", "4.33", "held-out loss, 0.00621 MB, 250 ms a step"),
    ]
    places = [page.source.index(mark) for mark in ('class="verdict"', 'class="tiles"', "<h2>")]
    assert places == sorted(places)


def test_links_are_on_the_names_of_runs_alone(tmp_path: Path) -> None:
    runs = {name: write_run(tmp_path / name, method=name) for name in ("dense", "comera")}
    for torch, folder in zip(("2.13.0", "2.15.0"), runs.values(), strict=True):
        (folder / "provenance.json").write_text(json.dumps([{"comera": "0.1.0", "torch": torch}]))
        render(folder)
    compare(runs, tmp_path)
    page = Page(tmp_path / "compare.html")
    assert page.anchors == ["dense/report.html", "comera/report.html"] * 2  # results, provenance
    assert "<dt>comera</dt><dd>0.1.0</dd>" in page.source
    assert '<td class="txt">torch</td><td class="txt">2.13.0</td><td class="txt">2.15.0</td>' in page.source


def test_samples_and_test_metrics_are_shown(tmp_path: Path) -> None:
    runs = {name: write_run(tmp_path / name, method=name) for name in ("dense", "comera")}
    for name, folder in runs.items():
        summary = Summary.read(folder / "summary.json")
        assert summary is not None
        replace(summary, examples=summary.tokens, metrics={"accuracy": 0.7}).write(folder / "summary.json")
        (folder / "test.json").write_text(json.dumps({"loss": 0.5, "accuracy": 0.75, "auc": 0.8}))
        (folder / "memory.json").write_text(json.dumps({name: {"weights": 2**20, "gradients": 2**21}}))
    dense, comera = cells(compare(runs, tmp_path / "out"))
    assert "tokens" not in dense
    assert [dense[c] for c in ("samples/s", "examples", "test accuracy %", "test auc")] == [
        *("1.00 k", "60,000", "75.0", "0.800")
    ]
    assert comera["samples/s"] == "4.00 k"
    page = Page(render(runs["comera"]))
    for text in ("Samples seen", "Test accuracy75.0 %", "Memory of a training step, estimated", "weights MB", "3.00"):
        assert text in page.text
    assert "Tokens" not in page.text
    (runs["comera"] / "memory.json").write_text("[]")
    assert "memory.json: expected an object, got list" in Page(render(runs["comera"])).text
    with pytest.raises(DataError, match=r"memory\.json: expected an object, got list"):
        compare(runs, tmp_path / "other")


def test_compare_shows_accuracy_epochs_ranks_of_a_block_and_a_pareto_figure(tmp_path: Path) -> None:
    runs = {name: write_run(tmp_path / name, method=name) for name in ("dense", "comera")}
    for name, accuracy in (("dense", 0.622), ("comera", 0.633)):
        summary = Summary.read(runs[name] / "summary.json")
        assert summary is not None
        more = replace(summary, metrics={"accuracy": accuracy}, epoch_time=90.0, examples=1200)
        more.write(runs[name] / "summary.json")
    text = compare(runs, tmp_path / "out")
    dense, comera = cells(text)
    assert (dense["accuracy %"], comera["accuracy %"]) == ("62.2", "63.3")
    assert (comera["epoch"], comera["examples"]) == ("90.0 s", "1,200")
    assert (tmp_path / "out" / "compare.md").read_text().endswith("\n\n[Curves, links and provenance](compare.html)\n")
    _, title, ranks = text.split("\n\n")
    assert title == "Ranks of blocks.0:"
    (row,) = cells(ranks)
    pruned = "-".join(str(r - r // 2) for r in TT.inner_ranks)
    assert row == {"tensor train": "up", "initial": "-".join(map(str, TT.inner_ranks)), "after comera": pruned}
    assert "Size and held-out loss" in Page(tmp_path / "out" / "compare.html").charts


def test_ranks_of_blocks_are_those_of_one_as_the_command_line_takes_them(tmp_path: Path) -> None:
    spec = btt_spec(64, 256, rank=8, blocks=(4, 4))
    row = LayerRow("blocks.0.up", "Linear", "BTTLinear", spec, spec.dense_numel, spec.numel + spec.rank_numel, None, "")
    run = write_run(tmp_path / "comera")
    (run / "layers.json").write_text(json.dumps([row.to_dict()]))
    lines = records(run)
    for k, line in enumerate(line for line in lines if line["kind"] == "size"):
        line["ranks"] = {"blocks.0.up.tt": [4 * 4 * 8 - 8 * bool(k)]}
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    text = compare({"comera": run}, tmp_path / "out")
    assert "| up           | 8       | 7.5          |" in text
    page = Page(render(run)).text
    assert "8 → 7.5" in page
    assert "128 →" not in page


def test_compare_works_without_a_dense_run_and_without_evaluations(tmp_path: Path) -> None:
    (row,) = cells(compare({"only": write_run(tmp_path / "run", evals=False)}, tmp_path / "out"))
    assert row["method"] == "only"
    assert {"held-out loss", "speed"}.isdisjoint(row)
    assert "| a\\|b " in compare({"a|b": tmp_path / "run"}, tmp_path / "out")


def test_compare_of_an_unfinished_run_writes_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ended=False)
    with pytest.raises(DataError, match=r"'b' in .* has no summary.json"):
        compare({"a": write_run(tmp_path / "whole"), "b": run}, tmp_path / "out")
    summary = Summary.read(tmp_path / "whole" / "summary.json")
    assert summary is not None
    replace(summary, stopped="interrupted").write(run / "summary.json")
    with pytest.raises(DataError, match=r"'b' in .* was interrupted: resume it"):
        compare({"b": run}, tmp_path / "out")
    with pytest.raises(DataError, match="at least one run"):
        compare({}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_page_links_its_runs_wherever_the_folder_goes(tmp_path: Path) -> None:
    out = tmp_path / "all"
    runs = {name: write_run(out / f"{name} #1", method=name) for name in ("dense", "comera")}
    render(runs["comera"])
    compare(runs, out)
    anchors = Page(out / "compare.html").anchors
    assert set(anchors) == {"comera%20%231/report.html"}  # dense has no page
    moved = out.rename(tmp_path / "moved")
    assert (moved / unquote(anchors[0])).is_file()


def test_text_of_runs_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    run = write_run(tmp_path / "run")
    (run / "provenance.json").write_text(json.dumps([{"machine": evil}]))
    (run / "references.json").write_text(json.dumps({"loss": {evil: 3.0}}))
    compare({evil: run}, tmp_path / "out")
    page = Page(tmp_path / "out" / "compare.html")
    assert evil not in page.source
    assert page.text.count(evil) >= 4
