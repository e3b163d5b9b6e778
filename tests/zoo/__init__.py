"""Pairs of every published family at toy size, each run by the real engine with honed attached: `make test-zoo`."""
