"""A browser for the page, and axe-core where it is at hand."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def _absent(what: str) -> None:
    """Absent tools fail in CI and are skipped loudly elsewhere."""
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(f"{what}; CI must have it", pytrace=False)
    pytest.skip(f"NOT RUN: {what}")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _absent("the page is tested with playwright, which is not installed")
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        _absent("the page is tested in Chromium, and there is no chromium on PATH")
    with sync_playwright() as playwright:
        # Sandboxed frames in the page's own process: where a test disables scripts, that must reach a notebook's frames.
        started = playwright.chromium.launch(
            executable_path=executable,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-features=IsolateSandboxedIframes",
            ],
        )
        yield started
        started.close()


@pytest.fixture(scope="session")
def axe_source() -> str:
    path = os.environ.get("OV_CIRCUITS_AXE", "")
    if not path or not Path(path).is_file():
        _absent("accessibility is tested with axe-core; OV_CIRCUITS_AXE must name its axe.min.js")
    return Path(path).read_text("utf-8")
