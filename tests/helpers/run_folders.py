"""Run folders as `fit` writes them, and parsed pages, for the tests of the report."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from comera.convert import LayerRow
from comera.trainer.metrics import Summary, to_json
from comera.tt.shapes import tt_spec, ttm_spec

TT = tt_spec(64, 48, order=4, rank=6)
TTM = ttm_spec(500, 64, order=3, rank=5)
PARAMETERS = TT.numel + TT.rank_numel + TTM.numel + TTM.rank_numel
DENSE = TT.dense_numel + TTM.dense_numel


def records(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """What a run logged, of these kinds or all."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in found if not kinds or record["kind"] in kinds]


def history(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """The records without what clock and memory say."""
    measured = {"time", "step_time", "tokens_per_s", "peak_memory", "energy"}
    return [{key: value for key, value in record.items() if key not in measured} for record in records(run, *kinds)]


def write_run(folder: Path, *, method: str = "comera", steps: int = 60, evals: bool = True, ended: bool = True) -> Path:
    """A small run as `fit` writes it: all ranks fall to half, one pruning in the middle."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"recipe: code-lm\nmethod: {method}\ntrain:\n  steps: {steps}\n")
    trains = {"embed.tt": TTM, "blocks.0.up.tt": TT} if method == "comera" else {}
    stored = PARAMETERS if trains else DENSE
    rows: list[dict[str, Any]] = []
    for step in range(steps + 1):
        at = {"step": step, "time": 20.0 * step}
        loss, tokens = 4 + 5 * 0.95**step, 1000 * step
        if step:
            rows.append(
                {
                    **{"kind": "train", **at, "loss": loss, "tokens": tokens, "step_time": 20.0, "lr": {"dense": 0.1}},
                    **{"grad_norm": 1.5, "peak_memory": 2**28, "energy": {"cpu_estimated": 72.0 * step}},
                }
            )
        if step == steps // 2 and step and trains:
            rows.append({"kind": "prune", **at, "before": stored + 9, "after": stored})
        if evals and step % 20 == 0 and step:
            rows.append(
                {"kind": "eval", **at, "loss": loss + 0.1, "tokens": tokens, "energy": {"cpu_estimated": 72.0 * step}}
            )
        if step % 20 == 0:
            ranks = {
                name: [max(1, r - r * step // (2 * max(steps, 1))) for r in s.inner_ranks] for name, s in trains.items()
            }
            size = {"total": stored + 100, "tensorized": stored if trains else 0, "active": stored // 2}
            rows.append({"kind": "size", **at, **size, "ratio": 7.5, "tensorized_ratio": 8.0, "ranks": ranks})
    (folder / "metrics.jsonl").write_text("".join(f"{to_json(row)}\n" for row in rows))
    layers = [
        LayerRow(name.removesuffix(".tt"), "Linear", "TTLinear", s, s.dense_numel, s.numel + s.rank_numel, None, "")
        for name, s in trains.items()
    ]
    if trains:
        layers.append(LayerRow("head", "Linear", "TTMProjection", TTM, 0, 0, None, "tied to embed"))
        layers.append(LayerRow("position", "Embedding", "Embedding", None, 100, 100, None, "left dense by an override"))
    (folder / "layers.json").write_text(json.dumps([layer.to_dict() for layer in layers]))
    if ended:
        Summary(
            method=method,
            recipe="code-lm",
            steps=steps,
            time=20.0 * steps,
            tokens=1000 * steps,
            step_time=0.25 if trains else 1.0,
            peak_memory=2**28,
            held_out_loss=4.5 if evals else None,
            best_held_out_loss=4.5 if evals else None,
            parameters=stored + 100,
            size_bytes=4 * (stored + 100),
            tensorized=stored if trains else 0,
            tensorized_ratio=8.0 if trains else 1.0,
            ratio=7.5,
            stopped="time",
            energy={"cpu_estimated": 72.0 * steps},
            memory={"weights": 4.0 * stored, "optimizer state": 8.0 * stored},
            parts={"batches": 2.0 * steps, "evaluation": 100.0},
        ).write(folder / "summary.json")
    return folder


class Page(HTMLParser):
    """A parsed page; raises on tags that do not match."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.anchors: list[str] = []
        self.charts: dict[str, dict[str, Any]] = {}
        self.text = ""
        self.source = path.read_text("utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        found = [value for name, value in attrs if name in ("src", "href", "xlink:href", "data") and value]
        if tag == "a":
            self.anchors += found
        else:
            self.links += found
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            if data.startswith("{"):  # the data of a chart
                chart = json.loads(data)
                self.charts[chart["title"]] = chart
        elif self.open[-1:] != ["style"]:
            self.text += data


def assert_self_contained(page: Page) -> None:
    """It loads nothing; what it links to is a page beside it."""
    assert not {"link", "iframe", "object", "img"} & set(page.tags)
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert all(not link.startswith(("/", "http")) for link in page.anchors)
    assert len(page.ids) == len(set(page.ids))
    assert "@import" not in page.source
    assert page.source.count("url(") == page.source.count("url(#")


def late_run(folder: Path) -> Path:
    """The small run with a late stage from step 40, accuracies, a size at every step, and a final rounding."""
    write_run(folder)
    rows = records(folder)
    for row in rows:
        late = row["step"] > 40
        if row["kind"] == "train":
            row |= {
                "size": PARAMETERS - (row["step"] - 40) * 20 if late else PARAMETERS,
                "stage": "late" if late else "early",
            }
        if row["kind"] == "eval":
            row |= {"metrics": {"accuracy": 0.4 + row["step"] / 1000}, "epoch": row["step"] / 20}
        if row["kind"] == "size" and row["step"] == 60:
            row |= {"total": PARAMETERS // 2 + 100, "tensorized": PARAMETERS // 2}
    at = {"step": 40, "time": 800.0}
    rows.append(
        {"kind": "stage", **at, "stage": "late", "target_size": PARAMETERS // 2, "target_loss": 4.6, "size": PARAMETERS}
    )
    end = {"step": 60, "time": 1200.0}
    rows.append(
        {"kind": "round", **end, "before": PARAMETERS - 400, "after": PARAMETERS // 2, "error": 0.1, "target": 1}
    )
    (folder / "metrics.jsonl").write_text("".join(f"{to_json(row)}\n" for row in rows))
    return folder
