"""The `vllm-specplugin` command. Each command imports what it needs when it runs, so that help is instant."""

from __future__ import annotations

import io
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vllm_specplugin.cli.output import one_line
from vllm_specplugin.cli.train import train_app
from vllm_specplugin.errors import SpecPluginError

USAGE_ERROR = 2
"""Exit code of every error that the user can mend, with one line on stderr."""


class _OneLineErrors(TyperGroup):
    """A user's error is one line and exit code 2; any other exception is a bug of ours and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SpecPluginError as error:
            typer.echo(f"vllm-specplugin: {one_line(error)}", err=True)
            raise typer.Exit(USAGE_ERROR) from error


app = typer.Typer(
    name="vllm-specplugin",
    cls=_OneLineErrors,
    help="Speculative decoding for vLLM as a plugin: what is installed, whether it will run, and what it brings.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)

app.add_typer(train_app, name="train")


def _print_version(wanted: bool) -> None:
    if wanted:
        from vllm_specplugin import __version__

        typer.echo(f"vllm-specplugin {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command("list")
def list_parts(
    name: Annotated[str | None, typer.Argument(help="Show this proposer or verifier in detail.", show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Show the installed proposers and verifiers: who brings them, what they need, their options."""
    from vllm_specplugin.cli.parts import list_command

    list_command(name, json)


@app.command()
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(help="The target model, as `vllm serve` takes it: much more can be said with it.", show_default=False),
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            "--speculative-config", "-sc", metavar="JSON", help='As `vllm serve` takes it; without it, {"proposer": "ngram"}.'
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option("--tensor-parallel-size", "-tp", metavar="N", help="As for vLLM.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(metavar="N", help="As for vLLM.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(metavar="N", help="As for vLLM.")] = None,
    async_scheduling: Annotated[
        bool | None, typer.Option("--async-scheduling/--no-async-scheduling", help="As for vLLM.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(metavar="TYPE", help="As for vLLM.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Details of every seam, not only of missing ones.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Say whether speculation will run here, how, and at what cost in memory; no engine is started.

    The exit code is 0 only where it will really run, 1 where it will not (the last line says why), 2 for wrong usage.
    """
    from vllm_specplugin.cli.doctor import doctor_command

    flags = {
        "tensor_parallel_size": tensor_parallel_size,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "async_scheduling": async_scheduling,
        "dtype": dtype,
    }
    given = {flag: value for flag, value in flags.items() if value is not None}
    raise typer.Exit(doctor_command(model, speculative_config, given, verbose, json))


@app.command()
def validate(
    model: Annotated[str, typer.Argument(help="The target model, as `vllm serve` takes it.", show_default=False)],
    speculative_config: Annotated[
        str | None,
        typer.Option(
            "--speculative-config",
            "-sc",
            metavar="JSON",
            help="Required. As `vllm serve` takes it: the plugin's or vLLM's own.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your own prompts, one per line, or JSON lines (.jsonl).")
    ] = None,
    sampling_params: Annotated[
        str | None, typer.Option(metavar="JSON", help='Of the sampled requests, e.g. {"temperature": 0.7, "top_p": 0.9}.')
    ] = None,
    engine_args: Annotated[str | None, typer.Option(metavar="JSON", help="Further arguments of vllm.LLM.")] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="How many tokens to test.")] = 100_000,
    alpha: Annotated[float, typer.Option(help="The chance that a lossless engine is called biased.")] = 1e-3,
    bias: Annotated[float, typer.Option(help="The share of probability that must not go astray unseen.")] = 0.01,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the run; another one draws other samples.")] = 0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the report and the state.")] = Path("specplugin-validate"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Drop an earlier run's state instead of going on with it.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")] = False,
) -> None:
    """Test on the real engine whether speculation changes the answers of this model; Ctrl-C keeps what was measured.

    The exit code is 0 for LOSSLESS, 1 for BIASED, 2 for INCONCLUSIVE and for errors.
    """
    from vllm_specplugin.cli.validate import validate_command

    try:
        code = validate_command(
            model, speculative_config, prompts, sampling_params, engine_args, tokens, alpha, bias, seed, out, fresh, json
        )
    except SpecPluginError:
        raise
    except Exception as error:  # Python would end with 1, which says BIASED here
        traceback.print_exc()
        raise typer.Exit(USAGE_ERROR) from error
    raise typer.Exit(code)


@app.command()
def evaluate(
    target: Annotated[str, typer.Option(metavar="MODEL", help="The target model: a folder or hub name.", show_default=False)],
    data: Annotated[
        Path, typer.Option(metavar="FILE", help="Held-out text, in any form that `train` reads.", show_default=False)
    ],
    heads: Annotated[
        str | None, typer.Option(metavar="DIR", help="A checkpoint of heads or a draft model; its family is found out.")
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option("--speculative-config", "-sc", metavar="JSON", help="Instead of --heads: as `vllm serve` takes it."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Another model to compare, such as one trained without the heads.")
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='For the downstream score: lines {"prompt", "answer"}, with "choices" or without.'),
    ] = None,
    texts: Annotated[int, typer.Option(min=1, metavar="N", help="Most texts that are scored.")] = 200,
    prompts: Annotated[int, typer.Option(min=1, metavar="N", help="Most requests per temperature.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Of each request.")] = 64,
    max_length: Annotated[int, typer.Option(min=8, metavar="N", help="Tokens at which a longer text is cut.")] = 1024,
    temperature: Annotated[
        list[float] | None, typer.Option(metavar="T", help="May be given several times; without it, 0 and 1.")
    ] = None,
    engine_args: Annotated[str | None, typer.Option(metavar="JSON", help="Further arguments of vllm.LLM.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the engines.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write evaluation.json and evaluation.md there.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of tables.")] = False,
) -> None:
    """Measure main-head loss, a downstream score and draft acceptance together, with and without drafts."""
    from vllm_specplugin.cli.evaluate import evaluate_command

    evaluate_command(
        target,
        heads,
        speculative_config,
        against,
        data,
        questions,
        texts,
        prompts,
        max_tokens,
        max_length,
        temperature or (),
        engine_args,
        seed,
        out,
        json,
    )


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Model folder or hub name; without it, SmolLM2-135M-Instruct, converted on first use."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens per answer.")] = 80,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your own prompts, one per line, or JSON lines (.jsonl).")
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            "--speculative-config", "-sc", metavar="JSON", help="As `vllm serve` takes it; without it, n-gram drafting, k=5."
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Times that each prompt is answered; the median counts.")] = 1,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the measurements as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Also write the table as Markdown.")] = None,
) -> None:
    """Run a small real model plain and with speculation, side by side, and compare speed and outputs."""
    from vllm_specplugin.cli.options import parse_object
    from vllm_specplugin.demo import demo_command

    given = speculative_config
    config = None if given is None else parse_object("--speculative-config", given, '{"proposer": "ngram"}')
    demo_command(model, max_tokens, prompts, config, json, markdown, repeat)


@app.command("demo-model")
def demo_model(
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Keep the model here; without it, $VLLM_SPECPLUGIN_CACHE or ~/.cache/vllm-specplugin."
        ),
    ] = None,
) -> None:
    """Print the folder of the demo's model, converting it first where needed (about 10 s)."""
    from vllm_specplugin.demo import demo_model_command

    demo_model_command(cache)


@app.command()
def distill(
    target: Annotated[str, typer.Option(metavar="MODEL", help="The model that answers, as `vllm serve` takes it.")],
    data: Annotated[
        Path, typer.Option(metavar="FILE", help='Prompts, one per line, or JSON lines (.jsonl) with "prompt" or "messages".')
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the answers go (.jsonl); what is there is gone on with.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per answer.")] = 256,
    temperature: Annotated[
        list[float] | None,
        typer.Option(metavar="T", help="Answer at this temperature (default 0); given twice, every prompt is answered at both."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="The engine's.")] = 0,
    engine_args: Annotated[str | None, typer.Option(metavar="JSON", help="Further arguments of vllm.LLM.")] = None,
) -> None:
    """Let the target answer prompts: the data that its drafting heads learn from (see `train`)."""
    from vllm_specplugin.cli.distill import distill_command

    distill_command(target, data, out, max_tokens, temperature or [0.0], seed, engine_args)


_MODEL = typer.Option("--model", metavar="MODEL", help="The target model, as `vllm serve` takes it.", show_default=False)
_PROMPTS = typer.Option("--prompts", metavar="FILE", help="Your own, one per line, or JSON lines (.jsonl); without it, built-in.")
_CONFIG = typer.Option(
    "--config", "-c", metavar="JSON", help="A --speculative-config, the plugin's or vLLM's own; may be given several times."
)
_METHOD = typer.Option(
    "--method", metavar="NAME", help="A registered proposer with its defaults, or vllm:ngram, vllm:suffix; several times, too."
)
_CONCURRENCY = typer.Option("--concurrency", metavar="N,N,...", help="Requests at once.")
_MAX_TOKENS = typer.Option("--max-tokens", min=2, metavar="N", help="Most tokens per answer.")
_TEMPERATURE = typer.Option("--temperature", metavar="T", help="Of every request; 0 is greedy.")
_ENGINE_ARGS = typer.Option("--engine-args", metavar="JSON", help="Further arguments of vllm.LLM.")
_JSON = typer.Option("--json", help="Print the report as JSON instead of tables.")
_MARKDOWN = typer.Option("--markdown", metavar="FILE", help="Also write the report as Markdown.")


@app.command()
def bench(
    model: Annotated[str, _MODEL],
    prompts: Annotated[Path | None, _PROMPTS] = None,
    config: Annotated[list[str] | None, _CONFIG] = None,
    method: Annotated[list[str] | None, _METHOD] = None,
    concurrency: Annotated[str, _CONCURRENCY] = "1,8,32",
    max_tokens: Annotated[int, _MAX_TOKENS] = 64,
    temperature: Annotated[float, _TEMPERATURE] = 0.0,
    minutes: Annotated[float, typer.Option(min=0.1, metavar="N", help="For all of it, loading included.")] = 15.0,
    repeat: Annotated[int | None, typer.Option(min=1, metavar="N", help="Most rounds; without it, as the time allows.")] = None,
    engines_at_once: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Most engines alive, the plain one included; without it, all. Needs memory."),
    ] = None,
    engine_args: Annotated[str | None, _ENGINE_ARGS] = None,
    json: Annotated[bool, _JSON] = False,
    markdown: Annotated[Path | None, _MARKDOWN] = None,
) -> None:
    """Compare plain decoding, vLLM's own methods and the plugin's, and say which configuration is fastest.

    Without --config and --method, everything takes part that needs no more than its name. The last line is what to paste.
    """
    from vllm_specplugin.cli.bench import Inputs, bench_command

    inputs = Inputs(model, prompts, config or (), method or (), concurrency, max_tokens, temperature, engine_args)
    bench_command(inputs, minutes, repeat, engines_at_once, json, markdown)


@app.command()
def tune(
    model: Annotated[str, _MODEL],
    prompts: Annotated[Path | None, _PROMPTS] = None,
    config: Annotated[list[str] | None, _CONFIG] = None,
    method: Annotated[list[str] | None, _METHOD] = None,
    concurrency: Annotated[str, _CONCURRENCY] = "1,8",
    max_tokens: Annotated[int, _MAX_TOKENS] = 64,
    temperature: Annotated[float, _TEMPERATURE] = 0.0,
    minutes: Annotated[float, typer.Option(min=0.1, metavar="N", help="For all of it, loading included.")] = 30.0,
    engines_at_once: Annotated[
        int, typer.Option(min=3, metavar="N", help="Most engines alive, the plain and the best one included. Needs memory.")
    ] = 5,
    engine_args: Annotated[str | None, _ENGINE_ARGS] = None,
    json: Annotated[bool, _JSON] = False,
    markdown: Annotated[Path | None, _MARKDOWN] = None,
) -> None:
    """Search proposer, draft length, verifier and options within a time budget, and say which configuration to use.

    It starts from --config and --method, or from everything that needs no more than its name.
    """
    from vllm_specplugin.cli.bench import Inputs
    from vllm_specplugin.cli.tune import tune_command

    inputs = Inputs(model, prompts, config or (), method or (), concurrency, max_tokens, temperature, engine_args)
    tune_command(inputs, minutes, engines_at_once, json, markdown)


def run() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no such character shows another, and no traceback
    app()
