"""The compiled loops of suffix drafting: one call per engine step takes in what was committed, one drafts.

Two kinds of tree (`suffix_tree`) are kept. A request's own is in a block of the arena that `ngram_index` manages, described by a
row of `state` as there. The one of all answers has a table of its own, over a ring of pieces of answers (`suffix_answers`):

    ring     HEAD, the position after the latest chunk; TOTAL, positions handed out so far; CURSOR of the sweep; NODES
    pieces   per request: BEGIN and END of the piece of the ring that it writes to, NEXT, where its next token goes, and KNOWN,
             how many tokens the request had after its last step
    origins  per 32 places of the ring: how many tokens of context the piece that starts there repeats; -1 for none

A piece starts with a mark, a negative number that occurs once in the ring, so that no context reaches beyond it. After it come
the tokens that lead up to the piece (of the prompt, or of the piece before), which are context only, then the answer's.
"""

from __future__ import annotations

import numpy as np

from vllm_specplugin.compiled import kernel_over, part
from vllm_specplugin.proposers import ngram_kernels, suffix_tree
from vllm_specplugin.proposers.ngram_kernels import (
    BEHIND,
    DONE,
    ENTRIES,
    FULL,
    GAP,
    INDEXED,
    LENGTH,
    MAX_TOKENS,
    STATE_COLUMNS,
    TABLE,
    TABLE_SIZE,
    TOKENS,
    UNKNOWN,
    Tokens,
    Words,
    append,
)
from vllm_specplugin.proposers.suffix_tree import (
    BOTH,
    GLOBAL,
    LOCAL,
    NODE_WORDS,
    Odds,
    consult,
    judge,
    learn,
    put,
    sweep,
    trust_class,
)

# What `ngram_index` asks a module of kernels for beside the functions.
__all__ = ["BEHIND", "DONE", "FULL", "GAP", "STATE_COLUMNS", "UNKNOWN"]

kernel = kernel_over(ngram_kernels, suffix_tree)

HEAD, TOTAL, CURSOR, NODES = range(4)
BEGIN, NEXT, END, KNOWN = range(4)
PIECE_COLUMNS = 4
MADE, MADE_AT = range(2)

CHUNK = 256
"""Places that the ring hands out at a time: to one request, or to several short ones after each other."""
PIECE = 32
"""Places that a piece starts at a multiple of."""
EMPTY = -(1 << 31)
SWEPT = 8
"""Places of the table looked at per token, so that a quarter of the ring passes between two looks at the same place."""

NO_MASK = MAX_TOKENS
"""A request's own tokens lie in no ring."""


# -- the ring of answers -----------------------------------------------------------


@part
def mark_of(position: int) -> int:
    return -1 - position


@part
def is_alive(row: Words, ring: Words, mask: int) -> bool:
    """The piece has not been overwritten."""
    return row[END] > 0 and ((ring[HEAD] - row[END]) & MAX_TOKENS) <= mask


@part
def start_piece(tokens: Tokens, origins: Words, row: Words, mask: int, context: Tokens) -> None:
    """Write mark and context at BEGIN."""
    place = row[BEGIN] & mask
    tokens[place] = mark_of(row[BEGIN])
    for i in range(len(context)):
        tokens[place + 1 + i] = context[i]
    origins[place // PIECE] = len(context)
    row[NEXT] = row[BEGIN] + 1 + len(context)


@part
def take_chunk(tokens: Tokens, origins: Words, ring: Words, row: Words, mask: int) -> None:
    """Give a request the chunk after the latest one, overwriting the oldest."""
    row[BEGIN] = ring[HEAD]
    row[END] = row[BEGIN] + CHUNK
    place = row[BEGIN] & mask
    tokens[place : place + CHUNK] = EMPTY
    origins[place // PIECE : (place + CHUNK) // PIECE] = -1
    ring[HEAD] = row[END] & MAX_TOKENS
    ring[TOTAL] += CHUNK


@part
def last_tokens(tokens: Tokens, row: Words, ring: Words, mask: int, most: int) -> Tokens:
    """A copy of up to `most` tokens before NEXT; none where the piece was overwritten."""
    count = min(most, row[NEXT] - row[BEGIN] - 1) if is_alive(row, ring, mask) else 0
    place = (row[BEGIN] & mask) + row[NEXT] - row[BEGIN]
    return tokens[place - count : place].copy()


@kernel
def begin(tokens: Tokens, origins: Words, ring: Words, pieces: Words, slot: int, context: Tokens, known: int) -> None:
    """Start a piece in what is left of the one that `slot` holds, or in a new chunk if that is too short."""
    pieces[slot, KNOWN] = known
    row, mask = pieces[slot], len(tokens) - 1
    first = (row[NEXT] + PIECE - 1) // PIECE * PIECE
    if is_alive(row, ring, mask) and row[END] - first >= 2 * PIECE + len(context):
        row[BEGIN] = first
    else:
        take_chunk(tokens, origins, ring, row, mask)
    start_piece(tokens, origins, row, mask, context)


@kernel
def take_in(
    words: Words,
    tokens: Tokens,
    origins: Words,
    ring: Words,
    pieces: Words,
    slots: Words,
    ids: Tokens,
    offsets: Words,
    lengths: Words,
    min_n: int,
    max_n: int,
    salt: np.uint64,
    odds: Odds,
    judged: bool,
) -> bool:
    """Append to the answers what each row committed; `slots` [rows], -1 for none; `ids`, `offsets`, `lengths` as in Step.

    False, and nothing done, where a row that committed something has no slot, or its tokens do not follow on the known ones.
    """
    mask, size = len(tokens) - 1, len(words) // NODE_WORDS
    source = GLOBAL if judged else -1
    for r in range(len(slots)):
        new = offsets[r + 1] - offsets[r]
        if new > 0 and (slots[r] < 0 or pieces[slots[r], KNOWN] != lengths[r] - new):
            return False
    for r in range(len(slots)):
        if offsets[r] == offsets[r + 1]:
            continue
        row = pieces[slots[r]]
        row[KNOWN] = lengths[r]
        for i in range(offsets[r], offsets[r + 1]):
            if row[NEXT] == row[END] or not is_alive(row, ring, mask):
                context = last_tokens(tokens, row, ring, mask, max_n)
                take_chunk(tokens, origins, ring, row, mask)
                start_piece(tokens, origins, row, mask, context)
            end = row[NEXT]
            tokens[(row[BEGIN] & mask) + end - row[BEGIN]] = ids[i]
            row[NEXT] += 1
            known = min(end - row[BEGIN], max_n)
            room = ring[NODES] + 2 <= size * 3 // 4
            head = ring[HEAD]
            ring[NODES] += learn(words, tokens, 0, size, 0, mask, head, end, known, min_n, max_n, salt, room, odds, source)
            if ring[TOTAL] > len(tokens):
                ring[CURSOR], removed = sweep(words, size, mask, head, ring[CURSOR], SWEPT)
                ring[NODES] -= removed
    return True


# -- the requests' own -------------------------------------------------------------


@part
def index_range(
    words: Words, tokens: Tokens, row: Words, until: int, min_n: int, max_n: int, salt: np.uint64, odds: Odds, source: int
) -> bool:
    """Take in a request's tokens up to `until`; False where its table is too full. A table is full at two thirds."""
    table, size, start = row[TABLE], row[TABLE_SIZE], row[TOKENS]
    indexed, entries = row[INDEXED], row[ENTRIES]
    room = size * 2 // 3 - 2
    while indexed < until and entries <= room:
        known = min(indexed, max_n)
        entries += learn(words, tokens, table, size, start, NO_MASK, 0, indexed, known, min_n, max_n, salt, True, odds, source)
        indexed += 1
    row[INDEXED], row[ENTRIES] = indexed, entries
    return bool(indexed == until)


@kernel
def build(
    words: Words,
    tokens: Tokens,
    state: Words,
    slot: int,
    until: int,
    min_n: int,
    max_n: int,
    salt: np.uint64,
    odds: Odds,
) -> bool:
    """Index the tokens of one slot up to `until`; False where its table is too full, to be called again after growth."""
    return index_range(words, tokens, state[slot], until, min_n, max_n, salt, odds, -1)


@kernel
def rehash(words: Words, old: int, old_size: int, new: int, new_size: int) -> None:
    """Move the nodes of one table into an empty one."""
    for i in range(old_size):
        entry = words[old + NODE_WORDS * i]
        if entry != 0:
            put(words, new, new_size, entry, words[old + NODE_WORDS * i + 1])


@kernel
def advance(
    words: Words,
    tokens: Tokens,
    state: Words,
    slots: Words,
    ids: Tokens,
    offsets: Words,
    lengths: Words,
    min_n: int,
    max_n: int,
    salt: np.uint64,
    odds: Odds,
    status: Words,
) -> bool:
    """Take a step's tokens into the requests' own trees; True where every row is DONE. Calling it again is harmless.

    `words` [arena] and `tokens` [2 * arena] are the same memory; `state` [slots, STATE_COLUMNS]; `slots` [rows], -1 where a
    row has none; `ids` [total], `offsets` [rows + 1], `lengths` [rows] as in Step. Writes `status` [rows].
    """
    all_done = True
    for r in range(len(slots)):
        status[r] = UNKNOWN
        if slots[r] >= 0:
            row = state[slots[r]]
            status[r] = append(tokens, row, ids, offsets[r], offsets[r + 1], lengths[r])
            if status[r] == DONE and not index_range(words, tokens, row, row[LENGTH], min_n, max_n, salt, odds, LOCAL):
                status[r] = FULL
        all_done = all_done and status[r] == DONE
    return all_done


# -- drafting ----------------------------------------------------------------------


@part
def judge_drafts(tokens: Tokens, row: Words, mask: int, guesses: Tokens, classes: Words, made: Words, trust: Odds) -> None:
    """Compare a row's last drafts with what was appended to its answer since; once, and not where that went on in another chunk.

    A draft is judged where all before it came true, whether the target verified it or drew the token by itself.
    """
    first = made[MADE_AT]
    if row[BEGIN] < first:
        place = (row[BEGIN] & mask) + first - row[BEGIN]
        for i in range(min(made[MADE], row[NEXT] - first)):
            hit = guesses[i] == tokens[place + i]
            judge(trust, classes[i], hit)
            if not hit:
                break
    made[MADE] = 0


@kernel
def draft(
    words: Words,
    tokens: Tokens,
    state: Words,
    slots: Words,
    status: Words,
    answer_words: Words,
    answer_tokens: Tokens,
    ring: Words,
    pieces: Words,
    answer_slots: Words,
    limits: Words,
    min_n: int,
    max_n: int,
    salt: np.uint64,
    odds: Odds,
    trust: Odds,
    guesses: Tokens,
    classes: Words,
    made: Words,
    least: float,
    drafts: Tokens,
    expected: Odds,
    counts: Words,
) -> None:
    """Draft token by token, each by the better forecast of the two trees, as long as all so far stand with probability `least`.

    Before that the last drafts are judged: `guesses` and their `classes` of trust [slots, k], and `made` [slots, 2], how many
    there were and at which NEXT. Writes `drafts` and `expected` [rows, k] and `counts` [rows].
    """
    mask, answer_size = len(answer_tokens) - 1, len(answer_words) // NODE_WORDS
    text = np.empty(max_n + drafts.shape[1], dtype=np.int32)
    for slot in answer_slots:
        if slot >= 0:
            judge_drafts(answer_tokens, pieces[slot], mask, guesses[slot], classes[slot], made[slot], trust)
    for r in range(len(slots)):
        counts[r] = 0
        slot = answer_slots[r]
        if slot < 0 or limits[r] <= 0:
            continue
        recent = last_tokens(answer_tokens, pieces[slot], ring, mask, max_n)
        known = at = len(recent)
        text[:at] = recent
        own = state[max(slots[r], 0)]
        own_size = own[TABLE_SIZE] if slots[r] >= 0 and status[r] == DONE else 0
        path = 1.0
        made[slot, MADE_AT] = pieces[slot, NEXT]
        for i in range(min(limits[r], drafts.shape[1])):
            token, chance = consult(
                words, tokens, own[TABLE], own_size, own[TOKENS], NO_MASK, 0, text, at, known, min_n, max_n, salt, odds, LOCAL
            )
            other, hope = consult(
                answer_words,
                answer_tokens,
                0,
                answer_size,
                0,
                mask,
                ring[HEAD],
                text,
                at,
                known,
                min_n,
                max_n,
                salt,
                odds,
                GLOBAL,
            )
            witnesses = BOTH if token == other else LOCAL if chance >= hope else GLOBAL
            if hope > chance:
                token, chance = other, hope
            if token < 0:
                break
            judged_by = trust_class(chance, i, witnesses)
            chance = trust[0, judged_by]
            path *= chance
            # One that is held back will be judged too: else what was once misjudged would never be tried again.
            guesses[slot, i], classes[slot, i], made[slot, MADE] = token, judged_by, i + 1
            if path < least:
                break
            drafts[r, i], expected[r, i] = token, chance
            counts[r] = i + 1
            text[at] = token
            at += 1
            known = min(known + 1, max_n)
