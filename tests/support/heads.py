"""Tiny checkpoints of Medusa heads: random ones, and ones that know a tiny target's greedy texts by heart."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.cache import cache_root, make_once
from vllm_specplugin.heads import checkpoint, medusa_files
from vllm_specplugin.heads.medusa import MedusaConfig, MedusaHeads

_RECIPE = 1  # raise it when the same arguments should give other weights

STEPS = 300  # of full-batch Adam: about 2 s, after which nearly every fitted place is right


def write(folder: Path, heads: MedusaHeads, target: Path | str = "tiny") -> Path:
    """A checkpoint as training writes it."""
    tensors, config = medusa_files.dump(heads)
    checkpoint.save(folder, tensors, config, checkpoint.provenance(target=str(target), seed=0))
    return folder


def random_medusa(config: MedusaConfig, seed: int = 0, cache: str | os.PathLike[str] | None = None) -> Path:
    """The folder of heads whose drafts mean nothing, but for which every tensor matters."""

    def fill(fresh: Path) -> None:
        write(fresh, random_heads(config, seed))

    return make_once(_place(f"{_RECIPE} {config} {seed}", cache), fill)


def checkpoint_for(proposer: str, vocab_size: int, k: int, hidden_size: int = 16, **options: Any) -> str:
    """A tiny random checkpoint for a registered proposer, to be named in its configuration; `options` are its family's own."""
    if proposer != "medusa":
        raise LookupError(f"no tiny checkpoint for the proposer {proposer!r}: add one to {__name__}")
    return str(random_medusa(MedusaConfig(num_heads=k, hidden_size=hidden_size, vocab_size=vocab_size, **options)))


def random_heads(config: MedusaConfig, seed: int = 0) -> MedusaHeads:
    """Random in every parameter, also in those that training starts at 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    heads = MedusaHeads(config)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
        if heads.draft_to_target is not None:
            chosen = torch.randperm(config.vocab_size, generator=generator)[: config.num_draftable]
            heads.draft_to_target.copy_(chosen.sort().values)
    return heads


def fitted_medusa(
    target: Path,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    num_heads: int = 4,
    cache: str | os.PathLike[str] | None = None,
    **options: object,
) -> Path:
    """Heads that draft the target's greedy continuation of the prompts, for `num_tokens` tokens, nearly without a mistake."""
    said = f"{_RECIPE} {target.name} {[list(prompt) for prompt in prompts]} {num_tokens} {num_heads} {sorted(options.items())}"

    def fill(fresh: Path) -> None:
        write(fresh, _fit(target, prompts, num_tokens, num_heads, options), target)

    return make_once(_place(said, cache), fill)


def _place(said: str, cache: str | os.PathLike[str] | None) -> Path:
    name = f"medusa-{hashlib.sha256(said.encode()).hexdigest()[:12]}"
    return (Path(cache) if cache is not None else cache_root() / "tiny") / name


def load_target(target: Path) -> Any:
    """The target as Hugging Face runs it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


def greedy_states(model: Any, prompt: Sequence[int], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The greedy text `[length]` of a loaded target, prompt first, and its last hidden states `[length - 1, hidden]`."""
    with torch.inference_mode():
        ids = torch.tensor([list(prompt)])
        cache, states = None, []
        for _ in range(num_tokens):
            out = model.model(ids if cache is None else ids[:, -1:], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            states.append(out.last_hidden_state[0])
            ids = torch.cat([ids, model.lm_head(out.last_hidden_state[:, -1]).argmax(-1, keepdim=True)], dim=1)
    return ids[0].clone(), torch.cat(states).clone()


def _fit(
    target: Path, prompts: Sequence[Sequence[int]], num_tokens: int, num_heads: int, options: dict[str, object]
) -> MedusaHeads:
    states, labels = [], []
    model = load_target(target)
    for prompt in prompts:
        ids, hidden = greedy_states(model, prompt, num_tokens + num_heads)
        for place in range(len(prompt) - 1, len(prompt) + num_tokens - 1):
            states.append(hidden[place])
            labels.append(ids[place + 2 : place + 2 + num_heads])
    inputs, wanted = torch.stack(states), torch.stack(labels)
    tensors = checkpoint.tensors(target)
    output = tensors["lm_head.weight"]
    config = MedusaConfig(num_heads=num_heads, hidden_size=inputs.shape[1], vocab_size=len(output), **options)  # type: ignore[arg-type]
    torch.manual_seed(0)
    heads = MedusaHeads(config)
    mapping = None
    if config.draft_vocab_size is not None:  # the commonest tokens of the texts
        mapping = wanted.flatten().bincount(minlength=len(output)).argsort(descending=True)[: config.draft_vocab_size]
        mapping = mapping.sort().values
    heads.initialise(output, mapping)
    if mapping is not None:
        place_of = torch.full((len(output),), -100)  # cross_entropy leaves these out
        place_of[mapping] = torch.arange(len(mapping))
        wanted = place_of[wanted]
    optimiser = torch.optim.Adam(heads.parameters(), lr=0.03)
    for _ in range(STEPS):
        logits = heads.logits(heads(inputs), output)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return heads
