"""Requests whose answers are known beforehand, for replay: what agents, editors and people ask for, and noise.

Everything comes from a seeded generator and from texts that every Python brings along; `encode` turns text into token ids.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import random
import re
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Encode = Callable[[str], list[int]]

MAX_PROMPT, MAX_ANSWER = 1500, 600


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and the answer that the target gives to it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


# -- agents: calls of a few tools, again and again ---------------------------------

SERVICES = ("billing", "search", "checkout", "profile", "mailer", "catalogue", "payments", "sessions")
ACTIONS = ("get_status", "list_incidents", "restart_service", "query_logs", "open_ticket", "read_file")


def tool_call(chance: random.Random, call: int) -> str:
    """What an agent answers: one or two calls with arguments of their own in wording that is always alike."""
    service, action = chance.choice(SERVICES), chance.choice(ACTIONS)
    arguments: dict[str, object] = {"service": service, "environment": chance.choice(("production", "staging"))}
    if action == "query_logs":
        arguments |= {"query": f"level:error AND service:{service}", "since": f"2026-11-{chance.randint(1, 30):02}T00:00:00Z"}
        arguments |= {"limit": chance.choice((50, 100, 200)), "order": "descending"}
    elif action == "open_ticket":
        arguments |= {"title": f"{service} is failing health checks", "severity": chance.choice(("low", "medium", "high"))}
        arguments |= {"labels": ["automation", "on-call", service], "assignee": chance.choice(("ana", "bela", "chen"))}
    elif action == "read_file":
        arguments |= {"path": f"/srv/{service}/config/{chance.choice(('main', 'limits', 'routes'))}.yaml", "encoding": "utf-8"}
    thought = f"I will call {action} for the {service} service to find out what is wrong before I change anything."
    payload = {"id": f"call_{call:06}", "type": "function", "function": {"name": action, "arguments": arguments}}
    return f"{thought}\n<tool_call>\n{json.dumps(payload, indent=2)}\n</tool_call>\n"


def agents(encode: Encode, count: int, seed: int) -> list[Exchange]:
    chance = random.Random(seed)
    system = "You are an on-call agent. Tools: " + ", ".join(ACTIONS) + ". Answer with one call as JSON.\n"
    exchanges = []
    for call in range(count):
        task = f"{system}Incident {chance.randint(1000, 9999)}: look after the service {chance.choice(SERVICES)}.\n"
        exchanges.append(exchange(encode, task, tool_call(chance, call)))
    return exchanges


# -- editors: a file comes back with some lines changed, and is asked for again -----


def edited(lines: list[str], chance: random.Random, rate: float) -> list[str]:
    """The lines, some of them renamed in, commented or dropped."""
    result = []
    for line in lines:
        kind = chance.random() / rate
        if kind < 0.4:
            names = re.findall(r"[a-z_]{4,}", line)
            new = chance.choice(("value", "result", "entry", "buffer"))
            result.append(line.replace(chance.choice(names), new) if names else line)
        elif kind < 0.7:
            result.append(f"{line}  # checked in round {chance.randint(1, 9)}")
        elif kind >= 1.0:
            result.append(line)
    return result


def edits(encode: Encode, count: int, seed: int) -> list[Exchange]:
    """Each passage of the standard library is edited in four attempts, among those of other passages."""
    chance = random.Random(seed)
    passages = code_passages(chance, count // 4 + 1)
    order = [passage for passage in passages for _ in range(4)]
    blocks = [order[first : first + 32] for first in range(0, len(order), 32)]
    for block in blocks:
        chance.shuffle(block)
    exchanges = []
    for passage in [passage for block in blocks for passage in block][:count]:
        prompt = "Clean up this code and give all of it back:\n" + "\n".join(passage) + "\n"
        exchanges.append(exchange(encode, prompt, "\n".join(edited(passage, chance, 0.12)) + "\n"))
    return exchanges


def code_passages(chance: random.Random, count: int) -> list[list[str]]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    passages = []
    while len(passages) < count:
        lines = chance.choice(files).read_text(errors="ignore").splitlines()
        if len(lines) > 80:
            first = chance.randrange(len(lines) - 50)
            passages.append(lines[first : first + 40])
    return passages


# -- new text, and none -------------------------------------------------------------


def prose(encode: Encode, count: int, seed: int) -> list[Exchange]:
    """Python's manual, a passage after the other: text that is no copy of anything before."""
    text = encode("".join(pydoc_data.topics.topics.values()))
    size = 300
    passages = [text[first : first + size] for first in range(0, len(text) - size, size)]
    return [Exchange(tuple(part[:50]), tuple(part[50:])) for part in (passages * (count // len(passages) + 1))[:count]]


def noise(encode: Encode, count: int, seed: int) -> list[Exchange]:
    """Tokens by chance."""
    chance = random.Random(seed)
    return [
        Exchange(tuple(chance.randrange(49_000) for _ in range(200)), tuple(chance.randrange(49_000) for _ in range(200)))
        for _ in range(count)
    ]


def exchange(encode: Encode, prompt: str, answer: str) -> Exchange:
    return Exchange(tuple(encode(prompt)[-MAX_PROMPT:]), tuple(encode(answer)[:MAX_ANSWER]))


TRAFFIC: dict[str, Callable[[Encode, int, int], list[Exchange]]] = {
    "agents' tool calls": agents,
    "code edits with retries": edits,
    "new prose": prose,
    "random tokens": noise,
}
