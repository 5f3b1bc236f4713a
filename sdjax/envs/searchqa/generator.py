"""A made-up world as a corpus, with questions of all seven kinds that only this corpus answers.

Everything is a function of the seed and ``world.toml``: the same passages and questions on every machine. Each fact
stands in one passage, that of the thing it is about, so the gold passages of a question are known. What one question
of the split eval ends in, a fact or a pair of things, no training question of that kind ends in.
"""

import hashlib
import itertools
import random
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from sdjax.envs.searchqa.corpus import Corpus, Passage
from sdjax.envs.searchqa.questions import SOURCES, Question
from sdjax.errors import DataError

_HELD_OUT = 4  # one fact in so many is asked for in the split eval only


@dataclass(eq=False)
class Thing:
    """facts: relation name -> another thing, or a text with its article."""

    id: str
    kind: str
    title: str
    year: int = 0
    facts: dict[str, "Thing | str"] = field(default_factory=dict)


@dataclass(frozen=True)
class Draft:
    """A question before it has an id. key: the fact that it ends in. steps: (question, answer) one by one. triples:
    subject, relation, object."""

    key: str
    question: str
    answer: str
    gold: tuple[Thing, ...]
    steps: tuple[tuple[str, str], ...]
    triples: tuple[tuple[str, str, str], ...]


def generate(seed: int, train: int, evaluation: int) -> tuple[Corpus, list[tuple[str, Question]]]:
    """Returns the corpus and (split, question) pairs: ``train`` and ``evaluation`` questions for each source.

    Raises:
      DataError: the world is too small for so many questions.
    """
    world = World(seed)
    found: list[tuple[str, Question]] = []
    for source in SOURCES:
        wanted = {"train": train if world.spec["sources"][source]["train"] else 0, "eval": evaluation}
        asked = set()
        for draft in world.drafts(source):
            split = "eval" if _held_out(draft.key) else "train"
            if wanted[split] == 0 or draft.question in asked:
                continue
            asked.add(draft.question)
            wanted[split] -= 1
            number = sum(question.source == source for _, question in found)
            found.append((split, world.question(draft, source, f"generated/{source}/{number}")))
        if any(wanted.values()):
            raise DataError(
                f"the generated world has too few {source} questions ({wanted} missing).",
                "lower env.searchqa.generator_train or generator_eval.",
            )
    return Corpus(world.passages()), found


class World:
    """Things with facts, drawn from ``seed``."""

    def __init__(self, seed: int):
        text = resources.files("sdjax.envs.searchqa").joinpath("world.toml").read_text(encoding="utf-8")
        self.spec: dict[str, Any] = tomllib.loads(text)
        self._seed = seed
        rng = random.Random(f"searchqa/{seed}/world")
        self._names = _invented_names(self.spec["names"], rng)
        self.things = {kind: self._make(kind, rng) for kind in self.spec["kinds"]}
        for name, relation in self.spec["relations"].items():
            for thing in self.things[relation["of"]]:
                thing.facts[name] = rng.choice(
                    relation["values"] if "values" in relation else self.things[relation["to"]]
                )
        self._make_consistent(rng)

    def _make(self, kind: str, rng: random.Random) -> list[Thing]:
        spec = self.spec["kinds"][kind]
        made = []
        for number in range(spec["count"]):
            title = spec["title"].format(
                a=next(self._names), b=next(self._names), noun=rng.choice(self.spec["names"]["nouns"])
            )
            year = rng.randint(*spec["years"]) if "years" in spec else 0
            made.append(Thing(f"{kind}-{number}", kind, title, year))
        return made

    def _make_consistent(self, rng: random.Random) -> None:
        """A capital lies in its region, and marriage goes both ways."""
        for region, city in zip(self.things["region"], rng.sample(self.things["city"], len(self.things["region"]))):
            region.facts["capital"], city.facts["city_region"] = city, region
        people = rng.sample(self.things["person"], len(self.things["person"]))
        for one, other in zip(people[::2], people[1::2], strict=True):
            one.facts["spouse"], other.facts["spouse"] = other, one

    def passages(self) -> list[Passage]:
        """One for each thing, in a mixed order."""
        rng = random.Random(f"searchqa/{self._seed}/passages")
        made = [self._passage(thing, rng) for kind in self.things.values() for thing in kind]
        rng.shuffle(made)
        return made

    def _passage(self, thing: Thing, rng: random.Random) -> Passage:
        spec = self.spec["kinds"][thing.kind]
        patterns = [(rng.choice(self.spec["relations"][name]["state"]), value) for name, value in thing.facts.items()]
        if "year" in spec:
            patterns.append((spec["year"], ""))
        patterns.append((rng.choice(spec["filler"]), ""))
        rng.shuffle(patterns)
        patterns.insert(0, (rng.choice(spec["intro"]), ""))
        text = " ".join(pattern.format(x=thing.title, y=_name(value), n=thing.year) for pattern, value in patterns)
        return Passage(thing.id, f'"{thing.title}"\n{text}')

    def question(self, draft: Draft, source: str, question_id: str) -> Question:
        spec = self.spec["sources"][source]
        text = draft.question.lower().removesuffix("?") if spec["lower"] else draft.question
        if spec["shows"] == "steps":
            lines = tuple(f"{asked} {answer}" for asked, answer in draft.steps)
        else:
            lines = tuple(" | ".join(triple) for triple in draft.triples)
        gold = tuple(thing.id for thing in draft.gold)
        return Question(question_id, source, text, (draft.answer,), gold, all_gold=True, decomposition=lines)

    def drafts(self, source: str) -> Iterator[Draft]:
        """Candidates for ``source``, its parts in turn, without end until one part is used up."""
        spec = self.spec["sources"][source]
        makers: dict[str, Callable[[random.Random], Iterator[Draft]]] = {
            "inverse": self._inverses,
            "comparison": self._comparisons,
            "equality": self._equalities,
        }
        pools = {}
        for part in sorted(set(spec["parts"])):
            rng = random.Random(f"searchqa/{self._seed}/{source}/{part}")
            if part.startswith("chain"):
                pool = list(self._chains(int(part.removeprefix("chain")), spec["wording"]))
            else:
                pool = list(makers[part](rng))
            rng.shuffle(pool)
            pools[part] = iter(pool)
        for part in itertools.cycle(spec["parts"]):
            draft = next(pools[part], None)
            if draft is None:
                return
            yield draft

    def _chains(self, hops: int, wording: int) -> Iterator[Draft]:
        for things in self.things.values():
            for start in things:
                for path in self._paths((start,), (), hops):
                    yield self._chain(*path, wording=wording)

    def _paths(self, things: tuple, names: tuple[str, ...], hops: int) -> Iterator[tuple[tuple, tuple[str, ...]]]:
        """(things on the way, relations between them), without a thing twice."""
        if len(names) == hops:
            yield things, names
        elif isinstance(things[-1], Thing):
            for name, value in things[-1].facts.items():
                if value not in things:
                    yield from self._paths((*things, value), (*names, name), hops)

    def _chain(self, things: tuple, names: tuple[str, ...], wording: int) -> Draft:
        relations = [self.spec["relations"][name] for name in names]
        noun, steps = things[0].title, []
        for number, (relation, value) in enumerate(zip(relations, things[1:])):
            subject = noun if number == 0 else f"#{number}"
            steps.append((relation["ask"][0].format(x=subject), _answer(value)))
        for relation in relations[:-1]:
            noun = relation["noun"].format(x=noun)
        return Draft(
            key=f"{things[-2].id} {names[-1]}",
            question=relations[-1]["ask"][wording].format(x=noun),
            answer=_answer(things[-1]),
            gold=things[:-1],
            steps=tuple(steps),
            triples=tuple(
                (a.title, relation["label"], _answer(b)) for a, relation, b in zip(things, relations, things[1:])
            ),
        )

    def _inverses(self, rng: random.Random) -> Iterator[Draft]:
        del rng
        for spec in self.spec["inverses"]:
            names = (spec["first"], spec["second"])
            things = self.things[self.spec["relations"][names[0]]["of"]]
            for thing in things:
                values = [thing.facts[name] for name in names]
                if sum([other.facts[name] for name in names] == values for other in things) > 1:
                    continue
                question = spec["ask"].format(p=_name(values[0]), q=_name(values[1]))
                yield Draft(
                    key=f"{thing.id} inverse",
                    question=question,
                    answer=thing.title,
                    gold=(thing,),
                    steps=((question, thing.title),),
                    triples=tuple(self._triple(thing, name) for name in names),
                )

    def _comparisons(self, rng: random.Random) -> Iterator[Draft]:
        for spec in self.spec["comparisons"]:
            through = spec.get("through")
            for a in self.things[spec["kind"]]:
                b = rng.choice(self.things[spec["kind"]])
                dated = [_thing(thing.facts[through]) if through else thing for thing in (a, b)]
                if a is b or dated[0].year == dated[1].year:
                    continue
                first = a if dated[0].year < dated[1].year else b
                triples = [self._triple(thing, through) for thing in (a, b)] if through else []
                yield Draft(
                    key=" ".join(sorted((a.id, b.id))) + f" {through}",
                    question=spec["ask"].format(a=a.title, b=b.title),
                    answer=first.title,
                    gold=(a, b, *dated) if through else (a, b),
                    steps=((spec["ask"].format(a=a.title, b=b.title), first.title),),
                    triples=(*triples, *((thing.title, "year", str(thing.year)) for thing in dated)),
                )

    def _equalities(self, rng: random.Random) -> Iterator[Draft]:
        """For each thing one partner with the same value, where there is one, and one with another."""
        for spec in self.spec["equalities"]:
            name = spec["relation"]
            relation = self.spec["relations"][name]
            things = self.things[relation["of"]]
            for a, same in itertools.product(things, (True, False)):
                partners = [b for b in things if b is not a and (b.facts[name] is a.facts[name]) == same]
                if not partners:
                    continue
                b = rng.choice(partners)
                yield Draft(
                    key=" ".join(sorted((a.id, b.id))) + f" {name}",
                    question=spec["ask"].format(a=a.title, b=b.title),
                    answer="yes" if same else "no",
                    gold=(a, b),
                    steps=tuple((relation["ask"][0].format(x=t.title), _answer(t.facts[name])) for t in (a, b)),
                    triples=(self._triple(a, name), self._triple(b, name)),
                )

    def _triple(self, thing: Thing, name: str) -> tuple[str, str, str]:
        return (thing.title, self.spec["relations"][name]["label"], _answer(thing.facts[name]))


def _thing(value: "Thing | str") -> Thing:
    assert isinstance(value, Thing)  # world.toml: a comparison goes through a relation to a dated kind
    return value


def _name(value: "Thing | str") -> str:
    return value if isinstance(value, str) else value.title


def _answer(value: "Thing | str") -> str:
    """A name, or a text without its article."""
    return value.split(" ", 1)[1] if isinstance(value, str) else value.title


def _held_out(key: str) -> bool:
    return hashlib.blake2b(key.encode(), digest_size=1).digest()[0] % _HELD_OUT == 0


def _invented_names(spec: dict[str, list[str]], rng: random.Random) -> Iterator[str]:
    """Words of two or three syllables, no word twice."""
    seen: set[str] = set()
    while True:
        syllables = [rng.choice(spec["onsets"]) + rng.choice(spec["vowels"]) for _ in range(rng.choice((2, 2, 3)))]
        name = ("".join(syllables) + rng.choice(spec["codas"])).capitalize()
        if name not in seen:
            seen.add(name)
            yield name
