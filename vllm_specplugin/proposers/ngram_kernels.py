"""The compiled loops of the n-gram index: one call per engine step for the whole batch.

A request's index is a trie over its reversed n-grams, as a suffix tree is: paths without a branch are not spelt out. Its nodes
lie in one open-addressing table, each under the shortest n-gram that leads there. A node stands for all occurrences of that
n-gram so far, knows on how many tokens (`agreed`, from n to `max_n`) they all agree, and where the latest one ends. Where
`agreed` is less than `max_n`, its children, one token longer than `agreed`, tell the occurrences apart.

To take in a token is to walk down from the node of the last `min_n` tokens, as long as the new occurrence agrees with all of
a node's. It costs a look-up per node on the way, nearly always one to three, and at most two new nodes (the new occurrence,
and the old ones of a node that it splits), whatever `max_n` is. What is found on the way is the answer: the latest earlier
occurrence of the longest suffix that has one.

A table entry is one int64, 0 where empty:

    bits 38..62  hash of the n-gram, 25 bits; entries are ordered by it, so that a table grows in one sequential sweep
    bits 33..37  n - 1
    bits 28..32  agreed - 1
    bits  0..27  end of the latest occurrence: the place of the token after it

The hash only decides where to look; whether an entry is the n-gram is decided by the tokens.

At a large batch nearly every access misses the caches (each request has its own table, and the model has run in between),
so `advance` works in passes over the batch, each asking for the memory that the next one needs.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from vllm_specplugin.compiled import kernel, part

HASH_BITS, LENGTH_BITS, END_BITS = 25, 5, 28
MAX_N = 1 << LENGTH_BITS
MAX_TOKENS = (1 << END_BITS) - 1
LENGTH_MASK = MAX_N - 1
KEY_SHIFT = LENGTH_BITS + END_BITS

# Columns of `state[slot]`, one cache line per request. TABLE counts words (int64) of the arena, TOKENS its int32 halves.
TABLE, TABLE_SIZE, ENTRIES, TOKENS, CAPACITY, LENGTH, INDEXED, MATCH = range(8)
STATE_COLUMNS = 8

# What `advance` says of a row: served; no slot; not the tokens that follow the known ones; block full; still being built.
DONE, UNKNOWN, GAP, FULL, BEHIND = range(5)

# Columns of `work`: table places looked at, tokens compared. Tests count these instead of measuring time.
PROBES, COMPARED = range(2)

BUILD_GROUP = 32

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FOLD = np.uint64(32)
_HASH_SHIFT = np.uint64(64 - HASH_BITS)

Words = NDArray[np.int64]
Tokens = NDArray[np.int32]


@intrinsic
def prefetch(typing_context, array, index):  # type: ignore[no-untyped-def]
    """Ask for the cache line of `array[index]` without waiting for it. Any index is safe."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        int32 = ir.IntType(32)
        llvm_type = ir.FunctionType(ir.VoidType(), [address.type, int32, int32, int32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [address.type], llvm_type)
        builder.call(function, [address, int32(0), int32(3), int32(1)])  # to read, into every cache level, data
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@part
def mix(state: np.uint64, token: np.int32) -> np.uint64:
    """The state of an n-gram with one more token in front."""
    state = (state ^ np.uint64(token)) * _MULTIPLIER
    return state ^ (state >> _FOLD)


@part
def make_key(state: np.uint64, n: int) -> int:
    """Hash and length of an n-gram as an entry holds them."""
    hashed = np.int64((state * _MULTIPLIER) >> _HASH_SHIFT)
    return (hashed << LENGTH_BITS) | (n - 1)  # type: ignore[return-value]


@part
def make_entry(key: int, agreed: int, end: int) -> int:
    return (((key << LENGTH_BITS) | (agreed - 1)) << END_BITS) | end


@part
def agreed_of(entry: int) -> int:
    return ((entry >> END_BITS) & LENGTH_MASK) + 1


@part
def home(key: int, size: int) -> int:
    """The place in a table of `size` where the search for a key starts."""
    return ((key >> LENGTH_BITS) * size) >> HASH_BITS


@part
def find(
    words: Words, tokens: Tokens, table: int, size: int, start: int, end: int, n: int, key: int, work: Words
) -> tuple[int, int]:
    """The word that holds the node of the `n` tokens before `end`, or the empty one where it belongs.

    And on how many tokens the occurrence at `end` agrees with the node's, no more than those do among themselves.
    """
    place = home(key, size)
    while True:
        work[PROBES] += 1
        entry = words[table + place]
        if entry == 0:
            return table + place, 0
        if entry >> KEY_SHIFT == key:
            other = entry & MAX_TOKENS
            most = min(agreed_of(entry), other)
            same = 0
            while same < most and tokens[start + other - 1 - same] == tokens[start + end - 1 - same]:
                same += 1
            work[COMPARED] += same
            if same >= n:
                return table + place, same
        place += 1
        if place == size:
            place = 0


@part
def put(words: Words, table: int, size: int, entry: int) -> None:
    """Enter a node that is known to be absent."""
    place = home(entry >> KEY_SHIFT, size)
    while words[table + place] != 0:
        place += 1
        if place == size:
            place = 0
    words[table + place] = entry


@part
def index_token(
    words: Words,
    tokens: Tokens,
    table: int,
    size: int,
    start: int,
    end: int,
    min_n: int,
    max_n: int,
    state: np.uint64,
    work: Words,
) -> tuple[int, int]:
    """Take in the occurrences that end before `end`; `state` is that of the shortest n-gram.

    Returns where the latest earlier occurrence of the longest known one ends (0 if none is known), and the nodes added.
    """
    if end < min_n:
        return 0, 0
    n, match = min_n, 0
    while True:
        key = make_key(state, n)
        place, same = find(words, tokens, table, size, start, end, n, key, work)
        entry = words[place]
        if entry == 0:
            words[place] = make_entry(key, max_n, end)
            return match, 1
        match, agreed = entry & MAX_TOKENS, agreed_of(entry)
        words[place] = make_entry(key, same, end)
        if same == max_n:
            return match, 0
        while n < same:
            n += 1
            state = mix(state, tokens[start + end - n])
        n += 1
        if same < agreed:
            break
        state = mix(state, tokens[start + end - n])
    # The node splits: from here on the new occurrence differs from the old ones, which agree among themselves further on.
    put(words, table, size, make_entry(make_key(mix(state, tokens[start + end - n]), n), max_n, end))
    if match < n:  # the old one is at the start of the text
        return match, 1
    put(words, table, size, make_entry(make_key(mix(state, tokens[start + match - n]), n), agreed, match))
    return match, 2


@part
def index_range(
    words: Words,
    tokens: Tokens,
    row: Words,
    until: int,
    min_n: int,
    max_n: int,
    states: NDArray[np.uint64],
    first: int,
    work: Words,
) -> bool:
    """Index a request's tokens up to `until`, their shortest n-grams' states given; False where its table is too full.

    A table is full at two thirds: beyond, the runs that a search walks grow quickly.
    """
    table, size, start = row[TABLE], row[TABLE_SIZE], row[TOKENS]
    entries, indexed, match = row[ENTRIES], row[INDEXED], row[MATCH]
    room = size * 2 // 3 - 2
    while indexed < until and entries <= room:
        indexed += 1
        match, added = index_token(words, tokens, table, size, start, indexed, min_n, max_n, states[first], work)
        entries += added
        first += 1
    row[ENTRIES], row[INDEXED], row[MATCH] = entries, indexed, match
    return bool(indexed == until)


@part
def hash_shortest(words: Words, tokens: Tokens, row: Words, end: int, min_n: int, salt: np.uint64) -> np.uint64:
    """The state of the `min_n` tokens before `end`; asks for the place of their entry."""
    state = salt
    if end >= min_n:
        for n in range(1, min_n + 1):
            state = mix(state, tokens[row[TOKENS] + end - n])
        prefetch(words, row[TABLE] + home(make_key(state, min_n), row[TABLE_SIZE]))
    return state


@part
def fetch_longer(words: Words, tokens: Tokens, row: Words, end: int, min_n: int, max_n: int, state: np.uint64) -> None:
    """Where the shortest n-gram seems to be known, ask for its latest occurrence and for the place of the next node."""
    key = make_key(state, min_n)
    entry = words[row[TABLE] + home(key, row[TABLE_SIZE])]
    if end >= min_n and entry >> KEY_SHIFT == key:
        prefetch(tokens, row[TOKENS] + (entry & MAX_TOKENS) - max_n)  # to compare, and below to draft: one line or two
        prefetch(tokens, row[TOKENS] + (entry & MAX_TOKENS) + 4)
        following = agreed_of(entry) + 1
        if following <= min(max_n, end):
            for n in range(min_n + 1, following + 1):
                state = mix(state, tokens[row[TOKENS] + end - n])
            prefetch(words, row[TABLE] + home(make_key(state, following), row[TABLE_SIZE]))


@part
def append(tokens: Tokens, row: Words, ids: Tokens, first: int, last: int, length: int) -> int:
    """Append what a step committed, unless that was done already; says whether the row can be indexed and drafted for."""
    behind = row[INDEXED] < row[LENGTH]
    new = length - row[LENGTH]
    if new != 0:
        if new != last - first:
            return GAP
        if length > row[CAPACITY]:
            return FULL
        tail = row[TOKENS] + row[LENGTH]
        for i in range(new):
            tokens[tail + i] = ids[first + i]
        row[LENGTH] = length
    return BEHIND if behind else DONE


@part
def draft(tokens: Tokens, row: Words, limit: int, out: Tokens) -> int:
    """Copy the tokens after the match, going on with the copies where the known tokens end; returns how many."""
    if row[MATCH] == 0:
        return 0
    source, known = row[TOKENS] + row[MATCH], row[LENGTH] - row[MATCH]
    count = max(0, min(limit, len(out)))
    for i in range(count):
        out[i] = tokens[source + i] if i < known else out[i - known]
    return count


@kernel
def advance(
    words: Words,
    tokens: Tokens,
    state: Words,
    slots: Words,
    ids: Tokens,
    offsets: Words,
    lengths: Words,
    limits: Words,
    min_n: int,
    max_n: int,
    salt: np.uint64,
    drafts: Tokens,
    counts: Words,
    status: Words,
    work: Words,
) -> bool:
    """Take a step's committed tokens into the indexes and draft; True where every row is DONE. Calling it again is harmless.

    `words` [arena] and `tokens` [2 * arena] are the same memory; `state` [slots, STATE_COLUMNS]; `slots` [rows], -1 where a
    row has none; `ids` [total], `offsets` [rows + 1], `lengths`, `limits` [rows] as in Step. Writes `drafts` [rows, k],
    `counts` and `status` [rows]. Costs O(max_n) per committed token, or O(max_n^2) in theory, and O(k) per row.
    """
    states = np.empty(len(ids), dtype=np.uint64)
    for r in range(len(slots)):
        if slots[r] >= 0:
            row = state[slots[r]]
            prefetch(tokens, row[TOKENS] + row[LENGTH] - 1)
    for r in range(len(slots)):
        status[r] = UNKNOWN
        if slots[r] >= 0:
            row = state[slots[r]]
            status[r] = append(tokens, row, ids, offsets[r], offsets[r + 1], lengths[r])
            if status[r] == DONE:
                for i in range(row[LENGTH] - row[INDEXED]):
                    states[offsets[r] + i] = hash_shortest(words, tokens, row, row[INDEXED] + i + 1, min_n, salt)
    for r in range(len(slots)):
        if status[r] == DONE:
            row = state[slots[r]]
            for i in range(row[LENGTH] - row[INDEXED]):
                fetch_longer(words, tokens, row, row[INDEXED] + i + 1, min_n, max_n, states[offsets[r] + i])
    all_done = True
    for r in range(len(slots)):
        counts[r] = 0
        if status[r] == DONE:
            row = state[slots[r]]
            if index_range(words, tokens, row, row[LENGTH], min_n, max_n, states, offsets[r], work):
                counts[r] = draft(tokens, row, limits[r], drafts[r])
            else:
                status[r] = FULL
        all_done = all_done and status[r] == DONE
    return all_done


@kernel
def build(
    words: Words, tokens: Tokens, state: Words, slot: int, until: int, min_n: int, max_n: int, salt: np.uint64, work: Words
) -> bool:
    """Index the tokens of one slot up to `until`; False where its table is too full, to be called again after growth."""
    states = np.empty(BUILD_GROUP, dtype=np.uint64)
    row = state[slot]
    while row[INDEXED] < until:
        first = row[INDEXED] + 1
        last = min(until, row[INDEXED] + BUILD_GROUP)
        for end in range(first, last + 1):
            states[end - first] = hash_shortest(words, tokens, row, end, min_n, salt)
        for end in range(first, last + 1):
            fetch_longer(words, tokens, row, end, min_n, max_n, states[end - first])
        if not index_range(words, tokens, row, last, min_n, max_n, states, 0, work):
            return False
    return True


@kernel
def rehash(words: Words, old: int, old_size: int, new: int, new_size: int) -> None:
    """Move the entries of one table into an empty one."""
    for i in range(old_size):
        entry = words[old + i]
        if entry != 0:
            put(words, new, new_size, entry)
