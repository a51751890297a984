"""Find the loops that run a model forward and backward, once per micro-batch; the package should
have one.
"""

import ast
import re

# Calls on a batch, by the last part of the name: model(...), self.module(...), forward_term(...),
# compute_loss(...).
_FORWARD = re.compile(r"(^|_)(model|module|replica|forward|compute_loss)(_|$)")
_BACKWARD = re.compile(
    r"(^|_)(backward|grad)$"
)  # loss.backward(), accelerator.backward(loss), torch.autograd.grad(...)


def loops(source: str) -> list[tuple[int, str]]:
    """Line and head of each innermost loop with a forward and a backward in its body."""
    found = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.For | ast.While) and _trains(node)
    ]
    inner = [
        node
        for node in found
        if not any(other is not node and other in ast.walk(node) for other in found)
    ]
    return [(node.lineno, ast.unparse(node).partition("\n")[0]) for node in inner]


def _trains(loop: ast.AST) -> bool:
    calls = [node.func for node in ast.walk(loop) if isinstance(node, ast.Call)]
    names = [
        getattr(called, "attr", getattr(called, "id", "")) for called in calls
    ]  # the last part
    return any(map(_FORWARD.search, names)) and any(map(_BACKWARD.search, names))
