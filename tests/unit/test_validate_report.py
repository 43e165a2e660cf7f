"""The report as JSON, as a page and as a table."""

from __future__ import annotations

import importlib.util
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.support.validate_tokens import plain, walked
from vllm_specplugin.errors import ConfigError, SpecPluginError
from vllm_specplugin.validate import report as report_module
from vllm_specplugin.validate.betting import Martingale
from vllm_specplugin.validate.chisquare import Cell, chi_square
from vllm_specplugin.validate.greedy import Output, compare
from vllm_specplugin.validate.html import render, write_html
from vllm_specplugin.validate.report import Report, Settings, require_report_libraries
from vllm_specplugin.validate.summary import rows
from vllm_specplugin.validate.table import print_report
from vllm_specplugin.validate.verdict import Levels, Verdict, decide

HOSTILE = '<script>alert("x")</script> $x^2 [bold]'
SETTINGS = Settings(
    model="some/model",
    speculative_config={"proposer": "ngram", "options": {"max_n": 3}},
    sampling_params={"temperature": 0.7},
    engine={"vllm": "0.32.0", "model_runner": "V1", "dtype": "float32", "nothing": None},
    verifier="one_hot",
    alpha=1e-3,
    bias=0.01,
)


def made(lenient: float = 0.0, passes: int = 8000, **changes: object) -> Report:
    rng, levels = np.random.default_rng(1), Levels.of(1e-3)
    martingale = Martingale(levels.martingale)
    martingale.add(walked(rng, passes, lenient=lenient))
    martingale.add(plain(rng, 100))
    p = rng.dirichlet(np.ones(16))
    test = chi_square([Cell(HOSTILE, p, rng.multinomial(2000, p))], levels.chi_square, 0.05)
    row = {1: -0.5, 2: -1.5}
    parted = (HOSTILE, Output([1, 1], [row, row]), Output([1, 2], [row, {2: -0.5, 1: -1.5}]))
    greedy = compare([("equal", Output([1], [row]), Output([1], [row])), *([parted] if lenient else [])], "float32", {2: "</td>"})
    evidence = martingale.evidence(0.01)
    decision = decide(evidence, test, greedy)
    values = {
        "settings": SETTINGS,
        "verdict": decision.verdict,
        "reason": decision.reason,
        "martingale": evidence,
        "greedy": greedy,
        "chi_square": test,
        "not_tested": [f"Grammars: {HOSTILE}."],
        "seconds": 12.3,
    }
    return Report.model_validate(values | changes)


@pytest.fixture(scope="module")
def lossless() -> Report:
    return made()


@pytest.fixture(scope="module")
def biased() -> Report:
    return made(lenient=0.2)


def bare() -> Report:
    """A run that was interrupted before it measured anything."""
    evidence = Martingale(1e-3).evidence(0.01)
    decision = decide(evidence, None, None, interrupted=True)
    return Report(settings=SETTINGS, verdict=decision.verdict, reason=decision.reason, martingale=evidence, interrupted=True)


class Page(HTMLParser):
    """Tags with their attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


# -- JSON --------------------------------------------------------------------------------------------------------


def test_json_comes_back_as_it_was(tmp_path: Path, lossless: Report, biased: Report) -> None:
    assert (lossless.verdict, biased.verdict) == (Verdict.LOSSLESS, Verdict.BIASED)
    for report in (lossless, biased, bare()):
        path = tmp_path / "report.json"
        report.write_json(path)
        assert Report.read_json(path) == report
        assert not re.search(r"\b(NaN|Infinity)\b", path.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize("text", ["", "{}", '{"version": 2}'])
def test_what_is_no_report_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(SpecPluginError, match=r"report.json is no report") as error:
        Report.read_json(path)
    assert "\n" not in str(error.value)


def test_an_unknown_field_is_refused(lossless: Report) -> None:
    with pytest.raises(ValueError, match="surprise"):
        Report.model_validate({**dict(lossless), "surprise": 1})
    with pytest.raises(ValueError, match="surprise"):
        Settings.model_validate({**dict(SETTINGS), "surprise": 1})


def test_missing_libraries_are_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    require_report_libraries()
    found = importlib.util.find_spec
    monkeypatch.setattr(report_module.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    with pytest.raises(ConfigError, match=r"needs matplotlib, .*pip install 'vllm-specplugin\[validate\]'"):
        require_report_libraries()


# -- the page ----------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_else(tmp_path: Path, biased: Report) -> None:
    path = tmp_path / "report.html"
    write_html(biased, path)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert not {"script", "link", "iframe", "object", "embed"} & {tag for tag, _ in page.tags}
    assert all(str(image["src"]).startswith("data:image/svg+xml;base64,") for image in page.all("img"))
    assert not re.search(r"(src|href)=\"(?!data:)|url\(|@import|\son\w+=", text)


def test_every_figure_is_there_and_said_in_words(biased: Report) -> None:
    images = Page(render(biased)).all("img")
    # The path, draft / residual / processed at drafted places, top / processed elsewhere, the chi-square.
    assert len(images) == 1 + 3 + 2 + 1
    alts = [str(image["alt"]) for image in images]
    assert f"It reached it after {biased.martingale.crossed_at:,} tokens" in alts[0]
    assert "draft 1: " in alts[1]
    assert "bonus: " in alts[4]
    assert "plain: " in alts[4]
    assert "16 largest bins" in alts[-1]


def test_what_users_wrote_is_no_markup(biased: Report) -> None:
    page = Page(render(biased))
    assert HOSTILE in page.text  # in the table of mismatches and in what was not tested
    assert page.text.count("</td>") == 1  # a token's text


def test_the_page_says_what_the_report_says(lossless: Report, biased: Report) -> None:
    for report in (lossless, biased, bare()):
        text = " ".join(Page(render(report)).text.split())
        assert report.verdict.value in text
        assert report.reason[1:] in text
        for row in rows(report):
            assert row.figure in text
        for value in ("some/model", '{"proposer": "ngram", "options": {"max_n": 3}}', "0.32.0", "model runner"):
            assert value in text
        assert "nothing None" not in text


def test_the_same_report_gives_the_same_page(lossless: Report) -> None:
    assert render(lossless) == render(lossless)


def test_a_page_without_results_is_still_a_page() -> None:
    page = Page(render(bare()))
    assert page.open == []
    assert len(page.all("img")) == 1
    assert "INCONCLUSIVE" in page.text


# -- the table ---------------------------------------------------------------------------------------------------


def printed(report: Report, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_report(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_verdict_comes_first_and_what_was_not_tested_last(biased: Report) -> None:
    lines = printed(biased).splitlines()
    assert lines[0].startswith("BIASED: the e-value reached 1,111 after")
    assert lines[-2:] == ["Not tested", f"- Grammars: {HOSTILE}."]
    assert f"{HOSTILE}: differs from token 1, '1' against '</td>': no tie" in "\n".join(lines)


def test_one_row_for_each_test(lossless: Report, biased: Report) -> None:
    found = {row.test: row for row in rows(lossless)}
    assert list(found) == [
        "Greedy equality",
        "Sampling (martingale)",
        "accepted drafts",
        "after a refusal",
        "bonus, undrafted",
        "its power",
        "First tokens (chi-square)",
        "Acceptance length",
    ]
    assert [row.verdict for row in found.values()] == ["equal", *["no evidence"] * 4, "enough", "no evidence", ""]
    assert not any(row.bad for row in found.values())
    bad = [row.test for row in rows(biased) if row.bad]
    assert bad[:3] == ["Greedy equality", "Sampling (martingale)", "accepted drafts"]
    assert "bonus, undrafted" not in bad
    for row in rows(lossless):
        assert row.figure in printed(lossless)


def test_figures_of_the_rows(biased: Report) -> None:
    found = {row.test: row for row in rows(biased)}
    assert found["Greedy equality"].verdict == "1 bug"
    assert found["Greedy equality"].figure.startswith("1 of 2 prompts equal, 2 tokens; numeric noise 1.9e-06 nats")
    assert found["Sampling (martingale)"].figure.endswith(f"of 1,111 allowed; {biased.martingale.tokens:,} tokens")
    length = biased.martingale.acceptance_length
    assert found["Acceptance length"].figure.startswith(f"{length:.2f} tokens per target pass; accepted up to position")


def test_what_is_granted_to_rounding_is_said(lossless: Report) -> None:
    said = "ounding between the engines is granted a noncentrality of 12"
    assert lossless.chi_square is not None
    assert said not in render(lossless)
    rounded = lossless.model_copy(update={"chi_square": replace(lossless.chi_square, noncentrality=12.3)})
    assert render(rounded).count(said) == 2  # in the table and below it
    assert said in " ".join(printed(rounded, width=400).split())


def test_what_was_not_made_is_not_tested() -> None:
    verdicts = {row.test: row.verdict for row in rows(bare())}
    assert verdicts["Greedy equality"] == verdicts["First tokens (chi-square)"] == "not tested"
    assert verdicts["Sampling (martingale)"] == verdicts["its power"] == "nothing drafted"
    assert verdicts["accepted drafts"] == "not tested"


def test_a_lossy_verifier_has_a_row() -> None:
    lossy = bare().model_copy(update={"settings": SETTINGS.model_copy(update={"verifier": "typical[/]", "lossy": True})})
    first = rows(lossy)[0]
    assert (first.test, first.verdict, first.bad) == ("Verifier", "lossy", True)
    assert "typical[/] is lossy" in first.figure
    assert first.figure in printed(lossy)


def test_ties_are_counted_and_not_held_against_the_engine(lossless: Report) -> None:
    parted = Output([1], [{1: -0.5, 2: -0.5}]), Output([2], [{2: -0.5, 1: -0.5}])
    ties = compare([("a", *parted), ("b", *parted)])
    row = rows(lossless.model_copy(update={"greedy": ties}))[0]
    assert (row.verdict, row.bad) == ("2 ties", False)
    assert row.figure.startswith("0 of 2 prompts equal, 0 tokens")


def test_the_table_fits_a_narrow_terminal(lossless: Report) -> None:
    assert max(len(line) for line in printed(lossless, width=80).splitlines()) <= 80
