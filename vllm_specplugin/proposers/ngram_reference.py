"""The executable specification of the n-gram proposer: brute force over one request, O(tokens * max_n) per draft."""

from __future__ import annotations

from collections.abc import Sequence


def ngram_draft(tokens: Sequence[int], min_n: int, max_n: int, limit: int) -> list[int]:
    """Up to `limit` tokens to follow `tokens`; none where no suffix of min_n to max_n tokens occurs earlier."""
    known = list(tokens)
    for n in range(min(max_n, len(known) - 1), min_n - 1, -1):
        for end in range(len(known) - 1, n - 1, -1):
            if known[end - n : end] == known[-n:]:
                text = list(known)
                for place in range(end, end + limit):
                    text.append(text[place])  # may be a token that was only just drafted
                return text[len(known) :]
    return []
