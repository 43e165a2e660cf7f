"""Trainable drafting heads: their modules in plain PyTorch, and their checkpoints; shared by training and serving."""
