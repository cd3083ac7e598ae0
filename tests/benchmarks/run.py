"""All benchmarks, one after the other: a table of ratios each, both sides measured in the same run.

ov-circuits fetch smollm2
python tests/benchmarks/run.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness import ROOT


def main() -> None:
    here = Path(__file__).parent
    sys.path.insert(0, str(ROOT))
    from ov_circuits.checkpoint.locate import cache_folder

    smollm2 = os.environ.get("OV_CIRCUITS_SMOLLM2", str(cache_folder() / "smollm2"))
    environment = os.environ | {"OV_CIRCUITS_SMOLLM2": smollm2, "PYTHONPATH": str(ROOT)}
    failed = [
        name
        for name in ("spectra", "command", "composition", "rank_copying")
        if subprocess.run([sys.executable, str(here / f"{name}.py")], env=environment, check=False).returncode
    ]
    if failed:
        raise SystemExit(f"these did not finish: {', '.join(failed)}")


if __name__ == "__main__":
    main()
