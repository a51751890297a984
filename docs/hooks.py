"""What `mkdocs build` does beside its configuration: README and CONTRIBUTING become pages, and the
API page must be complete.
"""

import logging
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
log = logging.getLogger("mkdocs.hooks")  # with `strict` a warning fails the build


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The Markdown files of the top level, with links as from docs/, and the notebooks, for links
    to them.
    """
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for source, target in PAGES.items():
            text = text.replace(f"]({source}", f"]({target}")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    for notebook in ROOT.glob("notebooks/*.ipynb"):
        name = notebook.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Warn about public names that the API page lacks, or that have no docstring."""
    if page.file.src_path == "api.md":
        package = griffe.load("hf_ga", search_paths=[ROOT])
        public = [
            name
            for name, member in package.members.items()
            if member.is_alias and member.target_path.startswith("hf_ga.")
        ]
        for name in public:
            if f'id="hf_ga.{name}"' not in html or not package[name].has_docstring:
                log.warning(f"api.md: hf_ga.{name} is missing or has no docstring")
