"""`vllm-specplugin validate`: does speculative decoding change the answers of this model on this engine?

The real engine generates; each of its tokens becomes evidence. Reading order: `records` (what is written down of a token),
`passes` and `distribution` (from an engine step to records), `recorder` (inside the engine's worker), `engine` (an engine in a
process of its own); `membership` and `first_tokens` (what the chi-square compares), `betting`, `chisquare` and `greedy` (the
three tests), `verdict`, `report`; `plan`, `identity`, `run`, `state` and `outcome` (the whole).
"""
