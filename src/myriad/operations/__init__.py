"""From what was measured to what it means: the ledger of accelerator-seconds and the waits between ranks.

Pure: plain values in, plain values out; no clock, no I/O, no randomness.
"""
