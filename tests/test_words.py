"""No idioms of this project's past in docs, docstrings, comments and messages: the field's terms only."""

import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
IDIOMS = {
    r"(is|are|was|were|been) told": "pass ... to, receives",
    r"says|said": "states, logs, describes",
    r"tells? (what|whether|which|how|where)": "shows, determines",
    r"asks?|asked": "requests, requires, uses",
    r"(is|are|was) off by|how far off": "relative error",
    r"holds (a|an|the|no|nothing|it|its|what|which|up|more|\d+)": "contains, has",
    r"of (its|their|one's) own(?= *([.,;:)]|in |for |to |with |on ))": "own, separate, custom",
    r"as (it is|they are)(?= *[.,;:)]|$)": "unchanged",
    r"comes? to(?! be)": "is, reaches",
    r"all else": "the rest",
    r"out of them": "from them",
    r"(go|goes|going) on( |$)": "continue, resume",
    r"anew": "again, from step 0",
    r"in its place": "replaces",
    r"what (is|was) proven": "the proof, the proven loss",
    r"knows": "has, supports, stores",
    r"of so (few|many)|so (few|many) (\w+ )?(that|as)": "this many",
    r"most (tokens|samples|rows|bytes|elements) (in|of|to)": "maximum",
    r"(go|goes) with": "support, combine",
    r"but for": "except",
    r"or the like": "such as",
    r"rightly|right (gradient|weights?|sum|accumulation|step)": "correct",
    r"whatever": "any, independent of",
    r"wins? over": "overrides",
    r"weighs?": "has weight, is weighted by",
    r"(lie|lies) (in|on|beside|below|behind)": "is in",
    r"(stand|stands) (in|beside|behind|under|alone)": "is in",
    r"for a while": "within the block",
    r"lanes?": "index of the draw",
    r"(once|one|two|targets?|seconds?|line|entry) an? (window|sample|row|line|head|epoch|step|machine|layer)": "per",
}


def prose(path: Path) -> str:
    """The text of a Markdown file, or docstrings, comments and strings of a module, with single spaces."""
    if path.suffix == ".md":
        return " ".join(path.read_text(encoding="utf-8").split())
    with path.open("rb") as file:
        kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
        return " ".join(" ".join(t.string for t in tokenize.tokenize(file.readline) if t.type in kinds).replace("#", " ").split())


def test_no_idioms():
    docs = [path for path in (ROOT / "docs").glob("*.md") if path.name not in ("log.md", "heads.md")]
    files = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *docs,
        *(ROOT / "hf_ga").rglob("*.py"),
        *(ROOT / "scripts").rglob("*.py"),
    ]
    found = []
    for path in files:
        text = prose(path)
        for idiom, better in IDIOMS.items():
            for match in re.finditer(rf"\b({idiom})(?!\w)", text):
                found.append(
                    f"{path.relative_to(ROOT)}: ...{text[max(0, match.start() - 50) : match.end() + 50]}... Rather: {better}"
                )
    assert not found, "\n".join(found)
