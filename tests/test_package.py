"""What the package promises as a package: quick imports, one list of names, the model inside the wheel."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

import ov_circuits as ov

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "numpy", "pandas", "transformers", "transformer_lens", "plotly", "huggingface_hub", "jaxtyping")


def python(code: str) -> str:
    """The standard output of a fresh interpreter (without the tests' type-checking hook)."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return result.stdout.strip()


def test_import_takes_less_than_150_ms_on_top_of_torch():
    code = "import torch, time; start = time.perf_counter(); import ov_circuits; print(time.perf_counter() - start)"
    # The smallest of several: a busy machine can only add to it.
    assert min(float(python(code)) for _ in range(4)) < 0.15


def test_loading_is_quick_too():
    """``ov.load`` pulls in what reading weights needs, on top of torch; transformers and its kin are not among it."""
    code = (
        "import torch, sys, ov_circuits; ov_circuits.load\n"
        "print([name for name in ('transformers', 'transformer_lens', 'plotly', 'huggingface_hub') if name in sys.modules])"
    )
    assert python(code) == "[]"


@pytest.mark.parametrize("arguments", [["--help"], [], ["heads", "--help"], ["fetch", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys, contextlib, io\n"
        "from ov_circuits.cli import app\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    app({arguments!r})\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert python(code) == "[]"


def test_scores_of_weights_do_not_import_transformers():
    code = (
        "import sys, ov_circuits as ov\n"
        "ov.scoreboard(ov.load())\n"
        "print([name for name in ('transformers', 'transformer_lens', 'plotly') if name in sys.modules])"
    )
    assert python(code) == "[]"


def test_every_public_name_is_there():
    assert {"load", "Model", "Head", "Trace", "scoreboard", "dashboard", "verify"} <= set(ov.__all__)
    assert all(getattr(ov, name) is not None for name in ov.__all__)
    assert set(ov.__all__) <= set(dir(ov))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = ov.nonsense


def test_every_module_says_what_it_is_for():
    for file in sorted((ROOT / "ov_circuits").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__main__":
            continue
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        assert module.__doc__, file


def test_imports_run_downwards_only():
    """checkpoint and linalg know nothing of the rooms above, nor of each other (see "How it is built" in the README)."""
    forbidden = {
        "linalg": ("checkpoint", "layer", "source", "model", "folding", "scores", "trace", "report", "verify", "cli"),
        "checkpoint": ("linalg", "layer", "source", "model", "folding", "scores", "trace", "report", "verify", "cli"),
        "scores": ("trace", "report", "verify", "cli"),
        "trace": ("report", "verify", "cli"),
        "report": ("cli", "terminal"),
    }
    for room, above in forbidden.items():
        for file in (ROOT / "ov_circuits" / room).glob("*.py"):
            text = file.read_text(encoding="utf-8")
            found = [
                name for name in above if f"from ov_circuits.{name}" in text or f"import ov_circuits.{name}" in text
            ]
            assert not found, f"{file} imports {found}"


def test_the_tested_set_covers_every_dependency():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    names = {name.split(">")[0].split("[")[0].replace("_", "-") for name in wanted} - {"ov-circuits"}
    assert names <= pinned


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel, built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        yield archive


def test_the_wheel_carries_the_model_and_the_page(wheel):
    model = {f"ov_circuits/_data/model/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")}
    page = {f"ov_circuits/report/page/{file.name}" for file in (ROOT / "ov_circuits" / "report" / "page").iterdir()}
    assert model | page | {"ov_circuits/py.typed"} <= set(wheel.namelist())
    assert sum(entry.compress_size for entry in wheel.infolist()) < 20e6


def test_the_wheels_metadata_is_complete(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    about = Parser().parsestr(wheel.read(name).decode())
    assert about["Name"] == "ov-circuits"
    assert about["Version"] == ov.__version__
    assert about["License-Expression"] == "MIT"
    assert about["Requires-Python"] == ">=3.10"
    assert set(about.get_all("Provides-Extra") or ()) == {"docs", "gguf", "notebook", "test", "dev"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
