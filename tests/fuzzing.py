"""Thousands of damaged, lying and hostile checkpoints, made from seeds, each opened and read: the process that test_fuzz.py runs.

``python fuzzing.py FOLDER SCALE`` writes FOLDER/report.json; OV_CIRCUITS_FUZZ_SEED gives other cases. The address space may grow
by 1 GB, a case may take 10 seconds, and a file named ``canary`` must not come into being: every pickle here tries to make one.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import ov_circuits as ov
from ov_circuits.checkpoint.families import family_of

SECONDS, BYTES = 10, 2**30
SEED = os.environ.get("OV_CIRCUITS_FUZZ_SEED", "0")
HEADER = 2500  # where most files say what is in them
ODD: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        3,
        7,
        2**31,
        2**63,
        2**70,
        10**400,
        -(2**63),
        0.5,
        1e308,
        float("nan"),
        float("inf"),
    ),
    *(
        "",
        "x",
        "gpt2",
        "llama",
        "\0",
        "\ud800",
        "a" * 1000,
        [],
        {},
        [1],
        [[[[]]]],
        {"a": {"b": []}},
        "../x",
        "/etc/passwd",
    ),
]
NUMBERS = [0, 1, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1]

GPT2 = dict(model_type="gpt2", n_embd=8, n_head=2, n_layer=2, n_positions=8, vocab_size=11, tie_word_embeddings=False)
LLAMA = dict(
    model_type="llama",
    hidden_size=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    intermediate_size=16,
    vocab_size=12,
    max_position_embeddings=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)


# -- the good files that are damaged ------------------------------------------------------------------------------------------


def tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    family = family_of(config, "here")
    shapes = family.shapes(family.architecture(config), config)
    generator = torch.Generator().manual_seed(0)
    named = shapes.attention | shapes.embeddings | shapes.mlps
    return {
        name if name.startswith("lm_head") else family.prefix + name: torch.randn(shape, generator=generator)
        for name, shape in named.items()
    }


def tokenizer() -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {c: i for i, c in enumerate(["<unk>", *"abcdefgh", "ab", "abc"])}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("ab", "c")], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("z", "a")])
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits()])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return str(backend.to_str())


def folder(target: Path, config: dict[str, Any], kind: str) -> Path:
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(config))
    (target / "tokenizer.json").write_text(tokenizer())
    state = tensors(config)
    if kind == "safetensors":
        save_file(state, target / "model.safetensors")
    elif kind == "index":
        names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        parts = [dict(list(state.items())[i::2]) for i in range(2)]
        for name, part in zip(names, parts, strict=True):
            save_file(part, target / name)
        where = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    else:
        torch.save(state, target / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "torch")
    return target


def gguf_file(target: Path) -> Path:
    import gguf

    target.mkdir(parents=True)
    writer = gguf.GGUFWriter(str(target / "x.gguf"), "llama")
    writer.add_block_count(1)
    writer.add_context_length(8)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "cc"])
    writer.add_array("tokenizer.ggml.scores", [0.0, 1.0, 2.0])
    shapes = {"token_embd": (12, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {f"blk.0.{n}": (32, 32) for n in ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    shapes |= {f"blk.0.{n}": (16, 32) for n in ("attn_k", "attn_v")}
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator).numpy()
        stored = gguf.GGMLQuantizationType.Q8_0 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def foreign(target: Path) -> dict[str, Path]:
    """The files of other programs, by kind; see foreign_files.py."""
    import foreign_files as made

    save = target / "llama"
    config = LLAMA | {"head_dim": 2, "tie_word_embeddings": False, "rope_parameters": {"rope_theta": 10000.0}}
    folder(save, config, "safetensors")
    gpt2 = folder(target / "gpt2", GPT2 | {"layer_norm_epsilon": 1e-5}, "safetensors")
    (target / "llama2c").mkdir()
    made.write_llama2c(save, target / "llama2c" / "x.bin")
    pieces = ["<unk>", "\n<s>\n", "\n</s>\n", *"abcdefgh", "ab"]
    data = b"".join(struct.pack("<fi", -i, len(p)) + p.encode() for i, p in enumerate(pieces))
    (target / "llama2c" / "tokenizer.bin").write_bytes(struct.pack("<i", 7) + data)
    (target / "nanogpt").mkdir()
    made.write_nanogpt(gpt2, target / "nanogpt" / "ckpt.pt")
    made.write_meta(save, target / "meta", 2)
    made.write_megatron(gpt2, target / "megatron", 2)
    adapter = target / "adapter"
    adapter.mkdir()
    said = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "base_model_name_or_path": str(save),
        "alpha_pattern": {"v_proj": 3},
    }
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    stem = "base_model.model.model.layers.0.self_attn."
    factors = {
        f"{stem}{p}_proj.lora_{f}.weight": torch.ones(s)
        for p, n in (("v", 4), ("o", 8))
        for f, s in (("A", (2, 8)), ("B", (n, 2)))
    }
    save_file(factors, adapter / "adapter_model.safetensors")
    return {
        "llama2c": target / "llama2c",
        "nanogpt": target / "nanogpt",
        "meta": target / "meta",
        "megatron": target / "megatron",
        "adapter": adapter,
    }


# -- damage -------------------------------------------------------------------------------------------------------------------


def flipped(data: bytes, rng: random.Random, within: int | None = None) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(min(len(data), within or len(data)))
        damaged[at] = damaged[at] ^ (1 << rng.randrange(8)) if rng.random() < 0.7 else rng.randrange(256)
    return bytes(damaged)


def lying(data: bytes, rng: random.Random, within: int) -> bytes:
    """A number in the header that is another one."""
    size = rng.choice((4, 8))
    at = rng.randrange(max(min(len(data), within) - size, 1))
    number = rng.choice(NUMBERS) % 2 ** (8 * size)
    return data[:at] + number.to_bytes(size, "little") + data[at + size :]


def spliced(data: bytes, rng: random.Random) -> bytes:
    a, b = sorted(rng.randrange(len(data)) for _ in range(2))
    return rng.choice((data[:a] + data[b:], data[:b] + data[a:], data[:a] + bytes(b - a) + data[b:]))


def boundaries(data: bytes) -> list[int]:
    """Where parts of a file meet: its ends, its header's, the records of a zip archive, JSON's brackets in a header."""
    found = {0, 1, 4, 7, 8, 9, 16, 24, 28, 32, 255, 256, 257, len(data) - 1, len(data) // 2}
    if len(data) > 8:
        header = struct.unpack("<Q", data[:8])[0]
        found |= {header + 8 + d for d in (-1, 0, 1)}
    for mark in (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08", b"}", b"blk.", b"llama.", b"general."):
        at = data.find(mark)
        while at >= 0:
            found |= {at, at + len(mark)}
            at = data.find(mark, at + 1)
    return sorted(n for n in found if 0 <= n < len(data))


def nodes(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a JSON value: what holds it, and its key there."""
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    for key, inner in items:
        yield node, key
        yield from nodes(inner)


def changed_json(data: bytes, rng: random.Random) -> bytes:
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 2))):
        places = list(nodes(value))
        if not places:
            break
        node, key = rng.choice(places)
        change = rng.random()
        if change < 0.15:
            del node[key]
        elif change < 0.25 and isinstance(node, dict):
            node[str(rng.choice(ODD))[:20]] = node[key]
        else:
            node[key] = rng.choice(ODD)
    return json.dumps(value).encode()


def fresh(source: Path, here: Path) -> None:
    """A copy of the good files; they are linked, so whoever changes one takes it away first."""
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(source, here, copy_function=os.link)


class Attack:
    """Unpickling runs a command."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


def attacks(canary: Path) -> list[Any]:
    touch = f"touch {canary}"
    code = f"open({str(canary)!r}, 'w')"
    return [
        Attack(os.system, touch),
        Attack(eval, code),
        Attack(exec, code),
        Attack(open, str(canary), "w"),
        Attack(os.popen, touch),
        Attack(getattr, os, "system"),
        Attack(__import__, "os"),
        Attack(pickle.loads, pickle.dumps(Attack(os.system, touch))),
        Attack(torch.load, io.BytesIO()),
        Attack(Path.touch, canary),
        Attack(shutil.copy, sys.executable, str(canary)),
        Attack(torch.hub.load, str(canary), "x"),
    ]


# -- cases --------------------------------------------------------------------------------------------------------------------

Case = tuple[str, Callable[[], Path]]


def cases(work: Path, scale: float) -> Iterator[Case]:
    """Every case: its kind, and what puts its files there."""
    good = work / "good"
    here = work / "case"
    canary = work / "canary"
    sources: dict[str, tuple[Path, list[str], str | None]] = {
        "safetensors": (folder(good / "safetensors", GPT2, "safetensors"), ["model.safetensors"], None),
        "index": (
            folder(good / "index", LLAMA, "index"),
            ["model.safetensors.index.json", "model-00001-of-00002.safetensors"],
            None,
        ),
        "torch": (folder(good / "torch", GPT2, "torch"), ["pytorch_model.bin"], None),
        "old torch": (folder(good / "old", LLAMA, "old torch"), ["pytorch_model.bin"], None),
        "config": (folder(good / "config", LLAMA, "safetensors"), ["config.json"], None),
        "gpt2 config": (folder(good / "gpt2config", GPT2, "safetensors"), ["config.json"], None),
        "tokenizer": (folder(good / "tokenizer", LLAMA, "safetensors"), ["tokenizer.json"], None),
        "gguf": (gguf_file(good / "gguf"), ["x.gguf"], "x.gguf"),
    }
    others = foreign(good / "foreign")
    sources |= {
        "llama2c": (others["llama2c"], ["x.bin", "tokenizer.bin"], "x.bin"),
        "nanogpt": (others["nanogpt"], ["ckpt.pt"], None),
        "meta": (others["meta"], ["params.json", "consolidated.00.pth", "consolidated.01.pth"], None),
        "megatron": (others["megatron"], ["mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"], None),
        "adapter": (others["adapter"], ["adapter_config.json", "adapter_model.safetensors"], None),
    }

    def put(kind: str, name: str, change: Callable[[bytes], bytes]) -> Callable[[], Path]:
        source, _, opened = sources[kind]

        def make() -> Path:
            fresh(source, here)
            file = here / name
            data = file.read_bytes()
            file.unlink()
            file.write_bytes(change(data))
            return here / opened if opened else here

        return make

    for kind, (source, names, _) in sources.items():
        for name in names:
            data = (source / name).read_bytes()
            rng = random.Random(f"{SEED} {kind} {name}")
            if name.endswith(".json"):
                for _ in range(int(scale * 110)):
                    seed = rng.random()
                    yield (
                        kind,
                        put(
                            kind,
                            name,
                            lambda d, s=seed: changed_json(d, random.Random(s)),
                        ),
                    )
            n = int(scale * (45 if name.endswith(".json") else 60))
            for _ in range(n):
                seed = rng.random()
                yield kind, put(kind, name, lambda d, s=seed: flipped(d, random.Random(s)))
                if name.endswith(".json"):
                    continue
                yield kind, put(kind, name, lambda d, s=seed: flipped(d, random.Random(s), HEADER))
                yield kind, put(kind, name, lambda d, s=seed: lying(d, random.Random(s), HEADER))
            for _ in range(int(scale * 12)):
                seed = rng.random()
                yield kind, put(kind, name, lambda d, s=seed: spliced(d, random.Random(s)))
            cuts = boundaries(data)
            for cut in rng.sample(cuts, min(len(cuts), int(scale * 25))):
                yield kind, put(kind, name, lambda d, c=cut: d[:c])
    yield from pickles(sources, here, canary)
    yield from settings(sources, here, int(scale * 150))
    yield from archives(good / "torch", here)
    yield from links(good, here)
    yield from numbers(good, here)


def pickles(sources: dict[str, Any], here: Path, canary: Path) -> Iterator[Case]:
    """Pickles that run something, in every place where one is read."""
    places = [("torch", "pytorch_model.bin"), ("nanogpt", "ckpt.pt"), ("meta", "consolidated.01.pth")]
    places += [("megatron", "mp_rank_01/model_optim_rng.pt")]

    def make(kind: str, name: str, attack: Any, form: str) -> Callable[[], Path]:
        def put() -> Path:
            fresh(sources[kind][0], here)
            content = torch.load(here / name, weights_only=False)
            content["args" if form == "args" else "extra"] = attack
            (here / name).unlink()
            if form == "bare":
                (here / name).write_bytes(pickle.dumps(content, protocol=2))
            else:
                torch.save(content, here / name, _use_new_zipfile_serialization=form != "legacy")
            return here

        return put

    for kind, name in places:
        for attack in attacks(canary):
            for form in ("zip", "legacy", "bare", "args"):
                try:
                    pickle.dumps(attack)
                except TypeError:
                    continue
                yield "pickle", make(kind, name, attack, form)


def settings(sources: dict[str, Any], here: Path, n: int) -> Iterator[Case]:
    """Settings that a pickle holds, set to what they cannot be."""

    def make(kind: str, names: list[str], seed: float) -> Callable[[], Path]:
        def put() -> Path:
            rng = random.Random(seed)
            fresh(sources[kind][0], here)
            odd = rng.choice([*(x for x in ODD if x != 10**400), torch.ones(2), torch.float32, (1, 2), {1, 2}])
            for name in names:
                content = torch.load(here / name, weights_only=False)
                said = content["model_args" if kind == "nanogpt" else "args"]
                said = said if isinstance(said, dict) else vars(said)
                key = random.Random(seed).choice([*said, "checkpoint_version", "model", "args", "model_args"])
                (said if key in said else content)[key] = odd
                (here / name).unlink()
                torch.save(content, here / name)
            return here

        return put

    for kind, names in (("nanogpt", ["ckpt.pt"]), ("megatron", sources["megatron"][1])):
        rng = random.Random(f"{SEED} {kind}")
        for _ in range(n):
            yield "settings", make(kind, names, rng.random())


def archives(source: Path, here: Path) -> Iterator[Case]:
    """Zip archives that unpack into more than they are, or are not what they list."""

    def make(change: Callable[[zipfile.ZipFile, zipfile.ZipFile], None]) -> Callable[[], Path]:
        def put() -> Path:
            fresh(source, here)
            file = here / "pytorch_model.bin"
            old = here / "old"
            file.rename(old)
            with zipfile.ZipFile(old) as a, zipfile.ZipFile(file, "w") as b:
                change(a, b)
            return here

        return put

    def copy(a: zipfile.ZipFile, b: zipfile.ZipFile, skip: str = "", **more: Any) -> None:
        for entry in a.infolist():
            if not skip or skip not in entry.filename:
                b.writestr(entry.filename, a.read(entry), **more)

    def bomb(a: zipfile.ZipFile, b: zipfile.ZipFile) -> None:
        copy(a, b, "data.pkl")
        b.writestr("pytorch_model/data.pkl", bytes(2**27), zipfile.ZIP_DEFLATED)

    def many(a: zipfile.ZipFile, b: zipfile.ZipFile) -> None:
        copy(a, b)
        for i in range(20000):
            b.writestr(f"pytorch_model/data/x{i}", b"")

    yield "archive", make(bomb)
    yield "archive", make(many)
    yield "archive", make(lambda a, b: copy(a, b, compress_type=zipfile.ZIP_DEFLATED))
    yield "archive", make(lambda a, b: copy(a, b, compress_type=zipfile.ZIP_BZIP2))
    for skip in ("data.pkl", "byteorder", "version", "data/0", "data/3", ".data"):
        yield "archive", make(lambda a, b, s=skip: copy(a, b, s))
    for name in ("../../x", "/etc/x", "pytorch_model/data/0", "a\0b"):
        yield "archive", make(lambda a, b, n=name: (copy(a, b), b.writestr(n, b"x" * 40))[0])


def links(good: Path, here: Path) -> Iterator[Case]:
    """Links that lead round in circles, out of the folder or nowhere, and things that are no files."""

    def make(source: str, name: str, target: str) -> Callable[[], Path]:
        def put() -> Path:
            fresh(good / source, here)
            (here / name).unlink()
            if target == "fifo":
                os.mkfifo(here / name)
            elif target == "folder":
                (here / name).mkdir()
            else:
                (here / name).symlink_to(target)
            return here

        return put

    names = {
        "safetensors": ["model.safetensors", "config.json", "tokenizer.json"],
        "index": ["model.safetensors.index.json", "model-00002-of-00002.safetensors"],
        "torch": ["pytorch_model.bin"],
        "foreign/adapter": ["adapter_config.json", "adapter_model.safetensors"],
        "foreign/meta": ["params.json", "consolidated.01.pth"],
        "foreign/nanogpt": ["ckpt.pt"],
        "foreign/megatron": ["mp_rank_01/model_optim_rng.pt"],
    }
    for source, files in names.items():
        for name in files:
            for target in (Path(name).name, ".", "..", "/dev/null", "/proc/self/mem", "nowhere", "fifo", "folder"):
                yield "links", make(source, name, target)

    def around() -> Path:
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir()
        (here / "a").symlink_to("b")
        (here / "b").symlink_to("a")
        return here / "a"

    yield "links", around


def numbers(good: Path, here: Path) -> Iterator[Case]:
    """Tensors of every type, of other shapes, and with NaN and infinity in them."""

    def make(source: str, change: Callable[[dict[str, torch.Tensor], str], None], name: str) -> Callable[[], Path]:
        def put() -> Path:
            from safetensors.torch import load_file

            fresh(good / source, here)
            state = load_file(here / "model.safetensors")
            change(state, name)
            (here / "model.safetensors").unlink()
            save_file(state, here / "model.safetensors")
            return here

        return put

    def to(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor], str], None]:
        return lambda state, name: state.update({name: state[name].to(dtype)})

    def to_shape(*shape: int) -> Callable[[dict[str, torch.Tensor], str], None]:
        return lambda state, name: state.update({name: torch.ones(shape)})

    def filled(value: float) -> Callable[[dict[str, torch.Tensor], str], None]:
        return lambda state, name: state.update({name: torch.full_like(state[name], value)})

    types = [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float64, torch.float16, torch.bfloat16]
    types += [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]
    changes = [to(dtype) for dtype in types]
    changes += [to_shape(), to_shape(0), to_shape(1), to_shape(8, 0), to_shape(8, 8, 8), to_shape(3, 5)]
    changes += [filled(float("nan")), filled(float("inf")), filled(0.0), filled(1e38)]
    for source, config in (("safetensors", GPT2), ("config", LLAMA)):
        for name in list(tensors(config))[::2]:
            for change in changes:
                yield "numbers", make(source, change, name)


# -- the run ------------------------------------------------------------------------------------------------------------------


class Hang(BaseException):
    """A case took longer than it may."""


def stop(*_: Any) -> None:
    raise Hang


def use(path: Path) -> None:
    """What a user's first commands do: open, read the first and last layer and the vocabulary, spell a word."""
    model = ov.load(path)
    for layer in {0, model.n_layers - 1}:
        assert model.layer(layer).W_O.isfinite is not None
        model.layer(layer).finite_heads.all()
    if model.has_embeddings:
        assert model.W_U.shape[0] == model.architecture.d_model
    if path.suffix != ".gguf" and model.has_tokenizer:
        model.tokenizer.encode("abc", unknown=True)
        model.tokenizer.text(0)


def main(work: Path, scale: float) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGALRM, stop)
    log = (work / "last").open("w")
    counts: dict[str, dict[str, int]] = {}
    failures: list[dict[str, str]] = []
    limited = False
    for number, (kind, put) in enumerate(cases(work, scale)):
        path = put()
        if not limited:  # the good files are there and the libraries imported
            use_good(work / "good")
            size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, resource.RLIM_INFINITY))
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            limited = True
        log.seek(0)
        log.write(f"{number} {kind}   ")
        log.flush()
        count = counts.setdefault(kind, {"opened": 0, "refused": 0, "failed": 0})
        signal.alarm(SECONDS)
        try:
            use(path)
            count["opened"] += 1
        except ov.CircuitsError as error:
            text = str(error)
            assert 10 < len(text) < 3000, text[:3000]
            count["refused"] += 1
        except BaseException as error:
            count["failed"] += 1
            shown = "".join(traceback.format_exception(error))[-1500:]
            failures.append(
                {"case": f"{number} {kind}", "error": f"{type(error).__name__}: {error}"[:300], "trace": shown}
            )
        finally:
            signal.alarm(0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    report = {"counts": counts, "failures": failures, "peak": peak * 1024, "canary": (work / "canary").exists()}
    (work / "report.json").write_text(json.dumps(report))


def use_good(good: Path) -> None:
    """Each undamaged file opens: else the damage would prove nothing."""
    for path in (
        *(good / n for n in ("safetensors", "index", "torch", "old", "config", "tokenizer")),
        good / "gguf" / "x.gguf",
    ):
        use(path)
    for path in ("llama2c/x.bin", "nanogpt", "meta", "megatron", "adapter"):
        use(good / "foreign" / path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
