"""Hub models against a stand-in of the hub on this machine: names, revisions, gates, what is fetched, broken connections."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ov_circuits as ov
from ov_circuits.cli import app

CircuitsError = ov.CircuitsError


@dataclass
class Hub:
    """What the stand-in serves, and what it was asked for.

    Attributes:
        repositories: name -> revision -> folder.
        gated: names whose files need a token.
        asked: (method, path, Range header) of every request.
        breaks: file name -> how many bytes are sent before the connection is cut, once.
    """

    repositories: dict[str, dict[str, Path]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    breaks: dict[str, int] = field(default_factory=dict)
    tokens: list[str | None] = field(default_factory=list)

    def got(self) -> set[str]:
        """The files whose content was asked for as a whole."""
        return {path.rsplit("/", 1)[1] for method, path, _ in self.asked if method == "GET" and "/resolve/" in path}

    def commit(self, repo: str, revision: str) -> str | None:
        """A revision's commit: a name's, or itself."""
        found = self.repositories.get(repo, {})
        for name in found:
            commit = hashlib.sha1(f"{repo}{name}".encode()).hexdigest()
            if revision in (name, commit):
                return commit
        return None

    def folder(self, repo: str, commit: str) -> Path:
        return next(f for name, f in self.repositories[repo].items() if self.commit(repo, name) == commit)


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None: ...

        def do_HEAD(self) -> None:
            self.answer(send=False)

        def do_GET(self) -> None:
            self.answer(send=True)

        def refuse(self, status: int, code: str, message: str = "") -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", message or code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def answer(self, *, send: bool) -> None:
            path = self.path.partition("?")[0].strip("/")
            hub.asked.append((self.command, path, self.headers.get("Range")))
            hub.tokens.append(self.headers.get("Authorization"))
            if path.startswith("api/models/"):
                return self.info(path.removeprefix("api/models/"))
            repo, _, rest = path.partition("/resolve/")
            revision, _, name = rest.partition("/")
            if repo not in hub.repositories:
                return self.refuse(401, "RepoNotFound", "Repository not found")
            if repo in hub.gated and self.headers.get("Authorization") != "Bearer hf_right":
                return self.refuse(403, "GatedRepo", f"Access to model {repo} is restricted")
            commit = hub.commit(repo, revision)
            if commit is None:
                return self.refuse(404, "RevisionNotFound")
            file = hub.folder(repo, commit) / name
            if not file.is_file():
                return self.refuse(404, "EntryNotFound")
            self.file(file, commit, send=send)

        def info(self, path: str) -> None:
            repo, _, revision = path.partition("/revision/")
            if repo not in hub.repositories:
                return self.refuse(401, "RepoNotFound", "Repository not found")
            commit = hub.commit(repo, revision or "main")
            if commit is None:
                return self.refuse(404, "RevisionNotFound")
            names = sorted(p.name for p in hub.folder(repo, commit).iterdir() if p.is_file())
            content = {
                "id": repo,
                "sha": commit,
                "gated": repo in hub.gated,
                "siblings": [{"rfilename": n} for n in names],
            }
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def file(self, file: Path, commit: str, *, send: bool) -> None:
            data = file.read_bytes()
            whole, start = data, 0
            wanted = self.headers.get("Range")
            if wanted is not None:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start = int(first)
                data = data[start : int(last) + 1 if last else None]
            self.send_response(206 if wanted else 200)
            etag = hashlib.sha256(whole).hexdigest()
            for name, value in {
                "X-Repo-Commit": commit,
                "ETag": f'"{etag}"',
                "X-Linked-ETag": f'"{etag}"',
                "X-Linked-Size": str(len(whole)),
                "Accept-Ranges": "bytes",
                "Content-Length": str(len(data)),
            }.items():
                self.send_header(name, value)
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{start + len(data) - 1}/{len(whole)}")
            self.end_headers()
            if not send:
                return
            cut = hub.breaks.pop(file.name, None)
            self.wfile.write(data if cut is None else data[:cut])
            if cut is not None:
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

    return Handler


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    """A hub of one's own on loopback, with an empty cache."""
    from huggingface_hub import constants

    served = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(served))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    point_at(monkeypatch, f"http://127.0.0.1:{server.server_port}", tmp_path / "cache")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.chdir(tmp_path)
    yield served
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def no_progress(monkeypatch) -> None:
    monkeypatch.setitem(import_module("huggingface_hub.utils.tqdm").progress_bar_states, "_global", False)


def point_at(monkeypatch: pytest.MonkeyPatch, endpoint: str, cache: Path) -> None:
    """What HF_ENDPOINT and HF_HUB_CACHE do when they are set before huggingface_hub is imported."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


def sharded(folder: Path, target: Path, groups: dict[str, Callable[[str], bool]]) -> Path:
    """A folder's tensors in shards, each with the tensors that its rule takes."""
    target.mkdir(parents=True)
    state = load_file(folder / "model.safetensors")
    where = {name: next(shard for shard, rule in groups.items() if rule(name)) for name in state}
    for shard in groups:
        save_file({n: t for n, t in state.items() if where[n] == shard}, target / shard, metadata={"format": "pt"})
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    shutil.copy(folder / "config.json", target)
    return target


_SHARDS: dict[str, Callable[[str], bool]] = {
    "model-00001-of-00003.safetensors": lambda name: "layers.0." in name and "mlp" not in name,
    "model-00002-of-00003.safetensors": lambda name: "mlp" in name,
    "model-00003-of-00003.safetensors": lambda name: True,
}
_MLP = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize("name", ["tiny", "org/tiny-model.v1"])
def test_a_model_by_name(hub, tiny_folders, no_progress, name):
    folder = tiny_folders("llama-grouped")
    hub.repositories[name] = {"main": folder}
    model, right = ov.load(name), ov.load(folder)
    assert model.name == name and model.head("1.1").W_O.equal(right.head("1.1").W_O)
    assert hub.got() == {"config.json", "model.safetensors"}
    before = len(hub.asked)
    assert ov.load(name).head("1.1").W_O.equal(right.head("1.1").W_O)
    assert len(hub.asked) == before, "what is in the cache is not asked for again"


def test_revisions(hub, tiny_folders, no_progress):
    early, late = tiny_folders("llama-grouped"), tiny_folders("llama-one-group")
    hub.repositories["tiny"] = {"main": late, "step1000": early}
    by_option, by_name = ov.load("tiny", revision="step1000"), ov.load("tiny@step1000")
    assert by_option.architecture.n_kv_heads == by_name.architecture.n_kv_heads == 2
    assert by_name.name == "tiny@step1000"
    assert ov.load("tiny").architecture.n_kv_heads == 1
    commit = hub.commit("tiny", "step1000")
    assert ov.load("tiny", revision=commit).architecture.n_kv_heads == 2
    result = CliRunner().invoke(app, ["inspect", "tiny", "--revision", "step1000", "--json"])
    assert result.exit_code == 0, result.output
    with pytest.raises(CircuitsError, match="tiny has no such revision on the hub"):
        ov.load("tiny@step9")
    with pytest.raises(CircuitsError, match="names the revision step1000, and main is asked for"):
        ov.load("tiny@step1000", revision="main")


def test_only_the_shards_that_are_needed_are_fetched(hub, tiny_folders, tmp_path, no_progress):
    folder = tiny_folders("llama-grouped")
    hub.repositories["org/big"] = {"main": sharded(folder, tmp_path / "served", _SHARDS)}
    model, right = ov.load("org/big"), ov.load(folder)
    whole = {path.rsplit("/", 1)[1] for _, path, wanted in hub.asked if "/resolve/" in path and wanted is None}
    assert whole >= {"model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"} and _MLP not in whole
    assert [wanted for _, path, wanted in hub.asked if path.endswith(_MLP)] == ["bytes=0-100000"], "its header alone"
    pd.testing.assert_frame_equal(ov.scoreboard(model, nulls=False), ov.scoreboard(right, nulls=False))
    assert model.source.store.n_parameters == right.source.store.n_parameters
    assert _MLP not in {path.rsplit("/", 1)[1] for _, path, wanted in hub.asked if wanted is None}
    tokens = [1, 5, 7]
    assert torch.equal(model.trace(tokens).logits, right.trace(tokens).logits)
    assert any(path.endswith(_MLP) and wanted is None for _, path, wanted in hub.asked), "a prompt needs it"
    before = len(hub.asked)
    assert torch.equal(ov.load("org/big").trace(tokens).logits, right.trace(tokens).logits)
    assert len(hub.asked) == before


def test_attention_in_the_cache_is_enough_without_a_network(hub, tiny_folders, tmp_path, monkeypatch, no_progress):
    from huggingface_hub import constants

    folder = tiny_folders("llama-grouped")
    hub.repositories["org/big"] = {"main": sharded(folder, tmp_path / "served", _SHARDS)}
    ov.load("org/big")
    right = ov.load(folder)
    del hub.repositories["org/big"]
    with pytest.raises(CircuitsError, match="no model org/big"):
        ov.load("org/big")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.asked)
    model = ov.load("org/big")
    assert model.head("1.1").W_O.equal(right.head("1.1").W_O) and model.has_embeddings
    with pytest.raises(CircuitsError, match=r"lacks layers\.0\.mlp"):
        model.trace([1, 2])
    assert len(hub.asked) == before
    point_at(monkeypatch, f"http://127.0.0.1:{closed_port()}", tmp_path / "cache")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert ov.load("org/big").head("1.1").W_O.equal(right.head("1.1").W_O)


def test_a_shard_that_does_not_hold_what_the_index_says(hub, tiny_folders, tmp_path, no_progress):
    served = sharded(tiny_folders("llama-grouped"), tmp_path / "served", _SHARDS)
    index = json.loads((served / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.mlp.up_proj.weight"] = "model-00001-of-00003.safetensors"
    (served / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.repositories["org/big"] = {"main": served}
    with pytest.raises(CircuitsError, match=r"does not hold the tensor model\.layers\.0\.mlp\.up_proj\.weight"):
        ov.load("org/big")
    index["weight_map"]["model.layers.0.mlp.up_proj.weight"] = "../secret.safetensors"
    (served / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.repositories["org/other"] = {"main": served}
    with pytest.raises(CircuitsError, match="not a file beside it: refused"):
        ov.load("org/other")


def test_a_gated_model_says_what_to_do(hub, tiny_folders, monkeypatch, no_progress):
    from huggingface_hub import constants

    hub.repositories["org/gated"] = {"main": tiny_folders("llama-grouped")}
    hub.gated.add("org/gated")
    with pytest.raises(
        CircuitsError, match=r"org/gated is gated: ask for access at http://127.*/org/gated, .*hf auth login"
    ):
        ov.load("org/gated")
    result = CliRunner().invoke(app, ["heads", "org/gated"])
    assert result.exit_code == 2 and "is gated" in result.stderr and "Traceback" not in result.output
    Path(constants.HF_TOKEN_PATH).write_text("hf_right")
    assert ov.load("org/gated").n_layers == 2


def test_a_name_that_the_hub_does_not_know(hub):
    with pytest.raises(CircuitsError, match=r"the Hugging Face hub has no model no-org/nothing, or it is private"):
        ov.load("no-org/nothing")


def test_a_model_without_weights_or_config(hub, tmp_path, tiny_folders, no_progress):
    (tmp_path / "served").mkdir()
    hub.repositories["org/x"] = {"main": tmp_path / "served"}
    with pytest.raises(CircuitsError, match=r"org/x could not be had .*config\.json is not there"):
        ov.load("org/x")
    shutil.copy(tiny_folders("llama-grouped") / "config.json", tmp_path / "served")
    with pytest.raises(CircuitsError, match=r"org/x could not be had .*no weight file is there"):
        ov.load("org/x")


def test_a_connection_that_breaks_is_taken_up_where_it_broke(hub, tiny_folders, no_progress, monkeypatch, caplog):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)
    folder = tiny_folders("llama-grouped")
    hub.repositories["tiny"] = {"main": folder}
    hub.breaks["model.safetensors"] = 5000
    assert ov.load("tiny").head("1.1").W_O.equal(ov.load(folder).head("1.1").W_O)
    ranges = [wanted for method, path, wanted in hub.asked if method == "GET" and path.endswith("model.safetensors")]
    assert ranges[0] is None and ranges[1] is not None and 0 < int(ranges[1].removeprefix("bytes=").rstrip("-")) <= 5000


def test_an_adapter_on_the_hub(hub, tiny_folders, tmp_path, no_progress):
    base = tiny_folders("llama-grouped")
    made = tmp_path / "lora"
    made.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "org/base"}
    (made / "adapter_config.json").write_text(json.dumps(config))
    stem = "base_model.model.model.layers.0.self_attn.v_proj.lora_"
    factors = {f"{stem}A.weight": torch.ones(2, 32), f"{stem}B.weight": torch.ones(16, 2)}
    save_file(factors, made / "adapter_model.safetensors")
    hub.repositories |= {"org/base": {"main": base}, "org/lora": {"main": made}}
    with pytest.raises(CircuitsError, match="org/base is not complete in the Hugging Face cache"):
        ov.load("org/lora")
    right = ov.load("org/base", view="raw").head("0.0").W_V
    torch.testing.assert_close(ov.load("org/lora", view="raw").head("0.0").W_V, right + 2 * 2.0)


def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_without_a_network_the_sentence_comes_at_once(hub, tmp_path, monkeypatch, caplog):
    """One attempt and no waiting in between: the hub library's own retries sleep for 26 seconds."""
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    point_at(monkeypatch, f"http://127.0.0.1:{closed_port()}", tmp_path / "cache")
    connections = []
    original = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", lambda s, a: (connections.append(a), original(s, a))[1])
    with pytest.raises(CircuitsError, match=r"tiny could not be had from the Hugging Face hub .*network"):
        ov.load("tiny")
    assert sum(slept) < 1
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_hub_that_does_not_answer_is_not_waited_for_long(hub, tmp_path, monkeypatch):
    """A listening port that never answers: patience of a few seconds, not of five attempts."""
    monkeypatch.setattr("ov_circuits.checkpoint.hub._PATIENCE", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        point_at(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path / "cache")
        slept = []
        monkeypatch.setattr(time, "sleep", slept.append)
        with pytest.raises(CircuitsError, match="could not be had"):
            ov.load("tiny")
        assert sum(slept) < 1
