"""Token shards on disk, the pure order of samples, and the loader that joins both."""
