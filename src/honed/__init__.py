"""honed keeps the drafter of a vLLM server sharp. The code folders are links to the top of the checkout."""
