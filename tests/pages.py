"""The code blocks of the README and of docs/, run as a reader would run them, and what they print held against the page.

A page's ``python`` blocks share one namespace; its ``sh`` blocks are lines of ``ov-circuits``; both run in order, in one folder.
A ``text`` block right after one of them is what it prints. Bring those up to date with

    python tests/pages.py docs/spectra.md ..

A ``sh`` block after a mark such as ``<!-- the test command -->`` sets up an environment: `.ci/run` runs it, by that mark. A
``python`` block after ``<!-- torchrun 3 -->`` is a script of its own, for so many processes (or for one), on SmolLM2; a ``sh``
block there is the command that starts them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- (the \w+ command) -->\s*\Z")
_RANKS = re.compile(r"<!-- torchrun (\d+) -->\s*\Z")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    """Code on a page.

    Attributes:
        language: ``python`` or ``sh``.
        code: what is run.
        line: of its first line on the page.
        mark: what `.ci/run` finds it by, where it is a set-up command.
        ranks: how many processes it is a script for, or starts; 0 where it runs with the page's other blocks.
        printed: what the page says that it prints, with its place in the page's text; None where it says nothing.
    """

    language: str
    code: str
    line: int
    mark: str | None
    ranks: int
    printed: str | None
    place: tuple[int, int] | None


def blocks(text: str) -> list[Block]:
    """All blocks of a page that are run, in order."""
    found = list(_BLOCK.finditer(text))
    made = []
    for i, here in enumerate(found):
        after = found[i + 1] if i + 1 < len(found) else None
        if here[1] not in ("python", "sh"):
            continue
        says = after is not None and after[1] == "text" and not text[here.end() : after.start()].strip()
        mark, ranks = (pattern.search(text[: here.start()]) for pattern in (_MARK, _RANKS))
        made.append(
            Block(
                here[1],
                here[2],
                text.count("\n", 0, here.start(2)) + 1,
                None if mark is None else mark[1],
                0 if ranks is None else int(ranks[1]),
                after[2] if says else None,
                after.span(2) if says else None,
            )
        )
    return made


def run(block: Block, page: Path, namespace: dict[str, Any]) -> str:
    """Run a block in the current folder; what it prints."""
    if block.ranks:
        return run_script(block)
    if block.language == "sh":
        return "".join(run_line(line) for line in block.code.replace("\\\n", " ").splitlines())
    out = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")  # a traceback names the page's own line
    with contextlib.redirect_stdout(out):
        exec(code, namespace)
    return out.getvalue()


def run_script(block: Block) -> str:
    """A script on several processes of this machine, or the command that starts them; what they print."""
    from torchrun import torchrun

    command: list[Any] = [Path("script.py").resolve()]
    if block.language == "python":
        command[0].write_text(block.code, encoding="utf-8")
    else:
        started, command = shlex.split(block.code)[:4], shlex.split(block.code)[4:]
        assert started == ["torchrun", "--standalone", "--nproc-per-node", str(block.ranks)], block.code
    done = torchrun(block.ranks, *command, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def run_line(line: str) -> str:
    """One line of shell, which has to be a command of ours."""
    from typer.testing import CliRunner

    from ov_circuits.cli import app

    words = shlex.split(line, comments=True)
    if not words:
        return ""
    assert words[0] == "ov-circuits", f"only ov-circuits is run: {line}"
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception!r}"
    return result.stdout


def same(printed: str, says: str) -> bool:
    """Equal words; numbers within two units of the last digit that the page shows."""
    printed, says = squeezed(printed), squeezed(says)
    if _NUMBER.sub("#", printed) != _NUMBER.sub("#", says):
        return False
    return all(_near(a, b) for a, b in zip(_NUMBER.findall(printed), _NUMBER.findall(says), strict=True))


def squeezed(text: str) -> str:
    return "\n".join(re.sub(r"[ ─━-]{2,}", " ", line).strip() for line in text.strip().splitlines())


def _near(number: str, says: str) -> bool:
    if "." not in says:
        return number == says
    digits, _, exponent = says.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(digits.split(".")[1]))
    return abs(float(number) - float(says)) <= 2.001 * unit


def rewrite(page: Path) -> None:
    """Put what the blocks print now into the page's ``text`` blocks."""
    text, namespace, made = page.read_text(encoding="utf-8"), {"__name__": "__main__"}, []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for block in blocks(text):
            if block.mark is None:
                made.append((block, run(block, page, namespace)))
    for block, printed in reversed(made):
        if block.place is not None:
            start, end = block.place
            text = (
                text[:start] + "\n".join(line.rstrip() for line in printed.strip("\n").splitlines()) + "\n" + text[end:]
            )
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in sys.argv[1:]:
        rewrite(Path(name).resolve())
