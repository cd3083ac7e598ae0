"""Copying scores against their definitions, written out densely in float64 or with the reference library's own modules."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import hf_model
from safetensors.torch import load_file, save_file
from torch import Tensor

import ov_circuits as ov
from ov_circuits.scores.copy_table import copy_table, disagreements
from ov_circuits.scores.copying import _standard_error, ioi_copying, ioi_negative_copying, rank_copying
from ov_circuits.scores.sources import SOURCES, source_embedding


def views(folder: Path) -> list[str]:
    return ["raw", "folded", *(["centred"] if ov.load(folder).architecture.norm == "LayerNorm" else [])]


# -- source embeddings ------------------------------------------------------------------------------------------------


def reference_source(folder: Path, source: str) -> Tensor:
    """X by the reference library's own modules, float64, raw stream."""
    model = hf_model(folder).double()
    gpt2 = model.config.model_type == "gpt2"
    block = model.transformer.h[0] if gpt2 else model.model.layers[0]
    embedding = (model.transformer.wte if gpt2 else model.model.embed_tokens).weight.detach()
    mlp_norm = block.ln_2 if gpt2 else block.post_attention_layernorm
    with torch.no_grad():
        m = embedding
        if source == "effective":
            if gpt2:
                d = embedding.shape[1]
                normed = block.ln_1(embedding) - block.ln_1.bias
                # All heads at once: concatenated values times W_O.
                m = m + normed @ block.attn.c_attn.weight[:, 2 * d :] @ block.attn.c_proj.weight
            else:
                attention = block.self_attn
                values = block.input_layernorm(embedding) @ attention.v_proj.weight.T
                a = model.config
                head = torch.arange(a.num_attention_heads) // (a.num_attention_heads // a.num_key_value_heads)
                per_head = values.reshape(len(m), a.num_key_value_heads, -1)[:, head]
                m = m + per_head.reshape(len(m), -1) @ attention.o_proj.weight.T
        written = block.mlp(mlp_norm(m))
    return {"embed": embedding, "embed_mlp0": written}.get(source, m + written)


@pytest.mark.parametrize("source", SOURCES)
def test_sources_are_what_the_model_computes(
    running_folder: Path, source: str, assert_close: Callable[..., None]
) -> None:
    right = reference_source(running_folder, source)
    for view in views(running_folder):
        ours = source_embedding(ov.load(running_folder, view=view), source)
        expected = right - right.mean(1, keepdim=True) if view == "centred" else right
        assert_close(ours, expected, 2e-5)


def test_a_few_tokens_are_rows_of_the_whole(runnable_model: Path, assert_close: Callable[..., None]) -> None:
    model = ov.load(runnable_model)
    tokens = torch.tensor([2, 0, 2])
    for source in SOURCES:
        assert_close(source_embedding(model, source, tokens), source_embedding(model, source)[tokens], 1e-5)


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_fast"])
def test_the_configs_activation_is_used(
    write_tiny: Callable[..., Path], activation: str, assert_close: Callable[..., None]
) -> None:
    folder = write_tiny("gpt2", activation_function=activation)
    assert_close(
        source_embedding(ov.load(folder, view="raw"), "embed_mlp0"), reference_source(folder, "embed_mlp0"), 2e-5
    )


def test_mlp_biases_of_llama_are_used(write_tiny: Callable[..., Path], assert_close: Callable[..., None]) -> None:
    folder = write_tiny("llama", mlp_bias=True)
    assert_close(source_embedding(ov.load(folder), "embed_mlp0"), reference_source(folder, "embed_mlp0"), 2e-5)


def test_an_unknown_source_names_the_nearest(tiny_gpt2_char: Path) -> None:
    with pytest.raises(ov.CircuitsError, match="did you mean 'embed_mlp0'"):
        rank_copying(ov.load(tiny_gpt2_char), source="embed_mpl0")


def test_attention_alone_says_what_is_missing(gpt2_small_attention: Path) -> None:
    model = ov.load(gpt2_small_attention)
    for score in (rank_copying, ioi_copying, copy_table):
        with pytest.raises(ov.CircuitsError, match=r"attention weights only|no tokenizer"):
            score(model)


# -- rank copying -----------------------------------------------------------------------------------------------------


def dense_scores(logits: Tensor) -> dict[str, float]:
    """All rank scores from the whole matrix [n_vocab, n_vocab]; places are found by sorting."""
    order = logits.argsort(dim=1, descending=True)
    place = (order == torch.arange(len(logits))[:, None]).double().argmax(dim=1).double()
    last = len(logits) - 1
    scores = {f"rank_copying_{k}": float((place < k).double().mean()) for k in (1, 5, 10)}
    scores |= {f"rank_suppression_{k}": float((last - place < k).double().mean()) for k in (1, 5, 10)}
    scores |= {"mean_rank": float(place.mean()), "median_rank": float(place.quantile(0.5))}
    return scores | {
        "suppression_mean_rank": float((last - place).mean()),
        "suppression_median_rank": float((last - place).quantile(0.5)),
    }


def dense_ov(right: Any, layer: int, head: int, view: str) -> Tensor:
    W_V = right.view_reader(right.reader(layer, "V", right.kv_head(head)), right.norm(layer)[0], view)
    return W_V @ right.view_writer(right.W_O(layer, head), view)


@pytest.mark.parametrize("source", ["embed", "effective"])
def test_rank_copying_of_every_head(running_folder: Path, source: str, reference: Callable[[Path], Any]) -> None:
    right = reference(running_folder)
    X = reference_source(running_folder, source)
    for view in views(running_folder):
        frame = rank_copying(ov.load(running_folder, view=view), source=source, ranks=True)
        W_U = right.view_reader(right.W_U, right.final_norm()[0], view)
        for row in frame.to_dict("records"):
            logits = right.view_writer(X, view) @ dense_ov(right, row["layer"], row["index"], view) @ W_U
            for name, value in dense_scores(logits).items():
                # Single places may differ where float32 weights put two logits closer than their rounding.
                allowed = 1.01 if "median" in name else 0.03 if "mean" in name else 1.01 / len(X)
                assert row[name] == pytest.approx(value, abs=allowed), (row["head"], name)


def test_members_without_and_with_full_ranks_agree(runnable_model: Path) -> None:
    model = ov.load(runnable_model)
    fast, full = rank_copying(model), rank_copying(model, ranks=True)
    assert fast.equals(full[fast.columns])


def test_a_list_of_heads_scores_their_sum(stories260k: Path, reference: Callable[[Path], Any]) -> None:
    right, model = reference(stories260k), ov.load(stories260k)
    frame = rank_copying(model, heads=["1.4", "1.7", "1.0"])
    summed = sum(dense_ov(right, 1, head, "folded") for head in (4, 7, 0))
    expected = dense_scores(right.W_E @ summed @ right.view_reader(right.W_U, right.final_norm()[0], "folded"))
    assert frame["head"].tolist() == ["1.4+1.7+1.0"]
    assert frame["layer"].tolist() == [1]
    assert frame["index"].isna().all()
    for k in (1, 5, 10):
        assert frame[f"rank_copying_{k}"][0] == pytest.approx(expected[f"rank_copying_{k}"], abs=1.01 / 512)


def test_each_scores_them_one_by_one(stories260k: Path) -> None:
    model = ov.load(stories260k)
    every = rank_copying(model).set_index("head")
    some = rank_copying(model, heads=["3.6", "L1H3"], each=True).set_index("head")
    assert some.equals(every.loc[["3.6", "1.3"]])
    assert rank_copying(model, heads=["3.6"]).set_index("head").equals(every.loc[["3.6"]])
    assert rank_copying(model, heads=["0.1", "3.6"])["layer"].isna().all()


@pytest.mark.parametrize("heads", [[], ["0.1", "L0H1"], ["9.9"]])
def test_heads_that_are_none_or_twice(stories260k: Path, heads: list[str]) -> None:
    with pytest.raises(ov.CircuitsError):
        rank_copying(ov.load(stories260k), heads=heads)


def test_a_sample_of_ranks_is_within_its_error(stories260k: Path) -> None:
    model = ov.load(stories260k)
    full, sample = rank_copying(model, ranks=True), rank_copying(model, ranks=200, seed=3)
    for end in ("mean_rank", "suppression_mean_rank"):
        z = (sample[end] - full[end]) / sample[f"{end}_error"]
        assert z.abs().max() < 4.5
        assert 0.6 < float(z.std()) < 1.5
    assert sample.equals(rank_copying(model, ranks=200, seed=3))
    assert sample["rank_copying_5"].equals(full["rank_copying_5"]), "shares stay exact"


def test_the_induction_heads_of_the_char_model_copy(tiny_gpt2_char: Path) -> None:
    frame = rank_copying(ov.load(tiny_gpt2_char)).set_index("head")
    assert (frame.loc[["1.0", "1.1", "1.2", "1.3"], "rank_copying_1"] > 0.85).all()
    assert (frame.loc[["0.0", "0.1", "0.2", "0.3"], "rank_copying_1"] < 0.2).all()


def test_results_say_what_they_are(stories260k: Path) -> None:
    attrs = rank_copying(ov.load(stories260k, view="raw"), heads=["0.0"], source="embed_mlp0").attrs
    assert (attrs["view"], attrs["source_embedding"]) == ("raw", "embed_mlp0")
    assert "McDougall" in attrs["source"] and attrs["definition"]


@pytest.fixture
def broken_head(stories260k: Path, tmp_path: Path) -> Path:
    """A copy in which head 2.3 writes NaN and head 1.1 writes nothing."""
    shutil.copytree(stories260k, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    prefix = next(name for name in tensors if name.endswith("layers.2.self_attn.o_proj.weight")).removesuffix(
        "2.self_attn.o_proj.weight"
    )
    tensors[f"{prefix}2.self_attn.o_proj.weight"][5, 3 * 8 + 1] = math.nan
    tensors[f"{prefix}1.self_attn.o_proj.weight"][:, 8:16] = 0
    save_file(tensors, file, metadata={"format": "pt"})
    return tmp_path / "model"


def test_nan_stays_with_its_head(broken_head: Path, stories260k: Path) -> None:
    whole, broken = rank_copying(ov.load(stories260k)), rank_copying(ov.load(broken_head))
    scores = [f"rank_{end}_{k}" for end in ("copying", "suppression") for k in (1, 5, 10)]
    nan = broken.set_index("head")[scores].isna().all(axis=1)
    assert nan[nan].index.tolist() == ["2.3"]
    others = ~whole["head"].isin(["2.3", "1.1"])
    assert whole[others].equals(broken[others])
    assert (broken.set_index("head").loc["1.1", scores] == 1).all(), "a head that writes nothing ties on both sides"
    names = ["Lily", "Tim", "day", "the"]
    ioi = ioi_copying(ov.load(broken_head), names=names).set_index("head")["ioi_copying"]
    assert ioi[ioi.isna()].index.tolist() == ["2.3"]


def test_every_number_over_tokens_has_its_chance(stories260k: Path) -> None:
    """Ranks drawn at random many times over: what each number would be, and how much it would vary."""
    model = ov.load(stories260k)
    n, m, draws = model.architecture.n_vocab, 3, 4000  # so few that the median's spread is not yet its limit's
    frame = rank_copying(model, ["1.4", "1.7"], ranks=m)
    ranks = torch.randint(n, (draws, n), generator=torch.Generator().manual_seed(0)).double()
    drawn = {f"rank_copying_{k}": (ranks < k).double().mean(1) for k in (1, 5, 10)}
    drawn |= {"mean_rank": ranks[:, :m].mean(1), "suppression_median_rank": ranks[:, :m].quantile(0.5, dim=1)}
    for name, values in drawn.items():
        error = float(values.std()) / draws**0.5
        assert abs(float(frame[f"{name}_null_mean"][0]) - float(values.mean())) < 5 * error, name
        z = (float(frame[name][0]) - float(frame[f"{name}_null_mean"][0])) / float(values.std())
        assert float(frame[f"{name}_z"][0]) == pytest.approx(z, rel=0.06), name
    assert not [name for name in rank_copying(model, ["1.4"], nulls=False) if name.endswith(("_z", "_null_mean"))]
    ioi = ioi_copying(model, names=["Lily", "Tim"])
    assert (ioi["ioi_copying_null_mean"] == 5 / n).all() and ioi["ioi_copying_z"].notna().all()


def test_the_error_of_a_sample_is_that_of_all_samples_that_could_be_drawn() -> None:
    ranks = torch.tensor([0, 3, 4, 11, 12, 40])
    samples = [ranks[list(chosen)] for chosen in combinations(range(6), 4)]
    spread = torch.stack([sample.double().mean() for sample in samples]).var(correction=0)
    squared = [_standard_error(sample, len(ranks)) ** 2 for sample in samples]
    assert sum(squared) / len(samples) == pytest.approx(float(spread), rel=1e-12)
    assert _standard_error(ranks, len(ranks)) == 0


def test_a_list_of_names_is_stripped_and_not_empty(tiny_gpt2_char: Path) -> None:
    model = ov.load(tiny_gpt2_char)
    assert ioi_copying(model, names=["a", " a", "b "]).attrs["names"] == 2
    with pytest.raises(ov.CircuitsError, match="list of names is empty"):
        ioi_copying(model, names=[])


# -- names ------------------------------------------------------------------------------------------------------------


def reference_ioi(folder: Path, right: Any, layer: int, head: int, ids: list[int], sign: int, folded: bool) -> float:
    """Name by name, with the reference library's own final norm."""
    model = hf_model(folder).double()
    final = model.transformer.ln_f if right.is_gpt2 else model.model.norm
    stream = reference_source(folder, "embed_plus_mlp0")
    gain = right.norm(layer)[0] if folded else torch.ones(right.d_model, dtype=torch.float64)
    hits = 0
    for token in ids:
        x = stream[token]
        if right.is_gpt2:
            x = x - x.mean()
        x = x / (x.square().mean() + final.eps if right.is_gpt2 else x.square().mean() + final.variance_epsilon).sqrt()
        written = sign * (x * gain) @ right.reader(layer, "V", right.kv_head(head)) @ right.W_O(layer, head)
        with torch.no_grad():
            logits = final(written[None])[0] @ right.W_U
        hits += token in logits.topk(5).indices.tolist()
    return hits / len(ids)


@pytest.mark.parametrize("name", ["stories260k", "tiny-gpt2-char"])
def test_ioi_scores_of_every_head(models_dir: Path, name: str, reference: Callable[[Path], Any]) -> None:
    folder = models_dir / name
    right = reference(folder)
    names = ["a", "b", "e", "T", "s", "w", "f", "L"]
    for view in views(folder):
        model = ov.load(folder, view=view)
        # One tokenizer puts the space before a word itself, the other knows no word with a space.
        ids = [model.tokenizer.encode(name)[0] for name in names]
        positive = ioi_copying(model, names=names)
        negative = ioi_negative_copying(model, names=names)
        assert (positive.attrs["names"], positive.attrs["dropped"]) == (8, [])
        for row in positive.index[:: 1 if len(positive) < 10 else 7]:
            layer, index = int(positive["layer"][row]), int(positive["index"][row])
            for frame, sign in ((positive, 1), (negative, -1)):
                expected = reference_ioi(folder, right, layer, index, ids, sign, folded=view != "raw")
                column = "ioi_copying" if sign > 0 else "ioi_negative_copying"
                assert frame[column][row] == pytest.approx(expected), (view, frame["head"][row], sign)


def test_names_of_several_tokens_are_dropped_and_named(tiny_gpt2_char: Path) -> None:
    model = ov.load(tiny_gpt2_char)
    assert ioi_copying(model, names=["a", "Mary", "b"]).attrs["dropped"] == ["Mary"]
    with pytest.raises(ov.CircuitsError, match="Mary"):
        ioi_copying(model, names=["Mary", "John"])


def test_names_from_a_file(tiny_gpt2_char: Path, tmp_path: Path) -> None:
    model, file = ov.load(tiny_gpt2_char), tmp_path / "n.csv"
    file.write_text("# mine\nname\na\nb\n")
    assert ioi_copying(model, names=file).attrs["names"] == 2
    file.write_text("a\nb\n")
    with pytest.raises(ov.CircuitsError, match="first line"):
        ioi_copying(model, names=file)
    with pytest.raises(ov.CircuitsError, match="cannot be read"):
        ioi_copying(model, names=tmp_path / "none.csv")


# -- the table --------------------------------------------------------------------------------------------------------


def test_the_copy_table_holds_every_score(stories260k: Path, tiny_gpt2_char: Path) -> None:
    model = ov.load(stories260k)
    table = copy_table(model)
    assert table["head"].tolist() == model.head_labels
    board = ov.scoreboard(model, ["eigen_copying_ov", "eigen_copying_full"], tokens=0)
    for name in ("eigen_copying_ov", "eigen_copying_full"):
        assert table[name].equals(board[name])
    assert table["rank_copying_5"].equals(rank_copying(model)["rank_copying_5"])
    assert {"ioi_copying", "ioi_negative_copying", "relation_copying_names"} <= set(table)
    without_names = copy_table(ov.load(tiny_gpt2_char))
    assert "ioi_copying" in without_names.attrs["left_out"]
    assert "ioi_copying" not in without_names


def test_disagreements_are_spreads_of_places(tiny_gpt2_char: Path) -> None:
    table = copy_table(ov.load(tiny_gpt2_char))
    found = disagreements(table).set_index("head")
    # 0.3 has the highest eigenvalue copying in the residual stream and the lowest over the vocabulary.
    assert found.index[0] == "0.3"
    assert found.loc["0.3", "spread"] == 1
    assert (found.loc["0.3", "high"], found.loc["0.3", "low"]) == ("eigen_copying_ov", "eigen_copying_full")
    assert found["spread"].is_monotonic_decreasing
    assert "directions" in found.loc["0.3", "reason"]
    for label, row in table.set_index("head").iterrows():
        below = sum(row["eigen_copying_full"] > table["eigen_copying_full"])
        assert found.loc[label, "place_eigen_copying_full"] == pytest.approx(below / (len(table) - 1))


def test_disagreement_takes_two_scores(tiny_gpt2_char: Path) -> None:
    table = copy_table(ov.load(tiny_gpt2_char))
    with pytest.raises(ov.CircuitsError, match="two scores"):
        disagreements(table[["head", "layer", "index", "eigen_copying_ov"]])
