"""Hide packages from this process, as if they were not installed."""

import sys
from importlib.machinery import ModuleSpec
from typing import Any

# Packages of the extra `finetune` that nothing which the library needs installs.
FINETUNE = (
    "datasets",
    "evaluate",
    "matplotlib",
    "peft",
    "pyarrow",
    "pytrec_eval",
    "rouge_score",
    "seqeval",
    "sklearn",
    "submitit",
)


class Finder:
    """A finder of `sys.meta_path` that does not find some packages. (One that raises an error
    instead would stop libraries that ask `importlib.util.find_spec` whether a package exists.)
    """

    def __init__(self, finder: Any, hidden: tuple[str, ...]) -> None:
        self.finder = finder
        self.hidden = hidden

    def find_spec(self, name: str, *arguments: Any) -> ModuleSpec | None:
        if name.partition(".")[0] in self.hidden:
            return None
        return self.finder.find_spec(name, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def hide(packages: tuple[str, ...] = FINETUNE) -> None:
    sys.meta_path[:] = [Finder(finder, packages) for finder in sys.meta_path]
