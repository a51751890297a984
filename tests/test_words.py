"""No idioms of this project's past in docs, docstrings, comments and messages: the field's terms only."""

import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
IDIOMS = {  # better -> regular expressions
    "states, logs, shows, requests": r"(is|are|was|were|been) told|says|said|tells? (what|whether|which|how|where)|asks?|asked",
    "relative error": r"(is|are|was) off by|how far off",
    "contains, has, supports": r"holds (a|an|the|no|nothing|it|its|what|which|up|more|\d+)|knows|(go|goes) with",
    "own, separate, custom": r"of (its|their|one's) own(?= *([.,;:)]|in |for |to |with |on ))",
    "unchanged; the proof": r"as (it is|they are)(?= *[.,;:)]|$)|what (is|was) proven",
    "is, is in, from": r"comes? to(?! be)|(lie|lies) (in|on|beside|below|behind)|stands? (in|beside|behind|under|alone)|out of "
    "them",
    "continue, resume, again": r"(go|goes|going) on( |$)|anew|in its place|for a while",
    "the rest, except, such as, any": r"all else|but for|or the like|whatever",
    "maximum, this many": r"most (tokens|samples|rows|bytes|elements) (in|of|to)|so (few|many) (\w+ )?(that|as)",
    "correct, overrides, has weight": r"rightly|right (gradient|weights?|sum|accumulation|step)|wins? over|weighs?|lanes?",
    "per": r"(once|one|two|targets?|seconds?|line|entry) an? (window|sample|row|line|head|epoch|step|machine|layer)",
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
    searches = [(path, prose(path), better, idiom) for path in files for better, idiom in IDIOMS.items()]
    hits = [(path, better, match.group()) for path, text, better, e in searches for match in re.finditer(rf"\b({e})(?!\w)", text)]
    assert not hits, "\n".join(f"{path.relative_to(ROOT)}: {found!r}, rather: {better}" for path, better, found in hits)
