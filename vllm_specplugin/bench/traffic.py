"""What the engines are asked: a user's prompts, or built-in traffic of four kinds that never repeats itself.

The kinds differ in how much of an answer stands in its prompt already. Prompts are made up from word lists, each another one: a
drafter that remembers past answers must not meet the same request again in the next round, which no real traffic would bring.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

from vllm_specplugin.prompt_files import Prompt, ask, assistant, encode, user

CODE, EXTRACTION, CHAT, RANDOM = "code rewriting", "JSON extraction", "chat", "random text"
KINDS = (CODE, EXTRACTION, CHAT, RANDOM)
PER_KIND = 4096
"""Prompts of a kind in the built-in traffic of one run, at most."""
AT_FIRST = 256
"""Of them that are made at once, for the longest; the others as they are asked for, since all of them take seconds."""
RANDOM_TOKENS, RANDOM_ALPHABET = 96, 16
"""Of a prompt of random text, and how many different ones: everything has occurred before and nothing says what comes next, so a
drafter that copies always drafts and is mostly refused."""

NAMES = (
    "Maria",
    "Jonas",
    "Amina",
    "Pedro",
    "Ruth",
    "Carlos",
    "Yuki",
    "Olga",
    "Samir",
    "Ingrid",
    "Tomas",
    "Leila",
    "Ravi",
    "Nora",
)
SURNAMES = ("Lopez", "Weber", "Diallo", "Silva", "Adler", "Ruiz", "Tanaka", "Petrova", "Haddad", "Berg", "Novak", "Okafor", "Rao")
CITIES = (
    "Lisbon",
    "Bremen",
    "Dakar",
    "Porto",
    "Graz",
    "Quito",
    "Osaka",
    "Riga",
    "Amman",
    "Bergen",
    "Brno",
    "Lagos",
    "Pune",
    "Leeds",
)
GOODS = (
    "ceramic bowls",
    "oak tables",
    "cotton towels",
    "copper lamps",
    "wool blankets",
    "steel pans",
    "paper lanterns",
    "tea cups",
)
THINGS = (
    "item",
    "order",
    "ticket",
    "parcel",
    "sensor",
    "recipe",
    "invoice",
    "player",
    "route",
    "sample",
    "device",
    "booking",
    "task",
)
FIELDS = (
    "name",
    "count",
    "price",
    "weight",
    "status",
    "owner",
    "city",
    "date",
    "score",
    "level",
    "size",
    "colour",
    "code",
    "length",
)
TOPICS = ("a lighthouse", "a lost letter", "a night train", "an old orchard", "a chess club", "a mountain hut", "a broken clock")
SETTINGS = (
    "in winter",
    "during a storm",
    "on a small island",
    "in a big city",
    "by the sea",
    "after the war",
    "far in the future",
)
SIZES = ("a short story", "a polite letter", "a newspaper article", "a speech", "a diary entry", "a travel report", "a review")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as token ids, and the kind of traffic that it belongs to."""

    kind: str
    token_ids: list[int]


class Traffic:
    """Requests in a fixed order, the kinds by turns; each is used once before any is used again."""

    def __init__(self, requests: Sequence[Request], more: Mapping[str, Iterator[Request]] | None = None) -> None:
        """`more`: by kind, what follows `requests`, none longer than the longest of them; None where they may be used again."""
        by_kind: dict[str, list[Request]] = {}
        for request in requests:
            by_kind.setdefault(request.kind, []).append(request)
        self.kinds = list(by_kind)
        self.longest = max(len(request.token_ids) for request in requests)
        self._pools, self._more = list(by_kind.values()), more
        self._taken = 0
        self._used = [0] * len(self._pools)

    @property
    def repeated(self) -> bool:
        """Whether some request was used more than once."""
        return any(used > len(pool) for used, pool in zip(self._used, self._pools, strict=True))

    def lasts(self, count: int) -> bool:
        """Whether so many more prompts may be taken; always, where they may be used again."""
        share = -(-count // len(self.kinds))
        return self._more is None or all(self._has(kind, used + share) for kind, used in enumerate(self._used))

    def take(self, count: int) -> list[list[int]]:
        """The next so many prompts."""
        return [self._next() for _ in range(count)]

    def _next(self) -> list[int]:
        kind = self._taken % len(self._pools)
        pool, used = self._pools[kind], self._used[kind]
        self._has(kind, used + 1)
        self._taken += 1
        self._used[kind] += 1
        return pool[used % len(pool)].token_ids

    def _has(self, kind: int, count: int) -> bool:
        """Whether there are so many requests of a kind, once they are made."""
        pool = self._pools[kind]
        if self._more is not None and len(pool) < count:
            pool += islice(self._more[self.kinds[kind]], count - len(pool))
        return len(pool) >= count


def of_user(prompts: Sequence[Prompt], tokenizer: Any, seed: int = 0) -> Traffic:
    """A user's prompts, shuffled, so that every round holds a bit of everything."""
    requests = [Request(prompt.kind, encode(prompt, tokenizer)) for prompt in prompts]
    Random(seed).shuffle(requests)
    return Traffic(requests)


def built_in(tokenizer: Any, kinds: Sequence[str] = KINDS, per_kind: int = PER_KIND, seed: int = 0) -> Traffic:
    """The built-in traffic of some kinds; `tokenizer` is a Hugging Face tokenizer."""
    streams = {kind: _of_kind(kind, tokenizer, per_kind, Random(f"{kind} {seed}")) for kind in kinds}
    first = [request for stream in streams.values() for request in islice(stream, AT_FIRST)]
    longest = max(len(request.token_ids) for request in first)
    return Traffic(first, {kind: (one for one in rest if len(one.token_ids) <= longest) for kind, rest in streams.items()})


def _of_kind(kind: str, tokenizer: Any, count: int, random: Random) -> Iterator[Request]:
    """So many, all of them different."""
    usable = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids)) if kind == RANDOM else []
    made: set[tuple[int, ...]] = set()
    for _ in range(2 * count):  # chance makes few of them again
        if len(made) == count:
            return
        if kind == RANDOM:
            token_ids = random.choices(random.sample(usable, RANDOM_ALPHABET), k=RANDOM_TOKENS)
        else:
            token_ids = encode(MAKERS[kind](random), tokenizer)
        if tuple(token_ids) not in made:
            made.add(tuple(token_ids))
            yield Request(kind, token_ids)


def _code(random: Random) -> Prompt:
    """A small class whose answer is the class again, with one name changed."""
    thing, fields = random.choice(THINGS), random.sample(FIELDS, 4)
    number, changed = random.randint(100, 999), random.choice(fields)
    lines = [f"class {thing.title()}{number}:", f"    def __init__(self, {', '.join(fields)}):"]
    lines += [f"        self.{field} = {field}" for field in fields]
    for field in fields[:2]:
        lines += ["", f"    def has_{field}(self, {field}):", f"        return self.{field} == {field}"]
    block = "```python\n" + "\n".join(lines) + "\n```"
    return ask(CODE, "rename", f"{block}\n\nRepeat the code above, with `{changed}` renamed to `{changed}_{number}`.")


def _extraction(random: Random) -> Prompt:
    """Two records with their JSON, and a third one without."""
    turns = []
    for _ in range(3):
        record = {
            "order": random.randint(1000, 9999),
            "name": f"{random.choice(NAMES)} {random.choice(SURNAMES)}",
            "city": random.choice(CITIES),
            "count": random.randint(1, 40),
            "product": random.choice(GOODS),
            "price": random.randint(5, 900),
        }
        text = "Order {order}: {name} from {city} bought {count} {product} for {price} euros.".format(**record)
        turns += [user(f"Turn this order into JSON.\n\n{text}"), assistant(json.dumps(record))]
    return Prompt(EXTRACTION, "orders", tuple(turns[:-1]))


def _chat(random: Random) -> Prompt:
    """Something to write about freely."""
    who, what, where = random.choice(NAMES), random.choice(TOPICS), random.choice(SETTINGS)
    return ask(CHAT, "writing", f"Write {random.choice(SIZES)} about {who} from {random.choice(CITIES)} and {what} {where}.")


MAKERS: dict[str, Callable[[Random], Prompt]] = {CODE: _code, EXTRACTION: _extraction, CHAT: _chat}
