"""How large a page is, and how soon its atlas is painted in headless Chromium: 270 heads (SmolLM2) and 1024 (an 8B shape).

    python tests/benchmarks/page.py

Pages are made up (tests/browser/made_up.py), of the real one's sizes. Painted means: the frame after the map of heads stands in the
document, by the page's own clock, from the start of the navigation; the best of three.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import ROOT, table

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

LIMITS = {"270 heads": (12, 2), "1024 heads": (40, 5)}

# Says when the first frame after the map's arrival was made.
WATCH = """new MutationObserver((_, observer) => {
  if (!document.querySelector('.map-panel .cell')) return;
  observer.disconnect();
  requestAnimationFrame(() => { window.painted = performance.now(); });
}).observe(document, { childList: true, subtree: true })"""


def painted(browser: Any, path: Path) -> float:
    """Seconds until the atlas stands."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    page.add_init_script(WATCH)
    page.goto(path.as_uri())
    page.wait_for_function("window.painted")
    seconds = float(page.evaluate("window.painted")) / 1000
    context.close()
    return seconds


def main() -> None:
    from browser.made_up import SHAPES, make_payload
    from playwright.sync_api import sync_playwright

    from ov_circuits.report.dashboard import Dashboard

    executable = shutil.which("chromium")
    if executable is None:
        raise SystemExit("this is measured in chromium, which is not on the PATH")
    rows = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        for name, shape in SHAPES.items():
            path = Path(folder) / "page.html"
            path.write_text(Dashboard(make_payload(**shape)).html, "utf-8")
            size, seconds = path.stat().st_size / 1e6, min(painted(browser, path) for _ in range(3))
            most_mb, most_s = LIMITS[name]
            rows.append((f"{name}: size", "", f"{size:.1f} MB", "", f"<= {most_mb} MB"))
            rows.append((f"{name}: first paint of the atlas", "", f"{seconds:.2f} s", "", f"<= {most_s} s"))
        browser.close()
    table("The page", rows)


if __name__ == "__main__":
    main()
