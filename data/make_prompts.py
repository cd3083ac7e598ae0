"""Write the prompt sets in `prompts/`, from the word lists beside them and the templates below.

    python data/make_prompts.py

Every draw depends on the seed of its set alone: the same lists and templates give the same files. The format is in
`ov_circuits/prompts.py`. Templates were written for ov_circuits; the tasks are those of the papers named at each set.
Roles are found by where a template's fields land, never by searching the text.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent


def read_csv(name: str) -> list[list[str]]:
    """The rows of a word list, without comments and header."""
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return list(csv.reader(line for line in lines if line and not line.startswith("#")))[1:]


def fill(template: str, **fields: str) -> tuple[str, dict[str, list[int]]]:
    """A template filled in, and where each field landed; a field that comes again is `name`, then `repeated_name`, .."""
    text, spans = "", {}
    for literal, name, _, _ in string.Formatter().parse(template):
        text += literal
        if name is not None:
            value = fields[name.removeprefix("repeated_")]
            if not name.startswith("_"):
                spans[name] = [len(text), len(text) + len(value)]
            text += value
    return text, spans


def line(template: str, answer: Any, foil: Any, variant: str, **fields: str) -> dict[str, Any]:
    """One prompt as it stands in a file."""
    prompt, roles = fill(template, **fields)
    return {"prompt": prompt, "answer": answer, "foil": foil, "roles": roles, "variant": variant}


# -- indirect objects: Wang et al. 2022, Interpretability in the Wild ---------------------------------------------------

PLACES = ("store", "garden", "restaurant", "school", "hospital", "office", "house", "station", "park", "library")
OBJECTS = ("ring", "kiss", "bone", "basketball", "computer", "necklace", "drink", "snack", "book", "letter")
# Of each: the two names in either order, then the subject again; the name that is not repeated receives.
IOI = (
    "When {a} and {b} went to the {_place}, {repeated_subject} gave a {_object} to",
    "Then, {a} and {b} went to the {_place}. {repeated_subject} gave a {_object} to",
    "Then, {a} and {b} had a long argument, and afterwards {repeated_subject} said to",
    "After {a} and {b} went to the {_place}, {repeated_subject} gave a {_object} to",
    "Friends {a} and {b} found a {_object} at the {_place}. {repeated_subject} gave it to",
    "While {a} and {b} were working at the {_place}, {repeated_subject} gave a {_object} to",
    "The {_place} that {a} and {b} went to had a {_object}. {repeated_subject} gave it to",
    "{a} and {b} were thinking about going to the {_place}. {repeated_subject} wanted to give a {_object} to",
)


def ioi() -> Iterator[dict[str, Any]]:
    """The answer is the name that is not repeated, the foil the one that is."""
    rng = random.Random(1)
    people = [row[0] for row in read_csv("names.csv")]
    for template in IOI:
        for _ in range(16):
            object_name, subject = rng.sample(people, 2)
            words = {"_place": rng.choice(PLACES), "_object": rng.choice(OBJECTS)}
            for variant, (a, b) in {
                "ABBA": ("indirect_object", "subject"),
                "BABA": ("subject", "indirect_object"),
            }.items():
                named = template.replace("{a}", f"{{{a}}}").replace("{b}", f"{{{b}}}")
                fields = {"indirect_object": object_name, "subject": subject, **words}
                yield line(named, f" {object_name}", f" {subject}", variant, **fields)


# -- capitals -----------------------------------------------------------------------------------------------------------

CAPITALS = {
    "is": "The capital of {country} is",
    "called": "The capital city of {country} is called",
    "visit": "We went to {country} and visited its capital,",
}


def capitals() -> Iterator[dict[str, Any]]:
    """The foil is another country's capital."""
    rng = random.Random(2)
    pairs = read_csv("relations/country_capital.csv")
    for variant, template in CAPITALS.items():
        for country, capital in pairs:
            other = rng.choice(sorted({city for _, city in pairs} - {capital}))
            yield line(template, f" {capital}", f" {other}", variant, country=country)


# -- successors: Gould et al. 2023, Successor Heads ---------------------------------------------------------------------

NEXT = {"number": "The number after {last} is", "day": "The day after {last} is", "month": "The month after {last} is"}


def successors() -> Iterator[dict[str, Any]]:
    """The foil is the last word itself: to copy it is the mistake that a successor head does not make."""
    for kind, template in NEXT.items():
        after = dict(read_csv(f"relations/{kind}_successor.csv"))
        for word, answer in after.items():
            yield line(template, f" {answer}", f" {word}", f"{kind}, asked", last=word)
        for word in after:
            chain = [word]
            while len(chain) < 4 and chain[-1] in after:
                chain.append(after[chain[-1]])
            if len(chain) == 4:
                named = dict(zip(("first", "second", "last"), chain, strict=False))
                yield line("{first}, {second}, {last},", f" {chain[3]}", f" {chain[2]}", f"{kind}, counted", **named)


# -- years: Hanna et al. 2023, How does GPT-2 compute greater-than? -----------------------------------------------------

EVENTS = ("war", "expedition", "reign", "siege", "famine", "dispute", "voyage", "campaign", "alliance", "drought",
          "rebellion", "trial", "project", "blockade", "occupation", "strike", "truce", "plague")  # fmt: skip
GREATER = "The {event} lasted from the year {century}{year} to the year {repeated_century}"


def greater_than() -> Iterator[dict[str, Any]]:
    """Answers are all two-digit ends of a later year, foils those of the same or an earlier one."""
    rng = random.Random(4)
    for event in EVENTS:
        for year in sorted(rng.sample(range(2, 99), 6)):
            later = [f"{end:02}" for end in range(year + 1, 100)]
            earlier = [f"{end:02}" for end in range(year + 1)]
            fields = {"event": event, "century": str(rng.choice(range(11, 20))), "year": f"{year:02}"}
            yield line(GREATER, later, earlier, "two digits", **fields)


def greater_than_digit() -> Iterator[dict[str, Any]]:
    """The same for tokenizers that read digit by digit: the next digit; the decade's own, which may begin either, is left out."""
    rng = random.Random(5)
    for event in EVENTS:
        for decade in sorted(rng.sample(range(1, 9), 5)):
            later, earlier = [str(d) for d in range(decade + 1, 10)], [str(d) for d in range(decade)]
            fields = {"event": event, "century": str(rng.choice(range(11, 20))), "decade": str(decade)}
            template = GREATER.replace("{year}", "{decade}{_end}")
            yield line(template, later, earlier, "one digit", **fields, _end=str(rng.choice(range(10))))


# -- pronouns: Mathwin et al. 2023, Identifying a Preliminary Circuit for Predicting Gendered Pronouns in GPT-2 Small --

WOMEN = ("Alice", "Amanda", "Amy", "Angela", "Anna", "Barbara", "Carol", "Claire", "Diana", "Elizabeth", "Emily", "Emma",
         "Helen", "Jane", "Jennifer", "Jessica", "Julia", "Karen", "Laura", "Linda", "Lisa", "Lucy", "Margaret", "Maria",
         "Mary", "Nancy", "Rachel", "Rebecca", "Sarah", "Susan")  # fmt: skip
MEN = ("Adam", "Andrew", "Anthony", "Arthur", "Brian", "Carl", "Charles", "Daniel", "David", "Edward", "Eric", "Frank",
       "George", "Henry", "Jack", "James", "Jason", "John", "Joseph", "Keith", "Kevin", "Mark", "Michael", "Paul",
       "Peter", "Philip", "Richard", "Robert", "Thomas", "William")  # fmt: skip
PRONOUNS = {
    "friend": "So {name} is a really great friend, isn't",
    "tired": "{name} went home early because",
    "said": "When I asked {name} about the letter, I did not know what",
}


def pronouns() -> Iterator[dict[str, Any]]:
    """Women and men alike, so that a liking for one word does not pass for an answer."""
    for variant, template in PRONOUNS.items():
        for names, answer, foil in ((WOMEN, " she", " he"), (MEN, " he", " she")):
            for name in names:
                yield line(template, answer, foil, variant, name=name)


# -- random tokens, repeated: Olsson et al. 2022, In-context Learning and Induction Heads -------------------------------


def repeated_tokens() -> Iterator[dict[str, Any]]:
    """Recipes: the tokens are the model's own. Periods vary, so that no fixed offset finds the answer."""
    rng = random.Random(6)
    for seed in range(96):
        period = rng.randrange(8, 29)
        yield {
            "repeat": {"period": period, "shown": rng.randrange(1, period), "seed": seed},
            "variant": "random tokens",
        }


SETS = (ioi, capitals, successors, greater_than, greater_than_digit, pronouns, repeated_tokens)


def main() -> None:
    """Write all sets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA / "prompts", help="folder to write to")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for make in SETS:
        lines = [json.dumps({**found, "set": make.__name__}, ensure_ascii=False) for found in make()]
        (out / f"{make.__name__}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{make.__name__}.jsonl: {len(lines)} prompts")


if __name__ == "__main__":
    main()
