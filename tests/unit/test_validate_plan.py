"""Wrong command lines of `validate`: one line that names what is wrong, before any engine starts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_specplugin.cli.main import app
from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.registry import VERIFIERS
from vllm_specplugin.validate import identity
from vllm_specplugin.validate.identity import code_of, hash_of, weights_of
from vllm_specplugin.validate.plan import make_plan
from vllm_specplugin.validate.prompts import TEXTS, generated, load_prompts, name_of
from vllm_specplugin.validate.sampling import Sampling
from vllm_specplugin.validate.state import State, open_state

NGRAM = {"proposer": "ngram"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def told(*arguments: str) -> str:
    """What the command says on stderr; it must be one line, with exit code 2."""
    done = CliRunner().invoke(app, ["validate", *arguments])
    assert done.exit_code == 2, done.output
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert done.stdout == ""
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--alpha", "0"], "--alpha is 0.0; a number between 0 and 1"),
        (["--alpha", "1"], "--alpha is 1.0"),
        (["--alpha", "1.5"], "--alpha is 1.5"),
        (["--bias", "0"], "--bias is 0.0"),
        (["--tokens", "0"], "--tokens is 0; at least 1"),
        (["--seed", "-1"], "--seed is -1; 0 or more"),
        (["--sampling-params", '{"temprature": 1}'], "'temprature', which validate cannot test; did you mean 'temperature'?"),
        (["--sampling-params", '{"seed": 1}'], "'seed', which validate cannot test"),
        (["--sampling-params", '{"temperature": 0}'], "temperature 0, which leaves nothing to chance"),
        (["--sampling-params", '{"top_p": 1.2}'], "'top_p' is 1.2: input should be less than or equal to 1"),
        (["--sampling-params", '{"logit_bias": {"x": 1}}'], "'logit_bias.x"),
        (["--sampling-params", "[1]"], "--sampling-params is [1], no JSON object"),
        (["--engine-args", "{"], "--engine-args is no JSON"),
        (["--engine-args", '{"seed": 3}'], "--engine-args has the key 'seed', which is set by --seed"),
        (["--engine-args", '{"speculative-config": {}}'], "'speculative_config', which is set by --speculative-config"),
        (["--prompts", "/nowhere/prompts.txt"], "--prompts: cannot read /nowhere/prompts.txt"),
    ],
)
def test_options(model: str, arguments: list[str], said: str) -> None:
    assert said in told(model, "-sc", json.dumps(NGRAM), *arguments)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "--speculative-config is missing"),
        ("{}", "--speculative-config is missing or empty"),
        ("{nonsense", "--speculative-config is no JSON"),
        ('"ngram"', 'is "ngram", no JSON object'),
        ('{"proposer": "ngrm"}', "'ngrm' is no proposer; did you mean 'ngram'?"),
        ('{"proposer": "ngram", "verifier": "onehot"}', "'onehot' is no verifier; did you mean 'one_hot'?"),
        ('{"proposer": "ngram", "num_speculative_tokens": 0}', "'num_speculative_tokens' is 0"),
        ('{"proposer": "ngram", "num_speculative_tokens": 1000}', "'num_speculative_tokens' is 1000"),
        ('{"proposer": "ngram", "tree": 1}', "'tree' is no key of --speculative-config"),
        ('{"proposer": "ngram", "verifier": "token"}', "needs the drafts' probabilities"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "'num_speculative_tokens' is 0; a whole number"),
        ('{"method": "ngram", "num_speculative_tokens": "3"}', "'num_speculative_tokens' is '3'"),
        ('{"num_speculative_tokens": 3}', "neither 'proposer' (the plugin's) nor 'method' or 'model' (vLLM's)"),
    ],
)
def test_speculative_config(model: str, config: str | None, said: str) -> None:
    assert said in told(model, *([] if config is None else ["-sc", config]))


def test_models(tmp_path: Path, model: str) -> None:
    config = ["-sc", json.dumps(NGRAM)]
    assert "there is no such folder" in told("/no/such/model", *config)
    assert "there is no such folder" in told("/nosuch", *config)
    assert "there is no such folder" in told("./model", *config)
    assert "there is no such folder" in told("a/b/c", *config)
    assert "a folder without a config.json" in told(str(tmp_path), *config)
    assert make_plan("some-one/on-the-hub", NGRAM).model == "some-one/on-the-hub"


def test_missing_report_libraries(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_specplugin.validate.report.LIBRARIES", ("no_such_library",))
    assert "pip install 'vllm-specplugin[validate]'" in told(model, "-sc", json.dumps(NGRAM))


def test_the_fingerprint_knows_what_changes_samples(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_plan(model, NGRAM).fingerprint()
    assert make_plan(model, dict(NGRAM), tokens=5, bias=0.5).fingerprint() == base
    changes: list[dict[str, Any]] = [
        {"sampling_params": {"top_k": 3}},
        {"engine_args": {"dtype": "float32"}},
        {"prompts": ["a"]},
        {"alpha": 0.01},
        {"seed": 1},
    ]
    seen = {base, *(make_plan(model, NGRAM, **change).fingerprint() for change in changes)}
    seen.add(make_plan(model, {"method": "ngram", "num_speculative_tokens": 2}).fingerprint())
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    seen.add(make_plan(model, NGRAM).fingerprint())
    assert len(seen) == len(changes) + 3


def weights(folder: Path, content: bytes) -> str:
    """A model folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content)
    return str(folder)


def test_the_fingerprint_knows_the_weights(tmp_path: Path) -> None:
    target, draft = weights(tmp_path / "target", b"one"), weights(tmp_path / "draft", b"one")
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": 2}

    def now() -> str:
        return make_plan(target, config).fingerprint()

    seen = {now(), now()}
    assert len(seen) == 1
    (tmp_path / "target" / "README.md").write_text("no weights")
    assert now() in seen
    weights(tmp_path / "target", b"longer")
    seen.add(now())
    weights(tmp_path / "draft", b"longer")
    seen.add(now())
    os.utime(tmp_path / "draft" / "model.safetensors", ns=(1, 1))  # as long as before, but written at another time
    seen.add(now())
    (tmp_path / "target" / "config.json").write_text('{"rope_theta": 1}')
    seen.add(now())
    assert len(seen) == 5
    heads = tmp_path / "heads.pt"  # a single file
    heads.write_bytes(b"one")
    first = weights_of(str(heads))
    heads.write_bytes(b"longer")
    assert weights_of(str(heads)) not in (None, first)
    assert weights_of("some-one/on-the-hub") is None


def test_the_fingerprint_knows_the_environment(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_plan(model, NGRAM).fingerprint()
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_CACHE_ROOT", "VLLM_SPECPLUGIN_CACHE", "HOME_OF_VLLM"):
        monkeypatch.setenv(name, "x")
    assert make_plan(model, NGRAM).fingerprint() == base
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    off = make_plan(model, NGRAM).fingerprint()
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    assert len({base, off, make_plan(model, NGRAM).fingerprint()}) == 3


VERIFIER = """
from vllm_specplugin.scorers.one_hot import OneHotVerifier

class Edited(OneHotVerifier):
    pass
"""


def test_the_fingerprint_knows_the_code(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of somebody else's, whose version stays the same while its verifier is edited."""
    installed = tmp_path / "installed"
    about = installed / "edited_verifier-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: edited-verifier\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[vllm_specplugin.verifiers]\nedited = edited_verifier:Edited\n")
    (installed / "edited_verifier.py").write_text(VERIFIER)
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.delitem(sys.modules, "edited_verifier", raising=False)
    config = NGRAM | {"verifier": "edited"}
    assert code_of(config)["verifier edited"][:2] == ["edited-verifier", "1.0"]
    out = tmp_path / "state.json"
    State(fingerprint=make_plan(model, config).fingerprint()).write(out)
    open_state(out, make_plan(model, config).fingerprint(), fresh=False)
    (installed / "edited_verifier.py").write_text(VERIFIER + "# edited\n")
    with pytest.raises(SpecPluginError, match="other settings, weights or code"):
        open_state(out, make_plan(model, config).fingerprint(), fresh=False)
    edited = make_plan(model, config).fingerprint()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: edited-verifier\nVersion: 1.1\n")
    assert make_plan(model, config).fingerprint() != edited


def test_the_code_of_parts_and_of_what_they_extend_counts() -> None:
    assert {"proposer hybrid", "proposer predicted", "proposer suffix"} <= set(code_of({"proposer": "hybrid"}))
    own = code_of({"method": "ngram", "num_speculative_tokens": 2})
    assert not any(name.startswith(("proposer", "verifier")) for name in own)
    sources = {path.name for path in identity._sources(VERIFIERS.resolve("one_hot"))}
    assert {"one_hot.py", "base.py"} <= sources


def test_an_edited_file_changes_the_hash(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("1")
    files = list(tmp_path.iterdir())
    base = hash_of(files)
    assert hash_of(reversed(files)) == base
    (tmp_path / "b.py").write_text("2")
    assert hash_of(files) != base


def test_every_engine_start_has_a_seed_of_its_own(model: str) -> None:
    plan = make_plan(model, NGRAM)
    seeds = [plan.engine_seed(rounds) for rounds in range(200)]
    assert len(set(seeds)) == 200
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert make_plan(model, NGRAM, seed=1).engine_seed(0) != seeds[0]


# -- sampling parameters -------------------------------------------------------------------------------------


def test_sampling_parameters_for_vllm() -> None:
    assert Sampling.parse({}).for_vllm() == {"temperature": 1.0}
    said = {"temperature": 0.7, "top_k": 5, "logit_bias": {"3": -1.5}, "allowed_token_ids": [1, 3], "max_tokens": 10}
    wanted = {"temperature": 0.7, "top_k": 5, "logit_bias": {3: -1.5}, "allowed_token_ids": [1, 3]}
    assert Sampling.parse(said).for_vllm() == wanted


@pytest.mark.parametrize(
    ("said", "processes"),
    [
        ({}, False),
        ({"max_tokens": 9, "top_k": -1}, False),
        ({"temperature": 0.9}, True),
        ({"top_k": 3}, True),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"logit_bias": {1: 1.0}}, True),
        ({"allowed_token_ids": [1]}, True),
    ],
)
def test_which_parameters_change_the_distribution(said: dict[str, Any], processes: bool) -> None:
    assert Sampling.parse(said).processes is processes


# -- prompts -------------------------------------------------------------------------------------------------


def test_prompts_as_text_and_as_token_ids(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n two \n")
    assert load_prompts(tmp_path / "a.txt") == ["one", "two"]
    (tmp_path / "a.jsonl").write_text('[1, 2]\n{"prompt_token_ids": [3]}\n{"prompt": "four"}\n"five"\n')
    assert load_prompts(tmp_path / "a.jsonl") == [[1, 2], [3], "four", "five"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no prompts"),
        ("[1, -2]", r"line 1 is \[1, -2\]; a list of token ids"),
        ("[]", "line 1 is"),
        ("[true]", "line 1 is"),
        ("[1]\n{", "line 2 is not JSON"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "line 1 is"),
        ('{"text": "a"}', "line 1 is"),
        ("3", "line 1 is 3"),
    ],
)
def test_faulty_prompt_files_name_the_line(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    with pytest.raises(SpecPluginError, match=said):
        load_prompts(file)


def test_built_in_prompts_fit_any_vocabulary() -> None:
    for vocab in (8, 16, 50_000):
        prompts = generated(vocab)
        assert all(0 <= token < vocab for prompt in prompts for token in prompt)
        assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
    assert len(set(TEXTS)) == len(TEXTS)


def test_names_of_prompts_are_short() -> None:
    assert name_of(0, "Hello\n there") == "1: Hello there"
    assert name_of(1, [4, 5]) == "2: token ids 4, 5"
    assert len(name_of(2, "x" * 500)) < 60
