"""Every code block of README and docs runs and prints what the page says; the site builds; every public name is on it."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pages
import pytest

import ov_circuits as ov
from ov_circuits.report.stills import why_no_stills
from ov_circuits.scores.board import all_scores

ROOT = pages.ROOT


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.stem)
def test_what_a_page_shows_runs_and_prints_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None
) -> None:
    if (
        "figures.save" in page.read_text(encoding="utf-8")
        and why_no_stills()
        and os.environ.get("CI", "").lower() != "true"
    ):
        pytest.skip(f"NOT RUN: {why_no_stills()}")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in pages.blocks(page.read_text(encoding="utf-8")):
        if block.mark is not None or block.ranks:
            continue
        printed = pages.run(block, page, namespace)
        if block.printed is not None:
            assert pages.same(printed, block.printed), f"{page}:{block.line} prints\n{printed}"


@pytest.mark.slow
@pytest.mark.network
def test_scripts_for_several_processes_run_and_print_what_the_page_says(
    smollm2: ov.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scripts = [(page, block) for page in pages.PAGES for block in pages.blocks(page.read_text()) if block.ranks]
    assert scripts
    for page, block in scripts:
        printed = pages.run(block, page, {})
        if block.language == "python" or block.printed is not None:
            assert block.printed is not None and pages.same(printed, block.printed), (
                f"{page}:{block.line} prints\n{printed}"
            )


def test_every_command_of_a_page_stands_in_a_block_that_is_run() -> None:
    for page in pages.PAGES:
        outside = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        assert not re.findall(r"^ {4,}(?:torchrun|ov-circuits|python|pip|import|from) .*", outside, re.MULTILINE), page


def test_set_up_commands_are_run_by_the_whole_check() -> None:
    marks = [block.mark for page in pages.PAGES for block in pages.blocks(page.read_text()) if block.mark is not None]
    assert marks == ["the page command", "the test command"]
    script = (ROOT / ".ci" / "run").read_text()
    assert all(f"run_from_readme '{mark}'" in script for mark in marks)


def test_a_page_that_says_something_else_is_found() -> None:
    assert pages.same("a  0.123\nb -1", "a 0.124\nb -1\n")
    assert not pages.same("a 0.123", "a 0.129")
    assert not pages.same("a 12", "a 13")
    assert not pages.same("a 0.123", "b 0.123")
    assert not pages.same("a 0.123", "a 0.123\nb 0.5")
    text = (
        "```python\nx = 1\n```\n\n```text\n1\n```\n\n<!-- the test command -->\n```sh\npip\n```\n\n```\nno code\n```\n"
        "<!-- torchrun 3 -->\n```python\ny = 2\n```\n"
    )
    first, second, third = pages.blocks(text)
    assert (first.ranks, second.ranks, third.ranks, third.mark) == (0, 0, 3, None)
    assert (first.language, first.line, first.printed, first.mark) == ("python", 2, "1\n", None)
    assert (second.code, second.printed, second.mark) == ("pip\n", None, "the test command")


def test_links_to_files_lead_somewhere() -> None:
    for page in [*pages.PAGES, ROOT / "CHANGELOG.md"]:
        links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
        assert not [link for link in links if not (page.parent / link).exists()], page


def test_the_plan_of_the_house_names_every_module() -> None:
    plan = (ROOT / "README.md").read_text(encoding="utf-8").split("## How it is built")[1].split("## Limits")[0]
    modules = {file.name for file in (ROOT / "ov_circuits").rglob("*.py")} - {"__init__.py", "__main__.py"}
    assert modules == set(re.findall(r"`(\w+\.py)`", plan))


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^\.\. auto(?:function|class|exception|module|data):: ov_circuits\.(\w+)$", text, re.MULTILINE)
    modules = re.findall(r"^\.\. automodule:: (ov_circuits\.\w+\.\w+)$", text, re.MULTILINE)
    named += [name for name in ov.__all__ if getattr(getattr(ov, name), "__name__", None) in modules]
    assert sorted(named) == sorted(ov.__all__)


def test_the_changelog_has_this_version() -> None:
    newest = re.search(r"^## \[([\d.]+)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None and newest[1] == ov.__version__.removesuffix(".dev0")
    assert (newest[2] == "unreleased") == ov.__version__.endswith(".dev0")


def test_every_public_docstring_says_what_it_needs_to() -> None:
    """What it takes, gives and refuses, for every function and every one of a public module."""
    found = {name: getattr(ov, name) for name in ov.__all__}
    assert not [name for name, thing in found.items() if not (thing.__doc__ or "").strip()]
    functions = {name: thing for name, thing in found.items() if inspect.isfunction(thing)}
    assert len(functions) > 20
    for name, function in functions.items():
        text = function.__doc__ or ""
        sections = ("Args", "Returns", *(["Raises"] if name != "space_map" else []))  # any model has that map
        assert all(f"    {section}:\n" in text for section in sections), name


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning is an error."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(ROOT / "docs"), str(out)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return out


def test_the_site_loads_nothing_from_outside(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"'](?:https?:)?//|<link[^>]*\shref=[\"'](?:https?:)?//|@import\s+url\((?:https?:)?//"
    )
    for file in [*site.rglob("*.html"), *site.rglob("*.css")]:
        assert not loads.search(file.read_text(encoding="utf-8")), file


def test_the_site_has_every_page_score_and_name(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").is_file()
    api = (site / "api.html").read_text(encoding="utf-8")
    assert all(
        f'id="ov_circuits.{name}"' in api or f"module-{getattr(ov, name).__name__}" in api for name in ov.__all__
    )
    scores = (site / "scores.html").read_text(encoding="utf-8")
    assert all(f">{key}<" in scores for key in all_scores())
