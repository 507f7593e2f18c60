"""Count the phrases that the language rules of CONTRIBUTING.md forbid, per 1,000 words.

    python scripts/prose.py [--limit N] FOLDER_OR_FILE ...

Checked are docstrings, comments, CLI help, error texts and log messages of Python files, comments of SQL, JavaScript
and protocol files, and the text of Markdown files outside code blocks and headings. Inline code and questions do not
count. Above the limit the exit code is 1, and every place is printed.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

_VERBS = "is|was|were|are|has|had|have|does|did|do|can|cannot|could|may|might|must|shall|should|will|would"
_PHRASES = {
    "what-clause": rf"\bwhat (?:{_VERBS}|it|they|we|you|one|each|every|others|nobody|somebody|a|an|the|this|that|there"
    r"|only|came|comes|follows|happens|happened|waits|runs|failed|fell|falls|goes|went|needs|became|becomes)\b",
    "who-clause": r"\b(?:whoever|whatever|whichever|whosever)\b"
    r"|(?:^|[.:;,] |\b(?:by|of|to|for|from|tells?|told|with) )who\b",
    "person without a role": r"\b(?:nobody|somebody|everybody|anybody)\b",
    "number without a name": r"\bso (?:many|much|long|large|often|late|old|few)\b(?! as\b| that\b)",
    "software speaks": r"\b(?:told|tells?|telling|says?|said|hears?|heard|last words?)\b",
    "of ours": r"\bof (?:ours|its own|their own|his own|our own|his|theirs|yours|hers)\b",
    "so that": r"\bso that\b",
    "sentence without a subject": r"(?:^|[.!?] +)(?-i:Of|What|Who|Whose|Whoever|Whatever)\b",
    "idiom": r"\b(?:come|comes|came|coming) (?:of|to nothing|to its end|to their end|to no result)\b"
    r"|\b(?:be|is|was|were) had\b|\bhad at once\b"
    r"|\b(?:now and then|be it|gets? on|got on|is no more|are no more|of no use|in its stead)\b"
    r"|\b(?:hence|whence|thereby|thus|upon|thereof)\b",
}
_PATTERNS = {name: re.compile(text, re.IGNORECASE | re.MULTILINE) for name, text in _PHRASES.items()}
_COMMENTS = {".sql": "--", ".proto": "//", ".js": "//"}
_LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}

Text = tuple[int, str]
"""Line number and words."""


def texts(path: Path) -> Iterator[Text]:
    source = path.read_text(encoding="utf-8")
    if path.suffix in _COMMENTS:
        return _comments(source, _COMMENTS[path.suffix])
    return _markdown(source) if path.suffix == ".md" else _python(source)


def _comments(source: str, mark: str) -> Iterator[Text]:
    """The comments of a file, each block of lines as one text: a phrase may go over the end of a line."""
    block: list[str] = []
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith(mark):
            block.append(line.lstrip().removeprefix(mark))
        elif block:
            yield number - len(block), " ".join(block)
            block = []


def _markdown(source: str) -> Iterator[Text]:
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("#"):
            yield number, line


def _python(source: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
        elif isinstance(node, ast.Raise) and node.exc is not None:
            yield node.lineno, _strings(node.exc)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in _LOG_METHODS and node.args:
                yield node.lineno, _strings(node.args[0])
            yield from ((node.lineno, _strings(each.value)) for each in node.keywords if each.arg == "help")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def _strings(node: ast.AST) -> str:
    found = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return " ".join(text for text in found if " " in text)


def cleaned(words: str) -> str:
    words = re.sub(r"(?s)(?:^|\n)\s*>>>.*", "", words)  # a doctest is code
    words = re.sub(r"``.+?``|`[^`\n]*`", "x", words)
    return re.sub(r"[^.!?]*\?", " ", " ".join(words.split()))  # a question may begin with what or who


def phrases(words: str) -> Iterator[tuple[str, str]]:
    """Name and surroundings of each phrase. A place counts once, under the first name that matches."""
    taken: set[int] = set()
    for name, pattern in _PATTERNS.items():
        for match in pattern.finditer(words):
            span = set(range(*match.span()))
            if not taken & span:
                taken |= span
                yield name, words[max(0, match.start() - 40) : match.end() + 40]


def files(roots: list[Path]) -> Iterator[Path]:
    for root in roots:
        found = (path for suffix in (".py", ".md", *_COMMENTS) for path in root.rglob(f"*{suffix}"))
        yield from sorted(path for path in found if not path.name.endswith(".min.js")) if root.is_dir() else [root]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", nargs="+", type=Path, help="folders or files")
    parser.add_argument("--limit", type=float, default=0.0, help="phrases per 1,000 words (default: 0)")
    given = parser.parse_args()
    words, places = 0, []
    for path in files(given.roots):
        for line, text in texts(path):
            plain = cleaned(text)
            words += len(re.findall(r"[A-Za-z][A-Za-z']*", plain))
            places += [f"{path}:{line}: {name}: …{around}…" for name, around in phrases(plain)]
    rate = 1000 * len(places) / max(1, words)
    if rate > given.limit:
        print(*places, sep="\n")
        sys.exit(f"{len(places)} phrases in {words:,} words: {rate:.1f} per 1,000, the limit is {given.limit:g}")


if __name__ == "__main__":
    main()
