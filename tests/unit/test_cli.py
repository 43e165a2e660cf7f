"""The command line: exit codes, one-line errors, `list`, and what `doctor` makes of what it is told. vLLM is not imported."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support import steps
from vllm_specplugin import Capabilities, Drafts, Proposer, SpecPluginError
from vllm_specplugin.cli import diagnosis
from vllm_specplugin.cli.main import app
from vllm_specplugin.config import PROPOSERS
from vllm_specplugin.runtime import inspect as engine_inspect
from vllm_specplugin.runtime import seams

SCRIPTED = Path(__file__).resolve().parents[1] / "support" / "scripted"

TYPED = '''
import sys
from typing import Literal
from pydantic import Field
from vllm_specplugin import Capabilities, Drafts, Proposer, ProposerOptions

print("an import that talks")

class Options(ProposerOptions):
    path: str
    how: Literal["fast", "well"] = "fast"
    limit: int | None = Field(None, ge=1, le=9, description="at most")
    names: list[str] = Field(default_factory=lambda: ["a"])

class Typed(Proposer):
    """First line
    goes on.

    Second paragraph."""

    Options = Options
    capabilities = Capabilities(hidden_states="aux", probabilities=True, trees=True, own_kv_cache=True, checkpoint=True)
    default_num_speculative_tokens = 3

    def propose(self, step):
        return Drafts.none(step.num_rows)
'''


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTED))


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def install(folder: Path, name: str, source: str, entry_points: str) -> None:
    """What an installed package looks like to Python."""
    info = folder / f"{name}-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text(f"[vllm_specplugin.proposers]\n{entry_points}\n")
    (folder / f"{name}.py").write_text(source)


def one_error_line(result: Any) -> str:
    """What is on stderr: one line, and no traceback."""
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert result.stdout == ""
    return str(line)


# -- the command itself ------------------------------------------------------------------------------------


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from vllm_specplugin.cli.main import app\n"
        "sys.argv = ['vllm-specplugin', 'list', '--help']\n"
        "try:\n    app()\n"
        "except SystemExit as done:\n    assert not done.code\n"
        "heavy = {'torch', 'vllm', 'numba', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loads {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "proposers and verifiers" in done.stdout


def test_help_names_every_command() -> None:
    result = call("--help")
    assert result.exit_code == 0
    for command in ("list", "doctor", "demo", "demo-model"):
        assert f" {command} " in result.stdout


def test_version() -> None:
    assert call("--version").stdout.startswith("vllm-specplugin ")


@pytest.mark.parametrize("arguments", [["lst"], ["list", "--jsn"], ["doctor", "--max-num-seqs", "many"]])
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    assert call(*arguments).exit_code == 2


def test_the_demo_is_told_what_the_user_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import vllm_specplugin.demo as demo

    stock = inspect.signature(demo.demo_command)
    seen: list[inspect.BoundArguments] = []
    monkeypatch.setattr(demo, "demo_command", lambda *args, **kwargs: seen.append(stock.bind(*args, **kwargs)))
    assert call("demo").exit_code == 0
    assert seen[0].arguments == {name: parameter.default for name, parameter in stock.parameters.items()}
    report = tmp_path / "a.json"
    assert call("demo", "--model", "m", "--max-tokens", "9", "--repeat", "2", "--json", str(report)).exit_code == 0
    given = {"model": "m", "max_tokens": 9, "repeat": 2, "json": report}
    assert {key: seen[1].arguments[key] for key in given} == given


def test_an_error_of_the_users_is_one_line_and_any_other_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm_specplugin.demo as demo

    def fail(error: Exception) -> Any:
        def demo_model_command(cache: Path | None) -> None:
            raise error

        return demo_model_command

    monkeypatch.setattr(demo, "demo_model_command", fail(SpecPluginError("no room\n  on the disk")))
    assert one_error_line(call("demo-model")) == "vllm-specplugin: no room on the disk"
    monkeypatch.setattr(demo, "demo_model_command", fail(ZeroDivisionError("ours")))
    assert isinstance(call("demo-model").exception, ZeroDivisionError)


# -- list --------------------------------------------------------------------------------------------------


def listed() -> dict[str, dict[str, Any]]:
    result = call("list", "--json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    return {part["name"]: part for part in [*answer["proposers"], *answer["verifiers"]]}


@pytest.mark.usefixtures("scripted")
def test_list_for_machines() -> None:
    parts = listed()
    scripted, broken, verifier = parts["scripted"], parts["broken"], parts["refuse_all"]
    assert (scripted["package"], scripted["package_version"]) == ("scripted-parts", "1.0")
    assert scripted["target"] == "scripted_parts:ScriptedProposer"
    assert scripted["capabilities"]["tokens"] == "host"
    assert scripted["broken"] is None
    assert parts["probe"]["capabilities"]["hidden_states"] == "last"
    assert (verifier["kind"], verifier["lossless"], verifier["needs_probabilities"]) == ("verifier", True, False)
    assert "has no attribute 'DoesNotExist'" in broken["broken"]
    assert broken["capabilities"] is None
    assert {option["name"] for option in parts["ngram"]["options"]} >= {"min_n", "max_n"}


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("width", [70, 100, 160])
def test_list_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    result = call("list")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= width
    for name in ("ngram", "scripted", "broken", "one_hot", "refuse_all"):
        assert any(line.split()[:1] == [name] for line in result.stdout.splitlines())
    assert "no attribute 'DoesNotExist'" in " ".join(result.stdout.split())


def test_options_and_capabilities_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "typed_parts", TYPED, "typed-one = typed_parts:Typed")
    monkeypatch.syspath_prepend(str(tmp_path))
    part = listed()["typed_one"]  # an import that talks does not spoil the JSON
    assert part["summary"] == "First line goes on."
    assert [(option["name"], option["type"], option["required"], option["default"]) for option in part["options"]] == [
        ("path", "str", True, None),
        ("how", "fast | well", False, "fast"),
        ("limit", "int | none ≥ 1, ≤ 9", False, None),
        ("names", "list[str]", False, ["a"]),
    ]
    detail = " ".join(call("list", "typed-one").stdout.split())
    for words in (
        "First line goes on.",
        "typed_parts 2.0",
        "last and auxiliary hidden states",
        "KV cache of its own",
        "checkpoint",
        "probabilities; trees",
        '{"proposer": "typed_one", "model": "PATH"}',
        "as its checkpoint is made for (up to 3 where that does not say)",
        "(required)",
        "at most",
    ):
        assert words in detail
    assert "Second paragraph" not in detail


@pytest.mark.parametrize("source", ["raise SystemExit(3)", "1 / 0", "Typed = int"])
def test_a_broken_package_spoils_its_own_row_only(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "bad_parts", source, "bad = bad_parts:Typed")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("bad_parts", None)
    parts = listed()
    assert parts["bad"]["broken"]
    assert parts["ngram"]["broken"] is None
    assert call("list", "bad").exit_code == 2


def test_two_packages_with_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "one_parts", TYPED, "same = one_parts:Typed")
    install(tmp_path, "two_parts", TYPED, "same = two_parts:Typed")
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [part for part in json.loads(call("list", "--json").stdout)["proposers"] if part["name"] == "same"]
    assert len(rows) == 2
    assert all("one_parts" in row["broken"] and "two_parts" in row["broken"] for row in rows)


@pytest.mark.usefixtures("scripted")
def test_a_misspelt_name() -> None:
    line = one_error_line(call("list", "scriptd"))
    assert "'scriptd' is no proposer or verifier; did you mean 'scripted'?" in line
    assert "one_hot" in line


# -- doctor ------------------------------------------------------------------------------------------------

HOST = steps.host(vocab_size=1000, max_model_len=64, k=4)


class Costly(Proposer):
    """Needs all that costs memory."""

    capabilities = Capabilities(probabilities=True, own_kv_cache=True, checkpoint=True)

    def propose(self, step: Any) -> Drafts:
        return Drafts.none(step.num_rows)

    @classmethod
    def memory_bill(cls, host: Any, options: Any) -> dict[str, int]:
        return {"draft KV cache": 3 * host.max_model_len}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A vLLM that is all right, unless a test says otherwise; what it was asked is in `asked`."""
    told = SimpleNamespace(
        asked=[], problem="", missing="", host=HOST, ours=True, max_num_batched_tokens=None, error=None, package=Path("somewhere")
    )

    def describe(model: str | None, config: Any, flags: Any) -> engine_inspect.Engine:
        told.asked.append((model, config, flags))
        if told.error is not None:
            raise told.error
        return engine_inspect.Engine(
            platform="cpu",
            runner="v1",
            runner_why="because",
            problem=told.problem,
            ours=told.ours,
            async_scheduling=False,
            scheduling_why="so it is",
            max_num_batched_tokens=told.max_num_batched_tokens,
            host=told.host,
        )

    def check(package: Path) -> list[seams.Finding]:
        return [seams.Finding(seam, told.missing if seam.name == "V1 sampler" else "") for seam in seams.SEAMS]

    monkeypatch.setattr(engine_inspect, "describe", describe)
    monkeypatch.setattr(seams, "check", check)
    monkeypatch.setattr(seams, "installed_package", lambda: told.package)
    monkeypatch.setattr(seams, "installed_version", lambda: ("vllm", "0.32.1"))
    return told


def doctor(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = call("doctor", *arguments, "--json")
    return result.exit_code, json.loads(result.stdout)


def test_doctor_when_all_is_well(engine: SimpleNamespace) -> None:
    code, answer = doctor("m", "--max-num-seqs", "7", "--no-async-scheduling")
    assert (code, answer["ok"], answer["reasons"]) == (0, True, [])
    assert engine.asked == [("m", {"proposer": "ngram"}, {"max_num_seqs": 7, "async_scheduling": False})]
    assert answer["runner"] == {"name": "v1", "why": "because"}
    assert answer["method"]["verifier"] == "one_hot"
    assert answer["method"]["num_speculative_tokens"] == HOST.num_speculative_tokens, "the engine's, not the configuration's"
    assert all(seam["found"] for seam in answer["seams"])
    text = call("doctor", "m")
    assert text.exit_code == 0
    assert text.stdout.splitlines()[-1].endswith("Speculation will run.")
    assert "because" in text.stdout
    assert "so it is" in text.stdout


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("width", [100, 160])
@pytest.mark.parametrize("verbose", [[], ["--verbose"]])
def test_doctor_fits_the_terminal(width: int, verbose: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert max(map(len, call("doctor", "m", *verbose).stdout.splitlines())) <= width


def test_doctor_names_a_missing_seam_and_does_not_ask_for_speculation(engine: SimpleNamespace) -> None:
    engine.missing = "no Sampler.forward in v1/sample/sampler.py"
    code, answer = doctor("m")
    assert code == 1
    assert engine.asked == [("m", None, {})]
    assert [seam["name"] for seam in answer["seams"] if not seam["found"]] == ["V1 sampler"]
    last = call("doctor", "m").stdout.splitlines()[-1]
    assert "vllm 0.32.1 lacks" in last
    assert "V1 sampler: no Sampler.forward" in last


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("plugins", "code"), [("", 1), ("other", 1), ("other,specplugin", 0)])
def test_doctor_knows_the_filter_of_plugins(plugins: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    result, answer = doctor("m")
    assert result == code
    assert answer["plugin"]["visible"] is (code == 0)
    assert all("VLLM_PLUGINS" in reason for reason in answer["reasons"])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"proposer": "ngrm"}', "did you mean 'ngram'?"),
        ('{"proposer": "ngram", "options": {"mn_n": 2}}', "did you mean 'min_n'?"),
        ('{"method": "ngram"}', "vLLM's own method 'ngram'"),
        ("{}", "no key 'proposer'"),
    ],
)
def test_doctor_on_a_configuration_that_will_not_run(config: str, words: str, engine: SimpleNamespace) -> None:
    code, answer = doctor("m", "-sc", config)
    assert code == 1
    (reason,) = answer["reasons"]
    assert words in reason
    assert len(engine.asked) == 1


def test_doctor_on_what_vllm_says(engine: SimpleNamespace) -> None:
    engine.problem = "Model Runner V2 requires Triton."
    assert doctor("m")[1]["reasons"] == ["Model Runner V2 requires Triton"]
    engine.problem, engine.ours = "", False
    assert "did not attach" in doctor("m")[1]["reasons"][0]
    engine.error = RuntimeError("operator torchvision::nms does not exist")
    assert "pip uninstall torchvision" in doctor("m")[1]["reasons"][0]
    engine.error = engine_inspect.EngineFlagError("vLLM refuses the model or a flag: no such model")
    assert "no such model" in one_error_line(call("doctor", "m"))


def test_doctor_without_vllm(engine: SimpleNamespace) -> None:
    engine.package = None
    code, answer = doctor("m")
    assert code == 1
    assert "vLLM is not installed" in answer["reasons"][0]
    assert engine.asked == []
    assert "vLLM is not installed" in call("doctor").stdout.splitlines()[-1]


@pytest.mark.parametrize("config", ["{bad", "[1]", '"ngram"'])
def test_doctor_on_what_is_no_configuration(config: str) -> None:
    line = one_error_line(call("doctor", "--speculative-config", config))
    assert config in line
    assert '{"proposer": "ngram"}' in line


def test_doctor_on_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert str(tmp_path / "nothing") in one_error_line(call("doctor", str(tmp_path / "nothing")))


# -- the memory bill ---------------------------------------------------------------------------------------


def bill(config: dict[str, Any]) -> dict[str, int | None]:
    found = diagnosis.diagnose("m", config, {})
    assert found.reasons == []
    return {item.what: item.bytes for item in found.memory}


@pytest.mark.usefixtures("engine")
def test_a_proposer_on_the_host_costs_an_index_and_rows_of_logits() -> None:
    found = bill({"proposer": "ngram"})
    assert (found["draft weights"], found["draft KV cache"], found["draft probabilities"]) == (0, 0, 0)
    assert found["more target logits"] == HOST.max_num_seqs * 4 * 1000 * 4
    assert any("index" in what and size for what, size in found.items())


def test_a_costly_proposer(engine: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROPOSERS, "resolve", lambda name: Costly)
    (tmp_path / "a.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "b.safetensors").write_bytes(b"x" * 11)
    engine.max_num_batched_tokens = HOST.max_num_seqs + 3
    config = {"proposer": "costly", "model": str(tmp_path), "draft_sampling": "probabilistic"}
    assert bill(config) == {
        "draft weights": 111,
        "draft probabilities": HOST.max_num_seqs * 4 * 1000 * 4,
        "draft KV cache": 3 * 64,
        "more target logits": 3 * 1000 * 4,
    }
    monkeypatch.setattr(Costly, "memory_bill", Proposer.memory_bill)
    assert bill(config | {"model": "far/away"}) | {"more target logits": 0} == {
        "draft weights": None,
        "draft KV cache": None,
        "draft probabilities": HOST.max_num_seqs * 4 * 1000 * 4,
        "more target logits": 0,
    }
