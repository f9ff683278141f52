"""Every Python block of the documentation runs, every link in it leads somewhere, and doctests hold."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import devsample

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
MODULES = [
    one.name
    for one in pkgutil.walk_packages(devsample.__path__, "devsample.")
    if not one.name.endswith("__main__")
]


def blocks(page):
    """Each block with as many lines before it as it has in the page, so that errors name the line."""
    text = page.read_text(encoding="utf-8")
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_blocks_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": f"page_{page.stem}"}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), namespace)


def anchors(page):
    """The names by which the headings of a page can be linked to."""
    titles = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for link, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), (link, anchor)


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert not failed


def test_a_wrong_block_fails(tmp_path, monkeypatch):
    page = tmp_path / "wrong.md"
    page.write_text("text\n\n```python\nvalue = 1\nassert value == 2\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError) as caught:
        test_blocks_run_in_order(page, tmp_path, monkeypatch)
    assert caught.traceback[-1].lineno == 4
