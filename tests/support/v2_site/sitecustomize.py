"""Found by Python at start when this folder is on PYTHONPATH: prepares vLLM's V2 runner for the CPU."""

import v2_on_cpu

v2_on_cpu.install()
