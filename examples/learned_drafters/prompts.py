"""Prompts to distil from, of the demo's four kinds, made from what every Python brings: its own sources and its help texts.

    python examples/learned_drafters/prompts.py --count 1600 --out prompts.jsonl

Cost: seconds. Result: 1,600 prompts. Of five, two are code rewriting (functions and stretches of files of the standard library),
one each a document question (paragraphs of `pydoc`'s topics), JSON extraction (made-up records) and chat. None of the demo's own
prompts is among them, nor any of the texts that those are about, so what is measured on the demo is measured on text that the
heads have not seen.

For heads that serve your users, distil from your users' prompts instead: acceptance is highest on the kind of text that they
were trained on.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data import topics

Message = dict[str, str]

MOST_REPEATS = 2000
"""Prompts in a row that were made before, after which a kind is taken to be used up."""

RENAMES = ("value", "item", "source", "target", "entry", "number", "text", "first", "result", "current", "key", "limit")
CODE_TASKS = (
    "Repeat the code above, with `{old}` renamed to `{new}`.",
    "Rewrite the code above with `{new}` instead of `{old}`, and change nothing else.",
    "Rename `{old}` to `{new}` in this code.",
    "Repeat the code above, with type hints.",
    "Repeat the code above, with a comment before each step.",
    "Add a docstring to the function above and repeat all of its code.",
    "Repeat the code above.",
)
WHOLE_CODE_TASKS = (
    "Repeat the code above, with `{old}` renamed to `{new}`.",
    "Repeat the code above, with `{old}` renamed to `{new}` everywhere.",
    "Rename `{old}` to `{new}` in the file above and give me the whole file.",
    "Repeat the file above, and change nothing.",
)
DOCUMENT_TASKS = (
    "What does the text say about {subject}? Answer with a quotation from the text.",
    "Quote the sentence about {subject}.",
    "Summarize the text above in two sentences.",
    "Explain in your own words what the text says about {subject}.",
    "Repeat the first two sentences of the text.",
    "Which facts does the text give about {subject}?",
)
CHAT_TASKS = (
    "Can you give me three tips for {activity}?",
    "Why is {activity} so hard, and what helps?",
    "What should a beginner know about {activity}?",
    "Write a short e-mail to a friend about {activity}.",
    "Explain {thing} to a child of ten.",
    "What is {thing}?",
    "How does {thing} work?",
    "Write a short story about {thing}.",
    "List five facts about {thing}.",
    "What are the advantages and disadvantages of {thing}?",
)
CHAT_STYLES = ("", "", " Answer in two sentences.", " Answer in one paragraph.", " Use simple words.", " Give an example, too.")
ACTIVITIES = (
    "learning a language", "saving money", "growing tomatoes", "running a marathon", "writing a diary", "baking bread",
    "moving to another city", "making friends", "studying for an exam", "playing chess", "cooking for a family",
    "reading more", "travelling alone", "caring for a cat", "giving a talk", "fixing a bicycle", "working from home",
    "painting a room", "using less plastic", "waking up early", "taking photographs", "learning the guitar", "swimming",
    "keeping bees",
)  # fmt: skip
THINGS = (
    "the moon", "a rainbow", "a volcano", "gravity", "electricity", "the internet", "a vaccine", "the ocean", "a magnet",
    "inflation", "a black hole", "photosynthesis", "a bridge", "a compass", "a database", "the heart", "a bank", "a glacier",
    "a telescope", "steam power", "a search engine", "the seasons", "an earthquake", "a battery", "solar energy", "a library",
    "the Roman Empire", "chocolate", "a bicycle", "music",
)  # fmt: skip
PEOPLE = (
    "Nora Field", "Peter Vance", "Li Wen", "Sofia Rossi", "Omar Haddad", "Ingrid Dahl", "Pablo Soto", "Yuki Mori",
    "Grace Obi", "Ivan Petrov",
)  # fmt: skip
CITIES = ("Oslo", "Porto", "Kyoto", "Lima", "Cairo", "Dublin", "Prague", "Hanoi", "Nairobi", "Turin", "Ghent", "Boston")
GOODS = (
    "desk lamps",
    "wool scarves",
    "steel knives",
    "glass jars",
    "paper notebooks",
    "garden chairs",
    "silver rings",
    "rubber boots",
)
JOBS = ("teacher", "plumber", "pilot", "chemist", "gardener", "editor", "baker", "surveyor")
DOCSTRING = re.compile(r'^ *""".*"""\n', re.MULTILINE)
LANGUAGES = ("Italian", "Korean", "Dutch", "Arabic", "Polish", "Swahili", "Danish")


def functions() -> list[tuple[str, list[str]]]:
    """Functions of the standard library of 5 to 30 lines, each with names that occur in it."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and 5 <= (node.end_lineno or 0) - node.lineno <= 30:
                lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
                names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and len(inner.id) > 2}
                code = textwrap.dedent("\n".join(lines))
                if names and len(code) < 1200:
                    found.append((code, sorted(names)))
    return found


def stretches() -> list[tuple[str, list[str]]]:
    """Classes, and neighbouring statements of a file, of 20 to 50 lines, each with names that occur in it."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        lines = source.splitlines()
        body = ast.parse(source).body
        for first in range(len(body)):
            for last in range(first, min(first + 12, len(body))):
                start, end = body[first].lineno, body[last].end_lineno or 0
                text = "\n".join(lines[start - 1 : end])
                nodes = body[first : last + 1]
                if (
                    20 <= end - start <= 50
                    and len(text) < 1300
                    and any(isinstance(n, ast.FunctionDef | ast.ClassDef) for n in nodes)
                ):
                    names = {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name) and len(n.id) > 2}
                    if names:
                        found.append((text, sorted(names)))
                    break
    return found


def paragraphs() -> list[str]:
    """Paragraphs of Python's help texts that are prose, of 300 to 1,200 characters."""
    found = set()
    for topic in topics.topics.values():
        for paragraph in topic.split("\n\n"):
            text = " ".join(paragraph.split())
            if 300 <= len(text) <= 1200 and text[0].isupper() and text.count(" ") > 40:
                found.add(text.replace('"', "").replace("*", ""))
    return sorted(found)


def code(random: random.Random, small: list[tuple[str, list[str]]], large: list[tuple[str, list[str]]]) -> list[Message]:
    """A function to rewrite, a stretch of a file, or docstrings to add after an example of it; the last a sixth of the time."""
    kind = random.random()
    if kind < 1 / 6:
        example = random.choice(
            [text for text, _ in small if len(text) < 600 and text.count('"""') == 2 * len(DOCSTRING.findall(text)) > 0]
        )
        asked = random.choice(random.choice([small, large]))
        before = DOCSTRING.sub("", example)
        task = "Add docstrings.\n\n"
        return [
            _user(task + _block(before)),
            {"role": "assistant", "content": _block(example)},
            _user(task + _block(asked[0])),
        ]
    sources, tasks = (small, CODE_TASKS) if kind < 0.5 else (large, WHOLE_CODE_TASKS)
    text, names = random.choice(sources)
    return [_user(f"{_block(text)}\n\n{random.choice(tasks).format(old=random.choice(names), new=random.choice(RENAMES))}")]


def _block(code: str) -> str:
    return f"```python\n{code}\n```"


def document(random: random.Random, texts: list[str]) -> list[Message]:
    text = random.choice(texts)
    words = [word.strip(".,:;()") for word in text.split() if len(word) > 6 and word.strip(".,:;()").isalpha()]
    subject = random.choice(words or ["the subject"])
    return [_user(f"{text}\n\n{random.choice(DOCUMENT_TASKS).format(subject=subject)}")]


def record(random: random.Random) -> tuple[str, dict[str, object]]:
    """A line about something made up, and what it says as a mapping."""
    name, city = random.choice(PEOPLE), random.choice(CITIES)
    date = f"20{random.randint(15, 25)}-{random.randint(1, 12):02}-{random.randint(1, 28):02}"
    if random.random() < 0.5:
        number, count, goods = random.randint(100, 9999), random.randint(1, 40), random.choice(GOODS)
        price = round(random.randint(100, 90000) / 100, 2)
        line = f"Invoice {number}: {name} from {city} ordered {count} {goods} for {price:.2f} euros, delivered on {date}."
        return line, {
            "invoice": number,
            "name": name,
            "city": city,
            "count": count,
            "product": goods,
            "price": price,
            "delivered": date,
        }
    job, spoken = random.choice(JOBS), random.sample(LANGUAGES, 2)
    phone = f"555-{random.randint(200, 9999):04}"
    line = f"{name} | {job} | {city} | since {date} | {phone} | speaks {spoken[0]} and {spoken[1]}"
    return line, {"name": name, "job": job, "city": city, "since": date, "phone": phone, "languages": spoken}


def extraction(random: random.Random) -> list[Message]:
    """One or two records with their JSON, then one without; all in one style."""
    indent, shots = random.choice([None, 2]), random.choice([1, 1, 2])
    ask = random.choice(["Turn this record into JSON.", "Extract the fields as JSON.", "Give me this line as a JSON object."])
    messages = []
    for _ in range(shots):
        line, fields = record(random)
        messages += [_user(f"{ask}\n\n{line}"), {"role": "assistant", "content": json.dumps(fields, indent=indent)}]
    kind = fields.keys()
    while True:
        line, fields = record(random)
        if fields.keys() == kind:
            return [*messages, _user(f"{ask}\n\n{line}")]


def chat(random: random.Random) -> list[Message]:
    question = random.choice(CHAT_TASKS).format(activity=random.choice(ACTIVITIES), thing=random.choice(THINGS))
    return [_user(question + random.choice(CHAT_STYLES))]


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def prompts(count: int, seed: int) -> Iterator[dict[str, object]]:
    """`count` different prompts: of five, two of code and one of each other kind."""
    dice = random.Random(seed)
    small, large, texts = functions(), stretches(), paragraphs()
    makers: dict[str, Callable[[], list[Message]]] = {
        "code rewriting": lambda: code(dice, small, large),
        "document question": lambda: document(dice, texts),
        "JSON extraction": lambda: extraction(dice),
        "chat": lambda: chat(dice),
    }
    seen: set[str] = set()
    repeats = 0
    kinds = ["code rewriting", "document question", "code rewriting", "JSON extraction", "chat"]
    while len(seen) < count:
        kind = kinds[len(seen) % len(kinds)]
        messages = makers[kind]()
        if (key := json.dumps(messages)) not in seen:
            repeats = 0
            seen.add(key)
            yield {"kind": kind, "messages": messages}
        elif (repeats := repeats + 1) == MOST_REPEATS:
            raise SystemExit(f"There are not many more prompts of the kind {kind!r} than those of the first {len(seen)}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("prompts.jsonl"))
    arguments = parser.parse_args()
    with arguments.out.open("w", encoding="utf-8") as file:
        for prompt in prompts(arguments.count, arguments.seed):
            file.write(json.dumps(prompt) + "\n")
    print(f"{arguments.count} prompts written")


if __name__ == "__main__":
    main()
