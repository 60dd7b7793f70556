"""The questions that accuracy.py asks: held-out staff lists, each asked at a prefix ratio that is aimed at.

A list is the system message of a chat; where a ratio wants a longer prefix, earlier questions and right
answers stand in between, as the model has seen them. What precedes the last question is the prefix. Masks
behind the prompt make up the ratio: at least as many as the longest answer of that kind to that list takes
with its EOS, so that their number tells nothing.
"""
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))
import staff  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402

RATIOS = (0.3, 0.5, 0.7, 0.85, 0.92, 0.97)
PEOPLE, TURNS, MASKS = (3, 30), 11, 130     # of a list; earlier turns, masks: at most
SHARE = 5                                   # questions a kind and list: at most
PERSON, TURN, OWN = 13, 24, 24              # tokens, about: to choose a list that can meet a ratio


@dataclass
class Question:
    """One request, what is right, and where it belongs."""
    kind: str
    target: float               # the ratio aimed at
    document: int
    own: str
    prompt: list
    prefix_len: int
    gen_length: int
    answer: str

    @property
    def ratio(self) -> float:
        return self.prefix_len / (len(self.prompt) + self.gen_length)


def draw_questions(tokenizer: Tokenizer, each: int, ratios=RATIOS, seed=0) -> list[Question]:
    """`each` questions of each kind, spread evenly over the ratios. Those on one document stand together."""
    made, document = [], 0
    for j, ratio in enumerate(ratios):
        wanted = Counter({kind: each // len(ratios) + (j < each % len(ratios)) for kind in staff.KINDS})
        S = ratio / (1 - ratio)                         # prefix tokens for each of the suffix
        least = min(max(round((S * (OWN + 1) - TURNS * TURN) / PERSON), PEOPLE[0]), PEOPLE[1])
        most = min(max(round(S * (MASKS + OWN / 3) / PERSON) - 1, least), PEOPLE[1])
        for i in range(100 * each):
            if not +wanted:
                break
            rng = random.Random(f"accuracy/{seed}/{ratio}/{i}")
            text, qa = staff.sample(rng, rng.randint(least, most))
            room = Counter()
            for kind, _, answer in qa:
                room[kind] = max(room[kind], len(tokenizer.encode(answer)) + 1)
            chat = [dict(role="system", content=text)]
            ask = lambda question: tokenizer.chat([*chat, dict(role="user", content=question)])
            ids, P = ask(qa[0][1])
            for _ in range(TURNS):                  # a longer prefix, if it is too short for room behind it
                if P >= S * (len(ids) - P + max(room.values())):
                    break
                _, question, answer = qa.pop()
                chat += [dict(role="user", content=question), dict(role="assistant", content=answer)]
                ids, P = ask(qa[0][1])
            taken = Counter()
            for kind, own, answer in qa:
                if taken[kind] < min(SHARE, wanted[kind]):
                    taken[kind] += 1
                    ids, P = ask(own)
                    G = min(max(round(P / ratio) - len(ids), room[kind]), MASKS)
                    made.append(Question(kind, ratio, document, own, ids, P, G, answer))
            wanted -= taken
            document += bool(taken)
        if +wanted:
            raise ValueError(f"no staff list for r = {ratio} has questions of the kind {min(+wanted)}; leave "
                             "out that ratio")
    return made
