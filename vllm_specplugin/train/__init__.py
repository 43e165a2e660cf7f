"""Training of drafting heads: data that the target wrote, its hidden states on disk, objectives, and the loop over them."""
