"""Prompt sets: a question a line, with its answer, a foil, and positions that have names.

A set is a JSONL file, one prompt a line (or, in Python, a list of such dictionaries):

    {"prompt": "When Mary and John went to the store, John gave a drink to", "answer": " Mary", "foil": " John",
     "roles": {"indirect_object": [5, 9], "subject": [14, 18], "repeated_subject": [38, 42]}, "set": "ioi", "variant": "BA"}

``prompt`` and ``answer`` must be there. An answer (or foil) is a word that is one token, leading space and all, or a list of such
words, which stands for the mean of their logits. A role is a span of characters [start, end), or a text that occurs once in the
prompt; with a tokenizer it becomes the tokens that overlap it, so the same file serves every tokenizer. Two roles are added to
every prompt, ``start`` (the first token, BOS where it is put there) and ``end`` (the last one, whose next token is asked for); a
role of the file that holds these tokens goes before. Other keys are kept as they are.

A line with ``repeat`` in place of ``prompt`` and ``answer`` is a recipe, filled from the model's own vocabulary:

    {"repeat": {"period": 20, "shown": 12, "seed": 3}, "set": "repeated_tokens"}

is BOS, 20 distinct random tokens, and the first 12 of them again; the answer is the 13th, the foil another of the 20.

The sets that come with the package are in ``data/prompts``, written by ``data/make_prompts.py``.
"""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ov_circuits.arguments import checked
from ov_circuits.checkpoint.locate import data_file
from ov_circuits.errors import LARGEST_SEED, CircuitsError
from ov_circuits.model import Model
from ov_circuits.shown import counted
from ov_circuits.words import bos_id, ordinary_tokens

# The roles that every prompt has.
START, END = "start", "end"


@dataclass(frozen=True)
class Line:
    """One line of a set, before any tokenizer.

    Attributes:
        where: its file and line.
        text: the prompt; empty for a recipe.
        answer, foil: words; several stand for the mean of their logits. No foil: the answer's logit alone.
        roles: name -> [start, end) in characters.
        repeat: the recipe of random tokens, or None.
        extra: what else the line says.
    """

    where: str
    text: str
    answer: tuple[str, ...]
    foil: tuple[str, ...]
    roles: Mapping[str, tuple[int, int]]
    repeat: Mapping[str, int] | None
    extra: Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """A question to one model.

    Attributes:
        text: what is asked; None where it was made of token ids.
        tokens: the ids to run, BOS included where it was added.
        bos_added: whether it was.
        answer, foil: ids, whose logits' means are compared.
        roles: name -> positions in ``tokens``; no position has two roles.
        extra: what else its line says.
    """

    text: str | None
    tokens: tuple[int, ...]
    bos_added: bool
    answer: tuple[int, ...]
    foil: tuple[int, ...]
    roles: Mapping[str, tuple[int, ...]]
    extra: Mapping[str, Any]

    @property
    def weights(self) -> dict[int, float]:
        """The question as a weighting of logits: mean over answers minus mean over foils."""
        weights = dict.fromkeys(self.answer, 1 / len(self.answer))
        return weights | {token: -1 / len(self.foil) for token in self.foil}


@dataclass(frozen=True)
class PromptSet:
    """Prompts as one model reads them.

    Attributes:
        name: of the set.
        prompts: those that fit the model.
        dropped: why others do not, each with how many.
        examples: for each of these reasons, the sentence about the first such prompt.
    """

    name: str
    prompts: tuple[Prompt, ...]
    dropped: Mapping[str, int]
    examples: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    def __repr__(self) -> str:
        dropped = "".join(f", {n} dropped ({why})" for why, n in self.dropped.items())
        return f"PromptSet({self.name!r}: {counted(len(self), 'prompt')}{dropped})"

    @property
    def compares(self) -> bool:
        """Whether answers are set against foils.

        Raises:
            CircuitsError: some are and some are not.
        """
        if len({bool(prompt.foil) for prompt in self}) > 1:
            raise CircuitsError(
                f"some prompts of {self.name} have a foil and some have none: a logit and a difference have no mean"
            )
        return bool(self.prompts[0].foil)

    @property
    def shared_roles(self) -> tuple[str, ...]:
        """Roles that every prompt has, in their order."""
        first = self.prompts[0].roles
        return tuple(role for role in first if all(role in prompt.roles for prompt in self.prompts))

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that any prompt has."""
        return tuple(dict.fromkeys(role for prompt in self.prompts for role in prompt.roles))


def names() -> list[str]:
    """The sets that come with the package."""
    return sorted(file.stem for file in data_file("prompts").glob("*.jsonl"))


@checked
def load(
    source: str | Path | Sequence[Mapping[str, Any]],
    model: Model,
    *,
    n: int | None = None,
    seed: int = 0,
    bos: bool | None = None,
    drop: bool | None = None,
) -> PromptSet:
    """A set of prompts as this model's tokenizer reads it.

    Args:
        source: a name from :func:`names`, a .jsonl file, or a list of what such a file has a line, as dictionaries.
        model: whose tokenizer and context it must fit.
        n: take that many of those that fit, at random.
        seed: which those are.
        bos: whether to put BOS first; None: where the model has one.
        drop: leave out prompts that do not fit, and count them (of a list of answers, those that fit are enough); otherwise
            the first of them is an error. None: for the sets of the package, and not for files.

    Raises:
        CircuitsError: no such set; a line that is no prompt (file and line are named); a prompt that does not fit, where they
            are not dropped: an answer of several tokens, a prompt past the context; or none that fits.
    """
    if isinstance(source, (str, Path)):
        path, ours = _path(source)
        lines, name = _read(path), path.stem
    else:
        lines, name, ours = _given(source), "prompts", False
    found = tokenize(lines, name, model, bos=bos, drop=ours if drop is None else drop)
    if n is None:
        return found
    if n < 1:
        raise CircuitsError(f"n = {n}: take at least one prompt")
    chosen = sorted(random.Random(seed).sample(range(len(found)), min(n, len(found))))
    return replace(found, prompts=tuple(found.prompts[index] for index in chosen))


@checked
def read(source: str | Path) -> list[Line]:
    """The lines of a set, as they are in the file.

    Raises:
        CircuitsError: no such set, or a line that is no prompt.
    """
    return _read(_path(source)[0])


def tokenize(
    lines: Sequence[Line], name: str, model: Model, *, bos: bool | None = None, drop: bool = False
) -> PromptSet:
    """Lines as a model reads them; arguments as of :func:`load`.

    Raises:
        CircuitsError: as :func:`load`.
    """
    first = bos_id(model)
    if bos and first is None:
        raise CircuitsError(f"{model.name} has no BOS token: ask for the prompts without one")
    start = None if bos is False else first
    prompts: list[Prompt] = []
    dropped: dict[str, int] = {}
    examples: dict[str, str] = {}
    for line in lines:
        try:
            recipe = line.repeat is not None
            prompts.append(_recipe(line, model, start) if recipe else _prompt(line, model, start, drop))
        except _Unfit as error:
            if not drop:
                raise CircuitsError(str(error)) from error
            dropped[error.kind] = dropped.get(error.kind, 0) + 1
            examples.setdefault(error.kind, str(error))
    if not prompts:
        reasons = "; ".join(f"{n} {kind}" for kind, n in dropped.items())
        raise CircuitsError(f"no prompt of {name} fits {model.name} ({reasons}): {next(iter(examples.values()))}")
    return PromptSet(name, tuple(prompts), dropped, examples)


class _Unfit(CircuitsError):
    """A prompt that is one, but not for this model."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


# -- files ------------------------------------------------------------------------------------------------------------


def _path(source: str | Path) -> tuple[Path, bool]:
    """The file, and whether it is one of ours."""
    path = Path(source)
    if isinstance(source, Path) or path.suffix:
        if path.suffix.lower() != ".jsonl":
            raise CircuitsError(f"{path} is no set of prompts: they are .jsonl files, one prompt a line")
        return path, False
    known = names()
    if source not in known:
        near = difflib.get_close_matches(str(source), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise CircuitsError(
            f"there is no prompt set {source!r}{hint} The sets are: {', '.join(known)}; or name a .jsonl file"
        )
    return data_file(f"prompts/{source}.jsonl"), True


def _given(source: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Lines that are dictionaries already."""
    if not source or not all(isinstance(one, Mapping) for one in source):
        raise CircuitsError(
            "prompts are a list of dictionaries, each with prompt and answer; or name a set or a .jsonl file"
        )
    return [_line(json.dumps(dict(one), default=str), f"prompt {number}") for number, one in enumerate(source, start=1)]


def _read(path: Path) -> list[Line]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CircuitsError(f"the prompts {path} cannot be read: {error}") from error
    lines = [
        _line(content, f"{path}, line {number}")
        for number, content in enumerate(text.split("\n"), start=1)
        if content.strip()
    ]
    if not lines:
        raise CircuitsError(f"{path} holds no prompts: write one a line, as JSON with prompt and answer")
    return lines


def _line(content: str, where: str) -> Line:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        raise CircuitsError(f"{where} is no JSON ({error}): write one object a line, with prompt and answer") from error
    if not isinstance(found, dict):
        raise CircuitsError(f"{where} is no JSON object: write one a line, with prompt and answer")
    extra = {key: value for key, value in found.items() if key not in ("prompt", "answer", "foil", "roles", "repeat")}
    if "repeat" in found:
        return Line(where, "", (), (), {}, _repeat(found["repeat"], where), extra)
    prompt = found.get("prompt")
    if not isinstance(prompt, str):
        raise CircuitsError(f"{where} has no prompt: give a text under the key prompt")
    if not prompt:
        raise CircuitsError(f"{where}: the prompt is empty")
    answer, foil = _words(found.get("answer"), "answer", where), _words(found.get("foil", []), "foil", where)
    if not answer:
        raise CircuitsError(f"{where} has no answer: give a word, leading space and all, or a list of words")
    return Line(where, prompt, answer, foil, _roles(found.get("roles", {}), prompt, where), None, extra)


def _words(value: Any, key: str, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    words = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else (None,)
    if any(not isinstance(word, str) or not word for word in words):
        raise CircuitsError(f"{where}: {key} is a word or a list of words, not {json.dumps(value)[:80]}")
    return words


def _roles(value: Any, prompt: str, where: str) -> dict[str, tuple[int, int]]:
    if not isinstance(value, dict):
        raise CircuitsError(f"{where}: roles are an object of name and span, not {json.dumps(value)[:80]}")
    roles = {name: _span(span, name, prompt, where) for name, span in value.items()}
    in_order = sorted(roles, key=lambda name: roles[name])
    for one, other in pairwise(in_order):
        if roles[other][0] < roles[one][1]:
            raise CircuitsError(f"{where}: the roles {one} and {other} overlap; a position has one role")
    return roles


def _span(span: Any, name: str, prompt: str, where: str) -> tuple[int, int]:
    """[start, end) of a role, given so or as a text that occurs once."""
    # In a frame of means, from_<role>_low and from_<role>_high are the ends of a role's interval.
    if name in (START, END, OTHER) or not name.isidentifier() or name.endswith(("_low", "_high")):
        raise CircuitsError(
            f"{where}: {name!r} cannot name a role: take letters, digits and underscores, not {START}, {END} or {OTHER}, "
            "and no _low or _high at the end"
        )
    if isinstance(span, str) and span:
        if prompt.count(span) != 1:
            raise CircuitsError(
                f"{where}: the role {name} is {span!r}, which occurs {prompt.count(span)} times in the prompt: "
                "give its place, as [start, end) in characters"
            )
        return prompt.index(span), prompt.index(span) + len(span)
    whole = isinstance(span, list) and len(span) == 2 and all(type(part) is int for part in span)
    if not whole or not 0 <= span[0] < span[1] <= len(prompt):
        raise CircuitsError(
            f"{where}: the role {name} is {json.dumps(span)[:80]}, and not [start, end) within the {len(prompt)} characters "
            "of the prompt, nor a text in it"
        )
    return span[0], span[1]


# Source positions without a role.
OTHER = "other"


def _repeat(value: Any, where: str) -> dict[str, int]:
    keys = ("period", "shown", "seed")
    if not isinstance(value, dict) or set(value) != set(keys) or any(type(value[key]) is not int for key in keys):
        raise CircuitsError(
            f"{where}: repeat takes three whole numbers, {', '.join(keys)}, not {json.dumps(value)[:80]}"
        )
    if value["period"] < 2 or not 1 <= value["shown"] < value["period"] or not 0 <= value["seed"] <= LARGEST_SEED:
        raise CircuitsError(
            f"{where}: of repeat, period is at least 2, shown is 1 to period - 1, and seed 0 to {LARGEST_SEED}"
        )
    return {key: value[key] for key in keys}


# -- for a model ------------------------------------------------------------------------------------------------------


def _prompt(line: Line, model: Model, start: int | None, drop: bool) -> Prompt:
    tokenizer = model.tokenizer
    try:
        ids, spans = tokenizer.encode(line.text), tokenizer.offsets(line.text)
    except CircuitsError as error:
        raise _Unfit("with a text that the tokenizer cannot spell", f"{line.where}: {error}") from error
    if not ids:
        raise CircuitsError(f"{line.where}: the prompt is empty for this tokenizer")
    added = start is not None and ids[0] != start
    shift = int(added)
    tokens = (start, *ids) if added and start is not None else tuple(ids)
    _check_length(tokens, model, line)
    answer = _ids(line.answer, "answer", ids, line, model, drop)
    foil = _ids(line.foil, "foil", ids, line, model, drop)
    _check_answers(answer, foil, line)
    roles: dict[str, tuple[int, ...]] = {}
    taken: set[int] = set()
    for name, (a, b) in line.roles.items():
        held = tuple(i + shift for i, (c, d) in enumerate(spans) if c < b and d > a and i + shift not in taken)
        if not held:
            raise _Unfit(
                "with two roles in one token", f"{line.where}: the role {name} has no token of its own in {model.name}"
            )
        roles[name] = held
        taken.update(held)
    return Prompt(line.text, tokens, added, answer, foil, _with_ends(roles, len(tokens)), line.extra)


def _recipe(line: Line, model: Model, start: int | None) -> Prompt:
    assert line.repeat is not None
    period, shown, seed = (line.repeat[key] for key in ("period", "shown", "seed"))
    pool = ordinary_tokens(model)
    if len(pool) < period:
        raise _Unfit(
            "with more distinct tokens than the vocabulary has",
            f"{line.where}: {period} distinct tokens are asked for, and {model.name} has {len(pool)}",
        )
    rng = torch.Generator().manual_seed(seed)
    segment = [pool[index] for index in torch.randperm(len(pool), generator=rng, device="cpu")[:period].tolist()]
    others = [token for token in segment if token not in (segment[shown], segment[shown - 1])] or [segment[shown - 1]]
    foil = others[int(torch.randint(len(others), (1,), generator=rng, device="cpu"))]
    shift = int(start is not None)
    tokens = (*([start] if start is not None else []), *segment, *segment[:shown])
    _check_length(tokens, model, line)
    # Of the last token: where it was before, and what came after it there, which is the answer.
    roles: dict[str, tuple[int, ...]] = {"earlier": (shift + shown - 1,), "after_earlier": (shift + shown,)}
    return Prompt(None, tokens, bool(shift), (segment[shown],), (foil,), _with_ends(roles, len(tokens)), line.extra)


def _with_ends(roles: dict[str, tuple[int, ...]], n: int) -> dict[str, tuple[int, ...]]:
    """The roles, and start and end where none holds these positions."""
    taken = {position for held in roles.values() for position in held}
    ends = {START: 0} | ({END: n - 1} if n > 1 else {})
    return roles | {name: (place,) for name, place in ends.items() if place not in taken}


def _check_length(tokens: Sequence[int], model: Model, line: Line) -> None:
    if len(tokens) > model.architecture.n_ctx:
        raise _Unfit(
            "longer than the context",
            f"{line.where}: the prompt is {len(tokens)} tokens long and {model.name} reads at most {model.architecture.n_ctx}: "
            "shorten it",
        )


def _ids(
    words: Sequence[str], what: str, prompt: Sequence[int], line: Line, model: Model, drop: bool
) -> tuple[int, ...]:
    """The words of an answer or foil as ids. Of several words, with ``drop``, those that fit are enough."""
    kept, problem = [], None
    for word in words:
        try:
            kept.append(_id(word, what, prompt, line, model))
        except _Unfit as error:
            if len(words) == 1 or not drop:
                raise
            problem = error
    if problem is not None and not kept:
        raise problem
    return tuple(kept)


def _id(word: str, what: str, prompt: Sequence[int], line: Line, model: Model) -> int:
    """The id of a word, if the tokenizer would read it as that one token after this prompt."""
    try:
        token = model.tokenizer.single(word)
    except CircuitsError as error:
        raise _Unfit(f"whose {what} is several tokens", f"{line.where}: the {what} {error}") from error
    if line.text.endswith(" ") and word.startswith(" "):
        raise _Unfit(
            f"whose {what} follows two spaces",
            f"{line.where}: the prompt ends with a space and the {what} {word!r} begins with one: it belongs to the {what} alone",
        )
    together = model.tokenizer.encode(line.text + word, unknown=True)
    if together != [*prompt, token]:
        read = ", ".join(repr(model.tokenizer.text(part)) for part in together[-3:])
        raise _Unfit(
            f"whose {what} the tokenizer joins to the prompt",
            f"{line.where}: after this prompt the tokenizer does not read the {what} {word!r} as that token (the two together "
            f"end with {read}): a space between them belongs to the {what}, not to the prompt",
        )
    return token


def _check_answers(answer: Sequence[int], foil: Sequence[int], line: Line) -> None:
    if len(set(answer) | set(foil)) < len(answer) + len(foil):
        raise CircuitsError(f"{line.where}: a word is twice among answer and foil")
