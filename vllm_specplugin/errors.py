"""The errors that users of the plugin meet: one small tree, each naming the culprit, what was expected and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SpecPluginError(Exception):
    """Base of everything that the plugin raises on purpose; its text is one line made for the user."""


class ConfigError(SpecPluginError, ValueError):
    """A key of ``--speculative-config`` is unknown, of the wrong type, or does not go with another one."""


class RegistryError(SpecPluginError, ValueError):
    """A proposer or verifier was named that is not installed, cannot be imported, or is installed twice."""


class SeamError(SpecPluginError, RuntimeError):
    """This vLLM lacks a place that the plugin attaches to."""


class DraftError(SpecPluginError, ValueError):
    """A proposer returned something that is no set of drafts (wrong type or shape)."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """End a sentence about an unknown `word`: ``"; did you mean 'ngram'?"`` where a known name is near it, else ``"."``."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else "."
