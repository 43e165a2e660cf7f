"""Names to classes by entry points: a broken third party spoils its own name only."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vllm_specplugin import Proposer, RegistryError, Verifier
from vllm_specplugin.proposers.base import ProposerOptions
from vllm_specplugin.registry import PROPOSERS, VERIFIERS

MODULE = """
from vllm_specplugin import Drafts, Proposer
class Good(Proposer):
    def propose(self, step):
        return Drafts.none(step.num_rows)
class NotAProposer: ...
"""


def install(folder: Path, name: str, entry_points: str) -> None:
    """What an installed package looks like to Python: a module and a dist-info on the path."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm_specplugin.proposers]\n{entry_points}\n")
    (folder / f"{name}_module.py").write_text(MODULE)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_built_ins_come_in_by_the_same_door() -> None:
    assert "ngram" in PROPOSERS.names()
    assert issubclass(PROPOSERS.resolve("ngram"), Proposer)
    assert issubclass(VERIFIERS.resolve("one-hot"), Verifier)
    assert {entry.distribution for entry in VERIFIERS.entries() if entry.name == "one_hot"} == {"vllm-specplugin"}


def test_a_third_party_is_found_and_imported_only_when_asked_for(site: Path) -> None:
    install(site, "lazy", "lazy-one = lazy_module:Good")
    assert "lazy_one" in PROPOSERS.names()
    assert "lazy_module" not in sys.modules
    assert PROPOSERS.resolve("lazy-one").__name__ == "Good"
    assert PROPOSERS.resolve("lazy_one").Options is ProposerOptions


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("nowhere_module:Good", ["cannot be imported", "ModuleNotFoundError", "third"]),
        ("third_module:Missing", ["cannot be imported", "AttributeError"]),
        ("third_module:NotAProposer", ["no subclass of", "Proposer"]),
    ],
)
def test_a_broken_third_party_is_named_and_spoils_nothing_else(site: Path, target: str, parts: list[str]) -> None:
    install(site, "third", f"bad = {target}")
    with pytest.raises(RegistryError) as caught:
        PROPOSERS.resolve("bad")
    for part in ["'bad'", *parts]:
        assert part in str(caught.value)
    described = {entry.name: text for entry, text in PROPOSERS.describe(lambda cls: cls.__name__)}
    assert described["bad"].startswith("broken: ")
    assert described["ngram"] == "NgramProposer"


def test_two_packages_that_claim_one_name_are_both_named(site: Path) -> None:
    install(site, "one", "twice = one_module:Good")
    install(site, "other", "twice = other_module:Good")
    with pytest.raises(RegistryError, match=r"registered by .*(one|other).* and .*(one|other)"):
        PROPOSERS.resolve("twice")


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(RegistryError, match=r"'n-gram' is no proposer; did you mean 'ngram'\? Installed: .*ngram"):
        PROPOSERS.resolve("n-gram")
    with pytest.raises(RegistryError, match=r"'zzz' is no verifier\. Installed:"):
        VERIFIERS.resolve("zzz")
