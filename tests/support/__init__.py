"""What the engine tests stand on: tiny checkpoints, and vLLM engines in processes of their own."""
