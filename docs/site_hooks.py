"""How do pages of the repository become pages of the site, and where do their relative links lead there?

mkdocs calls the `on_...` functions (mkdocs.yml names this file). `PAGES` lists what is shown although it lies outside
docs/. A relative link means a file of the repository, as the forge reads it; here it becomes a link to that file's
page, or plain code-styled text where the file has no page. A link to a file that does not exist stays as it is, and
strict mode fails. Nothing of mkdocs is imported before it calls: tests/test_site.py reads `PAGES` and `site_links`
without it.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A page of the site: the file of the repository that it shows.
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "programs.md": "eval/README.md",
    "tasks.md": "hf_mlspec/evaluation/tasks/README.md",
    "kernels.md": "kernels_ext/README.md",
    **{f"notebooks/{path.name}": f"notebooks/{path.name}" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))},
}
SHOWN = {source: page for page, source in PAGES.items()} | {"notebooks": "notebooks/README.md"}
# A fence, a link (its text, its target) or a span of code: only links are changed.
PIECES = re.compile(r"^```.*?^```|\[((?:[^\[\]`]|`[^`\n]*`)*)\]\(([^)\s]+)\)|`[^`\n]+`", re.DOTALL | re.MULTILINE)
OUTSIDE_SCRIPT = re.compile(r"<script\b(?:(?!</script>).)*?https?://.*?</script>", re.DOTALL)
NO_OUTPUTS = ('<div class="admonition note"><p class="admonition-title">Note</p>'
              "<p>This notebook is stored without its outputs. Run it to see them.</p></div>\n")


def page_of(file: str) -> str | None:
    """The page (or the picture, the data) of the site that shows a file of the repository, or None."""
    if file in SHOWN:
        return SHOWN[file]
    inside = file.startswith("docs/") and not file.endswith(".py") and (ROOT / file).is_file()
    return file.removeprefix("docs/") if inside else None


def site_links(markdown: str, page: str) -> str:
    """The text of `page` with its relative links as the site has them."""
    folder = posixpath.dirname(PAGES.get(page, f"docs/{page}"))

    def rewritten(match: re.Match[str]) -> str:
        label, target = match[1], match[2]
        if target is None or re.match(r"[a-z]+:|#", target):
            return match[0]
        path, _, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(folder, path))
        shown = page_of(file)
        if shown:
            return f"[{label}]({posixpath.relpath(shown, posixpath.dirname(page) or '.')}{'#' * bool(anchor)}{anchor})"
        if not (ROOT / file).exists():
            return match[0]
        return label if "`" in label else f"`{label}`"

    return PIECES.sub(rewritten, markdown)


def slug(text: str, separator: str) -> str:
    """The anchor of a heading as forges make it: every space is a hyphen, nothing is collapsed."""
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", separator)


def on_config(config):
    config["mdx_configs"].setdefault("toc", {})["slugify"] = slug
    config["watch"] += [str(ROOT / source) for source in PAGES.values()]
    return config


def on_files(files, config):
    from mkdocs.structure.files import File

    for page, source in PAGES.items():
        if page == source:  # the plugin that shows notebooks takes no generated files
            files.append(File(page, str(ROOT), config.site_dir, config.use_directory_urls))
        else:
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


on_files.mkdocs_priority = 100  # before the plugin that looks for notebooks among the files


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]  # its part of the menu is the page itself
    return site_links(markdown, page.file.src_uri)


def on_page_content(html, page, config, files):
    """Notebooks: no script from elsewhere is loaded, and one without outputs says so."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    html = OUTSIDE_SCRIPT.sub("", html)
    cells = json.loads(Path(page.file.abs_src_path).read_text(encoding="utf-8"))["cells"]
    return html if any(cell.get("outputs") for cell in cells) else html.replace("</h1>", "</h1>\n" + NO_OUTPUTS, 1)
