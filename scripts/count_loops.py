"""List the loops of the package that run a model forward and backward, once per micro-batch; the design asks for one.

Usage: python scripts/count_loops.py [FOLDER]
"""

import ast
import re
import sys
from pathlib import Path

# What is called on a batch, by the last part of its name: model(...), self.module(...), forward_term(...), compute_loss(...).
_FORWARD = re.compile(r"(^|_)(model|module|replica|forward|compute_loss)(_|$)")
_BACKWARD = re.compile(r"(^|_)(backward|grad)$")  # loss.backward(), accelerator.backward(loss), torch.autograd.grad(...)


def loops(source: str) -> list[tuple[int, str]]:
    """Line and enclosing function of each innermost loop with a forward and a backward in its body."""
    found: list[tuple[int, str]] = []
    _search(ast.parse(source), "<module>", found)
    return found


def _search(node: ast.AST, function: str, found: list[tuple[int, str]]) -> None:
    before = len(found)
    inner = node.name if isinstance(node, ast.FunctionDef) else function
    for child in ast.iter_child_nodes(node):
        _search(child, inner, found)
    if isinstance(node, (ast.For, ast.While)) and len(found) == before:
        names = [_called(call) for call in ast.walk(node) if isinstance(call, ast.Call)]
        if any(map(_FORWARD.search, names)) and any(map(_BACKWARD.search, names)):
            found.append((node.lineno, function))


def _called(call: ast.Call) -> str:
    """The last part of the name of what is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def main() -> None:
    """Print `file:line function` for each loop."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "hf_ga"
    for path in sorted(folder.rglob("*.py")):
        for line, function in loops(path.read_text(encoding="utf-8")):
            print(f"{path}:{line} {function}")


if __name__ == "__main__":
    main()
