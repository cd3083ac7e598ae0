"""The command line in surroundings that are not as they should be: streams, signals, folders, memory, variables."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ov_circuits as ov
from ov_circuits.cli import app
from ov_circuits.errors import CircuitsError
from ov_circuits.files import atomic_path
from ov_circuits.trace.engines import _blame_config

_MODULE = [sys.executable, "-m", "ov_circuits"]
_ROOT = str(Path(ov.__file__).parents[1])


def process(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    where = os.environ | {"PYTHONPATH": _ROOT} | more.pop("env", {})
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "check": False, "timeout": 240}
    return subprocess.run([*_MODULE, *map(str, arguments)], env=where, **options | more)


def one_sentence(text: str) -> str:
    assert text.startswith("error: ") and text.count("\n") == 1, text
    return text


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["--version"], ["--help"], ["heads", "--help"]])
def test_what_needs_no_model_ends_well_on_a_full_disk_and_in_a_closed_pipe(arguments):
    with open("/dev/full", "w") as full:
        done = process(*arguments, stdout=full)
    assert done.returncode == 2 and "No space left" in one_sentence(done.stderr)
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        done = process(*arguments, stdout=closed)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_closed_pipe_is_not_a_failed_check(tiny_gpt2_char, form):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        done = process("inspect", tiny_gpt2_char, *form, stdout=closed)
    assert (done.returncode, done.stderr) == (141, "")


def test_words_that_standard_error_does_not_take_stop_nothing(tiny_gpt2_char, tmp_path):
    with open("/dev/full", "w") as full:
        assert process("heads", tiny_gpt2_char, "--no-nulls", "-o", tmp_path / "h.csv", stderr=full).returncode == 0
        assert process("heads", tmp_path / "absent", stderr=full).returncode == 2
    assert [file.name for file in tmp_path.iterdir()] == ["h.csv"]


def test_closed_streams_are_no_files_numbers():
    """A file that took the number of a closed standard error would hold what C libraries write there."""
    code = (
        "import os, sys; from ov_circuits.cli import app as _; from ov_circuits.cli.app import _open_standard_streams\n"
        "_open_standard_streams(); print('lost'); print('lost', file=sys.stderr)\n"
        "sys.exit(0 if os.open(os.devnull, os.O_RDONLY) > 2 else 1)"
    )
    done = subprocess.run(["bash", "-c", f'exec "{sys.executable}" -c "$0" <&- >&- 2>&-', code], check=False)
    assert done.returncode == 0


# -- signals ----------------------------------------------------------------------------------------------------------

_STOPPED = """
import os, signal, sys, time
from unittest.mock import patch
from ov_circuits import __main__ as entry

def stop(*args, **kwargs):
    for name in {signals}:
        os.kill(os.getpid(), getattr(signal, name))
    time.sleep(0)

def slow(self, *args, **kwargs):  # the second signal comes while the first one's files are taken away
    for name in {later}:
        os.kill(os.getpid(), getattr(signal, name))
    time.sleep(0)
    unlink(self, *args, **kwargs)

from pathlib import Path
unlink = Path.unlink
sys.argv = ["ov-circuits", "heads", {model!r}, "-o", {output!r}]
with patch("ov_circuits.scores.board.Board.computed", stop), patch("pathlib.Path.unlink", slow):
    entry.main()
"""


@pytest.mark.parametrize(
    ("first", "later", "code"),
    [
        ("SIGINT", [], 130),
        ("SIGINT", ["SIGINT"], 130),
        ("SIGTERM", ["SIGTERM", "SIGHUP"], 143),
        ("SIGHUP", ["SIGINT"], 129),
    ],
)
def test_signals_leave_no_file_however_often_they_come(tmp_path, tiny_gpt2_char, first, later, code):
    script = _STOPPED.format(signals=[first], later=later, model=str(tiny_gpt2_char), output=str(tmp_path / "h.csv"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert done.stderr == ("stopped\n" if first == "SIGINT" else "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "wait"), [("ImportError('no module')", 0), ("CircuitsError('no file')", 0), (None, 1.1)]
)
def test_libraries_that_swallow_a_signal_do_not_keep_it(tmp_path, tiny_gpt2_char, error, wait):
    """transformers makes an ImportError of whatever happens while it imports; a callback of C code just goes on."""
    script = (
        "import os, signal, sys, time; from unittest.mock import patch\n"
        "from ov_circuits.cli import main; from ov_circuits.errors import CircuitsError\n"
        "def stop(*args, **kwargs):\n"
        "    try: os.kill(os.getpid(), signal.SIGTERM); time.sleep(0)\n"
        f"    except BaseException: {'pass' if error is None else f'raise {error}'}\n"
        f"    time.sleep({wait}); os.kill(os.getpid(), signal.SIGTERM); time.sleep(0)\n"
        f"sys.argv = ['ov-circuits', 'heads', {str(tiny_gpt2_char)!r}, '-o', {str(tmp_path / 'heads.csv')!r}]\n"
        "with patch('ov_circuits.scores.board.Board.computed', stop): main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (143, "")
    assert list(tmp_path.iterdir()) == []


def test_a_signal_waits_for_the_import_that_it_comes_in(tmp_path, tiny_gpt2_char):
    """torch ends the process with an abort and its own stack when an exception comes while it is imported."""
    (tmp_path / "heavy.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(0.2)\nprint('imported')\n"
    )
    script = (
        f"import sys, time; from unittest.mock import patch; sys.path.append({str(tmp_path)!r})\n"
        "from ov_circuits.cli import main\n"
        "def stop(*args, **kwargs): import heavy; time.sleep(60)\n"
        f"sys.argv = ['ov-circuits', 'heads', {str(tiny_gpt2_char)!r}]\n"
        "with patch('ov_circuits.scores.board.Board.computed', stop): main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (143, "imported\n", "")


def test_what_nohup_ignores_stays_ignored():
    code = (
        "import signal; from ov_circuits.cli.app import _stoppable\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "with _stoppable(): print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)\n"
        "print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "True", "True"], done.stderr


def test_ctrl_c_while_the_commands_are_imported_is_quiet():
    code = (
        "import os, signal, sys; from importlib.abc import MetaPathFinder; from ov_circuits.__main__ import main\n"
        "class Stop(MetaPathFinder):\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Stop()); main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


# -- folders, memory, variables -----------------------------------------------------------------------------------------


def test_a_working_directory_that_is_gone_is_said(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f'cd "{gone}" && rmdir "{gone}" && exec "{sys.executable}" -m ov_circuits heads'
    environment = os.environ | {"PYTHONPATH": _ROOT}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2 and "working directory" in one_sentence(done.stderr)


def test_a_name_that_is_no_utf8_is_said(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff\xfe")
    folder.mkdir()
    with pytest.raises(CircuitsError, match=r"udcff.* is no UTF-8"):
        ov.load(folder)


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (MemoryError(), "memory"),
        (MemoryError("Cannot allocate memory (os error 12)"), "os error 12"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory"), "memory"),
        (OSError(errno.EMFILE, "Too many open files", "/some/file"), "/some/file"),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), "temporarily"),
    ],
)
def test_what_the_system_refuses_is_a_sentence(tiny_gpt2_char, monkeypatch, error, word):
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("ov_circuits.scores.board.Board.computed", refuse)
    result = CliRunner().invoke(app, ["heads", str(tiny_gpt2_char)])
    assert result.exit_code == 2 and word in one_sentence(result.stderr)


def test_want_of_memory_is_not_blamed_on_a_file(tiny_gpt2_char, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    model = ov.load(tiny_gpt2_char)
    monkeypatch.setattr("safetensors.safe_open", refuse)
    with pytest.raises(RuntimeError, match="allocate"):
        _ = model.head("0.0").W_O
    with pytest.raises(MemoryError), _blame_config("a folder"):
        raise MemoryError


def test_docstrings_that_transformers_misses_are_said(tiny_gpt2_char):
    done = process("attribute", tiny_gpt2_char, "abc", "--answer", "d", env={"PYTHONOPTIMIZE": "2"})
    assert done.returncode == 2 and "python -OO" in done.stderr and "config.json" not in done.stderr


def test_faults_of_the_package_are_not_taken_for_it(tiny_gpt2_char, monkeypatch):
    def fault(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("ov_circuits.scores.board.Board.computed", fault)
    result = CliRunner().invoke(app, ["heads", str(tiny_gpt2_char)])
    assert isinstance(result.exception, RuntimeError) and str(result.exception) == "a fault"


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"WORLD_SIZE": "x", "RANK": "0"}, "WORLD_SIZE is 'x'"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK is '-1'"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": ""}, "LOCAL_RANK is ''"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR"),
    ],
)
def test_torchruns_variables_half_set_are_said(tiny_gpt2_char, variables, word):
    done = process("heads", tiny_gpt2_char, env=variables)
    assert done.returncode == 2 and word in one_sentence(done.stderr)


def test_a_stop_at_the_very_moment_a_temporary_file_is_made_leaves_none(tmp_path, monkeypatch):
    made = Path.touch

    def stopped(self, *arguments, **options):
        made(self, *arguments, **options)
        raise SystemExit(129)

    monkeypatch.setattr(Path, "touch", stopped)
    with pytest.raises(SystemExit), atomic_path(tmp_path / "table.csv"):
        pytest.fail("never here")
    assert not list(tmp_path.iterdir())


INTERRUPTED = """
import atexit, os, pathlib, sys
from ov_circuits.files import atomic_path
unlink, parent = pathlib.Path.unlink, os.getpid()
def interrupted(self, missing_ok=False):
    pathlib.Path.unlink = unlink
    raise SystemExit(143)
with atomic_path(sys.argv[1]) as temporary:
    if os.fork() == 0:
        atexit._run_exitfuncs()  # its end takes nothing away that is another's
        os._exit(0)
    os.wait()
    assert temporary.exists()
    pathlib.Path.unlink = interrupted
    raise RuntimeError("an error")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork there")
def test_a_signal_that_breaks_off_the_taking_away_leaves_no_file(tmp_path):
    """As of a rank whose neighbour dies: its connection breaks, and torchrun's SIGTERM comes while it ends for that."""
    script = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "out.csv")]
    done = subprocess.run(script, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": _ROOT})
    assert done.returncode == 143 and not list(tmp_path.iterdir()), done.stderr
