"""Reports of a benchmark for people and other tools, from its ``bench.jsonl``."""
