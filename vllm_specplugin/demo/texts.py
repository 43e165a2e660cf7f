"""The texts behind the demo's prompts, written for it: two small programs, two documents, two lists of records."""

INVENTORY_PY = '''\
"""Keeps count of what lies in a small warehouse."""

import json
from pathlib import Path


class Inventory:
    def __init__(self, path):
        self.path = Path(path)
        self.items = {}

    def load(self):
        if self.path.exists():
            self.items = json.loads(self.path.read_text())

    def save(self):
        self.path.write_text(json.dumps(self.items, indent=2))

    def add(self, name, count):
        if count <= 0:
            raise ValueError("count must be positive")
        self.items[name] = self.items.get(name, 0) + count

    def remove(self, name, count):
        if name not in self.items:
            raise KeyError(name)
        if count > self.items[name]:
            raise ValueError("not enough items")
        self.items[name] -= count
        if self.items[name] == 0:
            del self.items[name]

    def total(self):
        return sum(self.items.values())

    def report(self):
        lines = []
        for name in sorted(self.items):
            lines.append(f"{name}: {self.items[name]}")
        return "\\n".join(lines)
'''

TEMPERATURE_PY = """\
import csv
import statistics


def read_rows(path):
    rows = []
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            rows.append((row["station"], float(row["celsius"])))
    return rows


def group_by_station(rows):
    groups = {}
    for station, celsius in rows:
        groups.setdefault(station, []).append(celsius)
    return groups


def to_fahrenheit(celsius):
    return celsius * 9 / 5 + 32


def summarize(groups):
    summary = {}
    for station, values in groups.items():
        summary[station] = {
            "lowest": min(values),
            "highest": max(values),
            "mean": statistics.mean(values),
        }
    return summary


def print_summary(summary):
    for station, numbers in sorted(summary.items()):
        mean = to_fahrenheit(numbers["mean"])
        print(f"{station}: {mean:.1f} F")


def main(path):
    rows = read_rows(path)
    groups = group_by_station(rows)
    print_summary(summarize(groups))
"""

WORDS_PY = """\
def count_words(text):
    words = text.split()
    return len(words)
"""

WORDS_DOCUMENTED_PY = '''\
def count_words(text):
    """Count the words of a text."""
    words = text.split()
    return len(words)
'''

LIGHTHOUSE = """\
The lighthouse at Corran Head was built between 1871 and 1874 by the engineer Ada Merrow. Its tower is 38 metres high \
and was made of grey granite from a quarry nine kilometres inland, because the local sandstone crumbles in salt water. \
The first lamp burned rapeseed oil and could be seen for 22 kilometres on a clear night. In 1909 it was replaced by a \
paraffin lamp, and in 1953 by an electric one. The last keeper, Tom Hale, left the station in 1986, when the light was \
made automatic. Every winter the keepers painted the wooden gallery with white lead paint, which has since been \
removed. The station is open to visitors from April to October. A ticket costs six pounds, and children under twelve \
enter free. The path from the village takes forty minutes and is closed when the wind is stronger than eighty \
kilometres per hour.\
"""

LIGHTHOUSE_QUESTION = "How was the lighthouse built, what did the first lamp burn, and when is the station open?"

LIBRARY = """\
Rules of the Millbrook Town Library. Anyone who lives or works in Millbrook can get a library card at no cost by \
showing a letter with their address. A card is valid for three years. Members may borrow up to twelve books and four \
films at the same time. Books are lent for four weeks and films for one week. A loan can be renewed twice, unless \
another member has reserved the item. The fine for a late book is ten cents per day, and the fine for a late film is \
fifty cents per day. Members who owe more than five euros cannot borrow until they have paid. Lost items must be \
replaced or paid for at the full price. The reading room on the second floor is a quiet place, and telephones must be \
switched off there. The library is open from nine to six on weekdays and from ten to two on Saturdays. It is closed on \
Sundays and on public holidays.\
"""

LIBRARY_QUESTION = "How many books may I borrow, for how long, and can I renew a loan?"

ORDERS = (
    "Order 1041: Maria Lopez from Lisbon bought 3 ceramic bowls for 54.00 euros, paid by card, shipped on 2024-03-11.",
    "Order 1042: Jonas Weber from Bremen bought 1 oak table for 420.00 euros, paid by invoice, shipped on 2024-03-12.",
    "Order 1043: Amina Diallo from Dakar bought 12 cotton towels for 96.00 euros, paid by card, shipped on 2024-03-13.",
)

ORDERS_JSON = (
    '{"order": 1041, "name": "Maria Lopez", "city": "Lisbon", "count": 3, "product": "ceramic bowls", '
    '"price": 54.0, "paid by": "card", "shipped": "2024-03-11"}',
    '{"order": 1042, "name": "Jonas Weber", "city": "Bremen", "count": 1, "product": "oak table", '
    '"price": 420.0, "paid by": "invoice", "shipped": "2024-03-12"}',
)

STAFF = (
    "Name: Ruth Adler; role: nurse; city: Graz; started: 2016; phone: 555-0134; languages: German, English",
    "Name: Carlos Ruiz; role: radiologist; city: Quito; started: 2020; phone: 555-0190; languages: Spanish, French",
)

STAFF_JSON = (
    """\
{
  "name": "Ruth Adler",
  "role": "nurse",
  "city": "Graz",
  "started": 2016,
  "phone": "555-0134",
  "languages": ["German", "English"]
}""",
)
