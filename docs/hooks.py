"""Hooks of `mkdocs build`: add README, CONTRIBUTING and the changelog to the pages of the site, and
check that the API page is complete.
"""

import logging
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Markdown files of the repository's root -> pages of the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
# With `strict`, a warning of this logger fails the build.
log = logging.getLogger("mkdocs.hooks")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the root's Markdown files as pages of the site, with their links changed to be relative
    to docs/, and the notebooks, so that pages can link to them. mkdocs calls this hook.

    Returns:
        `files`, changed in place.
    """
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        for linked_source, linked_page in PAGES.items():
            text = text.replace(f"]({linked_source}", f"]({linked_page}")
        text = text.replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    for notebook in ROOT.glob("notebooks/*.ipynb"):
        path = notebook.relative_to(ROOT).as_posix()
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Warn about public names of hf_ga that the API page, api.md, does not show, or that have no
    docstring. mkdocs calls this hook after each page is rendered.
    """
    if page.file.src_path != "api.md":
        return
    package = griffe.load("hf_ga", search_paths=[ROOT])
    for name, member in package.members.items():
        is_public = member.is_alias and member.target_path.startswith("hf_ga.")
        if not is_public:
            continue
        is_shown = f'id="hf_ga.{name}"' in html
        if not is_shown or not package[name].has_docstring:
            log.warning(f"api.md: hf_ga.{name} is missing or has no docstring")
