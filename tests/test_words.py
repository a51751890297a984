"""No idioms of this project's past in docs, docstrings, comments and messages: the field's terms only."""

import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
IDIOMS = {  # better -> regular expressions
    "states, logs, shows, requests": r"(is|are|was|were|been) told|says|said|tells? (what|whether|which|how|where)|asks?|asked",
    "contains, has, supports": r"holds (a|an|the|no|nothing|it|its|what|which|up|more|\d+)|knows|(go|goes) with",
    "own, separate, custom": r"of (its|their|one's) own(?= *([.,;:)]|in |for |to |with |on ))",
    "unchanged; the proof": r"as (it is|they are)(?= *[.,;:)]|$)|what (is|was) proven",
    "is, is in, from": r"comes? to(?! be)|(lie|lies) (in|on|beside|below|behind)|stands? (in|beside|behind|under|alone)|out of "
    "them",
    "continue, resume, again": r"(go|goes|going) on( |$)|anew|in its place|for a while",
    "the rest, except, such as, any, relative error": r"(is|are|was) off by|how far off|all else|but for|or the like|whatever",
    "maximum, this many": r"most (tokens|samples|rows|bytes|elements) (in|of|to)|so (few|many) (\w+ )?(that|as)",
    "correct, overrides, has weight": r"rightly|right (gradient|weights?|sum|accumulation|step)|wins? over|weighs?|lanes?",
    "per": r"(once|one|two|targets?|seconds?|line|entry) an? (window|sample|row|line|head|epoch|step|machine|layer)",
}
IDIOMS = {better: re.compile(rf"\b({idiom})(?!\w)") for better, idiom in IDIOMS.items()}


def prose(path: Path) -> str:
    """The text of a Markdown file, or docstrings, comments and strings of a module, with single spaces."""
    if path.suffix == ".md":
        return " ".join(path.read_text(encoding="utf-8").split())
    tokens = tokenize.generate_tokens(iter(path.read_text(encoding="utf-8").splitlines(keepends=True)).__next__)
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    found = [t.string for t in tokens if t.type in kinds or t.string == "}"]  # a value between two parts of a string
    return " ".join(" ".join(found).replace("#", " ").split())


def test_no_idioms():
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "hf_ga").rglob("*.py")]
    texts = {path: prose(path) for path in [*files, *(ROOT / "scripts").rglob("*.py")] if path.name not in ("log.md", "heads.md")}
    found = [(p, e.search(t), better) for p, t in texts.items() for better, e in IDIOMS.items() if e.search(t)]
    assert not found, "\n".join(f"{p.relative_to(ROOT)}: {match.group()!r}, rather: {better}" for p, match, better in found)
