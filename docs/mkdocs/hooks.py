"""What the site does besides: pages of files outside of docs/, links to them, and figures that follow the colors."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand outside of docs/: README, contributing, the changelog, the scripts of examples/."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text("utf-8").replace("](docs/", "](")  # links as from the repository's root
        for other, at in PAGES.items():
            text = text.replace(f"]({other})", f"]({at})")
        files.append(File.generated(config, page, content=text))
    for script in sorted((ROOT / "examples").glob("*.py")):
        text = f"# {script.name}\n\n```python\n{script.read_text('utf-8')}```\n"
        files.append(File.generated(config, f"examples/{script.stem}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to scripts lead to their pages, and put drawings into the page, so that they take its colors."""
    markdown = re.sub(r"\]\((?:\.\./)*examples/(\w+)\.py\)", rf"]({_up(page)}examples/\1.md)", markdown)
    return re.sub(r"!\[([^\]]*)\]\(([^)\s]*?([\w-]+)\.svg)\)", _drawing, markdown)


def _up(page: Any) -> str:
    return "../" * page.file.src_uri.count("/")


def _drawing(link: re.Match[str]) -> str:
    svg = (ROOT / "docs" / "assets" / f"{link[3]}.svg").read_text("utf-8")
    svg = re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL)  # the site's own: stylesheets/extra.css
    svg = re.sub(r">\s+<", "><", svg).replace("<svg ", f'<svg role="img" aria-label="{link[1]}" class="drawing" ', 1)
    return f'<figure markdown="0">{svg}</figure>'
