"""Questions on examples/staff.txt and their answers, as tasks of lm-evaluation-harness. Offline."""
from pathlib import Path

from datasets import Dataset

LIST = (Path(__file__).resolve().parents[3] / "examples" / "staff.txt").read_text(encoding="utf-8").strip()
QUESTIONS = [
    ("Who is Zoe's manager?", "Zoe reports to Jim.", "Zoe reports to Noah."),
    ("Who does Ben report to?", "Ben reports to Noah.", "Ben reports to Ken."),
    ("Who is in room 66?", "Lara is in room 66.", "Paul is in room 66."),
    ("Which city is Ida's manager in?", "Ida reports to Fred, and Fred is in Tokyo.",
     "Ida reports to Fred, and Fred is in Oslo."),
    ("Which room is Tom's manager in?", "Tom reports to Noah, and Noah is in room 70.",
     "Tom reports to Noah, and Noah is in room 66."),
    ("Which room besides Lily's is in Lima?", "It is room 52.", "It is room 44."),
    ("Who besides Ben is in Bern?", "It is Ann.", "It is Ben."),
    ("How many people work in Oslo?", "The number of people in Oslo is 3.",
     "The number of people in Oslo is 7."),
]
EXAMPLES = [
    ("Which room is Zoe in?", "Zoe is in room 64.", "Zoe is in room 37."),
    ("Who is in room 52?", "Dora is in room 52.", "Ken is in room 52."),
]


def docs(**_) -> dict:
    return {"test": rows(QUESTIONS), "train": rows(EXAMPLES)}


def rows(questions: list) -> Dataset:
    return Dataset.from_list([dict(question=question, answer=right, choices=[wrong, right], list=LIST)
                              for question, right, wrong in questions])
