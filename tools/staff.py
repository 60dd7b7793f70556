"""The language of the embedded checkpoint: staff lists in English, and questions about them.

A staff list says of each person the room, the city and the manager (one of the list; one person leads the
team). All is drawn from a `random.Random`, so the same seed gives the same document. Questions have exactly
one answer, a sentence that restates the fact; for those in MARKED it only names the person or the room, so
that no part of an answer tells the rest of it:

    python tools/staff.py --people 5 --seed 1           # print a document with its questions and answers

    doc, qa = sample(random.Random(1), people=5)        # text, [(kind, question, answer), ...]

Each word, name, city and number is one token of the checkpoint's tokenizer; a person costs 12 to 14 tokens.
"""
import argparse
import functools
import itertools
import json
import random
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

NAMES = (
    "Ada Amy Ann Ben Bob Cal Dan Dana Dora Ed Ella Emma Eva Finn Fred Gina Gus Hal Hans Ida Ivan Jack "
    "Jane Jim Joan John Kate Ken Kim Lara Lee Leo Lily Liz Max Mia Nina Noah Nora Olga Omar Otto Paul Pia "
    "Ray Rosa Ruth Sam Sara Ted Tina Tom Uma Vera Walt Will Yan Zoe").split()
CITIES = "Accra Bern Cairo Delhi Lima Oslo Paris Quito Riga Rome Sofia Tokyo".split()
ROOMS = range(10, 100)
KINDS = ("lookup", "reverse", "two_hop", "counting", "other", "other_room")
MARKED = ("other", "other_room")    # trained so that a prefix run alone cannot know who is meant
MOST = 4                        # in one city, and who report to one manager: so counts are small

OPENING = "Staff list:"
# A person in one wording; {boss} is filled from BOSS or LEAD. The name stands before its values in all.
WORDINGS = (
    "{name} is in room {room} in {city} and {boss}.",
    "{name} works in {city}, in room {room}, and {boss}.",
    "{name} has room {room} in {city}. {name} {boss}.",
    "{name} {boss} and is in room {room} in {city}.",
)
BOSS, LEAD = "reports to {manager}", "leads the team"

# The tokenizer of the checkpoint
SPECIAL = ["<|mask|>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
MASK, EOS, SYSTEM, USER, ASSISTANT, END = range(6)
TEMPLATE = ("{% for message in messages %}"
            "<|{{ message['role'] }}|>{{ message['content'] | trim }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")
SPARE = ("Where When Yes No yes no not nobody office boss desk person named manage under based called at "
         "from on with for how many 0")


@dataclass(frozen=True)
class Person:
    name: str
    room: int
    city: str
    manager: str | None         # None: leads the team


def team(rng: random.Random, people: int) -> list[Person]:
    """`people` persons in the order of a list; the leader stands anywhere in it."""
    assert 2 <= people <= len(NAMES), f"a staff list has 2 to {len(NAMES)} people"
    names, rooms = rng.sample(NAMES, people), rng.sample(ROOMS, people)
    towns = rng.sample(CITIES, max(rng.randint(2, len(CITIES)), -(-people // MOST)))
    seats = [town for town in towns for _ in range(MOST)]
    cities = rng.sample(seats, people)
    reports = dict.fromkeys(names, 0)
    persons = [Person(names[0], rooms[0], cities[0], None)]
    for i in range(1, people):                  # each reports to someone before: a tree
        manager = rng.choice([name for name in names[:i] if reports[name] < MOST])
        reports[manager] += 1
        persons.append(Person(names[i], rooms[i], cities[i], manager))
    rng.shuffle(persons)
    return persons


def tell(rng: random.Random, persons: list[Person], wordings: int = len(WORDINGS)) -> str:
    """The facts as a document, each person in one of the first `wordings` wordings."""
    lines = [OPENING]
    for p in persons:
        boss = BOSS.format(manager=p.manager) if p.manager else LEAD
        lines.append(rng.choice(WORDINGS[:wordings]).format(name=p.name, room=p.room, city=p.city, boss=boss))
    return " ".join(lines)


def facts(rng: random.Random, persons: list[Person]) -> list[str]:
    """All facts as short sentences, the same ones that answers use, in any order."""
    lines = []
    for p in persons:
        boss = BOSS.format(manager=p.manager) if p.manager else LEAD
        lines += [f"{p.name} is in room {p.room}.", f"{p.name} is in {p.city}.", f"{p.name} {boss}."]
    return rng.sample(lines, len(lines))


def questions(rng: random.Random, persons: list[Person]) -> list[tuple[str, str, str]]:
    """All facts that have exactly one answer, each asked once, as (kind, question, answer)."""
    by_name = {p.name: p for p in persons}
    out, in_city = [], {}

    def ask(kind, answer, *wordings):
        out.append((kind, rng.choice(wordings), answer))

    for p in persons:
        in_city.setdefault(p.city, []).append(p.name)
        room, city = f"{p.name} is in room {p.room}.", f"{p.name} is in {p.city}."
        ask("lookup", room, f"Which room is {p.name} in?", f"What is the room of {p.name}?")
        ask("lookup", city, f"Which city is {p.name} in?", f"What is the city of {p.name}?")
        ask("reverse", room, f"Who is in room {p.room}?", f"Who has room {p.room}?")
        if not p.manager:
            ask("lookup", f"{p.name} leads the team.", f"Who does {p.name} report to?",
                f"Who is {p.name}'s manager?")
            ask("reverse", f"{p.name} leads the team.", "Who leads the team?")
            continue
        fact, m = f"{p.name} reports to {p.manager}", by_name[p.manager]
        ask("lookup", f"{fact}.", f"Who does {p.name} report to?", f"Who is {p.name}'s manager?")
        ask("two_hop", f"{fact}, and {m.name} is in room {m.room}.", f"Which room is {p.name}'s manager in?",
            f"What is the room of {p.name}'s manager?")
        ask("two_hop", f"{fact}, and {m.name} is in {m.city}.", f"Which city is {p.name}'s manager in?",
            f"What is the city of {p.name}'s manager?")
    for city, names in in_city.items():
        ask("counting", f"The number of people in {city} is {len(names)}.", f"How many people are in {city}?",
            f"How many people work in {city}?")
        if len(names) == 1:
            ask("reverse", f"{names[0]} is in {city}.", f"Who is in {city}?", f"Who works in {city}?")
        for name in names if 2 <= len(names) <= 3 else ():
            others = rng.sample([x for x in names if x != name], len(names) - 1)
            ask("other", f"It is {name}.", f"Who besides {' and '.join(others)} is in {city}?")
            whose = " and ".join(f"{x}'s" for x in others)
            ask("other_room", f"It is room {by_name[name].room}.", f"Which room besides {whose} is in {city}?")
    return out


def sample(rng: random.Random, people: int | None = None) -> tuple[str, list[tuple[str, str, str]]]:
    """A document of `people` persons (3 to 30 if not given) and its questions in random order."""
    persons = team(rng, people or rng.randint(3, 30))
    text, qa = tell(rng, persons), questions(rng, persons)
    rng.shuffle(qa)
    return text, qa


def ask(rng: random.Random, kind: str, people: int) -> tuple[str, str, str]:
    """(text, question, answer) of this kind. Documents are drawn until one has such a question, with one
    person more (up to 30) after each twenty that have none: small ones often have none of MARKED."""
    for i in itertools.count():
        text, qa = sample(rng, min(people + i // 20, 30))
        for found, question, answer in qa:
            if found == kind:
                return text, question, answer


class Language:
    """The tokenizer (byte-level BPE, each word of the language one token) and a quick `ids`, word by word."""

    def __init__(self):
        def texts():
            yield from [SPARE] * 20
            rng = random.Random("tokenizer")
            for _ in range(3000):
                document, qa = sample(rng)
                yield document
                yield from (text for _, question, answer in qa for text in (question, answer))
        self.tokenizer = Tokenizer(models.BPE())
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # first word as inner
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.train_from_iterator(texts(), trainers.BpeTrainer(
            vocab_size=2000, min_frequency=2, special_tokens=SPECIAL, show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
        self.size = self.tokenizer.get_vocab_size()
        self.word = functools.lru_cache(None)(lambda word: self.tokenizer.encode(word).ids)
        values = [*NAMES, *CITIES, *map(str, ROOMS), *map(str, range(10))]
        assert all(len(self.word(value)) == 1 for value in values), "each value is one token"
        self.values = {self.word(value)[0] for value in values}
        for i in range(20):                     # what is trained on is what a rendered chat is tokenized to
            document, qa = sample(random.Random(f"check/{i}"))
            chat = f"<|system|>{document}<|end|><|user|>{qa[0][1]}<|end|><|assistant|>"
            assert self.tokenizer.encode(chat).ids == self.prompt(document, qa[0][1]), chat

    def ids(self, text: str) -> list[int]:
        return [i for word in text.split(" ") for i in self.word(word)]

    def prompt(self, document: str, question: str) -> list[int]:
        return [SYSTEM, *self.ids(document), END, USER, *self.ids(question), END, ASSISTANT]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="print a staff list with its questions and answers")
    parser.add_argument("--people", type=int, help="persons in the list (default: drawn from 3 to 30)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the document (default 0)")
    parser.add_argument("--chats", type=int, metavar="N",
                        help="instead: N documents with a question each, kinds in turn, as JSON lines")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    for i in range(args.chats or 0):
        text, question, _ = ask(rng, KINDS[i % len(KINDS)], args.people or rng.randint(3, 30))
        print(json.dumps({"prefix": text, "prompt": question}))
    if not args.chats:
        text, qa = sample(rng, args.people)
        print(text)
        for kind, question, answer in sorted(qa):
            print(f"{kind:9} {question} -> {answer}")
