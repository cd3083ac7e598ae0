"""A bundle: complete, the same twice, and true to the library's own numbers."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from difflib import unified_diff
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import listed

import ov_circuits as ov
from ov_circuits import CircuitsError
from ov_circuits.report import stills as pictures
from ov_circuits.report.bundle import main_figures, write_bundle

needs_browser = pytest.mark.skipif(
    pictures.why_no_stills() is not None and not shutil.which("chromium"), reason="NOT RUN: nothing here draws pictures"
)


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        file.relative_to(folder).as_posix(): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
    }


@pytest.fixture(scope="module")
def story(stories260k):
    model, prompt = ov.load(stories260k), "Once upon a time there was a"
    more = {"prompts": "repeated_tokens", "generation": ov.generate(model, prompt, 2)}
    return model, ov.dashboard(model, model.trace(prompt), " little", " big", **more)


@pytest.fixture(scope="module")
def bundle(story, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle") / "first"
    manifest = write_bundle(story[1], folder)
    return folder, manifest


@needs_browser
def test_a_second_run_gives_the_same_bytes(bundle, stories260k, tmp_path):
    """In a process of its own, from the command line: nothing may come from this one's state."""
    again = tmp_path / "second"
    command = [
        sys.executable,
        "-m",
        "ov_circuits",
        "report",
        str(stories260k),
        "--prompt",
        "Once upon a time there was a",
    ]
    command += ["--answer", " little", "--against", " big", "--prompts", "repeated_tokens", "--generate", "2"]
    command += ["--bundle", str(again)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["second"], "no page beside the bundle, nothing left behind"
    first, second = files_of(bundle[0]), files_of(again)
    assert sorted(first) == sorted(second)
    differ = [name for name in first if first[name] != second[name]]
    assert differ == [], [
        line[:300]
        for name in differ
        if name.endswith(".svg")
        for line in unified_diff(
            *(side[name].decode().replace(">", ">\n").splitlines() for side in (first, second)), n=0
        )
    ]


def test_every_file_is_in_the_manifest_with_its_hash(bundle, stories260k):
    folder, manifest = bundle
    found = files_of(folder)
    assert json.loads(found.pop("manifest.json")) == manifest
    assert manifest["files"] == {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}
    weights = hashlib.sha256((stories260k / "model.safetensors").read_bytes()).hexdigest()
    assert manifest["checkpoint"]["model.safetensors"] == weights
    assert manifest["threads"] == torch.get_num_threads()
    assert manifest["view"] == "folded" and manifest["seeds"] == {"nulls": 0, "probes": list(range(8))}
    assert manifest["versions"]["ov_circuits"] == ov.__version__ and "torch" in manifest["versions"]
    assert manifest["prompt"]["quantity"] == "logit difference ' little' - ' big'"
    assert str(stories260k.parent) not in (folder / "manifest.json").read_text("utf-8")


def test_the_frames_are_the_librarys(bundle, story):
    folder, model, results = bundle[0], story[0], story[1].results
    board = pd.read_parquet(folder / "heads.parquet")
    weights = pd.DataFrame(ov.scoreboard(model, tokens=0))
    pd.testing.assert_frame_equal(board[weights.columns], weights)
    behaviours = ov.behaviours(model)
    both = [column for column in behaviours if column in board]
    pd.testing.assert_frame_equal(board[both], behaviours[both])
    assert len(both) > 20
    sweep = ov.ablation_sweep(model, results.trace, answer=" little", against=" big")
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "ablation.parquet"), sweep)
    examples = listed(pd.read_parquet(folder / "examples.parquet"))
    pd.testing.assert_frame_equal(examples, results.scan.examples)
    assert board.attrs["view"] == "folded"
    composition = ov.composition(model, "all")
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "composition.parquet"), composition)
    account = pd.read_parquet(folder / "account.parquet")
    assert account["value"].sum() == pytest.approx(results.account.attrs["total"])
    pairs = pd.read_parquet(folder / "pairs.parquet")
    alone = ov.strongest_token_pairs(model, "3.6", 6)
    assert pairs[pairs["head"] == "3.6"]["value"].tolist() == alone["value"].tolist()


def test_a_card_stands_alone(bundle, story):
    model = story[0]
    card = json.loads((bundle[0] / "cards" / "3.6.json").read_text("utf-8"))
    head = model.head("3.6")
    assert card["singular_values"] == pytest.approx(head.ov.singular_values.tolist(), rel=1e-4)
    assert card["scores"]["eigen_copying_ov"] == pytest.approx(
        ov.scoreboard(model).set_index("head")["eigen_copying_ov"]["3.6"], rel=1e-4
    )
    first = ov.strongest_token_pairs(model, head, 1).iloc[0]
    assert card["pairs"]["positive"][0] == [first["source"], first["output"], pytest.approx(first["value"], rel=1e-4)]
    assert card["evidence"].startswith("On probe prompts it attends mostly to the token before")
    assert "Its eigenvalues over the vocabulary" in card["evidence"]
    assert {row["kind"] for row in card["text"]["examples"]} == {"strongest", "most negative", "decile"}


@needs_browser
def test_pictures_are_pictures(bundle, story):
    folder = bundle[0] / "figures"
    names = set(main_figures(story[1].results))
    assert {"composition", "waterfall-kind", "attribution-map", "spaces-write", "spaces-read"} < names
    assert {"map-induction", "ablation", "prompt-set", "continuation", "scan-loss"} < names
    assert sum(name.endswith("-distances") for name in names) == 1
    assert {file.name for file in folder.iterdir()} == {f"{name}.{end}" for name in names for end in ("svg", "png")}
    for name in names:
        svg = (folder / f"{name}.svg").read_text("utf-8")
        assert svg.startswith("<svg") and svg.rstrip().endswith("</svg>")
        png = (folder / f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG") and len(png) > 5000
    assert "little" in (folder / "waterfall-kind.svg").read_text("utf-8")


@needs_browser
def test_no_text_ends_the_page_that_draws(story):
    figure = main_figures(story[1].results)["composition"].update_layout(title="<!--<script></script> &amp; &lt;b&gt;")
    drawn = pictures.stills({"x": figure})
    assert drawn["x.png"].startswith(b"\x89PNG") and drawn["x.svg"].startswith(b"<svg")
    assert b"<script" not in drawn["x.svg"]


def test_without_a_browser_the_rest_is_written_and_what_to_install_is_said(gpt_nano_sort, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "_browser", lambda: None)
    monkeypatch.setattr(pictures, "_has_kaleido", lambda: False)
    manifest = write_bundle(ov.dashboard(ov.load(gpt_nano_sort)), tmp_path / "made")
    assert "install Chromium, or kaleido" in manifest["left_out"]["figures"]
    assert not (tmp_path / "made" / "figures").exists() and (tmp_path / "made" / "report.html").is_file()
    with pytest.raises(CircuitsError, match="install Chromium"):
        pictures.stills({})


def test_a_browser_that_fails_is_said_and_nothing_is_left(gpt_nano_sort, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "_browser", lambda: sys.executable)
    monkeypatch.setattr(pictures, "_has_kaleido", lambda: False)
    with pytest.raises(CircuitsError, match="did not draw the figures"):
        pictures.stills(main_figures(ov.dashboard(ov.load(gpt_nano_sort)).results))


def test_an_older_bundle_is_replaced_and_other_folders_are_refused(gpt_nano_sort, tmp_path, monkeypatch):
    monkeypatch.setattr("ov_circuits.report.bundle.why_no_stills", lambda: "not here")
    page = ov.dashboard(ov.load(gpt_nano_sort))
    folder = tmp_path / "made"
    write_bundle(page, folder)
    (folder / "cards" / "9.9.json").write_text("of an older model")
    (folder / "mine.txt").write_text("kept")
    write_bundle(page, folder)
    assert not (folder / "cards" / "9.9.json").exists() and (folder / "mine.txt").read_text() == "kept"
    for wrong, message in (
        (tmp_path, "no bundle"),
        (folder / "mine.txt", "is a file"),
        (tmp_path / "a" / "b", "does not exist"),
    ):
        with pytest.raises(CircuitsError, match=message):
            write_bundle(page, wrong)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["made"]


@pytest.mark.parametrize(("options", "message"), [
    (["--pairs", "some"], "a number of heads or all"),
    (["--scores", " , "], "names no score"),
    (["--scores", "copyng"], "there is no score"),
])  # fmt: skip
def test_the_command_refuses_in_a_sentence(options, message, tmp_path):
    from typer.testing import CliRunner

    from ov_circuits.cli import app

    result = CliRunner().invoke(app, ["report", "-o", str(tmp_path / "page.html"), *options])
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []
