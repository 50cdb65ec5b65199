"""The pages in a real browser: nothing wider than the page on a desk or a phone, no error, nothing loaded."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from comera.report import compare, render
from comera.trainer.energy import EnergyConfig
from comera.trainer.loop import fit

from ..trainer.test_loop import CONFIG, Tiny

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (1400, 400)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome on PATH to look at the pages")

# at the top of a page: its errors, then what it looks like once the charts are there and the axis was changed
_PROBE = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
addEventListener("load", () => setTimeout(() => {
  document.querySelectorAll("details").forEach((each) => { each.open = true; });
  [...document.querySelectorAll("input[name=axis]")].forEach((input) => input.click());
  setTimeout(() => {
    const boxed = (element) => element.parentElement.closest(".scroll, pre");
    const wide = [...document.body.querySelectorAll("*")].filter((element) => {
      const { left, right, width } = element.getBoundingClientRect();
      return width && !boxed(element) && (right > innerWidth + 0.5 || left < -0.5);
    });
    const painted = [...document.querySelectorAll("canvas")].filter((canvas) => {
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      return data.some((value, k) => k % 4 === 3 && value > 0);
    });
    const fits = (canvas) => Math.abs(canvas.getBoundingClientRect().width - canvas.closest(".chart").clientWidth) < 1;
    parent.postMessage({
      name: NAME, errors, page: document.documentElement.scrollWidth - innerWidth,
      wide: wide.map((element) => `${element.tagName}.${element.className}`),
      cut: [...document.querySelectorAll(".scroll")].filter((each) => each.scrollWidth > each.clientWidth).length,
      clipped: [...document.querySelectorAll(".chart")].filter((each) => each.scrollWidth > each.clientWidth).length,
      rows: new Set([...document.querySelectorAll(".tiles div")].map((each) => each.offsetTop)).size,
      tiled: [...document.querySelectorAll(".tiles")].map((each) => each.clientWidth / each.parentElement.clientWidth),
      charts: document.querySelectorAll(".chart").length, painted: painted.length,
      fitting: [...document.querySelectorAll("canvas")].filter(fits).length,
      values: [...document.querySelectorAll(".u-value")].filter((value) => /\\d/.test(value.textContent)).length,
      loaded: performance.getEntriesByType("resource").length,
      paper: getComputedStyle(document.body).backgroundColor,
    }, "*");
  }, 100);
}, 50));
</script>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """report.html and compare.html of two tiny runs, whose texts are long."""
    out = tmp_path_factory.mktemp("pages")
    config = replace(CONFIG, steps=24, energy=EnergyConfig(grid_intensity=300.0))
    runs = {"dense": out / "dense", "comera": out / ("a-long-name-" * 15)}
    settings = {"recipe": "tiny", "data": {"path": "/a/long/path" * 20}}
    for method, folder in runs.items():
        task = Tiny(compressed=method == "comera")
        task.references = {"loss": {"always the same answer": 2.0}}
        fit(task, config, folder, resolved=settings)
        render(folder)
    (out / "broken").mkdir()
    (out / "broken" / "config.yaml").write_text("recipe: " + "long" * 100)
    (out / "broken" / "metrics.jsonl").write_text("x" * 1000 + "\n{}\n")
    compare(runs, out)
    return {
        "report": runs["comera"] / "report.html",
        "compare": out / "compare.html",
        "damaged": render(out / "broken"),
    }


def looked_at(pages: dict[str, Path], folder: Path, scheme: str) -> dict[str, Any]:
    """What the probe found on each page in each width, by "page width"."""
    frames = ""
    for page, path in pages.items():
        for width in WIDTHS:
            name = f"{page} {width}"
            probe = _PROBE.replace("NAME", json.dumps(name))
            copy = folder / f"{page}-{width}.html"
            copy.write_text(path.read_text("utf-8").replace("<head>", f"<head>{probe}", 1), "utf-8")
            frames += f'<iframe src="{copy.name}" style="width: {width}px; height: 900px; border: 0"></iframe>\n'
    collect = """<pre id="found">[]</pre><script>
      const pre = document.getElementById("found"), found = [];
      addEventListener("message", ({ data }) => { found.push(data); pre.textContent = JSON.stringify(found); });
    </script>"""
    (folder / "all.html").write_text(f"<!doctype html><body>{collect}{frames}")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    flags += [f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}", "--virtual-time-budget=4000"]
    command = [str(BROWSER), *flags, "--dump-dom", "--window-size=1500,1000", (folder / "all.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stdout[:500] + done.stderr[-500:]
    return {each["name"]: each for each in json.loads(unescape(match[1]))}


@pytest.mark.parametrize(("scheme", "paper"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 29)")])
def test_pages_fit_a_desk_and_a_phone(pages: dict[str, Path], tmp_path: Path, scheme: str, paper: str) -> None:
    found = looked_at(pages, tmp_path, scheme)
    assert set(found) == {f"{page} {width}" for page in pages for width in WIDTHS}
    for name, page in found.items():
        assert (name, page["errors"], page["wide"]) == (name, [], [])
        assert page["page"] <= page["clipped"] == 0
        assert page["painted"] == page["fitting"] == page["charts"]
        assert page["loaded"] == 0
        assert page["paper"] == paper
    assert (found["compare 400"]["cut"], found["compare 1400"]["cut"]) == (0, 0)
    assert [found[f"{page} 1400"]["rows"] for page in ("report", "compare")] == [1, 1]
    assert found["report 400"]["rows"] > 1
    assert found["report 1400"]["tiled"] == found["report 400"]["tiled"] == [1]
    assert found["report 400"]["charts"] >= 7
    assert found["compare 400"]["charts"] >= 2
    assert found["report 400"]["values"] >= 3 * found["report 400"]["charts"]


def test_the_probe_sees_an_element_that_is_too_wide_and_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<!doctype html><html><head></head><body><div class='wide' style='width: 2000px'>x</div>"
        "<script>missing()</script></body></html>"
    )
    for name, each in looked_at({"page": page}, tmp_path, "light").items():
        assert each["wide"] == ["DIV.wide"], name
        assert each["page"] > 0
        assert "missing is not defined" in each["errors"][0]
