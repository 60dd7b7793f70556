"""What the embedded checkpoint is trained on: sequences of ids, which rows are masked, and who sees whom.

A sequence is `(ids, weights, kinds, sight)`, the first three lists of one length: weight 0 is shown, above
0 is masked and counts that much in the loss; kind is an index of STATS. Sight says what rows may not see,
in training only; at inference all see all:

blind:  the last answer sees the document and itself, not the question. What is asked can reach it only
        through the document's rows: they must find out that they are meant. Most answers to questions of
        `staff.MARKED` are blind, so that there is something that a prefix run alone cannot know; some
        answers of other kinds are too, which are easier to begin with.
alone:  what precedes the last question does not see it, as in a prefix run alone: in all layers (some
        questions of other kinds: these are to be answered from such a prefix too), or in those below LATE
        (half of the blind: the rest does it above).
"""
from dataclasses import dataclass

import torch

import staff
from staff import ASSISTANT, END, EOS, SYSTEM, USER, Language

STATS = ("restate", *staff.KINDS, "blind")      # the last: blind answers to questions of the other kinds
SEEING = 0.2                    # of the answers to MARKED: what they see at inference must not disturb them
LATE = 3                        # layers


@dataclass(frozen=True)
class Sight:
    """Rows [0, document) are the document, [question, answer) the last question, from there on its answer."""
    document: int = 0
    question: int = 0
    answer: int = 0
    blind: bool = False
    alone: tuple = (False, False)               # below LATE, from LATE on


def restatement(rng, lang: Language, people: int, wordings: int):
    """The facts twice, in another order and wording: what one copy hides the other shows, to be looked up."""
    persons = staff.team(rng, people)
    again, rate = rng.sample(persons, people), rng.uniform(0.2, 0.7)
    ids = [SYSTEM, *lang.ids(staff.tell(rng, persons, wordings)), END, ASSISTANT]
    if rng.random() < 0.6:          # as single facts: of a sentence one value is hidden, rather the second
        weights = [0.0] * len(ids)
        for fact in staff.facts(rng, again):
            fact = lang.ids(fact)
            at = [i for i, t in enumerate(fact) if t in lang.values]
            hide = at[-1 if rng.random() < 0.75 else 0] if rng.random() < 1.3 * rate else None
            weights += [float(i == hide) for i in range(len(fact))]
            ids += fact
        return ids + [EOS], weights + [0.0], [0] * (len(ids) + 1), Sight()
    half = len(ids)
    ids += [*lang.ids(staff.tell(rng, again, wordings)), EOS]
    hidden_in = {value: rng.random() < 0.5 for value in lang.values}
    weights = [float(5 < i and (rng.random() < rate and hidden_in[t] == (i > half) if t in lang.values
                                    else t > END and rng.random() < rate / 12)) for i, t in enumerate(ids)]
    return ids, weights, [0] * len(ids), Sight()


def chat(rng, lang: Language, people: int, wordings: int, turns: int, shares: list[float], tail: int,
         shown: float):
    """Questions about one document; the last answer has `tail` EOS behind it, as a request has. Earlier
    answers are all shown in a share `shown` of the chats, and where the last one may be blind; else they are
    asked for, too, and of other kinds."""
    persons = staff.team(rng, people)
    by_kind = {kind: [] for kind in staff.KINDS}
    for kind, question, answer in staff.questions(rng, persons):
        by_kind[kind].append((question, answer))
    ids, weights, kinds = [SYSTEM, *lang.ids(staff.tell(rng, persons, wordings)), END], [], []
    document = len(ids)
    final = rng.choices(staff.KINDS, shares[:-1])[0]
    told = final in staff.MARKED or rng.random() < shown
    for turn in range(turns):
        last = turn == turns - 1
        allowed = [share * (told or kind not in staff.MARKED) for kind, share in zip(staff.KINDS, shares)]
        kind = final if last else rng.choices(staff.KINDS, allowed)[0]
        kind = kind if by_kind[kind] else "lookup"
        question, answer = rng.choice(by_kind[kind])
        start, answer = len(ids), lang.ids(answer)
        ids += [USER, *lang.ids(question), END, ASSISTANT]
        asked = len(ids)
        region = answer + ([EOS] * tail if last else [END])
        weight = [3.0 if t in lang.values else 1.0 for t in answer]
        weight += [0.5] + [0.1] * (len(region) - len(answer) - 1)                  # EOS is easy and plenty
        t = 1.0 if rng.random() < (0.4 if last else 0.2) else rng.uniform(0.05, 1)
        t = t if last or not told else 0.0
        weights += [0.0] * (len(ids) - len(weights))
        kinds += [0] * (len(ids) - len(kinds)) + [STATS.index(kind)] * len(region)
        weights += [w * min(1 / t, 4) if rng.random() < t else 0.0 for w in weight]
        ids += region
    # Who sees whom in the last turn; the share of blind easy answers falls as they come right.
    draw, easy = rng.random(), kind not in staff.MARKED
    unknown = shares[-1]                # of STATS the last: what blind answers of the easy kinds still lack
    blind = draw > SEEING if not easy else turns == 1 and kind != "counting" and draw < 0.2 + 0.12 * unknown
    if blind and easy:
        kinds[asked:] = [STATS.index("blind")] * (len(ids) - asked)
    alone = (rng.random() < 0.5, False) if blind else (easy and draw > 0.8,) * 2
    return ids, weights, kinds, Sight(document, start, asked, blind, alone)


@dataclass(frozen=True)
class Mix:
    """Shares of what is drawn."""
    long: float = 0.4           # batches whose lists have up to `most` people; else up to 12
    single: float = 0.6         # chats of a single question
    shown: float = 0.5          # other chats whose earlier answers are shown
    counting: float = 1.0       # how much more of what is not known in counting than in other kinds


def batch(rng, lang: Language, most: int, shares: list[float], tokens: int, mix: Mix = Mix()):
    """Sequences of one form and about one length, `tokens` in all: (ids, weights, kinds, biases, tokens),
    the first three (B, T); a bias (B, 1, 1 or T, T) for the layers below LATE and one for the others is
    added to the scores."""
    people = rng.randint(2, most if rng.random() < mix.long else min(most, 12))
    form, told = rng.random(), 0.4 if most < 8 else 0.04
    turns, tail = rng.randint(3, 12), rng.randint(1, 4)
    if form > told + (1 - told) * (1 - mix.single):             # as in a request
        turns, tail = 1, rng.randint(1, 130 if people < 8 and rng.random() < 0.3 else 42)
    rows, total, wordings = [], 0, max(1, min(len(staff.WORDINGS), most - 3))       # one wording first
    while total < tokens:
        rows.append(restatement(rng, lang, min(people, 16), wordings) if form < told
                    else chat(rng, lang, people, wordings, turns, shares, tail, mix.shown))
        total += len(rows[-1][0])
    lengths = torch.tensor([len(row[0]) for row in rows])[:, None]
    T = int(lengths.max())
    ids, weights, kinds = (torch.tensor([part + [fill] * (T - len(part)) for part in parts])
                           for parts, fill in zip(zip(*rows), (EOS, 0.0, 0)))
    sights, at = [row[3] for row in rows], torch.arange(T)

    def of(name):
        return torch.tensor([getattr(sight, name) for sight in sights]).unsqueeze(1)        # (B, 1)

    hide = (at >= lengths)[:, None]             # padding; (B, 1 or T, T)
    if of("blind").any():
        between = (at >= of("document")) & (at < of("answer"))
        hide = hide | (of("blind") & (at >= of("answer")))[:, :, None] & between[:, None]
    biases = []
    for alone in of("alone").unbind(-1):
        alone = alone & (at <= of("question"))  # up to the mark of the user's turn: the prefix of a request
        more = hide | alone[:, :, None] & (at > of("question"))[:, None] if alone.any() else hide
        biases.append(torch.where(more, -1e9, 0.0)[:, None])
    return ids, weights, kinds, biases, total
