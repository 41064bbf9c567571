"""Does the site of the documentation show every page and every public name, with links as the forge reads them?

`make docs` builds it strictly; this needs no mkdocs.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

import hf_mlspec
import hf_mlspec.evaluation

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SPEC = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
HOOKS = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(HOOKS)


def pages_of(nav) -> list[str]:
    """The pages of a nav, in its order, however deep."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages_of(part)]


@pytest.fixture(scope="module")
def nav() -> list[str]:
    return pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])


def test_every_page_is_in_the_nav_once(nav):
    written = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(nav) == sorted([*written, *HOOKS.PAGES])


def test_pages_from_elsewhere_exist():
    assert [source for source in HOOKS.PAGES.values() if not (ROOT / source).is_file()] == []
    assert len([page for page in HOOKS.PAGES if page.endswith(".ipynb")]) >= 6


def test_indexes_name_every_notebook_and_every_page_of_the_reference():
    for index, pages in (("notebooks", (ROOT / "notebooks").glob("*.ipynb")),
                         ("reference", set((DOCS / "reference").glob("*.md")) - {DOCS / "reference" / "README.md"})):
        text = (DOCS / index / "README.md").read_text(encoding="utf-8")
        assert [page.name for page in pages if f"{page.name})" not in text] == []


def test_every_public_name_is_in_the_reference():
    named = {page.stem: re.findall(r"^::: hf_mlspec\.(?:.+\.)?(\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
             for page in (DOCS / "reference").glob("*.md")}
    assert sorted([*named.pop("evaluation"), "TASKS"]) == hf_mlspec.evaluation.__all__
    assert "`TASKS`" in (DOCS / "reference" / "evaluation.md").read_text(encoding="utf-8")  # a path
    assert sorted(name for names in named.values() for name in names) == sorted(hf_mlspec.__all__)


@pytest.mark.parametrize(("page", "text", "expected"), [
    ("index.md", "[a](docs/guide/levels.md#another-tokenizer)", "[a](guide/levels.md#another-tokenizer)"),
    ("index.md", "![a\nb](docs/figures/one_prompt.png)", "![a\nb](figures/one_prompt.png)"),
    ("index.md", "[n](notebooks), [c](CONTRIBUTING.md)", "[n](notebooks/README.md), [c](contributing.md)"),
    ("programs.md", "[`a`](../docs/traces.md) [configs/](configs)", "[`a`](traces.md) `configs/`"),
    ("guide/add_a_format.md", "[t](../../tests/toy_format.py)", "`t`"),
    ("guide/levels.md", "[a](nested.md) [b](../../README.md)", "[a](nested.md) [b](../index.md)"),
    ("index.md", "[a](gone.md) [b](#levels) [c](https://x.y/z)", "[a](gone.md) [b](#levels) [c](https://x.y/z)"),
    ("index.md", "`[a](LICENSE)`\n```\n[a](LICENSE)\n```\n", "`[a](LICENSE)`\n```\n[a](LICENSE)\n```\n"),
])
def test_links_lead_to_pages_of_the_site(page, text, expected):
    assert HOOKS.site_links(text, page) == expected


@pytest.mark.parametrize(("heading", "anchor"), [("CPU engine: kernels", "cpu-engine-kernels"), ("A `b`: c", "a-b-c"),
                                                 ("(prepare=False) - x", "preparefalse---x")])
def test_anchors_are_those_of_the_forge(heading, anchor):
    assert HOOKS.slug(heading, "-") == anchor
