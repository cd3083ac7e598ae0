"""In other people's code: models that are pickled and copied, used from several threads, and whose tensors are written into."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import shutil
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import tiny_model
from torch import Tensor

import ov_circuits as ov
from ov_circuits.report.notebook import _TOKEN_TEXTS
from ov_circuits.report.text import visible

TEXT = "the people of the United States"

# -- copies -----------------------------------------------------------------------------------------------------------


def network() -> Any:
    return tiny_model("gpt2", seed=5)


OPENED: dict[str, Callable[[], ov.Model]] = {
    "embedded": lambda: ov.load(),
    "view": lambda: ov.load(view="raw"),
    "without heads": lambda: ov.load().without(["1.0"]).without(["1.2"]),
    "network": lambda: ov.load(network()),
    "state dict": lambda: ov.load(network().state_dict(), config=network().config),
    "arrays": lambda: ov.load({k: t.numpy() for k, t in network().state_dict().items()}, config=network().config),
}


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("opened", OPENED)
def test_a_copied_model_is_the_same_one(opened: str, copied: Callable[[Any], Any]) -> None:
    model = OPENED[opened]()
    right = model.trace([1, 2, 3]), model.head("1.0").full_ov.singular_values, model.W_E
    found, head = copied([model, model.head("1.0")])
    assert repr(found) == repr(model) and found.source.removed == model.source.removed
    assert head.model is found, "what is copied together stays together"
    assert torch.equal(found.trace([1, 2, 3]).logits, right[0].logits)
    assert torch.equal(head.full_ov.singular_values, right[1]) and torch.equal(found.W_E, right[2])


@pytest.mark.parametrize("name", ["trace", "full_ov", "layer", "embedding", "generation"])
def test_results_are_copied_with_their_model(name: str) -> None:
    model = ov.load()
    results: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "trace": (model.trace(TEXT), lambda trace: trace.ledger(" and")),
        "full_ov": (model.head("1.0").full_ov, lambda circuit: circuit.rows([3, 5])),
        "layer": (model.layer(1), lambda layer: layer.qk.singular_values),
        "embedding": (model.embedding, lambda rows: rows[[3, 5]]),
        "generation": (ov.generate(model, TEXT, 2), lambda generation: generation.frame()),
    }
    result, asked = results[name]
    found, right = asked(pickle.loads(pickle.dumps(result))), asked(result)
    assert found.equals(right) if isinstance(right, pd.DataFrame) else torch.equal(found, right)


def test_a_model_of_a_path_is_found_from_another_folder(
    write_tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(write_tiny("llama"), tmp_path / "here" / "model")
    monkeypatch.chdir(tmp_path / "here")
    pickled = pickle.dumps(ov.load("model"))  # as a name it would be one of the hub's elsewhere
    assert len(pickled) < 2000, "the weights stay where they are"
    monkeypatch.chdir(tmp_path)
    assert pickle.loads(pickled).source.checkpoint.folder == tmp_path / "here" / "model"


def test_another_checkpoint_in_its_place_is_said(write_tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(write_tiny("gpt2", seed=1), folder)
    pickled = pickle.dumps(ov.load(folder).without(["0.1"]).head("1.0"))
    shutil.rmtree(folder)
    shutil.copytree(write_tiny("gpt2", seed=2), folder)
    with pytest.raises(ov.CircuitsError, match="model holds another checkpoint than when this model was pickled"):
        pickle.loads(pickled)
    shutil.rmtree(folder)
    with pytest.raises(ov.CircuitsError, match="does not exist"):
        pickle.loads(pickled)


def test_what_would_be_another_model_is_not_copied(models_dir: Path, bridge_of: Callable[[Path], Any]) -> None:
    hooked, edited, stepped = ov.load(), ov.load(), network()
    hooked.network.transformer.h[0].register_forward_hook(lambda *_: None)
    with torch.no_grad():
        edited.network.transformer.h[0].mlp.c_proj.weight.mul_(2)
    memory = ov.load(stepped)
    with torch.no_grad():
        stepped.transformer.h[0].mlp.c_proj.weight.mul_(2)
    refused = {
        "the network of embedded was changed": [hooked, edited, hooked.trace(TEXT)],
        "were changed after they were opened": [memory],
        "in a TransformerBridge, which cannot be pickled": [ov.load(bridge_of(models_dir / "stories260k"))],
    }
    for message, values in refused.items():
        for value in values:
            with pytest.raises(ov.CircuitsError, match=message):
                pickle.dumps(value)


def _in_child(head: ov.Head) -> list[float]:
    return head.full_ov.singular_values.tolist() + head.model.trace(TEXT).write(head).norm(dim=-1).tolist()


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_other_processes_take_heads(method: str) -> None:
    head = ov.load().head("1.0")
    right = _in_child(head)  # a fork meets a model that was used
    # One thread, as torch's own workers have: a forked child waits for ever for the threads that OpenMP had in its parent.
    with multiprocessing.get_context(method).Pool(1, torch.set_num_threads, (1,)) as pool:
        found = pool.apply_async(_in_child, (head,)).get(120)
    assert found == pytest.approx(right, rel=1e-5)  # with fewer threads float32 is summed in another order


# -- tensors that are written into ------------------------------------------------------------------------------------

GIVEN: dict[str, Callable[[ov.Model], Tensor | None]] = {
    **{name: lambda m, name=name: getattr(m.head("1.0"), name) for name in ("W_Q", "W_K", "W_V", "W_O")},  # type: ignore[misc]
    **{name: lambda m, name=name: getattr(m.head("1.0"), name) for name in ("b_Q", "b_K", "b_V")},  # type: ignore[misc]
    **{name: lambda m, name=name: getattr(m, name) for name in ("W_E", "W_U", "W_pos", "b_U")},  # type: ignore[misc]
    "ov.left": lambda m: m.head("1.0").ov.left,
    "ov.right": lambda m: m.head("1.0").ov.right,
    "qk.left": lambda m: m.head("1.0").qk.left,
    "qk.right": lambda m: m.head("1.0").qk.right,
    "singular values": lambda m: m.head("1.0").full_ov.singular_values,
    "split_W_O": lambda m: m.split_W_O(1),
    "embedding": lambda m: m.embedding[3],
    "unembedding": lambda m: m.unembedding[3:5],
}


def _numbers(model: ov.Model) -> list[Tensor]:
    head, trace = model.head("1.0"), model.trace([1, 2, 3])
    spectra = head.ov.singular_values, head.qk.singular_values, head.full_ov.eigenvalues
    ledger = torch.tensor(trace.ledger(4)["value"].tolist())
    return [*spectra, trace.logits, trace.write(head), trace.value_bias_write(head), ledger]


@pytest.mark.parametrize("view", ["raw", "folded"])
@pytest.mark.parametrize("kind", ["file", "memory"])
@pytest.mark.parametrize("name", GIVEN)
def test_what_a_model_gives_may_be_written_into(
    write_tiny: Callable[..., Path], name: str, kind: str, view: str
) -> None:
    model = ov.load(write_tiny("gpt2", seed=5) if kind == "file" else network(), view=view)
    right = _numbers(model)
    given = GIVEN[name](model)
    if (name, view) == ("b_U", "raw"):
        assert given is None
        return
    assert given is not None
    given.numpy()[:] = 7  # torch does not see it
    assert all(map(torch.equal, _numbers(model), right))
    given.zero_()
    assert all(map(torch.equal, _numbers(model), right))


@pytest.mark.parametrize("name", ["W_Q", "W_K", "W_V", "W_O", "b_Q", "b_V"])
def test_a_layer_that_was_written_into_is_read_anew(name: str) -> None:
    model = ov.load(view="raw")
    right = _numbers(model)
    getattr(model.layer(1), name).mul_(7)
    assert all(map(torch.equal, _numbers(model), right))
    assert model.layer(1) is model.layer(1)


def test_a_trace_may_be_written_into() -> None:
    trace = ov.load().trace(TEXT)
    right, write = trace.ledger(" and"), trace.write("1.0")
    for given in (trace.logits, trace.pattern("1.0"), trace.values("1.0"), trace.write_norms()):
        given.numpy()[:] = 7
    assert trace.ledger(" and").equals(right) and torch.equal(trace.write("1.0"), write)
    assert trace.logits is trace.logits, "one copy, however often it is asked for"


# -- threads ----------------------------------------------------------------------------------------------------------


def test_prompts_of_several_threads_keep_apart() -> None:
    """Hooks are on modules that all threads share: each must meet its own run alone."""
    prompts = [[1 + i, *range(2, 3 + i % 5)] for i in range(16)]
    model = ov.load(network().train())
    right = [ov.load(network()).trace(prompt) for prompt in prompts]
    start = threading.Barrier(4)

    def traced(part: int) -> list[ov.Trace]:
        start.wait()
        return [model.trace(prompt) for prompt in prompts[part::4]]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(traced, range(4)))
    for part, traces in enumerate(found):
        for ours, other in zip(traces, right[part::4], strict=True):
            # float32 may be summed in another order in a pool's threads; what belongs to another run is far off.
            torch.testing.assert_close(ours.logits, other.logits, rtol=1e-4, atol=1e-4)
            for one, two in zip(ours.record.layers, other.record.layers, strict=True):
                torch.testing.assert_close(one.z, two.z, rtol=1e-4, atol=1e-4)
    assert all(module.training for module in model.network.modules())


def test_one_network_is_built_however_many_threads_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    from ov_circuits.trace import engines

    model, built, build = ov.load(), [], engines.build
    monkeypatch.setattr(engines, "build", lambda source: built.append(source) or build(source))  # type: ignore[func-returns-value]
    with ThreadPoolExecutor(4) as pool:
        networks = set(pool.map(lambda _: id(model.network), range(4)))
    assert len(built) == len(networks) == 1


# -- memory -----------------------------------------------------------------------------------------------------------

USES: dict[str, Callable[[ov.Model], object]] = {
    "full circuits": lambda m: m.head("1.0").full_ov.singular_values,
    "embeddings": lambda m: (m.W_E, m.W_U, m.b_U),
    "scoreboard": lambda m: ov.scoreboard(m, "all"),
    "without": lambda m: m.without("1.0").trace(TEXT).write_norms(),
    "ablate": lambda m: ov.ablate(m, ["1.0"], TEXT, answer=" and"),
}


@pytest.mark.parametrize("use", USES)
def test_a_model_goes_with_its_last_holder(use: str) -> None:
    """Weights that hold themselves stay until Python looks for cycles, which no size of a tensor makes it do."""
    gc.collect()
    gc.disable()
    try:
        model = ov.load()
        USES[use](model)
        source, seen = weakref.ref(model.source), weakref.ref(model)
        del model
        assert seen() is None and source() is None
    finally:
        gc.enable()


# -- frames -----------------------------------------------------------------------------------------------------------


def test_what_frames_say_of_themselves_survives_a_file(tmp_path: Path) -> None:
    model = ov.load()
    frames = {
        "space_map": ov.space_map(model),
        "scoreboard": ov.scoreboard(model),
        "composition": ov.composition(model),
        "behaviours": ov.behaviours(model, seeds=1, rows=2),
        "ledger": model.trace(TEXT).ledger(" and"),
        "compare": ov.compare(model, model),
        "copy_table": ov.copy_table(model),
    }
    for name, frame in frames.items():
        file = tmp_path / f"{name}.parquet"
        frame.to_parquet(file)
        assert pd.read_parquet(file).attrs == frame.attrs, name


def test_tables_of_tokens_show_their_spaces() -> None:
    """`` the`` and ``the`` are two tokens, and a browser drops the space."""
    model = ov.load()
    head = model.head("1.0")
    for whole in (
        ov.strongest_token_pairs(model, "1.0", k=3),
        ov.largest_query_key_pairs(model, "1.0", k=3),
        ov.span(head, [0, 1], k=3),
        head.reads(k=3),
        head.writes(" the", k=3),
    ):
        table = whole.head(20)
        texts = table[[name for name in _TOKEN_TEXTS if name in table]].select_dtypes(exclude="number").stack()
        spaced = {text for text in texts if text.startswith(" ")}
        shown = str(table._repr_html_())
        assert spaced and all(f"<td>{visible(text)}</td>" in shown for text in spaced), list(table)
        assert pd.DataFrame(table)._repr_html_().count("<td>") == shown.count("<td>")


def test_a_table_of_tokens_that_was_worked_on_shows_itself() -> None:
    table = ov.strongest_token_pairs(ov.load(), "1.0", k=3)
    numbers = table[["value"]].rename(columns={"value": "token"})
    assert f"<td>{numbers['token'][0]:.6f}</td>" in str(numbers._repr_html_()), "not text, whatever its name"
    assert "<table" in str(pd.concat([table, table], axis=1)._repr_html_())
    assert "<table" in str(table.iloc[:0]._repr_html_())


def test_a_scoreboard_without_rows_shows_itself() -> None:
    assert "<table" in str(ov.scoreboard(ov.load()).query("layer > 99")._repr_html_())
