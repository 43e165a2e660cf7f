"""Which speculative configuration is fastest here: `bench` compares some, `tune` searches for one.

`run.bench` and `tune.tune` are what the command line calls; both stand on `lineup.Lineup`, several engines that answer the same
requests in turns.
"""
